//! A view and a delta to the view of the next version; the view before stays what it was.

use std::ops::Range;
use std::sync::Arc;

use crate::delta::{DeltaFile, Run};
use crate::segment::{KeySpace, WholePartitions, build};
use crate::{CubeError, View};

/// Signs whose presence is asked for together.
const BATCH: usize = 1024;

/// The run of a partition and the part that has it.
type Owned<'a> = (&'a DeltaFile, Run);

impl View {
    /// The next version: this one with the parts of one delta applied, as far as they are of its partitions.
    ///
    /// The time it takes grows with the delta, and with the changes before it as often as neighbours of similar size
    /// are merged: about the logarithm of the number of deltas stay.
    pub fn with_delta(&self, parts: &[DeltaFile]) -> Result<View, CubeError> {
        self.stacked(parts)?.merged()
    }

    /// [`with_delta`](View::with_delta) without merging, in a time that grows with the delta alone: for who merges
    /// [later](View::merged), off the way of the next version.
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
            let unlike = |what| Err(CubeError::Unlike { name: part.name().to_owned(), what });
            if part.meta() != self.base.meta() {
                return unlike("other columns or another row type");
            }
            if part.num_partitions() != self.num_partitions() {
                return unlike("another number of partitions");
            }
        }
        Ok(())
    }

    /// Rows in each partition once the runs are applied.
    fn count_rows(&self, runs: &[Owned<'_>]) -> Arc<[u64]> {
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
                    // what was there and is no row now went, what is one and was not there came
                    *count += u64::from((after & !before).count_ones());
                    *count -= u64::from((before & !after).count_ones());
                }
            }
        }
        num_rows.into()
    }
}

/// What the parts say of each partition of `range`, in ascending order.
fn runs_of<'a>(parts: &'a [DeltaFile], range: &Range<u32>) -> Result<Vec<Owned<'a>>, CubeError> {
    let of_part = |part: &'a DeltaFile| part.runs(range).into_iter().map(move |run| (part, run));
    let mut runs: Vec<Owned<'a>> = parts.iter().flat_map(of_part).collect();
    runs.sort_by_key(|(_, run)| run.partition);
    match runs.windows(2).find(|pair| pair[0].1.partition == pair[1].1.partition) {
        Some([(first, run), (second, _)]) => Err(CubeError::Doubled {
            name: second.name().to_owned(),
            first: first.name().to_owned(),
            partition: run.partition,
        }),
        _ => Ok(runs),
    }
}
