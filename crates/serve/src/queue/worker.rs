//! A worker: takes requests that wait in the queue and scores them together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_queue::Backlog;
use elasticrec_sample::BatchBuilder;

use super::answers::Answers;
use super::job::{Job, Prediction, Timing};
use crate::codecs::{AnswerFormat, Limits, VersionInfo};
use crate::metrics::ModelMetrics;
use crate::model::Scorer;
use crate::refusal::Refusal;

/// A worker keeps the memory of this many signs between batches: 8 MB.
const KEPT_SIGNS: usize = 1 << 20;
/// Requests with more instances are left to the threads of the queue: a socket thread serves no sockets while it scores.
const MAX_SMALL_INSTANCES: usize = 256;

/// The limits on scoring requests together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batching {
    /// Instances at which no further request is taken; 1 scores each request by itself.
    pub(crate) max_instances: usize,
    /// Time that the first request may wait for others.
    pub(crate) max_wait: Duration,
}

/// A request in the batch.
struct BatchedRequest {
    job: Job,
    format: AnswerFormat,
    /// The end of its samples in the batch.
    end: usize,
    timing: Timing,
}

/// The outcome of taking a request from the queue.
enum TakeOutcome {
    Batched(BatchedRequest),
    /// The request was refused, or its client is gone.
    Answered,
    /// The request has more instances than this thread may score.
    TooLarge(Job),
}

/// A scorer, and the batch that joins its requests.
pub(crate) struct Worker {
    scorer: Scorer,
    info: Arc<VersionInfo>,
    limits: Limits,
    batching: Batching,
    metrics: ModelMetrics,
    builder: BatchBuilder,
    answers: Answers,
    /// Number of requests that arrived together in recent batches; the worker waits for this many.
    expected: usize,
}

impl Worker {
    pub(crate) fn new(
        scorer: Scorer,
        info: Arc<VersionInfo>,
        limits: Limits,
        batching: Batching,
        metrics: ModelMetrics,
        answers: Answers,
    ) -> Worker {
        let builder = scorer.model().parser().builder(0);
        Worker { scorer, info, limits, batching, metrics, builder, answers, expected: 1 }
    }

    /// Scores a request together with the requests that are queued behind it or arrive in time.
    pub(crate) fn work(&mut self, first: Job, backlog: &Backlog<'_, Job>) {
        if self.builder.batch().signs.len() > KEPT_SIGNS {
            // A large request must not keep its memory after it.
            self.builder = self.scorer.model().parser().builder(0);
        }
        self.builder.truncate(0);
        let on_socket_thread = backlog.is_on_caller();
        // A local, not a field: a panic then drops the requests, and their clients learn of it at once.
        let mut batched = Vec::new();
        let end = first.queued + self.batching.max_wait;
        let mut next = Some(first);
        while let Some(job) = next {
            if on_socket_thread && !job.is_small() {
                backlog.put_back(job);
                break;
            }
            match self.take(job, on_socket_thread) {
                TakeOutcome::Batched(request) => batched.push(request),
                TakeOutcome::Answered => (),
                TakeOutcome::TooLarge(job) => {
                    backlog.put_back(job);
                    break;
                }
            }
            if self.builder.num_samples() >= self.batching.max_instances {
                break;
            }
            // Wait only for as many requests as arrived together before.
            next = backlog.next((batched.len() < self.expected).then_some(end));
        }
        self.update_expected(batched.len());
        if !batched.is_empty() {
            self.score(batched, on_socket_thread);
        }
    }

    /// Adds the instances of a request to the batch, or refuses it.
    fn take(&mut self, mut job: Job, on_socket_thread: bool) -> TakeOutcome {
        let started = Instant::now();
        let queue = started - job.queued + job.reader.waited;
        if job.answer.is_closed() {
            return TakeOutcome::Answered;
        }
        if let Some(late) = job.deadline.filter(|deadline| deadline.at <= started) {
            self.metrics.queue.observe(queue);
            let _ = job.answer.send(Err(late.refusal()));
            return TakeOutcome::Answered;
        }
        let parser = self.scorer.model().parser();
        let before = self.builder.num_samples();
        let decoded = job.codec.decode(parser, &job.body, self.limits, &mut self.builder);
        if on_socket_thread && self.builder.num_samples() - before > MAX_SMALL_INSTANCES {
            // The number of instances is known only now; a thread of the queue decodes the request again.
            self.builder.truncate(before);
            job.is_large = true;
            return TakeOutcome::TooLarge(job);
        }
        self.metrics.queue.observe(queue);
        match decoded.and_then(|format| format.check(&self.info).map(|()| format)) {
            Ok(format) => {
                let reader = job.reader.took;
                let timing = Timing { queue, parse: started.elapsed() + reader, reader, ..Timing::default() };
                self.metrics.parse.observe(timing.parse);
                if !reader.is_zero() {
                    self.metrics.reader.observe(reader);
                }
                TakeOutcome::Batched(BatchedRequest { job, format, end: self.builder.num_samples(), timing })
            }
            Err(error) => {
                self.builder.truncate(before);
                let _ = job.answer.send(Err(error.into()));
                TakeOutcome::Answered
            }
        }
    }

    /// Tracks the number of requests that arrive together: increases it at once, decreases it
    /// by half of the difference, because waiting in vain is expensive.
    fn update_expected(&mut self, arrived: usize) {
        self.expected = if arrived >= self.expected { arrived } else { self.expected.midpoint(arrived) };
    }

    /// Scores the batch and answers each of its requests.
    fn score(&mut self, batched: Vec<BatchedRequest>, on_socket_thread: bool) {
        // The latest deadline of the batch; a request with an earlier one is refused where it waits for its answer.
        let deadline = batched.iter().map(|request| request.job.deadline.map(|deadline| deadline.at));
        let deadline = deadline.reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b))).flatten();
        let scored = self.scorer.score(self.builder.batch(), deadline).map_err(Refusal::from);
        let stats = self.scorer.stats();
        self.metrics.lookup.observe(stats.lookup);
        self.metrics.infer.observe(stats.infer);
        self.metrics.joined.observe(batched.len() as f64);
        self.metrics.signs.inc_by(stats.num_signs as u64);
        self.metrics.signs_missed.inc_by(stats.num_missed as u64);
        self.metrics.signs_lost.inc_by(stats.num_lost as u64);
        let (mut start, mut answers) = (0, Vec::with_capacity(batched.len()));
        for BatchedRequest { job, format, end, timing } in batched {
            let started = Instant::now();
            let (samples, num_samples) = (start..end, (end - start) as u64);
            start = end;
            let scores = scored.clone().and_then(|()| self.scorer.scores_of(samples).map_err(Refusal::from));
            let reply = scores.and_then(|scores| format.write(&self.info, scores).map_err(Refusal::Internal));
            let write = started.elapsed();
            if reply.is_ok() {
                self.metrics.instances.inc_by(num_samples);
                self.metrics.write.observe(write);
            }
            let timing = Timing { lookup: stats.lookup, infer: stats.infer, write, ..timing };
            answers.push((job.answer, reply.map(|reply| Prediction { reply, timing })));
        }
        self.answers.send(answers, on_socket_thread);
    }
}
