//! Python bindings of the demo data generator.

use std::ops::ControlFlow;
use std::path::PathBuf;

use elasticrec_sample::demo::{DemoError, DemoFormat, DemoKind, DemoSpec, generate};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{ConfigError, io_error};

/// Write demo data and return its summary as JSON; `progress` is called with the number of samples written.
#[pyfunction]
#[pyo3(signature = (out, *, samples, slots, hours, seed, format, overwrite, threads, progress, kind="pairwise", structure=true))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn write_demo(
    py: Python<'_>,
    out: PathBuf,
    samples: u64,
    slots: u32,
    hours: u32,
    seed: u64,
    format: &str,
    overwrite: bool,
    threads: usize,
    progress: Option<Py<PyAny>>,
    kind: &str,
    structure: bool,
) -> PyResult<String> {
    let format = match format {
        "slots" => DemoFormat::Slots,
        "criteo" => DemoFormat::Criteo,
        other => return Err(ConfigError::new_err(format!("format: expected slots or criteo, got `{other}`"))),
    };
    let kind = match kind {
        "pairwise" => DemoKind::Pairwise,
        "multitask" => DemoKind::Multitask,
        "sequence" => DemoKind::Sequence,
        other => {
            let message = format!("kind: expected pairwise, multitask or sequence, got `{other}`");
            return Err(ConfigError::new_err(message));
        }
    };
    let spec = DemoSpec { samples, slots, hours, seed, format, kind, structure };
    let mut interrupted = None;
    let summary = py.detach(|| {
        generate(&spec, &out, overwrite, threads, &mut |written| {
            let called = Python::attach(|py| {
                py.check_signals()?;
                progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (written,)).map(|_| ()))
            });
            match called {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    interrupted = Some(error);
                    ControlFlow::Break(())
                }
            }
        })
    });
    match (summary, interrupted) {
        (_, Some(error)) => Err(error),
        (Ok(summary), None) => {
            serde_json::to_string(&summary).map_err(|error| PyValueError::new_err(error.to_string()))
        }
        (Err(DemoError::Io { path, source }), None) => Err(io_error(&source, path.display().to_string())),
        (Err(error), None) => Err(ConfigError::new_err(error.to_string())),
    }
}
