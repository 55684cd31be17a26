//! `elasticrec._core`: the seam between Python and Rust, and the only crate that knows Python.

mod batch;
mod demo;
mod errors;
mod serve;
mod table;

use pyo3::prelude::*;

/// The module; `python/elasticrec/_core.pyi` is its description.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::batch::{Batch, BatchReader, Parser, cut_units, shuffle_units};
    #[pymodule_export]
    use crate::demo::write_demo;
    #[pymodule_export]
    use crate::serve::{Predictor, Server, engine_rate, load_test};
    #[pymodule_export]
    use crate::table::{Table, TableBench, read_cube};
}
