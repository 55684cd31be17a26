//! The columns of the demo data: the values of a slot with their probabilities, effects and texts.
//!
//! Effects are functions of the seed and the sign. The effects of each slot have mean zero and a fixed variance.

use super::random::{Rotation, Stream, exp, ln, mix, mix32};
use super::{DemoFormat, DemoKind, DemoSpec};

/// Approximate limit of the different signs of all slots together.
const MAX_TOTAL_VOCABULARY: u32 = 2_000_000;
/// Slots beyond this number have signs without effects, like useless features.
const NUM_LINEAR_SLOTS: u32 = 40;
const NUM_PAIRED_SLOTS: usize = 6;
const LINEAR_STD: f64 = 1.0;
const PAIRED_STD: f64 = 1.15;
/// Share of the linear variance that the 13 numbers of Criteo rows have.
const NUMBERS_SHARE: f64 = 0.2;
/// Share of the usual linear variance that the numbered slots have in data with an item and a history.
const SEQUENCE_SHARE: f64 = 0.25;
/// Effects fade with the rank of a value as `1 / (1 + rank / FADE)`: values too rare to be learned matter little.
const FADE: f64 = 20.0;

/// A kind of slot. Slot `i` has kind `i % 10`.
struct Kind {
    vocabulary: u32,
    zipf: f64,
    max_signs: u32,
    /// Probability that the slot has any sign.
    present: f64,
    linear: f64,
    /// `None` if the slot is in no pair; otherwise the axis of the latent vector that is mixed into the linear effect.
    /// Without this mix, latents would appear in products only, and an MLP could fail to learn one of the two axes in a
    /// whole pass.
    paired: Option<usize>,
    drifts: bool,
}

#[rustfmt::skip]
const KINDS: [Kind; 10] = [
    Kind { vocabulary: 24,      zipf: 1.05, max_signs: 1, present: 1.0,  linear: 1.0, paired: Some(0), drifts: false },
    Kind { vocabulary: 3_000,   zipf: 1.10, max_signs: 1, present: 1.0,  linear: 1.0, paired: Some(1), drifts: true  },
    Kind { vocabulary: 300,     zipf: 1.07, max_signs: 1, present: 1.0,  linear: 0.5, paired: Some(0), drifts: true  },
    Kind { vocabulary: 100_000, zipf: 1.10, max_signs: 1, present: 1.0,  linear: 1.0, paired: None,    drifts: false },
    Kind { vocabulary: 1_500,   zipf: 1.08, max_signs: 5, present: 0.9,  linear: 0.7, paired: Some(1), drifts: false },
    Kind { vocabulary: 60,      zipf: 1.06, max_signs: 1, present: 1.0,  linear: 0.5, paired: None,    drifts: true  },
    Kind { vocabulary: 8_000,   zipf: 1.10, max_signs: 1, present: 0.95, linear: 1.0, paired: None,    drifts: false },
    Kind { vocabulary: 12,      zipf: 1.05, max_signs: 1, present: 1.0,  linear: 0.3, paired: None,    drifts: false },
    Kind { vocabulary: 500,     zipf: 1.07, max_signs: 3, present: 0.7,  linear: 0.7, paired: None,    drifts: false },
    Kind { vocabulary: 20_000,  zipf: 1.09, max_signs: 1, present: 0.8,  linear: 0.5, paired: None,    drifts: false },
];

/// The 13 numbers of a Criteo row: count of different numbers (Zipf), smallest number, probability of not being empty.
#[rustfmt::skip]
const NUMBERS: [(u32, i64, f64); 13] = [
    (60, 0, 0.55), (4_000, -2, 1.0), (3_000, 0, 0.78), (50, 0, 0.78), (50_000, 0, 0.97), (8_000, 0, 0.77),
    (1_500, 0, 0.95), (100, 0, 1.0), (4_000, 0, 0.95), (9, 0, 0.55), (120, 0, 0.95), (200, 0, 0.23), (600, 0, 0.78),
];

/// The effects of a sign, or their sum over the signs of a slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Effects {
    /// The linear effect, and the effect that it is rotated towards over the hours in a slot that drifts.
    linear: [f64; 2],
    /// The latent vector in the plane.
    latent: [f64; 2],
}

impl Effects {
    fn add(&mut self, effects: [f32; 4]) {
        let [now, later, x, y] = effects.map(f64::from);
        self.linear[0] += now;
        self.linear[1] += later;
        self.latent[0] += x;
        self.latent[1] += y;
    }
}

/// The sum of the effects of a sample's signs on one label, added slot by slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Logit {
    pub(super) linear: f64,
    latent_sum: [f64; 2],
    squares: f64,
}

impl Logit {
    fn add(&mut self, column: &Column, pooled: Effects, rotation: Rotation) {
        let [now, later] = pooled.linear;
        let [x, y] = pooled.latent;
        self.linear += if column.drifts { rotation.cos * now + rotation.sin * later } else { now };
        if column.paired {
            let rotated = if column.drifts {
                [rotation.cos * x - rotation.sin * y, rotation.sin * x + rotation.cos * y]
            } else {
                [x, y]
            };
            self.latent_sum[0] += rotated[0];
            self.latent_sum[1] += rotated[1];
            self.squares += x * x + y * y;
        }
    }

    /// Returns the sum over all pairs of slots, computed from the square of the sum.
    pub(super) fn pairs(&self) -> f64 {
        let [x, y] = self.latent_sum;
        0.5 * (x * x + y * y - self.squares)
    }
}

/// One value of a column: its effects and its text, side by side so that a draw reads one region of memory.
#[derive(Clone, Copy)]
struct ColumnValue {
    effects: [f32; 4],
    text: [u8; TEXT_BYTES],
    text_bytes: u8,
}

/// The longest text is a separator, 20 digits, a colon and the 4 digits of slot 9999.
const TEXT_BYTES: usize = 26;

/// An entry of Walker's alias table: stands for the value itself below the threshold, else for its alias.
pub(super) struct AliasEntry {
    threshold: u32,
    alias: u32,
}

pub(super) struct Column {
    alias_table: Vec<AliasEntry>,
    values: Vec<ColumnValue>,
    /// Effects of the values on the second label; empty if there is none.
    second: Vec<[f32; 4]>,
    max_signs: u32,
    present: f64,
    paired: bool,
    drifts: bool,
    /// Text of a column without a value.
    absent: &'static [u8],
}

impl Column {
    /// Draws the values of this column, writes them, and adds their effects to the logit of each label.
    pub(super) fn draw(&self, stream: &mut Stream, rotation: Rotation, logits: &mut [Logit; 2], out: &mut Vec<u8>) {
        if self.present < 1.0 && stream.uniform() >= self.present {
            out.extend_from_slice(self.absent);
            return;
        }
        let mut pooled = [Effects::default(); 2];
        let num_signs = if self.max_signs > 1 { 1 + below(stream.next(), self.max_signs) } else { 1 };
        for _ in 0..num_signs {
            let value = pick(&self.alias_table, stream);
            let ColumnValue { effects, text, text_bytes } = &self.values[value];
            out.extend_from_slice(&text[..usize::from(*text_bytes)]);
            pooled[0].add(*effects);
            if let Some(&effects) = self.second.get(value) {
                pooled[1].add(effects);
            }
        }
        for (logit, pooled) in logits.iter_mut().zip(pooled) {
            logit.add(self, pooled, rotation);
        }
    }
}

/// Draws a value according to the shares of the alias table.
pub(super) fn pick(alias_table: &[AliasEntry], stream: &mut Stream) -> usize {
    let bits = stream.next();
    let value = below(bits, alias_table.len() as u32);
    let AliasEntry { threshold, alias } = alias_table[value as usize];
    (if (bits as u32) < threshold { value } else { alias }) as usize
}

/// Scales the upper half of `bits` to `0..limit`.
pub(super) fn below(bits: u64, limit: u32) -> u32 {
    (((bits >> 32) * u64::from(limit)) >> 32) as u32
}

/// A column before its effects are scaled relative to other columns.
struct Draft {
    kind: Kind,
    shares: Vec<f64>,
    effects: Vec<Effects>,
    texts: Vec<String>,
    absent: &'static [u8],
}

/// Returns the columns of slot text; slots are numbered from 0. Only `multitask` has effects on a second label, which
/// have their own seed.
pub(super) fn slot_columns(spec: &DemoSpec) -> Vec<Column> {
    let mut columns = seeded_columns(spec, spec.seed);
    if spec.kind == DemoKind::Multitask {
        for (column, other) in columns.iter_mut().zip(seeded_columns(spec, mix(spec.seed))) {
            column.second = other.values.into_iter().map(|value| value.effects).collect();
        }
    }
    columns
}

fn seeded_columns(spec: &DemoSpec, seed: u64) -> Vec<Column> {
    let num_slots = spec.slots - spec.kind.num_named_slots();
    let max_vocabulary = (MAX_TOTAL_VOCABULARY / spec.slots).max(20);
    let drafts = (0..num_slots)
        .map(|slot| {
            let pattern = &KINDS[slot as usize % KINDS.len()];
            let vocabulary = pattern.vocabulary.min(max_vocabulary);
            let linear = if slot < NUM_LINEAR_SLOTS { pattern.linear } else { 0.0 };
            let paired = pattern.paired.filter(|_| spec.kind != DemoKind::Sequence);
            let signs: Vec<u64> = (0..vocabulary).map(|value| sign_of(slot, value)).collect();
            let texts = signs.iter().map(|sign| format!(" {sign}:{slot}")).collect();
            Draft::new(seed, Kind { vocabulary, linear, paired, ..*pattern }, &signs, texts, b"")
        })
        .collect();
    finish(drafts, if spec.kind == DemoKind::Sequence { SEQUENCE_SHARE } else { 1.0 })
}

/// Returns a sign that is unique over all slots, because `mix` is a bijection.
pub(super) fn sign_of(slot: u32, value: u32) -> u64 {
    mix((u64::from(slot) + 1) << 32 | u64::from(value))
}

pub(super) fn criteo_columns(seed: u64) -> Vec<Column> {
    let mut columns = number_columns(seed);
    let drafts = (0..DemoFormat::CRITEO_CATEGORIES)
        .map(|slot| {
            let pattern = &KINDS[slot as usize % KINDS.len()];
            let signs: Vec<u64> = (0..pattern.vocabulary).map(|value| sign_of(slot, value)).collect();
            let texts = (0..pattern.vocabulary)
                .map(|value| format!("\t{:08x}", mix32(mix(u64::from(slot) + 1) as u32 ^ value)))
                .collect();
            Draft::new(seed, Kind { max_signs: 1, ..*pattern }, &signs, texts, b"\t")
        })
        .collect();
    columns.extend(finish(drafts, 1.0 - NUMBERS_SHARE));
    columns
}

/// Returns the columns of numbers; their only effect is linear in their logarithm.
fn number_columns(seed: u64) -> Vec<Column> {
    let drafts = NUMBERS
        .iter()
        .enumerate()
        .map(|(column, &(vocabulary, smallest, present))| {
            let mut stream = Stream::new(mix(seed), column as u64);
            let linear = 0.5 + stream.uniform();
            let kind = Kind { vocabulary, zipf: 1.08, max_signs: 1, present, linear, paired: None, drifts: false };
            let sign = if stream.next() & 1 == 0 { 1.0 } else { -1.0 };
            let numbers = smallest..smallest + i64::from(vocabulary);
            let mut draft = Draft {
                shares: zipf_shares(kind.vocabulary, kind.zipf),
                effects: vec![Effects::default(); vocabulary as usize],
                texts: numbers.clone().map(|number| format!("\t{number}")).collect(),
                kind,
                absent: b"\t",
            };
            for (effects, number) in draft.effects.iter_mut().zip(numbers) {
                effects.linear[0] = sign * ln(1.0 + number.max(0) as f64);
            }
            draft.centre(|_| 1.0);
            draft
        })
        .collect();
    finish(drafts, NUMBERS_SHARE)
}

impl Draft {
    /// Creates a column with random effects, a function of the seed and the sign that fades with the rank.
    fn new(seed: u64, kind: Kind, signs: &[u64], texts: Vec<String>, absent: &'static [u8]) -> Self {
        let fade = |rank: usize| 1.0 / (1.0 + rank as f64 / FADE);
        let effects = signs
            .iter()
            .enumerate()
            .map(|(rank, &sign)| {
                let mut stream = Stream::new(seed, sign);
                let mut effect = || fade(rank) * stream.bell();
                let [now, later] = [effect(), effect()];
                let latent = [effect(), effect()];
                let mixed = kind.paired.map_or(now, |axis| 0.6 * now + 0.8 * latent[axis]);
                Effects { linear: [mixed, later], latent }
            })
            .collect();
        let shares = zipf_shares(kind.vocabulary, kind.zipf);
        let mut draft = Self { kind, shares, effects, texts, absent };
        draft.centre(fade);
        draft
    }

    /// Makes the mean effect zero by shifting the effects in proportion to `weight`. A model may never have seen a rare
    /// value and then reads it as zero, so rare values must not carry the correction for frequent ones.
    fn centre(&mut self, weight: impl Fn(usize) -> f64) {
        let total: f64 = self.shares.iter().enumerate().map(|(rank, share)| share * weight(rank)).sum();
        let mean = |of: fn(&Effects) -> f64| -> f64 {
            self.shares.iter().zip(&self.effects).map(|(share, effects)| share * of(effects)).sum::<f64>() / total
        };
        let linear = [mean(|e| e.linear[0]), mean(|e| e.linear[1])];
        let latent = [mean(|e| e.latent[0]), mean(|e| e.latent[1])];
        for (rank, effects) in self.effects.iter_mut().enumerate() {
            for axis in 0..2 {
                effects.linear[axis] -= weight(rank) * linear[axis];
                effects.latent[axis] -= weight(rank) * latent[axis];
            }
        }
    }

    /// Returns the mean number of signs of the slot: the factor between the variance of a sum of independent, centred
    /// effects and the variance of one effect.
    fn mean_signs(&self) -> f64 {
        self.kind.present * 0.5 * f64::from(1 + self.kind.max_signs)
    }

    /// Scales one axis of the effects to a variance.
    fn scale(&mut self, pick: fn(&mut Effects) -> &mut [f64; 2], axis: usize, variance: f64) {
        let shares = &self.shares;
        let present: f64 =
            shares.iter().zip(&mut self.effects).map(|(share, e)| share * pick(e)[axis] * pick(e)[axis]).sum();
        let factor = if present > 0.0 { (variance / (present * self.mean_signs())).sqrt() } else { 0.0 };
        for effects in &mut self.effects {
            pick(effects)[axis] *= factor;
        }
    }
}

/// Scales the linear effects to `share` of their usual variance and the pairwise effects to their full variance, and
/// builds the columns from which samples are drawn.
fn finish(mut drafts: Vec<Draft>, share: f64) -> Vec<Column> {
    let total: f64 = drafts.iter().map(|draft| draft.kind.linear * draft.kind.linear).sum();
    let paired: Vec<usize> =
        (0..drafts.len()).filter(|&i| drafts[i].kind.paired.is_some()).take(NUM_PAIRED_SLOTS).collect();
    // Every axis of every paired slot has variance v; a pair then has 2 v², and the pairs are uncorrelated.
    let num_pairs = (paired.len() * paired.len().saturating_sub(1) / 2).max(1) as f64;
    let latent_variance = PAIRED_STD / (2.0 * num_pairs).sqrt();
    for (index, draft) in drafts.iter_mut().enumerate() {
        draft.kind.paired = draft.kind.paired.filter(|_| paired.contains(&index));
        let linear_variance = LINEAR_STD * LINEAR_STD * share * draft.kind.linear * draft.kind.linear / total;
        for axis in 0..2 {
            draft.scale(|e| &mut e.linear, axis, linear_variance);
            draft.scale(|e| &mut e.latent, axis, if draft.kind.paired.is_some() { latent_variance } else { 0.0 });
        }
    }
    drafts.into_iter().map(Column::from).collect()
}

impl From<Draft> for Column {
    fn from(draft: Draft) -> Self {
        let values = draft
            .effects
            .iter()
            .zip(&draft.texts)
            .map(|(effects, text)| {
                let mut value = ColumnValue {
                    effects: [effects.linear[0], effects.linear[1], effects.latent[0], effects.latent[1]]
                        .map(|effect| effect as f32),
                    text: [0; TEXT_BYTES],
                    text_bytes: text.len() as u8,
                };
                value.text[..text.len()].copy_from_slice(text.as_bytes());
                value
            })
            .collect();
        Self {
            alias_table: alias_table(&draft.shares),
            values,
            second: Vec::new(),
            max_signs: draft.kind.max_signs,
            present: draft.kind.present,
            paired: draft.kind.paired.is_some(),
            drifts: draft.kind.drifts,
            absent: draft.absent,
        }
    }
}

/// Returns the probability of each rank.
pub(super) fn zipf_shares(vocabulary: u32, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=vocabulary).map(|rank| exp(-exponent * ln(f64::from(rank)))).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Builds an alias table (Vose's method): each entry holds the remaining share of one value, filled up with one other.
pub(super) fn alias_table(shares: &[f64]) -> Vec<AliasEntry> {
    let mut left: Vec<f64> = shares.iter().map(|share| share * shares.len() as f64).collect();
    let mut alias_table: Vec<AliasEntry> =
        (0..shares.len()).map(|value| AliasEntry { threshold: u32::MAX, alias: value as u32 }).collect();
    let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..shares.len()).partition(|&value| left[value] < 1.0);
    while let (Some(low), Some(&high)) = (small.pop(), large.last()) {
        alias_table[low] = AliasEntry { threshold: (left[low] * f64::from(u32::MAX)) as u32, alias: high as u32 };
        left[high] -= 1.0 - left[low];
        if left[high] < 1.0 {
            large.pop();
            small.push(high);
        }
    }
    alias_table
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: DemoSpec = DemoSpec {
        samples: 1,
        slots: 10,
        hours: 1,
        seed: 5,
        format: DemoFormat::Slots,
        kind: DemoKind::Pairwise,
        structure: true,
    };

    #[test]
    fn an_alias_table_keeps_the_shares() {
        let shares = zipf_shares(50, 1.05);
        let mut seen = vec![0.0; 50];
        for (value, entry) in alias_table(&shares).iter().enumerate() {
            let own = f64::from(entry.threshold) / f64::from(u32::MAX);
            seen[value] += own / 50.0;
            seen[entry.alias as usize] += (1.0 - own) / 50.0;
        }
        for (share, seen) in shares.iter().zip(&seen) {
            assert!((share - seen).abs() < 1e-8, "{share} {seen}");
        }
    }

    #[test]
    fn effects_of_every_slot_have_mean_zero() {
        for column in slot_columns(&SPEC) {
            let mut mean = [0.0f64; 4];
            let num_entries = column.alias_table.len() as f64;
            for (value, entry) in column.alias_table.iter().enumerate() {
                let own = f64::from(entry.threshold) / f64::from(u32::MAX);
                for (axis, mean) in mean.iter_mut().enumerate() {
                    *mean += (own * f64::from(column.values[value].effects[axis])
                        + (1.0 - own) * f64::from(column.values[entry.alias as usize].effects[axis]))
                        / num_entries;
                }
            }
            assert!(mean.iter().all(|mean| mean.abs() < 1e-5), "{mean:?}");
        }
    }
}
