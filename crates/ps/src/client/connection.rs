//! A connection of a client: requests go out without waiting, a thread takes the answers off and hands each to whoever
//! asked.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_wire::frame::MAX_BODY_BYTES;
use elasticrec_wire::message::Parts;
use elasticrec_wire::{
    Body, FrameError, Header, Hello, Kind, MessageError, Refusal, Stream, TlsError, Welcome, read_frame, write_frame,
};

use super::{ClientError, Credentials};

/// A server that does not greet in this time hangs, or is none.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// An answer: its kind and its body.
type Answer = (Kind, Body);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to one shard.
#[derive(Debug)]
pub(super) struct Connection {
    shard: usize,
    pub(super) address: String,
    stream: Stream,
    pub(super) welcome: Welcome,
    next_id: Mutex<u64>,
    shared: Arc<PendingAnswers>,
}

/// Who waits for which answer.
#[derive(Debug, Default)]
struct PendingAnswers {
    asked: Mutex<HashMap<u64, SyncSender<Answer>>>,
    /// Why no more answers come.
    ended: Mutex<Option<String>>,
    /// Bodies to read the next answers into.
    spare: Mutex<Vec<Body>>,
}

impl PendingAnswers {
    /// Takes answers off the connection until it ends.
    fn receive(&self, stream: Stream) {
        let mut reader = BufReader::with_capacity(1 << 16, stream);
        let ended = loop {
            let mut body = lock(&self.spare).pop().unwrap_or_default();
            match read_frame(&mut reader, MAX_BODY_BYTES, &mut body) {
                Ok(Header { kind, id }) => {
                    // nobody waits for it any more
                    let Some(sender) = lock(&self.asked).remove(&id) else { continue };
                    drop(sender.send((kind, body)));
                }
                Err(FrameError::Closed) => break "the connection was closed".into(),
                Err(error) => break error.to_string(),
            }
        };
        *lock(&self.ended) = Some(ended);
        lock(&self.asked).clear();
    }
}

/// An answer that is waited for.
#[derive(Debug)]
pub struct Ticket {
    /// Only one waits for it; the lock lets a ticket go from thread to thread.
    answer: Mutex<Receiver<Answer>>,
}

impl Connection {
    pub(super) fn open(
        shard: usize,
        address: &str,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let lost = |what: String| ClientError::Lost { shard, address: address.into(), what };
        let unfit = |what: String| ClientError::Unfit { shard, address: address.into(), what };
        let patience = timeout.min(CONNECT_TIME);
        let deadline = Instant::now() + patience;
        let mut targets = address.to_socket_addrs().map_err(|error| lost(error.to_string()))?;
        let target = targets.next().ok_or_else(|| lost("expected an address, got none".into()))?;
        let tcp = TcpStream::connect_timeout(&target, patience).map_err(|error| lost(error.to_string()))?;
        tcp.set_nodelay(true).map_err(|error| lost(error.to_string()))?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host.trim_matches(['[', ']']));
        let mut stream =
            Stream::connect(tcp, credentials.tls.as_ref(), host, deadline).map_err(|error| match error {
                TlsError::Io(error) => lost(error.to_string()),
                other => unfit(other.to_string()),
            })?;
        let hello = Hello { run: &credentials.run, token: &credentials.token };
        write_frame(&mut stream, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices())
            .map_err(|error| lost(error.to_string()))?;
        let mut body = Body::default();
        let header =
            read_frame(&mut stream.until(deadline), MAX_BODY_BYTES, &mut body).map_err(|error| match error {
                FrameError::Version(_) | FrameError::Magic(_) => unfit(error.to_string()),
                other => lost(other.to_string()),
            })?;
        let welcome = match header.kind {
            Kind::Welcome => Welcome::decode(body.bytes()).map_err(|error| lost(error.to_string()))?,
            Kind::Refusal => {
                let refused = Refusal::decode(body.bytes()).map_err(|error| lost(error.to_string()))?;
                return Err(ClientError::Refused { shard, address: address.into(), refused });
            }
            other => return Err(lost(format!("expected a welcome, got {other:?}"))),
        };
        stream.limit_writes(timeout).map_err(|error| lost(error.to_string()))?;
        let reader = stream.try_clone().map_err(|error| lost(error.to_string()))?;
        let shared = Arc::new(PendingAnswers::default());
        let receiving = shared.clone();
        thread::Builder::new()
            .name("ps-answers".into())
            .spawn(move || receiving.receive(reader))
            .map_err(|error| lost(error.to_string()))?;
        Ok(Connection { shard, address: address.into(), stream, welcome, next_id: Mutex::new(1), shared })
    }

    pub(super) fn lost(&self, what: impl Into<String>) -> ClientError {
        ClientError::Lost { shard: self.shard, address: self.address.clone(), what: what.into() }
    }

    /// Sends a request; its answer comes to the ticket.
    pub(super) fn ask(&self, kind: Kind, parts: &Parts<'_>) -> Result<Ticket, ClientError> {
        // held while the frame is written: frames of two threads must not mix
        let mut next_id = lock(&self.next_id);
        let id = *next_id;
        *next_id += 1;
        let (sender, answer) = sync_channel(1);
        lock(&self.shared.asked).insert(id, sender);
        if let Some(ended) = &*lock(&self.shared.ended) {
            return Err(self.lost(ended.clone()));
        }
        write_frame(&mut &self.stream, Header { kind, id }, &parts.slices()).map_err(|error| self.unsent(&error))?;
        Ok(Ticket { answer: Mutex::new(answer) })
    }

    /// Why a request did not go out; what did is the beginning of a frame, behind which nothing can follow.
    fn unsent(&self, error: &io::Error) -> ClientError {
        drop(self.stream.shutdown());
        let (shard, address) = (self.shard, self.address.clone());
        match error.kind() {
            io::ErrorKind::InvalidInput => ClientError::Unfit { shard, address, what: error.to_string() },
            // so says a socket whose time is over
            io::ErrorKind::WouldBlock => self.lost("did not take a request in time"),
            _ => self.lost(error.to_string()),
        }
    }

    /// A handle that ends the connection, for another thread.
    pub(super) fn handle(&self) -> io::Result<Stream> {
        self.stream.try_clone()
    }

    pub(super) fn wait(&self, ticket: &Ticket, expected: Kind, deadline: Instant) -> Result<Body, ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        match lock(&ticket.answer).recv_timeout(left) {
            Ok((kind, body)) if kind == expected => Ok(body),
            Ok((Kind::Refusal, body)) => {
                let refused = Refusal::decode(body.bytes()).map_err(|error| self.broken(&error))?;
                Err(ClientError::Refused { shard: self.shard, address: self.address.clone(), refused })
            }
            Ok((kind, _)) => Err(self.lost(format!("expected {expected:?}, got {kind:?}"))),
            Err(RecvTimeoutError::Timeout) => Err(self.lost("did not answer in time")),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.lost(lock(&self.shared.ended).clone().unwrap_or_else(|| "the connection ended".into())))
            }
        }
    }

    pub(super) fn broken(&self, error: &MessageError) -> ClientError {
        self.lost(error.to_string())
    }

    pub(super) fn give_back(&self, body: Body) {
        lock(&self.shared.spare).push(body);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.stream.shutdown());
    }
}
