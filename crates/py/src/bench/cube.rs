//! Building, opening and looking up a cube in one process.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::cube::row_type_of;
use crate::errors::IntoPyErr;

/// A cube of many rows of 1 + 9 columns, for measurements.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct CubeBench {
    inner: elasticrec_bench::cube::CubeBench,
}

#[pymethods]
impl CubeBench {
    /// Write a cube of `num_rows` rows into `directory` and load it.
    #[new]
    #[pyo3(signature = (directory, num_rows, *, row_type = "f32"))]
    fn new(py: Python<'_>, directory: PathBuf, num_rows: u64, row_type: &str) -> PyResult<Self> {
        let row_type = row_type_of(row_type)?;
        let inner = py.detach(|| elasticrec_bench::cube::CubeBench::new(&directory, num_rows, row_type));
        Ok(CubeBench { inner: inner.map_err(IntoPyErr::into_py_err)? })
    }

    /// Seconds to write the file, checksums and sync included.
    #[getter]
    fn build_s(&self) -> f64 {
        self.inner.build_s
    }

    /// Seconds to load and check it.
    #[getter]
    fn open_s(&self) -> f64 {
        self.inner.open_s
    }

    #[getter]
    fn file_bytes(&self) -> u64 {
        self.inner.file_bytes
    }

    #[getter]
    fn row_bytes(&self) -> usize {
        self.inner.view().row_bytes()
    }

    /// Publish a delta; return the seconds to write, open and apply it, and its bytes.
    fn change(&mut self, py: Python<'_>, num_changed: usize) -> PyResult<(f64, f64, f64, u64)> {
        let cost = py.detach(|| self.inner.change(num_changed)).map_err(IntoPyErr::into_py_err)?;
        Ok((cost.write_s, cost.open_s, cost.apply_s, cost.file_bytes))
    }

    /// Return the median seconds per key of (lookup, its probe) over `num_batches` of 1000 keys each.
    fn measure(&mut self, py: Python<'_>, num_batches: usize) -> (f64, f64) {
        py.detach(|| self.inner.measure(num_batches.max(1))).into()
    }
}
