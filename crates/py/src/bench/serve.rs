//! Measurements for `elasticrec bench`: traffic to a prediction server, and the speed of the bare network.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use elasticrec_bench::engine::{self, EngineRate};
use elasticrec_bench::traffic::{self, Arrivals, Pace, Progress, Protocol, Traffic, TrafficError};
use pyo3::prelude::*;

use crate::errors::{ConfigError, IntoPyErr, UnavailableError};

/// The outcome of traffic to a server.
#[pyclass(frozen, get_all, module = "elasticrec._core")]
pub(crate) struct TrafficReport {
    answered: u64,
    failed: u64,
    failures: BTreeMap<String, u64>,
    seconds: f64,
    offered: u64,
    late: u64,
    unsent: u64,
    lag_p99_us: f64,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

#[pymethods]
impl TrafficReport {
    /// Return the answers per second.
    #[getter]
    fn requests_per_s(&self) -> f64 {
        self.answered as f64 / self.seconds
    }
}

impl From<traffic::TrafficReport> for TrafficReport {
    fn from(report: traffic::TrafficReport) -> Self {
        let latency = report.latency;
        TrafficReport {
            answered: report.answered,
            failed: report.failed(),
            failures: report.failures.iter().map(|(failure, count)| (failure.to_string(), *count)).collect(),
            seconds: report.seconds,
            offered: report.offered,
            late: report.late,
            unsent: report.unsent,
            lag_p99_us: report.lag_p99_us,
            p50_us: latency.p50_us,
            p90_us: latency.p90_us,
            p99_us: latency.p99_us,
            p999_us: latency.p999_us,
            max_us: latency.max_us,
        }
    }
}

impl IntoPyErr for TrafficError {
    fn into_py_err(self) -> PyErr {
        match self {
            TrafficError::NoBodies | TrafficError::Number { .. } | TrafficError::Head(_) => {
                ConfigError::new_err(self.to_string())
            }
            TrafficError::Connect { .. } | TrafficError::Start(_) => UnavailableError::new_err(self.to_string()),
        }
    }
}

/// Send requests over keep-alive connections: in a closed loop, or `rate` per second in an open loop.
#[pyfunction]
#[pyo3(signature = (
    address, path, bodies, *, connections, seconds, content_type = "text/plain", token = None, headers = None,
    grpc = false, rate = None, poisson_seed = None, timeout_s = 30.0, progress = None
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn run_traffic(
    py: Python<'_>,
    address: String,
    path: String,
    bodies: Vec<Vec<u8>>,
    connections: usize,
    seconds: f64,
    content_type: &str,
    token: Option<&str>,
    headers: Option<BTreeMap<String, String>>,
    grpc: bool,
    rate: Option<f64>,
    poisson_seed: Option<u64>,
    timeout_s: f64,
    progress: Option<Py<PyAny>>,
) -> PyResult<TrafficReport> {
    let mut headers: Vec<_> = headers.unwrap_or_default().into_iter().collect();
    headers.extend(token.map(|token| ("authorization".into(), format!("Bearer {token}"))));
    let arrivals = poisson_seed.map_or(Arrivals::Even, |seed| Arrivals::Poisson { seed });
    let traffic = Traffic {
        address,
        protocol: if grpc { Protocol::Grpc } else { Protocol::Http1 { content_type: content_type.into() } },
        path,
        headers,
        bodies,
        connections,
        pace: rate.map_or(Pace::Closed, |rate| Pace::Open { rate, arrivals }),
        length: duration("seconds", seconds)?,
        timeout: duration("timeout_s", timeout_s)?,
    };
    let mut raised = None;
    let watch = |so_far: Progress| {
        let result = Python::attach(|py| {
            py.check_signals()?;
            let Some(progress) = &progress else { return Ok(()) };
            progress.call1(py, (so_far.elapsed.as_secs_f64(), so_far.answered, so_far.failed)).map(drop)
        });
        match result {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                raised = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let report = py.detach(|| traffic::run(&traffic, watch));
    match raised {
        Some(error) => Err(error),
        None => report.map(TrafficReport::from).map_err(IntoPyErr::into_py_err),
    }
}

fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| ConfigError::new_err(format!("bench: {name}: expected a number of seconds, got {seconds}")))
}

/// Return the instances per second through the bare network on prepared tensors.
#[pyfunction]
#[pyo3(signature = (path, ort_library, *, batch, seconds, threads))]
pub(crate) fn engine_rate(
    py: Python<'_>,
    path: PathBuf,
    ort_library: PathBuf,
    batch: usize,
    seconds: f64,
    threads: usize,
) -> PyResult<f64> {
    py.detach(|| engine::engine_rate(&path, &ort_library, EngineRate { batch, seconds, threads }))
        .map_err(IntoPyErr::into_py_err)
}
