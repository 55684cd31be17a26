//! The paths of Paddle Serving and ElasticCTR. The first model answers; errors are also in the fields of the answer.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use axum::routing::post;

use super::predict::{RefusedRequest, Target, run_keeping_body};
use super::reply::JSON;
use crate::codecs::Codec;
use crate::codecs::elasticctr;
use crate::codecs::paddle::{Encoding, err_no};
use crate::server::App;

const PROTO: HeaderValue = HeaderValue::from_static("application/proto");

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/GeneralModelService/inference", post(infer))
        .route("/GeneralModelService/debug", post(infer))
        .route("/ElasticCTRPredictionService/inference", post(infer_elasticctr))
}

pub(crate) async fn infer(State(app): State<Arc<App>>, request: Request) -> Response {
    let encoding = encoding_of(request.headers());
    let content_type = match encoding {
        Encoding::Proto => PROTO,
        Encoding::Json => JSON,
    };
    let (parts, body) = request.into_parts();
    match run_keeping_body(&app, target(Codec::Paddle(encoding)), &parts.headers, body).await {
        Ok(mut response) => {
            response.headers_mut().insert(CONTENT_TYPE, content_type);
            response
        }
        Err(RefusedRequest { error, body }) => {
            let body = encoding.refusal(&body, err_no_of(error.status()), error.message());
            error.respond(content_type, body)
        }
    }
}

async fn infer_elasticctr(State(app): State<Arc<App>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let outcome = run_keeping_body(&app, target(Codec::ElasticCtr), &parts.headers, body).await;
    outcome.unwrap_or_else(|RefusedRequest { error, .. }| {
        let body = elasticctr::refusal(err_no_of(error.status()), error.message());
        error.respond(JSON, body)
    })
}

fn target(codec: Codec) -> Target<'static> {
    Target { model: None, version: None, codec }
}

/// Returns the encoding of the body: JSON unless the content type is protobuf, as in bRPC's own servers.
fn encoding_of(headers: &HeaderMap) -> Encoding {
    let value = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let essence = value.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    let names = ["application/proto", "application/protobuf", "application/x-protobuf"];
    match names.iter().any(|name| essence.eq_ignore_ascii_case(name.as_bytes())) {
        true => Encoding::Proto,
        false => Encoding::Json,
    }
}

fn err_no_of(status: StatusCode) -> i32 {
    match status {
        StatusCode::PAYLOAD_TOO_LARGE => err_no::OVERFLOW,
        StatusCode::INTERNAL_SERVER_ERROR => err_no::INFERENCE,
        _ => err_no::FAILURE,
    }
}
