//! The accept loop: connections in, and on a stop the wait for those that are under way.

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
use super::patience::Patient;
use crate::brpc;
use crate::http::Front;

/// Says when to stop, and until when that may take.
type Stop = watch::Receiver<Option<Instant>>;

/// After a failed accept, most likely for want of file descriptors: time for some to be closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Between two looks at a connection of which one to three bytes have come.
const PEEK_PAUSE: Duration = Duration::from_millis(5);

/// Requests under way on a connection of HTTP/2.
const MAX_STREAMS: u32 = 256;
/// What a client may send of a body before it is read: requests of thousands of instances come in one go.
const WINDOW_BYTES: u32 = 1 << 20;

/// What a connection of HTTP/2 begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The longest frame of HTTP/2 that a client may send.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// Serves until told to stop, then until all requests under way are answered or the deadline, which it returns.
pub(super) async fn serve(listener: TcpListener, app: Arc<App>, mut stop: Stop) -> Instant {
    let graceful = GracefulShutdown::new();
    let stopping = stop.clone();
    tokio::select! {
        error = accept(listener, &app, &graceful, &stopping) => match error {},
        // a handle that is gone can tell nothing any more; it stops the server too
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
        // answers are written whole, so waiting for more to send only adds latency
        let _ = stream.set_nodelay(true);
        // the end of the server waits for all that have one
        let watcher = graceful.watcher();
        let (app, stop, builders, service) = (app.clone(), stop.clone(), builders.clone(), service.clone());
        tokio::spawn(async move {
            let timeout = app.options.header_timeout;
            if let Some(tls) = &app.options.tls {
                let handshake = TlsAcceptor::from(tls.config().clone()).accept(stream);
                // one that does not speak TLS, or not ours, was told so by the handshake
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
                    // a client that breaks off, or breaks the protocol, is no business of the others
                    let _ = watcher.watch(connection).await;
                }
                None => (),
            }
            drop(permit);
        });
    }
}

/// What a connection begins with, left where it is: four bytes, or fewer that no protocol of ours but HTTP begins with.
/// Nothing if they do not come.
async fn first_bytes(stream: &TcpStream, stop: Stop, timeout: Duration) -> Option<[u8; 4]> {
    let mut bytes = [0; 4];
    let peek = async {
        loop {
            let count = stream.peek(&mut bytes).await.ok().filter(|&count| count > 0)?;
            if count == bytes.len() || bytes[..count] != brpc::MAGIC[..count] {
                return Some(());
            }
            // what is there is there at once; the rest of four bytes is not worth more than looking again
            tokio::time::sleep(PEEK_PAUSE).await;
        }
    };
    unless_stopped(stop, timeout, peek).await.flatten().map(|()| bytes)
}

/// What comes of the beginning of a connection; nothing if the server stops or the time is over first.
async fn unless_stopped<T>(mut stop: Stop, timeout: Duration, beginning: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        _ = stop.wait_for(Option::is_some) => None,
        outcome = tokio::time::timeout(timeout, beginning) => outcome.ok(),
    }
}

/// How the two versions of HTTP are served.
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
            // a client that is gone without a word holds its place no longer than one that idles
            .keep_alive_interval(timeout)
            .keep_alive_timeout(timeout)
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            // a request in one frame is read in one go
            .max_frame_size(MAX_FRAME_BYTES);
        Builders { http1, http2 }
    }

    /// How a connection is served; the preface of HTTP/2 has to come in time, as the first head of HTTP/1.1 has to.
    fn of<S>(&self, is_http2: bool, stream: S, app: &App) -> (&auto::Builder<TokioExecutor>, Patient<S>) {
        let stream = Patient::new(stream, app.options.body_timeout);
        if !is_http2 {
            return (&self.http1, stream);
        }
        (&self.http2, stream.beginning(PREFACE.len(), app.options.header_timeout).gathered())
    }
}
