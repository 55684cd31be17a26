//! The wake-up protocol over every interleaving of its threads: every queued job is run, no wake-up is lost, and closing
//! drains the queue. Run by `make test-loom`.
#![cfg(loom)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_queue::{Backlog, JobQueue};
use loom::sync::{Condvar, Mutex};
use loom::thread;

/// Preemptions that loom explores; protocols that fail at all usually fail with two.
const MAX_PREEMPTIONS: usize = 3;
const CAPACITY: usize = 4;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(MAX_PREEMPTIONS);
    builder.check(model);
}

/// The jobs that have run. Waiting for a job that never runs is a deadlock, which loom reports.
#[derive(Clone, Default)]
struct FinishedJobs(Arc<(Mutex<BTreeSet<u32>>, Condvar)>);

impl FinishedJobs {
    fn add(&self, job: u32) {
        assert!(self.0.0.lock().unwrap().insert(job), "job {job} ran twice");
        self.0.1.notify_all();
    }

    fn wait_for(&self, jobs: &[u32]) {
        let mut finished = self.0.0.lock().unwrap();
        while !jobs.iter().all(|job| finished.contains(job)) {
            finished = self.0.1.wait(finished).unwrap();
        }
    }
}

fn start(num_workers: usize, finished: &FinishedJobs) -> JobQueue<u32> {
    let worker = |_| {
        let finished = finished.clone();
        move |job: u32, _: &Backlog<'_, u32>| finished.add(job)
    };
    JobQueue::start(CAPACITY, (0..num_workers).map(worker).collect()).unwrap()
}

/// Queues a job and runs a pass, like a socket thread that has read a request.
fn submit_and_pass(queue: &JobQueue<u32>, job: u32, accepts: impl Fn(u32) -> bool) {
    queue.submit(job).unwrap();
    if let Some(mut pass) = queue.schedule_pass() {
        while pass.run(Duration::MAX, |&job| accepts(job)) {}
    }
}

#[test]
fn jobs_of_two_callers_run_without_a_lost_wake_up() {
    check(|| {
        let finished = FinishedJobs::default();
        let queue = Arc::new(start(1, &finished));
        let caller = {
            let queue = queue.clone();
            thread::spawn(move || submit_and_pass(&queue, 1, |_| true))
        };
        submit_and_pass(&queue, 2, |_| true);
        finished.wait_for(&[1, 2]);
        caller.join().unwrap();
    });
}

#[test]
fn jobs_that_callers_refuse_run_on_the_threads() {
    check(|| {
        let finished = FinishedJobs::default();
        let queue = Arc::new(start(1, &finished));
        let caller = {
            let queue = queue.clone();
            thread::spawn(move || submit_and_pass(&queue, 1, |job| job == 1))
        };
        submit_and_pass(&queue, 2, |job| job == 1);
        finished.wait_for(&[1, 2]);
        caller.join().unwrap();
    });
}

#[test]
fn two_threads_run_what_one_caller_queues() {
    check(|| {
        let finished = FinishedJobs::default();
        let queue = start(2, &finished);
        queue.submit(1).unwrap();
        submit_and_pass(&queue, 2, |_| false);
        finished.wait_for(&[1, 2]);
    });
}

#[test]
fn a_worker_that_waits_for_more_jobs_is_notified() {
    check(|| {
        let finished = FinishedJobs::default();
        let worker = {
            let finished = finished.clone();
            move |first: u32, backlog: &Backlog<'_, u32>| {
                // loom has no time, so this waits until a second job comes.
                let second = backlog.next(Some(Instant::now() + Duration::from_secs(3600))).unwrap();
                finished.add(first);
                finished.add(second);
            }
        };
        let queue = JobQueue::start(CAPACITY, vec![worker]).unwrap();
        submit_and_pass(&queue, 1, |_| false);
        submit_and_pass(&queue, 2, |_| false);
        finished.wait_for(&[1, 2]);
    });
}

#[test]
fn a_pass_that_is_dropped_wakes_the_threads() {
    check(|| {
        let finished = FinishedJobs::default();
        let queue = Arc::new(start(1, &finished));
        let caller = {
            let queue = queue.clone();
            thread::spawn(move || {
                queue.submit(1).unwrap();
                drop(queue.schedule_pass());
            })
        };
        submit_and_pass(&queue, 2, |_| true);
        finished.wait_for(&[1, 2]);
        caller.join().unwrap();
    });
}

#[test]
fn a_job_that_is_put_back_runs_on_a_thread() {
    check(|| {
        let finished = FinishedJobs::default();
        let worker = {
            let finished = finished.clone();
            move |job: u32, backlog: &Backlog<'_, u32>| match backlog.is_on_caller() && job == 2 {
                true => backlog.put_back(job),
                false => finished.add(job),
            }
        };
        let queue = JobQueue::start(CAPACITY, vec![worker]).unwrap();
        queue.submit(1).unwrap();
        queue.submit(2).unwrap();
        let mut pass = queue.schedule_pass().unwrap();
        let mut is_large = false;
        // The job that was put back is refused the second time, as a large request is in the server.
        while pass.run(Duration::MAX, |&job| !std::mem::replace(&mut is_large, job == 2)) {}
        finished.wait_for(&[1, 2]);
    });
}

#[test]
fn closing_runs_what_is_queued_and_ends_the_threads() {
    check(|| {
        let finished = FinishedJobs::default();
        let mut queue = start(1, &finished);
        queue.submit(1).unwrap();
        let mut pass = queue.schedule_pass().unwrap();
        let caller = thread::spawn(move || while pass.run(Duration::MAX, |_| true) {});
        queue.submit(2).unwrap();
        for thread in queue.close() {
            thread.join().unwrap();
        }
        caller.join().unwrap();
        finished.wait_for(&[1, 2]);
    });
}
