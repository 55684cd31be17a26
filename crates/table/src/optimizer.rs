//! Optimizers of sparse rows. They update one row at a time; their state is stored in the row.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::rows::Word;

/// An optimizer and its settings. `g` is the gradient of a weight, `lr` the learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Optimizer {
    /// `weight −= lr · g`.
    Sgd {
        /// Step size.
        learning_rate: f32,
    },
    /// `sum += g²; weight −= lr · g / (√sum + epsilon)`.
    Adagrad {
        /// Step size.
        learning_rate: f32,
        /// The initial value of `sum`.
        initial_accumulator: f32,
        /// Keeps the first step finite.
        epsilon: f32,
    },
    /// Adagrad with one sum for a row: `sum += mean of g²`.
    RowAdagrad {
        /// Step size.
        learning_rate: f32,
        /// The initial value of `sum`.
        initial_accumulator: f32,
        /// Keeps the first step finite.
        epsilon: f32,
    },
    /// Adam that updates a row only when its sign occurs; each row corrects its bias by its own number of steps, late
    /// columns by the steps since they were created.
    Adam {
        /// Step size.
        learning_rate: f32,
        /// Decay of the mean of g.
        beta1: f32,
        /// Decay of the mean of g².
        beta2: f32,
        /// Keeps steps finite.
        epsilon: f32,
    },
    /// FTRL-Proximal (McMahan et al. 2013): weights with |z| up to `l1` are 0.
    Ftrl {
        /// Step size, alpha in the paper.
        learning_rate: f32,
        /// Smooths the first steps.
        beta: f32,
        /// L1 regularisation, which sets weights to exactly 0.
        l1: f32,
        /// L2 regularisation, which shrinks weights.
        l2: f32,
    },
}

impl Optimizer {
    /// Rejects settings that cannot train.
    pub fn check(&self) -> Result<(), String> {
        let positive = |name: &str, value: f32| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(format!("optimizer.{name}: expected more than 0, got {value}")),
        };
        let least_zero = |name: &str, value: f32| match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(format!("optimizer.{name}: expected 0 or more, got {value}")),
        };
        let below_one = |name: &str, value: f32| match (0.0..1.0).contains(&value) {
            true => Ok(()),
            false => Err(format!("optimizer.{name}: expected 0 or more and less than 1, got {value}")),
        };
        match *self {
            Optimizer::Sgd { learning_rate } => positive("learning_rate", learning_rate),
            Optimizer::Adagrad { learning_rate, initial_accumulator, epsilon }
            | Optimizer::RowAdagrad { learning_rate, initial_accumulator, epsilon } => {
                positive("learning_rate", learning_rate)?;
                least_zero("initial_accumulator", initial_accumulator)?;
                least_zero("epsilon", epsilon)?;
                match initial_accumulator + epsilon > 0.0 {
                    true => Ok(()),
                    false => {
                        Err("optimizer: expected `initial_accumulator` or `epsilon` above 0, got 0 for both".into())
                    }
                }
            }
            Optimizer::Adam { learning_rate, beta1, beta2, epsilon } => {
                positive("learning_rate", learning_rate)?;
                below_one("beta1", beta1)?;
                below_one("beta2", beta2)?;
                positive("epsilon", epsilon)
            }
            Optimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                positive("learning_rate", learning_rate)?;
                positive("beta", beta)?;
                least_zero("l1", l1)?;
                least_zero("l2", l2)
            }
        }
    }

    /// Its name in jobs, snapshots and messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adagrad { .. } => "adagrad",
            Optimizer::RowAdagrad { .. } => "row_adagrad",
            Optimizer::Adam { .. } => "adam",
            Optimizer::Ftrl { .. } => "ftrl",
        }
    }

    /// State values for a row of `width` weights, some of them late if `has_late`.
    pub(crate) fn state_width(&self, width: usize, has_late: bool) -> usize {
        match self {
            Optimizer::Sgd { .. } => 0,
            Optimizer::Adagrad { .. } => width,
            Optimizer::RowAdagrad { .. } => 1,
            // Means of g, means of g², the powers of both betas, and these powers again for the late columns.
            Optimizer::Adam { .. } => 2 * width + if has_late { 4 } else { 2 },
            // z, then the sums of g².
            Optimizer::Ftrl { .. } => 2 * width,
        }
    }

    /// Writes the initial state of a row that starts with `weights`.
    pub(crate) fn init_state(&self, weights: &[f32], state: &mut [Word]) {
        match *self {
            Optimizer::Sgd { .. } => {}
            Optimizer::Adagrad { initial_accumulator, .. } | Optimizer::RowAdagrad { initial_accumulator, .. } => {
                state.fill(initial_accumulator.to_le_bytes());
            }
            Optimizer::Adam { .. } => {
                let (means, powers) = state.split_at_mut(2 * weights.len());
                means.fill(0f32.to_le_bytes());
                powers.fill(1f32.to_le_bytes());
            }
            Optimizer::Ftrl { .. } => {
                state.fill(0f32.to_le_bytes());
                self.start_columns(0..weights.len(), weights, state);
            }
        }
    }

    /// Resets the state of late `columns`, which start from `weights`.
    ///
    /// Until now these columns took steps with weight 0 and gradient 0. Only two values need a reset: FTRL's z, which
    /// decides the weight, and Adam's powers, which count the steps. The sum of row-wise Adagrad belongs to the whole row.
    pub(crate) fn start_columns(&self, columns: Range<usize>, weights: &[f32], state: &mut [Word]) {
        match *self {
            Optimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                // The z that gives this weight, so that a step with gradient 0 changes nothing.
                for (z, weight) in state[columns.clone()].iter_mut().zip(&weights[columns]) {
                    let start =
                        -weight * (beta / learning_rate + l2) - l1 * weight.signum() * f32::from(*weight != 0.0);
                    put(z, start);
                }
            }
            Optimizer::Adam { .. } => {
                if let Some(late) = state.get_mut(2 * weights.len() + 2..) {
                    late.fill(1f32.to_le_bytes());
                }
            }
            Optimizer::Sgd { .. } | Optimizer::Adagrad { .. } | Optimizer::RowAdagrad { .. } => {}
        }
    }

    /// Updates a row; its `late` columns count their own steps if the state has room for them.
    #[inline]
    pub(crate) fn step(&self, weights: &mut [Word], state: &mut [Word], gradient: &[f32], late: &[Range<usize>]) {
        match *self {
            Optimizer::Sgd { learning_rate } => {
                for (weight, g) in weights.iter_mut().zip(gradient) {
                    put(weight, get(weight) - learning_rate * g);
                }
            }
            Optimizer::Adagrad { learning_rate, epsilon, .. } => {
                for ((weight, sum), g) in weights.iter_mut().zip(state).zip(gradient) {
                    let after = get(sum) + g * g;
                    put(sum, after);
                    put(weight, get(weight) - learning_rate * g / (after.sqrt() + epsilon));
                }
            }
            Optimizer::RowAdagrad { learning_rate, epsilon, .. } => {
                let squares: f32 = gradient.iter().map(|g| g * g).sum();
                let after = get(&state[0]) + squares / gradient.len() as f32;
                put(&mut state[0], after);
                let rate = learning_rate / (after.sqrt() + epsilon);
                for (weight, g) in weights.iter_mut().zip(gradient) {
                    put(weight, get(weight) - rate * g);
                }
            }
            Optimizer::Adam { learning_rate, beta1, beta2, epsilon } => {
                let adam = Adam { learning_rate, beta1, beta2, epsilon };
                match state.len() > 2 * weights.len() + 2 {
                    true => adam.step_late(weights, state, gradient, late),
                    false => {
                        let (means, powers) = state.split_at_mut(2 * weights.len());
                        let (means, squares) = means.split_at_mut(weights.len());
                        let powers = adam.advance(powers);
                        adam.step(weights, means, squares, gradient, powers);
                    }
                }
            }
            Optimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                let (z, sums) = state.split_at_mut(weights.len());
                let ftrl = Ftrl { learning_rate, beta, l1, l2 };
                for (((weight, z), sum), g) in weights.iter_mut().zip(z).zip(sums).zip(gradient) {
                    let (before, after) = (get(sum), get(sum) + g * g);
                    put(sum, after);
                    let moved = get(z) + (g - (after.sqrt() - before.sqrt()) / learning_rate * get(weight));
                    put(z, moved);
                    put(weight, ftrl.weight(moved, after));
                }
            }
        }
    }

    /// Adds a geo increment to a row: changes of the weights, then of the state.
    pub(crate) fn add(&self, weights: &mut [Word], state: &mut [Word], increment: &[f32]) {
        let values = weights.iter_mut().chain(state.iter_mut());
        values.zip(increment).for_each(|(value, change)| put(value, get(value) + change));
        if let Optimizer::Ftrl { learning_rate, beta, l1, l2 } = *self {
            // The weights of FTRL follow from its state.
            let ftrl = Ftrl { learning_rate, beta, l1, l2 };
            let (z, sums) = state.split_at(weights.len());
            for ((weight, z), sum) in weights.iter_mut().zip(z).zip(sums) {
                put(weight, ftrl.weight(get(z), get(sum)));
            }
        }
    }
}

/// The settings of FTRL.
struct Ftrl {
    learning_rate: f32,
    beta: f32,
    l1: f32,
    l2: f32,
}

impl Ftrl {
    /// Returns the weight for z and the sum of g².
    #[inline(always)]
    fn weight(&self, z: f32, sum: f32) -> f32 {
        match z.abs() <= self.l1 {
            true => 0.0,
            false => -(z - self.l1 * z.signum()) / ((self.beta + sum.sqrt()) / self.learning_rate + self.l2),
        }
    }
}

/// The settings of Adam.
struct Adam {
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
}

impl Adam {
    /// Advances the powers of both betas by one step and returns them.
    #[inline(always)]
    fn advance(&self, powers: &mut [Word]) -> [f32; 2] {
        let advanced = [get(&powers[0]) * self.beta1, get(&powers[1]) * self.beta2];
        put(&mut powers[0], advanced[0]);
        put(&mut powers[1], advanced[1]);
        advanced
    }

    /// Updates columns that share the powers of both betas.
    #[inline(always)]
    fn step(
        &self,
        weights: &mut [Word],
        means: &mut [Word],
        squares: &mut [Word],
        gradient: &[f32],
        [power1, power2]: [f32; 2],
    ) {
        let Adam { learning_rate, beta1, beta2, epsilon } = *self;
        let rate = learning_rate / (1.0 - power1);
        let correction = (1.0 - power2).sqrt();
        for (((weight, mean), square), g) in weights.iter_mut().zip(means).zip(squares).zip(gradient) {
            let (m, s) = (get(mean), get(square));
            let (m, s) = (m + (1.0 - beta1) * (g - m), s + (1.0 - beta2) * (g * g - s));
            put(mean, m);
            put(square, s);
            put(weight, get(weight) - rate * m / (s.sqrt() / correction + epsilon));
        }
    }

    /// Updates a row whose late columns count their own steps.
    #[inline(never)]
    fn step_late(&self, weights: &mut [Word], state: &mut [Word], gradient: &[f32], late: &[Range<usize>]) {
        let width = weights.len();
        let (means, powers) = state.split_at_mut(2 * width);
        let (means, squares) = means.split_at_mut(width);
        let (early, own) = (self.advance(powers), self.advance(&mut powers[2..]));
        let mut step = |columns: Range<usize>, powers| {
            let (means, squares) = (&mut means[columns.clone()], &mut squares[columns.clone()]);
            self.step(&mut weights[columns.clone()], means, squares, &gradient[columns], powers);
        };
        let mut start = 0;
        for columns in late {
            step(start..columns.start, early);
            step(columns.clone(), own);
            start = columns.end;
        }
        step(start..width, early);
    }
}

#[inline(always)]
fn get(word: &Word) -> f32 {
    f32::from_le_bytes(*word)
}

#[inline(always)]
fn put(word: &mut Word, value: f32) {
    *word = value.to_le_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 300;
    const START: [f64; 2] = [0.3, -0.05];

    fn gradient(step: usize) -> [f64; 2] {
        let wave = |at: usize| ((at * 37 % 19) as f64 - 9.0) / 10.0;
        [wave(step), 0.1 * wave(step + 7)]
    }

    /// Compares the weights with an f64 reference after every step.
    fn compare(optimizer: &Optimizer, mut reference: impl FnMut(&mut [f64; 2], [f64; 2])) {
        optimizer.check().unwrap();
        let start = START.map(|weight| weight as f32);
        let mut weights = start.map(f32::to_le_bytes);
        let mut state = vec![[9; 4]; optimizer.state_width(2, false)];
        optimizer.init_state(&start, &mut state);
        let mut expected = START;
        for step in 0..STEPS {
            let g = gradient(step);
            optimizer.step(&mut weights, &mut state, &g.map(|g| g as f32), &[]);
            reference(&mut expected, g);
            for (weight, expected) in weights.iter().map(get).zip(expected) {
                let error = (f64::from(weight) - expected).abs();
                assert!(
                    error < 1e-6 * expected.abs().max(1.0),
                    "{} step {step}: {weight} {expected}",
                    optimizer.kind()
                );
            }
        }
    }

    #[test]
    fn sgd() {
        compare(&Optimizer::Sgd { learning_rate: 0.01 }, |w, g| (0..2).for_each(|i| w[i] -= 0.01 * g[i]));
    }

    #[test]
    fn adagrad() {
        // The large epsilon distinguishes √sum + epsilon from √(sum + epsilon).
        for epsilon in [1e-8f32, 0.5] {
            let mut sum = [0.1f64; 2];
            let optimizer = Optimizer::Adagrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon };
            compare(&optimizer, |w, g| {
                for i in 0..2 {
                    sum[i] += g[i] * g[i];
                    w[i] -= 0.05 * g[i] / (sum[i].sqrt() + f64::from(epsilon));
                }
            });
        }
    }

    #[test]
    fn row_adagrad() {
        for epsilon in [1e-8f32, 0.5] {
            let mut sum = 0.1f64;
            let optimizer = Optimizer::RowAdagrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon };
            compare(&optimizer, |w, g| {
                sum += (g[0] * g[0] + g[1] * g[1]) / 2.0;
                (0..2).for_each(|i| w[i] -= 0.05 * g[i] / (sum.sqrt() + f64::from(epsilon)));
            });
        }
    }

    #[test]
    fn adam() {
        let (mut mean, mut square, mut step) = ([0f64; 2], [0f64; 2], 0);
        // The settings are f32, and 1 − beta2 in f32 differs from 1 − beta2 in f64.
        let (beta1, beta2) = (f64::from(0.9f32), f64::from(0.999f32));
        let optimizer = Optimizer::Adam { learning_rate: 0.001, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        compare(&optimizer, |w, g| {
            step += 1;
            for i in 0..2 {
                mean[i] = beta1 * mean[i] + (1.0 - beta1) * g[i];
                square[i] = beta2 * square[i] + (1.0 - beta2) * g[i] * g[i];
                let corrected = (mean[i] / (1.0 - beta1.powi(step)), square[i] / (1.0 - beta2.powi(step)));
                w[i] -= 0.001 * corrected.0 / (corrected.1.sqrt() + 1e-8);
            }
        });
    }

    #[test]
    fn ftrl() {
        let (alpha, beta, l1, l2) = (0.05f64, 1.0f64, 0.05f64, 0.1f64);
        let mut sum = [0f64; 2];
        let mut z = START.map(|w| -w * (beta / alpha + l2) - l1 * w.signum());
        let optimizer = Optimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.05, l2: 0.1 };
        compare(&optimizer, |w, g| {
            for i in 0..2 {
                let sigma = ((sum[i] + g[i] * g[i]).sqrt() - sum[i].sqrt()) / alpha;
                z[i] += g[i] - sigma * w[i];
                sum[i] += g[i] * g[i];
                w[i] = if z[i].abs() <= l1 {
                    0.0
                } else {
                    -(z[i] - l1 * z[i].signum()) / ((beta + sum[i].sqrt()) / alpha + l2)
                };
            }
        });
    }

    #[test]
    fn ftrl_keeps_initial_weights_and_zeroes_weights_below_l1() {
        let optimizer = Optimizer::Ftrl { learning_rate: 0.1, beta: 1.0, l1: 1.0, l2: 0.0 };
        let start = [0.01f32, 0.0];
        let mut weights = start.map(f32::to_le_bytes);
        let mut state = [[9; 4]; 4];
        optimizer.init_state(&start, &mut state);
        optimizer.step(&mut weights, &mut state, &[0.0, 0.0], &[]);
        assert!((get(&weights[0]) - 0.01).abs() < 1e-6);
        assert_eq!(get(&weights[1]), 0.0);
        optimizer.step(&mut weights, &mut state, &[0.0, 0.5], &[]);
        assert_eq!(get(&weights[1]), 0.0, "half of l1 is not enough");
        optimizer.step(&mut weights, &mut state, &[0.0, 1.0], &[]);
        assert!(get(&weights[1]) < 0.0);
    }

    /// A late column takes steps with weight 0 and gradient 0, then gets its initial weight.
    #[test]
    fn late_columns_start_like_other_columns() {
        let optimizers = [
            Optimizer::Sgd { learning_rate: 0.1 },
            Optimizer::Adagrad { learning_rate: 0.1, initial_accumulator: 0.5, epsilon: 1e-8 },
            Optimizer::RowAdagrad { learning_rate: 0.1, initial_accumulator: 0.5, epsilon: 1e-8 },
            Optimizer::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.99, epsilon: 1e-8 },
            Optimizer::Ftrl { learning_rate: 0.1, beta: 1.0, l1: 0.1, l2: 0.1 },
        ];
        let late = 1..3;
        for optimizer in optimizers {
            let mut weights = [0f32; 3].map(f32::to_le_bytes);
            let mut state = vec![[9; 4]; optimizer.state_width(3, true)];
            optimizer.init_state(&[0.0; 3], &mut state);
            for _ in 0..3 {
                optimizer.step(&mut weights, &mut state, &[0.0; 3], std::slice::from_ref(&late));
                assert_eq!(weights.map(|word| get(&word)), [0.0; 3], "{}", optimizer.kind());
            }
            let initial = [0.0, 0.3, -0.2f32];
            optimizer.start_columns(late.clone(), &initial, &mut state);
            let mut fresh = vec![[9; 4]; state.len()];
            optimizer.init_state(&initial, &mut fresh);
            if matches!(optimizer, Optimizer::Adam { .. }) {
                let steps = [0.9f32 * 0.9 * 0.9, 0.99f32 * 0.99 * 0.99];
                assert_eq!([get(&state[6]), get(&state[7])], steps, "the powers of the other column are unchanged");
                fresh[6..8].copy_from_slice(&state[6..8]);
            }
            // Compared by value, because a zero may have either sign.
            let values = |state: &[Word]| state.iter().map(get).collect::<Vec<_>>();
            assert_eq!(values(&state), values(&fresh), "{}", optimizer.kind());
        }
    }

    #[test]
    fn settings_that_cannot_train_are_rejected() {
        let adagrad = |learning_rate, initial_accumulator, epsilon| {
            Optimizer::Adagrad { learning_rate, initial_accumulator, epsilon }.check()
        };
        assert!(adagrad(0.1, 0.0, 1e-8).is_ok());
        assert_eq!(adagrad(0.0, 0.1, 1e-8).unwrap_err(), "optimizer.learning_rate: expected more than 0, got 0");
        assert!(adagrad(f32::NAN, 0.1, 1e-8).is_err());
        assert!(adagrad(0.1, 0.0, 0.0).is_err());
        assert!(adagrad(0.1, -1.0, 1e-8).is_err());
        assert!(Optimizer::Sgd { learning_rate: f32::INFINITY }.check().is_err());
        assert!(Optimizer::Adam { learning_rate: 0.1, beta1: 1.0, beta2: 0.9, epsilon: 1e-8 }.check().is_err());
        assert!(Optimizer::Ftrl { learning_rate: 0.1, beta: 1.0, l1: -1.0, l2: 0.0 }.check().is_err());
    }
}
