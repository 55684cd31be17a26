//! The queue between the threads that read requests and the workers that score them.
//!
//! A job is queued with [`JobQueue::submit`], which wakes no thread. The thread that queued it then schedules a *pass*
//! over the queue ([`JobQueue::schedule_pass`]) and runs it once it has read everything that has arrived. A pass runs one
//! piece of work on the calling thread if a worker is free. A worker may also take the jobs behind its first one, so
//! that requests that arrived together are scored together.
//!
//! # The wake-up protocol
//!
//! Every queued job is run, because at any time one of these holds:
//!
//! - a pass is scheduled: [`Pass::run`] clears the flag *before* it looks at the queue, so a thread that finds the flag set
//!   may rely on that pass to see its job;
//! - a thread of the queue is running a job: it takes the next one before it waits;
//! - a pass is running a job: when it ends and jobs are left, the pass schedules itself again;
//! - a thread of the queue has been notified ([`Pass::run`] does that when it must not run the next job itself, or when
//!   every worker is taken but one of them waits in [`Backlog::next`]).
//!
//! A pass that is dropped before it ran, because its runtime ends, wakes the threads instead. After the queue is
//! closed, the threads run the queued jobs and end. `tests/loom.rs` checks all of this over every interleaving.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, AtomicU64, Builder, Condvar, JoinHandle, Mutex, MutexGuard, Ordering};

mod sync;

/// The queue is full; the job was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFull;

/// Runs a job, and takes jobs that wait behind it from the backlog if it wants them.
type Worker<J> = Box<dyn FnMut(J, &Backlog<'_, J>) + Send>;

struct Shared<J> {
    state: Mutex<State<J>>,
    /// Notified when a waiting thread should look at the queue.
    wake_up: Condvar,
    capacity: usize,
    /// Duration of the last piece of work.
    last_ns: AtomicU64,
    /// Whether a thread will run a pass over the queue.
    pass_is_scheduled: AtomicBool,
}

struct State<J> {
    jobs: VecDeque<J>,
    free_workers: Vec<Worker<J>>,
    is_closed: bool,
    num_waiting_threads: usize,
    /// Workers among them that wait for more jobs in [`Backlog::next`].
    num_waiting_workers: usize,
}

impl<J> State<J> {
    /// Takes a job and a free worker, if there are both.
    fn next(&mut self) -> Option<(J, Worker<J>)> {
        let worker = self.free_workers.pop()?;
        match self.jobs.pop_front() {
            Some(job) => Some((job, worker)),
            None => {
                self.free_workers.push(worker);
                None
            }
        }
    }
}

/// The result of an attempt to run work on the calling thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// Nothing is queued, or every worker is busy and takes the next job itself.
    Settled,
    /// A piece of work is done and more is queued.
    More,
    /// The next job is left to a thread of the queue, which must be notified.
    Refused,
}

impl<J> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs job after job on a thread of the queue, until the queue is closed and empty.
    fn run_thread(&self) {
        let mut state = self.lock();
        loop {
            if let Some((job, mut worker)) = state.next() {
                drop(state);
                self.run(job, &mut worker, false);
                state = self.lock();
                state.free_workers.push(worker);
            } else if state.is_closed && state.jobs.is_empty() {
                return;
            } else {
                state.num_waiting_threads += 1;
                state = self.wake_up.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.num_waiting_threads -= 1;
            }
        }
    }

    fn run(&self, job: J, worker: &mut Worker<J>, on_caller: bool) {
        let started = Instant::now();
        // A panic drops its job, which is how the client learns of it; the jobs behind it are not affected.
        let _ = catch_unwind(AssertUnwindSafe(|| worker(job, &Backlog { queue: self, on_caller })));
        self.last_ns.store(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Runs one piece of work on the calling thread, if a worker is free, the last piece took at most `max_last`, and
    /// `accepts` the next job. After `More` the caller must try again or call `wake`.
    fn run_on_caller(&self, max_last: Duration, accepts: impl FnOnce(&J) -> bool) -> Attempt {
        let mut state = self.lock();
        let Some(next) = state.jobs.front() else {
            return Attempt::Settled;
        };
        if state.free_workers.is_empty() {
            return if state.num_waiting_workers > 0 { Attempt::Refused } else { Attempt::Settled };
        }
        if self.last_ns.load(Ordering::Relaxed) > max_last.as_nanos() as u64 || !accepts(next) {
            return Attempt::Refused;
        }
        let Some((job, mut worker)) = state.next() else {
            return Attempt::Settled;
        };
        drop(state);
        self.run(job, &mut worker, true);
        let mut state = self.lock();
        state.free_workers.push(worker);
        if state.is_closed {
            // Threads that are ending may wait for this worker, and no further pass may come to wake them.
            self.wake_up.notify_all();
        }
        if state.jobs.is_empty() { Attempt::Settled } else { Attempt::More }
    }

    /// Notifies as many waiting threads as there are jobs.
    fn wake(&self) {
        let state = self.lock();
        let num_wanted = match state.num_waiting_workers {
            0 => state.num_waiting_threads.min(state.jobs.len()),
            // One notification could reach a thread that has no worker.
            _ => state.num_waiting_threads,
        };
        drop(state);
        (0..num_wanted).for_each(|_| self.wake_up.notify_one());
    }

    /// Sets the flag of the scheduled pass; returns false if it was set already.
    fn claim_pass(&self) -> bool {
        !self.pass_is_scheduled.swap(true, Ordering::AcqRel)
    }

    /// Clears the flag. A swap, not a plain store: its acquire ordering makes the jobs visible that other threads
    /// queued before they found the flag set. The lock that every pass takes next would be enough for that; with the
    /// swap the flag is correct by itself.
    fn clear_pass(&self) {
        self.pass_is_scheduled.swap(false, Ordering::AcqRel);
    }

    fn close(&self) {
        self.lock().is_closed = true;
        self.wake_up.notify_all();
    }
}

/// The jobs behind the one that a worker runs, for a worker that runs several together.
pub struct Backlog<'q, J> {
    queue: &'q Shared<J>,
    on_caller: bool,
}

impl<J> Backlog<'_, J> {
    /// Returns whether the worker runs on the thread of a caller instead of a thread of the queue.
    pub fn is_on_caller(&self) -> bool {
        self.on_caller
    }

    /// Puts a job that must not run on this thread back at the front of the queue.
    pub fn put_back(&self, job: J) {
        self.queue.lock().jobs.push_front(job);
    }

    /// Takes the next job, and waits until `end` if none is queued.
    pub fn next(&self, end: Option<Instant>) -> Option<J> {
        let mut state = self.queue.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())?;
            if state.is_closed {
                return None;
            }
            state.num_waiting_threads += 1;
            state.num_waiting_workers += 1;
            state = self.queue.wake_up.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.num_waiting_workers -= 1;
            state.num_waiting_threads -= 1;
        }
    }
}

/// A bounded queue of jobs, its workers, and a thread for each of them. Dropping it closes it: queued jobs are still run,
/// then the threads end.
pub struct JobQueue<J> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

impl<J: Send + 'static> JobQueue<J> {
    /// Starts a thread for each of `workers`, with a queue of `capacity` jobs in front of them.
    pub fn start<W>(capacity: usize, workers: Vec<W>) -> io::Result<JobQueue<J>>
    where
        W: FnMut(J, &Backlog<'_, J>) + Send + 'static,
    {
        let num_threads = workers.len();
        let free_workers = workers.into_iter().map(|worker| Box::new(worker) as Worker<J>).collect();
        let state = State {
            jobs: VecDeque::new(),
            free_workers,
            is_closed: false,
            num_waiting_threads: 0,
            num_waiting_workers: 0,
        };
        let shared = Shared {
            state: Mutex::new(state),
            wake_up: Condvar::new(),
            capacity: capacity.max(1),
            last_ns: AtomicU64::new(0),
            pass_is_scheduled: AtomicBool::new(false),
        };
        // If a thread fails to start, dropping the queue ends the threads that have started.
        let mut queue = JobQueue { shared: Arc::new(shared), threads: Vec::with_capacity(num_threads) };
        for number in 0..num_threads {
            let shared = queue.shared.clone();
            let thread = Builder::new().name(format!("scorer-{number}")).spawn(move || shared.run_thread())?;
            queue.threads.push(thread);
        }
        Ok(queue)
    }

    /// Queues a job, or refuses it at once if the queue is full. If all workers are busy, one of them takes it later;
    /// otherwise it waits for the next [pass](JobQueue::schedule_pass). Schedules one pass for all jobs that are queued
    /// together.
    pub fn submit(&self, job: J) -> Result<(), QueueFull> {
        let mut state = self.shared.lock();
        if state.jobs.len() >= self.shared.capacity {
            return Err(QueueFull);
        }
        state.jobs.push_back(job);
        Ok(())
    }

    /// Schedules a pass over the queue, which the caller must run or drop. Returns None if one is scheduled already.
    pub fn schedule_pass(&self) -> Option<Pass<J>> {
        self.shared.claim_pass().then(|| Pass { queue: self.shared.clone(), is_due: true })
    }

    /// Returns the number of queued jobs.
    pub fn num_queued(&self) -> usize {
        self.shared.lock().jobs.len()
    }

    /// Closes the queue and returns its threads, which end once all queued jobs have run.
    pub fn close(&mut self) -> Vec<JoinHandle<()>> {
        self.shared.close();
        std::mem::take(&mut self.threads)
    }
}

impl<J> Drop for JobQueue<J> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// A pass over the queue that other threads rely on. If it is dropped before it ran, it wakes threads of the queue.
pub struct Pass<J> {
    queue: Arc<Shared<J>>,
    is_due: bool,
}

impl<J> Pass<J> {
    /// Runs one piece of work on this thread if `accepts` the next job and the last piece took at most `max_last`; else
    /// wakes threads of the queue for the queued jobs. Returns whether the pass must be run again.
    pub fn run(&mut self, max_last: Duration, accepts: impl FnOnce(&J) -> bool) -> bool {
        self.is_due = false;
        self.queue.clear_pass();
        match self.queue.run_on_caller(max_last, accepts) {
            Attempt::Settled => (),
            Attempt::Refused => self.queue.wake(),
            // If another thread has scheduled a pass in the meantime, that pass finds the rest.
            Attempt::More => self.is_due = self.queue.claim_pass(),
        }
        self.is_due
    }
}

impl<J> Drop for Pass<J> {
    fn drop(&mut self) {
        if self.is_due {
            self.queue.clear_pass();
            self.queue.wake();
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
