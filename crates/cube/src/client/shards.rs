//! Shards and their replicas: their connections, the versions that they hold, and the choice of the replica for a request.
//! Replicas that are down are reconnected in the background.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_table::partition::{mix, partition_of};
use elasticrec_wire::{Kind, lock};

use super::connection::{Connection, Failure, inventory_of};
use super::inventory::{Layout, ServerInventory};
use super::{ClientError, Credentials, ReplicaInfo};

/// Time between two refreshes of the inventories.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// Back-off of reconnects: the first pause; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Back-off of reconnects: the longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// One server.
#[derive(Debug)]
pub(super) struct Replica {
    address: String,
    state: Mutex<ReplicaState>,
}

#[derive(Debug, Default)]
struct ReplicaState {
    /// The connection, while the replica is up.
    up: Option<Arc<Connection>>,
    /// The versions of its last inventory.
    held: Vec<(u64, Arc<Layout>)>,
    /// The time of the request for this inventory; inventories may arrive in another order than their requests.
    requested: Option<Instant>,
    /// The reason for which the replica was last down.
    failure: String,
}

/// The replicas of the same partitions.
#[derive(Debug)]
pub(super) struct Shard {
    /// Index in the list of addresses.
    pub(super) number: usize,
    partitions: Range<u32>,
    pub(super) replicas: Vec<Replica>,
    /// Start of the search for the least busy replica, so that equally busy replicas take turns.
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
    /// The row layout of each version, the same at every replica.
    layouts: RwLock<BTreeMap<u64, Arc<Layout>>>,
    signal: Arc<Signal>,
    /// For the background threads.
    own: Weak<Shards>,
}

/// Wakes threads that wait for a replica or for the end of the client.
#[derive(Debug, Default)]
struct Signal {
    /// Number of connections that were made, and whether the client is closed.
    state: Mutex<(u64, bool)>,
    changed: Condvar,
}

impl Signal {
    /// Waits for the length of a pause; true if the client is closed.
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
            let text = "expected at least one shard and an address for each, got none";
            return Err(ClientError::Map(text.into()));
        }
        let next_serial = AtomicU64::new(0);
        let open = |address: &String| {
            let serial = next_serial.fetch_add(1, Ordering::Relaxed);
            Connection::open(serial, address, &credentials, timeout)
        };
        // Connections are opened in parallel, so that a replica that does not answer delays no other.
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
        shards.note_first_inventories()?;
        for (number, replica) in down {
            let shard = shards.shards.iter().position(|shard| shard.number == number).unwrap_or(number);
            shards.reconnect(shard, replica);
        }
        shards.start_refresh();
        Ok(shards)
    }

    /// Ends the background threads.
    pub(super) fn close(&self) {
        lock(&self.signal.state).1 = true;
        self.signal.changed.notify_all();
    }

    /// The shard that owns a sign.
    #[inline]
    pub(super) fn shard_of(&self, sign: u64) -> usize {
        let partition = partition_of(sign, self.num_partitions);
        self.shards.partition_point(|shard| shard.partitions.end <= partition)
    }

    /// Picks a replica that was not tried: preferably one that holds the version, then the least busy one.
    pub(super) fn pick(&self, shard: usize, version: u64, tried: &[u64]) -> Option<(usize, Arc<Connection>)> {
        let Shard { replicas, turn, .. } = &self.shards[shard];
        let first = turn.fetch_add(1, Ordering::Relaxed);
        let mut best: Option<((bool, usize), usize, Arc<Connection>)> = None;
        for step in 0..replicas.len() {
            let at = (first.wrapping_add(step)) % replicas.len();
            let state = lock(&replicas[at].state);
            let Some(up) = state.up.as_ref().filter(|up| !tried.contains(&up.serial)) else { continue };
            let rank = (!state.holds(version), up.num_in_flight());
            if best.as_ref().is_none_or(|(least, ..)| rank < *least) {
                best = Some((rank, at, up.clone()));
            }
        }
        best.map(|(_, at, connection)| (at, connection))
    }

    /// Number of replicas of a shard that are up and were not tried.
    pub(super) fn num_left(&self, shard: usize, tried: &[u64]) -> usize {
        let is_left =
            |replica: &&Replica| lock(&replica.state).up.as_ref().is_some_and(|up| !tried.contains(&up.serial));
        self.shards[shard].replicas.iter().filter(is_left).count()
    }

    /// Number of connections made so far, for [`wait_for_change`](Shards::wait_for_change).
    pub(super) fn num_changes(&self) -> u64 {
        lock(&self.signal.state).0
    }

    /// Waits for a new connection since `before`; false if the deadline passes first.
    pub(super) fn wait_for_change(&self, before: u64, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let unchanged = |(now, is_closed): &mut (u64, bool)| *now == before && !*is_closed;
        let waited = self.signal.changed.wait_timeout_while(lock(&self.signal.state), left, unchanged);
        waited.unwrap_or_else(PoisonError::into_inner).0.0 != before
    }

    /// Marks a replica as down, if this is its current connection, and reconnects in the background.
    pub(super) fn take_down(&self, shard: usize, replica: usize, connection: &Connection, failure: &str) {
        let mut state = lock(&self.shards[shard].replicas[replica].state);
        if state.up.as_ref().is_some_and(|up| up.serial == connection.serial) {
            state.up = None;
            failure.clone_into(&mut state.failure);
            drop(state);
            self.reconnect(shard, replica);
        }
    }

    /// Notes that a replica does not hold a version.
    pub(super) fn forget_version(&self, shard: usize, replica: usize, version: u64) {
        lock(&self.shards[shard].replicas[replica].state).held.retain(|(held, _)| *held != version);
    }

    /// Returns the layout of a version; an unknown version triggers a refresh.
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

    /// Refreshes the inventories of all replicas; with a wanted version, only until one replica holds it.
    pub(super) fn refresh(&self, deadline: Instant, wanted: Option<u64>) {
        let hello = self.credentials.hello();
        let mut requests = Vec::new();
        for (at, shard) in self.shards.iter().enumerate() {
            for (number, replica) in shard.replicas.iter().enumerate() {
                let Some(up) = lock(&replica.state).up.clone() else { continue };
                let now = Instant::now();
                match up.send(Kind::Hello, &hello.parts(), deadline) {
                    Ok(ticket) => requests.push((at, number, up, ticket, now)),
                    Err(failure) => self.take_down(at, number, &up, &failure.text()),
                }
            }
        }
        let mut num_left = requests.len() as u32;
        for (at, number, up, ticket, requested) in requests {
            if wanted.is_some_and(|version| self.known_layout(version).is_some()) {
                up.forget(&ticket);
                continue;
            }
            // A replica that hangs must leave time for the others.
            let now = Instant::now();
            let timeout = deadline.saturating_duration_since(now) / num_left;
            num_left -= 1;
            let answer = up.wait(&ticket, now + timeout).and_then(inventory_of);
            let noted = answer.and_then(|inventory| {
                self.note_inventory(at, number, inventory, requested).map_err(Failure::WrongServer)
            });
            match noted {
                Ok(()) => {}
                // The replica is busy, not gone.
                Err(Failure::Late) if !up.is_silent() => {}
                Err(failure) => {
                    up.end(&failure.text());
                    self.take_down(at, number, &up, &failure.text());
                }
            }
            if let Some(reason) = up.end_reason() {
                self.take_down(at, number, &up, &reason);
            }
        }
        if wanted.is_none() {
            self.forget_versions();
        }
    }

    /// Notes the inventory of a replica unless a newer one is known; it must agree with the other replicas.
    fn note_inventory(
        &self,
        shard: usize,
        replica: usize,
        inventory: ServerInventory,
        requested: Instant,
    ) -> Result<(), String> {
        let Shard { partitions, replicas, .. } = &self.shards[shard];
        if inventory.partitions != *partitions || inventory.num_partitions != self.num_partitions {
            return Err(expected_partitions(partitions, self.num_partitions, &inventory));
        }
        let mut layouts = self.layouts.write().unwrap_or_else(PoisonError::into_inner);
        let is_other =
            |(version, layout): &&(u64, Arc<Layout>)| layouts.get(version).is_some_and(|known| known != layout);
        if let Some((version, layout)) = inventory.versions.iter().find(is_other) {
            let known = layouts.get(version).map(|known| describe(known)).unwrap_or_default();
            let got = describe(layout);
            return Err(format!("version {version}: expected {known} as at other replicas, got {got}"));
        }
        let mut state = lock(&replicas[replica].state);
        if state.requested.is_none_or(|before| before <= requested) {
            // Both locks are held, so that no thread sees a version without its layout.
            layouts.extend(inventory.versions.iter().cloned());
            state.held = inventory.versions;
            state.requested = Some(requested);
        }
        Ok(())
    }

    /// Notes the first inventory of every replica; at the start, replicas that disagree are an error.
    fn note_first_inventories(&self) -> Result<(), ClientError> {
        for (at, shard) in self.shards.iter().enumerate() {
            for (number, replica) in shard.replicas.iter().enumerate() {
                let versions = lock(&replica.state).held.clone();
                let (partitions, num_partitions) = (shard.partitions.clone(), self.num_partitions);
                let inventory = ServerInventory { partitions, num_partitions, versions, about: String::new() };
                self.note_inventory(at, number, inventory, Instant::now()).map_err(|what| {
                    ClientError::Map(format!("{} of shard {}: {what}", replica.address, shard.number))
                })?;
            }
        }
        Ok(())
    }

    /// Forgets the layouts of versions that no replica holds any more.
    fn forget_versions(&self) {
        let replicas = || self.shards.iter().flat_map(|shard| &shard.replicas);
        let mut layouts = self.layouts.write().unwrap_or_else(PoisonError::into_inner);
        layouts.retain(|version, _| replicas().any(|replica| lock(&replica.state).holds(*version)));
    }

    pub(super) fn info(&self) -> Vec<ReplicaInfo> {
        let mut shards: Vec<&Shard> = self.shards.iter().collect();
        shards.sort_by_key(|shard| shard.number);
        let of = |shard: &Shard| -> Vec<ReplicaInfo> {
            shard.replicas.iter().map(|replica| replica.info(shard.number)).collect()
        };
        shards.into_iter().flat_map(of).collect()
    }

    /// Reconnects to a replica in the background until it is up or the client is closed.
    fn reconnect(&self, shard: usize, replica: usize) {
        let (own, signal) = (self.own.clone(), self.signal.clone());
        let mut pause = FIRST_PAUSE;
        let connecting = move || {
            // Jitter keeps clients from reconnecting all at once.
            let mut spread = mix(replica as u64 ^ Arc::as_ptr(&signal) as u64);
            while !signal.pause(pause.mul_f64(0.75 + 0.5 * (spread >> 11) as f64 / (1u64 << 53) as f64)) {
                let Some(shards) = own.upgrade() else { return };
                if shards.try_connect(shard, replica) {
                    return;
                }
                (pause, spread) = ((2 * pause).min(MAX_PAUSE), mix(spread));
            }
        };
        if let Err(error) = thread::Builder::new().name("cube-connect".into()).spawn(connecting) {
            // The replica stays down, and its state shows the reason.
            lock(&self.shards[shard].replicas[replica].state).failure = error.to_string();
        }
    }

    /// Connects to a replica once; true if it is up now.
    fn try_connect(&self, shard: usize, replica: usize) -> bool {
        let own = &self.shards[shard].replicas[replica];
        let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
        let requested = Instant::now();
        let opened = Connection::open(serial, &own.address, &self.credentials, self.timeout);
        let opened = opened.and_then(|(connection, inventory)| {
            self.note_inventory(shard, replica, inventory, requested).map_err(Failure::WrongServer)?;
            Ok(connection)
        });
        match opened {
            Ok(connection) => {
                lock(&own.state).up = Some(Arc::new(connection));
                lock(&self.signal.state).0 += 1;
                self.signal.changed.notify_all();
                true
            }
            Err(failure) => {
                lock(&own.state).failure = failure.text();
                false
            }
        }
    }

    /// Starts the thread that refreshes inventories and so notices replicas that are gone.
    fn start_refresh(&self) {
        let (own, signal) = (self.own.clone(), self.signal.clone());
        let keeping = move || {
            while !signal.pause(REFRESH_EVERY) {
                let Some(shards) = own.upgrade() else { return };
                shards.refresh(Instant::now() + shards.timeout.max(REFRESH_EVERY), None);
            }
        };
        // Without the thread, inventories are refreshed when an unknown version is looked up.
        drop(thread::Builder::new().name("cube-keeper".into()).spawn(keeping));
    }
}

type OpenResult = Result<(Connection, ServerInventory), Failure>;

impl Shard {
    /// Builds a shard from the first connections to its replicas. Returns it with the number of partitions of the table and
    /// the replicas that are down.
    fn new(
        number: usize,
        addresses: &[String],
        opened: Vec<OpenResult>,
        timeout: Duration,
    ) -> Result<(Shard, u32, Vec<usize>), ClientError> {
        let first = opened.iter().find_map(|opened| opened.as_ref().ok());
        let Some((_, first)) = first else {
            return Err(none_up(number, addresses, &opened, timeout));
        };
        let (partitions, num_partitions) = (first.partitions.clone(), first.num_partitions);
        let (mut replicas, mut down) = (Vec::new(), Vec::new());
        for (at, (address, opened)) in addresses.iter().zip(opened).enumerate() {
            let state = match opened {
                Ok((_, held)) if held.partitions != partitions || held.num_partitions != num_partitions => {
                    let what = expected_partitions(&partitions, num_partitions, &held);
                    return Err(ClientError::Map(format!("{address} of shard {number}: {what}")));
                }
                Ok((connection, held)) => {
                    ReplicaState { up: Some(Arc::new(connection)), held: held.versions, ..ReplicaState::default() }
                }
                Err(failure) => {
                    down.push(at);
                    ReplicaState { failure: failure.text(), ..ReplicaState::default() }
                }
            };
            replicas.push(Replica { address: address.clone(), state: Mutex::new(state) });
        }
        Ok((Shard { number, partitions, replicas, turn: AtomicUsize::new(0) }, num_partitions, down))
    }

    /// The failure of each replica, when none of them answered.
    pub(super) fn failures(&self) -> Vec<String> {
        let failure = |replica: &Replica| {
            let state = lock(&replica.state);
            let what = if state.up.is_some() { "did not answer in time" } else { &state.failure };
            format!("{}: {what}", replica.address)
        };
        self.replicas.iter().map(failure).collect()
    }

    pub(super) fn address(&self, replica: usize) -> &str {
        &self.replicas[replica].address
    }
}

impl Replica {
    fn info(&self, shard: usize) -> ReplicaInfo {
        let state = lock(&self.state);
        ReplicaInfo {
            shard,
            address: self.address.clone(),
            down: state.up.is_none().then(|| state.failure.clone()),
            versions: state.held.iter().map(|(version, _)| *version).collect(),
            num_in_flight: state.up.as_ref().map_or(0, |up| up.num_in_flight()),
        }
    }
}

impl ReplicaState {
    fn holds(&self, version: u64) -> bool {
        self.held.binary_search_by_key(&version, |(version, _)| *version).is_ok()
    }
}

/// The error of a shard without any replica that is up.
fn none_up(shard: usize, addresses: &[String], opened: &[OpenResult], timeout: Duration) -> ClientError {
    let failures = || opened.iter().filter_map(|opened| opened.as_ref().err());
    let replicas = addresses.iter().zip(failures()).map(|(address, failure)| format!("{address}: {}", failure.text()));
    let replicas = replicas.collect();
    // A retry would not help.
    if failures().any(|failure| matches!(failure, Failure::WrongServer(_) | Failure::Refused(_))) {
        return ClientError::Permanent { shard, replicas };
    }
    ClientError::Unavailable { shard, timeout, replicas }
}

/// Sorts the shards by their partitions, which must cover the table exactly; returns the number of partitions.
fn check_map(shards: &mut [Shard], sizes: &[u32]) -> Result<u32, ClientError> {
    let num_partitions = sizes[0];
    if let Some(other) = sizes.iter().find(|size| **size != num_partitions) {
        let text = format!("expected the same number of partitions at all shards, got {num_partitions} and {other}");
        return Err(ClientError::Map(text));
    }
    shards.sort_by_key(|shard| shard.partitions.start);
    let mut end = 0;
    for shard in &*shards {
        let Range { start, end: next } = shard.partitions;
        if start != end {
            let text =
                format!("shard {}: expected partitions that begin at {end}, got {start} to {next}", shard.number);
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
