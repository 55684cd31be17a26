//! Pulls and pushes of a full table.

use elasticrec_table::TableSpec;
use pyo3::prelude::*;

use crate::errors::IntoPyErr;

/// A table full of rows, for measurements.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct TableBench {
    inner: elasticrec_bench::table::TableBench,
}

#[pymethods]
impl TableBench {
    #[new]
    fn new(py: Python<'_>, spec_json: &str, num_rows: u64) -> PyResult<Self> {
        let spec = TableSpec::from_json(spec_json).map_err(IntoPyErr::into_py_err)?;
        let table = elasticrec_table::Table::new(spec).map_err(IntoPyErr::into_py_err)?;
        let inner = py.detach(|| elasticrec_bench::table::TableBench::new(table, num_rows));
        Ok(TableBench { inner: inner.map_err(IntoPyErr::into_py_err)? })
    }

    /// Bytes of a row.
    #[getter]
    fn row_bytes(&self) -> usize {
        self.inner.table().row_bytes()
    }

    /// Return the median seconds per key of (pull, its probe, push, its probe) over `num_batches` of each.
    fn measure(&mut self, py: Python<'_>, num_batches: usize) -> PyResult<(f64, f64, f64, f64)> {
        let measured = py.detach(|| self.inner.measure(num_batches.max(1)));
        let [pull, pull_probe, push, push_probe] = measured.map_err(IntoPyErr::into_py_err)?;
        Ok((pull, pull_probe, push, push_probe))
    }

    /// Take the changed rows; return (their number, seconds). The table records its changes from the first call on.
    fn take_changes(&mut self, py: Python<'_>) -> (usize, f64) {
        py.detach(|| self.inner.take_changes())
    }
}
