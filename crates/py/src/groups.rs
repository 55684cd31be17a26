//! Groups of batches that are pushed as one, for Python: gradients that are merged, and rows that are stepped elsewhere.

use elasticrec_ps::client::{BatchUpdate, PullOptions, ShardSplit, Ticket};
use elasticrec_ps::merge::{MergedUpdate, UpdatePart};
use elasticrec_sample::pool::pool_gradient;
use elasticrec_table::FullRows;
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::batch::Batch;
use crate::errors::IntoPyErr;
use crate::ps::{PsClient, PushTicket};
use crate::table::{Table, batch_cells, check_shape};

fn contiguous(what: &str) -> PyErr {
    PyValueError::new_err(format!("{what}: expected a contiguous array"))
}

/// Places of metric sums, and what is added to each.
pub(crate) type Sums<'py> = (PyReadonlyArray1<'py, u32>, PyReadonlyArray1<'py, f64>);

/// The two arrays of metric sums, which have one length.
pub(crate) fn sums_of<'a>(sums: &'a Sums<'_>) -> PyResult<(&'a [u32], &'a [f64])> {
    let places = sums.0.as_slice().map_err(|_| contiguous("sums"))?;
    let values = sums.1.as_slice().map_err(|_| contiguous("sums"))?;
    if places.len() != values.len() {
        return Err(PyValueError::new_err("sums: expected as many places as values"));
    }
    Ok((places, values))
}

/// Gradients of several batches of a unit, to be pushed as one step.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Merging {
    merged: MergedUpdate,
    rows: Vec<f32>,
}

#[pymethods]
impl Merging {
    #[new]
    fn new() -> Self {
        Merging { merged: MergedUpdate::default(), rows: Vec::new() }
    }

    /// Batches in it.
    fn __len__(&self) -> usize {
        self.merged.num_parts as usize
    }

    /// Adds the gradient of what `PsClient.receive` wrote, times `scale`, and that of the dense values.
    #[pyo3(signature = (batch, gradient, dense, *, scale, weight, sums))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn add(
        &mut self,
        py: Python<'_>,
        batch: &Batch,
        gradient: PyReadonlyArray3<'_, f32>,
        dense: PyReadonlyArray1<'_, f32>,
        scale: f32,
        weight: f64,
        sums: Sums<'_>,
    ) -> PyResult<()> {
        let gradient = gradient.as_slice().map_err(|_| contiguous("gradient"))?;
        let dense = dense.as_slice().map_err(|_| contiguous("dense"))?;
        let (sum_indices, sum_values) = sums_of(&sums)?;
        let Batch { parser, parsed, .. } = batch;
        let num_cells = batch_cells(parser, parsed);
        let width = gradient.len().checked_div(num_cells).unwrap_or(0);
        check_shape("gradient", gradient.len(), num_cells, width)?;
        py.detach(|| {
            let signs = &parsed.unique.signs;
            self.rows.clear();
            self.rows.resize(signs.len() * width, 0.0);
            pool_gradient(&parsed.batch, &parsed.unique, parser.layout(), gradient, scale, &mut self.rows);
            let part = UpdatePart {
                signs,
                gradients: &self.rows,
                dense,
                weight,
                num_samples: parsed.batch.num_samples() as u32,
                checksum: parsed.batch.checksum(),
                sum_indices,
                sum_values,
            };
            self.merged.add(&part, parsed.counts.iter().copied());
        });
        Ok(())
    }

    /// Sends all of it under the name (unit, index), and is empty again.
    #[pyo3(signature = (servers, *, unit, index, last, seen))]
    fn push(
        &mut self,
        py: Python<'_>,
        servers: &PsClient,
        unit: u64,
        index: u32,
        last: bool,
        seen: u32,
    ) -> PyResult<PushTicket> {
        let merged = &mut self.merged;
        let sent = py.detach(|| {
            let mut split = ShardSplit::default();
            servers.inner.split(&merged.signs, &mut split);
            let learned = BatchUpdate {
                unit,
                batch: index,
                is_last: last,
                checksum: merged.checksum,
                num_samples: merged.num_samples,
                seen,
                weight: 1.0,
                group: None,
                is_increment: false,
                counts: &merged.counts,
                gradients: &merged.gradients,
                dense: &merged.dense,
                sum_indices: &merged.sum_indices,
                sum_values: &merged.sum_values,
            };
            let tickets = servers.inner.push(&split, &learned);
            merged.clear();
            tickets
        });
        Ok(PushTicket { tickets: sent.map_err(IntoPyErr::into_py_err)?, pulled_at: servers.take_oldest() })
    }
}

/// The rows of several batches, with all they have, on the way to a table of a trainer's own and back.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Exchange {
    /// Counts and checksums of the batches, without gradients.
    merged: MergedUpdate,
    split: ShardSplit,
    tickets: Vec<Ticket>,
    before: FullRows,
}

#[pymethods]
impl Exchange {
    /// Asks for the rows of all batches, and for the dense values with their states.
    #[new]
    fn new(py: Python<'_>, servers: &PsClient, batches: Vec<PyRef<'_, Batch>>) -> PyResult<Self> {
        let mut merged = MergedUpdate::default();
        for batch in &batches {
            let parsed = &batch.parsed;
            let part = UpdatePart {
                signs: &parsed.unique.signs,
                gradients: &[],
                dense: &[],
                weight: 0.0,
                num_samples: parsed.batch.num_samples() as u32,
                checksum: parsed.batch.checksum(),
                sum_indices: &[],
                sum_values: &[],
            };
            merged.add(&part, parsed.counts.iter().copied());
        }
        let mut split = ShardSplit::default();
        let tickets = py.detach(|| {
            servers.inner.split(&merged.signs, &mut split);
            servers.inner.pull(&split, PullOptions { dense: true, state: true, after: None })
        });
        let tickets = tickets.map_err(IntoPyErr::into_py_err)?;
        Ok(Exchange { merged, split, tickets, before: FullRows::default() })
    }

    /// Waits for the rows, puts them into an empty table, and writes the dense values and their states into `dense`.
    fn receive(
        &mut self,
        py: Python<'_>,
        servers: &PsClient,
        table: &mut Table,
        mut dense: PyReadwriteArray1<'_, f32>,
    ) -> PyResult<()> {
        let dense = dense.as_slice_mut().map_err(|_| contiguous("dense"))?;
        check_len(dense.len(), servers.inner.num_dense_full())?;
        if table.inner.full_width() != servers.inner.full_width() {
            return Err(PyValueError::new_err("table: expected the one of the servers"));
        }
        py.detach(|| servers.inner.receive_full(&self.tickets, &self.split, &mut self.before, dense))
            .map_err(IntoPyErr::into_py_err)?;
        py.detach(|| table.inner.adopt(&self.merged.signs, &self.before)).map_err(IntoPyErr::into_py_err)
    }

    /// Sends what changed in the table, and the changes of the dense values, under the name (unit, index).
    #[pyo3(signature = (servers, table, dense, *, unit, index, last, seen, sums))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn push(
        &self,
        py: Python<'_>,
        servers: &PsClient,
        table: &Table,
        dense: PyReadonlyArray1<'_, f32>,
        unit: u64,
        index: u32,
        last: bool,
        seen: u32,
        sums: Sums<'_>,
    ) -> PyResult<PushTicket> {
        let dense = dense.as_slice().map_err(|_| contiguous("dense"))?;
        let (sum_indices, sum_values) = sums_of(&sums)?;
        let merged = &self.merged;
        check_len(dense.len(), if merged.num_samples == 0 { 0 } else { servers.inner.num_dense_full() })?;
        let sent = py.detach(|| {
            let deltas = table.inner.deltas(&merged.signs, &self.before);
            let learned = BatchUpdate {
                unit,
                batch: index,
                is_last: last,
                checksum: merged.checksum,
                num_samples: merged.num_samples,
                seen,
                weight: 1.0,
                group: None,
                is_increment: true,
                counts: &merged.counts,
                gradients: &deltas,
                dense,
                sum_indices,
                sum_values,
            };
            servers.inner.push(&self.split, &learned)
        });
        Ok(PushTicket { tickets: sent.map_err(IntoPyErr::into_py_err)?, pulled_at: servers.take_oldest() })
    }
}

fn check_len(got: usize, expected: usize) -> PyResult<()> {
    if got == expected {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("dense: expected {expected} values, got {got}")))
}
