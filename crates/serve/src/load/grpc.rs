//! Unary calls of gRPC: a thread for each connection, on which hyper speaks HTTP/2.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

use super::desk::{Desk, Turn};
use super::tally::{Failure, Tally};
use super::{Load, LoadError, Part, first_body};

/// A server that refuses connections is not to be hammered.
const PAUSE: Duration = Duration::from_millis(1);
/// How often a thread that sleeps looks for the end.
const TICK: Duration = Duration::from_millis(50);
/// So large that answers are not held up for it.
const WINDOW_BYTES: u32 = 16 << 20;
/// What gRPC makes of an answer without a status.
const UNKNOWN: u32 = 2;

/// What all connections send.
#[derive(Clone)]
struct Calls {
    addr: SocketAddr,
    uri: Uri,
    headers: HeaderMap,
    messages: Vec<Bytes>,
    timeout: Duration,
}

/// One part for each connection.
pub(super) fn parts(load: &Load, addr: SocketAddr) -> Result<Vec<Part>, LoadError> {
    let calls = calls(load, addr)?;
    let part = |number| -> Result<Part, LoadError> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build().map_err(LoadError::Start)?;
        let connection = Connection { calls: calls.clone(), runtime, sender: None, next: first_body(load, number) };
        Ok(Box::new(move |desk| connection.run(desk)))
    };
    (0..load.connections).map(part).collect()
}

fn calls(load: &Load, addr: SocketAddr) -> Result<Calls, LoadError> {
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

struct Connection {
    calls: Calls,
    runtime: Runtime,
    /// None before the first call and after a failure: the next call connects.
    sender: Option<http2::SendRequest<Full<Bytes>>>,
    next: usize,
}

impl Connection {
    /// One call after the other, each when it is due.
    fn run(mut self, desk: &Desk) -> Tally {
        let mut tally = Tally::new();
        // one that fails is counted with its first call
        let _ = self.runtime.block_on(ready(&mut self.sender, self.calls.addr));
        let mut free = Instant::now();
        while let Some(turn) = desk.take() {
            if !sleep_until(turn, desk) {
                break;
            }
            tally.sent(turn, free, Instant::now());
            let outcome = self.call();
            tally.ended(turn, outcome, desk);
            if matches!(outcome, Err(Failure::Broken)) {
                self.sender = None;
                std::thread::sleep(PAUSE);
            }
            free = Instant::now();
        }
        tally
    }

    fn call(&mut self) -> Result<(), Failure> {
        let Connection { calls, runtime, sender, next } = self;
        let message = calls.messages[*next].clone();
        *next = (*next + 1) % calls.messages.len();
        let call = async {
            let sender = ready(sender, calls.addr).await.map_err(|_| Failure::Broken)?;
            let mut request = Request::post(&calls.uri).body(Full::new(message)).map_err(|_| Failure::Broken)?;
            *request.headers_mut() = calls.headers.clone();
            let response = sender.send_request(request).await.map_err(|_| Failure::Broken)?;
            status_of(response).await
        };
        runtime.block_on(async { tokio::time::timeout(calls.timeout, call).await }).unwrap_or(Err(Failure::Timeout))
    }
}

/// False if the load was stopped before.
fn sleep_until(turn: Turn, desk: &Desk) -> bool {
    loop {
        let left = turn.due.saturating_duration_since(Instant::now());
        if left.is_zero() || desk.is_stopped() {
            return left.is_zero();
        }
        std::thread::sleep(left.min(TICK));
    }
}

/// A connection that takes a call.
async fn ready(
    kept: &mut Option<http2::SendRequest<Full<Bytes>>>,
    addr: SocketAddr,
) -> io::Result<&mut http2::SendRequest<Full<Bytes>>> {
    if let Some(sender) = kept
        && sender.ready().await.is_err()
    {
        // closed by the server while there was no call on it
        *kept = None;
    }
    match kept {
        Some(sender) => Ok(sender),
        none => Ok(none.insert(connect(addr).await?)),
    }
}

async fn connect(addr: SocketAddr) -> io::Result<http2::SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // its end shows in the calls
    tokio::spawn(connection);
    sender.ready().await.map_err(io::Error::other)?;
    Ok(sender)
}

/// Reads the answer to its end, where the status is, unless the head has it.
async fn status_of(response: Response<Incoming>) -> Result<(), Failure> {
    if response.status() != 200 {
        return Err(Failure::Status(response.status().as_u16()));
    }
    let mut status = grpc_status(response.headers());
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Failure::Broken)?;
        if let Some(trailers) = frame.trailers_ref() {
            status = grpc_status(trailers);
        }
    }
    match status.unwrap_or(UNKNOWN) {
        0 => Ok(()),
        status => Err(Failure::Grpc(status)),
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}
