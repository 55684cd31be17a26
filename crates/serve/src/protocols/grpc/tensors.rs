//! The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use prost::Message;

use super::{Target, decode, encode, predict, unary};
use crate::codecs::Codec;
use crate::codecs::tensors::TensorInfo;
use crate::codecs::tensors::proto::InferTarget;
use crate::protocols::inference::{self, parse_version};
use crate::refusal::Refusal;
use crate::server::App;

pub(crate) const SERVICE: &str = "/inference.GRPCInferenceService/";
pub(crate) const LIVE: &str = "/inference.GRPCInferenceService/ServerLive";
pub(crate) const READY: &str = "/inference.GRPCInferenceService/ServerReady";
pub(crate) const MODEL_INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The methods of the service that this server has.
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

/// The answer of `ServerLive`, `ServerReady` and `ModelReady`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct BoolResponse {
    #[prost(bool, tag = "1")]
    pub(super) value: bool,
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
    unary(&app, request, async |_| encode(&BoolResponse { value: true })).await
}

async fn server_ready(State(app): State<Arc<App>>, request: Request) -> Response {
    unary(&app, request, async |_| encode(&BoolResponse { value: app.registry.ready().is_ok() })).await
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
            Ok(()) => encode(&BoolResponse { value: true }),
            Err(Refusal::Unavailable(_)) => encode(&BoolResponse { value: false }),
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
        // The worker decodes the rest.
        let message = call.message.clone();
        let InferTarget { model, version } = InferTarget::of(&message).map_err(Refusal::from)?;
        let version = parse_version(model, version)?;
        predict(&app, Target { model: Some(model), version, codec: Codec::TensorsProto }, call).await
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
