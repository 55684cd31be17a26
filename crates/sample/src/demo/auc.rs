//! The area under the ROC curve of the true scores against the labels that were drawn from them.
//!
//! Scores are counted in 2^20 buckets over the logits from -10 to 10; a tie within a bucket counts half. So memory does
//! not grow with the number of samples, and the counts of threads can be added in any order. A bucket is 2e-5 wide, so
//! the error from ties is far below the last printed digit.

const NUM_BUCKETS: usize = 1 << 20;
const LIMIT: f64 = 10.0;

/// Counts of clicked and other samples in each bucket of scores.
pub(super) struct Ranking {
    /// `[not clicked, clicked]` of each bucket.
    counts: Vec<[u64; 2]>,
    /// The range of buckets in use, `first..end`; most buckets are empty and need not be visited.
    first: usize,
    end: usize,
}

impl Ranking {
    pub(super) fn new() -> Self {
        Self { counts: vec![[0, 0]; NUM_BUCKETS], first: NUM_BUCKETS, end: 0 }
    }

    pub(super) fn add(&mut self, logit: f64, click: bool) {
        let scale = NUM_BUCKETS as f64 / (2.0 * LIMIT);
        // A float cast saturates, so scores beyond the limits land in the first and the last bucket.
        let bucket = (((logit + LIMIT) * scale) as usize).min(NUM_BUCKETS - 1);
        self.counts[bucket][usize::from(click)] += 1;
        self.first = self.first.min(bucket);
        self.end = self.end.max(bucket + 1);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.first = self.first.min(other.first);
        self.end = self.end.max(other.end);
        for bucket in other.first..other.end {
            self.counts[bucket][0] += other.counts[bucket][0];
            self.counts[bucket][1] += other.counts[bucket][1];
        }
    }

    /// Returns `None` unless there are both clicked and other samples.
    pub(super) fn auc(&self) -> Option<f64> {
        let mut negatives = 0u64;
        let mut positives = 0u64;
        let mut twice_in_order = 0u128;
        for bucket in self.first..self.end {
            let [negative, positive] = self.counts[bucket];
            twice_in_order += u128::from(positive) * (2 * u128::from(negatives) + u128::from(negative));
            negatives += negative;
            positives += positive;
        }
        let pairs = u128::from(negatives) * u128::from(positives);
        (pairs > 0).then(|| twice_in_order as f64 / (2.0 * pairs as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::Stream;
    use super::*;

    fn naive(samples: &[(f64, bool)]) -> f64 {
        let mut in_order = 0.0;
        let mut pairs = 0.0;
        for (high, _) in samples.iter().filter(|(_, click)| *click) {
            for (low, _) in samples.iter().filter(|(_, click)| !*click) {
                pairs += 1.0;
                in_order += if high > low { 1.0 } else { 0.5 * f64::from(u8::from(high == low)) };
            }
        }
        in_order / pairs
    }

    #[test]
    fn agrees_with_all_pairs() {
        let mut stream = Stream::new(3, 0);
        let samples: Vec<(f64, bool)> = (0..1500)
            .map(|_| {
                let logit = 1.5 * stream.bell();
                (logit, stream.uniform() < 1.0 / (1.0 + (-logit).exp()))
            })
            .collect();
        let (mut whole, mut half, mut rest) = (Ranking::new(), Ranking::new(), Ranking::new());
        for (index, &(logit, click)) in samples.iter().enumerate() {
            whole.add(logit, click);
            if index % 3 == 0 { half.add(logit, click) } else { rest.add(logit, click) }
        }
        half.merge(&rest);
        let expected = naive(&samples);
        assert!((whole.auc().unwrap() - expected).abs() < 1e-5);
        assert_eq!(whole.auc(), half.auc());
    }

    #[test]
    fn ties_and_extremes() {
        let mut ranking = Ranking::new();
        assert_eq!(ranking.auc(), None);
        ranking.add(0.5, true);
        assert_eq!(ranking.auc(), None);
        ranking.add(0.5, false);
        assert_eq!(ranking.auc(), Some(0.5));
        ranking.add(1e9, true);
        ranking.add(-1e9, false);
        assert_eq!(ranking.auc(), Some(0.875));
    }
}
