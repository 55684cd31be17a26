//! Maintenance of whole partitions: decay and eviction at the boundaries between passes, and the row limit.

use elasticrec_table::{Eviction, Overflow, Table, Trim};

use super::{Boundary, Shard};
use crate::record::Record;

/// Memory of the index per row.
pub(super) const INDEX_BYTES: usize = 8;
/// Lowest row limit of a partition that is accepted.
const MIN_ROWS: usize = 10;

impl Shard {
    /// Sets the boundaries between passes: all known boundaries, then new ones.
    pub fn set_boundaries(&mut self, boundaries: Vec<Boundary>) {
        debug_assert!(boundaries.starts_with(&self.boundaries));
        self.boundaries = boundaries;
        self.reach_boundaries();
        self.records.merge();
    }

    /// Applies each boundary to the partitions that have applied all units before it.
    pub(super) fn reach_boundaries(&mut self) {
        for group in 0..self.records.groups.len() {
            let record = &self.records.groups[group];
            let next = record.boundaries() as usize;
            let Some(&boundary) = self.boundaries.get(next) else { continue };
            if record.watermark() < boundary.before_unit {
                continue;
            }
            let (first, indices) = (self.spec.owned.start, &self.records.indices);
            let owned = self.spec.owned.clone();
            let chosen = |partition: u32| owned.contains(&partition) && indices[(partition - first) as usize] == group;
            if let Some(rate) = boundary.decay {
                self.table.decay_in(chosen, rate, boundary.decay_step);
            }
            if boundary.min_score.is_some() || boundary.max_age.is_some() {
                let Boundary { coefficients: (nonclk_coeff, click_coeff), min_score, now, max_age, .. } = boundary;
                let eviction = Eviction { nonclk_coeff, click_coeff, min_score, now, max_age };
                self.evicted += self.table.evict_in(chosen, &eviction) as u64;
            }
            if let Some(max_rows) = self.max_rows {
                let (nonclk_coeff, click_coeff) = boundary.coefficients;
                let least = admitted_of(max_rows);
                let trim = Trim { least, most: kept_of(max_rows), nonclk_coeff, click_coeff };
                make_room(&mut self.table, &mut self.overflow, first, chosen, &trim);
            }
            if self.spec.owned.contains(&0) && self.records.indices[0] == group {
                let (now, before) = self.sums.split_at_mut(self.spec.num_sums);
                before.copy_from_slice(now);
                now.fill(0.0);
            }
            self.records.groups[group].pass_boundary();
        }
        // After a load, a group may have reached several boundaries at once.
        let is_due = |record: &Record| {
            let next = self.boundaries.get(record.boundaries() as usize);
            next.is_some_and(|boundary| record.watermark() >= boundary.before_unit)
        };
        if self.records.groups.iter().any(is_due) {
            self.reach_boundaries();
        }
    }

    /// Limits the memory of the shard. A partition at 90 % of its row limit accepts no new signs, and at the next boundary
    /// its least valuable rows are evicted; a partition that was loaded with more rows than its limit evicts at once.
    ///
    /// Each partition counts its own rows and all have the same limit, so what a partition drops depends only on its
    /// pushes.
    pub fn limit_memory(&mut self, num_bytes: u64) -> Result<(), String> {
        let states = 1 + self.spec.dense.num_states();
        let fixed = (4 * states * self.dense.values().len() + 8 * self.sums.len()) as u64;
        let row = (self.table.row_bytes() + INDEX_BYTES) as u64;
        let partitions = self.spec.owned.len().max(1) as u64;
        let max_rows = (num_bytes.saturating_sub(fixed) / row / partitions) as usize;
        if max_rows < MIN_ROWS {
            let least = fixed + row * partitions * MIN_ROWS as u64;
            return Err(format!("expected at least {least} bytes for {partitions} partitions, got {num_bytes}"));
        }
        self.max_rows = Some(max_rows);
        self.table.set_max_rows(Some(admitted_of(max_rows)));
        let trim = Trim { least: max_rows + 1, most: kept_of(max_rows), nonclk_coeff: 1.0, click_coeff: 1.0 };
        make_room(&mut self.table, &mut self.overflow, self.spec.owned.start, |_| true, &trim);
        Ok(())
    }
}

/// Number of rows at which a partition stops accepting new signs.
fn admitted_of(max_rows: usize) -> usize {
    max_rows * 9 / 10
}

/// Number of rows that stay after an eviction.
fn kept_of(max_rows: usize) -> usize {
    max_rows * 8 / 10
}

/// Evicts the least valuable rows of full partitions.
fn make_room(
    table: &mut Table,
    overflow: &mut [Overflow],
    first: u32,
    chosen: impl Fn(u32) -> bool + Sync,
    trim: &Trim,
) {
    let evicted = table.trim_in(chosen, trim);
    for (overflow, evicted) in overflow.iter_mut().zip(evicted.into_iter().skip(first as usize)) {
        overflow.evicted += evicted as u64;
    }
}
