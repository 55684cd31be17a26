//! What all predictions over HTTP share: who is asked, until when, and what the answer's head says.

use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;

use super::body::read_body;
use super::reply::{Error, json_response};
use crate::ask::{self, Ask};
use crate::deployment::{Deadline, Done, Timing};
use crate::face::{About, Face};
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

/// The longest time that a request may ask for, an hour.
pub(crate) const MAX_TIMEOUT_MS: u64 = 3_600_000;

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
pub(super) async fn run(app: &App, model: Option<&str>, face: Face, request: Request) -> Result<Response, Error> {
    let started = Instant::now();
    let (parts, body) = request.into_parts();
    let called = Called::of(&parts.headers)?;
    let deadline = called.deadline(app);
    let body = read_body(&parts.headers, body, &app.options).await?;
    let choice = Choice { model, variant: called.variant, key: called.key, version: None };
    let answer = ask::predict(&app.registry, Ask { choice, face, body, deadline }).await;
    app.metrics.request.observe(started.elapsed());
    let (about, done) = answer?;
    Ok(respond(&about, done, called.wants_timing))
}

fn respond(about: &About, done: Done, wants_timing: bool) -> Response {
    let Done { reply, timing } = done;
    let mut response = json_response(StatusCode::OK, reply.body);
    tell(response.headers_mut(), about, wants_timing.then_some(timing));
    response
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
