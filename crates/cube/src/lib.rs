//! Cubes: the read-only dictionary from sign to row of a published version, and the servers of the online store.
//!
//! A table writes one with [`CubeWriter`], a partition at a time, and what changed since with [`DeltaWriter`]
//! ([`publish`] knows which it is to be); serving opens the parts of a version with
//! [`Cube`] and looks signs up in batches. The bytes are described in `docs/formats/cube.md`. A [`Server`] answers lookups of
//! the versions in its [`VersionSet`] over sockets, and a [`Client`] asks the servers of all partitions.

mod block;
pub mod client;
mod compare;
mod cube;
mod delta;
mod error;
mod filter;
mod fuzz;
mod index;
mod memory;
mod meta;
pub mod publish;
mod row;
mod search;
mod segment;
pub mod server;
mod sink;
pub mod versions;
mod view;
mod write;

pub use client::{Client, ClientError};
pub use cube::Cube;
pub use delta::{Changes, DeltaFile, DeltaWriter};
pub use elasticrec_table::part::Written;
pub use error::CubeError;
#[doc(hidden)]
pub use fuzz::{fuzz_delta, fuzz_open, repair_checksums};
pub use meta::Column;
pub use row::{RowCodec, RowType};
pub use server::Server;
pub use versions::{VersionError, VersionSet};
pub use view::View;
pub use write::{CubeWriter, write_table};
