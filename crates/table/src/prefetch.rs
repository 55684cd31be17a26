//! Asks memory for a cache line ahead of its use, so that the misses of a batch overlap.

/// Starts loading the cache line at `ptr`; a hint that never faults, whatever the address.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
#[inline(always)]
pub fn prefetch_read<T>(ptr: *const T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing the program can see and does not fault on any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) }
}

/// The same into the second-level cache, which can have more lines on the way than the first: for who asks for many, some
/// of them far ahead.
#[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
#[inline(always)]
pub fn prefetch_far<T>(ptr: *const T) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: as above.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(ptr.cast()) }
}

/// The portable twin: the hardware is left to itself.
#[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
#[inline(always)]
pub fn prefetch_read<T>(_ptr: *const T) {}

/// The portable twin: the hardware is left to itself.
#[cfg(not(all(target_arch = "x86_64", not(feature = "portable"))))]
#[inline(always)]
pub fn prefetch_far<T>(_ptr: *const T) {}
