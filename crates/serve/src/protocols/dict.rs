//! Rows by sign, as in Cube's `DictService`: from the current version of the first model.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use elasticrec_sample::parser::{excerpt, parse_u64};
use prost::Message;
use serde::Deserialize;

use crate::model::rows::FoundRows;
use crate::queue::deployment::Deployment;
use crate::refusal::Refusal;
use crate::server::App;
use crate::server::registry::Choice;

/// Maximum number of signs in a request.
pub(crate) const MAX_KEYS: usize = 1 << 16;
/// Cube's status for a key without a row: -1 as a u32.
pub(crate) const NO_KEY: u32 = u32::MAX;
/// A longer body has more signs: each is decimal text of up to 20 digits with its punctuation.
const MAX_BODY_BYTES: usize = 32 * MAX_KEYS;
/// Bodies up to this size are answered on the socket thread: with protobuf a sign may have one byte.
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
        /// A sign; some clients send numbers beyond 2^53 as text.
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
                let invalid =
                    || Refusal::Bad(format!("body: keys[{at}]: expected a u64, got `{}`", excerpt(text.as_bytes())));
                parse_u64(text.as_bytes()).ok_or_else(invalid)
            }
        };
        let keys = body.keys.into_iter().enumerate().map(number).collect::<Result<_, _>>()?;
        Ok(SeekRequest { keys, version_required: body.version_required })
    }
}

/// Checks the length of a body before its signs are allocated.
fn check_len(bytes: &[u8]) -> Result<(), Refusal> {
    match bytes.len() > MAX_BODY_BYTES {
        true => Err(too_many(format_args!("a body of {} bytes", bytes.len()))),
        false => Ok(()),
    }
}

fn too_many(got: impl fmt::Display) -> Refusal {
    Refusal::Bad(format!("keys: expected at most {MAX_KEYS}, got {got}"))
}

/// Rows of one version as little-endian f32.
pub(crate) struct DictRows {
    pub(crate) version: u64,
    row_bytes: usize,
    bytes: Bytes,
    present: Vec<bool>,
}

impl DictRows {
    fn new(version: u64, found: FoundRows) -> DictRows {
        let mut bytes = Vec::with_capacity(found.values.len() * size_of::<f32>());
        bytes.extend(found.values.iter().flat_map(|value| value.to_le_bytes()));
        let row_bytes = found.width * size_of::<f32>();
        DictRows { version, row_bytes, bytes: bytes.into(), present: found.present }
    }

    /// Returns the row of each key, or None.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Option<Bytes>> {
        let row = |at| self.bytes.slice(at * self.row_bytes..(at + 1) * self.row_bytes);
        self.present.iter().enumerate().map(move |(at, is_present)| is_present.then(|| row(at)))
    }

    /// Encodes the rows as a `DictResponse`.
    pub(crate) fn encode(&self, version_required: bool) -> Bytes {
        let value = |row: Option<Bytes>| match row {
            Some(value) => SeekValue { status: 0, value },
            None => SeekValue { status: NO_KEY, value: Bytes::new() },
        };
        let version = version_required.then(|| self.version.to_string());
        SeekResponse { values: self.rows().map(value).collect(), version }.encode_to_vec().into()
    }
}

/// Returns the version whose rows are looked up: that of the first variant of the first model.
fn deployment(app: &App) -> Result<Arc<Deployment>, Refusal> {
    let entry = app.registry.model(None)?;
    let variant = entry.variants.first().map(|variant| variant.name.as_str());
    app.registry.choose(Choice { variant, ..Choice::default() })
}

/// Returns the bytes of a row.
pub(crate) fn row_bytes(app: &App) -> usize {
    deployment(app).map_or(0, |deployment| deployment.row_bytes())
}

/// Answers a request; `read` and `write` are the encodings of the protocol.
pub(crate) async fn seek<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    read: fn(&[u8]) -> Result<SeekRequest, Refusal>,
    write: fn(&DictRows, bool) -> T,
) -> Result<T, Refusal> {
    let is_quick = body.len() <= SMALL_BYTES && deployment(app)?.has_local_rows();
    let app = app.clone();
    let work = move || {
        let SeekRequest { keys, version_required } = read(&body)?;
        Ok(write(&find(&app, &keys)?, version_required))
    };
    if is_quick {
        return work();
    }
    let panicked = |_| Refusal::Internal("the lookup failed; this is a bug".into());
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}

/// Looks up the rows of `keys`.
fn find(app: &App, keys: &[u64]) -> Result<DictRows, Refusal> {
    if keys.len() > MAX_KEYS {
        return Err(too_many(keys.len()));
    }
    let attempt = || {
        let deployment = deployment(app)?;
        Ok(DictRows::new(deployment.info.version, deployment.find_rows(keys)?))
    };
    match attempt() {
        // Try once more: the version was replaced meanwhile.
        Err(Refusal::Gone(_)) => attempt(),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_numbers_or_text_packed_or_not() {
        let json = SeekRequest::of_json(br#"{"keys":[5,"18446744073709551615"],"version_required":true}"#).unwrap();
        assert_eq!(json, SeekRequest { keys: vec![5, u64::MAX], version_required: true });
        assert_eq!(SeekRequest::of_proto(&json.encode_to_vec()).unwrap(), json);
        // proto2 writes a tag for each key.
        assert_eq!(SeekRequest::of_proto(b"\x08\x05\x08\x06").unwrap().keys, [5, 6]);
        assert_eq!(SeekRequest::of_json(b"{}").unwrap(), SeekRequest::default());
    }

    #[test]
    fn invalid_lists_of_keys_are_refused() {
        let message = |body: &str| SeekRequest::of_json(body.as_bytes()).unwrap_err().to_string();
        assert!(message("[1]").starts_with("body: "));
        assert!(
            message(r#"{"key":[1]}"#).starts_with("body: unknown field `key`, expected `keys` or `version_required`")
        );
        assert!(message(r#"{"keys":[-1]}"#).starts_with("body: keys: expected u64s, as numbers or strings"));
        assert_eq!(message(r#"{"keys":[1,"x"]}"#), "body: keys[1]: expected a u64, got `x`");
        let long = vec![0u8; MAX_BODY_BYTES + 1];
        let many = SeekRequest::of_proto(&long).unwrap_err().to_string();
        assert_eq!(many, "keys: expected at most 65536, got a body of 2097153 bytes");
    }

    #[test]
    fn rows_are_little_endian_and_missing_ones_have_a_status() {
        let found = FoundRows { width: 2, values: vec![1.0, -2.5, 0.0, 0.0], present: vec![true, false] };
        let rows = DictRows::new(3, found);
        let response = SeekResponse::decode(rows.encode(true)).unwrap();
        assert_eq!(response.version.as_deref(), Some("3"));
        let row = [1f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat();
        let [there, absent] = &response.values[..] else { panic!("two values") };
        assert_eq!((there.status, &there.value[..]), (0, &row[..]));
        assert_eq!((absent.status, absent.value.len()), (NO_KEY, 0));
        assert_eq!(SeekResponse::decode(rows.encode(false)).unwrap().version, None);
    }
}
