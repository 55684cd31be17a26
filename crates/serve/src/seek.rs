//! Rows by sign, as Cube's `DictService` has them: of the version that answers for the first model.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use elasticrec_sample::parser::parse_u64;
use prost::Message;
use serde::Deserialize;

use crate::deployment::Deployment;
use crate::refusal::Refusal;
use crate::registry::Choice;
use crate::rows::FoundRows;
use crate::server::App;

/// Signs a request.
pub(crate) const MAX_KEYS: usize = 1 << 16;
/// What Cube says of a key that it does not have: -1 in a u32.
pub(crate) const NO_KEY: u32 = u32::MAX;
/// A body of more bytes has more signs: decimal text of up to 20 digits with what stands around them.
const MAX_BODY_BYTES: usize = 32 * MAX_KEYS;
/// A body of up to so many bytes is answered by the socket's thread itself: signs of protobuf may have one byte each.
const SMALL_BYTES: usize = 512;

/// Cube's `DictRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SeekRequest {
    #[prost(uint64, repeated, tag = "1")]
    pub(crate) keys: Vec<u64>,
    #[prost(bool, tag = "2")]
    pub(crate) version_required: bool,
}

/// Cube's `DictValue`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SeekValue {
    #[prost(uint32, required, tag = "1")]
    pub(crate) status: u32,
    #[prost(bytes = "bytes", required, tag = "2")]
    pub(crate) value: Bytes,
}

/// Cube's `DictResponse`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SeekResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) values: Vec<SeekValue>,
    #[prost(string, optional, tag = "2")]
    pub(crate) version: Option<String>,
}

impl SeekRequest {
    pub(crate) fn of_proto(bytes: &[u8]) -> Result<SeekRequest, Refusal> {
        check_len(bytes)?;
        SeekRequest::decode(bytes).map_err(|error| Refusal::Bad(format!("body: {error}")))
    }

    pub(crate) fn of_json(bytes: &[u8]) -> Result<SeekRequest, Refusal> {
        /// Numbers beyond 2^53 come as text from some clients.
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "keys: expected u64s, as numbers or strings")]
        enum Key<'a> {
            Number(u64),
            Text(#[serde(borrow)] Cow<'a, str>),
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, expecting = "an object such as {\"keys\": [1, 2]}")]
        struct Body<'a> {
            #[serde(borrow, default)]
            keys: Vec<Key<'a>>,
            #[serde(default)]
            version_required: bool,
        }
        check_len(bytes)?;
        let body: Body<'_> = serde_json::from_slice(bytes).map_err(|error| Refusal::Bad(format!("body: {error}")))?;
        let number = |(at, key)| match key {
            Key::Number(number) => Ok(number),
            Key::Text(text) => {
                let shown: String = text.chars().take(40).flat_map(char::escape_debug).collect();
                let wrong = || Refusal::Bad(format!("body: keys[{at}]: expected a u64, got `{shown}`"));
                parse_u64(text.as_bytes()).ok_or_else(wrong)
            }
        };
        let keys = body.keys.into_iter().enumerate().map(number).collect::<Result<_, _>>()?;
        Ok(SeekRequest { keys, version_required: body.version_required })
    }
}

/// Before there is room for all the signs that a body may have.
fn check_len(bytes: &[u8]) -> Result<(), Refusal> {
    match bytes.len() > MAX_BODY_BYTES {
        true => Err(too_many(format_args!("a body of {} bytes", bytes.len()))),
        false => Ok(()),
    }
}

fn too_many(got: impl fmt::Display) -> Refusal {
    Refusal::Bad(format!("keys: expected at most {MAX_KEYS} at a time, got {got}"))
}

/// Rows of one version, little-endian f32.
pub(crate) struct Sought {
    pub(crate) version: u64,
    row_bytes: usize,
    bytes: Bytes,
    present: Vec<bool>,
}

impl Sought {
    fn new(version: u64, found: FoundRows) -> Sought {
        let mut bytes = Vec::with_capacity(found.values.len() * size_of::<f32>());
        bytes.extend(found.values.iter().flat_map(|value| value.to_le_bytes()));
        let row_bytes = found.width * size_of::<f32>();
        Sought { version, row_bytes, bytes: bytes.into(), present: found.present }
    }

    /// Each key's row, if it has one.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Option<Bytes>> {
        let row = |at| self.bytes.slice(at * self.row_bytes..(at + 1) * self.row_bytes);
        self.present.iter().enumerate().map(move |(at, is_there)| is_there.then(|| row(at)))
    }

    /// As protobuf.
    pub(crate) fn encode(&self, version_required: bool) -> Bytes {
        let value = |row: Option<Bytes>| match row {
            Some(value) => SeekValue { status: 0, value },
            None => SeekValue { status: NO_KEY, value: Bytes::new() },
        };
        let version = version_required.then(|| self.version.to_string());
        SeekResponse { values: self.rows().map(value).collect(), version }.encode_to_vec().into()
    }
}

/// Whose rows are asked for: of several variants those of the first.
fn deployment(app: &App) -> Result<Arc<Deployment>, Refusal> {
    let entry = app.registry.model(None)?;
    let variant = entry.variants.first().map(|variant| variant.name.as_str());
    app.registry.choose(Choice { variant, ..Choice::default() })
}

/// Bytes of a row.
pub(crate) fn row_bytes(app: &App) -> usize {
    deployment(app).map_or(0, |deployment| deployment.row_bytes())
}

/// Answers a request: how it is read, and how its answer is written, each protocol says itself.
pub(crate) async fn seek<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    read: fn(&[u8]) -> Result<SeekRequest, Refusal>,
    write: fn(&Sought, bool) -> T,
) -> Result<T, Refusal> {
    let is_quick = body.len() <= SMALL_BYTES && deployment(app)?.has_rows_here();
    let app = app.clone();
    let work = move || {
        let SeekRequest { keys, version_required } = read(&body)?;
        Ok(write(&find(&app, &keys)?, version_required))
    };
    if is_quick {
        return work();
    }
    let lost = |_| Refusal::Internal("the lookup failed, this is a bug".into());
    tokio::task::spawn_blocking(work).await.map_err(lost)?
}

/// The rows of `keys`.
fn find(app: &App, keys: &[u64]) -> Result<Sought, Refusal> {
    if keys.len() > MAX_KEYS {
        return Err(too_many(keys.len()));
    }
    let attempt = || {
        let deployment = deployment(app)?;
        Ok(Sought::new(deployment.about.version, deployment.rows_of(keys)?))
    };
    match attempt() {
        // once: by now there is another version
        Err(Refusal::Gone(_)) => attempt(),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_as_numbers_or_text_packed_or_not() {
        let json = SeekRequest::of_json(br#"{"keys":[5,"18446744073709551615"],"version_required":true}"#).unwrap();
        assert_eq!(json, SeekRequest { keys: vec![5, u64::MAX], version_required: true });
        assert_eq!(SeekRequest::of_proto(&json.encode_to_vec()).unwrap(), json);
        // proto2 writes each key with a tag of its own
        assert_eq!(SeekRequest::of_proto(b"\x08\x05\x08\x06").unwrap().keys, [5, 6]);
        assert_eq!(SeekRequest::of_json(b"{}").unwrap(), SeekRequest::default());
    }

    #[test]
    fn what_is_no_list_of_keys_is_told() {
        let told = |body: &str| SeekRequest::of_json(body.as_bytes()).unwrap_err().to_string();
        assert!(told("[1]").starts_with("body: invalid type: integer `1`") || told("[1]").starts_with("body: "));
        assert!(told(r#"{"key":[1]}"#).starts_with("body: unknown field `key`, expected `keys` or `version_required`"));
        assert!(told(r#"{"keys":[-1]}"#).starts_with("body: keys: expected u64s, as numbers or strings"));
        assert_eq!(told(r#"{"keys":[1,"x"]}"#), "body: keys[1]: expected a u64, got `x`");
        let long = vec![0u8; MAX_BODY_BYTES + 1];
        let many = SeekRequest::of_proto(&long).unwrap_err().to_string();
        assert_eq!(many, "keys: expected at most 65536 at a time, got a body of 2097153 bytes");
    }

    #[test]
    fn rows_are_little_endian_and_absent_ones_say_so() {
        let found = FoundRows { width: 2, values: vec![1.0, -2.5, 0.0, 0.0], present: vec![true, false] };
        let sought = Sought::new(3, found);
        let response = SeekResponse::decode(sought.encode(true)).unwrap();
        assert_eq!(response.version.as_deref(), Some("3"));
        let row = [1f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat();
        let [there, absent] = &response.values[..] else { panic!("two values") };
        assert_eq!((there.status, &there.value[..]), (0, &row[..]));
        assert_eq!((absent.status, absent.value.len()), (NO_KEY, 0));
        assert_eq!(SeekResponse::decode(sought.encode(false)).unwrap().version, None);
    }
}
