//! Python bindings of a parameter server.

use std::path::PathBuf;
use std::time::Instant;

use elasticrec_ps::{Boundary, Identity, Server, Shard, ShardSpec, SnapshotFiles};
use numpy::{PyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::PsTls;
use crate::cube::{figures_of, publish_request};
use crate::errors::{ConfigError, ElasticRecError, IntoPyErr, not_contiguous};
use crate::net::{cannot_listen, counts_of, duration};

/// Sets the initial dense values of a shard, with or without the optimizer's state vectors.
fn start(shard: &mut Shard, dense: &PyReadonlyArray2<'_, f32>, steps: u64) -> PyResult<()> {
    let flat = dense.as_slice().map_err(|_| not_contiguous("dense"))?;
    let (all, length) = (1 + shard.dense_state().states().len(), shard.dense().len());
    let &[num_vectors, num_values] = dense.shape() else { unreachable!("the array has two dimensions") };
    if num_values != length || (num_vectors != 1 && num_vectors != all) {
        let message = format!("dense: expected 1 or {all} vectors of {length} values, got {:?}", dense.shape());
        return Err(PyValueError::new_err(message));
    }
    let (values, states) = flat.split_at(length);
    let states: Vec<&[f32]> = (1..num_vectors).map(|at| &states[(at - 1) * length..at * length]).collect();
    shard.start_dense(values, &states, steps);
    Ok(())
}

/// A moment on the monotonic clock of leases.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct Moment {
    inner: Instant,
}

#[pymethods]
impl Moment {
    /// Now.
    #[new]
    fn new() -> Self {
        Moment { inner: Instant::now() }
    }
}

/// A shard that answers on a socket, on its own threads.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PsServer {
    inner: Server,
}

#[pymethods]
impl PsServer {
    /// Load the (rows, dense) part files of a checkpoint and listen. Without a checkpoint, the shard starts with `dense`,
    /// the values and optionally the optimizer's state vectors after `steps`, and with `rows`, part files of another table.
    #[new]
    #[pyo3(signature = (
        spec_json, *, address, run, token, incarnation, epoch, threads, files, dense, steps = 0, rows = None, tls = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        spec_json: &str,
        address: &str,
        run: &str,
        token: &str,
        incarnation: u64,
        epoch: u64,
        threads: usize,
        files: Vec<(PathBuf, PathBuf)>,
        dense: Option<PyReadonlyArray2<'_, f32>>,
        steps: u64,
        rows: Option<Vec<PathBuf>>,
        tls: Option<&PsTls>,
    ) -> PyResult<Self> {
        let spec: ShardSpec =
            serde_json::from_str(spec_json).map_err(|error| ConfigError::new_err(format!("shard: {error}")))?;
        let mut shard = Shard::new(spec, threads).map_err(IntoPyErr::into_py_err)?;
        let files: Vec<SnapshotFiles> = files.into_iter().map(|(rows, dense)| SnapshotFiles { rows, dense }).collect();
        if !files.is_empty() {
            py.detach(|| shard.load(&files)).map_err(IntoPyErr::into_py_err)?;
        }
        if let Some(dense) = dense {
            start(&mut shard, &dense, steps)?;
        }
        if let Some(rows) = rows {
            py.detach(|| shard.start_rows(&rows)).map_err(IntoPyErr::into_py_err)?;
        }
        let identity = Identity { run: run.into(), token: token.into(), incarnation, epoch };
        let tls = tls.and_then(|tls| tls.server.clone());
        let inner = Server::start(shard, identity, address, tls);
        Ok(PsServer { inner: inner.map_err(|error| cannot_listen("ps", address, &error))? })
    }

    /// The address that the server listens at, `host:port`.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// The reason the server cannot continue, or None.
    #[getter]
    fn failure(&self) -> Option<String> {
        self.inner.failure()
    }

    /// Extend the lease to `seconds` after the moment at which it was requested.
    fn extend_lease(&self, requested: &Moment, seconds: f64) -> PyResult<()> {
        self.inner.extend_lease(requested.inner, duration("seconds", seconds)?);
        Ok(())
    }

    /// End the lease: nothing is applied after this returns.
    fn end_lease(&self, py: Python<'_>) {
        py.detach(|| self.inner.end_lease());
    }

    /// Set the boundaries between passes, given as a JSON list of all known boundaries.
    fn set_boundaries(&self, py: Python<'_>, boundaries_json: &str) -> PyResult<()> {
        let boundaries: Vec<Boundary> = serde_json::from_str(boundaries_json)
            .map_err(|error| PyValueError::new_err(format!("boundaries: {error}")))?;
        py.detach(|| self.inner.set_boundaries(boundaries));
        Ok(())
    }

    /// Limit the bytes of rows and dense values; a nearly full shard drops new signs.
    fn limit_memory(&self, py: Python<'_>, num_bytes: u64) -> PyResult<()> {
        py.detach(|| self.inner.limit_memory(num_bytes)).map_err(ConfigError::new_err)
    }

    /// Delay every push from now on; 0 for no delay.
    fn slow_down(&self, seconds: f64) -> PyResult<()> {
        self.inner.slow_down(duration("seconds", seconds)?);
        Ok(())
    }

    /// Mark units as complete although their data is lost.
    fn skip_units(&self, py: Python<'_>, units: Vec<u64>) {
        py.detach(|| self.inner.skip_units(&units));
    }

    /// Rows, bytes, pushes and the records, as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = py.detach(|| self.inner.status());
        serde_json::to_string(&status).map_err(|error| ElasticRecError::new_err(error.to_string()))
    }

    /// Wait until the watermark differs from `watermark`, at most `seconds`; return the watermark.
    fn wait_for_units(&self, py: Python<'_>, watermark: u64, seconds: f64) -> PyResult<u64> {
        let timeout = duration("seconds", seconds)?;
        Ok(py.detach(|| {
            self.inner.wait_for_units(watermark, timeout);
            self.inner.watermark()
        }))
    }

    /// The metric sums of this pass and of the previous pass; empty unless the shard owns partition 0.
    fn sums<'py>(&self, py: Python<'py>) -> (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>) {
        let (now, before) = self.inner.sums();
        (PyArray1::from_vec(py, now), PyArray1::from_vec(py, before))
    }

    /// Number of samples applied to each partition of the shard.
    fn samples(&self) -> Vec<u64> {
        self.inner.read(|shard| shard.samples().to_vec())
    }

    /// Counters since the start, by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counters, connections) = (self.inner.counters(), self.inner.connections());
        counts_of(
            py,
            &[
                ("pulls", &counters.pulls),
                ("pulled_signs", &counters.pulled_signs),
                ("pushes", &counters.pushes),
                ("pushed_signs", &counters.pushed_signs),
                ("steps", &counters.steps),
                ("refused", &connections.refused),
                ("malformed", &connections.malformed),
                ("pull_nanos", &counters.pull_nanos),
                ("push_nanos", &counters.push_nanos),
                ("slowed", &counters.slowed),
            ],
        )
    }

    /// Write the shard's part of a checkpoint; return size and SHA-256 of the rows file and of the dense file.
    fn snapshot(&self, py: Python<'_>, rows: PathBuf, dense: PathBuf) -> PyResult<((u64, String), (u64, String))> {
        let written = py.detach(|| self.inner.snapshot(&SnapshotFiles { rows, dense }));
        let (rows, dense) = written.map_err(IntoPyErr::into_py_err)?;
        Ok(((rows.bytes, rows.sha256), (dense.bytes, dense.sha256)))
    }

    /// Write the shard's part of a version: all rows of a base, or the changes since the publish `committed`. Return
    /// figures, with size and SHA-256 of the file, and the dense values.
    #[pyo3(signature = (name, *, committed, is_base, row_type, path))]
    fn publish<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        committed: Option<&str>,
        is_base: bool,
        row_type: &str,
        path: PathBuf,
    ) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyArray1<f32>>)> {
        let request = publish_request(name, committed, is_base, row_type, path)?;
        let published = py.detach(|| self.inner.publish(&request)).map_err(IntoPyErr::into_py_err)?;
        let figures = figures_of(py, &published.rows)?;
        figures.set_item("samples", published.num_samples)?;
        Ok((figures, PyArray1::from_vec(py, published.dense)))
    }

    /// Stop the server after it has answered the requests that have arrived.
    fn stop(&mut self, py: Python<'_>) {
        py.detach(|| self.inner.stop());
    }
}

/// Read the dense part files of a checkpoint: the dense vector and the optimizer's state vectors, the number of steps, the
/// metric sums, and the number of samples applied to each partition.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "the shape of a Python tuple")]
pub(crate) fn read_dense_parts<'py>(
    py: Python<'py>,
    spec_json: &str,
    paths: Vec<PathBuf>,
) -> PyResult<(Vec<Bound<'py, PyArray1<f32>>>, u64, (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>), Vec<u64>)> {
    let spec: ShardSpec =
        serde_json::from_str(spec_json).map_err(|error| ConfigError::new_err(format!("shard: {error}")))?;
    let mut shard = Shard::new(spec, 1).map_err(IntoPyErr::into_py_err)?;
    py.detach(|| shard.load_without_rows(&paths)).map_err(IntoPyErr::into_py_err)?;
    let dense = shard.dense_state();
    let mut vectors = vec![PyArray1::from_slice(py, dense.values())];
    vectors.extend(dense.states().iter().map(|state| PyArray1::from_slice(py, state)));
    let (now, before) = shard.sums();
    let sums = (PyArray1::from_slice(py, now), PyArray1::from_slice(py, before));
    Ok((vectors, dense.steps(0), sums, shard.samples().to_vec()))
}
