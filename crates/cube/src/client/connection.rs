//! A connection of a client: requests go out without waiting. Whoever waits for an answer reads from the socket, unless
//! another thread does, and hands over what is not its own: no thread stands between the socket and its caller.

use std::io::{self, BufReader};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use elasticrec_wire::message::{MAX_RESULT_BYTES, Parts};
use elasticrec_wire::{
    Body, FrameError, Header, Hello, Incoming, Kind, Reason, Refusal, Stream, TlsError, read_frame, write_frame,
};

use super::Credentials;
use super::inventory::ServerInventory;

/// A server that does not greet in this time hangs, or is none.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// The beginning of an answer is read at once, and small ones together; the rest goes where it stays.
const READ_BYTES: usize = 4096;
/// Requests on their way that a socket takes whether or not their answers are read.
const MAX_WAITING_BYTES: usize = 128 << 10;
/// The largest answer: rows, and a little before them.
const MAX_ANSWER_BYTES: usize = MAX_RESULT_BYTES + (1 << 20);
/// Bodies kept for answers to come.
const MAX_SPARE: usize = 16;
/// Memory of a body that is kept.
const KEPT_BYTES: usize = 4 << 20;
/// A server that has said nothing for so long, while requests wait, hangs. One that is late for a caller in a hurry does not.
const SILENCE: Duration = Duration::from_secs(1);
/// The shortest wait that a socket is asked for.
const MIN_WAIT: Duration = Duration::from_micros(50);

/// Why a server did not answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// It cannot be reached, or the connection ended.
    Lost(String),
    /// It is not one to talk to: no TLS, another certificate, another release, another model.
    Unfit(String),
    /// It said no.
    Refused(Refusal),
    /// Not in time; the connection may be good.
    Late,
}

impl Failure {
    pub(super) fn text(&self) -> String {
        match self {
            Failure::Lost(what) | Failure::Unfit(what) => what.clone(),
            Failure::Refused(refused) => refused.to_string(),
            Failure::Late => "did not answer in time".into(),
        }
    }
}

/// Whether a socket says that its time is over.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn lost(error: impl ToString) -> Failure {
    Failure::Lost(error.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to one replica.
#[derive(Debug)]
pub(super) struct Connection {
    /// Of all connections of a client, so that a new one to the same replica is another one.
    pub(super) serial: u64,
    stream: Stream,
    /// ServerInventory while a frame is written: frames of two threads must not mix.
    next_id: Mutex<u64>,
    state: Mutex<State>,
    /// Requests without an answer.
    num_waiting: AtomicUsize,
    /// Their bytes.
    waiting_bytes: AtomicUsize,
    /// The server asked not to be asked any more.
    is_leaving: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// None while a thread reads.
    reading: Option<Box<Reading>>,
    /// Requests whose answers nobody has taken yet.
    slots: Vec<Slot>,
    /// Why no more answers come.
    ended: Option<String>,
    /// Bodies to read the next answers into.
    spare: Vec<Body>,
    /// When the last frame came.
    heard: Instant,
}

#[derive(Debug)]
struct Reading {
    reader: BufReader<Stream>,
    incoming: Incoming,
    /// How long the socket waits as it is set.
    wait: Duration,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    sent: Instant,
    num_bytes: usize,
    answer: Option<(Kind, Body)>,
    /// Who waits for it, while another thread reads.
    waiter: Option<Thread>,
    /// Nobody wants it any more.
    is_dropped: bool,
}

/// A request that was sent; without a wait its answer is thrown away.
#[derive(Debug)]
pub(super) struct Ticket {
    id: u64,
}

impl Reading {
    /// Reads a frame; what there is of one stays when the time is over.
    fn read(&mut self, stream: &Stream, deadline: Instant) -> Result<Header, FrameError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            // callers have like deadlines: setting it each time would cost two calls for every answer
            if left < self.wait || left > 4 * self.wait {
                self.wait = left.max(MIN_WAIT);
                stream.limit_reads(self.wait)?;
            }
            match self.incoming.read(&mut self.reader, MAX_ANSWER_BYTES) {
                Err(FrameError::Io(error)) if is_late(&error) => {}
                other => return other,
            }
        }
    }
}

impl Connection {
    /// Connects, says hello and hears what the server holds.
    pub(super) fn open(
        serial: u64,
        address: &str,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<(Connection, ServerInventory), Failure> {
        let patience = timeout.min(CONNECT_TIME);
        let deadline = Instant::now() + patience;
        let mut targets = address.to_socket_addrs().map_err(lost)?;
        let target = targets.next().ok_or_else(|| lost("expected an address, got none"))?;
        let tcp = TcpStream::connect_timeout(&target, patience).map_err(lost)?;
        tcp.set_nodelay(true).map_err(lost)?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host.trim_matches(['[', ']']));
        let stream = Stream::connect(tcp, credentials.tls.as_ref(), host, deadline).map_err(|error| match error {
            TlsError::Io(error) => lost(error),
            other => Failure::Unfit(other.to_string()),
        })?;
        stream.limit_writes(timeout).map_err(lost)?;
        let hello = Hello { run: credentials.model.as_bytes(), token: &credentials.token };
        let header = Header { kind: Kind::Hello, id: 0 };
        write_frame(&mut &stream, header, &hello.parts().slices()).map_err(lost)?;
        let mut body = Body::default();
        let header =
            read_frame(&mut stream.until(deadline), MAX_ANSWER_BYTES, &mut body).map_err(|error| match error {
                FrameError::Version(_) | FrameError::Magic(_) => Failure::Unfit(error.to_string()),
                other => lost(other),
            })?;
        let held = greeting((header.kind, body))?;
        stream.limit_reads(timeout).map_err(lost)?;
        let reader = BufReader::with_capacity(READ_BYTES, stream.try_clone().map_err(lost)?);
        let reading = Reading { reader, incoming: Incoming::default(), wait: timeout };
        let state = State {
            reading: Some(Box::new(reading)),
            slots: Vec::new(),
            ended: None,
            spare: Vec::new(),
            heard: Instant::now(),
        };
        let connection = Connection {
            serial,
            stream,
            next_id: Mutex::new(1),
            state: Mutex::new(state),
            num_waiting: AtomicUsize::new(0),
            waiting_bytes: AtomicUsize::new(0),
            is_leaving: AtomicBool::new(false),
        };
        Ok((connection, held))
    }

    /// Requests without an answer.
    pub(super) fn num_waiting(&self) -> usize {
        self.num_waiting.load(Ordering::Relaxed)
    }

    /// Whether it hangs, after a wait for an answer that did not come.
    pub(super) fn is_silent(&self) -> bool {
        let state = lock(&self.state);
        let waits = |slot: &Slot| slot.answer.is_none() && slot.sent.elapsed() >= SILENCE;
        state.heard.elapsed() >= SILENCE && state.slots.iter().any(waits)
    }

    /// Why it is not to be used for more requests, if so.
    pub(super) fn farewell(&self) -> Option<String> {
        if self.is_leaving.load(Ordering::Acquire) {
            return Some("the server stops".into());
        }
        lock(&self.state).ended.clone()
    }

    /// Ends it; whoever waits for an answer is told so.
    pub(super) fn end(&self, why: &str) {
        lock(&self.state).end(why);
        drop(self.stream.shutdown());
    }

    /// Sends a request; its answer is [`wait`](Connection::wait)ed for with the ticket.
    pub(super) fn ask(&self, kind: Kind, parts: &Parts<'_>, deadline: Instant) -> Result<Ticket, Failure> {
        let slices = parts.slices();
        let num_bytes = slices.iter().map(|slice| slice.len()).sum();
        while self.waiting_bytes.load(Ordering::Relaxed) > MAX_WAITING_BYTES && self.pump(deadline)? {}
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
        self.num_waiting.fetch_add(1, Ordering::Relaxed);
        self.waiting_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        if let Err(error) = write_frame(&mut &self.stream, Header { kind, id }, &slices) {
            let what = if is_late(&error) { "did not take a request in time".into() } else { error.to_string() };
            // what went out is the beginning of a frame, behind which nothing can follow
            self.end(&what);
            return Err(Failure::Lost(what));
        }
        Ok(Ticket { id })
    }

    /// Waits for an answer; too late, it is thrown away when it comes.
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
            let Some(reading) = state.reading.take() else {
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
            if let Err(failure) = self.read(reading, deadline) {
                self.forget(ticket);
                return Err(failure);
            }
        }
    }

    /// Throws an answer away, when it comes or now.
    pub(super) fn forget(&self, ticket: &Ticket) {
        let mut state = lock(&self.state);
        drop(state.take(ticket.id));
        if let Some(slot) = state.slots.iter_mut().find(|slot| slot.id == ticket.id) {
            (slot.is_dropped, slot.waiter) = (true, None);
        }
        state.wake_a_reader();
    }

    /// A body whose answer was used.
    pub(super) fn give_back(&self, mut body: Body) {
        body.shrink(KEPT_BYTES);
        let mut state = lock(&self.state);
        if state.spare.len() < MAX_SPARE {
            state.spare.push(body);
        }
    }

    /// Takes one answer off the socket for whoever it is; false if another thread does so.
    fn pump(&self, deadline: Instant) -> Result<bool, Failure> {
        let reading = lock(&self.state).reading.take();
        match reading {
            Some(reading) => {
                self.read(reading, deadline)?;
                // this thread may be long in coming back
                lock(&self.state).wake_a_reader();
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Reads a frame and puts it where it belongs.
    fn read(&self, mut reading: Box<Reading>, deadline: Instant) -> Result<(), Failure> {
        let read = reading.read(&self.stream, deadline);
        let mut state = lock(&self.state);
        let failure = match read {
            Ok(header) => {
                let spare = state.spare.pop().unwrap_or_default();
                self.deliver(&mut state, header, reading.incoming.swap(spare));
                None
            }
            Err(FrameError::Io(error)) if is_late(&error) => Some(Failure::Late),
            Err(FrameError::Closed) => Some(Failure::Lost(state.end("the connection was closed"))),
            Err(error) => Some(Failure::Lost(state.end(&error.to_string()))),
        };
        state.reading = Some(reading);
        match failure {
            None => Ok(()),
            Some(failure) => {
                state.wake_a_reader();
                Err(failure)
            }
        }
    }

    fn deliver(&self, state: &mut State, header: Header, body: Body) {
        state.heard = Instant::now();
        let Some(at) = state.slots.iter().position(|slot| slot.id == header.id) else {
            // not an answer: the server's last word
            let refused = (header.kind == Kind::Refusal).then(|| Refusal::decode(body.bytes()));
            match refused {
                Some(Ok(refused)) if refused.reason == Reason::Stopping => {
                    self.is_leaving.store(true, Ordering::Release);
                }
                Some(Ok(refused)) => drop(state.end(&refused.to_string())),
                _ => drop(state.end("an answer to nothing that was asked")),
            }
            return;
        };
        self.num_waiting.fetch_sub(1, Ordering::Relaxed);
        self.waiting_bytes.fetch_sub(state.slots[at].num_bytes, Ordering::Relaxed);
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
    /// The answer to a request, if it is there.
    fn take(&mut self, id: u64) -> Option<(Kind, Body)> {
        let at = self.slots.iter().position(|slot| slot.id == id && slot.answer.is_some())?;
        self.slots.swap_remove(at).answer
    }

    /// This thread waits for a request while another one reads.
    fn register(&mut self, id: u64) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
            slot.waiter = Some(thread::current());
        }
    }

    /// Lets somebody else read, if nobody does.
    fn wake_a_reader(&mut self) {
        if self.reading.is_some()
            && let Some(waiter) = self.slots.iter_mut().find_map(|slot| slot.waiter.take())
        {
            waiter.unpark();
        }
    }

    /// No more answers come, for the first reason that there is; returns it.
    fn end(&mut self, why: &str) -> String {
        let why = self.ended.get_or_insert_with(|| why.to_owned()).clone();
        self.slots.iter_mut().filter_map(|slot| slot.waiter.take()).for_each(|waiter| waiter.unpark());
        why
    }
}

/// What a server's answer to a hello says.
pub(super) fn greeting((kind, body): (Kind, Body)) -> Result<ServerInventory, Failure> {
    match kind {
        Kind::Inventory => ServerInventory::decode(body.bytes()).map_err(Failure::Unfit),
        Kind::Refusal => Err(Failure::Refused(Refusal::decode(body.bytes()).map_err(lost)?)),
        Kind::Welcome => Err(Failure::Unfit("expected a cube server, got a parameter server".into())),
        other => Err(lost(format!("expected what it holds, got {other:?}"))),
    }
}
