//! Tensors of the Open Inference Protocol: inputs by name into a batch, a tensor of scores for each label out.
//!
//! `json` (HTTP) and `proto` (gRPC) decode requests into the same [`Tensor`]s and encode the answers; `fill` adds the
//! tensors to a batch.

use std::borrow::Cow;

use elasticrec_sample::parser::excerpt;
use elasticrec_sample::{BatchBuilder, Features, Format, Parser};

use super::values::{Inputs, Target};
use super::{DecodeError, Limits};

mod fill;
pub(super) mod json;
pub(crate) mod proto;
#[cfg(test)]
mod tests;

/// Name of the tensor with all signs of a sample, one per slot.
const SIGNS: &str = "signs";
/// Name of the tensor with all dense values of a sample.
const DENSE: &str = "dense";
/// Suffix of the tensor with the number of values that each sample has in a slot; the name of the slot precedes it.
const LENGTHS: &str = ".lengths";

/// The type of a tensor's elements: the datatypes of the protocol that an input may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Datatype {
    Bytes,
    Int32,
    Int64,
    Uint32,
    Uint64,
    Fp32,
    Fp64,
}

impl Datatype {
    const ALL: [Datatype; 7] = [
        Datatype::Uint64,
        Datatype::Int64,
        Datatype::Uint32,
        Datatype::Int32,
        Datatype::Bytes,
        Datatype::Fp32,
        Datatype::Fp64,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Datatype::Bytes => "BYTES",
            Datatype::Int32 => "INT32",
            Datatype::Int64 => "INT64",
            Datatype::Uint32 => "UINT32",
            Datatype::Uint64 => "UINT64",
            Datatype::Fp32 => "FP32",
            Datatype::Fp64 => "FP64",
        }
    }

    /// Returns the bytes per element, or None for text, whose elements have a length each.
    fn size(self) -> Option<usize> {
        match self {
            Datatype::Bytes => None,
            Datatype::Int32 | Datatype::Uint32 | Datatype::Fp32 => Some(4),
            Datatype::Int64 | Datatype::Uint64 | Datatype::Fp64 => Some(8),
        }
    }
}

/// Returns the datatypes that an input accepts.
fn accepted_datatypes(format: Format, kind: Kind) -> &'static [Datatype] {
    use Datatype::{Bytes, Fp32, Fp64, Int32, Int64, Uint32, Uint64};
    match (kind, format) {
        (Kind::Slot(_), Format::Criteo) => &[Bytes],
        (Kind::Slot(_), Format::Slots) => &[Uint64, Int64, Uint32, Int32, Bytes],
        (Kind::Slot(_), _) => &[Bytes, Uint64, Int64, Uint32, Int32],
        (Kind::Signs, _) => &[Uint64, Int64],
        (Kind::Lengths(_), _) => &[Int32, Int64],
        (Kind::Dense(_) | Kind::AllDense, _) => &[Fp32, Fp64],
    }
}

/// The description of an input or an output for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) datatype: &'static str,
    /// -1 for a dimension of any size.
    pub(crate) shape: Vec<i64>,
}

impl TensorInfo {
    fn new(name: impl Into<String>, datatype: Datatype, shape: &[i64]) -> TensorInfo {
        TensorInfo { name: name.into(), datatype: datatype.name(), shape: shape.into() }
    }
}

/// Returns the inputs of a model, which are all optional: its slots, its dense columns, and a tensor for all of each.
pub(crate) fn inputs(features: &Features) -> Vec<TensorInfo> {
    let of_slot = if features.format.has_signs() { Datatype::Uint64 } else { Datatype::Bytes };
    let slots = features.read_slots();
    let mut inputs: Vec<TensorInfo> =
        slots.iter().map(|slot| TensorInfo::new(&slot.name, of_slot, &[-1, -1])).collect();
    inputs.extend(features.dense.iter().map(|dense| TensorInfo::new(&dense.name, Datatype::Fp32, &[-1, 1])));
    for (name, datatype, width) in
        [(SIGNS, Datatype::Uint64, slots.len()), (DENSE, Datatype::Fp32, features.dense.len())]
    {
        // A slot or column of that name takes precedence.
        if width > 0 && inputs.iter().all(|input| input.name != name) {
            inputs.push(TensorInfo::new(name, datatype, &[-1, width as i64]));
        }
    }
    inputs
}

/// Returns the outputs of a model: for each label, a score per sample.
pub(crate) fn outputs(labels: &[String]) -> Vec<TensorInfo> {
    labels.iter().map(|label| TensorInfo::new(label, Datatype::Fp32, &[-1])).collect()
}

/// An output that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    name: String,
    is_binary: bool,
}

/// The id of a request and the outputs that it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedOutputs {
    id: String,
    /// None for all labels.
    outputs: Option<Vec<Output>>,
    /// Whether the outputs are binary if `outputs` is None.
    is_binary: bool,
}

impl RequestedOutputs {
    /// Refuses outputs that the model does not have.
    pub(super) fn check(&self, labels: &[String]) -> Result<(), DecodeError> {
        let mut is_wanted = vec![false; labels.len()];
        for output in self.outputs.iter().flatten() {
            let Some(label) = labels.iter().position(|label| *label == output.name) else {
                let known = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
                let name = excerpt(&output.name);
                return Err(DecodeError::Bad(format!("outputs: unknown output `{name}`, expected one of {known}")));
            };
            // Repeated names would make the answer of a small request large.
            if std::mem::replace(&mut is_wanted[label], true) {
                return Err(DecodeError::Bad(format!("outputs: `{}`: given twice", excerpt(&output.name))));
            }
        }
        Ok(())
    }

    /// Returns the outputs of the answer: the index of each label, and whether its scores are binary.
    fn outputs(&self, labels: &[String]) -> Vec<(usize, bool)> {
        match &self.outputs {
            None => (0..labels.len()).map(|label| (label, self.is_binary)).collect(),
            Some(outputs) => {
                let index = |output: &Output| labels.iter().position(|label| *label == output.name);
                outputs.iter().filter_map(|output| Some((index(output)?, output.is_binary))).collect()
            }
        }
    }
}

/// Returns the scores of one label, from scores `[samples, labels]`.
fn scores_of(scores: &[f32], label: usize, num_labels: usize) -> impl Iterator<Item = f32> {
    scores.iter().skip(label).step_by(num_labels).copied()
}

fn bad(name: &str, what: impl std::fmt::Display) -> DecodeError {
    DecodeError::Bad(format!("input `{}`: {what}", excerpt(name)))
}

/// A tensor of a request. Its elements are row by row and little-endian in every encoding.
#[derive(Debug)]
struct Tensor<'a> {
    name: Cow<'a, str>,
    datatype: Datatype,
    rows: usize,
    /// Elements per row.
    width: usize,
    data: Cow<'a, [u8]>,
}

/// The name, datatype and shape of a tensor.
#[derive(Debug)]
struct Head<'a> {
    name: Cow<'a, str>,
    datatype: Datatype,
    rows: usize,
    width: usize,
}

impl<'a> Head<'a> {
    fn new(name: Cow<'a, str>, datatype: &str, shape: &[i64]) -> Result<Head<'a>, DecodeError> {
        let Some(datatype) = Datatype::ALL.into_iter().find(|known| known.name() == datatype) else {
            let known = Datatype::ALL.map(Datatype::name).join(", ");
            return Err(bad(&name, format_args!("datatype: expected one of {known}, got `{}`", excerpt(datatype))));
        };
        let size = |dim: i64| usize::try_from(dim).ok();
        let (rows, width) = match *shape {
            [rows] => (size(rows), Some(1)),
            [rows, width] => (size(rows), size(width)),
            _ => (None, None),
        };
        match (rows, width) {
            (Some(rows), Some(width)) => Ok(Head { name, datatype, rows, width }),
            _ => {
                // The list may be as long as the request, so the message shows only its start.
                let start = shape.iter().take(4).map(i64::to_string).collect::<Vec<_>>().join(", ");
                let more = if shape.len() > 4 { ", …" } else { "" };
                Err(bad(&name, format_args!("shape: expected [B] or [B, K], got [{start}{more}]")))
            }
        }
    }

    /// Returns the number of elements, or None if it overflows.
    fn num_elements(&self) -> Option<usize> {
        self.rows.checked_mul(self.width)
    }

    fn with(self, data: Cow<'a, [u8]>) -> Result<Tensor<'a>, DecodeError> {
        if let Some(size) = self.datatype.size() {
            let expected = self.num_elements().and_then(|num| num.checked_mul(size));
            if expected != Some(data.len()) {
                let expected = expected.map_or("more".into(), |expected| expected.to_string());
                let (rows, width, got) = (self.rows, self.width, data.len());
                let datatype = self.datatype.name();
                let what = format!("data: expected {expected} bytes for {rows} x {width} of {datatype}, got {got}");
                return Err(bad(&self.name, what));
            }
        }
        let Head { name, datatype, rows, width } = self;
        Ok(Tensor { name, datatype, rows, width, data })
    }
}

/// The inputs that a tensor has values for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Slot(u16),
    Lengths(u16),
    Dense(usize),
    Signs,
    AllDense,
}

fn kind_of(inputs: &Inputs<'_>, name: &str) -> Option<Kind> {
    match inputs.target(name) {
        Some(Target::Slot(slot)) => return Some(Kind::Slot(slot)),
        Some(Target::Dense(index)) => return Some(Kind::Dense(index)),
        None => (),
    }
    match name {
        SIGNS => Some(Kind::Signs),
        DENSE => Some(Kind::AllDense),
        _ => Some(Kind::Lengths(inputs.parser.slot(name.strip_suffix(LENGTHS)?.as_bytes())?)),
    }
}

/// The tensors of a request by input of the model; each input has at most one.
struct TensorsByInput<'t> {
    /// By slot: its values.
    slots: Vec<Option<&'t Tensor<'t>>>,
    /// By slot: the number of values of each sample.
    lengths: Vec<Option<&'t Tensor<'t>>>,
    /// By dense column.
    dense: Vec<Option<&'t Tensor<'t>>>,
    signs: Option<&'t Tensor<'t>>,
    all_dense: Option<&'t Tensor<'t>>,
    num_samples: usize,
}

/// Adds the samples of a request to a batch. On an error the batch may have some of them.
fn append(
    parser: &Parser,
    tensors: &[Tensor<'_>],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<(), DecodeError> {
    let inputs = Inputs { parser, builder };
    let given = TensorsByInput::new(&inputs, tensors)?;
    if given.num_samples > limits.max_instances {
        return Err(DecodeError::TooMany { what: "instances", max: limits.max_instances });
    }
    given.fill(inputs)
}

impl<'t> TensorsByInput<'t> {
    fn new(inputs: &Inputs<'_>, tensors: &'t [Tensor<'t>]) -> Result<TensorsByInput<'t>, DecodeError> {
        let features = inputs.parser.features();
        let mut given = TensorsByInput {
            slots: vec![None; features.slots.len()],
            lengths: vec![None; features.slots.len()],
            dense: vec![None; features.dense.len()],
            signs: None,
            all_dense: None,
            num_samples: 0,
        };
        for tensor in tensors {
            let kind = kind_of(inputs, &tensor.name)
                .ok_or_else(|| bad(&tensor.name, "unknown, expected an input of the model's metadata"))?;
            check_datatype(tensor, accepted_datatypes(features.format, kind))?;
            let (entry, width) = match kind {
                Kind::Slot(slot) => (&mut given.slots[usize::from(slot)], None),
                Kind::Lengths(slot) => (&mut given.lengths[usize::from(slot)], Some(1)),
                Kind::Dense(index) => (&mut given.dense[index], Some(1)),
                Kind::Signs => (&mut given.signs, Some(features.read_slots().len())),
                Kind::AllDense => (&mut given.all_dense, Some(features.dense.len())),
            };
            if let Some(width) = width.filter(|&width| width != tensor.width) {
                let what = format!("shape: expected [B, {width}], got [{}, {}]", tensor.rows, tensor.width);
                return Err(bad(&tensor.name, what));
            }
            if entry.replace(tensor).is_some() {
                return Err(bad(&tensor.name, "given twice"));
            }
        }
        given.check_all_at_once()?;
        given.num_samples = given.num_samples(features)?;
        Ok(given)
    }

    fn check_all_at_once(&self) -> Result<(), DecodeError> {
        for (all, single) in
            [(self.signs, self.slots.iter().flatten().next()), (self.all_dense, self.dense.iter().flatten().next())]
        {
            if let (Some(all), Some(single)) = (all, single) {
                return Err(bad(&single.name, format_args!("given twice, also in `{}`", all.name)));
            }
        }
        Ok(())
    }

    /// Returns the number of samples, which must be the same in all tensors.
    fn num_samples(&self, features: &Features) -> Result<usize, DecodeError> {
        let mut first: Option<&Tensor<'_>> = None;
        for (slot, lengths) in self.lengths.iter().enumerate() {
            let Some(lengths) = lengths else { continue };
            let Some(values) = self.slots[slot] else {
                let name = &features.slots[slot].name;
                return Err(bad(&lengths.name, format_args!("expected the values of slot `{name}` too, got none")));
            };
            if values.width != 1 {
                let what = format!(
                    "shape: expected [N] together with `{}`, got [{}, {}]",
                    lengths.name, values.rows, values.width
                );
                return Err(bad(&values.name, what));
            }
            let total = sum_of(lengths)?;
            if total != values.rows as u64 {
                let what = format!("expected a sum of {}, the number of values of the slot, got {total}", values.rows);
                return Err(bad(&lengths.name, what));
            }
        }
        let slots = self.slots.iter().zip(&self.lengths).filter_map(|(values, lengths)| lengths.or(*values));
        let others = self.dense.iter().copied().chain([self.signs, self.all_dense]).flatten();
        for tensor in slots.chain(others) {
            match first {
                None => first = Some(tensor),
                Some(first) if first.rows != tensor.rows => {
                    let what =
                        format!("shape: expected {} rows as in `{}`, got {}", first.rows, first.name, tensor.rows);
                    return Err(bad(&tensor.name, what));
                }
                Some(_) => (),
            }
        }
        let none = || DecodeError::Bad("inputs: expected at least one, got none".into());
        Ok(first.ok_or_else(none)?.rows)
    }
}

fn check_datatype(tensor: &Tensor<'_>, accepted: &[Datatype]) -> Result<(), DecodeError> {
    if accepted.contains(&tensor.datatype) {
        return Ok(());
    }
    let expected = accepted.iter().map(|datatype| datatype.name()).collect::<Vec<_>>().join(", ");
    let one_of = if accepted.len() > 1 { "one of " } else { "" };
    let got = tensor.datatype.name();
    Err(bad(&tensor.name, format_args!("datatype: expected {one_of}{expected}, got {got}")))
}

/// Returns the sum of the lengths, or refuses a negative one.
fn sum_of(lengths: &Tensor<'_>) -> Result<u64, DecodeError> {
    let mut total = 0u64;
    for row in 0..lengths.rows {
        let length = fill::length_at(lengths, row);
        let length = u64::try_from(length)
            .map_err(|_| bad(&lengths.name, format_args!("expected lengths of at least 0, got {length}")))?;
        total = total.saturating_add(length);
    }
    Ok(total)
}
