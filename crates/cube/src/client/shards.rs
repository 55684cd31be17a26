//! Shards and their replicas: who is up, who holds what, who is asked next. What went down is connected to again in the
//! background.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_table::partition::{mix, partition_of};
use elasticrec_wire::{Hello, Kind};

use super::connection::{Connection, Failure, greeting};
use super::inventory::{Layout, ServerInventory};
use super::{ClientError, Credentials, ReplicaInfo};

/// How often replicas are asked what they hold.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// The first pause before a replica is connected to again; each is twice the one before
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// up to this one.
const LAST_PAUSE: Duration = Duration::from_secs(2);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One server.
#[derive(Debug)]
pub(super) struct Replica {
    address: String,
    link: Mutex<Link>,
}

#[derive(Debug, Default)]
struct Link {
    up: Option<Arc<Connection>>,
    /// What it said last that it holds.
    held: Vec<(u64, Arc<Layout>)>,
    /// When it was asked for that: answers are not always heard in the order in which they were given.
    asked: Option<Instant>,
    /// Why it was not asked when it last was down.
    why: String,
}

/// The replicas of the same partitions.
#[derive(Debug)]
pub(super) struct Shard {
    /// Where it stands among the addresses that were given.
    pub(super) number: usize,
    partitions: Range<u32>,
    pub(super) replicas: Vec<Replica>,
    /// Where the search for the least busy replica begins, so that equals take turns.
    turn: AtomicUsize,
}

/// All shards, in the order of their partitions.
#[derive(Debug)]
pub(super) struct Shards {
    pub(super) shards: Vec<Shard>,
    num_partitions: u32,
    credentials: Credentials,
    timeout: Duration,
    next_serial: AtomicU64,
    /// How rows of each version are laid out, the same at every replica.
    layouts: RwLock<BTreeMap<u64, Arc<Layout>>>,
    signal: Arc<Signal>,
    /// For the threads that connect again.
    own: Weak<Shards>,
}

/// Wakes those who wait for a replica, or for the end.
#[derive(Debug, Default)]
struct Signal {
    /// Counts connections that were made; and whether the client is gone.
    state: Mutex<(u64, bool)>,
    changed: Condvar,
}

impl Signal {
    /// Waits for so long; true if the client is gone.
    fn pause(&self, length: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(lock(&self.state), length, |(_, is_closed)| !*is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        state.1
    }
}

impl Shards {
    pub(super) fn connect(
        addresses: &[Vec<String>],
        credentials: Credentials,
        timeout: Duration,
    ) -> Result<Arc<Shards>, ClientError> {
        if addresses.is_empty() || addresses.iter().any(Vec::is_empty) {
            let text = "expected at least one shard, and an address for each, got none";
            return Err(ClientError::Map(text.into()));
        }
        let next_serial = AtomicU64::new(0);
        let open = |address: &String| {
            let serial = next_serial.fetch_add(1, Ordering::Relaxed);
            Connection::open(serial, address, &credentials, timeout)
        };
        // all at once: one that does not answer holds up no other
        let opened: Vec<Vec<_>> = thread::scope(|scope| {
            let begin = |address| scope.spawn(move || open(address));
            let begun: Vec<Vec<_>> = addresses.iter().map(|shard| shard.iter().map(begin).collect()).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            begun.into_iter().map(|shard| shard.into_iter().map(join).collect()).collect()
        });
        let mut shards = Vec::new();
        let mut sizes = Vec::new();
        let mut down = Vec::new();
        for (number, (addresses, opened)) in addresses.iter().zip(opened).enumerate() {
            let (shard, num_partitions, failed) = Shard::new(number, addresses, opened, timeout)?;
            sizes.push(num_partitions);
            down.extend(failed.into_iter().map(|replica| (number, replica)));
            shards.push(shard);
        }
        let num_partitions = check_map(&mut shards, &sizes)?;
        let shards = Arc::new_cyclic(|own| Shards {
            shards,
            num_partitions,
            credentials,
            timeout,
            next_serial,
            layouts: RwLock::default(),
            signal: Arc::default(),
            own: own.clone(),
        });
        shards.learn_all()?;
        for (number, replica) in down {
            let shard = shards.shards.iter().position(|shard| shard.number == number).unwrap_or(number);
            shards.reconnect(shard, replica);
        }
        shards.keep_fresh();
        Ok(shards)
    }

    /// The client is gone: threads in the background end.
    pub(super) fn close(&self) {
        lock(&self.signal.state).1 = true;
        self.signal.changed.notify_all();
    }

    /// The shard that has a sign.
    #[inline]
    pub(super) fn shard_of(&self, sign: u64) -> usize {
        let partition = partition_of(sign, self.num_partitions);
        self.shards.partition_point(|shard| shard.partitions.end <= partition)
    }

    /// The replica to ask: of those that were not tried, first those that hold the version, then the least busy.
    pub(super) fn pick(&self, shard: usize, version: u64, tried: &[u64]) -> Option<(usize, Arc<Connection>)> {
        let Shard { replicas, turn, .. } = &self.shards[shard];
        let first = turn.fetch_add(1, Ordering::Relaxed);
        let mut best: Option<((bool, usize), usize, Arc<Connection>)> = None;
        for step in 0..replicas.len() {
            let at = (first.wrapping_add(step)) % replicas.len();
            let link = lock(&replicas[at].link);
            let Some(up) = link.up.as_ref().filter(|up| !tried.contains(&up.serial)) else { continue };
            let rank = (!link.holds(version), up.num_waiting());
            if best.as_ref().is_none_or(|(least, ..)| rank < *least) {
                best = Some((rank, at, up.clone()));
            }
        }
        best.map(|(_, at, connection)| (at, connection))
    }

    /// Replicas of a shard that are up and were not tried.
    pub(super) fn num_left(&self, shard: usize, tried: &[u64]) -> usize {
        let is_left =
            |replica: &&Replica| lock(&replica.link).up.as_ref().is_some_and(|up| !tried.contains(&up.serial));
        self.shards[shard].replicas.iter().filter(is_left).count()
    }

    /// Connections that were made so far, for [`wait_for_change`](Shards::wait_for_change).
    pub(super) fn num_changes(&self) -> u64 {
        lock(&self.signal.state).0
    }

    /// Waits until a connection was made that was not counted; false if the time was over first.
    pub(super) fn wait_for_change(&self, before: u64, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let unchanged = |(now, is_closed): &mut (u64, bool)| *now == before && !*is_closed;
        let waited = self.signal.changed.wait_timeout_while(lock(&self.signal.state), left, unchanged);
        waited.unwrap_or_else(PoisonError::into_inner).0.0 != before
    }

    /// A connection is of no more use: others are asked, and it is made anew.
    pub(super) fn take_down(&self, shard: usize, replica: usize, connection: &Connection, why: &str) {
        let mut link = lock(&self.shards[shard].replicas[replica].link);
        if link.up.as_ref().is_some_and(|up| up.serial == connection.serial) {
            link.up = None;
            why.clone_into(&mut link.why);
            drop(link);
            self.reconnect(shard, replica);
        }
    }

    /// A replica said that it does not hold a version.
    pub(super) fn unlearn(&self, shard: usize, replica: usize, version: u64) {
        lock(&self.shards[shard].replicas[replica].link).held.retain(|(held, _)| *held != version);
    }

    /// How rows of a version are laid out; replicas are asked for one that is new.
    pub(super) fn layout(&self, version: u64, deadline: Instant) -> Result<Arc<Layout>, ClientError> {
        if let Some(layout) = self.known_layout(version) {
            return Ok(layout);
        }
        self.refresh(deadline, Some(version));
        self.known_layout(version).ok_or_else(|| ClientError::Gone { version, held: self.versions() })
    }

    fn known_layout(&self, version: u64) -> Option<Arc<Layout>> {
        self.layouts.read().unwrap_or_else(PoisonError::into_inner).get(&version).cloned()
    }

    pub(super) fn versions(&self) -> Vec<u64> {
        self.layouts.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    /// Asks every replica what it holds now; answers are waited for until one holds the version that is wanted.
    pub(super) fn refresh(&self, deadline: Instant, wanted: Option<u64>) {
        let hello = Hello { run: self.credentials.model.as_bytes(), token: &self.credentials.token };
        let mut asked = Vec::new();
        for (at, shard) in self.shards.iter().enumerate() {
            for (number, replica) in shard.replicas.iter().enumerate() {
                let Some(up) = lock(&replica.link).up.clone() else { continue };
                let now = Instant::now();
                match up.ask(Kind::Hello, &hello.parts(), deadline) {
                    Ok(ticket) => asked.push((at, number, up, ticket, now)),
                    Err(failure) => self.take_down(at, number, &up, &failure.text()),
                }
            }
        }
        let mut num_left = asked.len() as u32;
        for (at, number, up, ticket, when) in asked {
            if wanted.is_some_and(|version| self.known_layout(version).is_some()) {
                up.forget(&ticket);
                continue;
            }
            // one that hangs must leave time for the others
            let now = Instant::now();
            let patience = deadline.saturating_duration_since(now) / num_left;
            num_left -= 1;
            let heard = up.wait(&ticket, now + patience).and_then(greeting);
            let heard = heard.and_then(|held| self.learn(at, number, held, when).map_err(Failure::Unfit));
            match heard {
                Ok(()) => {}
                // busy, not gone
                Err(Failure::Late) if !up.is_silent() => {}
                Err(failure) => {
                    up.end(&failure.text());
                    self.take_down(at, number, &up, &failure.text());
                }
            }
            if let Some(why) = up.farewell() {
                self.take_down(at, number, &up, &why);
            }
        }
        if wanted.is_none() {
            self.forget_versions();
        }
    }

    /// Notes what a replica holds, as far as that is newer than what is known; it must fit the others.
    fn learn(&self, shard: usize, replica: usize, held: ServerInventory, asked: Instant) -> Result<(), String> {
        let Shard { partitions, replicas, .. } = &self.shards[shard];
        if held.partitions != *partitions || held.num_partitions != self.num_partitions {
            return Err(expected_partitions(partitions, self.num_partitions, &held));
        }
        let mut layouts = self.layouts.write().unwrap_or_else(PoisonError::into_inner);
        let is_other =
            |(version, layout): &&(u64, Arc<Layout>)| layouts.get(version).is_some_and(|known| known != layout);
        if let Some((version, layout)) = held.versions.iter().find(is_other) {
            let known = layouts.get(version).map(|known| describe(known)).unwrap_or_default();
            let got = describe(layout);
            return Err(format!("version {version}: expected {known} as at other replicas, got {got}"));
        }
        let mut link = lock(&replicas[replica].link);
        if link.asked.is_none_or(|before| before <= asked) {
            // under both locks: nobody sees that it is held and not how it is laid out
            layouts.extend(held.versions.iter().cloned());
            link.held = held.versions;
            link.asked = Some(asked);
        }
        Ok(())
    }

    /// What all replicas that were connected to hold; at the beginning one that does not fit is an error.
    fn learn_all(&self) -> Result<(), ClientError> {
        for (at, shard) in self.shards.iter().enumerate() {
            for (number, replica) in shard.replicas.iter().enumerate() {
                let versions = lock(&replica.link).held.clone();
                let partitions = shard.partitions.clone();
                let held =
                    ServerInventory { partitions, num_partitions: self.num_partitions, versions, about: String::new() };
                self.learn(at, number, held, Instant::now()).map_err(|what| {
                    ClientError::Map(format!("{} of shard {}: {what}", replica.address, shard.number))
                })?;
            }
        }
        Ok(())
    }

    /// Layouts of versions that nobody holds any more.
    fn forget_versions(&self) {
        let replicas = || self.shards.iter().flat_map(|shard| &shard.replicas);
        let mut layouts = self.layouts.write().unwrap_or_else(PoisonError::into_inner);
        layouts.retain(|version, _| replicas().any(|replica| lock(&replica.link).holds(*version)));
    }

    pub(super) fn info(&self) -> Vec<ReplicaInfo> {
        let mut shards: Vec<&Shard> = self.shards.iter().collect();
        shards.sort_by_key(|shard| shard.number);
        let of = |shard: &Shard| -> Vec<ReplicaInfo> {
            shard.replicas.iter().map(|replica| replica.info(shard.number)).collect()
        };
        shards.into_iter().flat_map(of).collect()
    }

    /// Connects to a replica that is down, in the background, until it is up or the client is gone.
    fn reconnect(&self, shard: usize, replica: usize) {
        let (own, signal) = (self.own.clone(), self.signal.clone());
        let mut pause = FIRST_PAUSE;
        let connecting = move || {
            // a little apart, so that clients do not come all at once
            let mut spread = mix(replica as u64 ^ Arc::as_ptr(&signal) as u64);
            while !signal.pause(pause.mul_f64(0.75 + 0.5 * (spread >> 11) as f64 / (1u64 << 53) as f64)) {
                let Some(shards) = own.upgrade() else { return };
                if shards.try_again(shard, replica) {
                    return;
                }
                (pause, spread) = ((2 * pause).min(LAST_PAUSE), mix(spread));
            }
        };
        if let Err(error) = thread::Builder::new().name("cube-connect".into()).spawn(connecting) {
            // it stays down, and says why
            lock(&self.shards[shard].replicas[replica].link).why = error.to_string();
        }
    }

    fn try_again(&self, shard: usize, replica: usize) -> bool {
        let own = &self.shards[shard].replicas[replica];
        let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
        let asked = Instant::now();
        let opened = Connection::open(serial, &own.address, &self.credentials, self.timeout);
        let opened = opened.and_then(|(connection, held)| {
            self.learn(shard, replica, held, asked).map_err(Failure::Unfit)?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => {
                lock(&own.link).up = Some(Arc::new(connection));
                lock(&self.signal.state).0 += 1;
                self.signal.changed.notify_all();
                true
            }
            Err(failure) => {
                lock(&own.link).why = failure.text();
                false
            }
        }
    }

    /// A thread that asks now and then what replicas hold, and so notices those that are gone.
    fn keep_fresh(&self) {
        let (own, signal) = (self.own.clone(), self.signal.clone());
        let keeping = move || {
            while !signal.pause(REFRESH_EVERY) {
                let Some(shards) = own.upgrade() else { return };
                shards.refresh(Instant::now() + shards.timeout.max(REFRESH_EVERY), None);
            }
        };
        // without it versions are learned of when they are asked for
        drop(thread::Builder::new().name("cube-keeper".into()).spawn(keeping));
    }
}

type Opened = Result<(Connection, ServerInventory), Failure>;

impl Shard {
    /// Of what its replicas said; with the number of partitions of the table, and the replicas that are down.
    fn new(
        number: usize,
        addresses: &[String],
        opened: Vec<Opened>,
        timeout: Duration,
    ) -> Result<(Shard, u32, Vec<usize>), ClientError> {
        let first = opened.iter().find_map(|opened| opened.as_ref().ok());
        let Some((_, first)) = first else {
            return Err(none_up(number, addresses, &opened, timeout));
        };
        let (partitions, num_partitions) = (first.partitions.clone(), first.num_partitions);
        let (mut replicas, mut down) = (Vec::new(), Vec::new());
        for (at, (address, opened)) in addresses.iter().zip(opened).enumerate() {
            let link = match opened {
                Ok((_, held)) if held.partitions != partitions || held.num_partitions != num_partitions => {
                    let what = expected_partitions(&partitions, num_partitions, &held);
                    return Err(ClientError::Map(format!("{address} of shard {number}: {what}")));
                }
                Ok((connection, held)) => {
                    Link { up: Some(Arc::new(connection)), held: held.versions, ..Link::default() }
                }
                Err(failure) => {
                    down.push(at);
                    Link { why: failure.text(), ..Link::default() }
                }
            };
            replicas.push(Replica { address: address.clone(), link: Mutex::new(link) });
        }
        Ok((Shard { number, partitions, replicas, turn: AtomicUsize::new(0) }, num_partitions, down))
    }

    /// What is said when none of its replicas answered.
    pub(super) fn whys(&self) -> Vec<String> {
        let why = |replica: &Replica| {
            let link = lock(&replica.link);
            let what = if link.up.is_some() { "did not answer in time" } else { &link.why };
            format!("{}: {what}", replica.address)
        };
        self.replicas.iter().map(why).collect()
    }

    pub(super) fn address(&self, replica: usize) -> &str {
        &self.replicas[replica].address
    }
}

impl Replica {
    fn info(&self, shard: usize) -> ReplicaInfo {
        let link = lock(&self.link);
        ReplicaInfo {
            shard,
            address: self.address.clone(),
            down: link.up.is_none().then(|| link.why.clone()),
            versions: link.held.iter().map(|(version, _)| *version).collect(),
            num_waiting: link.up.as_ref().map_or(0, |up| up.num_waiting()),
        }
    }
}

impl Link {
    fn holds(&self, version: u64) -> bool {
        self.held.binary_search_by_key(&version, |(version, _)| *version).is_ok()
    }
}

fn none_up(shard: usize, addresses: &[String], opened: &[Opened], patience: Duration) -> ClientError {
    let failures = || opened.iter().filter_map(|opened| opened.as_ref().err());
    let replicas = addresses.iter().zip(failures()).map(|(address, failure)| format!("{address}: {}", failure.text()));
    let replicas = replicas.collect();
    // what another attempt does not change
    if failures().any(|failure| matches!(failure, Failure::Unfit(_) | Failure::Refused(_))) {
        return ClientError::Unfit { shard, replicas };
    }
    ClientError::Unavailable { shard, patience, replicas }
}

/// Sorts the shards by their partitions, which have to be all of a table, each once; returns how many there are.
fn check_map(shards: &mut [Shard], sizes: &[u32]) -> Result<u32, ClientError> {
    let num_partitions = sizes[0];
    if let Some(other) = sizes.iter().find(|size| **size != num_partitions) {
        let text = format!("expected one number of partitions, got {num_partitions} and {other}");
        return Err(ClientError::Map(text));
    }
    shards.sort_by_key(|shard| shard.partitions.start);
    let mut end = 0;
    for shard in &*shards {
        let Range { start, end: next } = shard.partitions;
        if start != end {
            let text = format!("expected partitions from {end} on, got {start} to {next} of shard {}", shard.number);
            return Err(ClientError::Map(text));
        }
        end = next;
    }
    if end != num_partitions {
        return Err(ClientError::Map(format!("expected {num_partitions} partitions, got {end}")));
    }
    Ok(num_partitions)
}

fn expected_partitions(partitions: &Range<u32>, num_partitions: u32, held: &ServerInventory) -> String {
    let of = |range: &Range<u32>, all: u32| format!("{} to {} of {all}", range.start, range.end);
    let (expected, got) = (of(partitions, num_partitions), of(&held.partitions, held.num_partitions));
    format!("expected partitions {expected}, got {got}")
}

fn describe(layout: &Layout) -> String {
    let column = |column: &crate::Column| format!("{} {}", column.name, column.width);
    let columns: Vec<String> = layout.columns().iter().map(column).collect();
    format!("{} rows of {}", layout.row_type(), columns.join(" + "))
}
