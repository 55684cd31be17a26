//! Requests over HTTP/1.1: one thread drives many connections, since a thread for each costs more than the requests.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::answer::Reading;
use super::desk::{Desk, Turn};
use super::tally::{Failure, Tally};
use super::{Load, LoadError};

/// A server that refuses connections is not to be hammered.
const PAUSE: Duration = Duration::from_millis(1);
/// How often the end and timeouts are looked for.
const TICK: Duration = Duration::from_millis(50);
/// Read at once.
const CHUNK_BYTES: usize = 64 << 10;
const MAX_EVENTS: usize = 256;

/// The bytes of all requests.
pub(super) fn requests(load: &Load, content_type: &str) -> Result<Arc<[Vec<u8>]>, LoadError> {
    let is_line = |text: &str| text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let headers = load.headers.iter().flat_map(|(name, value)| [name.as_str(), value]);
    let strange = |text: &&str| !is_line(text);
    if let Some(text) = [load.path.as_str(), content_type].into_iter().chain(headers).find(strange) {
        return Err(LoadError::Head(text.escape_debug().to_string()));
    }
    if !load.path.starts_with('/') || load.path.contains(' ') {
        return Err(LoadError::Head(load.path.clone()));
    }
    let Load { path, address, .. } = load;
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: {content_type}\r\n");
    for (name, value) in &load.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let request =
        |body: &Vec<u8>| [head.as_bytes(), format!("content-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat();
    Ok(load.bodies.iter().map(request).collect())
}

/// The connections of one thread.
pub(super) struct Lanes {
    addr: SocketAddr,
    requests: Arc<[Vec<u8>]>,
    timeout: Duration,
    poll: Poll,
    lanes: Vec<Lane>,
    /// Those with nothing to do, and since when, in turn: one that idles for long would be closed by the server.
    idle: VecDeque<(Instant, usize)>,
    /// Those that come back to `idle` after a failure, and when.
    resting: VecDeque<(Instant, usize)>,
    /// A request that is not due yet; the first of `idle` will have it.
    held: Option<Turn>,
    scratch: Vec<u8>,
    tally: Tally,
}

struct Lane {
    /// None before the first request and after a failure: the next request connects.
    stream: Option<TcpStream>,
    /// The body that is sent next.
    next: usize,
    under_way: Option<UnderWay>,
    reading: Reading,
}

#[derive(Clone, Copy)]
struct UnderWay {
    turn: Turn,
    sent: Instant,
    request: usize,
    num_written: usize,
}

/// What became of a lane's request.
enum Step {
    Waits,
    Ended(Result<(), Failure>),
}

impl Lanes {
    /// Lanes that begin at the given bodies, connected.
    pub(super) fn new(
        addr: SocketAddr,
        requests: Arc<[Vec<u8>]>,
        timeout: Duration,
        firsts: Vec<usize>,
    ) -> io::Result<Self> {
        let lane = |next| Lane { stream: None, next, under_way: None, reading: Reading::default() };
        let lanes: Vec<Lane> = firsts.into_iter().map(lane).collect();
        let mut lanes = Lanes {
            addr,
            requests,
            timeout,
            poll: Poll::new()?,
            idle: (0..lanes.len()).map(|at| (Instant::now(), at)).collect(),
            resting: VecDeque::new(),
            lanes,
            held: None,
            scratch: vec![0; CHUNK_BYTES],
            tally: Tally::new(),
        };
        for at in 0..lanes.lanes.len() {
            // one that fails is counted with its first request
            let _ = lanes.connect(at);
        }
        Ok(lanes)
    }

    /// Sends what is due until the end, and waits for the answers.
    pub(super) fn run(mut self, desk: &Desk) -> Tally {
        let mut events = Events::with_capacity(MAX_EVENTS);
        let mut next_look = Instant::now() + TICK;
        loop {
            let is_over = self.send_due(desk);
            if is_over && self.idle.len() + self.resting.len() == self.lanes.len() || desk.is_stopped() {
                return self.tally;
            }
            self.wait(&mut events, next_look);
            for event in &events {
                let at = event.token().0;
                self.advance(at, desk);
                if event.is_read_closed() && self.lanes[at].under_way.is_none() {
                    self.lanes[at].stream = None;
                }
                // whoever is free goes on at once, before further answers are read
                self.send_due(desk);
            }
            if Instant::now() >= next_look {
                next_look = Instant::now() + TICK;
                self.time_out(desk);
            }
        }
    }

    /// Sends what is due on the lanes that are idle; true if nothing more will be.
    fn send_due(&mut self, desk: &Desk) -> bool {
        while let Some(&(until, at)) = self.resting.front()
            && until <= Instant::now()
        {
            self.resting.pop_front();
            self.idle.push_back((until, at));
        }
        while let Some(&(free, at)) = self.idle.front() {
            let Some(turn) = self.held.take().or_else(|| desk.take()) else {
                return true;
            };
            let now = Instant::now();
            if turn.due > now {
                self.held = Some(turn);
                return false;
            }
            self.idle.pop_front();
            self.tally.sent(turn, free, now);
            let lane = &mut self.lanes[at];
            lane.under_way = Some(UnderWay { turn, sent: now, request: lane.next, num_written: 0 });
            lane.next = (lane.next + 1) % self.requests.len();
            self.advance(at, desk);
        }
        false
    }

    /// Waits for a socket, for the next request to be due, or for `until`.
    fn wait(&mut self, events: &mut Events, until: Instant) {
        let due = self.held.map_or(until, |turn| turn.due);
        let rested = self.resting.front().map_or(until, |&(until, _)| until);
        let exact = due.min(rested);
        let mut timeout = until.saturating_duration_since(Instant::now());
        if exact < until {
            // epoll counts milliseconds, poll nanoseconds; an error is a signal, after which there may be something as well
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

    /// Does what can be done for a lane without waiting.
    fn advance(&mut self, at: usize, desk: &Desk) {
        let Some(under_way) = self.lanes[at].under_way else {
            return self.watch_idle(at);
        };
        let outcome = match self.step(at, under_way) {
            Ok(Step::Waits) => return,
            Ok(Step::Ended(outcome)) => outcome,
            Err(_) => Err(Failure::Broken),
        };
        self.end(at, under_way.turn, outcome, desk);
    }

    fn end(&mut self, at: usize, turn: Turn, outcome: Result<(), Failure>, desk: &Desk) {
        self.tally.ended(turn, outcome, desk);
        let lane = &mut self.lanes[at];
        lane.under_way = None;
        lane.reading.clear();
        if matches!(outcome, Err(Failure::Broken | Failure::Timeout)) {
            lane.stream = None;
            self.resting.push_back((Instant::now() + PAUSE, at));
        } else {
            self.idle.push_back((Instant::now(), at));
        }
    }

    /// An idle connection that the server closes is no failure: there was no request on it.
    fn watch_idle(&mut self, at: usize) {
        if let Some(stream) = &mut self.lanes[at].stream
            && !matches!(stream.read(&mut self.scratch), Err(error) if is_wait(&error))
        {
            self.lanes[at].stream = None;
        }
    }

    fn connect(&mut self, at: usize) -> io::Result<()> {
        let mut stream = TcpStream::connect(self.addr)?;
        let _ = stream.set_nodelay(true);
        self.poll.registry().register(&mut stream, Token(at), Interest::READABLE | Interest::WRITABLE)?;
        self.lanes[at].stream = Some(stream);
        Ok(())
    }

    /// Writes what the socket takes, reads what is there.
    fn step(&mut self, at: usize, mut under_way: UnderWay) -> io::Result<Step> {
        if self.lanes[at].stream.is_none() {
            self.connect(at)?;
        }
        let Lane { stream: Some(stream), under_way: kept, reading, .. } = &mut self.lanes[at] else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let request = &self.requests[under_way.request];
        let is_new = under_way.num_written == 0;
        while under_way.num_written < request.len() {
            match stream.write(&request[under_way.num_written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(num_written) => under_way.num_written += num_written,
                Err(error) if is_wait(&error) => break,
                Err(error) => return Err(error),
            }
        }
        *kept = Some(under_way);
        let is_written = under_way.num_written == request.len();
        if is_new && is_written {
            // the answer cannot be there yet; its arrival is an event
            return Ok(Step::Waits);
        }
        loop {
            let num_read = match stream.read(&mut self.scratch) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(num_read) => num_read,
                Err(error) if is_wait(&error) => return Ok(Step::Waits),
                Err(error) => return Err(error),
            };
            let answer = reading.take(&self.scratch[..num_read]);
            let Some(answer) = answer.map_err(|_| io::ErrorKind::InvalidData)? else { continue };
            if !answer.is_kept || !is_written {
                self.lanes[at].stream = None;
            }
            return Ok(Step::Ended(if answer.status == 200 { Ok(()) } else { Err(Failure::Status(answer.status)) }));
        }
    }

    fn time_out(&mut self, desk: &Desk) {
        for at in 0..self.lanes.len() {
            if let Some(UnderWay { turn, sent, .. }) = self.lanes[at].under_way
                && sent.elapsed() >= self.timeout
            {
                self.end(at, turn, Err(Failure::Timeout), desk);
            }
        }
    }
}

/// There is nothing to read or no room to write yet, or the connection is still being made.
fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected | io::ErrorKind::Interrupted)
}
