//! The parameter server: a shard that answers on a socket. Each connection has a thread that answers its requests in order.
//! Pulls share the shard; a push has it exclusively.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_cube::publish::PublishRequest;
use elasticrec_table::part::FileInfo;
use elasticrec_wire::{
    Connections, FrameError, Listener, Push, PushAck, Reason, Refusal, ServerTls, Service, StepQuery, StepStatus,
    Stream, lock,
};

use self::connection::Connection;
use crate::publish::PublishedShard;
use crate::shard::{Boundary, Shard, Status};
use crate::snapshot::{ShardError, SnapshotFiles};

mod connection;

/// Longest wait of a step query; clients repeat the query.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Most copies of partitions that wait for the disk.
const COPIES_AHEAD: usize = 2;

/// The run of a server, the token of its clients, and the number of its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The id of the run.
    pub run: Vec<u8>,
    /// The token that clients must show; empty for none.
    pub token: Vec<u8>,
    /// Identifies this start of the server.
    pub incarnation: u64,
    /// Epoch of the partition map.
    pub epoch: u64,
}

/// Counters of a server since its start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Pulls answered.
    pub pulls: AtomicU64,
    /// Signs in these pulls.
    pub pulled_signs: AtomicU64,
    /// Pushes answered.
    pub pushes: AtomicU64,
    /// Signs in these pushes.
    pub pushed_signs: AtomicU64,
    /// Steps of several pushes applied.
    pub steps: AtomicU64,
    /// Nanoseconds that pushes took, including the wait for the shard.
    pub push_nanos: AtomicU64,
    /// Nanoseconds that pulls took, including the wait for the shard.
    pub pull_nanos: AtomicU64,
    /// Pushes that were delayed because the process uses more memory than its limit.
    pub slowed: AtomicU64,
}

/// A shard that answers on a socket.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    listener: Listener,
}

#[derive(Debug)]
struct Shared {
    shard: RwLock<Shard>,
    identity: Identity,
    counters: Counters,
    /// Delay of every push in nanoseconds.
    push_delay: AtomicU64,
    /// End of the lease in nanoseconds after `start`; pushes are applied and acknowledged until then.
    lease: AtomicU64,
    start: Instant,
    connections: Arc<Connections>,
    /// The reason the server cannot continue: a push was applied in part.
    failure: Mutex<Option<String>>,
    /// Locked during a publish, so that there is one at a time.
    publishing: Mutex<()>,
    /// Counts events that step queries and `wait_for_units` wait for: queued pushes, applied steps, complete units.
    arrivals: Mutex<u64>,
    arrived: Condvar,
}

impl Server {
    /// Listens and answers on its own threads, with TLS if there is a certificate. Nothing is applied before the first
    /// lease.
    pub fn start(shard: Shard, identity: Identity, address: &str, tls: Option<ServerTls>) -> io::Result<Server> {
        let connections = Arc::new(Connections::default());
        let shared = Arc::new(Shared {
            shard: RwLock::new(shard),
            identity,
            counters: Counters::default(),
            push_delay: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            start: Instant::now(),
            connections: connections.clone(),
            failure: Mutex::new(None),
            publishing: Mutex::new(()),
            arrivals: Mutex::new(0),
            arrived: Condvar::new(),
        });
        let listener = Listener::start("ps", address, tls, connections, shared.clone())?;
        Ok(Server { shared, listener })
    }

    /// The address that the server listens at.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Extends the lease to `length` after the moment at which it was requested.
    pub fn extend_lease(&self, requested: Instant, length: Duration) {
        let until = (requested + length).saturating_duration_since(self.shared.start);
        self.shared.lease.fetch_max(until.as_nanos() as u64, Ordering::Release);
    }

    /// Ends the lease: nothing is applied after this returns.
    pub fn end_lease(&self) {
        self.shared.lease.store(0, Ordering::Release);
        // Waits for a push that is being applied.
        drop(self.shared.shard.write());
    }

    /// Sets the boundaries between passes.
    pub fn set_boundaries(&self, boundaries: Vec<Boundary>) {
        self.shared.write(|shard| shard.set_boundaries(boundaries));
    }

    /// Limits the memory of the shard.
    pub fn limit_memory(&self, num_bytes: u64) -> Result<(), String> {
        self.shared.write(|shard| shard.limit_memory(num_bytes))
    }

    /// Delays every push from now on, until request buffers have been freed.
    pub fn slow_down(&self, pause: Duration) {
        self.shared.push_delay.store(pause.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Marks units as complete although their data is lost.
    pub fn skip_units(&self, units: &[u64]) {
        self.shared.write(|shard| shard.skip_units(units));
    }

    /// Returns the status for the coordinator.
    pub fn status(&self) -> Status {
        self.shared.read(Shard::status)
    }

    /// Returns the metric sums of this pass and of the previous pass.
    pub fn sums(&self) -> (Vec<f64>, Vec<f64>) {
        self.shared.read(|shard| {
            let (now, before) = shard.sums();
            (now.to_vec(), before.to_vec())
        })
    }

    /// The watermark: all units below it are complete in all partitions.
    pub fn watermark(&self) -> u64 {
        self.shared.read(Shard::watermark)
    }

    /// Waits until the watermark differs from `watermark`, or for the timeout.
    pub fn wait_for_units(&self, watermark: u64, timeout: Duration) {
        let end = Instant::now() + timeout;
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

    /// The counters since the start.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// The connections of the server.
    pub fn connections(&self) -> &Connections {
        &self.shared.connections
    }

    /// The reason the server cannot continue, or None.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Calls a function with the shard locked for reading.
    pub fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        self.shared.read(read)
    }

    /// Writes the shard's part of a checkpoint; pushes wait for the copy of one partition at a time.
    pub fn snapshot(&self, files: &SnapshotFiles) -> Result<(FileInfo, FileInfo), ShardError> {
        let mut writer = self.shared.read(|shard| shard.snapshot_writer(files))?;
        let copy = |partition| self.shared.read(|shard| shard.copy(partition));
        self.write_copies(copy, move |copies| {
            lower_priority();
            copies.iter().try_for_each(|copy| writer.add(&copy))?;
            writer.finish()
        })
    }

    /// Writes the shard's part of a version; pulls and pushes wait for the copy of one partition at a time.
    pub fn publish(&self, request: &PublishRequest) -> Result<PublishedShard, ShardError> {
        let _guard = lock(&self.shared.publishing);
        let mut writer = self.shared.read(|shard| shard.publish_writer(request))?;
        let copy = |partition| self.shared.write(|shard| shard.take_rows(request, partition));
        self.write_copies(copy, move |copies| {
            copies.iter().try_for_each(|copy| writer.add(&copy))?;
            writer.finish()
        })
    }

    /// Copies the partitions one after the other, while a second thread writes the copies.
    fn write_copies<C: Send, T: Send>(
        &self,
        copy: impl Fn(u32) -> C,
        write: impl FnOnce(Receiver<C>) -> Result<T, ShardError> + Send,
    ) -> Result<T, ShardError> {
        let owned = self.shared.read(|shard| shard.spec().owned.clone());
        thread::scope(|scope| {
            let (sender, copies) = sync_channel(COPIES_AHEAD);
            let writing = scope.spawn(move || write(copies));
            for partition in owned {
                if sender.send(copy(partition)).is_err() {
                    // The writer failed and returns the error.
                    break;
                }
            }
            drop(sender);
            writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Stops the server after it has answered the requests that have arrived.
    pub fn stop(&mut self) {
        self.listener.stop();
    }
}

impl Service for Shared {
    fn serve(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError> {
        Connection::new(self, stream)?.run(deadline)
    }
}

impl Shared {
    fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        read(&self.shard.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, write: impl FnOnce(&mut Shard) -> T) -> T {
        write(&mut self.shard.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks that the server may apply and acknowledge pushes.
    fn check_lease(&self) -> Result<(), Refusal> {
        if let Some(failure) = &*lock(&self.failure) {
            return Err(Refusal::new(Reason::Internal, failure.clone()));
        }
        if self.connections.is_stopping() {
            return Err(Refusal::new(Reason::Stopping, "the server is stopping"));
        }
        if self.start.elapsed().as_nanos() as u64 >= self.lease.load(Ordering::Acquire) {
            return Err(Refusal::new(Reason::Fenced, "the lease of the server has expired"));
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
            return Err(Refusal::new(Reason::Outdated, "the server has restarted"));
        }
        Ok(())
    }

    fn note_failure(&self, refused: &Refusal) {
        if refused.reason == Reason::Internal {
            lock(&self.failure).get_or_insert_with(|| refused.text.clone());
        }
    }

    /// Wakes the threads that wait for a step or a unit.
    fn announce(&self) {
        *lock(&self.arrivals) += 1;
        self.arrived.notify_all();
    }

    /// Answers a step query when all pushes of the step have arrived or the wait is over.
    fn step_status(&self, query: &StepQuery) -> Result<StepStatus, Refusal> {
        self.check_target(query.epoch, query.incarnation)?;
        let end = Instant::now() + Duration::from_millis(u64::from(query.wait_ms)).min(MAX_WAIT);
        loop {
            let arrivals = *lock(&self.arrivals);
            let (num_applied, is_full) = self.read(|shard| {
                self.check_lease()?;
                Ok::<_, Refusal>(shard.step_progress(query.group, query.step))
            })?;
            let left = end.saturating_duration_since(Instant::now());
            if is_full || left.is_zero() {
                return Ok(StepStatus { incarnation: self.identity.incarnation, num_applied, is_full });
            }
            let unchanged = |now: &mut u64| *now == arrivals;
            drop(self.arrived.wait_timeout_while(lock(&self.arrivals), left, unchanged));
        }
    }

    /// Applies the last step before a pull if needed; the client knows that all servers have all pushes of the step.
    fn commit(&self, first_unit: u64, num_steps: u32) -> Result<(), Refusal> {
        if self.read(|shard| shard.is_at(first_unit, num_steps))? {
            return Ok(());
        }
        let committed = self.write(|shard| {
            self.check_lease()?;
            // Another client may have committed the step meanwhile.
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
        let delay = self.push_delay.load(Ordering::Relaxed);
        if delay > 0 {
            self.counters.slowed.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_nanos(delay));
        }
        let start = Instant::now();
        let applied = self.write(|shard| {
            // A suspended process may resume anywhere, so the lease is checked while the shard is locked.
            self.check_lease()?;
            let watermark = shard.watermark();
            let applied = shard.push(push)?;
            Ok::<_, Refusal>((applied, shard.applied(), shard.watermark() != watermark))
        });
        self.counters.push_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let (done, applied, is_complete) = applied.inspect_err(|refused| self.note_failure(refused))?;
        if push.header.group.is_some() || is_complete {
            self.announce();
        }
        self.counters.pushes.fetch_add(1, Ordering::Relaxed);
        self.counters.pushed_signs.fetch_add(push.signs.len() as u64, Ordering::Relaxed);
        let incarnation = self.identity.incarnation;
        Ok(PushAck { incarnation, applied, was_known: done.was_known, non_finite: done.non_finite })
    }
}

/// Lowers the priority of the thread that sorts, hashes and writes, so that requests do not wait for it. The thread that
/// copies keeps its priority, because pushes wait for it.
fn lower_priority() {
    // At nice 5 the thread still gets a third of a busy core; at nice 19 checkpoints took 17 s on two busy cores. If the
    // call fails, requests only wait longer.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 5);
}
