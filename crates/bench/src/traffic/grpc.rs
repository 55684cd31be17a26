//! Unary gRPC calls over HTTP/2: one thread drives many connections, each in a task.

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

use super::dispatcher::{Dispatcher, DueRequest};
use super::recorder::{Failure, Recorder};
use super::timer::Timer;
use super::{Traffic, TrafficError};

/// Pause after a failed connection, before the next attempt.
const PAUSE: Duration = Duration::from_millis(1);
/// Interval at which a sleeping task checks for a stop.
const TICK: Duration = Duration::from_millis(50);
/// Large enough that flow control never delays an answer.
const WINDOW_BYTES: u32 = 16 << 20;
/// The gRPC status of an answer without one.
const UNKNOWN: u32 = 2;

/// The calls of all connections.
#[derive(Clone)]
pub(super) struct Calls {
    addr: SocketAddr,
    uri: Uri,
    headers: HeaderMap,
    messages: Vec<Bytes>,
    timeout: Duration,
}

/// Prepares the calls.
pub(super) fn calls(traffic: &Traffic, addr: SocketAddr) -> Result<Calls, TrafficError> {
    let strange = |text: &str| TrafficError::Head(text.escape_debug().to_string());
    let uri = format!("http://{}{}", traffic.address, traffic.path);
    let uri = uri.parse().map_err(|_| strange(&uri))?;
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    headers.insert("te", HeaderValue::from_static("trailers"));
    for (name, value) in &traffic.headers {
        let name: HeaderName = name.parse().map_err(|_| strange(name))?;
        headers.append(name, value.parse().map_err(|_| strange(value))?);
    }
    let messages = traffic.bodies.iter().map(|message| framed(message)).collect::<Result<_, _>>()?;
    Ok(Calls { addr, uri, headers, messages, timeout: traffic.timeout })
}

/// Returns a message with its prefix of five bytes: uncompressed, and its length.
fn framed(message: &[u8]) -> Result<Bytes, TrafficError> {
    let length = u32::try_from(message.len()).map_err(|_| TrafficError::Number {
        what: "bodies",
        expected: "messages of less than 4 GiB",
        got: message.len() as f64,
    })?;
    Ok([&[0], length.to_be_bytes().as_slice(), message].concat().into())
}

/// Sends calls until the end, on connections that start at the given messages.
pub(super) fn run(calls: Calls, firsts: Vec<usize>, dispatcher: Arc<Dispatcher>) -> Recorder {
    let recorder = Rc::new(RefCell::new(Recorder::new()));
    let calls = Rc::new(calls);
    let connection = |next| Connection { calls: calls.clone(), sender: None, next, recorder: recorder.clone() };
    let tasks = LocalSet::new();
    for first in firsts {
        tasks.spawn_local(connection(first).run(dispatcher.clone()));
    }
    match Builder::new_current_thread().enable_io().enable_time().build() {
        Ok(runtime) => runtime.block_on(tasks),
        // Without a runtime nothing is sent, which the report shows.
        Err(_) => drop(tasks),
    }
    recorder.replace(Recorder::new())
}

struct Connection {
    calls: Rc<Calls>,
    /// None before the first call and after a failure; the next call connects.
    sender: Option<SendRequest<Bytes>>,
    next: usize,
    recorder: Rc<RefCell<Recorder>>,
}

impl Connection {
    /// Sends one call after the other, each when it is due.
    async fn run(mut self, dispatcher: Arc<Dispatcher>) -> io::Result<()> {
        let mut timer = Timer::new()?;
        // A failed connection is counted with its first call.
        let _ = self.ready().await;
        let mut free = Instant::now();
        while let Some(request) = dispatcher.take() {
            if !sleep_until(request, &mut timer, &dispatcher).await? {
                break;
            }
            self.recorder.borrow_mut().record_sent(request, free, Instant::now());
            let outcome = tokio::time::timeout(self.calls.timeout, self.call()).await.unwrap_or(Err(Failure::Timeout));
            self.recorder.borrow_mut().record_outcome(request, outcome, &dispatcher);
            if matches!(outcome, Err(Failure::Broken)) {
                self.sender = None;
                timer.sleep(PAUSE).await?;
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
        // The server may answer before it has read the message; an error shows in the answer.
        let _ = body.send_data(message, true);
        status_of(response.await.map_err(|_| Failure::Broken)?).await
    }

    /// Waits until the connection can take a call; reconnects if the server closed it while it was idle.
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

/// Sleeps until a request is due; returns false if the traffic is stopped before.
async fn sleep_until(request: DueRequest, timer: &mut Timer, dispatcher: &Dispatcher) -> io::Result<bool> {
    loop {
        let left = request.due.saturating_duration_since(Instant::now());
        if left.is_zero() || dispatcher.is_stopped() {
            return Ok(left.is_zero());
        }
        timer.sleep(left.min(TICK)).await?;
    }
}

async fn connect(addr: SocketAddr) -> io::Result<SendRequest<Bytes>> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES).enable_push(false);
    let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
    // If the connection fails, its calls fail.
    tokio::spawn(connection);
    sender.ready().await.map_err(io::Error::other)
}

/// Reads an answer to its end and returns its status, which is in the trailers or in the headers.
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
