//! The record: the batches that a partition has applied. Its size does not grow with their number.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The name of a batch, or of batches that are pushed as one; the same each time the unit is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BatchName {
    /// The unit; numbers are assigned in order, without gaps.
    pub unit: u64,
    /// Index in the unit.
    pub batch: u32,
}

/// State of a batch in a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchState {
    /// The batch is not applied.
    Missing,
    /// The batch is applied.
    Applied,
    /// A batch of this name is applied, but with other samples: the unit was split differently.
    Clash,
}

/// The applied batches: all units below the watermark, complete units above it, and the batches of open units.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    watermark: u64,
    /// Complete units at or above the watermark.
    complete: BTreeSet<u64>,
    open: BTreeMap<u64, OpenUnit>,
    /// Number of pass boundaries applied.
    boundaries: u64,
}

/// A unit with some applied batches.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenUnit {
    /// Checksums of the applied batches.
    batches: BTreeMap<u32, u64>,
    /// Number of batches, once the last one has been applied.
    num_batches: Option<u32>,
}

impl Record {
    /// The watermark: all units below it are complete.
    pub fn watermark(&self) -> u64 {
        self.watermark
    }

    /// Number of pass boundaries applied.
    pub fn boundaries(&self) -> u64 {
        self.boundaries
    }

    /// Counts one more boundary.
    pub fn pass_boundary(&mut self) {
        self.boundaries += 1;
    }

    /// Whether all batches of a unit are applied.
    pub fn is_complete(&self, unit: u64) -> bool {
        unit < self.watermark || self.complete.contains(&unit)
    }

    /// Returns whether a batch is applied, and with the same samples.
    pub fn state_of(&self, name: BatchName, checksum: u64) -> BatchState {
        if self.is_complete(name.unit) {
            return BatchState::Applied;
        }
        match self.open.get(&name.unit).and_then(|unit| unit.batches.get(&name.batch)) {
            None => BatchState::Missing,
            Some(&applied) if applied == checksum => BatchState::Applied,
            Some(_) => BatchState::Clash,
        }
    }

    /// Adds an applied batch; `is_last` if it is the last of its unit.
    pub fn add(&mut self, name: BatchName, checksum: u64, is_last: bool) {
        debug_assert_eq!(self.state_of(name, checksum), BatchState::Missing);
        let unit = self.open.entry(name.unit).or_default();
        unit.batches.insert(name.batch, checksum);
        if is_last {
            unit.num_batches = Some(name.batch + 1);
        }
        // Batches are numbered from 0, and each is added once.
        if unit.num_batches == Some(unit.batches.len() as u32) {
            self.complete(name.unit);
        }
    }

    /// Marks a unit as complete although its data is lost, however many of its batches are applied.
    pub fn skip(&mut self, unit: u64) {
        if !self.is_complete(unit) {
            self.complete(unit);
        }
    }

    fn complete(&mut self, unit: u64) {
        self.open.remove(&unit);
        self.complete.insert(unit);
        while self.complete.remove(&self.watermark) {
            self.watermark += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn checksum(name: BatchName) -> u64 {
        name.unit * 1000 + u64::from(name.batch)
    }

    proptest! {
        /// In any order, a batch is applied once it is added, and a unit is complete once all its batches are.
        #[test]
        fn agrees_with_a_map_of_names(sizes in prop::collection::vec(1u32..5, 1..8), seed: u64) {
            let mut names: Vec<(BatchName, bool)> = sizes
                .iter()
                .zip(0u64..)
                .flat_map(|(&size, unit)| (0..size).map(move |batch| (BatchName { unit, batch }, batch + 1 == size)))
                .collect();
            let mut state = seed | 1;
            for at in (1..names.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                names.swap(at, (state >> 33) as usize % (at + 1));
            }
            let (mut record, mut applied) = (Record::default(), HashMap::new());
            for &(name, is_last) in &names {
                prop_assert_eq!(record.state_of(name, checksum(name)), BatchState::Missing);
                record.add(name, checksum(name), is_last);
                applied.entry(name.unit).or_insert_with(Vec::new).push(name.batch);
                for &(other, _) in &names {
                    let is_in = applied.get(&other.unit).is_some_and(|batches| batches.contains(&other.batch));
                    prop_assert_eq!(record.state_of(other, checksum(other)) == BatchState::Applied, is_in);
                }
                for (unit, &size) in (0u64..).zip(&sizes) {
                    let is_whole = applied.get(&unit).is_some_and(|batches| batches.len() as u32 == size);
                    prop_assert_eq!(record.is_complete(unit), is_whole);
                }
                let json = serde_json::to_string(&record).unwrap();
                prop_assert_eq!(&serde_json::from_str::<Record>(&json).unwrap(), &record);
            }
            prop_assert_eq!(record, Record { watermark: sizes.len() as u64, ..Record::default() });
        }
    }

    #[test]
    fn a_skipped_unit_is_complete() {
        let mut record = Record::default();
        record.add(BatchName { unit: 1, batch: 0 }, 7, false);
        record.skip(1);
        assert_eq!((record.watermark(), record.is_complete(1)), (0, true));
        assert_eq!(
            record.state_of(BatchName { unit: 1, batch: 5 }, 9),
            BatchState::Applied,
            "the rest must not be applied"
        );
        record.skip(0);
        record.skip(0);
        assert_eq!(record, Record { watermark: 2, ..Record::default() });
    }

    #[test]
    fn other_samples_under_the_same_name_clash_while_the_unit_is_open() {
        let (mut record, name) = (Record::default(), BatchName { unit: 0, batch: 1 });
        record.add(name, 7, true);
        assert_eq!((record.state_of(name, 7), record.state_of(name, 8)), (BatchState::Applied, BatchState::Clash));
        assert_eq!(record.open[&0].batches.keys().copied().collect::<Vec<_>>(), [1]);
        assert_eq!(record.watermark(), 0);
        record.add(BatchName { unit: 0, batch: 0 }, 6, false);
        assert_eq!(record.state_of(name, 8), BatchState::Applied, "checksums of complete units are forgotten");
        assert_eq!(record.watermark(), 1);
    }
}
