use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;

const LONG: Duration = Duration::from_secs(60);

impl<J: Send + 'static> JobQueue<J> {
    fn wake(&self) {
        drop(self.schedule_pass());
    }

    /// Waits until a thread of the queue waits. A thread that is still starting would take a job without a
    /// notification.
    fn wait_until_idle(&self) {
        while self.shared.lock().num_waiting_threads == 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_panic_affects_only_its_job() {
    let (done, results) = mpsc::channel();
    let work = move |job: u32, _: &Backlog<'_, u32>| {
        assert!(job != 1, "a planted panic");
        done.send(job).unwrap();
    };
    let mut queue = JobQueue::start(8, vec![work]).unwrap();
    for job in 0..4 {
        queue.submit(job).unwrap();
        queue.wake();
    }
    for thread in queue.close() {
        thread.join().unwrap();
    }
    drop(queue);
    assert_eq!(results.iter().collect::<Vec<_>>(), [0, 2, 3]);
}

#[test]
fn a_worker_takes_the_backlog_and_waits_for_more_until_its_deadline() {
    let (done, results) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let work = move |first: u32, backlog: &Backlog<'_, u32>| {
        wait.recv().unwrap();
        let mut together = vec![first];
        while let Some(next) = backlog.next(None) {
            together.push(next);
        }
        let late = backlog.next(Some(Instant::now() + LONG));
        let none = backlog.next(Some(Instant::now() + Duration::from_millis(1)));
        done.send((together, late, none)).unwrap();
    };
    let queue = JobQueue::start(8, vec![work]).unwrap();
    (0..3).for_each(|job| queue.submit(job).unwrap());
    queue.wake();
    go.send(()).unwrap();
    while queue.num_queued() > 0 {
        std::thread::yield_now();
    }
    queue.submit(3).unwrap();
    queue.wake();
    assert_eq!(results.recv().unwrap(), (vec![0, 1, 2], Some(3), None));
}

#[test]
fn a_worker_that_waits_for_more_jobs_gets_them_from_a_pass_at_once() {
    let (done, results) = mpsc::channel();
    let work = move |first: u32, backlog: &Backlog<'_, u32>| {
        done.send((first, backlog.next(Some(Instant::now() + LONG)))).unwrap();
    };
    let queue = JobQueue::start(8, vec![work]).unwrap();
    queue.submit(0).unwrap();
    queue.wake();
    while queue.shared.lock().num_waiting_workers == 0 {
        std::thread::yield_now();
    }
    queue.submit(1).unwrap();
    assert!(!queue.schedule_pass().unwrap().run(LONG, |_| true));
    assert_eq!(results.recv_timeout(LONG / 2).unwrap(), (0, Some(1)));
}

#[test]
fn a_full_queue_refuses_at_once_and_a_closed_one_runs_what_is_queued() {
    let (started_in, started) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let (done, results) = mpsc::channel();
    let work = move |job: u32, _: &Backlog<'_, u32>| {
        started_in.send(()).unwrap();
        wait.recv().unwrap();
        done.send(job).unwrap();
    };
    let queue = JobQueue::start(2, vec![work]).unwrap();
    queue.submit(0).unwrap();
    queue.wake();
    started.recv().unwrap();
    assert_eq!([queue.submit(1), queue.submit(2), queue.submit(3)], [Ok(()), Ok(()), Err(QueueFull)]);
    assert_eq!(queue.num_queued(), 2);
    drop(queue);
    for _ in 0..3 {
        go.send(()).unwrap();
    }
    assert_eq!(results.iter().collect::<Vec<_>>(), [0, 1, 2]);
}

/// A worker that reports each job and whether it ran on a caller, and that runs one job per message.
fn gated() -> (JobQueue<u32>, mpsc::Sender<()>, mpsc::Receiver<(u32, bool)>) {
    let (go, wait) = mpsc::channel::<()>();
    let (done, results) = mpsc::channel();
    let work = move |job: u32, backlog: &Backlog<'_, u32>| {
        wait.recv().unwrap();
        assert!(job != 13, "a planted panic");
        done.send((job, backlog.is_on_caller())).unwrap();
    };
    let queue = JobQueue::start(8, vec![work]).unwrap();
    queue.wait_until_idle();
    (queue, go, results)
}

#[test]
fn a_caller_runs_its_job_and_learns_that_more_is_queued() {
    let (queue, go, results) = gated();
    assert_eq!(queue.shared.run_on_caller(LONG, |_| true), Attempt::Settled);
    for job in [13, 1, 2] {
        queue.submit(job).unwrap();
        go.send(()).unwrap();
    }
    // A panic affects only its job on a caller's thread too.
    assert_eq!(queue.shared.run_on_caller(LONG, |_| true), Attempt::More);
    assert_eq!(queue.shared.run_on_caller(LONG, |&job| job == 1), Attempt::More);
    assert_eq!(queue.shared.run_on_caller(LONG, |_| false), Attempt::Refused);
    queue.wake();
    let done: Vec<_> = (0..2).map(|_| results.recv().unwrap()).collect();
    assert_eq!(done, [(1, true), (2, false)]);
}

#[test]
fn a_job_that_is_put_back_is_the_next_one_of_a_thread() {
    let (done, results) = mpsc::channel();
    let work = move |first: u32, backlog: &Backlog<'_, u32>| {
        let next = backlog.next(None);
        match (backlog.is_on_caller(), next) {
            (true, Some(next)) => backlog.put_back(next),
            (false, None) | (true, None) => (),
            (false, Some(next)) => done.send((next, false)).unwrap(),
        }
        done.send((first, backlog.is_on_caller())).unwrap();
    };
    let queue = JobQueue::start(8, vec![work]).unwrap();
    queue.wait_until_idle();
    (0..3).for_each(|job| queue.submit(job).unwrap());
    assert_eq!(queue.shared.run_on_caller(LONG, |&job| job == 0), Attempt::More);
    assert_eq!(queue.shared.run_on_caller(LONG, |&job| job == 0), Attempt::Refused);
    queue.wake();
    let done: Vec<_> = (0..3).map(|_| results.recv().unwrap()).collect();
    assert_eq!(done, [(0, true), (2, false), (1, false)]);
}

#[test]
fn jobs_after_long_work_are_left_to_the_threads() {
    let (queue, go, results) = gated();
    for job in 0..3 {
        queue.submit(job).unwrap();
        go.send(()).unwrap();
    }
    assert_eq!(queue.shared.run_on_caller(Duration::ZERO, |_| true), Attempt::More);
    assert_eq!(queue.shared.run_on_caller(Duration::ZERO, |_| true), Attempt::Refused);
    queue.wake();
    let done: Vec<_> = (0..3).map(|_| results.recv().unwrap()).collect();
    assert_eq!(done, [(0, true), (1, false), (2, false)]);
}

#[test]
fn a_worker_runs_on_one_thread_at_a_time_and_no_job_is_left() {
    let (mut queue, go, results) = gated();
    queue.submit(0).unwrap();
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| queue.shared.run_on_caller(LONG, |_| true));
        while queue.num_queued() > 0 {
            std::thread::yield_now();
        }
        // The only worker is busy on the caller, so neither this thread nor one of the queue can run the next job.
        queue.submit(1).unwrap();
        assert_eq!(queue.shared.run_on_caller(LONG, |_| true), Attempt::Settled);
        queue.wake();
        go.send(()).unwrap();
        assert_eq!(caller.join().unwrap(), Attempt::More);
    });
    go.send(()).unwrap();
    let threads = queue.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    drop(queue);
    assert_eq!(results.iter().collect::<Vec<_>>(), [(0, true), (1, false)]);
}

#[test]
fn a_dropped_pass_wakes_a_thread_and_another_pass_can_be_scheduled() {
    let (queue, go, results) = gated();
    for job in 0..2 {
        queue.submit(job).unwrap();
        let pass = queue.schedule_pass().unwrap();
        assert!(queue.schedule_pass().is_none(), "one pass at a time");
        drop(pass);
        go.send(()).unwrap();
        assert_eq!(results.recv().unwrap(), (job, false));
    }
}
