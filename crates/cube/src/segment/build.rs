//! Builds a segment from changes in order: one pass computes its size, another fills it.

use super::bucket::{self, SLOTS};
use super::{KeySpace, Segment, WholePartitions, no_memory};
use crate::CubeError;
use crate::compare::{BUCKET_BYTES, Bucket};
use crate::delta::Change;
use crate::filter::Filter;
use crate::memory::Memory;

/// Twice the average number of signs per bucket: fuller buckets would save little memory and lengthen searches.
const TWICE_SIGNS_PER_BUCKET: usize = 9;

/// Position of the next sign: its home bucket, or the next bucket with a free slot. Signs stay in order.
#[derive(Clone, Copy, Default)]
struct Cursor {
    bucket: usize,
    count: usize,
}

/// Result of advancing the cursor.
struct Step {
    /// Whether the previous bucket was full, so that searches continue from it.
    overflows: bool,
}

impl Cursor {
    #[inline]
    fn advance(&mut self, home: usize) -> Step {
        let overflows = home <= self.bucket && self.count == SLOTS;
        if overflows {
            *self = Cursor { bucket: self.bucket + 1, count: 0 };
        } else if home > self.bucket {
            *self = Cursor { bucket: home, count: 0 };
        }
        self.count += 1;
        Step { overflows }
    }
}

/// Builds a segment. `changes` returns the same changes on each call, in the order of the mixed signs.
pub(crate) fn build<'a, I>(
    space: KeySpace,
    row_bytes: usize,
    whole: WholePartitions,
    changes: impl Fn() -> I,
) -> Result<Segment, CubeError>
where
    I: Iterator<Item = Change<'a>>,
{
    let (mut num_signs, mut num_rows) = (0_usize, 0_usize);
    for change in changes() {
        num_signs += 1;
        num_rows += usize::from(change.row.is_some());
    }
    if u32::try_from(num_signs).is_err() {
        return Err(CubeError::TooManyChanges { got: num_signs });
    }
    let scale = space.scale((2 * num_signs).div_ceil(TWICE_SIGNS_PER_BUCKET));
    let mut cursor = Cursor::default();
    for change in changes() {
        cursor.advance(space.home(change.mixed, scale));
    }
    let num_buckets = if num_signs == 0 { 0 } else { cursor.bucket + 1 };
    let memory = |bytes| Memory::zeroed(bytes).map_err(|source| no_memory(bytes, source));
    let mut segment = Segment {
        space,
        scale,
        buckets: memory(num_buckets * BUCKET_BYTES)?,
        rows: memory(num_rows * row_bytes)?,
        row_bytes,
        filter: Filter::new(num_signs),
        whole,
        num_signs,
    };
    segment.fill(changes());
    Ok(segment)
}

impl Segment {
    fn fill<'a>(&mut self, changes: impl Iterator<Item = Change<'a>>) {
        let buckets: &mut [Bucket] = self.buckets.as_chunks_mut().0;
        let mut rows = self.rows.chunks_exact_mut(self.row_bytes);
        let mut cursor = Cursor::default();
        let mut next_row = 0;
        for Change { mixed, sign, row } in changes {
            let step = cursor.advance(self.space.home(mixed, self.scale));
            if step.overflows {
                bucket::set_overflowed(&mut buckets[cursor.bucket - 1]);
            }
            bucket::append(&mut buckets[cursor.bucket], sign, row.is_none(), next_row);
            self.filter.add(mixed);
            if let (Some(row), Some(out)) = (row, row.and_then(|_| rows.next())) {
                out.copy_from_slice(row);
                next_row += 1;
            }
        }
    }
}
