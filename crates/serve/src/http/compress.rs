//! Bodies that are smaller on the wire: requests are inflated within their limit, answers deflated if asked for.

use std::io::Write;

use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use bytes::Bytes;
use flate2::Compression;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use flate2::write::GzEncoder;

use super::reply::{Error, shown};
use crate::memory::{Share, Unread, read_within};

/// Shorter answers are sent as they are: they fit into a packet, and the time is better spent otherwise.
const MIN_BYTES: usize = 512;

/// How the body of a request is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    /// What the head says of it, none for a body as it is.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Encoding>, Error> {
        let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(None) };
        let known: [(&[u8], _); 3] =
            [(b"identity", None), (b"gzip", Some(Encoding::Gzip)), (b"deflate", Some(Encoding::Deflate))];
        match known.into_iter().find(|(name, _)| value.as_bytes().eq_ignore_ascii_case(name)) {
            Some((_, encoding)) => Ok(encoding),
            None => {
                let message = format!("content encoding: expected `gzip`, `deflate` or none, got `{}`", shown(value));
                Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
            }
        }
    }

    /// The body as it was; more than `max_bytes` of it are not even made.
    pub(super) async fn inflate(self, body: Bytes, max_bytes: usize, share: Share) -> Result<Bytes, Error> {
        // a small body may have a lot in it, which is not for a thread of the sockets
        let inflated = tokio::task::spawn_blocking(move || match self {
            Encoding::Gzip => read_within(MultiGzDecoder::new(&body[..]), max_bytes, share),
            Encoding::Deflate => read_within(ZlibDecoder::new(&body[..]), max_bytes, share),
        });
        let inflated =
            inflated.await.map_err(|error| Error::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
        inflated.map_err(|unread| match unread {
            Unread::Broken(error) => Error::new(StatusCode::BAD_REQUEST, format!("body: cannot be inflated: {error}")),
            Unread::TooLong => {
                let message = format!("body: expected at most {max_bytes} bytes once it is inflated, got more");
                Error::new(StatusCode::PAYLOAD_TOO_LARGE, message)
            }
            Unread::Refused(refusal) => refusal.into(),
        })
    }
}

/// Whether an answer of so many bytes should go as gzip.
pub(super) fn wants_gzip(headers: &HeaderMap, num_bytes: usize) -> bool {
    num_bytes > MIN_BYTES && headers.get_all(ACCEPT_ENCODING).iter().any(accepts_gzip)
}

fn accepts_gzip(value: &HeaderValue) -> bool {
    let Ok(value) = value.to_str() else { return false };
    value.split(',').any(|choice| {
        let mut parts = choice.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        // a weight of nought is a no
        let is_refused = parts.any(|part| part.strip_prefix("q=").is_some_and(|weight| weight.parse() == Ok(0.0)));
        name.eq_ignore_ascii_case("gzip") && !is_refused
    })
}

/// A body as gzip; none where that fails.
pub(crate) async fn gzip(body: Bytes) -> Option<Bytes> {
    let gzipped = tokio::task::spawn_blocking(move || {
        let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 2), Compression::fast());
        encoder.write_all(&body)?;
        encoder.finish()
    });
    gzipped.await.ok()?.ok().map(Bytes::from)
}
