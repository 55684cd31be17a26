//! Part files: the container of snapshots and cubes, one block per partition and a directory of the blocks.
//!
//! A part file is written in one sequential pass, which suits every storage, and read by range, so that a shard loads
//! only the partitions it owns. Every byte is covered by a checksum or must be zero. `docs/formats/part.md`
//! describes the bytes.

use std::io;
use std::path::Path;

use thiserror::Error;
use xxhash_rust::xxh3::Xxh3Default;

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::PartFile;
#[doc(hidden)]
pub use read::repair_checksums;
pub use write::{FileInfo, PartWriter};

const MAGIC: [u8; 8] = *b"ERECPART";
const FORMAT: u32 = 1;
/// Size of the header, the trailer and a directory entry, and the alignment of the blocks: a cache line.
const LINE: usize = 64;
/// The limit keeps a crafted file from filling memory with JSON values.
const MAX_META_BYTES: usize = 16 << 20;

const NO_PARTITIONS: &str = "expected at least 1 partition, got 0";

/// The content of the blocks of a part file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Rows with optimizer state: a part of a checkpoint.
    TableSnapshot = 1,
    /// An index and weights: a part of a published version.
    Cube = 2,
    /// Slices of the dense vector, with records of the applied pushes: a part of a checkpoint.
    DenseSnapshot = 3,
    /// Changed rows and removed signs: a part of a published delta.
    CubeDelta = 4,
}

impl Kind {
    fn from_number(number: u32) -> Option<Kind> {
        match number {
            1 => Some(Kind::TableSnapshot),
            2 => Some(Kind::Cube),
            3 => Some(Kind::DenseSnapshot),
            4 => Some(Kind::CubeDelta),
            _ => None,
        }
    }
}

/// A part file cannot be written or read; `name` is its path.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum PartError {
    #[error("{name}: {source}")]
    Io { name: String, source: io::Error },
    #[error("{name}: expected a part file, which starts with `ERECPART`")]
    NotAPart { name: String },
    #[error("{name}: expected format {FORMAT}, got {got}")]
    Format { name: String, got: u32 },
    #[error("{name}: expected kind {expected}, got {got}")]
    Kind { name: String, expected: &'static str, got: u32 },
    #[error("{name}: expected {expected} bytes, got {got}: the file is truncated")]
    Truncated { name: String, expected: u64, got: u64 },
    #[error("{name}: expected a trailer in the last 64 of {got} bytes, got none: the file is truncated")]
    NoTrailer { name: String, got: u64 },
    #[error("{name}: the checksum of the directory does not match, the file is damaged")]
    DirectoryChecksum { name: String },
    #[error("{name}: partition {partition}: the checksum does not match, the file is damaged")]
    BlockChecksum { name: String, partition: u32 },
    #[error("{name}: {what}")]
    Layout { name: String, what: String },
}

/// The directory entry of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The partition; a file has at most one entry for each.
    pub partition: u32,
    /// Epoch of the partition map under which the block was written.
    pub epoch: u64,
    /// Rows in the block.
    pub num_rows: u64,
    /// First byte of the block, a multiple of 64.
    pub offset: u64,
    /// Bytes of the block, without the padding behind it.
    pub length: u64,
    /// xxh3_64 of the block.
    pub checksum: u64,
    /// Two numbers whose meaning depends on the kind of file.
    pub aux: [u64; 2],
}

impl Entry {
    fn to_bytes(self) -> [u8; LINE] {
        let mut bytes = [0; LINE];
        put_u32(&mut bytes, 0, self.partition);
        let words = [self.epoch, self.num_rows, self.offset, self.length, self.checksum];
        for (i, word) in words.into_iter().chain(self.aux).enumerate() {
            put_u64(&mut bytes, 8 + 8 * i, word);
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; LINE]) -> Entry {
        Entry {
            partition: get_u32(bytes, 0),
            epoch: get_u64(bytes, 8),
            num_rows: get_u64(bytes, 16),
            offset: get_u64(bytes, 24),
            length: get_u64(bytes, 32),
            checksum: get_u64(bytes, 40),
            aux: [get_u64(bytes, 48), get_u64(bytes, 56)],
        }
    }
}

/// Returns the header; its first 16 bytes are also those of the trailer.
fn header(kind: Kind) -> [u8; LINE] {
    let mut bytes = [0; LINE];
    bytes[..8].copy_from_slice(&MAGIC);
    put_u32(&mut bytes, 8, FORMAT);
    put_u32(&mut bytes, 12, kind as u32);
    bytes
}

fn frame_checksum(header: &[u8; LINE], tail: &[u8]) -> u64 {
    let mut hash = Xxh3Default::new();
    hash.update(header);
    hash.update(tail);
    hash.digest()
}

fn name_of(path: &Path) -> String {
    path.display().to_string()
}

fn layout(name: &str, what: impl Into<String>) -> PartError {
    PartError::Layout { name: name.to_owned(), what: what.into() }
}

fn meta_too_long(got: u64) -> String {
    format!("meta: expected at most {MAX_META_BYTES} bytes, got {got}")
}

fn put_u32(line: &mut [u8; LINE], at: usize, value: u32) {
    line[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(line: &mut [u8; LINE], at: usize, value: u64) {
    line[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get_u32(line: &[u8; LINE], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| line[at + i]))
}

fn get_u64(line: &[u8; LINE], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| line[at + i]))
}
