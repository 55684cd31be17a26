//! Merges the updates of several batches into one step, as if they had been one batch.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use elasticrec_table::partition::mix;

/// Hashes signs like the table.
#[derive(Debug, Default)]
struct SignHasher(u64);

impl Hasher for SignHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Never called: a sign is hashed as a u64.
        bytes.iter().for_each(|&byte| self.0 = mix(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, sign: u64) {
        self.0 = mix(sign);
    }
}

/// The update of one batch.
#[derive(Debug, Clone, Copy)]
pub struct UpdatePart<'a> {
    /// Distinct signs.
    pub signs: &'a [u64],
    /// `[signs, width]`, sums over the samples.
    pub gradients: &'a [f32],
    /// The mean dense gradient of the samples; empty without samples.
    pub dense: &'a [f32],
    /// Weight of all samples together.
    pub weight: f64,
    /// Number of samples.
    pub num_samples: u32,
    /// Checksum of the samples.
    pub checksum: u64,
    /// Indices of the metric sums that change.
    pub sum_indices: &'a [u32],
    /// The amount to add to each of these sums.
    pub sum_values: &'a [f64],
}

/// The merged update of several batches.
#[derive(Debug, Default)]
pub struct MergedUpdate {
    indices: HashMap<u64, u32, BuildHasherDefault<SignHasher>>,
    weight: f64,
    /// Number of batches.
    pub num_parts: u32,
    /// Distinct signs, in the order of their first batch.
    pub signs: Vec<u64>,
    /// Show and click of each sign.
    pub counts: Vec<(u32, u32)>,
    /// `[signs, width]`.
    pub gradients: Vec<f32>,
    /// The mean dense gradient of all samples; empty without samples.
    pub dense: Vec<f32>,
    /// Number of samples.
    pub num_samples: u32,
    /// Checksum of the batches' checksums, in order.
    pub checksum: u64,
    /// Indices of the metric sums that change; an index may be repeated.
    pub sum_indices: Vec<u32>,
    /// The amount to add for each index.
    pub sum_values: Vec<f64>,
}

impl MergedUpdate {
    /// Empties it and keeps the memory.
    pub fn clear(&mut self) {
        let MergedUpdate { indices, signs, counts, gradients, dense, sum_indices, sum_values, .. } = self;
        indices.clear();
        signs.clear();
        counts.clear();
        gradients.clear();
        dense.clear();
        sum_indices.clear();
        sum_values.clear();
        (self.weight, self.num_parts, self.num_samples, self.checksum) = (0.0, 0, 0, 0);
    }

    /// Adds a batch; `counts` are show and click of its signs.
    pub fn add(&mut self, part: &UpdatePart<'_>, counts: impl Iterator<Item = (u32, u32)>) {
        let width = part.gradients.len().checked_div(part.signs.len()).unwrap_or(0);
        for ((at, &sign), (show, click)) in part.signs.iter().enumerate().zip(counts) {
            let gradient = &part.gradients[at * width..(at + 1) * width];
            let next = self.signs.len() as u32;
            let index = *self.indices.entry(sign).or_insert(next) as usize;
            if index == next as usize {
                self.signs.push(sign);
                self.counts.push((show, click));
                self.gradients.extend_from_slice(gradient);
                continue;
            }
            let (shows, clicks) = &mut self.counts[index];
            *shows = shows.saturating_add(show);
            *clicks = clicks.saturating_add(click);
            let sums = &mut self.gradients[index * width..(index + 1) * width];
            sums.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
        }
        if !part.dense.is_empty() {
            self.add_dense(part.dense, part.weight);
        }
        self.num_parts += 1;
        self.num_samples += part.num_samples;
        self.checksum = mix(self.checksum.rotate_left(1) ^ part.checksum);
        self.sum_indices.extend_from_slice(part.sum_indices);
        self.sum_values.extend_from_slice(part.sum_values);
    }

    /// Updates the weighted mean of the dense gradients; a single batch keeps its exact values.
    fn add_dense(&mut self, dense: &[f32], weight: f64) {
        self.weight += weight;
        if self.dense.is_empty() {
            self.dense.extend_from_slice(dense);
            return;
        }
        // Without any weight the first gradient stays.
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
            sum_indices: &[1],
            sum_values: &[0.5],
        }
    }

    #[test]
    fn rows_and_counts_are_summed_and_dense_gradients_averaged() {
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
            assert_eq!((&merged.sum_indices[..], &merged.sum_values[..]), (&[1, 1, 1][..], &[0.5; 3][..]));
        }
    }

    #[test]
    fn the_checksum_depends_on_the_order_of_batches() {
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
