//! Cubes: the read-only dictionary from sign to row of a published version, and the servers of the online store.
//!
//! [`publish`] writes the rows of a table: all rows of a base with [`CubeWriter`], or the changes since an earlier version
//! with [`DeltaWriter`]. [`Cube`] opens the part files of a base, and [`View`] adds the changes of deltas to it and looks signs
//! up in batches. `docs/formats/cube.md` describes the bytes. A [`Server`] answers lookups in the versions of its
//! [`VersionSet`] over sockets, and a [`Client`] sends lookups to the servers of all partitions.

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
pub use elasticrec_table::part::FileInfo;
pub use error::CubeError;
#[doc(hidden)]
pub use fuzz::{fuzz_delta, fuzz_open, repair_checksums};
pub use meta::Column;
pub use row::{RowCodec, RowType};
pub use server::Server;
pub use sink::presence_of;
pub use versions::{VersionError, VersionSet};
pub use view::View;
pub use write::{CubeWriter, write_table};
