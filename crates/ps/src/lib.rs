//! Parameter servers: shards of a table that apply every push exactly once.
//!
//! - `record`: the batches that a partition has applied;
//! - `dense`: a partition's slice of the network's weights;
//! - `shard`: the partitions of one server; applies pushes and pass boundaries to the partitions that lack them;
//! - `steps`, `merge`: pushes that are applied together as one step;
//! - `snapshot`, `publish`: a shard's part of a checkpoint and of a version;
//! - `server`: answers requests on a socket;
//! - `client`: a trainer's connections to all shards.

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

pub use elasticrec_wire::{Group, PushHeader};

pub use client::{Client, ClientError, Closer};
pub use dense::{Dense, DenseOptimizer};
pub use merge::MergedUpdate;
pub use publish::PublishedShard;
pub use record::{BatchName, BatchState, Record};
pub use server::{Identity, Server};
pub use shard::{Boundary, PushOutcome, Shard, ShardSpec, Status};
pub use snapshot::{PartitionCopy, ShardError, SnapshotFiles, SnapshotWriter};
