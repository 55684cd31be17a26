//! Cube files: the read-only dictionary of sign to row that a published version is served from.
//!
//! A table writes one with [`CubeWriter`], a partition at a time; serving opens the parts of a version with
//! [`Cube`] and looks signs up in batches. The bytes are described in `docs/formats/cube.md`.

mod cube;
mod error;
mod fuzz;
mod index;
mod meta;
mod publish;
mod write;

pub use cube::Cube;
pub use elasticrec_table::part::Written;
pub use error::CubeError;
#[doc(hidden)]
pub use fuzz::{fuzz_open, repair_checksums};
pub use meta::Column;
pub use publish::write_table;
pub use write::CubeWriter;
