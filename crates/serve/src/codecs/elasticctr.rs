//! ElasticCTR's API: `{"instances":[{"slots":[{"slot_name":"0","feasigns":[5]}]}]}` in, probabilities of a click out.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::Deserializer;
use serde_json::json;

use super::instances::{Decoder, Schema};

/// Instances of ElasticCTR. Unknown keys are ignored, as in ElasticCTR.
pub(super) struct ElasticCtr;

impl Schema for ElasticCtr {
    const IGNORES_OTHER_KEYS: bool = true;

    fn decode_instance<'de, D: Deserializer<'de>>(decoder: &mut Decoder<'_>, deserializer: D) -> Result<(), D::Error> {
        let instance = Instance::deserialize(deserializer)?;
        for Slot { slot_name, feasigns } in &instance.slots {
            let target = decoder.target(slot_name)?;
            for feasign in feasigns {
                let added = match feasign {
                    Feasign::Integer(number) => decoder.inputs.add_integer(target, *number),
                    Feasign::Number(number) => decoder.inputs.add_number(target, *number),
                    Feasign::Text(text) => decoder.inputs.add_text(target, text),
                };
                added.map_err(|what| decoder.refuse_instance::<D::Error>(what))?;
            }
        }
        Ok(())
    }
}

/// An instance.
#[derive(Deserialize)]
struct Instance<'a> {
    #[serde(borrow, default)]
    slots: Vec<Slot<'a>>,
}

/// A slot. Its signs may precede its name.
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

/// Estimated bytes of a prediction.
const PREDICTION_BYTES: usize = 48;

/// Writes the probabilities of the first of `num_labels` labels:
/// `{"predictions":[{"prob0":0.98,"prob1":0.02}],"err_code":0,"err_msg":""}`.
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

/// Returns an answer with an error and without predictions.
pub(crate) fn refusal(code: i32, message: &str) -> String {
    json!({"predictions": [], "err_code": code, "err_msg": message}).to_string()
}

#[cfg(test)]
mod tests;
