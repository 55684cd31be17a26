//! HTTP: the routes of all APIs.
//!
//! - `front` takes every request of HTTP and gRPC: it checks the token, counts, and sends predictions past the router.
//! - `plain` (named slots, lines), `tensors` (Open Inference Protocol), `paddle` (Paddle Serving, ElasticCTR) and `cube`
//!   (rows by sign) are the APIs; `predict` and `explain` turn a body into a response for all of them.
//! - `body` and `encoding` read bodies, `reply` writes answers and maps refusals to statuses, `docs` serves their description.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use self::reply::json_response;
use crate::metrics;
use crate::protocols::grpc;
use crate::server::App;

mod body;
mod cube;
mod docs;
mod encoding;
mod explain;
mod front;
mod paddle;
mod plain;
mod predict;
mod reply;
mod tensors;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub(crate) use self::front::Front;
pub(crate) use self::paddle::infer as infer_paddle;
pub(crate) use self::predict::{MAX_TIMEOUT_MS, RequestOptions, Target, set_answer_headers};
pub(crate) use self::reply::Error;

const HEALTH: &str = "/health";
const READY: &str = "/ready";
const METRICS: &str = "/metrics";

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(HEALTH, get(|| async { json_response(StatusCode::OK, r#"{"status":"up"}"#) }))
        .route(READY, get(ready))
        .route(METRICS, get(scrape))
        .route("/v1/models", get(plain::models))
        .route("/v1/models/{target}", get(plain::metadata).post(plain::predict))
        .merge(docs::routes())
        .merge(paddle::routes())
        .route("/DictService/seek", post(cube::seek))
        .merge(tensors::routes())
        .merge(grpc::routes())
        .fallback(|uri: Uri, headers: HeaderMap| async move {
            if grpc::is_grpc(&headers) {
                return grpc::unimplemented(uri.path());
            }
            Error::new(StatusCode::NOT_FOUND, format!("no such path: {}", uri.path())).into_response()
        })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            Error::method_not_allowed(method.as_str(), allowed(uri.path()))
        })
        .with_state(app)
}

/// Returns the method of a path: POST for actions and for services (`/package.Service/Method`), GET for all others.
fn allowed(path: &str) -> &'static str {
    let is_service = |first: &str| first.contains('.') || first.ends_with("Service");
    let is_action = path.contains(':')
        || (path.ends_with("/infer") && path != "/v2/models/infer")
        || path == tensors::INDEX
        || path.split('/').nth(1).is_some_and(is_service);
    if is_action { "POST" } else { "GET" }
}

async fn ready(State(app): State<Arc<App>>) -> Result<Response, Error> {
    app.registry.ready()?;
    Ok(json_response(StatusCode::OK, r#"{"status":"ready"}"#))
}

async fn scrape(State(app): State<Arc<App>>) -> Response {
    for deployment in app.registry.deployments() {
        let info = &deployment.info;
        deployment.set_gauges(&app.metrics.of(&info.model, &info.variant));
    }
    app.metrics.pending_bytes.set(app.memory.used_bytes() as i64);
    match app.metrics.encode() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => Error::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
