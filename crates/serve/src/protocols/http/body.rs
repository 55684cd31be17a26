//! The body of a request: complete, within its size limit and its time limit.

use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;

use super::encoding::content_encoding;
use super::reply::Error;
use crate::memory::{ReadError, collect};
use crate::server::App;

pub(super) async fn read_body(headers: &HeaderMap, body: Body, app: &App) -> Result<Bytes, Error> {
    let options = &app.options;
    let max_bytes = options.max_body_bytes;
    let compression = content_encoding(headers)?;
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let collected = collect(body, length, max_bytes, app.memory.reservation());
    let collected = tokio::time::timeout(options.body_timeout, collected).await.map_err(|_| {
        let seconds = options.body_timeout.as_secs_f64();
        Error::new(StatusCode::REQUEST_TIMEOUT, format!("body: did not arrive within {seconds} s"))
    })?;
    let body = collected.map_err(|error| match error {
        ReadError::Broken(what) => Error::new(StatusCode::BAD_REQUEST, format!("body: {what}")),
        ReadError::TooLong => {
            let message = format!("body: expected at most {max_bytes} bytes, got more");
            Error::new(StatusCode::PAYLOAD_TOO_LARGE, message).closing()
        }
        ReadError::Refused(refusal) => Error::from(refusal).closing(),
    })?;
    let Some(compression) = compression else { return Ok(body) };
    compression.inflate(body, max_bytes, app.memory.reservation()).await.map_err(|error| match error {
        ReadError::Broken(what) => Error::new(StatusCode::BAD_REQUEST, format!("body: cannot be inflated: {what}")),
        ReadError::TooLong => {
            let message = format!("body: expected at most {max_bytes} bytes after inflating, got more");
            Error::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        }
        ReadError::Refused(refusal) => refusal.into(),
    })
}
