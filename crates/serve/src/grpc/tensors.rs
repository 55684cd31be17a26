//! `inference.GRPCInferenceService`, the Open Inference Protocol over gRPC.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use prost::Message;

use super::{Target, decode, encode, predict, unary};
use crate::face::Face;
use crate::face::tensors::TensorInfo;
use crate::face::tensors::proto::Asked;
use crate::inference::{self, parse_version};
use crate::refusal::Refusal;
use crate::server::App;

pub(crate) const SERVICE: &str = "/inference.GRPCInferenceService/";
pub(crate) const LIVE: &str = "/inference.GRPCInferenceService/ServerLive";
pub(crate) const READY: &str = "/inference.GRPCInferenceService/ServerReady";
pub(crate) const MODEL_INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// What there is of the service.
pub(super) const METHODS: [&str; 7] =
    ["ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer", "RepositoryIndex"];

pub(super) fn routes() -> Router<Arc<App>> {
    let path = |method: &str| format!("{SERVICE}{method}");
    Router::new()
        .route(LIVE, post(server_live))
        .route(READY, post(server_ready))
        .route(&path("ServerMetadata"), post(server_metadata))
        .route(&path("ModelReady"), post(model_ready))
        .route(&path("ModelMetadata"), post(model_metadata))
        .route(MODEL_INFER, post(model_infer))
        .route(&path("RepositoryIndex"), post(repository_index))
}

/// An answer that is a yes or a no: of `ServerLive`, `ServerReady` and `ModelReady`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Yes {
    #[prost(bool, tag = "1")]
    pub(super) yes: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ServerMetadataResponse {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) extensions: Vec<String>,
}

/// The request of `ModelReady` and `ModelMetadata`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelMetadataResponse {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) versions: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) platform: String,
    #[prost(message, repeated, tag = "4")]
    pub(super) inputs: Vec<TensorMetadata>,
    #[prost(message, repeated, tag = "5")]
    pub(super) outputs: Vec<TensorMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub(super) shape: Vec<i64>,
}

impl From<TensorInfo> for TensorMetadata {
    fn from(info: TensorInfo) -> TensorMetadata {
        TensorMetadata { name: info.name, datatype: info.datatype.into(), shape: info.shape }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RepositoryIndexRequest {
    #[prost(bool, tag = "2")]
    pub(super) ready: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RepositoryIndexResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) models: Vec<ModelIndex>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelIndex {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(string, tag = "3")]
    pub(super) state: String,
    #[prost(string, tag = "4")]
    pub(super) reason: String,
}

async fn server_live(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |_| encode(&Yes { yes: true })).await
}

async fn server_ready(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |_| encode(&Yes { yes: app.registry.ready().is_ok() })).await
}

async fn server_metadata(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |_| {
        encode(&ServerMetadataResponse {
            name: inference::SERVER_NAME.into(),
            version: inference::SERVER_VERSION.into(),
            extensions: inference::EXTENSIONS.map(String::from).into(),
        })
    })
    .await
}

async fn model_ready(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |call| {
        let ModelRequest { name, version } = decode(&call.message)?;
        match inference::model_ready(&app.registry, &name, parse_version(&name, &version)?) {
            Ok(()) => encode(&Yes { yes: true }),
            Err(Refusal::Unavailable(_)) => encode(&Yes { yes: false }),
            Err(refusal) => Err(refusal.into()),
        }
    })
    .await
}

async fn model_metadata(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |call| {
        let ModelRequest { name, version } = decode(&call.message)?;
        let info = inference::model_info(&app.registry, &name, parse_version(&name, &version)?)?;
        encode(&ModelMetadataResponse {
            name: info.name,
            versions: info.versions,
            platform: inference::PLATFORM.into(),
            inputs: info.inputs.into_iter().map(TensorMetadata::from).collect(),
            outputs: info.outputs.into_iter().map(TensorMetadata::from).collect(),
        })
    })
    .await
}

pub(crate) async fn model_infer(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |call| {
        // the scorer reads the rest
        let message = call.message.clone();
        let asked = Asked::of(&message).map_err(Refusal::from)?;
        let version = parse_version(asked.model, asked.version)?;
        predict(&app, Target { model: Some(asked.model), version, face: Face::TensorsProto }, call).await
    })
    .await
}

async fn repository_index(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |call| {
        let RepositoryIndexRequest { ready } = decode(&call.message)?;
        let models = inference::index(&app.registry, ready).into_iter().map(|model| {
            let state = model.state().into();
            ModelIndex { name: model.name, version: model.version, state, reason: model.reason }
        });
        encode(&RepositoryIndexResponse { models: models.collect() })
    })
    .await
}
