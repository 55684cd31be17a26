//! A whole table as one part of a cube.

use std::path::Path;

use elasticrec_table::Table;
use elasticrec_table::part::Written;

use crate::{Column, CubeError, CubeWriter};

/// Writes the weights of every row, in the order of the signs: equal tables make equal files.
pub fn write_table(table: &Table, path: impl AsRef<Path>) -> Result<Written, CubeError> {
    let spec = table.spec();
    let columns = spec.columns.iter();
    let columns = columns.map(|column| Column { name: column.name.clone(), width: column.width as u32 }).collect();
    let mut cube = CubeWriter::create(path, columns, spec.partitions)?;
    for partition in 0..spec.partitions {
        let rows = table.rows_of(partition);
        cube.write_partition(partition, &rows.signs(), |position, row| rows.weights(position, row))?;
    }
    cube.finish()
}
