//! Hands out the requests of a load, each when it is due, to the connections that have nothing to do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::schedule::Schedule;

/// What all threads of a load share.
///
/// A request is taken only by a connection that is free, and held until it is due. So when one that is due has not been taken, all
/// connections are busy, whichever threads they belong to.
pub(super) struct Desk {
    start: Instant,
    end: Instant,
    /// None in a closed loop.
    schedule: Option<Mutex<Schedule>>,
    unsent: AtomicU64,
    stopped: AtomicBool,
    answered: AtomicU64,
    failed: AtomicU64,
}

/// A request to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    /// When.
    pub(super) due: Instant,
    /// The time was fixed beforehand; in a closed loop it is when the answer to the one before was there.
    pub(super) is_timed: bool,
}

impl Desk {
    pub(super) fn new(start: Instant, length: Duration, schedule: Option<Schedule>) -> Self {
        let schedule = schedule.map(Mutex::new);
        let zero = AtomicU64::default;
        let stopped = AtomicBool::new(false);
        Desk { start, end: start + length, schedule, unsent: zero(), stopped, answered: zero(), failed: zero() }
    }

    /// The next request; none after the end.
    pub(super) fn take(&self) -> Option<Turn> {
        let now = Instant::now();
        if self.is_stopped() {
            return None;
        }
        let Some(schedule) = &self.schedule else {
            return (now < self.end).then_some(Turn { due: now.max(self.start), is_timed: false });
        };
        let mut schedule = schedule.lock().unwrap_or_else(PoisonError::into_inner);
        if now >= self.end {
            // what is left in it was due before the end
            self.unsent.fetch_add(schedule.by_ref().count() as u64, Ordering::Relaxed);
            return None;
        }
        Some(Turn { due: self.start + schedule.next()?, is_timed: true })
    }

    /// Counts what came of a request, for who watches.
    pub(super) fn note(&self, is_answered: bool) {
        let counter = if is_answered { &self.answered } else { &self.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Answered and failed so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.answered.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Requests that were due and could not be sent until the end.
    pub(super) fn unsent(&self) -> u64 {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Nothing more is sent or waited for.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::Arrivals;
    use super::*;

    #[test]
    fn what_is_left_at_the_end_is_unsent_and_counted_once() {
        let length = Duration::from_millis(100);
        let start = Instant::now() - length;
        let desk = Desk::new(start, length, Some(Schedule::new(1000.0, Arrivals::Even, length)));
        assert_eq!((desk.take(), desk.take()), (None, None));
        assert_eq!(desk.unsent(), 100);
    }

    #[test]
    fn requests_are_handed_out_in_order_until_the_end() {
        let length = Duration::from_secs(1000);
        let start = Instant::now() - length / 2;
        let desk = Desk::new(start, length, Some(Schedule::new(0.004, Arrivals::Even, length)));
        let turns: Vec<Turn> = std::iter::from_fn(|| desk.take()).collect();
        let seconds: Vec<u64> = turns.iter().map(|turn| (turn.due - start).as_secs()).collect();
        assert_eq!(seconds, [0, 250, 500, 750]);
        assert!(turns.iter().all(|turn| turn.is_timed));
        assert_eq!(desk.unsent(), 0);
    }

    #[test]
    fn a_load_that_is_stopped_has_no_more_turns() {
        let desk = Desk::new(Instant::now(), Duration::from_secs(1000), None);
        assert_eq!(desk.take().map(|turn| turn.is_timed), Some(false));
        desk.stop();
        assert_eq!(desk.take(), None);
    }
}
