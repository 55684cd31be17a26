//! A model at work: its scorers on their threads, each taking a request from bytes to the bytes of its answer.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use serde_json::json;
use tokio::sync::oneshot;

use crate::decode::{ContentType, DecodeError, Limits, decode};
use crate::metrics::Metrics;
use crate::model::{Model, ModelError};
use crate::pool::{Full, Pool};
use crate::score::Scorer;

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
}

impl Deployment {
    /// Builds and warms the scorers, then starts their threads.
    pub(crate) fn start(model: &Arc<Model>, sizes: Sizes, metrics: &Arc<Metrics>) -> Result<Deployment, ModelError> {
        let worker = || {
            let mut worker = Worker::new(model.scorer()?, sizes.limits, metrics.clone());
            Ok(move |job| worker.work(job))
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

/// A scorer and what it writes answers from.
struct Worker {
    scorer: Scorer,
    limits: Limits,
    metrics: Arc<Metrics>,
    /// The answer up to the first prediction.
    head: Vec<u8>,
    /// For each label what stands before its score: `{"click":`, `,"buy":`.
    labels: Vec<Vec<u8>>,
}

impl Worker {
    fn new(scorer: Scorer, limits: Limits, metrics: Arc<Metrics>) -> Worker {
        let manifest = scorer.model().manifest();
        let head = format!("{{\"model\":{},\"version\":{},\"predictions\":[", json!(manifest.model), manifest.version);
        let label = |(index, label)| format!("{}{}:", if index == 0 { '{' } else { ',' }, json!(label)).into_bytes();
        let labels = manifest.labels().iter().enumerate().map(label).collect();
        Worker { limits, metrics, head: head.into_bytes(), labels, scorer }
    }

    fn work(&mut self, job: Job) {
        self.metrics.queue.observe(job.queued.elapsed());
        // nobody is left to read it
        if job.answer.is_closed() {
            return;
        }
        let answer = self.answer(job.content, &job.body);
        let _ = job.answer.send(answer);
    }

    fn answer(&mut self, content: ContentType, body: &[u8]) -> Answer {
        let started = Instant::now();
        let parser = self.scorer.model().parser();
        let batch = decode(parser, content, body, self.limits).map_err(Refusal::Decode)?;
        self.metrics.parse.observe(started.elapsed());
        self.scorer.score(&batch).map_err(|error| Refusal::Internal(error.to_string()))?;
        let stats = self.scorer.stats();
        self.metrics.lookup.observe(stats.lookup);
        self.metrics.infer.observe(stats.infer);
        self.metrics.instances.inc_by(batch.num_samples() as u64);
        self.metrics.signs.inc_by(stats.num_signs as u64);
        self.metrics.signs_missed.inc_by(stats.num_missed as u64);
        write_answer(&self.head, &self.labels, self.scorer.scores())
            .map_err(|error| Refusal::Internal(error.to_string()))
    }
}

/// Digits, a name's punctuation and a comma.
const SCORE_BYTES: usize = 16;

/// `{"model":"demo","version":3,"predictions":[{"click":0.0123}, …]}`, digits enough to get each f32 back.
fn write_answer(head: &[u8], labels: &[Vec<u8>], scores: &[f32]) -> serde_json::Result<Vec<u8>> {
    let names_bytes: usize = labels.iter().map(|label| label.len() + SCORE_BYTES).sum();
    let num_samples = scores.len() / labels.len();
    let mut out = Vec::with_capacity(head.len() + num_samples * names_bytes + 2);
    out.extend_from_slice(head);
    for (sample, scores) in scores.chunks_exact(labels.len()).enumerate() {
        if sample > 0 {
            out.push(b',');
        }
        for (label, score) in labels.iter().zip(scores) {
            out.extend_from_slice(label);
            serde_json::to_writer(&mut out, score)?;
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn scores_come_back_bit_for_bit(scores in prop::collection::vec(0f32..=1.0, 0..5)) {
            let labels = [b"{\"click\":".to_vec(), b",\"buy\":".to_vec()];
            let scores: Vec<f32> = scores.into_iter().flat_map(|score| [score, 1e-30 * score]).collect();
            let answer = write_answer(b"{\"predictions\":[", &labels, &scores).unwrap();
            let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
            let predictions = answer["predictions"].as_array().unwrap();
            prop_assert_eq!(predictions.len(), scores.len() / 2);
            for (prediction, scores) in predictions.iter().zip(scores.chunks(2)) {
                let back = ["click", "buy"].map(|label| prediction[label].as_f64().unwrap() as f32);
                prop_assert_eq!(back, [scores[0], scores[1]]);
            }
        }
    }
}
