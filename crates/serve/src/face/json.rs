//! `{"instances": [{"slot": value or list, …}, …]}`, straight into a batch: no tree, no allocation a value.

use std::fmt;

use elasticrec_sample::parser::parse_u64;
use elasticrec_sample::{BatchBuilder, Features, Format, Parser};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{DecodeError, Limits};

/// Adds the instances of a body to a batch; of one that is refused some may be there.
pub(super) fn decode(
    parser: &Parser,
    body: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<(), DecodeError> {
    let features = parser.features();
    let mut decoder = Decoder {
        parser,
        first: builder.num_samples(),
        builder,
        seen: vec![0; features.slots.len() + features.dense.len()],
        max_instances: limits.max_instances,
        refused: None,
    };
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let result = Body(&mut decoder).deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match (decoder.refused, result) {
        (Some(refused), _) => Err(refused),
        (None, Err(error)) => Err(DecodeError::Bad(format!("body: {error}"))),
        (None, Ok(())) => Ok(()),
    }
}

/// What is known while a body is read.
struct Decoder<'p> {
    parser: &'p Parser,
    builder: &'p mut BatchBuilder,
    /// Samples that were there before.
    first: usize,
    /// For each slot, then each dense column, one more than the last instance that gave it.
    seen: Vec<u32>,
    max_instances: usize,
    /// The error in our words; those of the JSON reader end in a line and column that say less.
    refused: Option<DecodeError>,
}

/// An input of the model.
#[derive(Clone, Copy)]
enum Target {
    Slot(u16),
    Dense(usize),
}

impl Decoder<'_> {
    /// Instances so far.
    fn num_instances(&self) -> usize {
        self.builder.num_samples() - self.first
    }

    /// Refuses the body; the error returned only ends the reading.
    fn refuse<E: serde::de::Error>(&mut self, error: DecodeError) -> E {
        self.refused = Some(error);
        E::custom("refused")
    }

    fn refuse_instance<E: serde::de::Error>(&mut self, what: impl fmt::Display) -> E {
        let instance = self.num_instances();
        self.refuse(DecodeError::Bad(format!("instances[{instance}]: {what}")))
    }

    fn refuse_value<E: serde::de::Error>(&mut self, target: Target, got: impl fmt::Display) -> E {
        let features = self.parser.features();
        let (kind, name, expected) = match (target, features.format) {
            (Target::Slot(slot), format) => {
                let expected = match format {
                    Format::Slots => "a u64, as a number or a string, or a list of them",
                    // a number has many spellings (1, 1.0, 01), and the sign is a hash of the spelling
                    Format::Criteo => "a string, as it stands in the log, or a list of them",
                    _ => "a string or a whole number, or a list of them",
                };
                ("slot", &features.slots[usize::from(slot)].name, expected)
            }
            (Target::Dense(index), _) => ("dense", &features.dense[index].name, "a number"),
        };
        self.refuse_instance(format_args!("{kind} `{name}`: expected {expected}, got {got}"))
    }

    /// The input called `name`, each once an instance.
    fn target<E: serde::de::Error>(&mut self, name: &str) -> Result<Target, E> {
        let target = match self.parser.slot(name.as_bytes()) {
            Some(slot) => Target::Slot(slot),
            None => match self.parser.dense(name) {
                Some(index) => Target::Dense(index),
                None => return Err(self.refuse_instance(format_args!("unknown slot `{}`", shown(name)))),
            },
        };
        let place = match target {
            Target::Slot(slot) => usize::from(slot),
            Target::Dense(index) => self.parser.features().slots.len() + index,
        };
        let mark = self.num_instances() as u32 + 1;
        if std::mem::replace(&mut self.seen[place], mark) == mark {
            return Err(self.refuse_instance(format_args!("`{}` is given twice", shown(name))));
        }
        Ok(target)
    }

    fn add_text<E: serde::de::Error>(&mut self, target: Target, text: &str) -> Result<(), E> {
        let Target::Slot(slot) = target else {
            return Err(self.refuse_value(target, format_args!("the string `{}`", shown(text))));
        };
        match self.parser.features().format {
            Format::Slots => match parse_u64(text.as_bytes()) {
                Some(sign) => self.parser.add_sign(slot, sign, self.builder),
                None => return Err(self.refuse_value(target, format_args!("`{}`", shown(text)))),
            },
            // an empty field of a row is a missing one
            _ if text.is_empty() => (),
            _ => self.parser.add_value(slot, text.as_bytes(), self.builder),
        }
        Ok(())
    }

    fn add_integer<E: serde::de::Error>(&mut self, target: Target, number: u64) -> Result<(), E> {
        match (target, self.parser.features().format) {
            (Target::Dense(index), _) => self.set_dense(index, number as f32),
            (Target::Slot(slot), Format::Slots) => {
                self.parser.add_sign(slot, number, self.builder);
                Ok(())
            }
            (Target::Slot(_), Format::Criteo) => Err(self.refuse_value(target, format_args!("the number {number}"))),
            (Target::Slot(slot), _) => {
                self.parser.add_value(slot, number.to_string().as_bytes(), self.builder);
                Ok(())
            }
        }
    }

    fn add_number<E: serde::de::Error>(&mut self, target: Target, number: f64) -> Result<(), E> {
        match target {
            Target::Dense(index) => self.set_dense(index, number as f32),
            Target::Slot(_) => Err(self.refuse_value(target, format_args!("the number {number}"))),
        }
    }

    fn set_dense<E: serde::de::Error>(&mut self, index: usize, value: f32) -> Result<(), E> {
        self.parser.set_dense(index, value, self.builder).map_err(|error| self.refuse_instance(error))
    }
}

/// The start of a piece of the request as it may stand in a message.
fn shown(text: &str) -> String {
    const LONGEST: usize = 40;
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(LONGEST).flat_map(char::escape_debug).collect();
    if chars.next().is_some() { start + "…" } else { start }
}

/// The whole body.
struct Body<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> DeserializeSeed<'de> for Body<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Body<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object with `instances`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(()) = map.next_key_seed(BodyKey(self.0))? {
            if std::mem::replace(&mut found, true) {
                return Err(self.0.refuse(DecodeError::Bad("body: `instances` is given twice".into())));
            }
            map.next_value_seed(Instances(self.0))?;
        }
        if !found {
            return Err(self.0.refuse(DecodeError::Bad("body: expected an object with `instances`, got none".into())));
        }
        Ok(())
    }
}

/// A key of the body, of which there is one.
struct BodyKey<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> DeserializeSeed<'de> for BodyKey<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for BodyKey<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("`instances`")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<(), E> {
        if key == "instances" {
            return Ok(());
        }
        Err(self.0.refuse(DecodeError::Bad(format!("body: unknown key `{}`, expected `instances`", shown(key)))))
    }
}

/// The list of instances.
struct Instances<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> DeserializeSeed<'de> for Instances<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Instances<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of instances")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut instances: A) -> Result<(), A::Error> {
        while let Some(()) = instances.next_element_seed(Instance(self.0))? {}
        Ok(())
    }
}

/// One instance: a sample of the batch.
struct Instance<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> DeserializeSeed<'de> for Instance<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.0.num_instances() == self.0.max_instances {
            let max = self.0.max_instances;
            return Err(self.0.refuse(DecodeError::TooMany { what: "instances", max }));
        }
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Instance<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object of named slots as instances[{}]", self.0.num_instances())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.builder.begin();
        while let Some(target) = map.next_key_seed(Name(self.0))? {
            map.next_value_seed(Value { decoder: self.0, target, in_list: false })?;
        }
        self.0.builder.end(1, 0);
        Ok(())
    }
}

/// The name of an input.
struct Name<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> DeserializeSeed<'de> for Name<'_, '_> {
    type Value = Target;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Target, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_, '_> {
    type Value = Target;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the name of a slot")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Target, E> {
        self.0.target(name)
    }
}

/// A value of an input, or a list of them.
struct Value<'d, 'p> {
    decoder: &'d mut Decoder<'p>,
    target: Target,
    in_list: bool,
}

impl<'de> DeserializeSeed<'de> for Value<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value or a list of values")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        self.decoder.add_text(self.target, text)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<(), E> {
        self.decoder.add_integer(self.target, number)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<(), E> {
        self.decoder.add_number(self.target, number as f64)
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<(), E> {
        self.decoder.add_number(self.target, number)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        Err(self.decoder.refuse_value(self.target, value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        let Value { decoder, target, in_list } = self;
        if in_list || matches!(target, Target::Dense(_)) {
            return Err(decoder.refuse_value(target, if in_list { "a list in a list" } else { "a list" }));
        }
        while let Some(()) = values.next_element_seed(Value { decoder: &mut *decoder, target, in_list: true })? {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(self.decoder.refuse_value(self.target, "an object"))
    }
}

/// A parser of each format, as the fuzzer and the tests use them.
pub(super) fn fuzz_parsers() -> [Parser; 2] {
    let slots = r#"{"format":"slots","hash":1,"slots":[{"name":"0","pooling":"sum"},{"name":"7","pooling":"mean"},
        {"name":"user","pooling":"sqrtn"}],"dense":[],"labels":["click","buy"]}"#;
    let criteo = r#"{"format":"criteo","hash":1,"slots":[{"name":"C1","pooling":"sum"},{"name":"C26","pooling":"sum"},
        {"name":"I1.bucket","pooling":"sum","buckets":{"dense":"I1","steps":6}}],
        "dense":[{"name":"I1","normalize":{"kind":"log"}},{"name":"I2","normalize":{"kind":"none"}}],"labels":["click"]}"#;
    [slots, criteo].map(|json| match Features::from_json(json).and_then(Parser::new) {
        Ok(parser) => parser,
        Err(error) => unreachable!("the declarations above are valid: {error}"),
    })
}

#[cfg(test)]
mod tests;
