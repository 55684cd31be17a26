//! A batch of samples in flat arrays; signs are ordered by sample, then slot.

use xxhash_rust::xxh3::Xxh3Default;

/// Parsed samples. `offsets[b * num_slots + s] .. offsets[b * num_slots + s + 1]` are the signs of sample `b` in slot `s`.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Slots per sample.
    pub num_slots: usize,
    /// Dense values per sample.
    pub num_dense: usize,
    /// Labels per sample.
    pub num_labels: usize,
    /// All signs.
    pub signs: Vec<u64>,
    /// Index of the first sign of each (sample, slot) in `signs`, and one more at the end.
    pub offsets: Vec<u32>,
    /// `[num_samples, num_dense]`, normalised.
    pub dense: Vec<f32>,
    /// `[num_samples, num_labels]`: the share of the shows with the label.
    pub labels: Vec<f32>,
    /// Weight of each sample in the loss: its shows, unless the data has weights.
    pub weights: Vec<f32>,
    /// Shows of each sample.
    pub shows: Vec<u32>,
    /// Clicks of each sample.
    pub clicks: Vec<u32>,
}

impl Batch {
    /// Number of samples.
    pub fn num_samples(&self) -> usize {
        self.shows.len()
    }

    /// Whether the arrays have consistent lengths and the offsets are valid.
    pub fn is_consistent(&self) -> bool {
        let n = self.num_samples();
        let lengths = [
            (self.offsets.len(), n * self.num_slots + 1),
            (self.dense.len(), n * self.num_dense),
            (self.labels.len(), n * self.num_labels),
            (self.weights.len(), n),
            (self.clicks.len(), n),
        ];
        lengths.iter().all(|(got, expected)| got == expected)
            && self.offsets.first() == Some(&0)
            && self.offsets.is_sorted()
            && self.offsets.last().copied() == Some(self.signs.len() as u32)
    }

    /// Checksum of signs and counts. It tells whether a batch that is read again has the same records.
    pub fn checksum(&self) -> u64 {
        let mut hash = Xxh3Default::new();
        hash.update(bytemuck::cast_slice(&self.signs));
        for numbers in [&self.offsets, &self.shows, &self.clicks] {
            hash.update(bytemuck::cast_slice(numbers));
        }
        hash.digest()
    }

    /// The signs of sample `b` in slot `s`.
    pub fn signs_of(&self, b: usize, s: usize) -> &[u64] {
        let at = b * self.num_slots + s;
        &self.signs[self.offsets[at] as usize..self.offsets[at + 1] as usize]
    }
}

/// Builds a batch sample by sample; an unfinished sample is discarded.
#[derive(Debug)]
pub struct BatchBuilder {
    batch: Batch,
    tokens: Vec<(u16, u64)>,
    sorted: bool,
    /// Signs of bucket slots, which come after all other slots.
    buckets: Vec<(u16, u64)>,
    dense: Vec<f32>,
    labels: Vec<f32>,
    /// Labels that the sample has so far.
    labels_seen: Vec<bool>,
    /// Occurrences of each dense name in the line so far, by its first column.
    dense_seen: Vec<u16>,
    /// Maximum number of signs in each slot, of which the last ones are kept; empty if no slot is limited.
    longest: Vec<usize>,
    /// Value for missing dense values.
    missing: f32,
}

impl BatchBuilder {
    /// Creates an empty batch with room for `capacity` samples.
    pub fn new(num_slots: usize, num_dense: usize, num_labels: usize, capacity: usize) -> Self {
        let mut offsets = Vec::with_capacity(capacity * num_slots + 1);
        offsets.push(0);
        BatchBuilder {
            batch: Batch {
                num_slots,
                num_dense,
                num_labels,
                signs: Vec::with_capacity(capacity * num_slots),
                offsets,
                dense: Vec::with_capacity(capacity * num_dense),
                labels: Vec::with_capacity(capacity * num_labels),
                weights: Vec::with_capacity(capacity),
                shows: Vec::with_capacity(capacity),
                clicks: Vec::with_capacity(capacity),
            },
            tokens: Vec::with_capacity(2 * num_slots),
            sorted: true,
            buckets: Vec::new(),
            dense: vec![0.0; num_dense],
            labels: vec![0.0; num_labels],
            labels_seen: vec![false; num_labels],
            dense_seen: vec![0; num_dense],
            longest: Vec::new(),
            missing: 0.0,
        }
    }

    /// Limits each slot to its last `longest[slot]` signs.
    pub(crate) fn with_longest(mut self, longest: &[usize]) -> Self {
        self.longest = longest.to_vec();
        self
    }

    /// Uses `missing` for missing dense values.
    pub(crate) fn with_missing(mut self, missing: f32) -> Self {
        self.missing = missing;
        self
    }

    /// Starts a sample and discards an unfinished one.
    #[inline]
    pub fn begin(&mut self) {
        self.tokens.clear();
        self.sorted = true;
        self.buckets.clear();
        self.dense.fill(self.missing);
        self.labels.fill(0.0);
        self.labels_seen.fill(false);
        self.dense_seen.fill(0);
    }

    /// Counts an occurrence of the dense name with first column `first`; returns the number of earlier ones.
    #[inline]
    pub(crate) fn next_dense(&mut self, first: usize) -> usize {
        let seen = self.dense_seen[first];
        self.dense_seen[first] = seen.saturating_add(1);
        usize::from(seen)
    }

    /// Adds a sign to a slot of the sample.
    #[inline]
    pub fn add_sign(&mut self, slot: u16, sign: u64) {
        debug_assert!(usize::from(slot) < self.batch.num_slots);
        self.sorted &= self.tokens.last().is_none_or(|&(last, _)| last <= slot);
        self.tokens.push((slot, sign));
    }

    /// Adds a sign to a bucket slot. Separate from [`Self::add_sign`], because dense values may come first in a line
    /// and signs out of slot order must be sorted.
    #[inline]
    pub(crate) fn add_bucket(&mut self, slot: u16, sign: u64) {
        self.buckets.push((slot, sign));
    }

    /// Sets a normalised dense value of the sample.
    #[inline]
    pub fn set_dense(&mut self, index: usize, value: f32) {
        self.dense[index] = value;
    }

    /// Sets a label of the sample.
    #[inline]
    pub fn set_label(&mut self, index: usize, value: f32) {
        self.labels[index] = value;
        self.labels_seen[index] = true;
    }

    /// Whether the sample has a label.
    #[inline]
    pub(crate) fn has_label(&self, index: usize) -> bool {
        self.labels_seen[index]
    }

    /// The first missing label of the sample.
    #[inline]
    pub(crate) fn missing_label(&self) -> Option<usize> {
        self.labels_seen.iter().position(|is_seen| !is_seen)
    }

    /// Appends the sample to the batch, with its shows as weight.
    #[inline]
    pub fn end(&mut self, show: u32, click: u32) {
        self.end_weighted(show, click, show as f32);
    }

    /// Appends the sample to the batch.
    #[inline]
    pub fn end_weighted(&mut self, show: u32, click: u32, weight: f32) {
        if !self.buckets.is_empty() {
            self.sorted &= self.buckets.is_sorted_by_key(|&(slot, _)| slot);
            self.tokens.append(&mut self.buckets);
        }
        if !self.sorted {
            self.tokens.sort_by_key(|&(slot, _)| slot);
        }
        let mut next = 0;
        for slot in 0..self.batch.num_slots as u16 {
            while let Some(&(at, sign)) = self.tokens.get(next)
                && at == slot
            {
                self.batch.signs.push(sign);
                next += 1;
            }
            if !self.longest.is_empty() {
                self.trim(slot);
            }
            self.batch.offsets.push(self.batch.signs.len() as u32);
        }
        self.batch.dense.extend_from_slice(&self.dense);
        self.batch.labels.extend_from_slice(&self.labels);
        self.batch.weights.push(weight);
        self.batch.shows.push(show);
        self.batch.clicks.push(click);
    }

    /// Appends samples that all have `widths[slot]` signs in each slot. Returns their signs
    /// `[num_samples, sum of widths]` and dense values, to be filled in, or `None` if a slot is limited to fewer signs.
    pub fn append_uniform(&mut self, num_samples: usize, widths: &[usize]) -> Option<(&mut [u64], &mut [f32])> {
        assert_eq!(widths.len(), self.batch.num_slots);
        if self.longest.iter().zip(widths).any(|(longest, width)| width > longest) {
            return None;
        }
        let Batch { num_dense, num_labels, .. } = self.batch;
        let (num_signs, num_values) = (self.batch.signs.len(), self.batch.dense.len());
        let row: usize = widths.iter().sum();
        self.batch.signs.resize(num_signs + num_samples * row, 0);
        let mut end = num_signs;
        self.batch.offsets.reserve(num_samples * widths.len());
        for _ in 0..num_samples {
            self.batch.offsets.extend(widths.iter().map(|width| {
                end += width;
                end as u32
            }));
        }
        let samples = self.batch.shows.len() + num_samples;
        self.batch.dense.resize(num_values + num_samples * num_dense, self.missing);
        self.batch.labels.resize(samples * num_labels, 0.0);
        self.batch.weights.resize(samples, 1.0);
        self.batch.shows.resize(samples, 1);
        self.batch.clicks.resize(samples, 0);
        Some((&mut self.batch.signs[num_signs..], &mut self.batch.dense[num_values..]))
    }

    /// Drops the first signs of a slot that exceeds its limit.
    fn trim(&mut self, slot: u16) {
        let start = self.batch.offsets.last().map_or(0, |&start| start as usize);
        let excess = (self.batch.signs.len() - start).saturating_sub(self.longest[usize::from(slot)]);
        self.batch.signs.drain(start..start + excess);
    }

    /// Number of samples so far.
    pub fn num_samples(&self) -> usize {
        self.batch.num_samples()
    }

    /// Drops all samples after the first `num_samples`.
    pub fn truncate(&mut self, num_samples: usize) {
        let Batch { num_slots, num_dense, num_labels, .. } = self.batch;
        if num_samples >= self.batch.num_samples() {
            return;
        }
        self.batch.offsets.truncate(num_samples * num_slots + 1);
        self.batch.signs.truncate(self.batch.offsets.last().map_or(0, |&end| end as usize));
        self.batch.dense.truncate(num_samples * num_dense);
        self.batch.labels.truncate(num_samples * num_labels);
        self.batch.weights.truncate(num_samples);
        self.batch.shows.truncate(num_samples);
        self.batch.clicks.truncate(num_samples);
    }

    /// The samples so far.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Returns the batch.
    pub fn finish(self) -> Batch {
        self.batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_ordered_by_sample_then_slot_and_keep_their_order_within() {
        let mut builder = BatchBuilder::new(3, 0, 1, 2);
        builder.begin();
        for (slot, sign) in [(2, 9), (0, 5), (2, 8), (0, 5)] {
            builder.add_sign(slot, sign);
        }
        builder.end(1, 0);
        builder.begin();
        builder.end(4, 2);
        let batch = builder.finish();
        assert_eq!(batch.signs, [5, 5, 9, 8]);
        assert_eq!(batch.offsets, [0, 2, 2, 4, 4, 4, 4]);
        assert_eq!(batch.signs_of(0, 2), [9, 8]);
        assert!(batch.signs_of(1, 0).is_empty());
    }

    #[test]
    fn the_last_signs_of_a_sequence_stay() {
        let mut builder = BatchBuilder::new(2, 0, 1, 2).with_longest(&[2, usize::MAX]);
        builder.begin();
        for (slot, sign) in [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)] {
            builder.add_sign(slot, sign);
        }
        builder.end(1, 0);
        let batch = builder.finish();
        assert_eq!(batch.signs, [2, 3, 4, 5, 6]);
        assert_eq!(batch.offsets, [0, 2, 5]);
    }

    #[test]
    fn uniform_samples_equal_samples_added_one_by_one() {
        const WIDTHS: [usize; 3] = [1, 0, 2];
        let builder = || BatchBuilder::new(3, 2, 1, 0).with_longest(&[1, 5, 2]).with_missing(-1.0);
        let (mut at_once, mut one_by_one) = (builder(), builder());
        // After other samples, and twice.
        for start in [100, 200] {
            for builder in [&mut at_once, &mut one_by_one] {
                builder.begin();
                builder.add_sign(1, 7);
                builder.end(1, 0);
            }
            let (signs, dense) = at_once.append_uniform(4, &WIDTHS).unwrap();
            signs.iter_mut().zip(start..).for_each(|(sign, value)| *sign = value);
            dense.iter_mut().step_by(2).for_each(|value| *value = 0.5);
            for sample in 0..4 {
                one_by_one.begin();
                one_by_one.add_sign(0, start + 3 * sample);
                one_by_one.add_sign(2, start + 3 * sample + 1);
                one_by_one.add_sign(2, start + 3 * sample + 2);
                one_by_one.set_dense(0, 0.5);
                one_by_one.end(1, 0);
            }
        }
        assert!(at_once.append_uniform(0, &WIDTHS).is_some());
        assert!(at_once.append_uniform(1, &[2, 0, 0]).is_none(), "the slot is limited to one sign");
        assert_eq!(at_once.finish(), one_by_one.finish());
    }

    #[test]
    fn dropped_samples_leave_no_traces() {
        let mut builder = BatchBuilder::new(2, 1, 1, 2);
        let add = |builder: &mut BatchBuilder, sign: u64| {
            builder.begin();
            builder.add_sign(1, sign);
            builder.set_dense(0, sign as f32);
            builder.end(1, 0);
        };
        (0..3).for_each(|sign| add(&mut builder, sign));
        builder.truncate(5);
        assert_eq!(builder.num_samples(), 3);
        builder.truncate(1);
        assert!(builder.batch().is_consistent());
        add(&mut builder, 7);
        assert_eq!((&builder.batch().signs[..], &builder.batch().dense[..]), (&[0, 7][..], &[0.0, 7.0][..]));
        builder.truncate(0);
        assert!(builder.batch().is_consistent());
        assert_eq!(builder.finish(), BatchBuilder::new(2, 1, 1, 0).finish());
    }

    #[test]
    fn an_unfinished_sample_leaves_no_traces() {
        let mut builder = BatchBuilder::new(2, 1, 1, 1);
        builder.begin();
        builder.add_sign(0, 1);
        builder.add_bucket(1, 2);
        builder.set_dense(0, 3.0);
        builder.set_label(0, 1.0);
        builder.begin();
        assert_eq!(builder.missing_label(), Some(0));
        builder.end(1, 1);
        let batch = builder.finish();
        assert!(batch.signs.is_empty());
        assert_eq!((batch.dense, batch.labels), (vec![0.0], vec![0.0]));
    }
}
