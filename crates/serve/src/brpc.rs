//! bRPC's `baidu_std` on the same port: requests of many calls on a connection, answers in any order; what each refusal
//! is here, said once.

use bytes::BytesMut;

use self::frame::FrameError;
use crate::memory::Memory;
use crate::refusal::Refusal;

mod compress;
mod connection;
mod frame;
mod service;
#[cfg(test)]
mod tests;

pub(crate) use self::connection::serve;

/// What a connection begins with.
pub(crate) const MAGIC: [u8; 4] = *b"PRPC";

/// bRPC's numbers of errors.
mod code {
    pub(super) const OK: u16 = 0;
    pub(super) const NO_SERVICE: u16 = 1001;
    pub(super) const NO_METHOD: u16 = 1002;
    pub(super) const BAD_REQUEST: u16 = 1003;
    pub(super) const UNAUTHORIZED: u16 = 1004;
    pub(super) const TIMED_OUT: u16 = 1008;
    pub(super) const INTERNAL: u16 = 2001;
    /// Clients go on to another server.
    pub(super) const LOG_OFF: u16 = 2003;
    pub(super) const LIMIT: u16 = 2004;
}

/// Why a call has no answer.
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
            Refusal::Full { .. } | Refusal::Crowded { .. } => code::LIMIT,
            Refusal::Late { .. } => code::TIMED_OUT,
            Refusal::Internal(_) => code::INTERNAL,
        };
        Fault::new(code, refusal.to_string())
    }
}

/// Any bytes as what comes on a connection: the target of the fuzzer.
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
                if let Ok(payload) =
                    compress::inflate(request.compress_type, &request.payload, MAX_PAYLOAD, memory.share())
                {
                    assert!(payload.len() <= MAX_PAYLOAD);
                    let _ = crate::seek::SeekRequest::of_proto(&payload);
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
