//! The encoding of gRPC: `inference.ModelInferRequest`, decoded without a copy of its data, and `ModelInferResponse`.

use std::borrow::Cow;

use bytes::Bytes;
use elasticrec_sample::{BatchBuilder, Parser};
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};

use super::{Datatype, Head, Output, RequestedOutputs, append, bad, scores_of};
use crate::codecs::{DecodeError, Limits, Reply, VersionInfo};

/// A field of a message: its number and its value.
#[derive(Debug, Clone, Copy)]
enum Field<'a> {
    Varint(u32, u64),
    Bytes(u32, &'a [u8]),
    /// Four or eight bytes.
    Fixed(u32, &'a [u8]),
}

/// The fields of a message, in the order of its bytes.
struct Fields<'a>(&'a [u8]);

fn broken(what: impl std::fmt::Display) -> DecodeError {
    DecodeError::Bad(format!("message: {what}"))
}

impl<'a> Fields<'a> {
    fn next(&mut self) -> Result<Option<Field<'a>>, DecodeError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let (number, wire_type) = decode_key(&mut self.0).map_err(broken)?;
        Ok(Some(match wire_type {
            WireType::Varint => Field::Varint(number, decode_varint(&mut self.0).map_err(broken)?),
            WireType::LengthDelimited => {
                let length = decode_varint(&mut self.0).map_err(broken)?;
                Field::Bytes(number, self.take(length)?)
            }
            WireType::ThirtyTwoBit => Field::Fixed(number, self.take(4)?),
            WireType::SixtyFourBit => Field::Fixed(number, self.take(8)?),
            WireType::StartGroup | WireType::EndGroup => return Err(broken("groups are not supported")),
        }))
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], DecodeError> {
        let split = usize::try_from(length).ok().and_then(|length| self.0.split_at_checked(length));
        let (field, rest) = split.ok_or_else(|| broken(format_args!("ends within a field of {length} bytes")))?;
        self.0 = rest;
        Ok(field)
    }
}

fn text(bytes: &[u8]) -> Result<&str, DecodeError> {
    std::str::from_utf8(bytes).map_err(|_| broken("text is not UTF-8"))
}

/// The model and version of a request, found without decoding the tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct InferTarget<'a> {
    pub(crate) model: &'a str,
    pub(crate) version: &'a str,
}

impl<'a> InferTarget<'a> {
    pub(crate) fn of(message: &'a [u8]) -> Result<InferTarget<'a>, DecodeError> {
        let mut target = InferTarget::default();
        let mut fields = Fields(message);
        while let Some(field) = fields.next()? {
            match field {
                Field::Bytes(1, name) => target.model = text(name)?,
                Field::Bytes(2, version) => target.version = text(version)?,
                _ => (),
            }
        }
        Ok(target)
    }
}

/// Adds the samples of a message to a batch. On an error the batch may have some of them.
pub(in crate::codecs) fn decode(
    parser: &Parser,
    message: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<RequestedOutputs, DecodeError> {
    let mut id = "";
    let (mut inputs, mut raw, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
    let mut fields = Fields(message);
    while let Some(field) = fields.next()? {
        match field {
            Field::Bytes(3, bytes) => id = text(bytes)?,
            Field::Bytes(5, bytes) => inputs.push(Input::of(bytes)?),
            Field::Bytes(6, bytes) => outputs.push(Output { name: output_name(bytes)?.into(), is_binary: true }),
            Field::Bytes(7, bytes) => raw.push(bytes),
            _ => (),
        }
    }
    if !raw.is_empty() && raw.len() != inputs.len() {
        let (expected, got) = (inputs.len(), raw.len());
        let what = format!("raw_input_contents: expected one for each of {expected} inputs, or none, got {got}");
        return Err(DecodeError::Bad(what));
    }
    let mut tensors = Vec::with_capacity(inputs.len());
    for (at, input) in inputs.into_iter().enumerate() {
        let Input { head, contents } = input;
        tensors.push(match (raw.get(at), contents) {
            (Some(raw), None) => head.with(Cow::Borrowed(raw))?,
            (None, contents) => {
                let data = elements(&head, contents.unwrap_or_default())?;
                head.with(data.into())?
            }
            (Some(_), Some(_)) => {
                return Err(bad(&head.name, "expected `contents` or `raw_input_contents`, got both"));
            }
        });
    }
    append(parser, &tensors, limits, builder)?;
    let outputs = (!outputs.is_empty()).then_some(outputs);
    Ok(RequestedOutputs { id: id.into(), outputs, is_binary: true })
}

fn output_name(message: &[u8]) -> Result<&str, DecodeError> {
    let mut name = "";
    let mut fields = Fields(message);
    while let Some(field) = fields.next()? {
        if let Field::Bytes(1, bytes) = field {
            name = text(bytes)?;
        }
    }
    Ok(name)
}

/// An input, with its typed contents if it has them.
struct Input<'a> {
    head: Head<'a>,
    contents: Option<&'a [u8]>,
}

impl<'a> Input<'a> {
    fn of(message: &'a [u8]) -> Result<Input<'a>, DecodeError> {
        let (mut name, mut datatype, mut contents) = ("", "", None);
        let mut shape = Vec::with_capacity(2);
        let mut fields = Fields(message);
        while let Some(field) = fields.next()? {
            match field {
                Field::Bytes(1, bytes) => name = text(bytes)?,
                Field::Bytes(2, bytes) => datatype = text(bytes)?,
                Field::Varint(3, dim) => shape.push(dim as i64),
                Field::Bytes(3, mut packed) => {
                    while !packed.is_empty() {
                        shape.push(decode_varint(&mut packed).map_err(broken)? as i64);
                    }
                }
                Field::Bytes(5, bytes) => contents = Some(bytes),
                _ => (),
            }
        }
        Ok(Input { head: Head::new(Cow::Borrowed(name), datatype, &shape)?, contents })
    }
}

/// Returns the field of a datatype in `InferTensorContents`: its number and name.
fn contents_field(datatype: Datatype) -> (u32, &'static str) {
    match datatype {
        Datatype::Int32 => (2, "int_contents"),
        Datatype::Int64 => (3, "int64_contents"),
        Datatype::Uint32 => (4, "uint_contents"),
        Datatype::Uint64 => (5, "uint64_contents"),
        Datatype::Fp32 => (6, "fp32_contents"),
        Datatype::Fp64 => (7, "fp64_contents"),
        Datatype::Bytes => (8, "bytes_contents"),
    }
}

/// Returns the elements of typed contents as bytes.
fn elements(head: &Head<'_>, contents: &[u8]) -> Result<Vec<u8>, DecodeError> {
    let (number, name) = contents_field(head.datatype);
    let mut out = Vec::new();
    let mut num = 0;
    // Elements of four bytes; protobuf writes negative ones with 64 bits.
    let is_short = matches!(head.datatype, Datatype::Int32 | Datatype::Uint32);
    let push = |value: u64, out: &mut Vec<u8>| match is_short {
        true => out.extend_from_slice(&(value as u32).to_le_bytes()),
        false => out.extend_from_slice(&value.to_le_bytes()),
    };
    let mut fields = Fields(contents);
    while let Some(field) = fields.next()? {
        num += match (field, head.datatype) {
            (Field::Bytes(at, text), Datatype::Bytes) if at == number => {
                let length = u32::try_from(text.len())
                    .map_err(|_| bad(&head.name, "contents: expected elements of less than 4 GiB, got more"))?;
                out.extend_from_slice(&length.to_le_bytes());
                out.extend_from_slice(text);
                1
            }
            (Field::Bytes(at, packed), Datatype::Fp32 | Datatype::Fp64) if at == number => {
                out.extend_from_slice(packed);
                packed.len() / if head.datatype == Datatype::Fp32 { 4 } else { 8 }
            }
            (Field::Fixed(at, value), Datatype::Fp32 | Datatype::Fp64) if at == number => {
                out.extend_from_slice(value);
                1
            }
            (Field::Bytes(at, mut packed), _) if at == number => {
                let mut num_packed = 0;
                while !packed.is_empty() {
                    push(decode_varint(&mut packed).map_err(broken)?, &mut out);
                    num_packed += 1;
                }
                num_packed
            }
            (Field::Varint(at, value), _) if at == number => {
                push(value, &mut out);
                1
            }
            _ => return Err(bad(&head.name, format_args!("contents: expected only `{name}`, got another field"))),
        }
    }
    if head.num_elements() != Some(num) {
        let (rows, width) = (head.rows, head.width);
        return Err(bad(&head.name, format_args!("{name}: expected {rows} x {width} elements, got {num}")));
    }
    Ok(out)
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ModelInferResponse {
    #[prost(string, tag = "1")]
    pub(crate) model_name: String,
    #[prost(string, tag = "2")]
    pub(crate) model_version: String,
    #[prost(string, tag = "3")]
    pub(crate) id: String,
    #[prost(btree_map = "string, message", tag = "4")]
    pub(crate) parameters: std::collections::BTreeMap<String, InferParameter>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) outputs: Vec<InferOutputTensor>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub(crate) raw_output_contents: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct InferOutputTensor {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub(crate) shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct InferParameter {
    #[prost(string, tag = "3")]
    pub(crate) string_param: String,
}

/// Encodes the answer, with scores as bytes.
pub(in crate::codecs) fn write(wanted: &RequestedOutputs, info: &VersionInfo, scores: &[f32]) -> Reply {
    let num_labels = info.labels.len();
    let num_samples = scores.len() / num_labels;
    let (mut outputs, mut contents) = (Vec::new(), Vec::new());
    for (label, _) in wanted.outputs(&info.labels) {
        outputs.push(InferOutputTensor {
            name: info.labels[label].clone(),
            datatype: Datatype::Fp32.name().into(),
            shape: vec![num_samples as i64],
        });
        contents.push(scores_of(scores, label, num_labels).flat_map(f32::to_le_bytes).collect::<Vec<_>>().into());
    }
    let variant = (!info.variant.is_empty()).then(|| info.variant.clone());
    let parameter = |variant| ("variant".to_string(), InferParameter { string_param: variant });
    let message = ModelInferResponse {
        model_name: info.model.clone(),
        model_version: info.version.to_string(),
        id: wanted.id.clone(),
        parameters: variant.map(parameter).into_iter().collect(),
        outputs,
        raw_output_contents: contents,
    };
    Reply { body: message.encode_to_vec().into(), json_bytes: None }
}
