//! Frames: a header with length and checksum, then a body. Nothing here depends on the meaning of the body.

use std::io::{self, IoSlice, Read, Write};

use thiserror::Error;
use xxhash_rust::xxh3::Xxh3Default;

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"EREC";
/// Protocol version of frames and messages.
pub const VERSION: u8 = 1;
/// Bytes of a header.
const HEADER_BYTES: usize = 32;
/// Longest body that is accepted.
pub const MAX_BODY_BYTES: usize = 1 << 30;
/// Longest body of a peer that has not shown its token yet.
pub const MAX_HELLO_BYTES: usize = 4096;

/// Memory is allocated in steps of this size as bytes arrive, whatever length the header promises.
const STEP_BYTES: usize = 1 << 20;
/// Header bytes that the checksum covers.
const CHECKED_BYTES: usize = 24;

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The first frame of a client.
    Hello = 1,
    /// A parameter server's answer to a hello.
    Welcome = 2,
    /// The reason why a request was refused.
    Refusal = 3,
    /// A request for rows and dense values.
    Pull = 4,
    /// The answer to a pull.
    Rows = 5,
    /// The update of a batch.
    Push = 6,
    /// The answer to a push.
    PushAck = 7,
    /// A request for the progress of a step.
    StepQuery = 8,
    /// The answer to a step query.
    StepStatus = 9,
    /// A request for rows of a version.
    Lookup = 10,
    /// The answer to a lookup.
    LookupResult = 11,
    /// A cube server's answer to a hello: its partitions and versions.
    Inventory = 12,
}

impl Kind {
    fn from_number(number: u8) -> Option<Kind> {
        use Kind::{
            Hello, Inventory, Lookup, LookupResult, Pull, Push, PushAck, Refusal, Rows, StepQuery, StepStatus, Welcome,
        };
        [Hello, Welcome, Refusal, Pull, Rows, Push, PushAck, StepQuery, StepStatus, Lookup, LookupResult, Inventory]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// The reason a frame could not be read.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The connection ended between two frames.
    #[error("the connection is closed")]
    Closed,
    /// The connection ended or failed inside a frame.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer speaks another protocol.
    #[error("expected a frame that begins with `EREC`, got {0:02x?}")]
    Magic([u8; 4]),
    /// The peer speaks another version of the protocol.
    #[error("expected protocol version {VERSION}, got {0}")]
    Version(u8),
    /// This version has no such kind.
    #[error("expected a kind from 1 to 12, got {0}")]
    Kind(u8),
    /// Reserved bytes are not zero.
    #[error("expected zeros in the reserved bytes of the header")]
    Reserved,
    /// The body is longer than the receiver accepts.
    #[error("expected a body of at most {limit} bytes, got {got}")]
    TooLong {
        /// The receiver's limit.
        limit: usize,
        /// The length in the header.
        got: usize,
    },
    /// The bytes do not match their checksum.
    #[error("the checksum of a frame does not match")]
    Checksum,
}

/// The header of a frame, without the length of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Kind of the body.
    pub kind: Kind,
    /// Number of the request; the answer has the same number.
    pub id: u64,
}

/// The body of a frame, aligned for every array in it; the memory is reused for further frames.
#[derive(Debug, Default)]
pub struct Body {
    words: Vec<u64>,
    len: usize,
}

impl Body {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// Frees the memory if it is more than `max_bytes`.
    pub fn shrink(&mut self, max_bytes: usize) {
        if self.words.capacity() * 8 > max_bytes {
            *self = Body::default();
        }
    }

    /// Reads until the body has `len` bytes.
    fn fill(&mut self, reader: &mut impl Read, len: usize) -> io::Result<()> {
        while self.len < len {
            let end = len.min(self.len + STEP_BYTES);
            if self.words.len() * 8 < end {
                self.words.resize(end.div_ceil(8), 0);
            }
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
            match reader.read(&mut bytes[self.len..end]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads a frame with a body of at most `limit` bytes.
pub fn read_frame(reader: &mut impl Read, limit: usize, body: &mut Body) -> Result<Header, FrameError> {
    let mut incoming = FrameReader { body: std::mem::take(body), ..FrameReader::default() };
    let header = incoming.read(reader, limit);
    *body = incoming.body;
    header
}

/// Reads frames from a socket with a read timeout: after a timeout, the next attempt resumes in the middle of the frame.
#[derive(Debug, Default)]
pub struct FrameReader {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have arrived.
    len: usize,
    body: Body,
}

impl FrameReader {
    /// Reads a frame, or the rest of one, with a body of at most `limit` bytes.
    pub fn read(&mut self, reader: &mut impl Read, limit: usize) -> Result<Header, FrameError> {
        if self.len < HEADER_BYTES {
            self.body.len = 0;
            self.read_header(reader)?;
        }
        let (header, length) = parse_header(&self.header, limit)?;
        self.body.fill(reader, length)?;
        self.len = 0;
        if checksum(&self.header, &[self.body.bytes()]) != word(&self.header, 24) {
            return Err(FrameError::Checksum);
        }
        Ok(header)
    }

    /// Returns the body of the frame that was read and keeps `spare` for the next frame.
    pub fn swap(&mut self, spare: Body) -> Body {
        std::mem::replace(&mut self.body, spare)
    }

    /// Like `read_exact`, but end of file before the first byte is [`FrameError::Closed`].
    fn read_header(&mut self, reader: &mut impl Read) -> Result<(), FrameError> {
        while self.len < HEADER_BYTES {
            match reader.read(&mut self.header[self.len..]) {
                Ok(0) if self.len == 0 => return Err(FrameError::Closed),
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(count) => self.len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Returns the header and the length of the body.
fn parse_header(header: &[u8; HEADER_BYTES], limit: usize) -> Result<(Header, usize), FrameError> {
    let magic = [header[0], header[1], header[2], header[3]];
    if magic != MAGIC {
        return Err(FrameError::Magic(magic));
    }
    if header[4] != VERSION {
        return Err(FrameError::Version(header[4]));
    }
    let kind = Kind::from_number(header[5]).ok_or(FrameError::Kind(header[5]))?;
    if header[6..8] != [0; 2] || header[20..24] != [0; 4] {
        return Err(FrameError::Reserved);
    }
    let got = header[16..20].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
    let limit = limit.min(MAX_BODY_BYTES);
    if got > limit {
        return Err(FrameError::TooLong { limit, got });
    }
    Ok((Header { kind, id: word(header, 8) }, got))
}

fn word(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    header[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Writes a frame; its body is the concatenation of `parts`, which are not copied.
pub fn write_frame(writer: &mut impl Write, header: Header, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if length > MAX_BODY_BYTES {
        let message = format!("expected a body of at most {MAX_BODY_BYTES} bytes, got {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = header.kind as u8;
    bytes[8..16].copy_from_slice(&header.id.to_le_bytes());
    bytes[16..20].copy_from_slice(&(length as u32).to_le_bytes());
    let sum = checksum(&bytes, parts);
    bytes[24..].copy_from_slice(&sum.to_le_bytes());
    let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(1 + parts.len());
    slices.push(IoSlice::new(&bytes));
    slices.extend(parts.iter().filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)));
    write_all(writer, &mut slices)?;
    writer.flush()
}

fn write_all(writer: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match writer.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn checksum(header: &[u8; HEADER_BYTES], parts: &[&[u8]]) -> u64 {
    let mut hash = Xxh3Default::new();
    hash.update(&header[..CHECKED_BYTES]);
    parts.iter().for_each(|part| hash.update(part));
    hash.digest()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(id: u64, parts: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Header { kind: Kind::Push, id }, parts).unwrap();
        bytes
    }

    fn read(mut bytes: &[u8], limit: usize) -> Result<(Header, Vec<u8>), FrameError> {
        let mut body = Body::default();
        let header = read_frame(&mut bytes, limit, &mut body)?;
        Ok((header, body.bytes().to_vec()))
    }

    /// A writer that accepts a few bytes at a time, as a socket may.
    struct SlowWriter<'a>(&'a mut Vec<u8>, usize);

    impl Write for SlowWriter<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.1);
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A reader that alternates between a timeout and a few bytes.
    struct TimeoutReader<'a> {
        bytes: &'a [u8],
        step: usize,
        is_late: bool,
    }

    impl Read for TimeoutReader<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.is_late = !self.is_late;
            if self.is_late {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = buffer.len().min(self.step).min(self.bytes.len());
            buffer[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes = &self.bytes[count..];
            Ok(count)
        }
    }

    proptest! {
        #[test]
        fn bytes_that_arrived_before_a_timeout_are_kept(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..90), 1..4), step in 1usize..50) {
            let bytes: Vec<u8> = (0..).zip(&bodies).flat_map(|(id, body)| frame(id, &[body])).collect();
            let mut reader = TimeoutReader { bytes: &bytes, step, is_late: false };
            let mut incoming = FrameReader::default();
            for (id, body) in (0..).zip(&bodies) {
                let header = loop {
                    match incoming.read(&mut reader, 1000) {
                        Ok(header) => break header,
                        Err(FrameError::Io(error)) => prop_assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                        Err(error) => panic!("{error}"),
                    }
                };
                prop_assert_eq!(header, Header { kind: Kind::Push, id });
                let got = incoming.swap(Body::default());
                prop_assert_eq!(got.bytes(), body.as_slice());
            }
        }

        #[test]
        fn frames_survive_a_round_trip(id: u64, parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..5), step in 1usize..9) {
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut bytes = Vec::new();
            write_frame(&mut SlowWriter(&mut bytes, step), Header { kind: Kind::Push, id }, &parts).unwrap();
            prop_assert_eq!(&bytes, &frame(id, &parts));
            let (header, body) = read(&bytes, 1000).unwrap();
            prop_assert_eq!((header, body), (Header { kind: Kind::Push, id }, parts.concat()));
        }

        #[test]
        fn a_flipped_bit_or_a_truncation_is_detected(id: u64, body in prop::collection::vec(any::<u8>(), 0..40), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let good = frame(id, &[&body]);
            let at = at.index(good.len());
            let mut changed = good.clone();
            changed[at] ^= 1 << bit;
            prop_assert!(read(&changed, 1 << 20).is_err());
            prop_assert!(read(&good[..at], 1 << 20).is_err());
        }

        #[test]
        fn hostile_bytes_give_errors(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(read(&bytes, 1 << 20).is_err());
        }
    }

    #[test]
    fn a_large_length_in_the_header_allocates_no_memory() {
        let mut bytes = frame(1, &[&[7; 100]]);
        bytes[16..20].copy_from_slice(&(MAX_BODY_BYTES as u32).to_le_bytes());
        let mut body = Body::default();
        assert!(matches!(read_frame(&mut bytes.as_slice(), MAX_BODY_BYTES, &mut body), Err(FrameError::Io(_))));
        assert!(body.words.capacity() * 8 <= 2 * STEP_BYTES);
        assert!(matches!(read(&bytes, 4096), Err(FrameError::TooLong { limit: 4096, got: MAX_BODY_BYTES })));
    }

    #[test]
    fn errors_name_the_problem() {
        let good = frame(1, &[b"x"]);
        let error = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            read(&bytes, 100).unwrap_err().to_string()
        };
        assert_eq!(error(4, 2), "expected protocol version 1, got 2");
        assert_eq!(error(5, 13), "expected a kind from 1 to 12, got 13");
        assert_eq!(error(6, 1), "expected zeros in the reserved bytes of the header");
        assert_eq!(error(32, b'y'), "the checksum of a frame does not match");
        assert_eq!(
            read(b"GET / HTTP/1.1\r\n\r\nxxxxxxxxxxxxxxxxx", 9).unwrap_err().to_string(),
            "expected a frame that begins with `EREC`, got [47, 45, 54, 20]"
        );
        assert!(matches!(read(b"", 100), Err(FrameError::Closed)));
        assert!(matches!(read(&good[..10], 100), Err(FrameError::Io(_))));
    }
}
