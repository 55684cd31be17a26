//! The description of this server's API: OpenAPI for programs, a page for people.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::reply::json_response;
use crate::server::App;

const OPENAPI: &str = include_str!("openapi.json");
const PAGE: &str = include_str!("docs.html");
/// The page loads the description from this server and nothing from anywhere else.
const POLICY: &str = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'";

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/openapi.json", get(|| async { json_response(StatusCode::OK, OPENAPI) }))
        .route("/docs", get(page))
}

async fn page() -> Response {
    ([(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, POLICY)], PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_is_json_and_names_the_main_paths() {
        let description: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        for path in ["/health", "/v1/models/{name}:predict", "/v2/models/{name}/infer", "/docs"] {
            assert!(description["paths"][path].is_object(), "{path}");
        }
    }
}
