//! Click logs to batches: the part of the data path that training, evaluation and serving share.
//!
//! | module | what it does |
//! |---|---|
//! | `unit` | splits files into units |
//! | `lines`, `compressed` | load a unit and find its records |
//! | `records` | groups the records of a unit into batches |
//! | `features` | declares slots, dense columns and labels |
//! | `parser` | parses a record into a sample; one module per format: `slots`, `paddlerec`, `criteo`, `csv`, `columns` |
//! | `hash` | signs of categorical values; permutations |
//! | `batch`, `unique` | hold the samples; deduplicate their signs |
//! | `pool` | sums the rows of a slot |
//! | `reader` | does all of this ahead of the trainer, in threads |
//! | `demo` | generates demo data |

pub mod batch;
pub mod columns;
pub mod compressed;
mod criteo;
mod csv;
pub mod demo;
pub mod features;
pub mod hash;
pub mod lines;
mod paddlerec;
pub mod parser;
pub mod pool;
pub mod reader;
pub mod records;
mod slots;
pub mod unique;
pub mod unit;

pub use batch::{Batch, BatchBuilder};
pub use features::{Features, FeaturesError, Format, Normalize, Pooling};
pub use parser::{LabelMode, Parser, RecordError};
pub use pool::Layout;
pub use reader::{BatchName, BatchReader, ParsedBatch, ReadError, ReaderOptions};
pub use records::{RecordBatch, RecordBatches, RecordOptions, Selection};
pub use unique::Unique;
pub use unit::{Stamp, Unit};
