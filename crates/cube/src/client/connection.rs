//! A client's connection to one replica: requests go out without waiting for answers. A thread that waits for an answer
//! reads from the socket itself, unless another thread is reading, and passes on answers that other threads wait for. So
//! there is no extra thread between the socket and the caller.

use std::io::{self, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use elasticrec_wire::message::{MAX_RESULT_BYTES, Parts};
use elasticrec_wire::{
    Body, ConnectError, Connector, FrameError, FrameReader, Greeting, Header, Kind, Reason, Refusal, Stream, lock,
    read_greeting, write_frame,
};

use super::Credentials;
use super::inventory::ServerInventory;

/// Read buffer: the beginning of a large answer, or several small ones; the rest of a large answer skips the buffer.
const READ_BYTES: usize = 4096;
/// Bytes of requests in flight that fit into socket buffers even if no answer is read.
const MAX_IN_FLIGHT_BYTES: usize = 128 << 10;
/// Longest answer: the rows, and room for the fields before them.
const MAX_ANSWER_BYTES: usize = MAX_RESULT_BYTES + (1 << 20);
/// Number of bodies that are kept for further answers.
const MAX_SPARE: usize = 16;
/// Most memory that a kept body may have.
const KEPT_BYTES: usize = 4 << 20;
/// A server hangs if it sends nothing for this long while requests are in flight. Missing a caller's short deadline is not
/// a sign of that.
const SILENCE: Duration = Duration::from_secs(1);
/// Shortest read timeout that is set on a socket.
const MIN_READ_TIMEOUT: Duration = Duration::from_micros(50);

/// The reason a server did not answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server cannot be reached, or the connection ended.
    Lost(String),
    /// The server is the wrong one: no TLS, another certificate, another release, another role.
    WrongServer(String),
    /// The server refused the request.
    Refused(Refusal),
    /// The deadline passed; the connection may still be good.
    Late,
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Lost(what) => Failure::Lost(what),
            ConnectError::WrongServer(what) => Failure::WrongServer(what),
            ConnectError::Refused(refusal) => Failure::Refused(refusal),
        }
    }
}

impl Failure {
    pub(super) fn text(&self) -> String {
        match self {
            Failure::Lost(what) | Failure::WrongServer(what) => what.clone(),
            Failure::Refused(refused) => refused.to_string(),
            Failure::Late => "did not answer in time".into(),
        }
    }
}

/// Whether an error is the read or write timeout of a socket.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A connection to one replica.
#[derive(Debug)]
pub(super) struct Connection {
    /// Unique among the client's connections, so that a new connection to the same replica differs from the old one.
    pub(super) serial: u64,
    stream: Stream,
    /// Locked while a frame is written, so that frames of two threads do not mix.
    next_id: Mutex<u64>,
    state: Mutex<State>,
    /// Number of requests in flight.
    num_in_flight: AtomicUsize,
    /// Bytes of these requests.
    in_flight_bytes: AtomicUsize,
    /// Whether the server announced that it is stopping.
    is_stopping: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// None while a thread reads.
    reader: Option<Box<AnswerReader>>,
    /// Requests whose answers have not been taken yet.
    slots: Vec<Slot>,
    /// The reason no more answers arrive, once the connection has ended.
    ended: Option<String>,
    /// Bodies to reuse for further answers.
    spare: Vec<Body>,
    /// The time at which the last frame arrived.
    last_frame: Instant,
}

/// The reading half of a connection; one thread at a time has it.
#[derive(Debug)]
struct AnswerReader {
    reader: BufReader<Stream>,
    incoming: FrameReader,
    /// The read timeout that is set on the socket.
    read_timeout: Duration,
}

/// A request in flight, or its answer.
#[derive(Debug)]
struct Slot {
    id: u64,
    sent: Instant,
    num_bytes: usize,
    answer: Option<(Kind, Body)>,
    /// The thread that waits for the answer while another one reads.
    waiter: Option<Thread>,
    /// Whether the answer is to be discarded.
    is_dropped: bool,
}

/// A claim on the answer to a request. Every ticket is either waited for or [forgotten](Connection::forget).
#[derive(Debug)]
pub(super) struct Ticket {
    id: u64,
}

impl AnswerReader {
    /// Reads a frame by the deadline; after a timeout the next call resumes in the middle of the frame.
    fn read(&mut self, stream: &Stream, deadline: Instant) -> Result<Header, FrameError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            // Deadlines of callers are similar; setting the timeout each time would cost two system calls per answer.
            if left < self.read_timeout || left > 4 * self.read_timeout {
                self.read_timeout = left.max(MIN_READ_TIMEOUT);
                stream.limit_reads(self.read_timeout)?;
            }
            match self.incoming.read(&mut self.reader, MAX_ANSWER_BYTES) {
                Err(FrameError::Io(error)) if is_late(&error) => {}
                other => return other,
            }
        }
    }
}

impl Connection {
    /// Connects and returns the connection with the server's inventory.
    pub(super) fn open(
        serial: u64,
        address: &str,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<(Connection, ServerInventory), Failure> {
        let connector = Connector {
            hello: credentials.hello(),
            tls: credentials.tls.as_ref(),
            timeout,
            max_greeting_bytes: MAX_ANSWER_BYTES,
        };
        let (stream, inventory) = connector.connect(address)?;
        stream.limit_reads(timeout).map_err(ConnectError::lost)?;
        let reader = BufReader::with_capacity(READ_BYTES, stream.try_clone().map_err(ConnectError::lost)?);
        let reader = AnswerReader { reader, incoming: FrameReader::default(), read_timeout: timeout };
        let state = State {
            reader: Some(Box::new(reader)),
            slots: Vec::new(),
            ended: None,
            spare: Vec::new(),
            last_frame: Instant::now(),
        };
        let connection = Connection {
            serial,
            stream,
            next_id: Mutex::new(1),
            state: Mutex::new(state),
            num_in_flight: AtomicUsize::new(0),
            in_flight_bytes: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
        };
        Ok((connection, inventory))
    }

    /// Number of requests in flight.
    pub(super) fn num_in_flight(&self) -> usize {
        self.num_in_flight.load(Ordering::Relaxed)
    }

    /// Whether the server hangs. Call this after an answer did not arrive in time.
    pub(super) fn is_silent(&self) -> bool {
        let state = lock(&self.state);
        let waits = |slot: &Slot| slot.answer.is_none() && slot.sent.elapsed() >= SILENCE;
        state.last_frame.elapsed() >= SILENCE && state.slots.iter().any(waits)
    }

    /// The reason the connection must not be used for more requests, or None.
    pub(super) fn end_reason(&self) -> Option<String> {
        if self.is_stopping.load(Ordering::Acquire) {
            return Some("the server is stopping".into());
        }
        lock(&self.state).ended.clone()
    }

    /// Ends the connection; threads that wait for answers get the reason.
    pub(super) fn end(&self, why: &str) {
        lock(&self.state).end(why);
        drop(self.stream.shutdown());
    }

    /// Sends a request; [`wait`](Connection::wait) with the ticket gives its answer.
    pub(super) fn send(&self, kind: Kind, parts: &Parts<'_>, deadline: Instant) -> Result<Ticket, Failure> {
        let slices = parts.slices();
        let num_bytes = slices.iter().map(|slice| slice.len()).sum();
        while self.in_flight_bytes.load(Ordering::Relaxed) > MAX_IN_FLIGHT_BYTES && self.read_one(deadline)? {}
        let mut next_id = lock(&self.next_id);
        let id = *next_id;
        *next_id += 1;
        {
            let mut state = lock(&self.state);
            if let Some(ended) = &state.ended {
                return Err(Failure::Lost(ended.clone()));
            }
            let sent = Instant::now();
            state.slots.push(Slot { id, sent, num_bytes, answer: None, waiter: None, is_dropped: false });
        }
        self.num_in_flight.fetch_add(1, Ordering::Relaxed);
        self.in_flight_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        if let Err(error) = write_frame(&mut &self.stream, Header { kind, id }, &slices) {
            let what = if is_late(&error) { "did not accept a request in time".into() } else { error.to_string() };
            // Nothing can follow half a frame.
            self.end(&what);
            return Err(Failure::Lost(what));
        }
        Ok(Ticket { id })
    }

    /// Waits for an answer; an answer that arrives after the deadline is discarded.
    pub(super) fn wait(&self, ticket: &Ticket, deadline: Instant) -> Result<(Kind, Body), Failure> {
        loop {
            let mut state = lock(&self.state);
            if let Some(answer) = state.take(ticket.id) {
                state.wake_a_reader();
                return Ok(answer);
            }
            if let Some(ended) = &state.ended {
                return Err(Failure::Lost(ended.clone()));
            }
            let Some(reader) = state.reader.take() else {
                state.register(ticket.id);
                drop(state);
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.forget(ticket);
                    return Err(Failure::Late);
                }
                thread::park_timeout(left);
                continue;
            };
            drop(state);
            if let Err(failure) = self.read(reader, deadline) {
                self.forget(ticket);
                return Err(failure);
            }
        }
    }

    /// Discards the answer to a request, now or when it arrives.
    pub(super) fn forget(&self, ticket: &Ticket) {
        let mut state = lock(&self.state);
        drop(state.take(ticket.id));
        if let Some(slot) = state.slots.iter_mut().find(|slot| slot.id == ticket.id) {
            (slot.is_dropped, slot.waiter) = (true, None);
        }
        state.wake_a_reader();
    }

    /// Keeps the memory of an answer for further answers.
    pub(super) fn give_back(&self, mut body: Body) {
        body.shrink(KEPT_BYTES);
        let mut state = lock(&self.state);
        if state.spare.len() < MAX_SPARE {
            state.spare.push(body);
        }
    }

    /// Reads one answer from the socket, for any waiting thread; false if another thread is reading.
    fn read_one(&self, deadline: Instant) -> Result<bool, Failure> {
        let reader = lock(&self.state).reader.take();
        match reader {
            Some(reader) => {
                self.read(reader, deadline)?;
                // This thread may not read again soon.
                lock(&self.state).wake_a_reader();
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Reads a frame and puts it into the slot of its request.
    fn read(&self, mut reader: Box<AnswerReader>, deadline: Instant) -> Result<(), Failure> {
        let read = reader.read(&self.stream, deadline);
        let mut state = lock(&self.state);
        let failure = match read {
            Ok(header) => {
                let spare = state.spare.pop().unwrap_or_default();
                self.deliver(&mut state, header, reader.incoming.swap(spare));
                None
            }
            Err(FrameError::Io(error)) if is_late(&error) => Some(Failure::Late),
            Err(FrameError::Closed) => Some(Failure::Lost(state.end("the connection was closed"))),
            Err(error) => Some(Failure::Lost(state.end(&error.to_string()))),
        };
        state.reader = Some(reader);
        match failure {
            None => Ok(()),
            Some(failure) => {
                state.wake_a_reader();
                Err(failure)
            }
        }
    }

    fn deliver(&self, state: &mut State, header: Header, body: Body) {
        state.last_frame = Instant::now();
        let Some(at) = state.slots.iter().position(|slot| slot.id == header.id) else {
            // Not an answer: the server announces that it stops, or why it ends the connection.
            let refused = (header.kind == Kind::Refusal).then(|| Refusal::decode(body.bytes()));
            match refused {
                Some(Ok(refused)) if refused.reason == Reason::Stopping => {
                    self.is_stopping.store(true, Ordering::Release);
                }
                Some(Ok(refused)) => drop(state.end(&refused.to_string())),
                _ => drop(state.end("expected an answer to a request in flight, got another")),
            }
            return;
        };
        self.num_in_flight.fetch_sub(1, Ordering::Relaxed);
        self.in_flight_bytes.fetch_sub(state.slots[at].num_bytes, Ordering::Relaxed);
        if state.slots[at].is_dropped {
            state.slots.swap_remove(at);
            return;
        }
        state.slots[at].answer = Some((header.kind, body));
        if let Some(waiter) = state.slots[at].waiter.take() {
            waiter.unpark();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.stream.shutdown());
    }
}

impl State {
    /// Returns the answer to a request if it has arrived.
    fn take(&mut self, id: u64) -> Option<(Kind, Body)> {
        let at = self.slots.iter().position(|slot| slot.id == id && slot.answer.is_some())?;
        self.slots.swap_remove(at).answer
    }

    /// Notes that this thread waits for a request while another one reads.
    fn register(&mut self, id: u64) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
            slot.waiter = Some(thread::current());
        }
    }

    /// Wakes a waiting thread to read, unless a thread is reading.
    fn wake_a_reader(&mut self) {
        if self.reader.is_some()
            && let Some(waiter) = self.slots.iter_mut().find_map(|slot| slot.waiter.take())
        {
            waiter.unpark();
        }
    }

    /// Notes that no more answers arrive; returns the first reason for it.
    fn end(&mut self, why: &str) -> String {
        let why = self.ended.get_or_insert_with(|| why.to_owned()).clone();
        self.slots.iter_mut().filter_map(|slot| slot.waiter.take()).for_each(|waiter| waiter.unpark());
        why
    }
}

impl Greeting for ServerInventory {
    fn read(kind: Kind, body: &[u8]) -> Result<Self, ConnectError> {
        match kind {
            Kind::Inventory => ServerInventory::decode(body).map_err(ConnectError::WrongServer),
            Kind::Welcome => Err(ConnectError::WrongServer("expected a cube server, got a parameter server".into())),
            other => Err(ConnectError::Lost(format!("expected an inventory, got {other:?}"))),
        }
    }
}

/// Reads the answer to a hello on an open connection.
pub(super) fn inventory_of((kind, body): (Kind, Body)) -> Result<ServerInventory, Failure> {
    Ok(read_greeting(kind, body.bytes())?)
}
