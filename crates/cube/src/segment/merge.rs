//! Merges two segments into one with the same effect.

use super::{Segment, build};
use crate::CubeError;
use crate::delta::Change;

/// Merges `newer` over `older`.
pub(crate) fn merge(newer: &Segment, older: &Segment) -> Result<Segment, CubeError> {
    build(newer.space, newer.row_bytes, newer.whole.union(&older.whole), || merged(newer, older))
}

/// Iterates over the merged changes. The newer change of a sign wins. Older changes are dropped in partitions that the newer
/// segment replaces as a whole, and tombstones in partitions that the older segment replaces, since nothing lies below.
fn merged<'a>(newer: &'a Segment, older: &'a Segment) -> impl Iterator<Item = Change<'a>> {
    let is_covered = |by: &'a Segment| {
        move |change: &Change<'_>| !by.whole.is_empty() && by.is_whole(by.space.partition_of(change.mixed))
    };
    let (by_newer, by_older) = (is_covered(newer), is_covered(older));
    let mut newest = newer.changes().peekable();
    let mut oldest = older.changes().filter(move |change| !by_newer(change)).peekable();
    let both = std::iter::from_fn(move || {
        let (Some(new), Some(old)) = (newest.peek(), oldest.peek()) else {
            return newest.next().or_else(|| oldest.next());
        };
        if old.mixed < new.mixed {
            return oldest.next();
        }
        if old.mixed == new.mixed {
            oldest.next();
        }
        newest.next()
    });
    both.filter(move |change| change.row.is_some() || !by_older(change))
}
