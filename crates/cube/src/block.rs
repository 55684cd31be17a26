//! The block of a partition in a cube file: its size according to the directory, and the copy into memory, which converts
//! blocks of the previous layout.

use elasticrec_table::part::{Entry, PartFile};

use crate::CubeError;
use crate::compare::BUCKET_BYTES;
use crate::index::{IndexBuilder, SIGN_BYTES, num_buckets_for};
use crate::segment::bucket;

/// The layout number in directories: an index of tags, then records of sign and row.
pub(crate) const LAYOUT: u64 = 1;
/// The previous layout: buckets of seven whole signs, as in segments, then rows.
const PREVIOUS_LAYOUT: u64 = 0;

/// The size of a block.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    is_previous_layout: bool,
    /// Number of buckets in the file.
    num_buckets: u32,
    pub(crate) num_rows: u32,
    row_bytes: usize,
}

impl Shape {
    /// Reads the shape of block `i` from the directory and checks it against the length of the block.
    pub(crate) fn of(file: &PartFile, i: usize, row_bytes: usize) -> Result<Shape, CubeError> {
        let Entry { num_rows, length, aux: [num_buckets, layout], .. } = file.entries()[i];
        let record_bytes = match layout {
            LAYOUT => SIGN_BYTES + row_bytes,
            PREVIOUS_LAYOUT => row_bytes,
            _ => return Err(wrong(file, i, format!("expected layout {PREVIOUS_LAYOUT} or {LAYOUT}, got {layout}"))),
        };
        let index_bytes = num_buckets.checked_mul(BUCKET_BYTES as u64);
        let records_bytes = num_rows.checked_mul(record_bytes as u64);
        let expected = index_bytes.zip(records_bytes).and_then(|(index, records)| index.checked_add(records));
        let narrow = u32::try_from(num_buckets).ok().zip(u32::try_from(num_rows).ok());
        match narrow {
            Some((num_buckets, num_rows)) if expected == Some(length) => {
                Ok(Shape { is_previous_layout: layout == PREVIOUS_LAYOUT, num_buckets, num_rows, row_bytes })
            }
            _ => Err(wrong(
                file,
                i,
                format!("expected a block of {length} bytes, got {num_buckets} buckets and {num_rows} rows"),
            )),
        }
    }

    /// Whether the block has the previous layout and must be converted.
    pub(crate) fn is_previous_layout(&self) -> bool {
        self.is_previous_layout
    }

    /// Number of buckets in memory.
    pub(crate) fn num_buckets(&self) -> u32 {
        if self.is_previous_layout { num_buckets_for(self.num_rows as usize) } else { self.num_buckets }
    }

    /// Bytes of a sign and its row in memory.
    pub(crate) fn record_bytes(&self) -> usize {
        SIGN_BYTES + self.row_bytes
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.num_buckets() as usize * BUCKET_BYTES + self.num_rows as usize * self.record_bytes()
    }

    /// Copies block `i` into `out`, which has [`bytes`](Shape::bytes) bytes, and compares its checksum.
    pub(crate) fn read(&self, file: &PartFile, i: usize, out: &mut [u8]) -> Result<(), CubeError> {
        let block = file.block(i);
        if self.is_previous_layout {
            file.verify_block(i)?;
            return self.convert(file, i, out);
        }
        out.copy_from_slice(block);
        Ok(file.verify_copy(i, out)?)
    }

    /// Converts a block of the previous layout.
    fn convert(&self, file: &PartFile, i: usize, out: &mut [u8]) -> Result<(), CubeError> {
        let (index, rows) = file.block(i).split_at(self.num_buckets as usize * BUCKET_BYTES);
        let mut signs = Vec::new();
        for (at, bucket) in index.as_chunks().0.iter().enumerate() {
            let count = bucket::count(bucket);
            if count > 0 && bucket::row_of(bucket, 0) != Some(signs.len() as u32) {
                return Err(wrong(file, i, format!("bucket {at}: expected first row {}", signs.len())));
            }
            signs.extend((0..count).map(|slot| bucket::sign_at(bucket, slot)));
        }
        if signs.len() != self.num_rows as usize {
            return Err(wrong(file, i, format!("expected {} rows, got {} in the index", self.num_rows, signs.len())));
        }
        let mut builder = IndexBuilder::default();
        let built = builder.build(&signs, file.entries()[i].partition, file.num_partitions());
        built.map_err(|error| wrong(file, i, error.to_string()))?;
        let (index, records) = out.split_at_mut(builder.num_buckets() * BUCKET_BYTES);
        for (out, bucket) in index.as_chunks_mut().0.iter_mut().zip(builder.buckets(&signs)) {
            *out = bucket;
        }
        for (record, position) in records.chunks_exact_mut(self.record_bytes()).zip(builder.order()) {
            let (sign, row) = record.split_at_mut(SIGN_BYTES);
            sign.copy_from_slice(&signs[position].to_le_bytes());
            row.copy_from_slice(&rows[position * self.row_bytes..][..self.row_bytes]);
        }
        Ok(())
    }
}

/// The error of an invalid block.
pub(crate) fn wrong(file: &PartFile, i: usize, what: String) -> CubeError {
    CubeError::Block { name: file.name().to_owned(), partition: file.entries()[i].partition, what }
}
