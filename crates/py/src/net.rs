//! Shared by the bindings of parameter servers and cube servers: durations, listen errors, counters.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::ConfigError;

/// Converts seconds to a duration; the error names the parameter.
pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("{name}: {error}, got {seconds}")))
}

/// The error of a server that cannot listen at its address.
pub(crate) fn cannot_listen(role: &str, address: &str, error: &io::Error) -> PyErr {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => "the port is in use".into(),
        _ => error.to_string(),
    };
    ConfigError::new_err(format!("{role}: {address}: cannot listen: {reason}"))
}

/// Reads counters into a dict, by name.
pub(crate) fn counts_of<'py>(py: Python<'py>, counters: &[(&str, &AtomicU64)]) -> PyResult<Bound<'py, PyDict>> {
    let counts = PyDict::new(py);
    for (name, counter) in counters {
        counts.set_item(name, counter.load(Ordering::Relaxed))?;
    }
    Ok(counts)
}
