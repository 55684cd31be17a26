//! Content encodings: the compression of a request's body and of its answer.

use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use axum::http::{HeaderMap, HeaderValue, StatusCode};

use super::reply::{Error, excerpt};
use crate::protocols::compression::Compression;

/// Answers up to this size are not compressed: they fit into one packet.
const MAX_PLAIN_BYTES: usize = 512;

/// Returns the compression of the body, or None for a plain body.
pub(super) fn content_encoding(headers: &HeaderMap) -> Result<Option<Compression>, Error> {
    let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(None) };
    let known: [(&[u8], _); 3] =
        [(b"identity", None), (b"gzip", Some(Compression::Gzip)), (b"deflate", Some(Compression::Zlib))];
    match known.into_iter().find(|(name, _)| value.as_bytes().eq_ignore_ascii_case(name)) {
        Some((_, encoding)) => Ok(encoding),
        None => {
            let message = format!("content encoding: expected `gzip`, `deflate` or none, got `{}`", excerpt(value));
            Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
        }
    }
}

/// Returns whether an answer of this size should be compressed with gzip.
pub(super) fn wants_gzip(headers: &HeaderMap, num_bytes: usize) -> bool {
    num_bytes > MAX_PLAIN_BYTES && headers.get_all(ACCEPT_ENCODING).iter().any(accepts_gzip)
}

fn accepts_gzip(value: &HeaderValue) -> bool {
    let Ok(value) = value.to_str() else { return false };
    value.split(',').any(|choice| {
        let mut parts = choice.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        // `q=0` excludes an encoding.
        let is_excluded = parts.any(|part| part.strip_prefix("q=").is_some_and(|weight| weight.parse() == Ok(0.0)));
        name.eq_ignore_ascii_case("gzip") && !is_excluded
    })
}
