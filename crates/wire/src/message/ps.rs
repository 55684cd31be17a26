//! Trainers and parameter servers: rows and dense values there, what a batch learned back.

use super::{MessageError, Parts, Reader, head};

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
    /// Values of optimizer state a row.
    pub state_width: u32,
    /// Vectors of optimizer state beside the dense values.
    pub num_dense_states: u32,
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
            state_width: reader.u32()?,
            num_dense_states: reader.u32()?,
        };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        let Welcome { first_partition, end_partition, width, num_dense, state_width, num_dense_states, .. } = *self;
        let halves = [first_partition, end_partition, width, num_dense, state_width, num_dense_states];
        Parts::new(head(&[self.incarnation, self.epoch], &halves))
    }
}

/// A group of units whose batches make steps together: step j takes batch j of each unit that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The first unit
    pub first_unit: u64,
    /// and how many there are, at least one.
    pub num_units: u32,
}

/// Rows, and dense values if wanted, are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull<'a> {
    /// Of the partition map that the signs were dealt by.
    pub epoch: u64,
    /// The server that is meant.
    pub incarnation: u64,
    /// The first unit of a group and how many of its steps are to be applied: who asks knows that all servers have all
    /// pushes of them.
    pub after: Option<(u64, u32)>,
    /// Whether the dense values are wanted too.
    pub wants_dense: bool,
    /// Whether optimizer states and counters are wanted too.
    pub wants_state: bool,
    /// Each once, all of the server's partitions.
    pub signs: &'a [u64],
}

impl<'a> Pull<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("pull", bytes);
        let (epoch, incarnation, first_unit) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (num_steps, flags) = (reader.u32()?, reader.u32()?);
        let (num_signs, _zero) = (reader.u32()? as usize, reader.u32()?);
        if flags > 7 {
            return reader.fail(format!("expected flags from 0 to 7, got {flags}"));
        }
        let signs = reader.array(num_signs)?;
        reader.end()?;
        let after = (flags & 4 == 4).then_some((first_unit, num_steps));
        Ok(Pull { epoch, incarnation, after, wants_dense: flags & 1 == 1, wants_state: flags & 2 == 2, signs })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        let (first_unit, num_steps) = self.after.unwrap_or_default();
        let flags =
            u32::from(self.wants_dense) | u32::from(self.wants_state) << 1 | u32::from(self.after.is_some()) << 2;
        let halves = [num_steps, flags, self.signs.len() as u32];
        Parts::new(head(&[self.epoch, self.incarnation, first_unit], &halves)).array(self.signs)
    }
}

/// The answer to a pull.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rows<'a> {
    /// Of the server.
    pub incarnation: u64,
    /// Pushes that the server had applied: how fresh the rows are.
    pub applied: u64,
    /// `[signs, width]`, in the order of the signs; zeros for a sign without a row. With states `[signs, width + state]`.
    pub rows: &'a [f32],
    /// The dense values of the server's partitions, or none; with states those vectors behind them.
    pub dense: &'a [f32],
    /// With states, of each sign: show, click, and its stamp.
    pub tails: &'a [[u32; 3]],
}

impl<'a> Rows<'a> {
    /// Reads a body.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("rows", bytes);
        let (incarnation, applied) = (reader.u64()?, reader.u64()?);
        let (num_rows, num_dense) = (reader.u32()? as usize, reader.u32()? as usize);
        let (num_tails, _zero) = (reader.u32()? as usize, reader.u32()?);
        let rows = reader.array(num_rows)?;
        let dense = reader.array(num_dense)?;
        let message = Rows { incarnation, applied, rows, dense, tails: reader.array(num_tails)? };
        reader.end()?;
        Ok(message)
    }

    /// The body.
    pub fn parts(&self) -> Parts<'a> {
        let halves = [self.rows.len() as u32, self.dense.len() as u32, self.tails.len() as u32];
        Parts::new(head(&[self.incarnation, self.applied], &halves))
            .array(self.rows)
            .array(self.dense)
            .array(self.tails)
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
    /// Of all samples together: what the dense gradient counts for among others of a step.
    pub weight: f64,
    /// The group of units whose batches of this number make one step; none for a push that is a step of its own.
    pub group: Option<Group>,
    /// Changes to be added, of weights and states, in place of gradients.
    pub is_delta: bool,
    /// Each once.
    pub signs: &'a [u64],
    /// Show and click of each sign.
    pub counts: &'a [[u32; 2]],
    /// `[signs, width]`, sums over the samples; of a delta `[signs, width + state]`.
    pub gradients: &'a [f32],
    /// Of the dense values of the server's partitions, their mean; none where a batch has no sample. Of a delta of the
    /// values, then of each state vector.
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
        let (weight, first_unit) = (f64::from_bits(reader.u64()?), reader.u64()?);
        let (num_units, _zero) = (reader.u32()?, reader.u32()?);
        if flags > 3 {
            return reader.fail(format!("expected flags from 0 to 3, got {flags}"));
        }
        let message = Push {
            epoch,
            incarnation,
            unit,
            batch,
            is_last: flags & 1 == 1,
            checksum,
            num_samples,
            seen,
            weight,
            group: (num_units > 0).then_some(Group { first_unit, num_units }),
            is_delta: flags & 2 == 2,
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
        let flags = u32::from(self.is_last) | u32::from(self.is_delta) << 1;
        let halves = [self.batch, flags, self.num_samples, self.seen, signs, gradients, dense, sums];
        let mut bytes = head(&numbers, &halves);
        let (first_unit, num_units) = self.group.map_or((0, 0), |group| (group.first_unit, group.num_units));
        bytes.extend(head(&[self.weight.to_bits(), first_unit], &[num_units]));
        Parts::new(bytes)
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
pub struct PushAck {
    /// Of the server.
    pub incarnation: u64,
    /// Pushes that the server has applied.
    pub applied: u64,
    /// All partitions had it before.
    pub was_known: bool,
    /// It held something that is not a number: counted, not applied.
    pub non_finite: bool,
}

impl PushAck {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("pushed", bytes);
        let (incarnation, applied, flags) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if flags > 3 {
            return reader.fail(format!("expected flags from 0 to 3, got {flags}"));
        }
        reader.end()?;
        Ok(PushAck { incarnation, applied, was_known: flags & 1 == 1, non_finite: flags & 2 == 2 })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        let flags = u64::from(self.was_known) | u64::from(self.non_finite) << 1;
        Parts::new(head(&[self.incarnation, self.applied, flags], &[]))
    }
}

/// Asks whether a server has all pushes of a step; the answer waits a little for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepQuery {
    /// Of the partition map.
    pub epoch: u64,
    /// The server that is meant.
    pub incarnation: u64,
    /// Whose step it is.
    pub group: Group,
    /// The step, from 0.
    pub step: u32,
    /// How long the answer may wait.
    pub wait_ms: u32,
}

impl StepQuery {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("meet", bytes);
        let (epoch, incarnation, first_unit) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (num_units, step) = (reader.u32()?, reader.u32()?);
        let (wait_ms, _zero) = (reader.u32()?, reader.u32()?);
        reader.end()?;
        Ok(StepQuery { epoch, incarnation, group: Group { first_unit, num_units }, step, wait_ms })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        let numbers = [self.epoch, self.incarnation, self.group.first_unit];
        Parts::new(head(&numbers, &[self.group.num_units, self.step, self.wait_ms]))
    }
}

/// How far a server is with a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepStatus {
    /// Of the server.
    pub incarnation: u64,
    /// Steps of the group that are applied.
    pub num_applied: u32,
    /// Whether all pushes of the step that was asked for are there, or applied.
    pub is_full: bool,
}

impl StepStatus {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("met", bytes);
        let (incarnation, num_applied, flags) = (reader.u64()?, reader.u32()?, reader.u32()?);
        if flags > 1 {
            return reader.fail(format!("expected flags 0 or 1, got {flags}"));
        }
        reader.end()?;
        Ok(StepStatus { incarnation, num_applied, is_full: flags == 1 })
    }

    /// The body.
    pub fn parts(&self) -> Parts<'static> {
        Parts::new(head(&[self.incarnation], &[self.num_applied, u32::from(self.is_full)]))
    }
}
