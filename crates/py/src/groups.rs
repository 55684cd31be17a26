//! Python bindings for groups of batches that are pushed as one step: merged gradients, and whole rows of strategy `geo`.

use elasticrec_ps::PushHeader;
use elasticrec_ps::client::{BatchUpdate, PullOptions, ShardSplit, Ticket};
use elasticrec_ps::merge::{MergedUpdate, UpdatePart};
use elasticrec_sample::pool::pool_gradient;
use elasticrec_table::FullRows;
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::batch::Batch;
use crate::errors::{IntoPyErr, not_contiguous};
use crate::ps::{PsClient, PushTicket};
use crate::table::{Table, batch_cells, check_len};

/// Positions of metric sums, and the values to add.
pub(crate) type Sums<'py> = (PyReadonlyArray1<'py, u32>, PyReadonlyArray1<'py, f64>);

/// Returns positions and values of metric sums, which must have equal lengths.
pub(crate) fn sums_of<'a>(sums: &'a Sums<'_>) -> PyResult<(&'a [u32], &'a [f64])> {
    let positions = sums.0.as_slice().map_err(|_| not_contiguous("sums"))?;
    let values = sums.1.as_slice().map_err(|_| not_contiguous("sums"))?;
    if positions.len() != values.len() {
        let (num_positions, num_values) = (positions.len(), values.len());
        let message = format!("sums: expected {num_positions} values, one for each position, got {num_values}");
        return Err(PyValueError::new_err(message));
    }
    Ok((positions, values))
}

/// The merged gradients of several batches of a unit, pushed as one step.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct MergedGradients {
    merged: MergedUpdate,
    rows: Vec<f32>,
}

#[pymethods]
impl MergedGradients {
    #[new]
    fn new() -> Self {
        MergedGradients { merged: MergedUpdate::default(), rows: Vec::new() }
    }

    /// Number of batches.
    fn __len__(&self) -> usize {
        self.merged.num_parts as usize
    }

    /// Add `scale` times the gradient of the pooled rows, and the gradient of the dense values.
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
        let gradient = gradient.as_slice().map_err(|_| not_contiguous("gradient"))?;
        let dense = dense.as_slice().map_err(|_| not_contiguous("dense"))?;
        let (sum_indices, sum_values) = sums_of(&sums)?;
        let Batch { parser, parsed, .. } = batch;
        let num_cells = batch_cells(parser, parsed);
        let width = gradient.len().checked_div(num_cells).unwrap_or(0);
        check_len("gradient", gradient.len(), num_cells * width)?;
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

    /// Push the merged gradients under the name (unit, index), and start anew.
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
            let update = BatchUpdate {
                header: header_of(merged, unit, index, last, seen),
                counts: &merged.counts,
                gradients: &merged.gradients,
                dense: &merged.dense,
                sum_indices: &merged.sum_indices,
                sum_values: &merged.sum_values,
            };
            let tickets = servers.inner.push(&split, &update);
            merged.clear();
            tickets
        });
        Ok(PushTicket { tickets: sent.map_err(IntoPyErr::into_py_err)?, pulled_at: servers.take_oldest() })
    }
}

/// Strategy `geo`: copies the whole rows of several batches into a trainer's table and pushes their increments.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct GeoExchange {
    /// Counts and checksums of the batches, without gradients.
    merged: MergedUpdate,
    split: ShardSplit,
    tickets: Vec<Ticket>,
    before: FullRows,
}

#[pymethods]
impl GeoExchange {
    /// Request the rows of all batches, and the dense values with their optimizer state.
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
        Ok(GeoExchange { merged, split, tickets, before: FullRows::default() })
    }

    /// Wait for the rows and insert them into an empty table; write the dense values and their state into `dense`.
    fn receive(
        &mut self,
        py: Python<'_>,
        servers: &PsClient,
        table: &mut Table,
        mut dense: PyReadwriteArray1<'_, f32>,
    ) -> PyResult<()> {
        let dense = dense.as_slice_mut().map_err(|_| not_contiguous("dense"))?;
        check_len("dense", dense.len(), servers.inner.num_dense_full())?;
        let (expected, got) = (servers.inner.full_width(), table.inner.full_width());
        if got != expected {
            let message = format!("table: expected rows of {expected} values as on the servers, got {got}");
            return Err(PyValueError::new_err(message));
        }
        py.detach(|| servers.inner.receive_full(&self.tickets, &self.split, &mut self.before, dense))
            .map_err(IntoPyErr::into_py_err)?;
        py.detach(|| table.inner.insert_full(&self.merged.signs, &self.before)).map_err(IntoPyErr::into_py_err)
    }

    /// Push the increments of the table and of the dense values under the name (unit, index).
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
        let dense = dense.as_slice().map_err(|_| not_contiguous("dense"))?;
        let (sum_indices, sum_values) = sums_of(&sums)?;
        let merged = &self.merged;
        check_len("dense", dense.len(), if merged.num_samples == 0 { 0 } else { servers.inner.num_dense_full() })?;
        let sent = py.detach(|| {
            let increments = table.inner.increments(&merged.signs, &self.before);
            let header = PushHeader { is_increment: true, ..header_of(merged, unit, index, last, seen) };
            let (counts, gradients) = (&merged.counts, &increments);
            let update = BatchUpdate { header, counts, gradients, dense, sum_indices, sum_values };
            servers.inner.push(&self.split, &update)
        });
        Ok(PushTicket { tickets: sent.map_err(IntoPyErr::into_py_err)?, pulled_at: servers.take_oldest() })
    }
}

/// Returns the header of the merged batches as one push with the name (unit, batch).
fn header_of(merged: &MergedUpdate, unit: u64, batch: u32, is_last: bool, seen: u32) -> PushHeader {
    let MergedUpdate { checksum, num_samples, .. } = *merged;
    PushHeader { unit, batch, is_last, checksum, num_samples, seen, weight: 1.0, group: None, is_increment: false }
}
