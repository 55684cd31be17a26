//! A connection at the server: the hello, then requests in, answers and refusals out.

use std::io::{self, BufReader};
use std::time::Instant;

use crate::frame::{Body, FrameError, Header, Kind, MAX_HELLO_BYTES, read_frame, write_frame};
use crate::handshake::Access;
use crate::message::{Parts, Refusal};
use crate::stream::Stream;

/// Read buffer of a connection: several small requests, or the beginning of a large one.
const READ_BYTES: usize = 1 << 16;

/// The server's end of a connection to one client.
#[derive(Debug)]
pub struct Peer {
    reader: BufReader<Stream>,
    stream: Stream,
    /// The body of the last frame.
    pub body: Body,
}

impl Peer {
    /// Wraps a connection on which nothing has been read yet.
    pub fn new(stream: Stream) -> io::Result<Self> {
        let reader = BufReader::with_capacity(READ_BYTES, stream.try_clone()?);
        Ok(Peer { reader, stream, body: Body::default() })
    }

    /// Reads the first frame by the deadline. Returns its number, and a refusal unless it is a hello that `access` accepts.
    pub fn read_hello(
        &mut self,
        access: Access<'_>,
        deadline: Instant,
    ) -> Result<(u64, Result<(), Refusal>), FrameError> {
        let Header { kind, id } = read_frame(&mut self.stream.until(deadline), MAX_HELLO_BYTES, &mut self.body)?;
        Ok((id, access.check(kind, self.body.bytes())))
    }

    /// Reads a request of at most `max_bytes` into `body`.
    pub fn read(&mut self, max_bytes: usize) -> Result<Header, FrameError> {
        read_frame(&mut self.reader, max_bytes, &mut self.body)
    }

    /// Sends an answer to request `id`.
    pub fn send(&self, kind: Kind, id: u64, parts: &Parts<'_>) -> io::Result<()> {
        write_frame(&mut &self.stream, Header { kind, id }, &parts.slices())
    }

    /// Refuses request `id`; 0 for a refusal of all further requests.
    pub fn refuse(&self, id: u64, refusal: &Refusal) -> io::Result<()> {
        self.send(Kind::Refusal, id, &refusal.parts())
    }
}
