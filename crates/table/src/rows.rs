//! The rows of one partition: an open-addressing index of 4 bytes an entry over rows in fixed chunks.
//!
//! An index entry is the number of a row plus one, and above it the bits of the sign's hash that do not choose
//! the place: a probe reads a row only if those bits agree. Rows never move, so a row number stays valid.

use crate::partition::mix;
use crate::prefetch::prefetch_read;

/// 32-bit words before the weights: sign (2), show, click, seen, changed.
const HEADER: usize = 6;
/// A chunk has as many rows, a power of two, as fit into so many words: 32 KB.
const CHUNK_WORDS: usize = 8192;
/// Grow beyond this share of used places, in eighths.
const MAX_LOAD_EIGHTHS: usize = 6;
const SMALLEST: usize = 16;

/// No such row.
pub(crate) const ABSENT: u32 = u32::MAX;

/// The counters of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times samples with the sign were shown.
    pub show: u32,
    /// Times they were clicked.
    pub click: u32,
    /// Data time of the last push.
    pub seen: u32,
    /// The publish number under which it last changed.
    pub changed: u32,
}

#[derive(Debug)]
pub(crate) struct Rows {
    index: Vec<u32>,
    chunks: Vec<Box<[u32]>>,
    len: usize,
    /// Words a row.
    stride: usize,
    /// A chunk has `1 << chunk_bits` rows.
    chunk_bits: u32,
    width: usize,
}

impl Rows {
    pub(crate) fn new(width: usize, state_width: usize) -> Self {
        let stride = HEADER + width + state_width;
        let chunk_bits = (CHUNK_WORDS / stride).max(1).ilog2();
        Rows { index: Vec::new(), chunks: Vec::new(), len: 0, stride, chunk_bits, width }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes held, spare capacity included.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.index.capacity() + (self.chunks.len() << self.chunk_bits) * self.stride)
    }

    /// Asks for the index entry of a sign with this hash.
    #[inline]
    pub(crate) fn prefetch_entry(&self, hash: u64) {
        if !self.index.is_empty() {
            prefetch_read(&raw const self.index[hash as usize & (self.index.len() - 1)]);
        }
    }

    /// Asks for the row that a sign with this hash most likely has.
    #[inline]
    pub(crate) fn prefetch_row(&self, hash: u64) {
        if self.index.is_empty() {
            return;
        }
        let mask = self.index.len() - 1;
        let entry = self.index[hash as usize & mask];
        if entry != 0 {
            let row = self.row((entry as usize & mask) as u32 - 1);
            prefetch_read(row.as_ptr());
            prefetch_read(&raw const row[(self.stride - 1).min(16)]);
        }
    }

    /// The row of `sign`, or `ABSENT`.
    #[inline]
    pub(crate) fn find(&self, sign: u64, hash: u64) -> u32 {
        if self.index.is_empty() {
            return ABSENT;
        }
        let mask = self.index.len() - 1;
        let tag = hash as u32 & !(mask as u32);
        let mut at = hash as usize & mask;
        loop {
            let entry = self.index[at];
            if entry == 0 {
                return ABSENT;
            }
            if entry & !(mask as u32) == tag {
                let row = (entry & mask as u32) - 1;
                if self.sign(row) == sign {
                    return row;
                }
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds a row of zeroes for `sign`, which has none, and returns its number.
    pub(crate) fn insert(&mut self, sign: u64, hash: u64) -> u32 {
        if (self.len + 1) * 8 > self.index.len() * MAX_LOAD_EIGHTHS {
            self.grow();
        }
        let row = self.len as u32;
        if self.len == self.chunks.len() << self.chunk_bits {
            self.chunks.push(vec![0; self.stride << self.chunk_bits].into_boxed_slice());
        }
        self.len += 1;
        let words = self.row_mut(row);
        words[0] = sign as u32;
        words[1] = (sign >> 32) as u32;
        self.enter(row, hash);
        row
    }

    /// Doubles the index; signs are read back from the rows in their order, which is sequential.
    fn grow(&mut self) {
        let places = (self.index.len() * 2).max(SMALLEST);
        assert!(places <= 1 << 32, "a partition holds at most 3·2^30 rows: raise sparse.partitions");
        self.index = vec![0; places];
        for row in 0..self.len as u32 {
            let hash = mix(self.sign(row));
            self.enter(row, hash);
        }
    }

    fn enter(&mut self, row: u32, hash: u64) {
        let mask = self.index.len() - 1;
        let mut at = hash as usize & mask;
        while self.index[at] != 0 {
            at = (at + 1) & mask;
        }
        self.index[at] = (hash as u32 & !(mask as u32)) | (row + 1);
    }

    /// (chunk, place in it) of a row.
    #[inline]
    fn place(&self, row: u32) -> (usize, usize) {
        (row as usize >> self.chunk_bits, row as usize & ((1 << self.chunk_bits) - 1))
    }

    #[inline]
    fn row(&self, row: u32) -> &[u32] {
        let (chunk, at) = self.place(row);
        &self.chunks[chunk][at * self.stride..(at + 1) * self.stride]
    }

    #[inline]
    fn row_mut(&mut self, row: u32) -> &mut [u32] {
        let (chunk, at) = self.place(row);
        &mut self.chunks[chunk][at * self.stride..(at + 1) * self.stride]
    }

    #[inline]
    pub(crate) fn sign(&self, row: u32) -> u64 {
        let words = self.row(row);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    pub(crate) fn counters(&self, row: u32) -> Counters {
        let words = self.row(row);
        Counters { show: words[2], click: words[3], seen: words[4], changed: words[5] }
    }

    pub(crate) fn set_counters(&mut self, row: u32, counters: Counters) {
        let Counters { show, click, seen, changed } = counters;
        self.row_mut(row)[2..HEADER].copy_from_slice(&[show, click, seen, changed]);
    }

    #[inline]
    pub(crate) fn weights(&self, row: u32) -> &[f32] {
        bytemuck::cast_slice(&self.row(row)[HEADER..HEADER + self.width])
    }

    pub(crate) fn state(&self, row: u32) -> &[f32] {
        bytemuck::cast_slice(&self.row(row)[HEADER + self.width..])
    }

    /// Weights and optimizer state, to change.
    #[inline]
    pub(crate) fn values_mut(&mut self, row: u32) -> (&mut [f32], &mut [f32]) {
        let width = self.width;
        bytemuck::cast_slice_mut(&mut self.row_mut(row)[HEADER..]).split_at_mut(width)
    }

    /// Row numbers in the order of their signs.
    pub(crate) fn sorted(&self) -> Vec<u32> {
        let mut rows: Vec<u32> = (0..self.len as u32).collect();
        rows.sort_unstable_by_key(|&row| self.sign(row));
        rows
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_map(signs in prop::collection::vec(prop_oneof![0u64..50, any::<u64>(), Just(u64::MAX)], 0..2000)) {
            let mut rows = Rows::new(2, 1);
            let mut map: HashMap<u64, u32> = HashMap::new();
            for &sign in &signs {
                let found = rows.find(sign, mix(sign));
                prop_assert_eq!(found, map.get(&sign).copied().unwrap_or(ABSENT));
                if found == ABSENT {
                    let row = rows.insert(sign, mix(sign));
                    rows.values_mut(row).0[0] = sign as f32;
                    map.insert(sign, row);
                }
            }
            prop_assert_eq!(rows.len(), map.len());
            for (&sign, &row) in &map {
                prop_assert_eq!(rows.find(sign, mix(sign)), row);
                prop_assert_eq!(rows.weights(row)[0], sign as f32);
            }
            let sorted: Vec<u64> = rows.sorted().into_iter().map(|row| rows.sign(row)).collect();
            prop_assert!(sorted.is_sorted());
        }
    }
}
