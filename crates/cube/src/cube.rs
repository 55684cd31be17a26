//! The base of a version: checked part files, mapped or loaded into memory, with the offsets of each partition.

use std::ops::Range;
use std::path::PathBuf;

use elasticrec_table::part::{Kind, PartFile};

use crate::block::{Shape, wrong};
use crate::compare::{BUCKET_BYTES, Compare};
use crate::index::{self, SIGN_BYTES};
use crate::memory::Memory;
use crate::meta::Meta;
use crate::row::RowCodec;
use crate::search::{Keys, RowSink, Search};
use crate::{Column, CubeError};

/// The rows of a table, or of some of its partitions, read-only, from one or more part files.
pub struct Cube {
    backing: Backing,
    meta: Meta,
    codec: RowCodec,
    num_partitions: u32,
    /// The partitions that this cube holds.
    range: Range<u32>,
    partitions: Vec<Partition>,
}

/// The location of the bytes.
enum Backing {
    /// In mapped files, whose memory the system can reclaim.
    Mapped(Vec<PartFile>),
    /// Copied into memory, on huge pages if the system has them, which makes lookups faster.
    Loaded(Memory),
}

/// Offsets of a partition; 32 bytes, so that all partitions of a usual table stay in the first-level cache.
#[derive(Clone, Copy)]
pub(crate) struct Partition {
    part: u32,
    pub(crate) num_buckets: u32,
    /// Most buckets between a sign's home bucket and its bucket.
    pub(crate) max_steps: u32,
    num_rows: u32,
    pub(crate) index_offset: usize,
    pub(crate) records_offset: usize,
}

/// A partition without rows, for the partitions that a cube does not hold.
pub(crate) const NONE: Partition =
    Partition { part: 0, num_buckets: 0, max_steps: 0, num_rows: 0, index_offset: 0, records_offset: 0 };

/// The bytes that the offsets of a partition refer to.
pub(crate) trait Blocks<'a>: Copy {
    fn bytes_of(self, partition: &Partition) -> &'a [u8];

    /// Whether the bytes cannot change after they were checked.
    const ARE_OWN: bool;
}

impl<'a> Blocks<'a> for &'a [PartFile] {
    const ARE_OWN: bool = false;

    #[inline]
    fn bytes_of(self, partition: &Partition) -> &'a [u8] {
        self.get(partition.part as usize).map_or(&[], PartFile::bytes)
    }
}

impl<'a> Blocks<'a> for &'a [u8] {
    const ARE_OWN: bool = true;

    #[inline]
    fn bytes_of(self, _: &Partition) -> &'a [u8] {
        self
    }
}

impl Cube {
    /// Maps and checks part files that together hold every partition once.
    pub fn open(paths: &[PathBuf]) -> Result<Cube, CubeError> {
        Cube::from_parts(open_all(paths)?)
    }

    /// Maps and checks the partitions of `range`; other partitions of the files are not read.
    pub fn open_range(paths: &[PathBuf], range: Range<u32>) -> Result<Cube, CubeError> {
        Cube::mapped(open_all(paths)?, Some(range))
    }

    /// Like [`open_range`](Cube::open_range), or [`open`](Cube::open) without a range, but copies the partitions into
    /// memory, which makes lookups faster. The copy is checked, not the file.
    pub fn load(paths: &[PathBuf], range: Option<Range<u32>>) -> Result<Cube, CubeError> {
        Cube::loaded(&open_all(paths)?, range)
    }

    fn loaded(parts: &[PartFile], range: Option<Range<u32>>) -> Result<Cube, CubeError> {
        let mut cube = Cube::unchecked(parts, range)?;
        let shapes = cube.shapes(parts)?;
        let bytes = shapes.iter().map(|(.., shape)| shape.bytes().next_multiple_of(BUCKET_BYTES)).sum();
        let mut memory = Memory::zeroed(bytes).map_err(|source| CubeError::Memory { bytes, source })?;
        let mut offset = 0;
        for (_, file, i, shape) in shapes {
            let copy = &mut memory[offset..][..shape.bytes()];
            shape.read(file, i, copy)?;
            let partition = Partition::check(file, i, &shape, copy)?;
            cube.set_partition(file.entries()[i].partition, partition.at(0, offset));
            offset += copy.len().next_multiple_of(BUCKET_BYTES);
        }
        cube.backing = Backing::Loaded(memory);
        Ok(cube)
    }

    /// Like [`open`](Cube::open), for part files that are open already.
    pub fn from_parts(parts: Vec<PartFile>) -> Result<Cube, CubeError> {
        Cube::mapped(parts, None)
    }

    fn mapped(parts: Vec<PartFile>, range: Option<Range<u32>>) -> Result<Cube, CubeError> {
        let mut cube = Cube::unchecked(&parts, range.clone())?;
        let shapes = cube.shapes(&parts)?;
        if shapes.iter().any(|(.., shape)| shape.is_previous_layout()) {
            // Blocks of the previous layout are converted in memory.
            return Cube::loaded(&parts, range);
        }
        for (part, file, i, shape) in shapes {
            file.verify_block(i)?;
            let partition = Partition::check(file, i, &shape, file.block(i))?;
            let entry = file.entries()[i];
            cube.set_partition(entry.partition, partition.at(part, entry.offset as usize));
        }
        cube.backing = Backing::Mapped(parts);
        Ok(cube)
    }

    /// Returns the blocks of the cube's partitions: number of the file, file, number of the block, and shape.
    fn shapes<'a>(&self, parts: &'a [PartFile]) -> Result<Vec<(u32, &'a PartFile, usize, Shape)>, CubeError> {
        let blocks = (0_u32..).zip(parts).flat_map(|(part, file)| {
            let numbered = file.entries().iter().enumerate();
            let own = numbered.filter(|(_, entry)| self.range.contains(&entry.partition));
            own.map(move |(i, _)| (part, file, i))
        });
        let row_bytes = self.codec.row_bytes();
        blocks.map(|(part, file, i)| Ok((part, file, i, Shape::of(file, i, row_bytes)?))).collect()
    }

    /// Creates a cube of the partitions in `range`, whose offsets are set later.
    fn unchecked(parts: &[PartFile], range: Option<Range<u32>>) -> Result<Cube, CubeError> {
        let meta = common_meta(parts)?;
        let num_partitions = parts.first().map_or(0, PartFile::num_partitions);
        let range = range.unwrap_or(0..num_partitions);
        if range.start > range.end || range.end > num_partitions {
            return Err(CubeError::Range { start: range.start, end: range.end, num_partitions });
        }
        check_directory(parts, &range)?;
        Ok(Cube::empty(&meta, num_partitions, range))
    }

    /// Creates a cube without rows.
    pub(crate) fn empty(meta: &Meta, num_partitions: u32, range: Range<u32>) -> Cube {
        let partitions = vec![NONE; range.len()];
        let backing = Backing::Mapped(Vec::new());
        Cube { backing, meta: meta.clone(), codec: meta.codec(), num_partitions, range, partitions }
    }

    fn set_partition(&mut self, number: u32, partition: Partition) {
        self.partitions[(number - self.range.start) as usize] = partition;
    }

    /// Hands the stored row of each key to `sink`, in any order; returns the number of keys with a row.
    #[inline(always)]
    pub(crate) fn search_all<C: Compare>(&self, keys: &impl Keys, sink: &mut impl RowSink) -> usize {
        match &self.backing {
            Backing::Mapped(parts) => self.search(&parts[..]).all::<C>(keys, sink),
            Backing::Loaded(memory) => self.search(&memory[..]).all::<C>(keys, sink),
        }
    }

    /// Returns the stored row of one sign.
    pub(crate) fn get(&self, sign: u64) -> Option<&[u8]> {
        match &self.backing {
            Backing::Mapped(parts) => self.search(&parts[..]).one(sign),
            Backing::Loaded(memory) => self.search(&memory[..]).one(sign),
        }
    }

    #[inline(always)]
    fn search<'a, B: Blocks<'a>>(&'a self, blocks: B) -> Search<'a, B> {
        Search {
            blocks,
            partitions: &self.partitions,
            first: self.range.start,
            num_partitions: self.num_partitions,
            record_bytes: self.record_bytes(),
        }
    }

    /// Iterates over all signs with their stored rows, partition by partition.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.range.clone().flat_map(|partition| self.rows_of(partition))
    }

    /// Iterates over the signs of a partition with their stored rows; empty if the cube does not hold it.
    pub fn rows_of(&self, partition: u32) -> impl Iterator<Item = (u64, &[u8])> {
        let partition = self.partition(partition);
        let bytes = match &self.backing {
            Backing::Mapped(parts) => parts[..].bytes_of(partition),
            Backing::Loaded(memory) => memory[..].bytes_of(partition),
        };
        let records = bytes.get(partition.records_offset..).unwrap_or_default().chunks_exact(self.record_bytes());
        records.take(partition.num_rows as usize).map(|record| (index::sign_of(record), &record[SIGN_BYTES..]))
    }

    fn record_bytes(&self) -> usize {
        SIGN_BYTES + self.codec.row_bytes()
    }

    /// Number of rows in one partition.
    pub(crate) fn num_rows_of(&self, partition: u32) -> u64 {
        u64::from(self.partition(partition).num_rows)
    }

    /// The encoding of the rows.
    pub fn codec(&self) -> &RowCodec {
        &self.codec
    }

    /// The columns of a row.
    pub fn columns(&self) -> &[Column] {
        &self.meta.columns
    }

    pub(crate) fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Partitions of the table.
    pub fn num_partitions(&self) -> u32 {
        self.num_partitions
    }

    /// The partitions that this cube holds.
    pub fn partitions(&self) -> Range<u32> {
        self.range.clone()
    }

    /// Bytes of index and rows in the cube's partitions.
    pub fn bytes(&self) -> u64 {
        let record_bytes = self.record_bytes() as u64;
        let bytes_of = |partition: &Partition| {
            u64::from(partition.num_buckets) * BUCKET_BYTES as u64 + u64::from(partition.num_rows) * record_bytes
        };
        self.partitions.iter().map(bytes_of).sum()
    }

    /// The memory of a loaded cube; empty for a mapped one.
    pub fn memory(&self) -> &[u8] {
        match &self.backing {
            Backing::Mapped(_) => &[],
            Backing::Loaded(memory) => memory,
        }
    }

    fn partition(&self, partition: u32) -> &Partition {
        self.partitions.get(partition.wrapping_sub(self.range.start) as usize).unwrap_or(&NONE)
    }
}

impl Partition {
    /// Checks the bytes of block `i`. Returns the partition with offsets from the start of the block.
    fn check(file: &PartFile, i: usize, shape: &Shape, block: &[u8]) -> Result<Partition, CubeError> {
        let (num_buckets, num_rows) = (shape.num_buckets(), shape.num_rows);
        let (index, records) = block.split_at(num_buckets as usize * BUCKET_BYTES);
        let records = records.chunks_exact(shape.record_bytes());
        let (partition, num_partitions) = (file.entries()[i].partition, file.num_partitions());
        let max_steps = index::check(index.as_chunks().0, records, partition, num_partitions);
        let max_steps = max_steps.map_err(|what| wrong(file, i, what))?;
        Ok(Partition { part: 0, num_buckets, max_steps, num_rows, index_offset: 0, records_offset: index.len() })
    }

    /// Returns the partition with its offsets moved into part `part` by `offset`.
    fn at(self, part: u32, offset: usize) -> Partition {
        let (index_offset, records_offset) = (self.index_offset + offset, self.records_offset + offset);
        Partition { part, index_offset, records_offset, ..self }
    }
}

/// Returns the meta of the parts, which must be the same in all of them.
fn common_meta(parts: &[PartFile]) -> Result<Meta, CubeError> {
    let Some(first) = parts.first() else {
        return Err(CubeError::NoParts);
    };
    first.expect_kind(Kind::Cube)?;
    let meta = Meta::parse(first.name(), first.meta())?;
    for part in &parts[1..] {
        part.expect_kind(Kind::Cube)?;
        let mismatch =
            |what| CubeError::PartMismatch { name: part.name().to_owned(), first: first.name().to_owned(), what };
        if Meta::parse(part.name(), part.meta())? != meta {
            return Err(mismatch("columns and row type"));
        }
        if part.num_partitions() != first.num_partitions() {
            return Err(mismatch("number of partitions"));
        }
    }
    Ok(meta)
}

/// Checks that the parts hold every partition at most once, and every partition of `range`.
fn check_directory(parts: &[PartFile], range: &Range<u32>) -> Result<(), CubeError> {
    let mut owners: Vec<(u32, &PartFile)> = Vec::new();
    for part in parts {
        owners.extend(part.entries().iter().map(|entry| (entry.partition, part)));
    }
    owners.sort_by_key(|(partition, _)| *partition);
    if let Some(pair) = owners.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let [(partition, first), (_, second)] = [pair[0], pair[1]];
        return Err(CubeError::DuplicatePartition {
            name: second.name().to_owned(),
            first: first.name().to_owned(),
            partition,
        });
    }
    // Each partition exists at most once, so the count shows whether any is missing.
    let missing = range.len() - owners.iter().filter(|(partition, _)| range.contains(partition)).count();
    if missing == 0 {
        return Ok(());
    }
    let is_there = |partition: &u32| owners.binary_search_by_key(partition, |(owned, _)| *owned).is_ok();
    let absent = range.clone().filter(|partition| !is_there(partition));
    let mut first: Vec<String> = absent.take(8).map(|partition| partition.to_string()).collect();
    if missing > 8 {
        first.push("…".to_owned());
    }
    Err(CubeError::Missing { num_files: parts.len(), expected: range.len(), missing, first: first.join(", ") })
}

fn open_all(paths: &[PathBuf]) -> Result<Vec<PartFile>, CubeError> {
    Ok(paths.iter().map(PartFile::open).collect::<Result<_, _>>()?)
}
