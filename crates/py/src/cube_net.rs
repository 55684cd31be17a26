//! Python bindings of the cube server and its client.

use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_cube::client::{Credentials, probe};
use elasticrec_cube::server::Identity;
use elasticrec_cube::{
    Client, ClientError, Cube, CubeError, DeltaFile, Server, VersionError, VersionSet, View, presence_of,
};
use elasticrec_wire::Reason;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::{ConfigError, IntoPyErr, ModelError, UnavailableError, not_contiguous};
use crate::net::{cannot_listen, counts_of, duration};
use crate::ps::PsTls;

type PresenceFlags<'py> = Bound<'py, PyArray1<bool>>;

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
            // A retry would not help.
            ClientError::Permanent { .. } | ClientError::Map(_) => ConfigError::new_err(text),
            ClientError::Gone { .. } => ModelError::new_err(text),
        }
    }
}

fn signs_of<'a>(signs: &'a PyReadonlyArray1<'_, u64>) -> PyResult<&'a [u64]> {
    signs.as_slice().map_err(|_| not_contiguous("signs"))
}

/// A server of some partitions of a model's versions; answers lookups on its own threads.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeServer {
    inner: Server,
}

#[pymethods]
impl CubeServer {
    /// Listen without holding a version yet. `partitions` are the server's first partition and their end.
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
            let text = format!("cube: expected partitions between 0 and {num_partitions}, got {first} to {end}");
            return Err(ConfigError::new_err(text));
        }
        let identity = Identity { model: model.into(), token: token.into() };
        let versions = Arc::new(VersionSet::new(first..end, num_partitions));
        let tls = tls.and_then(|tls| tls.server.clone());
        let inner = Server::start(versions, identity, address, tls);
        Ok(CubeServer { inner: inner.map_err(|error| cannot_listen("cube", address, &error))? })
    }

    /// The address that the server listens at, `host:port`.
    #[getter]
    fn address(&self) -> String {
        self.inner.address().to_string()
    }

    /// Load the server's partitions from the part files of a base, check them and install the version. The partitions are
    /// copied into memory, on huge pages if possible, or mapped: mapped pages can be reclaimed by the system.
    #[pyo3(signature = (version, paths, *, mapped = false))]
    fn install_base(&self, py: Python<'_>, version: u64, paths: Vec<PathBuf>, mapped: bool) -> PyResult<()> {
        py.detach(|| {
            let versions = self.inner.versions();
            let range = versions.partitions();
            let cube = if mapped { Cube::open_range(&paths, range) } else { Cube::load(&paths, Some(range)) };
            let view = View::of_base(Arc::new(cube.map_err(IntoPyErr::into_py_err)?));
            versions.install(version, view).map_err(IntoPyErr::into_py_err)
        })
    }

    /// Apply the part files of a delta to its parent, which the server holds, and install the version.
    fn install_delta(&self, py: Python<'_>, version: u64, parent: u64, paths: Vec<PathBuf>) -> PyResult<()> {
        py.detach(|| {
            let versions = self.inner.versions();
            let parent = versions.get(parent).map_err(IntoPyErr::into_py_err)?;
            let view = || -> Result<View, CubeError> {
                let parts = paths.iter().map(DeltaFile::open).collect::<Result<Vec<_>, _>>()?;
                versions.apply_delta(&parent, &parts)
            };
            versions.install(version, view().map_err(IntoPyErr::into_py_err)?).map_err(IntoPyErr::into_py_err)?;
            versions.start_merge();
            Ok(())
        })
    }

    /// Remove a version after the requests that use it.
    fn retire(&self, py: Python<'_>, version: u64) -> PyResult<()> {
        py.detach(|| self.inner.versions().retire(version)).map_err(IntoPyErr::into_py_err)
    }

    /// The versions that the server holds, ascending.
    fn versions(&self) -> Vec<u64> {
        self.inner.versions().numbers()
    }

    /// Figures of each version: rows, bytes of index and rows, segments over the base, signs changed in the segments.
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Vec<(u64, Bound<'py, PyDict>)>> {
        let describe = |(version, view): (u64, Arc<View>)| {
            let figures = PyDict::new(py);
            figures.set_item("rows", view.num_rows())?;
            figures.set_item("bytes", view.bytes())?;
            figures.set_item("segments", view.num_segments())?;
            figures.set_item("changes", view.num_changes())?;
            Ok((version, figures))
        };
        py.detach(|| self.inner.versions().all()).into_iter().map(describe).collect()
    }

    /// Set the server's description of itself, a JSON object, which clients receive with the inventory.
    fn set_about(&self, about: String) {
        self.inner.set_about(about);
    }

    /// Counters since the start, by name.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counters, connections) = (self.inner.counters(), self.inner.connections());
        let figures = counts_of(
            py,
            &[
                ("requests", &counters.requests),
                ("keys", &counters.keys),
                ("misses", &counters.misses),
                ("bytes", &counters.bytes),
                ("refused", &connections.refused),
                ("malformed", &connections.malformed),
            ],
        )?;
        figures.set_item("connections", connections.num_open())?;
        Ok(figures)
    }

    /// Latency of requests: (upper bound in seconds, count) of each bucket, and the sum of all latencies in seconds.
    fn latency(&self) -> (Vec<(f64, u64)>, f64) {
        let latency = &self.inner.counters().latency;
        (latency.buckets(), latency.sum_s())
    }

    /// Look signs up: their stored rows, one after the other, and which signs have one.
    fn seek<'py>(
        &self,
        py: Python<'py>,
        version: u64,
        signs: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Bound<'py, PyBytes>, PresenceFlags<'py>)> {
        let signs = signs_of(&signs)?;
        let result = py.detach(|| {
            let (mut rows, mut bits) = (Vec::new(), Vec::new());
            self.inner.look_up(version, signs, &mut rows, &mut bits)?;
            Ok((rows, presence_of(&bits, signs.len())))
        });
        let (rows, present) = result.map_err(|refusal: elasticrec_wire::Refusal| match refusal.reason {
            Reason::NoVersion => ModelError::new_err(refusal.text),
            _ => ConfigError::new_err(refusal.text),
        })?;
        Ok((PyBytes::new(py, &rows), PyArray1::from_vec(py, present)))
    }

    /// Stop the server: it sends clients to other replicas and answers the requests that have arrived.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.inner.stop());
    }
}

/// Looks up rows of a model at all shards of a store. Any number of threads may use it at once.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct CubeClient {
    pub(crate) inner: Arc<Client>,
}

#[pymethods]
impl CubeClient {
    /// Connect to the shards, given as lists of replica addresses. At least one replica of each shard must answer.
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

    /// Look signs up in a version: rows `[signs, width]`, zeros for signs without a row, and which signs have one.
    fn get<'py>(
        &self,
        py: Python<'py>,
        version: u64,
        signs: PyReadonlyArray1<'_, u64>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, PresenceFlags<'py>)> {
        let signs = signs_of(&signs)?;
        let found = py.detach(|| {
            let lookup = self.inner.lookup(version, signs)?;
            let width = lookup.layout().width();
            let (mut rows, mut present) = (vec![0.0; signs.len() * width], vec![false; signs.len()]);
            lookup.wait(&mut rows, &mut present)?;
            Ok::<_, ClientError>((rows, present, width))
        });
        let (rows, present, width) = found.map_err(IntoPyErr::into_py_err)?;
        Ok((PyArray1::from_vec(py, rows).reshape([signs.len(), width])?, PyArray1::from_vec(py, present)))
    }

    /// (name, width) of the columns of a version, and the type of its stored rows.
    fn layout(&self, py: Python<'_>, version: u64) -> PyResult<(Vec<(String, u32)>, &'static str)> {
        let layout = py.detach(|| self.inner.layout(version)).map_err(IntoPyErr::into_py_err)?;
        let columns = layout.columns().iter().map(|column| (column.name.clone(), column.width)).collect();
        Ok((columns, layout.row_type().name()))
    }

    /// Versions that some replica holds according to its last inventory, ascending.
    fn versions(&self) -> Vec<u64> {
        self.inner.versions()
    }

    /// Each replica: shard, address, why it is down or None, the versions that it holds, requests in flight.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let describe = |replica: elasticrec_cube::client::ReplicaInfo| {
            let info = PyDict::new(py);
            info.set_item("shard", replica.shard)?;
            info.set_item("address", replica.address)?;
            info.set_item("down", replica.down)?;
            info.set_item("versions", replica.versions)?;
            info.set_item("waiting", replica.num_in_flight)?;
            Ok(info)
        };
        py.detach(|| self.inner.info()).into_iter().map(describe).collect()
    }
}

/// Return the state of a cube server: its versions, its first and end partition and their number, and its description.
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
