//! Python bindings for formats that are read in Python: records for a user's own reader, columns of Parquet, batches.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use elasticrec_sample::columns::{ColumnBatch, NumberColumn, SlotColumn, add_text};
use elasticrec_sample::hash::{SplitMix64, sign_of, slot_seed};
use elasticrec_sample::reader::SHOWN_BAD;
use elasticrec_sample::{BatchBuilder, BatchName, LabelMode, ParsedBatch, ReadError, RecordBatches, Selection};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::batch::{Batch, BatchOptions, Parser, UnitTuple, label_mode, unit_of};
use crate::errors::{IntoPyErr, SampleError};

/// An iterator over batches of records before parsing.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct RecordReader {
    inner: Mutex<RecordBatches>,
}

#[pymethods]
impl RecordReader {
    #[new]
    fn new(parser: &Parser, units: Vec<UnitTuple>, batches: &BatchOptions) -> Self {
        let units = units.into_iter().map(unit_of).collect();
        RecordReader { inner: Mutex::new(RecordBatches::new(parser.inner.clone(), units, batches.options.clone())) }
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        let batches = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        match py.detach(|| batches.next()) {
            None => Ok(None),
            Some(Ok(inner)) => Ok(Some(RecordBatch { inner })),
            Some(Err(error)) => Err(error.into_py_err()),
        }
    }
}

/// The records of a batch before parsing.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct RecordBatch {
    inner: elasticrec_sample::RecordBatch,
}

#[pymethods]
impl RecordBatch {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyBytes>> {
        if index >= self.inner.len() {
            return Err(pyo3::exceptions::PyIndexError::new_err(index));
        }
        Ok(PyBytes::new(py, self.inner.get(index)))
    }

    #[getter]
    fn unit(&self) -> u64 {
        self.inner.name.unit
    }

    #[getter]
    fn index(&self) -> u32 {
        self.inner.name.index
    }

    /// Location of the records, as `file: lines 3, 8 and 510 more up to 1530`.
    #[getter]
    fn location(&self) -> String {
        self.inner.location()
    }

    /// Return the offset of a record in the decompressed file.
    fn offset(&self, index: usize) -> u64 {
        self.inner.offset(index)
    }

    /// Return the location of a record, as `file:line`.
    fn location_of(&self, index: usize) -> String {
        self.inner.location_of(index)
    }

    /// Return all records, each with a line end.
    fn text<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let text = py.detach(|| {
            let mut text = Vec::new();
            for index in 0..self.inner.len() {
                text.extend_from_slice(self.inner.get(index));
                text.push(b'\n');
            }
            text
        });
        PyBytes::new(py, &text)
    }

    /// Return the records that `parser` accepts, each with a line end, and the bad ones as `file:line: what`.
    fn good<'py>(&self, py: Python<'py>, parser: &Parser) -> (Bound<'py, PyBytes>, Vec<String>) {
        let (text, bad) = py.detach(|| {
            let (mut text, mut bad) = (Vec::new(), Vec::new());
            let mut builder = parser.inner.builder(self.inner.len());
            for index in 0..self.inner.len() {
                let record = self.inner.get(index);
                match parser.inner.parse_line(record, LabelMode::Required, &mut builder) {
                    Ok(()) => {
                        text.extend_from_slice(record);
                        text.push(b'\n');
                    }
                    Err(error) => bad.push(format!("{}: {error}", self.inner.location_of(index))),
                }
            }
            (text, bad)
        });
        (PyBytes::new(py, &text), bad)
    }
}

/// Builds a batch from named values.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct BatchMaker {
    parser: Arc<elasticrec_sample::Parser>,
    builder: BatchBuilder,
    mode: LabelMode,
}

#[pymethods]
impl BatchMaker {
    #[new]
    #[pyo3(signature = (parser, *, labels))]
    fn new(parser: &Parser, labels: bool) -> Self {
        let parser = parser.inner.clone();
        BatchMaker { builder: parser.builder(0), parser, mode: label_mode(labels) }
    }

    /// Add a sample: values of slots, dense columns, labels and `weight` by name. A bad sample adds nothing.
    fn add(&mut self, sample: &Bound<'_, PyDict>) -> PyResult<()> {
        let parser = self.parser.clone();
        let builder = &mut self.builder;
        builder.begin();
        let (mut num_labels, mut click, mut weight) = (0, 0, 1.0);
        for (name, value) in sample.iter() {
            let name = name.cast::<PyString>().map_err(|_| SampleError::new_err("expected strings as keys"))?;
            let name = name.to_str().map_err(|_| SampleError::new_err("expected UTF-8 strings as keys"))?;
            if value.is_none() {
                continue;
            }
            if let Some(slot) = parser.slot(name.as_bytes()) {
                add_values(&parser, slot, name, &value, builder)?;
            } else if let Some(index) = parser.dense(name) {
                let number = number_of("dense", name, &value)?;
                parser.set_dense(index, number, builder).map_err(|error| SampleError::new_err(error.0))?;
            } else if let Some(index) = parser.label(name.as_bytes()) {
                let label = number_of("label", name, &value)?;
                if self.mode == LabelMode::Required && !(0.0..=1.0).contains(&label) {
                    let message = format!("label `{name}`: expected a number from 0 to 1, got {label}");
                    return Err(SampleError::new_err(message));
                }
                builder.set_label(index, label);
                num_labels += 1;
                click = if index == 0 { u32::from(label >= 0.5) } else { click };
            } else if name == "weight" {
                weight = number_of("weight", name, &value)?;
                if !(weight > 0.0 && weight.is_finite()) {
                    return Err(SampleError::new_err(format!("weight: expected a number above 0, got {weight}")));
                }
            }
        }
        let expected = parser.features().labels.len();
        if self.mode == LabelMode::Required && num_labels != expected {
            return Err(SampleError::new_err(format!("expected {expected} labels, each once, got {num_labels}")));
        }
        builder.end_weighted(1, click, weight);
        Ok(())
    }

    /// Return the batch of the samples so far, and start a new one.
    #[pyo3(signature = (*, unit, index, num_records, bad, num_bad, location))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn finish(
        &mut self,
        py: Python<'_>,
        unit: u64,
        index: u32,
        num_records: usize,
        bad: Vec<String>,
        num_bad: usize,
        location: String,
    ) -> Batch {
        let batch = std::mem::replace(&mut self.builder, self.parser.builder(0)).finish();
        let parsed = ParsedBatch::of(BatchName { unit, index }, batch);
        let mut batch = Batch::new(py, self.parser.clone(), ParsedBatch { num_records, num_bad, bad, ..parsed });
        batch.location = Some(location);
        batch
    }
}

fn number_of(kind: &str, name: &str, value: &Bound<'_, PyAny>) -> PyResult<f32> {
    let number = value.extract::<f64>().map_err(|_| {
        let got = value.repr().map_or_else(|_| "another type".into(), |repr| repr.to_string());
        SampleError::new_err(format!("{kind} `{name}`: expected a number, got {got}"))
    })?;
    Ok(number as f32)
}

fn add_values(
    parser: &elasticrec_sample::Parser,
    slot: u16,
    name: &str,
    value: &Bound<'_, PyAny>,
    into: &mut BatchBuilder,
) -> PyResult<()> {
    let separator = parser.features().slots[usize::from(slot)].separator.as_ref().map(String::as_bytes);
    if let Ok(text) = value.cast::<PyString>() {
        // Python strings may contain lone surrogates, which are not UTF-8.
        let text = text.to_str().map_err(|_| SampleError::new_err(format!("slot `{name}`: expected UTF-8 text")))?;
        add_text(parser, slot, text.as_bytes(), separator, into);
    } else if let Ok(bytes) = value.cast::<PyBytes>() {
        add_text(parser, slot, bytes.as_bytes(), separator, into);
    } else if value.is_instance_of::<PyInt>() && !value.is_instance_of::<PyBool>() {
        // As decimal text, so that 7 and "7" are the same value.
        add_text(parser, slot, value.str()?.to_str()?.as_bytes(), None, into);
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        for item in value.try_iter()? {
            let item = item?;
            if !item.is_none() {
                if item.is_instance_of::<PyList>() || item.is_instance_of::<PyTuple>() {
                    return Err(SampleError::new_err(format!(
                        "slot `{name}`: expected a list of values, got a list of lists"
                    )));
                }
                add_values(parser, slot, name, &item, into)?;
            }
        }
    } else {
        let hint =
            if value.is_instance_of::<PyFloat>() { "; a number with a fraction cannot be a category" } else { "" };
        let kind = value.get_type().name()?.to_string();
        let message = format!("slot `{name}`: expected a string, a whole number or a list of them, got {kind}{hint}");
        return Err(SampleError::new_err(message));
    }
    Ok(())
}

/// (offsets of the rows or None, offsets of the values, text).
type PySlotColumn<'py> = (Option<PyReadonlyArray1<'py, i64>>, PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, u8>);
/// (values, whether each one is missing).
type PyNumberColumn<'py> = (PyReadonlyArray1<'py, f32>, Option<PyReadonlyArray1<'py, bool>>);

fn numbers<'a>(column: &'a PyNumberColumn<'_>) -> PyResult<NumberColumn<'a>> {
    let nulls = column.1.as_ref().map(|nulls| nulls.as_slice()).transpose()?;
    Ok(NumberColumn { values: column.0.as_slice()?, nulls })
}

/// Return a batch of columns. `rows` are the row numbers in the file, for messages. `refused` has the bad rows that the
/// caller found, with the reason, by their position in the batch.
#[pyfunction]
#[pyo3(signature = (parser, *, unit, index, path, rows, slots, dense, labels, weights, refused, shown))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn batch_of_columns(
    py: Python<'_>,
    parser: &Parser,
    unit: u64,
    index: u32,
    path: &str,
    rows: PyReadonlyArray1<'_, i64>,
    slots: Vec<PySlotColumn<'_>>,
    dense: Vec<PyNumberColumn<'_>>,
    labels: Option<Vec<PyNumberColumn<'_>>>,
    weights: Option<PyNumberColumn<'_>>,
    refused: HashMap<usize, String>,
    shown: usize,
) -> PyResult<Batch> {
    let rows = rows.as_slice()?;
    let mode = label_mode(labels.is_some());
    let labels = labels.unwrap_or_default();
    let mut columns = ColumnBatch {
        num_rows: rows.len(),
        slots: Vec::with_capacity(slots.len()),
        dense: dense.iter().map(numbers).collect::<PyResult<_>>()?,
        labels: labels.iter().map(numbers).collect::<PyResult<_>>()?,
        weights: weights.as_ref().map(numbers).transpose()?,
    };
    for (offsets, values, text) in &slots {
        let rows = offsets.as_ref().map(|rows| rows.as_slice()).transpose()?;
        columns.slots.push(SlotColumn { rows, values: values.as_slice()?, text: text.as_slice()? });
    }
    let inner = &parser.inner;
    columns.check(inner).map_err(PyValueError::new_err)?;
    let (batch, num_bad, bad) = py.detach(|| {
        let mut builder = inner.builder(rows.len());
        let (mut num_bad, mut bad) = (0, Vec::new());
        for (at, &row) in rows.iter().enumerate() {
            let what = match refused.get(&at) {
                Some(what) => what.clone(),
                None => match columns.add_row(inner, at, mode, &mut builder) {
                    Ok(()) => continue,
                    Err(error) => error.to_string(),
                },
            };
            num_bad += 1;
            if shown < SHOWN_BAD {
                bad.push((row, what));
            }
        }
        // In file order, because people look the records up there.
        bad.sort_unstable();
        bad.truncate(SHOWN_BAD.saturating_sub(shown));
        let bad = bad.into_iter().map(|(row, what)| format!("{path}: row {row}: {what}")).collect();
        (builder.finish(), num_bad, bad)
    });
    let parsed = ParsedBatch::of(BatchName { unit, index }, batch);
    let num_records = rows.len();
    let mut batch = Batch::new(py, inner.clone(), ParsedBatch { num_records, num_bad, bad, ..parsed });
    let (first, last) = (rows.iter().min().unwrap_or(&0), rows.iter().max().unwrap_or(&0));
    batch.location = Some(format!("{path}: {num_records} rows from {first} to {last}"));
    Ok(batch)
}

/// Return the first line of a file, compressed or not, or None if the file is empty.
#[pyfunction]
pub(crate) fn first_line<'py>(py: Python<'py>, path: PathBuf) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let read = |source| ReadError { path: path.clone(), source };
    let line = py.detach(|| elasticrec_sample::lines::first_line(&path)).map_err(|error| read(error).into_py_err())?;
    Ok(line.map(|line| PyBytes::new(py, &line)))
}

/// Return the order in which the `count` records of a unit are read.
#[pyfunction]
pub(crate) fn shuffle_records(
    py: Python<'_>,
    count: usize,
    seed: u64,
    epoch: u32,
    unit: u64,
) -> Bound<'_, PyArray1<i64>> {
    let mut order: Vec<i64> = (0..count as i64).collect();
    SplitMix64::from_parts(&[seed, u64::from(epoch), unit]).shuffle(&mut order);
    PyArray1::from_vec(py, order)
}

/// Return which rows of a file are in the held-out share, by their row numbers.
#[pyfunction]
pub(crate) fn held_out<'py>(
    py: Python<'py>,
    rows: PyReadonlyArray1<'_, i64>,
    file: &str,
    ratio: f64,
) -> PyResult<Bound<'py, PyArray1<bool>>> {
    let seed = slot_seed(file);
    let chosen =
        rows.as_slice()?.iter().map(|row| Selection::is_held_out(sign_of(seed, &row.to_le_bytes()), ratio)).collect();
    Ok(PyArray1::from_vec(py, chosen))
}

/// A batch as plain arrays, to be sent to another process.
type Parts<'py> = (
    (u64, u32, usize, usize),
    (Vec<String>, String),
    (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>),
    (Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<f32>>),
    (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<u32>>),
);

/// Return the content of a batch as plain arrays, to be sent to another process.
#[pyfunction]
pub(crate) fn batch_to_parts<'py>(py: Python<'py>, batch: &Batch) -> PyResult<Parts<'py>> {
    let flat =
        |array: &Bound<'py, PyAny>| array.call_method0("ravel")?.cast_into::<PyArray1<f32>>().map_err(PyErr::from);
    let (dense, labels) = (flat(batch.dense_array(py).as_any())?, flat(batch.labels_array(py).as_any())?);
    let weights = flat(batch.weights_array(py).as_any())?;
    let location = batch.location.clone().unwrap_or_default();
    let ParsedBatch { name, batch, num_records, num_bad, bad, .. } = &batch.parsed;
    Ok((
        (name.unit, name.index, *num_records, *num_bad),
        (bad.clone(), location),
        (PyArray1::from_slice(py, &batch.signs), PyArray1::from_slice(py, &batch.offsets)),
        (dense, labels, weights),
        (PyArray1::from_slice(py, &batch.shows), PyArray1::from_slice(py, &batch.clicks)),
    ))
}

/// Return the batch from the result of `batch_to_parts` in another process.
#[pyfunction]
pub(crate) fn batch_from_parts(py: Python<'_>, parser: &Parser, parts: Parts<'_>) -> PyResult<Batch> {
    let ((unit, index, num_records, num_bad), (bad, location), signs, values, counts) = parts;
    let features = parser.inner.features();
    let batch = elasticrec_sample::Batch {
        num_slots: features.slots.len(),
        num_dense: features.dense.len(),
        num_labels: features.labels.len(),
        signs: signs.0.to_vec()?,
        offsets: signs.1.to_vec()?,
        dense: values.0.to_vec()?,
        labels: values.1.to_vec()?,
        weights: values.2.to_vec()?,
        shows: counts.0.to_vec()?,
        clicks: counts.1.to_vec()?,
    };
    if !batch.is_consistent() {
        return Err(PyValueError::new_err("batch_from_parts: expected the arrays of one batch"));
    }
    let parsed = py.detach(|| ParsedBatch::of(BatchName { unit, index }, batch));
    let mut batch = Batch::new(py, parser.inner.clone(), ParsedBatch { num_records, num_bad, bad, ..parsed });
    batch.location = Some(location);
    Ok(batch)
}
