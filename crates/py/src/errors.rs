//! Conversion of the crates' errors into the exceptions of `elasticrec.errors`.

use std::io;

use elasticrec_cube::CubeError;
use elasticrec_sample::{FeaturesError, ReadError};
use elasticrec_table::part::PartError;
use elasticrec_table::{GrowError, SnapshotError, SpecError};
use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyValueError};

pyo3::import_exception!(elasticrec.errors, ConfigError);
pyo3::import_exception!(elasticrec.errors, ElasticRecError);
pyo3::import_exception!(elasticrec.errors, ModelError);
pyo3::import_exception!(elasticrec.errors, SampleError);
pyo3::import_exception!(elasticrec.errors, UnavailableError);

/// Converts an error into its Python exception.
pub(crate) trait IntoPyErr {
    fn into_py_err(self) -> PyErr;
}

impl IntoPyErr for FeaturesError {
    fn into_py_err(self) -> PyErr {
        ConfigError::new_err(self.to_string())
    }
}

impl IntoPyErr for SpecError {
    fn into_py_err(self) -> PyErr {
        ConfigError::new_err(self.to_string())
    }
}

impl IntoPyErr for ReadError {
    fn into_py_err(self) -> PyErr {
        match self.source.raw_os_error() {
            Some(_) => io_error(&self.source, self.path.display().to_string()),
            None => SampleError::new_err(self.to_string()),
        }
    }
}

impl IntoPyErr for PartError {
    fn into_py_err(self) -> PyErr {
        match self {
            PartError::Io { name, source } => io_error(&source, name),
            error => ModelError::new_err(error.to_string()),
        }
    }
}

impl IntoPyErr for SnapshotError {
    fn into_py_err(self) -> PyErr {
        match self {
            SnapshotError::Part(error) => error.into_py_err(),
            SnapshotError::Grow(error) => error.into_py_err(),
            error => ModelError::new_err(error.to_string()),
        }
    }
}

impl IntoPyErr for GrowError {
    fn into_py_err(self) -> PyErr {
        ElasticRecError::new_err(self.to_string())
    }
}

impl IntoPyErr for CubeError {
    fn into_py_err(self) -> PyErr {
        match self {
            CubeError::Part(error) => error.into_py_err(),
            error => ModelError::new_err(error.to_string()),
        }
    }
}

/// Returns `OSError(errno, text, path)`, which Python turns into `FileNotFoundError` and other subclasses.
pub(crate) fn io_error(error: &io::Error, path: String) -> PyErr {
    match error.raw_os_error() {
        Some(code) => {
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default().to_string();
            PyOSError::new_err((code, text, path))
        }
        None => PyOSError::new_err(format!("{path}: {error}")),
    }
}

/// Returns the error for an array that is not contiguous.
pub(crate) fn not_contiguous(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: expected a contiguous array"))
}
