//! A scorer on its thread: requests that wait together are scored together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_sample::BatchBuilder;
use serde_json::json;

use crate::decode::{Limits, decode};
use crate::deployment::{Answer, Job, Refusal};
use crate::metrics::Metrics;
use crate::pool::Waiting;
use crate::score::Scorer;

/// Signs of a batch that a worker keeps room for: 8 MB.
const KEPT_SIGNS: usize = 1 << 20;

/// When requests are scored together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Joining {
    /// Instances at which no further request is taken; 1 scores each request by itself.
    pub(crate) max_instances: usize,
    /// How long the first of them may wait for others.
    pub(crate) max_wait: Duration,
}

/// A scorer, what it joins requests in, and what it writes answers from.
pub(crate) struct Worker {
    scorer: Scorer,
    limits: Limits,
    joining: Joining,
    metrics: Arc<Metrics>,
    builder: BatchBuilder,
    /// Requests in the batch, and where the samples of each end.
    joined: Vec<(Job, usize)>,
    /// Requests that came together the last times: so many are waited for.
    expected: usize,
    /// The answer up to the first prediction.
    head: Vec<u8>,
    /// For each label what stands before its score: `{"click":`, `,"buy":`.
    labels: Vec<Vec<u8>>,
}

impl Worker {
    pub(crate) fn new(scorer: Scorer, limits: Limits, joining: Joining, metrics: Arc<Metrics>) -> Worker {
        let manifest = scorer.model().manifest();
        let head = format!("{{\"model\":{},\"version\":{},\"predictions\":[", json!(manifest.model), manifest.version);
        let label = |(index, label)| format!("{}{}:", if index == 0 { '{' } else { ',' }, json!(label)).into_bytes();
        let labels = manifest.labels().iter().enumerate().map(label).collect();
        let builder = scorer.model().parser().builder(0);
        let (joined, head) = (Vec::new(), head.into_bytes());
        Worker { scorer, limits, joining, metrics, builder, joined, expected: 1, head, labels }
    }

    /// Scores a request, and with it those that wait behind it or come in time.
    pub(crate) fn work(&mut self, first: Job, waiting: &Waiting<'_, Job>) {
        // of a batch that ended in a panic, which all of its requests paid for
        self.joined.clear();
        if self.builder.batch().signs.len() > KEPT_SIGNS {
            // what one large request took is not kept for ever
            self.builder = self.scorer.model().parser().builder(0);
        }
        self.builder.truncate(0);
        let end = first.queued + self.joining.max_wait;
        let mut next = Some(first);
        while let Some(job) = next {
            self.take(job);
            if self.builder.num_samples() >= self.joining.max_instances {
                break;
            }
            // as many as came together before are worth a wait, further ones are not
            next = waiting.next((self.joined.len() < self.expected).then_some(end));
        }
        self.learn();
        self.score();
    }

    /// Adds the instances of a request to the batch, or refuses it.
    fn take(&mut self, job: Job) {
        self.metrics.queue.observe(job.queued.elapsed());
        // nobody is left to read it
        if job.answer.is_closed() {
            return;
        }
        let started = Instant::now();
        let parser = self.scorer.model().parser();
        match decode(parser, job.content, &job.body, self.limits, &mut self.builder) {
            Ok(_) => {
                self.metrics.parse.observe(started.elapsed());
                self.joined.push((job, self.builder.num_samples()));
            }
            Err(error) => answer(job, Err(Refusal::Decode(error))),
        }
    }

    /// Halfway to what came together this time, up at once: waiting for those that do not come is dear.
    fn learn(&mut self) {
        let came = self.joined.len();
        self.expected = if came >= self.expected { came } else { self.expected.midpoint(came) };
    }

    /// Scores the batch and answers each request of it.
    fn score(&mut self) {
        if self.joined.is_empty() {
            return;
        }
        let batch = self.builder.batch();
        let scored = self.scorer.score(batch).map_err(|error| error.to_string());
        let stats = self.scorer.stats();
        self.metrics.lookup.observe(stats.lookup);
        self.metrics.infer.observe(stats.infer);
        self.metrics.joined.observe(self.joined.len() as f64);
        self.metrics.signs.inc_by(stats.num_signs as u64);
        self.metrics.signs_missed.inc_by(stats.num_missed as u64);
        let mut start = 0;
        for (job, end) in self.joined.drain(..) {
            let (samples, num_samples) = (start..end, (end - start) as u64);
            start = end;
            let scores =
                scored.clone().and_then(|()| self.scorer.scores_of(samples).map_err(|error| error.to_string()));
            let written = scores
                .and_then(|scores| write_answer(&self.head, &self.labels, scores).map_err(|error| error.to_string()));
            if written.is_ok() {
                self.metrics.instances.inc_by(num_samples);
            }
            answer(job, written.map_err(Refusal::Internal));
        }
    }
}

fn answer(job: Job, answer: Answer) {
    let _ = job.answer.send(answer);
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
