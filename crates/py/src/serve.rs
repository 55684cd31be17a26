//! Python bindings of the prediction server. Python starts and watches it; no request passes through Python.

use std::net::SocketAddr;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticrec_cube::client::ShardFailurePolicy;
use elasticrec_serve::server::{PROTOCOLS, Token};
use elasticrec_serve::{
    ModelPlan, PredictError, ServerError, ServerHandle, ServerOptions, VariantPlan, init_onnxruntime,
};
use elasticrec_wire::ServerTls;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::cube_net::CubeClient;
use crate::errors::{ConfigError, IntoPyErr, ModelError, SampleError, io_error};

/// A prediction server. It answers 503 until every variant of every model has a version.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct Server {
    handle: ServerHandle,
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (ort_library, address, models, *, workers, queue, max_connections, max_body_bytes, max_pending_bytes, max_instances, batch_size, batch_wait_us, timeout_ms, token, tls = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        ort_library: PathBuf,
        address: &str,
        models: Vec<(String, Vec<(String, f64)>)>,
        workers: usize,
        queue: usize,
        max_connections: usize,
        max_body_bytes: usize,
        max_pending_bytes: usize,
        max_instances: usize,
        batch_size: usize,
        batch_wait_us: u64,
        timeout_ms: Option<u64>,
        token: Option<String>,
        tls: Option<(PathBuf, PathBuf)>,
    ) -> PyResult<Self> {
        let addr = parse_address(address)?;
        let token = token.map(Token);
        let tls =
            tls.map(|(certificate, key)| ServerTls::for_external_clients(&certificate, &key, &PROTOCOLS)).transpose();
        let tls = tls.map_err(|error| ConfigError::new_err(error.to_string()))?;
        let options = ServerOptions {
            addr,
            workers,
            queue,
            max_connections,
            max_body_bytes,
            max_pending_bytes,
            max_instances,
            max_batch: batch_size,
            max_wait: Duration::from_micros(batch_wait_us),
            timeout: timeout_ms.map(Duration::from_millis),
            token,
            tls,
            ..ServerOptions::default()
        };
        let plan = |(name, variants): (String, Vec<(String, f64)>)| ModelPlan {
            name,
            variants: variants.into_iter().map(|(name, weight)| VariantPlan { name, weight }).collect(),
        };
        let plans: Vec<ModelPlan> = models.into_iter().map(plan).collect();
        let handle = py.detach(|| {
            init_onnxruntime(&ort_library).map_err(|error| ModelError::new_err(error.to_string()))?;
            elasticrec_serve::Server::start(options, &plans).map_err(|error| match error {
                ServerError::Bind { addr, source } => io_error(&source, addr.to_string()),
                error @ ServerError::Plan(_) => ConfigError::new_err(error.to_string()),
                error => PyOSError::new_err(error.to_string()),
            })
        })?;
        Ok(Server { handle })
    }

    /// `host:port` that the server listens on.
    #[getter]
    fn address(&self) -> String {
        self.handle.addr().to_string()
    }

    /// Load and warm a version, make it the current one of a variant, and return (version, rows). Rows are loaded from the
    /// version's files, or looked up in a store; with `lost_as_zero`, rows of a shard that is down read as zero. `readers`
    /// parse lines in a user's own format and belong to this version.
    #[pyo3(signature = (model, variant, path, *, store = None, lost_as_zero = false, readers = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn load(
        &self,
        py: Python<'_>,
        model: &str,
        variant: &str,
        path: PathBuf,
        store: Option<&CubeClient>,
        lost_as_zero: bool,
        readers: Option<&Readers>,
    ) -> PyResult<(u64, u64)> {
        let policy = if lost_as_zero { ShardFailurePolicy::Zero } else { ShardFailurePolicy::Fail };
        let store = store.map(|store| (store.inner.clone(), policy));
        let readers = readers.map(|readers| readers.inner.clone());
        py.detach(|| {
            let loaded = self.handle.load(model, variant, &path, store, readers)?;
            let manifest = loaded.manifest();
            Ok((manifest.version, manifest.table.rows))
        })
        .map_err(|error: elasticrec_serve::ModelError| error.into_py_err())
    }

    /// Set the metrics `offered_version` and `load_failures` of a variant.
    fn note(&self, model: &str, variant: &str, offered: u64, failures: u64) {
        self.handle.note(model, variant, offered, failures);
    }

    /// Wait until the server has stopped, at most for `seconds`; return whether it has.
    fn wait(&self, py: Python<'_>, seconds: f64) -> bool {
        py.detach(|| self.handle.wait(Some(Duration::from_secs_f64(seconds.max(0.0)))).is_some())
    }

    /// Stop accepting and finish in-flight requests; return whether all were answered in time.
    fn stop(&self, py: Python<'_>, within_s: f64) -> bool {
        py.detach(|| self.handle.stop(Duration::from_secs_f64(within_s.max(0.0))).0)
    }
}

/// Reader processes of a version, which parse lines in a user's own format. The owner of the processes adds them, and ends
/// those that are lost. Their sockets are closed with the version.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct Readers {
    inner: Arc<elasticrec_serve::Readers>,
}

#[pymethods]
impl Readers {
    #[new]
    #[pyo3(signature = (*, timeout_ms))]
    fn new(timeout_ms: u64) -> Self {
        Readers { inner: Arc::new(elasticrec_serve::Readers::new(Duration::from_millis(timeout_ms))) }
    }

    /// Add a process by its socket and return its number; the socket object is closed.
    fn add(&self, socket: &Bound<'_, PyAny>) -> PyResult<u64> {
        let fd: RawFd = socket.call_method0("detach")?.extract()?;
        if fd < 0 {
            return Err(PyValueError::new_err("socket: expected an open socket, got a closed one"));
        }
        // SAFETY: `detach` closed the socket object and returned its descriptor, which has no other owner.
        let stream = unsafe { UnixStream::from_raw_fd(fd) };
        self.inner.add(stream).map_err(|error| PyOSError::new_err(error.to_string()))
    }

    /// Return the numbers of processes that died, hung or returned invalid data since the last call.
    fn lost(&self) -> Vec<u64> {
        self.inner.lost()
    }
}

/// A version in this process: the server's path of a request without the socket.
#[pyclass(module = "elasticrec._core")]
pub(crate) struct Predictor {
    /// A scorer runs on one thread at a time.
    inner: Mutex<elasticrec_serve::Predictor>,
    num_labels: usize,
}

#[pymethods]
impl Predictor {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, ort_library: PathBuf) -> PyResult<Self> {
        let predictor = py
            .detach(|| elasticrec_serve::Predictor::load(&path, &ort_library))
            .map_err(|error: PredictError| error.into_py_err())?;
        let num_labels = predictor.manifest().labels().len();
        Ok(Predictor { inner: Mutex::new(predictor), num_labels })
    }

    /// Return the scores `[lines, labels]` of lines in the training format; their labels are ignored.
    fn predict<'py>(&mut self, py: Python<'py>, text: &[u8]) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let inner = self.inner.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let scores = py.detach(|| inner.predict_text(text)).map_err(|error: PredictError| error.into_py_err())?;
        self.shaped(py, scores)
    }

    /// Return the scores `[samples, labels]` of a batch as a reader process sends it.
    fn predict_parsed<'py>(&mut self, py: Python<'py>, parsed: &[u8]) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let inner = self.inner.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let scores = py.detach(|| inner.predict_parsed(parsed)).map_err(|error: PredictError| error.into_py_err())?;
        self.shaped(py, scores)
    }
}

impl Predictor {
    fn shaped<'py>(&self, py: Python<'py>, scores: Vec<f32>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let num_samples = scores.len() / self.num_labels;
        PyArray1::from_vec(py, scores).reshape([num_samples, self.num_labels])
    }
}

impl IntoPyErr for elasticrec_serve::ModelError {
    fn into_py_err(self) -> PyErr {
        ModelError::new_err(self.to_string())
    }
}

impl IntoPyErr for PredictError {
    fn into_py_err(self) -> PyErr {
        match self {
            PredictError::Record(message) => SampleError::new_err(message),
            error => ModelError::new_err(error.to_string()),
        }
    }
}

fn parse_address(address: &str) -> PyResult<SocketAddr> {
    address.parse().map_err(|_| {
        ConfigError::new_err(format!("address: expected `IP:port`, such as 127.0.0.1:8500, got `{address}`"))
    })
}
