//! What `elasticrec bench cube` asks with, for Python: a store or Redis, as fast as they answer or at a rate.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use elasticrec_cube::client::Credentials;
use elasticrec_cube::load::redis::{Redis, fill, requests};
use elasticrec_cube::load::{self, Measured, Plan, batches};
use elasticrec_cube::{Client, Column};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cube_net::duration;
use crate::errors::{IntoPyErr, UnavailableError};

/// Partitions, and columns of a row: 40 bytes.
const NUM_PARTITIONS: u32 = 256;
const WIDTHS: [(&str, u32); 2] = [("wide", 1), ("deep", 9)];
const WIDTH: usize = 10;
/// A request that takes longer is lost.
const DEADLINE_S: f64 = 10.0;

/// Writes a cube of `num_rows` rows of 1 + 9 columns, the first of which is the version.
#[pyfunction]
pub(crate) fn write_load_cube(py: Python<'_>, path: PathBuf, num_rows: u64, version: u64) -> PyResult<()> {
    let columns = WIDTHS.map(|(name, width)| Column { name: name.into(), width }).into();
    let written = py.detach(|| load::write_cube(&path, num_rows, columns, NUM_PARTITIONS, version));
    written.map(drop).map_err(IntoPyErr::into_py_err)
}

fn plan_of(num_rows: u64, batch: usize, miss_share: f64, in_flight: usize) -> PyResult<Plan> {
    let length = duration("seconds", 1.0)?;
    Ok(Plan { num_rows: num_rows.max(1), batch, miss_share, in_flight: in_flight.max(1), rate: None, length })
}

fn figures<'py>(py: Python<'py>, measured: &Measured) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    figures.set_item("keys", measured.keys)?;
    figures.set_item("misses", measured.misses)?;
    figures.set_item("failed", measured.failed)?;
    figures.set_item("failure", &measured.failure)?;
    figures.set_item("restarted", measured.restarted)?;
    figures.set_item("seconds", measured.seconds)?;
    for (name, q) in [("p50_s", 0.5), ("p99_s", 0.99), ("p999_s", 0.999)] {
        figures.set_item(name, measured.quantile_s(q))?;
    }
    figures.set_item("slice_s", load::SLICE.as_secs_f64())?;
    figures.set_item("slices", &measured.slices)?;
    Ok(figures)
}

/// Batches of random keys against a store.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeLoad {
    clients: Vec<Client>,
    batches: Vec<Vec<u64>>,
    plan: Plan,
    version: AtomicU64,
}

#[pymethods]
impl CubeLoad {
    /// With `connections` connections to each replica, each with `in_flight` requests of `batch` keys on their way.
    #[new]
    #[pyo3(signature = (model, shards, *, token, version, rows, batch, miss_share, connections, in_flight))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
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
        let plan = plan_of(rows, batch, miss_share, in_flight)?;
        let timeout = duration("deadline_s", DEADLINE_S)?;
        let credentials = Credentials { model: model.into(), token: token.into(), tls: None };
        let connect = |_| Client::connect(&shards, credentials.clone(), timeout);
        let clients = py.detach(|| (0..connections.max(1)).map(connect).collect::<Result<_, _>>());
        let clients = clients.map_err(IntoPyErr::into_py_err)?;
        let batches = py.detach(|| batches(&plan));
        Ok(CubeLoad { clients, batches, plan, version: AtomicU64::new(version) })
    }

    /// Requests ask for this version from now on, also while they are run.
    fn switch(&self, version: u64) {
        self.version.store(version, Ordering::Release);
    }

    /// Asks for so long: as fast as answers come, or so many requests a second whatever becomes of those before.
    #[pyo3(signature = (seconds, *, rate = None))]
    fn run<'py>(&self, py: Python<'py>, seconds: f64, rate: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let plan = Plan { length: duration("seconds", seconds)?, rate, ..self.plan };
        let restarted = AtomicU64::new(0);
        let target = |client| load::Store::new(client, &self.batches, &self.version, &restarted);
        let mut measured = py.detach(|| {
            let targets: Vec<load::Store<'_>> = self.clients.iter().map(target).collect();
            load::run(&targets, &plan)
        });
        measured.restarted = restarted.load(Ordering::Relaxed);
        figures(py, &measured)
    }
}

/// The same keys against Redis, with `MGET`.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct RedisLoad {
    address: String,
    requests: Vec<Vec<u8>>,
    plan: Plan,
    connections: usize,
}

#[pymethods]
impl RedisLoad {
    /// With `connections` connections, each with `in_flight` requests of `batch` keys on their way.
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
        let plan = plan_of(rows, batch, miss_share, in_flight)?;
        let requests = py.detach(|| requests(&batches(&plan)));
        Ok(RedisLoad { address, requests, plan, connections: connections.max(1) })
    }

    /// Gives Redis the rows of the cube.
    fn fill(&self, py: Python<'_>, version: u64) -> PyResult<()> {
        let filled = py.detach(|| fill(&self.address, self.plan.num_rows, WIDTH, version));
        filled.map_err(|error| UnavailableError::new_err(format!("redis at {}: {error}", self.address)))
    }

    /// As `CubeLoad.run`.
    #[pyo3(signature = (seconds, *, rate = None))]
    fn run<'py>(&self, py: Python<'py>, seconds: f64, rate: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let plan = Plan { length: duration("seconds", seconds)?, rate, ..self.plan };
        let connect = |_| Redis::connect(&self.address, &self.requests, plan.batch, 4 * WIDTH);
        let measured = py.detach(|| {
            let targets: Vec<Redis<'_>> = (0..self.connections).map(connect).collect::<Result<_, _>>()?;
            Ok::<_, std::io::Error>(load::run(&targets, &plan))
        });
        let measured =
            measured.map_err(|error| UnavailableError::new_err(format!("redis at {}: {error}", self.address)))?;
        figures(py, &measured)
    }
}
