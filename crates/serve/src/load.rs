//! Load from this process on a server, over kept connections: what benchmarks measure it with.
//!
//! The `schedule` says when requests are due, the `desk` hands them out to whoever has a connection free, `http1` and `grpc`
//! send them and read the answers, the `tally` counts what came of them.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use thiserror::Error;

mod alarm;
mod answer;
mod desk;
mod grpc;
mod http1;
mod schedule;
mod tally;
#[cfg(test)]
mod tests;

use desk::Desk;
pub use schedule::Arrivals;
use schedule::Schedule;
use tally::Tally;
pub use tally::{Failure, Latency};

/// What to send, and how hard.
#[derive(Clone)]
pub struct Load {
    /// The server, `host:port`.
    pub address: String,
    /// What it speaks.
    pub protocol: Protocol,
    /// The path of the requests.
    pub path: String,
    /// Further headers of theirs, a token among them.
    pub headers: Vec<(String, String)>,
    /// Their bodies, or messages, sent in turn; each connection begins at another one.
    pub bodies: Vec<Vec<u8>>,
    /// Connections, each with at most one request under way.
    pub connections: usize,
    /// When requests are sent.
    pub pace: Pace,
    /// For how long.
    pub length: Duration,
    /// An answer that takes longer is a failure.
    pub timeout: Duration,
}

/// A protocol that requests are sent with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, with bodies of this content type.
    Http1 {
        /// The content type.
        content_type: String,
    },
    /// Unary calls of gRPC, over HTTP/2 without TLS.
    Grpc,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// When the answer to the one before is there: as fast as the server answers.
    Closed,
    /// At times that are fixed beforehand, whatever becomes of those before. A request is as old as the time at which it was due.
    Open {
        /// Requests a second, of all connections.
        rate: f64,
        /// How they are spread.
        arrivals: Arrivals,
    },
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// Requests answered with success.
    pub answered: u64,
    /// The others that were sent, by what became of them.
    pub failures: Vec<(Failure, u64)>,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Requests that were due; in a closed loop, those that were sent.
    pub offered: u64,
    /// Of an open loop: requests that had to wait for a connection, because all were busy when they were due.
    pub late: u64,
    /// Of an open loop: requests that were due and had no connection until the end.
    pub unsent: u64,
    /// Of an open loop, requests for which a connection was free: 99 of 100 were sent within so many microseconds of when they were
    /// due. More than a few hundred are the generator's own want of CPU.
    pub lag_p99_us: f64,
    /// Of the answered ones.
    pub latency: Latency,
}

impl LoadReport {
    /// Requests that were sent and not answered with success.
    pub fn failed(&self) -> u64 {
        self.failures.iter().map(|(_, count)| count).sum()
    }
}

/// How far it is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Since the beginning.
    pub elapsed: Duration,
    /// Requests answered with success so far.
    pub answered: u64,
    /// Requests that failed so far.
    pub failed: u64,
}

/// Why there is no load.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum LoadError {
    #[error("load: bodies: expected at least 1, got 0")]
    NoBodies,
    #[error("load: {what}: expected {expected}, got {got}")]
    Number { what: &'static str, expected: &'static str, got: f64 },
    #[error("load: `{0}` cannot stand in a request")]
    Head(String),
    #[error("load: {address}: {source}")]
    Connect { address: String, source: io::Error },
    #[error("load: {0}")]
    Start(io::Error),
}

/// For all connections to be handed to their threads before the first request is due.
const SETTLE: Duration = Duration::from_millis(20);
/// How often the caller hears of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Connections that one thread drives before another one is worth it.
const CONNECTIONS_A_THREAD: usize = 64;
/// Rates and lengths beyond are mistakes.
const MAX_RATE: f64 = 1e7;
const MAX_SECONDS: f64 = 1e6;

/// A thread's part of the load, with its connections made.
type Part = Box<dyn FnOnce(Arc<Desk>) -> Tally + Send>;

/// Runs the load and sums up; `progress` hears of it every second, and may end it.
pub fn run(load: &Load, mut progress: impl FnMut(Progress) -> ControlFlow<()>) -> Result<LoadReport, LoadError> {
    check(load)?;
    let addr = resolve(&load.address)?;
    let connect = |source| LoadError::Connect { address: load.address.clone(), source };
    // one answer for all connections to a server that is not there
    drop(TcpStream::connect_timeout(&addr, load.timeout).map_err(connect)?);
    let parts = match &load.protocol {
        Protocol::Http1 { content_type } => http1_parts(load, addr, content_type)?,
        Protocol::Grpc => grpc_parts(load, addr)?,
    };
    let start = Instant::now() + SETTLE;
    let schedule = match load.pace {
        Pace::Closed => None,
        Pace::Open { rate, arrivals } => Some(Schedule::new(rate, arrivals, load.length)),
    };
    let desk = Arc::new(Desk::new(start, load.length, schedule));
    let (done, all_done) = channel::<()>();
    let begin = |part: Part| -> io::Result<JoinHandle<Tally>> {
        let (desk, done) = (desk.clone(), done.clone());
        Builder::new().name("load".into()).spawn(move || {
            let _done = done;
            sharpen_timers();
            part(desk)
        })
    };
    let threads = parts.into_iter().map(begin).collect::<io::Result<Vec<_>>>();
    drop(done);
    let threads = threads.map_err(|error| {
        desk.stop();
        LoadError::Start(error)
    })?;
    while let Err(RecvTimeoutError::Timeout) = all_done.recv_timeout(PROGRESS_EVERY) {
        let (answered, failed) = desk.counts();
        if progress(Progress { elapsed: start.elapsed(), answered, failed }).is_break() {
            desk.stop();
        }
    }
    let mut tally = Tally::new();
    for thread in threads {
        tally.add(&thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    }
    Ok(report(tally, &desk, start.elapsed()))
}

fn report(tally: Tally, desk: &Desk, elapsed: Duration) -> LoadReport {
    let unsent = desk.unsent();
    LoadReport {
        answered: tally.answered(),
        offered: tally.answered() + tally.failed() + unsent,
        late: tally.late,
        unsent,
        lag_p99_us: tally.lag_p99_us(),
        latency: tally.latency(),
        failures: tally.failures.into_iter().collect(),
        seconds: elapsed.as_secs_f64(),
    }
}

fn check(load: &Load) -> Result<(), LoadError> {
    if load.bodies.is_empty() {
        return Err(LoadError::NoBodies);
    }
    if load.connections == 0 {
        return Err(LoadError::Number { what: "connections", expected: "at least 1", got: 0.0 });
    }
    let seconds = load.length.as_secs_f64();
    if !(seconds > 0.0 && seconds <= MAX_SECONDS) {
        return Err(LoadError::Number { what: "seconds", expected: "more than 0 and at most 1e6", got: seconds });
    }
    match load.pace {
        Pace::Open { rate, .. } if !(rate > 0.0 && rate <= MAX_RATE) => {
            Err(LoadError::Number { what: "rate", expected: "more than 0 and at most 1e7", got: rate })
        }
        _ => Ok(()),
    }
}

fn resolve(address: &str) -> Result<SocketAddr, LoadError> {
    let connect = |source| LoadError::Connect { address: address.into(), source };
    let found = address.to_socket_addrs().map_err(connect)?.next();
    found.ok_or_else(|| connect(io::Error::new(io::ErrorKind::NotFound, "no address of this name")))
}

fn http1_parts(load: &Load, addr: SocketAddr, content_type: &str) -> Result<Vec<Part>, LoadError> {
    let requests = http1::requests(load, content_type)?;
    let part = |firsts: Vec<usize>| -> Result<Part, LoadError> {
        let lanes = http1::Lanes::new(addr, requests.clone(), load.timeout, firsts).map_err(LoadError::Start)?;
        Ok(Box::new(move |desk| lanes.run(&desk)))
    };
    dealt(load).into_iter().map(part).collect()
}

fn grpc_parts(load: &Load, addr: SocketAddr) -> Result<Vec<Part>, LoadError> {
    let calls = grpc::calls(load, addr)?;
    let part = |firsts: Vec<usize>| -> Part {
        let calls = calls.clone();
        Box::new(move |desk| grpc::run(calls, firsts, desk))
    };
    Ok(dealt(load).into_iter().map(part).collect())
}

/// The connections of each thread, by the body that they begin at.
fn dealt(load: &Load) -> Vec<Vec<usize>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let num_threads = load.connections.div_ceil(CONNECTIONS_A_THREAD).min(cores);
    let first = |number| (number as u128 * load.bodies.len() as u128 / load.connections as u128) as usize;
    let deal = |thread| (thread..load.connections).step_by(num_threads).map(first).collect();
    (0..num_threads).map(deal).collect()
}

/// Lets a sleeping thread wake when it wants to: 50 µs later, as is usual, would be 50 µs of latency.
fn sharpen_timers() {
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}
