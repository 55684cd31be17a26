//! Hands due requests to connections that are free.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::arrivals::DueTimes;

/// The state that all threads share.
///
/// A free connection takes the next request early and holds it until it is due. So a request that is due and not taken
/// means that all connections of all threads are busy.
pub(super) struct Dispatcher {
    start: Instant,
    end: Instant,
    /// None in a closed loop.
    schedule: Option<Mutex<DueTimes>>,
    unsent: AtomicU64,
    stopped: AtomicBool,
    answered: AtomicU64,
    failed: AtomicU64,
}

/// A request to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DueRequest {
    /// The time at which it is due.
    pub(super) due: Instant,
    /// Whether the time was fixed in advance (open loop); in a closed loop it is the time of the previous answer.
    pub(super) is_timed: bool,
}

impl Dispatcher {
    pub(super) fn new(start: Instant, length: Duration, schedule: Option<DueTimes>) -> Self {
        let schedule = schedule.map(Mutex::new);
        let zero = AtomicU64::default;
        let stopped = AtomicBool::new(false);
        Dispatcher { start, end: start + length, schedule, unsent: zero(), stopped, answered: zero(), failed: zero() }
    }

    /// Returns the next request, or None after the end.
    pub(super) fn take(&self) -> Option<DueRequest> {
        let now = Instant::now();
        if self.is_stopped() {
            return None;
        }
        let Some(schedule) = &self.schedule else {
            return (now < self.end).then_some(DueRequest { due: now.max(self.start), is_timed: false });
        };
        let mut schedule = schedule.lock().unwrap_or_else(PoisonError::into_inner);
        if now >= self.end {
            // The remaining requests were due before the end.
            self.unsent.fetch_add(schedule.by_ref().count() as u64, Ordering::Relaxed);
            return None;
        }
        Some(DueRequest { due: self.start + schedule.next()?, is_timed: true })
    }

    /// Counts an outcome for progress reports.
    pub(super) fn note(&self, is_answered: bool) {
        let counter = if is_answered { &self.answered } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the numbers of answered and failed requests so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.answered.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Returns the number of requests that were due and never sent.
    pub(super) fn unsent(&self) -> u64 {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Sends nothing more and waits for no answers.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::arrivals::Arrivals;
    use super::*;

    #[test]
    fn requests_left_at_the_end_are_unsent_and_counted_once() {
        let length = Duration::from_millis(100);
        let start = Instant::now() - length;
        let dispatcher = Dispatcher::new(start, length, Some(DueTimes::new(1000.0, Arrivals::Even, length)));
        assert_eq!((dispatcher.take(), dispatcher.take()), (None, None));
        assert_eq!(dispatcher.unsent(), 100);
    }

    #[test]
    fn requests_are_handed_out_in_order_until_the_end() {
        let length = Duration::from_secs(1000);
        let start = Instant::now() - length / 2;
        let dispatcher = Dispatcher::new(start, length, Some(DueTimes::new(0.004, Arrivals::Even, length)));
        let turns: Vec<DueRequest> = std::iter::from_fn(|| dispatcher.take()).collect();
        let seconds: Vec<u64> = turns.iter().map(|request| (request.due - start).as_secs()).collect();
        assert_eq!(seconds, [0, 250, 500, 750]);
        assert!(turns.iter().all(|request| request.is_timed));
        assert_eq!(dispatcher.unsent(), 0);
    }

    #[test]
    fn a_stopped_dispatcher_hands_out_nothing() {
        let dispatcher = Dispatcher::new(Instant::now(), Duration::from_secs(1000), None);
        assert_eq!(dispatcher.take().map(|request| request.is_timed), Some(false));
        dispatcher.stop();
        assert_eq!(dispatcher.take(), None);
    }
}
