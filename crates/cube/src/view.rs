//! One version in memory: a base and segments. A view never changes, so readers need no lock and never mix versions.

mod apply;
mod merge;

use std::ops::Range;
use std::sync::Arc;

use crate::Column;
use crate::compare::{Compare, Scalar};
use crate::cube::Cube;
use crate::row::{RowCodec, RowType, decode_f16};
use crate::search::{AllKeys, RowSink, SelectedKeys};
use crate::segment::{BLOCK, PendingKeys, Segment, SignState};
#[cfg(target_endian = "little")]
use crate::sink::F32Rows;
use crate::sink::{DecodedRows, PresenceBits, StoredRows, check_room};

/// The rows of one version, or of some of its partitions: a base and the changes since, newest first.
#[derive(Clone)]
pub struct View {
    base: Arc<Cube>,
    segments: Vec<Arc<Segment>>,
    /// Number of rows in each partition of the view.
    num_rows: Arc<[u64]>,
}

impl View {
    /// Creates the view of a base, without changes.
    pub fn of_base(base: Arc<Cube>) -> View {
        let num_rows = base.partitions().map(|partition| base.num_rows_of(partition)).collect();
        View { base, segments: Vec::new(), num_rows }
    }

    /// Copies the stored rows of `signs` to `rows`, zeros for absent signs, and sets the bits of present signs in `present`
    /// (sign `i`: bit `i % 64` of word `i / 64`). Returns the number of present signs.
    ///
    /// # Panics
    /// If `rows` is not `signs.len() * row_bytes()` long, or `present` is not `signs.len().div_ceil(64)`.
    pub fn stored_rows(&self, signs: &[u64], rows: &mut [u8], present: &mut [u64]) -> usize {
        check_room(signs.len(), rows.len(), self.codec(), present);
        self.search(signs, &mut StoredRows { rows, present, row_bytes: self.row_bytes() })
    }

    /// Writes the values of `signs` to `out`, row by row; absent signs read as zero. Returns the number of present signs.
    ///
    /// # Panics
    /// If `out` is not `signs.len() * width()` long.
    pub fn lookup(&self, signs: &[u64], out: &mut [f32]) -> usize {
        let (codec, width) = (self.codec(), self.width());
        assert_eq!(out.len(), signs.len() * width, "`out` must have a row for each sign");
        match codec.row_type() {
            #[cfg(target_endian = "little")]
            RowType::F32 => self.search(signs, &mut F32Rows { out, width }),
            #[cfg(not(target_endian = "little"))]
            RowType::F32 => self.search(signs, &mut DecodedRows { out, width, decode: crate::row::decode_f32 }),
            RowType::F16 => self.search(signs, &mut DecodedRows { out, width, decode: decode_f16 }),
            RowType::Int8 => {
                let decode = |row: &[u8], values: &mut [f32]| codec.decode_int8(row, values);
                self.search(signs, &mut DecodedRows { out, width, decode })
            }
        }
    }

    /// Sets the bits of the signs that have a row; returns their number.
    ///
    /// # Panics
    /// If `present` is not `signs.len().div_ceil(64)` long.
    pub fn find(&self, signs: &[u64], present: &mut [u64]) -> usize {
        assert_eq!(present.len(), signs.len().div_ceil(64), "`present` must have a bit for each sign");
        present.fill(0);
        self.search(signs, &mut PresenceBits(present))
    }

    /// Whether there is a row for `sign`.
    pub fn contains(&self, sign: u64) -> bool {
        self.get(sign).is_some()
    }

    /// Returns the stored row of `sign`. Batches are looked up faster with the functions above.
    pub fn get(&self, sign: u64) -> Option<&[u8]> {
        for segment in &self.segments {
            match segment.get(sign) {
                SignState::Row(row) => return Some(row),
                SignState::Removed => return None,
                SignState::Unknown => (),
            }
        }
        self.base.get(sign)
    }

    /// Iterates over the signs of a partition with their stored rows, in any order.
    pub fn rows_of(&self, partition: u32) -> impl Iterator<Item = (u64, &[u8])> {
        let is_newest = move |newer: &[Arc<Segment>], sign| {
            newer.iter().all(|segment| matches!(segment.get(sign), SignState::Unknown))
        };
        let changed = self.segments.iter().enumerate().flat_map(move |(at, segment)| {
            segment.rows_of(partition).filter(move |(sign, _)| is_newest(&self.segments[..at], *sign))
        });
        let hides = |segment: &Arc<Segment>| segment.is_whole(partition);
        let base = (!self.segments.iter().any(hides)).then(|| self.base.rows_of(partition));
        changed.chain(base.into_iter().flatten().filter(move |(sign, _)| is_newest(&self.segments, *sign)))
    }

    fn search(&self, signs: &[u64], sink: &mut impl RowSink) -> usize {
        #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { self.search_with_avx2(signs, sink) };
        }
        self.search_by::<Scalar>(signs, sink)
    }

    #[cfg(all(target_arch = "x86_64", not(feature = "portable")))]
    #[target_feature(enable = "avx2")]
    fn search_with_avx2(&self, signs: &[u64], sink: &mut impl RowSink) -> usize {
        self.search_by::<crate::compare::Avx2>(signs, sink)
    }

    #[inline(always)]
    fn search_by<C: Compare>(&self, signs: &[u64], sink: &mut impl RowSink) -> usize {
        if self.segments.is_empty() {
            return self.base.search_all::<C>(&AllKeys(signs), sink);
        }
        let mut hits = 0;
        for (block, signs) in signs.chunks(BLOCK).enumerate() {
            hits += self.search_block::<C>(signs, &mut OffsetSink { sink, by: block * BLOCK });
        }
        hits
    }

    /// Searches the segments from the newest to the oldest, then the base for the keys that are left.
    #[inline(always)]
    fn search_block<C: Compare>(&self, signs: &[u64], sink: &mut impl RowSink) -> usize {
        let mut pending = PendingKeys::new(signs);
        let mut hits = 0;
        for segment in &self.segments {
            hits += segment.search::<C>(&mut pending, sink);
        }
        hits + self.base.search_all::<C>(&SelectedKeys { signs, indices: pending.indices() }, sink)
    }

    /// The base, without the changes of later deltas.
    pub fn base(&self) -> &Arc<Cube> {
        &self.base
    }

    /// The encoding of the rows.
    pub fn codec(&self) -> &RowCodec {
        self.base.codec()
    }

    /// Bytes of a stored row.
    pub fn row_bytes(&self) -> usize {
        self.codec().row_bytes()
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.codec().width()
    }

    /// The type of the stored values.
    pub fn row_type(&self) -> RowType {
        self.codec().row_type()
    }

    /// The columns of a row.
    pub fn columns(&self) -> &[Column] {
        self.base.columns()
    }

    /// Partitions of the table.
    pub fn num_partitions(&self) -> u32 {
        self.base.num_partitions()
    }

    /// The partitions of the view; signs of other partitions read as absent.
    pub fn partitions(&self) -> Range<u32> {
        self.base.partitions()
    }

    /// Number of rows in the partitions of the view.
    pub fn num_rows(&self) -> u64 {
        self.num_rows.iter().sum()
    }

    /// Number of changed and removed signs in all segments; a sign counts once per segment.
    pub fn num_changes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.num_signs() as u64).sum()
    }

    /// Number of segments that a lookup searches before the base.
    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes of index and rows of the base and of all segments.
    pub fn bytes(&self) -> u64 {
        self.base.bytes() + self.segments.iter().map(|segment| segment.bytes() as u64).sum::<u64>()
    }
}

/// Passes the rows of a block to the sink of the whole batch.
struct OffsetSink<'a, S> {
    sink: &'a mut S,
    by: usize,
}

impl<S: RowSink> RowSink for OffsetSink<'_, S> {
    #[inline(always)]
    fn put(&mut self, i: usize, row: &[u8], is_present: bool) {
        self.sink.put(self.by + i, row, is_present);
    }
}
