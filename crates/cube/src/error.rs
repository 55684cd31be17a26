//! Errors of cube files.

use std::io;

use elasticrec_table::part::PartError;
use thiserror::Error;

/// The reason a cube cannot be written or opened; `name` is the path of a part file.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum CubeError {
    #[error(transparent)]
    Part(#[from] PartError),
    #[error("cube: expected at least 1 part file, got 0")]
    NoParts,
    #[error("{name}: meta: {what}")]
    Meta { name: String, what: String },
    #[error("{name}: row type `{got}` is not known, expected `f32`, `f16` or `int8`")]
    RowType { name: String, got: String },
    #[error("{name}: partition {partition}: {what}")]
    Block { name: String, partition: u32, what: String },
    #[error("{name}: expected the {what} of {first}, got other values: the files are not parts of one cube")]
    PartMismatch { name: String, first: String, what: &'static str },
    #[error("{name}: partition {partition} is also in {first}")]
    DuplicatePartition { name: String, first: String, partition: u32 },
    #[error("cube: expected partitions between 0 and {num_partitions}, got {start} to {end}")]
    Range { start: u32, end: u32, num_partitions: u32 },
    #[error("cube of {num_files} part files: {missing} of {expected} partitions are missing: {first}")]
    Missing { num_files: usize, expected: usize, missing: usize, first: String },
    #[error("partition {partition}: sign {sign} is repeated")]
    DuplicateSign { partition: u32, sign: u64 },
    #[error("partition {partition}: sign {sign} belongs to partition {home}")]
    ForeignSign { partition: u32, sign: u64, home: u32 },
    #[error("partition {partition}: sign {sign} is both changed and removed")]
    ChangedAndRemoved { partition: u32, sign: u64 },
    #[error("{name}: {what}")]
    Delta { name: String, what: String },
    #[error("{name}: expected the {what} of the version that it changes, got other values")]
    DeltaMismatch { name: String, what: &'static str },
    #[error("delta: expected fewer than 2^32 changes at a time, got {got}")]
    TooManyChanges { got: usize },
    #[error("cube: cannot allocate {bytes} bytes of memory: {source}")]
    Memory { bytes: usize, source: io::Error },
    #[error("partition {partition}: expected fewer than 2^32 rows, got {got}")]
    TooManyRows { partition: u32, got: usize },
}

/// Version numbers for a message: `3, 7`, or `none`.
pub(crate) fn list(versions: &[u64]) -> String {
    match versions {
        [] => "none".into(),
        some => some.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}
