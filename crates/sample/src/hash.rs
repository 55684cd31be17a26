//! The hash from categorical values to signs, and the random numbers of permutations; both are part of the data format.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The only version of [`sign_of`] that this release reads and writes.
pub const HASH_VERSION: u32 = 1;

/// Returns the seed of a slot; equal values of two slots get different signs.
pub fn slot_seed(slot: &str) -> u64 {
    xxh3_64(slot.as_bytes())
}

/// Hash version 1: XXH3-64 of the value's bytes, seeded with XXH3-64 of the slot's name.
#[inline]
pub fn sign_of(slot_seed: u64, value: &[u8]) -> u64 {
    xxh3_64_with_seed(value, slot_seed)
}

/// SplitMix64: the generator behind every permutation of units and records.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator whose stream depends on `parts` alone.
    pub fn from_parts(parts: &[u64]) -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15;
        for &part in parts {
            let mut step = SplitMix64(state ^ part);
            state = step.next();
        }
        SplitMix64(state)
    }

    /// Returns the next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "the stream is infinite")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which must not be 0 (multiply-shift; the bias is below 2^-32 for bounds below 2^32).
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Permutes `items` (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_signs_never_change() {
        assert_eq!(sign_of(slot_seed("C1"), b"68fd1e64"), 13_509_463_285_594_505_790);
        assert_eq!(sign_of(slot_seed("C2"), b"68fd1e64"), 10_178_713_517_322_396_983);
        assert_eq!(sign_of(slot_seed("C1"), b""), 12_008_751_331_287_298_922);
    }

    #[test]
    fn golden_permutation_never_changes() {
        let mut items: Vec<u32> = (0..8).collect();
        SplitMix64::from_parts(&[1, 0, 7]).shuffle(&mut items);
        assert_eq!(items, [6, 2, 0, 5, 1, 4, 3, 7]);
    }
}
