//! Which signs a segment may have, in so few bytes that they stay near the core: most lookups end here.

use elasticrec_table::prefetch::prefetch_read;

const BITS_A_SIGN: usize = 12;
/// 128 KB: a share of the second-level cache.
const NEAR_WORDS: usize = 16 << 10;

/// A Bloom filter of which one sign touches one word.
pub(crate) struct Filter {
    words: Vec<u64>,
}

impl Filter {
    /// An empty filter, made for so many signs.
    pub(crate) fn new(num_signs: usize) -> Filter {
        Filter { words: vec![0; (num_signs * BITS_A_SIGN).div_ceil(64).max(1)] }
    }

    pub(crate) fn add(&mut self, mixed: u64) {
        let at = self.place(mixed);
        self.words[at] |= bits_of(mixed);
    }

    /// Whether it may have a sign with these [`bits_of`]. False is certain.
    #[inline(always)]
    pub(crate) fn may_have(&self, mixed: u64, bits: u64) -> bool {
        self.words.get(self.place(mixed)).is_some_and(|word| word & bits == bits)
    }

    #[inline(always)]
    pub(crate) fn prefetch(&self, mixed: u64) {
        prefetch_read(self.words.as_ptr().wrapping_add(self.place(mixed)));
    }

    /// Whether it is too large to be near the core all the time.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        self.words.len() > NEAR_WORDS
    }

    pub(crate) fn bytes(&self) -> usize {
        8 * self.words.len()
    }

    /// From the low half; the bits come from the high one.
    #[inline(always)]
    fn place(&self, mixed: u64) -> usize {
        ((u64::from(mixed as u32) * self.words.len() as u64) >> 32) as usize
    }
}

/// The bits of a sign: four of 64. The highest of the mixed sign are left out, which are nearly equal inside a
/// partition.
#[inline(always)]
pub(crate) fn bits_of(mixed: u64) -> u64 {
    let bit = |shift: u32| 1_u64 << ((mixed >> shift) & 63);
    bit(32) | bit(38) | bit(44) | bit(50)
}
