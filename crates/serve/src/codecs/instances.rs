//! The outline of JSON bodies with instances: an object with a list `instances`, decoded straight into a batch.

use std::fmt;
use std::marker::PhantomData;

use elasticrec_sample::parser::excerpt;
use elasticrec_sample::{BatchBuilder, Parser};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::values::{Inputs, Target};
use super::{DecodeError, Limits};

/// The differences between the codecs that share this outline.
pub(super) trait Schema {
    /// Ignore other keys of the body instead of refusing them.
    const IGNORES_OTHER_KEYS: bool;

    /// Decodes one instance into a sample of the batch.
    fn decode_instance<'de, D: Deserializer<'de>>(decoder: &mut Decoder<'_>, deserializer: D) -> Result<(), D::Error>;
}

/// Adds the instances of a body to a batch. On an error the batch may have some of them.
pub(super) fn decode<S: Schema>(
    parser: &Parser,
    body: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<(), DecodeError> {
    let inputs = Inputs { parser, builder };
    let mut decoder = Decoder {
        num_before: inputs.builder.num_samples(),
        seen: vec![0; inputs.num_inputs()],
        inputs,
        max_instances: limits.max_instances,
        refused: None,
    };
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let outline = Outline::<S>(&mut decoder, PhantomData);
    let result = outline.deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match (decoder.refused, result) {
        (Some(refused), _) => Err(refused),
        (None, Err(error)) => Err(DecodeError::Bad(format!("body: {error}"))),
        (None, Ok(())) => Ok(()),
    }
}

/// The state while a body is decoded.
pub(super) struct Decoder<'p> {
    pub(super) inputs: Inputs<'p>,
    /// Samples of earlier requests in the batch.
    num_before: usize,
    /// For each input, 1 plus the last instance that has it.
    seen: Vec<u32>,
    max_instances: usize,
    /// The reason of a refusal. serde_json's errors would add a line and a column, which say less.
    refused: Option<DecodeError>,
}

impl Decoder<'_> {
    /// Returns the number of complete instances.
    pub(super) fn num_instances(&self) -> usize {
        self.inputs.builder.num_samples() - self.num_before
    }

    /// Refuses the body; the error that is returned only ends the decoding.
    fn refuse<E: serde::de::Error>(&mut self, error: DecodeError) -> E {
        self.refused = Some(error);
        E::custom("refused")
    }

    /// Refuses the current instance, and the body with it.
    pub(super) fn refuse_instance<E: serde::de::Error>(&mut self, what: impl fmt::Display) -> E {
        let instance = self.num_instances();
        self.refuse(DecodeError::Bad(format!("instances[{instance}]: {what}")))
    }

    /// Returns the input of that name; an instance has each at most once.
    pub(super) fn target<E: serde::de::Error>(&mut self, name: &str) -> Result<Target, E> {
        let Some(target) = self.inputs.target(name) else {
            return Err(self.refuse_instance(format_args!("unknown slot `{}`", excerpt(name))));
        };
        let mark = self.num_instances() as u32 + 1;
        if std::mem::replace(&mut self.seen[self.inputs.number_of(target)], mark) == mark {
            return Err(self.refuse_instance(format_args!("`{}`: given twice", excerpt(name))));
        }
        Ok(target)
    }
}

/// The whole body.
struct Outline<'d, 'p, S>(&'d mut Decoder<'p>, PhantomData<S>);

impl<'de, S: Schema> DeserializeSeed<'de> for Outline<'_, '_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, S: Schema> Visitor<'de> for Outline<'_, '_, S> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object with `instances`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_instances = false;
        while let Some(is_instances) = map.next_key_seed(Key::<S>(self.0, PhantomData))? {
            if !is_instances {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut has_instances, true) {
                return Err(self.0.refuse(DecodeError::Bad("body: `instances`: given twice".into())));
            }
            map.next_value_seed(Instances::<S>(self.0, PhantomData))?;
        }
        if !has_instances {
            return Err(self.0.refuse(DecodeError::Bad("body: expected an object with `instances`, got none".into())));
        }
        Ok(())
    }
}

/// A key of the body: whether it is `instances`.
struct Key<'d, 'p, S>(&'d mut Decoder<'p>, PhantomData<S>);

impl<'de, S: Schema> DeserializeSeed<'de> for Key<'_, '_, S> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<S: Schema> Visitor<'_> for Key<'_, '_, S> {
    type Value = bool;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("`instances`")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<bool, E> {
        if key == "instances" || S::IGNORES_OTHER_KEYS {
            return Ok(key == "instances");
        }
        Err(self.0.refuse(DecodeError::Bad(format!("body: unknown key `{}`, expected `instances`", excerpt(key)))))
    }
}

/// The list of instances.
struct Instances<'d, 'p, S>(&'d mut Decoder<'p>, PhantomData<S>);

impl<'de, S: Schema> DeserializeSeed<'de> for Instances<'_, '_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, S: Schema> Visitor<'de> for Instances<'_, '_, S> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of instances")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut instances: A) -> Result<(), A::Error> {
        while let Some(()) = instances.next_element_seed(Instance::<S>(self.0, PhantomData))? {}
        Ok(())
    }
}

/// One instance: a sample of the batch.
struct Instance<'d, 'p, S>(&'d mut Decoder<'p>, PhantomData<S>);

impl<'de, S: Schema> DeserializeSeed<'de> for Instance<'_, '_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.0.num_instances() == self.0.max_instances {
            let max = self.0.max_instances;
            return Err(self.0.refuse(DecodeError::TooMany { what: "instances", max }));
        }
        self.0.inputs.builder.begin();
        S::decode_instance(self.0, deserializer)?;
        self.0.inputs.builder.end(1, 0);
        Ok(())
    }
}
