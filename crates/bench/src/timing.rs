//! Timing of short pieces of work.
//!
//! The work and its memory probe are timed alternately and compared by the median: on a shared machine the same code
//! runs at half its speed for milliseconds at a time.

use std::hint::black_box;
use std::time::Instant;

/// Returns the seconds that `work` takes.
pub(crate) fn seconds<R>(work: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_secs_f64()
}

/// Returns the median of `times`, or 0 if there are none.
pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}
