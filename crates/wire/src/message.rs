//! Messages: what the body of a frame says. Numbers first, then arrays that begin at multiples of eight bytes, so that
//! they are used where they lie.

use bytemuck::{AnyBitPattern, NoUninit};
use thiserror::Error;

/// A body that is not what its frame says.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{message}: {what}")]
pub struct MessageError {
    message: &'static str,
    what: String,
}

/// Reads the numbers and arrays of a body, in order.
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

    /// An array of `count` values, and the zeros behind it.
    fn array<T: AnyBitPattern>(&mut self, count: usize) -> Result<&'a [T], MessageError> {
        let Some(length) = count.checked_mul(size_of::<T>()).filter(|length| *length <= self.bytes.len()) else {
            return self.fail(format!("expected at most {} bytes in an array, got more", self.bytes.len()));
        };
        let taken = self.take(length)?;
        self.take(padding(length))?;
        bytemuck::try_cast_slice(taken).or_else(|_| self.fail("expected an array at a multiple of its size"))
    }

    fn end(self) -> Result<(), MessageError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            more => self.fail(format!("expected {} bytes, got {more} more", self.at)),
        }
    }
}

/// Zeros behind an array of `length` bytes.
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

    /// The slices, in order.
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

/// A client's first frame: who it is and which run it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello<'a> {
    /// What both sides of a run know of it: jobs of another kind do not meet.
    pub run: &'a [u8],
    /// The secret of the run; empty on loopback without one.
    pub token: &'a [u8],
}

impl<'a> Hello<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("hello", bytes);
        let (run, token) = (reader.u32()? as usize, reader.u32()? as usize);
        let message = Hello { run: reader.array(run)?, token: reader.array(token)? };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        Parts::new(head(&[], &[self.run.len() as u32, self.token.len() as u32])).array(self.run).array(self.token)
    }
}

/// What a server is, to a client that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Of this start of the server; another one may lack what this one has.
    pub incarnation: u64,
    /// Of the partition map.
    pub epoch: u64,
    /// Its partitions: from this one
    pub first_partition: u32,
    /// up to, without, this one.
    pub end_partition: u32,
    /// Weights a row.
    pub width: u32,
    /// Dense values of its partitions.
    pub num_dense: u32,
}

impl Welcome {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("welcome", bytes);
        let message = Welcome {
            incarnation: reader.u64()?,
            epoch: reader.u64()?,
            first_partition: reader.u32()?,
            end_partition: reader.u32()?,
            width: reader.u32()?,
            num_dense: reader.u32()?,
        };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        let halves = [self.first_partition, self.end_partition, self.width, self.num_dense];
        Parts::new(head(&[self.incarnation, self.epoch], &halves))
    }
}

/// Why a request was not done, for a program to decide on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// Bytes that are no request.
    Malformed = 1,
    /// Another token or another run.
    Unauthorized = 2,
    /// Another epoch of the partition map, or another start of the server.
    Outdated = 3,
    /// The server lost its lease and may be replaced.
    Fenced = 4,
    /// The name belongs behind a boundary that is not reached: try again.
    NotYet = 5,
    /// The name was applied with other samples.
    NameClash = 6,
    /// Kept for a memory limit: try again later. Not sent yet.
    Full = 7,
    /// The server stops.
    Stopping = 8,
    /// A fault of the server's own.
    Internal = 9,
}

impl Refusal {
    fn from_number(number: u32) -> Option<Refusal> {
        use Refusal::{Fenced, Full, Internal, Malformed, NameClash, NotYet, Outdated, Stopping, Unauthorized};
        [Malformed, Unauthorized, Outdated, Fenced, NotYet, NameClash, Full, Stopping, Internal]
            .into_iter()
            .find(|refusal| *refusal as u32 == number)
    }
}

/// A request that was not done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct Refused {
    /// For programs.
    pub reason: Refusal,
    /// For people.
    pub text: String,
}

impl Refused {
    /// With a text of at most some lines.
    pub fn new(reason: Refusal, text: impl Into<String>) -> Self {
        Refused { reason, text: text.into() }
    }

    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("refused", bytes);
        let (number, length) = (reader.u32()?, reader.u32()? as usize);
        let Some(reason) = Refusal::from_number(number) else {
            return reader.fail(format!("expected a reason from 1 to 9, got {number}"));
        };
        let text = String::from_utf8_lossy(reader.array(length)?).into_owned();
        reader.end()?;
        Ok(Refused { reason, text })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'_> {
        Parts::new(head(&[], &[self.reason as u32, self.text.len() as u32])).array(self.text.as_bytes())
    }
}

/// Rows, and dense values if wanted, are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull<'a> {
    /// Of the partition map that the signs were dealt by.
    pub epoch: u64,
    /// The server that is meant.
    pub incarnation: u64,
    /// Kept for steps that a pull waits for: 0, and not looked at yet.
    pub after_step: u64,
    /// Whether the dense values are wanted too.
    pub wants_dense: bool,
    /// Each once, all of the server's partitions.
    pub signs: &'a [u64],
}

impl<'a> Pull<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("pull", bytes);
        let (epoch, incarnation, after_step) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (num_signs, flags) = (reader.u32()? as usize, reader.u32()?);
        if flags > 1 {
            return reader.fail(format!("expected flags 0 or 1, got {flags}"));
        }
        let signs = reader.array(num_signs)?;
        reader.end()?;
        Ok(Pull { epoch, incarnation, after_step, wants_dense: flags == 1, signs })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        let halves = [self.signs.len() as u32, u32::from(self.wants_dense)];
        Parts::new(head(&[self.epoch, self.incarnation, self.after_step], &halves)).array(self.signs)
    }
}

/// The answer to a pull.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows<'a> {
    /// Of the server.
    pub incarnation: u64,
    /// Pushes that the server had applied: how fresh the rows are.
    pub applied: u64,
    /// `[signs, width]`, in the order of the signs; zeros for a sign without a row.
    pub rows: &'a [f32],
    /// The dense values of the server's partitions, or none.
    pub dense: &'a [f32],
}

impl<'a> Rows<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("rows", bytes);
        let (incarnation, applied) = (reader.u64()?, reader.u64()?);
        let (num_rows, num_dense) = (reader.u32()? as usize, reader.u32()? as usize);
        let message = Rows { incarnation, applied, rows: reader.array(num_rows)?, dense: reader.array(num_dense)? };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        let halves = [self.rows.len() as u32, self.dense.len() as u32];
        Parts::new(head(&[self.incarnation, self.applied], &halves)).array(self.rows).array(self.dense)
    }
}

/// What a batch learned; one goes to every server, with what is of its partitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Push<'a> {
    /// Of the partition map that the signs were dealt by.
    pub epoch: u64,
    /// The server that is meant.
    pub incarnation: u64,
    /// The unit of the batch's name.
    pub unit: u64,
    /// The batch, or the group of batches, of the unit.
    pub batch: u32,
    /// No other one of the unit comes behind it.
    pub is_last: bool,
    /// Of the samples: the same name always has the same.
    pub checksum: u64,
    /// Samples in it.
    pub num_samples: u32,
    /// Data time.
    pub seen: u32,
    /// Each once.
    pub signs: &'a [u64],
    /// Show and click of each sign.
    pub counts: &'a [[u32; 2]],
    /// `[signs, width]`, sums over the samples.
    pub gradients: &'a [f32],
    /// Of the dense values of the server's partitions; none where a batch has no sample.
    pub dense: &'a [f32],
    /// Places of the metric sums
    pub sum_places: &'a [u32],
    /// and what is added to each.
    pub sum_values: &'a [f64],
}

impl<'a> Push<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("push", bytes);
        let (epoch, incarnation) = (reader.u64()?, reader.u64()?);
        let (unit, checksum) = (reader.u64()?, reader.u64()?);
        let (batch, flags) = (reader.u32()?, reader.u32()?);
        let (num_samples, seen) = (reader.u32()?, reader.u32()?);
        let (num_signs, num_gradients) = (reader.u32()? as usize, reader.u32()? as usize);
        let (num_dense, num_sums) = (reader.u32()? as usize, reader.u32()? as usize);
        if flags > 1 {
            return reader.fail(format!("expected flags 0 or 1, got {flags}"));
        }
        let message = Push {
            epoch,
            incarnation,
            unit,
            batch,
            is_last: flags == 1,
            checksum,
            num_samples,
            seen,
            signs: reader.array(num_signs)?,
            counts: reader.array(num_signs)?,
            gradients: reader.array(num_gradients)?,
            dense: reader.array(num_dense)?,
            sum_places: reader.array(num_sums)?,
            sum_values: reader.array(num_sums)?,
        };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        debug_assert_eq!(self.signs.len(), self.counts.len());
        debug_assert_eq!(self.sum_places.len(), self.sum_values.len());
        let numbers = [self.epoch, self.incarnation, self.unit, self.checksum];
        let lengths = [self.signs.len(), self.gradients.len(), self.dense.len(), self.sum_places.len()];
        let [signs, gradients, dense, sums] = lengths.map(|length| length as u32);
        let flags = u32::from(self.is_last);
        let halves = [self.batch, flags, self.num_samples, self.seen, signs, gradients, dense, sums];
        Parts::new(head(&numbers, &halves))
            .array(self.signs)
            .array(self.counts)
            .array(self.gradients)
            .array(self.dense)
            .array(self.sum_places)
            .array(self.sum_values)
    }
}

/// A push is applied, or was before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// Of the server.
    pub incarnation: u64,
    /// Pushes that the server has applied.
    pub applied: u64,
    /// All partitions had it before.
    pub was_known: bool,
    /// It held something that is not a number: counted, not applied.
    pub non_finite: bool,
}

impl Pushed {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("pushed", bytes);
        let (incarnation, applied, flags) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if flags > 3 {
            return reader.fail(format!("expected flags from 0 to 3, got {flags}"));
        }
        reader.end()?;
        Ok(Pushed { incarnation, applied, was_known: flags & 1 == 1, non_finite: flags & 2 == 2 })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        let flags = u64::from(self.was_known) | u64::from(self.non_finite) << 1;
        Parts::new(head(&[self.incarnation, self.applied, flags], &[]))
    }
}

/// Any bytes as the body of every message: the target of the fuzzer.
#[doc(hidden)]
pub fn fuzz_messages(bytes: &[u8]) {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    aligned[..bytes.len()].copy_from_slice(bytes);
    let body = &aligned[..bytes.len()];
    let same = |parts: Parts<'_>| assert_eq!(parts.slices().concat().len(), body.len());
    let _ = Hello::decode(body).map(|message| same(message.parts()));
    let _ = Welcome::decode(body).map(|message| same(message.parts()));
    let _ = Refused::decode(body);
    let _ = Pull::decode(body).map(|message| same(message.parts()));
    let _ = Rows::decode(body).map(|message| same(message.parts()));
    let _ = Push::decode(body).map(|message| same(message.parts()));
    let _ = Pushed::decode(body).map(|message| same(message.parts()));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::{Body, Header, Kind, read_frame, write_frame};

    /// Through a frame, as on the wire.
    fn sent(parts: &Parts<'_>) -> Body {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Header { kind: Kind::Push, id: 1 }, &parts.slices()).unwrap();
        let mut body = Body::default();
        read_frame(&mut bytes.as_slice(), 1 << 20, &mut body).unwrap();
        body
    }

    proptest! {
        #[test]
        fn pushes_go_there_and_back(
            numbers: [u64; 4],
            halves: [u32; 3],
            is_last: bool,
            signs in prop::collection::vec((any::<u64>(), any::<[u32; 2]>()), 0..20),
            gradients in prop::collection::vec(-1f32..1.0, 0..50),
            dense in prop::collection::vec(-1f32..1.0, 0..9),
            sums in prop::collection::vec((any::<u32>(), -1f64..1.0), 0..9),
        ) {
            let (signs, counts): (Vec<u64>, Vec<[u32; 2]>) = signs.into_iter().unzip();
            let (sum_places, sum_values): (Vec<u32>, Vec<f64>) = sums.into_iter().unzip();
            let [epoch, incarnation, unit, checksum] = numbers;
            let [batch, num_samples, seen] = halves;
            let push = Push {
                epoch, incarnation, unit, batch, is_last, checksum, num_samples, seen,
                signs: &signs, counts: &counts, gradients: &gradients, dense: &dense,
                sum_places: &sum_places, sum_values: &sum_values,
            };
            let body = sent(&push.parts());
            prop_assert_eq!(Push::decode(body.bytes()).unwrap(), push);
            let rows = Rows { incarnation, applied: unit, rows: &gradients, dense: &dense };
            let body = sent(&rows.parts());
            prop_assert_eq!(Rows::decode(body.bytes()).unwrap(), rows);
            let pull = Pull { epoch, incarnation, after_step: unit, wants_dense: is_last, signs: &signs };
            let body = sent(&pull.parts());
            prop_assert_eq!(Pull::decode(body.bytes()).unwrap(), pull);
        }

        #[test]
        fn hostile_bytes_give_errors(bytes in prop::collection::vec(prop::sample::select(vec![0u8, 0, 0, 1, 2, 8, 255]), 0..200)) {
            fuzz_messages(&bytes);
        }
    }

    #[test]
    fn small_messages_go_there_and_back() {
        let hello = Hello { run: b"run", token: b"a secret" };
        assert_eq!(Hello::decode(sent(&hello.parts()).bytes()), Ok(hello));
        let welcome =
            Welcome { incarnation: 1, epoch: 2, first_partition: 3, end_partition: 4, width: 5, num_dense: 6 };
        assert_eq!(Welcome::decode(sent(&welcome.parts()).bytes()), Ok(welcome));
        let refused = Refused::new(Refusal::NotYet, "unit 7 is behind a boundary");
        assert_eq!(Refused::decode(sent(&refused.parts()).bytes()), Ok(refused));
        for (was_known, non_finite) in [(false, false), (true, false), (false, true), (true, true)] {
            let pushed = Pushed { incarnation: 1, applied: 2, was_known, non_finite };
            assert_eq!(Pushed::decode(sent(&pushed.parts()).bytes()), Ok(pushed));
        }
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let pull = Pull { epoch: 1, incarnation: 2, after_step: 3, wants_dense: false, signs: &[4, 5] };
        let mut bytes = pull.parts().slices().concat();
        bytes[24] = 3;
        let mut words = vec![0u64; bytes.len() / 8];
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(&bytes);
        let error = Pull::decode(bytemuck::cast_slice(&words)).unwrap_err();
        assert_eq!(error.to_string(), "pull: expected at least 56 bytes, got 48");
    }
}
