//! The index of a partition: sign's hash to row number, 4 bytes an entry, 16 entries a cache line.
//!
//! An entry is the number of a row in the arena plus one, and above it bits of the hash that do not choose the line: a row is read
//! only if those agree. A line fills from its front; what no longer fits goes into the next one. Nothing is removed
//! singly: after an eviction the index is built anew.

use std::sync::Arc;

use crate::arena::{Arena, GrowError};

const ENTRIES: usize = 16;
/// A block of the index's arena, 16 KB: few enough that their list stays in the first caches.
const SEGMENT_BYTES: usize = 16 << 10;
const SEGMENT_LINES: usize = SEGMENT_BYTES / size_of::<Line>();
/// Grow beyond this share of used places, in percent: the lines are long enough that few keys are not in their own.
const MAX_LOAD_PERCENT: usize = 79;
/// Grow by this part, so that little capacity is spare.
const GROWTH: usize = 24;

/// No such row.
pub(crate) const ABSENT: u32 = u32::MAX;

#[repr(C, align(64))]
struct Line([u32; ENTRIES]);

impl Line {
    /// Bit mask of the entries that are `value` under `mask`.
    #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
    #[inline(always)]
    fn compare(&self, value: u32, mask: u32) -> u32 {
        use std::arch::x86_64::{
            __m128i, _mm_and_si128, _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16,
            _mm_packs_epi32, _mm_set1_epi32,
        };
        let fours = self.0.as_ptr().cast::<__m128i>();
        // SAFETY: SSE2 is part of x86-64; a line has four times 16 bytes, aligned.
        unsafe {
            let (value, mask) = (_mm_set1_epi32(value as i32), _mm_set1_epi32(mask as i32));
            let [a, b, c, d] =
                [0, 1, 2, 3].map(|i| _mm_cmpeq_epi32(_mm_and_si128(_mm_load_si128(fours.add(i)), mask), value));
            _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d))) as u32
        }
    }

    /// The portable twin.
    #[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
    #[inline(always)]
    fn compare(&self, value: u32, mask: u32) -> u32 {
        self.0.iter().enumerate().fold(0, |bits, (i, entry)| bits | u32::from(entry & mask == value) << i)
    }

    /// Whether keys that belong here may stand in the next line.
    #[inline(always)]
    fn is_full(&self) -> bool {
        self.0[ENTRIES - 1] != 0
    }
}

/// Units for [`Index`].
pub(crate) fn line_arena() -> Arena {
    Arena::new(size_of::<Line>(), SEGMENT_BYTES)
}

#[derive(Debug)]
pub(crate) struct Index {
    /// First lines of blocks of the arena.
    segments: Box<[u32]>,
    num_lines: u32,
    /// Low bits of an entry that are the row's number plus one.
    row_bits: u32,
    lines: Arc<Arena>,
}

impl Index {
    pub(crate) fn new(lines: Arc<Arena>) -> Self {
        Index { segments: Box::default(), num_lines: 0, row_bits: 1, lines }
    }

    /// Leaves an empty one in its place.
    pub(crate) fn take(&mut self) -> Self {
        let empty = Index::new(self.lines.clone());
        std::mem::replace(self, empty)
    }

    /// Whether `row`, next to `len` others, needs `rebuild` before it is entered.
    #[inline]
    pub(crate) fn is_full(&self, len: usize, row: u32) -> bool {
        len >= capacity(self.num_lines as usize) || (row + 1) >> self.row_bits != 0
    }

    /// Makes room for `len` rows and some more, with numbers up to `max_row` and some more, and enters `rows`.
    ///
    /// Without an error it has just these; with one it is what it was. Fewer rows than before never need more memory.
    pub(crate) fn rebuild(
        &mut self,
        len: usize,
        max_row: usize,
        rows: impl Iterator<Item = (u32, u64)>,
    ) -> Result<(), GrowError> {
        let room = capacity(self.num_lines as usize);
        // an eviction gives back only what it is worth: the rows after it would ask for it again
        let lines = if room > len && room / 2 <= len + ENTRIES { self.num_lines as usize } else { lines_for(len) };
        self.hold(lines.div_ceil(SEGMENT_LINES))?;
        // the arena has no number that needs more
        self.row_bits = (((max_row + 2) * 5 / 4).ilog2() + 1).min(31);
        for &segment in &self.segments {
            // SAFETY: the segment has so many bytes and is ours.
            unsafe { self.lines.at(segment).write_bytes(0, SEGMENT_BYTES) };
        }
        self.num_lines = lines as u32;
        rows.for_each(|(row, hash)| self.enter(row, hash));
        Ok(())
    }

    /// Takes or gives back segments until it has so many; all or none of those it lacks.
    fn hold(&mut self, num_segments: usize) -> Result<(), GrowError> {
        let held = self.segments.len();
        let mut segments = std::mem::take(&mut self.segments).into_vec();
        let lacking = (held..num_segments).try_for_each(|_| self.lines.take().map(|segment| segments.push(segment)));
        let kept = if lacking.is_ok() { num_segments } else { held };
        segments.drain(kept..).for_each(|segment| self.lines.give_back(segment));
        self.segments = segments.into_boxed_slice();
        lacking
    }

    /// Enters a row for which there is room.
    pub(crate) fn enter(&mut self, row: u32, hash: u64) {
        let entry = self.tag(hash) | (row + 1);
        let mut at = self.home(hash);
        loop {
            let line = self.line_mut(at);
            if !line.is_full() {
                line.0[line.compare(0, u32::MAX).trailing_zeros() as usize] = entry;
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
            let mut same = line.compare(tag, !row_mask);
            while same != 0 {
                // an empty entry looks like one with the tag 0
                let row = (line.0[same.trailing_zeros() as usize] & row_mask).wrapping_sub(1);
                if row == ABSENT {
                    return ABSENT;
                }
                if is_it(row) {
                    return row;
                }
                same &= same - 1;
            }
            if !line.is_full() {
                return ABSENT;
            }
            at = self.next(at);
        }
    }

    /// The first row with the tag of `hash`, in the line at `place` if it is there, or `ABSENT`; `others` is told the rest of them.
    ///
    /// # Safety
    /// `place` is what [`Index::place`] gave for the hash, and the index is what it was then.
    #[inline(always)]
    pub(crate) unsafe fn guess(&self, place: *const u8, hash: u64, mut others: impl FnMut(u32)) -> u32 {
        // SAFETY: as the caller promises, a line of ours.
        let line = unsafe { &*place.cast::<Line>() };
        let row_mask = (1 << self.row_bits) - 1;
        // an empty entry looks like one with the tag 0
        let row_of = |same: u32| (line.0[same.trailing_zeros() as usize % ENTRIES] & row_mask).wrapping_sub(1);
        let same = line.compare(self.tag(hash), !row_mask);
        if same == 0 {
            return if line.is_full() { self.find(hash, |_| true) } else { ABSENT };
        }
        let mut rest = same & (same - 1);
        while rest != 0 {
            others(row_of(rest));
            rest &= rest - 1;
        }
        row_of(same)
    }

    /// Where the line of a hash is in `lines`, the arena of all lines; null if there is none.
    #[inline(always)]
    pub(crate) fn place(&self, hash: u64, lines: &Arena) -> *const u8 {
        let line = self.home(hash);
        // without lines there are no segments either
        let Some(segment) = self.segments.get(line as usize / SEGMENT_LINES) else { return std::ptr::null() };
        lines.at(segment + line % SEGMENT_LINES as u32)
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
        let segment = self.segments[line as usize / SEGMENT_LINES];
        // SAFETY: the segment is ours, of `SEGMENT_LINES` lines, zeroed before their first use, at a cache line.
        unsafe { &*self.lines.at(segment + line % SEGMENT_LINES as u32).cast::<Line>() }
    }

    #[inline]
    fn line_mut(&mut self, line: u32) -> &mut Line {
        let segment = self.segments[line as usize / SEGMENT_LINES];
        // SAFETY: as in `line`, and we are borrowed for change.
        unsafe { &mut *self.lines.at(segment + line % SEGMENT_LINES as u32).cast::<Line>() }
    }
}

/// Rows that so many lines take before they grow.
fn capacity(lines: usize) -> usize {
    lines * ENTRIES * MAX_LOAD_PERCENT / 100
}

/// Lines for `len` rows, one more, and some growth; whole segments where there are several.
fn lines_for(len: usize) -> usize {
    let lines = ((len + 1) * 100).div_ceil(ENTRIES * MAX_LOAD_PERCENT);
    let lines = lines + lines / GROWTH;
    if lines > SEGMENT_LINES { lines.next_multiple_of(SEGMENT_LINES) } else { lines }
}
