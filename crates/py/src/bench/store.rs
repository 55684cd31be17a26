//! Traffic of random keys on a store or on Redis.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use elasticrec_bench::store::redis::{Redis, fill, requests};
use elasticrec_bench::store::{SLICE, StoreTarget, Traffic, TrafficReport, batches, run, write_cube};
use elasticrec_cube::client::Credentials;
use elasticrec_cube::{Client, Column};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{IntoPyErr, UnavailableError};
use crate::net::duration;

const NUM_PARTITIONS: u32 = 256;
/// The columns of a row: 40 bytes.
const WIDTHS: [(&str, u32); 2] = [("wide", 1), ("deep", 9)];
const WIDTH: usize = 10;
/// Time limit of a request.
const DEADLINE_S: f64 = 10.0;

/// Write a cube of `num_rows` rows of 1 + 9 columns; the first value of a row is the version.
#[pyfunction]
pub(crate) fn write_bench_cube(py: Python<'_>, path: PathBuf, num_rows: u64, version: u64) -> PyResult<()> {
    let columns = WIDTHS.map(|(name, width)| Column { name: name.into(), width }).into();
    let written = py.detach(|| write_cube(&path, num_rows, columns, NUM_PARTITIONS, version));
    written.map(drop).map_err(IntoPyErr::into_py_err)
}

fn traffic_of(num_rows: u64, batch: usize, miss_share: f64, in_flight: usize) -> PyResult<Traffic> {
    let length = duration("seconds", 1.0)?;
    Ok(Traffic { num_rows: num_rows.max(1), batch, miss_share, in_flight: in_flight.max(1), rate: None, length })
}

fn figures<'py>(py: Python<'py>, report: &TrafficReport) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    figures.set_item("keys", report.keys)?;
    figures.set_item("misses", report.misses)?;
    figures.set_item("failed", report.failed)?;
    figures.set_item("failure", &report.failure)?;
    figures.set_item("restarted", report.restarted)?;
    figures.set_item("seconds", report.seconds)?;
    for (name, q) in [("p50_s", 0.5), ("p99_s", 0.99), ("p999_s", 0.999)] {
        figures.set_item(name, report.quantile_s(q))?;
    }
    figures.set_item("slice_s", SLICE.as_secs_f64())?;
    figures.set_item("slices", &report.slices)?;
    Ok(figures)
}

/// Traffic of random keys on a store.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct StoreTraffic {
    clients: Vec<Client>,
    batches: Vec<Vec<u64>>,
    traffic: Traffic,
    version: AtomicU64,
}

#[pymethods]
impl StoreTraffic {
    /// Open `connections` connections to each replica, each with up to `in_flight` requests of `batch` keys in flight.
    #[new]
    #[pyo3(signature = (model, shards, *, token, version, rows, batch, miss_share, connections, in_flight))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn new(
        py: Python<'_>,
        model: &str,
        shards: Vec<Vec<String>>,
        token: &str,
        version: u64,
        rows: u64,
        batch: usize,
        miss_share: f64,
        connections: usize,
        in_flight: usize,
    ) -> PyResult<Self> {
        let traffic = traffic_of(rows, batch, miss_share, in_flight)?;
        let timeout = duration("deadline_s", DEADLINE_S)?;
        let credentials = Credentials { model: model.into(), token: token.into(), tls: None };
        let connect = |_| Client::connect(&shards, credentials.clone(), timeout);
        let clients = py.detach(|| (0..connections.max(1)).map(connect).collect::<Result<_, _>>());
        let clients = clients.map_err(IntoPyErr::into_py_err)?;
        let batches = py.detach(|| batches(&traffic));
        Ok(StoreTraffic { clients, batches, traffic, version: AtomicU64::new(version) })
    }

    /// Request this version from now on; may be called during `run`.
    fn switch(&self, version: u64) {
        self.version.store(version, Ordering::Release);
    }

    /// Send requests for `seconds`: as fast as answers arrive, or `rate` per second on schedule.
    #[pyo3(signature = (seconds, *, rate = None))]
    fn run<'py>(&self, py: Python<'py>, seconds: f64, rate: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let traffic = Traffic { length: duration("seconds", seconds)?, rate, ..self.traffic };
        let restarted = AtomicU64::new(0);
        let target = |client| StoreTarget::new(client, &self.batches, &self.version, &restarted);
        let mut report = py.detach(|| {
            let targets: Vec<StoreTarget<'_>> = self.clients.iter().map(target).collect();
            run(&targets, &traffic)
        });
        report.restarted = restarted.load(Ordering::Relaxed);
        figures(py, &report)
    }
}

/// The same traffic on Redis, with `MGET`.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct RedisTraffic {
    address: String,
    requests: Vec<Vec<u8>>,
    traffic: Traffic,
    connections: usize,
}

#[pymethods]
impl RedisTraffic {
    /// Prepare `connections` connections, each with up to `in_flight` requests of `batch` keys in flight.
    #[new]
    #[pyo3(signature = (address, *, rows, batch, miss_share, connections, in_flight))]
    fn new(
        py: Python<'_>,
        address: String,
        rows: u64,
        batch: usize,
        miss_share: f64,
        connections: usize,
        in_flight: usize,
    ) -> PyResult<Self> {
        let traffic = traffic_of(rows, batch, miss_share, in_flight)?;
        let requests = py.detach(|| requests(&batches(&traffic)));
        Ok(RedisTraffic { address, requests, traffic, connections: connections.max(1) })
    }

    /// Set the rows that `write_bench_cube` writes.
    fn fill(&self, py: Python<'_>, version: u64) -> PyResult<()> {
        let filled = py.detach(|| fill(&self.address, self.traffic.num_rows, WIDTH, version));
        filled.map_err(|error| self.unavailable(&error))
    }

    /// Send requests like `StoreTraffic.run`.
    #[pyo3(signature = (seconds, *, rate = None))]
    fn run<'py>(&self, py: Python<'py>, seconds: f64, rate: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let traffic = Traffic { length: duration("seconds", seconds)?, rate, ..self.traffic };
        let connect = |_| Redis::connect(&self.address, &self.requests, traffic.batch, 4 * WIDTH);
        let report = py.detach(|| {
            let targets: Vec<Redis<'_>> = (0..self.connections).map(connect).collect::<Result<_, _>>()?;
            Ok(run(&targets, &traffic))
        });
        figures(py, &report.map_err(|error| self.unavailable(&error))?)
    }
}

impl RedisTraffic {
    fn unavailable(&self, error: &io::Error) -> PyErr {
        UnavailableError::new_err(format!("redis at {}: {error}", self.address))
    }
}
