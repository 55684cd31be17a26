//! Decompresses files piece by piece.
//!
//! A compressed file can only be read from its start, so it is one unit. Pieces of bounded size keep the memory small
//! for files of any size.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lines::MAX_RECORD_BYTES;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Whether a file with these first bytes is compressed.
pub fn is_compressed(start: &[u8]) -> bool {
    start.starts_with(GZIP) || start.starts_with(ZSTD)
}

/// A piece of decompressed text: whole lines.
#[derive(Debug)]
pub(crate) struct Text {
    pub bytes: Vec<u8>,
    /// Offset of `bytes[0]` in the decompressed file.
    pub base: u64,
    /// Line number of `bytes[0]`.
    pub first_line: u64,
    /// Byte range in the file on disk.
    pub file_bytes: Range<u64>,
}

/// A compressed file that is being read.
pub(crate) struct Stream {
    decoder: Box<dyn Read + Send>,
    /// Bytes of the file that the decoder has read.
    taken: Arc<AtomicU64>,
    /// Bytes of the file that belong to earlier pieces.
    reported: u64,
    /// Bytes after the last line end of the previous piece.
    carried: Vec<u8>,
    base: u64,
    next_line: u64,
}

/// Counts the bytes that are read.
struct CountingReader {
    file: File,
    taken: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.taken.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

impl Stream {
    /// Opens a file at its start; returns `None` if it is not compressed.
    pub(crate) fn open(file: &mut File) -> io::Result<Option<Self>> {
        let mut start = Vec::new();
        file.by_ref().take(4).read_to_end(&mut start)?;
        file.seek(SeekFrom::Start(0))?;
        let taken = Arc::new(AtomicU64::new(0));
        let counted = || io::Result::Ok(CountingReader { file: file.try_clone()?, taken: taken.clone() });
        let decoder: Box<dyn Read + Send> = if start.starts_with(GZIP) {
            Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 18, counted()?)))
        } else if start.starts_with(ZSTD) {
            Box::new(zstd::stream::read::Decoder::new(counted()?)?)
        } else {
            return Ok(None);
        };
        Ok(Some(Stream { decoder, taken, reported: 0, carried: Vec::new(), base: 0, next_line: 1 }))
    }

    /// Returns the next piece of about `piece_bytes`, up to a line end.
    pub(crate) fn next_text(&mut self, piece_bytes: usize) -> io::Result<Option<Text>> {
        let mut bytes = std::mem::take(&mut self.carried);
        let mut wanted = piece_bytes;
        let end = loop {
            let missing = wanted.saturating_sub(bytes.len()).max(1 << 16) as u64;
            let searched = bytes.len();
            let count = self.decoder.by_ref().take(missing).read_to_end(&mut bytes).map_err(|error| {
                let line = self.next_line + memchr::memchr_iter(b'\n', &bytes).count() as u64;
                io::Error::new(error.kind(), format!("damaged or truncated in line {line}: {error}"))
            })?;
            if count == 0 {
                break bytes.len();
            }
            if bytes.len() < wanted {
                continue;
            }
            if let Some(at) = memchr::memrchr(b'\n', &bytes[searched.min(bytes.len())..]) {
                break searched + at + 1;
            }
            wanted = bytes.len() + 1;
            if bytes.len() > piece_bytes + MAX_RECORD_BYTES {
                let message = format!("line {} is longer than {MAX_RECORD_BYTES} bytes", self.next_line);
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        };
        if bytes.is_empty() {
            return Ok(None);
        }
        self.carried = bytes.split_off(end);
        let num_lines = memchr::memchr_iter(b'\n', &bytes).count() as u64;
        let taken = self.taken.load(Ordering::Relaxed);
        let file_bytes = std::mem::replace(&mut self.reported, taken)..taken;
        let text = Text { bytes, base: self.base, first_line: self.next_line, file_bytes };
        self.base += text.bytes.len() as u64;
        self.next_line += num_lines;
        Ok(Some(text))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use super::*;

    pub(crate) fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn texts(bytes: &[u8], piece_bytes: usize) -> io::Result<Vec<Text>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        let mut stream = Stream::open(&mut file)?.expect("the file is compressed");
        std::iter::from_fn(|| stream.next_text(piece_bytes).transpose()).collect()
    }

    #[test]
    fn pieces_are_bounded_and_long_enough() {
        let text: String = (0..100_000).map(|number| format!("{number}\n")).collect();
        let pieces = texts(&gzip(text.as_bytes()), 100_000).unwrap();
        let sizes: Vec<usize> = pieces.iter().map(|piece| piece.bytes.len()).collect();
        assert_eq!(pieces.iter().flat_map(|piece| piece.bytes.clone()).collect::<Vec<u8>>(), text.as_bytes());
        assert!(sizes.iter().all(|&size| size < 200_000), "{sizes:?}");
        assert!(sizes.len() > 3, "{sizes:?}");
    }

    #[test]
    fn a_truncated_file_names_the_line() {
        let text: String =
            (0..50_000u64).map(|number| format!("{}\n", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
        let whole = gzip(text.as_bytes());
        let error = texts(&whole[..whole.len() / 2], 1 << 16).unwrap_err().to_string();
        assert!(error.starts_with("damaged or truncated in line "), "{error}");
        let whole = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let error = texts(&whole[..whole.len() / 2], 1 << 16).unwrap_err().to_string();
        assert!(error.starts_with("damaged or truncated in line "), "{error}");
    }
}
