//! A version at work: what answers say of it, and the queue before its scorers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use elasticrec_sample::Format;
use serde_json::json;
use tokio::sync::oneshot;

use crate::answers::Answers;
use crate::face::parsed::Shape;
use crate::face::tensors::{self, TensorInfo};
use crate::face::{About, Face, Limits, Reply};
use crate::manifest::READER_FILE;
use crate::metrics::ModelMetrics;
use crate::model::{Model, ModelError};
use crate::pool::{Full, Here, Pool, Waiting};
use crate::readers::{Read, ReaderTime, Readers, Terms};
use crate::refusal::Refusal;
use crate::rows::FoundRows;
use crate::score::{ScoreError, Scorer};
use crate::worker::{Joining, Worker};

/// A prediction on its way to a scorer.
pub(crate) struct Job {
    pub(crate) face: Face,
    pub(crate) body: Bytes,
    /// What it took to come here from lines of a user's own format.
    pub(crate) reader: ReaderTime,
    pub(crate) queued: Instant,
    /// Nobody waits for it any longer.
    pub(crate) deadline: Option<Deadline>,
    pub(crate) answer: oneshot::Sender<Answer>,
    /// It has more instances than a thread of the sockets scores.
    pub(crate) is_large: bool,
}

impl Job {
    /// Whether a thread of the sockets may take it.
    pub(crate) fn is_small(&self) -> bool {
        !self.is_large && self.body.len() <= MAX_HERE_BYTES
    }
}

/// When a request's time is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    /// The time that it had.
    pub(crate) after: Duration,
}

impl Deadline {
    pub(crate) fn within(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after, after }
    }

    pub(crate) fn refusal(self) -> Refusal {
        Refusal::Late { after_ms: self.after.as_millis() }
    }
}

/// A prediction, or why there is none.
pub(crate) type Answer = Result<Done, Refusal>;

/// A prediction that was made.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) reply: Reply,
    pub(crate) timing: Timing,
}

/// Where the time of a request went; what was done for several at once counts in full for each.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Timing {
    pub(crate) queue: Duration,
    pub(crate) parse: Duration,
    /// The part of `parse` that a reader process took.
    pub(crate) reader: Duration,
    pub(crate) lookup: Duration,
    pub(crate) infer: Duration,
    pub(crate) write: Duration,
}

impl Timing {
    /// The stages by name, in their order.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let stages = [
            ("queue", self.queue),
            ("parse", self.parse),
            ("reader", self.reader),
            ("lookup", self.lookup),
            ("infer", self.infer),
            ("write", self.write),
        ];
        // most models have no reader of their own
        stages.into_iter().filter(|&(name, time)| name != "reader" || !time.is_zero())
    }

    /// The value of the header `Server-Timing`, milliseconds.
    pub(crate) fn header(&self) -> String {
        let stages = self.stages().map(|(name, time)| format!("{name};dur={:.3}", time.as_secs_f64() * 1e3));
        stages.collect::<Vec<_>>().join(", ")
    }
}

/// A version that is warm, and the threads that score with it. Requests hold on to the one they started with.
pub(crate) struct Deployment {
    pub(crate) about: Arc<About>,
    /// The answer of `GET /v1/models/{name}`.
    pub(crate) metadata: Bytes,
    /// The tensors it takes.
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) pool: Pool<Job>,
    /// What it scores with; tests have none.
    pub(crate) model: Option<Arc<Model>>,
    lines: Lines,
    queue: usize,
    /// Small requests are scored by the threads of the sockets: the rows are here, and none waits for others.
    scores_here: bool,
    /// Somebody is about to look after what is queued.
    is_waking: AtomicBool,
}

/// A request that is longer, or that turns out to have more instances, is left to the threads of the scorers, and so is
/// what follows work that took longer: sockets are not looked after meanwhile.
const MAX_HERE_BYTES: usize = 64 << 10;
pub(crate) const MAX_HERE_INSTANCES: usize = 256;
const MAX_HERE: Duration = Duration::from_millis(4);

/// Who reads the lines of the training format.
enum Lines {
    /// The scorers.
    Scorers,
    /// Processes that run a reader of the user's own.
    Readers(Arc<Readers>, Terms),
    /// Nobody, and why.
    Nobody(String),
}

/// How a deployment is cut to the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) queue: usize,
    pub(crate) limits: Limits,
    pub(crate) joining: Joining,
}

/// What the scorers of a deployment work with.
pub(crate) struct Means<'a> {
    pub(crate) metrics: &'a ModelMetrics,
    pub(crate) answers: &'a Answers,
    /// Those who read lines of a user's own format.
    pub(crate) readers: Option<Arc<Readers>>,
}

impl Deployment {
    /// Starts the threads of scorers that are warm. The readers are those of this version.
    pub(crate) fn start(
        scorers: Vec<Scorer>,
        name: &str,
        variant: &str,
        sizes: Sizes,
        means: Means<'_>,
    ) -> Result<Deployment, ModelError> {
        let Means { metrics, answers, readers } = means;
        let failed = |what: String| ModelError::Mismatch { name: name.into(), what };
        let model = scorers.first().ok_or_else(|| failed("expected at least one scorer".into()))?.model().clone();
        let manifest = model.manifest();
        let about = Arc::new(About::new(name, variant, manifest.version, manifest.labels()));
        let workers = scorers.into_iter().map(|scorer| {
            let mut worker =
                Worker::new(scorer, about.clone(), sizes.limits, sizes.joining, metrics.clone(), answers.clone());
            move |job: Job, waiting: &Waiting<'_, Job>| worker.work(job, waiting)
        });
        let pool = Pool::start(sizes.queue, workers.collect());
        let pool = pool.map_err(|error| failed(format!("cannot start a scorer thread: {error}")))?;
        let inputs = tensors::inputs(&manifest.features);
        let deployment = Deployment::new(about.clone(), metadata(&model, name), pool, sizes.queue);
        if let Some(readers) = &readers {
            readers.count_losses(metrics.reader_losses.clone());
        }
        let lines = lines_of(&model, sizes, readers);
        let scores_here = model.rows().held().is_some() && sizes.joining.max_wait.is_zero();
        Ok(Deployment { inputs, model: Some(model), lines, scores_here, ..deployment })
    }

    pub(crate) fn new(about: Arc<About>, metadata: Bytes, pool: Pool<Job>, queue: usize) -> Deployment {
        Deployment {
            about,
            metadata,
            inputs: Vec::new(),
            pool,
            model: None,
            lines: Lines::Scorers,
            queue,
            scores_here: false,
            is_waking: AtomicBool::new(false),
        }
    }

    /// Bytes of a row, as values.
    pub(crate) fn row_bytes(&self) -> usize {
        self.model.as_ref().map_or(0, |model| model.rows().width() * size_of::<f32>())
    }

    /// Whether rows are looked up in this process.
    pub(crate) fn has_rows_here(&self) -> bool {
        self.model.as_ref().is_none_or(|model| model.rows().held().is_some())
    }

    /// The rows of some signs; those of a store are waited for.
    pub(crate) fn rows_of(&self, signs: &[u64]) -> Result<FoundRows, Refusal> {
        match &self.model {
            Some(model) => model.rows().find(signs).map_err(|error| ScoreError::from(error).into()),
            None => Err(Refusal::Unavailable(format!("model `{}`: has no rows", self.about.model))),
        }
    }

    /// Has lines read that the scorers cannot read themselves.
    pub(crate) async fn read_lines(&self, body: &Bytes, deadline: Option<Deadline>) -> Result<Option<Read>, Refusal> {
        match &self.lines {
            Lines::Scorers => Ok(None),
            Lines::Readers(readers, terms) => readers.read(body, *terms, deadline).await.map(Some),
            Lines::Nobody(why) => Err(Refusal::Bad(why.clone())),
        }
    }

    /// What is as it is just now.
    pub(crate) fn gauge(&self, metrics: &ModelMetrics) {
        metrics.queued.set(self.pool.num_queued() as i64);
        if let Lines::Readers(readers, _) = &self.lines {
            metrics.readers.set(readers.num_alive() as i64);
        }
    }

    /// Scores some of what is queued on this thread, if it is little.
    fn score_here(&self) -> Here {
        self.pool.work_here(MAX_HERE, |job| self.scores_here && job.is_small())
    }

    /// Queues a prediction, or refuses it at once.
    pub(crate) fn submit(
        &self,
        face: Face,
        body: Bytes,
        reader: ReaderTime,
        deadline: Option<Deadline>,
    ) -> Result<oneshot::Receiver<Answer>, Refusal> {
        let (answer, receiver) = oneshot::channel();
        let job = Job { face, body, reader, queued: Instant::now(), deadline, answer, is_large: false };
        self.pool.submit(job).map_err(|Full| Refusal::Full { queue: self.queue })?;
        Ok(receiver)
    }
}

/// Scores what is queued once all that has come by now is: a scorer that is woken for the first of many requests would
/// score it alone, and take its core from who reads the others.
pub(crate) fn score_soon(deployment: &Arc<Deployment>) {
    // what is queued before this is seen by whoever set it, who looks after taking it back
    if deployment.is_waking.swap(true, Ordering::AcqRel) {
        return;
    }
    let mut look = Look { deployment: deployment.clone(), is_due: true };
    tokio::spawn(async move {
        loop {
            // behind the connections that have something to read or to write
            tokio::task::yield_now().await;
            look.is_due = false;
            let deployment = &look.deployment;
            deployment.is_waking.store(false, Ordering::Release);
            match deployment.score_here() {
                Here::Settled => return,
                Here::Refused => return deployment.pool.wake(),
                Here::More if deployment.is_waking.swap(true, Ordering::AcqRel) => return,
                Here::More => look.is_due = true,
            }
        }
    });
}

/// A look at the queue that somebody relies on: if it never comes, because its runtime ends, the threads of the pool do.
struct Look {
    deployment: Arc<Deployment>,
    is_due: bool,
}

impl Drop for Look {
    fn drop(&mut self) {
        if self.is_due {
            self.deployment.is_waking.store(false, Ordering::Release);
            self.deployment.pool.wake();
        }
    }
}

fn lines_of(model: &Model, sizes: Sizes, readers: Option<Arc<Readers>>) -> Lines {
    let manifest = model.manifest();
    if manifest.features.format != Format::Reader {
        return Lines::Scorers;
    }
    let terms = Terms { shape: Shape::of(model.parser()), limits: sizes.limits, queue: sizes.queue };
    match readers {
        Some(readers) => Lines::Readers(readers, terms),
        None => {
            let how = if manifest.files.contains_key(READER_FILE) {
                "which this server does not run; `serve.readers` is how many processes may"
            } else {
                "which this version has not with it; publish it anew"
            };
            let what = "lines of this model are read by code of its own";
            Lines::Nobody(format!("{what}, {how}. Named slots (application/json) are answered"))
        }
    }
}

/// What clients are told of a version.
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
    fn what_is_queued_is_done_though_the_runtime_that_was_to_look_ends() {
        let (done_in, done) = std::sync::mpsc::channel();
        let work = move |_: Job, _: &Waiting<'_, Job>| done_in.send(()).unwrap();
        let about = Arc::new(About::new("demo", "", 1, &["click".into()]));
        let deployment = Arc::new(Deployment::new(about, Bytes::new(), Pool::start(8, vec![work]).unwrap(), 8));
        for _ in 0..2 {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let submit = || deployment.submit(Face::Text, Bytes::new(), ReaderTime::default(), None);
            // told, and never polled
            let _answer = runtime.block_on(async { submit().inspect(|_| score_soon(&deployment)) }).unwrap();
            drop(runtime);
            assert!(!deployment.is_waking.load(Ordering::Acquire));
            done.recv_timeout(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn long_requests_and_those_of_many_instances_are_not_for_the_sockets() {
        let is_small = |num_bytes: usize, is_large: bool| {
            let (body, answer) = (vec![0; num_bytes].into(), oneshot::channel().0);
            let (reader, queued) = (ReaderTime::default(), Instant::now());
            Job { face: Face::Text, body, reader, queued, deadline: None, answer, is_large }.is_small()
        };
        assert!(is_small(MAX_HERE_BYTES, false));
        assert!(!is_small(MAX_HERE_BYTES + 1, false));
        assert!(!is_small(1, true));
    }
}
