//! The index of a partition: sign's hash to row number, 4 bytes an entry, 16 entries a cache line.
//!
//! An entry is the number of a row plus one, and above it bits of the hash that do not choose the line: a row is read
//! only if those agree. A line fills from its front; what no longer fits goes into the next one. Nothing is removed
//! singly: after an eviction the index is built anew.

use std::sync::Arc;

use crate::arena::{Arena, Block};
use crate::prefetch::prefetch_read;

const ENTRIES: usize = 16;
/// A block of the arena has so many lines: 4 KB.
const SEGMENT_LINES: usize = 64;
const SEGMENT_BYTES: usize = SEGMENT_LINES * size_of::<Line>();
/// Grow beyond this share of used places, in tenths: the lines are long enough that few keys are not in their own.
const MAX_LOAD_TENTHS: usize = 9;
/// Grow by this part, so that little capacity is spare.
const GROWTH: usize = 8;

/// No such row.
pub(crate) const ABSENT: u32 = u32::MAX;

#[repr(C, align(64))]
struct Line([u32; ENTRIES]);

impl Line {
    /// Bit masks of the entries with this tag, and of the empty ones.
    #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
    #[inline(always)]
    fn compare(&self, tag: u32, tag_mask: u32) -> (u32, u32) {
        use std::arch::x86_64::{
            __m128i, _mm_and_si128, _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16,
            _mm_packs_epi32, _mm_set1_epi32, _mm_setzero_si128,
        };
        let fours = self.0.as_ptr().cast::<__m128i>();
        // SAFETY: SSE2 is part of x86-64; a line has four times 16 bytes, aligned.
        unsafe {
            let (tag, mask) = (_mm_set1_epi32(tag as i32), _mm_set1_epi32(tag_mask as i32));
            let entries = [0, 1, 2, 3].map(|i| _mm_load_si128(fours.add(i)));
            let bits = |four: [__m128i; 4]| {
                let [a, b, c, d] = four;
                _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d))) as u32
            };
            let same = entries.map(|four| _mm_cmpeq_epi32(_mm_and_si128(four, mask), tag));
            let empty = entries.map(|four| _mm_cmpeq_epi32(four, _mm_setzero_si128()));
            (bits(same), bits(empty))
        }
    }

    /// The portable twin.
    #[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
    #[inline(always)]
    fn compare(&self, tag: u32, tag_mask: u32) -> (u32, u32) {
        let (mut same, mut empty) = (0, 0);
        for (i, &entry) in self.0.iter().enumerate() {
            same |= u32::from(entry & tag_mask == tag) << i;
            empty |= u32::from(entry == 0) << i;
        }
        (same, empty)
    }
}

#[derive(Debug)]
pub(crate) struct Index {
    segments: Vec<Block>,
    num_lines: u32,
    /// Low bits of an entry that are the row's number plus one.
    row_bits: u32,
    arena: Arc<Arena>,
}

impl Index {
    pub(crate) fn new(arena: Arc<Arena>) -> Self {
        Index { segments: Vec::new(), num_lines: 0, row_bits: 1, arena }
    }

    /// Bytes beyond the arena's.
    pub(crate) fn num_bytes(&self) -> usize {
        self.segments.capacity() * size_of::<Block>()
    }

    /// Whether one more row than `len` needs `rebuild`.
    #[inline]
    pub(crate) fn is_full(&self, len: usize) -> bool {
        len >= capacity(self.num_lines as usize)
    }

    /// Makes room for `len` rows and one more, and enters those of `hashes`, numbered from 0.
    pub(crate) fn rebuild(&mut self, len: usize, hashes: impl Iterator<Item = u64>) {
        let room = capacity(self.num_lines as usize);
        // an eviction gives back only what it is worth: the rows after it would ask for it again
        let lines = if room > len && room / 2 <= len + ENTRIES { self.num_lines as usize } else { lines_for(len) };
        let row_bits = (capacity(lines) + 1).ilog2() + 1;
        assert!(row_bits <= 31, "a partition holds less than 2^31 rows: raise sparse.partitions");
        for segment in self.segments.drain(..) {
            self.arena.give_back(segment, SEGMENT_BYTES);
        }
        for _ in 0..lines.div_ceil(SEGMENT_LINES) {
            let mut segment = self.arena.take(SEGMENT_BYTES);
            // SAFETY: the segment has so many bytes and is ours.
            unsafe { segment.as_mut_ptr().write_bytes(0, SEGMENT_BYTES) };
            self.segments.push(segment);
        }
        self.segments.shrink_to_fit();
        self.num_lines = lines as u32;
        self.row_bits = row_bits;
        for (row, hash) in hashes.enumerate() {
            self.enter(row as u32, hash);
        }
    }

    /// Enters a row for which there is room.
    pub(crate) fn enter(&mut self, row: u32, hash: u64) {
        let entry = self.tag(hash) | (row + 1);
        let mut at = self.home(hash);
        loop {
            let line = self.line_mut(at);
            if let Some(place) = line.0.iter_mut().find(|place| **place == 0) {
                *place = entry;
                return;
            }
            at = self.next(at);
        }
    }

    /// The first row with the tag of `hash` that `is_it` agrees to, or `ABSENT`.
    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> u32 {
        if self.num_lines == 0 {
            return ABSENT;
        }
        let (tag, row_mask) = (self.tag(hash), (1 << self.row_bits) - 1);
        let mut at = self.home(hash);
        loop {
            let line = self.line(at);
            let (same, empty) = line.compare(tag, !row_mask);
            let mut same = same & !empty;
            while same != 0 {
                let row = (line.0[same.trailing_zeros() as usize] & row_mask) - 1;
                if is_it(row) {
                    return row;
                }
                same &= same - 1;
            }
            if empty != 0 {
                return ABSENT;
            }
            at = self.next(at);
        }
    }

    /// Asks for the line of a hash.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        if self.num_lines != 0 {
            prefetch_read(self.line(self.home(hash)));
        }
    }

    /// Lines are chosen by the low half of the hash: its high bits chose the partition.
    #[inline]
    fn home(&self, hash: u64) -> u32 {
        ((u64::from(hash as u32) * u64::from(self.num_lines)) >> 32) as u32
    }

    /// The low bits of the hash, which count least in the choice of the line.
    #[inline]
    fn tag(&self, hash: u64) -> u32 {
        (hash as u32) << self.row_bits
    }

    #[inline]
    fn next(&self, line: u32) -> u32 {
        if line + 1 == self.num_lines { 0 } else { line + 1 }
    }

    #[inline]
    fn line(&self, line: u32) -> &Line {
        let segment = &self.segments[line as usize / SEGMENT_LINES];
        // SAFETY: a segment is `SEGMENT_LINES` lines, zeroed before their first use, at a cache line.
        unsafe { &*segment.as_ptr().cast::<Line>().add(line as usize % SEGMENT_LINES) }
    }

    #[inline]
    fn line_mut(&mut self, line: u32) -> &mut Line {
        let segment = &mut self.segments[line as usize / SEGMENT_LINES];
        // SAFETY: as in `line`, and the segment is borrowed for change.
        unsafe { &mut *segment.as_mut_ptr().cast::<Line>().add(line as usize % SEGMENT_LINES) }
    }
}

/// Rows that so many lines take before they grow.
fn capacity(lines: usize) -> usize {
    lines * ENTRIES * MAX_LOAD_TENTHS / 10
}

/// Lines for `len` rows, one more, and some growth.
fn lines_for(len: usize) -> usize {
    let lines = ((len + 1) * 10).div_ceil(ENTRIES * MAX_LOAD_TENTHS);
    lines + lines / GROWTH
}
