//! The plain face: named slots in JSON, or lines of the training format, to predictions by label.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::json;

use super::explain::explain;
use super::predict::{Called, Target, run};
use super::reply::{Error, PathParts, json_response, shown};
use crate::face::Face;
use crate::registry::Choice;
use crate::server::App;

pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let models = app.registry.deployments().map(|deployment| {
        let about = &deployment.about;
        let mut model = json!({"name": about.model, "version": about.version});
        if !about.variant.is_empty() {
            model["variant"] = json!(about.variant);
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
    let called = Called::of(&headers)?;
    // all variants of a model are asked in the same words
    let entry = app.registry.model(Some(&target))?;
    let variant = called.variant.or(entry.variants.first().map(|variant| variant.name.as_str()));
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

/// What is asked of a model, `NAME:predict` or `NAME:explain`.
pub(super) async fn act(app: &App, target: &str, headers: &HeaderMap, body: Body) -> Result<Response, Error> {
    let Some((name, action)) = target.rsplit_once(':') else {
        return Err(Error::method_not_allowed("POST", "GET"));
    };
    // before the body is read
    app.registry.model(Some(name))?;
    match action {
        "predict" => {
            let target = Target { model: Some(name), version: None, face: face_of(headers)? };
            run(app, target, headers, body).await
        }
        "explain" => explain(app, name, face_of(headers)?, headers, body).await,
        other => {
            let what = format!("no action `{other}`, there is `predict` and `explain`");
            Err(Error::new(StatusCode::NOT_FOUND, what))
        }
    }
}

fn face_of(headers: &HeaderMap) -> Result<Face, Error> {
    let value = headers.get(CONTENT_TYPE);
    let essence = value.and_then(|value| value.as_bytes().split(|&byte| byte == b';').next());
    let essence = essence.unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(b"application/json") {
        return Ok(Face::Json);
    }
    if essence.eq_ignore_ascii_case(b"text/plain") {
        return Ok(Face::Text);
    }
    let got = value.map_or("none".into(), |value| format!("`{}`", shown(value)));
    let message = format!("content type: expected `application/json` or `text/plain`, got {got}");
    Err(Error::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}
