//! The entry of every HTTP and gRPC request: token, counters, and a fast path for predictions.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use subtle::ConstantTimeEq;

use super::{Error, HEALTH, METRICS, READY, plain, router, tensors};
use crate::protocols::grpc;
use crate::server::App;

/// Paths that need no token and are not counted.
const PROBES: [&str; 7] = [HEALTH, READY, tensors::LIVE, tensors::READY, grpc::CHECK, grpc::LIVE, grpc::READY];

/// Answers the requests of HTTP and gRPC.
pub(crate) struct Front {
    app: Arc<App>,
    router: TowerToHyperService<Router>,
}

impl Front {
    pub(crate) fn new(app: Arc<App>) -> Front {
        Front { router: TowerToHyperService::new(router(app.clone())), app }
    }

    /// Checks the token, answers the request and counts the answer.
    pub(crate) async fn answer(&self, request: Request) -> Response {
        let path = request.uri().path();
        if PROBES.contains(&path) {
            return self.route(request).await;
        }
        let is_counted = path != METRICS;
        let is_grpc = grpc::is_grpc(request.headers());
        let response = match &self.app.options.token {
            Some(token) if !has_token(request.headers(), token.0.as_bytes()) => match is_grpc {
                true => grpc::unauthenticated(),
                false => Error::unauthorized().into_response(),
            },
            _ => self.dispatch(request).await,
        };
        match grpc::code_of(&response) {
            Some(code) => self.app.metrics.count_answer("grpc", code),
            None if is_counted => self.app.metrics.count_answer("http", response.status().as_u16()),
            None => (),
        }
        response
    }

    /// Answers a request. Predictions with a plain path skip the router: for a request of one instance, its search,
    /// strings and boxed futures cost as much as the lookup of the rows.
    async fn dispatch(&self, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let (app, headers, path) = (&*self.app, &parts.headers, parts.uri.path());
        if parts.method == Method::POST {
            if let Some(model) = middle_of(path, "/v2/models/", "/infer") {
                return tensors::infer_with(app, model, None, headers, body).await.into_response();
            }
            if let Some(target) = middle_of(path, "/v1/models/", "") {
                return plain::act(app, target, headers, body).await.into_response();
            }
            if path == grpc::MODEL_INFER {
                return grpc::model_infer(State(self.app.clone()), Request::from_parts(parts, body)).await;
            }
        }
        self.route(Request::from_parts(parts, body)).await
    }

    async fn route(&self, request: Request) -> Response {
        self.router.call(request).await.unwrap_or_else(|never| match never {})
    }
}

/// Returns the part of a path between `start` and `end`, if it is one segment without percent-encoding.
fn middle_of<'p>(path: &'p str, start: &str, end: &str) -> Option<&'p str> {
    let part = path.strip_prefix(start)?.strip_suffix(end)?;
    (!part.is_empty() && !part.contains(['/', '%'])).then_some(part)
}

/// Returns whether the request has the token, compared in constant time.
fn has_token(headers: &HeaderMap, token: &[u8]) -> bool {
    let Some(value) = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes) else {
        return false;
    };
    let Some((scheme, given)) = value.split_at_checked(b"Bearer ".len()) else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(given.ct_eq(token))
}
