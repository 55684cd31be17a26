//! Merging: what several batches learned becomes one step, as if they had been one batch.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use elasticrec_table::partition::mix;

/// Signs are spread as the table spreads them.
#[derive(Debug, Default)]
struct SignHasher(u64);

impl Hasher for SignHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // only signs are hashed, and those come as numbers
        bytes.iter().for_each(|&byte| self.0 = mix(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, sign: u64) {
        self.0 = mix(sign);
    }
}

/// What one batch learned.
#[derive(Debug, Clone, Copy)]
pub struct UpdatePart<'a> {
    /// Each once.
    pub signs: &'a [u64],
    /// `[signs, width]`, sums over the samples.
    pub gradients: &'a [f32],
    /// The mean over the samples; empty where there are none.
    pub dense: &'a [f32],
    /// Of all samples.
    pub weight: f64,
    /// Samples in it.
    pub num_samples: u32,
    /// Of the samples.
    pub checksum: u64,
    /// Places of the metric sums
    pub sum_places: &'a [u32],
    /// and what is added to each.
    pub sum_values: &'a [f64],
}

/// What several batches learned.
#[derive(Debug, Default)]
pub struct MergedUpdate {
    places: HashMap<u64, u32, BuildHasherDefault<SignHasher>>,
    weight: f64,
    /// Batches in it.
    pub num_parts: u32,
    /// Each once, in the order of their first batch.
    pub signs: Vec<u64>,
    /// Show and click of each.
    pub counts: Vec<(u32, u32)>,
    /// `[signs, width]`.
    pub gradients: Vec<f32>,
    /// The mean over all samples; empty where there are none.
    pub dense: Vec<f32>,
    /// Samples of all.
    pub num_samples: u32,
    /// Of the checksums, in order.
    pub checksum: u64,
    /// Places of the metric sums, some of them more than once,
    pub sum_places: Vec<u32>,
    /// and what is added to each.
    pub sum_values: Vec<f64>,
}

impl MergedUpdate {
    /// Forgets what it has; the room stays.
    pub fn clear(&mut self) {
        let MergedUpdate { places, signs, counts, gradients, dense, sum_places, sum_values, .. } = self;
        places.clear();
        signs.clear();
        counts.clear();
        gradients.clear();
        dense.clear();
        sum_places.clear();
        sum_values.clear();
        (self.weight, self.num_parts, self.num_samples, self.checksum) = (0.0, 0, 0, 0);
    }

    /// Adds a batch. `counts` are show and click of its signs.
    pub fn add(&mut self, part: &UpdatePart<'_>, counts: impl Iterator<Item = (u32, u32)>) {
        let width = part.gradients.len().checked_div(part.signs.len()).unwrap_or(0);
        for ((at, &sign), (show, click)) in part.signs.iter().enumerate().zip(counts) {
            let gradient = &part.gradients[at * width..(at + 1) * width];
            let next = self.signs.len() as u32;
            let place = *self.places.entry(sign).or_insert(next) as usize;
            if place == next as usize {
                self.signs.push(sign);
                self.counts.push((show, click));
                self.gradients.extend_from_slice(gradient);
                continue;
            }
            let (shows, clicks) = &mut self.counts[place];
            *shows = shows.saturating_add(show);
            *clicks = clicks.saturating_add(click);
            let sums = &mut self.gradients[place * width..(place + 1) * width];
            sums.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
        }
        if !part.dense.is_empty() {
            self.add_dense(part.dense, part.weight);
        }
        self.num_parts += 1;
        self.num_samples += part.num_samples;
        self.checksum = mix(self.checksum.rotate_left(1) ^ part.checksum);
        self.sum_places.extend_from_slice(part.sum_places);
        self.sum_values.extend_from_slice(part.sum_values);
    }

    /// Keeps the weighted mean of the dense gradients, so that one batch alone is as it was.
    fn add_dense(&mut self, dense: &[f32], weight: f64) {
        self.weight += weight;
        if self.dense.is_empty() {
            self.dense.extend_from_slice(dense);
            return;
        }
        // without any weight nothing can be said of the mean
        let share = if self.weight > 0.0 { (weight / self.weight) as f32 } else { 0.0 };
        self.dense.iter_mut().zip(dense).for_each(|(mean, value)| *mean += (value - *mean) * share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part<'a>(signs: &'a [u64], gradients: &'a [f32], dense: &'a [f32], weight: f64) -> UpdatePart<'a> {
        UpdatePart {
            signs,
            gradients,
            dense,
            weight,
            num_samples: 2,
            checksum: 5,
            sum_places: &[1],
            sum_values: &[0.5],
        }
    }

    #[test]
    fn sums_rows_and_counts_and_takes_the_mean_of_the_network() {
        let mut merged = MergedUpdate::default();
        for _ in 0..2 {
            merged.clear();
            merged.add(&part(&[7, 9], &[1.0, 2.0, 3.0, 4.0], &[1.0, 1.0], 1.0), [(1, 0), (2, 1)].into_iter());
            merged.add(&part(&[9, 8], &[0.5, 0.5, 6.0, 7.0], &[4.0, 7.0], 2.0), [(1, 1), (u32::MAX, 0)].into_iter());
            merged.add(&part(&[], &[], &[], 0.0), std::iter::empty());
            assert_eq!(merged.signs, [7, 9, 8]);
            assert_eq!(merged.counts, [(1, 0), (3, 2), (u32::MAX, 0)]);
            assert_eq!(merged.gradients, [1.0, 2.0, 3.5, 4.5, 6.0, 7.0]);
            assert_eq!(merged.dense, [3.0, 5.0]);
            assert_eq!((merged.num_parts, merged.num_samples), (3, 6));
            assert_eq!((&merged.sum_places[..], &merged.sum_values[..]), (&[1, 1, 1][..], &[0.5; 3][..]));
        }
    }

    #[test]
    fn the_order_of_batches_is_part_of_the_checksum() {
        let checksum = |order: [u64; 2]| {
            let mut merged = MergedUpdate::default();
            for checksum in order {
                merged.add(&UpdatePart { checksum, ..part(&[], &[], &[], 0.0) }, std::iter::empty());
            }
            merged.checksum
        };
        assert_ne!(checksum([1, 2]), checksum([2, 1]));
    }
}
