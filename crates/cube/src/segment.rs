//! The changes of one delta, or of several merged, in memory: rows and tombstones over whatever is older.
//!
//! Everything stands in the order of the mixed signs, that of delta files: a segment is built and two are merged by
//! reading and writing straight on.

pub(crate) mod bucket;
mod build;
mod merge;

use std::io;
use std::ops::Range;

use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_read;

pub(crate) use build::build;
pub(crate) use merge::merge;

use crate::compare::{BUCKET_BYTES, Bucket, Compare, Plain};
use crate::delta::Change;
use crate::filter::{Filter, bits_of};
use crate::memory::Memory;
use crate::search::{RowSink, prefetch_row, zeros};

/// Keys that go through the segments together; what is known of them fits into the first-level cache.
pub(crate) const BLOCK: usize = 512;
/// Candidates whose waits overlap.
const GROUP: usize = 32;

/// The mixed signs of a range of partitions, spread over the buckets of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeySpace {
    low: u64,
    /// The highest, less `low`.
    span: u64,
    /// Moves the highest bit of `span` to the top.
    shift: u32,
    num_partitions: u32,
}

/// Rows and tombstones, found like the rows of a cube.
pub(crate) struct Segment {
    space: KeySpace,
    /// Turns a place in `space` into a bucket.
    scale: u64,
    buckets: Memory,
    rows: Memory,
    row_bytes: usize,
    filter: Filter,
    whole: WholePartitions,
    num_signs: usize,
}

/// The partitions that a segment replaces whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WholePartitions {
    /// A bit for each partition of the table; no words if there is none.
    words: Vec<u64>,
}

/// What a segment says of a sign.
#[derive(Clone, Copy)]
pub(crate) enum SignState<'a> {
    Row(&'a [u8]),
    Removed,
    /// Older segments and the base know.
    Unknown,
}

/// A block of keys on its way down: those that no segment has said anything of yet.
pub(crate) struct Pending<'a> {
    signs: &'a [u64],
    mixed: [u64; BLOCK],
    /// What the filters are asked for.
    bits: [u64; BLOCK],
    /// Their places in `signs`, below `BLOCK`.
    places: [u16; BLOCK],
    count: usize,
    /// Those that a segment may have.
    candidates: [u16; BLOCK],
}

impl<'a> Pending<'a> {
    /// All of `signs`, at most `BLOCK`.
    #[inline(always)]
    pub(crate) fn new(signs: &'a [u64]) -> Pending<'a> {
        let (mut mixed, mut bits) = ([0; BLOCK], [0; BLOCK]);
        for (at, sign) in signs.iter().enumerate().take(BLOCK) {
            mixed[at] = mix(*sign);
            bits[at] = bits_of(mixed[at]);
        }
        let places = std::array::from_fn(|place| place as u16);
        Pending { signs, mixed, bits, places, count: signs.len().min(BLOCK), candidates: [0; BLOCK] }
    }

    /// The keys that are left.
    #[inline(always)]
    pub(crate) fn places(&self) -> &[u16] {
        &self.places[..self.count]
    }

    #[inline(always)]
    fn mixed(&self, place: u16) -> u64 {
        self.mixed[usize::from(place) % BLOCK]
    }
}

impl KeySpace {
    pub(crate) fn new(partitions: &Range<u32>, num_partitions: u32) -> KeySpace {
        // the first mixed sign of a partition, or 2^64
        let first = |partition: u32| (u128::from(partition) << 64).div_ceil(u128::from(num_partitions.max(1)));
        let (low, end) = (first(partitions.start), first(partitions.end));
        let span = end.saturating_sub(low).saturating_sub(1) as u64;
        KeySpace { low: low as u64, span, shift: span.leading_zeros().min(63), num_partitions }
    }

    #[inline]
    pub(crate) fn partition_of(&self, mixed: u64) -> u32 {
        partition_of_mixed(mixed, self.num_partitions)
    }

    /// The scale for about so many buckets.
    fn scale(&self, num_buckets: usize) -> u64 {
        let used = u128::from(self.span << self.shift).max(1);
        (((num_buckets as u128) << 64) / used).min(u128::from(u64::MAX)) as u64
    }

    /// Where the search for a sign starts. A sign of another range may start anywhere: it is found nowhere.
    #[inline]
    fn home(&self, mixed: u64, scale: u64) -> usize {
        let place = mixed.wrapping_sub(self.low) << self.shift;
        ((u128::from(place) * u128::from(scale)) >> 64) as usize
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
    /// Signs in it, with a row or removed.
    pub(crate) fn num_signs(&self) -> usize {
        self.num_signs
    }

    /// Memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.len() + self.rows.len() + self.filter.bytes()
    }

    /// What it says of one sign.
    pub(crate) fn get(&self, sign: u64) -> SignState<'_> {
        let mixed = mix(sign);
        let may_have = self.filter.may_have(mixed, bits_of(mixed));
        let says = if may_have { self.find::<Plain>(mixed, sign) } else { SignState::Unknown };
        match says {
            SignState::Unknown if self.whole.contains(self.space.partition_of(mixed)) => SignState::Removed,
            says => says,
        }
    }

    /// Answers what it can of a block and leaves the rest pending; returns how many rows it gave.
    #[inline(always)]
    pub(crate) fn search<C: Compare>(&self, pending: &mut Pending<'_>, sink: &mut impl RowSink) -> usize {
        let num_candidates = self.sift(pending);
        let mut hits = 0;
        for start in (0..num_candidates).step_by(GROUP) {
            hits += self.search_group::<C>(pending, start..num_candidates.min(start + GROUP), sink);
        }
        self.end_whole(pending, sink);
        hits
    }

    /// Asks for the buckets of some candidates, then searches them and asks for the rows, then hands these over.
    #[inline(always)]
    fn search_group<C: Compare>(
        &self,
        pending: &mut Pending<'_>,
        group: Range<usize>,
        sink: &mut impl RowSink,
    ) -> usize {
        let mut hits = 0;
        for &place in &pending.candidates[group.clone()] {
            self.prefetch_bucket(pending.mixed(place));
        }
        let mut found = [SignState::Unknown; GROUP];
        for (says, &place) in found.iter_mut().zip(&pending.candidates[group.clone()]) {
            *says = self.find::<C>(pending.mixed(place), pending.signs[usize::from(place)]);
            if let SignState::Row(row) = says {
                prefetch_row(row);
            }
        }
        for (says, at) in found.iter().zip(group) {
            let place = pending.candidates[at];
            match says {
                SignState::Row(row) => {
                    sink.put(usize::from(place), row, true);
                    hits += 1;
                }
                SignState::Removed => sink.put(usize::from(place), zeros(self.row_bytes), false),
                SignState::Unknown => {
                    pending.places[pending.count] = place;
                    pending.count += 1;
                }
            }
        }
        hits
    }

    /// Makes candidates of the keys that it may have.
    #[inline(always)]
    fn sift(&self, pending: &mut Pending<'_>) -> usize {
        if self.filter.is_large() {
            for &place in pending.places() {
                self.filter.prefetch(pending.mixed(place));
            }
        }
        let (mut num_candidates, mut num_kept) = (0, 0);
        for at in 0..pending.count.min(BLOCK) {
            let place = pending.places[at];
            let may_have = self.filter.may_have(pending.mixed(place), pending.bits[usize::from(place) % BLOCK]);
            // both are written and one counts: no branch that guesses wrong
            pending.candidates[num_candidates % BLOCK] = place;
            pending.places[num_kept % BLOCK] = place;
            num_candidates += usize::from(may_have);
            num_kept += usize::from(!may_have);
        }
        pending.count = num_kept;
        num_candidates
    }

    /// Nothing older counts for the partitions that are whole.
    fn end_whole(&self, pending: &mut Pending<'_>, sink: &mut impl RowSink) {
        if self.whole.is_empty() {
            return;
        }
        let mut num_kept = 0;
        for at in 0..pending.count {
            let place = pending.places[at];
            if self.whole.contains(self.space.partition_of(pending.mixed(place))) {
                sink.put(usize::from(place), zeros(self.row_bytes), false);
            } else {
                pending.places[num_kept] = place;
                num_kept += 1;
            }
        }
        pending.count = num_kept;
    }

    /// The signs of a partition that have a row, in order.
    pub(crate) fn rows_of(&self, partition: u32) -> impl Iterator<Item = (u64, &[u8])> {
        let first = KeySpace::new(&(partition..partition + 1), self.space.num_partitions).low;
        let home = self.space.home(first, self.scale).min(self.num_buckets());
        let changes = self.changes_from(home).skip_while(move |change| change.mixed < first);
        let in_partition = move |change: &Change<'_>| self.space.partition_of(change.mixed) == partition;
        changes.take_while(in_partition).filter_map(|change| Some((change.sign, change.row?)))
    }

    /// Whether it replaces the partition whole.
    pub(crate) fn is_whole(&self, partition: u32) -> bool {
        self.whole.contains(partition)
    }

    /// Everything in it, in order.
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

    /// The row of a slot, unless it is a tombstone.
    #[inline]
    fn row_at(&self, bucket: &Bucket, slot: usize) -> Option<&[u8]> {
        let number = bucket::row_of(bucket, slot)?;
        self.rows.get(number as usize * self.row_bytes..)?.get(..self.row_bytes)
    }
}

/// No room for a segment.
pub(crate) fn no_memory(bytes: usize, source: io::Error) -> crate::CubeError {
    crate::CubeError::Memory { bytes, source }
}
