//! A model at work: what clients are told of it, and the queue before its scorers.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde_json::json;
use tokio::sync::oneshot;

use crate::decode::{ContentType, DecodeError, Limits};
use crate::metrics::Metrics;
use crate::model::{Model, ModelError};
use crate::pool::{Full, Pool, Waiting};
use crate::worker::{Joining, Worker};

/// A prediction on its way to a scorer.
pub(crate) struct Job {
    pub(crate) content: ContentType,
    pub(crate) body: Bytes,
    pub(crate) queued: Instant,
    pub(crate) answer: oneshot::Sender<Answer>,
}

/// The body of the answer, or why there is none.
pub(crate) type Answer = Result<Vec<u8>, Refusal>;

/// Why a prediction was not made; what it is in HTTP is said in one place, `http::reply`.
#[derive(Debug)]
pub(crate) enum Refusal {
    Decode(DecodeError),
    /// A mistake of ours or of the model's.
    Internal(String),
}

/// What clients are told of a model.
pub(crate) struct ModelInfo {
    pub(crate) name: String,
    pub(crate) version: u64,
    /// The answer of `GET /v1/models/{name}`.
    pub(crate) metadata: Bytes,
}

impl ModelInfo {
    fn of(model: &Model) -> ModelInfo {
        let manifest = model.manifest();
        let features = &manifest.features;
        let metadata = json!({
            "model": manifest.model,
            "version": manifest.version,
            "created": manifest.created,
            "format": features.format,
            "slots": features.read_slots().iter().map(|slot| &slot.name).collect::<Vec<_>>(),
            "dense": features.dense.iter().map(|dense| &dense.name).collect::<Vec<_>>(),
            "labels": manifest.labels(),
            "columns": manifest.table.columns,
            "rows": manifest.table.rows,
        });
        let metadata = Bytes::from(metadata.to_string());
        ModelInfo { name: manifest.model.clone(), version: manifest.version, metadata }
    }
}

/// A version that is warm, and the threads that score with it. Requests hold on to the one they started with.
pub(crate) struct Deployment {
    pub(crate) info: ModelInfo,
    pub(crate) pool: Pool<Job>,
}

/// How a deployment is cut to the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) workers: usize,
    pub(crate) queue: usize,
    pub(crate) limits: Limits,
    pub(crate) joining: Joining,
}

impl Deployment {
    /// Builds and warms the scorers, then starts their threads.
    pub(crate) fn start(model: &Arc<Model>, sizes: Sizes, metrics: &Arc<Metrics>) -> Result<Deployment, ModelError> {
        let worker = || {
            let mut worker = Worker::new(model.scorer()?, sizes.limits, sizes.joining, metrics.clone());
            Ok(move |job: Job, waiting: &Waiting<'_, Job>| worker.work(job, waiting))
        };
        let workers = (0..sizes.workers.max(1)).map(|_| worker()).collect::<Result<Vec<_>, ModelError>>()?;
        let info = ModelInfo::of(model);
        let spawn = |error: io::Error| ModelError::Mismatch {
            name: info.name.clone(),
            what: format!("cannot start a scorer thread: {error}"),
        };
        let pool = Pool::start(sizes.queue, workers).map_err(spawn)?;
        Ok(Deployment { info, pool })
    }

    /// Queues a prediction, or refuses it at once.
    pub(crate) fn submit(&self, content: ContentType, body: Bytes) -> Result<oneshot::Receiver<Answer>, Full> {
        let (answer, receiver) = oneshot::channel();
        self.pool.submit(Job { content, body, queued: Instant::now(), answer })?;
        Ok(receiver)
    }
}
