//! The rows of one partition: packed into blocks of the arena, found through the index.
//!
//! A row has the same bytes as in a snapshot (`docs/formats/table.md`): sign, weights, optimizer state, show, click
//! and a stamp, without padding, so values are unaligned. Rows do not move until an eviction closes the gaps.

mod changes;

use std::sync::Arc;

use self::changes::ChangeLists;
pub use self::changes::Changes;
use crate::arena::{Arena, GrowError};
use crate::index::Index;
use crate::limit::Overflow;
use crate::partition::mix;

/// A value of a row: a little-endian f32, not aligned.
pub(crate) type Word = [u8; 4];

const SIGN_BYTES: usize = 8;
/// Show, click and stamp.
pub(crate) const TAIL_BYTES: usize = 10;
/// A block has the largest power of two of rows that fit into these bytes.
const BLOCK_BYTES: usize = 32 << 10;
/// Bit of a stamp: the row has its late columns.
const ADMITTED: u16 = 1 << 15;
/// Bit of a stamp: the row is in the list of changes; 0 in a snapshot.
const CHANGED: u16 = 1 << 14;
/// The largest data time that a row can store.
pub const MAX_SEEN: u32 = CHANGED as u32 - 1;

/// The counters of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Shows of samples with the sign.
    pub show: u32,
    /// Clicks of samples with the sign.
    pub click: u32,
    /// Data time of the last push, at most [`MAX_SEEN`].
    pub seen: u32,
    /// Whether the row has its late columns.
    pub admitted: bool,
}

/// The end of a row: show, click, and a stamp that consists of `seen` and the two bits.
pub(crate) type Tail = [u8; TAIL_BYTES];

impl Counters {
    #[inline]
    pub(crate) fn of(tail: &Tail) -> Self {
        let [s0, s1, s2, s3, c0, c1, c2, c3, ..] = *tail;
        let stamp = stamp_of(tail);
        Counters {
            show: u32::from_le_bytes([s0, s1, s2, s3]),
            click: u32::from_le_bytes([c0, c1, c2, c3]),
            seen: u32::from(stamp) & MAX_SEEN,
            admitted: stamp & ADMITTED != 0,
        }
    }

    /// Writes the counters; the `CHANGED` bit stays.
    #[inline]
    pub(crate) fn write(self, tail: &mut Tail) {
        let Counters { show, click, seen, admitted } = self;
        let stamp = seen.min(MAX_SEEN) as u16 | if admitted { ADMITTED } else { 0 } | stamp_of(tail) & CHANGED;
        tail[..4].copy_from_slice(&show.to_le_bytes());
        tail[4..8].copy_from_slice(&click.to_le_bytes());
        tail[8..].copy_from_slice(&stamp.to_le_bytes());
    }
}

#[inline]
fn stamp_of(tail: &Tail) -> u16 {
    u16::from_le_bytes([tail[8], tail[9]])
}

fn mark(tail: &mut Tail, changed: bool) {
    let stamp = if changed { stamp_of(tail) | CHANGED } else { stamp_of(tail) & !CHANGED };
    tail[8..].copy_from_slice(&stamp.to_le_bytes());
}

/// Clears the `CHANGED` bit of a row, as in a snapshot.
pub(crate) fn clear_mark(row: &mut [u8]) {
    if let Some(tail) = row.last_chunk_mut() {
        mark(tail, false);
    }
}

/// A mutable row.
pub(crate) struct RowMut<'a> {
    pub weights: &'a mut [Word],
    pub state: &'a mut [Word],
    pub tail: &'a mut Tail,
}

/// Returns the sign of the row at an address.
///
/// # Safety
/// `address` is the address of a row.
#[inline(always)]
pub(crate) unsafe fn sign_at(address: *const u8) -> u64 {
    // SAFETY: a row begins with its sign.
    u64::from_le_bytes(unsafe { *address.cast::<[u8; SIGN_BYTES]>() })
}

/// Returns the weights of the row at an address.
///
/// # Safety
/// `address` is the address of a row with `width` weights, which does not change while they are borrowed.
#[inline(always)]
pub(crate) unsafe fn weights_at<'a>(address: *const u8, width: usize) -> &'a [Word] {
    // SAFETY: `width` weights follow the sign.
    unsafe { std::slice::from_raw_parts(address.add(SIGN_BYTES).cast(), width) }
}

/// The arena for the rows of a table.
pub(crate) fn row_arena(width: usize, state_width: usize) -> Arena {
    Arena::new(SIGN_BYTES + 4 * (width + state_width) + TAIL_BYTES, BLOCK_BYTES)
}

/// The rows of a partition, identified by their numbers in the arena. The fields that every lookup reads come first.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Rows {
    index: Index,
    arena: Arc<Arena>,
    weights_end: u32,
    len: u32,
    /// First rows of blocks of the arena.
    blocks: Vec<u32>,
    /// Changes since they were last taken; `None` if all rows count as changed.
    changes: Option<ChangeLists>,
    /// Signs rejected and rows evicted since the last `take_overflow`.
    pub(crate) overflow: Overflow,
}

impl Rows {
    pub(crate) fn new(width: usize, arena: Arc<Arena>, lines: Arc<Arena>) -> Self {
        let weights_end = (SIGN_BYTES + 4 * width) as u32;
        let (index, overflow) = (Index::new(lines), Overflow::default());
        Rows { index, arena, weights_end, len: 0, blocks: Vec::new(), changes: None, overflow }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns the address of the index line of a hash in the arena of all lines, or null if there are no rows.
    #[inline(always)]
    pub(crate) fn line_address(&self, hash: u64, lines: &Arena) -> *const u8 {
        self.index.line_address(hash, lines)
    }

    /// Returns the address of a row.
    #[inline]
    pub(crate) fn address(&self, row: u32) -> *const u8 {
        self.arena.at(row)
    }

    /// Bytes of a row up to the end of its weights.
    #[inline]
    pub(crate) fn weights_end(&self) -> usize {
        self.weights_end as usize
    }

    /// Returns the row that a sign with this hash most likely has; calls `others` with further candidates.
    ///
    /// # Safety
    /// `line` is the result of [`Rows::line_address`] for the hash, and no row was inserted or removed since.
    #[inline(always)]
    pub(crate) unsafe fn guess(&self, line: *const u8, hash: u64, others: impl FnMut(u32)) -> u32 {
        // SAFETY: the caller promises the same.
        unsafe { self.index.guess(line, hash, others) }
    }

    /// Returns the row of `sign`, or `ABSENT`.
    #[inline]
    pub(crate) fn find(&self, sign: u64, hash: u64) -> u32 {
        self.index.find(hash, |row| self.sign(row) == sign)
    }

    /// Reserves room for `len` rows in an empty partition.
    pub(crate) fn reserve(&mut self, len: usize) -> Result<(), GrowError> {
        assert_eq!(self.len, 0, "rows are reserved before the first insert");
        let max_row = self.arena.num_items() + len;
        self.index.rebuild(len, max_row, std::iter::empty())
    }

    /// Adds a row for `sign`, which must not have one, and returns its number. The caller writes all of its values.
    pub(crate) fn insert(&mut self, sign: u64, hash: u64) -> Result<u32, GrowError> {
        if self.len() == self.blocks.len() << self.arena.block_bits() {
            if self.blocks.len() == self.blocks.capacity() {
                // A `Vec` would double its capacity.
                self.blocks.reserve_exact(self.blocks.len() / 8 + 1);
            }
            self.blocks.push(self.arena.allocate()?);
        }
        let row = self.number(self.len);
        if self.index.is_full(self.len(), row) {
            self.build_index()?;
        }
        self.len += 1;
        self.row_mut(row)[..SIGN_BYTES].copy_from_slice(&sign.to_le_bytes());
        self.index.insert(row, hash);
        Ok(row)
    }

    /// Rebuilds the index; rows are read in order, which is sequential.
    fn build_index(&mut self) -> Result<(), GrowError> {
        let mut index = self.index.take();
        let rows = self.numbers().map(|row| (row, mix(self.sign(row))));
        let built = index.rebuild(self.len(), self.arena.num_items(), rows);
        self.index = index;
        built
    }

    /// Keeps the rows for which `keep` holds, in order; returns the number of removed rows.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(Counters) -> bool) -> usize {
        let before = self.len;
        let mut kept = 0;
        for at in 0..before {
            let row = self.number(at);
            if !keep(self.counters(row)) {
                self.note_removal(row);
                continue;
            }
            let to = self.number(kept);
            if to != row {
                let bytes = self.arena.item_bytes();
                // SAFETY: both are whole rows of this partition, `self` is borrowed mutably, and rows do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(self.arena.at(row), self.arena.at(to), bytes) };
            }
            kept += 1;
        }
        if kept < before {
            self.truncate(kept);
        }
        (before - kept) as usize
    }

    fn truncate(&mut self, len: u32) {
        self.len = len;
        let num_blocks = self.len().div_ceil(1 << self.arena.block_bits());
        self.blocks.drain(num_blocks..).for_each(|block| self.arena.free(block));
        self.build_index().expect("fewer rows need no more lines");
        self.relist_changes();
    }

    /// The number of the row at a position of this partition.
    #[inline]
    fn number(&self, at: u32) -> u32 {
        let block_bits = self.arena.block_bits();
        self.blocks[at as usize >> block_bits] + (at & ((1 << block_bits) - 1))
    }

    /// Whether a row belongs to this partition.
    pub(crate) fn has(&self, row: u32) -> bool {
        let block = row >> self.arena.block_bits() << self.arena.block_bits();
        self.blocks.contains(&block)
    }

    /// All rows, in the order of their creation.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        (0..self.len).map(|at| self.number(at))
    }

    /// The bytes of a row.
    #[inline]
    fn row(&self, row: u32) -> &[u8] {
        // SAFETY: row numbers come from this partition, so the row is in one of its blocks, which are initialised.
        unsafe { std::slice::from_raw_parts(self.arena.at(row), self.arena.item_bytes()) }
    }

    /// The mutable bytes of a row.
    #[inline]
    fn row_mut(&mut self, row: u32) -> &mut [u8] {
        // SAFETY: as in `row`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.arena.at(row), self.arena.item_bytes()) }
    }

    #[inline]
    pub(crate) fn sign(&self, row: u32) -> u64 {
        self.row(row).first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    #[inline]
    pub(crate) fn weights(&self, row: u32) -> &[Word] {
        self.row(row)[SIGN_BYTES..self.weights_end as usize].as_chunks().0
    }

    pub(crate) fn state(&self, row: u32) -> &[Word] {
        let bytes = self.row(row);
        bytes[self.weights_end as usize..bytes.len() - TAIL_BYTES].as_chunks().0
    }

    #[inline]
    fn tail(&self, row: u32) -> &Tail {
        self.row(row).last_chunk().expect("a row has a tail")
    }

    #[inline]
    pub(crate) fn counters(&self, row: u32) -> Counters {
        Counters::of(self.tail(row))
    }

    /// The mutable parts of a row.
    #[inline]
    pub(crate) fn parts_mut(&mut self, row: u32) -> RowMut<'_> {
        let weights_end = self.weights_end as usize;
        let (values, tail) = self.row_mut(row).split_last_chunk_mut().expect("a row has a tail");
        let (weights, state) = values.split_at_mut(weights_end);
        RowMut { weights: weights[SIGN_BYTES..].as_chunks_mut().0, state: state.as_chunks_mut().0, tail }
    }

    /// Appends the snapshot bytes of a row.
    pub(crate) fn write_to(&self, row: u32, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.row(row));
        clear_mark(bytes);
    }

    /// Appends the bytes of all rows in the order of creation, with their `CHANGED` bits, see [`clear_mark`].
    pub(crate) fn copy_to(&self, bytes: &mut Vec<u8>) {
        let (block_rows, mut left) = (1 << self.arena.block_bits(), self.len());
        for &block in &self.blocks {
            let num_rows = left.min(block_rows);
            // SAFETY: the rows of a block are contiguous, and `num_rows` of them were written.
            let rows = unsafe { std::slice::from_raw_parts(self.arena.at(block), num_rows * self.arena.item_bytes()) };
            bytes.extend_from_slice(rows);
            left -= num_rows;
        }
    }

    /// Writes a row from its snapshot bytes.
    pub(crate) fn read_from(&mut self, row: u32, bytes: &[u8]) {
        self.row_mut(row).copy_from_slice(bytes);
        mark(self.parts_mut(row).tail, false);
    }

    /// Returns the rows in the order of their signs.
    pub(crate) fn sorted(&self) -> Vec<u32> {
        let mut rows: Vec<(u64, u32)> = self.numbers().map(|row| (self.sign(row), row)).collect();
        rows.sort_unstable();
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::index::{ABSENT, line_arena};

    fn new(width: usize, state_width: usize) -> (Rows, Arc<Arena>, Arc<Arena>) {
        let (arena, lines) = (Arc::new(row_arena(width, state_width)), Arc::new(line_arena()));
        (Rows::new(width, arena.clone(), lines.clone()), arena, lines)
    }

    fn add(rows: &mut Rows, sign: u64) -> u32 {
        let row = rows.insert(sign, mix(sign)).unwrap();
        let parts = rows.parts_mut(row);
        parts.weights.fill((sign as f32).to_le_bytes());
        parts.state.fill([7; 4]);
        Counters { show: sign as u32, click: 1, seen: 2, admitted: sign.is_multiple_of(2) }.write(parts.tail);
        rows.note_change(row);
        row
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(
            signs in prop::collection::vec(prop_oneof![0u64..50, any::<u64>(), Just(u64::MAX)], 0..2000),
            evict_every in 1usize..600,
            width in 1usize..40,
        ) {
            let (mut rows, _, lines) = new(width, 1);
            let mut map: HashMap<u64, u32> = HashMap::new();
            for (at, &sign) in signs.iter().enumerate() {
                let found = rows.find(sign, mix(sign));
                prop_assert_eq!(found != ABSENT, map.contains_key(&sign));
                if found == ABSENT {
                    let row = add(&mut rows, sign);
                    prop_assert_eq!(rows.find(sign, mix(sign)), row);
                    map.insert(sign, sign as u32);
                }
                if at % evict_every == evict_every - 1 {
                    let limit = (at as u32).wrapping_mul(0x9e37_79b9);
                    let before = map.len();
                    map.retain(|_, show| *show > limit);
                    prop_assert_eq!(rows.retain(|counters| counters.show > limit), before - map.len());
                }
            }
            prop_assert_eq!(rows.len(), map.len());
            let mut num_missed = 0;
            for (&sign, &show) in &map {
                let row = rows.find(sign, mix(sign));
                prop_assert!(rows.sign(row) == sign);
                let mut guesses = Vec::new();
                // SAFETY: the line is that of the hash, and no row is inserted or removed in between.
                let first = unsafe { rows.guess(rows.line_address(mix(sign), &lines), mix(sign), |other| guesses.push(other)) };
                prop_assert!(first != ABSENT);
                guesses.push(first);
                num_missed += usize::from(!guesses.contains(&row));
                prop_assert!(rows.weights(row).iter().all(|word| f32::from_le_bytes(*word) == sign as f32));
                prop_assert_eq!(rows.state(row), &[[7; 4]][..]);
                prop_assert_eq!(rows.counters(row), Counters { show, click: 1, seen: 2, admitted: sign.is_multiple_of(2) });
            }
            // A row is missed only if it overflowed from a full line in which another row happens to have its tag.
            prop_assert!(num_missed <= 2 + map.len() / 50, "{num_missed} of {}", map.len());
            let sorted: Vec<u64> = rows.sorted().into_iter().map(|row| rows.sign(row)).collect();
            prop_assert!(sorted.is_sorted());
        }
    }

    #[test]
    fn memory_freed_by_an_eviction_is_reused() {
        let (mut rows, arena, lines) = new(10, 10);
        let fill = |rows: &mut Rows| (0..20_000).for_each(|sign| _ = add(rows, sign));
        fill(&mut rows);
        let held = (arena.num_items(), lines.num_items());
        for _ in 0..5 {
            assert_eq!(rows.retain(|_| false), 20_000);
            assert_eq!(rows.len(), 0);
            fill(&mut rows);
        }
        assert_eq!((arena.num_items(), lines.num_items()), held);
    }

    #[test]
    fn partitions_share_an_arena_and_its_blocks() {
        let (mut one, arena, lines) = new(3, 3);
        let mut other = Rows::new(3, arena.clone(), lines);
        for sign in 0..5_000 {
            add(if sign % 3 == 0 { &mut one } else { &mut other }, sign);
        }
        let held = arena.num_items();
        other.retain(|_| false);
        for sign in 5_000..7_000 {
            add(&mut one, sign);
        }
        assert_eq!(arena.num_items(), held, "freed blocks of the other partition are reused");
        for sign in (0..5_000).filter(|sign| sign % 3 == 0).chain(5_000..7_000) {
            assert_eq!(one.counters(one.find(sign, mix(sign))).show, sign as u32);
        }
    }
}
