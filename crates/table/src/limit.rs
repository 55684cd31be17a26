//! A limit of rows per partition: a full partition rejects new signs and can evict its least valuable rows.

use serde::{Deserialize, Serialize};

use crate::rows::{Counters, Rows};
use crate::table::Table;
use crate::threads::share;

/// Counts of the signs that a full partition rejected and of the rows that it evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overflow {
    /// Signs of pushes that got no row, with repeats.
    pub signs: u64,
    /// Shows of those signs, which are counted nowhere else.
    pub shows: u64,
    /// Clicks of those signs.
    pub clicks: u64,
    /// Rows evicted to make room.
    pub evicted: u64,
}

impl Overflow {
    /// Counts a sign that got no row.
    pub(crate) fn count_rejected(&mut self, show: u32, click: u32) {
        self.signs += 1;
        self.shows += u64::from(show);
        self.clicks += u64::from(click);
    }

    /// Adds later counts.
    pub fn add(&mut self, more: Overflow) {
        self.signs += more.signs;
        self.shows += more.shows;
        self.clicks += more.clicks;
        self.evicted += more.evicted;
    }
}

/// Trims full partitions: a partition with at least `least` rows keeps its `most` most valuable rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trim {
    /// Partitions with fewer rows keep all of them.
    pub least: usize,
    /// Number of rows that stay.
    pub most: usize,
    /// Score of a show without a click.
    pub nonclk_coeff: f64,
    /// Score of a click.
    pub click_coeff: f64,
}

impl Trim {
    /// Returns the value of a row: its score, then its data time. It depends on the row alone, so that a repeat evicts
    /// the same rows.
    fn value(&self, counters: Counters) -> (f64, u32) {
        let Counters { show, click, seen, .. } = counters;
        let score = self.nonclk_coeff * f64::from(show.saturating_sub(click)) + self.click_coeff * f64::from(click);
        (score, seen)
    }

    fn apply(&self, rows: &mut Rows) -> usize {
        if rows.len() < self.least.max(1) || rows.len() <= self.most {
            return 0;
        }
        let order = |a: &(f64, u32), b: &(f64, u32)| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1));
        let mut values: Vec<(f64, u32)> = rows.numbers().map(|row| self.value(rows.counters(row))).collect();
        values.sort_unstable_by(order);
        let limit = values.get(self.most.saturating_sub(1)).copied();
        let Some(limit) = limit.filter(|_| self.most > 0) else { return rows.retain(|_| false) };
        // Among the rows whose value equals the limit, those created first stay, up to the room that is left.
        let mut equals = self.most - values.partition_point(|value| order(value, &limit).is_lt());
        rows.retain(|counters| match order(&self.value(counters), &limit) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Greater => false,
            std::cmp::Ordering::Equal => {
                let stays = equals > 0;
                equals -= usize::from(stays);
                stays
            }
        })
    }
}

impl Table {
    /// Limits the rows of each partition; new signs beyond the limit are rejected and counted.
    pub fn set_max_rows(&mut self, max_rows: Option<usize>) {
        self.max_rows = max_rows.unwrap_or(usize::MAX);
    }

    /// Trims the chosen partitions that are full; returns the number of evicted rows of every partition.
    pub fn trim_in(&mut self, chosen: impl Fn(u32) -> bool + Sync, trim: &Trim) -> Vec<usize> {
        let threads = self.num_threads();
        let evicted = share(self.invalidate_handles(), threads, |first, partitions| {
            let all = (first as u32..).zip(partitions);
            all.map(|(partition, rows)| if chosen(partition) { trim.apply(rows) } else { 0 }).collect::<Vec<_>>()
        });
        evicted.into_iter().flatten().collect()
    }

    /// Takes the counts of the partitions that rejected or evicted something since the last call.
    pub fn take_overflow(&mut self) -> Vec<(u32, Overflow)> {
        let taken = self.spec_and_partitions_mut().1.iter_mut().map(|rows| std::mem::take(&mut rows.overflow));
        (0..).zip(taken).filter(|(_, overflow)| *overflow != Overflow::default()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::partition_of;
    use crate::push::{Push, PushResult};
    use crate::spec::test_spec;

    fn push(table: &mut Table, signs: &[u64], count: (u32, u32), seen: u32) -> PushResult {
        let (gradients, counts) = (vec![0.5; 4 * signs.len()], vec![count; signs.len()]);
        table
            .push(Push { signs, handles: None, gradients: &gradients, counts: &counts, seen, is_increment: false })
            .unwrap()
    }

    #[test]
    fn a_full_partition_rejects_new_signs_and_counts_them() {
        for threads in [1, 2] {
            let mut table = Table::new(test_spec(4)).unwrap().with_threads(threads);
            table.set_max_rows(Some(3000));
            let signs: Vec<u64> = (0..40_000).collect();
            let pushed = push(&mut table, &signs, (2, 1), 0);
            assert_eq!((pushed.created, pushed.dropped, table.len()), (12_000, 28_000, 12_000));
            let overflow = table.take_overflow();
            for (partition, found) in &overflow {
                let own = signs.iter().filter(|sign| partition_of(**sign, 4) == *partition).count() as u64;
                let expected = Overflow { signs: own - 3000, shows: 2 * (own - 3000), clicks: own - 3000, evicted: 0 };
                assert_eq!(*found, expected);
            }
            assert_eq!(overflow.len(), 4);
            assert_eq!(table.take_overflow(), []);
            let again = push(&mut table, &signs, (1, 0), 0);
            assert_eq!((again.created, again.dropped), (0, 28_000), "existing rows keep learning");
            let held = signs.iter().filter_map(|sign| table.get(*sign));
            assert!(held.map(|row| (row.counters.show, row.counters.click)).all(|counts| counts == (3, 1)));
            table.set_max_rows(None);
            assert_eq!(push(&mut table, &signs, (1, 0), 0).created, 28_000);
        }
    }

    #[test]
    fn the_least_valuable_rows_are_evicted() {
        let mut table = Table::new(test_spec(1)).unwrap();
        for sign in 0..10u64 {
            push(&mut table, &[sign], (1 + sign as u32 / 2, 0), 10 - sign as u32);
        }
        let trim = Trim { least: 11, most: 5, nonclk_coeff: 1.0, click_coeff: 1.0 };
        assert_eq!(table.trim_in(|_| true, &trim), [0], "the partition is not full");
        let trim = Trim { least: 10, ..trim };
        assert_eq!(table.trim_in(|_| false, &trim), [0]);
        assert_eq!(table.trim_in(|_| true, &trim), [5]);
        // The scores are 1 1 2 2 3 3 4 4 5 5. Of the two rows with score 3, the one seen later stays.
        assert_eq!(table.rows_of(0).signs(), [4, 6, 7, 8, 9]);
        assert_eq!(table.trim_in(|_| true, &Trim { least: 1, most: 0, ..trim }), [5]);
        assert!(table.is_empty());
    }
}
