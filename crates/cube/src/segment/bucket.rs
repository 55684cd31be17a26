//! The buckets of a segment: one cache line each, with whole signs.

use crate::compare::{Bucket, Compare};

/// A bucket has seven signs, the first row, the number of used slots, the overflow flag and the tombstones.
pub(crate) const SLOTS: usize = 7;
const FIRST_ROW_AT: usize = 56;
const COUNT_AT: usize = 60;
const OVERFLOWED_AT: usize = 61;
/// A bit for each slot with a tombstone.
const REMOVED_AT: usize = 62;

/// Returns the slot of a sign.
#[inline(always)]
pub(crate) fn slot_of<C: Compare>(bucket: &Bucket, sign: u64) -> Option<usize> {
    let found = C::words(bucket, sign) & ((1 << count(bucket)) - 1);
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// Whether searches continue in the next bucket.
#[inline]
pub(crate) fn overflowed(bucket: &Bucket) -> bool {
    bucket[OVERFLOWED_AT] != 0
}

/// Number of signs in a bucket.
#[inline]
pub(crate) fn count(bucket: &Bucket) -> usize {
    usize::from(bucket[COUNT_AT]).min(SLOTS)
}

#[inline]
pub(crate) fn sign_at(bucket: &Bucket, slot: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bucket[8 * slot + i]))
}

/// Returns the row number of a slot, or None for a tombstone.
#[inline]
pub(crate) fn row_of(bucket: &Bucket, slot: usize) -> Option<u32> {
    let removed = u32::from(bucket[REMOVED_AT]);
    let before = (removed & ((1 << slot) - 1)).count_ones();
    let first_row = u32::from_le_bytes(std::array::from_fn(|i| bucket[FIRST_ROW_AT + i]));
    (removed >> slot & 1 == 0).then(|| first_row + slot as u32 - before)
}

/// Adds a sign to a bucket with a free slot; `next_row` is the number of the next row.
#[inline]
pub(crate) fn append(bucket: &mut Bucket, sign: u64, removed: bool, next_row: u32) {
    let slot = count(bucket);
    if slot == 0 {
        bucket[FIRST_ROW_AT..COUNT_AT].copy_from_slice(&next_row.to_le_bytes());
    }
    bucket[8 * slot..][..8].copy_from_slice(&sign.to_le_bytes());
    bucket[COUNT_AT] += 1;
    bucket[REMOVED_AT] |= u8::from(removed) << slot;
}

/// Marks a bucket as overflowed: searches continue in the next bucket.
#[inline]
pub(crate) fn set_overflowed(bucket: &mut Bucket) {
    bucket[OVERFLOWED_AT] = 1;
}
