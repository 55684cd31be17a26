//! Maintenance between epochs: counters decay, and rows that are not worth their memory are evicted.

use crate::partition::mix;
use crate::rows::{Counters, Rows};
use crate::table::Table;
use crate::threads::share;

/// Evicts rows with a low score and rows that were not seen for long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Eviction {
    /// Score of a show without a click.
    pub nonclk_coeff: f64,
    /// Score of a click.
    pub click_coeff: f64,
    /// Rows with a lower score are evicted; `None` for no limit.
    pub min_score: Option<f64>,
    /// The current data time.
    pub now: u32,
    /// Rows whose last push is longer ago are evicted; `None` for no limit.
    pub max_age: Option<u32>,
}

impl Eviction {
    fn keeps(&self, counters: Counters) -> bool {
        let Counters { show, click, seen, .. } = counters;
        let score = self.nonclk_coeff * f64::from(show.saturating_sub(click)) + self.click_coeff * f64::from(click);
        self.min_score.is_none_or(|least| score >= least)
            && self.max_age.is_none_or(|most| self.now.saturating_sub(seen) <= most)
    }
}

impl Table {
    /// Multiplies show and click of every row by `rate`.
    ///
    /// Counters are integers. A fraction is rounded up with a probability equal to the fraction, decided by (sign,
    /// step), so that rare signs decay at the same rate as others and a repeat of the step gives the same counters.
    pub fn decay(&mut self, rate: f64, step: u32) {
        self.decay_in(|_| true, rate, step);
    }

    /// Like [`Table::decay`], in the chosen partitions.
    pub fn decay_in(&mut self, chosen: impl Fn(u32) -> bool + Sync, rate: f64, step: u32) {
        assert!((0.0..=1.0).contains(&rate), "decay: expected a rate from 0 to 1, got {rate}");
        let threads = self.num_threads();
        share(self.spec_and_partitions_mut().1, threads, |first, partitions| {
            chosen_in(&chosen, first, partitions).for_each(|rows| decay_rows(rows, rate, step));
        });
    }

    /// Resets the data time: every row was last seen at 0.
    pub fn restart_time(&mut self) {
        let threads = self.num_threads();
        share(self.spec_and_partitions_mut().1, threads, |_, partitions| {
            for rows in partitions {
                for row in rows.numbers().collect::<Vec<u32>>() {
                    Counters { seen: 0, ..rows.counters(row) }.write(rows.parts_mut(row).tail);
                }
            }
        });
    }

    /// Evicts rows; returns their number.
    pub fn evict(&mut self, eviction: &Eviction) -> usize {
        self.evict_in(|_| true, eviction)
    }

    /// Like [`Table::evict`], in the chosen partitions.
    pub fn evict_in(&mut self, chosen: impl Fn(u32) -> bool + Sync, eviction: &Eviction) -> usize {
        let threads = self.num_threads();
        let evicted = share(self.invalidate_handles(), threads, |first, partitions| {
            let chosen = chosen_in(&chosen, first, partitions);
            chosen.map(|rows| rows.retain(|counters| eviction.keeps(counters))).sum::<usize>()
        });
        evicted.into_iter().sum()
    }
}

/// Returns the chosen partitions of a share that begins with partition `first`.
fn chosen_in<'a>(
    chosen: &'a (impl Fn(u32) -> bool + Sync),
    first: usize,
    partitions: &'a mut [Rows],
) -> impl Iterator<Item = &'a mut Rows> {
    (first as u32..).zip(partitions).filter(|(partition, _)| chosen(*partition)).map(|(_, rows)| rows)
}

fn decay_rows(rows: &mut Rows, rate: f64, step: u32) {
    for row in rows.numbers().collect::<Vec<u32>>() {
        let Counters { show, click, seen, admitted } = rows.counters(row);
        let chance = (mix(rows.sign(row) ^ mix(u64::from(step))) >> 32) as f64 / (1u64 << 32) as f64;
        // One random number for both counters keeps clicks at most shows.
        let decayed = |count: u32| (f64::from(count) * rate + chance).floor().min(f64::from(count)) as u32;
        Counters { show: decayed(show), click: decayed(click), seen, admitted }.write(rows.parts_mut(row).tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_at_the_limit_is_kept() {
        let eviction = Eviction { nonclk_coeff: 0.5, click_coeff: 2.0, min_score: Some(3.0), now: 9, max_age: Some(4) };
        let keeps = |show, click, seen| eviction.keeps(Counters { show, click, seen, admitted: true });
        assert!(keeps(3, 1, 9) && keeps(6, 0, 9), "a score of 3 is not below 3");
        assert!(!keeps(2, 1, 9) && !keeps(5, 0, 9));
        assert!(keeps(3, 1, 5), "an age of 4 is not above 4");
        assert!(!keeps(3, 1, 4));
        assert!(keeps(1, 3, 10), "more clicks than shows and a future time are no reason");
        let all = Eviction { min_score: None, max_age: None, ..eviction };
        assert!(all.keeps(Counters::default()));
    }
}
