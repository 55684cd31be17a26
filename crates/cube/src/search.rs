//! A batch of keys through the partitions of a cube: memory is asked ahead, so that the waits of many keys overlap.

use std::hint::select_unpredictable as select;
use std::marker::PhantomData;

use elasticrec_table::partition::{mix, partition_of_mixed};
use elasticrec_table::prefetch::prefetch_far;

use crate::cube::{Blocks, NONE, Partition};
use crate::index::{self, Answer, BUCKET_BYTES, Bucket, Compare, Plain};
use crate::meta::MAX_ROW_BYTES;

/// Keys between the request of a cache line and its use: enough to hide the memory behind the other keys,
/// few enough for the lines a core can have on the way.
const LANES: usize = 16;
/// Lines of a row asked for ahead; the hardware follows a longer one by itself.
const ROW_LINES_AHEAD: usize = 8;
const LINE: usize = 64;
/// What a partition without signs is searched in.
static EMPTY: Bucket = [0; BUCKET_BYTES];

/// Where answers go.
pub(crate) trait Sink {
    /// Key `i` has this row, or none, and then it is zeros. What comes last for a key counts.
    fn put(&mut self, i: usize, row: &[u8], is_present: bool);
}

/// What is asked: the place of each key's answer, and its sign.
pub(crate) trait Keys {
    fn key(&self, at: usize) -> Option<(usize, u64)>;
}

/// All of a list.
pub(crate) struct All<'a>(pub(crate) &'a [u64]);

impl Keys for All<'_> {
    #[inline]
    fn key(&self, at: usize) -> Option<(usize, u64)> {
        self.0.get(at).map(|sign| (at, *sign))
    }
}

/// Some of a list.
pub(crate) struct Chosen<'a> {
    pub(crate) signs: &'a [u64],
    pub(crate) places: &'a [u16],
}

impl Keys for Chosen<'_> {
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
    pub(crate) row_bytes: usize,
}

/// Keys on their way: in each lane one that waits for a bucket, and one before it that waits for its row.
///
/// A turn of a lane hands over the row that has come, searches the bucket that has, and asks for what is next: so the
/// memory always has as much to do, and a key that has to go on to another bucket waits like any other. A key that is
/// absent, or not found yet, hands over zeros: that costs less than a branch that guesses wrong.
struct Lanes<'a> {
    probes: [Probe<'a>; LANES],
    rows: [Answered<'a>; LANES],
}

/// A key that waits for a bucket.
#[derive(Clone, Copy)]
struct Probe<'a> {
    bucket: &'a Bucket,
    partition: &'a Partition,
    sign: u64,
    /// Where the answer goes.
    place: usize,
    /// The number of the bucket.
    at: u32,
    /// Buckets that may still come after it.
    num_further: u32,
}

/// A key that waits for its row.
#[derive(Clone, Copy)]
struct Answered<'a> {
    row: Row<'a>,
    place: usize,
    is_present: bool,
}

/// So many bytes as a row of the search has; without their number, which is the same for all of them.
#[derive(Clone, Copy)]
struct Row<'a> {
    start: *const u8,
    _bytes: PhantomData<&'a [u8]>,
}

impl<'a, B: Blocks<'a>> Search<'a, B> {
    /// Hands the row of each key to `sink`, not in their order, and returns how many there are.
    #[inline(always)]
    pub(crate) fn all<C: Compare>(&self, keys: &impl Keys, sink: &mut impl Sink) -> usize {
        let Some(first) = keys.key(0) else { return 0 };
        let nothing = Answered { row: Row::of_zeros(), place: first.0, is_present: false };
        let mut lanes = Lanes { probes: [self.start(first); LANES], rows: [nothing; LANES] };
        let mut next = 0;
        while next < LANES
            && let Some(key) = keys.key(next)
        {
            lanes.probes[next] = self.start(key);
            // zeros before the answer
            lanes.rows[next].place = key.0;
            prefetch_far(lanes.probes[next].bucket);
            next += 1;
        }
        let num_lanes = next;
        let (mut hits, mut turn) = (0, 0);
        while let Some(key) = keys.key(next) {
            let lane = turn % LANES;
            turn += 1;
            hits += self.hand_over(&lanes, lane, sink);
            if self.turn::<C>(&mut lanes, lane) {
                lanes.probes[lane] = self.go_on(&lanes.probes[lane]);
            } else {
                lanes.probes[lane] = self.start(key);
                next += 1;
            }
            prefetch_far(lanes.probes[lane].bucket);
        }
        hits + self.finish::<C>(&mut lanes, num_lanes, sink)
    }

    /// There are no more keys: those on their way come to an end.
    #[inline(always)]
    fn finish<C: Compare>(&self, lanes: &mut Lanes<'a>, num_lanes: usize, sink: &mut impl Sink) -> usize {
        let mut hits = 0;
        let mut is_open: [bool; LANES] = std::array::from_fn(|lane| lane < num_lanes);
        while is_open.contains(&true) {
            for (lane, is_open) in is_open.iter_mut().enumerate().filter(|(_, is_open)| **is_open) {
                hits += self.hand_over(lanes, lane, sink);
                *is_open = self.turn::<C>(lanes, lane);
                if *is_open {
                    lanes.probes[lane] = self.go_on(&lanes.probes[lane]);
                    prefetch_far(lanes.probes[lane].bucket);
                }
            }
        }
        hits + (0..num_lanes).map(|lane| self.hand_over(lanes, lane, sink)).sum::<usize>()
    }

    /// Searches the bucket of a lane and asks for the row; true if its key has to go on to another bucket.
    #[inline(always)]
    fn turn<C: Compare>(&self, lanes: &mut Lanes<'a>, lane: usize) -> bool {
        let Probe { bucket, partition, sign, place, num_further, .. } = lanes.probes[lane];
        let found = C::found(bucket, sign);
        let is_present = found != 0;
        let number = index::first_row(bucket).wrapping_add(found.trailing_zeros());
        let start = self.row_start(partition, number);
        let row = Row { start: select(is_present, start, ZEROS.as_ptr()), _bytes: PhantomData };
        prefetch_bytes(row.start, self.row_bytes);
        lanes.rows[lane] = Answered { row, place, is_present };
        // most are present, so that is asked first: whether a bucket leads on nobody can guess
        if is_present {
            return false;
        }
        index::overflowed(bucket) & (num_further > 0)
    }

    /// The row of one sign.
    pub(crate) fn one(&self, sign: u64) -> Option<&'a [u8]> {
        let mut probe = self.start((0, sign));
        loop {
            match Plain::ask(probe.bucket, sign) {
                Answer::Row(number) => return Some(self.row(probe.partition, number)),
                Answer::Further if probe.num_further > 0 => probe = self.go_on(&probe),
                _ => return None,
            }
        }
    }

    #[inline(always)]
    fn start(&self, (place, sign): (usize, u64)) -> Probe<'a> {
        let mixed = mix(sign);
        let partition = self.partition_of(mixed);
        let at = index::home_of(mixed, partition.num_buckets);
        Probe { bucket: self.bucket(partition, at), partition, sign, place, at, num_further: partition.max_steps }
    }

    /// The same key at the next bucket, around the end.
    #[inline(always)]
    fn go_on(&self, probe: &Probe<'a>) -> Probe<'a> {
        let at = select(probe.at + 1 < probe.partition.num_buckets, probe.at + 1, 0);
        let num_further = probe.num_further.saturating_sub(1);
        Probe { bucket: self.bucket(probe.partition, at), at, num_further, ..*probe }
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

    /// A row that the index of a partition names.
    #[inline(always)]
    fn row(&self, partition: &Partition, number: u32) -> &'a [u8] {
        let start = partition.rows_offset + number as usize * self.row_bytes;
        self.blocks.bytes_of(partition).get(start..start + self.row_bytes).unwrap_or(zeros(self.row_bytes))
    }

    /// The first byte of a row that the index of a partition names; of other numbers it may be any address.
    #[inline(always)]
    fn row_start(&self, partition: &Partition, number: u32) -> *const u8 {
        if !B::ARE_OWN {
            // a file may change after it was checked
            return self.row(partition, number).as_ptr();
        }
        let bytes = self.blocks.bytes_of(partition);
        bytes.as_ptr().wrapping_add(partition.rows_offset + number as usize * self.row_bytes)
    }

    /// Gives away what has come; returns whether that is a row.
    #[inline(always)]
    fn hand_over(&self, lanes: &Lanes<'a>, lane: usize, sink: &mut impl Sink) -> usize {
        let Answered { row, place, is_present } = lanes.rows[lane];
        // SAFETY: it is a row of this search, which `Partition::check` saw inside of bytes that never change, or was
        // looked at when it was found; or zeros, of which there are as many as the longest row has.
        let row = unsafe { std::slice::from_raw_parts(row.start, self.row_bytes) };
        sink.put(place, row, is_present);
        usize::from(is_present)
    }
}

impl Row<'_> {
    fn of_zeros() -> Self {
        Row { start: ZEROS.as_ptr(), _bytes: PhantomData }
    }
}

static ZEROS: [u8; MAX_ROW_BYTES] = [0; MAX_ROW_BYTES];

/// A row of zeros.
#[inline(always)]
pub(crate) fn zeros(row_bytes: usize) -> &'static [u8] {
    ZEROS.get(..row_bytes).unwrap_or(&ZEROS)
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
