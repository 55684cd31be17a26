//! The accept loop: connections in, and on a stop the wait for those that are under way.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::{App, routes};

/// After a failed accept, most likely for want of file descriptors: time for some to be closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until told to stop, then until all requests under way are answered or the deadline, which it returns.
pub(super) async fn serve(listener: TcpListener, app: Arc<App>, mut stop: watch::Receiver<Option<Instant>>) -> Instant {
    let graceful = GracefulShutdown::new();
    tokio::select! {
        error = accept(listener, &app, &graceful) => match error {},
        // a handle that is gone can tell nothing any more; it stops the server too
        _ = stop.wait_for(Option::is_some) => (),
    }
    let deadline = stop.borrow().unwrap_or_else(Instant::now);
    let _ = tokio::time::timeout_at(deadline.into(), graceful.shutdown()).await;
    deadline
}

async fn accept(listener: TcpListener, app: &Arc<App>, graceful: &GracefulShutdown) -> Infallible {
    let service = TowerToHyperService::new(routes::router(app.clone()));
    let connections = Arc::new(Semaphore::new(app.options.max_connections.clamp(1, Semaphore::MAX_PERMITS)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(app.options.header_timeout);
    loop {
        let permit = connections.clone().acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // answers are written whole, so waiting for more to send only adds latency
        let _ = stream.set_nodelay(true);
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service.clone()));
        tokio::spawn(async move {
            // a client that breaks off, or breaks the protocol, is no business of the others
            let _ = connection.await;
            drop(permit);
        });
    }
}
