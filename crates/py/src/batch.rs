//! Python bindings of the parser, of batches, and of the reader that reads ahead.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use elasticrec_sample::hash::SplitMix64;
use elasticrec_sample::reader::parse_text;
use elasticrec_sample::unit::split;
use elasticrec_sample::{
    BatchName, Features, LabelMode, ParsedBatch, ReaderOptions, RecordOptions, Selection, Stamp, Unit,
};
use elasticrec_table::Handles;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{IntoPyErr, SampleError};

/// The parser of a declaration of features.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct Parser {
    pub(crate) inner: Arc<elasticrec_sample::Parser>,
}

#[pymethods]
impl Parser {
    #[new]
    #[pyo3(signature = (features_json, *, missing = 0.0))]
    fn new(features_json: &str, missing: f32) -> PyResult<Self> {
        let features = Features::from_json(features_json).map_err(IntoPyErr::into_py_err)?;
        let parser = elasticrec_sample::Parser::new(features).map_err(IntoPyErr::into_py_err)?;
        Ok(Parser { inner: Arc::new(parser.with_missing(missing)) })
    }

    /// The value of missing dense values.
    #[getter]
    fn missing(&self) -> f32 {
        self.inner.missing()
    }

    /// Parse lines in memory; the first bad line raises `SampleError`.
    #[pyo3(signature = (text, *, labels))]
    fn parse(&self, py: Python<'_>, text: &[u8], labels: bool) -> PyResult<Batch> {
        let parser = &self.inner;
        let parsed = py.detach(|| {
            let batch = parse_text(parser, text, label_mode(labels))?;
            Ok(ParsedBatch::of(BatchName { unit: 0, index: 0 }, batch))
        });
        Ok(Batch::new(py, self.inner.clone(), parsed.map_err(|error: String| SampleError::new_err(error))?))
    }

    /// Return a batch without samples: the first batch of a unit without records.
    fn empty(&self, py: Python<'_>, unit: u64) -> Batch {
        let batch = self.inner.builder(0).finish();
        Batch::new(py, self.inner.clone(), ParsedBatch::of(BatchName { unit, index: 0 }, batch))
    }

    /// Return the sign of a categorical value in the slot called `slot`.
    fn sign(&self, slot: &str, value: &[u8]) -> PyResult<u64> {
        let number = self.inner.slot(slot.as_bytes()).ok_or_else(|| unknown("slot", slot))?;
        Ok(self.inner.sign(number, value))
    }
}

/// The error for a name that the job does not have.
pub(crate) fn unknown(kind: &str, name: &str) -> PyErr {
    SampleError::new_err(format!("unknown {kind} `{name}`"))
}

pub(crate) fn label_mode(required: bool) -> LabelMode {
    if required { LabelMode::Required } else { LabelMode::Ignored }
}

/// Split a file of `size` bytes into byte ranges of at most `unit_bytes`.
#[pyfunction]
pub(crate) fn split_units(size: u64, unit_bytes: u64) -> Vec<(u64, u64)> {
    split(size, unit_bytes)
}

/// Return whether a file with these first bytes is compressed; a compressed file is one unit.
#[pyfunction]
pub(crate) fn is_compressed(start: &[u8]) -> bool {
    elasticrec_sample::compressed::is_compressed(start)
}

/// Return the order in which `count` units of an epoch are read.
#[pyfunction]
pub(crate) fn shuffle_units(count: usize, seed: u64, epoch: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    SplitMix64::from_parts(&[seed, u64::from(epoch)]).shuffle(&mut order);
    order
}

/// A batch of samples. The arrays are views of the parser's memory.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Batch {
    pub(crate) parser: Arc<elasticrec_sample::Parser>,
    pub(crate) parsed: ParsedBatch,
    /// The rows that the last pull found.
    pub(crate) handles: Handles,
    dense: Py<PyArray2<f32>>,
    labels: Py<PyArray2<f32>>,
    weights: Py<PyArray1<f32>>,
    /// Location of the records, for batches without lines.
    pub(crate) location: Option<String>,
}

impl Batch {
    pub(crate) fn new(py: Python<'_>, parser: Arc<elasticrec_sample::Parser>, mut parsed: ParsedBatch) -> Self {
        let batch = &mut parsed.batch;
        let (rows, num_dense, num_labels) = (batch.num_samples(), batch.num_dense, batch.num_labels);
        let matrix = |values: Vec<f32>, columns: usize| {
            let flat = PyArray1::from_vec(py, values);
            flat.reshape([rows, columns])
                .map(Bound::unbind)
                .unwrap_or_else(|_| PyArray2::zeros(py, [rows, columns], false).unbind())
        };
        let dense = matrix(std::mem::take(&mut batch.dense), num_dense);
        let labels = matrix(std::mem::take(&mut batch.labels), num_labels);
        let weights = PyArray1::from_vec(py, std::mem::take(&mut batch.weights)).unbind();
        Batch { parser, parsed, handles: Handles::default(), dense, labels, weights, location: None }
    }

    pub(crate) fn dense_array<'py>(&self, py: Python<'py>) -> &Bound<'py, PyArray2<f32>> {
        self.dense.bind(py)
    }

    pub(crate) fn labels_array<'py>(&self, py: Python<'py>) -> &Bound<'py, PyArray2<f32>> {
        self.labels.bind(py)
    }

    pub(crate) fn weights_array<'py>(&self, py: Python<'py>) -> &Bound<'py, PyArray1<f32>> {
        self.weights.bind(py)
    }
}

#[pymethods]
impl Batch {
    /// The id of the unit.
    #[getter]
    fn unit(&self) -> u64 {
        self.parsed.name.unit
    }

    /// The number of the batch in the unit.
    #[getter]
    fn index(&self) -> u32 {
        self.parsed.name.index
    }

    #[getter]
    fn num_samples(&self) -> usize {
        self.parsed.batch.num_samples()
    }

    /// Number of records, including bad ones.
    #[getter]
    fn num_records(&self) -> usize {
        self.parsed.num_records
    }

    #[getter]
    fn num_bad(&self) -> usize {
        self.parsed.num_bad
    }

    /// The first few bad records of the reader, as `file:line: what`.
    #[getter]
    fn bad(&self) -> Vec<String> {
        self.parsed.bad.clone()
    }

    /// Location of the records, as `file: lines 3, 8 and 510 more up to 1530`.
    #[getter]
    fn location(&self) -> String {
        let source = self.parsed.source.as_ref().map(elasticrec_sample::RecordBatch::location);
        source.or_else(|| self.location.clone()).unwrap_or_default()
    }

    /// Approximate offset in the file after this batch; 0 if unknown.
    #[getter]
    fn file_bytes(&self) -> u64 {
        self.parsed.source.as_ref().map_or(0, elasticrec_sample::RecordBatch::file_bytes)
    }

    /// `[num_samples, num_dense]`
    #[getter]
    fn dense(&self, py: Python<'_>) -> Py<PyArray2<f32>> {
        self.dense.clone_ref(py)
    }

    /// `[num_samples, num_labels]`
    #[getter]
    fn labels(&self, py: Python<'_>) -> Py<PyArray2<f32>> {
        self.labels.clone_ref(py)
    }

    /// `[num_samples]`: the weight of each sample in the loss.
    #[getter]
    fn weights(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.weights.clone_ref(py)
    }

    /// All signs, ordered by sample, then slot.
    #[getter]
    fn signs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.parsed.batch.signs)
    }

    /// Index of the first sign of each (sample, slot) in `signs`, and one more at the end.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_slice(py, &self.parsed.batch.offsets)
    }
}

/// (id, path, start, end, epoch, size, modification time in ns).
pub(crate) type UnitTuple = (u64, PathBuf, u64, u64, u32, u64, u64);

pub(crate) fn unit_of((id, path, start, end, epoch, size, modified_ns): UnitTuple) -> Unit {
    Unit { id, path, start, end, epoch, stamp: Some(Stamp { size, modified_ns }) }
}

/// The division of units into batches.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct BatchOptions {
    pub(crate) options: RecordOptions,
}

#[pymethods]
impl BatchOptions {
    /// `select` is ("ratio" or "time", share or seconds since 1970, whether to read the held-out records).
    #[new]
    #[pyo3(signature = (*, batch_size, shuffle, seed, skip_batches, piece_bytes, select))]
    fn new(
        batch_size: usize,
        shuffle: bool,
        seed: u64,
        skip_batches: usize,
        piece_bytes: usize,
        select: Option<(String, f64, bool)>,
    ) -> PyResult<Self> {
        let selection = match select {
            None => Selection::All,
            Some((kind, ratio, held_out)) if kind == "ratio" => Selection::Ratio { ratio, held_out },
            Some((kind, from, held_out)) if kind == "time" => Selection::Time { from, held_out },
            Some((kind, ..)) => {
                return Err(PyValueError::new_err(format!("select: expected `ratio` or `time`, got `{kind}`")));
            }
        };
        let batch_size = batch_size.max(1);
        Ok(BatchOptions { options: RecordOptions { batch_size, shuffle, seed, skip_batches, piece_bytes, selection } })
    }
}

/// An iterator over the batches of units; its threads read and parse ahead.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct BatchReader {
    parser: Arc<elasticrec_sample::Parser>,
    /// In a mutex, because a channel is not `Sync`; only `&mut self` methods use it.
    inner: Mutex<Option<elasticrec_sample::BatchReader>>,
}

impl BatchReader {
    fn reader(&mut self) -> &mut Option<elasticrec_sample::BatchReader> {
        self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl BatchReader {
    /// `units` are (id, path, start, end, epoch, size, modification time in ns).
    #[new]
    #[pyo3(signature = (parser, units, batches, *, labels, workers))]
    fn new(parser: &Parser, units: Vec<UnitTuple>, batches: &BatchOptions, labels: bool, workers: usize) -> Self {
        let units = units.into_iter().map(unit_of).collect();
        let options = ReaderOptions { records: batches.options.clone(), labels: label_mode(labels), workers };
        let parser = parser.inner.clone();
        let inner = elasticrec_sample::BatchReader::start(parser.clone(), units, options);
        BatchReader { parser, inner: Mutex::new(Some(inner)) }
    }

    /// Return the seconds that the threads have spent (reading, parsing).
    fn times(&mut self) -> (f64, f64) {
        self.reader().as_ref().map_or((0.0, 0.0), elasticrec_sample::BatchReader::times)
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&mut self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let Some(reader) = self.reader() else { return Ok(None) };
        match py.detach(|| reader.next()) {
            None => Ok(None),
            Some(Ok(parsed)) => Ok(Some(Batch::new(py, self.parser.clone(), parsed))),
            Some(Err(error)) => Err(error.into_py_err()),
        }
    }

    /// Stop the threads.
    fn close(&mut self, py: Python<'_>) {
        let reader = self.reader().take();
        py.detach(|| drop(reader));
    }
}
