//! Messages: the bodies of frames. Numbers come first, then arrays that begin at multiples of eight bytes, so that they
//! are used in place.

use bytemuck::{AnyBitPattern, NoUninit};
use thiserror::Error;

mod cube;
mod hello;
mod ps;

pub use self::cube::{Inventory, Lookup, LookupResult, MAX_LOOKUP_BYTES, MAX_LOOKUP_SIGNS, MAX_RESULT_BYTES};
pub use self::hello::{Hello, Reason, Refusal};
pub use self::ps::{Group, Pull, Push, PushAck, PushHeader, Rows, StepQuery, StepStatus, Welcome};

/// A body that does not match the kind of its frame.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{message}: {what}")]
pub struct MessageError {
    message: &'static str,
    what: String,
}

/// Reads the numbers and arrays of a body in order.
struct Reader<'a> {
    message: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Reader { message, bytes, at: 0 }
    }

    fn fail<T>(&self, what: impl Into<String>) -> Result<T, MessageError> {
        Err(MessageError { message: self.message, what: what.into() })
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], MessageError> {
        match self.bytes[self.at..].get(..length) {
            Some(taken) => {
                self.at += length;
                Ok(taken)
            }
            None => self.fail(format!("expected at least {} bytes, got {}", self.at + length, self.bytes.len())),
        }
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        Ok(self.take(N)?.first_chunk().copied().unwrap_or([0; N]))
    }

    fn u32(&mut self) -> Result<u32, MessageError> {
        Ok(u32::from_le_bytes(self.number()?))
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        Ok(u64::from_le_bytes(self.number()?))
    }

    /// Reads an array of `count` values and the padding after it.
    fn array<T: AnyBitPattern>(&mut self, count: usize) -> Result<&'a [T], MessageError> {
        let Some(length) = count.checked_mul(size_of::<T>()).filter(|length| *length <= self.bytes.len()) else {
            return self.fail(format!("expected at most {} bytes in an array, got more", self.bytes.len()));
        };
        let taken = self.take(length)?;
        self.take(padding(length))?;
        bytemuck::try_cast_slice(taken).or_else(|_| self.fail("expected an aligned array, got an unaligned one"))
    }

    fn end(self) -> Result<(), MessageError> {
        match self.bytes.len() {
            got if got == self.at => Ok(()),
            got => self.fail(format!("expected {} bytes, got {got}", self.at)),
        }
    }
}

/// Number of zeros after an array of `length` bytes.
fn padding(length: usize) -> usize {
    length.wrapping_neg() % 8
}

/// The parts of a body, for [`crate::write_frame`].
#[derive(Debug)]
pub struct Parts<'a> {
    head: Vec<u8>,
    arrays: Vec<&'a [u8]>,
}

impl<'a> Parts<'a> {
    fn new(head: Vec<u8>) -> Self {
        debug_assert!(head.len().is_multiple_of(8));
        Parts { head, arrays: Vec::new() }
    }

    fn array<T: NoUninit>(mut self, values: &'a [T]) -> Self {
        const ZEROS: [u8; 8] = [0; 8];
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.arrays.push(bytes);
        self.arrays.push(&ZEROS[..padding(bytes.len())]);
        self
    }

    /// Returns the slices of the body in order.
    pub fn slices(&self) -> Vec<&[u8]> {
        std::iter::once(self.head.as_slice()).chain(self.arrays.iter().copied()).collect()
    }
}

fn head(numbers: &[u64], halves: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 * numbers.len() + 4 * halves.len() + 4);
    numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
    halves.iter().for_each(|half| bytes.extend_from_slice(&half.to_le_bytes()));
    bytes.resize(bytes.len() + padding(bytes.len()), 0);
    bytes
}

/// Decodes any bytes as every message, for the fuzzer.
#[doc(hidden)]
pub fn fuzz_messages(bytes: &[u8]) {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    aligned[..bytes.len()].copy_from_slice(bytes);
    let body = &aligned[..bytes.len()];
    let same = |parts: Parts<'_>| assert_eq!(parts.slices().concat().len(), body.len());
    let _ = Hello::decode(body).map(|message| same(message.parts()));
    let _ = Welcome::decode(body).map(|message| same(message.parts()));
    let _ = Refusal::decode(body);
    let _ = Pull::decode(body).map(|message| same(message.parts()));
    let _ = Rows::decode(body).map(|message| same(message.parts()));
    let _ = Push::decode(body).map(|message| same(message.parts()));
    let _ = PushAck::decode(body).map(|message| same(message.parts()));
    let _ = StepQuery::decode(body).map(|message| same(message.parts()));
    let _ = StepStatus::decode(body).map(|message| same(message.parts()));
    let _ = Lookup::decode(body).map(|message| same(message.parts()));
    let _ = LookupResult::decode(body).map(|message| same(message.parts()));
    let _ = Inventory::decode(body).map(|message| same(message.parts()));
}

#[cfg(test)]
mod tests;
