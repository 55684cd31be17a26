//! Writes cube files: partition by partition, with rows written directly to the file.

use std::path::Path;

use elasticrec_table::part::{FileInfo, Kind, PartWriter};
use elasticrec_table::{Table, TableSpec};

use crate::block::LAYOUT;
use crate::index::{IndexBuilder, SIGN_BYTES};
use crate::meta::Meta;
use crate::row::{RowCodec, RowType};
use crate::{Column, CubeError};

/// Writes one part file of a cube; each partition is in exactly one part of the cube.
pub struct CubeWriter {
    name: String,
    part: PartWriter,
    meta: Meta,
    codec: RowCodec,
    num_partitions: u32,
    index: IndexBuilder,
}

impl CubeWriter {
    /// Creates a part file for rows of these columns; fails if the file exists.
    pub fn create(
        path: impl AsRef<Path>,
        columns: Vec<Column>,
        row_type: RowType,
        num_partitions: u32,
    ) -> Result<CubeWriter, CubeError> {
        let name = path.as_ref().display().to_string();
        let meta = Meta::new(&name, columns, row_type)?;
        let part = PartWriter::create(path, Kind::Cube, num_partitions)?;
        Ok(CubeWriter { name, part, codec: meta.codec(), meta, num_partitions, index: IndexBuilder::default() })
    }

    /// Writes a partition, which may be empty. Partitions are written in ascending order.
    ///
    /// `row(i, values)` fills in the values of `signs[i]`, which start as zeros. It is called once for each sign, in the
    /// order of the file.
    pub fn write_partition(
        &mut self,
        partition: u32,
        signs: &[u64],
        mut row: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), CubeError> {
        self.index.build(signs, partition, self.num_partitions)?;
        self.part.begin_block(partition)?;
        for bucket in self.index.buckets(signs) {
            self.part.write(&bucket)?;
        }
        let (mut values, mut record) = (vec![0.0; self.codec.width()], vec![0; SIGN_BYTES + self.codec.row_bytes()]);
        for position in self.index.order() {
            values.fill(0.0);
            row(position, &mut values);
            record[..SIGN_BYTES].copy_from_slice(&signs[position].to_le_bytes());
            self.codec.encode(&values, &mut record[SIGN_BYTES..]);
            self.part.write(&record)?;
        }
        let num_buckets = self.index.num_buckets() as u64;
        Ok(self.part.end_block(signs.len() as u64, [num_buckets, LAYOUT])?)
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.codec.width()
    }

    /// Completes the file and syncs it to the disk.
    pub fn finish(self) -> Result<FileInfo, CubeError> {
        Ok(self.part.finish(&self.meta.to_value(&self.name)?)?)
    }
}

/// The columns of a table as columns of a cube.
pub(crate) fn columns_of(spec: &TableSpec) -> Vec<Column> {
    spec.columns.iter().map(|column| Column { name: column.name.clone(), width: column.width as u32 }).collect()
}

/// Writes the weights of all rows of a table as one part. Rows are sorted by sign, so equal tables make equal files.
pub fn write_table(table: &Table, path: impl AsRef<Path>, row_type: RowType) -> Result<FileInfo, CubeError> {
    let spec = table.spec();
    let mut cube = CubeWriter::create(path, columns_of(spec), row_type, spec.partitions)?;
    for partition in 0..spec.partitions {
        let rows = table.rows_of(partition);
        cube.write_partition(partition, &rows.signs(), |position, row| rows.weights(position, row))?;
    }
    cube.finish()
}
