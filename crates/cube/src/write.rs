//! Table to cube file: one partition after the other, rows straight from the table into the file.

use std::path::Path;

use elasticrec_table::part::{Kind, PartWriter, Written};

use crate::index::IndexBuilder;
use crate::meta::Meta;
use crate::{Column, CubeError};

/// Writes one part file of a cube; the parts of a cube hold each partition once between them.
pub struct CubeWriter {
    name: String,
    part: PartWriter,
    meta: Meta,
    num_partitions: u32,
    index: IndexBuilder,
}

impl CubeWriter {
    /// Creates a part file for rows of these columns; one that exists is refused.
    pub fn create(path: impl AsRef<Path>, columns: Vec<Column>, num_partitions: u32) -> Result<CubeWriter, CubeError> {
        let name = path.as_ref().display().to_string();
        let meta = Meta::new(&name, columns)?;
        let part = PartWriter::create(path, Kind::Cube, num_partitions)?;
        Ok(CubeWriter { name, part, meta, num_partitions, index: IndexBuilder::default() })
    }

    /// Writes a partition, which has to be higher than the one before; an empty one is written too.
    ///
    /// `row(i, values)` fills in the values of `signs[i]`, which are zero before. It is called once for each
    /// sign, in the order of the file.
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
        let mut values = vec![0.0; self.meta.width()];
        let mut bytes = vec![0; self.meta.row_bytes()];
        for position in self.index.order() {
            values.fill(0.0);
            row(position, &mut values);
            for (four, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&values) {
                *four = value.to_le_bytes();
            }
            self.part.write(&bytes)?;
        }
        let num_buckets = self.index.num_buckets() as u64;
        Ok(self.part.end_block(signs.len() as u64, [num_buckets, 0])?)
    }

    /// Completes the file and returns when it is on the disk.
    pub fn finish(self) -> Result<Written, CubeError> {
        let meta = serde_json::to_value(&self.meta)
            .map_err(|error| CubeError::Meta { name: self.name, what: error.to_string() })?;
        Ok(self.part.finish(&meta)?)
    }
}
