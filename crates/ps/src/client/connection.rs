//! A client's connection to one shard: requests go out without waiting for answers; a thread receives the answers and hands
//! each to the thread that waits for it.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_wire::frame::MAX_BODY_BYTES;
use elasticrec_wire::message::Parts;
use elasticrec_wire::{
    Body, ConnectError, Connector, FrameError, Greeting, Header, Hello, Kind, MessageError, Refusal, Stream, Welcome,
    lock, read_frame, write_frame,
};

use super::{ClientError, Credentials};

/// Read buffer for answers.
const READ_BYTES: usize = 1 << 16;

/// An answer: its kind and its body.
type Answer = (Kind, Body);

/// A connection to one shard.
#[derive(Debug)]
pub(super) struct Connection {
    shard: usize,
    pub(super) address: String,
    stream: Stream,
    pub(super) welcome: Welcome,
    next_id: Mutex<u64>,
    answers: Arc<PendingAnswers>,
}

/// The answers that have not arrived yet.
#[derive(Debug, Default)]
struct PendingAnswers {
    /// The destination of the answer to each request.
    senders: Mutex<HashMap<u64, SyncSender<Answer>>>,
    /// The reason no more answers arrive, once the connection has ended.
    ended: Mutex<Option<String>>,
    /// Bodies to reuse for further answers.
    spare: Mutex<Vec<Body>>,
}

impl PendingAnswers {
    /// Receives answers until the connection ends.
    fn receive(&self, stream: Stream) {
        let mut reader = BufReader::with_capacity(READ_BYTES, stream);
        let ended = loop {
            let mut body = lock(&self.spare).pop().unwrap_or_default();
            match read_frame(&mut reader, MAX_BODY_BYTES, &mut body) {
                Ok(Header { kind, id }) => {
                    // Without a sender, the request has been given up.
                    let Some(sender) = lock(&self.senders).remove(&id) else { continue };
                    drop(sender.send((kind, body)));
                }
                Err(FrameError::Closed) => break "the connection was closed".into(),
                Err(error) => break error.to_string(),
            }
        };
        *lock(&self.ended) = Some(ended);
        lock(&self.senders).clear();
    }
}

/// A claim on the answer to a request in flight.
#[derive(Debug)]
pub struct Ticket {
    /// Only one thread waits for it; the lock lets a ticket move between threads.
    answer: Mutex<Receiver<Answer>>,
}

/// The welcome of a parameter server.
struct ShardGreeting(Welcome);

impl Greeting for ShardGreeting {
    fn read(kind: Kind, body: &[u8]) -> Result<Self, ConnectError> {
        match kind {
            Kind::Welcome => Welcome::decode(body).map(ShardGreeting).map_err(ConnectError::lost),
            other => Err(ConnectError::Lost(format!("expected a welcome, got {other:?}"))),
        }
    }
}

impl Connection {
    pub(super) fn open(
        shard: usize,
        address: &str,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let Credentials { run, token, tls } = credentials;
        let connector =
            Connector { hello: Hello { run, token }, tls: tls.as_ref(), timeout, max_greeting_bytes: MAX_BODY_BYTES };
        let failed = |error: ConnectError| ClientError::at(shard, address, error);
        let (stream, ShardGreeting(welcome)) = connector.connect(address).map_err(failed)?;
        let lost = |error: io::Error| failed(ConnectError::lost(error));
        let reader = stream.try_clone().map_err(lost)?;
        let answers = Arc::new(PendingAnswers::default());
        let receiver = answers.clone();
        thread::Builder::new().name("ps-answers".into()).spawn(move || receiver.receive(reader)).map_err(lost)?;
        Ok(Connection { shard, address: address.into(), stream, welcome, next_id: Mutex::new(1), answers })
    }

    /// The error for a connection that ended.
    pub(super) fn lost(&self, what: impl ToString) -> ClientError {
        ClientError::at(self.shard, &self.address, ConnectError::lost(what))
    }

    /// Sends a request; the ticket gives its answer.
    pub(super) fn send(&self, kind: Kind, parts: &Parts<'_>) -> Result<Ticket, ClientError> {
        // Locked while the frame is written, so that frames of two threads do not mix.
        let mut next_id = lock(&self.next_id);
        let id = *next_id;
        *next_id += 1;
        let (sender, answer) = sync_channel(1);
        lock(&self.answers.senders).insert(id, sender);
        if let Some(ended) = &*lock(&self.answers.ended) {
            return Err(self.lost(ended));
        }
        write_frame(&mut &self.stream, Header { kind, id }, &parts.slices()).map_err(|error| self.unsent(&error))?;
        Ok(Ticket { answer: Mutex::new(answer) })
    }

    /// Ends the connection after a failed write, since nothing can follow half a frame. Returns the error for the caller.
    fn unsent(&self, error: &io::Error) -> ClientError {
        drop(self.stream.shutdown());
        match error.kind() {
            // The request is too long for a frame.
            io::ErrorKind::InvalidInput => {
                ClientError::Permanent { shard: self.shard, address: self.address.clone(), what: error.to_string() }
            }
            // A socket returns this after its write timeout.
            io::ErrorKind::WouldBlock => self.lost("did not accept a request in time"),
            _ => self.lost(error),
        }
    }

    /// Returns a handle with which another thread can end the connection.
    pub(super) fn handle(&self) -> io::Result<Stream> {
        self.stream.try_clone()
    }

    /// Waits for the answer of a ticket, which must be of the expected kind.
    pub(super) fn wait(&self, ticket: &Ticket, expected: Kind, deadline: Instant) -> Result<Body, ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        match lock(&ticket.answer).recv_timeout(left) {
            Ok((kind, body)) if kind == expected => Ok(body),
            Ok((Kind::Refusal, body)) => {
                let refusal = Refusal::decode(body.bytes()).map_err(|error| self.broken(&error))?;
                Err(ClientError::at(self.shard, &self.address, ConnectError::Refused(refusal)))
            }
            Ok((kind, _)) => Err(self.lost(format!("expected {expected:?}, got {kind:?}"))),
            Err(RecvTimeoutError::Timeout) => Err(self.lost("did not answer in time")),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.lost(lock(&self.answers.ended).as_deref().unwrap_or("the connection ended")))
            }
        }
    }

    /// The error for an answer that cannot be decoded.
    pub(super) fn broken(&self, error: &MessageError) -> ClientError {
        self.lost(error)
    }

    /// Keeps the memory of an answer for further answers.
    pub(super) fn give_back(&self, body: Body) {
        lock(&self.answers.spare).push(body);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.stream.shutdown());
    }
}
