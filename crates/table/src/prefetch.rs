//! Prefetches cache lines, so that the cache misses of a batch overlap.

/// Prefetches the cache line at `ptr`; never faults, for any address.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
#[inline(always)]
pub fn prefetch_read<T>(ptr: *const T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch has no visible effect and does not fault on any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) }
}

/// Prefetches the cache line at `ptr` into the second-level cache, which can have more lines in flight than the
/// first-level cache. Use it for many prefetches, some of them far ahead.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
#[inline(always)]
pub fn prefetch_far<T>(ptr: *const T) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: as above.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr.cast()) }
}

/// The portable fallback does nothing.
#[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
#[inline(always)]
pub fn prefetch_read<T>(_ptr: *const T) {}

/// The portable fallback does nothing.
#[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
#[inline(always)]
pub fn prefetch_far<T>(_ptr: *const T) {}
