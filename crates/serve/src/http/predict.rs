//! What all predictions over HTTP share: who is asked, until when, and what the answer's head says.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use bytes::Bytes;

use super::body::read_body;
use super::compress::{gzip, wants_gzip};
use super::reply::{Error, json_response};
use crate::ask::{self, Ask};
use crate::deployment::{Deadline, Done, Timing};
use crate::face::{About, Face, Reply};
use crate::refusal::Refusal;
use crate::registry::Choice;
use crate::server::App;

/// Requests with the same key get the same variant.
pub(crate) const KEY: HeaderName = HeaderName::from_static("elasticrec-key");
/// The variant that is asked for; in an answer, the one that gave it.
pub(crate) const VARIANT: HeaderName = HeaderName::from_static("elasticrec-variant");
/// The version that gave an answer.
pub(crate) const VERSION: HeaderName = HeaderName::from_static("elasticrec-version");
/// Milliseconds that a request may take.
pub(crate) const TIMEOUT: HeaderName = HeaderName::from_static("elasticrec-timeout-ms");
/// Asks for `server-timing`.
pub(crate) const TIMING: HeaderName = HeaderName::from_static("elasticrec-timing");
pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// How much of a body is JSON; bytes of tensors are behind it.
pub(super) const JSON_BYTES: HeaderName = HeaderName::from_static("inference-header-content-length");

/// The longest time that a request may ask for, an hour.
pub(crate) const MAX_TIMEOUT_MS: u64 = 3_600_000;

/// Who should score a request, and how it is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    /// The first one if none is named.
    pub(crate) model: Option<&'a str>,
    pub(crate) version: Option<u64>,
    pub(crate) face: Face,
}

impl<'a> Target<'a> {
    pub(crate) fn choice(self, called: Called<'a>) -> Choice<'a> {
        Choice { model: self.model, variant: called.variant, key: called.key, version: self.version }
    }
}

/// What the head of a request says of who should answer it, and until when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Called<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) variant: Option<&'a str>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) wants_timing: bool,
}

impl Called<'_> {
    pub(crate) fn of(headers: &HeaderMap) -> Result<Called<'_>, Refusal> {
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
        Ok(Called {
            key: headers.get(KEY).map(HeaderValue::as_bytes),
            variant: variant.map_err(|_| Refusal::Bad(format!("{VARIANT}: expected a name in ASCII")))?,
            timeout,
            wants_timing: headers.contains_key(TIMING),
        })
    }

    /// When its time is over.
    pub(crate) fn deadline(&self, app: &App) -> Option<Deadline> {
        self.timeout.or(app.options.timeout).map(Deadline::within)
    }
}

/// Reads the body of a request and has it scored.
pub(super) async fn run(app: &App, target: Target<'_>, headers: &HeaderMap, body: Body) -> Result<Response, Error> {
    run_known(app, target, headers, body).await.map_err(|refused| refused.error)
}

/// A request that is refused, and its body if that has come: some faces tell it in words of the request.
pub(super) struct Refused {
    pub(super) error: Error,
    pub(super) body: Bytes,
}

/// As [`run`], for those faces.
pub(super) async fn run_known(
    app: &App,
    target: Target<'_>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    let unread = |error| Refused { error, body: Bytes::new() };
    let started = Instant::now();
    let called = Called::of(headers).map_err(|refusal| unread(refusal.into()))?;
    let deadline = called.deadline(app);
    let body = read_body(headers, body, app).await.map_err(unread)?;
    let ask = Ask { choice: target.choice(called), face: target.face, body: body.clone(), deadline };
    let answer = ask::predict(&app.registry, ask).await;
    app.metrics.request.observe(started.elapsed());
    let (about, Done { reply, timing }) = match answer {
        Ok(answer) => answer,
        Err(refusal) => return Err(Refused { error: refusal.into(), body }),
    };
    // its memory is free for the answer
    drop(body);
    let mut response = respond(app, headers, reply).await.map_err(|refusal| unread(refusal.into()))?;
    tell(response.headers_mut(), &about, called.wants_timing.then_some(timing));
    Ok(response)
}

async fn respond(app: &App, asked: &HeaderMap, reply: Reply) -> Result<Response, Refusal> {
    let Reply { body, json_bytes } = reply;
    let gzipped = if wants_gzip(asked, body.len()) { gzip(body.clone()).await } else { None };
    let is_gzipped = gzipped.is_some();
    let body = app.memory.share().hold(gzipped.unwrap_or(body))?;
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

/// Says in the head of an answer who gave it and, if asked for, where its time went.
pub(crate) fn tell(headers: &mut HeaderMap, about: &About, timing: Option<Timing>) {
    headers.insert(VERSION, about.version.into());
    if let Some(variant) = HeaderValue::from_str(&about.variant).ok().filter(|value| !value.is_empty()) {
        headers.insert(VARIANT, variant);
    }
    if let Some(timing) = timing.and_then(|timing| HeaderValue::from_str(&timing.header()).ok()) {
        headers.insert(SERVER_TIMING, timing);
    }
}
