//! Units: byte ranges of files that always cut into the same records, in the same order, into the same batches.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::hash::SplitMix64;

/// Longer records are not records; the bound keeps a file without line ends from filling the memory.
pub const MAX_RECORD_BYTES: usize = 16 << 20;

/// A byte range of a file: the records whose first byte lies in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Increasing over the life of a run.
    pub id: u64,
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Which pass over the data it belongs to.
    pub epoch: u32,
    /// What the file was when its units were written down; a reader that finds another file refuses it.
    pub stamp: Option<Stamp>,
}

/// What a file is known by: it changes with everything that is written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes.
    pub size: u64,
    /// Modification time in nanoseconds since 1970.
    pub modified_ns: u64,
}

impl Stamp {
    fn of(file: &File) -> io::Result<Stamp> {
        let metadata = file.metadata()?;
        let since_1970 = metadata.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Ok(Stamp { size: metadata.len(), modified_ns: since_1970.as_nanos() as u64 })
    }

    /// Refuses a file that is not the one it was.
    fn check(self, file: &File) -> io::Result<()> {
        let now = Stamp::of(file)?;
        if now == self {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "changed since its units were written down: expected {} bytes as of {} ns, got {} bytes as of {} ns",
                self.size, self.modified_ns, now.size, now.modified_ns
            ),
        ))
    }
}

/// Cuts a file of `size` bytes into ranges of about `unit_bytes`.
pub fn cut(size: u64, unit_bytes: u64) -> Vec<(u64, u64)> {
    let num_units = size.div_ceil(unit_bytes.max(1));
    // the product of a large file and its units is beyond a u64
    let at = |i: u64| (u128::from(size) * u128::from(i) / u128::from(num_units)) as u64;
    (0..num_units).map(|i| (at(i), at(i + 1))).collect()
}

/// The bytes of a unit and where its records are.
#[derive(Debug)]
pub struct UnitLines {
    bytes: Vec<u8>,
    /// Place of `bytes[0]` in the file.
    base: u64,
    /// (start, end) in `bytes` of each record that is not blank, in batch order.
    lines: Vec<(u32, u32)>,
}

impl UnitLines {
    /// Reads the records of a unit in file order.
    pub fn read(unit: &Unit) -> io::Result<Self> {
        let bytes = read_range(unit)?;
        let base = unit.start.saturating_sub(1);
        let mut lines = Vec::new();
        // the byte before the range tells whether a record begins at the range's first byte
        let mut start = match unit.start {
            0 => 0,
            _ => memchr::memchr(b'\n', &bytes).map_or(bytes.len(), |at| at + 1),
        };
        let range_end = (unit.end - base) as usize;
        while start < range_end.min(bytes.len()) {
            let line_end = memchr::memchr(b'\n', &bytes[start..]).map_or(bytes.len(), |at| start + at);
            let end = if line_end > start && bytes[line_end - 1] == b'\r' { line_end - 1 } else { line_end };
            if bytes[start..end].iter().any(|&byte| byte != b' ' && byte != b'\t') {
                lines.push((start as u32, end as u32));
            }
            start = line_end + 1;
        }
        Ok(UnitLines { bytes, base, lines })
    }

    /// Permutes the records; the order is a function of the arguments alone.
    pub fn shuffle(&mut self, seed: u64, epoch: u32, unit: u64) {
        SplitMix64::from_parts(&[seed, u64::from(epoch), unit]).shuffle(&mut self.lines);
    }

    /// Records in it.
    pub fn num_records(&self) -> usize {
        self.lines.len()
    }

    /// The bytes of record `index`.
    pub fn record(&self, index: usize) -> &[u8] {
        let (start, end) = self.lines[index];
        &self.bytes[start as usize..end as usize]
    }

    /// Where record `index` begins in the file.
    pub fn file_offset(&self, index: usize) -> u64 {
        self.base + u64::from(self.lines[index].0)
    }
}

/// Reads `start - 1 .. end` and on to the end of the record that crosses `end`.
fn read_range(unit: &Unit) -> io::Result<Vec<u8>> {
    let Unit { start, end, stamp, .. } = *unit;
    let mut file = File::open(&unit.path)?;
    stamp.map_or(Ok(()), |stamp| stamp.check(&file))?;
    let size = file.metadata()?.len();
    if size < end {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("expected at least {end} bytes, got {size}: the file was cut after its units were written down"),
        ));
    }
    let base = start.saturating_sub(1);
    let length = (end - base) as usize;
    if length + MAX_RECORD_BYTES > u32::MAX as usize {
        return Err(io::Error::other(format!("a unit of {length} bytes is too large, expected less than 4 GiB")));
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
    // once more: it may have been written to while it was read
    stamp.map_or(Ok(()), |stamp| stamp.check(&file))?;
    Ok(bytes)
}

/// The number of the line at byte `offset`, counted from 1: read only for messages.
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

    fn records(path: &Path, ranges: &[(u64, u64)]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for &(start, end) in ranges {
            let unit = Unit { id: 0, path: path.into(), start, end, epoch: 0, stamp: None };
            let lines = UnitLines::read(&unit).unwrap();
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
            let ranges = cut(text.len() as u64, unit_bytes);
            prop_assert_eq!(records(file.path(), &ranges), expected);
        }

        #[test]
        fn ranges_cover_the_file(size in 0u64..10_000, unit_bytes in 1u64..3_000) {
            let ranges = cut(size, unit_bytes);
            let mut at = 0;
            for (start, end) in ranges {
                prop_assert_eq!(start, at);
                prop_assert!(end > start && end - start <= unit_bytes);
                at = end;
            }
            prop_assert_eq!(at, size);
        }
    }

    #[test]
    fn ranges_cover_a_file_of_32_tib() {
        let ranges = cut(1 << 45, 1 << 24);
        assert_eq!(ranges.len(), 1 << 21);
        assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, 1 << 45));
        assert!(ranges.iter().all(|(start, end)| end - start == 1 << 24));
        assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
    }

    #[test]
    fn a_record_beyond_the_limit_is_refused() {
        let read = |record_bytes: usize, line_end: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            // a hole of zeroes: bytes without a line end that take no room on the disk
            file.as_file().set_len(record_bytes as u64).unwrap();
            file.seek(SeekFrom::End(0)).unwrap();
            file.write_all(line_end).unwrap();
            let unit = Unit { id: 0, path: file.path().into(), start: 0, end: 1, epoch: 0, stamp: None };
            UnitLines::read(&unit).map(|lines| lines.record(0).len())
        };
        assert_eq!(read(MAX_RECORD_BYTES, b"\nb\n").unwrap(), MAX_RECORD_BYTES);
        // the limit is on what is read beyond the unit, whose one byte is part of the record
        let error = read(MAX_RECORD_BYTES + 2, b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(error.to_string(), "the record that begins before byte 1 is longer than 16777216 bytes");
    }

    #[test]
    fn a_cut_file_is_an_error_and_lines_have_numbers() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a\nb\nc\n").unwrap();
        let unit = Unit { id: 0, path: file.path().into(), start: 0, end: 7, epoch: 0, stamp: None };
        assert!(UnitLines::read(&unit).unwrap_err().to_string().contains("expected at least 7 bytes, got 6"));
        assert_eq!(line_number(file.path(), 0).unwrap(), 1);
        assert_eq!(line_number(file.path(), 4).unwrap(), 3);
    }

    #[test]
    fn a_file_that_is_not_what_it_was_is_refused() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a\nb\n").unwrap();
        let stamp = Stamp::of(file.as_file()).unwrap();
        let mut unit = Unit { id: 0, path: file.path().into(), start: 0, end: 4, epoch: 0, stamp: Some(stamp) };
        assert_eq!(UnitLines::read(&unit).unwrap().num_records(), 2);
        unit.stamp = Some(Stamp { modified_ns: stamp.modified_ns + 1, ..stamp });
        let error = UnitLines::read(&unit).unwrap_err().to_string();
        assert!(error.starts_with("changed since its units were written down: expected 4 bytes"), "{error}");
        unit.stamp = Some(stamp);
        file.write_all(b"c\n").unwrap();
        assert!(UnitLines::read(&unit).unwrap_err().to_string().contains("expected 4 bytes"));
    }

    #[test]
    fn shuffling_is_a_function_of_its_arguments() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for number in 0..100 {
            writeln!(file, "{number}").unwrap();
        }
        let size = file.path().metadata().unwrap().len();
        let order = |seed, epoch, id| {
            let unit = Unit { id, path: file.path().into(), start: 0, end: size, epoch, stamp: None };
            let mut lines = UnitLines::read(&unit).unwrap();
            lines.shuffle(seed, epoch, id);
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
}
