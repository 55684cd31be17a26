//! Shard to version: rows (as [`elasticrec_cube::publish`] takes them) and dense values, one partition at a time: pushes
//! wait for the copy of one, never for a write.

use elasticrec_cube::publish::{PartitionRows, PublishRequest, PublishedRows, RowsWriter};

use crate::fail::fail_point;
use crate::shard::Shard;
use crate::snapshot::ShardError;

/// A shard's part of a version.
#[derive(Debug)]
pub struct PublishedShard {
    /// The part file.
    pub rows: PublishedRows,
    /// Samples applied to its first partition.
    pub num_samples: u64,
    /// The dense values of all its partitions.
    pub dense: Vec<f32>,
}

/// A partition as it was between two pushes.
pub(crate) struct PublishCopy {
    rows: PartitionRows,
    dense: Vec<f32>,
}

impl Shard {
    /// Takes what a publish has to carry of a partition, with pushes held up.
    pub(crate) fn take_rows(&mut self, order: &PublishRequest, partition: u32) -> PublishCopy {
        let publish_states = &mut self.publish_states[(partition - self.spec.owned.start) as usize];
        let rows = publish_states.take_rows(&mut self.table, partition, order);
        let dense = self.dense.values()[self.dense.slice(partition)].to_vec();
        PublishCopy { rows, dense }
    }

    /// Begins the part file of a publish; partitions are added in ascending order.
    pub(crate) fn publish_writer(&self, order: &PublishRequest) -> Result<PublishWriter, ShardError> {
        Ok(PublishWriter {
            rows: RowsWriter::create(&self.spec.table, order)?,
            num_samples: self.samples.first().copied().unwrap_or(0),
            dense: Vec::with_capacity(self.dense.values().len()),
        })
    }
}

/// The file of a publish while it is written.
pub(crate) struct PublishWriter {
    rows: RowsWriter,
    num_samples: u64,
    dense: Vec<f32>,
}

impl PublishWriter {
    /// Adds a partition.
    pub(crate) fn add(&mut self, copy: &PublishCopy) -> Result<(), ShardError> {
        self.dense.extend_from_slice(&copy.dense);
        self.rows.add(&copy.rows)?;
        fail_point("publish");
        Ok(())
    }

    /// Ends the file, synced to the disk.
    pub(crate) fn finish(self) -> Result<PublishedShard, ShardError> {
        Ok(PublishedShard { rows: self.rows.finish()?, num_samples: self.num_samples, dense: self.dense })
    }
}

#[cfg(test)]
mod tests;
