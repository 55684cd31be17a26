//! Publishes a shard: writes its rows and dense values into a version, one partition at a time. Pushes wait for the copy of
//! one partition, never for the disk. [`elasticrec_cube::publish`] decides which rows are written.

use elasticrec_cube::publish::{PartitionRows, PublishRequest, PublishedRows, RowsWriter};

use crate::fail::fail_point;
use crate::shard::Shard;
use crate::snapshot::ShardError;

/// A shard's part of a version.
#[derive(Debug)]
pub struct PublishedShard {
    /// The part file of the rows.
    pub rows: PublishedRows,
    /// Number of samples applied to the first partition.
    pub num_samples: u64,
    /// The dense values of all partitions of the shard.
    pub dense: Vec<f32>,
}

/// A consistent copy of a partition, taken between two pushes.
pub(crate) struct PublishCopy {
    rows: PartitionRows,
    dense: Vec<f32>,
}

impl Shard {
    /// Copies the rows and dense values of a partition that a publish must contain. Pushes wait during the copy.
    pub(crate) fn take_rows(&mut self, request: &PublishRequest, partition: u32) -> PublishCopy {
        let publish_state = &mut self.publish_states[(partition - self.spec.owned.start) as usize];
        let rows = publish_state.take_rows(&mut self.table, partition, request);
        let dense = self.dense.values()[self.dense.slice(partition)].to_vec();
        PublishCopy { rows, dense }
    }

    /// Creates the part file of a publish; partitions are added in ascending order.
    pub(crate) fn publish_writer(&self, request: &PublishRequest) -> Result<PublishWriter, ShardError> {
        Ok(PublishWriter {
            rows: RowsWriter::create(&self.spec.table, request)?,
            num_samples: self.samples.first().copied().unwrap_or(0),
            dense: Vec::with_capacity(self.dense.values().len()),
        })
    }
}

/// Writes the part file of a publish.
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

    /// Completes the file and syncs it to the disk.
    pub(crate) fn finish(self) -> Result<PublishedShard, ShardError> {
        Ok(PublishedShard { rows: self.rows.finish()?, num_samples: self.num_samples, dense: self.dense })
    }
}

#[cfg(test)]
mod tests;
