//! The rows of one partition: packed side by side in blocks of the arena, found through the index.
//!
//! A row is the bytes that a snapshot has of it (`docs/formats/table.md`): sign, weights, optimizer state, show,
//! click and a stamp, without padding, so values are read and written wherever they stand. Rows stay where they are
//! until an eviction closes the gaps it makes.

use std::sync::Arc;

use crate::arena::{Arena, Block};
use crate::index::{ABSENT, Index};
use crate::partition::mix;
use crate::prefetch::prefetch_read;

/// A value of a row: an f32, little endian, at any address.
pub(crate) type Word = [u8; 4];

const SIGN_BYTES: usize = 8;
/// Show, click and stamp.
const TAIL_BYTES: usize = 10;
/// A block has as many rows, a power of two, as fit into so many bytes.
const BLOCK_BYTES: usize = 32 << 10;
/// Lines of a row that are asked for ahead: the hardware follows by itself where there are more.
const MAX_LINES: usize = 8;
/// The bit of a stamp that says that the row has its late columns; the others are `seen`.
const ADMITTED: u16 = 1 << 15;
/// The last data time that a row can tell from later ones.
pub const MAX_SEEN: u32 = ADMITTED as u32 - 1;

/// The counters of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times samples with the sign were shown.
    pub show: u32,
    /// Times they were clicked.
    pub click: u32,
    /// Data time of the last push, at most [`MAX_SEEN`].
    pub seen: u32,
    /// Whether the row has its late columns.
    pub admitted: bool,
}

impl Counters {
    pub(crate) fn from_bytes(tail: &[u8; TAIL_BYTES]) -> Self {
        let [s0, s1, s2, s3, c0, c1, c2, c3, t0, t1] = *tail;
        let stamp = u16::from_le_bytes([t0, t1]);
        Counters {
            show: u32::from_le_bytes([s0, s1, s2, s3]),
            click: u32::from_le_bytes([c0, c1, c2, c3]),
            seen: u32::from(stamp & !ADMITTED),
            admitted: stamp & ADMITTED != 0,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; TAIL_BYTES] {
        let [s0, s1, s2, s3] = self.show.to_le_bytes();
        let [c0, c1, c2, c3] = self.click.to_le_bytes();
        let stamp = self.seen.min(MAX_SEEN) as u16 | if self.admitted { ADMITTED } else { 0 };
        let [t0, t1] = stamp.to_le_bytes();
        [s0, s1, s2, s3, c0, c1, c2, c3, t0, t1]
    }
}

/// A row to change.
pub(crate) struct RowMut<'a> {
    pub weights: &'a mut [Word],
    pub state: &'a mut [Word],
    pub tail: &'a mut [u8; TAIL_BYTES],
}

/// Where the parts of a row stand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    width: u32,
    row_bytes: u32,
    /// A block has `1 << block_bits` rows.
    block_bits: u32,
}

impl Shape {
    pub(crate) fn new(width: usize, state_width: usize) -> Self {
        let row_bytes = SIGN_BYTES + 4 * (width + state_width) + TAIL_BYTES;
        let block_bits = (BLOCK_BYTES / row_bytes).max(1).ilog2();
        Shape { width: width as u32, row_bytes: row_bytes as u32, block_bits }
    }

    #[inline]
    pub(crate) fn row_bytes(self) -> usize {
        self.row_bytes as usize
    }

    #[inline]
    fn weights_end(self) -> usize {
        SIGN_BYTES + 4 * self.width as usize
    }

    fn block_bytes(self) -> usize {
        self.row_bytes() << self.block_bits
    }
}

#[derive(Debug)]
pub(crate) struct Rows {
    index: Index,
    blocks: Vec<Block>,
    len: usize,
    shape: Shape,
    /// A bit for every row that changed since the changes were last taken.
    changed: Vec<u64>,
    arena: Arc<Arena>,
}

impl Rows {
    pub(crate) fn new(shape: Shape, arena: Arc<Arena>) -> Self {
        Rows { index: Index::new(arena.clone()), blocks: Vec::new(), len: 0, shape, changed: Vec::new(), arena }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes beyond the arena's.
    pub(crate) fn num_bytes(&self) -> usize {
        self.index.num_bytes() + self.blocks.capacity() * size_of::<Block>() + 8 * self.changed.capacity()
    }

    /// Asks for the index line of a sign with this hash.
    #[inline]
    pub(crate) fn prefetch_entry(&self, hash: u64) {
        self.index.prefetch(hash);
    }

    /// The row that a sign with this hash most likely has.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> u32 {
        self.index.find(hash, |_| true)
    }

    /// Asks for the sign and the weights of a row.
    #[inline]
    pub(crate) fn prefetch_weights(&self, row: u32) {
        self.prefetch(row, self.shape.weights_end());
    }

    /// Asks for all of a row.
    #[inline]
    pub(crate) fn prefetch_row(&self, row: u32) {
        self.prefetch(row, self.shape.row_bytes());
    }

    #[inline]
    fn prefetch(&self, row: u32, bytes: usize) {
        let start = self.row(row).as_ptr();
        for line in 0..bytes.div_ceil(64).min(MAX_LINES) {
            prefetch_read(start.wrapping_add(64 * line));
        }
        // rows are not aligned: the last byte may be in one line more
        prefetch_read(start.wrapping_add(bytes - 1));
    }

    /// Whether `row` is there and `sign`'s.
    #[inline]
    pub(crate) fn is(&self, row: u32, sign: u64) -> bool {
        (row as usize) < self.len && self.sign(row) == sign
    }

    /// The row of `sign`, or `ABSENT`.
    #[inline]
    pub(crate) fn find(&self, sign: u64, hash: u64) -> u32 {
        self.index.find(hash, |row| self.sign(row) == sign)
    }

    /// Makes room for so many rows at once.
    pub(crate) fn reserve(&mut self, len: usize) {
        assert_eq!(self.len, 0, "room is made before the first row");
        self.index.rebuild(len, std::iter::empty());
    }

    /// Adds a row for `sign`, which has none: all of it is to be written. Returns its number.
    pub(crate) fn insert(&mut self, sign: u64, hash: u64) -> u32 {
        if self.index.is_full(self.len) {
            self.build_index();
        }
        let row = self.len as u32;
        if self.len == self.blocks.len() << self.shape.block_bits {
            push_frugally(&mut self.blocks, self.arena.take(self.shape.block_bytes()));
        }
        if self.len == self.changed.len() * 64 {
            push_frugally(&mut self.changed, 0);
        }
        self.len += 1;
        self.row_mut(row)[..SIGN_BYTES].copy_from_slice(&sign.to_le_bytes());
        self.index.enter(row, hash);
        self.mark_changed(row);
        row
    }

    /// Enters all rows anew; their signs are read in their order, which is sequential.
    fn build_index(&mut self) {
        let Rows { index, blocks, len, shape, .. } = self;
        index.rebuild(*len, (0..*len as u32).map(|row| mix(sign_of(row_bytes(blocks, *shape, row)))));
    }

    /// Keeps the rows of which `keep` says so, in their order; returns how many went.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(Counters) -> bool) -> usize {
        let before = self.len;
        let mut kept = 0;
        for row in 0..before as u32 {
            if !keep(self.counters(row)) {
                continue;
            }
            if kept != row {
                let changed = self.is_changed(row);
                let (from, to) = (self.row(row).as_ptr(), self.row_mut(kept).as_mut_ptr());
                // SAFETY: both are whole rows of ours, and two rows do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(from, to, self.shape.row_bytes()) };
                self.set_changed(kept, changed);
            }
            kept += 1;
        }
        self.truncate(kept as usize);
        before - self.len
    }

    fn truncate(&mut self, len: usize) {
        if len == self.len {
            return;
        }
        self.len = len;
        self.changed.truncate(len.div_ceil(64));
        self.changed.shrink_to_fit();
        if let (Some(last), rest @ 1..) = (self.changed.last_mut(), len % 64) {
            *last &= (1 << rest) - 1;
        }
        while self.blocks.len() > len.div_ceil(1 << self.shape.block_bits) {
            if let Some(block) = self.blocks.pop() {
                self.arena.give_back(block, self.shape.block_bytes());
            }
        }
        self.build_index();
    }

    /// The bytes of a row.
    #[inline]
    pub(crate) fn row(&self, row: u32) -> &[u8] {
        row_bytes(&self.blocks, self.shape, row)
    }

    /// The bytes of a row, to change.
    #[inline]
    pub(crate) fn row_mut(&mut self, row: u32) -> &mut [u8] {
        let Shape { block_bits, .. } = self.shape;
        let block = &mut self.blocks[row as usize >> block_bits];
        let at = row as usize & ((1 << block_bits) - 1);
        // SAFETY: as in `row_bytes`, and the block is borrowed for change.
        unsafe {
            let start = block.as_mut_ptr().add(at * self.shape.row_bytes());
            std::slice::from_raw_parts_mut(start, self.shape.row_bytes())
        }
    }

    #[inline]
    pub(crate) fn sign(&self, row: u32) -> u64 {
        sign_of(self.row(row))
    }

    #[inline]
    pub(crate) fn weights(&self, row: u32) -> &[Word] {
        self.row(row)[SIGN_BYTES..self.shape.weights_end()].as_chunks().0
    }

    pub(crate) fn state(&self, row: u32) -> &[Word] {
        let bytes = self.row(row);
        bytes[self.shape.weights_end()..bytes.len() - TAIL_BYTES].as_chunks().0
    }

    #[inline]
    pub(crate) fn counters(&self, row: u32) -> Counters {
        self.row(row).last_chunk().map_or_else(Counters::default, Counters::from_bytes)
    }

    pub(crate) fn set_counters(&mut self, row: u32, counters: Counters) {
        *self.parts_mut(row).tail = counters.to_bytes();
    }

    /// The parts of a row, to change.
    #[inline]
    pub(crate) fn parts_mut(&mut self, row: u32) -> RowMut<'_> {
        let weights_end = self.shape.weights_end();
        let (values, tail) = self.row_mut(row).split_last_chunk_mut().expect("a row has a tail");
        let (weights, state) = values.split_at_mut(weights_end);
        RowMut { weights: weights[SIGN_BYTES..].as_chunks_mut().0, state: state.as_chunks_mut().0, tail }
    }

    /// Notes that the next publish has to carry the row.
    #[inline]
    pub(crate) fn mark_changed(&mut self, row: u32) {
        self.set_changed(row, true);
    }

    #[inline]
    fn set_changed(&mut self, row: u32, changed: bool) {
        let word = &mut self.changed[row as usize / 64];
        let bit = 1 << (row % 64);
        *word = if changed { *word | bit } else { *word & !bit };
    }

    fn is_changed(&self, row: u32) -> bool {
        self.changed[row as usize / 64] >> (row % 64) & 1 == 1
    }

    /// The signs of the rows that changed since the last call, in no order.
    pub(crate) fn take_changed(&mut self) -> Vec<u64> {
        let signs = (0..self.len as u32).filter(|&row| self.is_changed(row)).map(|row| self.sign(row)).collect();
        self.changed.fill(0);
        signs
    }

    /// Row numbers in the order of their signs.
    pub(crate) fn sorted(&self) -> Vec<u32> {
        let mut rows: Vec<(u64, u32)> = (0..self.len as u32).map(|row| (self.sign(row), row)).collect();
        rows.sort_unstable();
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

#[inline]
fn row_bytes(blocks: &[Block], shape: Shape, row: u32) -> &[u8] {
    let block = &blocks[row as usize >> shape.block_bits];
    let at = row as usize & ((1 << shape.block_bits) - 1);
    // SAFETY: a block is ours alone and has `1 << block_bits` rows; its bytes are zeroes or what was written.
    unsafe { std::slice::from_raw_parts(block.as_ptr().add(at * shape.row_bytes()), shape.row_bytes()) }
}

#[inline]
fn sign_of(row: &[u8]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Pushes with an eighth of spare room, where a `Vec` by itself doubles.
fn push_frugally<T>(items: &mut Vec<T>, item: T) {
    if items.len() == items.capacity() {
        items.reserve_exact(items.len() / 8 + 1);
    }
    items.push(item);
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn add(rows: &mut Rows, sign: u64) -> u32 {
        let row = rows.insert(sign, mix(sign));
        let parts = rows.parts_mut(row);
        parts.weights.fill((sign as f32).to_le_bytes());
        parts.state.fill([7; 4]);
        rows.set_counters(row, Counters { show: sign as u32, click: 1, seen: 2, admitted: sign % 2 == 0 });
        row
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(
            signs in prop::collection::vec(prop_oneof![0u64..50, any::<u64>(), Just(u64::MAX)], 0..2000),
            evict_every in 1usize..600,
            width in 1usize..40,
        ) {
            let mut rows = Rows::new(Shape::new(width, 1), Arc::default());
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
            for (&sign, &show) in &map {
                let row = rows.find(sign, mix(sign));
                prop_assert!(rows.is(row, sign));
                prop_assert_eq!(rows.guess(mix(sign)) == ABSENT, false);
                prop_assert!(rows.weights(row).iter().all(|word| f32::from_le_bytes(*word) == sign as f32));
                prop_assert_eq!(rows.state(row), &[[7; 4]][..]);
                prop_assert_eq!(rows.counters(row), Counters { show, click: 1, seen: 2, admitted: sign % 2 == 0 });
            }
            let sorted: Vec<u64> = rows.sorted().into_iter().map(|row| rows.sign(row)).collect();
            prop_assert!(sorted.is_sorted());
        }

        #[test]
        fn changes_are_told_once_and_move_with_their_rows(
            signs in prop::collection::hash_set(any::<u64>(), 1..500), marked in any::<u64>(), limit in any::<u32>()
        ) {
            let mut rows = Rows::new(Shape::new(1, 0), Arc::default());
            for &sign in &signs {
                add(&mut rows, sign);
            }
            let mut all = rows.take_changed();
            all.sort_unstable();
            prop_assert_eq!(all.len(), signs.len());
            prop_assert!(rows.take_changed().is_empty());
            let is_marked = |sign: u64| mix(sign ^ marked) % 3 == 0;
            for &sign in all.iter().filter(|&&sign| is_marked(sign)) {
                rows.mark_changed(rows.find(sign, mix(sign)));
            }
            rows.retain(|counters| counters.show > limit);
            let mut changed = rows.take_changed();
            changed.sort_unstable();
            let expected: Vec<u64> = all.into_iter().filter(|&sign| is_marked(sign) && sign as u32 > limit).collect();
            prop_assert_eq!(changed, expected);
        }
    }

    #[test]
    fn what_an_eviction_frees_is_used_again() {
        let arena = Arc::new(Arena::default());
        let mut rows = Rows::new(Shape::new(10, 10), arena.clone());
        let fill = |rows: &mut Rows| (0..20_000).for_each(|sign| _ = add(rows, sign));
        fill(&mut rows);
        let held = arena.num_bytes();
        for _ in 0..5 {
            assert_eq!(rows.retain(|_| false), 20_000);
            assert_eq!(rows.len(), 0);
            fill(&mut rows);
        }
        assert_eq!(arena.num_bytes(), held);
    }

    #[test]
    fn little_is_spare() {
        let arena = Arc::new(Arena::default());
        let mut rows = Rows::new(Shape::new(10, 10), arena.clone());
        for sign in 0..60_000u64 {
            add(&mut rows, sign);
            if sign % 1000 == 999 && sign > 10_000 {
                let spare = (arena.num_bytes() + rows.num_bytes()) as f64 / (sign + 1) as f64 - 88.0;
                // freed index blocks count here; the next partition takes them
                assert!(spare < 23.0, "{spare} bytes a key at {sign}");
            }
        }
    }
}
