//! A request's body to a batch: named slots in JSON, or lines of the training format.

use elasticrec_sample::reader::parse_text;
use elasticrec_sample::{Batch, LabelMode, Parser};
use thiserror::Error;

mod json;

/// What a body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentType {
    /// `application/json`: `{"instances": [{"name": value, …}, …]}`.
    Json,
    /// `text/plain`: lines of the training format.
    Text,
}

/// How much a body may ask for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Instances, or lines, a request.
    pub max_instances: usize,
}

/// Why a body is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Not what was asked for.
    #[error("{0}")]
    Bad(String),
    /// More than the server takes at once.
    #[error("expected at most {max} {what} a request, got more")]
    TooMany {
        /// Instances or lines.
        what: &'static str,
        /// The limit.
        max: usize,
    },
}

/// The samples in `body`.
pub fn decode(parser: &Parser, content: ContentType, body: &[u8], limits: Limits) -> Result<Batch, DecodeError> {
    match content {
        ContentType::Json => json::decode(parser, body, limits),
        ContentType::Text => decode_text(parser, body, limits),
    }
}

fn decode_text(parser: &Parser, body: &[u8], limits: Limits) -> Result<Batch, DecodeError> {
    // before parsing: a batch has room for every line from the start
    let last_is_open = body.last().is_some_and(|&byte| byte != b'\n');
    let num_lines = memchr::memchr_iter(b'\n', body).count() + usize::from(last_is_open);
    if num_lines > limits.max_instances {
        return Err(DecodeError::TooMany { what: "lines", max: limits.max_instances });
    }
    parse_text(parser, body, LabelMode::Ignored).map_err(DecodeError::Bad)
}

/// Any bytes as a body, for both decoders and both formats: the target of the fuzzer.
#[doc(hidden)]
pub fn fuzz_body(bytes: &[u8]) {
    const MAX_INSTANCES: usize = 5;
    for parser in json::fuzz_parsers() {
        for content in [ContentType::Json, ContentType::Text] {
            match decode(&parser, content, bytes, Limits { max_instances: MAX_INSTANCES }) {
                Ok(batch) => {
                    let num_samples = batch.num_samples();
                    assert!(num_samples <= MAX_INSTANCES);
                    assert_eq!(batch.offsets.len(), num_samples * batch.num_slots + 1);
                    assert_eq!(batch.offsets.last().copied(), Some(batch.signs.len() as u32));
                    assert!(batch.offsets.is_sorted());
                    assert_eq!(batch.dense.len(), num_samples * batch.num_dense);
                    assert!(batch.dense.iter().all(|value| value.is_finite()));
                }
                Err(error) => {
                    let line = error.to_string();
                    assert!(!line.is_empty() && line.len() < 1000 && !line.contains('\n'), "{line}");
                }
            }
        }
    }
}
