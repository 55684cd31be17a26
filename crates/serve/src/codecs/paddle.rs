//! Paddle Serving's `GeneralModelService`: a tensor for each slot or dense column in, a tensor for each label out.

use std::ops::Range;

use bytes::Bytes;
use elasticrec_sample::parser::excerpt;
use elasticrec_sample::{BatchBuilder, Parser};
use prost::Message;

use self::message::{Echo, ModelOutput, Request, Response, Tensor};
use super::values::{Inputs, Target};
use super::{DecodeError, Limits, VersionInfo};

mod message;

/// The encoding of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// `application/proto`, gRPC and bRPC.
    Proto,
    /// `application/json`.
    Json,
}

/// The outputs that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    encoding: Encoding,
    /// Names of labels; empty for all.
    names: Vec<String>,
    log_id: u64,
}

/// Paddle's error numbers.
pub(crate) mod err_no {
    /// Errors without a number of their own.
    pub(crate) const FAILURE: i32 = -5000;
    /// The request exceeds a limit.
    pub(crate) const OVERFLOW: i32 = -5002;
    /// Scoring failed.
    pub(crate) const INFERENCE: i32 = -5100;
}

/// Names of a tensor with all dense columns, unless a column has that name.
const ALL_DENSE: [&str; 2] = ["dense_input", "dense"];

/// Paddle's element types that are supported in `tensor_content`.
mod elem_type {
    pub(super) const INT64: i32 = 0;
    pub(super) const FLOAT32: i32 = 1;
    pub(super) const INT32: i32 = 2;
    pub(super) const FLOAT64: i32 = 3;
    pub(super) const INT16: i32 = 4;
    pub(super) const UINT8: i32 = 7;
    pub(super) const INT8: i32 = 8;
}

/// Adds the rows of a request to a batch. On an error the batch may have some of them.
pub(super) fn decode(
    encoding: Encoding,
    parser: &Parser,
    body: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<Fetch, DecodeError> {
    let read = match encoding {
        Encoding::Proto => Request::of_proto(body),
        Encoding::Json => Request::of_json(body),
    };
    let request = read.map_err(|error| DecodeError::Bad(format!("body: {error}")))?;
    let mut inputs = Inputs { parser, builder };
    let columns = columns(&inputs, &request).map_err(DecodeError::Bad)?;
    let Some(num_rows) = columns.first().map(|column| column.rows.len()) else {
        return Err(DecodeError::Bad("tensor: expected at least one tensor, got none".into()));
    };
    if num_rows > limits.max_instances {
        return Err(DecodeError::TooMany { what: "instances", max: limits.max_instances });
    }
    if let Some(other) = columns.iter().find(|column| column.rows.len() != num_rows) {
        let (first, second, got) = (columns[0].number, other.number, other.rows.len());
        let what = format!("tensor[{second}]: expected {num_rows} rows as in tensor[{first}], got {got}");
        return Err(DecodeError::Bad(what));
    }
    for row in 0..num_rows {
        inputs.builder.begin();
        for column in &columns {
            let added = column.add(row, &mut inputs);
            added.map_err(|what| DecodeError::Bad(format!("tensor[{}]: row {row}: {what}", column.number)))?;
        }
        inputs.builder.end(1, 0);
    }
    Ok(Fetch { encoding, names: request.fetch_var_names, log_id: request.log_id })
}

/// The inputs that a tensor has values for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TensorInput {
    Slot(u16),
    /// Adjacent dense columns.
    Dense(Range<usize>),
}

/// A tensor of a request with its inputs.
struct Column<'r> {
    /// Its index in the request.
    number: usize,
    input: TensorInput,
    values: Values<'r>,
    rows: Rows<'r>,
}

impl Column<'_> {
    fn add(&self, row: usize, inputs: &mut Inputs<'_>) -> Result<(), String> {
        let range = self.rows.of(row);
        match &self.input {
            TensorInput::Slot(slot) => {
                range.into_iter().try_for_each(|at| self.values.add(at, Target::Slot(*slot), inputs))
            }
            TensorInput::Dense(columns) => {
                let mut pairs = range.zip(columns.clone());
                pairs.try_for_each(|(at, column)| self.values.add(at, Target::Dense(column), inputs))
            }
        }
    }
}

/// Returns the tensors of a request in the order of the model's inputs; each input has at most one.
fn columns<'r>(inputs: &Inputs<'_>, request: &'r Request) -> Result<Vec<Column<'r>>, String> {
    let mut seen = vec![false; inputs.num_inputs()];
    let mut columns = Vec::new();
    for (number, tensor) in request.tensor.iter().enumerate() {
        let column = Column::of(number, tensor, inputs).map_err(|what| format!("tensor[{number}]: {what}"))?;
        let numbers = match &column.input {
            TensorInput::Slot(slot) => usize::from(*slot)..usize::from(*slot) + 1,
            TensorInput::Dense(range) => {
                let first = inputs.number_of(Target::Dense(0));
                first + range.start..first + range.end
            }
        };
        for input in numbers {
            if std::mem::replace(&mut seen[input], true) {
                let name = excerpt(names_of(tensor)[0]);
                return Err(format!("tensor[{number}]: `{name}`: given twice"));
            }
        }
        columns.push(column);
    }
    // Signs added in the order of the slots need no sorting in the batch.
    columns.sort_by_key(|column| match &column.input {
        TensorInput::Slot(slot) => (0, usize::from(*slot)),
        TensorInput::Dense(range) => (1, range.start),
    });
    Ok(columns)
}

/// Returns the names of a tensor: its alias, which clients use, before its name in the program.
fn names_of(tensor: &Tensor) -> [&str; 2] {
    match tensor.alias_name.is_empty() {
        true => [&tensor.name, &tensor.name],
        false => [&tensor.alias_name, &tensor.name],
    }
}

impl<'r> Column<'r> {
    fn of(number: usize, tensor: &'r Tensor, inputs: &Inputs<'_>) -> Result<Column<'r>, String> {
        let names = names_of(tensor);
        let Some(input) = names.iter().find_map(|name| input_of(name, inputs)) else {
            return Err(format!("unknown slot `{}`", excerpt(names[0])));
        };
        let in_tensor = |what: String| format!("`{}`: {what}", excerpt(names[0]));
        let values = Values::of(tensor).map_err(in_tensor)?;
        let rows = Rows::of_tensor(tensor, values.len()).map_err(in_tensor)?;
        if let TensorInput::Dense(columns) = &input
            && rows.width() != Some(columns.len())
        {
            return Err(in_tensor(format!("shape: expected [rows, {}], got {:?}", columns.len(), few(&tensor.shape))));
        }
        Ok(Column { number, input, values, rows })
    }
}

/// Returns the input of that name: a slot, a dense column, dense columns `NAME.0`, `NAME.1` … (PaddleRec's names), or
/// all dense columns.
fn input_of(name: &str, inputs: &Inputs<'_>) -> Option<TensorInput> {
    match inputs.target(name) {
        Some(Target::Slot(slot)) => return Some(TensorInput::Slot(slot)),
        Some(Target::Dense(index)) => return Some(TensorInput::Dense(index..index + 1)),
        None => (),
    }
    let dense = &inputs.parser.features().dense;
    let number_of = |column: &str| column.strip_prefix(name)?.strip_prefix('.')?.parse::<usize>().ok();
    if let Some(first) = dense.iter().position(|column| number_of(&column.name) == Some(0)) {
        let count = dense[first..].iter().zip(0..).take_while(|(column, at)| number_of(&column.name) == Some(*at));
        return Some(TensorInput::Dense(first..first + count.count()));
    }
    (ALL_DENSE.contains(&name) && !dense.is_empty()).then_some(TensorInput::Dense(0..dense.len()))
}

/// The ranges of each row's values.
enum Rows<'r> {
    Even { len: usize, width: usize },
    Ragged { lod: &'r [i32], width: usize },
}

impl<'r> Rows<'r> {
    /// Returns the rows by the tensor's `lod`, or by its shape if it has none. Every value belongs to a row.
    fn of_tensor(tensor: &'r Tensor, num_values: usize) -> Result<Rows<'r>, String> {
        let [first, rest @ ..] = &tensor.shape[..] else {
            return Err("shape: expected [rows, values], got none".into());
        };
        let negative = || format!("shape: expected sizes of at least 0, got {:?}", few(&tensor.shape));
        let first = usize::try_from(*first).map_err(|_| negative())?;
        let mut width = 1usize;
        for &dim in rest {
            width = width.saturating_mul(usize::try_from(dim).map_err(|_| negative())?);
        }
        if first.checked_mul(width) != Some(num_values) {
            let shape = few(&tensor.shape);
            return Err(format!("expected the number of values of shape {shape:?}, got {num_values}"));
        }
        if tensor.lod.is_empty() {
            return Ok(Rows::Even { len: first, width });
        }
        let lod = &tensor.lod[..];
        let ends = i32::try_from(first).ok();
        if lod[0] != 0 || lod.last().copied() != ends || !lod.is_sorted() {
            let got = few(lod);
            return Err(format!("lod: expected ascending offsets from 0 to {first}, got {got:?}"));
        }
        Ok(Rows::Ragged { lod, width })
    }

    fn len(&self) -> usize {
        match self {
            Rows::Even { len, .. } => *len,
            Rows::Ragged { lod, .. } => lod.len() - 1,
        }
    }

    /// Returns the number of values per row, if it is the same for all rows.
    fn width(&self) -> Option<usize> {
        match self {
            Rows::Even { width, .. } => Some(*width),
            Rows::Ragged { lod, width } => {
                let first = lod.get(1).map_or(1, |&end| end);
                lod.windows(2).all(|pair| pair[1] - pair[0] == first).then_some(first as usize * width)
            }
        }
    }

    fn of(&self, row: usize) -> Range<usize> {
        match self {
            Rows::Even { width, .. } => row * width..(row + 1) * width,
            // The offsets were checked to ascend from 0.
            Rows::Ragged { lod, width } => lod[row] as usize * width..lod[row + 1] as usize * width,
        }
    }
}

/// Returns the start of a list, for a message.
fn few(numbers: &[i32]) -> &[i32] {
    &numbers[..numbers.len().min(8)]
}

/// The values of a tensor.
enum Values<'r> {
    Int64(&'r [i64]),
    Int32(&'r [i32]),
    Uint32(&'r [u32]),
    Float32(&'r [f32]),
    Float64(&'r [f64]),
    Text(&'r [String]),
    /// Little-endian elements of `elem_type`.
    Content {
        bytes: &'r [u8],
        elem_type: i32,
        size: usize,
    },
}

impl<'r> Values<'r> {
    /// Returns the list that is not empty; the list determines the type of the values.
    fn of(tensor: &'r Tensor) -> Result<Values<'r>, String> {
        let lists = [
            Values::Int64(&tensor.int64_data),
            Values::Int32(&tensor.int_data),
            Values::Uint32(&tensor.uint32_data),
            Values::Float32(&tensor.float_data),
            Values::Float64(&tensor.float64_data),
            Values::Text(&tensor.data),
            Values::of_content(&tensor.tensor_content, tensor.elem_type)?,
        ];
        let mut lists = lists.into_iter().filter(|list| list.len() > 0);
        let first = lists.next().unwrap_or(Values::Int64(&[]));
        match lists.next() {
            Some(_) => Err("expected values in one field, got several".into()),
            None => Ok(first),
        }
    }

    fn of_content(bytes: &'r [u8], elem_type: i32) -> Result<Values<'r>, String> {
        use self::elem_type::{FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, UINT8};
        let size = match elem_type {
            INT64 | FLOAT64 => 8,
            FLOAT32 | INT32 => 4,
            INT16 => 2,
            UINT8 | INT8 => 1,
            _ if bytes.is_empty() => 1,
            _ => return Err(format!("elem_type: expected one of 0, 1, 2, 3, 4, 7, 8 for content, got {elem_type}")),
        };
        match bytes.len() % size {
            0 => Ok(Values::Content { bytes, elem_type, size }),
            _ => Err(format!("tensor_content: expected elements of {size} bytes, got {} bytes", bytes.len())),
        }
    }

    fn len(&self) -> usize {
        match self {
            Values::Int64(list) => list.len(),
            Values::Int32(list) => list.len(),
            Values::Uint32(list) => list.len(),
            Values::Float32(list) => list.len(),
            Values::Float64(list) => list.len(),
            Values::Text(list) => list.len(),
            Values::Content { bytes, size, .. } => bytes.len() / size,
        }
    }

    fn add(&self, at: usize, target: Target, inputs: &mut Inputs<'_>) -> Result<(), String> {
        match self {
            Values::Int64(list) => add_integer(list[at], target, inputs),
            Values::Int32(list) => add_integer(list[at].into(), target, inputs),
            Values::Uint32(list) => add_integer(list[at].into(), target, inputs),
            Values::Float32(list) => inputs.add_number(target, list[at].into()),
            Values::Float64(list) => inputs.add_number(target, list[at]),
            Values::Text(list) => inputs.add_text(target, &list[at]),
            Values::Content { bytes, elem_type, size } => {
                let mut element = [0; 8];
                element[..*size].copy_from_slice(&bytes[at * size..(at + 1) * size]);
                let [first, second, third, fourth, ..] = element;
                let four = [first, second, third, fourth];
                match *elem_type {
                    elem_type::FLOAT32 => inputs.add_number(target, f32::from_le_bytes(four).into()),
                    elem_type::FLOAT64 => inputs.add_number(target, f64::from_le_bytes(element)),
                    elem_type::INT32 => add_integer(i32::from_le_bytes(four).into(), target, inputs),
                    elem_type::INT16 => add_integer(i16::from_le_bytes([first, second]).into(), target, inputs),
                    elem_type::INT8 => add_integer((first as i8).into(), target, inputs),
                    elem_type::UINT8 => add_integer(first.into(), target, inputs),
                    _ => add_integer(i64::from_le_bytes(element), target, inputs),
                }
            }
        }
    }
}

/// Adds an integer. A sign is a u64 with the bits of Paddle's i64; negative values of hashed slots are refused as in
/// JSON.
fn add_integer(number: i64, target: Target, inputs: &mut Inputs<'_>) -> Result<(), String> {
    let is_sign = matches!(target, Target::Slot(_)) && inputs.parser.features().format.has_signs();
    match number >= 0 || is_sign {
        true => inputs.add_integer(target, number as u64),
        false => inputs.add_number(target, number as f64),
    }
}

impl Fetch {
    /// Refuses outputs that the model does not have.
    pub(super) fn check(&self, info: &VersionInfo) -> Result<(), DecodeError> {
        // Repeated names would make the answer of a small request large.
        if self.names.len() > info.labels.len() {
            let (max, got) = (info.labels.len(), self.names.len());
            return Err(DecodeError::Bad(format!("fetch_var_names: expected at most {max}, got {got}")));
        }
        match self.names.iter().find(|name| !info.labels.contains(name)) {
            Some(name) => {
                let known = info.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
                let what = format!("fetch_var_names: unknown output `{}`, expected one of {known}", excerpt(name));
                Err(DecodeError::Bad(what))
            }
            None => Ok(()),
        }
    }

    pub(super) fn write(&self, info: &VersionInfo, scores: &[f32]) -> Result<Bytes, String> {
        let num_labels = info.labels.len();
        let num_rows = (scores.len() / num_labels) as i32;
        let tensor = |(index, label): (usize, &String)| Tensor {
            float_data: scores.iter().skip(index).step_by(num_labels).copied().collect(),
            elem_type: elem_type::FLOAT32,
            shape: vec![num_rows, 1],
            name: label.clone(),
            alias_name: label.clone(),
            ..Tensor::default()
        };
        let labels = info.labels.iter().enumerate();
        let tensor = match self.names.is_empty() {
            true => labels.map(tensor).collect(),
            // In the order of the request.
            false => self
                .names
                .iter()
                .filter_map(|name| labels.clone().find(|(_, label)| *label == name))
                .map(tensor)
                .collect(),
        };
        let mut engine_name = format!("{}/{}", info.model, info.version);
        if !info.variant.is_empty() {
            engine_name = format!("{engine_name}/{}", info.variant);
        }
        let outputs = vec![ModelOutput { tensor, engine_name }];
        self.encoding.write(&Response { outputs, log_id: self.log_id, ..Response::default() })
    }
}

impl Encoding {
    fn write(self, response: &Response) -> Result<Bytes, String> {
        match self {
            Encoding::Proto => Ok(response.encode_to_vec().into()),
            Encoding::Json => serde_json::to_vec(response).map(Bytes::from).map_err(|error| error.to_string()),
        }
    }

    /// Returns the answer to `body` with an error and without outputs.
    pub(crate) fn refusal(self, body: &[u8], err_no: i32, err_msg: &str) -> Bytes {
        // A body that cannot be decoded has no id to return.
        let echo = match self {
            Encoding::Proto => Echo::decode(body).ok(),
            Encoding::Json => serde_json::from_slice::<Echo>(body).ok(),
        };
        let log_id = echo.map_or(0, |echo| echo.log_id);
        let response = Response { outputs: Vec::new(), log_id, err_no, err_msg: err_msg.into() };
        self.write(&response).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
