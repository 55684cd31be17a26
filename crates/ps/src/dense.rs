//! The dense vector: each partition holds a slice of it, with its own optimizer state and step count.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Beta 1, beta 2 and epsilon of Adam, and epsilon of Adagrad: torch's defaults, as in local training.
const ADAM: (f32, f32, f32) = (0.9, 0.999, 1e-8);
const ADAGRAD_EPSILON: f32 = 1e-10;

/// The optimizer of the dense vector.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum DenseOptimizer {
    /// w −= rate · g
    Sgd {
        /// Step size.
        learning_rate: f32,
    },
    /// w −= rate · g / √(Σ g²)
    Adagrad {
        /// Step size.
        learning_rate: f32,
    },
    /// Running means of g and g², both with bias correction.
    Adam {
        /// Step size.
        learning_rate: f32,
    },
}

impl DenseOptimizer {
    /// Number of state vectors.
    pub fn num_states(self) -> usize {
        match self {
            DenseOptimizer::Sgd { .. } => 0,
            DenseOptimizer::Adagrad { .. } => 1,
            DenseOptimizer::Adam { .. } => 2,
        }
    }
}

/// The dense values of a range of partitions.
#[derive(Debug, Clone)]
pub struct Dense {
    optimizer: DenseOptimizer,
    /// Length of the whole vector.
    total: usize,
    /// Number of parameters. The buffers follow them; pushed values are added to buffers, without the optimizer.
    num_parameters: usize,
    num_partitions: u32,
    owned: Range<u32>,
    values: Vec<f32>,
    states: Vec<Vec<f32>>,
    /// Number of steps of each owned partition.
    steps: Vec<u64>,
}

/// Returns the range of a partition's values in the whole vector.
pub fn slice_of(partition: u32, num_partitions: u32, total: usize) -> Range<usize> {
    let at = |partition: u32| (partition as usize * total) / num_partitions as usize;
    at(partition)..at(partition + 1)
}

impl Dense {
    /// Creates zeros for the partitions `owned` of a vector of `total` parameters.
    pub fn new(optimizer: DenseOptimizer, total: usize, num_partitions: u32, owned: Range<u32>) -> Self {
        let all = slice_of(owned.start, num_partitions, total).start..slice_of(owned.end, num_partitions, total).start;
        Dense {
            optimizer,
            total,
            num_parameters: total,
            num_partitions,
            values: vec![0.0; all.len()],
            states: vec![vec![0.0; all.len()]; optimizer.num_states()],
            steps: vec![0; owned.len()],
            owned,
        }
    }

    /// Declares the last `num_buffers` values as buffers. Pushed values are added to buffers, without the optimizer.
    #[must_use]
    pub fn with_buffers(self, num_buffers: usize) -> Self {
        Dense { num_parameters: self.total.saturating_sub(num_buffers), ..self }
    }

    /// The values of all owned partitions.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The optimizer's state vectors, each as long as the values.
    pub fn states(&self) -> &[Vec<f32>] {
        &self.states
    }

    /// Returns the range of an owned partition's values in `values`.
    pub fn slice(&self, partition: u32) -> Range<usize> {
        let start = slice_of(self.owned.start, self.num_partitions, self.total).start;
        let slice = slice_of(partition, self.num_partitions, self.total);
        slice.start - start..slice.end - start
    }

    /// Number of steps of a partition.
    pub fn steps(&self, partition: u32) -> u64 {
        self.steps[(partition - self.owned.start) as usize]
    }

    /// Copies the values of a partition, followed by its state vectors.
    pub fn copy_slice(&self, partition: u32) -> Vec<f32> {
        let slice = self.slice(partition);
        std::iter::once(&self.values).chain(&self.states).flat_map(|vector| &vector[slice.clone()]).copied().collect()
    }

    /// Restores a copy of `copy_slice`; false if it has another length.
    #[must_use]
    pub fn restore_slice(&mut self, partition: u32, steps: u64, copied: &[f32]) -> bool {
        let slice = self.slice(partition);
        if copied.len() != slice.len() * (1 + self.states.len()) {
            return false;
        }
        let vectors = std::iter::once(&mut self.values).chain(&mut self.states);
        for (at, vector) in vectors.enumerate() {
            vector[slice.clone()].copy_from_slice(&copied[at * slice.len()..(at + 1) * slice.len()]);
        }
        self.steps[(partition - self.owned.start) as usize] = steps;
        true
    }

    /// Adds its increments to a partition. `increments` has the increments of all owned partitions: of the values, then of
    /// each state vector.
    pub fn add(&mut self, partition: u32, increments: &[f32]) {
        assert_eq!(increments.len(), self.values.len() * (1 + self.states.len()));
        let (slice, length) = (self.slice(partition), self.values.len());
        self.steps[(partition - self.owned.start) as usize] += 1;
        for (at, vector) in std::iter::once(&mut self.values).chain(&mut self.states).enumerate() {
            let changes = &increments[at * length..][slice.clone()];
            vector[slice.clone()].iter_mut().zip(changes).for_each(|(value, change)| *value += change);
        }
    }

    /// Takes one step in a partition; `gradient` is the gradient of all owned partitions.
    pub fn step(&mut self, partition: u32, gradient: &[f32]) {
        assert_eq!(gradient.len(), self.values.len());
        let whole = self.slice(partition);
        let steps = &mut self.steps[(partition - self.owned.start) as usize];
        *steps += 1;
        let first = slice_of(partition, self.num_partitions, self.total).start;
        let num_stepped = self.num_parameters.saturating_sub(first).min(whole.len());
        let (slice, buffers) = (whole.start..whole.start + num_stepped, whole.start + num_stepped..whole.end);
        let changes = &gradient[buffers.clone()];
        self.values[buffers].iter_mut().zip(changes).for_each(|(value, change)| *value += change);
        let (values, gradient) = (&mut self.values[slice.clone()], &gradient[slice.clone()]);
        match (self.optimizer, &mut self.states[..]) {
            (DenseOptimizer::Adagrad { learning_rate }, [sums]) => {
                for ((value, sum), &g) in values.iter_mut().zip(&mut sums[slice]).zip(gradient) {
                    *sum += g * g;
                    *value -= learning_rate * g / (sum.sqrt() + ADAGRAD_EPSILON);
                }
            }
            (DenseOptimizer::Adam { learning_rate }, [means, squares]) => {
                let (beta1, beta2, epsilon) = ADAM;
                let correction = |beta: f32| 1.0 - f64::from(beta).powf(*steps as f64);
                let step = (f64::from(learning_rate) / correction(beta1)) as f32;
                let root = correction(beta2).sqrt() as f32;
                let states = means[slice.clone()].iter_mut().zip(&mut squares[slice]);
                for ((value, (mean, square)), &g) in values.iter_mut().zip(states).zip(gradient) {
                    *mean += (g - *mean) * (1.0 - beta1);
                    *square = *square * beta2 + (1.0 - beta2) * g * g;
                    *value -= step * *mean / (square.sqrt() / root + epsilon);
                }
            }
            (DenseOptimizer::Sgd { learning_rate }, _) => {
                for (value, &g) in values.iter_mut().zip(gradient) {
                    *value -= learning_rate * g;
                }
            }
            _ => unreachable!("each optimizer has its number of states"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_the_vector_once() {
        for (total, num_partitions) in [(0, 4), (3, 4), (1000, 7), (361_217, 256)] {
            let mut end = 0;
            for partition in 0..num_partitions {
                let slice = slice_of(partition, num_partitions, total);
                assert_eq!(slice.start, end);
                end = slice.end;
            }
            assert_eq!(end, total);
        }
    }

    #[test]
    fn adam_matches_the_paper() {
        let mut dense = Dense::new(DenseOptimizer::Adam { learning_rate: 0.1 }, 6, 2, 0..2);
        let (mut mean, mut square, mut value) = (0f64, 0f64, 0f64);
        for t in 1..50 {
            let g = (f64::from(t) * 0.7).sin();
            dense.step(1, &[9.0, 9.0, 9.0, g as f32, g as f32, g as f32]);
            mean = 0.9 * mean + 0.1 * g;
            square = 0.999 * square + 0.001 * g * g;
            let (m, s) = (mean / (1.0 - 0.9f64.powi(t)), square / (1.0 - 0.999f64.powi(t)));
            value -= 0.1 * m / (s.sqrt() + 1e-8);
            assert!((f64::from(dense.values()[4]) - value).abs() < 2e-6, "{t}");
        }
        assert_eq!(dense.values()[..3], [0.0; 3], "other slices do not change");
        assert_eq!((dense.steps(0), dense.steps(1)), (0, 49));
    }

    #[test]
    fn pushed_values_are_added_to_buffers() {
        // Partitions have two values; the second has a parameter and a buffer, the third two buffers.
        let optimizer = DenseOptimizer::Adagrad { learning_rate: 0.1 };
        let mut dense = Dense::new(optimizer, 6, 3, 0..3).with_buffers(3);
        for partition in 0..3 {
            dense.step(partition, &[1.0; 6]);
        }
        let expected = [-0.1, -0.1, -0.1, 1.0, 1.0, 1.0];
        assert!(dense.values().iter().zip(expected).all(|(value, expected)| (value - expected).abs() < 1e-6));
        assert_eq!(dense.states()[0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_copied_slice_can_be_restored() {
        let mut dense = Dense::new(DenseOptimizer::Adagrad { learning_rate: 0.1 }, 10, 4, 1..3);
        dense.step(1, &[1.0, 2.0, 3.0, 4.0, 5.0]);
        dense.step(2, &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let mut other = Dense::new(DenseOptimizer::Adagrad { learning_rate: 0.1 }, 10, 4, 0..4);
        for partition in 1..3 {
            assert!(other.restore_slice(partition, dense.steps(partition), &dense.copy_slice(partition)));
        }
        assert_eq!(other.values()[2..7], *dense.values());
        assert_eq!(other.copy_slice(2), dense.copy_slice(2));
        assert!(!other.restore_slice(0, 1, &[0.0]));
    }
}
