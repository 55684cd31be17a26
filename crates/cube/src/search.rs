//! A batch of keys through the partitions of a cube: memory is asked ahead, so that the waits of many keys overlap.

use std::hint::select_unpredictable as select;

use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_far;

use crate::compare::{BUCKET_BYTES, Bucket, Compare, Plain};
use crate::cube::{Blocks, NONE, Partition};
use crate::index::{self, SIGN_BYTES};
use crate::meta::MAX_ROW_BYTES;

/// Keys of a wave: enough to hide the memory behind the others, few enough for the lines a core can have on the way.
const WAVE: usize = 32;
/// Lines of a row asked for ahead; the hardware follows a longer one by itself.
const ROW_LINES_AHEAD: usize = 8;
const LINE: usize = 64;
/// What a partition without signs is searched in.
static EMPTY: Bucket = [0; BUCKET_BYTES];

/// Where answers go.
pub(crate) trait RowSink {
    /// Key `i` has this row, or none, and then it is zeros. What comes last for a key counts.
    fn put(&mut self, i: usize, row: &[u8], is_present: bool);
}

/// What is asked: the place of each key's answer, and its sign.
pub(crate) trait Keys {
    fn key(&self, at: usize) -> Option<(usize, u64)>;
}

/// All of a list.
pub(crate) struct AllKeys<'a>(pub(crate) &'a [u64]);

impl Keys for AllKeys<'_> {
    #[inline]
    fn key(&self, at: usize) -> Option<(usize, u64)> {
        self.0.get(at).map(|sign| (at, *sign))
    }
}

/// Some of a list.
pub(crate) struct SelectedKeys<'a> {
    pub(crate) signs: &'a [u64],
    pub(crate) places: &'a [u16],
}

impl Keys for SelectedKeys<'_> {
    #[inline]
    fn key(&self, at: usize) -> Option<(usize, u64)> {
        let place = usize::from(*self.places.get(at)?);
        self.signs.get(place).map(|sign| (place, *sign))
    }
}

/// The partitions of a cube and where their bytes are.
pub(crate) struct Search<'a, B> {
    pub(crate) blocks: B,
    pub(crate) partitions: &'a [Partition],
    /// The first partition that there is.
    pub(crate) first: u32,
    pub(crate) num_partitions: u32,
    pub(crate) record_bytes: usize,
}

/// Keys that go the same way together: their buckets are asked for, then these are searched and the records asked for,
/// then the rows are handed over.
///
/// Three waves are on their way, each a step behind the one before, so that the memory always has something to do; each
/// step is a short loop, so that a core sees many keys ahead. A key that is absent, or not found yet, hands over zeros:
/// that costs less than a branch that guesses wrong.
struct Wave<'a> {
    count: usize,
    /// Where the answers go.
    places: [usize; WAVE],
    signs: [u64; WAVE],
    tags: [u16; WAVE],
    /// Buckets beyond their home that they have come to.
    steps: [u32; WAVE],
    partitions: [&'a Partition; WAVE],
    buckets: [&'a Bucket; WAVE],
    /// Where the records start that have their tags, and so nearly always their signs; `ZEROS` if there is none.
    records: [*const u8; WAVE],
}

/// Keys that have to go on to another bucket: with the next wave.
struct CarriedKeys {
    count: usize,
    /// Their places, signs and steps.
    keys: [(usize, u64, u32); WAVE],
}

impl<'a, B: Blocks<'a>> Search<'a, B> {
    /// Hands the row of each key to `sink`, not in their order, and returns how many there are.
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

    /// Fills a wave, first with those that go on, then with keys from `next` on, and asks for their buckets; returns the
    /// key after them.
    #[inline(always)]
    fn start(&self, wave: &mut Wave<'a>, keys: &impl Keys, mut next: usize, carried: &mut CarriedKeys) -> usize {
        wave.count = 0;
        wave.steps = [0; WAVE];
        for &(place, sign, steps) in &carried.keys[..carried.count.min(WAVE)] {
            wave.steps[wave.count] = steps;
            self.add(wave, place, sign, steps);
        }
        carried.count = 0;
        while wave.count < WAVE
            && let Some((place, sign)) = keys.key(next)
        {
            self.add(wave, place, sign, 0);
            next += 1;
        }
        next
    }

    #[inline(always)]
    fn add(&self, wave: &mut Wave<'a>, place: usize, sign: u64, steps: u32) {
        let at = wave.count;
        let mixed = mix(sign);
        let partition = self.partition_of(mixed);
        let home = index::home_of(mixed, partition.num_buckets);
        let bucket = self.bucket(partition, index::after(home, steps, partition.num_buckets));
        prefetch_far(bucket);
        wave.places[at] = place;
        wave.signs[at] = sign;
        wave.tags[at] = index::tag_of(mixed);
        wave.partitions[at] = partition;
        wave.buckets[at] = bucket;
        wave.count += 1;
    }

    /// Searches the buckets of a wave and asks for the records.
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
                carried.keys[carried.count % WAVE] = (wave.places[at], wave.signs[at], wave.steps[at] + 1);
                carried.count += 1;
            }
        }
    }

    /// Gives away what has come; returns how many rows that is.
    #[inline(always)]
    fn hand_over(&self, wave: &Wave<'a>, sink: &mut impl RowSink) -> usize {
        let mut hits = 0;
        for at in 0..wave.count.min(WAVE) {
            let (place, sign, start) = (wave.places[at], wave.signs[at], wave.records[at]);
            // SAFETY: it is a record of this search, which `Partition::check` saw inside of bytes that never change, or
            // was looked at when it was found; or zeros, of which there are as many as the longest record has.
            let (found, row) = unsafe {
                let row = std::slice::from_raw_parts(start.add(SIGN_BYTES), self.record_bytes - SIGN_BYTES);
                (u64::from_le_bytes(start.cast::<[u8; SIGN_BYTES]>().read()), row)
            };
            let is_candidate = start != ZEROS.as_ptr();
            let is_present = is_candidate & (found == sign);
            sink.put(place, row, is_present);
            hits += usize::from(is_present);
            if is_candidate & !is_present {
                hits += self.hand_over_again(sign, place, sink);
            }
        }
        hits
    }

    /// The key whose tag another sign has too.
    #[cold]
    #[inline(never)]
    fn hand_over_again(&self, sign: u64, place: usize, sink: &mut impl RowSink) -> usize {
        let row = self.one(sign);
        sink.put(place, row.unwrap_or(zeros(self.record_bytes - SIGN_BYTES)), row.is_some());
        usize::from(row.is_some())
    }

    /// The row of one sign.
    pub(crate) fn one(&self, sign: u64) -> Option<&'a [u8]> {
        let mixed = mix(sign);
        let partition = self.partition_of(mixed);
        let home = index::home_of(mixed, partition.num_buckets);
        for steps in 0..=partition.max_steps {
            let bucket = self.bucket(partition, index::after(home, steps, partition.num_buckets));
            let mut candidates = index::candidates::<Plain>(bucket, index::tag_of(mixed));
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
            // a partition without buckets has no signs
            return &EMPTY;
        }
        let start = partition.index_offset + at as usize * BUCKET_BYTES;
        let bytes = self.blocks.bytes_of(partition);
        debug_assert!(start + BUCKET_BYTES <= bytes.len(), "buckets lie inside their block");
        // SAFETY: `Partition::check` saw `num_buckets` buckets from `index_offset` on in these bytes, which never change.
        unsafe { &*bytes.as_ptr().add(start).cast() }
    }

    /// A record that the index of a partition names.
    #[inline(always)]
    fn record(&self, partition: &Partition, number: u32) -> &'a [u8] {
        let start = partition.records_offset + number as usize * self.record_bytes;
        self.blocks.bytes_of(partition).get(start..start + self.record_bytes).unwrap_or(zeros(self.record_bytes))
    }

    /// The first byte of a record that the index of a partition names; of other numbers it may be any address.
    #[inline(always)]
    fn record_start(&self, partition: &Partition, number: u32) -> *const u8 {
        if !B::ARE_OWN {
            // a file may change after it was checked
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
            places: [0; WAVE],
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

/// So many zeros, for a row or a record.
#[inline(always)]
pub(crate) fn zeros(num_bytes: usize) -> &'static [u8] {
    ZEROS.get(..num_bytes).unwrap_or(&ZEROS)
}

/// Asks for the lines of a row; a packed one starts anywhere in a line, and so may touch one more.
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
