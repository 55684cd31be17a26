//! Memory of the requests under way: what is not small counts, bodies from when they come until they are dropped, answers
//! until they are sent, whichever protocol they came by. What many connections may have at once is more than any machine has.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::refusal::Refusal;

/// What is shorter does not count: the numbers of connections, and of requests of each, bound it well enough.
pub(crate) const FREE_BYTES: usize = 4 << 10;
/// Inflated between two looks at what is left.
const STEP_BYTES: u64 = 256 << 10;
/// Up to here a copy is cheaper than a new buffer for the next request of a connection.
const SMALL_BYTES: usize = 2048;

/// What all requests share.
pub(crate) struct Memory {
    max_bytes: usize,
    used_bytes: AtomicUsize,
}

impl Memory {
    pub(crate) fn new(max_bytes: usize) -> Arc<Memory> {
        Arc::new(Memory { max_bytes, used_bytes: AtomicUsize::new(0) })
    }

    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// The part of something of which there is nothing yet.
    pub(crate) fn share(self: &Arc<Memory>) -> Share {
        Share { memory: self.clone(), num_bytes: 0 }
    }
}

/// The part that one body or answer has; given back with it.
pub(crate) struct Share {
    memory: Arc<Memory>,
    num_bytes: usize,
}

impl Share {
    /// Grows to so many bytes, or says that there is no room for them.
    pub(crate) fn cover(&mut self, num_bytes: usize) -> Result<(), Refusal> {
        if num_bytes <= FREE_BYTES.max(self.num_bytes) {
            return Ok(());
        }
        let Memory { max_bytes, used_bytes } = &*self.memory;
        let more = num_bytes - self.num_bytes;
        let grown = |used: usize| used.checked_add(more).filter(|used| used <= max_bytes);
        let taken = used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
        taken.map_err(|_| Refusal::Crowded { max_bytes: *max_bytes })?;
        self.num_bytes = num_bytes;
        Ok(())
    }

    /// Bytes that have this part for as long as somebody holds them.
    pub(crate) fn keep(self, bytes: Bytes) -> Bytes {
        if self.num_bytes == 0 { bytes } else { Bytes::from_owner(Kept { bytes, _share: self }) }
    }

    /// As [`keep`](Share::keep), of bytes that are there already.
    pub(crate) fn hold(mut self, bytes: Bytes) -> Result<Bytes, Refusal> {
        self.cover(bytes.len()).map(|()| self.keep(bytes))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.num_bytes > 0 {
            self.memory.used_bytes.fetch_sub(self.num_bytes, Ordering::Relaxed);
        }
    }
}

struct Kept {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Why a body was not read, or not inflated.
#[derive(Debug)]
pub(crate) enum Unread {
    /// It did not come, or is no such thing.
    Broken(String),
    TooLong,
    Refused(Refusal),
}

/// A body as a whole; `num_expected` is how long it says that it is.
pub(crate) async fn collect(
    mut body: Body,
    num_expected: Option<u64>,
    max_bytes: usize,
    mut share: Share,
) -> Result<Bytes, Unread> {
    // said beforehand: not a byte of it is read
    if num_expected.is_some_and(|num_bytes| num_bytes > max_bytes as u64) {
        return Err(Unread::TooLong);
    }
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Unread::Broken(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        let num_bytes = first.len() + rest.len() + data.len();
        if num_bytes > max_bytes {
            return Err(Unread::TooLong);
        }
        // what has come, not what was promised: a promise takes no memory
        share.cover(num_bytes).map_err(Unread::Refused)?;
        // most bodies come in one piece, which needs no copy
        match (first.is_empty(), rest.is_empty()) {
            // a small one is copied all the same: the connection keeps the buffer that it has read it into
            (true, true) if data.len() <= SMALL_BYTES => first = Bytes::copy_from_slice(&data),
            (true, true) => first = data,
            (false, _) => {
                rest.reserve(num_expected.map_or(0, |num_bytes| num_bytes as usize).max(num_bytes));
                rest.extend_from_slice(&std::mem::take(&mut first));
                rest.extend_from_slice(&data);
            }
            (true, false) => rest.extend_from_slice(&data),
        }
    }
    Ok(share.keep(if rest.is_empty() { first } else { rest.freeze() }))
}

/// All that an inflater gives; more than `max_bytes` of it are not even made.
pub(crate) fn read_within(reader: impl Read, max_bytes: usize, mut share: Share) -> Result<Bytes, Unread> {
    let mut reader = reader.take(max_bytes as u64 + 1);
    let mut out = Vec::new();
    let broken = |error: io::Error| Unread::Broken(error.to_string());
    while reader.by_ref().take(STEP_BYTES).read_to_end(&mut out).map_err(broken)? > 0 {
        // not to be told to try again
        if out.len() > max_bytes {
            return Err(Unread::TooLong);
        }
        share.cover(out.len()).map_err(Unread::Refused)?;
    }
    Ok(share.keep(out.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_count_while_somebody_holds_them_and_small_ones_do_not() {
        let memory = Memory::new(200_000);
        let body = |num_bytes: usize| {
            let mut share = memory.share();
            share.cover(num_bytes / 2)?;
            share.cover(num_bytes).map(|()| share.keep(vec![7; num_bytes].into()))
        };
        let small: Vec<Bytes> = (0..10).map(|_| body(FREE_BYTES).unwrap()).collect();
        assert_eq!((small.len(), memory.used_bytes()), (10, 0));
        let (first, second) = (body(100_000).unwrap(), body(100_000).unwrap());
        assert_eq!(memory.used_bytes(), 200_000);
        assert_eq!(body(FREE_BYTES + 1), Err(Refusal::Crowded { max_bytes: 200_000 }));
        assert_eq!(memory.used_bytes(), 200_000);
        let part = first.slice(5..9);
        drop((first, second));
        assert_eq!((&part[..], memory.used_bytes()), (&[7; 4][..], 100_000));
        drop(part);
        assert_eq!(memory.used_bytes(), 0);
    }

    #[test]
    fn what_is_inflated_ends_at_its_limit_or_where_there_is_no_room() {
        let memory = Memory::new(1 << 20);
        let read = |num_bytes: u64, max_bytes| read_within(io::repeat(7).take(num_bytes), max_bytes, memory.share());
        let kept = read(600_000, 600_000).unwrap();
        assert_eq!((kept.len(), memory.used_bytes()), (600_000, 600_000));
        assert!(matches!(read(400_001, 400_000), Err(Unread::TooLong)));
        assert!(matches!(read(u64::MAX, usize::MAX - 1), Err(Unread::Refused(Refusal::Crowded { .. }))));
        assert_eq!(memory.used_bytes(), 600_000);
    }
}
