//! ElasticCTR's shape: `{"instances":[{"slots":[{"slot_name":"0","feasigns":[5]}]}]}` to the odds of a click.

use std::borrow::Cow;
use std::fmt;

use elasticrec_sample::{BatchBuilder, Parser};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde_json::json;

use super::values::{Inputs, shown};
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
    /// The error in our words.
    refused: Option<DecodeError>,
}

impl Decoder<'_> {
    fn num_instances(&self) -> usize {
        self.inputs.builder.num_samples() - self.first
    }

    fn add(&mut self, instance: &Instance<'_>) -> Result<(), String> {
        self.inputs.builder.begin();
        let mark = self.num_instances() as u32 + 1;
        for Slot { slot_name, feasigns } in &instance.slots {
            let target = self.inputs.target(slot_name).ok_or_else(|| format!("unknown slot `{}`", shown(slot_name)))?;
            if std::mem::replace(&mut self.seen[self.inputs.place(target)], mark) == mark {
                return Err(format!("`{}` is given twice", shown(slot_name)));
            }
            for feasign in feasigns {
                match feasign {
                    Feasign::Integer(number) => self.inputs.add_integer(target, *number)?,
                    Feasign::Number(number) => self.inputs.add_number(target, *number)?,
                    Feasign::Text(text) => self.inputs.add_text(target, text)?,
                }
            }
        }
        self.inputs.builder.end(1, 0);
        Ok(())
    }
}

/// An instance; keys that ElasticCTR did not have are passed over, as it did.
#[derive(Deserialize)]
struct Instance<'a> {
    #[serde(borrow, default)]
    slots: Vec<Slot<'a>>,
}

/// A slot, whose signs may stand before its name.
#[derive(Deserialize)]
struct Slot<'a> {
    #[serde(borrow)]
    slot_name: Cow<'a, str>,
    #[serde(borrow, default)]
    feasigns: Vec<Feasign<'a>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a number or a string")]
enum Feasign<'a> {
    Integer(u64),
    Number(f64),
    Text(#[serde(borrow)] Cow<'a, str>),
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

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key != "instances" {
                map.next_value::<serde::de::IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut found, true) {
                return Err(refuse(self.0, DecodeError::Bad("body: `instances` is given twice".into())));
            }
            map.next_value_seed(Instances(self.0))?;
        }
        if !found {
            let expected = "body: expected an object with `instances`, got none";
            return Err(refuse(self.0, DecodeError::Bad(expected.into())));
        }
        Ok(())
    }
}

/// Refuses the body; the error returned only ends the reading.
fn refuse<E: serde::de::Error>(decoder: &mut Decoder<'_>, error: DecodeError) -> E {
    decoder.refused = Some(error);
    E::custom("refused")
}

/// The list of instances, each a sample of the batch as soon as it is read.
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
        while let Some(instance) = instances.next_element::<Instance<'de>>()? {
            let number = self.0.num_instances();
            if number == self.0.max_instances {
                let max = self.0.max_instances;
                return Err(refuse(self.0, DecodeError::TooMany { what: "instances", max }));
            }
            if let Err(what) = self.0.add(&instance) {
                return Err(refuse(self.0, DecodeError::Bad(format!("instances[{number}]: {what}"))));
            }
        }
        Ok(())
    }
}

/// Digits of two odds and what stands around them.
const PREDICTION_BYTES: usize = 48;

/// `{"predictions":[{"prob0":0.98,"prob1":0.02}],"err_code":0,"err_msg":""}`: of the first of `num_labels` labels.
pub(super) fn write(num_labels: usize, scores: &[f32]) -> serde_json::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(64 + scores.len() / num_labels * PREDICTION_BYTES);
    out.extend_from_slice(b"{\"predictions\":[");
    for (sample, score) in scores.iter().step_by(num_labels).enumerate() {
        out.extend_from_slice(if sample == 0 { b"{\"prob0\":" } else { b",{\"prob0\":" });
        serde_json::to_writer(&mut out, &(1.0 - score))?;
        out.extend_from_slice(b",\"prob1\":");
        serde_json::to_writer(&mut out, score)?;
        out.push(b'}');
    }
    out.extend_from_slice(b"],\"err_code\":0,\"err_msg\":\"\"}");
    Ok(out)
}

/// An answer without predictions.
pub(crate) fn refusal(code: i32, message: &str) -> String {
    json!({"predictions": [], "err_code": code, "err_msg": message}).to_string()
}

#[cfg(test)]
mod tests;
