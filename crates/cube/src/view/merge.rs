//! Merges segments of similar size: the same rows with fewer searches.

use std::sync::Arc;

use crate::segment::{Segment, merge};
use crate::{CubeError, View};

impl View {
    /// Whether two neighbouring segments have a similar size.
    pub fn is_mergeable(&self) -> bool {
        self.segments.windows(2).any(|pair| is_similar(&pair[0], &pair[1]))
    }

    /// Returns the same version with neighbouring segments of similar size merged.
    pub fn merged(&self) -> Result<View, CubeError> {
        let mut segments = Vec::new();
        for segment in self.segments.iter().rev() {
            segments = stack(segment.clone(), &segments)?;
        }
        Ok(View { base: self.base.clone(), segments, num_rows: self.num_rows.clone() })
    }

    /// Returns the same version with the segments of `before` replaced by those of `after`, which is `before`
    /// [merged](View::merged). Returns None if this view was not derived from `before`.
    pub fn with_merged(&self, before: &View, after: &View) -> Option<View> {
        let num_own = self.segments.len().checked_sub(before.segments.len())?;
        let (own, common) = self.segments.split_at(num_own);
        let is_same = Arc::ptr_eq(&self.base, &before.base)
            && common.iter().zip(&before.segments).all(|(ours, theirs)| Arc::ptr_eq(ours, theirs));
        is_same.then(|| View {
            base: self.base.clone(),
            segments: own.iter().chain(&after.segments).cloned().collect(),
            num_rows: self.num_rows.clone(),
        })
    }
}

fn is_similar(newer: &Segment, older: &Segment) -> bool {
    older.num_signs() <= 2 * newer.num_signs()
}

/// Adds a segment on top and merges it with older ones while they are at most twice its size.
fn stack(mut newest: Arc<Segment>, older: &[Arc<Segment>]) -> Result<Vec<Arc<Segment>>, CubeError> {
    let mut older = older.iter();
    let mut rest = older.clone();
    while let Some(next) = older.next()
        && is_similar(&newest, next)
    {
        newest = Arc::new(merge(&newest, next)?);
        rest = older.clone();
    }
    Ok([newest].into_iter().chain(rest.cloned()).collect())
}
