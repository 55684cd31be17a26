//! Between the sockets and the scorers: a bounded queue, those who empty it, and the threads that they work on.
//!
//! A thread that has just queued a job may do it itself, if a worker is free: nobody has to be woken for it then.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The queue is full; the job was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// Does a job, and with it those that wait behind it, if it wants them.
type Work<J> = Box<dyn FnMut(J, &Waiting<'_, J>) + Send>;

struct Queue<J> {
    state: Mutex<State<J>>,
    arrived: Condvar,
    capacity: usize,
    /// What the last piece of work took.
    last_ns: AtomicU64,
}

struct State<J> {
    jobs: VecDeque<J>,
    /// Those that have nothing to do.
    workers: Vec<Work<J>>,
    closed: bool,
    /// Threads that wait for a job.
    num_idle: usize,
}

impl<J> State<J> {
    /// A job and who does it, if there are both.
    fn next(&mut self) -> Option<(J, Work<J>)> {
        let worker = self.workers.pop()?;
        match self.jobs.pop_front() {
            Some(job) => Some((job, worker)),
            None => {
                self.workers.push(worker);
                None
            }
        }
    }
}

impl<J> Queue<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread of the pool does: job after job, until the queue is closed and empty.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some((job, mut worker)) = state.next() {
                drop(state);
                self.run(job, &mut worker, false);
                state = self.lock();
                state.workers.push(worker);
            } else if state.closed && state.jobs.is_empty() {
                return;
            } else {
                state.num_idle += 1;
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.num_idle -= 1;
            }
        }
    }

    fn run(&self, job: J, worker: &mut Work<J>, is_here: bool) {
        let started = Instant::now();
        // whoever waits for the job sees it dropped; the next one does not suffer for it
        let _ = catch_unwind(AssertUnwindSafe(|| worker(job, &Waiting { queue: self, is_here })));
        self.last_ns.store(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

/// What waits behind the job that a worker has, for one that does several together.
pub(crate) struct Waiting<'q, J> {
    queue: &'q Queue<J>,
    /// It works on the thread of a caller, not on one of the pool.
    pub(crate) is_here: bool,
}

impl<J> Waiting<'_, J> {
    /// Gives back a job that is not for this place; it is the next one again.
    pub(crate) fn put_back(&self, job: J) {
        self.queue.lock().jobs.push_front(job);
    }

    /// The next job, if there is one, or one comes before `end`.
    pub(crate) fn next(&self, end: Option<Instant>) -> Option<J> {
        let mut state = self.queue.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())?;
            if state.closed {
                return None;
            }
            state.num_idle += 1;
            state = self.queue.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.num_idle -= 1;
        }
    }
}

/// What came of [working here](Pool::work_here).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Here {
    /// Nothing is left to do, or those who are at work come to it.
    Settled,
    /// A piece of work is done, and more waits.
    More,
    /// What waits is nothing to do here.
    Refused,
}

/// Workers that do jobs, and a thread for each. When it is dropped, what is queued is still done, and then the threads end.
pub(crate) struct Pool<J> {
    queue: Arc<Queue<J>>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> Pool<J> {
    /// Starts a thread for each of `workers`, and a queue of `capacity` jobs before them.
    pub(crate) fn start<W>(capacity: usize, workers: Vec<W>) -> io::Result<Pool<J>>
    where
        W: FnMut(J, &Waiting<'_, J>) + Send + 'static,
    {
        let num_threads = workers.len();
        let workers = workers.into_iter().map(|worker| Box::new(worker) as Work<J>).collect();
        let state = Mutex::new(State { jobs: VecDeque::new(), workers, closed: false, num_idle: 0 });
        let (arrived, last_ns) = Default::default();
        let queue = Arc::new(Queue { state, arrived, capacity: capacity.max(1), last_ns });
        // threads that did start end with the pool if a later one does not
        let mut pool = Pool { queue, threads: Vec::with_capacity(num_threads) };
        for number in 0..num_threads {
            let queue = pool.queue.clone();
            let thread = std::thread::Builder::new().name(format!("scorer-{number}")).spawn(move || queue.work())?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Queues a job, or refuses it at once. A thread that is busy will come to it; those that wait have to be
    /// [woken](Pool::wake), once for all that is queued together, unless it is [done here](Pool::work_here).
    pub(crate) fn submit(&self, job: J) -> Result<(), Full> {
        let mut state = self.queue.lock();
        if state.jobs.len() >= self.queue.capacity {
            return Err(Full);
        }
        state.jobs.push_back(job);
        Ok(())
    }

    /// Wakes as many of those that wait as there are jobs.
    pub(crate) fn wake(&self) {
        let state = self.queue.lock();
        let num_wanted = state.num_idle.min(state.jobs.len());
        drop(state);
        (0..num_wanted).for_each(|_| self.queue.arrived.notify_one());
    }

    /// Does one piece of work on the calling thread, if a worker is free, the last one took no longer than `most`, and
    /// `is_fit` says so of the next job. One who is told that there is more has to come again, or to [wake](Pool::wake).
    pub(crate) fn work_here(&self, most: Duration, is_fit: impl FnOnce(&J) -> bool) -> Here {
        let queue = &*self.queue;
        let mut state = queue.lock();
        let Some(next) = state.jobs.front().filter(|_| !state.workers.is_empty()) else {
            return Here::Settled;
        };
        if queue.last_ns.load(Ordering::Relaxed) > most.as_nanos() as u64 || !is_fit(next) {
            return Here::Refused;
        }
        let Some((job, mut worker)) = state.next() else {
            return Here::Settled;
        };
        drop(state);
        queue.run(job, &mut worker, true);
        let mut state = queue.lock();
        state.workers.push(worker);
        if state.closed {
            // for those who are on their way out: one who comes again is not sure to
            queue.arrived.notify_all();
        }
        if state.jobs.is_empty() { Here::Settled } else { Here::More }
    }

    /// Jobs that wait.
    pub(crate) fn num_queued(&self) -> usize {
        self.queue.lock().jobs.len()
    }

    /// Closes the queue and returns the threads, for who wants to see them end.
    pub(crate) fn close(&mut self) -> Vec<JoinHandle<()>> {
        self.queue.lock().closed = true;
        self.queue.arrived.notify_all();
        std::mem::take(&mut self.threads)
    }
}

impl<J> Drop for Pool<J> {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_panic_costs_its_job_only() {
        let (done, results) = mpsc::channel();
        let work = move |job: u32, _: &Waiting<'_, u32>| {
            assert!(job != 1, "a planted panic");
            done.send(job).unwrap();
        };
        let mut pool = Pool::start(8, vec![work]).unwrap();
        for job in 0..4 {
            pool.submit(job).unwrap();
            pool.wake();
        }
        for thread in pool.close() {
            thread.join().unwrap();
        }
        drop(pool);
        assert_eq!(results.iter().collect::<Vec<_>>(), [0, 2, 3]);
    }

    #[test]
    fn a_worker_takes_what_waits_and_what_comes_in_time() {
        let (done, results) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let work = move |first: u32, waiting: &Waiting<'_, u32>| {
            wait.recv().unwrap();
            let mut together = vec![first];
            while let Some(next) = waiting.next(None) {
                together.push(next);
            }
            let late = waiting.next(Some(Instant::now() + Duration::from_secs(60)));
            let nobody = waiting.next(Some(Instant::now() + Duration::from_millis(1)));
            done.send((together, late, nobody)).unwrap();
        };
        let pool = Pool::start(8, vec![work]).unwrap();
        (0..3).for_each(|job| pool.submit(job).unwrap());
        pool.wake();
        go.send(()).unwrap();
        while pool.num_queued() > 0 {
            std::thread::yield_now();
        }
        pool.submit(3).unwrap();
        pool.wake();
        assert_eq!(results.recv().unwrap(), (vec![0, 1, 2], Some(3), None));
    }

    #[test]
    fn a_full_queue_refuses_at_once_and_what_is_in_it_is_done_after_the_close() {
        let (started_in, started) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let (done, results) = mpsc::channel();
        let work = move |job: u32, _: &Waiting<'_, u32>| {
            started_in.send(()).unwrap();
            wait.recv().unwrap();
            done.send(job).unwrap();
        };
        let pool = Pool::start(2, vec![work]).unwrap();
        pool.submit(0).unwrap();
        pool.wake();
        started.recv().unwrap();
        assert_eq!([pool.submit(1), pool.submit(2), pool.submit(3)], [Ok(()), Ok(()), Err(Full)]);
        assert_eq!(pool.num_queued(), 2);
        drop(pool);
        for _ in 0..3 {
            go.send(()).unwrap();
        }
        assert_eq!(results.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    /// A worker that says on which thread it did which jobs, each when it is told to.
    fn gated() -> (Pool<u32>, mpsc::Sender<()>, mpsc::Receiver<(u32, bool)>) {
        let (go, wait) = mpsc::channel::<()>();
        let (done, results) = mpsc::channel();
        let work = move |job: u32, waiting: &Waiting<'_, u32>| {
            wait.recv().unwrap();
            assert!(job != 13, "a planted panic");
            done.send((job, waiting.is_here)).unwrap();
        };
        let pool = Pool::start(8, vec![work]).unwrap();
        // a thread that begins takes what is there unasked
        while pool.queue.lock().num_idle == 0 {
            std::thread::yield_now();
        }
        (pool, go, results)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn who_queues_a_job_may_do_it_and_is_told_of_more() {
        let (pool, go, results) = gated();
        assert_eq!(pool.work_here(LONG, |_| true), Here::Settled);
        for job in [13, 1, 2] {
            pool.submit(job).unwrap();
            go.send(()).unwrap();
        }
        // a panic costs its job only, here too
        assert_eq!(pool.work_here(LONG, |_| true), Here::More);
        assert_eq!(pool.work_here(LONG, |&job| job == 1), Here::More);
        assert_eq!(pool.work_here(LONG, |_| false), Here::Refused);
        pool.wake();
        let done: Vec<_> = (0..2).map(|_| results.recv().unwrap()).collect();
        assert_eq!(done, [(1, true), (2, false)]);
    }

    #[test]
    fn what_turns_out_to_be_nothing_to_do_here_is_the_next_job_of_a_thread() {
        let (done, results) = mpsc::channel();
        let work = move |first: u32, waiting: &Waiting<'_, u32>| {
            let next = waiting.next(None);
            match (waiting.is_here, next) {
                (true, Some(next)) => waiting.put_back(next),
                (false, None) | (true, None) => (),
                (false, Some(next)) => done.send((next, false)).unwrap(),
            }
            done.send((first, waiting.is_here)).unwrap();
        };
        let pool = Pool::start(8, vec![work]).unwrap();
        while pool.queue.lock().num_idle == 0 {
            std::thread::yield_now();
        }
        (0..3).for_each(|job| pool.submit(job).unwrap());
        assert_eq!(pool.work_here(LONG, |&job| job == 0), Here::More);
        assert_eq!(pool.work_here(LONG, |&job| job == 0), Here::Refused);
        pool.wake();
        let done: Vec<_> = (0..3).map(|_| results.recv().unwrap()).collect();
        assert_eq!(done, [(0, true), (2, false), (1, false)]);
    }

    #[test]
    fn what_follows_long_work_is_left_to_the_threads() {
        let (pool, go, results) = gated();
        for job in 0..3 {
            pool.submit(job).unwrap();
            go.send(()).unwrap();
        }
        assert_eq!(pool.work_here(Duration::ZERO, |_| true), Here::More);
        assert_eq!(pool.work_here(Duration::ZERO, |_| true), Here::Refused);
        pool.wake();
        let done: Vec<_> = (0..3).map(|_| results.recv().unwrap()).collect();
        assert_eq!(done, [(0, true), (1, false), (2, false)]);
    }

    #[test]
    fn a_worker_is_at_one_place_at_a_time_and_nothing_is_left_behind() {
        let (mut pool, go, results) = gated();
        pool.submit(0).unwrap();
        std::thread::scope(|scope| {
            let here = scope.spawn(|| pool.work_here(LONG, |_| true));
            while pool.num_queued() > 0 {
                std::thread::yield_now();
            }
            // the worker is at work there: neither this thread nor one of the pool can do the next one
            pool.submit(1).unwrap();
            assert_eq!(pool.work_here(LONG, |_| true), Here::Settled);
            pool.wake();
            go.send(()).unwrap();
            assert_eq!(here.join().unwrap(), Here::More);
        });
        go.send(()).unwrap();
        let threads = pool.close();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(pool);
        assert_eq!(results.iter().collect::<Vec<_>>(), [(0, true), (1, false)]);
    }
}
