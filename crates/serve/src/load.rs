//! A closed loop of requests over kept connections: the load that benchmarks put on a server from another process.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use thiserror::Error;

/// What to send, and how hard.
#[derive(Debug, Clone)]
pub struct Load {
    /// The server.
    pub addr: SocketAddr,
    /// The path of the requests.
    pub path: String,
    /// Their content type.
    pub content_type: String,
    /// Their bearer token.
    pub token: Option<crate::server::Token>,
    /// Their bodies, sent in turn.
    pub bodies: Vec<Vec<u8>>,
    /// Connections, each with one request under way.
    pub connections: usize,
    /// How long.
    pub seconds: f64,
}

/// What came back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadReport {
    /// Requests answered with 200.
    pub requests: u64,
    /// Other answers, and broken connections.
    pub failures: u64,
    /// How long it took.
    pub seconds: f64,
    /// Half of the answers were faster.
    pub p50_us: f64,
    /// 99 of 100 were.
    pub p99_us: f64,
    /// The slowest.
    pub max_us: f64,
}

/// Why there is no load.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum LoadError {
    #[error("load: bodies: expected at least 1, got 0")]
    NoBodies,
    #[error("load: {addr}: {source}")]
    Connect { addr: SocketAddr, source: io::Error },
}

/// An answer that takes longer is a failure.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest head of an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Runs the load and sums up.
pub fn run(load: &Load) -> Result<LoadReport, LoadError> {
    if load.bodies.is_empty() {
        return Err(LoadError::NoBodies);
    }
    let connect = || connect(load.addr).map_err(|source| LoadError::Connect { addr: load.addr, source });
    let streams = (0..load.connections.max(1)).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
    let requests: std::sync::Arc<[Vec<u8>]> = load.bodies.iter().map(|body| request(load, body)).collect();
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(load.seconds);
    let run_one = |(number, stream)| -> JoinHandle<Counts> {
        let (requests, addr) = (requests.clone(), load.addr);
        std::thread::spawn(move || {
            drive(Connection { addr, stream: Some(stream), buffer: Vec::new() }, &requests, number, end)
        })
    };
    let threads: Vec<_> = streams.into_iter().enumerate().map(run_one).collect();
    let mut counts = Counts::default();
    for thread in threads {
        let part = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        counts.failures += part.failures;
        counts.latencies_ns.extend(part.latencies_ns);
    }
    Ok(counts.report(started.elapsed()))
}

#[derive(Default)]
struct Counts {
    latencies_ns: Vec<u64>,
    failures: u64,
}

impl Counts {
    fn report(mut self, elapsed: Duration) -> LoadReport {
        self.latencies_ns.sort_unstable();
        let latencies = &self.latencies_ns;
        let at = |share: f64| {
            let rank = (share * latencies.len() as f64).ceil() as usize;
            latencies.get(rank.saturating_sub(1)).map_or(0.0, |&ns| ns as f64 / 1e3)
        };
        LoadReport {
            requests: latencies.len() as u64,
            failures: self.failures,
            seconds: elapsed.as_secs_f64(),
            p50_us: at(0.5),
            p99_us: at(0.99),
            max_us: at(1.0),
        }
    }
}

fn request(load: &Load, body: &[u8]) -> Vec<u8> {
    let Load { path, addr, content_type, token, .. } = load;
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: {addr}\r\ncontent-type: {content_type}\r\n");
    if let Some(token) = token {
        head.push_str(&format!("authorization: Bearer {}\r\n", token.0));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    [head.as_bytes(), body].concat()
}

/// Sends one request after the other until the end; each connection begins at another body.
fn drive(mut connection: Connection, requests: &[Vec<u8>], number: usize, end: Instant) -> Counts {
    let mut counts = Counts::default();
    let mut next = number % requests.len();
    loop {
        let started = Instant::now();
        if started >= end {
            return counts;
        }
        match connection.exchange(&requests[next]) {
            Ok(200) => counts.latencies_ns.push(started.elapsed().as_nanos() as u64),
            Ok(_) => counts.failures += 1,
            Err(_) => {
                counts.failures += 1;
                connection.stream = None;
                // a server that refuses connections is not to be hammered
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        next = (next + 1) % requests.len();
    }
}

struct Connection {
    addr: SocketAddr,
    /// None after a failure: the next exchange connects again.
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Connection {
    /// Sends a request, reads the whole answer, and returns its status.
    fn exchange(&mut self, request: &[u8]) -> io::Result<u16> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert(connect(self.addr)?),
        };
        stream.write_all(request)?;
        self.buffer.clear();
        let head = loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                break at + 4;
            }
            if self.buffer.len() > MAX_HEAD_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
            read_some(stream, &mut self.buffer)?;
        };
        let (status, length) = parse_head(&self.buffer[..head]).ok_or(io::ErrorKind::InvalidData)?;
        while self.buffer.len() < head + length {
            read_some(stream, &mut self.buffer)?;
        }
        Ok(status)
    }
}

fn connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(addr)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn read_some(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<()> {
    const CHUNK_BYTES: usize = 16 << 10;
    let start = buffer.len();
    buffer.resize(start + CHUNK_BYTES, 0);
    let read = stream.read(&mut buffer[start..]);
    buffer.truncate(start + *read.as_ref().unwrap_or(&0));
    if read? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Status and length of the body.
fn parse_head(head: &[u8]) -> Option<(u16, usize)> {
    let text = std::str::from_utf8(head).ok()?;
    let mut lines = text.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    })?;
    Some((status, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_in_any_case() {
        assert_eq!(parse_head(b"HTTP/1.1 429 Too Many\r\nContent-Length: 12\r\n\r\n"), Some((429, 12)));
        assert_eq!(parse_head(b"HTTP/1.1 200 OK\r\n\r\n"), None);
    }

    #[test]
    fn percentiles_are_of_the_sorted_latencies() {
        let counts = Counts { latencies_ns: (1..=200).rev().map(|us| us * 1000).collect(), failures: 3 };
        let report = counts.report(Duration::from_secs(1));
        assert_eq!((report.requests, report.failures), (200, 3));
        assert_eq!((report.p50_us, report.p99_us, report.max_us), (100.0, 198.0, 200.0));
        assert_eq!(Counts::default().report(Duration::from_secs(1)).p99_us, 0.0);
    }
}
