//! Python bindings of the table: pulls pooled rows into the memory of a tensor and pushes its gradient.

use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_cube::publish::{PublishState, publish_table};
use elasticrec_cube::{Cube, View, write_table};
use elasticrec_sample::pool::{pool, pool_gradient};
use elasticrec_table::{Eviction, Push, TableSpec};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray3, PyReadwriteArray3};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::cube::{figures_of, publish_request, row_type_of};
use crate::errors::{IntoPyErr, not_contiguous};

/// A sparse table in this process.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Table {
    pub(crate) inner: elasticrec_table::Table,
    /// `[unique signs, width]`: rows of a pull or gradients of a push; kept to save the allocation.
    rows: Vec<f32>,
    /// For each partition, which of its changes are part of a version already.
    publish_states: Vec<PublishState>,
}

fn new_publish_states(table: &elasticrec_table::Table) -> Vec<PublishState> {
    (0..table.spec().partitions).map(|_| PublishState::default()).collect()
}

#[pymethods]
impl Table {
    /// Large batches and work on the whole table use up to `threads` threads; the rows do not depend on their number.
    #[new]
    #[pyo3(signature = (spec_json, *, threads = 1))]
    fn new(spec_json: &str, threads: usize) -> PyResult<Self> {
        let spec = TableSpec::from_json(spec_json).map_err(IntoPyErr::into_py_err)?;
        let inner = elasticrec_table::Table::new(spec).map_err(IntoPyErr::into_py_err)?;
        let publish_states = new_publish_states(&inner);
        Ok(Table { inner: inner.with_threads(threads), rows: Vec::new(), publish_states })
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Allocated bytes, including spare capacity.
    #[getter]
    fn num_bytes(&self) -> usize {
        self.inner.bytes()
    }

    /// Weights per row.
    #[getter]
    fn width(&self) -> usize {
        self.inner.width()
    }

    /// Write the pooled rows of a batch into `out`, `[num_samples, num_cells, width]`; creates no rows.
    fn pull(&mut self, py: Python<'_>, batch: &mut Batch, mut out: PyReadwriteArray3<'_, f32>) -> PyResult<()> {
        let out = out.as_slice_mut().map_err(|_| not_contiguous("out"))?;
        let Batch { parser, parsed, handles, .. } = batch;
        check_len("out", out.len(), batch_cells(parser, parsed) * self.inner.width())?;
        py.detach(|| {
            self.rows.resize(parsed.unique.signs.len() * self.inner.width(), 0.0);
            self.inner.pull(&parsed.unique.signs, &mut self.rows, handles);
            pool(&parsed.batch, &parsed.unique, parser.layout(), &self.rows, self.inner.width(), out);
        });
        Ok(())
    }

    /// Apply `scale` times the gradient of the pooled rows; return (rows created, whether the gradient was not finite).
    fn push(
        &mut self,
        py: Python<'_>,
        batch: &Batch,
        gradient: PyReadonlyArray3<'_, f32>,
        scale: f32,
        seen: u32,
    ) -> PyResult<(usize, bool)> {
        let gradient = gradient.as_slice().map_err(|_| not_contiguous("gradient"))?;
        let Batch { parser, parsed, handles, .. } = batch;
        check_len("gradient", gradient.len(), batch_cells(parser, parsed) * self.inner.width())?;
        if handles.len() != parsed.unique.signs.len() {
            return Err(PyValueError::new_err("push: expected a batch that was pulled before"));
        }
        let pushed = py.detach(|| {
            self.rows.clear();
            self.rows.resize(parsed.unique.signs.len() * self.inner.width(), 0.0);
            pool_gradient(&parsed.batch, &parsed.unique, parser.layout(), gradient, scale, &mut self.rows);
            self.inner.push(Push {
                signs: &parsed.unique.signs,
                handles: Some(handles),
                gradients: &self.rows,
                counts: &parsed.counts,
                seen,
                is_increment: false,
            })
        });
        let pushed = pushed.map_err(IntoPyErr::into_py_err)?;
        Ok((pushed.created, pushed.non_finite))
    }

    /// Multiply show and click of every row by `rate`; `step` is the seed of the rounding.
    fn decay(&mut self, py: Python<'_>, rate: f64, step: u32) -> PyResult<()> {
        if !(0.0..=1.0).contains(&rate) {
            return Err(PyValueError::new_err(format!("decay: expected a rate from 0 to 1, got {rate}")));
        }
        py.detach(|| self.inner.decay(rate, step));
        Ok(())
    }

    /// Reset the data time: every row was last seen at 0.
    fn restart_time(&mut self, py: Python<'_>) {
        py.detach(|| self.inner.restart_time());
    }

    /// Evict rows with a score below `min_score` or last seen more than `max_age` before `now`; return their number.
    #[pyo3(signature = (*, nonclk_coeff, click_coeff, min_score, now, max_age))]
    fn evict(
        &mut self,
        py: Python<'_>,
        nonclk_coeff: f64,
        click_coeff: f64,
        min_score: Option<f64>,
        now: u32,
        max_age: Option<u32>,
    ) -> usize {
        let eviction = Eviction { nonclk_coeff, click_coeff, min_score, now, max_age };
        py.detach(|| self.inner.evict(&eviction))
    }

    /// Return (show, click, seen, weights, optimizer state) of a sign, or None.
    #[expect(clippy::type_complexity, reason = "the shape of a Python tuple")]
    fn get(&self, sign: u64) -> Option<(u32, u32, u32, Vec<f32>, Vec<f32>)> {
        let row = self.inner.get(sign)?;
        Some((row.counters.show, row.counters.click, row.counters.seen, row.weights, row.state))
    }

    /// Write a part file; return its size and sha-256.
    fn snapshot(&self, py: Python<'_>, path: PathBuf) -> PyResult<(u64, String)> {
        let written = py.detach(|| self.inner.snapshot(&path)).map_err(IntoPyErr::into_py_err)?;
        Ok((written.bytes, written.sha256))
    }

    /// Load the part files of a snapshot into this empty table.
    fn load(&mut self, py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<()> {
        if !self.inner.is_empty() {
            return Err(PyValueError::new_err("load: expected an empty table"));
        }
        // The table does not know which loaded rows are part of a version, so the next publish writes all rows.
        self.publish_states = new_publish_states(&self.inner);
        py.detach(|| self.inner.load(&paths)).map_err(IntoPyErr::into_py_err)
    }

    /// Write the weights as a cube part file; return its size and sha-256.
    #[pyo3(signature = (path, *, row_type = "f32"))]
    fn write_cube(&self, py: Python<'_>, path: PathBuf, row_type: &str) -> PyResult<(u64, String)> {
        let row_type = row_type_of(row_type)?;
        let written = py.detach(|| write_table(&self.inner, path, row_type)).map_err(IntoPyErr::into_py_err)?;
        Ok((written.bytes, written.sha256))
    }

    /// Write the rows of a version: all rows of a base, or the rows that changed since the publish `committed`. The table
    /// records its changes from the first call on. Return figures, with size and sha-256 of the file.
    #[pyo3(signature = (name, *, committed, is_base, row_type, path))]
    fn publish<'py>(
        &mut self,
        py: Python<'py>,
        name: &str,
        committed: Option<&str>,
        is_base: bool,
        row_type: &str,
        path: PathBuf,
    ) -> PyResult<Bound<'py, PyDict>> {
        let request = publish_request(name, committed, is_base, row_type, path)?;
        let Table { inner, publish_states, .. } = self;
        let published = py.detach(|| publish_table(inner, publish_states, &request)).map_err(IntoPyErr::into_py_err)?;
        figures_of(py, &published)
    }
}

/// Number of cells of a batch.
pub(crate) fn batch_cells(parser: &elasticrec_sample::Parser, parsed: &elasticrec_sample::ParsedBatch) -> usize {
    parsed.batch.num_samples() * parser.layout().num_cells()
}

pub(crate) fn check_len(what: &str, len: usize, expected: usize) -> PyResult<()> {
    if len == expected {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{what}: expected {expected} values, got {len}")))
}

/// Return the rows of signs in a cube: (rows `[signs, width]`, number of signs that have a row).
#[pyfunction]
pub(crate) fn read_cube<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    signs: Vec<u64>,
) -> PyResult<(Bound<'py, PyArray2<f32>>, usize)> {
    let (rows, found, width) = py
        .detach(|| {
            let cube = View::of_base(Arc::new(Cube::open(&paths)?));
            let mut rows = vec![0.0; signs.len() * cube.width()];
            let found = cube.lookup(&signs, &mut rows);
            Ok((rows, found, cube.width()))
        })
        .map_err(|error: elasticrec_cube::CubeError| error.into_py_err())?;
    Ok((PyArray1::from_vec(py, rows).reshape([signs.len(), width])?, found))
}
