//! `elasticrec bench cube`, through sockets: batches of random keys against a store, and against Redis with the same rows.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_cube::client::{Client, ClientError, PendingLookup};
use elasticrec_cube::{Column, CubeError, CubeWriter, FileInfo, RowType};
use elasticrec_table::partition::{mix, partition_of};

use crate::keys::{Random, sign_of};

pub mod redis;

/// Number of distinct batches, so that their keys do not fit into caches.
const NUM_BATCHES: usize = 4096;
/// Requests that an open loop may be behind its schedule.
const MAX_BEHIND: usize = 1 << 16;
/// Answered keys are counted per interval of this length.
pub const SLICE: Duration = Duration::from_millis(50);
/// Slices of the longest measurement.
const MAX_SLICES: usize = 20 * 3600;

/// Writes the row of a sign: the version first, then values without meaning.
fn fill_row(version: u64, sign: u64, row: &mut [f32]) {
    for (at, value) in (0..).zip(row.iter_mut()) {
        *value = if at == 0 { version as f32 } else { (mix(sign ^ at) >> 40) as f32 };
    }
}

/// Writes a cube of `num_rows` rows whose first value is the version.
pub fn write_cube(
    path: &Path,
    num_rows: u64,
    columns: Vec<Column>,
    num_partitions: u32,
    version: u64,
) -> Result<FileInfo, CubeError> {
    let mut signs_by_partition = vec![Vec::new(); num_partitions as usize];
    for sign in (0..num_rows).map(sign_of) {
        signs_by_partition[partition_of(sign, num_partitions) as usize].push(sign);
    }
    let mut writer = CubeWriter::create(path, columns, RowType::F32, num_partitions)?;
    for (partition, signs) in (0..).zip(signs_by_partition) {
        writer.write_partition(partition, &signs, |at, row| fill_row(version, signs[at], row))?;
    }
    writer.finish()
}

/// The traffic of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Rows of the table.
    pub num_rows: u64,
    /// Keys of a request.
    pub batch: usize,
    /// Share of keys without a row.
    pub miss_share: f64,
    /// Requests in flight on each connection of a closed loop.
    pub in_flight: usize,
    /// Requests per second over all connections, sent on schedule whether or not earlier ones were answered. `None` is
    /// a closed loop: the next request is sent when an answer arrives.
    pub rate: Option<f64>,
    /// Duration of the traffic.
    pub length: Duration,
}

/// The figures of a measurement.
#[derive(Debug, Default)]
pub struct TrafficReport {
    /// Keys that were answered.
    pub keys: u64,
    /// Answered keys without a row.
    pub misses: u64,
    /// Requests that failed.
    pub failed: u64,
    /// The first failure.
    pub failure: Option<String>,
    /// Requests that were repeated with another version.
    pub restarted: u64,
    /// Seconds from the first request to the last answer.
    pub seconds: f64,
    /// Seconds of each request, ascending, from when it was sent (open loop: was due) to its rows.
    pub latencies_s: Vec<f64>,
    /// Keys answered in each [`SLICE`].
    pub slices: Vec<u64>,
}

impl TrafficReport {
    /// Returns the latency that a share `q` of the requests stays below.
    pub fn quantile_s(&self, q: f64) -> f64 {
        let at = (q * self.latencies_s.len() as f64) as usize;
        self.latencies_s.get(at.min(self.latencies_s.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    fn merge(mut self, other: TrafficReport) -> TrafficReport {
        self.keys += other.keys;
        self.misses += other.misses;
        self.failed += other.failed;
        self.failure = self.failure.or(other.failure);
        self.latencies_s.extend(other.latencies_s);
        self
    }

    fn record(&mut self, progress: &Progress, batch: usize, since: Instant, received: Result<usize, String>) {
        match received {
            Ok(hits) => {
                self.keys += batch as u64;
                self.misses += (batch - hits) as u64;
                self.latencies_s.push(since.elapsed().as_secs_f64());
                let slice = (progress.start.elapsed().as_secs_f64() / SLICE.as_secs_f64()) as usize;
                if let Some(slice) = progress.slices.get(slice) {
                    slice.fetch_add(batch as u64, Ordering::Relaxed);
                }
            }
            Err(failure) => {
                self.failed += 1;
                self.failure.get_or_insert(failure);
            }
        }
    }
}

/// A connection that answers batches of keys.
pub trait Target: Sync {
    /// A request in flight.
    type Request<'a>: Send
    where
        Self: 'a;

    /// Sends the request for a batch.
    fn send(&self, batch: usize) -> Result<Self::Request<'_>, String>;

    /// Waits for the rows; returns the number of keys that have one.
    fn receive<'a>(&'a self, request: Self::Request<'a>) -> Result<usize, String>;
}

/// Returns the batches that are requested, the same in every run.
pub fn batches(traffic: &Traffic) -> Vec<Vec<u64>> {
    let mut random = Random::default();
    let misses = (traffic.miss_share * 1e6) as u64;
    let mut key = || {
        let is_miss = random.below(1_000_000) < misses;
        sign_of(random.below(traffic.num_rows) + if is_miss { traffic.num_rows } else { 0 })
    };
    (0..NUM_BATCHES).map(|_| (0..traffic.batch).map(|_| key()).collect()).collect()
}

/// State that the connections of a measurement share.
struct Progress {
    start: Instant,
    next: AtomicUsize,
    slices: Vec<AtomicU64>,
}

impl Progress {
    fn next_batch(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % NUM_BATCHES
    }
}

/// Sends the traffic to all targets, each from its own threads, and reports on it.
pub fn run<T: Target>(targets: &[T], traffic: &Traffic) -> TrafficReport {
    let num_slices = (traffic.length.as_secs_f64() / SLICE.as_secs_f64()) as usize + 1;
    let slices = (0..num_slices.min(MAX_SLICES)).map(|_| AtomicU64::new(0)).collect();
    let progress = Progress { start: Instant::now(), next: AtomicUsize::new(0), slices };
    let mut report = thread::scope(|scope| {
        let spawn = |(at, target)| {
            let progress = &progress;
            scope.spawn(move || match traffic.rate {
                None => run_closed(target, traffic, progress),
                Some(rate) => {
                    let interval = Duration::from_secs_f64(targets.len() as f64 / rate);
                    run_open(target, traffic, progress, interval, interval.mul_f64(at as f64 / targets.len() as f64))
                }
            })
        };
        let threads: Vec<_> = targets.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(join).fold(TrafficReport::default(), TrafficReport::merge)
    });
    report.seconds = progress.start.elapsed().as_secs_f64();
    report.latencies_s.sort_by(f64::total_cmp);
    report.slices = progress.slices.into_iter().map(AtomicU64::into_inner).collect();
    report
}

fn join<R>(thread: thread::ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Sends the next request when an answer arrives.
fn run_closed<T: Target>(target: &T, traffic: &Traffic, progress: &Progress) -> TrafficReport {
    let mut report = TrafficReport::default();
    let mut in_flight = VecDeque::new();
    loop {
        let is_over = progress.start.elapsed() >= traffic.length;
        while !is_over && in_flight.len() < traffic.in_flight {
            let since = Instant::now();
            match target.send(progress.next_batch()) {
                Ok(request) => in_flight.push_back((since, request)),
                Err(failure) => report.record(progress, traffic.batch, since, Err(failure)),
            }
        }
        let Some((since, request)) = in_flight.pop_front() else { return report };
        report.record(progress, traffic.batch, since, target.receive(request));
    }
}

/// Sends requests on schedule. The latency of a late request counts from its scheduled time, so that a slow answer
/// shows in the latency of those queued behind it.
fn run_open<T: Target>(
    target: &T,
    traffic: &Traffic,
    progress: &Progress,
    interval: Duration,
    offset: Duration,
) -> TrafficReport {
    let (sender, receiver) = sync_channel::<(Instant, Result<T::Request<'_>, String>)>(MAX_BEHIND);
    thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let mut report = TrafficReport::default();
            for (since, request) in receiver {
                let received = request.and_then(|request| target.receive(request));
                report.record(progress, traffic.batch, since, received);
            }
            report
        });
        let mut due = progress.start + offset;
        while due < progress.start + traffic.length {
            let left = due.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                thread::sleep(left);
            }
            if sender.send((due, target.send(progress.next_batch()))).is_err() {
                break;
            }
            due += interval;
        }
        drop(sender);
        join(receiving)
    })
}

/// A connection to a store.
pub struct StoreTarget<'a> {
    client: &'a Client,
    batches: &'a [Vec<u64>],
    /// The version that new requests ask for.
    version: &'a AtomicU64,
    restarted: &'a AtomicU64,
}

impl<'a> StoreTarget<'a> {
    /// Requests `batches` of `version`; counts requests that had to be repeated in `restarted`.
    pub fn new(client: &'a Client, batches: &'a [Vec<u64>], version: &'a AtomicU64, restarted: &'a AtomicU64) -> Self {
        StoreTarget { client, batches, version, restarted }
    }
}

thread_local! {
    /// Buffers for rows and for which keys have one.
    static ROWS: std::cell::RefCell<(Vec<f32>, Vec<bool>)> = std::cell::RefCell::default();
}

impl Target for StoreTarget<'_> {
    type Request<'a>
        = (u64, &'a [u64], PendingLookup<'a>)
    where
        Self: 'a;

    fn send(&self, batch: usize) -> Result<Self::Request<'_>, String> {
        let signs = &self.batches[batch];
        let version = self.version.load(Ordering::Acquire);
        let lookup = self.client.lookup(version, signs).map_err(|error| error.to_string())?;
        Ok((version, signs, lookup))
    }

    fn receive<'a>(&'a self, (version, signs, lookup): Self::Request<'a>) -> Result<usize, String> {
        ROWS.with_borrow_mut(|(rows, present)| {
            let width = lookup.layout().width();
            rows.resize(signs.len() * width, 0.0);
            present.resize(signs.len(), false);
            let (received, version) = match lookup.wait(rows, present) {
                Err(ClientError::Gone { .. }) => {
                    self.restarted.fetch_add(1, Ordering::Relaxed);
                    let version = self.version.load(Ordering::Acquire);
                    (self.client.get(version, signs, rows, present), version)
                }
                received => (received.map(|result| result.hits), version),
            };
            let hits = received.map_err(|error| error.to_string())?;
            let is_other = |(row, present): (&[f32], &bool)| *present && row[0].to_bits() != (version as f32).to_bits();
            if rows.chunks_exact(width).zip(&*present).any(is_other) {
                return Err(format!("expected rows of version {version}, got rows of another version"));
            }
            Ok(hits)
        })
    }
}
