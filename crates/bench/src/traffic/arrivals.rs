//! The due times of the requests of an open loop.

use std::time::Duration;

/// The distribution of requests over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrivals {
    /// Evenly.
    Even,
    /// Randomly, with exponential gaps, as from many independent users. The same seed gives the same gaps.
    Poisson {
        /// The seed.
        seed: u64,
    },
}

/// The due times since the start, ascending.
#[derive(Debug, Clone)]
pub(super) struct DueTimes {
    rate: f64,
    arrivals: Arrivals,
    length: Duration,
    number: u64,
    /// The previous due time of random arrivals.
    at_s: f64,
}

impl DueTimes {
    pub(super) fn new(rate: f64, arrivals: Arrivals, length: Duration) -> Self {
        DueTimes { rate, arrivals, length, number: 0, at_s: 0.0 }
    }
}

impl Iterator for DueTimes {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let at_s = match self.arrivals {
            // Computed from the number, so that rounding errors do not add up.
            Arrivals::Even => self.number as f64 / self.rate,
            Arrivals::Poisson { seed } => {
                self.at_s -= (1.0 - uniform(seed, self.number)).ln() / self.rate;
                self.at_s
            }
        };
        self.number += 1;
        Duration::try_from_secs_f64(at_s).ok().filter(|at| *at < self.length)
    }
}

/// Returns value `number` of a pseudo-random sequence in [0, 1), by splitmix64.
fn uniform(seed: u64, number: u64) -> f64 {
    let mut value = seed.wrapping_add((number.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^= value >> 31;
    (value >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn due_times_ascend_and_match_the_rate(
            rate in 1.0..50_000.0_f64, seconds in 0.1..2.0_f64, seed in proptest::option::of(any::<u64>()),
        ) {
            let arrivals = seed.map_or(Arrivals::Even, |seed| Arrivals::Poisson { seed });
            let times: Vec<_> = DueTimes::new(rate, arrivals, Duration::from_secs_f64(seconds)).collect();
            prop_assert!(times.is_sorted());
            prop_assert!(times.iter().all(|at| at.as_secs_f64() < seconds));
            let expected = rate * seconds;
            // The number of Poisson arrivals has a variance equal to its mean.
            let allowed = if seed.is_some() { 1.0 + 6.0 * expected.sqrt() } else { 1.0 };
            prop_assert!((times.len() as f64 - expected).abs() <= allowed, "{} of {expected}", times.len());
        }
    }

    #[test]
    fn random_gaps_are_exponential_and_depend_on_the_seed() {
        let times = |seed| -> Vec<f64> {
            let arrivals = Arrivals::Poisson { seed };
            DueTimes::new(1000.0, arrivals, Duration::from_secs(100)).map(|at| at.as_secs_f64()).collect()
        };
        let found = times(7);
        assert_eq!(found, times(7));
        assert_ne!(found, times(8));
        let gaps: Vec<f64> = found.windows(2).map(|pair| (pair[1] - pair[0]) * 1000.0).collect();
        let mean_of = |power: i32| gaps.iter().map(|gap| gap.powi(power)).sum::<f64>() / gaps.len() as f64;
        // An exponential of mean 1 has the second moment 2; even gaps have 1.
        assert!((mean_of(1) - 1.0).abs() < 0.02 && (mean_of(2) - 2.0).abs() < 0.1, "{} {}", mean_of(1), mean_of(2));
    }
}
