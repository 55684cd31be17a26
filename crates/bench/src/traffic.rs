//! Sends traffic to a prediction server over keep-alive connections and measures the answers.
//!
//! - `arrivals` computes when requests are due, `dispatcher` hands them to connections that are free;
//! - `http1` and `grpc` send them and read the answers (`response`), `timer` wakes them in time;
//! - `recorder` counts outcomes and latencies.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use thiserror::Error;

mod arrivals;
mod dispatcher;
mod grpc;
mod http1;
mod recorder;
mod response;
#[cfg(test)]
mod tests;
mod timer;

pub use arrivals::Arrivals;
use arrivals::DueTimes;
use dispatcher::Dispatcher;
use recorder::Recorder;
pub use recorder::{Failure, Latency};

/// The traffic to send.
#[derive(Clone)]
pub struct Traffic {
    /// The server, `host:port`.
    pub address: String,
    /// The protocol of the requests.
    pub protocol: Protocol,
    /// The path of the requests.
    pub path: String,
    /// Further headers, such as a token.
    pub headers: Vec<(String, String)>,
    /// Bodies or messages, sent in turn; each connection starts at a different one.
    pub bodies: Vec<Vec<u8>>,
    /// Number of connections, each with at most one request in flight.
    pub connections: usize,
    /// The times at which requests are sent.
    pub pace: Pace,
    /// Duration of the traffic.
    pub length: Duration,
    /// A slower answer counts as a failure.
    pub timeout: Duration,
}

/// The protocol of the requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http1 {
        /// The content type of the bodies.
        content_type: String,
    },
    /// Unary gRPC calls over HTTP/2 without TLS.
    Grpc,
}

/// The times at which requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// Closed loop: a connection sends the next request when it has the answer to the previous one.
    Closed,
    /// Open loop: requests are due at fixed times, however fast the server answers. Latency counts from the due time.
    Open {
        /// Requests per second over all connections.
        rate: f64,
        /// The distribution of the due times.
        arrivals: Arrivals,
    },
}

/// The outcome of the traffic.
#[derive(Debug, Clone, PartialEq)]
pub struct TrafficReport {
    /// Requests answered with success.
    pub answered: u64,
    /// Requests that failed, by the kind of failure.
    pub failures: Vec<(Failure, u64)>,
    /// Time from the first request to the last answer.
    pub seconds: f64,
    /// Requests that were due; in a closed loop, requests that were sent.
    pub offered: u64,
    /// Open loop: requests that waited for a connection because all were busy when they were due.
    pub late: u64,
    /// Open loop: requests that were due and found no free connection until the end.
    pub unsent: u64,
    /// Open loop: 99th percentile of the delay between due time and sending, of requests with a free connection. More than
    /// a few hundred microseconds means that the generator lacks CPU.
    pub lag_p99_us: f64,
    /// Latency of the answered requests.
    pub latency: Latency,
}

impl TrafficReport {
    /// Returns the number of requests that were sent and not answered with success.
    pub fn failed(&self) -> u64 {
        self.failures.iter().map(|(_, count)| count).sum()
    }
}

/// Progress of the traffic.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Requests answered with success so far.
    pub answered: u64,
    /// Requests that failed so far.
    pub failed: u64,
}

/// The reason traffic did not start.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum TrafficError {
    #[error("bench: bodies: expected at least 1, got 0")]
    NoBodies,
    #[error("bench: {what}: expected {expected}, got {got}")]
    Number { what: &'static str, expected: &'static str, got: f64 },
    #[error("bench: `{0}`: cannot be sent in a request")]
    Head(String),
    #[error("bench: {address}: {source}")]
    Connect { address: String, source: io::Error },
    #[error("bench: {0}")]
    Start(io::Error),
}

/// Delay before the first request is due, for the threads to start.
const SETTLE: Duration = Duration::from_millis(20);
/// Interval of progress reports.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Connections per thread; more of them start another thread.
const CONNECTIONS_PER_THREAD: usize = 64;
/// Higher rates and longer durations are refused as mistakes.
const MAX_RATE: f64 = 1e7;
const MAX_SECONDS: f64 = 1e6;

/// The traffic of one thread, with its connections open.
type Part = Box<dyn FnOnce(Arc<Dispatcher>) -> Recorder + Send>;

/// Sends the traffic and reports on it. `progress` is called every second and may stop it.
pub fn run(
    traffic: &Traffic,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<TrafficReport, TrafficError> {
    check(traffic)?;
    let addr = resolve(&traffic.address)?;
    let connect = |source| TrafficError::Connect { address: traffic.address.clone(), source };
    // If the server is down, fail once instead of once per connection.
    drop(TcpStream::connect_timeout(&addr, traffic.timeout).map_err(connect)?);
    let parts = match &traffic.protocol {
        Protocol::Http1 { content_type } => http1_parts(traffic, addr, content_type)?,
        Protocol::Grpc => grpc_parts(traffic, addr)?,
    };
    let start = Instant::now() + SETTLE;
    let schedule = match traffic.pace {
        Pace::Closed => None,
        Pace::Open { rate, arrivals } => Some(DueTimes::new(rate, arrivals, traffic.length)),
    };
    let dispatcher = Arc::new(Dispatcher::new(start, traffic.length, schedule));
    let (done, all_done) = channel::<()>();
    let begin = |part: Part| -> io::Result<JoinHandle<Recorder>> {
        let (dispatcher, done) = (dispatcher.clone(), done.clone());
        Builder::new().name("traffic".into()).spawn(move || {
            let _done = done;
            minimize_timer_slack();
            part(dispatcher)
        })
    };
    let threads = parts.into_iter().map(begin).collect::<io::Result<Vec<_>>>();
    drop(done);
    let threads = threads.map_err(|error| {
        dispatcher.stop();
        TrafficError::Start(error)
    })?;
    while let Err(RecvTimeoutError::Timeout) = all_done.recv_timeout(PROGRESS_EVERY) {
        let (answered, failed) = dispatcher.counts();
        if progress(Progress { elapsed: start.elapsed(), answered, failed }).is_break() {
            dispatcher.stop();
        }
    }
    let mut recorder = Recorder::new();
    for thread in threads {
        recorder.add(&thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    }
    Ok(report(recorder, &dispatcher, start.elapsed()))
}

fn report(recorder: Recorder, dispatcher: &Dispatcher, elapsed: Duration) -> TrafficReport {
    let unsent = dispatcher.unsent();
    TrafficReport {
        answered: recorder.answered(),
        offered: recorder.answered() + recorder.failed() + unsent,
        late: recorder.late,
        unsent,
        lag_p99_us: recorder.lag_p99_us(),
        latency: recorder.latency(),
        failures: recorder.failures.into_iter().collect(),
        seconds: elapsed.as_secs_f64(),
    }
}

fn check(traffic: &Traffic) -> Result<(), TrafficError> {
    if traffic.bodies.is_empty() {
        return Err(TrafficError::NoBodies);
    }
    if traffic.connections == 0 {
        return Err(TrafficError::Number { what: "connections", expected: "at least 1", got: 0.0 });
    }
    let seconds = traffic.length.as_secs_f64();
    if !(seconds > 0.0 && seconds <= MAX_SECONDS) {
        return Err(TrafficError::Number { what: "seconds", expected: "more than 0 and at most 1e6", got: seconds });
    }
    match traffic.pace {
        Pace::Open { rate, .. } if !(rate > 0.0 && rate <= MAX_RATE) => {
            Err(TrafficError::Number { what: "rate", expected: "more than 0 and at most 1e7", got: rate })
        }
        _ => Ok(()),
    }
}

fn resolve(address: &str) -> Result<SocketAddr, TrafficError> {
    let connect = |source| TrafficError::Connect { address: address.into(), source };
    let found = address.to_socket_addrs().map_err(connect)?.next();
    found.ok_or_else(|| connect(io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
}

fn http1_parts(traffic: &Traffic, addr: SocketAddr, content_type: &str) -> Result<Vec<Part>, TrafficError> {
    let requests = http1::requests(traffic, content_type)?;
    let part = |firsts: Vec<usize>| -> Result<Part, TrafficError> {
        let connections =
            http1::Connections::new(addr, requests.clone(), traffic.timeout, firsts).map_err(TrafficError::Start)?;
        Ok(Box::new(move |dispatcher| connections.run(&dispatcher)))
    };
    first_bodies(traffic).into_iter().map(part).collect()
}

fn grpc_parts(traffic: &Traffic, addr: SocketAddr) -> Result<Vec<Part>, TrafficError> {
    let calls = grpc::calls(traffic, addr)?;
    let part = |firsts: Vec<usize>| -> Part {
        let calls = calls.clone();
        Box::new(move |dispatcher| grpc::run(calls, firsts, dispatcher))
    };
    Ok(first_bodies(traffic).into_iter().map(part).collect())
}

/// Returns for each thread the first body of each of its connections.
fn first_bodies(traffic: &Traffic) -> Vec<Vec<usize>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let num_threads = traffic.connections.div_ceil(CONNECTIONS_PER_THREAD).min(cores);
    let first = |number| (number as u128 * traffic.bodies.len() as u128 / traffic.connections as u128) as usize;
    let of_thread = |thread| (thread..traffic.connections).step_by(num_threads).map(first).collect();
    (0..num_threads).map(of_thread).collect()
}

/// Sets the timer slack of this thread to the minimum: the default of 50 µs would add to each latency.
fn minimize_timer_slack() {
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}
