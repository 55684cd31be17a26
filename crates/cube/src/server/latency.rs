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

    /// The upper bound in seconds of quantile `q`; zero without any durations.
    pub fn quantile_s(&self, q: f64) -> f64 {
        let buckets = self.buckets();
        let all: u64 = buckets.iter().map(|(_, count)| count).sum();
        let mut below = 0;
        for (bound, count) in buckets {
            below += count;
            if below > 0 && below as f64 >= q * all as f64 {
                return bound;
            }
        }
        0.0
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
        }
    }

    #[test]
    fn a_quantile_is_accurate_to_a_quarter() {
        let latency = Latency::default();
        assert!(latency.quantile_s(0.99).abs() < f64::EPSILON);
        (1..=1000).for_each(|micros| latency.note(Duration::from_micros(micros)));
        for (q, expected) in [(0.5, 500e-6), (0.99, 990e-6)] {
            let got = latency.quantile_s(q);
            assert!(got >= expected && got <= 1.26 * expected, "{q}: {got}");
        }
        assert!((latency.sum_s() - 0.5005).abs() < 1e-9);
        assert_eq!(latency.buckets().iter().map(|(_, count)| count).sum::<u64>(), 1000);
    }
}
