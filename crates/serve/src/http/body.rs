//! The body of a request: whole, within its limit, in time.

use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, StatusCode};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use super::compress::Encoding;
use super::reply::Error;
use crate::memory::Share;
use crate::server::App;

/// Up to here a copy is cheaper than a new buffer for the next request of a connection.
const SMALL_BYTES: usize = 2048;

pub(super) async fn read_body(headers: &HeaderMap, body: Body, app: &App) -> Result<Bytes, Error> {
    let options = &app.options;
    let encoding = Encoding::of(headers)?;
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let collected = collect(body, length, options.max_body_bytes, app.memory.share());
    let body = tokio::time::timeout(options.body_timeout, collected).await.map_err(|_| {
        let seconds = options.body_timeout.as_secs_f64();
        Error::new(StatusCode::REQUEST_TIMEOUT, format!("body: did not arrive in {seconds} s"))
    })??;
    match encoding {
        Some(encoding) => encoding.inflate(body, options.max_body_bytes, app.memory.share()).await,
        None => Ok(body),
    }
}

async fn collect(mut body: Body, length: Option<u64>, max_bytes: usize, mut share: Share) -> Result<Bytes, Error> {
    let too_long =
        || Error::new(StatusCode::PAYLOAD_TOO_LARGE, format!("body: expected at most {max_bytes} bytes, got more"));
    // said beforehand: not a byte of it is read
    if length.is_some_and(|length| length > max_bytes as u64) {
        return Err(too_long());
    }
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Error::new(StatusCode::BAD_REQUEST, format!("body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        let num_bytes = first.len() + rest.len() + data.len();
        if num_bytes > max_bytes {
            return Err(too_long());
        }
        // what has come, not what was promised: a promise takes no memory
        share.cover(num_bytes)?;
        // most bodies come in one piece, which needs no copy
        match (first.is_empty(), rest.is_empty()) {
            // a small one is copied all the same: the connection keeps the buffer that it has read it into
            (true, true) if data.len() <= SMALL_BYTES => first = Bytes::copy_from_slice(&data),
            (true, true) => first = data,
            (false, _) => {
                rest.reserve(length.map_or(0, |length| length as usize).max(first.len() + data.len()));
                rest.extend_from_slice(&std::mem::take(&mut first));
                rest.extend_from_slice(&data);
            }
            (true, false) => rest.extend_from_slice(&data),
        }
    }
    Ok(share.keep(if rest.is_empty() { first } else { rest.freeze() }))
}
