//! Cube clients and cube servers: signs there, rows of one version back.

use super::{MessageError, Parts, Reader, head};

/// Signs of a request.
pub const MAX_LOOKUP_SIGNS: usize = 1 << 16;
/// The body of a request with as many signs.
pub const MAX_LOOKUP_BYTES: usize = 16 + 8 * MAX_LOOKUP_SIGNS;
/// Bytes of the rows of an answer.
pub const MAX_RESULT_BYTES: usize = 64 << 20;

/// What a cube server is and holds: its answer to every hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inventory<'a> {
    /// Its partitions: from this one
    pub first_partition: u32,
    /// up to, without, this one,
    pub end_partition: u32,
    /// of so many.
    pub num_partitions: u32,
    /// Whose rows it has.
    pub model: &'a [u8],
    /// How rows are laid out, a JSON list: versions may differ in it.
    pub layouts: &'a [u8],
    /// The versions it has, ascending, each with the place of its layout in the list.
    pub versions: &'a [[u64; 2]],
    /// How the server is, a JSON object, for whoever watches it.
    pub about: &'a [u8],
}

impl<'a> Inventory<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("holding", bytes);
        let (first_partition, end_partition, num_partitions) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (model, layouts, versions) = (reader.u32()? as usize, reader.u32()? as usize, reader.u32()? as usize);
        let (about, _zero) = (reader.u32()? as usize, reader.u32()?);
        if first_partition >= end_partition || end_partition > num_partitions {
            let got = format!("{first_partition} to {end_partition}");
            return reader.fail(format!("expected partitions from 0 to {num_partitions}, got {got}"));
        }
        let (model, layouts) = (reader.array(model)?, reader.array(layouts)?);
        let versions = reader.array(versions)?;
        let about = reader.array(about)?;
        reader.end()?;
        Ok(Inventory { first_partition, end_partition, num_partitions, model, layouts, versions, about })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        let Inventory { first_partition, end_partition, num_partitions, .. } = *self;
        let lengths = [self.model.len(), self.layouts.len(), self.versions.len(), self.about.len()];
        let [model, layouts, versions, about] = lengths.map(|length| length as u32);
        let halves = [first_partition, end_partition, num_partitions, model, layouts, versions, about, 0];
        Parts::new(head(&[], &halves)).array(self.model).array(self.layouts).array(self.versions).array(self.about)
    }
}

/// Rows of a version are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lookup<'a> {
    /// The one, and no other.
    pub version: u64,
    /// All of the server's partitions, in any order.
    pub signs: &'a [u64],
}

impl<'a> Lookup<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("seek", bytes);
        let version = reader.u64()?;
        let (num_signs, _zero) = (reader.u32()? as usize, reader.u32()?);
        if num_signs > MAX_LOOKUP_SIGNS {
            return reader.fail(format!("expected at most {MAX_LOOKUP_SIGNS} signs, got {num_signs}"));
        }
        let signs = reader.array(num_signs)?;
        reader.end()?;
        Ok(Lookup { version, signs })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        Parts::new(head(&[self.version], &[self.signs.len() as u32, 0])).array(self.signs)
    }
}

/// The answer to a seek.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupResult<'a> {
    /// Of all rows in it.
    pub version: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// A bit for each sign, from the lowest of the first word on: whether it has a row. The other bits are zero.
    pub present: &'a [u64],
    /// A row for each sign, in their order, as the version's layout says; zeros for a sign without one.
    pub rows: &'a [u8],
    /// Signs that were asked for.
    pub num_signs: usize,
}

impl<'a> LookupResult<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("found", bytes);
        let (version, num_signs, row_bytes) = (reader.u64()?, reader.u32()? as usize, reader.u32()?);
        let present = reader.array(num_signs.div_ceil(64))?;
        let rows = reader.array(num_signs.saturating_mul(row_bytes as usize))?;
        reader.end()?;
        Ok(LookupResult { version, row_bytes, present, rows, num_signs })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        debug_assert_eq!(self.rows.len(), self.num_signs * self.row_bytes as usize);
        debug_assert_eq!(self.present.len(), self.num_signs.div_ceil(64));
        Parts::new(head(&[self.version], &[self.num_signs as u32, self.row_bytes])).array(self.present).array(self.rows)
    }
}
