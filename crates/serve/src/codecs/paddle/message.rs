//! Paddle Serving's messages, as protobuf and as protobuf's JSON. Other fields are ignored.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use elasticrec_sample::parser::excerpt;
use prost::Message;
use prost::encoding::{DecodeContext, decode_key};
use serde::de::{DeserializeOwned, Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

/// Maximum number of tensors and of names in a request: an empty tensor has two bytes in a request and hundreds in memory.
pub(super) const MAX_TENSORS: usize = 1 << 16;

/// A tensor. Its values are in one of the lists or in `tensor_content`.
#[derive(Clone, PartialEq, Message, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Tensor {
    #[prost(int64, repeated, tag = "1")]
    #[serde(alias = "int64Data", deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) int64_data: Vec<i64>,
    #[prost(float, repeated, tag = "2")]
    #[serde(alias = "floatData", deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "3")]
    #[serde(alias = "intData", deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) int_data: Vec<i32>,
    #[prost(double, repeated, tag = "4")]
    #[serde(alias = "float64Data", deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) float64_data: Vec<f64>,
    #[prost(uint32, repeated, tag = "5")]
    #[serde(alias = "uint32Data", deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) uint32_data: Vec<u32>,
    #[prost(string, repeated, tag = "9")]
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub(super) data: Vec<String>,
    #[prost(int32, tag = "10")]
    #[serde(alias = "elemType", deserialize_with = "number")]
    pub(super) elem_type: i32,
    #[prost(int32, repeated, tag = "11")]
    #[serde(deserialize_with = "numbers")]
    pub(super) shape: Vec<i32>,
    #[prost(int32, repeated, tag = "12")]
    #[serde(deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub(super) lod: Vec<i32>,
    #[prost(string, tag = "13")]
    #[serde(deserialize_with = "nullable")]
    pub(super) name: String,
    #[prost(string, tag = "14")]
    #[serde(alias = "aliasName", deserialize_with = "nullable")]
    pub(super) alias_name: String,
    #[prost(bytes = "bytes", tag = "15")]
    #[serde(alias = "tensorContent", deserialize_with = "base64", skip_serializing)]
    pub(super) tensor_content: Bytes,
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(default)]
pub(super) struct Request {
    #[prost(message, repeated, tag = "1")]
    #[serde(deserialize_with = "limited_list")]
    pub(super) tensor: Vec<Tensor>,
    #[prost(string, repeated, tag = "2")]
    #[serde(alias = "fetchVarNames", deserialize_with = "limited_list")]
    pub(super) fetch_var_names: Vec<String>,
    #[prost(uint64, tag = "4")]
    #[serde(alias = "logId", deserialize_with = "number")]
    pub(super) log_id: u64,
}

/// The fields of a request that a refusal returns.
#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(default)]
pub(super) struct Echo {
    #[prost(uint64, tag = "4")]
    #[serde(alias = "logId", deserialize_with = "number")]
    pub(super) log_id: u64,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub(super) struct Response {
    #[prost(message, repeated, tag = "1")]
    pub(super) outputs: Vec<ModelOutput>,
    #[prost(uint64, tag = "4")]
    pub(super) log_id: u64,
    #[prost(int32, tag = "5")]
    pub(super) err_no: i32,
    #[prost(string, tag = "6")]
    pub(super) err_msg: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub(super) struct ModelOutput {
    #[prost(message, repeated, tag = "1")]
    pub(super) tensor: Vec<Tensor>,
    #[prost(string, tag = "2")]
    pub(super) engine_name: String,
}

impl Request {
    /// Decodes protobuf.
    pub(super) fn of_proto(mut bytes: &[u8]) -> Result<Request, String> {
        let mut request = Request::default();
        while !bytes.is_empty() {
            let (tag, wire_type) = decode_key(&mut bytes).map_err(|error| error.to_string())?;
            // Checked before the entry is allocated.
            if request.tensor.len().max(request.fetch_var_names.len()) == MAX_TENSORS && tag <= 2 {
                return Err(too_many());
            }
            let merged = request.merge_field(tag, wire_type, &mut bytes, DecodeContext::default());
            merged.map_err(|error| error.to_string())?;
        }
        Ok(request)
    }

    /// Decodes JSON.
    pub(super) fn of_json(bytes: &[u8]) -> Result<Request, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

fn too_many() -> String {
    format!("expected at most {MAX_TENSORS} tensors and names, got more")
}

/// A number in JSON. Protobuf's JSON, and clients whose numbers are doubles, write 64-bit integers as text.
trait Number: Sized {
    const EXPECTED: &'static str;

    fn of_i128(number: i128) -> Option<Self>;

    fn of_f64(number: f64) -> Option<Self> {
        // Integers may be written 1.0 or 1e3; beyond 2^53 a double is ambiguous.
        (number.fract() == 0.0 && number.abs() < 9e15).then(|| Self::of_i128(number as i128)).flatten()
    }

    fn of_text(text: &str) -> Option<Self> {
        Self::of_i128(text.parse().ok()?)
    }
}

impl Number for i64 {
    const EXPECTED: &'static str = "an integer of 64 bits";

    /// Signs beyond i64 keep the bits of their u64.
    fn of_i128(number: i128) -> Option<i64> {
        i64::try_from(number).ok().or_else(|| u64::try_from(number).ok().map(|number| number as i64))
    }
}

impl Number for u64 {
    const EXPECTED: &'static str = "a u64";

    fn of_i128(number: i128) -> Option<u64> {
        u64::try_from(number).ok()
    }
}

impl Number for i32 {
    const EXPECTED: &'static str = "an i32";

    fn of_i128(number: i128) -> Option<i32> {
        i32::try_from(number).ok()
    }
}

impl Number for u32 {
    const EXPECTED: &'static str = "a u32";

    fn of_i128(number: i128) -> Option<u32> {
        u32::try_from(number).ok()
    }
}

impl Number for f64 {
    const EXPECTED: &'static str = "a number";

    fn of_i128(number: i128) -> Option<f64> {
        Some(number as f64)
    }

    fn of_f64(number: f64) -> Option<f64> {
        Some(number)
    }

    fn of_text(text: &str) -> Option<f64> {
        text.parse().ok()
    }
}

impl Number for f32 {
    const EXPECTED: &'static str = "a number";

    fn of_i128(number: i128) -> Option<f32> {
        Some(number as f32)
    }

    fn of_f64(number: f64) -> Option<f32> {
        Some(number as f32)
    }

    fn of_text(text: &str) -> Option<f32> {
        text.parse().ok()
    }
}

/// A number, written as a number or as text.
struct AnyNumber<T>(T);

impl<'de, T: Number> Deserialize<'de> for AnyNumber<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor(PhantomData)).map(AnyNumber)
    }
}

struct NumberVisitor<T>(PhantomData<T>);

impl<T: Number> NumberVisitor<T> {
    fn found<E: serde::de::Error>(self, number: Option<T>, got: impl fmt::Display) -> Result<T, E> {
        number.ok_or_else(|| E::custom(format_args!("expected {}, got {got}", T::EXPECTED)))
    }
}

impl<T: Number> Visitor<'_> for NumberVisitor<T> {
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(T::EXPECTED)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<T, E> {
        self.found(T::of_i128(number.into()), number)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        self.found(T::of_i128(number.into()), number)
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<T, E> {
        self.found(T::of_f64(number), number)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        self.found(T::of_text(text), format_args!("`{}`", excerpt(text)))
    }
}

fn number<'de, T: Number + Default, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<AnyNumber<T>>::deserialize(deserializer)?.map_or_else(T::default, |AnyNumber(number)| number))
}

/// Deserializes a list of numbers; null is an empty list.
fn numbers<'de, T: Number, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Numbers<T>(PhantomData<T>);

    impl<'de, T: Number> Visitor<'de> for Numbers<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of numbers")
        }

        fn visit_unit<E: serde::de::Error>(self) -> Result<Vec<T>, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut numbers = Vec::new();
            while let Some(AnyNumber(number)) = list.next_element()? {
                numbers.push(number);
            }
            Ok(numbers)
        }
    }

    deserializer.deserialize_any(Numbers(PhantomData))
}

/// Deserializes a list of at most [`MAX_TENSORS`] items; null is an empty list.
fn limited_list<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct LimitedList<T>(PhantomData<T>);

    impl<'de, T: DeserializeOwned> Visitor<'de> for LimitedList<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list")
        }

        fn visit_unit<E: serde::de::Error>(self) -> Result<Vec<T>, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = list.next_element()? {
                if items.len() == MAX_TENSORS {
                    return Err(A::Error::custom(too_many()));
                }
                items.push(item);
            }
            Ok(items)
        }
    }

    deserializer.deserialize_any(LimitedList(PhantomData))
}

fn nullable<'de, T: DeserializeOwned + Default, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    let text = Option::<Cow<'de, str>>::deserialize(deserializer)?.unwrap_or_default();
    STANDARD.decode(text.as_bytes()).map(Bytes::from).map_err(|error| D::Error::custom(format_args!("base64: {error}")))
}
