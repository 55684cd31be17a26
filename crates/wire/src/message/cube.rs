//! Messages between cube clients and cube servers: signs in, rows of one version out.

use super::{MessageError, Parts, Reader, head};

/// Most signs of a request.
pub const MAX_LOOKUP_SIGNS: usize = 1 << 16;
/// Bytes of a request with that many signs.
pub const MAX_LOOKUP_BYTES: usize = 16 + 8 * MAX_LOOKUP_SIGNS;
/// Most bytes of rows in an answer.
pub const MAX_RESULT_BYTES: usize = 64 << 20;

/// A cube server's answer to every hello: its partitions and the versions that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inventory<'a> {
    /// First partition of the server.
    pub first_partition: u32,
    /// End of its partitions, exclusive.
    pub end_partition: u32,
    /// Partitions of the table.
    pub num_partitions: u32,
    /// The model.
    pub model: &'a [u8],
    /// Row layouts, a JSON list; versions may differ in their layout.
    pub layouts: &'a [u8],
    /// Versions in ascending order, each with the index of its layout.
    pub versions: &'a [[u64; 2]],
    /// State of the server, a JSON object, for monitoring.
    pub about: &'a [u8],
}

impl<'a> Inventory<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("inventory", bytes);
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

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        let Inventory { first_partition, end_partition, num_partitions, .. } = *self;
        let lengths = [self.model.len(), self.layouts.len(), self.versions.len(), self.about.len()];
        let [model, layouts, versions, about] = lengths.map(|length| length as u32);
        let halves = [first_partition, end_partition, num_partitions, model, layouts, versions, about, 0];
        Parts::new(head(&[], &halves)).array(self.model).array(self.layouts).array(self.versions).array(self.about)
    }
}

/// A request for rows of one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lookup<'a> {
    /// The version.
    pub version: u64,
    /// Signs of the server's partitions, in any order.
    pub signs: &'a [u64],
}

impl<'a> Lookup<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("lookup", bytes);
        let version = reader.u64()?;
        let (num_signs, _zero) = (reader.u32()? as usize, reader.u32()?);
        if num_signs > MAX_LOOKUP_SIGNS {
            return reader.fail(format!("expected at most {MAX_LOOKUP_SIGNS} signs, got {num_signs}"));
        }
        let signs = reader.array(num_signs)?;
        reader.end()?;
        Ok(Lookup { version, signs })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        Parts::new(head(&[self.version], &[self.signs.len() as u32, 0])).array(self.signs)
    }
}

/// The answer to a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupResult<'a> {
    /// The version of all rows.
    pub version: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Whether each sign has a row, one bit each, lowest bit first. Unused bits are zero.
    pub present: &'a [u64],
    /// A row for each sign in the order of the request, in the version's layout; zeros for a sign without a row.
    pub rows: &'a [u8],
    /// Signs of the request.
    pub num_signs: usize,
}

impl<'a> LookupResult<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("lookup result", bytes);
        let (version, num_signs, row_bytes) = (reader.u64()?, reader.u32()? as usize, reader.u32()?);
        let present = reader.array(num_signs.div_ceil(64))?;
        let rows = reader.array(num_signs.saturating_mul(row_bytes as usize))?;
        reader.end()?;
        Ok(LookupResult { version, row_bytes, present, rows, num_signs })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        debug_assert_eq!(self.rows.len(), self.num_signs * self.row_bytes as usize);
        debug_assert_eq!(self.present.len(), self.num_signs.div_ceil(64));
        Parts::new(head(&[self.version], &[self.num_signs as u32, self.row_bytes])).array(self.present).array(self.rows)
    }
}
