//! The server: sockets in, predictions out; all that computes is behind the queues of the versions at work.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elasticrec_cube::Client;
use elasticrec_cube::client::ShardFailurePolicy;
use elasticrec_wire::ServerTls;
use thiserror::Error;
use tokio::sync::watch;

use crate::answers::Answers;
use crate::deployment::{Deployment, Means, Sizes};
use crate::face::Limits;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::model::{Model, ModelError, RowSource};
use crate::readers::Readers;
use crate::registry::{ModelPlan, PlanError, Registry};
use crate::worker::Joining;

mod listen;
mod patience;

/// A secret that does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("***")
    }
}

/// How to serve.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Where to listen; port 0 takes a free one.
    pub addr: SocketAddr,
    /// Scorers, each with a thread of its own for what is not small.
    pub workers: usize,
    /// Predictions that may wait for a scorer; further ones get 429.
    pub queue: usize,
    /// Threads for the sockets, which score small requests too.
    pub io_threads: usize,
    /// Connections at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// Longest body.
    pub max_body_bytes: usize,
    /// What requests under way and their answers may have together; further ones get 429.
    pub max_pending_bytes: usize,
    /// Instances, or lines, a request.
    pub max_instances: usize,
    /// Requests that wait together are scored together up to so many instances; 1 scores each by itself.
    pub max_batch: usize,
    /// How long a request may wait for others, when others came together with those before it.
    pub max_wait: Duration,
    /// Asked for on everything but health and readiness.
    pub token: Option<Token>,
    /// What it shows; HTTP and gRPC are inside, and bRPC, which has no TLS of its own, is not spoken then.
    pub tls: Option<ServerTls>,
    /// For the head of a request, and so for how long a connection may idle.
    pub header_timeout: Duration,
    /// For the body of a request.
    pub body_timeout: Duration,
    /// For the prediction of a request that says nothing of it; none for as long as it takes.
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
            // those that come while a batch is scored are together anyway
            max_wait: Duration::ZERO,
            token: None,
            tls: None,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            timeout: None,
        }
    }
}

/// Why there is no server.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The address cannot be had.
    #[error("serve: {addr}: {source}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system gave no thread or no event queue.
    #[error("serve: {0}")]
    Start(io::Error),
    /// The models make no sense.
    #[error("serve: {0}")]
    Plan(#[from] PlanError),
}

/// What all connections share.
pub(crate) struct App {
    pub(crate) options: ServerOptions,
    pub(crate) metrics: Metrics,
    pub(crate) registry: Registry,
    pub(crate) memory: Arc<Memory>,
    answers: Answers,
}

/// What is spoken inside of TLS.
pub const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The server.
pub struct Server;

impl Server {
    /// Binds the address and answers on it; ready once every variant of every model has a version.
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
        let (answers, hand_out) = Answers::new();
        runtime.spawn(hand_out);
        let metrics = Metrics::new();
        for (model, variant) in models.iter().flat_map(|plan| plan.variants.iter().map(|one| (&plan.name, &one.name))) {
            // so that they are there before their first request
            metrics.of(model, variant);
        }
        let memory = Memory::new(options.max_pending_bytes);
        let app = Arc::new(App { options, metrics, registry, memory, answers });
        let (stop, stopped) = watch::channel(None);
        let ended = Arc::new(Ended::default());
        let (thread_app, thread_ended) = (app.clone(), ended.clone());
        let serve = move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let deadline = runtime.block_on(listen::serve(listener, thread_app.clone(), stopped));
                runtime.shutdown_background();
                end_scorers(&thread_app, deadline)
            }));
            thread_ended.set(outcome.unwrap_or(Drained(false)));
        };
        std::thread::Builder::new().name("serve".into()).spawn(serve).map_err(ServerError::Start)?;
        Ok(ServerHandle { addr, app, stop, ended })
    }
}

/// Does heavy work on a thread that leaves the cores to those that answer; threads that come of it must not be started
/// there: they would inherit that.
fn in_the_background<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let work = move || {
            // only a wish: without it all the same is done, and answers wait a little longer meanwhile
            #[cfg(target_os = "linux")]
            let _ = rustix::process::setpriority_process(None, BACKGROUND);
            work()
        };
        scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Frees a version once its last request is answered, on nobody's time.
fn let_go(deployment: Arc<Deployment>) {
    let wait = move || {
        while Arc::strong_count(&deployment) > 1 {
            std::thread::sleep(LEAVE_POLL);
        }
    };
    // without a thread the last request does it
    let _ = std::thread::Builder::new().name("serve-leave".into()).spawn(wait);
}

/// Whether everything that was accepted has been answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained(pub bool);

/// Set once, by the server's thread on its way out.
#[derive(Default)]
struct Ended {
    outcome: Mutex<Option<Drained>>,
    changed: Condvar,
}

impl Ended {
    fn set(&self, outcome: Drained) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.changed.notify_all();
    }

    fn wait(&self, timeout: Option<Duration>) -> Option<Drained> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
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

/// How often the end of a scorer thread is looked for.
const POLL: Duration = Duration::from_millis(1);
/// How often the end of a version's last request is looked for.
const LEAVE_POLL: Duration = Duration::from_millis(10);
/// The niceness of what loads: a tenth of what others get, so that on busy cores it comes to an end too.
const BACKGROUND: i32 = 10;

/// Lets the scorers finish what is queued, until the deadline.
fn end_scorers(app: &App, deadline: Instant) -> Drained {
    let variants = app.registry.models().flat_map(|entry| &entry.variants);
    let mut left: Vec<Arc<Deployment>> = variants.filter_map(|variant| variant.switch(None)).collect();
    let mut threads = Vec::new();
    loop {
        // connections that were cut off at the deadline may still let go of it
        left.retain_mut(|deployment| match Arc::get_mut(deployment) {
            Some(deployment) => {
                threads.extend(deployment.pool.close());
                false
            }
            None => true,
        });
        if left.is_empty() && threads.iter().all(|thread: &JoinHandle<()>| thread.is_finished()) {
            return Drained(true);
        }
        if Instant::now() >= deadline {
            return Drained(false);
        }
        std::thread::sleep(POLL);
    }
}

/// A server that runs; stops when it is dropped.
pub struct ServerHandle {
    addr: SocketAddr,
    pub(crate) app: Arc<App>,
    stop: watch::Sender<Option<Instant>>,
    ended: Arc<Ended>,
}

impl ServerHandle {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Warms a version and gives it every request of a variant from then on; requests under way end on the version that
    /// they began with.
    pub fn install(&self, name: &str, variant: &str, model: &Arc<Model>) -> Result<(), ModelError> {
        self.prepare(name, variant, None, || Ok(model.clone())).map(|_| ())
    }

    /// Loads a version and [installs](ServerHandle::install) it. Its rows are looked up at a store if one is given; else
    /// they are those of its files, of which the version before may have some already. `readers` read its lines where
    /// they are of a user's own format.
    pub fn load(
        &self,
        name: &str,
        variant: &str,
        path: &Path,
        store: Option<(Arc<Client>, ShardFailurePolicy)>,
        readers: Option<Arc<Readers>>,
    ) -> Result<Arc<Model>, ModelError> {
        self.prepare(name, variant, readers, || {
            let before = self.app.registry.place(name, variant)?.current();
            let source = match store {
                Some((client, lost)) => RowSource::Store(client, lost),
                None => RowSource::Files(before.and_then(|deployment| deployment.model.clone())),
            };
            Model::load_with(path, &source)
        })
    }

    fn prepare(
        &self,
        name: &str,
        variant: &str,
        readers: Option<Arc<Readers>>,
        load: impl FnOnce() -> Result<Arc<Model>, ModelError> + Send,
    ) -> Result<Arc<Model>, ModelError> {
        let ServerOptions { workers, queue, max_instances, max_batch, max_wait, .. } = self.app.options;
        let joining = Joining { max_instances: max_batch, max_wait };
        let sizes = Sizes { queue, limits: Limits { max_instances }, joining };
        let place = self.app.registry.place(name, variant)?;
        let scorers = in_the_background(|| {
            let model = load()?;
            (0..workers.max(1)).map(|_| model.scorer()).collect::<Result<Vec<_>, _>>()
        })?;
        let metrics = self.app.metrics.of(name, variant);
        let means = Means { metrics: &metrics, answers: &self.app.answers, readers };
        let deployment = Arc::new(Deployment::start(scorers, name, variant, sizes, means)?);
        metrics.version.set(deployment.about.version as i64);
        let model = deployment.model.clone();
        if let Some(before) = place.switch(Some(deployment)) {
            let_go(before);
        }
        model.ok_or_else(|| ModelError::Mismatch { name: name.into(), what: "has no model".into() })
    }

    /// Notes which version a variant should have, and how often one could not be loaded so far.
    pub fn note(&self, name: &str, variant: &str, offered: u64, failures: u64) {
        let metrics = self.app.metrics.of(name, variant);
        metrics.offered.set(offered as i64);
        metrics.load_failures.inc_by(failures.saturating_sub(metrics.load_failures.get()));
    }

    /// Stops accepting, finishes what was begun, and returns when that is done or the time is up.
    pub fn stop(&self, within: Duration) -> Drained {
        let deadline = Instant::now() + within;
        self.stop.send_modify(|stop| {
            stop.get_or_insert(deadline);
        });
        self.ended.wait(None).unwrap_or(Drained(false))
    }

    /// Waits until the server has stopped, at most for `timeout`; `None` if it still runs then.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Drained> {
        self.ended.wait(timeout)
    }
}
