//! The world the demo data are drawn from: which signs a sample has, and how likely it is clicked.
//!
//! `logit = bias + Σ linear(sign) + structure`, where the structure is what one family of models is made to see:
//!
//! - `pairwise`: `Σ over pairs of slots ⟨latent(slot), latent(other slot)⟩`, where the latent of a slot is the sum of its
//!   signs' vectors in the plane. Slots are independent of each other and the effects of every slot have mean zero, so
//!   the pairwise part is invisible to a linear model, while an FM holds it in two dimensions.
//! - `multitask`: the same, and a rare `buy` whose logit is mostly that of the click: what is learned from many clicks is
//!   what the few buys lack.
//! - `sequence`: how many items of the history are of the same hidden category as the item that is shown.
//!
//! Without structure that part is drawn from another sample (for `multitask`: the buy has effects of its own), so
//! that all rates stay as they are and nothing of it can be learned. Linear effects and latents of some slots turn
//! with the hour: a model of yesterday is a little wrong today.

use super::column::{Column, Logit, criteo_columns, slot_columns};
use super::history::Items;
use super::random::{Stream, Turn, exp, ln, mix};
use super::{DemoFormat, DemoKind, DemoSpec};

const CLICK_RATE: f64 = 0.22;
const BUY_RATE: f64 = 0.02;
/// The correlation of the buy's logit with that of the click; the buy's own effects have the rest of the variance.
const BUY_SHARED: f64 = 0.9;
/// What the logit of the buy is to that of the click in size: a buy is more a matter of chance.
const BUY_SCALE: f64 = 0.75;
/// Tangent of half the angle the drifting slots turn in an hour: 1 degree.
const HALF_TURN: f64 = 0.008_727;
const PILOT_SAMPLES: u64 = 20_000;

/// One label of a sample as drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// Puts samples in the order of their true probabilities, as far as what is written tells them.
    pub(super) best: f64,
    /// The bias and the linear part of the logit.
    pub(super) linear: f64,
    pub(super) happened: bool,
}

/// One sample as drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Drawn {
    pub(super) click: Outcome,
    /// Only `multitask` has it; whoever buys has clicked.
    pub(super) buy: Option<Outcome>,
}

/// How the logit of the buy is made of the click's and its own.
struct Buy {
    bias: f64,
    shared: f64,
    own: f64,
}

/// All that a seed decides before the first sample is drawn.
pub(super) struct Truth {
    seed: u64,
    label_prefix: &'static [u8],
    columns: Vec<Column>,
    items: Option<Items>,
    bias: f64,
    buy: Option<Buy>,
    /// Whether the structure is that of the sample itself.
    structured: bool,
}

/// What the signs of a sample do: to the click, to the buy, and by their sequence.
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

    /// How far the world has turned by `hour`.
    pub(super) fn turn(hour: u32) -> Turn {
        Turn::new(HALF_TURN, hour)
    }

    /// Appends the line of sample `index` to `out`. Its signs depend on the seed and the index alone.
    pub(super) fn draw(&self, index: u64, turn: Turn, out: &mut Vec<u8>) -> Drawn {
        let mut stream = Stream::new(self.seed, index);
        // The labels come first in the line and last in the draw: their places are kept for them.
        out.extend_from_slice(self.label_prefix);
        let click_at = out.len();
        out.push(b'0');
        if self.buy.is_some() {
            out.extend_from_slice(b" buy=0");
        }
        let buy_at = out.len() - 1;
        let signs = self.draw_signs(&mut stream, turn, out);
        let end = out.len();
        let structure = if self.structured { signs.structure() } else { self.foreign_structure(index, turn, out) };
        out.truncate(end);
        out.push(b'\n');
        let logit = signs.click.linear + structure;
        let drawn = match &self.buy {
            None => {
                let best = if self.structured { logit } else { signs.click.linear };
                let happened = stream.unit() < probability(logit);
                Drawn { click: Outcome { best, linear: signs.click.linear, happened }, buy: None }
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
    fn draw_signs(&self, stream: &mut Stream, turn: Turn, out: &mut Vec<u8>) -> Signs {
        let mut logits = [Logit::default(); 2];
        logits[0].linear = self.bias;
        for column in &self.columns {
            column.draw(stream, turn, &mut logits, out);
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

    /// The structure of a sample that nobody sees; what it writes behind the end of `out` is the caller's to drop.
    fn foreign_structure(&self, index: u64, turn: Turn, out: &mut Vec<u8>) -> f64 {
        self.draw_signs(&mut Stream::new(mix(self.seed), index), turn, out).structure()
    }

    /// Sets the biases at which a pilot of the first hour has the rates wanted.
    fn set_biases(&mut self) {
        let mut line = Vec::new();
        let (mut clicks, mut buys) = (Vec::new(), Vec::new());
        for index in 0..PILOT_SAMPLES {
            line.clear();
            let signs = self.draw_signs(&mut Stream::new(self.seed, index), Self::turn(0), &mut line);
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
    /// `click_bias` is in the logit of the click and has no place in that of the buy.
    fn logit(&self, click_bias: f64, signs: &Signs) -> f64 {
        self.linear(click_bias, signs) + self.shared * signs.structure() + self.own * signs.buy.pairs()
    }

    fn linear(&self, click_bias: f64, signs: &Signs) -> f64 {
        self.bias + self.shared * (signs.click.linear - click_bias) + self.own * signs.buy.linear
    }

    /// Buys are drawn by their own probability and count as clicks; others click by that of the click.
    fn draw(&self, click_bias: f64, signs: &Signs, stream: &mut Stream) -> Drawn {
        let buy_logit = self.logit(click_bias, signs);
        let buy = stream.unit() < probability(buy_logit);
        let click_logit = signs.click.linear + signs.structure();
        let click = stream.unit() < probability(click_logit) || buy;
        // the odds of a union: neither happens with the product of both chances not to
        let odds = (1.0 + exp(click_logit)) * (1.0 + exp(buy_logit)) - 1.0;
        Drawn {
            click: Outcome { best: ln(odds), linear: signs.click.linear, happened: click },
            buy: Some(Outcome { best: buy_logit, linear: self.linear(click_bias, signs), happened: buy }),
        }
    }
}

fn probability(logit: f64) -> f64 {
    1.0 / (1.0 + exp(-logit))
}

/// The bias that gives the logits this rate.
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
        // few: most of the time of these tests goes into making slots and drawing the pilot
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
            let drawn = truth.draw(index, Truth::turn(0), &mut line);
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
    fn an_old_truth_is_worse_after_a_day() {
        let truth = Truth::new(&spec(DemoKind::Pairwise, true, 7));
        let (mut fresh, mut stale) = (Ranking::new(), Ranking::new());
        let mut line = Vec::new();
        for index in 0..60_000 {
            line.clear();
            let now = truth.draw(index, Truth::turn(23), &mut line).click;
            let then = truth.draw(index, Truth::turn(0), &mut line).click;
            fresh.add(now.best, now.happened);
            stale.add(then.best, now.happened);
        }
        let lost = fresh.auc().unwrap() - stale.auc().unwrap();
        assert!((0.005..0.08).contains(&lost), "a day costs {lost}");
    }

    #[test]
    fn pairs_are_worth_what_the_demo_says() {
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
    fn matches_are_worth_more_than_all_linear_effects() {
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
