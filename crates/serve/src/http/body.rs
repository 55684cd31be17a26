//! The body of a request: whole, within its limit, in time.

use axum::body::Body;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;

use super::compress::Encoding;
use super::reply::Error;
use crate::memory::{Unread, collect};
use crate::server::App;

pub(super) async fn read_body(headers: &HeaderMap, body: Body, app: &App) -> Result<Bytes, Error> {
    let options = &app.options;
    let encoding = Encoding::of(headers)?;
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let collected = collect(body, length, options.max_body_bytes, app.memory.share());
    let collected = tokio::time::timeout(options.body_timeout, collected).await.map_err(|_| {
        let seconds = options.body_timeout.as_secs_f64();
        Error::new(StatusCode::REQUEST_TIMEOUT, format!("body: did not arrive in {seconds} s"))
    })?;
    let body = collected.map_err(|unread| match unread {
        Unread::Broken(what) => Error::new(StatusCode::BAD_REQUEST, format!("body: {what}")),
        Unread::TooLong => {
            let message = format!("body: expected at most {} bytes, got more", options.max_body_bytes);
            Error::new(StatusCode::PAYLOAD_TOO_LARGE, message).closing()
        }
        Unread::Refused(refusal) => Error::from(refusal).closing(),
    })?;
    match encoding {
        Some(encoding) => encoding.inflate(body, options.max_body_bytes, app.memory.share()).await,
        None => Ok(body),
    }
}
