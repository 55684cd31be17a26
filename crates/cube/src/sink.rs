//! Destinations for the rows of a lookup: as stored, decoded to f32, or only their presence.

use crate::row::RowCodec;
use crate::search::RowSink;

/// Copies rows as stored and sets a bit for each key with a row.
pub(crate) struct StoredRows<'a> {
    pub(crate) rows: &'a mut [u8],
    pub(crate) present: &'a mut [u64],
    pub(crate) row_bytes: usize,
}

impl RowSink for StoredRows<'_> {
    #[inline(always)]
    fn put(&mut self, i: usize, row: &[u8], is_present: bool) {
        copy_row(row, &mut self.rows[i * self.row_bytes..][..self.row_bytes]);
        self.present[i / 64] |= u64::from(is_present) << (i % 64);
    }
}

/// Decodes rows to f32.
pub(crate) struct DecodedRows<'a, D> {
    pub(crate) out: &'a mut [f32],
    pub(crate) width: usize,
    pub(crate) decode: D,
}

impl<D: Fn(&[u8], &mut [f32])> RowSink for DecodedRows<'_, D> {
    #[inline(always)]
    fn put(&mut self, i: usize, row: &[u8], _: bool) {
        (self.decode)(row, &mut self.out[i * self.width..][..self.width]);
    }
}

/// Copies rows of type `f32`, whose stored bytes are those in memory.
#[cfg(target_endian = "little")]
pub(crate) struct F32Rows<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) width: usize,
}

#[cfg(target_endian = "little")]
impl RowSink for F32Rows<'_> {
    #[inline(always)]
    fn put(&mut self, i: usize, row: &[u8], _: bool) {
        let out = &mut self.out[i * self.width..][..self.width];
        // SAFETY: each value has four bytes, and any four bytes are a valid f32.
        let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), size_of_val(out)) };
        copy_row(row, out);
    }
}

/// Copies a row. Most rows are short, so that two overlapping moves cost less than a call.
#[inline(always)]
fn copy_row(row: &[u8], out: &mut [u8]) {
    match row.len() {
        32..=64 => copy_ends::<32>(row, out),
        16..=31 => copy_ends::<16>(row, out),
        _ => out.copy_from_slice(row),
    }
}

/// Copies the first and the last `N` bytes, which together cover the row.
#[inline(always)]
fn copy_ends<const N: usize>(row: &[u8], out: &mut [u8]) {
    if let (Some(row), Some(out)) = (row.first_chunk::<N>(), out.first_chunk_mut::<N>()) {
        *out = *row;
    }
    if let (Some(row), Some(out)) = (row.last_chunk::<N>(), out.last_chunk_mut::<N>()) {
        *out = *row;
    }
}

/// Sets a bit for each key with a row.
pub(crate) struct PresenceBits<'a>(pub(crate) &'a mut [u64]);

impl RowSink for PresenceBits<'_> {
    #[inline(always)]
    fn put(&mut self, i: usize, _: &[u8], is_present: bool) {
        self.0[i / 64] |= u64::from(is_present) << (i % 64);
    }
}

/// Whether the bit of key `i` is set.
#[inline]
pub(crate) fn is_set(present: &[u64], i: usize) -> bool {
    present[i / 64] >> (i % 64) & 1 == 1
}

/// Returns whether each sign has a row, from the bits that a lookup of `num_signs` signs has set.
pub fn presence_of(bits: &[u64], num_signs: usize) -> Vec<bool> {
    (0..num_signs).map(|i| is_set(bits, i)).collect()
}

/// Number of words of a bitmap for `num_keys` keys.
#[inline]
fn num_words(num_keys: usize) -> usize {
    num_keys.div_ceil(64)
}

/// Checks the size of the output of a lookup and clears its bitmap.
#[inline]
pub(crate) fn check_room(num_keys: usize, rows: usize, codec: &RowCodec, present: &mut [u64]) {
    assert_eq!(rows, num_keys * codec.row_bytes(), "`rows` must have a row for each sign");
    assert_eq!(present.len(), num_words(num_keys), "`present` must have a bit for each sign");
    present.fill(0);
}
