//! Answers over HTTP, and the status of each refusal.

use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::header::{ALLOW, CONNECTION, CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use elasticrec_sample::parser::excerpt_up_to;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::refusal::Refusal;

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// A refusal, answered as `{"error": "…"}`.
#[derive(Debug)]
pub(crate) struct Error {
    status: StatusCode,
    message: String,
    header: Option<(HeaderName, HeaderValue)>,
}

impl Error {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Error {
        Error { status, message: message.into(), header: None }
    }

    pub(super) fn unauthorized() -> Error {
        let header = Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        let message = "authorization: expected `Bearer TOKEN` with the token of this server".into();
        Error { status: StatusCode::UNAUTHORIZED, message, header }
    }

    /// Closes the connection after this answer: the rest of the body is not read.
    pub(super) fn closing(self) -> Error {
        Error { header: Some((CONNECTION, HeaderValue::from_static("close"))), ..self }
    }

    pub(super) fn method_not_allowed(method: &str, allowed: &'static str) -> Error {
        let message = format!("method: expected {allowed}, got {method}");
        let header = Some((ALLOW, HeaderValue::from_static(allowed)));
        Error { status: StatusCode::METHOD_NOT_ALLOWED, message, header }
    }
}

impl Error {
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Answers with the body of a protocol that has its own form of errors.
    pub(super) fn respond(self, content_type: HeaderValue, body: impl Into<Bytes>) -> Response {
        let mut response = json_response(self.status, body);
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let status = match &refusal {
            Refusal::Bad(_) => StatusCode::BAD_REQUEST,
            Refusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::Unknown(_) => StatusCode::NOT_FOUND,
            Refusal::Unavailable(_) | Refusal::Gone(_) => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::QueueFull { .. } | Refusal::MemoryLimit { .. } => StatusCode::TOO_MANY_REQUESTS,
            Refusal::DeadlineExceeded { .. } => StatusCode::GATEWAY_TIMEOUT,
            Refusal::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Error::new(status, refusal.to_string())
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let body = json!({ "error": self.message }).to_string();
        self.respond(JSON, body)
    }
}

/// The parts of a path by name; parts that are not UTF-8 are refused like other errors.
pub(super) struct PathParts<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParts<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<PathParts<T>, Error> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(named)) => Ok(PathParts(named)),
            Err(rejection) => Err(Error::new(rejection.status(), format!("path: {}", rejection.body_text()))),
        }
    }
}

/// Returns an answer with a JSON body.
pub(super) fn json_response(status: StatusCode, body: impl Into<Bytes>) -> Response {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// Returns the start of a header's value for a message.
pub(super) fn excerpt(value: &HeaderValue) -> String {
    excerpt_up_to(60, value)
}
