//! Latency histogram with fixed buckets, four per doubling.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Durations below 2^10 ns are in the first bucket.
const FIRST_BIT: u32 = 10;
/// Durations of 2^34 ns (17 seconds) and more are in the last bucket.
const LAST_BIT: u32 = 34;
const STEPS: u32 = 4;
const NUM_BUCKETS: usize = ((LAST_BIT - FIRST_BIT) * STEPS) as usize + 2;

/// A histogram of durations.
#[derive(Debug)]
pub struct Latency {
    buckets: [AtomicU64; NUM_BUCKETS],
    nanos: AtomicU64,
}

impl Default for Latency {
    fn default() -> Self {
        Latency { buckets: [const { AtomicU64::new(0) }; NUM_BUCKETS], nanos: AtomicU64::new(0) }
    }
}

impl Latency {
    /// Counts a duration.
    pub fn note(&self, took: Duration) {
        let nanos = took.as_nanos() as u64;
        self.buckets[bucket_of(nanos)].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns each bucket's upper bound in seconds, infinite for the last, and its count.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let count = |at: usize| self.buckets[at].load(Ordering::Relaxed);
        (0..NUM_BUCKETS).map(|at| (bound_s(at), count(at))).collect()
    }

    /// The sum of all durations in seconds.
    pub fn sum_s(&self) -> f64 {
        self.nanos.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

fn bucket_of(nanos: u64) -> usize {
    if nanos < 1 << FIRST_BIT {
        return 0;
    }
    let bit = nanos.ilog2();
    if bit >= LAST_BIT {
        return NUM_BUCKETS - 1;
    }
    // The two bits after the highest bit.
    let step = (nanos >> (bit - 2)) as u32 % STEPS;
    ((bit - FIRST_BIT) * STEPS + step) as usize + 1
}

fn bound_s(bucket: usize) -> f64 {
    if bucket == NUM_BUCKETS - 1 {
        return f64::INFINITY;
    }
    let (bit, step) = (FIRST_BIT as usize + bucket / STEPS as usize, bucket % STEPS as usize);
    (1u64 << bit) as f64 * (1.0 + step as f64 / f64::from(STEPS)) * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_is_between_the_bounds_of_its_bucket() {
        for nanos in (0..200).chain((0..2000).map(|at| 1000 + at * 7)).chain((0..44).map(|bit| (1u64 << bit) - 1)) {
            let bucket = bucket_of(nanos);
            let seconds = nanos as f64 * 1e-9;
            assert!(seconds < bound_s(bucket), "{nanos}");
            assert!(bucket == 0 || seconds >= bound_s(bucket - 1), "{nanos}");
            assert!(bucket == 0 || bucket == NUM_BUCKETS - 1 || bound_s(bucket) <= 1.26 * seconds, "{nanos}");
        }
    }

    #[test]
    fn durations_are_counted_and_summed() {
        let latency = Latency::default();
        (1..=1000).for_each(|micros| latency.note(Duration::from_micros(micros)));
        assert!((latency.sum_s() - 0.5005).abs() < 1e-9);
        assert_eq!(latency.buckets().iter().map(|(_, count)| count).sum::<u64>(), 1000);
    }
}
