//! The declaration of a table: columns, initial values, optimizer.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::optimizer::Optimizer;
use crate::partition::mix;

/// A named group of weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// The name that models use, e.g. `wide` or `deep`.
    pub name: String,
    /// Weights per row.
    pub width: usize,
    /// Initial values are uniform between minus and plus `init_scale`.
    pub init_scale: f32,
    /// Whether it exists only once the sign was shown `admit_after` times; until then it reads as 0.
    #[serde(default)]
    pub late: bool,
}

/// The declaration of a table, as in a job and in a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// The name of the table, on which initial values depend.
    pub name: String,
    /// The seed of the initial values.
    pub seed: u64,
    /// Number of partitions, fixed for the life of the table.
    pub partitions: u32,
    /// The columns of a row, in order.
    pub columns: Vec<Column>,
    /// Shows of a sign before its row gets the late columns.
    #[serde(default)]
    pub admit_after: u32,
    /// The optimizer of the rows.
    pub optimizer: Optimizer,
}

/// An invalid declaration.
#[derive(Debug, Error)]
pub enum SpecError {
    /// The JSON is malformed.
    #[error("table: {0}")]
    Json(#[from] serde_json::Error),
    /// A number is out of range.
    #[error("table: {0}")]
    Invalid(String),
}

/// The widest row: 64 KB of weights.
const MAX_WIDTH: usize = 16_384;

impl TableSpec {
    /// Reads and checks a declaration.
    pub fn from_json(json: &str) -> Result<Self, SpecError> {
        let spec: TableSpec = serde_json::from_str(json)?;
        spec.check()?;
        Ok(spec)
    }

    /// Rejects numbers that are out of range.
    pub fn check(&self) -> Result<(), SpecError> {
        let invalid = |message| Err(SpecError::Invalid(message));
        if !(1..=65_536).contains(&self.partitions) {
            return invalid(format!("partitions: expected 1 to 65536, got {}", self.partitions));
        }
        let widths = self.columns.iter().map(|column| column.width);
        let width = widths.clone().fold(0usize, usize::saturating_add);
        if widths.clone().any(|width| width == 0) || !(1..=MAX_WIDTH).contains(&width) {
            return invalid(format!(
                "columns: expected 1 to {MAX_WIDTH} values per row and no column of width 0, got {width}"
            ));
        }
        for column in &self.columns {
            if !(column.init_scale.is_finite() && column.init_scale >= 0.0) {
                return invalid(format!("column `{}`: init_scale: expected 0 or more", column.name));
            }
        }
        self.optimizer.check().map_err(SpecError::Invalid)
    }

    /// Weights per row.
    pub fn width(&self) -> usize {
        self.columns.iter().map(|column| column.width).sum()
    }

    /// Optimizer state values per row.
    pub(crate) fn state_width(&self) -> usize {
        let has_late = self.admit_after > 0 && self.columns.iter().any(|column| column.late);
        self.optimizer.state_width(self.width(), has_late)
    }

    /// The ranges of the late columns among the weights.
    pub(crate) fn late_columns(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let ranges = self.columns.iter().map(|column| {
            end += column.width;
            (column.late, end - column.width..end)
        });
        ranges.filter(|(late, _)| *late).map(|(_, range)| range).collect()
    }

    /// Writes the initial weights of `sign`, a function of (seed, table, sign) alone.
    pub fn init(&self, sign: u64, weights: &mut [f32]) {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut state = mix(sign ^ mix(self.seed ^ xxh3_64(self.name.as_bytes())));
        let mut at = 0;
        for column in &self.columns {
            for weight in &mut weights[at..at + column.width] {
                state = state.wrapping_add(STEP);
                // 24 bits, the precision of an f32.
                let uniform = (mix(state) >> 40) as f32 / (1u32 << 24) as f32;
                *weight = (2.0 * uniform - 1.0) * column.init_scale;
            }
            at += column.width;
        }
    }
}

#[cfg(test)]
pub(crate) fn test_spec(partitions: u32) -> TableSpec {
    let json = format!(
        r#"{{"name":"main","seed":7,"partitions":{partitions},
        "columns":[{{"name":"wide","width":1,"init_scale":0}},{{"name":"deep","width":3,"init_scale":0.5}}],
        "optimizer":{{"kind":"adagrad","learning_rate":0.1,"initial_accumulator":0.25,"epsilon":1e-8}}}}"#
    );
    TableSpec::from_json(&json).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_initial_values_never_change() {
        let mut weights = [9.0; 4];
        test_spec(1).init(12_345, &mut weights);
        assert_eq!(weights, GOLDEN);
        test_spec(256).init(12_345, &mut weights);
        assert_eq!(weights, GOLDEN, "the number of partitions does not matter");
    }

    const GOLDEN: [f32; 4] = [0.0, 0.485_952_62, -0.316_287_76, -0.484_088];

    #[test]
    fn initial_values_are_uniform() {
        let spec = test_spec(1);
        let mut all = Vec::new();
        let mut weights = [0.0; 4];
        for sign in 0..10_000 {
            spec.init(sign, &mut weights);
            assert_eq!(weights[0], 0.0);
            all.extend_from_slice(&weights[1..]);
        }
        let mean = all.iter().sum::<f32>() / all.len() as f32;
        let square = all.iter().map(|x| x * x).sum::<f32>() / all.len() as f32;
        assert!(mean.abs() < 0.005, "{mean}");
        assert!((square - 0.25 / 3.0).abs() < 0.002, "{square}");
        assert!(all.iter().all(|x| x.abs() <= 0.5));
    }

    #[test]
    fn invalid_declarations_are_rejected() {
        let mut spec = test_spec(4);
        spec.partitions = 0;
        assert_eq!(spec.check().unwrap_err().to_string(), "table: partitions: expected 1 to 65536, got 0");
        let mut spec = test_spec(4);
        spec.columns[1].width = 20_000;
        assert!(spec.check().unwrap_err().to_string().contains("got 20001"));
        assert!(TableSpec::from_json("{").is_err());
    }
}
