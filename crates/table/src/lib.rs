//! Sparse tables: what the trainer learns, row by row.
//!
//! `table` pulls and pushes rows by sign, `rows` keeps those of one partition, `optimizer` steps them, and
//! `snapshot` writes them into part files (`part`) and reads them back.

pub mod optimizer;
pub mod part;
pub mod partition;
pub mod prefetch;
mod rows;
pub mod snapshot;
pub mod spec;
pub mod table;

pub use optimizer::Optimizer;
pub use rows::Counters;
pub use snapshot::SnapshotError;
pub use spec::{Column, SpecError, TableSpec};
pub use table::{Handle, Push, Pushed, Row, Table};
