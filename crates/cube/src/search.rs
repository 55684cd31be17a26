//! Searches a batch of keys in the partitions of a cube. Memory is prefetched, so that the cache misses of many keys overlap.

use std::hint::select_unpredictable as select;

use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_far;

use crate::compare::{BUCKET_BYTES, Bucket, Compare, Scalar};
use crate::cube::{Blocks, NONE, Partition};
use crate::index::{self, SIGN_BYTES};
use crate::meta::MAX_ROW_BYTES;

/// Keys of a wave: enough to hide memory latency, few enough for the cache lines that a core can have in flight.
const WAVE: usize = 32;
/// Cache lines of a row that are prefetched; the hardware prefetches the rest of longer rows.
const ROW_LINES_AHEAD: usize = 8;
const LINE: usize = 64;
/// The bucket of a partition without signs.
static EMPTY: Bucket = [0; BUCKET_BYTES];

/// Receives the rows of a search.
pub(crate) trait RowSink {
    /// Receives the row of key `i`, or zeros if it is absent. The last call for a key counts.
    fn put(&mut self, i: usize, row: &[u8], is_present: bool);
}

/// The keys of a search: for each its index in the answer, and its sign.
pub(crate) trait Keys {
    fn key(&self, at: usize) -> Option<(usize, u64)>;
}

/// All signs of a list.
pub(crate) struct AllKeys<'a>(pub(crate) &'a [u64]);

impl Keys for AllKeys<'_> {
    #[inline]
    fn key(&self, at: usize) -> Option<(usize, u64)> {
        self.0.get(at).map(|sign| (at, *sign))
    }
}

/// Some signs of a list.
pub(crate) struct SelectedKeys<'a> {
    pub(crate) signs: &'a [u64],
    pub(crate) indices: &'a [u16],
}

impl Keys for SelectedKeys<'_> {
    #[inline]
    fn key(&self, at: usize) -> Option<(usize, u64)> {
        let index = usize::from(*self.indices.get(at)?);
        self.signs.get(index).map(|sign| (index, *sign))
    }
}

/// The partitions of a cube and their bytes.
pub(crate) struct Search<'a, B> {
    pub(crate) blocks: B,
    pub(crate) partitions: &'a [Partition],
    /// The first partition of the cube.
    pub(crate) first: u32,
    pub(crate) num_partitions: u32,
    pub(crate) record_bytes: usize,
}

/// A group of keys that takes three steps together: prefetch the buckets; search the buckets and prefetch the records; hand
/// the rows over.
///
/// Three waves are in flight, each one step behind the other, so that memory is always busy. Each step is a short loop, so
/// that a core looks many keys ahead. Absent keys, and keys that are not found yet, hand over zeros, which costs less than a
/// mispredicted branch.
struct Wave<'a> {
    count: usize,
    /// Indices in the answer.
    indices: [usize; WAVE],
    signs: [u64; WAVE],
    tags: [u16; WAVE],
    /// Distance of the current bucket from the home bucket.
    steps: [u32; WAVE],
    partitions: [&'a Partition; WAVE],
    buckets: [&'a Bucket; WAVE],
    /// Start of the record with the key's tag, which nearly always has its sign too; `ZEROS` if there is none.
    records: [*const u8; WAVE],
}

/// Keys that continue in another bucket, with the next wave.
struct CarriedKeys {
    count: usize,
    /// Index in the answer, sign and steps of each key.
    keys: [(usize, u64, u32); WAVE],
}

impl<'a, B: Blocks<'a>> Search<'a, B> {
    /// Hands the row of each key to `sink`, in any order; returns the number of keys with a row.
    #[inline(always)]
    pub(crate) fn all<C: Compare>(&self, keys: &impl Keys, sink: &mut impl RowSink) -> usize {
        let mut waves = [Wave::empty(), Wave::empty(), Wave::empty()];
        let [mut last, mut middle, mut first] = waves.each_mut();
        let mut carried = CarriedKeys { count: 0, keys: [(0, 0, 0); WAVE] };
        let (mut hits, mut next) = (0, 0);
        loop {
            hits += self.hand_over(last, sink);
            self.find::<C>(middle, &mut carried);
            next = self.start(first, keys, next, &mut carried);
            if first.count + middle.count == 0 {
                return hits;
            }
            (last, middle, first) = (middle, first, last);
        }
    }

    /// Fills a wave with carried keys and then with keys from `next`, and prefetches their buckets. Returns the next key.
    #[inline(always)]
    fn start(&self, wave: &mut Wave<'a>, keys: &impl Keys, mut next: usize, carried: &mut CarriedKeys) -> usize {
        wave.count = 0;
        wave.steps = [0; WAVE];
        for &(index, sign, steps) in &carried.keys[..carried.count.min(WAVE)] {
            wave.steps[wave.count] = steps;
            self.add(wave, index, sign, steps);
        }
        carried.count = 0;
        while wave.count < WAVE
            && let Some((index, sign)) = keys.key(next)
        {
            self.add(wave, index, sign, 0);
            next += 1;
        }
        next
    }

    #[inline(always)]
    fn add(&self, wave: &mut Wave<'a>, index: usize, sign: u64, steps: u32) {
        let at = wave.count;
        let mixed = mix(sign);
        let partition = self.partition_of(mixed);
        let home = index::home_of(mixed, partition.num_buckets);
        let bucket = self.bucket(partition, index::after(home, steps, partition.num_buckets));
        prefetch_far(bucket);
        wave.indices[at] = index;
        wave.signs[at] = sign;
        wave.tags[at] = index::tag_of(mixed);
        wave.partitions[at] = partition;
        wave.buckets[at] = bucket;
        wave.count += 1;
    }

    /// Searches the buckets of a wave and prefetches the records.
    #[inline(always)]
    fn find<C: Compare>(&self, wave: &mut Wave<'a>, carried: &mut CarriedKeys) {
        for at in 0..wave.count.min(WAVE) {
            let (bucket, partition) = (wave.buckets[at], wave.partitions[at]);
            let candidates = index::candidates::<C>(bucket, wave.tags[at]);
            let number = index::first_row(bucket).wrapping_add(candidates.trailing_zeros());
            let record = select(candidates != 0, self.record_start(partition, number), ZEROS.as_ptr());
            prefetch_bytes(record, self.record_bytes);
            wave.records[at] = record;
            if (candidates == 0) & index::overflowed(bucket) & (wave.steps[at] < partition.max_steps) {
                carried.keys[carried.count % WAVE] = (wave.indices[at], wave.signs[at], wave.steps[at] + 1);
                carried.count += 1;
            }
        }
    }

    /// Hands the rows of a wave to the sink; returns their number.
    #[inline(always)]
    fn hand_over(&self, wave: &Wave<'a>, sink: &mut impl RowSink) -> usize {
        let mut hits = 0;
        for at in 0..wave.count.min(WAVE) {
            let (index, sign, start) = (wave.indices[at], wave.signs[at], wave.records[at]);
            // SAFETY: `start` is a record inside the checked bytes: `Partition::check` saw it in memory that never changes,
            // or its bounds were checked when it was found. Otherwise it is `ZEROS`, which has the longest record's length.
            let (found, row) = unsafe {
                let row = std::slice::from_raw_parts(start.add(SIGN_BYTES), self.record_bytes - SIGN_BYTES);
                (u64::from_le_bytes(start.cast::<[u8; SIGN_BYTES]>().read()), row)
            };
            let is_candidate = start != ZEROS.as_ptr();
            let is_present = is_candidate & (found == sign);
            sink.put(index, row, is_present);
            hits += usize::from(is_present);
            if is_candidate & !is_present {
                hits += self.hand_over_again(sign, index, sink);
            }
        }
        hits
    }

    /// Handles a key whose tag is also the tag of another sign.
    #[cold]
    #[inline(never)]
    fn hand_over_again(&self, sign: u64, index: usize, sink: &mut impl RowSink) -> usize {
        let row = self.one(sign);
        sink.put(index, row.unwrap_or(zeros(self.record_bytes - SIGN_BYTES)), row.is_some());
        usize::from(row.is_some())
    }

    /// Returns the row of one sign.
    pub(crate) fn one(&self, sign: u64) -> Option<&'a [u8]> {
        let mixed = mix(sign);
        let partition = self.partition_of(mixed);
        let home = index::home_of(mixed, partition.num_buckets);
        for steps in 0..=partition.max_steps {
            let bucket = self.bucket(partition, index::after(home, steps, partition.num_buckets));
            let mut candidates = index::candidates::<Scalar>(bucket, index::tag_of(mixed));
            while candidates != 0 {
                let number = index::first_row(bucket).wrapping_add(candidates.trailing_zeros());
                let record = self.record(partition, number);
                if index::sign_of(record) == sign {
                    return record.get(SIGN_BYTES..);
                }
                candidates &= candidates - 1;
            }
            if !index::overflowed(bucket) {
                break;
            }
        }
        None
    }

    #[inline(always)]
    fn partition_of(&self, mixed: u64) -> &'a Partition {
        let number = partition_of_mixed(mixed, self.num_partitions).wrapping_sub(self.first);
        self.partitions.get(number as usize).unwrap_or(&NONE)
    }

    #[inline(always)]
    fn bucket(&self, partition: &Partition, at: u32) -> &'a Bucket {
        if at >= partition.num_buckets {
            // A partition without buckets has no signs.
            return &EMPTY;
        }
        let start = partition.index_offset + at as usize * BUCKET_BYTES;
        let bytes = self.blocks.bytes_of(partition);
        debug_assert!(start + BUCKET_BYTES <= bytes.len(), "buckets lie inside their block");
        // SAFETY: `Partition::check` saw `num_buckets` buckets from `index_offset` in these bytes, which never change.
        unsafe { &*bytes.as_ptr().add(start).cast() }
    }

    /// Returns a record by its number in the partition's index.
    #[inline(always)]
    fn record(&self, partition: &Partition, number: u32) -> &'a [u8] {
        let start = partition.records_offset + number as usize * self.record_bytes;
        self.blocks.bytes_of(partition).get(start..start + self.record_bytes).unwrap_or(zeros(self.record_bytes))
    }

    /// Returns the start of a record; for numbers that are not in the index, the address is arbitrary.
    #[inline(always)]
    fn record_start(&self, partition: &Partition, number: u32) -> *const u8 {
        if !B::ARE_OWN {
            // A mapped file may change after the check, so bounds are checked again.
            return self.record(partition, number).as_ptr();
        }
        let bytes = self.blocks.bytes_of(partition);
        bytes.as_ptr().wrapping_add(partition.records_offset + number as usize * self.record_bytes)
    }
}

impl Wave<'_> {
    #[inline(always)]
    fn empty() -> Self {
        Wave {
            count: 0,
            indices: [0; WAVE],
            signs: [0; WAVE],
            tags: [0; WAVE],
            steps: [0; WAVE],
            partitions: [&NONE; WAVE],
            buckets: [&EMPTY; WAVE],
            records: [ZEROS.as_ptr(); WAVE],
        }
    }
}

static ZEROS: [u8; SIGN_BYTES + MAX_ROW_BYTES] = [0; SIGN_BYTES + MAX_ROW_BYTES];

/// Returns zeros for an absent row or record.
#[inline(always)]
pub(crate) fn zeros(num_bytes: usize) -> &'static [u8] {
    ZEROS.get(..num_bytes).unwrap_or(&ZEROS)
}

/// Prefetches the cache lines of a row. Rows are packed, so a row may touch one line more than its length suggests.
#[inline(always)]
pub(crate) fn prefetch_row(row: &[u8]) {
    prefetch_bytes(row.as_ptr(), row.len());
}

#[inline(always)]
fn prefetch_bytes(start: *const u8, length: usize) {
    let mut ahead = 0;
    while ahead < length.min(ROW_LINES_AHEAD * LINE) {
        prefetch_far(start.wrapping_add(ahead));
        ahead += LINE;
    }
    prefetch_far(start.wrapping_add(length.saturating_sub(1)));
}
