//! `{"instances": [{"slot": value or list, …}, …]}`, straight into a batch: no tree, no allocation a value.

use std::fmt;

use elasticrec_sample::{BatchBuilder, Features, Parser};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::values::{Inputs, Target, shown};
use super::{DecodeError, Limits};

/// Adds the instances of a body to a batch; of one that is refused some may be there.
pub(super) fn decode(
    parser: &Parser,
    body: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<(), DecodeError> {
    let inputs = Inputs { parser, builder };
    let mut decoder = Decoder {
        first: inputs.builder.num_samples(),
        seen: vec![0; inputs.num_places()],
        inputs,
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
    inputs: Inputs<'p>,
    /// Samples that were there before.
    first: usize,
    /// For each input one more than the last instance that gave it.
    seen: Vec<u32>,
    max_instances: usize,
    /// The error in our words; those of the JSON reader end in a line and column that say less.
    refused: Option<DecodeError>,
}

impl Decoder<'_> {
    /// Instances so far.
    fn num_instances(&self) -> usize {
        self.inputs.builder.num_samples() - self.first
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
        let misfit = self.inputs.misfit(target, got);
        self.refuse_instance(misfit)
    }

    /// The input called `name`, each once an instance.
    fn target<E: serde::de::Error>(&mut self, name: &str) -> Result<Target, E> {
        let Some(target) = self.inputs.target(name) else {
            return Err(self.refuse_instance(format_args!("unknown slot `{}`", shown(name))));
        };
        let mark = self.num_instances() as u32 + 1;
        if std::mem::replace(&mut self.seen[self.inputs.place(target)], mark) == mark {
            return Err(self.refuse_instance(format_args!("`{}` is given twice", shown(name))));
        }
        Ok(target)
    }
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
        self.0.inputs.builder.begin();
        while let Some(target) = map.next_key_seed(Name(self.0))? {
            map.next_value_seed(Value { decoder: self.0, target, in_list: false })?;
        }
        self.0.inputs.builder.end(1, 0);
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
        self.decoder.inputs.add_text(self.target, text).map_err(|what| self.decoder.refuse_instance(what))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<(), E> {
        self.decoder.inputs.add_integer(self.target, number).map_err(|what| self.decoder.refuse_instance(what))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<(), E> {
        self.visit_f64(number as f64)
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<(), E> {
        self.decoder.inputs.add_number(self.target, number).map_err(|what| self.decoder.refuse_instance(what))
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
