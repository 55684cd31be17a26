//! Optimizers that run inside the table, one row at a time, with their state beside the row's weights.

use serde::{Deserialize, Serialize};

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
        /// What `sum` starts from.
        initial_accumulator: f32,
        /// Keeps the first step finite.
        epsilon: f32,
    },
    /// Adagrad with one sum for a row: `sum += mean of g²`.
    RowAdagrad {
        /// Step size.
        learning_rate: f32,
        /// What `sum` starts from.
        initial_accumulator: f32,
        /// Keeps the first step finite.
        epsilon: f32,
    },
    /// Adam whose row stands still while its sign does not occur; each row corrects its bias by its own steps.
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
    /// FTRL-Proximal (McMahan et al. 2013): weights whose evidence is below `l1` are 0.
    Ftrl {
        /// Step size, alpha in the paper.
        learning_rate: f32,
        /// Smooths the first steps.
        beta: f32,
        /// Strength of the pull to exactly 0.
        l1: f32,
        /// Strength of the pull towards 0.
        l2: f32,
    },
}

impl Optimizer {
    /// Refuses settings that cannot train.
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
                    false => Err("optimizer: expected initial_accumulator or epsilon above 0, got 0 for both".into()),
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

    /// The word a job, a snapshot and a message use for it.
    pub fn kind(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adagrad { .. } => "adagrad",
            Optimizer::RowAdagrad { .. } => "row_adagrad",
            Optimizer::Adam { .. } => "adam",
            Optimizer::Ftrl { .. } => "ftrl",
        }
    }

    /// Floats of state for a row of `width` weights.
    pub fn state_width(&self, width: usize) -> usize {
        match self {
            Optimizer::Sgd { .. } => 0,
            Optimizer::Adagrad { .. } => width,
            Optimizer::RowAdagrad { .. } => 1,
            // means of g, means of g², and the powers of both betas
            Optimizer::Adam { .. } => 2 * width + 2,
            // z, then the sums of g²
            Optimizer::Ftrl { .. } => 2 * width,
        }
    }

    /// Fills the state of a row that starts from `weights`.
    pub fn init_state(&self, weights: &[f32], state: &mut [f32]) {
        match *self {
            Optimizer::Sgd { .. } => {}
            Optimizer::Adagrad { initial_accumulator, .. } | Optimizer::RowAdagrad { initial_accumulator, .. } => {
                state.fill(initial_accumulator);
            }
            Optimizer::Adam { .. } => {
                let (means, powers) = state.split_at_mut(2 * weights.len());
                means.fill(0.0);
                powers.fill(1.0);
            }
            Optimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                let (z, sums) = state.split_at_mut(weights.len());
                sums.fill(0.0);
                // the z whose weight this is: a step without a gradient leaves the row as it began
                for (z, weight) in z.iter_mut().zip(weights) {
                    *z = -weight * (beta / learning_rate + l2) - l1 * weight.signum() * f32::from(*weight != 0.0);
                }
            }
        }
    }

    /// One step on a row.
    #[inline]
    pub fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        match *self {
            Optimizer::Sgd { learning_rate } => {
                for (weight, g) in weights.iter_mut().zip(gradient) {
                    *weight -= learning_rate * g;
                }
            }
            Optimizer::Adagrad { learning_rate, epsilon, .. } => {
                for ((weight, sum), g) in weights.iter_mut().zip(state).zip(gradient) {
                    *sum += g * g;
                    *weight -= learning_rate * g / (sum.sqrt() + epsilon);
                }
            }
            Optimizer::RowAdagrad { learning_rate, epsilon, .. } => {
                let squares: f32 = gradient.iter().map(|g| g * g).sum();
                state[0] += squares / gradient.len() as f32;
                let rate = learning_rate / (state[0].sqrt() + epsilon);
                for (weight, g) in weights.iter_mut().zip(gradient) {
                    *weight -= rate * g;
                }
            }
            Optimizer::Adam { learning_rate, beta1, beta2, epsilon } => {
                let (means, powers) = state.split_at_mut(2 * weights.len());
                let (mean, square) = means.split_at_mut(weights.len());
                powers[0] *= beta1;
                powers[1] *= beta2;
                let rate = learning_rate / (1.0 - powers[0]);
                let correction = (1.0 - powers[1]).sqrt();
                for (((weight, mean), square), g) in weights.iter_mut().zip(mean).zip(square).zip(gradient) {
                    *mean += (1.0 - beta1) * (g - *mean);
                    *square += (1.0 - beta2) * (g * g - *square);
                    *weight -= rate * *mean / (square.sqrt() / correction + epsilon);
                }
            }
            Optimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                let (z, sums) = state.split_at_mut(weights.len());
                for (((weight, z), sum), g) in weights.iter_mut().zip(z).zip(sums).zip(gradient) {
                    let before = sum.sqrt();
                    *sum += g * g;
                    let after = sum.sqrt();
                    *z += g - (after - before) / learning_rate * *weight;
                    *weight = match z.abs() <= l1 {
                        true => 0.0,
                        false => -(*z - l1 * z.signum()) / ((beta + after) / learning_rate + l2),
                    };
                }
            }
        }
    }
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

    /// Runs the optimizer beside a reference in f64 and compares the weights after every step.
    fn compare(optimizer: &Optimizer, mut reference: impl FnMut(&mut [f64; 2], [f64; 2])) {
        optimizer.check().unwrap();
        let mut weights = START.map(|weight| weight as f32);
        let mut state = vec![9.0; optimizer.state_width(2)];
        optimizer.init_state(&weights, &mut state);
        let mut expected = START;
        for step in 0..STEPS {
            let g = gradient(step);
            optimizer.step(&mut weights, &mut state, &g.map(|g| g as f32));
            reference(&mut expected, g);
            for (weight, expected) in weights.iter().zip(expected) {
                let error = (f64::from(*weight) - expected).abs();
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
        // the large one shows on which side of the root it stands
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
        // the settings are f32, and 1 − beta2 of an f32 is not 1 − beta2 of an f64
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
    fn ftrl_keeps_its_initial_weights_and_zeroes_the_undecided() {
        let optimizer = Optimizer::Ftrl { learning_rate: 0.1, beta: 1.0, l1: 1.0, l2: 0.0 };
        let mut weights = [0.01f32, 0.0];
        let mut state = [9.0; 4];
        optimizer.init_state(&weights, &mut state);
        optimizer.step(&mut weights, &mut state, &[0.0, 0.0]);
        assert!((weights[0] - 0.01).abs() < 1e-6);
        assert_eq!(weights[1], 0.0);
        optimizer.step(&mut weights, &mut state, &[0.0, 0.5]);
        assert_eq!(weights[1], 0.0, "half of l1 is not enough");
        optimizer.step(&mut weights, &mut state, &[0.0, 1.0]);
        assert!(weights[1] < 0.0);
    }

    #[test]
    fn settings_that_cannot_train_are_refused() {
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
