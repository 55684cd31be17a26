//! Parameter servers: what a shard holds, how it applies every push once, and how it leaves memory and comes back.
//!
//! `record` knows which batches a partition has; `dense` is its slice of the network; `shard` holds the partitions of one
//! server and applies pushes and pass boundaries to those that lack them; `steps` keeps pushes that are applied together, which
//! `merge` makes one of; `snapshot` writes and loads partitions, `publish` writes what is served of them. `server` answers on
//! a socket, and `client` is the other end of it: a trainer's connections to all shards.

pub mod client;
pub mod dense;
mod fail;
pub mod merge;
pub mod publish;
pub mod record;
mod records;
pub mod server;
pub mod shard;
pub mod snapshot;
mod steps;

pub use elasticrec_wire::Group;

pub use client::{Client, ClientError, Closer};
pub use dense::{Dense, DenseOptimizer};
pub use merge::MergedUpdate;
pub use publish::PublishedShard;
pub use record::{BatchName, BatchState, Record};
pub use server::{Identity, Server};
pub use shard::{Boundary, PushOutcome, Shard, ShardSpec, Status};
pub use snapshot::{PartitionCopy, ShardError, SnapshotFiles, SnapshotWriter};
