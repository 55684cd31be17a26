//! Sparse tables: what the trainer learns, row by row.
//!
//! `table` pulls rows by sign and `push` steps them (or adds a `delta` that was stepped elsewhere), both through a `pipeline` that asks memory ahead. `rows` keeps
//! those of one partition in blocks of the `arena` and finds them through its `index`; `optimizer` steps them,
//! `upkeep` decays and evicts, `limit` keeps it small, and `snapshot` writes them into part files (`part`) and reads them back.

mod arena;
mod delta;
mod index;
mod limit;
pub mod optimizer;
pub mod part;
pub mod partition;
mod pipeline;
pub mod prefetch;
mod push;
mod rows;
pub mod snapshot;
pub mod spec;
pub mod table;
mod threads;
mod upkeep;

pub use arena::{GrowError, map_huge_pages};
pub use delta::{FullRows, RowTail};
pub use limit::{Cut, Overflow};
pub use optimizer::Optimizer;
pub use push::{Push, Pushed};
pub use rows::{Changes, Counters, MAX_SEEN};
pub use snapshot::{CopiedRows, SnapshotError};
pub use spec::{Column, SpecError, TableSpec};
pub use table::{Handles, Row, SortedRows, Table};
pub use upkeep::Eviction;
