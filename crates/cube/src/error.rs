//! What can be wrong with a cube, in the words a user reads.

use elasticrec_table::part::PartError;
use thiserror::Error;

/// Why a cube cannot be written or opened; `name` is the path of a part file.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum CubeError {
    #[error(transparent)]
    Part(#[from] PartError),
    #[error("cube: expected at least 1 part file, got 0")]
    NoParts,
    #[error("{name}: meta: {what}")]
    Meta { name: String, what: String },
    #[error("{name}: row type `{got}` is not known, expected `f32`")]
    RowType { name: String, got: String },
    #[error("{name}: partition {partition}: {what}")]
    Block { name: String, partition: u32, what: String },
    #[error("{name}: {what} than in {first}: they are not parts of one cube")]
    Differs { name: String, first: String, what: &'static str },
    #[error("{name}: partition {partition} is also in {first}")]
    Doubled { name: String, first: String, partition: u32 },
    #[error("cube of {num_files} part files: {missing} of {num_partitions} partitions missing: {first}")]
    Missing { num_files: usize, num_partitions: u32, missing: u32, first: String },
    #[error("partition {partition}: sign {sign} comes twice")]
    DuplicateSign { partition: u32, sign: u64 },
    #[error("partition {partition}: sign {sign} belongs to partition {home}")]
    ForeignSign { partition: u32, sign: u64, home: u32 },
    #[error("partition {partition}: expected fewer than 2^32 rows, got {got}")]
    TooManyRows { partition: u32, got: usize },
}
