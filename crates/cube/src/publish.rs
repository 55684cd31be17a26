//! Table to version: the rows that changed since the last version that was committed, or all of them, one partition at a
//! time.
//!
//! What a publish takes stays with its partition, under the name of the publish, until the partition hears which one was
//! committed last. What nobody got is taken again with the next. A partition that does not know the committed one, as
//! after a load, is written whole.

use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_table::part::Written;
use elasticrec_table::{Changes, CopiedRows, Handles, Table, TableSpec};

use crate::delta::Changes as DeltaChanges;
use crate::write::columns_of;
use crate::{CubeError, CubeWriter, DeltaWriter, RowType};

/// A publish as whoever holds rows is states of it.
#[derive(Debug, Clone)]
pub struct PublishRequest {
    /// Its name, which no other one has.
    pub name: Arc<str>,
    /// The last one that became a version, if there is one.
    pub committed: Option<Arc<str>>,
    /// All rows, or what changed since the committed one.
    pub is_base: bool,
    /// How rows are written.
    pub row_type: RowType,
    /// The part file.
    pub path: PathBuf,
}

/// The rows of a version, or of a part of it, as they were written.
#[derive(Debug)]
pub struct PublishedRows {
    /// The part file.
    pub written: Written,
    /// Rows of all its partitions.
    pub num_rows: u64,
    /// Rows in the file.
    pub num_changed: u64,
    /// Signs in it that have no row any more; those of partitions that are whole are not counted.
    pub num_removed: u64,
    /// Partitions that are whole in it.
    pub num_whole: u64,
}

/// Which changes of a partition became part of a version.
#[derive(Debug, Default)]
pub struct PublishState {
    /// The lists of the table have what changed since this one, but for what is pending.
    basis: Option<Arc<str>>,
    /// What was taken for a publish of which it is not known whether it was committed.
    pending: Option<(Arc<str>, Arc<Changes>)>,
}

impl PublishState {
    /// Takes what a publish has to carry of a partition, which is not pushed to meanwhile.
    pub fn take_rows(&mut self, table: &mut Table, partition: u32, order: &PublishRequest) -> PartitionRows {
        match (self.pending.take(), &order.committed) {
            (Some((name, _)), Some(committed)) if name == *committed => self.basis = Some(name),
            (pending, Some(committed)) if self.basis.as_ref() == Some(committed) => {
                if let Some((_, taken)) = pending {
                    table.put_back_changes(partition, &taken);
                }
            }
            _ => {
                self.basis = None;
                table.forget_changes(partition);
            }
        }
        let changes = Arc::new(table.take_changes(partition));
        self.pending = Some((order.name.clone(), changes.clone()));
        let rows = if order.is_base || changes.is_whole {
            RowSelection::Whole(table.copy_rows(partition))
        } else {
            let mut weights = vec![0.0; changes.changed.len() * table.width()];
            table.pull(&changes.changed, &mut weights, &mut Handles::default());
            RowSelection::Some(changes, weights)
        };
        PartitionRows { partition, rows, num_rows: table.num_rows(partition) }
    }
}

/// A partition as it was between two pushes.
#[derive(Debug)]
pub struct PartitionRows {
    partition: u32,
    rows: RowSelection,
    num_rows: usize,
}

#[derive(Debug)]
enum RowSelection {
    Whole(CopiedRows),
    /// With the weights of those that changed.
    Some(Arc<Changes>, Vec<f32>),
}

enum Part {
    Base(CubeWriter),
    Delta(DeltaWriter),
}

/// The part file of a publish while it is written.
pub struct RowsWriter {
    part: Part,
    num_rows: usize,
    num_changed: usize,
    num_removed: usize,
    num_whole: usize,
}

impl RowsWriter {
    /// Begins the file; partitions are added in ascending order.
    pub fn create(spec: &TableSpec, order: &PublishRequest) -> Result<Self, CubeError> {
        let (columns, path, row_type) = (columns_of(spec), &order.path, order.row_type);
        let part = match order.is_base {
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
            RowSelection::Some(changes, weights) => (changes, weights),
        };
        let Changes { changed, removed, .. } = &**changes;
        self.num_changed += changed.len();
        self.num_removed += removed.len();
        if let Part::Delta(delta) = &mut self.part {
            let (width, some) = (delta.width(), DeltaChanges { signs: changed, removed, is_whole: false });
            delta.add(taken.partition, some, |at, row| row.copy_from_slice(&weights[at * width..][..width]))?;
        }
        Ok(())
    }

    fn add_whole(&mut self, partition: u32, rows: &CopiedRows) -> Result<(), CubeError> {
        // in the order of the signs: equal tables make equal files
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

    /// Ends the file, synced to the disk.
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

/// Writes a version of a whole table; `states` has one of each partition, and stays with the table.
pub fn publish_table(
    table: &mut Table,
    states: &mut [PublishState],
    order: &PublishRequest,
) -> Result<PublishedRows, CubeError> {
    let mut writer = RowsWriter::create(table.spec(), order)?;
    for (partition, states) in (0..).zip(states) {
        writer.add(&states.take_rows(table, partition, order))?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests;
