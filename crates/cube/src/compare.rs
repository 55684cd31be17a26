//! Compares all parts of a bucket with one value.

/// A bucket is a cache line.
pub(crate) const BUCKET_BYTES: usize = 64;

pub(crate) type Bucket = [u8; BUCKET_BYTES];

/// Compares the parts of a bucket with a value. The results have a bit for each part; the lowest bit is for the first part.
pub(crate) trait Compare {
    /// Returns which of the eight words equal `word`.
    fn words(bucket: &Bucket, word: u64) -> u32;
    /// Returns which of the 32 pairs of bytes equal `pair`.
    fn pairs(bucket: &Bucket, pair: u16) -> u32;
}

/// Compares one part after the other, on any processor.
pub(crate) struct Scalar;

// Without an early exit: a few more comparisons cost less than a mispredicted branch.
impl Compare for Scalar {
    #[inline(always)]
    fn words(bucket: &Bucket, word: u64) -> u32 {
        let words = (0_u32..).zip(bucket.as_chunks().0);
        words.fold(0, |found, (i, other)| found | u32::from(u64::from_le_bytes(*other) == word) << i)
    }

    #[inline(always)]
    fn pairs(bucket: &Bucket, pair: u16) -> u32 {
        let pairs = (0_u32..).zip(bucket.as_chunks().0);
        pairs.fold(0, |found, (i, other)| found | u32::from(u16::from_le_bytes(*other) == pair) << i)
    }
}

/// Compares many parts at once. Only for code that runs on processors with AVX2.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
pub(crate) struct Avx2;

#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
impl Compare for Avx2 {
    #[inline(always)]
    fn words(bucket: &Bucket, word: u64) -> u32 {
        // SAFETY: code that uses this type has checked that the processor has AVX2.
        unsafe { avx2::words(bucket, word) }
    }

    #[inline(always)]
    fn pairs(bucket: &Bucket, pair: u16) -> u32 {
        // SAFETY: as above.
        unsafe { avx2::pairs(bucket, pair) }
    }
}

#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_castsi256_pd, _mm256_cmpeq_epi16, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_epi8,
        _mm256_movemask_pd, _mm256_packs_epi16, _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_set1_epi64x,
    };

    use super::{BUCKET_BYTES, Bucket};

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn words(bucket: &Bucket, word: u64) -> u32 {
        let word = _mm256_set1_epi64x(word as i64);
        let [low, high] = halves(bucket).map(|half| {
            let equal = _mm256_cmpeq_epi64(half, word);
            _mm256_movemask_pd(_mm256_castsi256_pd(equal)) as u32
        });
        low | high << 4
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn pairs(bucket: &Bucket, pair: u16) -> u32 {
        let pair = _mm256_set1_epi16(pair as i16);
        let [low, high] = halves(bucket).map(|half| _mm256_cmpeq_epi16(half, pair));
        // Packing interleaves quarters of both halves; the permutation restores the order.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi16(low, high));
        _mm256_movemask_epi8(packed) as u32
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn halves(bucket: &Bucket) -> [__m256i; 2] {
        let half = |start: usize| {
            let half: *const __m256i = bucket[start..start + BUCKET_BYTES / 2].as_ptr().cast();
            // SAFETY: 32 bytes of the bucket start there, and the load needs no alignment.
            unsafe { _mm256_loadu_si256(half) }
        };
        [half(0), half(BUCKET_BYTES / 2)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<C: Compare>() {
        let bucket: Bucket = std::array::from_fn(|i| [7, 1, 7, 0][i % 4] * u8::from(!(8..20).contains(&i)));
        assert_eq!(C::pairs(&bucket, 0x0107), 0x5555_5405);
        assert_eq!(C::pairs(&bucket, 0), 0b11_1111_0000);
        assert_eq!(C::words(&bucket, 0x0007_0107_0007_0107), 0b1111_1001);
        assert_eq!(C::words(&bucket, 0), 0b10);
        for i in 0..BUCKET_BYTES {
            let mut one: Bucket = [0; BUCKET_BYTES];
            one[i] = 0x80;
            assert_eq!(C::pairs(&one, 0x80 << (i % 2 * 8)), 1 << (i / 2), "byte {i}");
            assert_eq!(C::words(&one, 0x80 << (i % 8 * 8)), 1 << (i / 8), "byte {i}");
        }
    }

    #[test]
    fn the_bits_of_equal_parts_are_set() {
        check::<Scalar>();
        #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
        if is_x86_feature_detected!("avx2") {
            check::<Avx2>();
        }
    }
}
