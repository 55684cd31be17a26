//! The HTTP face: sockets in, predictions out; all that computes is behind the queue.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::sync::watch;

use crate::decode::Limits;
use crate::deployment::{Deployment, Sizes};
use crate::metrics::Metrics;
use crate::model::{Model, ModelError};
use crate::worker::Joining;

mod listen;
mod reply;
mod routes;
#[cfg(test)]
mod tests;

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
    /// Scorer threads.
    pub workers: usize,
    /// Predictions that may wait for a scorer; further ones get 429.
    pub queue: usize,
    /// Threads for the sockets.
    pub io_threads: usize,
    /// Connections at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// Longest body.
    pub max_body_bytes: usize,
    /// Instances, or lines, a request.
    pub max_instances: usize,
    /// Requests that wait together are scored together up to so many instances; 1 scores each by itself.
    pub max_batch: usize,
    /// How long a request may wait for others, when others came together with those before it.
    pub max_wait: Duration,
    /// Asked for on everything but health and readiness.
    pub token: Option<Token>,
    /// For the head of a request, and so for how long a connection may idle.
    pub header_timeout: Duration,
    /// For the body of a request.
    pub body_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        ServerOptions {
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            workers: cores,
            queue: 1024,
            io_threads: cores.div_ceil(4),
            max_connections: 4096,
            max_body_bytes: 16 << 20,
            max_instances: 10_000,
            max_batch: 256,
            // those that come while a batch is scored are together anyway
            max_wait: Duration::ZERO,
            token: None,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
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
}

/// What all connections share.
struct App {
    options: ServerOptions,
    metrics: Arc<Metrics>,
    /// The version that new requests get; none before the first is warm.
    current: RwLock<Option<Arc<Deployment>>>,
}

impl App {
    fn current(&self) -> Option<Arc<Deployment>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes `next` the version of new requests and returns the one before, which ends with its last request.
    fn switch(&self, next: Option<Deployment>) -> Option<Arc<Deployment>> {
        let version = next.as_ref().map_or(0, |deployment| deployment.info.version);
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        self.metrics.model_version.set(version as i64);
        std::mem::replace(&mut *current, next.map(Arc::new))
    }
}

/// The server.
pub struct Server;

impl Server {
    /// Binds the address and answers on it; ready, and able to predict, once a model is installed.
    pub fn start(options: ServerOptions) -> Result<ServerHandle, ServerError> {
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
        let app = Arc::new(App { options, metrics: Arc::new(Metrics::new()), current: RwLock::new(None) });
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

/// Lets the scorers finish what is queued, until the deadline.
fn end_scorers(app: &App, deadline: Instant) -> Drained {
    let Some(mut deployment) = app.switch(None) else {
        return Drained(true);
    };
    let mut threads = Vec::new();
    loop {
        // connections that were cut off at the deadline may still let go of it
        if let Some(deployment) = Arc::get_mut(&mut deployment) {
            threads.extend(deployment.pool.close());
            if threads.iter().all(|thread| thread.is_finished()) {
                return Drained(true);
            }
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
    app: Arc<App>,
    stop: watch::Sender<Option<Instant>>,
    ended: Arc<Ended>,
}

impl ServerHandle {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Warms `model` and gives it every request from then on; requests under way end on the version they began with.
    pub fn install(&self, model: &Arc<Model>) -> Result<(), ModelError> {
        let ServerOptions { workers, queue, max_instances, max_batch, max_wait, .. } = self.app.options;
        let joining = Joining { max_instances: max_batch, max_wait };
        let sizes = Sizes { workers, queue, limits: Limits { max_instances }, joining };
        let deployment = Deployment::start(model, sizes, &self.app.metrics)?;
        self.app.switch(Some(deployment));
        Ok(())
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
