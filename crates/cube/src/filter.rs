//! A Bloom filter of the signs of a segment, small enough to stay in the cache: most lookups end here.

use elasticrec_table::prefetch::prefetch_read;

const BITS_PER_SIGN: usize = 12;
/// 128 KB, a share of the second-level cache.
const NEAR_WORDS: usize = 16 << 10;

/// A Bloom filter with one word per lookup.
pub(crate) struct Filter {
    words: Vec<u64>,
}

impl Filter {
    /// Creates an empty filter for a number of signs.
    pub(crate) fn new(num_signs: usize) -> Filter {
        Filter { words: vec![0; (num_signs * BITS_PER_SIGN).div_ceil(64).max(1)] }
    }

    pub(crate) fn add(&mut self, mixed: u64) {
        let at = self.word_of(mixed);
        self.words[at] |= bits_of(mixed);
    }

    /// Whether the segment may have a sign with these [`bits_of`]; false is certain.
    #[inline(always)]
    pub(crate) fn may_have(&self, mixed: u64, bits: u64) -> bool {
        self.words.get(self.word_of(mixed)).is_some_and(|word| word & bits == bits)
    }

    #[inline(always)]
    pub(crate) fn prefetch(&self, mixed: u64) {
        prefetch_read(self.words.as_ptr().wrapping_add(self.word_of(mixed)));
    }

    /// Whether the filter is too large to stay in the second-level cache.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        self.words.len() > NEAR_WORDS
    }

    pub(crate) fn bytes(&self) -> usize {
        8 * self.words.len()
    }

    /// The word of a sign. It comes from the low half of the mixed sign; the bits come from the high half.
    #[inline(always)]
    fn word_of(&self, mixed: u64) -> usize {
        ((u64::from(mixed as u32) * self.words.len() as u64) >> 32) as usize
    }
}

/// The bits of a sign: four of 64. They do not depend on the highest bits of the mixed sign, which are nearly equal within
/// a partition.
#[inline(always)]
pub(crate) fn bits_of(mixed: u64) -> u64 {
    let bit = |shift: u32| 1_u64 << ((mixed >> shift) & 63);
    bit(32) | bit(38) | bit(44) | bit(50)
}
