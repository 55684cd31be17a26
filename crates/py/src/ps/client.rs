//! Python bindings of a trainer's connections to all shards.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use elasticrec_ps::client::{BatchUpdate, Credentials, PullOptions, ShardSplit, Ticket};
use elasticrec_ps::{Client, ClientError, Closer, Group, PushHeader};
use elasticrec_sample::pool::{pool, pool_gradient};
use elasticrec_wire::lock;
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyReadwriteArray1, PyReadwriteArray3};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::PsTls;
use crate::batch::Batch;
use crate::errors::{IntoPyErr, not_contiguous};
use crate::groups::{Sums, sums_of};
use crate::net::duration;
use crate::table::{batch_cells, check_len};

/// A pull in flight; also needed to push the batch.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PullTicket {
    split: ShardSplit,
    wants_dense: bool,
    tickets: Vec<Ticket>,
    /// Number of pushes that each shard had applied when it answered; empty before the answer.
    applied: Mutex<Vec<u64>>,
}

/// A push in flight.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PushTicket {
    pub(crate) tickets: Vec<Ticket>,
    /// `applied` of the pull whose rows the batch was trained on; empty if unknown.
    pub(crate) pulled_at: Vec<u64>,
}

/// Staleness of the pushes of a `PsClient`; may be read while another thread uses the client.
#[pyclass(frozen, module = "elasticrec._core")]
#[derive(Default)]
pub(crate) struct Staleness {
    pushes: AtomicU64,
    sum: AtomicU64,
    most: AtomicU64,
}

impl Staleness {
    /// Counts a push. Its staleness is the number of other pushes between its pull and itself, on the worst shard.
    fn count(&self, pulled_at: &[u64], applied: impl Iterator<Item = u64>) {
        if pulled_at.is_empty() {
            return;
        }
        let between = |(applied, pulled_at): (u64, &u64)| applied.saturating_sub(pulled_at + 1);
        let most = applied.zip(pulled_at).map(between).max().unwrap_or(0);
        self.pushes.fetch_add(1, Relaxed);
        self.sum.fetch_add(most, Relaxed);
        self.most.fetch_max(most, Relaxed);
    }
}

#[pymethods]
impl Staleness {
    /// Number of acknowledged pushes whose pull is known.
    #[getter]
    fn pushes(&self) -> u64 {
        self.pushes.load(Relaxed)
    }

    /// Number of pushes applied between a batch's pull and its push, summed over the batches.
    #[getter]
    fn sum(&self) -> u64 {
        self.sum.load(Relaxed)
    }

    /// The same number for the worst batch.
    #[getter]
    fn most(&self) -> u64 {
        self.most.load(Relaxed)
    }
}

/// Ends the connections of a `PsClient` while another thread waits on them.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct PsCloser {
    inner: Closer,
}

#[pymethods]
impl PsCloser {
    /// End all connections; threads that wait on them raise `UnavailableError`.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// A trainer's connections to all shards of a table.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct PsClient {
    pub(crate) inner: Client,
    /// Spare buffers `[unique signs, width]`, one per thread, kept to save allocations.
    rows: Mutex<Vec<Vec<f32>>>,
    staleness: Py<Staleness>,
    /// `applied` of the first pull received since the last push.
    oldest: Mutex<Vec<u64>>,
}

impl PsClient {
    /// Calls a function with a buffer of rows with arbitrary content.
    fn with_rows<T>(&self, num_rows: usize, run: impl FnOnce(&mut [f32]) -> T) -> T {
        let spare = lock(&self.rows).pop();
        let mut rows = spare.unwrap_or_default();
        rows.resize(num_rows * self.inner.width(), 0.0);
        let result = run(&mut rows);
        lock(&self.rows).push(rows);
        result
    }

    /// Takes `oldest`: the number of pushes that each shard had applied at the first pull since the last push.
    pub(crate) fn take_oldest(&self) -> Vec<u64> {
        std::mem::take(&mut *lock(&self.oldest))
    }

    /// Records the number of pushes that each shard had applied when it answered a pull.
    pub(crate) fn note_pull(&self, applied: &[u64]) {
        let mut oldest = lock(&self.oldest);
        if oldest.is_empty() {
            oldest.extend_from_slice(applied);
        }
    }
}

#[pymethods]
impl PsClient {
    /// Connect to the shards; addresses are in the order of the partitions.
    #[new]
    #[pyo3(signature = (addresses, *, run, token, partitions, timeout_s, tls = None))]
    fn new(
        py: Python<'_>,
        addresses: Vec<String>,
        run: &str,
        token: &str,
        partitions: u32,
        timeout_s: f64,
        tls: Option<&PsTls>,
    ) -> PyResult<Self> {
        let timeout = duration("timeout_s", timeout_s)?;
        let tls = tls.and_then(|tls| tls.client.clone());
        let credentials = Credentials { run: run.into(), token: token.into(), tls };
        let inner = py.detach(|| Client::connect(&addresses, &credentials, partitions, timeout));
        let staleness = Py::new(py, Staleness::default())?;
        Ok(PsClient {
            inner: inner.map_err(IntoPyErr::into_py_err)?,
            rows: Mutex::default(),
            staleness,
            oldest: Mutex::default(),
        })
    }

    /// Weights of a row.
    #[getter]
    fn width(&self) -> usize {
        self.inner.width()
    }

    /// Dense values of all shards.
    #[getter]
    fn num_dense(&self) -> usize {
        self.inner.num_dense()
    }

    /// Incarnations of the shards in order.
    #[getter]
    fn incarnations(&self) -> Vec<u64> {
        self.inner.incarnations()
    }

    /// Return the number of pushes that each shard has applied.
    fn applied(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let applied = py.detach(|| {
            let mut split = ShardSplit::default();
            self.inner.split(&[], &mut split);
            let tickets = self.inner.pull(&split, PullOptions::default())?;
            self.inner.receive(&tickets, &split, &mut [], None)
        });
        applied.map_err(IntoPyErr::into_py_err)
    }

    /// Staleness of the pushes.
    #[getter]
    fn staleness(&self, py: Python<'_>) -> Py<Staleness> {
        self.staleness.clone_ref(py)
    }

    /// Return a handle with which another thread can end the connections.
    fn closer(&self) -> PyResult<PsCloser> {
        Ok(PsCloser { inner: self.inner.closer()? })
    }

    /// Dense values and optimizer state vectors of all shards.
    #[getter]
    fn num_dense_full(&self) -> usize {
        self.inner.num_dense_full()
    }

    /// Send a pull of the rows of a batch and, optionally, of the dense values. `after` is the first unit of a group and
    /// the number of its steps to apply first; all servers have all pushes of these steps.
    #[pyo3(signature = (batch, *, dense, after = None))]
    fn pull(&self, py: Python<'_>, batch: &Batch, dense: bool, after: Option<(u64, u32)>) -> PyResult<PullTicket> {
        let signs = &batch.parsed.unique.signs;
        let pulling = py.detach(|| {
            let mut split = ShardSplit::default();
            self.inner.split(signs, &mut split);
            let wanted = PullOptions { dense, state: false, after };
            self.inner.pull(&split, wanted).map(|tickets| PullTicket {
                split,
                wants_dense: dense,
                tickets,
                applied: Mutex::default(),
            })
        });
        pulling.map_err(IntoPyErr::into_py_err)
    }

    /// Wait for a pull. Write pooled rows to `out`, `[num_samples, num_cells, width]`, and pulled dense values to `dense`.
    /// Return the number of pushes that each shard had applied.
    fn receive(
        &self,
        py: Python<'_>,
        pulling: &PullTicket,
        batch: &Batch,
        mut out: PyReadwriteArray3<'_, f32>,
        dense: Option<PyReadwriteArray1<'_, f32>>,
    ) -> PyResult<Vec<u64>> {
        let out = out.as_slice_mut().map_err(|_| not_contiguous("out"))?;
        let mut dense = dense.filter(|_| pulling.wants_dense);
        let dense = match &mut dense {
            Some(dense) => Some(dense.as_slice_mut().map_err(|_| not_contiguous("dense"))?),
            None => None,
        };
        if let Some(dense) = &dense {
            check_len("dense", dense.len(), self.inner.num_dense())?;
        }
        let Batch { parser, parsed, .. } = batch;
        let width = self.inner.width();
        check_len("out", out.len(), batch_cells(parser, parsed) * width)?;
        let applied = py.detach(|| {
            self.with_rows(parsed.unique.signs.len(), |rows| {
                let applied = self.inner.receive(&pulling.tickets, &pulling.split, rows, dense)?;
                pool(&parsed.batch, &parsed.unique, parser.layout(), rows, width, out);
                Ok::<_, ClientError>(applied)
            })
        });
        let applied = applied.map_err(IntoPyErr::into_py_err)?;
        lock(&pulling.applied).clone_from(&applied);
        self.note_pull(&applied);
        Ok(applied)
    }

    /// Send the push of a batch: the gradient of the rows that `receive` wrote, times `scale`, and the dense gradient.
    ///
    /// With a `group` (first unit, number of units), it is one push of a step of that group.
    #[pyo3(signature = (pulling, batch, gradient, dense, *, scale, last, seen, sums, weight = 1.0, group = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &self,
        py: Python<'_>,
        pulling: &PullTicket,
        batch: &Batch,
        gradient: PyReadonlyArray3<'_, f32>,
        dense: PyReadonlyArray1<'_, f32>,
        scale: f32,
        last: bool,
        seen: u32,
        sums: Sums<'_>,
        weight: f64,
        group: Option<(u64, u32)>,
    ) -> PyResult<PushTicket> {
        let gradient = gradient.as_slice().map_err(|_| not_contiguous("gradient"))?;
        let dense = dense.as_slice().map_err(|_| not_contiguous("dense"))?;
        let (sum_indices, sum_values) = sums_of(&sums)?;
        let Batch { parser, parsed, .. } = batch;
        let width = self.inner.width();
        check_len("gradient", gradient.len(), batch_cells(parser, parsed) * width)?;
        let num_samples = parsed.batch.num_samples() as u32;
        if dense.len() != if num_samples == 0 { 0 } else { self.inner.num_dense() } {
            let message = format!("dense: expected {} values, got {}", self.inner.num_dense(), dense.len());
            return Err(PyValueError::new_err(message));
        }
        let header = PushHeader {
            unit: parsed.name.unit,
            batch: parsed.name.index,
            is_last: last,
            checksum: parsed.batch.checksum(),
            num_samples,
            seen,
            weight,
            group: group.map(group_of),
            is_increment: false,
        };
        let pushing = py.detach(|| {
            self.with_rows(parsed.unique.signs.len(), |gradients| {
                gradients.fill(0.0);
                pool_gradient(&parsed.batch, &parsed.unique, parser.layout(), gradient, scale, gradients);
                let update = BatchUpdate { header, counts: &parsed.counts, gradients, dense, sum_indices, sum_values };
                self.inner.push(&pulling.split, &update)
            })
        });
        drop(self.take_oldest());
        let pulled_at = lock(&pulling.applied).clone();
        Ok(PushTicket { tickets: pushing.map_err(IntoPyErr::into_py_err)?, pulled_at })
    }

    /// Wait until all shards have applied a push; return whether all had applied it before, and whether it had a NaN or
    /// infinite value.
    fn wait_for_ack(&self, py: Python<'_>, pushing: &PushTicket) -> PyResult<(bool, bool)> {
        let pushed = py.detach(|| self.inner.wait_for_ack(&pushing.tickets)).map_err(IntoPyErr::into_py_err)?;
        self.staleness.get().count(&pushing.pulled_at, pushed.iter().map(|ack| ack.applied));
        Ok((pushed.iter().all(|ack| ack.was_known), pushed.iter().any(|ack| ack.non_finite)))
    }

    /// Wait until every shard has all pushes of a step, at most `wait_s`. Return for each shard the number of steps of the
    /// group that it has applied, and whether it has all pushes of this step.
    fn step_status(&self, py: Python<'_>, group: (u64, u32), step: u32, wait_s: f64) -> PyResult<Vec<(u32, bool)>> {
        let wait = duration("wait_s", wait_s)?;
        let shards =
            py.detach(|| self.inner.step_status(group_of(group), step, wait)).map_err(IntoPyErr::into_py_err)?;
        Ok(shards.iter().map(|shard| (shard.num_applied, shard.is_full)).collect())
    }

    /// Make every shard apply the first steps of a group; all shards have all pushes of these steps.
    fn commit(&self, py: Python<'_>, first_unit: u64, num_steps: u32) -> PyResult<()> {
        let committed = py.detach(|| {
            let mut split = ShardSplit::default();
            self.inner.split(&[], &mut split);
            let wanted = PullOptions { after: Some((first_unit, num_steps)), ..PullOptions::default() };
            let tickets = self.inner.pull(&split, wanted)?;
            self.inner.receive(&tickets, &split, &mut [], None)
        });
        committed.map(drop).map_err(IntoPyErr::into_py_err)
    }
}

fn group_of((first_unit, num_units): (u64, u32)) -> Group {
    Group { first_unit, num_units }
}
