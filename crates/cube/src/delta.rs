//! Delta files: the changes from one version to the next. `docs/formats/cube.md` describes the bytes.

mod read;
mod write;

pub use read::DeltaFile;
pub(crate) use read::{Change, Run};
pub use write::{Changes, DeltaWriter};

const SIGN_BYTES: usize = size_of::<u64>();
const PARTITION_BYTES: usize = size_of::<u32>();
