//! The Open Inference Protocol over HTTP: `/v2`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::read_body;
use super::predict::{JSON_BYTES, Target, run};
use super::reply::{Error, PathParts, excerpt, json_response};
use crate::codecs::Codec;
use crate::codecs::tensors::TensorInfo;
use crate::protocols::inference::{self, parse_version};
use crate::refusal::Refusal;
use crate::server::App;

pub(super) const LIVE: &str = "/v2/health/live";
pub(super) const READY: &str = "/v2/health/ready";
pub(super) const INDEX: &str = "/v2/repository/index";

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2", get(server))
        .route(LIVE, get(|| async { json_response(StatusCode::OK, r#"{"live":true}"#) }))
        .route(READY, get(ready))
        .route(INDEX, post(index))
        .route("/v2/models/{model}", get(model))
        .route("/v2/models/{model}/ready", get(model_ready))
        .route("/v2/models/{model}/infer", post(infer))
        .route("/v2/models/{model}/versions/{version}", get(model))
        .route("/v2/models/{model}/versions/{version}/ready", get(model_ready))
        .route("/v2/models/{model}/versions/{version}/infer", post(infer))
}

/// The model and the version in a path.
#[derive(Deserialize)]
struct ModelPath {
    model: String,
    #[serde(default)]
    version: String,
}

impl ModelPath {
    fn version(&self) -> Result<Option<u64>, Refusal> {
        parse_version(&self.model, &self.version)
    }
}

async fn server() -> Response {
    let server = json!({
        "name": inference::SERVER_NAME,
        "version": inference::SERVER_VERSION,
        "extensions": inference::EXTENSIONS,
    });
    json_response(StatusCode::OK, server.to_string())
}

async fn ready(State(app): State<Arc<App>>) -> Result<Response, Error> {
    app.registry.ready()?;
    Ok(json_response(StatusCode::OK, r#"{"ready":true}"#))
}

async fn model(State(app): State<Arc<App>>, PathParts(path): PathParts<ModelPath>) -> Result<Response, Error> {
    let info = inference::model_info(&app.registry, &path.model, path.version()?)?;
    let model = json!({
        "name": info.name,
        "versions": info.versions,
        "platform": inference::PLATFORM,
        "inputs": info.inputs.iter().map(tensor).collect::<Vec<_>>(),
        "outputs": info.outputs.iter().map(tensor).collect::<Vec<_>>(),
    });
    Ok(json_response(StatusCode::OK, model.to_string()))
}

fn tensor(info: &TensorInfo) -> Value {
    json!({"name": info.name, "datatype": info.datatype, "shape": info.shape})
}

async fn model_ready(State(app): State<Arc<App>>, PathParts(path): PathParts<ModelPath>) -> Result<Response, Error> {
    inference::model_ready(&app.registry, &path.model, path.version()?)?;
    Ok(json_response(StatusCode::OK, json!({"name": path.model, "ready": true}).to_string()))
}

#[derive(Deserialize, Default)]
struct IndexRequest {
    #[serde(default)]
    ready: bool,
}

async fn index(State(app): State<Arc<App>>, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let body = read_body(&parts.headers, body, &app).await?;
    let request: IndexRequest = match &body[..] {
        b"" => IndexRequest::default(),
        body => serde_json::from_slice(body).map_err(|error| Refusal::Bad(format!("body: {error}")))?,
    };
    let models = inference::index(&app.registry, request.ready).into_iter().map(|model| {
        let mut line = json!({"name": model.name, "state": model.state()});
        for (key, value) in [("version", model.version), ("reason", model.reason)] {
            if !value.is_empty() {
                line[key] = json!(value);
            }
        }
        line
    });
    Ok(json_response(StatusCode::OK, json!(models.collect::<Vec<_>>()).to_string()))
}

async fn infer(
    State(app): State<Arc<App>>,
    PathParts(path): PathParts<ModelPath>,
    request: Request,
) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    infer_with(&app, &path.model, path.version()?, &parts.headers, body).await
}

/// Scores tensors with the given version, or with the current one.
pub(super) async fn infer_with(
    app: &App,
    model: &str,
    version: Option<u64>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Error> {
    // Checked before the body is read.
    app.registry.model(Some(model))?;
    let codec = Codec::TensorsJson { json_bytes: json_bytes(headers)? };
    run(app, Target { model: Some(model), version, codec }, headers, body).await
}

fn json_bytes(headers: &HeaderMap) -> Result<Option<usize>, Refusal> {
    let Some(value) = headers.get(JSON_BYTES) else { return Ok(None) };
    match value.to_str().ok().and_then(|value| value.parse().ok()) {
        Some(json_bytes) => Ok(Some(json_bytes)),
        None => Err(Refusal::Bad(format!("{JSON_BYTES}: expected a number of bytes, got `{}`", excerpt(value)))),
    }
}
