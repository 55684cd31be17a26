//! The plain API under `/v1/models`: named slots in JSON or lines of the training format in, predictions by label out.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::json;

use super::explain::explain;
use super::predict::{RequestOptions, Target, run};
use super::reply::{Error, PathParts, excerpt, json_response};
use crate::codecs::Codec;
use crate::server::App;
use crate::server::registry::Choice;

pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let models = app.registry.deployments().map(|deployment| {
        let info = &deployment.info;
        let mut model = json!({"name": info.model, "version": info.version});
        if !info.variant.is_empty() {
            model["variant"] = json!(info.variant);
        }
        model
    });
    json_response(StatusCode::OK, json!({ "models": models.collect::<Vec<_>>() }).to_string())
}

pub(super) async fn metadata(
    State(app): State<Arc<App>>,
    PathParts(target): PathParts<String>,
    headers: HeaderMap,
) -> Result<Response, Error> {
    if target.contains(':') {
        return Err(Error::method_not_allowed("GET", "POST"));
    }
    let options = RequestOptions::of(&headers)?;
    // All variants of a model have the same inputs, so the first one stands for them.
    let entry = app.registry.model(Some(&target))?;
    let variant = options.variant.or(entry.variants.first().map(|variant| variant.name.as_str()));
    let deployment = app.registry.choose(Choice { model: Some(&target), variant, ..Choice::default() })?;
    Ok(json_response(StatusCode::OK, deployment.metadata.clone()))
}

pub(super) async fn predict(
    State(app): State<Arc<App>>,
    PathParts(target): PathParts<String>,
    request: Request,
) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    act(&app, &target, &parts.headers, body).await
}

/// Runs an action on a model: `NAME:predict` or `NAME:explain`.
pub(super) async fn act(app: &App, target: &str, headers: &HeaderMap, body: Body) -> Result<Response, Error> {
    let Some((name, action)) = target.rsplit_once(':') else {
        return Err(Error::method_not_allowed("POST", "GET"));
    };
    // Checked before the body is read.
    app.registry.model(Some(name))?;
    match action {
        "predict" => {
            let target = Target { model: Some(name), version: None, codec: codec_of(headers)? };
            run(app, target, headers, body).await
        }
        "explain" => explain(app, name, codec_of(headers)?, headers, body).await,
        other => {
            let what = format!("unknown action `{other}`, expected `predict` or `explain`");
            Err(Error::new(StatusCode::NOT_FOUND, what))
        }
    }
}

fn codec_of(headers: &HeaderMap) -> Result<Codec, Error> {
    let value = headers.get(CONTENT_TYPE);
    let essence = value.and_then(|value| value.as_bytes().split(|&byte| byte == b';').next());
    let essence = essence.unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(b"application/json") {
        return Ok(Codec::Json);
    }
    if essence.eq_ignore_ascii_case(b"text/plain") {
        return Ok(Codec::Text);
    }
    let got = value.map_or("none".into(), |value| format!("`{}`", excerpt(value)));
    let message = format!("content type: expected `application/json` or `text/plain`, got {got}");
    Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}
