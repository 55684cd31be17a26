//! Requests over HTTP/1.1: one thread drives many connections, as a thread for each would cost more than the requests.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::dispatcher::{Dispatcher, DueRequest};
use super::recorder::{Failure, Recorder};
use super::response::ResponseReader;
use super::{Traffic, TrafficError};

/// Pause after a failed connection, before the next attempt.
const PAUSE: Duration = Duration::from_millis(1);
/// Interval of checks for the end and for timeouts.
const TICK: Duration = Duration::from_millis(50);
/// Bytes of one read.
const CHUNK_BYTES: usize = 64 << 10;
const MAX_EVENTS: usize = 256;

/// Returns the bytes of all requests.
pub(super) fn requests(traffic: &Traffic, content_type: &str) -> Result<Arc<[Vec<u8>]>, TrafficError> {
    let is_line = |text: &str| text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let headers = traffic.headers.iter().flat_map(|(name, value)| [name.as_str(), value]);
    let strange = |text: &&str| !is_line(text);
    if let Some(text) = [traffic.path.as_str(), content_type].into_iter().chain(headers).find(strange) {
        return Err(TrafficError::Head(text.escape_debug().to_string()));
    }
    if !traffic.path.starts_with('/') || traffic.path.contains(' ') {
        return Err(TrafficError::Head(traffic.path.clone()));
    }
    let Traffic { path, address, .. } = traffic;
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: {content_type}\r\n");
    for (name, value) in &traffic.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let request =
        |body: &Vec<u8>| [head.as_bytes(), format!("content-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat();
    Ok(traffic.bodies.iter().map(request).collect())
}

/// The connections of one thread.
pub(super) struct Connections {
    addr: SocketAddr,
    requests: Arc<[Vec<u8>]>,
    timeout: Duration,
    poll: Poll,
    connections: Vec<Connection>,
    /// Idle connections, each with the time when it became idle. They are used in turn: the server closes a connection
    /// that idles too long.
    idle: VecDeque<(Instant, usize)>,
    /// Connections that pause after a failure, each with the time when it may connect again.
    resting: VecDeque<(Instant, usize)>,
    /// A request that is not due yet; the first idle connection sends it.
    held: Option<DueRequest>,
    scratch: Vec<u8>,
    recorder: Recorder,
}

struct Connection {
    /// None before the first request and after a failure; the next request connects.
    stream: Option<TcpStream>,
    /// The next body to send.
    next: usize,
    in_flight: Option<InFlight>,
    reading: ResponseReader,
}

#[derive(Clone, Copy)]
struct InFlight {
    due: DueRequest,
    sent: Instant,
    body: usize,
    num_written: usize,
}

/// The state of a connection's request after reading and writing.
enum Step {
    Pending,
    Ended(Result<(), Failure>),
}

impl Connections {
    /// Opens connections that start at the given bodies.
    pub(super) fn new(
        addr: SocketAddr,
        requests: Arc<[Vec<u8>]>,
        timeout: Duration,
        firsts: Vec<usize>,
    ) -> io::Result<Self> {
        let connection = |next| Connection { stream: None, next, in_flight: None, reading: ResponseReader::default() };
        let connections: Vec<Connection> = firsts.into_iter().map(connection).collect();
        let mut connections = Connections {
            addr,
            requests,
            timeout,
            poll: Poll::new()?,
            idle: (0..connections.len()).map(|at| (Instant::now(), at)).collect(),
            resting: VecDeque::new(),
            connections,
            held: None,
            scratch: vec![0; CHUNK_BYTES],
            recorder: Recorder::new(),
        };
        for at in 0..connections.connections.len() {
            // A failed connection is counted with its first request.
            let _ = connections.connect(at);
        }
        Ok(connections)
    }

    /// Sends the due requests until the end, and waits for the answers.
    pub(super) fn run(mut self, dispatcher: &Dispatcher) -> Recorder {
        let mut events = Events::with_capacity(MAX_EVENTS);
        let mut next_check = Instant::now() + TICK;
        loop {
            let is_over = self.send_due(dispatcher);
            if is_over && self.idle.len() + self.resting.len() == self.connections.len() || dispatcher.is_stopped() {
                return self.recorder;
            }
            self.wait(&mut events, next_check);
            for event in &events {
                let at = event.token().0;
                self.advance(at, dispatcher);
                if event.is_read_closed() && self.connections[at].in_flight.is_none() {
                    self.connections[at].stream = None;
                }
                // A connection that became free sends at once, before further answers are read.
                self.send_due(dispatcher);
            }
            if Instant::now() >= next_check {
                next_check = Instant::now() + TICK;
                self.time_out(dispatcher);
            }
        }
    }

    /// Sends the due requests on idle connections. Returns true if no more requests will be due.
    fn send_due(&mut self, dispatcher: &Dispatcher) -> bool {
        while let Some(&(until, at)) = self.resting.front()
            && until <= Instant::now()
        {
            self.resting.pop_front();
            self.idle.push_back((until, at));
        }
        while let Some(&(free, at)) = self.idle.front() {
            let Some(request) = self.held.take().or_else(|| dispatcher.take()) else {
                return true;
            };
            let now = Instant::now();
            if request.due > now {
                self.held = Some(request);
                return false;
            }
            self.idle.pop_front();
            self.recorder.record_sent(request, free, now);
            let connection = &mut self.connections[at];
            connection.in_flight = Some(InFlight { due: request, sent: now, body: connection.next, num_written: 0 });
            connection.next = (connection.next + 1) % self.requests.len();
            self.advance(at, dispatcher);
        }
        false
    }

    /// Waits for a socket, for the next request to be due, or for `until`.
    fn wait(&mut self, events: &mut Events, until: Instant) {
        let due = self.held.map_or(until, |request| request.due);
        let rested = self.resting.front().map_or(until, |&(until, _)| until);
        let exact = due.min(rested);
        let mut timeout = until.saturating_duration_since(Instant::now());
        if exact < until {
            // epoll counts milliseconds, ppoll nanoseconds. An error is a signal, after which sockets may be ready too.
            let left = exact.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(self.poll.registry(), PollFlags::IN)];
            let _ = poll(&mut fds, Some(&left));
            timeout = Duration::ZERO;
        }
        if self.poll.poll(events, Some(timeout)).is_err() {
            events.clear();
        }
    }

    /// Reads and writes on a connection as far as possible without waiting.
    fn advance(&mut self, at: usize, dispatcher: &Dispatcher) {
        let Some(in_flight) = self.connections[at].in_flight else {
            return self.watch_idle(at);
        };
        let outcome = match self.step(at, in_flight) {
            Ok(Step::Pending) => return,
            Ok(Step::Ended(outcome)) => outcome,
            Err(_) => Err(Failure::Broken),
        };
        self.end(at, in_flight.due, outcome, dispatcher);
    }

    fn end(&mut self, at: usize, request: DueRequest, outcome: Result<(), Failure>, dispatcher: &Dispatcher) {
        self.recorder.record_outcome(request, outcome, dispatcher);
        let connection = &mut self.connections[at];
        connection.in_flight = None;
        connection.reading.clear();
        if matches!(outcome, Err(Failure::Broken | Failure::Timeout)) {
            connection.stream = None;
            self.resting.push_back((Instant::now() + PAUSE, at));
        } else {
            self.idle.push_back((Instant::now(), at));
        }
    }

    /// Drops an idle connection that the server closed. This is no failure, as it had no request.
    fn watch_idle(&mut self, at: usize) {
        if let Some(stream) = &mut self.connections[at].stream
            && !matches!(stream.read(&mut self.scratch), Err(error) if is_wait(&error))
        {
            self.connections[at].stream = None;
        }
    }

    fn connect(&mut self, at: usize) -> io::Result<()> {
        let mut stream = TcpStream::connect(self.addr)?;
        let _ = stream.set_nodelay(true);
        self.poll.registry().register(&mut stream, Token(at), Interest::READABLE | Interest::WRITABLE)?;
        self.connections[at].stream = Some(stream);
        Ok(())
    }

    /// Writes what the socket accepts and reads what has arrived.
    fn step(&mut self, at: usize, mut in_flight: InFlight) -> io::Result<Step> {
        if self.connections[at].stream.is_none() {
            self.connect(at)?;
        }
        let Connection { stream: Some(stream), in_flight: kept, reading, .. } = &mut self.connections[at] else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let request = &self.requests[in_flight.body];
        let is_new = in_flight.num_written == 0;
        while in_flight.num_written < request.len() {
            match stream.write(&request[in_flight.num_written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(num_written) => in_flight.num_written += num_written,
                Err(error) if is_wait(&error) => break,
                Err(error) => return Err(error),
            }
        }
        *kept = Some(in_flight);
        let is_written = in_flight.num_written == request.len();
        if is_new && is_written {
            // The answer cannot have arrived yet; its arrival is an event.
            return Ok(Step::Pending);
        }
        loop {
            let num_read = match stream.read(&mut self.scratch) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(num_read) => num_read,
                Err(error) if is_wait(&error) => return Ok(Step::Pending),
                Err(error) => return Err(error),
            };
            let answer = reading.take(&self.scratch[..num_read]);
            let Some(answer) = answer.map_err(|_| io::ErrorKind::InvalidData)? else { continue };
            if !answer.keeps_alive || !is_written {
                self.connections[at].stream = None;
            }
            return Ok(Step::Ended(if answer.status == 200 { Ok(()) } else { Err(Failure::Status(answer.status)) }));
        }
    }

    fn time_out(&mut self, dispatcher: &Dispatcher) {
        for at in 0..self.connections.len() {
            if let Some(InFlight { due, sent, .. }) = self.connections[at].in_flight
                && sent.elapsed() >= self.timeout
            {
                self.end(at, due, Err(Failure::Timeout), dispatcher);
            }
        }
    }
}

/// Returns whether the socket has nothing to read, no room to write, or is still connecting.
fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected | io::ErrorKind::Interrupted)
}
