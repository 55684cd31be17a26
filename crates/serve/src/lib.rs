//! The inference server: from a socket to a score, without Python.
//!
//! In the order of a request: `server` accepts its connection, `http`, `grpc` or `brpc` reads it (`memory` bounds
//! what all of them hold), `ask` finds who answers it in
//! the `registry` and queues it for the `pool` of that `deployment`, lines of a user's own format by way of its `readers`; a
//! `worker`, on the thread that read it or on one of the pool, joins those that wait: their `face` decodes each into a
//! batch, `score` goes over it (cube lookup → pooling → `engine`), and the face writes the answers, which go back together (`answers`). `version`,
//! `manifest`, `chain`, `rows` and `model` turn a directory of the model repository into what the scorers share. `inference` is
//! what `http` and `grpc` say of models in the words of the Open Inference Protocol. `predictor` is the same path without the
//! socket; `load` and `engine_rate` are what benchmarks measure it with.

mod answers;
mod ask;
mod brpc;
mod chain;
mod deployment;
pub mod engine;
mod engine_rate;
pub mod face;
mod grpc;
mod http;
mod inference;
pub mod load;
pub mod manifest;
mod memory;
mod metrics;
pub mod model;
mod pool;
mod predictor;
mod readers;
mod refusal;
mod registry;
mod rows;
pub mod score;
mod seal;
mod seek;
pub mod server;
pub mod version;
mod worker;

#[doc(hidden)]
pub use brpc::fuzz_brpc;
pub use engine::{EngineError, init_onnxruntime};
pub use engine_rate::{EngineRate, engine_rate};
#[doc(hidden)]
pub use face::fuzz_body;
pub use face::{DecodeError, Face, Limits};
pub use load::{Load, LoadError, LoadReport};
pub use manifest::{Manifest, ManifestError};
pub use model::{Model, ModelError, RowSource};
pub use predictor::{PredictError, Predictor};
pub use readers::Readers;
pub use registry::{ModelPlan, PlanError, VariantPlan};
pub use rows::{Rows, StoreRows};
pub use score::{ScoreError, ScoreStats, Scorer};
#[doc(hidden)]
pub use seal::seal;
pub use server::{Server, ServerError, ServerHandle, ServerOptions};
