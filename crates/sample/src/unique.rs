//! Deduplicates the signs of a batch, so that each is looked up and updated once.

use crate::batch::Batch;

/// The distinct signs of a batch in the order of their first occurrence.
#[derive(Debug, Clone, PartialEq)]
pub struct Unique {
    /// The distinct signs.
    pub signs: Vec<u64>,
    /// For each entry of `Batch::signs` its position in `signs`.
    pub inverse: Vec<u32>,
}

/// Minimum of hash table entries per sign; a half-empty hash table keeps probes short.
const ENTRIES_PER_SIGN: usize = 2;

impl Unique {
    /// Finds the distinct signs of `batch`.
    pub fn of(batch: &Batch) -> Self {
        const EMPTY: u32 = u32::MAX;
        let capacity = (batch.signs.len() * ENTRIES_PER_SIGN).next_power_of_two().max(16);
        let shift = 64 - capacity.trailing_zeros();
        let mask = capacity - 1;
        let mut positions = vec![EMPTY; capacity];
        let mut signs: Vec<u64> = Vec::with_capacity(batch.signs.len());
        let mut inverse = Vec::with_capacity(batch.signs.len());
        for &sign in &batch.signs {
            let mut at = (sign.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> shift) as usize;
            let position = loop {
                let position = positions[at];
                if position == EMPTY {
                    positions[at] = signs.len() as u32;
                    signs.push(sign);
                    break signs.len() as u32 - 1;
                }
                if signs[position as usize] == sign {
                    break position;
                }
                at = (at + 1) & mask;
            };
            inverse.push(position);
        }
        Unique { signs, inverse }
    }

    /// Returns shows and clicks of each distinct sign; every occurrence counts those of its sample.
    pub fn counts(&self, batch: &Batch) -> Vec<(u32, u32)> {
        let mut counts = vec![(0u32, 0u32); self.signs.len()];
        for b in 0..batch.num_samples() {
            let start = batch.offsets[b * batch.num_slots] as usize;
            let end = batch.offsets[(b + 1) * batch.num_slots] as usize;
            for &position in &self.inverse[start..end] {
                let (show, click) = &mut counts[position as usize];
                *show = show.saturating_add(batch.shows[b]);
                *click = click.saturating_add(batch.clicks[b]);
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::BatchBuilder;

    proptest! {
        #[test]
        fn agrees_with_a_map(samples in prop::collection::vec((1u32..4, prop::collection::vec((0u16..3, 0u64..20), 0..8)), 0..30)) {
            let mut builder = BatchBuilder::new(3, 0, 1, samples.len());
            let mut shows: HashMap<u64, u32> = HashMap::new();
            for (show, tokens) in &samples {
                builder.begin();
                for &(slot, sign) in tokens {
                    builder.add_sign(slot, sign);
                    *shows.entry(sign).or_default() += show;
                }
                builder.end(*show, 1);
            }
            let batch = builder.finish();
            let unique = Unique::of(&batch);
            prop_assert_eq!(unique.signs.len(), shows.len());
            for (&sign, &position) in batch.signs.iter().zip(&unique.inverse) {
                prop_assert_eq!(unique.signs[position as usize], sign);
            }
            for (sign, (show, _)) in unique.signs.iter().zip(unique.counts(&batch)) {
                prop_assert_eq!(shows[sign], show);
            }
        }
    }

    #[test]
    fn counts_saturate() {
        let mut builder = BatchBuilder::new(1, 0, 1, 2);
        for (show, click) in [(u32::MAX, u32::MAX - 1), (2, 2)] {
            builder.begin();
            builder.add_sign(0, 5);
            builder.end(show, click);
        }
        let batch = builder.finish();
        assert_eq!(Unique::of(&batch).counts(&batch), [(u32::MAX, u32::MAX)]);
    }
}
