//! Redis as a target: pipelined `MGET` of binary keys, with as little work per key as the protocol allows.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Target, fill_row, sign_of};

/// Keys of an `MSET`.
const FILL_KEYS: u64 = 1000;
/// `MSET` commands in flight.
const AHEAD: u64 = 16;
const READ_BYTES: usize = 1 << 18;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to Redis, and the requests that are sent on it.
pub struct Redis<'a> {
    writer: TcpStream,
    reader: Mutex<(BufReader<TcpStream>, Vec<u8>)>,
    requests: &'a [Vec<u8>],
    batch: usize,
    row_bytes: usize,
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Returns the bytes of an `MGET` for each batch.
pub fn requests(batches: &[Vec<u64>]) -> Vec<Vec<u8>> {
    let encode = |signs: &Vec<u64>| {
        let mut bytes = format!("*{}\r\n$4\r\nMGET\r\n", signs.len() + 1).into_bytes();
        signs.iter().for_each(|sign| push_bulk(&mut bytes, &sign.to_le_bytes()));
        bytes
    };
    batches.iter().map(encode).collect()
}

/// Sets the rows that [`super::write_cube`] writes.
pub fn fill(address: &str, num_rows: u64, width: usize, version: u64) -> io::Result<()> {
    let mut writer = connect(address)?;
    let mut reader = BufReader::new(writer.try_clone()?);
    let num_commands = num_rows.div_ceil(FILL_KEYS);
    let (mut row, mut value, mut line) = (vec![0.0; width], Vec::new(), Vec::new());
    let mut num_answers = 0;
    for command in 0..num_commands {
        let numbers = command * FILL_KEYS..num_rows.min((command + 1) * FILL_KEYS);
        let mut bytes = format!("*{}\r\n$4\r\nMSET\r\n", 1 + 2 * (numbers.end - numbers.start)).into_bytes();
        for sign in numbers.map(sign_of) {
            fill_row(version, sign, &mut row);
            value.clear();
            row.iter().for_each(|number| value.extend_from_slice(&number.to_le_bytes()));
            push_bulk(&mut bytes, &sign.to_le_bytes());
            push_bulk(&mut bytes, &value);
        }
        writer.write_all(&bytes)?;
        while num_answers + AHEAD <= command || command + 1 == num_commands && num_answers < num_commands {
            line.clear();
            reader.read_until(b'\n', &mut line)?;
            if line != b"+OK\r\n" {
                return Err(unexpected(&line));
            }
            num_answers += 1;
        }
    }
    Ok(())
}

fn push_bulk(bytes: &mut Vec<u8>, value: &[u8]) {
    bytes.extend_from_slice(format!("${}\r\n", value.len()).as_bytes());
    bytes.extend_from_slice(value);
    bytes.extend_from_slice(b"\r\n");
}

fn unexpected(line: &[u8]) -> io::Error {
    io::Error::other(format!("redis: unexpected answer `{}`", String::from_utf8_lossy(line).trim_end()))
}

impl<'a> Redis<'a> {
    /// Connects; each request asks for `batch` keys, and a row has `row_bytes`.
    pub fn connect(address: &str, requests: &'a [Vec<u8>], batch: usize, row_bytes: usize) -> io::Result<Redis<'a>> {
        let writer = connect(address)?;
        let reader = BufReader::with_capacity(READ_BYTES, writer.try_clone()?);
        let rows = vec![0; batch * row_bytes];
        Ok(Redis { writer, reader: Mutex::new((reader, rows)), requests, batch, row_bytes })
    }

    /// Reads the answer to one request: the rows, and zeros for keys without one. Returns the number of keys that have
    /// a row.
    fn read(&self) -> io::Result<usize> {
        let mut guard = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let (reader, rows) = &mut *guard;
        let mut line = Vec::with_capacity(16);
        reader.read_until(b'\n', &mut line)?;
        if line != format!("*{}\r\n", self.batch).as_bytes() {
            return Err(unexpected(&line));
        }
        let header = format!("${}\r\n", self.row_bytes).into_bytes();
        let value_bytes = header.len() + self.row_bytes + 2;
        let mut hits = 0;
        for row in rows.chunks_exact_mut(self.row_bytes) {
            let buffered = reader.buffer();
            if buffered.len() >= value_bytes && buffered.starts_with(&header) {
                row.copy_from_slice(&buffered[header.len()..][..self.row_bytes]);
                reader.consume(value_bytes);
                hits += 1;
            } else if buffered.starts_with(b"$-1\r\n") {
                row.fill(0);
                reader.consume(5);
            } else {
                hits += usize::from(read_unbuffered(reader, row, &header)?);
            }
        }
        Ok(hits)
    }
}

/// Reads a value that is not completely buffered; returns whether the key has a row.
fn read_unbuffered(reader: &mut BufReader<TcpStream>, row: &mut [u8], header: &[u8]) -> io::Result<bool> {
    let mut line = Vec::with_capacity(16);
    reader.read_until(b'\n', &mut line)?;
    if line == b"$-1\r\n" {
        row.fill(0);
        return Ok(false);
    }
    if line != header {
        return Err(unexpected(&line));
    }
    reader.read_exact(row)?;
    reader.read_exact(&mut [0; 2])?;
    Ok(true)
}

impl Target for Redis<'_> {
    type Request<'a>
        = ()
    where
        Self: 'a;

    fn send(&self, batch: usize) -> Result<(), String> {
        (&self.writer).write_all(&self.requests[batch]).map_err(|error| error.to_string())
    }

    fn receive<'a>(&'a self, (): Self::Request<'a>) -> Result<usize, String> {
        self.read().map_err(|error| error.to_string())
    }
}
