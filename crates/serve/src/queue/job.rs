//! A queued prediction: its body, deadline and answer channel, and the answer of a worker.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::readers::ReaderTime;
use crate::codecs::{Codec, Reply};
use crate::refusal::Refusal;

/// Longer bodies are left to the threads of the queue: a socket thread serves no sockets while it scores.
pub(super) const MAX_SMALL_BYTES: usize = 64 << 10;

/// A prediction on its way to a scorer.
pub(crate) struct Job {
    pub(crate) codec: Codec,
    pub(crate) body: Bytes,
    /// Time that reader processes took for lines in a user's own format.
    pub(crate) reader: ReaderTime,
    pub(crate) queued: Instant,
    /// The time at which the client stops waiting for the answer.
    pub(crate) deadline: Option<Deadline>,
    pub(crate) answer: oneshot::Sender<Answer>,
    /// Whether it has more instances than a socket thread scores.
    pub(crate) is_large: bool,
}

impl Job {
    /// Returns whether a socket thread may score it.
    pub(crate) fn is_small(&self) -> bool {
        !self.is_large && self.body.len() <= MAX_SMALL_BYTES
    }
}

/// The time limit of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    /// The whole time limit, for messages.
    pub(crate) after: Duration,
}

impl Deadline {
    pub(crate) fn within(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after, after }
    }

    pub(crate) fn refusal(self) -> Refusal {
        Refusal::DeadlineExceeded { after_ms: self.after.as_millis() }
    }
}

/// A prediction, or the reason of its refusal.
pub(crate) type Answer = Result<Prediction, Refusal>;

/// The scores of a request, encoded.
#[derive(Debug)]
pub(crate) struct Prediction {
    pub(crate) reply: Reply,
    pub(crate) timing: Timing,
}

/// The time of each stage of a request. Work done for several requests together counts in full for each.
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
    /// Returns the stages by name, in their order.
    pub(crate) fn stages(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let stages = [
            ("queue", self.queue),
            ("parse", self.parse),
            ("reader", self.reader),
            ("lookup", self.lookup),
            ("infer", self.infer),
            ("write", self.write),
        ];
        // Most models have no reader of their own.
        stages.into_iter().filter(|&(name, time)| name != "reader" || !time.is_zero())
    }

    /// Returns the value of the header `Server-Timing`, in milliseconds.
    pub(crate) fn header(&self) -> String {
        let stages = self.stages().map(|(name, time)| format!("{name};dur={:.3}", time.as_secs_f64() * 1e3));
        stages.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_requests_and_those_with_many_instances_are_not_small() {
        let is_small = |num_bytes: usize, is_large: bool| {
            let (body, answer) = (vec![0; num_bytes].into(), oneshot::channel().0);
            let (reader, queued) = (ReaderTime::default(), Instant::now());
            Job { codec: Codec::Text, body, reader, queued, deadline: None, answer, is_large }.is_small()
        };
        assert!(is_small(MAX_SMALL_BYTES, false));
        assert!(!is_small(MAX_SMALL_BYTES + 1, false));
        assert!(!is_small(1, true));
    }
}
