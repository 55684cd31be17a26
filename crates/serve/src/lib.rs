//! The inference server: from a socket to a score, without Python.
//!
//! In the order of a request: `http` reads it and queues it for the `pool`, a `worker` of the `deployment` joins those that wait: `decode` into a batch and
//! `score` over it (unique signs → cube lookup → pooling → `engine`), and `http` writes the answer. `version`,
//! `manifest`, `chain` and `model` turn a directory of the model repository into what the scorers share. `predictor` is the same
//! path without the socket; `load` and `engine_rate` are what benchmarks measure it with.

mod chain;
pub mod decode;
mod deployment;
pub mod engine;
mod engine_rate;
pub mod http;
pub mod load;
pub mod manifest;
mod metrics;
pub mod model;
mod pool;
mod predictor;
pub mod score;
mod seal;
pub mod version;
mod worker;

#[doc(hidden)]
pub use decode::fuzz_body;
pub use decode::{ContentType, DecodeError, Limits};
pub use engine::{EngineError, init_onnxruntime};
pub use engine_rate::{EngineRate, engine_rate};
pub use http::{Server, ServerError, ServerHandle, ServerOptions};
pub use load::{Load, LoadError, LoadReport};
pub use manifest::{Manifest, ManifestError};
pub use model::{Model, ModelError};
pub use predictor::{PredictError, Predictor};
pub use score::{ScoreError, ScoreStats, Scorer};
#[doc(hidden)]
pub use seal::seal;
