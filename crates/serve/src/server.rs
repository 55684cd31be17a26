//! The server: its options, its start and stop, and loading versions.
//!
//! - `listen` accepts connections and detects their protocol; `time_limits` disconnects clients that do not send or read;
//! - `registry` has the models, their variants and the current version of each.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elasticrec_cube::Client;
use elasticrec_cube::client::ShardFailurePolicy;
use elasticrec_wire::{ServerTls, lock};
use thiserror::Error;
use tokio::sync::watch;

use crate::codecs::Limits;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::model::{Model, ModelError, RowSource};
use crate::queue::answers::Answers;
use crate::queue::deployment::{Deployment, DeploymentOptions, Resources};
use crate::queue::readers::Readers;
use crate::queue::worker::Batching;

mod listen;
pub(crate) mod registry;
mod time_limits;

use registry::Registry;
pub use registry::{ModelPlan, PlanError, VariantPlan};

/// A secret that its `Debug` output hides.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("***")
    }
}

/// The options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Address to listen on; port 0 takes a free one.
    pub addr: SocketAddr,
    /// Number of scorers, each with a thread.
    pub workers: usize,
    /// Maximum number of queued requests for each model; further ones are answered with 429.
    pub queue: usize,
    /// Number of threads for the sockets, which also score small requests.
    pub io_threads: usize,
    /// Maximum number of connections; further ones wait to be accepted.
    pub max_connections: usize,
    /// Maximum length of a body.
    pub max_body_bytes: usize,
    /// Maximum memory of all in-flight requests and answers; further requests are answered with 429.
    pub max_pending_bytes: usize,
    /// Maximum number of instances or lines in a request.
    pub max_instances: usize,
    /// Queued requests are scored together up to this number of instances; 1 scores each by itself.
    pub max_batch: usize,
    /// Time that a request may wait for others to be scored with it, if recent requests arrived together.
    pub max_wait: Duration,
    /// The token, required on every path except health and readiness.
    pub token: Option<Token>,
    /// Certificate and key. With TLS only HTTP and gRPC are served: bRPC has no TLS.
    pub tls: Option<ServerTls>,
    /// Time limit for the headers of a request, and so for an idle connection.
    pub header_timeout: Duration,
    /// Time limit for the body of a request.
    pub body_timeout: Duration,
    /// Time limit for the prediction of a request without one of its own.
    pub timeout: Option<Duration>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        ServerOptions {
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            workers: cores,
            queue: 1024,
            io_threads: cores,
            max_connections: 4096,
            max_body_bytes: 16 << 20,
            max_pending_bytes: 1 << 30,
            max_instances: 10_000,
            max_batch: 256,
            // Requests that arrive while a batch is scored are scored together anyway.
            max_wait: Duration::ZERO,
            token: None,
            tls: None,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            timeout: None,
        }
    }
}

/// The reason a server did not start.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error("serve: {addr}: {source}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The operating system refused a thread or an event queue.
    #[error("serve: {0}")]
    Start(io::Error),
    /// The models of the configuration are invalid.
    #[error("serve: {0}")]
    Plan(#[from] PlanError),
}

/// The state that all connections share.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) metrics: Metrics,
    pub(crate) registry: Registry,
    pub(crate) memory: Arc<Memory>,
    answers: Answers,
}

/// The protocols that clients may negotiate with ALPN.
pub const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The server.
pub struct Server;

impl Server {
    /// Binds the address and answers requests; ready once every variant of every model has a version.
    pub fn start(options: ServerOptions, models: &[ModelPlan]) -> Result<ServerHandle, ServerError> {
        let registry = Registry::new(models)?;
        let bind = |source| ServerError::Bind { addr: options.addr, source };
        let listener = TcpListener::bind(options.addr).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.io_threads.max(1))
            .thread_name("serve-io")
            .enable_io()
            .enable_time()
            .build()
            .map_err(ServerError::Start)?;
        let listener = {
            let _guard = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(ServerError::Start)?
        };
        let (answers, deliver_all) = Answers::new();
        runtime.spawn(deliver_all);
        let metrics = Metrics::new();
        for (model, variant) in models.iter().flat_map(|plan| plan.variants.iter().map(|one| (&plan.name, &one.name))) {
            // The metrics of a variant exist before its first request.
            metrics.of(model, variant);
        }
        let memory = Memory::new(options.max_pending_bytes);
        let app = Arc::new(App { options, metrics, registry, memory, answers });
        let (stop, stopped) = watch::channel(None);
        let ended = Arc::new(EndSignal::default());
        let (thread_app, thread_ended) = (app.clone(), ended.clone());
        let serve = move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let deadline = runtime.block_on(listen::serve(listener, thread_app.clone(), stopped));
                runtime.shutdown_background();
                end_scorers(&thread_app, deadline)
            }));
            thread_ended.set(outcome.unwrap_or(DrainOutcome(false)));
        };
        std::thread::Builder::new().name("serve".into()).spawn(serve).map_err(ServerError::Start)?;
        Ok(ServerHandle { addr, app, stop, ended })
    }
}

/// Runs heavy work on a thread of low priority, so that it does not delay answers. The work must not start threads:
/// they would inherit the priority.
fn run_in_background<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let work = move || {
            // If this fails, answers wait a little longer during the work.
            #[cfg(target_os = "linux")]
            let _ = rustix::process::setpriority_process(None, BACKGROUND);
            work()
        };
        scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Frees a replaced version after its last request, on a thread of its own: unmapping takes time.
fn release_later(deployment: Arc<Deployment>) {
    let wait = move || {
        while Arc::strong_count(&deployment) > 1 {
            std::thread::sleep(RELEASE_POLL);
        }
    };
    // If no thread starts, the last request frees the version.
    let _ = std::thread::Builder::new().name("serve-release".into()).spawn(wait);
}

/// Whether every accepted request was answered before the stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainOutcome(pub bool);

/// Set once, when the server's thread ends.
#[derive(Default)]
struct EndSignal {
    outcome: Mutex<Option<DrainOutcome>>,
    changed: Condvar,
}

impl EndSignal {
    fn set(&self, outcome: DrainOutcome) {
        *lock(&self.outcome) = Some(outcome);
        self.changed.notify_all();
    }

    fn wait(&self, timeout: Option<Duration>) -> Option<DrainOutcome> {
        let outcome = lock(&self.outcome);
        match timeout {
            Some(timeout) => {
                *self
                    .changed
                    .wait_timeout_while(outcome, timeout, |outcome| outcome.is_none())
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
            None => {
                *self.changed.wait_while(outcome, |outcome| outcome.is_none()).unwrap_or_else(PoisonError::into_inner)
            }
        }
    }
}

/// Interval of checks whether the scorer threads have ended.
const END_POLL: Duration = Duration::from_millis(1);
/// Interval of checks whether the last request of a version has ended.
const RELEASE_POLL: Duration = Duration::from_millis(10);
/// Niceness of loading: a tenth of the CPU share of other threads, so that it ends on busy cores too.
const BACKGROUND: i32 = 10;

/// Lets the scorers finish the queued requests, until the deadline.
fn end_scorers(app: &App, deadline: Instant) -> DrainOutcome {
    let variants = app.registry.models().flat_map(|entry| &entry.variants);
    let mut left: Vec<Arc<Deployment>> = variants.filter_map(|variant| variant.switch(None)).collect();
    let mut threads = Vec::new();
    loop {
        // Connections closed at the deadline may hold a deployment a little longer.
        left.retain_mut(|deployment| match Arc::get_mut(deployment) {
            Some(deployment) => {
                threads.extend(deployment.queue.close());
                false
            }
            None => true,
        });
        if left.is_empty() && threads.iter().all(|thread: &JoinHandle<()>| thread.is_finished()) {
            return DrainOutcome(true);
        }
        if Instant::now() >= deadline {
            return DrainOutcome(false);
        }
        std::thread::sleep(END_POLL);
    }
}

/// A running server; dropping the handle stops it.
pub struct ServerHandle {
    addr: SocketAddr,
    pub(crate) app: Arc<App>,
    stop: watch::Sender<Option<Instant>>,
    ended: Arc<EndSignal>,
}

impl ServerHandle {
    /// Returns the address of the listening socket.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Loads and warms a version, and makes it the current one of a variant. In-flight requests end on the version they
    /// started with. Rows are looked up in `store` if it is given, else they are loaded from the version's files,
    /// except those that the previous version has in memory. `readers` parse lines in a user's own format.
    pub fn load(
        &self,
        name: &str,
        variant: &str,
        path: &Path,
        store: Option<(Arc<Client>, ShardFailurePolicy)>,
        readers: Option<Arc<Readers>>,
    ) -> Result<Arc<Model>, ModelError> {
        let ServerOptions { workers, queue, max_instances, max_batch, max_wait, .. } = self.app.options;
        let batching = Batching { max_instances: max_batch, max_wait };
        let options = DeploymentOptions { capacity: queue, limits: Limits { max_instances }, batching };
        let entry = self.app.registry.variant(name, variant)?;
        let load = || {
            let source = match store {
                Some((client, policy)) => RowSource::Store(client, policy),
                None => RowSource::Files(entry.current().and_then(|deployment| deployment.model.clone())),
            };
            Model::load_with(path, &source)
        };
        let scorers = run_in_background(|| {
            let model = load()?;
            (0..workers.max(1)).map(|_| model.scorer()).collect::<Result<Vec<_>, _>>()
        })?;
        let metrics = self.app.metrics.of(name, variant);
        let resources = Resources { metrics: &metrics, answers: &self.app.answers, readers };
        let deployment = Arc::new(Deployment::start(scorers, name, variant, options, resources)?);
        metrics.version.set(deployment.info.version as i64);
        let model = deployment.model.clone();
        if let Some(previous) = entry.switch(Some(deployment)) {
            release_later(previous);
        }
        model.ok_or_else(|| ModelError::Mismatch { name: name.into(), what: "has no model".into() })
    }

    /// Sets the metrics `offered_version` and `load_failures` of a variant.
    pub fn note(&self, name: &str, variant: &str, offered: u64, failures: u64) {
        let metrics = self.app.metrics.of(name, variant);
        metrics.offered.set(offered as i64);
        metrics.load_failures.inc_by(failures.saturating_sub(metrics.load_failures.get()));
    }

    /// Stops accepting, finishes in-flight requests, and returns when they are done or the time limit has passed.
    pub fn stop(&self, within: Duration) -> DrainOutcome {
        let deadline = Instant::now() + within;
        self.stop.send_modify(|stop| {
            stop.get_or_insert(deadline);
        });
        self.ended.wait(None).unwrap_or(DrainOutcome(false))
    }

    /// Waits until the server has stopped, at most for `timeout`. Returns None if it is still running.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<DrainOutcome> {
        self.ended.wait(timeout)
    }
}
