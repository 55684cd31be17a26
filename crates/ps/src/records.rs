//! The records of a shard's partitions.

use crate::record::Record;

/// Records by partition; partitions with equal records share one.
#[derive(Debug)]
pub(crate) struct Records {
    /// Index in `groups` for each owned partition.
    pub(crate) indices: Vec<usize>,
    /// Distinct records.
    pub(crate) groups: Vec<Record>,
}

impl Records {
    /// Creates empty records for all partitions.
    pub(crate) fn new(num_partitions: usize) -> Self {
        Records { indices: vec![0; num_partitions], groups: vec![Record::default()] }
    }

    /// Groups one record per partition.
    pub(crate) fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut found = Records { indices: Vec::new(), groups: Vec::new() };
        for record in records {
            let index = found.groups.iter().position(|group| *group == record).unwrap_or(found.groups.len());
            if index == found.groups.len() {
                found.groups.push(record);
            }
            found.indices.push(index);
        }
        found
    }

    /// Returns the record of the owned partition with index `at`.
    pub(crate) fn get(&self, at: usize) -> &Record {
        &self.groups[self.indices[at]]
    }

    /// Merges groups that have become equal.
    pub(crate) fn merge(&mut self) {
        if self.groups.len() > 1 {
            *self = Records::of(self.indices.iter().map(|&index| self.groups[index].clone()).collect::<Vec<_>>());
        }
    }
}
