//! The common part of all predictions over HTTP: headers of requests and answers, and the steps from a body to a response.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use bytes::Bytes;

use super::body::read_body;
use super::encoding::wants_gzip;
use super::reply::{Error, json_response};
use crate::codecs::{Codec, Reply, VersionInfo};
use crate::protocols::compression::Compression;
use crate::protocols::predict::{PredictRequest, predict};
use crate::queue::job::{Deadline, Prediction, Timing};
use crate::refusal::Refusal;
use crate::server::App;
use crate::server::registry::Choice;

/// Requests with the same key get the same variant.
const KEY: HeaderName = HeaderName::from_static("elasticrec-key");
/// In a request, the variant to use; in an answer, the variant that was used.
const VARIANT: HeaderName = HeaderName::from_static("elasticrec-variant");
/// The version that scored a request.
const VERSION: HeaderName = HeaderName::from_static("elasticrec-version");
/// The time limit of a request in milliseconds.
const TIMEOUT: HeaderName = HeaderName::from_static("elasticrec-timeout-ms");
/// Requests the header `server-timing` in the answer.
const TIMING: HeaderName = HeaderName::from_static("elasticrec-timing");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Number of bytes of JSON in a body; the binary data of tensors follows them.
pub(super) const JSON_BYTES: HeaderName = HeaderName::from_static("inference-header-content-length");

/// The longest time limit that a request may ask for: an hour.
pub(crate) const MAX_TIMEOUT_MS: u64 = 3_600_000;

/// The model that a request names, and how its body is decoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    /// None for the first model of the server.
    pub(crate) model: Option<&'a str>,
    pub(crate) version: Option<u64>,
    pub(crate) codec: Codec,
}

impl<'a> Target<'a> {
    pub(crate) fn choice(self, options: RequestOptions<'a>) -> Choice<'a> {
        Choice { model: self.model, variant: options.variant, key: options.key, version: self.version }
    }
}

/// The options in the headers of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestOptions<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) variant: Option<&'a str>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) wants_timing: bool,
}

impl RequestOptions<'_> {
    pub(crate) fn of(headers: &HeaderMap) -> Result<RequestOptions<'_>, Refusal> {
        let variant = headers.get(VARIANT).map(HeaderValue::to_str).transpose();
        let timeout = headers.get(TIMEOUT).map(|value| value.to_str().ok()?.parse::<u64>().ok());
        let timeout = match timeout {
            Some(Some(ms)) if (1..=MAX_TIMEOUT_MS).contains(&ms) => Some(Duration::from_millis(ms)),
            Some(_) => {
                let expected = format!("{TIMEOUT}: expected milliseconds from 1 to {MAX_TIMEOUT_MS}");
                return Err(Refusal::Bad(expected));
            }
            None => None,
        };
        Ok(RequestOptions {
            key: headers.get(KEY).map(HeaderValue::as_bytes),
            variant: variant.map_err(|_| Refusal::Bad(format!("{VARIANT}: expected a name in ASCII")))?,
            timeout,
            wants_timing: headers.contains_key(TIMING),
        })
    }

    /// Returns the deadline of the request, or that of the server's configuration.
    pub(crate) fn deadline(&self, app: &App) -> Option<Deadline> {
        self.timeout.or(app.options.timeout).map(Deadline::within)
    }
}

/// Reads the body of a request and scores it.
pub(super) async fn run(app: &App, target: Target<'_>, headers: &HeaderMap, body: Body) -> Result<Response, Error> {
    run_keeping_body(app, target, headers, body).await.map_err(|refused| refused.error)
}

/// A refused request with its body, if that arrived: some protocols repeat fields of the request in the refusal.
pub(super) struct RefusedRequest {
    pub(super) error: Error,
    pub(super) body: Bytes,
}

/// Like [`run`], but a refusal returns the body too.
pub(super) async fn run_keeping_body(
    app: &App,
    target: Target<'_>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, RefusedRequest> {
    let without_body = |error| RefusedRequest { error, body: Bytes::new() };
    let started = Instant::now();
    let options = RequestOptions::of(headers).map_err(|refusal| without_body(refusal.into()))?;
    let deadline = options.deadline(app);
    let body = read_body(headers, body, app).await.map_err(without_body)?;
    let request = PredictRequest { choice: target.choice(options), codec: target.codec, body: body.clone(), deadline };
    let outcome = predict(&app.registry, request).await;
    app.metrics.request.observe(started.elapsed());
    let (info, Prediction { reply, timing }) = match outcome {
        Ok(prediction) => prediction,
        Err(refusal) => return Err(RefusedRequest { error: refusal.into(), body }),
    };
    // Release the body's memory for the answer.
    drop(body);
    let mut response = respond(app, headers, reply).await.map_err(|refusal| without_body(refusal.into()))?;
    set_answer_headers(response.headers_mut(), &info, options.wants_timing.then_some(timing));
    Ok(response)
}

async fn respond(app: &App, request_headers: &HeaderMap, reply: Reply) -> Result<Response, Refusal> {
    let Reply { body, json_bytes } = reply;
    let gzipped = match wants_gzip(request_headers, body.len()) {
        true => Compression::Gzip.compress(body.clone()).await.ok(),
        false => None,
    };
    let is_gzipped = gzipped.is_some();
    let body = app.memory.reservation().cover(gzipped.unwrap_or(body))?;
    let mut response = json_response(StatusCode::OK, body);
    let headers = response.headers_mut();
    if is_gzipped {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    if let Some(json_bytes) = json_bytes {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        headers.insert(JSON_BYTES, json_bytes.into());
    }
    Ok(response)
}

/// Sets the headers that name the version of an answer and, if asked for, the time of each stage.
pub(crate) fn set_answer_headers(headers: &mut HeaderMap, info: &VersionInfo, timing: Option<Timing>) {
    headers.insert(VERSION, info.version.into());
    if let Some(variant) = HeaderValue::from_str(&info.variant).ok().filter(|value| !value.is_empty()) {
        headers.insert(VARIANT, variant);
    }
    if let Some(timing) = timing.and_then(|timing| HeaderValue::from_str(&timing.header()).ok()) {
        headers.insert(SERVER_TIMING, timing);
    }
}
