//! Parameter servers: what a shard holds, how it applies every push once, and how it leaves memory and comes back.
//!
//! `record` knows which batches a partition has; `dense` is its slice of the network; `shard` holds the partitions of one
//! server and applies pushes and pass boundaries to those that lack them; `snapshot` writes and loads them. `server` answers
//! on a socket, and `client` is the other end of it: a trainer's connections to all shards.

pub mod client;
pub mod dense;
pub mod record;
pub mod server;
pub mod shard;
pub mod snapshot;

pub use client::{Client, ClientError};
pub use dense::{Dense, DenseOptimizer};
pub use record::{Known, Name, Record};
pub use server::{Identity, Server};
pub use shard::{Applied, Boundary, Shard, ShardSpec, Status};
pub use snapshot::{Files, PartitionCopy, ShardError, SnapshotWriter};
