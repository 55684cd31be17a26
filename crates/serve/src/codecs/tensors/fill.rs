//! Adds checked tensors to a batch: all samples at once if they have the same number of signs, else sample by sample.

use super::{Datatype, Inputs, Tensor, TensorsByInput, bad};
use crate::codecs::DecodeError;
use crate::codecs::values::Target;

/// Returns the bytes of element `at`, which must exist.
fn eight(data: &[u8], at: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&data[8 * at..8 * at + 8]);
    bytes
}

fn four(data: &[u8], at: usize) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&data[4 * at..4 * at + 4]);
    bytes
}

/// Returns element `at` of a tensor of integers.
fn integer_at(tensor: &Tensor<'_>, at: usize) -> i128 {
    match tensor.datatype {
        Datatype::Int32 => i32::from_le_bytes(four(&tensor.data, at)).into(),
        Datatype::Uint32 => u32::from_le_bytes(four(&tensor.data, at)).into(),
        Datatype::Int64 => i64::from_le_bytes(eight(&tensor.data, at)).into(),
        _ => u64::from_le_bytes(eight(&tensor.data, at)).into(),
    }
}

pub(super) fn length_at(tensor: &Tensor<'_>, row: usize) -> i128 {
    integer_at(tensor, row)
}

#[inline]
fn sign_at(tensor: &Tensor<'_>, at: usize) -> u64 {
    u64::from_le_bytes(eight(&tensor.data, at))
}

#[inline]
fn float_at(tensor: &Tensor<'_>, at: usize) -> f32 {
    match tensor.datatype {
        Datatype::Fp32 => f32::from_le_bytes(four(&tensor.data, at)),
        _ => f64::from_le_bytes(eight(&tensor.data, at)) as f32,
    }
}

/// A dense column: a separate tensor, or a column of the tensor with all of them.
#[derive(Clone, Copy)]
struct DenseColumn<'t> {
    index: usize,
    tensor: &'t Tensor<'t>,
    /// Its index in a row of the tensor.
    at: usize,
}

/// The values of a slot, read from front to back.
struct Column<'t> {
    slot: u16,
    tensor: &'t Tensor<'t>,
    lengths: Option<&'t Tensor<'t>>,
    /// Number of elements read so far.
    next: usize,
    /// Number of bytes of text read so far.
    read: usize,
}

impl TensorsByInput<'_> {
    pub(super) fn fill(&self, mut inputs: Inputs<'_>) -> Result<(), DecodeError> {
        match self.widths(&inputs) {
            Some(widths) => self.fill_at_once(&mut inputs, &widths),
            None => self.fill_one_by_one(&mut inputs),
        }
    }

    fn dense_columns(&self) -> impl Iterator<Item = DenseColumn<'_>> {
        let own = self.dense.iter().enumerate();
        let own = own.filter_map(|(index, tensor)| Some(DenseColumn { index, tensor: (*tensor)?, at: 0 }));
        let all = self.all_dense.into_iter();
        own.chain(all.flat_map(|tensor| (0..tensor.width).map(move |index| DenseColumn { index, tensor, at: index })))
    }

    /// Returns the number of signs per sample by slot, if it is the same for all samples; values are not read.
    fn widths(&self, inputs: &Inputs<'_>) -> Option<Vec<usize>> {
        let parser = inputs.parser;
        if !parser.has_no_padding_sign() || self.lengths.iter().any(Option::is_some) {
            return None;
        }
        let mut widths = vec![0; self.slots.len()];
        for (width, tensor) in widths.iter_mut().zip(&self.slots) {
            let Some(tensor) = tensor else { continue };
            let has_signs = matches!(tensor.datatype, Datatype::Uint64 | Datatype::Int64);
            if !has_signs || !parser.features().format.has_signs() {
                return None;
            }
            *width = tensor.width;
        }
        if self.signs.is_some() {
            widths[..parser.features().read_slots().len()].fill(1);
        }
        for column in self.dense_columns() {
            if let Some(slot) = parser.bucket_slot(column.index) {
                widths[usize::from(slot)] = 1;
            }
        }
        Some(widths)
    }

    fn fill_at_once(&self, inputs: &mut Inputs<'_>, widths: &[usize]) -> Result<(), DecodeError> {
        let (parser, num_samples) = (inputs.parser, self.num_samples);
        let Some((signs, dense)) = inputs.builder.append_uniform(num_samples, widths) else {
            return self.fill_one_by_one(inputs);
        };
        let row: usize = widths.iter().sum();
        let mut starts = Vec::with_capacity(widths.len());
        let mut start = 0;
        for width in widths {
            starts.push(start);
            start += width;
        }
        let keeps = parser.keeps_signs();
        let key = |slot: usize, bytes: &[u8; 8]| {
            let sign = u64::from_le_bytes(*bytes);
            if keeps { sign } else { parser.key(slot as u16, sign).unwrap_or(sign) }
        };
        if let Some(tensor) = self.signs.filter(|tensor| tensor.width > 0) {
            for (to, from) in signs.chunks_exact_mut(row).zip(tensor.data.chunks_exact(8 * tensor.width)) {
                for (slot, (to, from)) in to.iter_mut().zip(from.as_chunks().0).enumerate() {
                    *to = key(slot, from);
                }
            }
        }
        for (slot, tensor) in self.slots.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            for at in 0..tensor.width {
                // Column by column: most slots have one value per sample, so this needs no inner loop per sample.
                let to = signs.iter_mut().skip(starts[slot] + at).step_by(row);
                for (to, from) in to.zip(tensor.data.as_chunks().0.iter().skip(at).step_by(tensor.width)) {
                    *to = key(slot, from);
                }
            }
        }
        let num_dense = self.dense.len();
        for DenseColumn { index, tensor, at } in self.dense_columns() {
            for sample in 0..num_samples {
                let value = float_at(tensor, sample * tensor.width + at);
                let value = parser.normalize(index, value).map_err(|error| refuse(sample, &error))?;
                dense[sample * num_dense + index] = value;
                if let Some((slot, sign)) = parser.bucket(index, value) {
                    signs[sample * row + starts[usize::from(slot)]] = sign;
                }
            }
        }
        Ok(())
    }

    fn fill_one_by_one(&self, inputs: &mut Inputs<'_>) -> Result<(), DecodeError> {
        let with_slots = self.slots.iter().zip(&self.lengths).enumerate();
        let column = |(slot, (tensor, lengths)): (usize, (&Option<_>, &Option<_>))| {
            Some(Column { slot: slot as u16, tensor: (*tensor)?, lengths: *lengths, next: 0, read: 0 })
        };
        let mut columns: Vec<Column<'_>> = with_slots.filter_map(column).collect();
        for sample in 0..self.num_samples {
            inputs.builder.begin();
            for column in &mut columns {
                column.add(inputs, sample)?;
            }
            if let Some(tensor) = self.signs {
                for slot in 0..tensor.width {
                    let sign = sign_at(tensor, sample * tensor.width + slot);
                    if let Some(key) = inputs.parser.key(slot as u16, sign) {
                        inputs.builder.add_sign(slot as u16, key);
                    }
                }
            }
            for DenseColumn { index, tensor, at } in self.dense_columns() {
                let value = float_at(tensor, sample * tensor.width + at);
                inputs.set_dense(index, value).map_err(|error| refuse(sample, &error))?;
            }
            inputs.builder.end(1, 0);
        }
        for column in columns {
            let left = column.tensor.data.len() - column.read;
            if column.tensor.datatype == Datatype::Bytes && left > 0 {
                return Err(bad(
                    &column.tensor.name,
                    format_args!("data: expected no bytes after the last element, got {left}"),
                ));
            }
        }
        Ok(())
    }
}

fn refuse(sample: usize, what: &dyn std::fmt::Display) -> DecodeError {
    DecodeError::Bad(format!("instances[{sample}]: {what}"))
}

impl Column<'_> {
    /// Adds the values of a sample.
    fn add(&mut self, inputs: &mut Inputs<'_>, sample: usize) -> Result<(), DecodeError> {
        let target = Target::Slot(self.slot);
        let num = match self.lengths {
            // The sum of the lengths was checked, so these elements exist.
            Some(lengths) => length_at(lengths, sample) as usize,
            None => self.tensor.width,
        };
        for _ in 0..num {
            match self.tensor.datatype {
                Datatype::Bytes => {
                    let text = self.text()?;
                    inputs.add_bytes(target, text).map_err(|error| refuse(sample, &error))?;
                }
                // Clients without u64 send the bits of a sign as an i64.
                Datatype::Int64 if inputs.parser.features().format.has_signs() => {
                    inputs.parser.add_sign(self.slot, sign_at(self.tensor, self.next), inputs.builder);
                }
                _ => {
                    let number = integer_at(self.tensor, self.next);
                    let added = match u64::try_from(number) {
                        Ok(number) => inputs.add_integer(target, number),
                        Err(_) => inputs.add_number(target, number as f64),
                    };
                    added.map_err(|error| refuse(sample, &error))?;
                }
            }
            self.next += 1;
        }
        Ok(())
    }

    /// Returns the next element of text. Its length precedes its bytes.
    fn text(&mut self) -> Result<&'_ [u8], DecodeError> {
        let rest = &self.tensor.data[self.read..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            return Err(self.truncated());
        };
        let length = u32::from_le_bytes(*length) as usize;
        let Some(text) = rest.get(..length) else {
            return Err(self.truncated());
        };
        self.read += 4 + length;
        Ok(text)
    }

    fn truncated(&self) -> DecodeError {
        bad(&self.tensor.name, format_args!("data: ends within element {}", self.next))
    }
}
