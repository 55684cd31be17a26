//! Answers: what each refusal is in HTTP, said once.

use axum::body::Body;
use axum::http::header::{ALLOW, CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;

use crate::decode::DecodeError;
use crate::deployment::Refusal;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// A refusal on its way out: `{"error": "…"}`.
#[derive(Debug)]
pub(super) struct Error {
    status: StatusCode,
    message: String,
    header: Option<(HeaderName, HeaderValue)>,
}

impl Error {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Error {
        Error { status, message: message.into(), header: None }
    }

    pub(super) fn unauthorized() -> Error {
        let header = Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        let message = "expected `authorization: bearer TOKEN` with the token of this server".into();
        Error { status: StatusCode::UNAUTHORIZED, message, header }
    }

    pub(super) fn method_not_allowed(method: &str, allowed: &'static str) -> Error {
        let message = format!("method: expected {allowed}, got {method}");
        let header = Some((ALLOW, HeaderValue::from_static(allowed)));
        Error { status: StatusCode::METHOD_NOT_ALLOWED, message, header }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        match refusal {
            Refusal::Decode(error @ DecodeError::Bad(_)) => Error::new(StatusCode::BAD_REQUEST, error.to_string()),
            Refusal::Decode(error @ DecodeError::TooMany { .. }) => {
                Error::new(StatusCode::PAYLOAD_TOO_LARGE, error.to_string())
            }
            Refusal::Internal(message) => Error::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let body = json!({ "error": self.message }).to_string();
        let mut response = json_response(self.status, body);
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// An answer whose body is JSON already.
pub(super) fn json_response(status: StatusCode, body: impl Into<Bytes>) -> Response {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}
