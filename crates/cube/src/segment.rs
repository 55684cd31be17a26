//! Segments: the changes of one delta or of several merged ones in memory, rows and tombstones.
//!
//! Everything is in the order of the mixed signs, like in delta files: building a segment and merging two are sequential.

pub(crate) mod bucket;
mod build;
mod merge;

use std::io;
use std::ops::Range;

use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_read;

pub(crate) use build::build;
pub(crate) use merge::merge;

use crate::compare::{BUCKET_BYTES, Bucket, Compare, Scalar};
use crate::delta::Change;
use crate::filter::{Filter, bits_of};
use crate::memory::Memory;
use crate::search::{RowSink, prefetch_row, zeros};

/// Number of keys that are searched together; their state fits into the first-level cache.
pub(crate) const BLOCK: usize = 512;
/// Number of candidates whose memory accesses overlap.
const GROUP: usize = 32;

/// The mixed signs of a range of partitions, spread over the buckets of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeySpace {
    low: u64,
    /// The highest mixed sign minus `low`.
    span: u64,
    /// Shift that moves the highest bit of `span` to the top.
    shift: u32,
    num_partitions: u32,
}

/// Rows and tombstones with an index of buckets.
pub(crate) struct Segment {
    space: KeySpace,
    /// Factor from a position in `space` to a bucket.
    scale: u64,
    buckets: Memory,
    rows: Memory,
    row_bytes: usize,
    filter: Filter,
    whole: WholePartitions,
    num_signs: usize,
}

/// The partitions that a segment replaces as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WholePartitions {
    /// A bit for each partition of the table; empty if there is none.
    words: Vec<u64>,
}

/// State of a sign in a segment.
#[derive(Clone, Copy)]
pub(crate) enum SignState<'a> {
    Row(&'a [u8]),
    Removed,
    /// The segment does not change the sign; older segments and the base decide.
    Unknown,
}

/// A block of keys, and which of them no segment has decided yet.
pub(crate) struct PendingKeys<'a> {
    signs: &'a [u64],
    mixed: [u64; BLOCK],
    /// Filter bits of the signs.
    bits: [u64; BLOCK],
    /// Indices in `signs` of the pending keys, below `BLOCK`.
    indices: [u16; BLOCK],
    count: usize,
    /// Keys that the current segment may have.
    candidates: [u16; BLOCK],
}

impl<'a> PendingKeys<'a> {
    /// Starts with all of `signs`, at most `BLOCK`.
    #[inline(always)]
    pub(crate) fn new(signs: &'a [u64]) -> PendingKeys<'a> {
        let (mut mixed, mut bits) = ([0; BLOCK], [0; BLOCK]);
        for (at, sign) in signs.iter().enumerate().take(BLOCK) {
            mixed[at] = mix(*sign);
            bits[at] = bits_of(mixed[at]);
        }
        let indices = std::array::from_fn(|index| index as u16);
        PendingKeys { signs, mixed, bits, indices, count: signs.len().min(BLOCK), candidates: [0; BLOCK] }
    }

    /// Indices of the keys that are left.
    #[inline(always)]
    pub(crate) fn indices(&self) -> &[u16] {
        &self.indices[..self.count]
    }

    #[inline(always)]
    fn mixed(&self, index: u16) -> u64 {
        self.mixed[usize::from(index) % BLOCK]
    }
}

impl KeySpace {
    pub(crate) fn new(partitions: &Range<u32>, num_partitions: u32) -> KeySpace {
        // The first mixed sign of a partition, or 2^64.
        let first = |partition: u32| (u128::from(partition) << 64).div_ceil(u128::from(num_partitions.max(1)));
        let (low, end) = (first(partitions.start), first(partitions.end));
        let span = end.saturating_sub(low).saturating_sub(1) as u64;
        KeySpace { low: low as u64, span, shift: span.leading_zeros().min(63), num_partitions }
    }

    #[inline]
    pub(crate) fn partition_of(&self, mixed: u64) -> u32 {
        partition_of_mixed(mixed, self.num_partitions)
    }

    /// Returns the scale for about `num_buckets` buckets.
    fn scale(&self, num_buckets: usize) -> u64 {
        let used = u128::from(self.span << self.shift).max(1);
        (((num_buckets as u128) << 64) / used).min(u128::from(u64::MAX)) as u64
    }

    /// Returns the bucket where the search for a sign starts; for signs of other partitions, which have no row here, an
    /// arbitrary bucket.
    #[inline]
    fn home(&self, mixed: u64, scale: u64) -> usize {
        let index = mixed.wrapping_sub(self.low) << self.shift;
        ((u128::from(index) * u128::from(scale)) >> 64) as usize
    }
}

impl WholePartitions {
    pub(crate) fn insert(&mut self, partition: u32) {
        let word = partition as usize / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (partition % 64);
    }

    #[inline]
    pub(crate) fn contains(&self, partition: u32) -> bool {
        self.words.get(partition as usize / 64).is_some_and(|word| word >> (partition % 64) & 1 == 1)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    fn union(&self, other: &WholePartitions) -> WholePartitions {
        let mut union = self.clone();
        union.words.resize(self.words.len().max(other.words.len()), 0);
        union.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
        union
    }
}

impl Segment {
    /// Number of signs, with a row or removed.
    pub(crate) fn num_signs(&self) -> usize {
        self.num_signs
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.len() + self.rows.len() + self.filter.bytes()
    }

    /// Returns the state of one sign.
    pub(crate) fn get(&self, sign: u64) -> SignState<'_> {
        let mixed = mix(sign);
        let may_have = self.filter.may_have(mixed, bits_of(mixed));
        let found = if may_have { self.find::<Scalar>(mixed, sign) } else { SignState::Unknown };
        match found {
            SignState::Unknown if self.whole.contains(self.space.partition_of(mixed)) => SignState::Removed,
            state => state,
        }
    }

    /// Decides the keys of a block that the segment changes and leaves the rest pending; returns the number of rows found.
    #[inline(always)]
    pub(crate) fn search<C: Compare>(&self, pending: &mut PendingKeys<'_>, sink: &mut impl RowSink) -> usize {
        let num_candidates = self.sift(pending);
        let mut hits = 0;
        for start in (0..num_candidates).step_by(GROUP) {
            hits += self.search_group::<C>(pending, start..num_candidates.min(start + GROUP), sink);
        }
        self.decide_whole(pending, sink);
        hits
    }

    /// Prefetches the buckets of some candidates, then searches them and prefetches the rows, then hands the rows over.
    #[inline(always)]
    fn search_group<C: Compare>(
        &self,
        pending: &mut PendingKeys<'_>,
        group: Range<usize>,
        sink: &mut impl RowSink,
    ) -> usize {
        let mut hits = 0;
        for &index in &pending.candidates[group.clone()] {
            self.prefetch_bucket(pending.mixed(index));
        }
        let mut found = [SignState::Unknown; GROUP];
        for (state, &index) in found.iter_mut().zip(&pending.candidates[group.clone()]) {
            *state = self.find::<C>(pending.mixed(index), pending.signs[usize::from(index)]);
            if let SignState::Row(row) = state {
                prefetch_row(row);
            }
        }
        for (state, at) in found.iter().zip(group) {
            let index = pending.candidates[at];
            match state {
                SignState::Row(row) => {
                    sink.put(usize::from(index), row, true);
                    hits += 1;
                }
                SignState::Removed => sink.put(usize::from(index), zeros(self.row_bytes), false),
                SignState::Unknown => {
                    pending.indices[pending.count] = index;
                    pending.count += 1;
                }
            }
        }
        hits
    }

    /// Splits the pending keys by the filter; returns the number of candidates.
    #[inline(always)]
    fn sift(&self, pending: &mut PendingKeys<'_>) -> usize {
        if self.filter.is_large() {
            for &index in pending.indices() {
                self.filter.prefetch(pending.mixed(index));
            }
        }
        let (mut num_candidates, mut num_kept) = (0, 0);
        for at in 0..pending.count.min(BLOCK) {
            let index = pending.indices[at];
            let may_have = self.filter.may_have(pending.mixed(index), pending.bits[usize::from(index) % BLOCK]);
            // Both lists are written and one counter grows: this avoids a mispredicted branch.
            pending.candidates[num_candidates % BLOCK] = index;
            pending.indices[num_kept % BLOCK] = index;
            num_candidates += usize::from(may_have);
            num_kept += usize::from(!may_have);
        }
        pending.count = num_kept;
        num_candidates
    }

    /// Decides the keys of partitions that the segment replaces as a whole: they have no row.
    fn decide_whole(&self, pending: &mut PendingKeys<'_>, sink: &mut impl RowSink) {
        if self.whole.is_empty() {
            return;
        }
        let mut num_kept = 0;
        for at in 0..pending.count {
            let index = pending.indices[at];
            if self.whole.contains(self.space.partition_of(pending.mixed(index))) {
                sink.put(usize::from(index), zeros(self.row_bytes), false);
            } else {
                pending.indices[num_kept] = index;
                num_kept += 1;
            }
        }
        pending.count = num_kept;
    }

    /// Iterates over the signs of a partition that have a row, in order.
    pub(crate) fn rows_of(&self, partition: u32) -> impl Iterator<Item = (u64, &[u8])> {
        let first = KeySpace::new(&(partition..partition + 1), self.space.num_partitions).low;
        let home = self.space.home(first, self.scale).min(self.num_buckets());
        let changes = self.changes_from(home).skip_while(move |change| change.mixed < first);
        let in_partition = move |change: &Change<'_>| self.space.partition_of(change.mixed) == partition;
        changes.take_while(in_partition).filter_map(|change| Some((change.sign, change.row?)))
    }

    /// Whether the segment replaces a partition as a whole.
    pub(crate) fn is_whole(&self, partition: u32) -> bool {
        self.whole.contains(partition)
    }

    /// Iterates over all changes in order.
    pub(crate) fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        self.changes_from(0)
    }

    fn changes_from(&self, first: usize) -> impl Iterator<Item = Change<'_>> {
        self.all_buckets()[first..].iter().flat_map(move |bucket| {
            (0..bucket::count(bucket)).map(move |slot| {
                let sign = bucket::sign_at(bucket, slot);
                Change { mixed: mix(sign), sign, row: self.row_at(bucket, slot) }
            })
        })
    }

    fn num_buckets(&self) -> usize {
        self.buckets.len() / BUCKET_BYTES
    }

    #[inline]
    fn all_buckets(&self) -> &[Bucket] {
        self.buckets.as_chunks().0
    }

    #[inline]
    fn prefetch_bucket(&self, mixed: u64) {
        if let Some(bucket) = self.all_buckets().get(self.space.home(mixed, self.scale)) {
            prefetch_read(bucket);
        }
    }

    #[inline(always)]
    fn find<C: Compare>(&self, mixed: u64, sign: u64) -> SignState<'_> {
        let home = self.space.home(mixed, self.scale);
        for bucket in self.all_buckets().iter().skip(home) {
            if let Some(slot) = bucket::slot_of::<C>(bucket, sign) {
                return self.row_at(bucket, slot).map_or(SignState::Removed, SignState::Row);
            }
            if !bucket::overflowed(bucket) {
                break;
            }
        }
        SignState::Unknown
    }

    /// Returns the row of a slot, or None for a tombstone.
    #[inline]
    fn row_at(&self, bucket: &Bucket, slot: usize) -> Option<&[u8]> {
        let number = bucket::row_of(bucket, slot)?;
        self.rows.get(number as usize * self.row_bytes..)?.get(..self.row_bytes)
    }
}

/// The error of a failed allocation.
pub(crate) fn no_memory(bytes: usize, source: io::Error) -> crate::CubeError {
    crate::CubeError::Memory { bytes, source }
}
