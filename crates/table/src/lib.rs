//! Sparse tables: a map from signs to rows of weights, counters and optimizer state.
//!
//! | module | what it does |
//! |---|---|
//! | `table`, `push` | read the rows of a batch; apply its gradients |
//! | `pipeline`, `prefetch` | order the work on a batch so that cache misses overlap |
//! | `rows`, `index`, `arena` | the rows of one partition, the index that finds them, the memory they lie in |
//! | `optimizer`, `spec` | the update of a row; the declaration of a table |
//! | `upkeep`, `limit` | decay and eviction between epochs; a limit of rows per partition |
//! | `geo` | whole rows for trainers of strategy `geo`, and the increments they send back |
//! | `snapshot`, `part` | rows to part files and back; the container of snapshots and cubes |

mod arena;
mod geo;
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

pub use arena::{GrowError, HUGE_PAGE_BYTES, map_huge_pages};
pub use geo::{FullRows, RowTail};
pub use limit::{Overflow, Trim};
pub use optimizer::Optimizer;
pub use push::{Push, PushResult};
pub use rows::{Changes, Counters, MAX_SEEN};
pub use snapshot::{CopiedRows, SnapshotError};
pub use spec::{Column, SpecError, TableSpec};
pub use table::{Handles, Row, SortedRows, Table};
pub use upkeep::Eviction;
