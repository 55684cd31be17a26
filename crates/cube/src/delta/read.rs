//! Reads delta files; every byte is checked before it is used.

use std::ops::Range;
use std::path::Path;

use elasticrec_table::part::{Kind, PartFile};
use elasticrec_table::partition::{mix, partition_of_mixed};

use super::{PARTITION_BYTES, SIGN_BYTES};
use crate::CubeError;
use crate::meta::Meta;

/// One part of a delta, mapped and checked.
pub struct DeltaFile {
    part: PartFile,
    meta: Meta,
    record_bytes: usize,
    num_rows: usize,
    num_removed: usize,
    whole: Vec<u32>,
}

/// A change of one sign: its new row, or None if it was removed.
#[derive(Clone, Copy)]
pub(crate) struct Change<'a> {
    pub(crate) mixed: u64,
    pub(crate) sign: u64,
    pub(crate) row: Option<&'a [u8]>,
}

impl Change<'_> {
    /// A tombstone.
    pub(crate) fn removed(sign: u64) -> Change<'static> {
        Change { mixed: mix(sign), sign, row: None }
    }
}

/// The changes of one partition in a delta.
pub(crate) struct Run {
    pub(crate) partition: u32,
    pub(crate) is_whole: bool,
    changed: Range<usize>,
    removed: Range<usize>,
}

impl DeltaFile {
    /// Opens a part file and reads it through to check it.
    pub fn open(path: impl AsRef<Path>) -> Result<DeltaFile, CubeError> {
        DeltaFile::from_part(PartFile::open(path)?)
    }

    /// Like [`open`](DeltaFile::open), for a part file that is open already.
    pub fn from_part(part: PartFile) -> Result<DeltaFile, CubeError> {
        part.expect_kind(Kind::CubeDelta)?;
        let wrong = |what: String| CubeError::Delta { name: part.name().to_owned(), what };
        let [entry] = part.entries() else {
            return Err(wrong(format!("expected 1 block, got {}", part.entries().len())));
        };
        if entry.partition != 0 {
            return Err(wrong(format!("expected block 0, got {}", entry.partition)));
        }
        let meta = Meta::parse(part.name(), part.meta())?;
        let record_bytes = SIGN_BYTES + meta.codec().row_bytes();
        let (num_rows, [num_removed, num_whole]) = (entry.num_rows, entry.aux);
        let sizes = [(num_rows, record_bytes), (num_removed, SIGN_BYTES), (num_whole, PARTITION_BYTES)];
        let sum = |sum: u64, (count, bytes): (u64, usize)| sum.checked_add(count.checked_mul(bytes as u64)?);
        // Numbers that add up to the length of a mapped file fit into a usize.
        if sizes.into_iter().try_fold(0_u64, sum) != Some(entry.length) {
            let got = format!("{num_rows} rows, {num_removed} removed signs and {num_whole} whole partitions");
            return Err(wrong(format!("expected a block of {} bytes, got {got}", entry.length)));
        }
        if num_rows + num_removed > u64::from(u32::MAX) {
            return Err(wrong(format!("expected fewer than 2^32 signs, got {}", num_rows + num_removed)));
        }
        part.verify_block(0)?;
        let (num_rows, num_removed) = (num_rows as usize, num_removed as usize);
        let mut delta = DeltaFile { part, meta, record_bytes, num_rows, num_removed, whole: Vec::new() };
        delta.whole = delta.read_whole();
        let checked = delta.check();
        checked.map_err(|what| CubeError::Delta { name: delta.name().to_owned(), what })?;
        Ok(delta)
    }

    /// The path of the file, for messages.
    pub fn name(&self) -> &str {
        self.part.name()
    }

    /// Partitions of the table.
    pub fn num_partitions(&self) -> u32 {
        self.part.num_partitions()
    }

    pub(crate) fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns the changes of each partition of `range` that has any, in ascending order.
    pub(crate) fn runs(&self, range: &Range<u32>) -> Vec<Run> {
        let partition_of = |mixed| partition_of_mixed(mixed, self.num_partitions());
        let changed_in = |at: usize| partition_of(mix(self.sign(at)));
        let removed_in = |at: usize| partition_of(mix(self.removed(at)));
        let mut changed = first_where(0..self.num_rows, |at| changed_in(at) >= range.start);
        let mut removed = first_where(0..self.num_removed, |at| removed_in(at) >= range.start);
        let mut whole = self.whole.partition_point(|partition| *partition < range.start);
        let mut runs = Vec::new();
        loop {
            let next_changed = (changed < self.num_rows).then(|| changed_in(changed));
            let next_removed = (removed < self.num_removed).then(|| removed_in(removed));
            let next_whole = self.whole.get(whole).copied();
            let next = [next_changed, next_removed, next_whole].into_iter().flatten().min();
            let Some(partition) = next.filter(|partition| range.contains(partition)) else {
                return runs;
            };
            let changed_end = first_where(changed..self.num_rows, |at| changed_in(at) > partition);
            let removed_end = first_where(removed..self.num_removed, |at| removed_in(at) > partition);
            let is_whole = next_whole == Some(partition);
            runs.push(Run { partition, is_whole, changed: changed..changed_end, removed: removed..removed_end });
            (changed, removed) = (changed_end, removed_end);
            whole += usize::from(is_whole);
        }
    }

    /// Iterates over the changes of a run in the order of their mixed signs.
    pub(crate) fn changes(&self, run: &Run) -> impl Iterator<Item = Change<'_>> {
        let record = |at: usize| {
            let (sign, row) = self.record(at);
            Change { mixed: mix(sign), sign, row: Some(row) }
        };
        let mut changed = run.changed.clone().map(record).peekable();
        let mut removed = run.removed.clone().map(|at| Change::removed(self.removed(at))).peekable();
        std::iter::from_fn(move || {
            let removed_is_next = match (changed.peek(), removed.peek()) {
                (Some(changed), Some(removed)) => removed.mixed < changed.mixed,
                (None, Some(_)) => true,
                _ => false,
            };
            if removed_is_next { removed.next() } else { changed.next() }
        })
    }

    #[inline]
    fn record(&self, at: usize) -> (u64, &[u8]) {
        let record = &self.block()[at * self.record_bytes..][..self.record_bytes];
        let (sign, row) = record.split_at(SIGN_BYTES);
        (get_u64(sign), row)
    }

    #[inline]
    fn sign(&self, at: usize) -> u64 {
        self.record(at).0
    }

    #[inline]
    fn removed(&self, at: usize) -> u64 {
        get_u64(&self.block()[self.num_rows * self.record_bytes + at * SIGN_BYTES..][..SIGN_BYTES])
    }

    fn read_whole(&self) -> Vec<u32> {
        let start = self.num_rows * self.record_bytes + self.num_removed * SIGN_BYTES;
        self.block()[start..].as_chunks().0.iter().map(|four| u32::from_le_bytes(*four)).collect()
    }

    fn block(&self) -> &[u8] {
        self.part.block(0)
    }

    /// Checks that rows, removed signs and whole partitions are in order, unique and without contradictions.
    fn check(&self) -> Result<(), String> {
        let ascends = |pair: &[u32]| pair[0] < pair[1];
        let limit = self.num_partitions();
        if !self.whole.windows(2).all(ascends) || self.whole.last().is_some_and(|last| *last >= limit) {
            return Err("whole partitions: out of order or beyond the number of partitions".to_owned());
        }
        check_order("rows", (0..self.num_rows).map(|at| self.sign(at)))?;
        check_order("removed", (0..self.num_removed).map(|at| self.removed(at)))?;
        let mut rows = (0..self.num_rows).map(|at| mix(self.sign(at))).peekable();
        for at in 0..self.num_removed {
            let sign = self.removed(at);
            let mixed = mix(sign);
            while rows.next_if(|row| *row < mixed).is_some() {}
            if rows.peek() == Some(&mixed) {
                return Err(format!("sign {sign} is both changed and removed"));
            }
            let partition = partition_of_mixed(mixed, limit);
            if self.whole.binary_search(&partition).is_ok() {
                return Err(format!("sign {sign} is removed from partition {partition}, which is replaced as a whole"));
            }
        }
        Ok(())
    }
}

fn check_order(what: &str, signs: impl Iterator<Item = u64>) -> Result<(), String> {
    let mut last = None;
    for (at, sign) in signs.enumerate() {
        let mixed = mix(sign);
        if last.is_some_and(|last| last >= mixed) {
            return Err(format!("{what}: sign {sign} at {at} is out of order or repeated"));
        }
        last = Some(mixed);
    }
    Ok(())
}

/// Returns the first index of `range` for which `is_beyond` holds, or the end; a binary search.
fn first_where(range: Range<usize>, is_beyond: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_beyond(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

#[inline]
fn get_u64(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}
