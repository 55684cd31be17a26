//! Messages that are compressed: gzip and zlib, never to more than a message may have.

use std::io::{Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};

use super::{Fault, code};
use crate::memory::{Share, Unread, read_within};

pub(super) const NONE: i32 = 0;
const GZIP: i32 = 2;
const ZLIB: i32 = 3;

/// The message inside.
pub(super) fn inflate(kind: i32, payload: &Bytes, max_bytes: usize, share: Share) -> Result<Bytes, Fault> {
    match kind {
        NONE => Ok(payload.clone()),
        GZIP => read(GzDecoder::new(&payload[..]), max_bytes, share),
        ZLIB => read(ZlibDecoder::new(&payload[..]), max_bytes, share),
        _ => {
            let expected = format!("compress type: expected 0 (none), 2 (gzip) or 3 (zlib), got {kind}");
            Err(Fault::new(code::BAD_REQUEST, expected))
        }
    }
}

fn read(decoder: impl Read, max_bytes: usize, share: Share) -> Result<Bytes, Fault> {
    read_within(decoder, max_bytes, share).map_err(|unread| match unread {
        Unread::Broken(error) => Fault::new(code::BAD_REQUEST, format!("body: {error}")),
        Unread::TooLong => Fault::new(code::BAD_REQUEST, too_long(max_bytes)),
        Unread::Refused(refusal) => refusal.into(),
    })
}

pub(super) fn too_long(max_bytes: usize) -> String {
    format!("body: expected at most {max_bytes} bytes, got more")
}

/// An answer, compressed as its request was.
pub(super) fn deflate(kind: i32, message: Bytes) -> Result<Bytes, Fault> {
    let level = Compression::fast();
    let written = match kind {
        GZIP => {
            let mut encoder = GzEncoder::new(Vec::new(), level);
            encoder.write_all(&message).and_then(|()| encoder.finish())
        }
        ZLIB => {
            let mut encoder = ZlibEncoder::new(Vec::new(), level);
            encoder.write_all(&message).and_then(|()| encoder.finish())
        }
        _ => return Ok(message),
    };
    written.map(Bytes::from).map_err(|error| Fault::new(code::INTERNAL, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn messages_come_back_up_to_the_limit_and_bombs_do_not_go_off() {
        let memory = Memory::new(0);
        let share = || memory.share();
        let message = Bytes::from(vec![7; 1000]);
        for kind in [NONE, GZIP, ZLIB] {
            let packed = deflate(kind, message.clone()).unwrap();
            assert_eq!(inflate(kind, &packed, 1000, share()).unwrap(), message);
        }
        let bomb = deflate(GZIP, vec![0; 1 << 20].into()).unwrap();
        let fault = inflate(GZIP, &bomb, 999, share()).unwrap_err();
        assert_eq!(fault, Fault::new(code::BAD_REQUEST, "body: expected at most 999 bytes, got more"));
        assert_eq!(inflate(GZIP, &bomb.slice(..100), 1 << 20, share()).unwrap_err().code, code::BAD_REQUEST);
        let fault = inflate(1, &message, 1000, share()).unwrap_err();
        assert_eq!(fault.text, "compress type: expected 0 (none), 2 (gzip) or 3 (zlib), got 1");
    }
}
