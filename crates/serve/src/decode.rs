//! A request's body to a batch: named slots in JSON, or lines of the training format.

use elasticrec_sample::reader::parse_text_into;
use elasticrec_sample::{BatchBuilder, LabelMode, Parser};
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

/// Adds the samples in `body` to a batch, all or none; returns how many that are.
pub fn decode(
    parser: &Parser,
    content: ContentType,
    body: &[u8],
    limits: Limits,
    into: &mut BatchBuilder,
) -> Result<usize, DecodeError> {
    let before = into.num_samples();
    let decoded = match content {
        ContentType::Json => json::decode(parser, body, limits, into),
        ContentType::Text => decode_text(parser, body, limits, into),
    };
    if let Err(error) = decoded {
        into.truncate(before);
        return Err(error);
    }
    Ok(into.num_samples() - before)
}

fn decode_text(parser: &Parser, body: &[u8], limits: Limits, into: &mut BatchBuilder) -> Result<(), DecodeError> {
    let last_is_open = body.last().is_some_and(|&byte| byte != b'\n');
    let num_lines = memchr::memchr_iter(b'\n', body).count() + usize::from(last_is_open);
    if num_lines > limits.max_instances {
        return Err(DecodeError::TooMany { what: "lines", max: limits.max_instances });
    }
    parse_text_into(parser, body, LabelMode::Ignored, into).map_err(DecodeError::Bad)
}

/// Any bytes as a body, for both decoders and both formats: the target of the fuzzer.
#[doc(hidden)]
pub fn fuzz_body(bytes: &[u8]) {
    const MAX_INSTANCES: usize = 5;
    for parser in json::fuzz_parsers() {
        // one after the other into one batch, as requests are joined
        let mut builder = parser.builder(0);
        for content in [ContentType::Json, ContentType::Text, ContentType::Json] {
            let before = builder.num_samples();
            let decoded = decode(&parser, content, bytes, Limits { max_instances: MAX_INSTANCES }, &mut builder);
            assert!(builder.batch().is_consistent());
            assert!(builder.batch().dense.iter().all(|value| value.is_finite()));
            match decoded {
                Ok(num_samples) => {
                    assert!(num_samples <= MAX_INSTANCES);
                    assert_eq!(builder.num_samples(), before + num_samples);
                }
                Err(error) => {
                    assert_eq!(builder.num_samples(), before);
                    let line = error.to_string();
                    assert!(!line.is_empty() && line.len() < 1000 && !line.contains('\n'), "{line}");
                }
            }
        }
    }
}
