//! Writes delta files: partition by partition, with rows written directly to the file.

use std::path::Path;

use elasticrec_table::part::{FileInfo, Kind, PartWriter};
use elasticrec_table::partition::{mix, partition_of_mixed};

use crate::meta::Meta;
use crate::row::{RowCodec, RowType};
use crate::{Column, CubeError};

/// The changes of one partition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes<'a> {
    /// Distinct signs with a new or changed row, in any order.
    pub signs: &'a [u64],
    /// Signs that were removed; must not be in `signs`.
    pub removed: &'a [u64],
    /// Whether `signs` are all signs of the partition; `removed` is ignored then.
    pub is_whole: bool,
}

/// Writes one part file of a delta; the parts of a delta have no partition in common.
pub struct DeltaWriter {
    name: String,
    part: PartWriter,
    meta: Meta,
    codec: RowCodec,
    num_partitions: u32,
    /// Lowest partition that may be added next.
    next: u64,
    num_rows: u64,
    removed: Vec<u64>,
    whole: Vec<u32>,
    /// The partition's signs, mixed, with their positions in the caller's list.
    order: Vec<(u64, usize)>,
    /// The same for its removed signs.
    gone: Vec<(u64, usize)>,
}

impl DeltaWriter {
    /// Creates a part file for rows of these columns; fails if the file exists.
    pub fn create(
        path: impl AsRef<Path>,
        columns: Vec<Column>,
        row_type: RowType,
        num_partitions: u32,
    ) -> Result<DeltaWriter, CubeError> {
        let name = path.as_ref().display().to_string();
        let meta = Meta::new(&name, columns, row_type)?;
        let mut part = PartWriter::create(path, Kind::CubeDelta, num_partitions)?;
        part.begin_block(0)?;
        let (removed, whole, order, gone) = Default::default();
        Ok(DeltaWriter {
            name,
            part,
            codec: meta.codec(),
            meta,
            num_partitions,
            next: 0,
            num_rows: 0,
            removed,
            whole,
            order,
            gone,
        })
    }

    /// Adds the changes of a partition. Partitions are added in ascending order.
    ///
    /// `row(i, values)` fills in the values of `changes.signs[i]`, which start as zeros. It is called once for each sign,
    /// in the order of the file.
    pub fn add(
        &mut self,
        partition: u32,
        changes: Changes<'_>,
        mut row: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), CubeError> {
        self.check_order(partition)?;
        let Changes { signs, removed, is_whole } = changes;
        sort(&mut self.order, signs, partition, self.num_partitions)?;
        sort(&mut self.gone, if is_whole { &[] } else { removed }, partition, self.num_partitions)?;
        let mut gone = self.gone.iter().peekable();
        for (mixed, position) in &self.order {
            while gone.next_if(|(other, _)| other < mixed).is_some() {}
            if gone.peek().is_some_and(|(other, _)| other == mixed) {
                return Err(CubeError::ChangedAndRemoved { partition, sign: signs[*position] });
            }
        }
        let mut values = vec![0.0; self.codec.width()];
        let mut bytes = vec![0; self.codec.row_bytes()];
        for (_, position) in &self.order {
            values.fill(0.0);
            row(*position, &mut values);
            self.codec.encode(&values, &mut bytes);
            self.part.write(&signs[*position].to_le_bytes())?;
            self.part.write(&bytes)?;
        }
        self.num_rows += signs.len() as u64;
        self.removed.extend(self.gone.iter().map(|(_, position)| removed[*position]));
        self.whole.extend(is_whole.then_some(partition));
        Ok(())
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.codec.width()
    }

    /// Completes the file and syncs it to the disk.
    pub fn finish(mut self) -> Result<FileInfo, CubeError> {
        for sign in &self.removed {
            self.part.write(&sign.to_le_bytes())?;
        }
        for partition in &self.whole {
            self.part.write(&partition.to_le_bytes())?;
        }
        self.part.end_block(self.num_rows, [self.removed.len() as u64, self.whole.len() as u64])?;
        Ok(self.part.finish(&self.meta.to_value(&self.name)?)?)
    }

    fn check_order(&mut self, partition: u32) -> Result<(), CubeError> {
        if u64::from(partition) < self.next || partition >= self.num_partitions {
            let (lowest, limit) = (self.next, self.num_partitions);
            let what = format!("expected a partition from {lowest} to below {limit}, got {partition}");
            return Err(CubeError::Delta { name: self.name.clone(), what });
        }
        self.next = u64::from(partition) + 1;
        Ok(())
    }
}

/// Sorts `signs` into the order of the file; rejects signs of other partitions and repeated signs.
fn sort(order: &mut Vec<(u64, usize)>, signs: &[u64], partition: u32, num_partitions: u32) -> Result<(), CubeError> {
    order.clear();
    for (position, &sign) in signs.iter().enumerate() {
        let mixed = mix(sign);
        let home = partition_of_mixed(mixed, num_partitions);
        if home != partition {
            return Err(CubeError::ForeignSign { partition, sign, home });
        }
        order.push((mixed, position));
    }
    order.sort_unstable();
    match order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(CubeError::DuplicateSign { partition, sign: signs[pair[0].1] }),
        None => Ok(()),
    }
}
