//! The prediction server: from a socket to a score, without Python.
//!
//! The path of a request:
//!
//! 1. [`server`] accepts the connection and applies the limits on connections, time and memory;
//! 2. [`protocols`] reads the request (HTTP, gRPC or bRPC) and chooses the version that answers it;
//! 3. [`queue`] holds it until a worker is free; a worker joins the requests that wait into one batch;
//! 4. [`codecs`] decode each body into samples of that batch;
//! 5. [`model`] looks up the rows, pools them and runs the network;
//! 6. [`codecs`] encode the scores, and the answers return to the connections.
//!
//! [`predictor`] is the same path without a socket. `memory`, `metrics` and `refusal` are used by all steps.

pub mod codecs;
mod memory;
mod metrics;
pub mod model;
pub mod predictor;
pub mod protocols;
pub mod queue;
mod refusal;
pub mod server;

#[doc(hidden)]
pub use codecs::fuzz_body;
pub use codecs::{Codec, DecodeError, Limits};
#[doc(hidden)]
pub use model::seal::seal;
pub use model::{
    EngineError, Manifest, ManifestError, Model, ModelError, RowSource, Rows, ScoreError, ScoreStats, Scorer,
    StoreRows, init_onnxruntime,
};
pub use predictor::{PredictError, Predictor};
#[doc(hidden)]
pub use protocols::fuzz_brpc;
pub use queue::Readers;
pub use server::{ModelPlan, PlanError, Server, ServerError, ServerHandle, ServerOptions, VariantPlan};
