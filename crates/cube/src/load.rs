//! What `elasticrec bench cube` measures with: batches of random keys against a store, and against Redis, which has to give the
//! same rows.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_table::part::Written;
use elasticrec_table::partition::{mix, partition_of};

use crate::client::{Client, ClientError, PendingLookup};
use crate::{Column, CubeError, CubeWriter, RowType};

pub mod redis;

/// Different batches: together more keys than caches hold.
const NUM_BATCHES: usize = 4096;
/// Requests that an open loop may be behind.
const MAX_BEHIND: usize = 1 << 16;
/// Keys are counted in slices of this length.
pub const SLICE: Duration = Duration::from_millis(50);
/// Slices of the longest measurement.
const MAX_SLICES: usize = 20 * 3600;

/// The sign of a row: distinct for distinct numbers, in no order.
pub fn sign_of(number: u64) -> u64 {
    // any odd multiplier
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The row of a sign: the version, then values of no meaning.
pub fn fill_row(version: u64, sign: u64, row: &mut [f32]) {
    for (at, value) in (0..).zip(row.iter_mut()) {
        *value = if at == 0 { version as f32 } else { (mix(sign ^ at) >> 40) as f32 };
    }
}

/// Writes a cube of `num_rows` such rows.
pub fn write_cube(
    path: &Path,
    num_rows: u64,
    columns: Vec<Column>,
    num_partitions: u32,
    version: u64,
) -> Result<Written, CubeError> {
    let mut dealt = vec![Vec::new(); num_partitions as usize];
    for sign in (0..num_rows).map(sign_of) {
        dealt[partition_of(sign, num_partitions) as usize].push(sign);
    }
    let mut writer = CubeWriter::create(path, columns, RowType::F32, num_partitions)?;
    for (partition, signs) in (0..).zip(dealt) {
        writer.write_partition(partition, &signs, |at, row| fill_row(version, signs[at], row))?;
    }
    writer.finish()
}

/// How much is asked for, and how.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rows of the table.
    pub num_rows: u64,
    /// Keys of a request.
    pub batch: usize,
    /// Share of keys without a row.
    pub miss_share: f64,
    /// Requests on their way, of each connection.
    pub in_flight: usize,
    /// Requests a second of all connections, whatever becomes of those before; as fast as answers come without it.
    pub rate: Option<f64>,
    /// How long.
    pub length: Duration,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Measured {
    /// Keys whose rows came.
    pub keys: u64,
    /// Of those, keys without a row.
    pub misses: u64,
    /// Requests that failed, and why the first one did.
    pub failed: u64,
    /// The first failure.
    pub failure: Option<String>,
    /// Requests that were asked again with another version.
    pub restarted: u64,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Of each request, ascending: from when it was sent, or was to be sent, to its rows.
    pub latencies_s: Vec<f64>,
    /// Keys that came in each [`SLICE`].
    pub slices: Vec<u64>,
}

impl Measured {
    /// The latency that a share `q` of requests stays below.
    pub fn quantile_s(&self, q: f64) -> f64 {
        let at = (q * self.latencies_s.len() as f64) as usize;
        self.latencies_s.get(at.min(self.latencies_s.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }
}

/// Something that answers batches of keys.
pub trait Target: Sync {
    /// A request on its way.
    type Sent<'a>: Send
    where
        Self: 'a;

    /// Asks for a batch.
    fn send(&self, batch: usize) -> Result<Self::Sent<'_>, String>;

    /// Waits for it; returns how many keys have a row.
    fn receive<'a>(&'a self, sent: Self::Sent<'a>) -> Result<usize, String>;
}

/// The batches that are asked for, always the same.
pub fn batches(plan: &Plan) -> Vec<Vec<u64>> {
    let mut drawn = 0;
    let mut draw = |below: u64| {
        drawn += 1;
        ((u128::from(mix(drawn)) * u128::from(below)) >> 64) as u64
    };
    let misses = (plan.miss_share * 1e6) as u64;
    let mut key = || {
        let is_miss = draw(1_000_000) < misses;
        sign_of(draw(plan.num_rows) + if is_miss { plan.num_rows } else { 0 })
    };
    (0..NUM_BATCHES).map(|_| (0..plan.batch).map(|_| key()).collect()).collect()
}

/// What the connections of a measurement count together.
struct Count {
    start: Instant,
    next: AtomicUsize,
    slices: Vec<AtomicU64>,
}

/// Asks all targets, each on threads of its own.
pub fn run<T: Target>(targets: &[T], plan: &Plan) -> Measured {
    let num_slices = (plan.length.as_secs_f64() / SLICE.as_secs_f64()) as usize + 1;
    let slices = (0..num_slices.min(MAX_SLICES)).map(|_| AtomicU64::new(0)).collect();
    let count = Count { start: Instant::now(), next: AtomicUsize::new(0), slices };
    let mut measured = thread::scope(|scope| {
        let begin = |(at, target)| {
            let count = &count;
            scope.spawn(move || match plan.rate {
                None => closed(target, plan, count),
                Some(rate) => {
                    let every = Duration::from_secs_f64(targets.len() as f64 / rate);
                    open(target, plan, count, every, every.mul_f64(at as f64 / targets.len() as f64))
                }
            })
        };
        let begun: Vec<_> = targets.iter().enumerate().map(begin).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Measured>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        begun.into_iter().map(join).fold(Measured::default(), Measured::and)
    });
    measured.seconds = count.start.elapsed().as_secs_f64();
    measured.latencies_s.sort_by(f64::total_cmp);
    measured.slices = count.slices.into_iter().map(AtomicU64::into_inner).collect();
    measured
}

impl Measured {
    fn and(mut self, other: Measured) -> Measured {
        self.keys += other.keys;
        self.misses += other.misses;
        self.failed += other.failed;
        self.failure = self.failure.or(other.failure);
        self.latencies_s.extend(other.latencies_s);
        self
    }

    fn note(&mut self, count: &Count, batch: usize, since: Instant, received: Result<usize, String>) {
        match received {
            Ok(hits) => {
                self.keys += batch as u64;
                self.misses += (batch - hits) as u64;
                self.latencies_s.push(since.elapsed().as_secs_f64());
                let slice = (count.start.elapsed().as_secs_f64() / SLICE.as_secs_f64()) as usize;
                if let Some(slice) = count.slices.get(slice) {
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

fn next_batch(count: &Count) -> usize {
    count.next.fetch_add(1, Ordering::Relaxed) % NUM_BATCHES
}

/// The next request goes out when an answer has come.
fn closed<T: Target>(target: &T, plan: &Plan, count: &Count) -> Measured {
    let mut measured = Measured::default();
    let mut flying = VecDeque::new();
    loop {
        let is_over = count.start.elapsed() >= plan.length;
        while !is_over && flying.len() < plan.in_flight {
            let since = Instant::now();
            match target.send(next_batch(count)) {
                Ok(sent) => flying.push_back((since, sent)),
                Err(failure) => measured.note(count, plan.batch, since, Err(failure)),
            }
        }
        let Some((since, sent)) = flying.pop_front() else { return measured };
        measured.note(count, plan.batch, since, target.receive(sent));
    }
}

/// Requests go out at their times; one that is late, because those before it were, counts from when it should have gone.
fn open<T: Target>(target: &T, plan: &Plan, count: &Count, every: Duration, offset: Duration) -> Measured {
    let (sender, receiver) = sync_channel::<(Instant, Result<T::Sent<'_>, String>)>(MAX_BEHIND);
    thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let mut measured = Measured::default();
            for (since, sent) in receiver {
                let received = sent.and_then(|sent| target.receive(sent));
                measured.note(count, plan.batch, since, received);
            }
            measured
        });
        let mut due = count.start + offset;
        while due < count.start + plan.length {
            let left = due.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                thread::sleep(left);
            }
            if sender.send((due, target.send(next_batch(count)))).is_err() {
                break;
            }
            due += every;
        }
        drop(sender);
        receiving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A store, through a client.
pub struct Store<'a> {
    client: &'a Client,
    batches: &'a [Vec<u64>],
    /// The version that is asked for now.
    version: &'a AtomicU64,
    restarted: &'a AtomicU64,
}

impl<'a> Store<'a> {
    /// Asks a client for batches of the version that is current when a request goes out.
    pub fn new(client: &'a Client, batches: &'a [Vec<u64>], version: &'a AtomicU64, restarted: &'a AtomicU64) -> Self {
        Store { client, batches, version, restarted }
    }
}

thread_local! {
    /// Where rows go.
    static ROWS: std::cell::RefCell<(Vec<f32>, Vec<bool>)> = std::cell::RefCell::default();
}

impl Target for Store<'_> {
    type Sent<'a>
        = (u64, &'a [u64], PendingLookup<'a>)
    where
        Self: 'a;

    fn send(&self, batch: usize) -> Result<Self::Sent<'_>, String> {
        let signs = &self.batches[batch];
        let version = self.version.load(Ordering::Acquire);
        let asked = self.client.lookup(version, signs).map_err(|error| error.to_string())?;
        Ok((version, signs, asked))
    }

    fn receive<'a>(&'a self, (version, signs, asked): Self::Sent<'a>) -> Result<usize, String> {
        ROWS.with_borrow_mut(|(rows, present)| {
            let width = asked.layout().width();
            rows.resize(signs.len() * width, 0.0);
            present.resize(signs.len(), false);
            let (received, version) = match asked.wait(rows, present) {
                Err(ClientError::Gone { .. }) => {
                    self.restarted.fetch_add(1, Ordering::Relaxed);
                    let version = self.version.load(Ordering::Acquire);
                    (self.client.get(version, signs, rows, present), version)
                }
                received => (received.map(|sought| sought.hits), version),
            };
            let hits = received.map_err(|error| error.to_string())?;
            let is_other = |(row, present): (&[f32], &bool)| *present && row[0].to_bits() != (version as f32).to_bits();
            if rows.chunks_exact(width).zip(&*present).any(is_other) {
                return Err(format!("rows of another version than {version}"));
            }
            Ok(hits)
        })
    }
}
