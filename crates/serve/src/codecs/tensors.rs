//! Tensors of the Open Inference Protocol: inputs by name into a batch, a tensor of scores a label out of it.
//!
//! `json` and `proto` bring the two forms of a request to the same [`Tensor`]s and write the two forms of the answer.

use std::borrow::Cow;

use elasticrec_sample::{BatchBuilder, Features, Format, Parser};

use super::values::{Inputs, Target, shown};
use super::{DecodeError, Limits};

mod fill;
pub(super) mod json;
pub(crate) mod proto;
#[cfg(test)]
mod tests;

/// All signs of a sample, one a slot.
const SIGNS: &str = "signs";
/// All dense values of a sample.
const DENSE: &str = "dense";
/// Behind the name of a slot: how many values each sample has there.
const LENGTHS: &str = ".lengths";

/// What the elements of a tensor are, of those that an input takes.
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

    /// Bytes an element; none for text, which says it itself.
    fn size(self) -> Option<usize> {
        match self {
            Datatype::Bytes => None,
            Datatype::Int32 | Datatype::Uint32 | Datatype::Fp32 => Some(4),
            Datatype::Int64 | Datatype::Uint64 | Datatype::Fp64 => Some(8),
        }
    }
}

/// What an input takes.
fn taken(format: Format, kind: Kind) -> &'static [Datatype] {
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

/// An input as clients are told of it, or an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) datatype: &'static str,
    /// -1 where any number goes.
    pub(crate) shape: Vec<i64>,
}

impl TensorInfo {
    fn new(name: impl Into<String>, datatype: Datatype, shape: &[i64]) -> TensorInfo {
        TensorInfo { name: name.into(), datatype: datatype.name(), shape: shape.into() }
    }
}

/// The inputs of a model: its slots, its dense columns, and all of each at once. None has to be there.
pub(crate) fn inputs(features: &Features) -> Vec<TensorInfo> {
    let of_slot = if features.format.has_signs() { Datatype::Uint64 } else { Datatype::Bytes };
    let slots = features.read_slots();
    let mut inputs: Vec<TensorInfo> =
        slots.iter().map(|slot| TensorInfo::new(&slot.name, of_slot, &[-1, -1])).collect();
    inputs.extend(features.dense.iter().map(|dense| TensorInfo::new(&dense.name, Datatype::Fp32, &[-1, 1])));
    for (name, datatype, width) in
        [(SIGNS, Datatype::Uint64, slots.len()), (DENSE, Datatype::Fp32, features.dense.len())]
    {
        // a slot or a column of that name goes first
        if width > 0 && inputs.iter().all(|input| input.name != name) {
            inputs.push(TensorInfo::new(name, datatype, &[-1, width as i64]));
        }
    }
    inputs
}

/// The outputs of a model: a score a sample for each label.
pub(crate) fn outputs(labels: &[String]) -> Vec<TensorInfo> {
    labels.iter().map(|label| TensorInfo::new(label, Datatype::Fp32, &[-1])).collect()
}

/// An output that a request wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    name: String,
    is_binary: bool,
}

/// What a request wants of its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedOutputs {
    id: String,
    /// All labels where the request names none.
    outputs: Option<Vec<Output>>,
    /// Where it says nothing of an output.
    is_binary: bool,
}

impl RequestedOutputs {
    /// Refuses outputs that the model does not have.
    pub(super) fn check(&self, labels: &[String]) -> Result<(), DecodeError> {
        let mut is_wanted = vec![false; labels.len()];
        for output in self.outputs.iter().flatten() {
            let Some(label) = labels.iter().position(|label| *label == output.name) else {
                let known = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
                let name = shown(&output.name);
                return Err(DecodeError::Bad(format!("output `{name}`: unknown, there is {known}")));
            };
            // else a small request might ask for an answer of any length
            if std::mem::replace(&mut is_wanted[label], true) {
                return Err(DecodeError::Bad(format!("output `{}`: is asked for twice", shown(&output.name))));
            }
        }
        Ok(())
    }

    /// The outputs of the answer: the number of each label, and whether it goes as bytes.
    fn outputs(&self, labels: &[String]) -> Vec<(usize, bool)> {
        match &self.outputs {
            None => (0..labels.len()).map(|label| (label, self.is_binary)).collect(),
            Some(outputs) => {
                let place = |output: &Output| labels.iter().position(|label| *label == output.name);
                outputs.iter().filter_map(|output| Some((place(output)?, output.is_binary))).collect()
            }
        }
    }
}

/// The scores of one label, out of `[samples, labels]`.
fn scores_of(scores: &[f32], label: usize, num_labels: usize) -> impl Iterator<Item = f32> {
    scores.iter().skip(label).step_by(num_labels).copied()
}

fn bad(name: &str, what: impl std::fmt::Display) -> DecodeError {
    DecodeError::Bad(format!("input `{}`: {what}", shown(name)))
}

/// A tensor of a request: elements row by row, little-endian, whichever way they came.
#[derive(Debug)]
struct Tensor<'a> {
    name: Cow<'a, str>,
    datatype: Datatype,
    rows: usize,
    /// Elements a row.
    width: usize,
    data: Cow<'a, [u8]>,
}

/// A tensor before its data.
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
            return Err(bad(&name, format_args!("datatype: expected one of {known}, got `{}`", shown(datatype))));
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
                // a request may have as many dimensions as it has bytes
                let start = shape.iter().take(4).map(i64::to_string).collect::<Vec<_>>().join(", ");
                let more = if shape.len() > 4 { ", …" } else { "" };
                Err(bad(&name, format_args!("shape: expected [B] or [B, K], got [{start}{more}]")))
            }
        }
    }

    /// Elements, if so many can be.
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

/// What a tensor is for.
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

/// Who gives what: each input of the model has one tensor at most.
struct TensorsByInput<'t> {
    /// By slot: its values, and how many a sample has.
    slots: Vec<Option<&'t Tensor<'t>>>,
    lengths: Vec<Option<&'t Tensor<'t>>>,
    /// By dense column.
    dense: Vec<Option<&'t Tensor<'t>>>,
    signs: Option<&'t Tensor<'t>>,
    all_dense: Option<&'t Tensor<'t>>,
    num_samples: usize,
}

/// Adds the samples of a request to a batch; of one that is refused some may be there.
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
                .ok_or_else(|| bad(&tensor.name, "unknown, the model's metadata says which there are"))?;
            check_datatype(tensor, taken(features.format, kind))?;
            let (place, width) = match kind {
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
            if place.replace(tensor).is_some() {
                return Err(bad(&tensor.name, "is given twice"));
            }
        }
        given.check_all_at_once()?;
        given.num_samples = given.agree(features)?;
        Ok(given)
    }

    fn check_all_at_once(&self) -> Result<(), DecodeError> {
        for (all, single) in
            [(self.signs, self.slots.iter().flatten().next()), (self.all_dense, self.dense.iter().flatten().next())]
        {
            if let (Some(all), Some(single)) = (all, single) {
                return Err(bad(&single.name, format_args!("is given twice, `{}` has it too", all.name)));
            }
        }
        Ok(())
    }

    /// The number of samples, which all tensors have to agree on.
    fn agree(&self, features: &Features) -> Result<usize, DecodeError> {
        let mut first: Option<&Tensor<'_>> = None;
        for (slot, lengths) in self.lengths.iter().enumerate() {
            let Some(lengths) = lengths else { continue };
            let Some(values) = self.slots[slot] else {
                let name = &features.slots[slot].name;
                return Err(bad(&lengths.name, format_args!("expected the values of slot `{name}` too, got none")));
            };
            if values.width != 1 {
                let what = format!("shape: expected [N], as `{}` says how many each sample has", lengths.name);
                return Err(bad(&values.name, what));
            }
            let total = sum_of(lengths)?;
            if total != values.rows as u64 {
                let what = format!("expected a sum of {}, the values of the slot, got {total}", values.rows);
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
                        format!("shape: expected {} rows, as `{}` has, got {}", first.rows, first.name, tensor.rows);
                    return Err(bad(&tensor.name, what));
                }
                Some(_) => (),
            }
        }
        let none = || DecodeError::Bad("inputs: expected at least one, got none".into());
        Ok(first.ok_or_else(none)?.rows)
    }
}

fn check_datatype(tensor: &Tensor<'_>, taken: &[Datatype]) -> Result<(), DecodeError> {
    if taken.contains(&tensor.datatype) {
        return Ok(());
    }
    let expected = taken.iter().map(|datatype| datatype.name()).collect::<Vec<_>>().join(", ");
    let one_of = if taken.len() > 1 { "one of " } else { "" };
    let got = tensor.datatype.name();
    Err(bad(&tensor.name, format_args!("datatype: expected {one_of}{expected}, got {got}")))
}

/// The sum of lengths, none of them negative.
fn sum_of(lengths: &Tensor<'_>) -> Result<u64, DecodeError> {
    let mut total = 0u64;
    for row in 0..lengths.rows {
        let length = fill::length_at(lengths, row);
        let length = u64::try_from(length).map_err(|_| bad(&lengths.name, format_args!("got the length {length}")))?;
        total = total.saturating_add(length);
    }
    Ok(total)
}
