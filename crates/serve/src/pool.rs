//! Between the sockets and the scorers: a bounded queue and the fixed threads that empty it.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// The queue is full; the job was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

struct Queue<J> {
    state: Mutex<State<J>>,
    arrived: Condvar,
    capacity: usize,
}

struct State<J> {
    jobs: VecDeque<J>,
    closed: bool,
    /// Threads that wait for a job.
    num_idle: usize,
}

impl<J> Queue<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job; `None` once the queue is closed and empty.
    fn pop(&self) -> Option<J> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.num_idle += 1;
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.num_idle -= 1;
        }
    }
}

/// What waits behind the job that a worker has, for one that does several together.
pub(crate) struct Waiting<'q, J>(&'q Queue<J>);

impl<J> Waiting<'_, J> {
    /// The next job, if there is one, or one comes before `end`.
    pub(crate) fn next(&self, end: Option<Instant>) -> Option<J> {
        let mut state = self.0.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())?;
            if state.closed {
                return None;
            }
            state.num_idle += 1;
            state = self.0.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.num_idle -= 1;
        }
    }
}

/// Threads that do jobs. When it is dropped, what is queued is still done, and then the threads end.
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
        let state = Mutex::new(State { jobs: VecDeque::new(), closed: false, num_idle: 0 });
        let queue = Arc::new(Queue { state, arrived: Condvar::new(), capacity: capacity.max(1) });
        // threads that did start end with the pool if a later one does not
        let mut pool = Pool { queue, threads: Vec::with_capacity(workers.len()) };
        for (number, mut work) in workers.into_iter().enumerate() {
            let queue = pool.queue.clone();
            let thread = std::thread::Builder::new().name(format!("scorer-{number}")).spawn(move || {
                while let Some(job) = queue.pop() {
                    // whoever waits for the job sees it dropped; the next one does not suffer for it
                    let _ = catch_unwind(AssertUnwindSafe(|| work(job, &Waiting(&queue))));
                }
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Queues a job, or refuses it at once. A thread that is busy will come to it; those that wait have to be
    /// [woken](Pool::wake), once for all that is queued together.
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
}
