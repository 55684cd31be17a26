//! Conversion of values in a request to inputs of the model, by the format of the training data. All codecs share it.

use std::fmt;

use elasticrec_sample::parser::{excerpt, parse_u64};
use elasticrec_sample::{BatchBuilder, Format, Parser};

/// An input of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Slot(u16),
    Dense(usize),
}

/// The inputs of the sample that the builder has begun. Errors do not name the instance; callers add it.
pub(super) struct Inputs<'p> {
    pub(super) parser: &'p Parser,
    pub(super) builder: &'p mut BatchBuilder,
}

impl Inputs<'_> {
    /// Returns the input of that name.
    pub(super) fn target(&self, name: &str) -> Option<Target> {
        let slot = self.parser.slot(name.as_bytes()).map(Target::Slot);
        slot.or_else(|| self.parser.dense(name).map(Target::Dense))
    }

    /// Returns the number of an input among all inputs, slots first.
    pub(super) fn number_of(&self, target: Target) -> usize {
        match target {
            Target::Slot(slot) => usize::from(slot),
            Target::Dense(index) => self.parser.features().slots.len() + index,
        }
    }

    /// Returns the number of inputs.
    pub(super) fn num_inputs(&self) -> usize {
        let features = self.parser.features();
        features.slots.len() + features.dense.len()
    }

    /// Returns the message about a value of the wrong type.
    pub(super) fn misfit(&self, target: Target, got: impl fmt::Display) -> String {
        let features = self.parser.features();
        let (kind, name, expected) = match (target, features.format) {
            (Target::Slot(slot), format) => {
                let expected = match format {
                    Format::Slots => "a u64, as a number or a string, or a list of them",
                    // A number has many spellings (1, 1.0, 01), and the sign is a hash of the spelling.
                    Format::Criteo => "a string as in the training data, or a list of them",
                    _ => "a string or a whole number, or a list of them",
                };
                ("slot", &features.slots[usize::from(slot)].name, expected)
            }
            (Target::Dense(index), _) => ("dense", &features.dense[index].name, "a number"),
        };
        format!("{kind} `{name}`: expected {expected}, got {got}")
    }

    pub(super) fn add_text(&mut self, target: Target, text: &str) -> Result<(), String> {
        self.add_bytes(target, text.as_bytes())
    }

    /// Adds text, in the encoding of the training data.
    pub(super) fn add_bytes(&mut self, target: Target, text: &[u8]) -> Result<(), String> {
        let Target::Slot(slot) = target else {
            return Err(self.misfit(target, format_args!("the string `{}`", excerpt(text))));
        };
        match self.parser.features().format {
            Format::Slots => match parse_u64(text) {
                Some(sign) => self.parser.add_sign(slot, sign, self.builder),
                None => return Err(self.misfit(target, format_args!("`{}`", excerpt(text)))),
            },
            // As in training, an empty field is a missing one.
            _ if text.is_empty() => (),
            _ => self.parser.add_value(slot, text, self.builder),
        }
        Ok(())
    }

    pub(super) fn add_integer(&mut self, target: Target, number: u64) -> Result<(), String> {
        match (target, self.parser.features().format) {
            (Target::Dense(index), _) => return self.set_dense(index, number as f32),
            (Target::Slot(slot), Format::Slots) => self.parser.add_sign(slot, number, self.builder),
            (Target::Slot(_), Format::Criteo) => return Err(self.misfit(target, format_args!("the number {number}"))),
            (Target::Slot(slot), _) => self.parser.add_value(slot, number.to_string().as_bytes(), self.builder),
        }
        Ok(())
    }

    pub(super) fn add_number(&mut self, target: Target, number: f64) -> Result<(), String> {
        match target {
            Target::Dense(index) => self.set_dense(index, number as f32),
            Target::Slot(_) => Err(self.misfit(target, format_args!("the number {number}"))),
        }
    }

    pub(super) fn set_dense(&mut self, index: usize, value: f32) -> Result<(), String> {
        self.parser.set_dense(index, value, self.builder).map_err(|error| error.to_string())
    }
}
