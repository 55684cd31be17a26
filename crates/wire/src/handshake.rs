//! The first exchange on a connection, for both ends: connect, TLS, hello, and the server's greeting or refusal.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

use crate::frame::{Body, FrameError, Header, Kind, read_frame, write_frame};
use crate::message::{Hello, Reason, Refusal};
use crate::stream::Stream;
use crate::tls::{ClientTls, TlsError};

/// Upper bound for connecting, TLS and the greeting together, whatever the client's timeout is.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason a client has no connection to a server.
#[derive(Debug)]
pub enum ConnectError {
    /// The server cannot be reached, or the connection ended; another attempt may succeed.
    Lost(String),
    /// The server is the wrong one: no TLS, another certificate, another protocol version, another role.
    WrongServer(String),
    /// The server refused the client.
    Refused(Refusal),
}

impl ConnectError {
    /// The server cannot be reached.
    pub fn lost(error: impl ToString) -> Self {
        ConnectError::Lost(error.to_string())
    }
}

/// A server's answer to a hello.
pub trait Greeting: Sized {
    /// Reads the greeting from a frame that is not a refusal.
    fn read(kind: Kind, body: &[u8]) -> Result<Self, ConnectError>;
}

/// Reads the answer to a hello: the greeting, or the server's refusal as an error.
pub fn read_greeting<G: Greeting>(kind: Kind, body: &[u8]) -> Result<G, ConnectError> {
    match kind {
        Kind::Refusal => Err(Refusal::decode(body).map_or_else(ConnectError::lost, ConnectError::Refused)),
        _ => G::read(kind, body),
    }
}

/// The settings with which a client connects to a server.
#[derive(Debug, Clone, Copy)]
pub struct Connector<'a> {
    /// The run or model of the client, and its token.
    pub hello: Hello<'a>,
    /// The authorities that the client trusts; without them the connection is plain.
    pub tls: Option<&'a ClientTls>,
    /// Time limit for connecting, at most five seconds; afterwards for a write that makes no progress.
    pub timeout: Duration,
    /// Longest body of a greeting.
    pub max_greeting_bytes: usize,
}

impl Connector<'_> {
    /// Connects to `host:port`, says hello and returns the connection with the server's greeting.
    pub fn connect<G: Greeting>(&self, address: &str) -> Result<(Stream, G), ConnectError> {
        let timeout = self.timeout.min(CONNECT_TIMEOUT);
        let deadline = Instant::now() + timeout;
        let mut targets = address.to_socket_addrs().map_err(ConnectError::lost)?;
        let target = targets.next().ok_or_else(|| ConnectError::lost("expected an address, got none"))?;
        let tcp = TcpStream::connect_timeout(&target, timeout).map_err(ConnectError::lost)?;
        tcp.set_nodelay(true).map_err(ConnectError::lost)?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host.trim_matches(['[', ']']));
        let stream = Stream::connect(tcp, self.tls, host, deadline).map_err(|error| match error {
            TlsError::Io(error) => ConnectError::lost(error),
            other => ConnectError::WrongServer(other.to_string()),
        })?;
        stream.limit_writes(self.timeout).map_err(ConnectError::lost)?;
        let header = Header { kind: Kind::Hello, id: 0 };
        write_frame(&mut &stream, header, &self.hello.parts().slices()).map_err(ConnectError::lost)?;
        let mut body = Body::default();
        let header = read_frame(&mut stream.until(deadline), self.max_greeting_bytes, &mut body);
        let header = header.map_err(|error| match error {
            FrameError::Version(_) | FrameError::Magic(_) => ConnectError::WrongServer(error.to_string()),
            other => ConnectError::lost(other),
        })?;
        let greeting = read_greeting(header.kind, body.bytes())?;
        Ok((stream, greeting))
    }
}

/// The clients that a server accepts.
#[derive(Debug, Clone, Copy)]
pub struct Access<'a> {
    /// The scope that clients and server share, for messages: `run` or `model`.
    pub scope: &'static str,
    /// The run or model that a client must name.
    pub name: &'a [u8],
    /// The token that a client must show; empty for none.
    pub token: &'a [u8],
}

impl Access<'_> {
    /// Checks that a frame is the hello of a client with the right token and the right run or model.
    pub fn check(&self, kind: Kind, body: &[u8]) -> Result<(), Refusal> {
        let scope = self.scope;
        match (kind, Hello::decode(body)) {
            (Kind::Hello, Ok(hello)) if !is_equal(hello.token, self.token) => {
                let text = format!("expected the token of the {scope}, got another token");
                Err(Refusal::new(Reason::Unauthorized, text))
            }
            (Kind::Hello, Ok(hello)) if hello.run != self.name => {
                let text = format!("expected a client of this {scope}, got a client of another {scope}");
                Err(Refusal::new(Reason::Unauthorized, text))
            }
            (Kind::Hello, Ok(_)) => Ok(()),
            (Kind::Hello, Err(error)) => Err(error.into()),
            (other, _) => Err(Refusal::new(Reason::Malformed, format!("expected a hello, got {other:?}"))),
        }
    }
}

/// Compares two secrets in a time that does not depend on where they differ.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}
