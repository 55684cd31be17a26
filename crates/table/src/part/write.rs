//! Writing part files: one sequential pass that computes both checksums.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::Xxh3Default;

use super::{
    Entry, Kind, LINE, MAX_META_BYTES, NO_PARTITIONS, PartError, frame_checksum, header, layout, meta_too_long,
    name_of, put_u32, put_u64,
};

/// Small enough to stay in the second-level cache during the copy, the two hashes and the write.
const BUFFER_BYTES: usize = 256 << 10;

/// Size and checksum of a finished file, for the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Size of the file.
    pub bytes: u64,
    /// SHA-256 of the file in lower-case hex.
    pub sha256: String,
}

/// Writes a part file sequentially.
///
/// Partitions must be in ascending order. A writer that is dropped before [`finish`](PartWriter::finish) leaves a file
/// without a trailer, which readers reject.
pub struct PartWriter {
    file: File,
    path: PathBuf,
    kind: Kind,
    num_partitions: u32,
    entries: Vec<Entry>,
    /// Partition and first byte of the block being written.
    open_block: Option<(u32, u64)>,
    block_hash: Xxh3Default,
    file_hash: Sha256,
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that are already in `block_hash` or belong to no block.
    num_hashed: usize,
    position: u64,
}

impl PartWriter {
    /// Creates the file; an existing file is an error, because a reader may have mapped it.
    pub fn create(path: impl AsRef<Path>, kind: Kind, num_partitions: u32) -> Result<PartWriter, PartError> {
        let path = path.as_ref();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|source| PartError::Io { name: name_of(path), source })?;
        PartWriter::for_file(file, path, kind, num_partitions)
    }

    pub(super) fn for_file(file: File, path: &Path, kind: Kind, num_partitions: u32) -> Result<PartWriter, PartError> {
        if num_partitions == 0 {
            return Err(layout(&name_of(path), NO_PARTITIONS));
        }
        let mut writer = PartWriter {
            file,
            path: path.to_owned(),
            kind,
            num_partitions,
            entries: Vec::new(),
            open_block: None,
            block_hash: Xxh3Default::new(),
            file_hash: Sha256::new(),
            buffer: Vec::with_capacity(BUFFER_BYTES),
            num_hashed: 0,
            position: 0,
        };
        writer.put(&header(kind))?;
        Ok(writer)
    }

    /// Begins the block of a partition, which must be higher than the previous one.
    ///
    /// # Panics
    /// If the previous block was not ended.
    pub fn begin_block(&mut self, partition: u32) -> Result<(), PartError> {
        assert!(self.open_block.is_none(), "end_block comes before the next begin_block");
        let lowest = self.entries.last().map_or(0, |entry| u64::from(entry.partition) + 1);
        if u64::from(partition) < lowest || partition >= self.num_partitions {
            let what = format!("expected a partition from {lowest} to {}, got {partition}", self.num_partitions - 1);
            return Err(layout(&name_of(&self.path), what));
        }
        self.open_block = Some((partition, self.position));
        self.block_hash.reset();
        self.num_hashed = self.buffer.len();
        Ok(())
    }

    /// Adds bytes to the block.
    ///
    /// # Panics
    /// If no block was begun.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), PartError> {
        assert!(self.open_block.is_some(), "begin_block comes before write");
        self.put(bytes)
    }

    /// Ends the block and adds it to the directory.
    ///
    /// # Panics
    /// If no block was begun.
    pub fn end_block(&mut self, num_rows: u64, aux: [u64; 2]) -> Result<(), PartError> {
        let (partition, offset) = self.open_block.take().expect("begin_block comes before end_block");
        self.block_hash.update(&self.buffer[self.num_hashed..]);
        self.entries.push(Entry {
            partition,
            epoch: 0,
            num_rows,
            offset,
            length: self.position - offset,
            checksum: self.block_hash.digest(),
            aux,
        });
        self.put(&[0; LINE][..padding(self.position)])
    }

    /// Writes meta, directory and trailer, and syncs the file.
    ///
    /// The directory that contains the file is not synced; that is the job of the manifest's writer.
    ///
    /// # Panics
    /// If the last block was not ended.
    pub fn finish(mut self, meta: &Value) -> Result<FileInfo, PartError> {
        assert!(self.open_block.is_none(), "end_block comes before finish");
        let name = name_of(&self.path);
        let mut tail = serde_json::to_vec(meta).map_err(|error| layout(&name, format!("meta: {error}")))?;
        let meta_bytes = tail.len();
        if meta_bytes > MAX_META_BYTES {
            return Err(layout(&name, meta_too_long(meta_bytes as u64)));
        }
        tail.resize(meta_bytes.next_multiple_of(LINE), 0);
        let directory_offset = self.position + tail.len() as u64;
        for entry in &self.entries {
            tail.extend_from_slice(&entry.to_bytes());
        }
        let mut trailer = header(self.kind);
        put_u64(&mut trailer, 16, self.position);
        put_u64(&mut trailer, 24, meta_bytes as u64);
        put_u64(&mut trailer, 32, directory_offset);
        put_u32(&mut trailer, 40, self.entries.len() as u32);
        put_u32(&mut trailer, 44, self.num_partitions);
        tail.extend_from_slice(&trailer[..LINE - 8]);
        let checksum = frame_checksum(&header(self.kind), &tail);
        tail.extend_from_slice(&checksum.to_le_bytes());

        self.put(&tail)?;
        self.flush()?;
        self.file.sync_all().map_err(|source| PartError::Io { name, source })?;
        let digest = self.file_hash.finalize();
        let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(FileInfo { bytes: self.position, sha256 })
    }

    #[inline]
    fn put(&mut self, mut bytes: &[u8]) -> Result<(), PartError> {
        self.position += bytes.len() as u64;
        while self.buffer.len() + bytes.len() > BUFFER_BYTES {
            let (now, later) = bytes.split_at(BUFFER_BYTES - self.buffer.len());
            self.buffer.extend_from_slice(now);
            self.flush()?;
            bytes = later;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), PartError> {
        if self.open_block.is_some() {
            self.block_hash.update(&self.buffer[self.num_hashed..]);
        }
        self.file_hash.update(&self.buffer);
        self.file.write_all(&self.buffer).map_err(|source| PartError::Io { name: name_of(&self.path), source })?;
        self.buffer.clear();
        self.num_hashed = 0;
        Ok(())
    }
}

fn padding(position: u64) -> usize {
    (position.next_multiple_of(LINE as u64) - position) as usize
}
