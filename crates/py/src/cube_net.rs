//! The cube server and its client, for Python.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use elasticrec_cube::client::{Credentials, probe};
use elasticrec_cube::server::Identity;
use elasticrec_cube::{Client, ClientError, Cube, CubeError, DeltaFile, Server, VersionError, VersionSet, View};
use elasticrec_wire::Reason;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::{ConfigError, IntoPyErr, ModelError, UnavailableError};
use crate::ps::PsTls;

type Present<'py> = Bound<'py, PyArray1<bool>>;

impl IntoPyErr for VersionError {
    fn into_py_err(self) -> PyErr {
        ModelError::new_err(self.to_string())
    }
}

impl IntoPyErr for ClientError {
    fn into_py_err(self) -> PyErr {
        let text = self.to_string();
        match self {
            ClientError::Unavailable { .. } => UnavailableError::new_err(text),
            // what another attempt does not change
            ClientError::Unfit { .. } | ClientError::Map(_) => ConfigError::new_err(text),
            ClientError::Gone { .. } => ModelError::new_err(text),
        }
    }
}

fn signs_of<'a>(signs: &'a PyReadonlyArray1<'_, u64>) -> PyResult<&'a [u64]> {
    signs.as_slice().map_err(|_| PyValueError::new_err("signs: expected a contiguous array"))
}

/// Seconds that may come from a user.
pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("{name}: {error}, got {seconds}")))
}

/// Versions of some partitions of a model, looked up over sockets; answers on threads of its own.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeServer {
    inner: Server,
}

#[pymethods]
impl CubeServer {
    /// Listens; holds no version yet. `partitions` are the first and the end of its own.
    #[new]
    #[pyo3(signature = (model, *, address, token, partitions, num_partitions, tls = None))]
    fn new(
        model: &str,
        address: &str,
        token: &str,
        partitions: (u32, u32),
        num_partitions: u32,
        tls: Option<&PsTls>,
    ) -> PyResult<Self> {
        let (first, end) = partitions;
        if first >= end || end > num_partitions {
            let text = format!("cube: expected partitions from 0 to {num_partitions}, got {first} to {end}");
            return Err(ConfigError::new_err(text));
        }
        let identity = Identity { model: model.into(), token: token.into() };
        let store = Arc::new(VersionSet::new(first..end, num_partitions));
        let tls = tls.and_then(|tls| tls.server.clone());
        let inner = Server::start(store, identity, address, tls).map_err(|error| {
            let reason = match error.kind() {
                io::ErrorKind::AddrInUse => "the port is in use".into(),
                _ => error.to_string(),
            };
            ConfigError::new_err(format!("cube: {address}: cannot listen there: {reason}"))
        })?;
        Ok(CubeServer { inner })
    }

    /// Where it listens.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// Reads its own partitions of the part files of a base, checks them, and answers for it from now on. They are copied
    /// into memory, on huge pages where there are some, or mapped: a map takes no memory that others could not have.
    #[pyo3(signature = (version, paths, *, mapped = false))]
    fn install_base(&self, py: Python<'_>, version: u64, paths: Vec<PathBuf>, mapped: bool) -> PyResult<()> {
        py.detach(|| {
            let store = self.inner.store();
            let range = store.partitions();
            let cube = if mapped { Cube::open_range(&paths, range) } else { Cube::load(&paths, Some(range)) };
            let view = View::of_base(Arc::new(cube.map_err(IntoPyErr::into_py_err)?));
            store.install(version, view).map_err(IntoPyErr::into_py_err)
        })
    }

    /// Applies the part files of a delta to its parent, which it holds, and answers for the version from now on.
    fn install_delta(&self, py: Python<'_>, version: u64, parent: u64, paths: Vec<PathBuf>) -> PyResult<()> {
        py.detach(|| {
            let store = self.inner.store();
            let parent = store.get(parent).map_err(IntoPyErr::into_py_err)?;
            let view = || -> Result<View, CubeError> {
                let parts = paths.iter().map(DeltaFile::open).collect::<Result<Vec<_>, _>>()?;
                store.next(&parent, &parts)
            };
            store.install(version, view().map_err(IntoPyErr::into_py_err)?).map_err(IntoPyErr::into_py_err)?;
            store.merge_behind();
            Ok(())
        })
    }

    /// Gives a version up; requests that have it end first.
    fn retire(&self, py: Python<'_>, version: u64) -> PyResult<()> {
        py.detach(|| self.inner.store().retire(version)).map_err(IntoPyErr::into_py_err)
    }

    /// The versions it holds, ascending.
    fn versions(&self) -> Vec<u64> {
        self.inner.store().versions()
    }

    /// Of each version: rows, bytes of index and rows, segments over its base, signs changed in those.
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Vec<(u64, Bound<'py, PyDict>)>> {
        let describe = |(version, view): (u64, Arc<View>)| {
            let figures = PyDict::new(py);
            figures.set_item("rows", view.num_rows())?;
            figures.set_item("bytes", view.bytes())?;
            figures.set_item("segments", view.num_segments())?;
            figures.set_item("changes", view.num_changes())?;
            Ok((version, figures))
        };
        py.detach(|| self.inner.store().all()).into_iter().map(describe).collect()
    }

    /// Says how it is, a JSON object, to everybody who greets it.
    fn set_about(&self, about: String) {
        self.inner.set_about(about);
    }

    /// What it did so far, by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let figures = PyDict::new(py);
        for (name, counter) in [
            ("requests", &counters.requests),
            ("keys", &counters.keys),
            ("misses", &counters.misses),
            ("bytes", &counters.bytes),
            ("refused", &counters.refused),
            ("malformed", &counters.malformed),
        ] {
            figures.set_item(name, counter.load(Relaxed))?;
        }
        figures.set_item("connections", self.inner.num_connections())?;
        Ok(figures)
    }

    /// How long requests took: the upper bound in seconds of each bucket, how many are in it, and the seconds of all.
    fn latency(&self) -> (Vec<(f64, u64)>, f64) {
        let latency = &self.inner.counters().latency;
        (latency.buckets(), latency.sum_s())
    }

    /// Rows of a version as they are stored, one after the other, and which signs have one.
    fn seek<'py>(
        &self,
        py: Python<'py>,
        version: u64,
        signs: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Bound<'py, PyBytes>, Present<'py>)> {
        let signs = signs_of(&signs)?;
        let found = py.detach(|| {
            let (mut rows, mut bits) = (Vec::new(), Vec::new());
            self.inner.seek(version, signs, &mut rows, &mut bits)?;
            let present: Vec<bool> = (0..signs.len()).map(|at| bits[at / 64] >> (at % 64) & 1 == 1).collect();
            Ok((rows, present))
        });
        let (rows, present) = found.map_err(|refused: elasticrec_wire::Refusal| match refused.reason {
            Reason::NoVersion => ModelError::new_err(refused.text),
            _ => ConfigError::new_err(refused.text),
        })?;
        Ok((PyBytes::new(py, &rows), PyArray1::from_vec(py, present)))
    }

    /// Tells clients to go elsewhere, answers what they have sent, and ends.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.inner.stop());
    }
}

/// Rows of a model from all shards of a store, each of which has replicas. Any number of threads may use it at once.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeClient {
    pub(crate) inner: Arc<Client>,
}

#[pymethods]
impl CubeClient {
    /// Connects to the shards, a list of the addresses of its replicas each; of each at least one must answer.
    #[new]
    #[pyo3(signature = (model, shards, *, token, deadline_s, tls = None))]
    fn new(
        py: Python<'_>,
        model: &str,
        shards: Vec<Vec<String>>,
        token: &str,
        deadline_s: f64,
        tls: Option<&PsTls>,
    ) -> PyResult<Self> {
        let timeout = duration("deadline_s", deadline_s)?;
        let tls = tls.and_then(|tls| tls.client.clone());
        let credentials = Credentials { model: model.into(), token: token.into(), tls };
        let inner = py.detach(|| Client::connect(&shards, credentials, timeout)).map_err(IntoPyErr::into_py_err)?;
        Ok(CubeClient { inner: Arc::new(inner) })
    }

    /// Rows of a version, `[signs, width]`, zeros for signs without one, and which signs have one.
    fn get<'py>(
        &self,
        py: Python<'py>,
        version: u64,
        signs: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, Present<'py>)> {
        let signs = signs_of(&signs)?;
        let found = py.detach(|| {
            let asked = self.inner.lookup(version, signs)?;
            let width = asked.layout().width();
            let (mut rows, mut present) = (vec![0.0; signs.len() * width], vec![false; signs.len()]);
            asked.wait(&mut rows, &mut present)?;
            Ok::<_, ClientError>((rows, present, width))
        });
        let (rows, present, width) = found.map_err(IntoPyErr::into_py_err)?;
        Ok((PyArray1::from_vec(py, rows).reshape([signs.len(), width])?, PyArray1::from_vec(py, present)))
    }

    /// (name, width) of the columns of a version, and the type its rows are stored as.
    fn layout(&self, py: Python<'_>, version: u64) -> PyResult<(Vec<(String, u32)>, &'static str)> {
        let layout = py.detach(|| self.inner.layout(version)).map_err(IntoPyErr::into_py_err)?;
        let columns = layout.columns().iter().map(|column| (column.name.clone(), column.width)).collect();
        Ok((columns, layout.row_type().name()))
    }

    /// Versions that some replica held when it was last heard of, ascending.
    fn versions(&self) -> Vec<u64> {
        self.inner.versions()
    }

    /// Of each replica: shard, address, why it is down or None, the versions it holds, requests without an answer.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let describe = |replica: elasticrec_cube::client::ReplicaInfo| {
            let info = PyDict::new(py);
            info.set_item("shard", replica.shard)?;
            info.set_item("address", replica.address)?;
            info.set_item("down", replica.down)?;
            info.set_item("versions", replica.versions)?;
            info.set_item("waiting", replica.num_waiting)?;
            Ok(info)
        };
        py.detach(|| self.inner.info()).into_iter().map(describe).collect()
    }
}

/// What a cube server holds: its versions, its first and end partition and the number of all, and what it says of itself.
#[pyfunction]
#[pyo3(signature = (address, model, *, token, timeout_s, tls = None))]
pub(crate) fn probe_cube_server(
    py: Python<'_>,
    address: &str,
    model: &str,
    token: &str,
    timeout_s: f64,
    tls: Option<&PsTls>,
) -> PyResult<(Vec<u64>, [u32; 3], String)> {
    let timeout = duration("timeout_s", timeout_s)?;
    let tls = tls.and_then(|tls| tls.client.clone());
    let credentials = Credentials { model: model.into(), token: token.into(), tls };
    let found = py.detach(|| probe(address, &credentials, timeout)).map_err(UnavailableError::new_err)?;
    let partitions = [found.partitions.start, found.partitions.end, found.num_partitions];
    Ok((found.versions, partitions, found.about))
}
