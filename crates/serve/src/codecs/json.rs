//! `{"instances": [{"slot": value or list, …}, …]}`, decoded straight into a batch: no tree, no allocation per value.

use std::fmt;

use elasticrec_sample::{Features, Parser};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::instances::{Decoder, Schema};
use super::values::Target;

/// Instances that are objects of named slots.
pub(super) struct NamedSlots;

impl Schema for NamedSlots {
    const IGNORES_OTHER_KEYS: bool = false;

    fn decode_instance<'de, D: Deserializer<'de>>(decoder: &mut Decoder<'_>, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(Instance(decoder))
    }
}

/// One instance: a sample of the batch.
struct Instance<'d, 'p>(&'d mut Decoder<'p>);

impl<'de> Visitor<'de> for Instance<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object of named slots as instances[{}]", self.0.num_instances())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(target) = map.next_key_seed(Name(self.0))? {
            map.next_value_seed(Value { decoder: self.0, target, in_list: false })?;
        }
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
        Err(refuse_value(self.decoder, self.target, value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        let Value { decoder, target, in_list } = self;
        if in_list || matches!(target, Target::Dense(_)) {
            return Err(refuse_value(decoder, target, if in_list { "a list in a list" } else { "a list" }));
        }
        while let Some(()) = values.next_element_seed(Value { decoder: &mut *decoder, target, in_list: true })? {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(refuse_value(self.decoder, self.target, "an object"))
    }
}

/// Refuses a value of the wrong type.
fn refuse_value<E: serde::de::Error>(decoder: &mut Decoder<'_>, target: Target, got: impl fmt::Display) -> E {
    let misfit = decoder.inputs.misfit(target, got);
    decoder.refuse_instance(misfit)
}

/// Returns a parser of each format, for the fuzzer and the tests.
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
