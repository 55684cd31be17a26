//! A scorer on its thread: requests that wait together are scored together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_sample::BatchBuilder;

use crate::answers::Answers;
use crate::deployment::{Done, Job, MAX_HERE_INSTANCES, Timing};
use crate::face::{About, Limits, Wanted};
use crate::metrics::ModelMetrics;
use crate::pool::Waiting;
use crate::refusal::Refusal;
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

/// A request in the batch.
struct Joined {
    job: Job,
    wanted: Wanted,
    /// Where its samples end.
    end: usize,
    timing: Timing,
}

/// What became of a request that waited.
enum Taken {
    Joined(Joined),
    /// Refused, or nobody waits for it.
    Answered,
    /// It has more instances than are scored here.
    TooLarge(Job),
}

/// A scorer and what it joins requests in.
pub(crate) struct Worker {
    scorer: Scorer,
    about: Arc<About>,
    limits: Limits,
    joining: Joining,
    metrics: ModelMetrics,
    builder: BatchBuilder,
    answers: Answers,
    /// Requests that came together the last times: so many are waited for.
    expected: usize,
}

impl Worker {
    pub(crate) fn new(
        scorer: Scorer,
        about: Arc<About>,
        limits: Limits,
        joining: Joining,
        metrics: ModelMetrics,
        answers: Answers,
    ) -> Worker {
        let builder = scorer.model().parser().builder(0);
        Worker { scorer, about, limits, joining, metrics, builder, answers, expected: 1 }
    }

    /// Scores a request, and with it those that wait behind it or come in time.
    pub(crate) fn work(&mut self, first: Job, waiting: &Waiting<'_, Job>) {
        if self.builder.batch().signs.len() > KEPT_SIGNS {
            // what one large request took is not kept for ever
            self.builder = self.scorer.model().parser().builder(0);
        }
        self.builder.truncate(0);
        // not in a field: after a panic nobody would hear of them before the next batch
        let mut joined = Vec::new();
        let end = first.queued + self.joining.max_wait;
        let mut next = Some(first);
        while let Some(job) = next {
            if waiting.is_here && !job.is_small() {
                waiting.put_back(job);
                break;
            }
            match self.take(job, waiting.is_here) {
                Taken::Joined(request) => joined.push(request),
                Taken::Answered => (),
                Taken::TooLarge(job) => {
                    waiting.put_back(job);
                    break;
                }
            }
            if self.builder.num_samples() >= self.joining.max_instances {
                break;
            }
            // as many as came together before are worth a wait, further ones are not
            next = waiting.next((joined.len() < self.expected).then_some(end));
        }
        self.learn(joined.len());
        if !joined.is_empty() {
            self.score(joined, waiting.is_here);
        }
    }

    /// Adds the instances of a request to the batch, or refuses it.
    fn take(&mut self, mut job: Job, is_here: bool) -> Taken {
        let started = Instant::now();
        let queue = started - job.queued + job.reader.waited;
        // nobody is left to read it
        if job.answer.is_closed() {
            return Taken::Answered;
        }
        if let Some(late) = job.deadline.filter(|deadline| deadline.at <= started) {
            self.metrics.queue.observe(queue);
            let _ = job.answer.send(Err(late.refusal()));
            return Taken::Answered;
        }
        let parser = self.scorer.model().parser();
        let before = self.builder.num_samples();
        let decoded = job.face.decode(parser, &job.body, self.limits, &mut self.builder);
        if is_here && self.builder.num_samples() - before > MAX_HERE_INSTANCES {
            // known only now; who has the time for it reads it again
            self.builder.truncate(before);
            job.is_large = true;
            return Taken::TooLarge(job);
        }
        self.metrics.queue.observe(queue);
        match decoded.and_then(|wanted| wanted.check(&self.about).map(|()| wanted)) {
            Ok(wanted) => {
                let reader = job.reader.took;
                let timing = Timing { queue, parse: started.elapsed() + reader, reader, ..Timing::default() };
                self.metrics.parse.observe(timing.parse);
                if !reader.is_zero() {
                    self.metrics.reader.observe(reader);
                }
                Taken::Joined(Joined { job, wanted, end: self.builder.num_samples(), timing })
            }
            Err(error) => {
                self.builder.truncate(before);
                let _ = job.answer.send(Err(error.into()));
                Taken::Answered
            }
        }
    }

    /// Halfway to what came together this time, up at once: waiting for those that do not come is dear.
    fn learn(&mut self, came: usize) {
        self.expected = if came >= self.expected { came } else { self.expected.midpoint(came) };
    }

    /// Scores the batch and answers each request of it.
    fn score(&mut self, joined: Vec<Joined>, is_here: bool) {
        // what the most patient of them waits for; those whose time is over first are told so where they wait
        let deadline = joined.iter().map(|joined| joined.job.deadline.map(|deadline| deadline.at));
        let deadline = deadline.reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b))).flatten();
        let scored = self.scorer.score(self.builder.batch(), deadline).map_err(Refusal::from);
        let stats = self.scorer.stats();
        self.metrics.lookup.observe(stats.lookup);
        self.metrics.infer.observe(stats.infer);
        self.metrics.joined.observe(joined.len() as f64);
        self.metrics.signs.inc_by(stats.num_signs as u64);
        self.metrics.signs_missed.inc_by(stats.num_missed as u64);
        self.metrics.signs_lost.inc_by(stats.num_lost as u64);
        let (mut start, mut done) = (0, Vec::with_capacity(joined.len()));
        for Joined { job, wanted, end, timing } in joined {
            let started = Instant::now();
            let (samples, num_samples) = (start..end, (end - start) as u64);
            start = end;
            let scores = scored.clone().and_then(|()| self.scorer.scores_of(samples).map_err(Refusal::from));
            let reply = scores.and_then(|scores| wanted.write(&self.about, scores).map_err(Refusal::Internal));
            let write = started.elapsed();
            if reply.is_ok() {
                self.metrics.instances.inc_by(num_samples);
                self.metrics.write.observe(write);
            }
            let timing = Timing { lookup: stats.lookup, infer: stats.infer, write, ..timing };
            done.push((job.answer, reply.map(|reply| Done { reply, timing })));
        }
        self.answers.give(done, is_here);
    }
}
