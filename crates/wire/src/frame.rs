//! Frames: a header with length and checksum, then a body; what is on the wire before it means anything.

use std::io::{self, IoSlice, Read, Write};

use thiserror::Error;
use xxhash_rust::xxh3::Xxh3Default;

/// What every frame begins with.
pub const MAGIC: [u8; 4] = *b"EREC";
/// The version of frames and messages.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// A longer body is no body.
pub const MAX_BODY_BYTES: usize = 1 << 30;
/// Until it has shown its token a peer may send no more than this.
pub const MAX_HELLO_BYTES: usize = 4096;

/// Memory is asked for as bytes arrive, not as a header promises them.
const STEP_BYTES: usize = 1 << 20;
/// Header bytes that the checksum covers.
const CHECKED_BYTES: usize = 24;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The first frame of a client.
    Hello = 1,
    /// The answer to it.
    Welcome = 2,
    /// A request that was not done, and why.
    Refusal = 3,
    /// Rows and dense values are asked for.
    Pull = 4,
    /// They come.
    Rows = 5,
    /// What a batch learned.
    Push = 6,
    /// It is applied.
    PushAck = 7,
    /// Whether a step has all its pushes is asked for.
    StepQuery = 8,
    /// The answer to it.
    StepStatus = 9,
    /// Rows of a version are asked for.
    Lookup = 10,
    /// They come.
    LookupResult = 11,
    /// What a cube server is and holds: its answer to a hello.
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

/// Why no frame could be read.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The connection ended between two frames.
    #[error("the connection is closed")]
    Closed,
    /// The connection ended or failed inside a frame.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Another protocol.
    #[error("expected a frame that begins with `EREC`, got {0:02x?}")]
    Magic([u8; 4]),
    /// Another release.
    #[error("expected protocol version {VERSION}, got {0}")]
    Version(u8),
    /// Not a kind of this version.
    #[error("expected a kind from 1 to 12, got {0}")]
    Kind(u8),
    /// Bytes that must be zero are not.
    #[error("expected zeros in the header, got others")]
    Reserved,
    /// More than the receiver takes.
    #[error("expected a body of at most {limit} bytes, got {got}")]
    TooLong {
        /// What it takes.
        limit: usize,
        /// What the header says.
        got: usize,
    },
    /// Bytes changed on the way.
    #[error("the checksum of a frame differs")]
    Checksum,
}

/// What a header says, beside the length of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the body is.
    pub kind: Kind,
    /// The number of a request; its answer has the same.
    pub id: u64,
}

/// The body of a frame, at an address that every array in it may be read from; its memory is used again.
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

    /// Gives its memory back if it is more than so many bytes.
    pub fn shrink(&mut self, most: usize) {
        if self.words.capacity() * 8 > most {
            *self = Body::default();
        }
    }

    /// Reads on until it has `len` bytes.
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

/// Reads a frame whose body has at most `limit` bytes.
pub fn read_frame(reader: &mut impl Read, limit: usize, body: &mut Body) -> Result<Header, FrameError> {
    let mut incoming = Incoming { body: std::mem::take(body), ..Incoming::default() };
    let header = incoming.read(reader, limit);
    *body = incoming.body;
    header
}

/// Reads frames where a read may run out of time: what has come of a frame stays for the next attempt.
#[derive(Debug, Default)]
pub struct Incoming {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that are there.
    len: usize,
    body: Body,
}

impl Incoming {
    /// Reads a frame, or what is left of it, whose body has at most `limit` bytes.
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

    /// The body of the frame that was read, in exchange for memory for the next one.
    pub fn swap(&mut self, spare: Body) -> Body {
        std::mem::replace(&mut self.body, spare)
    }

    /// As `read_exact`, but an end before the first byte is an end between two frames.
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

/// What a header says, and the bytes of the body behind it.
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

/// Writes a frame whose body is `parts`, one behind the other, from where they lie.
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

    /// Gives a few bytes at a time and takes a few at a time, as a socket may.
    struct Slow<'a>(&'a mut Vec<u8>, usize);

    impl Write for Slow<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.1);
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Gives a few bytes, then runs out of time, again and again.
    struct Hesitant<'a> {
        bytes: &'a [u8],
        step: usize,
        is_late: bool,
    }

    impl Read for Hesitant<'_> {
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
        fn what_came_before_the_time_was_over_is_kept(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..90), 1..4), step in 1usize..50) {
            let bytes: Vec<u8> = (0..).zip(&bodies).flat_map(|(id, body)| frame(id, &[body])).collect();
            let mut reader = Hesitant { bytes: &bytes, step, is_late: false };
            let mut incoming = Incoming::default();
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
        fn frames_go_there_and_back(id: u64, parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..5), step in 1usize..9) {
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut bytes = Vec::new();
            write_frame(&mut Slow(&mut bytes, step), Header { kind: Kind::Push, id }, &parts).unwrap();
            prop_assert_eq!(&bytes, &frame(id, &parts));
            let (header, body) = read(&bytes, 1000).unwrap();
            prop_assert_eq!((header, body), (Header { kind: Kind::Push, id }, parts.concat()));
        }

        #[test]
        fn a_changed_bit_or_a_cut_is_noticed(id: u64, body in prop::collection::vec(any::<u8>(), 0..40), at in any::<prop::sample::Index>(), bit in 0u8..8) {
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
    fn a_promise_of_many_bytes_takes_no_memory() {
        let mut bytes = frame(1, &[&[7; 100]]);
        bytes[16..20].copy_from_slice(&(MAX_BODY_BYTES as u32).to_le_bytes());
        let mut body = Body::default();
        assert!(matches!(read_frame(&mut bytes.as_slice(), MAX_BODY_BYTES, &mut body), Err(FrameError::Io(_))));
        assert!(body.words.capacity() * 8 <= 2 * STEP_BYTES);
        assert!(matches!(read(&bytes, 4096), Err(FrameError::TooLong { limit: 4096, got: MAX_BODY_BYTES })));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = frame(1, &[b"x"]);
        let error = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            read(&bytes, 100).unwrap_err().to_string()
        };
        assert_eq!(error(4, 2), "expected protocol version 1, got 2");
        assert_eq!(error(5, 13), "expected a kind from 1 to 12, got 13");
        assert_eq!(error(6, 1), "expected zeros in the header, got others");
        assert_eq!(error(32, b'y'), "the checksum of a frame differs");
        assert_eq!(
            read(b"GET / HTTP/1.1\r\n\r\nxxxxxxxxxxxxxxxxx", 9).unwrap_err().to_string(),
            "expected a frame that begins with `EREC`, got [47, 45, 54, 20]"
        );
        assert!(matches!(read(b"", 100), Err(FrameError::Closed)));
        assert!(matches!(read(&good[..10], 100), Err(FrameError::Io(_))));
    }
}
