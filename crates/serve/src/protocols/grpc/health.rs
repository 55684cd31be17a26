//! `grpc.health.v1.Health`, for Kubernetes and load balancers; like `/ready` it needs no token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use prost::Message;
use tonic::Status;

use super::{decode, encode, unary};
use crate::server::App;

pub(crate) const CHECK: &str = "/grpc.health.v1.Health/Check";

#[derive(Clone, PartialEq, Message)]
pub(super) struct CheckRequest {
    /// Empty for the server, or the name of a model.
    #[prost(string, tag = "1")]
    pub(super) service: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CheckResponse {
    #[prost(enumeration = "Health", tag = "1")]
    pub(super) status: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum Health {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
}

/// Answers whether the server or one of its models is ready.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |call| {
        let request: CheckRequest = decode(&call.message)?;
        let ready = match request.service.as_str() {
            "" => app.registry.ready(),
            // A service of this server is ready when the server is.
            service if service.contains('.') => app.registry.ready(),
            model => app.registry.model(Some(model)).map_err(Status::from)?.ready(),
        };
        let status = if ready.is_ok() { Health::Serving } else { Health::NotServing };
        encode(&CheckResponse { status: status.into() })
    })
    .await
}
