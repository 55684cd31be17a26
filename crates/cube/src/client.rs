//! The client: rows of one version from all shards of a store, each of which has replicas. Signs are dealt out to the shards,
//! answers put together; a replica that is gone is replaced by another while the caller's time lasts.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_wire::ClientTls;
use thiserror::Error;

use self::connection::Connection;
pub use self::inventory::Layout;
pub use self::lookup::{LookupSummary, PendingLookup, ShardFailurePolicy};
use self::shards::Shards;

mod connection;
mod inventory;
mod lookup;
mod shards;

/// Why there are no rows.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ClientError {
    /// No replica of a shard answered in time.
    #[error("cube shard {shard}: no replica answered in {}: {}", millis(*.patience), .replicas.join("; "))]
    Unavailable { shard: usize, patience: Duration, replicas: Vec<String> },
    /// A server refused what no other attempt would change: a token, a request.
    #[error("cube shard {shard}: {}", .replicas.join("; "))]
    Unfit { shard: usize, replicas: Vec<String> },
    /// The shards do not make up a table.
    #[error("cube shards: {0}")]
    Map(String),
    /// No replica of some shard holds the version any more: start again with the current one.
    #[error("version {version} is {}, held: {}", if .held.contains(version) { "not at every shard" } else { "gone" }, list(.held))]
    Gone { version: u64, held: Vec<u64> },
}

fn list(versions: &[u64]) -> String {
    match versions {
        [] => "none".into(),
        some => some.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn millis(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}

/// What a client says to every server.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// Whose rows it wants.
    pub model: String,
    /// The secret of the store; empty for none.
    pub token: Vec<u8>,
    /// Whom it trusts; without it connections are plain.
    pub tls: Option<ClientTls>,
}

/// What is known of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaInfo {
    /// The shard's number.
    pub shard: usize,
    /// Where it is.
    pub address: String,
    /// Why it is not asked; none while it is.
    pub down: Option<String>,
    /// The versions it held when it was last heard of.
    pub versions: Vec<u64>,
    /// Requests without an answer.
    pub num_waiting: usize,
}

/// What a server says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its partitions
    pub partitions: Range<u32>,
    /// of so many.
    pub num_partitions: u32,
    /// Those it holds, ascending.
    pub versions: Vec<u64>,
    /// How it is, a JSON object; empty if it does not say.
    pub about: String,
}

/// Asks one server what it is and holds; the error says why it does not tell.
pub fn probe(address: &str, credentials: &Credentials, timeout: Duration) -> Result<ServerInfo, String> {
    let (_, held) = Connection::open(0, address, credentials, timeout).map_err(|failure| failure.text())?;
    let versions = held.versions.iter().map(|(version, _)| *version).collect();
    Ok(ServerInfo { partitions: held.partitions, num_partitions: held.num_partitions, versions, about: held.about })
}

/// Connections to all replicas of all shards of a store; any number of threads may use it at once.
#[derive(Debug)]
pub struct Client {
    shards: Arc<Shards>,
    timeout: Duration,
}

impl Client {
    /// Connects to the shards, a list of the addresses of its replicas each. Of each shard at least one must answer.
    pub fn connect(
        addresses: &[Vec<String>],
        credentials: Credentials,
        timeout: Duration,
    ) -> Result<Client, ClientError> {
        Ok(Client { shards: Shards::connect(addresses, credentials, timeout)?, timeout })
    }

    /// How rows of a version are laid out.
    pub fn layout(&self, version: u64) -> Result<Arc<Layout>, ClientError> {
        self.shards.layout(version, Instant::now() + self.timeout)
    }

    /// Asks for rows of a version; they are waited for with what is returned. Several may be asked for at a time.
    pub fn lookup<'a>(&'a self, version: u64, signs: &'a [u64]) -> Result<PendingLookup<'a>, ClientError> {
        self.lookup_until(version, signs, Instant::now() + self.timeout, ShardFailurePolicy::Fail)
    }

    /// [`ask`](Client::ask) with a deadline of its own, and a choice of what becomes of signs whose shard is down.
    pub fn lookup_until<'a>(
        &'a self,
        version: u64,
        signs: &'a [u64],
        deadline: Instant,
        lost: ShardFailurePolicy,
    ) -> Result<PendingLookup<'a>, ClientError> {
        PendingLookup::new(&self.shards, version, signs, deadline, lost)
    }

    /// How long a request may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Rows of a version, `[signs, width]`, and which signs have one; others read as zero. Returns how many have.
    ///
    /// # Panics
    /// If `out` or `present` have no room for all signs.
    pub fn get(
        &self,
        version: u64,
        signs: &[u64],
        out: &mut [f32],
        present: &mut [bool],
    ) -> Result<usize, ClientError> {
        Ok(self.lookup(version, signs)?.wait(out, present)?.hits)
    }

    /// What each replica holds, and who is down.
    pub fn info(&self) -> Vec<ReplicaInfo> {
        self.shards.refresh(Instant::now() + self.timeout, None);
        self.shards.info()
    }

    /// Versions that some replica held when it was last heard of, ascending.
    pub fn versions(&self) -> Vec<u64> {
        self.shards.versions()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shards.close();
    }
}
