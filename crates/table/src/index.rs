//! The index of a partition: from the hash of a sign to a row number, 4 bytes per entry, 16 entries per cache line.
//!
//! The low bits of an entry are the number of a row in the arena plus one. The bits above are a tag: bits of the hash
//! that do not choose the line. A row is read only if its tag matches. A line fills from its front and overflows into
//! the next one. Entries are not removed one by one: an eviction rebuilds the index.

use std::sync::Arc;

use crate::arena::{Arena, GrowError};

const ENTRIES: usize = 16;
/// A block of the index's arena, large enough that the list of blocks stays in the first-level cache.
const SEGMENT_BYTES: usize = 16 << 10;
const SEGMENT_LINES: usize = SEGMENT_BYTES / size_of::<Line>();
/// Grow beyond this percentage of used entries: lines are long enough that few keys overflow.
const MAX_USED_PERCENT: usize = 79;
/// Grow by 1/24, so that little capacity is spare.
const GROWTH: usize = 24;

/// Stands for "no row".
pub(crate) const ABSENT: u32 = u32::MAX;

#[repr(C, align(64))]
struct Line([u32; ENTRIES]);

impl Line {
    /// Returns the bit mask of the entries that equal `value` under `mask`.
    #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
    #[inline(always)]
    fn compare(&self, value: u32, mask: u32) -> u32 {
        use std::arch::x86_64::{
            __m128i, _mm_and_si128, _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16,
            _mm_packs_epi32, _mm_set1_epi32,
        };
        let fours = self.0.as_ptr().cast::<__m128i>();
        // SAFETY: SSE2 is part of x86-64; a line is four aligned pieces of 16 bytes.
        unsafe {
            let (value, mask) = (_mm_set1_epi32(value as i32), _mm_set1_epi32(mask as i32));
            let [a, b, c, d] =
                [0, 1, 2, 3].map(|i| _mm_cmpeq_epi32(_mm_and_si128(_mm_load_si128(fours.add(i)), mask), value));
            _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d))) as u32
        }
    }

    /// The portable fallback.
    #[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
    #[inline(always)]
    fn compare(&self, value: u32, mask: u32) -> u32 {
        self.0.iter().enumerate().fold(0, |bits, (i, entry)| bits | u32::from(entry & mask == value) << i)
    }

    /// Whether keys of this line may be in the next one.
    #[inline(always)]
    fn is_full(&self) -> bool {
        self.0[ENTRIES - 1] != 0
    }
}

/// The arena of the lines of [`Index`].
pub(crate) fn line_arena() -> Arena {
    Arena::new(size_of::<Line>(), SEGMENT_BYTES)
}

#[derive(Debug)]
pub(crate) struct Index {
    /// First lines of blocks of the arena.
    segments: Box<[u32]>,
    num_lines: u32,
    /// Number of low bits of an entry that hold the row number plus one.
    row_bits: u32,
    lines: Arc<Arena>,
}

impl Index {
    pub(crate) fn new(lines: Arc<Arena>) -> Self {
        Index { segments: Box::default(), num_lines: 0, row_bits: 1, lines }
    }

    /// Takes the index and leaves an empty one.
    pub(crate) fn take(&mut self) -> Self {
        let empty = Index::new(self.lines.clone());
        std::mem::replace(self, empty)
    }

    /// Whether `rebuild` must be called before `row` is added to `len` other rows.
    #[inline]
    pub(crate) fn is_full(&self, len: usize, row: u32) -> bool {
        len >= capacity(self.num_lines as usize) || (row + 1) >> self.row_bits != 0
    }

    /// Replaces the entries by `rows`, with room for more than `len` rows and for numbers above `max_row`.
    ///
    /// An error leaves the index unchanged. Fewer rows than before never need more memory.
    pub(crate) fn rebuild(
        &mut self,
        len: usize,
        max_row: usize,
        rows: impl Iterator<Item = (u32, u64)>,
    ) -> Result<(), GrowError> {
        let room = capacity(self.num_lines as usize);
        // Keep the lines unless half of them are free: the rows that follow an eviction would need them again.
        let lines = if room > len && room / 2 <= len + ENTRIES { self.num_lines as usize } else { lines_for(len) };
        self.resize(lines.div_ceil(SEGMENT_LINES))?;
        // 31 bits are enough for every number of the arena.
        self.row_bits = (((max_row + 2) * 5 / 4).ilog2() + 1).min(31);
        for &segment in &self.segments {
            // SAFETY: the segment has `SEGMENT_BYTES` bytes and belongs to this index.
            unsafe { self.lines.at(segment).write_bytes(0, SEGMENT_BYTES) };
        }
        self.num_lines = lines as u32;
        rows.for_each(|(row, hash)| self.insert(row, hash));
        Ok(())
    }

    /// Allocates or frees segments until there are `num_segments`; on an error their number is unchanged.
    fn resize(&mut self, num_segments: usize) -> Result<(), GrowError> {
        let held = self.segments.len();
        let mut segments = std::mem::take(&mut self.segments).into_vec();
        let grown = (held..num_segments).try_for_each(|_| self.lines.allocate().map(|segment| segments.push(segment)));
        let kept = if grown.is_ok() { num_segments } else { held };
        segments.drain(kept..).for_each(|segment| self.lines.free(segment));
        self.segments = segments.into_boxed_slice();
        grown
    }

    /// Adds a row; the index must have room for it.
    pub(crate) fn insert(&mut self, row: u32, hash: u64) {
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

    /// Returns the first row with the tag of `hash` for which `is_match` holds, or `ABSENT`.
    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, mut is_match: impl FnMut(u32) -> bool) -> u32 {
        if self.num_lines == 0 {
            return ABSENT;
        }
        let (tag, row_mask) = (self.tag(hash), (1 << self.row_bits) - 1);
        let mut at = self.home(hash);
        loop {
            let line = self.line(at);
            let mut same = line.compare(tag, !row_mask);
            while same != 0 {
                // An empty entry looks like an entry with tag 0.
                let row = (line.0[same.trailing_zeros() as usize] & row_mask).wrapping_sub(1);
                if row == ABSENT {
                    return ABSENT;
                }
                if is_match(row) {
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

    /// Returns the first row with the tag of `hash`, or `ABSENT`; calls `others` with further rows of the line that have
    /// the tag.
    ///
    /// # Safety
    /// `line` is the result of [`Index::line_address`] for the hash, and the index did not change since.
    #[inline(always)]
    pub(crate) unsafe fn guess(&self, line: *const u8, hash: u64, mut others: impl FnMut(u32)) -> u32 {
        // SAFETY: the caller promises that it is a line of this index.
        let line = unsafe { &*line.cast::<Line>() };
        let row_mask = (1 << self.row_bits) - 1;
        // An empty entry looks like an entry with tag 0.
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

    /// Returns the address of the line of a hash in `lines`, the arena of all lines, or null if the index is empty.
    #[inline(always)]
    pub(crate) fn line_address(&self, hash: u64, lines: &Arena) -> *const u8 {
        let line = self.home(hash);
        // An empty index has no segments.
        let Some(segment) = self.segments.get(line as usize / SEGMENT_LINES) else { return std::ptr::null() };
        lines.at(segment + line % SEGMENT_LINES as u32)
    }

    /// Chooses the line by the low half of the hash, because the high bits choose the partition.
    #[inline]
    fn home(&self, hash: u64) -> u32 {
        ((u64::from(hash as u32) * u64::from(self.num_lines)) >> 32) as u32
    }

    /// The low bits of the hash, which matter least in the choice of the line.
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
        // SAFETY: the segment belongs to this index, has `SEGMENT_LINES` aligned lines, and was zeroed before its first use.
        unsafe { &*self.lines.at(segment + line % SEGMENT_LINES as u32).cast::<Line>() }
    }

    #[inline]
    fn line_mut(&mut self, line: u32) -> &mut Line {
        let segment = self.segments[line as usize / SEGMENT_LINES];
        // SAFETY: as in `line`, and `self` is borrowed mutably.
        unsafe { &mut *self.lines.at(segment + line % SEGMENT_LINES as u32).cast::<Line>() }
    }
}

/// Returns the number of rows that `lines` hold before the index grows.
fn capacity(lines: usize) -> usize {
    lines * ENTRIES * MAX_USED_PERCENT / 100
}

/// Returns the number of lines for `len + 1` rows and some growth, in whole segments if there are several.
fn lines_for(len: usize) -> usize {
    let lines = ((len + 1) * 100).div_ceil(ENTRIES * MAX_USED_PERCENT);
    let lines = lines + lines / GROWTH;
    if lines > SEGMENT_LINES { lines.next_multiple_of(SEGMENT_LINES) } else { lines }
}
