//! The encoding of HTTP: a JSON object. The data of a tensor is in the JSON, or follows it as bytes.

use std::borrow::Cow;
use std::fmt;

use elasticrec_sample::parser::excerpt;
use elasticrec_sample::{BatchBuilder, Parser};
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Datatype, Head, Output, RequestedOutputs, append, bad, scores_of};
use crate::codecs::{DecodeError, Limits, Reply, VersionInfo};

/// Estimated bytes of the JSON before binary scores.
const HEAD_BYTES: usize = 256;

#[derive(Deserialize)]
struct Request<'a> {
    #[serde(borrow, default)]
    id: Cow<'a, str>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(borrow)]
    inputs: Vec<Input<'a>>,
    #[serde(borrow)]
    outputs: Option<Vec<RequestedOutput<'a>>>,
}

#[derive(Deserialize)]
struct Input<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    datatype: Cow<'a, str>,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RequestedOutput<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(default)]
    parameters: Parameters,
}

/// The supported parameters; others are ignored.
#[derive(Deserialize, Default)]
struct Parameters {
    binary_data_size: Option<u64>,
    binary_data: Option<bool>,
    binary_data_output: Option<bool>,
}

/// Adds the samples of a body to a batch; its first `json_bytes` bytes are JSON. On an error the batch may have some of
/// them.
pub(in crate::codecs) fn decode(
    parser: &Parser,
    body: &[u8],
    json_bytes: Option<usize>,
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<RequestedOutputs, DecodeError> {
    let json_bytes = json_bytes.unwrap_or(body.len());
    let Some((head, mut binary)) = body.split_at_checked(json_bytes) else {
        let got = body.len();
        return Err(DecodeError::Bad(format!("body: expected {json_bytes} bytes of JSON, got {got}")));
    };
    let request: Request<'_> =
        serde_json::from_slice(head).map_err(|error| DecodeError::Bad(format!("body: {error}")))?;
    let mut tensors = Vec::with_capacity(request.inputs.len());
    for input in request.inputs {
        let size = input.parameters.binary_data_size;
        let head = Head::new(input.name, &input.datatype, &input.shape)?;
        tensors.push(match (input.data, size) {
            (Some(data), None) => {
                let data = elements(&head, data)?;
                head.with(data.into())?
            }
            (None, Some(size)) => {
                let split = usize::try_from(size).ok().and_then(|size| binary.split_at_checked(size));
                let Some((data, rest)) = split else {
                    let left = binary.len();
                    return Err(bad(&head.name, format_args!("binary_data_size: expected at most {left}, got {size}")));
                };
                binary = rest;
                head.with(data.into())?
            }
            _ => return Err(bad(&head.name, "expected either `data` or the parameter `binary_data_size`")),
        });
    }
    if !binary.is_empty() {
        return Err(DecodeError::Bad(format!("body: expected no bytes after the last tensor, got {}", binary.len())));
    }
    append(parser, &tensors, limits, builder)?;
    let is_binary = request.parameters.binary_data_output.unwrap_or(false);
    let output = |output: RequestedOutput<'_>| Output {
        name: output.name.into_owned(),
        is_binary: output.parameters.binary_data.unwrap_or(is_binary),
    };
    let outputs = request.outputs.map(|outputs| outputs.into_iter().map(output).collect());
    Ok(RequestedOutputs { id: request.id.into_owned(), outputs, is_binary })
}

/// Returns the elements of a tensor in JSON, flat or nested, as bytes.
fn elements(head: &Head<'_>, data: &RawValue) -> Result<Vec<u8>, DecodeError> {
    let mut out = Vec::new();
    let mut elements = Elements { datatype: head.datatype, num: 0, out: &mut out };
    elements
        .deserialize(&mut serde_json::Deserializer::from_str(data.get()))
        .map_err(|error| bad(&head.name, format_args!("data: {}", without_position(&error))))?;
    let (expected, got) = (head.num_elements(), elements.num);
    if expected != Some(got) {
        let (rows, width) = (head.rows, head.width);
        return Err(bad(&head.name, format_args!("data: expected {rows} x {width} elements, got {got}")));
    }
    Ok(out)
}

/// Returns the message of an error without its line and column, which do not count from the start of the body.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_string()
}

/// Converts elements from JSON to bytes.
struct Elements<'o> {
    datatype: Datatype,
    num: usize,
    out: &'o mut Vec<u8>,
}

impl<'de> DeserializeSeed<'de> for &mut Elements<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Elements<'_> {
    fn push<E>(&mut self, bytes: &[u8]) -> Result<(), E> {
        self.out.extend_from_slice(bytes);
        self.num += 1;
        Ok(())
    }

    fn misfit<E: serde::de::Error>(&self, got: impl fmt::Display) -> E {
        E::custom(format_args!("expected {}, got {got}", self.datatype.name()))
    }

    fn push_integer<E: serde::de::Error>(&mut self, number: i128) -> Result<(), E> {
        let misfit = |_| self.misfit(format_args!("the number {number}"));
        match self.datatype {
            Datatype::Uint64 => self.push(&u64::try_from(number).map_err(misfit)?.to_le_bytes()),
            Datatype::Int64 => self.push(&i64::try_from(number).map_err(misfit)?.to_le_bytes()),
            Datatype::Uint32 => self.push(&u32::try_from(number).map_err(misfit)?.to_le_bytes()),
            Datatype::Int32 => self.push(&i32::try_from(number).map_err(misfit)?.to_le_bytes()),
            Datatype::Fp32 => self.push(&(number as f32).to_le_bytes()),
            Datatype::Fp64 => self.push(&(number as f64).to_le_bytes()),
            Datatype::Bytes => Err(self.misfit(format_args!("the number {number}"))),
        }
    }
}

impl<'de> Visitor<'de> for &mut Elements<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.datatype.name())
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<(), E> {
        self.push_integer(number.into())
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<(), E> {
        self.push_integer(number.into())
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<(), E> {
        match self.datatype {
            Datatype::Fp32 => self.push(&(number as f32).to_le_bytes()),
            Datatype::Fp64 => self.push(&number.to_le_bytes()),
            _ => Err(self.misfit(format_args!("the number {number}"))),
        }
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        match u32::try_from(text.len()) {
            Ok(length) if self.datatype == Datatype::Bytes => {
                self.out.extend_from_slice(&length.to_le_bytes());
                self.push(text.as_bytes())
            }
            _ => Err(self.misfit(format_args!("the string `{}`", excerpt(text)))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(()) = elements.next_element_seed(&mut *self)? {}
        Ok(())
    }
}

#[derive(Serialize)]
struct Response<'a> {
    model_name: &'a str,
    model_version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<AnswerParameters<'a>>,
    outputs: Vec<AnswerOutput<'a>>,
}

#[derive(Serialize)]
struct AnswerParameters<'a> {
    variant: &'a str,
}

#[derive(Serialize)]
struct AnswerOutput<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: [usize; 1],
    #[serde(flatten)]
    content: Content,
}

/// The scores of an output, or the size of its binary scores after the JSON.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content {
    Data(Vec<f32>),
    Parameters { binary_data_size: usize },
}

/// Encodes the answer. Binary scores follow the JSON.
pub(in crate::codecs) fn write(wanted: &RequestedOutputs, info: &VersionInfo, scores: &[f32]) -> Result<Reply, String> {
    let num_labels = info.labels.len();
    let num_samples = scores.len() / num_labels;
    let mut binary = Vec::new();
    let outputs = wanted.outputs(&info.labels).into_iter().map(|(label, is_binary)| {
        let scores = scores_of(scores, label, num_labels);
        let content = if is_binary {
            scores.for_each(|score| binary.extend_from_slice(&score.to_le_bytes()));
            Content::Parameters { binary_data_size: size_of::<f32>() * num_samples }
        } else {
            Content::Data(scores.collect())
        };
        AnswerOutput { name: &info.labels[label], datatype: Datatype::Fp32.name(), shape: [num_samples], content }
    });
    let answer = Response {
        outputs: outputs.collect(),
        model_name: &info.model,
        model_version: &info.version_text,
        id: &wanted.id,
        parameters: (!info.variant.is_empty()).then_some(AnswerParameters { variant: &info.variant }),
    };
    let mut body = Vec::with_capacity(HEAD_BYTES + binary.len());
    serde_json::to_writer(&mut body, &answer).map_err(|error| error.to_string())?;
    let json_bytes = (!binary.is_empty()).then_some(body.len());
    body.extend_from_slice(&binary);
    Ok(Reply { body: body.into(), json_bytes })
}
