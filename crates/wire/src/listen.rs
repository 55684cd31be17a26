//! The listening end of a server: lets peers in, with TLS or without, gives each a thread, and lets them end.

use std::collections::HashMap;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::frame::{FrameError, Header, Kind, MAGIC, write_frame};
use crate::message::{Hello, Reason, Refusal};
use crate::stream::Stream;
use crate::tls::ServerTls;

/// A peer that has not said hello in this time, with TLS or without, is none.
const HELLO_TIME: Duration = Duration::from_secs(10);
/// A peer that has taken nothing of an answer for so long is gone.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// At the end requests that are being answered have so long.
const FAREWELL_TIME: Duration = Duration::from_secs(5);

/// Connections at a time, each with a thread and some descriptors; who comes beyond that is sent away.
const MAX_OPEN: usize = 4096;
/// A peer from which nothing came for so long is asked whether it is there,
const SILENT_TIME: Duration = Duration::from_secs(60);
/// again and again,
const PROBE_TIME: Duration = Duration::from_secs(10);
/// so often before it is gone: its machine may have died without a word.
const NUM_PROBES: u32 = 3;

/// Before a connection is taken after one that could not be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// A peer that was refused has so long to hear why.
const LINGER_TIME: Duration = Duration::from_millis(200);

/// What a server does with those who connect.
pub trait Service: Send + Sync + 'static {
    /// Answers a peer until the connection ends; one that has not said hello by the deadline is none.
    fn talk(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError>;

    /// Counts a peer or a request that was refused.
    fn note_refused(&self);

    /// Counts a connection that ended with bytes that are no request.
    fn note_malformed(&self);
}

/// The open connections, and whether they are to end.
#[derive(Debug, Default)]
pub struct Gate {
    is_stopping: AtomicBool,
    /// By the number of each.
    streams: Mutex<HashMap<u64, TcpStream>>,
}

/// A server that listens until it is dropped.
#[derive(Debug)]
pub struct Listening {
    gate: Arc<Gate>,
    address: SocketAddr,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

/// Nobody who holds the lock can leave what it guards half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// Whether the server stops: requests that are there are the last ones.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Connections that are open.
    pub fn num_open(&self) -> usize {
        lock(&self.streams).len()
    }

    /// Lets every connection end, after the requests that have come or at once.
    fn end_streams(&self, how: Shutdown) {
        for stream in lock(&self.streams).values() {
            // one that has ended is what is wanted
            drop(stream.shutdown(how));
        }
    }
}

impl Listening {
    /// Listens and answers on threads named `<name>-accept` and `<name>-serve`, with TLS if there is a certificate.
    pub fn start(
        name: &'static str,
        address: &str,
        tls: Option<ServerTls>,
        gate: Arc<Gate>,
        service: Arc<impl Service>,
    ) -> io::Result<Listening> {
        Listening::start_with(name, address, tls, gate, service, MAX_OPEN)
    }

    fn start_with(
        name: &'static str,
        address: &str,
        tls: Option<ServerTls>,
        gate: Arc<Gate>,
        service: Arc<impl Service>,
        max_open: usize,
    ) -> io::Result<Listening> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let door = Arc::new(Door { name, tls, gate: gate.clone(), service, max_open });
        let acceptor = thread::Builder::new().name(format!("{name}-accept")).spawn(move || door.accept(&listener))?;
        Ok(Listening { gate, address, acceptor: Mutex::new(Some(acceptor)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops answering; requests that have come are answered first.
    pub fn stop(&self) {
        // held until it has: whoever calls this returns when it has stopped
        let mut running = lock(&self.acceptor);
        let Some(acceptor) = running.take() else { return };
        self.gate.is_stopping.store(true, Ordering::Release);
        // wakes the acceptor; it may be gone, and then that is all that is wanted
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
        self.gate.end_streams(Shutdown::Read);
        drop(acceptor.join());
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the threads of a server share.
struct Door<S> {
    name: &'static str,
    tls: Option<ServerTls>,
    gate: Arc<Gate>,
    service: Arc<S>,
    max_open: usize,
}

impl<S: Service> Door<S> {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut connections: Vec<JoinHandle<()>> = Vec::new();
        for (number, stream) in (0..).zip(listener.incoming()) {
            if self.gate.is_stopping() {
                break;
            }
            let Ok(stream) = stream else {
                // a connection that ended before it was taken, or no more descriptors: those pass
                thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            connections.retain(|connection| !connection.is_finished());
            if connections.len() >= self.max_open {
                self.service.note_refused();
                continue;
            }
            let door = self.clone();
            let thread = thread::Builder::new().name(format!("{}-serve", self.name));
            connections.extend(thread.spawn(move || door.serve(number, stream)));
        }
        self.gate.end_streams(Shutdown::Read);
        let end = Instant::now() + FAREWELL_TIME;
        while Instant::now() < end && !connections.iter().all(JoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(5));
        }
        // the rest are of peers that do not read
        self.gate.end_streams(Shutdown::Both);
        for connection in connections {
            drop(connection.join());
        }
    }

    /// Answers the requests of a connection until it ends.
    fn serve(&self, number: u64, tcp: TcpStream) {
        let Ok(kept) = tcp.try_clone() else { return };
        lock(&self.gate.streams).insert(number, kept);
        if self.gate.is_stopping() {
            // those that stand in the list were told before this one stood there
            drop(tcp.shutdown(Shutdown::Both));
        }
        self.let_in(tcp);
        let kept = lock(&self.gate.streams).remove(&number);
        if let Some(kept) = kept {
            if !self.gate.is_stopping() {
                see_off(&kept);
            }
            drop(kept.shutdown(Shutdown::Both));
        }
    }

    fn let_in(&self, tcp: TcpStream) {
        let deadline = Instant::now() + HELLO_TIME;
        if self.tls.is_some() && is_plain(&tcp) {
            self.refuse(&tcp, Refusal::new(Reason::Unauthorized, "expected TLS, got a plain connection"));
            return;
        }
        if tcp.set_nodelay(true).is_err() || keep_alive(&tcp).is_err() {
            return;
        }
        let Ok(stream) = Stream::accept(tcp, self.tls.as_ref(), deadline) else {
            self.service.note_malformed();
            return;
        };
        let (Ok(()), Ok(farewell)) = (stream.limit_writes(WRITE_TIME), stream.try_clone()) else { return };
        match self.service.talk(stream, deadline) {
            Ok(()) | Err(FrameError::Closed | FrameError::Io(_)) => {}
            Err(error) => {
                self.service.note_malformed();
                self.refuse(&farewell, Refusal::new(Reason::Malformed, error.to_string()));
            }
        }
    }

    /// Says no at the end of a connection.
    fn refuse(&self, mut writer: impl io::Write, refused: Refusal) {
        self.service.note_refused();
        drop(write_frame(&mut writer, Header { kind: Kind::Refusal, id: 0 }, &refused.parts().slices()));
    }
}

/// Lets a peer whose machine is gone not be waited for for ever.
fn keep_alive(tcp: &TcpStream) -> io::Result<()> {
    sockopt::set_tcp_keepidle(tcp, SILENT_TIME)?;
    sockopt::set_tcp_keepintvl(tcp, PROBE_TIME)?;
    sockopt::set_tcp_keepcnt(tcp, NUM_PROBES)?;
    Ok(sockopt::set_socket_keepalive(tcp, true)?)
}

/// Reads on until the peer has ended too, or for a moment: a socket that is closed with bytes in it takes back what was
/// written last, which says why.
fn see_off(mut tcp: &TcpStream) {
    let end = Instant::now() + LINGER_TIME;
    if tcp.shutdown(Shutdown::Write).is_err() || tcp.set_read_timeout(Some(LINGER_TIME)).is_err() {
        return;
    }
    let mut unread = [0; 4096];
    while Instant::now() < end && matches!(tcp.read(&mut unread), Ok(1..)) {}
}

/// Whether a peer begins with a frame, where a handshake of TLS should be: it is told so in its own language.
fn is_plain(tcp: &TcpStream) -> bool {
    let mut first = [0];
    let peeked = tcp.set_read_timeout(Some(HELLO_TIME)).and_then(|()| tcp.peek(&mut first));
    peeked.is_ok_and(|count| count == 1) && first[0] == MAGIC[0]
}

/// Whom a server lets in.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// What the two ends belong to, for people: `run`, `model`.
    pub of: &'static str,
    /// Which one.
    pub run: &'a [u8],
    /// Its secret; empty for none.
    pub token: &'a [u8],
}

impl Expected<'_> {
    /// Whether a peer's first frame is the hello of one that is let in.
    pub fn check(&self, kind: Kind, body: &[u8]) -> Result<(), Refusal> {
        let of = self.of;
        match (kind, Hello::decode(body)) {
            (Kind::Hello, Ok(hello)) if !is_equal(hello.token, self.token) => {
                let text = format!("expected the token of the {of}, got another one");
                Err(Refusal::new(Reason::Unauthorized, text))
            }
            (Kind::Hello, Ok(hello)) if hello.run != self.run => {
                let text = format!("expected a client of this {of}, got one of another {of}");
                Err(Refusal::new(Reason::Unauthorized, text))
            }
            (Kind::Hello, Ok(_)) => Ok(()),
            (Kind::Hello, Err(error)) => Err(Refusal::new(Reason::Malformed, error.to_string())),
            (other, _) => Err(Refusal::new(Reason::Malformed, format!("expected a hello, got {other:?}"))),
        }
    }
}

/// Whether two secrets are equal, in a time that does not tell how much of them is.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Says a byte to whoever is let in, and waits for the end.
    #[derive(Default)]
    struct Greeter {
        num_refused: AtomicUsize,
    }

    impl Service for Greeter {
        fn talk(&self, mut stream: Stream, _: Instant) -> Result<(), FrameError> {
            stream.write_all(b"!").map_err(FrameError::Io)?;
            stream.read(&mut [0]).map(drop).map_err(FrameError::Io)
        }

        fn note_refused(&self) {
            self.num_refused.fetch_add(1, Ordering::Relaxed);
        }

        fn note_malformed(&self) {}
    }

    /// A connection, and whether it was let in.
    fn connect(server: &Listening) -> (TcpStream, bool) {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let is_in = matches!(stream.read(&mut [0]), Ok(1));
        (stream, is_in)
    }

    #[test]
    fn who_comes_beyond_the_limit_is_sent_away_until_somebody_leaves() {
        let service = Arc::new(Greeter::default());
        let server = Listening::start_with("test", "127.0.0.1:0", None, Arc::default(), service.clone(), 2).unwrap();
        let (first, second) = (connect(&server), connect(&server));
        assert!(first.1 && second.1);
        assert!(!connect(&server).1);
        assert_eq!(service.num_refused.load(Ordering::Relaxed), 1);
        drop(first);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !connect(&server).1 {
            assert!(Instant::now() < deadline, "nobody is let in any more");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_peer_is_asked_whether_it_is_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        keep_alive(&peer).unwrap();
        assert!(sockopt::socket_keepalive(&peer).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&peer).unwrap(), SILENT_TIME);
    }
}
