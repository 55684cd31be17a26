//! Optimizers that run inside the table, one row at a time.

use serde::{Deserialize, Serialize};

/// An optimizer and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Optimizer {
    /// `state += g²; weight −= learning_rate · g / (√state + epsilon)`.
    Adagrad {
        /// Step size.
        learning_rate: f32,
        /// What `state` starts from.
        initial_accumulator: f32,
        /// Keeps the first step finite.
        epsilon: f32,
    },
}

impl Optimizer {
    /// Refuses settings that cannot train.
    pub fn check(&self) -> Result<(), String> {
        let Optimizer::Adagrad { learning_rate, initial_accumulator, epsilon } = *self;
        let good = |value: f32, least: bool| value.is_finite() && (value > 0.0 || least && value == 0.0);
        if !good(learning_rate, false) {
            return Err(format!("optimizer.learning_rate: expected more than 0, got {learning_rate}"));
        }
        if !good(initial_accumulator, true) || !good(epsilon, true) || initial_accumulator + epsilon == 0.0 {
            return Err(format!(
                "optimizer: expected initial_accumulator and epsilon of 0 or more, not both 0, \
                 got {initial_accumulator} and {epsilon}"
            ));
        }
        Ok(())
    }

    /// The word a snapshot and a message use for it.
    pub fn kind(&self) -> &'static str {
        match self {
            Optimizer::Adagrad { .. } => "adagrad",
        }
    }

    /// Floats of state for a row of `width` weights.
    pub fn state_width(&self, width: usize) -> usize {
        match self {
            Optimizer::Adagrad { .. } => width,
        }
    }

    /// Fills the state of a new row.
    pub fn init_state(&self, state: &mut [f32]) {
        match *self {
            Optimizer::Adagrad { initial_accumulator, .. } => state.fill(initial_accumulator),
        }
    }

    /// One step on a row.
    #[inline]
    pub fn step(&self, weights: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        match *self {
            Optimizer::Adagrad { learning_rate, epsilon, .. } => {
                for ((weight, sum), g) in weights.iter_mut().zip(state).zip(gradient) {
                    *sum += g * g;
                    *weight -= learning_rate * g / (sum.sqrt() + epsilon);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adagrad_follows_its_formula() {
        let optimizer = Optimizer::Adagrad { learning_rate: 0.1, initial_accumulator: 0.01, epsilon: 1e-8 };
        let (mut weight, mut state) = ([1.0f32], [0.0f32]);
        optimizer.init_state(&mut state);
        let (mut expected, mut sum) = (1.0f64, 0.01f64);
        for step in 0..1000 {
            let g = ((step * 37 % 19) as f64 - 9.0) / 10.0;
            optimizer.step(&mut weight, &mut state, &[g as f32]);
            sum += g * g;
            expected -= 0.1 * g / (sum.sqrt() + 1e-8);
        }
        assert!((f64::from(weight[0]) - expected).abs() < 1e-5, "{} {expected}", weight[0]);
    }

    #[test]
    fn settings_that_cannot_train_are_refused() {
        let check = |learning_rate, initial_accumulator, epsilon| {
            Optimizer::Adagrad { learning_rate, initial_accumulator, epsilon }.check()
        };
        assert!(check(0.1, 0.0, 1e-8).is_ok());
        assert!(check(0.0, 0.1, 1e-8).is_err());
        assert!(check(f32::NAN, 0.1, 1e-8).is_err());
        assert!(check(0.1, 0.0, 0.0).is_err());
        assert!(check(0.1, -1.0, 1e-8).is_err());
    }
}
