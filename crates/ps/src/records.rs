//! The records of a shard's partitions.

use crate::record::Record;

/// Records by partition: partitions with equal ones share one.
#[derive(Debug)]
pub(crate) struct Records {
    /// For each owned partition its place in `groups`.
    pub(crate) places: Vec<usize>,
    /// Each once.
    pub(crate) groups: Vec<Record>,
}

impl Records {
    /// All partitions have applied nothing.
    pub(crate) fn new(num_partitions: usize) -> Self {
        Records { places: vec![0; num_partitions], groups: vec![Record::default()] }
    }

    /// From one record a partition.
    pub(crate) fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut found = Records { places: Vec::new(), groups: Vec::new() };
        for record in records {
            let place = found.groups.iter().position(|group| *group == record).unwrap_or(found.groups.len());
            if place == found.groups.len() {
                found.groups.push(record);
            }
            found.places.push(place);
        }
        found
    }

    /// The record of the owned partition at `at`.
    pub(crate) fn get(&self, at: usize) -> &Record {
        &self.groups[self.places[at]]
    }

    /// Joins groups that became equal.
    pub(crate) fn merge(&mut self) {
        if self.groups.len() > 1 {
            *self = Records::of(self.places.iter().map(|&place| self.groups[place].clone()).collect::<Vec<_>>());
        }
    }
}
