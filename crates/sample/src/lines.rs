//! Loads a unit piece by piece and finds the records in it.
//!
//! A unit of an uncompressed file is one piece; `compressed` decompresses a file into several.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use crate::compressed::{Stream, Text};
use crate::hash::SplitMix64;
use crate::unit::Unit;

/// Longer records are an error, so that a file without line ends cannot fill the memory.
pub const MAX_RECORD_BYTES: usize = 16 << 20;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The records of a piece.
#[derive(Debug)]
pub struct UnitLines {
    bytes: Vec<u8>,
    /// Offset of `bytes[0]` in the file.
    base: u64,
    /// (start, end) of each record in `bytes`, in batch order.
    lines: Vec<(u32, u32)>,
    /// Line number of `bytes[0]`, if it cannot be counted later.
    first_line: Option<u64>,
    /// Byte range of the piece in the file on disk.
    file_bytes: Range<u64>,
}

impl UnitLines {
    /// Finds the records in a piece of a compressed file.
    fn of_text(text: Text, is_record: impl Fn(&[u8]) -> bool) -> Self {
        let Text { bytes, base, first_line, file_bytes } = text;
        let mut piece = UnitLines { bytes, base, lines: Vec::new(), first_line: Some(first_line), file_bytes };
        piece.find(0, piece.bytes.len(), is_record);
        piece
    }

    /// Permutes the records; the order depends on the arguments alone.
    pub fn shuffle(&mut self, seed: u64, epoch: u32, unit: u64, piece: u64) {
        let parts = [seed, u64::from(epoch), unit, piece];
        // The number of the first piece is left out, so that a unit of one piece is permuted as in formats without
        // pieces.
        SplitMix64::from_parts(if piece == 0 { &parts[..3] } else { &parts }).shuffle(&mut self.lines);
    }

    /// Number of records.
    pub fn num_records(&self) -> usize {
        self.lines.len()
    }

    /// The bytes of record `index`.
    pub fn record(&self, index: usize) -> &[u8] {
        let (start, end) = self.lines[index];
        &self.bytes[start as usize..end as usize]
    }

    /// Offset of record `index` in the decompressed file.
    pub fn file_offset(&self, index: usize) -> u64 {
        self.base + u64::from(self.lines[index].0)
    }

    /// Approximate offset in the file on disk after the first `records` records of the piece.
    pub fn file_bytes(&self, records: usize) -> u64 {
        let Range { start, end } = self.file_bytes;
        start + (end - start) * records as u64 / self.lines.len().max(1) as u64
    }

    /// Returns the line number of record `index`, from 1. It may read the file again, so it is only for messages.
    pub fn line_number(&self, path: &Path, index: usize) -> io::Result<u64> {
        match self.first_line {
            Some(first) => {
                let before = &self.bytes[..self.lines[index].0 as usize];
                Ok(first + memchr::memchr_iter(b'\n', before).count() as u64)
            }
            None => line_number(path, self.file_offset(index)),
        }
    }

    /// Finds the records that begin in `bytes[start..range_end]`; the last one may end after it.
    fn find(&mut self, mut start: usize, range_end: usize, is_record: impl Fn(&[u8]) -> bool) {
        let bytes = &self.bytes;
        if self.base == 0 && start == 0 && bytes.starts_with(BYTE_ORDER_MARK) {
            start = BYTE_ORDER_MARK.len();
        }
        while start < range_end.min(bytes.len()) {
            let line_end = memchr::memchr(b'\n', &bytes[start..]).map_or(bytes.len(), |at| start + at);
            let end = if line_end > start && bytes[line_end - 1] == b'\r' { line_end - 1 } else { line_end };
            if is_record(&bytes[start..end]) {
                self.lines.push((start as u32, end as u32));
            }
            start = line_end + 1;
        }
    }
}

/// Returns the first line of a file, compressed or not, without its line end, or `None` if the file is empty.
pub fn first_line(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let end = std::fs::metadata(path)?.len();
    // Limits how much of an uncompressed file is read.
    let unit = Unit { id: 0, path: path.into(), start: 0, end: end.min(1 << 16), epoch: 0, stamp: None };
    let mut pieces = Pieces::open(&unit, 1 << 16)?;
    let piece = pieces.next_piece(|_| true)?.filter(|piece| piece.num_records() > 0);
    Ok(piece.map(|piece| piece.record(0).to_vec()))
}

/// Reads the pieces of a unit.
pub struct Pieces {
    unit: Unit,
    source: Source,
    piece_bytes: usize,
}

enum Source {
    Plain,
    Stream(Box<Stream>),
    Ended,
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pieces").field("unit", &self.unit).finish_non_exhaustive()
    }
}

impl Pieces {
    /// Opens a unit; a compressed file is read in pieces of about `piece_bytes`.
    pub fn open(unit: &Unit, piece_bytes: usize) -> io::Result<Self> {
        let mut file = File::open(&unit.path)?;
        unit.stamp.map_or(Ok(()), |stamp| stamp.check(&file))?;
        let stream = if unit.start == 0 { Stream::open(&mut file)? } else { None };
        let source = stream.map_or(Source::Plain, |stream| Source::Stream(Box::new(stream)));
        Ok(Pieces { unit: unit.clone(), source, piece_bytes: piece_bytes.clamp(1, u32::MAX as usize / 4) })
    }

    /// Returns the next piece, with the lines for which `is_record` holds, in file order.
    pub fn next_piece(&mut self, is_record: impl Fn(&[u8]) -> bool) -> io::Result<Option<UnitLines>> {
        match &mut self.source {
            Source::Ended => Ok(None),
            Source::Plain => {
                let piece = read_plain(&self.unit, is_record)?;
                self.source = Source::Ended;
                Ok(Some(piece))
            }
            Source::Stream(stream) => {
                let text = stream.next_text(self.piece_bytes);
                if !matches!(text, Ok(Some(_))) {
                    self.source = Source::Ended;
                    // Check again: the file may have been written to while it was read.
                    self.unit.stamp.map_or(Ok(()), |stamp| stamp.check(&File::open(&self.unit.path)?))?;
                }
                Ok(text?.map(|text| UnitLines::of_text(text, is_record)))
            }
        }
    }
}

fn read_plain(unit: &Unit, is_record: impl Fn(&[u8]) -> bool) -> io::Result<UnitLines> {
    let bytes = read_range(unit)?;
    let base = unit.start.saturating_sub(1);
    // The byte before the range decides whether a record begins at the first byte of the range.
    let start = match unit.start {
        0 => 0,
        _ => memchr::memchr(b'\n', &bytes).map_or(bytes.len(), |at| at + 1),
    };
    let mut piece = UnitLines { bytes, base, lines: Vec::new(), first_line: None, file_bytes: unit.start..unit.end };
    piece.find(start, (unit.end - base) as usize, is_record);
    Ok(piece)
}

/// Reads from `start - 1` to the end of the record that crosses `end`.
fn read_range(unit: &Unit) -> io::Result<Vec<u8>> {
    let Unit { start, end, stamp, .. } = *unit;
    let mut file = File::open(&unit.path)?;
    stamp.map_or(Ok(()), |stamp| stamp.check(&file))?;
    let size = file.metadata()?.len();
    if size < end {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("expected at least {end} bytes, got {size}: the file was truncated after its units were recorded"),
        ));
    }
    let base = start.saturating_sub(1);
    let length = (end - base) as usize;
    if length + MAX_RECORD_BYTES > u32::MAX as usize {
        return Err(io::Error::other(format!("unit: expected less than 4 GiB, got {length} bytes")));
    }
    file.seek(SeekFrom::Start(base))?;
    let mut bytes = Vec::with_capacity(length + 4096);
    (&mut file).take(length as u64).read_to_end(&mut bytes)?;
    let mut searched = bytes.len().saturating_sub(1);
    while memchr::memchr(b'\n', &bytes[searched..]).is_none() {
        searched = bytes.len();
        if searched - length > MAX_RECORD_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the record that begins before byte {end} is longer than {MAX_RECORD_BYTES} bytes"),
            ));
        }
        if (&mut file).take(64 << 10).read_to_end(&mut bytes)? == 0 {
            break;
        }
    }
    // Check again: the file may have been written to while it was read.
    stamp.map_or(Ok(()), |stamp| stamp.check(&file))?;
    Ok(bytes)
}

/// Returns the line number of byte `offset`, from 1. It reads the file, so it is only for messages.
pub fn line_number(path: &Path, offset: u64) -> io::Result<u64> {
    let mut rest = File::open(path)?.take(offset);
    let mut buffer = vec![0; 1 << 20];
    let mut line = 1;
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(line),
            count => line += memchr::memchr_iter(b'\n', &buffer[..count]).count() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::compressed::tests::gzip;
    use crate::unit::{Stamp, split};

    fn not_blank(line: &[u8]) -> bool {
        line.iter().any(|&byte| byte != b' ' && byte != b'\t')
    }

    fn read(unit: &Unit) -> io::Result<UnitLines> {
        Pieces::open(unit, 1 << 20)?
            .next_piece(not_blank)
            .map(|piece| piece.expect("an uncompressed unit has one piece"))
    }

    fn records(path: &Path, ranges: &[(u64, u64)]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for &(start, end) in ranges {
            let unit = Unit { id: 0, path: path.into(), start, end, epoch: 0, stamp: None };
            let lines = read(&unit).unwrap();
            for index in 0..lines.num_records() {
                let record = lines.record(index).to_vec();
                let bytes = std::fs::read(path).unwrap();
                assert!(bytes[lines.file_offset(index) as usize..].starts_with(&record));
                all.push(record);
            }
        }
        all
    }

    proptest! {
        #[test]
        fn every_record_is_in_exactly_one_unit(
            text in prop::collection::vec(prop::sample::select(b"ab \r\n".to_vec()), 0..200),
            unit_bytes in 1u64..40,
        ) {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&text).unwrap();
            let expected: Vec<Vec<u8>> = text
                .split(|&byte| byte == b'\n')
                .map(|line| line.strip_suffix(b"\r").unwrap_or(line).to_vec())
                .filter(|line| line.iter().any(|&byte| byte != b' '))
                .collect();
            let ranges = split(text.len() as u64, unit_bytes);
            prop_assert_eq!(records(file.path(), &ranges), expected);
        }
    }

    #[test]
    fn a_record_beyond_the_limit_is_rejected() {
        let read_one = |record_bytes: usize, line_end: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            // A sparse file: bytes without a line end that take no room on disk.
            file.as_file().set_len(record_bytes as u64).unwrap();
            file.seek(SeekFrom::End(0)).unwrap();
            file.write_all(line_end).unwrap();
            let unit = Unit { id: 0, path: file.path().into(), start: 0, end: 1, epoch: 0, stamp: None };
            read(&unit).map(|lines| lines.record(0).len())
        };
        assert_eq!(read_one(MAX_RECORD_BYTES, b"\nb\n").unwrap(), MAX_RECORD_BYTES);
        // The limit applies to the bytes beyond the unit, which has one byte of the record.
        let error = read_one(MAX_RECORD_BYTES + 2, b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(error.to_string(), "the record that begins before byte 1 is longer than 16777216 bytes");
    }

    #[test]
    fn a_truncated_file_is_an_error_and_lines_have_numbers() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a\nb\nc\n").unwrap();
        let unit = Unit { id: 0, path: file.path().into(), start: 0, end: 7, epoch: 0, stamp: None };
        assert!(read(&unit).unwrap_err().to_string().contains("expected at least 7 bytes, got 6"));
        assert_eq!(line_number(file.path(), 0).unwrap(), 1);
        assert_eq!(line_number(file.path(), 4).unwrap(), 3);
    }

    #[test]
    fn a_changed_file_is_rejected() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a\nb\n").unwrap();
        let stamp = Stamp::of(file.as_file()).unwrap();
        let mut unit = Unit { id: 0, path: file.path().into(), start: 0, end: 4, epoch: 0, stamp: Some(stamp) };
        assert_eq!(read(&unit).unwrap().num_records(), 2);
        unit.stamp = Some(Stamp { modified_ns: stamp.modified_ns + 1, ..stamp });
        let error = read(&unit).unwrap_err().to_string();
        assert!(error.starts_with("changed since its units were recorded: expected 4 bytes"), "{error}");
        unit.stamp = Some(stamp);
        file.write_all(b"c\n").unwrap();
        assert!(read(&unit).unwrap_err().to_string().contains("expected 4 bytes"));
    }

    #[test]
    fn the_order_depends_on_the_arguments_alone() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for number in 0..100 {
            writeln!(file, "{number}").unwrap();
        }
        let size = file.path().metadata().unwrap().len();
        let order = |seed, epoch, id| {
            let unit = Unit { id, path: file.path().into(), start: 0, end: size, epoch, stamp: None };
            let mut lines = read(&unit).unwrap();
            lines.shuffle(seed, epoch, id, 0);
            (0..lines.num_records()).map(|index| lines.record(index).to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(order(1, 2, 3), order(1, 2, 3));
        assert_ne!(order(1, 2, 3), order(1, 3, 3));
        assert_ne!(order(1, 2, 3), order(1, 2, 4));
        let mut sorted = order(1, 2, 3);
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), 100);
    }

    fn pieces(bytes: &[u8], piece_bytes: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let unit = Unit { id: 0, path: file.path().into(), start: 0, end: bytes.len() as u64, epoch: 0, stamp: None };
        let mut pieces = Pieces::open(&unit, piece_bytes)?;
        let mut records = Vec::new();
        while let Some(piece) = pieces.next_piece(not_blank)? {
            for index in 0..piece.num_records() {
                records.push((piece.line_number(file.path(), index)?, piece.record(index).to_vec()));
            }
        }
        Ok(records)
    }

    proptest! {
        #[test]
        fn a_compressed_file_has_the_same_records(
            text in prop::collection::vec(prop::sample::select(b"ab \r\n".to_vec()), 0..200),
            more in prop::collection::vec(prop::sample::select(b"ab\n".to_vec()), 0..40),
            piece_bytes in 1usize..80,
        ) {
            let plain = pieces(&[text.as_slice(), &more].concat(), 1 << 20).unwrap();
            // Two members, as written by `cat a.gz b.gz`.
            let members = [gzip(&text), gzip(&more)].concat();
            prop_assert_eq!(&pieces(&members, piece_bytes).unwrap(), &plain);
            let frames = [zstd::encode_all(text.as_slice(), 1).unwrap(), zstd::encode_all(more.as_slice(), 1).unwrap()];
            prop_assert_eq!(&pieces(&frames.concat(), piece_bytes).unwrap(), &plain);
        }
    }

    #[test]
    fn first_lines() {
        let first = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            first_line(file.path()).unwrap()
        };
        assert_eq!(first(b"a,b\r\n1,2\n"), Some(b"a,b".to_vec()));
        assert_eq!(first(&gzip(b"a,b\n1,2\n")), Some(b"a,b".to_vec()));
        assert_eq!(first(b""), None);
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_the_first_line() {
        assert_eq!(pieces(b"\xef\xbb\xbfa\nb\n", 100).unwrap(), [(1, b"a".to_vec()), (2, b"b".to_vec())]);
    }
}
