//! Python bindings of cube files: views of versions, and writers of base and delta files.

use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_cube::publish::{PublishRequest, PublishedRows};
use elasticrec_cube::{Changes, Column, Cube, CubeError, DeltaFile, RowType, View, presence_of};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{ConfigError, IntoPyErr, not_contiguous};

type Rows<'py> = Bound<'py, PyArray2<f32>>;

/// The rows of one version: a base and the deltas applied to it.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeView {
    inner: Arc<View>,
}

#[pymethods]
impl CubeView {
    /// Open the part files of a base and of deltas, in the order of their versions; with `partitions` (first, end), only
    /// those partitions.
    #[new]
    #[pyo3(signature = (base, deltas = Vec::new(), *, partitions = None))]
    fn new(
        py: Python<'_>,
        base: Vec<PathBuf>,
        deltas: Vec<Vec<PathBuf>>,
        partitions: Option<(u32, u32)>,
    ) -> PyResult<Self> {
        let open = || -> Result<View, CubeError> {
            let base = match partitions {
                Some((first, end)) => Cube::open_range(&base, first..end)?,
                None => Cube::open(&base)?,
            };
            let mut view = View::of_base(Arc::new(base));
            for paths in deltas {
                let parts = paths.iter().map(DeltaFile::open).collect::<Result<Vec<_>, _>>()?;
                view = view.with_delta(&parts)?;
            }
            Ok(view)
        };
        Ok(CubeView { inner: Arc::new(py.detach(open).map_err(IntoPyErr::into_py_err)?) })
    }

    /// Look signs up: rows `[signs, width]`, zeros for signs without a row, and which signs have one.
    fn lookup<'py>(
        &self,
        py: Python<'py>,
        signs: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Rows<'py>, Bound<'py, PyArray1<bool>>)> {
        let signs = signs.as_slice().map_err(|_| not_contiguous("signs"))?;
        let view = &self.inner;
        let (rows, present) = py.detach(|| {
            let mut stored = vec![0; signs.len() * view.row_bytes()];
            let mut bits = vec![0; signs.len().div_ceil(64)];
            view.stored_rows(signs, &mut stored, &mut bits);
            let mut rows = vec![0.0; signs.len() * view.width()];
            view.codec().decode(&stored, &mut rows);
            (rows, presence_of(&bits, signs.len()))
        });
        let rows = PyArray1::from_vec(py, rows).reshape([signs.len(), view.width()])?;
        Ok((rows, PyArray1::from_vec(py, present)))
    }

    /// Iterate over all signs with their rows: one batch per partition, sorted by sign.
    fn items(&self) -> CubeItems {
        let partitions = self.inner.partitions();
        CubeItems { view: self.inner.clone(), next: partitions.start, end: partitions.end }
    }

    #[getter]
    fn num_rows(&self) -> u64 {
        self.inner.num_rows()
    }

    /// (name, width) of each column.
    #[getter]
    fn columns(&self) -> Vec<(String, u32)> {
        self.inner.columns().iter().map(|column| (column.name.clone(), column.width)).collect()
    }

    #[getter]
    fn width(&self) -> usize {
        self.inner.width()
    }

    #[getter]
    fn row_type(&self) -> &'static str {
        self.inner.row_type().name()
    }

    #[getter]
    fn num_partitions(&self) -> u32 {
        self.inner.num_partitions()
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.inner.bytes()
    }
}

/// The rows of a version, a partition at a time.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct CubeItems {
    view: Arc<View>,
    next: u32,
    end: u32,
}

#[pymethods]
impl CubeItems {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyArray1<u64>>, Rows<'py>)>> {
        if self.next >= self.end {
            return Ok(None);
        }
        let (view, partition) = (&self.view, self.next);
        let (signs, values) = py.detach(|| {
            let mut rows: Vec<(u64, &[u8])> = view.rows_of(partition).collect();
            rows.sort_unstable_by_key(|(sign, _)| *sign);
            let mut values = vec![0.0; rows.len() * view.width()];
            for ((_, row), values) in rows.iter().zip(values.chunks_mut(view.width())) {
                view.codec().decode(row, values);
            }
            (rows.iter().map(|(sign, _)| *sign).collect::<Vec<_>>(), values)
        });
        self.next += 1;
        let rows = PyArray1::from_vec(py, values).reshape([signs.len(), self.view.width()])?;
        Ok(Some((PyArray1::from_vec(py, signs), rows)))
    }
}

/// Writes one part file of a base.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct CubeWriter {
    /// Boxed: its checksum must be aligned to 64 bytes, and Python aligns objects to 16.
    inner: Option<Box<elasticrec_cube::CubeWriter>>,
}

#[pymethods]
impl CubeWriter {
    /// `columns` are (name, width).
    #[new]
    #[pyo3(signature = (path, columns, *, row_type, num_partitions))]
    fn new(path: PathBuf, columns: Vec<(String, u32)>, row_type: &str, num_partitions: u32) -> PyResult<Self> {
        let (columns, row_type) = (columns_of(columns), row_type_of(row_type)?);
        let inner = elasticrec_cube::CubeWriter::create(path, columns, row_type, num_partitions);
        Ok(CubeWriter { inner: Some(Box::new(inner.map_err(IntoPyErr::into_py_err)?)) })
    }

    /// Write a partition: its signs and their rows `[signs, width]`. Partitions are written in ascending order.
    fn add(
        &mut self,
        partition: u32,
        signs: PyReadonlyArray1<'_, u64>,
        rows: PyReadonlyArray2<'_, f32>,
    ) -> PyResult<()> {
        let writer = self.inner.as_mut().ok_or_else(already_complete)?;
        let width = writer.width();
        let (signs, rows) = contiguous(&signs, &rows, width)?;
        writer
            .write_partition(partition, signs, |i, values| values.copy_from_slice(&rows[i * width..][..width]))
            .map_err(IntoPyErr::into_py_err)
    }

    /// Complete the file; return its size and SHA-256.
    fn finish(&mut self, py: Python<'_>) -> PyResult<(u64, String)> {
        let writer = self.inner.take().ok_or_else(already_complete)?;
        let written = py.detach(|| writer.finish()).map_err(IntoPyErr::into_py_err)?;
        Ok((written.bytes, written.sha256))
    }
}

/// Writes one part file of a delta.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct DeltaWriter {
    /// Boxed, like that of `CubeWriter`.
    inner: Option<Box<elasticrec_cube::DeltaWriter>>,
}

#[pymethods]
impl DeltaWriter {
    /// `columns` are (name, width).
    #[new]
    #[pyo3(signature = (path, columns, *, row_type, num_partitions))]
    fn new(path: PathBuf, columns: Vec<(String, u32)>, row_type: &str, num_partitions: u32) -> PyResult<Self> {
        let (columns, row_type) = (columns_of(columns), row_type_of(row_type)?);
        let inner = elasticrec_cube::DeltaWriter::create(path, columns, row_type, num_partitions);
        Ok(DeltaWriter { inner: Some(Box::new(inner.map_err(IntoPyErr::into_py_err)?)) })
    }

    /// Add the changes of a partition: signs with their rows `[signs, width]`, and removed signs. Partitions are added in
    /// ascending order.
    #[pyo3(signature = (partition, signs, rows, removed, *, is_whole = false))]
    fn add(
        &mut self,
        partition: u32,
        signs: PyReadonlyArray1<'_, u64>,
        rows: PyReadonlyArray2<'_, f32>,
        removed: PyReadonlyArray1<'_, u64>,
        is_whole: bool,
    ) -> PyResult<()> {
        let writer = self.inner.as_mut().ok_or_else(already_complete)?;
        let width = writer.width();
        let (signs, rows) = contiguous(&signs, &rows, width)?;
        let removed = removed.as_slice().map_err(|_| not_contiguous("removed"))?;
        let changes = Changes { signs, removed, is_whole };
        writer
            .add(partition, changes, |i, values| values.copy_from_slice(&rows[i * width..][..width]))
            .map_err(IntoPyErr::into_py_err)
    }

    /// Complete the file; return its size and SHA-256.
    fn finish(&mut self, py: Python<'_>) -> PyResult<(u64, String)> {
        let writer = self.inner.take().ok_or_else(already_complete)?;
        let written = py.detach(|| writer.finish()).map_err(IntoPyErr::into_py_err)?;
        Ok((written.bytes, written.sha256))
    }
}

/// Returns the row type with a name.
pub(crate) fn row_type_of(name: &str) -> PyResult<RowType> {
    let what = || ConfigError::new_err(format!("row_type: expected `f32`, `f16` or `int8`, got `{name}`"));
    RowType::of_name(name).ok_or_else(what)
}

/// Returns the request to write the rows of a version to `path`.
pub(crate) fn publish_request(
    name: &str,
    committed: Option<&str>,
    is_base: bool,
    row_type: &str,
    path: PathBuf,
) -> PyResult<PublishRequest> {
    let row_type = row_type_of(row_type)?;
    Ok(PublishRequest { name: name.into(), committed: committed.map(Into::into), is_base, row_type, path })
}

/// Figures of a published part file, for messages and manifests.
pub(crate) fn figures_of<'py>(py: Python<'py>, published: &PublishedRows) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    for (name, figure) in [
        ("bytes", published.written.bytes),
        ("rows", published.num_rows),
        ("changed", published.num_changed),
        ("removed", published.num_removed),
        ("whole", published.num_whole),
    ] {
        figures.set_item(name, figure)?;
    }
    figures.set_item("sha256", &published.written.sha256)?;
    Ok(figures)
}

fn columns_of(columns: Vec<(String, u32)>) -> Vec<Column> {
    columns.into_iter().map(|(name, width)| Column { name, width }).collect()
}

fn already_complete() -> PyErr {
    PyValueError::new_err("the file is already complete")
}

/// Returns signs and rows as slices; checks that the rows are `[signs, width]`.
fn contiguous<'a>(
    signs: &'a PyReadonlyArray1<'_, u64>,
    rows: &'a PyReadonlyArray2<'_, f32>,
    width: usize,
) -> PyResult<(&'a [u64], &'a [f32])> {
    let signs = signs.as_slice().map_err(|_| not_contiguous("signs"))?;
    if *rows.shape() != [signs.len(), width] {
        let (expected, got) = ([signs.len(), width], rows.shape());
        return Err(PyValueError::new_err(format!("rows: expected shape {expected:?}, got {got:?}")));
    }
    let rows = rows.as_slice().map_err(|_| not_contiguous("rows"))?;
    Ok((signs, rows))
}
