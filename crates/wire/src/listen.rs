//! The listening end of a server: accepts connections, with or without TLS, gives each a thread, and closes them on stop.

use std::collections::HashMap;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::frame::{FrameError, Header, Kind, MAGIC, write_frame};
use crate::lock;
use crate::message::{Reason, Refusal};
use crate::stream::Stream;
use crate::tls::ServerTls;

/// Time limit for the hello, including the TLS handshake; slower peers are dropped.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a write that makes no progress; such a peer is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for requests in flight when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of open connections, each with a thread and some descriptors; further peers are closed at once.
const MAX_OPEN: usize = 4096;
/// TCP keep-alive: idle time before the first probe.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// TCP keep-alive: time between two probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// TCP keep-alive: unanswered probes before the connection ends.
const KEEPALIVE_PROBES: u32 = 3;

/// Pause after an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Time for a refused peer to read the reason.
const LINGER_TIME: Duration = Duration::from_millis(200);

/// Handles the connections of a server.
pub trait Service: Send + Sync + 'static {
    /// Serves a peer until its connection ends; returns early if the peer has not said hello by the deadline.
    fn serve(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError>;
}

/// The connections of a server: the open ones, the refused ones, and whether the server is stopping.
#[derive(Debug, Default)]
pub struct Connections {
    /// Requests and peers that were refused.
    pub refused: AtomicU64,
    /// Connections that ended with bytes that are not a request.
    pub malformed: AtomicU64,
    is_stopping: AtomicBool,
    /// By the number of the connection.
    streams: Mutex<HashMap<u64, TcpStream>>,
}

/// A server that listens until it is dropped.
#[derive(Debug)]
pub struct Listener {
    connections: Arc<Connections>,
    address: SocketAddr,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

impl Connections {
    /// Whether the server is stopping: requests that have arrived are answered, further ones are not.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Number of open connections.
    pub fn num_open(&self) -> usize {
        lock(&self.streams).len()
    }

    /// Counts a peer or a request that was refused.
    pub fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that ended with bytes that are not a request.
    pub fn count_malformed(&self) {
        self.malformed.fetch_add(1, Ordering::Relaxed);
    }

    /// Shuts every connection down, for reads only or both ways.
    fn shut_down(&self, how: Shutdown) {
        for stream in lock(&self.streams).values() {
            // An error means that the connection has ended already.
            drop(stream.shutdown(how));
        }
    }
}

impl Listener {
    /// Listens and serves on threads named `<name>-accept` and `<name>-serve`, with TLS if there is a certificate.
    pub fn start(
        name: &'static str,
        address: &str,
        tls: Option<ServerTls>,
        connections: Arc<Connections>,
        service: Arc<impl Service>,
    ) -> io::Result<Listener> {
        Listener::start_with(address, Acceptor { name, tls, connections, service, max_open: MAX_OPEN })
    }

    fn start_with(address: &str, acceptor: Acceptor<impl Service>) -> io::Result<Listener> {
        let socket = TcpListener::bind(address)?;
        let address = socket.local_addr()?;
        let connections = acceptor.connections.clone();
        let thread = thread::Builder::new().name(format!("{}-accept", acceptor.name));
        let acceptor = Arc::new(acceptor);
        let handle = thread.spawn(move || acceptor.run(&socket))?;
        Ok(Listener { connections, address, acceptor: Mutex::new(Some(handle)) })
    }

    /// The address that the server listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the server after it has answered the requests that have arrived.
    pub fn stop(&self) {
        // The lock is held to the end, so that every caller returns only when the server has stopped.
        let mut running = lock(&self.acceptor);
        let Some(acceptor) = running.take() else { return };
        self.connections.is_stopping.store(true, Ordering::Release);
        // A connection wakes the acceptor; an error means that it has ended already.
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
        self.connections.shut_down(Shutdown::Read);
        drop(acceptor.join());
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

/// State that the threads of a server share.
struct Acceptor<S> {
    name: &'static str,
    tls: Option<ServerTls>,
    connections: Arc<Connections>,
    service: Arc<S>,
    max_open: usize,
}

impl<S: Service> Acceptor<S> {
    fn run(self: &Arc<Self>, socket: &TcpListener) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        for (number, stream) in (0..).zip(socket.incoming()) {
            if self.connections.is_stopping() {
                break;
            }
            let Ok(stream) = stream else {
                // The peer is gone already or descriptors ran out; both are temporary.
                thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            threads.retain(|thread| !thread.is_finished());
            if threads.len() >= self.max_open {
                self.connections.count_refused();
                continue;
            }
            let acceptor = self.clone();
            let thread = thread::Builder::new().name(format!("{}-serve", self.name));
            threads.extend(thread.spawn(move || acceptor.handle(number, stream)));
        }
        self.connections.shut_down(Shutdown::Read);
        let end = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < end && !threads.iter().all(JoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(5));
        }
        // The peers that are left do not read their answers.
        self.connections.shut_down(Shutdown::Both);
        for thread in threads {
            drop(thread.join());
        }
    }

    /// Serves a connection from its registration to its end.
    fn handle(&self, number: u64, tcp: TcpStream) {
        let Ok(registered) = tcp.try_clone() else { return };
        lock(&self.connections.streams).insert(number, registered);
        if self.connections.is_stopping() {
            // `stop` may have shut the registered connections down before this one was registered.
            drop(tcp.shutdown(Shutdown::Both));
        }
        self.serve(tcp);
        let registered = lock(&self.connections.streams).remove(&number);
        if let Some(registered) = registered {
            if !self.connections.is_stopping() {
                linger(&registered);
            }
            drop(registered.shutdown(Shutdown::Both));
        }
    }

    fn serve(&self, tcp: TcpStream) {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        if self.tls.is_some() && is_plain(&tcp) {
            self.refuse(&tcp, &Refusal::new(Reason::Unauthorized, "expected TLS, got a plain connection"));
            return;
        }
        if tcp.set_nodelay(true).is_err() || keep_alive(&tcp).is_err() {
            return;
        }
        let Ok(stream) = Stream::accept(tcp, self.tls.as_ref(), deadline) else {
            self.connections.count_malformed();
            return;
        };
        let (Ok(()), Ok(writer)) = (stream.limit_writes(WRITE_TIMEOUT), stream.try_clone()) else { return };
        match self.service.serve(stream, deadline) {
            Ok(()) | Err(FrameError::Closed | FrameError::Io(_)) => {}
            Err(error) => {
                self.connections.count_malformed();
                self.refuse(&writer, &Refusal::new(Reason::Malformed, error.to_string()));
            }
        }
    }

    /// Sends the reason for which a connection ends.
    fn refuse(&self, mut writer: impl io::Write, refusal: &Refusal) {
        self.connections.count_refused();
        drop(write_frame(&mut writer, Header { kind: Kind::Refusal, id: 0 }, &refusal.parts().slices()));
    }
}

/// Turns TCP keep-alive on, so that a connection to a machine that died ends.
fn keep_alive(tcp: &TcpStream) -> io::Result<()> {
    sockopt::set_tcp_keepidle(tcp, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(tcp, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(tcp, KEEPALIVE_PROBES)?;
    Ok(sockopt::set_socket_keepalive(tcp, true)?)
}

/// Reads until the peer closes too, or for a moment. Closing a socket with unread bytes resets the connection, and the
/// peer would lose the refusal that was written last.
fn linger(mut tcp: &TcpStream) {
    let end = Instant::now() + LINGER_TIME;
    if tcp.shutdown(Shutdown::Write).is_err() || tcp.set_read_timeout(Some(LINGER_TIME)).is_err() {
        return;
    }
    let mut unread = [0; 4096];
    while Instant::now() < end && matches!(tcp.read(&mut unread), Ok(1..)) {}
}

/// Whether a peer begins with a frame instead of a TLS handshake; the refusal is then a plain frame too.
fn is_plain(tcp: &TcpStream) -> bool {
    let mut first = [0];
    let peeked = tcp.set_read_timeout(Some(HELLO_TIMEOUT)).and_then(|()| tcp.peek(&mut first));
    peeked.is_ok_and(|count| count == 1) && first[0] == MAGIC[0]
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Writes one byte to each accepted peer and waits for its end.
    struct OneByteService;

    impl Service for OneByteService {
        fn serve(&self, mut stream: Stream, _: Instant) -> Result<(), FrameError> {
            stream.write_all(b"!").map_err(FrameError::Io)?;
            stream.read(&mut [0]).map(drop).map_err(FrameError::Io)
        }
    }

    /// Connects; returns the connection and whether it was accepted.
    fn connect(server: &Listener) -> (TcpStream, bool) {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let is_accepted = matches!(stream.read(&mut [0]), Ok(1));
        (stream, is_accepted)
    }

    #[test]
    fn peers_beyond_the_limit_are_closed_until_another_leaves() {
        let (connections, service) = (Arc::<Connections>::default(), Arc::new(OneByteService));
        let acceptor = Acceptor { name: "test", tls: None, connections: connections.clone(), service, max_open: 2 };
        let server = Listener::start_with("127.0.0.1:0", acceptor).unwrap();
        let (first, second) = (connect(&server), connect(&server));
        assert!(first.1 && second.1);
        assert!(!connect(&server).1);
        assert_eq!(connections.refused.load(Ordering::Relaxed), 1);
        drop(first);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !connect(&server).1 {
            assert!(Instant::now() < deadline, "no peer is accepted any more");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn keep_alive_probes_idle_peers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        keep_alive(&peer).unwrap();
        assert!(sockopt::socket_keepalive(&peer).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&peer).unwrap(), KEEPALIVE_IDLE);
    }
}
