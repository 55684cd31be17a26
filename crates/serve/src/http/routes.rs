//! Who answers what, and what every request passes first: the token, the counters.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use subtle::ConstantTimeEq;

use super::App;
use super::reply::{Error, json_response};
use crate::decode::ContentType;
use crate::deployment::Deployment;
use crate::metrics;

const HEALTH: &str = "/health";
const READY: &str = "/ready";
const METRICS: &str = "/metrics";

pub(super) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(HEALTH, get(|| async { json_response(StatusCode::OK, r#"{"status":"up"}"#) }))
        .route(READY, get(ready))
        .route(METRICS, get(scrape))
        .route("/v1/models", get(models))
        .route("/v1/models/{target}", get(metadata).post(predict))
        .fallback(|uri: Uri| async move { Error::new(StatusCode::NOT_FOUND, format!("no such path: {}", uri.path())) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            // the models' path takes GET, or with an action POST; all others take GET
            Error::method_not_allowed(method.as_str(), if uri.path().contains(':') { "POST" } else { "GET" })
        })
        .layer(from_fn_with_state(app.clone(), pass))
        .with_state(app)
}

/// Checks the token and counts the answer.
async fn pass(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path == HEALTH || path == READY {
        return next.run(request).await;
    }
    let counted = path != METRICS;
    let response = match &app.options.token {
        Some(token) if !bears(request.headers(), token.0.as_bytes()) => Error::unauthorized().into_response(),
        _ => next.run(request).await,
    };
    if counted {
        app.metrics.count_answer(response.status().as_u16());
    }
    response
}

/// Whether the request carries the token; how long that takes does not depend on how much of it is right.
fn bears(headers: &HeaderMap, token: &[u8]) -> bool {
    let Some(value) = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes) else {
        return false;
    };
    let Some((scheme, given)) = value.split_at_checked(b"Bearer ".len()) else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(given.ct_eq(token))
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.current() {
        Some(_) => json_response(StatusCode::OK, r#"{"status":"ready"}"#),
        None => not_ready().into_response(),
    }
}

fn not_ready() -> Error {
    Error::new(StatusCode::SERVICE_UNAVAILABLE, "no model is ready yet")
}

async fn scrape(State(app): State<Arc<App>>) -> Response {
    let num_queued = app.current().map_or(0, |deployment| deployment.pool.num_queued());
    app.metrics.queued.set(num_queued as i64);
    match app.metrics.encode() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => Error::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let current = app.current();
    let names = current.iter().map(|deployment| &deployment.info);
    let models: Vec<_> = names.map(|info| serde_json::json!({"name": info.name, "version": info.version})).collect();
    json_response(StatusCode::OK, serde_json::json!({ "models": models }).to_string())
}

async fn metadata(State(app): State<Arc<App>>, Path(target): Path<String>) -> Result<Response, Error> {
    if target.contains(':') {
        return Err(Error::method_not_allowed("GET", "POST"));
    }
    let deployment = find(&app, &target)?;
    Ok(json_response(StatusCode::OK, deployment.info.metadata.clone()))
}

async fn predict(State(app): State<Arc<App>>, Path(target): Path<String>, request: Request) -> Result<Response, Error> {
    let started = Instant::now();
    let Some((name, action)) = target.rsplit_once(':') else {
        return Err(Error::method_not_allowed("POST", "GET"));
    };
    if action != "predict" {
        return Err(Error::new(StatusCode::NOT_FOUND, format!("no action `{action}`, there is `predict`")));
    }
    let deployment = find(&app, name)?;
    let answer = run(&app, &deployment, request).await;
    app.metrics.request.observe(started.elapsed());
    Ok(json_response(StatusCode::OK, answer?))
}

/// The version that serves the model called `name`.
fn find(app: &App, name: &str) -> Result<Arc<Deployment>, Error> {
    let deployment = app.current().ok_or_else(not_ready)?;
    if deployment.info.name == name {
        return Ok(deployment);
    }
    Err(Error::new(StatusCode::NOT_FOUND, format!("no model `{name}`, there is `{}`", deployment.info.name)))
}

async fn run(app: &App, deployment: &Deployment, request: Request) -> Result<Vec<u8>, Error> {
    let content = content_type(request.headers())?;
    let body = tokio::time::timeout(app.options.body_timeout, read_body(request, app.options.max_body_bytes)).await;
    let body = body.map_err(|_| {
        let seconds = app.options.body_timeout.as_secs_f64();
        Error::new(StatusCode::REQUEST_TIMEOUT, format!("body: did not arrive in {seconds} s"))
    })??;
    let answer = deployment.submit(content, body).map_err(|_| {
        let queue = app.options.queue;
        Error::new(StatusCode::TOO_MANY_REQUESTS, format!("{queue} requests are waiting already, try again later"))
    })?;
    // a scorer that lets a request drop has panicked
    let lost = |_| Error::new(StatusCode::INTERNAL_SERVER_ERROR, "the scorer failed on this request, this is a bug");
    Ok(answer.await.map_err(lost)??)
}

fn content_type(headers: &HeaderMap) -> Result<ContentType, Error> {
    if let Some(encoding) = headers.get(CONTENT_ENCODING).filter(|&value| value != "identity") {
        let message = format!("content encoding: expected none, got `{}`", shown(encoding));
        return Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let value = headers.get(CONTENT_TYPE);
    let essence = value.and_then(|value| value.as_bytes().split(|&byte| byte == b';').next());
    let essence = essence.unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(b"application/json") {
        return Ok(ContentType::Json);
    }
    if essence.eq_ignore_ascii_case(b"text/plain") {
        return Ok(ContentType::Text);
    }
    let got = value.map_or("none".into(), |value| format!("`{}`", shown(value)));
    let message = format!("content type: expected `application/json` or `text/plain`, got {got}");
    Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

fn shown(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).chars().take(60).flat_map(char::escape_debug).collect()
}

async fn read_body(request: Request, max_bytes: usize) -> Result<Bytes, Error> {
    let too_long =
        || Error::new(StatusCode::PAYLOAD_TOO_LARGE, format!("body: expected at most {max_bytes} bytes, got more"));
    let length = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    // said beforehand: not a byte of it is read
    if length.is_some_and(|length| length > max_bytes as u64) {
        return Err(too_long());
    }
    let mut body: Body = request.into_body();
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Error::new(StatusCode::BAD_REQUEST, format!("body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + rest.len() + data.len() > max_bytes {
            return Err(too_long());
        }
        // most bodies come in one piece, which needs no copy
        match (first.is_empty(), rest.is_empty()) {
            (true, true) => first = data,
            (false, _) => {
                rest.reserve(length.map_or(0, |length| length as usize).max(first.len() + data.len()));
                rest.extend_from_slice(&std::mem::take(&mut first));
                rest.extend_from_slice(&data);
            }
            (true, false) => rest.extend_from_slice(&data),
        }
    }
    Ok(if rest.is_empty() { first } else { rest.freeze() })
}
