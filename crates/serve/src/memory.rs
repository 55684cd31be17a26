//! The memory limit of in-flight requests, across all protocols.
//!
//! Bodies count from their first byte until they are dropped, answers until they are sent. Without this limit all
//! connections together could use more memory than the machine has.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::refusal::Refusal;

/// Smaller bodies do not count: the limits on connections and on requests per connection bound them well enough.
pub(crate) const FREE_BYTES: usize = 4 << 10;
/// Bytes inflated between two checks of the limit.
const STEP_BYTES: u64 = 256 << 10;
/// Up to this size a copy is cheaper than a new read buffer for the next request of the connection.
const SMALL_BYTES: usize = 2048;

/// The memory that all requests share.
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

    /// Returns an empty reservation.
    pub(crate) fn reservation(self: &Arc<Memory>) -> Reservation {
        Reservation { memory: self.clone(), num_bytes: 0 }
    }
}

/// The memory reserved for one body or answer; released when it is dropped.
pub(crate) struct Reservation {
    memory: Arc<Memory>,
    num_bytes: usize,
}

impl Reservation {
    /// Grows to `num_bytes`, or refuses if the limit does not allow it.
    pub(crate) fn grow_to(&mut self, num_bytes: usize) -> Result<(), Refusal> {
        if num_bytes <= FREE_BYTES.max(self.num_bytes) {
            return Ok(());
        }
        let Memory { max_bytes, used_bytes } = &*self.memory;
        let more = num_bytes - self.num_bytes;
        let grown = |used: usize| used.checked_add(more).filter(|used| used <= max_bytes);
        let updated = used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
        updated.map_err(|_| Refusal::MemoryLimit { max_bytes: *max_bytes })?;
        self.num_bytes = num_bytes;
        Ok(())
    }

    /// Returns `bytes` with this reservation attached: it is released when the last handle to them is dropped.
    pub(crate) fn attach(self, bytes: Bytes) -> Bytes {
        if self.num_bytes == 0 { bytes } else { Bytes::from_owner(ReservedBytes { bytes, _reservation: self }) }
    }

    /// Reserves the size of `bytes` and [attaches](Reservation::attach) the reservation to them.
    pub(crate) fn cover(mut self, bytes: Bytes) -> Result<Bytes, Refusal> {
        self.grow_to(bytes.len()).map(|()| self.attach(bytes))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.num_bytes > 0 {
            self.memory.used_bytes.fetch_sub(self.num_bytes, Ordering::Relaxed);
        }
    }
}

struct ReservedBytes {
    bytes: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The reason a body was not read or not inflated.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The connection broke, or the compressed bytes are invalid.
    Broken(String),
    TooLong,
    Refused(Refusal),
}

/// Reads a whole body; `num_expected` is its length according to its headers.
pub(crate) async fn collect(
    mut body: Body,
    num_expected: Option<u64>,
    max_bytes: usize,
    mut reservation: Reservation,
) -> Result<Bytes, ReadError> {
    // A body that announces too much is refused before a byte of it is read.
    if num_expected.is_some_and(|num_bytes| num_bytes > max_bytes as u64) {
        return Err(ReadError::TooLong);
    }
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ReadError::Broken(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        let num_bytes = first.len() + rest.len() + data.len();
        if num_bytes > max_bytes {
            return Err(ReadError::TooLong);
        }
        // Reserve the bytes that have arrived, not the announced length: announcing costs the client nothing.
        reservation.grow_to(num_bytes).map_err(ReadError::Refused)?;
        // Most bodies arrive in one piece, which needs no copy.
        match (first.is_empty(), rest.is_empty()) {
            // Copying a small piece lets the connection keep the buffer that it was read into.
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
    Ok(reservation.attach(if rest.is_empty() { first } else { rest.freeze() }))
}

/// Reads everything that an inflating reader returns, up to `max_bytes`.
pub(crate) fn read_within(
    reader: impl Read,
    max_bytes: usize,
    mut reservation: Reservation,
) -> Result<Bytes, ReadError> {
    let mut reader = reader.take(max_bytes as u64 + 1);
    let mut out = Vec::new();
    let broken = |error: io::Error| ReadError::Broken(error.to_string());
    while reader.by_ref().take(STEP_BYTES).read_to_end(&mut out).map_err(broken)? > 0 {
        // Checked before the memory limit, because retrying later does not help here.
        if out.len() > max_bytes {
            return Err(ReadError::TooLong);
        }
        reservation.grow_to(out.len()).map_err(ReadError::Refused)?;
    }
    Ok(reservation.attach(out.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_count_until_they_are_dropped_and_small_ones_do_not_count() {
        let memory = Memory::new(200_000);
        let body = |num_bytes: usize| {
            let mut reservation = memory.reservation();
            reservation.grow_to(num_bytes / 2)?;
            reservation.grow_to(num_bytes).map(|()| reservation.attach(vec![7; num_bytes].into()))
        };
        let small: Vec<Bytes> = (0..10).map(|_| body(FREE_BYTES).unwrap()).collect();
        assert_eq!((small.len(), memory.used_bytes()), (10, 0));
        let (first, second) = (body(100_000).unwrap(), body(100_000).unwrap());
        assert_eq!(memory.used_bytes(), 200_000);
        assert_eq!(body(FREE_BYTES + 1), Err(Refusal::MemoryLimit { max_bytes: 200_000 }));
        assert_eq!(memory.used_bytes(), 200_000);
        let part = first.slice(5..9);
        drop((first, second));
        assert_eq!((&part[..], memory.used_bytes()), (&[7; 4][..], 100_000));
        drop(part);
        assert_eq!(memory.used_bytes(), 0);
    }

    #[test]
    fn inflating_stops_at_the_size_limit_and_at_the_memory_limit() {
        let memory = Memory::new(1 << 20);
        let read =
            |num_bytes: u64, max_bytes| read_within(io::repeat(7).take(num_bytes), max_bytes, memory.reservation());
        let kept = read(600_000, 600_000).unwrap();
        assert_eq!((kept.len(), memory.used_bytes()), (600_000, 600_000));
        assert!(matches!(read(400_001, 400_000), Err(ReadError::TooLong)));
        assert!(matches!(read(u64::MAX, usize::MAX - 1), Err(ReadError::Refused(Refusal::MemoryLimit { .. }))));
        assert_eq!(memory.used_bytes(), 600_000);
    }
}
