//! A version that answers requests, with its queue and its scorers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use elasticrec_queue::{Backlog, JobQueue, QueueFull};
use elasticrec_sample::Format;
use serde_json::json;
use tokio::sync::oneshot;

use super::answers::Answers;
use super::job::{Answer, Deadline, Job};
use super::readers::{ParsedLines, ReaderLimits, ReaderTime, Readers};
use super::worker::{Batching, Worker};
use crate::codecs::parsed::Shape;
use crate::codecs::tensors::{self, TensorInfo};
use crate::codecs::{Codec, Limits, VersionInfo};
use crate::metrics::ModelMetrics;
use crate::model::manifest::READER_FILE;
use crate::model::rows::FoundRows;
use crate::model::{Model, ModelError, ScoreError, Scorer};
use crate::refusal::Refusal;

/// After work that took longer on a socket thread, the next job is left to the threads of the queue.
const MAX_SOCKET_WORK: Duration = Duration::from_millis(4);

/// A version that is warm, and the threads that score with it. A request keeps the deployment that it started with.
pub(crate) struct Deployment {
    pub(crate) info: Arc<VersionInfo>,
    /// The answer to `GET /v1/models/{name}`.
    pub(crate) metadata: Bytes,
    /// The tensors that the model takes.
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) queue: JobQueue<Job>,
    /// None in tests that replace the scorers.
    pub(crate) model: Option<Arc<Model>>,
    lines: LineParser,
    capacity: usize,
    /// Whether socket threads score small requests: the rows are in this process, and no request waits for others.
    scores_on_sockets: bool,
}

/// The parser of lines in the training format.
enum LineParser {
    /// The workers.
    Workers,
    /// Reader processes that run a user's own reader.
    Readers(Arc<Readers>, ReaderLimits),
    /// This server cannot parse lines, for this reason.
    Missing(String),
}

/// The limits of a deployment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeploymentOptions {
    /// Jobs that may be queued.
    pub(crate) capacity: usize,
    pub(crate) limits: Limits,
    pub(crate) batching: Batching,
}

/// The resources that the workers of a deployment share with the server.
pub(crate) struct Resources<'a> {
    pub(crate) metrics: &'a ModelMetrics,
    pub(crate) answers: &'a Answers,
    /// Reader processes of this version, for lines in a user's own format.
    pub(crate) readers: Option<Arc<Readers>>,
}

impl Deployment {
    /// Starts a thread for each of the warm scorers.
    pub(crate) fn start(
        scorers: Vec<Scorer>,
        name: &str,
        variant: &str,
        options: DeploymentOptions,
        resources: Resources<'_>,
    ) -> Result<Deployment, ModelError> {
        let Resources { metrics, answers, readers } = resources;
        let DeploymentOptions { capacity, limits, batching } = options;
        let failed = |what: String| ModelError::Mismatch { name: name.into(), what };
        let model = scorers.first().ok_or_else(|| failed("expected at least one scorer, got none".into()))?;
        let model = model.model().clone();
        let manifest = model.manifest();
        let info = Arc::new(VersionInfo::new(name, variant, manifest.version, manifest.labels()));
        let workers = scorers.into_iter().map(|scorer| {
            let mut worker = Worker::new(scorer, info.clone(), limits, batching, metrics.clone(), answers.clone());
            move |job: Job, backlog: &Backlog<'_, Job>| worker.work(job, backlog)
        });
        let queue = JobQueue::start(capacity, workers.collect());
        let queue = queue.map_err(|error| failed(format!("cannot start a scorer thread: {error}")))?;
        let inputs = tensors::inputs(&manifest.features);
        let deployment = Deployment::new(info.clone(), metadata(&model, name), queue, capacity);
        if let Some(readers) = &readers {
            readers.count_losses(metrics.reader_losses.clone());
        }
        let lines = line_parser(&model, options, readers);
        let scores_on_sockets = model.rows().held().is_some() && batching.max_wait.is_zero();
        Ok(Deployment { inputs, model: Some(model), lines, scores_on_sockets, ..deployment })
    }

    pub(crate) fn new(info: Arc<VersionInfo>, metadata: Bytes, queue: JobQueue<Job>, capacity: usize) -> Deployment {
        Deployment {
            info,
            metadata,
            inputs: Vec::new(),
            queue,
            model: None,
            lines: LineParser::Workers,
            capacity,
            scores_on_sockets: false,
        }
    }

    /// Returns the size of a row's values in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.model.as_ref().map_or(0, |model| model.rows().width() * size_of::<f32>())
    }

    /// Returns whether rows are looked up in this process.
    pub(crate) fn has_local_rows(&self) -> bool {
        self.model.as_ref().is_none_or(|model| model.rows().held().is_some())
    }

    /// Looks up the rows of `signs`; blocks while a store answers.
    pub(crate) fn find_rows(&self, signs: &[u64]) -> Result<FoundRows, Refusal> {
        match &self.model {
            Some(model) => model.rows().find(signs).map_err(|error| ScoreError::from(error).into()),
            None => Err(Refusal::Unavailable(format!("model `{}`: has no rows", self.info.model))),
        }
    }

    /// Has reader processes parse the lines, or returns None if the workers parse them.
    pub(crate) async fn parse_lines(
        &self,
        body: &Bytes,
        deadline: Option<Deadline>,
    ) -> Result<Option<ParsedLines>, Refusal> {
        match &self.lines {
            LineParser::Workers => Ok(None),
            LineParser::Readers(readers, limits) => readers.read(body, *limits, deadline).await.map(Some),
            LineParser::Missing(reason) => Err(Refusal::Bad(reason.clone())),
        }
    }

    /// Sets the gauges of this version.
    pub(crate) fn set_gauges(&self, metrics: &ModelMetrics) {
        metrics.queued.set(self.queue.num_queued() as i64);
        if let LineParser::Readers(readers, _) = &self.lines {
            metrics.readers.set(readers.num_alive() as i64);
        }
    }

    /// Queues a prediction, or refuses it at once.
    pub(crate) fn submit(
        &self,
        codec: Codec,
        body: Bytes,
        reader: ReaderTime,
        deadline: Option<Deadline>,
    ) -> Result<oneshot::Receiver<Answer>, Refusal> {
        let (answer, receiver) = oneshot::channel();
        let job = Job { codec, body, reader, queued: Instant::now(), deadline, answer, is_large: false };
        self.queue.submit(job).map_err(|QueueFull| Refusal::QueueFull { queue: self.capacity })?;
        Ok(receiver)
    }
}

/// Scores queued requests, but reads the data that has already arrived first. A thread that is woken for the first of
/// many requests would score it alone, and take its core from the threads that read the others.
pub(crate) fn score_soon(deployment: &Arc<Deployment>) {
    let Some(mut pass) = deployment.queue.schedule_pass() else { return };
    let deployment = deployment.clone();
    tokio::spawn(async move {
        loop {
            // Runs after the connections that have something to read or to write.
            tokio::task::yield_now().await;
            let accepts = |job: &Job| deployment.scores_on_sockets && job.is_small();
            if !pass.run(MAX_SOCKET_WORK, accepts) {
                return;
            }
        }
    });
}

fn line_parser(model: &Model, options: DeploymentOptions, readers: Option<Arc<Readers>>) -> LineParser {
    let manifest = model.manifest();
    if manifest.features.format != Format::Reader {
        return LineParser::Workers;
    }
    let DeploymentOptions { capacity, limits, .. } = options;
    let limits = ReaderLimits { shape: Shape::of(model.parser()), limits, queue: capacity };
    match readers {
        Some(readers) => LineParser::Readers(readers, limits),
        None => {
            let reason = if manifest.files.contains_key(READER_FILE) {
                "this server runs no reader processes (`serve.readers`)"
            } else {
                "this version was published without the reader"
            };
            let what = "lines of this model need its own reader, but";
            LineParser::Missing(format!("{what} {reason}; send named slots (`application/json`) instead"))
        }
    }
}

/// Returns the description of a version for clients.
fn metadata(model: &Model, name: &str) -> Bytes {
    let manifest = model.manifest();
    let features = &manifest.features;
    let metadata = json!({
        "model": name,
        "version": manifest.version,
        "created": manifest.created,
        "format": features.format,
        "slots": features.read_slots().iter().map(|slot| &slot.name).collect::<Vec<_>>(),
        "dense": features.dense.iter().map(|dense| &dense.name).collect::<Vec<_>>(),
        "labels": manifest.labels(),
        "columns": manifest.table.columns,
        "rows": manifest.table.rows,
        "features": features,
    });
    Bytes::from(metadata.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_requests_are_scored_when_the_runtime_ends_before_their_pass() {
        let (done_in, done) = std::sync::mpsc::channel();
        let work = move |_: Job, _: &Backlog<'_, Job>| done_in.send(()).unwrap();
        let info = Arc::new(VersionInfo::new("demo", "", 1, &["click".into()]));
        let queue = JobQueue::start(8, vec![work]).unwrap();
        let deployment = Arc::new(Deployment::new(info, Bytes::new(), queue, 8));
        for _ in 0..2 {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let submit = || deployment.submit(Codec::Text, Bytes::new(), ReaderTime::default(), None);
            // The task is spawned and never polled.
            let _answer = runtime.block_on(async { submit().inspect(|_| score_soon(&deployment)) }).unwrap();
            drop(runtime);
            done.recv_timeout(Duration::from_secs(60)).unwrap();
        }
    }
}
