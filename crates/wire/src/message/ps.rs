//! Messages between trainers and parameter servers: rows and dense values out, gradients in.

use super::{MessageError, Parts, Reader, head};

/// A parameter server's answer to the hello of a client that it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Identifies this start of the server; after a restart, pushes may be missing.
    pub incarnation: u64,
    /// Epoch of the partition map.
    pub epoch: u64,
    /// First partition of the server.
    pub first_partition: u32,
    /// End of its partitions, exclusive.
    pub end_partition: u32,
    /// Weights of a row.
    pub width: u32,
    /// Dense values of its partitions.
    pub num_dense: u32,
    /// Values of optimizer state of a row.
    pub state_width: u32,
    /// Vectors of optimizer state of the dense values.
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

    /// Returns the body.
    pub fn parts(&self) -> Parts<'static> {
        let Welcome { first_partition, end_partition, width, num_dense, state_width, num_dense_states, .. } = *self;
        let halves = [first_partition, end_partition, width, num_dense, state_width, num_dense_states];
        Parts::new(head(&[self.incarnation, self.epoch], &halves))
    }
}

/// A group of units that are trained in common steps: step j takes batch j of each unit that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The first unit.
    pub first_unit: u64,
    /// Number of units, at least one.
    pub num_units: u32,
}

/// A request for rows and, optionally, for dense values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull<'a> {
    /// Epoch of the partition map that the signs were split by.
    pub epoch: u64,
    /// Incarnation of the server that the client is connected to.
    pub incarnation: u64,
    /// The first unit of a group and the number of its steps to apply first. The client knows that all servers have all
    /// pushes of these steps.
    pub after: Option<(u64, u32)>,
    /// Whether to return the dense values.
    pub wants_dense: bool,
    /// Whether to return optimizer states and counters.
    pub wants_state: bool,
    /// Distinct signs of the server's partitions.
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

    /// Returns the body.
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
    /// Incarnation of the server.
    pub incarnation: u64,
    /// Number of pushes that the server had applied, to measure staleness.
    pub applied: u64,
    /// `[signs, width]`, in the order of the signs; zeros for a sign without a row. With states `[signs, width + state]`.
    pub rows: &'a [f32],
    /// The dense values of the server's partitions, or none; with states followed by the state vectors.
    pub dense: &'a [f32],
    /// With states: show, click and stamp of each sign.
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

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        let halves = [self.rows.len() as u32, self.dense.len() as u32, self.tails.len() as u32];
        Parts::new(head(&[self.incarnation, self.applied], &halves))
            .array(self.rows)
            .array(self.dense)
            .array(self.tails)
    }
}

/// The batch of a push and how its update is applied; the same for all servers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PushHeader {
    /// The unit of the batch.
    pub unit: u64,
    /// Index of the batch, or of the group of batches, in the unit.
    pub batch: u32,
    /// Whether this is the last push of the unit.
    pub is_last: bool,
    /// Checksum of the samples; the same (unit, batch) always has the same checksum.
    pub checksum: u64,
    /// Number of samples.
    pub num_samples: u32,
    /// Data time.
    pub seen: u32,
    /// Weight of all samples together, for the mean of the dense gradients of a step.
    pub weight: f64,
    /// The group whose batches of this index make one step; none for a push that is a step by itself.
    pub group: Option<Group>,
    /// Whether the push has increments of weights and states instead of gradients (strategy `geo`).
    pub is_increment: bool,
}

/// The update of a batch; each server gets the part of its partitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Push<'a> {
    /// Epoch of the partition map that the signs were split by.
    pub epoch: u64,
    /// Incarnation of the server that the client is connected to.
    pub incarnation: u64,
    /// The batch and how its update is applied.
    pub header: PushHeader,
    /// Distinct signs.
    pub signs: &'a [u64],
    /// Show and click of each sign.
    pub counts: &'a [[u32; 2]],
    /// `[signs, width]`, sums over the samples; for an increment `[signs, width + state]`.
    pub gradients: &'a [f32],
    /// Mean gradient of the dense values of the server's partitions, empty for a batch without samples. For an increment,
    /// the changes of the values and then of each state vector.
    pub dense: &'a [f32],
    /// Indices of the metric sums that change.
    pub sum_indices: &'a [u32],
    /// The amount to add to each of these sums.
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
        let (is_last, is_increment) = (flags & 1 == 1, flags & 2 == 2);
        let group = (num_units > 0).then_some(Group { first_unit, num_units });
        let message = Push {
            epoch,
            incarnation,
            header: PushHeader { unit, batch, is_last, checksum, num_samples, seen, weight, group, is_increment },
            signs: reader.array(num_signs)?,
            counts: reader.array(num_signs)?,
            gradients: reader.array(num_gradients)?,
            dense: reader.array(num_dense)?,
            sum_indices: reader.array(num_sums)?,
            sum_values: reader.array(num_sums)?,
        };
        reader.end()?;
        Ok(message)
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'a> {
        debug_assert_eq!(self.signs.len(), self.counts.len());
        debug_assert_eq!(self.sum_indices.len(), self.sum_values.len());
        let PushHeader { unit, batch, is_last, checksum, num_samples, seen, weight, group, is_increment } = self.header;
        let lengths = [self.signs.len(), self.gradients.len(), self.dense.len(), self.sum_indices.len()];
        let [signs, gradients, dense, sums] = lengths.map(|length| length as u32);
        let flags = u32::from(is_last) | u32::from(is_increment) << 1;
        let halves = [batch, flags, num_samples, seen, signs, gradients, dense, sums];
        let mut bytes = head(&[self.epoch, self.incarnation, unit, checksum], &halves);
        let (first_unit, num_units) = group.map_or((0, 0), |group| (group.first_unit, group.num_units));
        bytes.extend(head(&[weight.to_bits(), first_unit], &[num_units]));
        Parts::new(bytes)
            .array(self.signs)
            .array(self.counts)
            .array(self.gradients)
            .array(self.dense)
            .array(self.sum_indices)
            .array(self.sum_values)
    }
}

/// The answer to a push that is applied, now or earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushAck {
    /// Incarnation of the server.
    pub incarnation: u64,
    /// Number of pushes that the server has applied.
    pub applied: u64,
    /// Whether all partitions had applied it before.
    pub was_known: bool,
    /// Whether it had a NaN or infinite value: such a push is counted and not applied.
    pub non_finite: bool,
}

impl PushAck {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("push ack", bytes);
        let (incarnation, applied, flags) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if flags > 3 {
            return reader.fail(format!("expected flags from 0 to 3, got {flags}"));
        }
        reader.end()?;
        Ok(PushAck { incarnation, applied, was_known: flags & 1 == 1, non_finite: flags & 2 == 2 })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'static> {
        let flags = u64::from(self.was_known) | u64::from(self.non_finite) << 1;
        Parts::new(head(&[self.incarnation, self.applied, flags], &[]))
    }
}

/// A request for the progress of a step; the server answers when it has all pushes of the step or the wait is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepQuery {
    /// Epoch of the partition map.
    pub epoch: u64,
    /// Incarnation of the server that the client is connected to.
    pub incarnation: u64,
    /// The group of the step.
    pub group: Group,
    /// The step, from 0.
    pub step: u32,
    /// Longest wait in milliseconds.
    pub wait_ms: u32,
}

impl StepQuery {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("step query", bytes);
        let (epoch, incarnation, first_unit) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (num_units, step) = (reader.u32()?, reader.u32()?);
        let (wait_ms, _zero) = (reader.u32()?, reader.u32()?);
        reader.end()?;
        Ok(StepQuery { epoch, incarnation, group: Group { first_unit, num_units }, step, wait_ms })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'static> {
        let numbers = [self.epoch, self.incarnation, self.group.first_unit];
        Parts::new(head(&numbers, &[self.group.num_units, self.step, self.wait_ms]))
    }
}

/// A server's progress with a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepStatus {
    /// Incarnation of the server.
    pub incarnation: u64,
    /// Steps of the group that are applied.
    pub num_applied: u32,
    /// Whether the server has all pushes of the step, queued or applied.
    pub is_full: bool,
}

impl StepStatus {
    /// Reads a body.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new("step status", bytes);
        let (incarnation, num_applied, flags) = (reader.u64()?, reader.u32()?, reader.u32()?);
        if flags > 1 {
            return reader.fail(format!("expected flags 0 or 1, got {flags}"));
        }
        reader.end()?;
        Ok(StepStatus { incarnation, num_applied, is_full: flags == 1 })
    }

    /// Returns the body.
    pub fn parts(&self) -> Parts<'static> {
        Parts::new(head(&[self.incarnation], &[self.num_applied, u32::from(self.is_full)]))
    }
}
