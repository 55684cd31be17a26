//! Log lines to batches: the part of the data path that training, evaluation and serving share.
//!
//! `unit` cuts files into units, `lines` a unit into lines (`compressed` where it is), `records` lines into batches, `parser` turns a line into
//! slots, signs, dense values and labels, `batch` holds the result, `unique` names each sign once, `pool` adds the rows
//! of a slot up, and `reader` runs all of it ahead of the trainer.

pub mod batch;
pub mod columns;
pub mod compressed;
mod criteo;
pub mod csv;
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
