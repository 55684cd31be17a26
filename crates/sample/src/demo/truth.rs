//! The true model that the demo data is drawn from: the signs of a sample, and the probability of its click.
//!
//! `logit = bias + Σ linear(sign) + structure`, where each kind of structure suits one family of models:
//!
//! - `pairwise`: `Σ over pairs of slots ⟨latent(slot), latent(other slot)⟩`, where the latent of a slot is the sum of its
//!   signs' vectors in the plane. Slots are independent of each other and the effects of every slot have mean zero, so
//!   the pairwise part is invisible to a linear model, while an FM needs two dimensions for it.
//! - `multitask`: the same, and a rare `buy` whose logit is mostly the logit of the click: the many clicks teach a
//!   model what it cannot learn from the few buys.
//! - `sequence`: the number of items in the history with the hidden category of the shown item.
//!
//! Without structure, the structure of a sample is replaced by that of another sample, and for `multitask` the buy has
//! only its own effects. The rates stay the same, and nothing of the structure can be learned. Linear effects and
//! latents of some slots rotate with the hour: a model of yesterday is a little wrong today.

use super::column::{Column, Logit, criteo_columns, slot_columns};
use super::history::Items;
use super::random::{Rotation, Stream, exp, ln, mix};
use super::{DemoFormat, DemoKind, DemoSpec};

const CLICK_RATE: f64 = 0.22;
const BUY_RATE: f64 = 0.02;
/// The correlation of the buy's logit with that of the click; the buy's own effects have the rest of the variance.
const BUY_SHARED: f64 = 0.9;
/// Scale of the buy's logit relative to the click's: a buy depends more on chance.
const BUY_SCALE: f64 = 0.75;
/// Drifting slots rotate by 1 degree in an hour; this is the tangent of half that angle.
const HALF_TURN: f64 = 0.008_727;
/// Samples of the first hour from which the biases are set.
const PILOT_SAMPLES: u64 = 20_000;

/// One drawn label of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// The best score that the written features allow: orders samples by their true probability.
    pub(super) best: f64,
    /// The bias and the linear part of the logit.
    pub(super) linear: f64,
    pub(super) happened: bool,
}

/// A drawn sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DrawnSample {
    pub(super) click: Outcome,
    /// Only in `multitask`; a buy implies a click.
    pub(super) buy: Option<Outcome>,
}

/// The logit of the buy: a bias, and the weights of the click's effects and of its own effects.
struct Buy {
    bias: f64,
    shared: f64,
    own: f64,
}

/// The true model, fixed by the spec before the first sample is drawn.
pub(super) struct Truth {
    seed: u64,
    label_prefix: &'static [u8],
    columns: Vec<Column>,
    items: Option<Items>,
    bias: f64,
    buy: Option<Buy>,
    /// Whether samples have their own structure rather than that of another sample.
    structured: bool,
}

/// The effects of a sample's signs: on the click, on the buy, and by matches in the history.
struct Signs {
    click: Logit,
    buy: Logit,
    matches: f64,
}

impl Truth {
    pub(super) fn new(spec: &DemoSpec) -> Self {
        let (columns, label_prefix): (_, &'static [u8]) = match spec.format {
            DemoFormat::Slots => (slot_columns(spec), b"1 "),
            DemoFormat::Criteo => (criteo_columns(spec.seed), b""),
        };
        let shared = if spec.structure { BUY_SHARED } else { 0.0 };
        let own = BUY_SCALE * (1.0 - shared * shared).sqrt();
        let buy = Buy { bias: 0.0, shared: BUY_SCALE * shared, own };
        let mut truth = Self {
            seed: spec.seed,
            label_prefix,
            columns,
            items: (spec.kind == DemoKind::Sequence).then(|| Items::new(spec.seed)),
            bias: 0.0,
            buy: (spec.kind == DemoKind::Multitask).then_some(buy),
            structured: spec.structure || spec.kind == DemoKind::Multitask,
        };
        truth.set_biases();
        truth
    }

    /// Returns the rotation of drifting slots by `hour`.
    pub(super) fn rotation(hour: u32) -> Rotation {
        Rotation::new(HALF_TURN, hour)
    }

    /// Appends the line of sample `index` to `out`. Its signs depend on the seed and the index alone.
    pub(super) fn draw(&self, index: u64, rotation: Rotation, out: &mut Vec<u8>) -> DrawnSample {
        let mut stream = Stream::new(self.seed, index);
        // Labels come first in the line but are drawn last: write zeros now and overwrite them below.
        out.extend_from_slice(self.label_prefix);
        let click_at = out.len();
        out.push(b'0');
        if self.buy.is_some() {
            out.extend_from_slice(b" buy=0");
        }
        let buy_at = out.len() - 1;
        let signs = self.draw_signs(&mut stream, rotation, out);
        let end = out.len();
        let structure = if self.structured { signs.structure() } else { self.foreign_structure(index, rotation, out) };
        out.truncate(end);
        out.push(b'\n');
        let logit = signs.click.linear + structure;
        let drawn = match &self.buy {
            None => {
                let best = if self.structured { logit } else { signs.click.linear };
                let happened = stream.uniform() < probability(logit);
                DrawnSample { click: Outcome { best, linear: signs.click.linear, happened }, buy: None }
            }
            Some(buy) => buy.draw(self.bias, &signs, &mut stream),
        };
        if drawn.click.happened {
            out[click_at] = b'1';
        }
        if drawn.buy.is_some_and(|buy| buy.happened) {
            out[buy_at] = b'1';
        }
        drawn
    }

    /// Draws and writes all signs of a sample.
    fn draw_signs(&self, stream: &mut Stream, rotation: Rotation, out: &mut Vec<u8>) -> Signs {
        let mut logits = [Logit::default(); 2];
        logits[0].linear = self.bias;
        for column in &self.columns {
            column.draw(stream, rotation, &mut logits, out);
        }
        let mut matches = 0.0;
        if let Some(items) = &self.items {
            let drawn = items.draw(stream, out);
            logits[0].linear += drawn.linear;
            matches = drawn.matches;
        }
        let [click, buy] = logits;
        Signs { click, buy, matches }
    }

    /// Returns the structure of another sample, which is not part of the data. Its signs are appended to `out`; the
    /// caller truncates them.
    fn foreign_structure(&self, index: u64, rotation: Rotation, out: &mut Vec<u8>) -> f64 {
        self.draw_signs(&mut Stream::new(mix(self.seed), index), rotation, out).structure()
    }

    /// Sets the biases so that a pilot of the first hour has the expected rates.
    fn set_biases(&mut self) {
        let mut line = Vec::new();
        let (mut clicks, mut buys) = (Vec::new(), Vec::new());
        for index in 0..PILOT_SAMPLES {
            line.clear();
            let signs = self.draw_signs(&mut Stream::new(self.seed, index), Self::rotation(0), &mut line);
            clicks.push(signs.click.linear + signs.structure());
            if let Some(buy) = &self.buy {
                buys.push(buy.logit(0.0, &signs));
            }
        }
        self.bias = bias_for(&clicks, CLICK_RATE);
        if let Some(buy) = &mut self.buy {
            buy.bias = bias_for(&buys, BUY_RATE);
        }
    }
}

impl Signs {
    fn structure(&self) -> f64 {
        self.click.pairs() + self.matches
    }
}

impl Buy {
    /// Returns the logit of the buy. `click_bias` is subtracted from the click's logit, because the buy has its own
    /// bias.
    fn logit(&self, click_bias: f64, signs: &Signs) -> f64 {
        self.linear(click_bias, signs) + self.shared * signs.structure() + self.own * signs.buy.pairs()
    }

    fn linear(&self, click_bias: f64, signs: &Signs) -> f64 {
        self.bias + self.shared * (signs.click.linear - click_bias) + self.own * signs.buy.linear
    }

    /// Draws the buy by its own probability, then the click; a buy is always a click.
    fn draw(&self, click_bias: f64, signs: &Signs, stream: &mut Stream) -> DrawnSample {
        let buy_logit = self.logit(click_bias, signs);
        let buy = stream.uniform() < probability(buy_logit);
        let click_logit = signs.click.linear + signs.structure();
        let click = stream.uniform() < probability(click_logit) || buy;
        // The odds of click or buy: the probability of neither is the product of both complements.
        let odds = (1.0 + exp(click_logit)) * (1.0 + exp(buy_logit)) - 1.0;
        DrawnSample {
            click: Outcome { best: ln(odds), linear: signs.click.linear, happened: click },
            buy: Some(Outcome { best: buy_logit, linear: self.linear(click_bias, signs), happened: buy }),
        }
    }
}

fn probability(logit: f64) -> f64 {
    1.0 / (1.0 + exp(-logit))
}

/// Returns the bias that gives the logits this rate.
fn bias_for(logits: &[f64], rate: f64) -> f64 {
    let (mut low, mut high) = (-10.0, 10.0);
    for _ in 0..20 {
        let bias = 0.5 * (low + high);
        let happened: f64 = logits.iter().map(|logit| probability(logit + bias)).sum();
        if happened > rate * logits.len() as f64 {
            high = bias;
        } else {
            low = bias;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::super::auc::Ranking;
    use super::*;

    fn spec(kind: DemoKind, structure: bool, seed: u64) -> DemoSpec {
        // Few slots, because these tests spend most of their time on creating slots and drawing the pilot.
        let slots = if kind == DemoKind::Pairwise { 20 } else { 8 };
        DemoSpec { samples: 1, slots, hours: 1, seed, format: DemoFormat::Slots, kind, structure }
    }

    /// (rate, best AUC, linear AUC) of each label over the first samples.
    fn measure(spec: &DemoSpec) -> Vec<(f64, f64, f64)> {
        const SAMPLES: u64 = 20_000;
        let truth = Truth::new(spec);
        let mut rankings: Vec<(u64, Ranking, Ranking)> = Vec::new();
        let mut line = Vec::new();
        for index in 0..SAMPLES {
            line.clear();
            let drawn = truth.draw(index, Truth::rotation(0), &mut line);
            assert!(!drawn.buy.is_some_and(|buy| buy.happened) || drawn.click.happened, "a buy is a click");
            for (at, outcome) in [Some(drawn.click), drawn.buy].into_iter().flatten().enumerate() {
                if rankings.len() == at {
                    rankings.push((0, Ranking::new(), Ranking::new()));
                }
                rankings[at].0 += u64::from(outcome.happened);
                rankings[at].1.add(outcome.best, outcome.happened);
                rankings[at].2.add(outcome.linear, outcome.happened);
            }
        }
        let rate = |count: u64| count as f64 / SAMPLES as f64;
        rankings
            .iter()
            .map(|(count, best, linear)| (rate(*count), best.auc().unwrap(), linear.auc().unwrap()))
            .collect()
    }

    #[test]
    fn the_true_model_of_yesterday_is_worse_today() {
        let truth = Truth::new(&spec(DemoKind::Pairwise, true, 7));
        let (mut fresh, mut stale) = (Ranking::new(), Ranking::new());
        let mut line = Vec::new();
        for index in 0..60_000 {
            line.clear();
            let now = truth.draw(index, Truth::rotation(23), &mut line).click;
            let then = truth.draw(index, Truth::rotation(0), &mut line).click;
            fresh.add(now.best, now.happened);
            stale.add(then.best, now.happened);
        }
        let lost = fresh.auc().unwrap() - stale.auc().unwrap();
        assert!((0.005..0.08).contains(&lost), "a day costs {lost}");
    }

    #[test]
    fn pairwise_data_has_the_documented_rate_and_auc() {
        for seed in 0..4 {
            let (rate, best, linear) = measure(&spec(DemoKind::Pairwise, true, seed))[0];
            assert!((0.21..0.23).contains(&rate), "seed {seed}: rate {rate}");
            assert!((0.79..0.84).contains(&best), "seed {seed}: best {best}");
            assert!((0.66..0.74).contains(&linear), "seed {seed}: linear {linear}");
        }
    }

    #[test]
    fn buys_are_rare_clicks() {
        for seed in 0..2 {
            let [(click_rate, click_best, _), (buy_rate, buy_best, buy_linear)] =
                measure(&spec(DemoKind::Multitask, true, seed))[..]
            else {
                panic!("expected two labels");
            };
            assert!((0.21..0.25).contains(&click_rate), "seed {seed}: clicks {click_rate}");
            assert!((0.015..0.025).contains(&buy_rate), "seed {seed}: buys {buy_rate}");
            assert!((0.79..0.84).contains(&click_best), "seed {seed}: clicks {click_best}");
            assert!((0.79..0.89).contains(&buy_best), "seed {seed}: buys {buy_best}");
            assert!((0.62..0.75).contains(&buy_linear), "seed {seed}: buys, linear {buy_linear}");
        }
    }

    #[test]
    fn matches_raise_the_auc_beyond_linear_effects() {
        for seed in 0..2 {
            let (rate, best, linear) = measure(&spec(DemoKind::Sequence, true, seed))[0];
            assert!((0.21..0.23).contains(&rate), "seed {seed}: rate {rate}");
            assert!(best > linear + 0.05, "seed {seed}: best {best}, linear {linear}");
        }
    }

    #[test]
    fn without_structure_the_rates_stay_and_a_linear_model_is_the_best() {
        for kind in [DemoKind::Pairwise, DemoKind::Sequence] {
            let (rate, _, linear) = measure(&spec(kind, true, 5))[0];
            let (shuffled_rate, best, shuffled_linear) = measure(&spec(kind, false, 5))[0];
            assert!((rate - shuffled_rate).abs() < 0.01, "{kind:?}: {rate} and {shuffled_rate}");
            assert!((linear - shuffled_linear).abs() < 0.015, "{kind:?}: {linear} and {shuffled_linear}");
            assert_eq!(best, shuffled_linear, "{kind:?}");
        }
        let with = measure(&spec(DemoKind::Multitask, true, 5));
        let without = measure(&spec(DemoKind::Multitask, false, 5));
        for (with, without) in with.iter().zip(&without) {
            assert!((with.0 - without.0).abs() < 0.02, "{with:?} and {without:?}");
            assert!((with.1 - without.1).abs() < 0.04, "{with:?} and {without:?}");
        }
    }
}
