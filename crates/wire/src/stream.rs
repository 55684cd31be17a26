//! A connection: TCP as it is, or TLS around it. One thread may read while others write, with either.
//!
//! A TLS session has one state for both directions. It is locked while bytes are encrypted or decrypted, never while the
//! socket is waited for: a reader that waits holds up no writer, and two peers that both write go on reading.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::Connection;

use crate::tls::{ClientTls, ServerTls, TlsError};

/// Ciphertext that is read at once: some records.
const INCOMING_BYTES: usize = 1 << 16;

/// A connection that was made.
#[derive(Debug)]
pub enum Stream {
    /// On this machine, or where `insecure` says so.
    Plain(TcpStream),
    /// Everywhere else.
    Tls(Arc<TlsStream>),
}

/// TLS on a connection whose handshake is done.
#[derive(Debug)]
pub struct TlsStream {
    tcp: TcpStream,
    session: Mutex<Connection>,
    incoming: Mutex<Incoming>,
    /// Ciphertext on its way out; held until it is written, so that records keep their order.
    outgoing: Mutex<Vec<u8>>,
}

/// Ciphertext that was read and not decrypted yet.
#[derive(Debug)]
struct Incoming {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// A thread that panicked leaves a session that fails its next record at worst.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// A server's end of a connection; with TLS after the handshake, which must be done by then.
    pub fn accept(tcp: TcpStream, tls: Option<&ServerTls>, deadline: Instant) -> Result<Stream, TlsError> {
        match tls {
            Some(tls) => TlsStream::shake(tcp, Connection::Server(tls.session()?), deadline),
            None => Ok(Stream::Plain(tcp)),
        }
    }

    /// A client's end; with TLS the server must show a certificate for `host`.
    pub fn connect(tcp: TcpStream, tls: Option<&ClientTls>, host: &str, deadline: Instant) -> Result<Stream, TlsError> {
        match tls {
            Some(tls) => TlsStream::shake(tcp, Connection::Client(tls.session(host)?), deadline),
            None => Ok(Stream::Plain(tcp)),
        }
    }

    /// Another handle of the same connection.
    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Plain(tcp) => tcp.try_clone().map(Stream::Plain),
            Stream::Tls(tls) => Ok(Stream::Tls(tls.clone())),
        }
    }

    /// Reads that must come to an end by then.
    pub fn until(&self, deadline: Instant) -> Until<'_> {
        Until { stream: self, deadline }
    }

    /// From now on a write fails when the peer has taken nothing for so long.
    pub fn limit_writes(&self, most: Duration) -> io::Result<()> {
        self.tcp().set_write_timeout(Some(most))
    }

    /// From now on a read fails with [`io::ErrorKind::WouldBlock`] when nothing has come for so long; what comes later is
    /// there for the next one.
    pub fn limit_reads(&self, most: Duration) -> io::Result<()> {
        self.tcp().set_read_timeout(Some(most))
    }

    /// Ends the connection; a read or write that waits fails.
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
        // what was written is with the socket
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

/// Reads of a connection up to a deadline, however few bytes come at a time.
#[derive(Debug)]
pub struct Until<'a> {
    stream: &'a Stream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let tcp = self.stream.tcp();
        tcp.set_read_timeout(Some(left(self.deadline)?))?;
        let count = (&mut &*self.stream).read(buffer).map_err(in_time);
        tcp.set_read_timeout(None)?;
        count
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "did not answer in time")
}

/// A socket whose time is over says that it would block.
fn in_time(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { late() } else { error }
}

impl TlsStream {
    fn shake(tcp: TcpStream, mut session: Connection, deadline: Instant) -> Result<Stream, TlsError> {
        let result = handshake(&tcp, &mut session, deadline);
        if result.is_err() {
            // tells the other end why, if there is something to tell and it listens
            drop(session.write_tls(&mut &tcp));
        }
        result?;
        tcp.set_read_timeout(None)?;
        tcp.set_write_timeout(None)?;
        let incoming = Incoming { bytes: vec![0; INCOMING_BYTES].into(), start: 0, end: 0 };
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
                // frames say themselves where they end: without a farewell an end is as good
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, count);
        }
    }

    /// Decrypts what was read until there is something for `buffer`; none if more has to be read.
    fn decrypt(&self, incoming: &mut Incoming, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut session = lock(&self.session);
        loop {
            match session.reader().read(buffer) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let Incoming { bytes, start, end } = incoming;
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
            // half a record is out: nothing that comes behind it could be read
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
            session.write_tls(&mut writer).map_err(in_time)?;
        }
        if !session.is_handshaking() {
            return Ok(());
        }
        tcp.set_read_timeout(Some(left(deadline)?))?;
        if session.read_tls(&mut reader).map_err(in_time)? == 0 {
            let text = "the connection was closed in the handshake of TLS";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text).into());
        }
        session.process_new_packets()?;
    }
}
