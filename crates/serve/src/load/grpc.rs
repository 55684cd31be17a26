//! Unary calls of gRPC over HTTP/2: one thread drives many connections, each of them a task.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

use super::alarm::Alarm;
use super::desk::{Desk, Turn};
use super::tally::{Failure, Tally};
use super::{Load, LoadError};

/// A server that refuses connections is not to be hammered.
const PAUSE: Duration = Duration::from_millis(1);
/// How often a task that sleeps looks for the end.
const TICK: Duration = Duration::from_millis(50);
/// So large that answers are not held up for it.
const WINDOW_BYTES: u32 = 16 << 20;
/// What gRPC makes of an answer without a status.
const UNKNOWN: u32 = 2;

/// What all connections send.
#[derive(Clone)]
pub(super) struct Calls {
    addr: SocketAddr,
    uri: Uri,
    headers: HeaderMap,
    messages: Vec<Bytes>,
    timeout: Duration,
}

/// The calls of a load.
pub(super) fn calls(load: &Load, addr: SocketAddr) -> Result<Calls, LoadError> {
    let strange = |text: &str| LoadError::Head(text.escape_debug().to_string());
    let uri = format!("http://{}{}", load.address, load.path);
    let uri = uri.parse().map_err(|_| strange(&uri))?;
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    headers.insert("te", HeaderValue::from_static("trailers"));
    for (name, value) in &load.headers {
        let name: HeaderName = name.parse().map_err(|_| strange(name))?;
        headers.append(name, value.parse().map_err(|_| strange(value))?);
    }
    let messages = load.bodies.iter().map(|message| framed(message)).collect::<Result<_, _>>()?;
    Ok(Calls { addr, uri, headers, messages, timeout: load.timeout })
}

/// A message behind the five bytes that say that it is not compressed, and how long it is.
fn framed(message: &[u8]) -> Result<Bytes, LoadError> {
    let length = u32::try_from(message.len()).map_err(|_| LoadError::Number {
        what: "bodies",
        expected: "messages of less than 4 GiB",
        got: message.len() as f64,
    })?;
    Ok([&[0], length.to_be_bytes().as_slice(), message].concat().into())
}

/// Calls over connections that begin at the given messages, until the end.
pub(super) fn run(calls: Calls, firsts: Vec<usize>, desk: Arc<Desk>) -> Tally {
    let tally = Rc::new(RefCell::new(Tally::new()));
    let calls = Rc::new(calls);
    let connection = |next| Connection { calls: calls.clone(), sender: None, next, tally: tally.clone() };
    let tasks = LocalSet::new();
    for first in firsts {
        tasks.spawn_local(connection(first).run(desk.clone()));
    }
    match Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime.block_on(tasks),
        // without it nothing is sent, which the report shows
        Err(_) => drop(tasks),
    }
    tally.replace(Tally::new())
}

struct Connection {
    calls: Rc<Calls>,
    /// None before the first call and after a failure: the next call connects.
    sender: Option<SendRequest<Bytes>>,
    next: usize,
    tally: Rc<RefCell<Tally>>,
}

impl Connection {
    /// One call after the other, each when it is due.
    async fn run(mut self, desk: Arc<Desk>) -> io::Result<()> {
        let mut alarm = Alarm::new()?;
        // one that fails is counted with its first call
        let _ = self.ready().await;
        let mut free = Instant::now();
        while let Some(turn) = desk.take() {
            if !sleep_until(turn, &mut alarm, &desk).await? {
                break;
            }
            self.tally.borrow_mut().sent(turn, free, Instant::now());
            let outcome = tokio::time::timeout(self.calls.timeout, self.call()).await.unwrap_or(Err(Failure::Timeout));
            self.tally.borrow_mut().ended(turn, outcome, &desk);
            if matches!(outcome, Err(Failure::Broken)) {
                self.sender = None;
                alarm.sleep(PAUSE).await?;
            }
            free = Instant::now();
        }
        Ok(())
    }

    async fn call(&mut self) -> Result<(), Failure> {
        let calls = self.calls.clone();
        let message = calls.messages[self.next].clone();
        self.next = (self.next + 1) % calls.messages.len();
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = calls.uri.clone();
        *request.headers_mut() = calls.headers.clone();
        self.ready().await.map_err(|_| Failure::Broken)?;
        let sender = self.sender.as_mut().ok_or(Failure::Broken)?;
        let (response, mut body) = sender.send_request(request, false).map_err(|_| Failure::Broken)?;
        // an answer may be there before the message was taken; if it is not, the answer says why
        let _ = body.send_data(message, true);
        status_of(response.await.map_err(|_| Failure::Broken)?).await
    }

    /// Waits for the connection to take a call; makes one if there is none, or if the server closed it while there was no call on it.
    async fn ready(&mut self) -> io::Result<()> {
        if let Some(sender) = self.sender.take() {
            self.sender = sender.ready().await.ok();
        }
        if self.sender.is_none() {
            self.sender = Some(connect(self.calls.addr).await?);
        }
        Ok(())
    }
}

/// False if the load was stopped before.
async fn sleep_until(turn: Turn, alarm: &mut Alarm, desk: &Desk) -> io::Result<bool> {
    loop {
        let left = turn.due.saturating_duration_since(Instant::now());
        if left.is_zero() || desk.is_stopped() {
            return Ok(left.is_zero());
        }
        alarm.sleep(left.min(TICK)).await?;
    }
}

async fn connect(addr: SocketAddr) -> io::Result<SendRequest<Bytes>> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES).enable_push(false);
    let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
    // its end shows in the calls
    tokio::spawn(connection);
    sender.ready().await.map_err(io::Error::other)
}

/// Reads the answer to its end, where the status is, unless the head has it.
async fn status_of(response: Response<RecvStream>) -> Result<(), Failure> {
    if response.status() != 200 {
        return Err(Failure::Status(response.status().as_u16()));
    }
    let in_head = grpc_status(response.headers());
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        let num_bytes = data.map_err(|_| Failure::Broken)?.len();
        let _ = body.flow_control().release_capacity(num_bytes);
    }
    let trailers = body.trailers().await.map_err(|_| Failure::Broken)?;
    match trailers.as_ref().and_then(grpc_status).or(in_head).unwrap_or(UNKNOWN) {
        0 => Ok(()),
        status => Err(Failure::Grpc(status)),
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}
