//! A connection, plain TCP or TLS. In both cases one thread may read while others write.
//!
//! A TLS session has one state for both directions. The state is locked while bytes are encrypted or decrypted, never
//! during a wait for the socket: a waiting reader does not block writers, and two peers that both write can still read.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::Connection;

use crate::lock;
use crate::tls::{ClientTls, ServerTls, TlsError};

/// Read buffer for ciphertext: several records.
const INCOMING_BYTES: usize = 1 << 16;

/// An established connection.
#[derive(Debug)]
pub enum Stream {
    /// Without TLS: on one machine, or where the job says `insecure`.
    Plain(TcpStream),
    /// With TLS.
    Tls(Arc<TlsStream>),
}

/// A TLS connection after its handshake.
#[derive(Debug)]
pub struct TlsStream {
    tcp: TcpStream,
    session: Mutex<Connection>,
    incoming: Mutex<Ciphertext>,
    /// Ciphertext to write; locked until it is written, so that records keep their order.
    outgoing: Mutex<Vec<u8>>,
}

/// Ciphertext that is not decrypted yet.
#[derive(Debug)]
struct Ciphertext {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Stream {
    /// Accepts a connection at the server; with TLS, completes the handshake by the deadline.
    pub fn accept(tcp: TcpStream, tls: Option<&ServerTls>, deadline: Instant) -> Result<Stream, TlsError> {
        match tls {
            Some(tls) => TlsStream::establish(tcp, Connection::Server(tls.session()?), deadline),
            None => Ok(Stream::Plain(tcp)),
        }
    }

    /// Wraps a client's connection; with TLS, the server must show a certificate for `host`.
    pub fn connect(tcp: TcpStream, tls: Option<&ClientTls>, host: &str, deadline: Instant) -> Result<Stream, TlsError> {
        match tls {
            Some(tls) => TlsStream::establish(tcp, Connection::Client(tls.session(host)?), deadline),
            None => Ok(Stream::Plain(tcp)),
        }
    }

    /// Returns another handle of the same connection.
    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Plain(tcp) => tcp.try_clone().map(Stream::Plain),
            Stream::Tls(tls) => Ok(Stream::Tls(tls.clone())),
        }
    }

    /// Returns a reader whose reads fail after the deadline.
    pub fn until(&self, deadline: Instant) -> DeadlineReader<'_> {
        DeadlineReader { stream: self, deadline }
    }

    /// Makes a write fail if it makes no progress within the timeout.
    pub fn limit_writes(&self, timeout: Duration) -> io::Result<()> {
        self.tcp().set_write_timeout(Some(timeout))
    }

    /// Makes reads fail with [`io::ErrorKind::WouldBlock`] if nothing arrives within the timeout; no bytes are lost.
    pub fn limit_reads(&self, timeout: Duration) -> io::Result<()> {
        self.tcp().set_read_timeout(Some(timeout))
    }

    /// Ends the connection; blocked reads and writes fail.
    pub fn shutdown(&self) -> io::Result<()> {
        self.tcp().shutdown(Shutdown::Both)
    }

    fn tcp(&self) -> &TcpStream {
        match self {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => &tls.tcp,
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => (&mut &*tcp).read(buffer),
            Stream::Tls(tls) => tls.read(buffer),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => (&mut &*tcp).write_vectored(slices),
            Stream::Tls(tls) => tls.write(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        // Writes are not buffered.
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&mut &*self).write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads from a connection up to a deadline, even if the peer sends a few bytes at a time.
#[derive(Debug)]
pub struct DeadlineReader<'a> {
    stream: &'a Stream,
    deadline: Instant,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let tcp = self.stream.tcp();
        tcp.set_read_timeout(Some(left(self.deadline)?))?;
        let count = (&mut &*self.stream).read(buffer).map_err(name_timeout);
        tcp.set_read_timeout(None)?;
        count
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(timed_out()) } else { Ok(left) }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "did not answer in time")
}

/// Replaces `WouldBlock`, which a socket returns after its timeout, by a readable error.
fn name_timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { timed_out() } else { error }
}

impl TlsStream {
    fn establish(tcp: TcpStream, mut session: Connection, deadline: Instant) -> Result<Stream, TlsError> {
        let result = handshake(&tcp, &mut session, deadline);
        if result.is_err() {
            // Sends the peer the TLS alert, if there is one and the peer still reads.
            drop(session.write_tls(&mut &tcp));
        }
        result?;
        tcp.set_read_timeout(None)?;
        tcp.set_write_timeout(None)?;
        let incoming = Ciphertext { bytes: vec![0; INCOMING_BYTES].into(), start: 0, end: 0 };
        Ok(Stream::Tls(Arc::new(TlsStream {
            tcp,
            session: Mutex::new(session),
            incoming: Mutex::new(incoming),
            outgoing: Mutex::new(Vec::new()),
        })))
    }

    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut incoming = lock(&self.incoming);
        loop {
            if let Some(count) = self.decrypt(&mut incoming, buffer)? {
                return Ok(count);
            }
            let count = (&self.tcp).read(&mut incoming.bytes)?;
            if count == 0 {
                // No `close_notify` is needed: frames have a length, so a truncation is detected anyway.
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, count);
        }
    }

    /// Decrypts buffered ciphertext into `buffer`; returns None if more must be read first.
    fn decrypt(&self, incoming: &mut Ciphertext, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut session = lock(&self.session);
        loop {
            match session.reader().read(buffer) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let Ciphertext { bytes, start, end } = incoming;
            if start == end {
                return Ok(None);
            }
            *start += session.read_tls(&mut &bytes[*start..*end])?;
            session.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }

    fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.clear();
        let mut session = lock(&self.session);
        let count = session.writer().write_vectored(slices)?;
        while session.wants_write() {
            session.write_tls(&mut *outgoing)?;
        }
        drop(session);
        (&self.tcp).write_all(&outgoing).inspect_err(|_| {
            // After a partial record the peer cannot decrypt anything further.
            drop(self.tcp.shutdown(Shutdown::Both));
        })?;
        Ok(count)
    }
}

fn handshake(tcp: &TcpStream, session: &mut Connection, deadline: Instant) -> Result<(), TlsError> {
    let (mut reader, mut writer) = (tcp, tcp);
    loop {
        while session.wants_write() {
            tcp.set_write_timeout(Some(left(deadline)?))?;
            session.write_tls(&mut writer).map_err(name_timeout)?;
        }
        if !session.is_handshaking() {
            return Ok(());
        }
        tcp.set_read_timeout(Some(left(deadline)?))?;
        if session.read_tls(&mut reader).map_err(name_timeout)? == 0 {
            let text = "the connection was closed during the TLS handshake";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text).into());
        }
        session.process_new_packets()?;
    }
}
