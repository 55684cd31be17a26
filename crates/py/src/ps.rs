//! Parameter servers, for Python: a shard on a socket, and a trainer's connections to all shards.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use elasticrec_ps::client::{Credentials, Dealt, Learned, Ticket};
use elasticrec_ps::{Boundary, Client, ClientError, Files, Identity, Server, Shard, ShardError, ShardSpec};
use elasticrec_sample::pool::{pool, pool_gradient};
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray3, PyReadwriteArray1, PyReadwriteArray3};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::Batch;
use crate::errors::{ConfigError, ElasticRecError, IntoPyErr, ModelError, UnavailableError, io_error};
use crate::table::{batch_cells, check_shape};

impl IntoPyErr for ShardError {
    fn into_py_err(self) -> PyErr {
        match self {
            ShardError::Rows(error) => error.into_py_err(),
            ShardError::Part(error) => error.into_py_err(),
            error @ ShardError::Other { .. } => ModelError::new_err(error.to_string()),
        }
    }
}

impl IntoPyErr for ClientError {
    fn into_py_err(self) -> PyErr {
        UnavailableError::new_err(self.to_string())
    }
}

/// A moment on the clock of leases.
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

/// A shard that answers on a socket, on threads of its own.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PsServer {
    inner: Server,
}

#[pymethods]
impl PsServer {
    /// `files` are the (rows, dense) part files of a checkpoint; `dense` are the values to start with if there is none.
    #[new]
    #[pyo3(signature = (spec_json, *, address, run, token, incarnation, epoch, threads, files, dense))]
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
        dense: Option<PyReadonlyArray1<'_, f32>>,
    ) -> PyResult<Self> {
        let spec: ShardSpec =
            serde_json::from_str(spec_json).map_err(|error| ConfigError::new_err(format!("shard: {error}")))?;
        let mut shard = Shard::new(spec, threads).map_err(IntoPyErr::into_py_err)?;
        let files: Vec<Files> = files.into_iter().map(|(rows, dense)| Files { rows, dense }).collect();
        if !files.is_empty() {
            py.detach(|| shard.load(&files)).map_err(IntoPyErr::into_py_err)?;
        }
        if let Some(dense) = dense {
            let dense = dense.as_slice().map_err(|_| PyValueError::new_err("dense: expected a contiguous array"))?;
            if dense.len() != shard.dense().len() {
                let message = format!("dense: expected {} values, got {}", shard.dense().len(), dense.len());
                return Err(PyValueError::new_err(message));
            }
            shard.start_dense(dense);
        }
        let identity = Identity { run: run.into(), token: token.into(), incarnation, epoch };
        let inner = Server::start(shard, identity, address).map_err(|error| io_error(&error, address.to_owned()))?;
        Ok(PsServer { inner })
    }

    /// Where it listens, as `host:port`.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// Why it cannot go on, or None.
    #[getter]
    fn failure(&self) -> Option<String> {
        self.inner.failure()
    }

    /// Lets it apply and acknowledge for so many seconds from the moment at which the lease was asked for.
    fn extend_lease(&self, asked: &Moment, seconds: f64) -> PyResult<()> {
        let length = Duration::try_from_secs_f64(seconds)
            .map_err(|error| PyValueError::new_err(format!("seconds: {error}, got {seconds}")))?;
        self.inner.extend_lease(asked.inner, length);
        Ok(())
    }

    /// Takes its lease away: nothing is applied from now on.
    fn end_lease(&self, py: Python<'_>) {
        py.detach(|| self.inner.end_lease());
    }

    /// Learns of the boundaries between passes, a JSON list of all so far.
    fn set_boundaries(&self, py: Python<'_>, boundaries_json: &str) -> PyResult<()> {
        let boundaries: Vec<Boundary> = serde_json::from_str(boundaries_json)
            .map_err(|error| PyValueError::new_err(format!("boundaries: {error}")))?;
        py.detach(|| self.inner.set_boundaries(boundaries));
        Ok(())
    }

    /// Rows, bytes, pushes and the records, as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = py.detach(|| self.inner.status());
        serde_json::to_string(&status).map_err(|error| ElasticRecError::new_err(error.to_string()))
    }

    /// The metric sums of this pass, and of the pass before; empty unless it has partition 0.
    fn sums<'py>(&self, py: Python<'py>) -> (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>) {
        let (now, before) = self.inner.sums();
        (PyArray1::from_vec(py, now), PyArray1::from_vec(py, before))
    }

    /// Samples applied to each of its partitions.
    fn samples(&self) -> Vec<u64> {
        self.inner.read(|shard| shard.samples().to_vec())
    }

    /// What it did so far, by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        use std::sync::atomic::Ordering::Relaxed;
        let counters = self.inner.counters();
        let found = PyDict::new(py);
        for (name, counter) in [
            ("pulls", &counters.pulls),
            ("pulled_signs", &counters.pulled_signs),
            ("pushes", &counters.pushes),
            ("pushed_signs", &counters.pushed_signs),
            ("refused", &counters.refused),
            ("malformed", &counters.malformed),
            ("pull_nanos", &counters.pull_nanos),
            ("push_nanos", &counters.push_nanos),
        ] {
            found.set_item(name, counter.load(Relaxed))?;
        }
        Ok(found)
    }

    /// Writes its part of a checkpoint; returns size and sha-256 of the rows' file and of the dense one.
    fn snapshot(&self, py: Python<'_>, rows: PathBuf, dense: PathBuf) -> PyResult<((u64, String), (u64, String))> {
        let written = py.detach(|| self.inner.snapshot(&Files { rows, dense }));
        let (rows, dense) = written.map_err(IntoPyErr::into_py_err)?;
        Ok(((rows.bytes, rows.sha256), (dense.bytes, dense.sha256)))
    }

    /// Stops answering; what is being answered ends first.
    fn stop(&mut self, py: Python<'_>) {
        py.detach(|| self.inner.stop());
    }
}

/// What the dense part files of a checkpoint hold beside rows: the dense vector, the optimizer's vectors, its steps, the
/// metric sums, and the samples applied to each partition.
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

/// A pull that was sent; its batch is pushed with it.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Pulling {
    dealt: Dealt,
    tickets: Vec<Ticket>,
}

/// A push that was sent.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Pushing {
    tickets: Vec<Ticket>,
}

/// A trainer's connections to all shards of a table.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PsClient {
    inner: Client,
    /// `[unique signs, width]`; kept to save the allocation.
    rows: Vec<f32>,
}

#[pymethods]
impl PsClient {
    /// Connects to the shards, in the order of their partitions.
    #[new]
    #[pyo3(signature = (addresses, *, run, token, partitions, timeout_s))]
    fn new(
        py: Python<'_>,
        addresses: Vec<String>,
        run: &str,
        token: &str,
        partitions: u32,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s: {error}, got {timeout_s}")))?;
        let credentials = Credentials { run: run.into(), token: token.into() };
        let inner = py.detach(|| Client::connect(&addresses, &credentials, partitions, timeout));
        Ok(PsClient { inner: inner.map_err(IntoPyErr::into_py_err)?, rows: Vec::new() })
    }

    /// Weights a row.
    #[getter]
    fn width(&self) -> usize {
        self.inner.width()
    }

    /// Dense values of all shards.
    #[getter]
    fn num_dense(&self) -> usize {
        self.inner.num_dense()
    }

    /// Incarnations of the shards.
    #[getter]
    fn incarnations(&self) -> Vec<u64> {
        self.inner.incarnations()
    }

    /// Asks for the rows of a batch, and for the dense values.
    #[pyo3(signature = (batch, *, dense))]
    fn pull(&self, py: Python<'_>, batch: &Batch, dense: bool) -> PyResult<Pulling> {
        let signs = &batch.parsed.unique.signs;
        let pulling = py.detach(|| {
            let mut dealt = Dealt::default();
            self.inner.deal(signs, &mut dealt);
            self.inner.pull(&dealt, dense).map(|tickets| Pulling { dealt, tickets })
        });
        pulling.map_err(IntoPyErr::into_py_err)
    }

    /// Waits for what was asked for: pooled rows into `out`, `[num_samples, num_cells, width]`, dense values into `dense`.
    /// Returns the pushes that each shard had applied.
    fn receive(
        &mut self,
        py: Python<'_>,
        pulling: &Pulling,
        batch: &Batch,
        mut out: PyReadwriteArray3<'_, f32>,
        dense: Option<PyReadwriteArray1<'_, f32>>,
    ) -> PyResult<Vec<u64>> {
        let out = out.as_slice_mut().map_err(|_| PyValueError::new_err("out: expected a contiguous array"))?;
        let mut dense = dense;
        let dense = match &mut dense {
            Some(dense) => {
                Some(dense.as_slice_mut().map_err(|_| PyValueError::new_err("dense: expected a contiguous array"))?)
            }
            None => None,
        };
        if let Some(dense) = &dense
            && dense.len() != self.inner.num_dense()
        {
            let message = format!("dense: expected {} values, got {}", self.inner.num_dense(), dense.len());
            return Err(PyValueError::new_err(message));
        }
        let Batch { parser, parsed, .. } = batch;
        let width = self.inner.width();
        check_shape("out", out.len(), batch_cells(parser, parsed), width)?;
        let applied = py.detach(|| {
            self.rows.resize(parsed.unique.signs.len() * width, 0.0);
            let applied = self.inner.receive(&pulling.tickets, &pulling.dealt, &mut self.rows, dense)?;
            pool(&parsed.batch, &parsed.unique, parser.layout(), &self.rows, width, out);
            Ok::<_, ClientError>(applied)
        });
        applied.map_err(IntoPyErr::into_py_err)
    }

    /// Sends the gradient of what `receive` wrote, times `scale`, and that of the dense values, under the batch's name.
    #[pyo3(signature = (pulling, batch, gradient, dense, *, scale, last, seen, sums))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &mut self,
        py: Python<'_>,
        pulling: &Pulling,
        batch: &Batch,
        gradient: PyReadonlyArray3<'_, f32>,
        dense: PyReadonlyArray1<'_, f32>,
        scale: f32,
        last: bool,
        seen: u32,
        sums: (PyReadonlyArray1<'_, u32>, PyReadonlyArray1<'_, f64>),
    ) -> PyResult<Pushing> {
        let contiguous = |what: &str| PyValueError::new_err(format!("{what}: expected a contiguous array"));
        let gradient = gradient.as_slice().map_err(|_| contiguous("gradient"))?;
        let dense = dense.as_slice().map_err(|_| contiguous("dense"))?;
        let sum_places = sums.0.as_slice().map_err(|_| contiguous("sums"))?;
        let sum_values = sums.1.as_slice().map_err(|_| contiguous("sums"))?;
        if sum_places.len() != sum_values.len() {
            return Err(PyValueError::new_err("sums: expected as many places as values"));
        }
        let Batch { parser, parsed, .. } = batch;
        let width = self.inner.width();
        check_shape("gradient", gradient.len(), batch_cells(parser, parsed), width)?;
        let num_samples = parsed.batch.num_samples() as u32;
        if dense.len() != if num_samples == 0 { 0 } else { self.inner.num_dense() } {
            let message = format!("dense: expected {} values, got {}", self.inner.num_dense(), dense.len());
            return Err(PyValueError::new_err(message));
        }
        let checksum = parsed.batch.checksum();
        let pushing = py.detach(|| {
            self.rows.clear();
            self.rows.resize(parsed.unique.signs.len() * width, 0.0);
            pool_gradient(&parsed.batch, &parsed.unique, parser.layout(), gradient, scale, &mut self.rows);
            let learned = Learned {
                unit: parsed.name.unit,
                batch: parsed.name.index,
                is_last: last,
                checksum,
                num_samples,
                seen,
                counts: &parsed.counts,
                gradients: &self.rows,
                dense,
                sum_places,
                sum_values,
            };
            self.inner.push(&pulling.dealt, &learned)
        });
        Ok(Pushing { tickets: pushing.map_err(IntoPyErr::into_py_err)? })
    }

    /// Waits until all shards have applied a push; returns whether all knew it before, and whether it was not finite.
    fn acknowledged(&self, py: Python<'_>, pushing: &Pushing) -> PyResult<(bool, bool)> {
        let pushed = py.detach(|| self.inner.acknowledged(&pushing.tickets)).map_err(IntoPyErr::into_py_err)?;
        Ok((pushed.iter().all(|one| one.was_known), pushed.iter().any(|one| one.non_finite)))
    }
}
