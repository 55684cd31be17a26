//! Applies a delta to a view. The result is the view of the next version; the old view does not change.

use std::ops::Range;
use std::sync::Arc;

use crate::delta::{DeltaFile, Run};
use crate::segment::{KeySpace, WholePartitions, build};
use crate::{CubeError, View};

/// Number of signs whose presence is looked up together.
const BATCH: usize = 1024;

/// The run of a partition, with its part file.
type FileRun<'a> = (&'a DeltaFile, Run);

impl View {
    /// Returns the next version: this view with the parts of a delta applied, as far as they concern its partitions.
    ///
    /// Segments of similar size are merged, so their number grows with the logarithm of the number of deltas.
    pub fn with_delta(&self, parts: &[DeltaFile]) -> Result<View, CubeError> {
        self.stacked(parts)?.merged()
    }

    /// Like [`with_delta`](View::with_delta) without the merge, in time linear in the delta. [`merged`](View::merged) can
    /// follow later, off the path of the next version.
    pub fn stacked(&self, parts: &[DeltaFile]) -> Result<View, CubeError> {
        self.check_parts(parts)?;
        let runs = runs_of(parts, &self.partitions())?;
        if runs.is_empty() {
            return Ok(self.clone());
        }
        let mut whole = WholePartitions::default();
        runs.iter().filter(|(_, run)| run.is_whole).for_each(|(_, run)| whole.insert(run.partition));
        let space = KeySpace::new(&self.partitions(), self.num_partitions());
        let changes = || runs.iter().flat_map(|(part, run)| part.changes(run));
        let segment = build(space, self.row_bytes(), whole, changes)?;
        let num_rows = self.count_rows(&runs);
        let segments = [Arc::new(segment)].into_iter().chain(self.segments.iter().cloned()).collect();
        Ok(View { base: self.base.clone(), segments, num_rows })
    }

    fn check_parts(&self, parts: &[DeltaFile]) -> Result<(), CubeError> {
        for part in parts {
            let mismatch = |what| Err(CubeError::DeltaMismatch { name: part.name().to_owned(), what });
            if part.meta() != self.base.meta() {
                return mismatch("columns and row type");
            }
            if part.num_partitions() != self.num_partitions() {
                return mismatch("number of partitions");
            }
        }
        Ok(())
    }

    /// Returns the number of rows in each partition after the runs.
    fn count_rows(&self, runs: &[FileRun<'_>]) -> Arc<[u64]> {
        let mut num_rows = self.num_rows.to_vec();
        let mut signs = Vec::with_capacity(BATCH);
        let mut present = [0; BATCH / 64];
        for (part, run) in runs {
            let count = &mut num_rows[(run.partition - self.partitions().start) as usize];
            if run.is_whole {
                *count = part.changes(run).count() as u64;
                continue;
            }
            let mut changes = part.changes(run);
            loop {
                signs.clear();
                let mut rows = [0; BATCH / 64];
                for (i, change) in changes.by_ref().take(BATCH).enumerate() {
                    signs.push(change.sign);
                    rows[i / 64] |= u64::from(change.row.is_some()) << (i % 64);
                }
                if signs.is_empty() {
                    break;
                }
                let present = &mut present[..signs.len().div_ceil(64)];
                self.find(&signs, present);
                for (after, before) in rows.iter().zip(&*present) {
                    // Counts new rows, then removed ones.
                    *count += u64::from((after & !before).count_ones());
                    *count -= u64::from((before & !after).count_ones());
                }
            }
        }
        num_rows.into()
    }
}

/// Returns the runs of the partitions of `range`, in ascending order.
fn runs_of<'a>(parts: &'a [DeltaFile], range: &Range<u32>) -> Result<Vec<FileRun<'a>>, CubeError> {
    let of_part = |part: &'a DeltaFile| part.runs(range).into_iter().map(move |run| (part, run));
    let mut runs: Vec<FileRun<'a>> = parts.iter().flat_map(of_part).collect();
    runs.sort_by_key(|(_, run)| run.partition);
    match runs.windows(2).find(|pair| pair[0].1.partition == pair[1].1.partition) {
        Some([(first, run), (second, _)]) => Err(CubeError::DuplicatePartition {
            name: second.name().to_owned(),
            first: first.name().to_owned(),
            partition: run.partition,
        }),
        _ => Ok(runs),
    }
}
