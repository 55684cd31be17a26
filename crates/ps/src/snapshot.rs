//! Writes a shard to the files of a checkpoint and loads it, one partition at a time. Pushes wait for the copy of one
//! partition, never for the disk.
//!
//! Rows go into a part file like those of any table; slices of the dense vector, records and metric sums go into a second
//! part file. Each partition has its own cut between two pushes, and its record says which pushes are before the cut.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticrec_cube::CubeError;
use elasticrec_table::part::{FileInfo, Kind, PartError, PartFile, PartWriter};
use elasticrec_table::{CopiedRows, Overflow, SnapshotError, Table};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::dense::DenseOptimizer;
use crate::fail::fail_point;
use crate::record::Record;
use crate::records::Records;
use crate::shard::Shard;

/// The reason a shard cannot be written or loaded.
#[derive(Debug, Error)]
pub enum ShardError {
    /// The part file of the rows is invalid.
    #[error(transparent)]
    Rows(#[from] SnapshotError),
    /// The part file of the dense values is invalid.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The part of a version cannot be written.
    #[error(transparent)]
    Cube(#[from] CubeError),
    /// The file is valid but does not fit this shard.
    #[error("{name}: {what}")]
    Other {
        /// The file.
        name: String,
        /// The expected value and the value in the file.
        what: String,
    },
}

fn other(name: impl ToString, what: impl Into<String>) -> ShardError {
    ShardError::Other { name: name.to_string(), what: what.into() }
}

/// Meta of the part file of the dense values.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meta {
    num_dense: usize,
    dense: DenseOptimizer,
    num_sums: usize,
    records: Vec<Record>,
    /// Overflow of the partitions that have reached their row limit.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    overflow: BTreeMap<u32, Overflow>,
}

/// A consistent copy of a partition, taken between two pushes.
#[derive(Debug)]
pub struct PartitionCopy {
    partition: u32,
    rows: CopiedRows,
    /// Dense values and optimizer states.
    dense: Vec<f32>,
    steps: u64,
    samples: u64,
    sums: Vec<f64>,
    record: Record,
    overflow: Overflow,
}

/// The two files of a shard's part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFiles {
    /// Rows, sorted by sign.
    pub rows: PathBuf,
    /// Slices of the dense vector, records and metric sums.
    pub dense: PathBuf,
}

impl Shard {
    /// Copies a partition. Pushes wait during the copy.
    pub fn copy(&self, partition: u32) -> PartitionCopy {
        let at = (partition - self.spec.owned.start) as usize;
        PartitionCopy {
            partition,
            rows: self.table.copy_rows(partition),
            dense: self.dense.copy_slice(partition),
            steps: self.dense.steps(partition),
            samples: self.samples[at],
            sums: if partition == 0 { self.sums.clone() } else { Vec::new() },
            record: self.records.get(at).clone(),
            overflow: self.overflow[at],
        }
    }

    /// Creates the files of a snapshot; partitions are added in ascending order.
    pub fn snapshot_writer(&self, files: &SnapshotFiles) -> Result<SnapshotWriter, ShardError> {
        let num_partitions = self.spec.table.partitions;
        Ok(SnapshotWriter {
            rows: PartWriter::create(&files.rows, Kind::TableSnapshot, num_partitions)?,
            rows_meta: self.table.snapshot_meta(),
            dense: PartWriter::create(&files.dense, Kind::DenseSnapshot, num_partitions)?,
            meta: Meta {
                num_dense: self.spec.num_dense,
                dense: self.spec.dense,
                num_sums: self.spec.num_sums,
                records: Vec::new(),
                overflow: BTreeMap::new(),
            },
        })
    }

    /// Loads the partitions of this shard from the files of all shards of a checkpoint. The number of shards may differ.
    pub fn load(&mut self, files: &[SnapshotFiles]) -> Result<(), ShardError> {
        let rows: Vec<&Path> = files.iter().map(|files| files.rows.as_path()).collect();
        let mut table = Table::new(self.spec.table.clone())
            .map_err(|error| other("table", error.to_string()))?
            .with_threads(self.num_threads());
        table.load_range(&rows, self.spec.owned.clone())?;
        fail_point("load");
        let mut records: Vec<Option<Record>> = vec![None; self.spec.owned.len()];
        for files in files {
            self.load_dense(&files.dense, &mut records)?;
        }
        let missing = records.iter().position(Option::is_none);
        if let Some(at) = missing {
            let name = files.first().map_or("snapshot".into(), |files| files.dense.display().to_string());
            return Err(other(name, format!("partition {} is missing", self.spec.owned.start + at as u32)));
        }
        self.records = Records::of(records.into_iter().flatten());
        self.table = table;
        Ok(())
    }

    /// Loads the rows of another table from the part files of its snapshot; data time starts again.
    pub fn start_rows(&mut self, paths: &[PathBuf]) -> Result<(), ShardError> {
        self.table.load_range(paths, self.spec.owned.clone())?;
        self.table.restart_time();
        Ok(())
    }

    /// Loads everything but the rows: the dense vector, its states, the metric sums and the number of samples.
    pub fn load_without_rows<P: AsRef<Path>>(&mut self, dense: &[P]) -> Result<(), ShardError> {
        let mut records: Vec<Option<Record>> = vec![None; self.spec.owned.len()];
        dense.iter().try_for_each(|path| self.load_dense(path.as_ref(), &mut records))?;
        match records.iter().position(Option::is_none) {
            None => Ok(()),
            Some(at) => Err(other("checkpoint", format!("partition {} is missing", self.spec.owned.start + at as u32))),
        }
    }

    fn load_dense(&mut self, path: &Path, records: &mut [Option<Record>]) -> Result<(), ShardError> {
        let file = PartFile::open(path)?;
        file.expect_kind(Kind::DenseSnapshot)?;
        let meta: Meta = serde_json::from_value(file.meta().clone())
            .map_err(|error| other(file.name(), format!("meta: {error}")))?;
        let ours = (self.spec.num_dense, self.spec.dense.num_states(), self.spec.num_sums);
        let theirs = (meta.num_dense, meta.dense.num_states(), meta.num_sums);
        if ours != theirs {
            let describe = |(num_dense, num_states, num_sums): (usize, usize, usize)| {
                format!("{num_dense} dense values, {num_states} optimizer vectors and {num_sums} metric sums")
            };
            let what = format!("expected {}, got {}", describe(ours), describe(theirs));
            return Err(other(file.name(), what));
        }
        for (at, entry) in file.entries().iter().enumerate() {
            if !self.spec.owned.contains(&entry.partition) {
                continue;
            }
            file.verify_block(at)?;
            let refuse = |what: &str| other(file.name(), format!("partition {}: {what}", entry.partition));
            let index = (entry.partition - self.spec.owned.start) as usize;
            let [steps, record] = entry.aux;
            let record = meta.records.get(record as usize).ok_or_else(|| refuse("expected a record, got none"))?;
            if records[index].replace(record.clone()).is_some() {
                return Err(refuse("is in two files"));
            }
            let num_values = self.dense.slice(entry.partition).len() * (1 + self.spec.dense.num_states());
            let (values, sums) =
                file.block(at).split_at_checked(4 * num_values).ok_or_else(|| refuse("is truncated"))?;
            let values: Vec<f32> = words(values, f32::from_le_bytes);
            if !self.dense.restore_slice(entry.partition, steps, &values) {
                return Err(refuse("expected the slice of the dense vector of this shard, got another length"));
            }
            if sums.len() != 8 * if entry.partition == 0 { 2 * self.spec.num_sums } else { 0 } {
                return Err(refuse("expected the metric sums of this job, got another number"));
            }
            if entry.partition == 0 {
                self.sums = words(sums, f64::from_le_bytes);
            }
            self.samples[index] = entry.num_rows;
            self.overflow[index] = meta.overflow.get(&entry.partition).copied().unwrap_or_default();
        }
        Ok(())
    }
}

fn words<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|word| read(word.first_chunk().copied().unwrap_or([0; N]))).collect()
}

/// Writes the files of a snapshot.
pub struct SnapshotWriter {
    rows: PartWriter,
    rows_meta: serde_json::Value,
    dense: PartWriter,
    meta: Meta,
}

impl SnapshotWriter {
    /// Adds a partition.
    pub fn add(&mut self, copy: &PartitionCopy) -> Result<(), ShardError> {
        copy.rows.write(&mut self.rows, copy.partition)?;
        fail_point("snapshot");
        // Search from the end: neighbouring partitions often have the same cut and so equal records.
        let known = self.meta.records.iter().rposition(|record| *record == copy.record);
        let record = known.unwrap_or_else(|| {
            self.meta.records.push(copy.record.clone());
            self.meta.records.len() - 1
        });
        if copy.overflow != Overflow::default() {
            self.meta.overflow.insert(copy.partition, copy.overflow);
        }
        self.dense.begin_block(copy.partition)?;
        let values: Vec<u8> = copy.dense.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.dense.write(&values)?;
        let sums: Vec<u8> = copy.sums.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.dense.write(&sums)?;
        Ok(self.dense.end_block(copy.samples, [copy.steps, record as u64])?)
    }

    /// Completes the files and syncs them to the disk.
    pub fn finish(self) -> Result<(FileInfo, FileInfo), ShardError> {
        let meta = serde_json::to_value(&self.meta)
            .unwrap_or_else(|error| unreachable!("records have text and numbers only: {error}"));
        Ok((self.rows.finish(&self.rows_meta)?, self.dense.finish(&meta)?))
    }
}
