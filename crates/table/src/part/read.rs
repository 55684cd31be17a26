//! Reading part files: all bytes are checked before they are used.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Entry, FORMAT, Kind, LINE, MAGIC, MAX_META_BYTES, NO_PARTITIONS, PartError, frame_checksum, get_u32, get_u64,
    layout, meta_too_long, name_of,
};

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

/// An open part file. Opening it checks everything but the blocks.
pub struct PartFile {
    name: String,
    kind: Kind,
    num_partitions: u32,
    entries: Vec<Entry>,
    meta: Value,
    bytes: Bytes,
}

impl PartFile {
    /// Maps a file and checks everything but the blocks; call [`verify_block`](PartFile::verify_block)
    /// before using a block.
    pub fn open(path: impl AsRef<Path>) -> Result<PartFile, PartError> {
        let path = path.as_ref();
        let io_error = |source| PartError::Io { name: name_of(path), source };
        let file = File::open(path).map_err(io_error)?;
        let length = file.metadata().map_err(io_error)?.len();
        if length == 0 {
            // An empty file cannot be mapped.
            return PartFile::from_bytes(&name_of(path), Vec::new());
        }
        // SAFETY: part files never change once written (PartWriter rejects a path that exists), so the
        // mapped bytes do not change.
        let map = unsafe { Mmap::map(&file) }.map_err(io_error)?;
        PartFile::parse(name_of(path), Bytes::Mapped(map))
    }

    /// Opens a part file in memory; messages use `name` as its path.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<PartFile, PartError> {
        PartFile::parse(name.to_owned(), Bytes::Owned(bytes))
    }

    fn parse(name: String, bytes: Bytes) -> Result<PartFile, PartError> {
        let frame = Frame::parse(&name, as_slice(&bytes))?;
        let Frame { kind, num_partitions, entries, meta } = frame;
        Ok(PartFile { name, kind, num_partitions, entries, meta, bytes })
    }

    /// Rejects a file of another kind.
    pub fn expect_kind(&self, kind: Kind) -> Result<(), PartError> {
        if self.kind == kind {
            return Ok(());
        }
        let expected = match kind {
            Kind::TableSnapshot => "1 (table snapshot)",
            Kind::Cube => "2 (cube)",
            Kind::DenseSnapshot => "3 (dense snapshot)",
            Kind::CubeDelta => "4 (cube delta)",
        };
        Err(PartError::Kind { name: self.name.clone(), expected, got: self.kind as u32 })
    }

    /// Reads block `i` and compares its checksum.
    ///
    /// # Panics
    /// If there is no entry `i`.
    pub fn verify_block(&self, i: usize) -> Result<(), PartError> {
        self.verify_copy(i, self.block(i))
    }

    /// Compares the checksum of block `i` with the checksum of a copy of it.
    ///
    /// # Panics
    /// If there is no entry `i`.
    pub fn verify_copy(&self, i: usize, copy: &[u8]) -> Result<(), PartError> {
        let Entry { checksum, partition, .. } = self.entries[i];
        if xxh3_64(copy) == checksum {
            return Ok(());
        }
        Err(PartError::BlockChecksum { name: self.name.clone(), partition })
    }

    /// The bytes of block `i`.
    ///
    /// # Panics
    /// If there is no entry `i`.
    pub fn block(&self, i: usize) -> &[u8] {
        let Entry { offset, length, .. } = self.entries[i];
        &self.bytes()[offset as usize..][..length as usize]
    }

    /// The whole file.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        as_slice(&self.bytes)
    }

    /// The path, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of partitions of the whole table; this file may hold only some.
    pub fn num_partitions(&self) -> u32 {
        self.num_partitions
    }

    /// The directory, in ascending order of partitions.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The description of the blocks.
    pub fn meta(&self) -> &Value {
        &self.meta
    }
}

/// The parts of a file that are not blocks.
struct Frame {
    kind: Kind,
    num_partitions: u32,
    entries: Vec<Entry>,
    meta: Value,
}

impl Frame {
    fn parse(name: &str, bytes: &[u8]) -> Result<Frame, PartError> {
        let name_again = || name.to_owned();
        let got = bytes.len() as u64;
        if !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(PartError::NotAPart { name: name_again() });
        }
        let too_short = PartError::Truncated { name: name_again(), expected: 2 * LINE as u64, got };
        let (Some(head), Some(trailer)) = (bytes.first_chunk::<LINE>(), bytes.last_chunk::<LINE>()) else {
            return Err(too_short);
        };
        let format = get_u32(head, 8);
        if format != FORMAT {
            return Err(PartError::Format { name: name_again(), got: format });
        }
        let number = get_u32(head, 12);
        let Some(kind) = Kind::from_number(number) else {
            return Err(PartError::Kind { name: name_again(), expected: "1 to 4", got: number });
        };
        if bytes.len() < 2 * LINE {
            return Err(too_short);
        }
        if trailer[..16] != head[..16] {
            return Err(PartError::NoTrailer { name: name_again(), got });
        }

        let meta_offset = get_u64(trailer, 16);
        let meta_bytes = get_u64(trailer, 24);
        let directory_offset = get_u64(trailer, 32);
        let num_entries = get_u32(trailer, 40);
        let num_partitions = get_u32(trailer, 44);
        let expected = directory_offset.saturating_add(LINE as u64 * (u64::from(num_entries) + 1));
        if expected != got {
            return Err(PartError::Truncated { name: name_again(), expected, got });
        }
        let meta_end = meta_offset.saturating_add(meta_bytes);
        let in_place = meta_offset >= LINE as u64
            && meta_offset.is_multiple_of(LINE as u64)
            && meta_end.checked_next_multiple_of(LINE as u64) == Some(directory_offset);
        if !in_place {
            let what = format!(
                "meta: expected to end at byte {directory_offset}, before the directory, got {meta_bytes} bytes at {meta_offset}"
            );
            return Err(layout(name, what));
        }
        if meta_bytes > MAX_META_BYTES as u64 {
            return Err(layout(name, meta_too_long(meta_bytes)));
        }
        // From here on all offsets lie inside the file, in this order.
        let tail = &bytes[meta_offset as usize..bytes.len() - 8];
        if frame_checksum(head, tail) != get_u64(trailer, 56) {
            return Err(PartError::DirectoryChecksum { name: name_again() });
        }
        if num_partitions == 0 {
            return Err(layout(name, NO_PARTITIONS));
        }
        let reserved_is_zero = is_zero(&head[16..]) && is_zero(&trailer[48..56]);
        if !reserved_is_zero || !is_zero(&bytes[meta_end as usize..directory_offset as usize]) {
            return Err(layout(name, "reserved bytes: expected zeros"));
        }
        let directory = &bytes[directory_offset as usize..bytes.len() - LINE];
        let entries = parse_directory(name, &bytes[..meta_offset as usize], directory, num_partitions)?;
        let meta = serde_json::from_slice(&bytes[meta_offset as usize..meta_end as usize])
            .map_err(|error| layout(name, format!("meta: {error}")))?;
        Ok(Frame { kind, num_partitions, entries, meta })
    }
}

/// Checks that the blocks fill `body`, the bytes before meta, in the order of the directory and without a gap.
fn parse_directory(name: &str, body: &[u8], bytes: &[u8], num_partitions: u32) -> Result<Vec<Entry>, PartError> {
    let (lines, _) = bytes.as_chunks::<LINE>();
    let mut entries: Vec<Entry> = Vec::with_capacity(lines.len());
    let mut next_offset = LINE;
    for line in lines {
        let entry = Entry::from_bytes(line);
        let Entry { partition, offset, length, .. } = entry;
        if entries.last().is_some_and(|last| last.partition >= partition) || partition >= num_partitions {
            let what = "out of order or above the number of partitions";
            return Err(layout(name, format!("partition {partition}: {what}")));
        }
        let end = offset.checked_add(length).filter(|end| *end <= body.len() as u64);
        let (true, Some(end)) = (offset == next_offset as u64, end) else {
            let what = format!("expected a block at {next_offset}, got {length} bytes at {offset}");
            return Err(layout(name, format!("partition {partition}: {what}")));
        };
        // `body` ends on a line, so it contains the padding after `end`.
        next_offset = (end as usize).next_multiple_of(LINE);
        if get_u32(line, 4) != 0 || !is_zero(&body[end as usize..next_offset]) {
            return Err(layout(name, format!("partition {partition}: reserved bytes: expected zeros")));
        }
        entries.push(entry);
    }
    if next_offset != body.len() {
        return Err(layout(name, format!("expected meta at {next_offset}, got {}", body.len())));
    }
    Ok(entries)
}

/// Corrects the checksums of damaged bytes, as far as they can be found, so that tests and fuzzers reach the checks
/// that follow them.
#[doc(hidden)]
pub fn repair_checksums(bytes: &mut [u8]) {
    let length = bytes.len();
    let (Some(head), Some(trailer)) = (bytes.first_chunk::<LINE>().copied(), bytes.last_chunk::<LINE>().copied())
    else {
        return;
    };
    let range = |offset: u64, length: u64| Some(offset as usize..usize::try_from(offset.checked_add(length)?).ok()?);
    for i in 0..u64::from(get_u32(&trailer, 40)) {
        let at = get_u64(&trailer, 32).saturating_add(i * LINE as u64);
        let Some(line) = range(at, LINE as u64).filter(|line| line.end <= length) else {
            break;
        };
        let Some(entry) = bytes[line.clone()].first_chunk().map(Entry::from_bytes) else {
            break;
        };
        if let Some(block) = range(entry.offset, entry.length).and_then(|block| bytes.get(block)) {
            let checksum = xxh3_64(block).to_le_bytes();
            bytes[line][40..48].copy_from_slice(&checksum);
        }
    }
    if let Some(tail) = bytes.get(get_u64(&trailer, 16) as usize..length - 8) {
        let checksum = frame_checksum(&head, tail).to_le_bytes();
        bytes[length - 8..].copy_from_slice(&checksum);
    }
}

fn as_slice(bytes: &Bytes) -> &[u8] {
    match bytes {
        Bytes::Mapped(map) => map,
        Bytes::Owned(bytes) => bytes,
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
