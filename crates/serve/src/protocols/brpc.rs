//! bRPC's `baidu_std` on the same port: many calls on a connection, answers in any order, and the code of each refusal.
//!
//! - `connection` reads calls and writes answers, within a budget of memory per connection;
//! - `frame` is the byte format, `service` are the methods: Paddle Serving's predictions and Cube's rows.

use bytes::BytesMut;

use self::frame::FrameError;
use crate::memory::{Memory, ReadError};
use crate::protocols::compression::Compression;
use crate::refusal::Refusal;

mod connection;
mod frame;
mod service;
#[cfg(test)]
mod tests;

pub(crate) use self::connection::serve;

/// The first bytes of a connection.
pub(crate) const MAGIC: [u8; 4] = *b"PRPC";

/// bRPC's error codes.
mod code {
    pub(super) const OK: u16 = 0;
    pub(super) const NO_SERVICE: u16 = 1001;
    pub(super) const NO_METHOD: u16 = 1002;
    pub(super) const BAD_REQUEST: u16 = 1003;
    pub(super) const UNAUTHORIZED: u16 = 1004;
    pub(super) const TIMED_OUT: u16 = 1008;
    pub(super) const INTERNAL: u16 = 2001;
    /// Clients try another server.
    pub(super) const LOG_OFF: u16 = 2003;
    pub(super) const LIMIT: u16 = 2004;
}

/// The reason a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    code: u16,
    text: String,
}

impl Fault {
    fn new(code: u16, text: impl Into<String>) -> Fault {
        Fault { code, text: text.into() }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        let code = match &refusal {
            Refusal::Bad(_) | Refusal::TooLarge(_) => code::BAD_REQUEST,
            Refusal::Unknown(_) => code::NO_SERVICE,
            Refusal::Unavailable(_) | Refusal::Gone(_) => code::LOG_OFF,
            Refusal::QueueFull { .. } | Refusal::MemoryLimit { .. } => code::LIMIT,
            Refusal::DeadlineExceeded { .. } => code::TIMED_OUT,
            Refusal::Internal(_) => code::INTERNAL,
        };
        Fault::new(code, refusal.to_string())
    }
}

/// The compression of a message, by bRPC's number; None for a plain one.
fn compression_of(compress_type: i32) -> Result<Option<Compression>, Fault> {
    match compress_type {
        0 => Ok(None),
        2 => Ok(Some(Compression::Gzip)),
        3 => Ok(Some(Compression::Zlib)),
        _ => {
            let expected = format!("compress type: expected 0 (none), 2 (gzip) or 3 (zlib), got {compress_type}");
            Err(Fault::new(code::BAD_REQUEST, expected))
        }
    }
}

/// The refusal of a message longer than `max_bytes`.
fn too_long(max_bytes: usize) -> Fault {
    Fault::new(code::BAD_REQUEST, format!("body: expected at most {max_bytes} bytes, got more"))
}

/// The refusal of a message that was not read, of at most `max_bytes`.
fn unreadable(error: ReadError, max_bytes: usize) -> Fault {
    match error {
        ReadError::Broken(what) => Fault::new(code::BAD_REQUEST, format!("body: {what}")),
        ReadError::TooLong => too_long(max_bytes),
        ReadError::Refused(refusal) => refusal.into(),
    }
}

/// Reads any bytes as those of a connection, for the fuzzer.
#[doc(hidden)]
pub fn fuzz_brpc(bytes: &[u8]) {
    const MAX_PAYLOAD: usize = 4096;
    let memory = Memory::new(MAX_PAYLOAD);
    let mut buffer = BytesMut::from(bytes);
    loop {
        let before = buffer.len();
        match frame::take(&mut buffer, MAX_PAYLOAD) {
            Ok(Some(request)) => {
                assert!(buffer.len() < before && request.payload.len() <= MAX_PAYLOAD);
                let _ = service::Method::of(&request.call.service_name, &request.call.method_name);
                let payload = match compression_of(request.compress_type) {
                    Ok(None) => Ok(request.payload),
                    Ok(Some(compression)) => {
                        let inflated =
                            compression.inflate_blocking(&request.payload, MAX_PAYLOAD, memory.reservation());
                        inflated.map_err(|error| unreadable(error, MAX_PAYLOAD))
                    }
                    Err(fault) => Err(fault),
                };
                if let Ok(payload) = payload {
                    assert!(payload.len() <= MAX_PAYLOAD);
                    let _ = crate::protocols::dict::SeekRequest::of_proto(&payload);
                }
            }
            Ok(None) => {
                assert_eq!(buffer.len(), before);
                return;
            }
            Err(FrameError::Malformed | FrameError::TooLong { .. }) => return,
        }
    }
}
