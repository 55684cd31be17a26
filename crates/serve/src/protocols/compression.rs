//! Compressed bodies, the same for every protocol: inflated within their limits, compressed on request.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};

use crate::memory::{ReadError, Reservation, read_within};
use crate::refusal::Refusal;

/// The compression of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    /// `deflate` in HTTP.
    Zlib,
}

impl Compression {
    /// Inflates a body to at most `max_bytes`, on a thread for blocking work: a small body may inflate to a large one.
    pub(crate) async fn inflate(
        self,
        body: Bytes,
        max_bytes: usize,
        reservation: Reservation,
    ) -> Result<Bytes, ReadError> {
        let inflated = tokio::task::spawn_blocking(move || self.inflate_blocking(&body, max_bytes, reservation));
        let panicked = |error: tokio::task::JoinError| ReadError::Refused(Refusal::Internal(error.to_string()));
        inflated.await.map_err(panicked)?
    }

    /// Inflates a body on the calling thread.
    pub(super) fn inflate_blocking(
        self,
        body: &[u8],
        max_bytes: usize,
        reservation: Reservation,
    ) -> Result<Bytes, ReadError> {
        match self {
            Compression::Gzip => read_within(MultiGzDecoder::new(body), max_bytes, reservation),
            Compression::Zlib => read_within(ZlibDecoder::new(body), max_bytes, reservation),
        }
    }

    /// Compresses a body, on a thread for blocking work.
    pub(crate) async fn compress(self, body: Bytes) -> io::Result<Bytes> {
        let compressed = tokio::task::spawn_blocking(move || {
            let (out, level) = (Vec::with_capacity(body.len() / 2), flate2::Compression::fast());
            match self {
                Compression::Gzip => {
                    let mut encoder = GzEncoder::new(out, level);
                    encoder.write_all(&body)?;
                    encoder.finish()
                }
                Compression::Zlib => {
                    let mut encoder = ZlibEncoder::new(out, level);
                    encoder.write_all(&body)?;
                    encoder.finish()
                }
            }
        });
        Ok(compressed.await??.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[tokio::test]
    async fn bodies_are_restored_up_to_the_limit() {
        let memory = Memory::new(0);
        let message = Bytes::from(vec![7; 1000]);
        for compression in [Compression::Gzip, Compression::Zlib] {
            let packed = compression.compress(message.clone()).await.unwrap();
            let inflate = |max_bytes| compression.inflate(packed.clone(), max_bytes, memory.reservation());
            assert_eq!(inflate(1000).await.unwrap(), message);
            assert!(matches!(inflate(999).await, Err(ReadError::TooLong)));
            let truncated = compression.inflate(packed.slice(..8), 1000, memory.reservation()).await;
            assert!(matches!(truncated, Err(ReadError::Broken(_))));
        }
    }
}
