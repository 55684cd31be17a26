//! The accept loop: accepts connections, detects their protocol, and on a stop waits for in-flight requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use super::App;
use super::time_limits::TimedStream;
use crate::protocols::brpc;
use crate::protocols::http::Front;

/// Set to the deadline when the server should stop.
type Stop = watch::Receiver<Option<Instant>>;

/// Pause after a failed accept, most likely for lack of file descriptors, so that some are closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Pause between two peeks at a connection that has sent one to three bytes.
const PEEK_PAUSE: Duration = Duration::from_millis(5);

/// In-flight requests on a connection of HTTP/2.
const MAX_STREAMS: u32 = 256;
/// Bytes of a body that a client may send before they are read: enough for thousands of instances at once.
const WINDOW_BYTES: u32 = 1 << 20;

/// The first bytes of a connection of HTTP/2.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The longest frame of HTTP/2 that a client may send.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Serves until a stop, then until all in-flight requests are answered or the deadline has passed. Returns the
/// deadline.
pub(super) async fn serve(listener: TcpListener, app: Arc<App>, mut stop: Stop) -> Instant {
    let graceful = GracefulShutdown::new();
    let stopping = stop.clone();
    tokio::select! {
        error = accept(listener, &app, &graceful, &stopping) => match error {},
        // Dropping the handle stops the server too.
        _ = stop.wait_for(Option::is_some) => (),
    }
    let deadline = stop.borrow().unwrap_or_else(Instant::now);
    let _ = tokio::time::timeout_at(deadline.into(), graceful.shutdown()).await;
    deadline
}

async fn accept(listener: TcpListener, app: &Arc<App>, graceful: &GracefulShutdown, stop: &Stop) -> Infallible {
    let front = Arc::new(Front::new(app.clone()));
    let service = service_fn(move |request: Request<Incoming>| {
        let front = front.clone();
        async move { Ok::<_, Infallible>(front.answer(request.map(Body::new)).await) }
    });
    let connections = Arc::new(Semaphore::new(app.options.max_connections.clamp(1, Semaphore::MAX_PERMITS)));
    let builders = Arc::new(Builders::new(app));
    loop {
        let permit = connections.clone().acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Answers are written whole, so Nagle's algorithm would only add latency.
        let _ = stream.set_nodelay(true);
        // A stop waits for every connection that has a watcher.
        let watcher = graceful.watcher();
        let (app, stop, builders, service) = (app.clone(), stop.clone(), builders.clone(), service.clone());
        tokio::spawn(async move {
            let timeout = app.options.header_timeout;
            if let Some(tls) = &app.options.tls {
                let handshake = TlsAcceptor::from(tls.config().clone()).accept(stream);
                // A failed handshake has told the client why.
                if let Some(Ok(stream)) = unless_stopped(stop, timeout, handshake).await {
                    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let (builder, stream) = builders.of(is_http2, stream, &app);
                    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
                    let _ = watcher.watch(connection).await;
                }
                drop(permit);
                return;
            }
            match first_bytes(&stream, stop.clone(), timeout).await {
                Some(first) if first == brpc::MAGIC => {
                    brpc::serve(stream, app, stop).await;
                    drop(watcher);
                }
                Some(first) => {
                    let (builder, stream) = builders.of(first.starts_with(&PREFACE[..3]), stream, &app);
                    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
                    // An error concerns this client only.
                    let _ = watcher.watch(connection).await;
                }
                None => (),
            }
            drop(permit);
        });
    }
}

/// Peeks at the first bytes of a connection: four, or fewer if they cannot be the start of bRPC. Returns None if none
/// arrive in time.
async fn first_bytes(stream: &TcpStream, stop: Stop, timeout: Duration) -> Option<[u8; 4]> {
    let mut bytes = [0; 4];
    let peek = async {
        loop {
            let count = stream.peek(&mut bytes).await.ok().filter(|&count| count > 0)?;
            if count == bytes.len() || bytes[..count] != brpc::MAGIC[..count] {
                return Some(());
            }
            // Four bytes almost always arrive together, so polling for the rest is enough.
            tokio::time::sleep(PEEK_PAUSE).await;
        }
    };
    unless_stopped(stop, timeout, peek).await.flatten().map(|()| bytes)
}

/// Waits for the start of a connection. Returns None if the server stops or the time limit passes first.
async fn unless_stopped<T>(mut stop: Stop, timeout: Duration, start: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        _ = stop.wait_for(Option::is_some) => None,
        outcome = tokio::time::timeout(timeout, start) => outcome.ok(),
    }
}

/// hyper's settings for HTTP/1.1 and HTTP/2.
struct Builders {
    http1: auto::Builder<TokioExecutor>,
    http2: auto::Builder<TokioExecutor>,
}

impl Builders {
    fn new(app: &App) -> Builders {
        let timeout = app.options.header_timeout;
        let mut http1 = auto::Builder::new(TokioExecutor::new()).http1_only();
        http1.http1().timer(TokioTimer::new()).header_read_timeout(timeout);
        let mut http2 = auto::Builder::new(TokioExecutor::new()).http2_only();
        http2
            .http2()
            .timer(TokioTimer::new())
            // Disconnect a vanished client within the time limit of an idle one.
            .keep_alive_interval(timeout)
            .keep_alive_timeout(timeout)
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            // A request in one frame is read in one piece.
            .max_frame_size(MAX_FRAME_BYTES);
        Builders { http1, http2 }
    }

    /// Returns the settings for a connection. The preface of HTTP/2 has the time limit of HTTP/1.1's first headers.
    fn of<S>(&self, is_http2: bool, stream: S, app: &App) -> (&auto::Builder<TokioExecutor>, TimedStream<S>) {
        let stream = TimedStream::new(stream, app.options.body_timeout);
        if !is_http2 {
            return (&self.http1, stream);
        }
        (&self.http2, stream.with_preface(PREFACE.len(), app.options.header_timeout).joining_writes())
    }
}
