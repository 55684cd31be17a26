//! The client: looks up rows of one version at all shards of a store. Signs are split by shard and the answers put together;
//! when a replica of a shard fails, another is tried until the caller's deadline.
//!
//! - `lookup`: one lookup, from the split to the last row;
//! - `shards`: shards and replicas, their connections and the versions that they hold;
//! - `connection`: requests and answers on one connection;
//! - `inventory`: a server's answer to a hello.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_wire::{ClientTls, Hello};
use thiserror::Error;

use self::connection::Connection;
pub use self::inventory::Layout;
use self::inventory::ServerInventory;
pub use self::lookup::{LookupSummary, PendingLookup, ShardFailurePolicy};
use self::shards::Shards;
use crate::error::list;

mod connection;
mod inventory;
mod lookup;
mod shards;

/// The reason a lookup failed.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ClientError {
    /// No replica of a shard answered in time.
    #[error("cube shard {shard}: no replica answered in {}: {}", millis(*.timeout), .replicas.join("; "))]
    Unavailable { shard: usize, timeout: Duration, replicas: Vec<String> },
    /// A retry does not help: the server is the wrong one, or refused the request (another token, an invalid request).
    #[error("cube shard {shard}: {}", .replicas.join("; "))]
    Permanent { shard: usize, replicas: Vec<String> },
    /// The partitions of the shards do not make up a table.
    #[error("cube shards: {0}")]
    Map(String),
    /// No replica of some shard holds the version any more: start again with the current version.
    #[error("version {version}: {} hold it, versions held: {}", if .held.contains(version) { "not all shards" } else { "no shards" }, list(.held))]
    Gone { version: u64, held: Vec<u64> },
}

fn millis(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}

/// The credentials of a client, and the authorities that it trusts.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The model.
    pub model: String,
    /// The shared secret of the store; empty for none.
    pub token: Vec<u8>,
    /// The authorities to trust; without them connections are plain.
    pub tls: Option<ClientTls>,
}

impl Credentials {
    fn hello(&self) -> Hello<'_> {
        Hello { run: self.model.as_bytes(), token: &self.token }
    }
}

/// The client's view of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaInfo {
    /// Number of the shard.
    pub shard: usize,
    /// Address of the replica.
    pub address: String,
    /// The reason the replica is down; None while it is up.
    pub down: Option<String>,
    /// The versions that it held according to its last inventory.
    pub versions: Vec<u64>,
    /// Number of requests in flight.
    pub num_in_flight: usize,
}

/// The state of one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// Partitions of the server.
    pub partitions: Range<u32>,
    /// Partitions of the table.
    pub num_partitions: u32,
    /// The versions that it holds, ascending.
    pub versions: Vec<u64>,
    /// Its description of itself, a JSON object or empty.
    pub about: String,
}

/// Returns the state of one server, or the reason why it does not answer.
pub fn probe(address: &str, credentials: &Credentials, timeout: Duration) -> Result<ServerInfo, String> {
    let (_, inventory) = Connection::open(0, address, credentials, timeout).map_err(|failure| failure.text())?;
    let versions = inventory.versions.iter().map(|(version, _)| *version).collect();
    let ServerInventory { partitions, num_partitions, about, .. } = inventory;
    Ok(ServerInfo { partitions, num_partitions, versions, about })
}

/// Connections to all replicas of all shards of a store. Any number of threads may use it at once.
#[derive(Debug)]
pub struct Client {
    shards: Arc<Shards>,
    timeout: Duration,
}

impl Client {
    /// Connects to the shards, given as lists of replica addresses. At least one replica of each shard must answer.
    pub fn connect(
        addresses: &[Vec<String>],
        credentials: Credentials,
        timeout: Duration,
    ) -> Result<Client, ClientError> {
        Ok(Client { shards: Shards::connect(addresses, credentials, timeout)?, timeout })
    }

    /// Returns the row layout of a version.
    pub fn layout(&self, version: u64) -> Result<Arc<Layout>, ClientError> {
        self.shards.layout(version, Instant::now() + self.timeout)
    }

    /// Starts a lookup; wait for the rows with the returned value. Several lookups may be in flight.
    pub fn lookup<'a>(&'a self, version: u64, signs: &'a [u64]) -> Result<PendingLookup<'a>, ClientError> {
        self.lookup_until(version, signs, Instant::now() + self.timeout, ShardFailurePolicy::Fail)
    }

    /// Starts a lookup with its own deadline and a policy for shards that do not answer.
    pub fn lookup_until<'a>(
        &'a self,
        version: u64,
        signs: &'a [u64],
        deadline: Instant,
        policy: ShardFailurePolicy,
    ) -> Result<PendingLookup<'a>, ClientError> {
        PendingLookup::new(&self.shards, version, signs, deadline, policy)
    }

    /// Time limit of a lookup.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Looks up rows of a version, `[signs, width]`, and which signs have one; other rows are zero. Returns the number of
    /// signs that have a row.
    ///
    /// # Panics
    /// If `out` or `present` does not have room for exactly these signs.
    pub fn get(
        &self,
        version: u64,
        signs: &[u64],
        out: &mut [f32],
        present: &mut [bool],
    ) -> Result<usize, ClientError> {
        Ok(self.lookup(version, signs)?.wait(out, present)?.hits)
    }

    /// Refreshes and returns the state of all replicas.
    pub fn info(&self) -> Vec<ReplicaInfo> {
        self.shards.refresh(Instant::now() + self.timeout, None);
        self.shards.info()
    }

    /// Versions that some replica holds according to its last inventory, ascending.
    pub fn versions(&self) -> Vec<u64> {
        self.shards.versions()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shards.close();
    }
}
