//! The columns of the demo data: which values a slot has, how often each is drawn, what it does and how it is written.
//!
//! Effects are functions of the seed and the sign; those of every slot have mean zero and a variance that is set.

use super::random::{Stream, Turn, exp, ln, mix, mix32};
use super::{DemoFormat, DemoKind, DemoSpec};

/// Rows of all slots together stay about here, whatever the number of slots.
const MAX_ROWS: u32 = 2_000_000;
/// Slots beyond these carry signs but no effect, as useless features do.
const NUM_LINEAR_SLOTS: u32 = 40;
const NUM_PAIRED_SLOTS: usize = 6;
const LINEAR_STD: f64 = 1.0;
const PAIRED_STD: f64 = 1.15;
/// Share of the linear variance that the 13 numbers of Criteo rows have.
const NUMBERS_SHARE: f64 = 0.2;
/// Share of the usual variance that the numbered slots have beside an item and its history.
const SEQUENCE_SHARE: f64 = 0.25;
/// Effects fade with the rank of a value as `1 / (1 + rank / FADE)`: what is too rare to be learned matters little.
const FADE: f64 = 20.0;

/// What a slot looks like. Slots take these in turn.
struct Kind {
    vocabulary: u32,
    zipf: f64,
    max_signs: u32,
    /// How often the slot has any sign.
    present: f64,
    linear: f64,
    /// Whether it takes part in pairs, and the axis of the latent that the linear effect leans on. Without that lean
    /// the latents would be visible in products alone, and an MLP can sit on one axis of them for a whole pass.
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

/// The 13 numbers of a Criteo row: how many different ones (from 0 on, Zipf), the smallest, how often not empty.
#[rustfmt::skip]
const NUMBERS: [(u32, i64, f64); 13] = [
    (60, 0, 0.55), (4_000, -2, 1.0), (3_000, 0, 0.78), (50, 0, 0.78), (50_000, 0, 0.97), (8_000, 0, 0.77),
    (1_500, 0, 0.95), (100, 0, 1.0), (4_000, 0, 0.95), (9, 0, 0.55), (120, 0, 0.95), (200, 0, 0.23), (600, 0, 0.78),
];

/// The four effects of a sign, or their sum over the signs of a slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Effects {
    /// The linear effect, and what it turns into with the hours.
    linear: [f64; 2],
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

/// What the signs of a sample do to one label, slot by slot.
#[derive(Clone, Copy, Default)]
pub(super) struct Logit {
    pub(super) linear: f64,
    latent_sum: [f64; 2],
    squares: f64,
}

impl Logit {
    fn add(&mut self, column: &Column, pooled: Effects, turn: Turn) {
        let [now, later] = pooled.linear;
        let [x, y] = pooled.latent;
        self.linear += if column.drifts { turn.cos * now + turn.sin * later } else { now };
        if column.paired {
            let turned =
                if column.drifts { [turn.cos * x - turn.sin * y, turn.sin * x + turn.cos * y] } else { [x, y] };
            self.latent_sum[0] += turned[0];
            self.latent_sum[1] += turned[1];
            self.squares += x * x + y * y;
        }
    }

    /// The sum over all pairs of slots, by the square of the sum.
    pub(super) fn pairs(&self) -> f64 {
        let [x, y] = self.latent_sum;
        0.5 * (x * x + y * y - self.squares)
    }
}

/// One value of a column: what it does and how it is written, together so that a draw touches one place in memory.
#[derive(Clone, Copy)]
struct Row {
    effects: [f32; 4],
    text: [u8; TEXT_BYTES],
    text_bytes: u8,
}

/// The longest is a separator, 20 digits, a colon and the 4 digits of slot 9999.
const TEXT_BYTES: usize = 26;

/// A cell of Walker's alias table: the value itself below the threshold, else its alias.
pub(super) struct Cell {
    threshold: u32,
    alias: u32,
}

pub(super) struct Column {
    cells: Vec<Cell>,
    rows: Vec<Row>,
    /// What the values do to a second label; empty where there is none.
    second: Vec<[f32; 4]>,
    max_signs: u32,
    present: f64,
    paired: bool,
    drifts: bool,
    /// What stands for a column without a value.
    absent: &'static [u8],
}

impl Column {
    /// Draws the values of this column, writes them, and adds what they do to each label.
    pub(super) fn draw(&self, stream: &mut Stream, turn: Turn, logits: &mut [Logit; 2], out: &mut Vec<u8>) {
        if self.present < 1.0 && stream.unit() >= self.present {
            out.extend_from_slice(self.absent);
            return;
        }
        let mut pooled = [Effects::default(); 2];
        let num_signs = if self.max_signs > 1 { 1 + below(stream.next(), self.max_signs) } else { 1 };
        for _ in 0..num_signs {
            let value = pick(&self.cells, stream);
            let row = &self.rows[value];
            out.extend_from_slice(&row.text[..usize::from(row.text_bytes)]);
            pooled[0].add(row.effects);
            if let Some(&effects) = self.second.get(value) {
                pooled[1].add(effects);
            }
        }
        for (logit, pooled) in logits.iter_mut().zip(pooled) {
            logit.add(self, pooled, turn);
        }
    }
}

/// A value, each with its share.
pub(super) fn pick(cells: &[Cell], stream: &mut Stream) -> usize {
    let bits = stream.next();
    let cell = below(bits, cells.len() as u32);
    let Cell { threshold, alias } = cells[cell as usize];
    (if (bits as u32) < threshold { cell } else { alias }) as usize
}

/// The upper half of `bits`, scaled to `0..limit`.
pub(super) fn below(bits: u64, limit: u32) -> u32 {
    (((bits >> 32) * u64::from(limit)) >> 32) as u32
}

/// A column before its effects are scaled against those of the others.
struct Draft {
    kind: Kind,
    shares: Vec<f64>,
    effects: Vec<Effects>,
    texts: Vec<String>,
    absent: &'static [u8],
}

/// The columns of slot text, slots numbered from 0. Only `multitask` has effects on a second label, of a seed of their own.
pub(super) fn slot_columns(spec: &DemoSpec) -> Vec<Column> {
    let mut columns = seeded_columns(spec, spec.seed);
    if spec.kind == DemoKind::Multitask {
        for (column, other) in columns.iter_mut().zip(seeded_columns(spec, mix(spec.seed))) {
            column.second = other.rows.into_iter().map(|row| row.effects).collect();
        }
    }
    columns
}

fn seeded_columns(spec: &DemoSpec, seed: u64) -> Vec<Column> {
    let num_slots = spec.slots - spec.kind.num_own_slots();
    let max_vocabulary = (MAX_ROWS / spec.slots).max(20);
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

/// Unique over all slots, because `mix` is a bijection.
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

/// Numbers act by their logarithm, and only linearly.
fn number_columns(seed: u64) -> Vec<Column> {
    let drafts = NUMBERS
        .iter()
        .enumerate()
        .map(|(column, &(vocabulary, smallest, present))| {
            let mut stream = Stream::new(mix(seed), column as u64);
            let linear = 0.5 + stream.unit();
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
    /// Random effects: a function of the seed and the sign, fading with its rank.
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
                let leaning = kind.paired.map_or(now, |axis| 0.6 * now + 0.8 * latent[axis]);
                Effects { linear: [leaning, later], latent }
            })
            .collect();
        let shares = zipf_shares(kind.vocabulary, kind.zipf);
        let mut draft = Self { kind, shares, effects, texts, absent };
        draft.centre(fade);
        draft
    }

    /// Makes the mean effect zero by moving values in proportion to `weight`: the rare ones, which a model may never
    /// have seen and reads as zero, must not carry the correction for the frequent ones.
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

    /// How many signs the slot has in the mean: sums of independent, centred effects have this times their variance.
    fn mean_signs(&self) -> f64 {
        self.kind.present * 0.5 * f64::from(1 + self.kind.max_signs)
    }

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

/// Gives the linear part `share` of its variance, the pairwise part all of its own, and lays the columns out for drawing.
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
        let rows = draft
            .effects
            .iter()
            .zip(&draft.texts)
            .map(|(effects, text)| {
                let mut row = Row {
                    effects: [effects.linear[0], effects.linear[1], effects.latent[0], effects.latent[1]]
                        .map(|effect| effect as f32),
                    text: [0; TEXT_BYTES],
                    text_bytes: text.len() as u8,
                };
                row.text[..text.len()].copy_from_slice(text.as_bytes());
                row
            })
            .collect();
        Self {
            cells: alias_cells(&draft.shares),
            rows,
            second: Vec::new(),
            max_signs: draft.kind.max_signs,
            present: draft.kind.present,
            paired: draft.kind.paired.is_some(),
            drifts: draft.kind.drifts,
            absent: draft.absent,
        }
    }
}

/// The probability of each rank.
pub(super) fn zipf_shares(vocabulary: u32, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=vocabulary).map(|rank| exp(-exponent * ln(f64::from(rank)))).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Vose's construction: each cell holds what is left of one value and fills up with one other.
pub(super) fn alias_cells(shares: &[f64]) -> Vec<Cell> {
    let mut left: Vec<f64> = shares.iter().map(|share| share * shares.len() as f64).collect();
    let mut cells: Vec<Cell> =
        (0..shares.len()).map(|value| Cell { threshold: u32::MAX, alias: value as u32 }).collect();
    let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..shares.len()).partition(|&value| left[value] < 1.0);
    while let (Some(low), Some(&high)) = (small.pop(), large.last()) {
        cells[low] = Cell { threshold: (left[low] * f64::from(u32::MAX)) as u32, alias: high as u32 };
        left[high] -= 1.0 - left[low];
        if left[high] < 1.0 {
            large.pop();
            small.push(high);
        }
    }
    cells
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
    fn alias_cells_keep_the_shares() {
        let shares = zipf_shares(50, 1.05);
        let mut seen = vec![0.0; 50];
        for (value, cell) in alias_cells(&shares).iter().enumerate() {
            let own = f64::from(cell.threshold) / f64::from(u32::MAX);
            seen[value] += own / 50.0;
            seen[cell.alias as usize] += (1.0 - own) / 50.0;
        }
        for (share, seen) in shares.iter().zip(&seen) {
            assert!((share - seen).abs() < 1e-8, "{share} {seen}");
        }
    }

    #[test]
    fn effects_of_every_slot_have_mean_zero() {
        for column in slot_columns(&SPEC) {
            let mut mean = [0.0f64; 4];
            let num_cells = column.cells.len() as f64;
            for (value, cell) in column.cells.iter().enumerate() {
                let own = f64::from(cell.threshold) / f64::from(u32::MAX);
                for (axis, mean) in mean.iter_mut().enumerate() {
                    *mean += (own * f64::from(column.rows[value].effects[axis])
                        + (1.0 - own) * f64::from(column.rows[cell.alias as usize].effects[axis]))
                        / num_cells;
                }
            }
            assert!(mean.iter().all(|mean| mean.abs() < 1e-5), "{mean:?}");
        }
    }
}
