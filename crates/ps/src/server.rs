//! The server: connections to a shard. A thread each reads requests and answers them in order; pulls share the shard, a
//! push has it alone.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_cube::publish::PublishRequest;
use elasticrec_table::part::Written;
use elasticrec_wire::{
    FrameError, Gate, Listening, Push, PushAck, Reason, Refusal, ServerTls, Service, StepQuery, StepStatus, Stream,
};

use self::connection::Connection;

use crate::publish::PublishedShard;
use crate::shard::{Boundary, Shard, Status};
use crate::snapshot::{ShardError, SnapshotFiles};

mod connection;

/// A client that waits for a step asks again after this time at the latest.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Copies of partitions that wait for the disk.
const COPIES_AHEAD: usize = 2;

/// Who a server is and whom it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// What all roles of a run know of it.
    pub run: Vec<u8>,
    /// Their secret; empty for none.
    pub token: Vec<u8>,
    /// Of this start of the server.
    pub incarnation: u64,
    /// Of the partition map.
    pub epoch: u64,
}

/// What a server did so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Pulls that were answered.
    pub pulls: AtomicU64,
    /// Signs in them.
    pub pulled_signs: AtomicU64,
    /// Pushes that were answered.
    pub pushes: AtomicU64,
    /// Signs in them.
    pub pushed_signs: AtomicU64,
    /// Steps of several pushes that were applied.
    pub steps: AtomicU64,
    /// Requests that were refused.
    pub refused: AtomicU64,
    /// Connections that ended with bytes that are no request.
    pub malformed: AtomicU64,
    /// Nanoseconds in which pushes had the shard.
    pub push_nanos: AtomicU64,
    /// Nanoseconds in which pulls had it.
    pub pull_nanos: AtomicU64,
    /// Pushes that were held up because the process has more memory than it may.
    pub slowed: AtomicU64,
}

/// A shard that answers on a socket.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    listening: Listening,
}

#[derive(Debug)]
struct Shared {
    shard: RwLock<Shard>,
    identity: Identity,
    counters: Counters,
    /// Nanoseconds that every push is held up.
    slow: AtomicU64,
    /// Nanoseconds from `start` on until which it may apply and acknowledge.
    lease: AtomicU64,
    start: Instant,
    gate: Arc<Gate>,
    /// Why it cannot go on: a push that was applied in part.
    failure: Mutex<Option<String>>,
    /// Held by the one publish that is written.
    publishing: Mutex<()>,
    /// Counts pushes that wait for others of their step, steps, and units that are complete.
    arrivals: Mutex<u64>,
    arrived: Condvar,
}

/// Nobody who holds one of these locks can leave what it guards half changed, but a push that panicked: see `fail`.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Listens and answers on threads of its own, with TLS if it has a certificate. Nothing is applied before the first
    /// lease.
    pub fn start(shard: Shard, identity: Identity, address: &str, tls: Option<ServerTls>) -> io::Result<Server> {
        let gate = Arc::new(Gate::default());
        let shared = Arc::new(Shared {
            shard: RwLock::new(shard),
            identity,
            counters: Counters::default(),
            slow: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            start: Instant::now(),
            gate: gate.clone(),
            failure: Mutex::new(None),
            publishing: Mutex::new(()),
            arrivals: Mutex::new(0),
            arrived: Condvar::new(),
        });
        let listening = Listening::start("ps", address, tls, gate, shared.clone())?;
        Ok(Server { shared, listening })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listening.address()
    }

    /// Lets it apply and acknowledge for so long from the moment at which the lease was asked for.
    pub fn extend_lease(&self, asked: Instant, length: Duration) {
        let until = (asked + length).saturating_duration_since(self.shared.start);
        self.shared.lease.fetch_max(until.as_nanos() as u64, Ordering::Release);
    }

    /// Takes its lease away: nothing is applied from now on.
    pub fn end_lease(&self) {
        self.shared.lease.store(0, Ordering::Release);
        // a push that is being applied ends first
        drop(self.shared.shard.write());
    }

    /// Learns of the boundaries between passes.
    pub fn set_boundaries(&self, boundaries: Vec<Boundary>) {
        self.shared.write(|shard| shard.set_boundaries(boundaries));
    }

    /// Lets the shard hold so many bytes.
    pub fn limit_memory(&self, num_bytes: u64) -> Result<(), String> {
        self.shared.write(|shard| shard.limit_memory(num_bytes))
    }

    /// Holds every push up for so long from now on, so that memory that others have comes back.
    pub fn slow_down(&self, pause: Duration) {
        self.shared.slow.store(pause.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Learns of units whose data is lost.
    pub fn skip_units(&self, units: &[u64]) {
        self.shared.write(|shard| shard.skip_units(units));
    }

    /// For the coordinator.
    pub fn status(&self) -> Status {
        self.shared.read(Shard::status)
    }

    /// The metric sums of this pass, and of the pass before.
    pub fn sums(&self) -> (Vec<f64>, Vec<f64>) {
        self.shared.read(|shard| {
            let (now, before) = shard.sums();
            (now.to_vec(), before.to_vec())
        })
    }

    /// All units below it are complete in all partitions.
    pub fn watermark(&self) -> u64 {
        self.shared.read(Shard::watermark)
    }

    /// Waits until the watermark is another one, or the time is over.
    pub fn wait_for_units(&self, watermark: u64, length: Duration) {
        let end = Instant::now() + length;
        loop {
            let arrivals = *lock(&self.shared.arrivals);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.watermark() != watermark {
                return;
            }
            let unchanged = |now: &mut u64| *now == arrivals;
            drop(self.shared.arrived.wait_timeout_while(lock(&self.shared.arrivals), left, unchanged));
        }
    }

    /// What it did so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Why it cannot go on, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Reads the shard.
    pub fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        self.shared.read(read)
    }

    /// Writes the shard's part of a checkpoint; pushes wait for the copy of one partition at a time.
    pub fn snapshot(&self, files: &SnapshotFiles) -> Result<(Written, Written), ShardError> {
        let mut writer = self.shared.read(|shard| shard.snapshot_writer(files))?;
        let owned = self.shared.read(|shard| shard.spec().owned.clone());
        thread::scope(|scope| {
            let (sender, copies) = sync_channel(COPIES_AHEAD);
            let writing = scope.spawn(move || {
                step_back();
                copies.iter().try_for_each(|copy| writer.add(&copy))?;
                writer.finish()
            });
            for partition in owned {
                let copy = self.shared.read(|shard| shard.copy(partition));
                if sender.send(copy).is_err() {
                    // the writer failed and says why
                    break;
                }
            }
            drop(sender);
            writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Writes the shard's part of a version; all wait for the copy of one partition at a time.
    pub fn publish(&self, order: &PublishRequest) -> Result<PublishedShard, ShardError> {
        let _alone = lock(&self.shared.publishing);
        let mut writer = self.shared.read(|shard| shard.publish_writer(order))?;
        let owned = self.shared.read(|shard| shard.spec().owned.clone());
        thread::scope(|scope| {
            let (sender, copies) = sync_channel(COPIES_AHEAD);
            let writing = scope.spawn(move || {
                copies.iter().try_for_each(|copy| writer.add(&copy))?;
                writer.finish()
            });
            for partition in owned {
                let copy = self.shared.write(|shard| shard.take_rows(order, partition));
                if sender.send(copy).is_err() {
                    // the writer failed and says why
                    break;
                }
            }
            drop(sender);
            writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Stops answering; requests that are being answered end first.
    pub fn stop(&mut self) {
        self.listening.stop();
    }
}

impl Service for Shared {
    fn talk(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError> {
        Connection::new(self, stream)?.run(deadline)
    }

    fn note_refused(&self) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn note_malformed(&self) {
        self.counters.malformed.fetch_add(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        read(&self.shard.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, write: impl FnOnce(&mut Shard) -> T) -> T {
        write(&mut self.shard.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it may apply and acknowledge.
    fn check_lease(&self) -> Result<(), Refusal> {
        if let Some(failure) = &*lock(&self.failure) {
            return Err(Refusal::new(Reason::Internal, failure.clone()));
        }
        if self.gate.is_stopping() {
            return Err(Refusal::new(Reason::Stopping, "the server stops"));
        }
        if self.start.elapsed().as_nanos() as u64 >= self.lease.load(Ordering::Acquire) {
            return Err(Refusal::new(Reason::Fenced, "the lease of the server ran out"));
        }
        Ok(())
    }

    fn check_target(&self, epoch: u64, incarnation: u64) -> Result<(), Refusal> {
        let Identity { epoch: our_epoch, incarnation: ours, .. } = self.identity;
        if epoch != our_epoch {
            let text = format!("expected epoch {our_epoch} of the partition map, got {epoch}");
            return Err(Refusal::new(Reason::Outdated, text));
        }
        if incarnation != ours {
            return Err(Refusal::new(Reason::Outdated, "the server was started anew"));
        }
        Ok(())
    }

    fn note_failure(&self, refused: &Refusal) {
        if refused.reason == Reason::Internal {
            lock(&self.failure).get_or_insert_with(|| refused.text.clone());
        }
    }

    /// Wakes those who wait for a step.
    fn announce(&self) {
        *lock(&self.arrivals) += 1;
        self.arrived.notify_all();
    }

    /// Answers whether all pushes of a step are there, as soon as they are or the time is over.
    fn step_status(&self, meet: &StepQuery) -> Result<StepStatus, Refusal> {
        self.check_target(meet.epoch, meet.incarnation)?;
        let end = Instant::now() + Duration::from_millis(u64::from(meet.wait_ms)).min(MAX_WAIT);
        loop {
            let arrivals = *lock(&self.arrivals);
            let (num_applied, is_full) = self.read(|shard| {
                self.check_lease()?;
                Ok::<_, Refusal>(shard.step_progress(meet.group, meet.step))
            })?;
            let left = end.saturating_duration_since(Instant::now());
            if is_full || left.is_zero() {
                return Ok(StepStatus { incarnation: self.identity.incarnation, num_applied, is_full });
            }
            let unchanged = |now: &mut u64| *now == arrivals;
            drop(self.arrived.wait_timeout_while(lock(&self.arrivals), left, unchanged));
        }
    }

    /// Brings a group to where a pull needs it: the step before has all its pushes everywhere, as the client says.
    fn commit(&self, first_unit: u64, num_steps: u32) -> Result<(), Refusal> {
        if self.read(|shard| shard.is_at(first_unit, num_steps))? {
            return Ok(());
        }
        let committed = self.write(|shard| {
            self.check_lease()?;
            // another client may have been faster
            if shard.is_at(first_unit, num_steps)? {
                return Ok(());
            }
            self.counters.steps.fetch_add(1, Ordering::Relaxed);
            shard.commit()
        });
        committed.inspect_err(|refused| self.note_failure(refused))?;
        self.announce();
        Ok(())
    }

    fn push(&self, push: &Push<'_>) -> Result<PushAck, Refusal> {
        self.check_target(push.epoch, push.incarnation)?;
        let slow = self.slow.load(Ordering::Relaxed);
        if slow > 0 {
            self.counters.slowed.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_nanos(slow));
        }
        let start = Instant::now();
        let applied = self.write(|shard| {
            // a process that was stopped may wake up anywhere, so that the lease is looked at with the shard in hand
            self.check_lease()?;
            let watermark = shard.watermark();
            let applied = shard.push(push)?;
            Ok::<_, Refusal>((applied, shard.applied(), shard.watermark() != watermark))
        });
        self.counters.push_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let (done, applied, is_complete) = applied.inspect_err(|refused| self.note_failure(refused))?;
        if push.group.is_some() || is_complete {
            self.announce();
        }
        self.counters.pushes.fetch_add(1, Ordering::Relaxed);
        self.counters.pushed_signs.fetch_add(push.signs.len() as u64, Ordering::Relaxed);
        let incarnation = self.identity.incarnation;
        Ok(PushAck { incarnation, applied, was_known: done.was_known, non_finite: done.non_finite })
    }
}

/// Has a thread that sorts, hashes and writes get less of a core than those that answer: pushes must not wait for it. The
/// thread that copies is not one of those, as it holds pushes up until it is done.
fn step_back() {
    // a third of what others get: a thirtieth made checkpoints of 17 s on two busy cores. Without it they only come sooner
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 5);
}
