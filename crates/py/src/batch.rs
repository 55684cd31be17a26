//! Lines to batches, for Python: the parser, the reader that runs ahead, and the batch it yields.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use elasticrec_sample::hash::SplitMix64;
use elasticrec_sample::reader::parse_text;
use elasticrec_sample::unit::cut;
use elasticrec_sample::{
    BatchName, Features, LabelMode, ParsedBatch, ReaderOptions, RecordOptions, Selection, Stamp, Unit,
};
use elasticrec_table::Handles;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{IntoPyErr, SampleError};

/// The one parser, made from the feature handling of a job or manifest.
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

    /// What a dense value is that a sample does not have.
    #[getter]
    fn missing(&self) -> f32 {
        self.inner.missing()
    }

    /// Parses lines in memory; the first bad one raises `SampleError`.
    #[pyo3(signature = (text, *, labels))]
    fn parse(&self, py: Python<'_>, text: &[u8], labels: bool) -> PyResult<Batch> {
        let parser = &self.inner;
        let parsed = py.detach(|| {
            let batch = parse_text(parser, text, label_mode(labels))?;
            Ok(ParsedBatch::of(BatchName { unit: 0, index: 0 }, batch))
        });
        Ok(Batch::new(py, self.inner.clone(), parsed.map_err(|error: String| SampleError::new_err(error))?))
    }

    /// A batch without samples, the first one of a unit that has none.
    fn empty(&self, py: Python<'_>, unit: u64) -> Batch {
        let batch = self.inner.builder(0).finish();
        Batch::new(py, self.inner.clone(), ParsedBatch::of(BatchName { unit, index: 0 }, batch))
    }

    /// The sign of a categorical value in the slot called `slot`.
    fn sign(&self, slot: &str, value: &[u8]) -> PyResult<u64> {
        let number = self.inner.slot(slot.as_bytes()).ok_or_else(|| unknown("slot", slot))?;
        Ok(self.inner.sign(number, value))
    }
}

/// A name that the job does not have.
pub(crate) fn unknown(kind: &str, name: &str) -> PyErr {
    SampleError::new_err(format!("unknown {kind} `{name}`"))
}

pub(crate) fn label_mode(required: bool) -> LabelMode {
    if required { LabelMode::Required } else { LabelMode::Ignored }
}

/// Cuts a file of `size` bytes into byte ranges.
#[pyfunction]
pub(crate) fn cut_units(size: u64, unit_bytes: u64) -> Vec<(u64, u64)> {
    cut(size, unit_bytes)
}

/// Whether a file with these first bytes is compressed, and so is one unit.
#[pyfunction]
pub(crate) fn is_compressed(start: &[u8]) -> bool {
    elasticrec_sample::compressed::is_compressed(start)
}

/// The order in which `count` units of an epoch are read.
#[pyfunction]
pub(crate) fn shuffle_units(count: usize, seed: u64, epoch: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    SplitMix64::from_parts(&[seed, u64::from(epoch)]).shuffle(&mut order);
    order
}

/// Samples ready for look-ups. The arrays are views of what the parser wrote.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Batch {
    pub(crate) parser: Arc<elasticrec_sample::Parser>,
    pub(crate) parsed: ParsedBatch,
    /// Where the last pull found the rows.
    pub(crate) handles: Handles,
    dense: Py<PyArray2<f32>>,
    labels: Py<PyArray2<f32>>,
    weights: Py<PyArray1<f32>>,
    /// Where its records stand, for batches that come from no lines.
    pub(crate) place: Option<String>,
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
        Batch { parser, parsed, handles: Handles::default(), dense, labels, weights, place: None }
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
    /// The id of its unit.
    #[getter]
    fn unit(&self) -> u64 {
        self.parsed.name.unit
    }

    /// Its place in the unit.
    #[getter]
    fn index(&self) -> u32 {
        self.parsed.name.index
    }

    #[getter]
    fn num_samples(&self) -> usize {
        self.parsed.batch.num_samples()
    }

    /// Records read for it, good or bad.
    #[getter]
    fn num_records(&self) -> usize {
        self.parsed.num_records
    }

    #[getter]
    fn num_bad(&self) -> usize {
        self.parsed.num_bad
    }

    /// Signs in slots that the job does not use.
    #[getter]
    fn num_unused(&self) -> u64 {
        self.parsed.batch.num_unused
    }

    /// The first few bad records of the reader, as `file:line: what`.
    #[getter]
    fn bad(&self) -> Vec<String> {
        self.parsed.bad.clone()
    }

    /// Where its records stand, as `file: lines 3, 8 and 510 more up to 1530`.
    #[getter]
    fn places(&self) -> String {
        let source = self.parsed.source.as_ref().map(elasticrec_sample::RecordBatch::places);
        source.or_else(|| self.place.clone()).unwrap_or_default()
    }

    /// Bytes of its file that are behind after it, about; 0 if unknown.
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

    /// `[num_samples]`: how often each sample was shown.
    #[getter]
    fn weights(&self, py: Python<'_>) -> Py<PyArray1<f32>> {
        self.weights.clone_ref(py)
    }

    /// All signs, by sample, then slot.
    #[getter]
    fn signs<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.parsed.batch.signs)
    }

    /// Where each (sample, slot) begins in `signs`; one more at the end.
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

/// How units are cut into batches.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct Cut {
    pub(crate) options: RecordOptions,
}

#[pymethods]
impl Cut {
    /// `select` is ("ratio" or "time", share or seconds since 1970, whether to take what is held out).
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
            Some((kind, ..)) => return Err(PyValueError::new_err(format!("select: unknown kind `{kind}`"))),
        };
        let batch_size = batch_size.max(1);
        Ok(Cut { options: RecordOptions { batch_size, shuffle, seed, skip_batches, piece_bytes, selection } })
    }
}

/// An iterator over the batches of units, read and parsed ahead by threads of its own.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct BatchReader {
    parser: Arc<elasticrec_sample::Parser>,
    /// A channel's end is not `Sync`; only `&mut self` methods touch it.
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
    #[pyo3(signature = (parser, units, cut, *, labels, workers))]
    fn new(parser: &Parser, units: Vec<UnitTuple>, cut: &Cut, labels: bool, workers: usize) -> Self {
        let units = units.into_iter().map(unit_of).collect();
        let options = ReaderOptions { records: cut.options.clone(), labels: label_mode(labels), workers };
        let parser = parser.inner.clone();
        let inner = elasticrec_sample::BatchReader::start(parser.clone(), units, options);
        BatchReader { parser, inner: Mutex::new(Some(inner)) }
    }

    /// Seconds that its threads spent reading, and parsing.
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

    /// Ends its threads.
    fn close(&mut self, py: Python<'_>) {
        let reader = self.reader().take();
        py.detach(|| drop(reader));
    }
}
