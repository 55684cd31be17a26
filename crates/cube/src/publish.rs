//! Publishes a table: the rows that changed since the last committed publish, or all rows, one partition at a time.
//!
//! A partition keeps the changes of a publish, under the name of the publish, until a later request says which publish was
//! committed last. Changes of a publish that was not committed are written again with the next one. A partition that does
//! not know the committed publish, for instance after a load, is written as a whole.

use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_table::part::FileInfo;
use elasticrec_table::{Changes, CopiedRows, Handles, Table, TableSpec};

use crate::delta::Changes as DeltaChanges;
use crate::write::columns_of;
use crate::{CubeError, CubeWriter, DeltaWriter, RowType};

/// A request to the owner of rows to write them into a version.
#[derive(Debug, Clone)]
pub struct PublishRequest {
    /// Unique name of the publish.
    pub name: Arc<str>,
    /// Name of the last publish that became a version, if any.
    pub committed: Option<Arc<str>>,
    /// Whether to write all rows, or only the changes since the committed publish.
    pub is_base: bool,
    /// Type of the written rows.
    pub row_type: RowType,
    /// Path of the part file.
    pub path: PathBuf,
}

/// Figures of a written part file.
#[derive(Debug)]
pub struct PublishedRows {
    /// Size and checksum of the file.
    pub written: FileInfo,
    /// Number of rows of all its partitions after the publish.
    pub num_rows: u64,
    /// Number of rows in the file.
    pub num_changed: u64,
    /// Number of removed signs in the file, without those of partitions that are written as a whole.
    pub num_removed: u64,
    /// Number of partitions that are written as a whole.
    pub num_whole: u64,
}

/// Records which changes of a partition are part of a version already.
#[derive(Debug, Default)]
pub struct PublishState {
    /// The last committed publish that is known: the table lists the changes since then, without the pending ones.
    basis: Option<Arc<str>>,
    /// A publish that may or may not be committed, and its changes.
    pending: Option<(Arc<str>, Arc<Changes>)>,
}

impl PublishState {
    /// Copies the rows of a partition that a publish must contain. There must be no pushes to the partition meanwhile.
    pub fn take_rows(&mut self, table: &mut Table, partition: u32, request: &PublishRequest) -> PartitionRows {
        match (self.pending.take(), &request.committed) {
            (Some((name, _)), Some(committed)) if name == *committed => self.basis = Some(name),
            (pending, Some(committed)) if self.basis.as_ref() == Some(committed) => {
                if let Some((_, taken)) = pending {
                    table.put_back_changes(partition, &taken);
                }
            }
            _ => {
                self.basis = None;
                table.mark_all_changed(partition);
            }
        }
        let changes = Arc::new(table.take_changes(partition));
        self.pending = Some((request.name.clone(), changes.clone()));
        let rows = if request.is_base || changes.is_whole {
            RowSelection::Whole(table.copy_rows(partition))
        } else {
            let mut weights = vec![0.0; changes.changed.len() * table.width()];
            table.pull(&changes.changed, &mut weights, &mut Handles::default());
            RowSelection::Changed(changes, weights)
        };
        PartitionRows { partition, rows, num_rows: table.num_rows(partition) }
    }
}

/// A consistent copy of the rows that a publish writes of a partition.
#[derive(Debug)]
pub struct PartitionRows {
    partition: u32,
    rows: RowSelection,
    num_rows: usize,
}

#[derive(Debug)]
enum RowSelection {
    Whole(CopiedRows),
    /// The changes, with the weights of the changed rows.
    Changed(Arc<Changes>, Vec<f32>),
}

enum Part {
    Base(CubeWriter),
    Delta(DeltaWriter),
}

/// Writes the part file of a publish.
pub struct RowsWriter {
    part: Part,
    num_rows: usize,
    num_changed: usize,
    num_removed: usize,
    num_whole: usize,
}

impl RowsWriter {
    /// Creates the file; partitions are added in ascending order.
    pub fn create(spec: &TableSpec, request: &PublishRequest) -> Result<Self, CubeError> {
        let (columns, path, row_type) = (columns_of(spec), &request.path, request.row_type);
        let part = match request.is_base {
            true => Part::Base(CubeWriter::create(path, columns, row_type, spec.partitions)?),
            false => Part::Delta(DeltaWriter::create(path, columns, row_type, spec.partitions)?),
        };
        Ok(RowsWriter { part, num_rows: 0, num_changed: 0, num_removed: 0, num_whole: 0 })
    }

    /// Adds a partition.
    pub fn add(&mut self, taken: &PartitionRows) -> Result<(), CubeError> {
        self.num_rows += taken.num_rows;
        let (changes, weights) = match &taken.rows {
            RowSelection::Whole(rows) => return self.add_whole(taken.partition, rows),
            RowSelection::Changed(changes, weights) => (changes, weights),
        };
        let Changes { changed, removed, .. } = &**changes;
        self.num_changed += changed.len();
        self.num_removed += removed.len();
        if let Part::Delta(delta) = &mut self.part {
            let (width, changes) = (delta.width(), DeltaChanges { signs: changed, removed, is_whole: false });
            delta.add(taken.partition, changes, |at, row| row.copy_from_slice(&weights[at * width..][..width]))?;
        }
        Ok(())
    }

    fn add_whole(&mut self, partition: u32, rows: &CopiedRows) -> Result<(), CubeError> {
        // Rows are sorted by sign, so that equal tables make equal files.
        let mut order: Vec<(u64, u32)> = rows.signs().into_iter().zip(0..).collect();
        order.sort_unstable();
        let signs: Vec<u64> = order.iter().map(|(sign, _)| *sign).collect();
        let row = |at: usize, out: &mut [f32]| rows.weights(order[at].1 as usize, out);
        self.num_changed += signs.len();
        self.num_whole += 1;
        match &mut self.part {
            Part::Base(cube) => cube.write_partition(partition, &signs, row),
            Part::Delta(delta) => {
                delta.add(partition, DeltaChanges { signs: &signs, removed: &[], is_whole: true }, row)
            }
        }
    }

    /// Completes the file and syncs it to the disk.
    pub fn finish(self) -> Result<PublishedRows, CubeError> {
        let written = match self.part {
            Part::Base(cube) => cube.finish()?,
            Part::Delta(delta) => delta.finish()?,
        };
        Ok(PublishedRows {
            written,
            num_rows: self.num_rows as u64,
            num_changed: self.num_changed as u64,
            num_removed: self.num_removed as u64,
            num_whole: self.num_whole as u64,
        })
    }
}

/// Publishes a whole table; `states` has one state per partition and must stay with the table.
pub fn publish_table(
    table: &mut Table,
    states: &mut [PublishState],
    request: &PublishRequest,
) -> Result<PublishedRows, CubeError> {
    let mut writer = RowsWriter::create(table.spec(), request)?;
    for (partition, state) in (0..).zip(states) {
        writer.add(&state.take_rows(table, partition, request))?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests;
