//! Feature handling in full: what a job declares, what a manifest carries, what the parser is built from.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::hash::HASH_VERSION;

/// The format of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `show click sign:slot sign:slot …`
    Slots,
    /// `click:0 dense_feature:0.05 … slot:value slot:value …`
    PaddleRec,
    /// Tab separated: label, 13 numbers, 26 categories, empty = missing.
    Criteo,
    /// Lines of fields in a fixed order, see [`Columns`].
    Csv,
    /// Columns by name; has no lines.
    Parquet,
    /// Lines that a reader of the user's own turns into named values.
    Reader,
}

impl Format {
    /// Whether signs stand in the data as they are; they are hashes of values otherwise.
    pub fn has_signs(self) -> bool {
        matches!(self, Format::Slots)
    }
}

/// How the rows of one slot become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their sum, repeats counted.
    Sum,
    /// The sum over the number of signs.
    Mean,
    /// The sum over the square root of the number of signs.
    Sqrtn,
}

impl Pooling {
    /// The factor on the sum of `num_signs` rows.
    #[inline]
    pub fn factor(self, num_signs: usize) -> f32 {
        match self {
            Pooling::Sum => 1.0,
            Pooling::Mean => 1.0 / num_signs as f32,
            Pooling::Sqrtn => 1.0 / (num_signs as f32).sqrt(),
        }
    }
}

/// How a dense value is brought to scale; the constants are fixed in the job, never fitted from the stream.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Normalize {
    /// As it stands.
    None,
    /// sign(x) · ln(1 + |x|).
    Log,
    /// (x − min) / (max − min), held within 0 and 1.
    MinMax {
        /// Becomes 0.
        min: f32,
        /// Becomes 1.
        max: f32,
    },
}

impl Normalize {
    /// The model's input for the value `x`.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Normalize::None => x,
            Normalize::Log => (f64::from(x.abs()).ln_1p() as f32).copysign(x),
            Normalize::MinMax { min, max } => ((x - min) / (max - min)).clamp(0.0, 1.0),
        }
    }
}

/// A sparse slot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    /// Its name in the data.
    pub name: String,
    /// How its rows are joined.
    pub pooling: Pooling,
    /// The slot whose rows it shares: equal values of the two are one sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
    /// Not pooled: its last so many signs are laid out one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u16>,
    /// The column it is read from, if that has another name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// What stands between several values in one field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separator: Option<String>,
    /// Not read: the bucket that a dense value falls into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<Buckets>,
}

/// Where a slot of buckets has its signs from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buckets {
    /// The dense column.
    pub dense: String,
    /// Buckets for each 1.0 of the model's input.
    pub steps: u16,
}

impl Buckets {
    /// The bucket of a dense value as the model has it.
    #[inline]
    pub fn of(steps: u16, normalized: f32) -> i64 {
        (normalized * f32::from(steps)).floor() as i64
    }
}

impl Slot {
    /// The column it is read from.
    pub fn column(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }
}

/// A dense column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// Its name in the data.
    pub name: String,
    /// How it is brought to scale.
    pub normalize: Normalize,
    /// The column it is read from, if that has another name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
}

impl Dense {
    /// The column it is read from.
    pub fn column(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }
}

/// What CSV and Parquet need beside slots, dense columns and labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Columns {
    /// CSV: the columns in the order of a line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// CSV: a line with these names is no sample.
    #[serde(default)]
    pub header: bool,
    /// CSV: what stands between two fields.
    #[serde(default = "comma")]
    pub delimiter: char,
    /// How often a sample counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// When a sample was logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// Texts that mean that there is no value, beside the empty one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub null: Vec<String>,
}

fn comma() -> char {
    ','
}

/// Everything that decides what a line means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    /// The format.
    pub format: Format,
    /// The version of the hash, see [`crate::hash`].
    pub hash: u32,
    /// Sparse slots, in the order of the model's input.
    pub slots: Vec<Slot>,
    /// Dense columns, in the order of the model's input.
    pub dense: Vec<Dense>,
    /// Labels; the first one is the click.
    pub labels: Vec<String>,
    /// Signs are taken modulo this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modulo: Option<u64>,
    /// The sign, or the value that is hashed to one, that only fills a place: it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<String>,
    /// Slot text: a sign is hashed with its slot, so that equal signs of two slots have rows of their own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub separate_slots: bool,
    /// CSV and Parquet: the rest of the columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
}

/// A declaration that cannot be served.
#[derive(Debug, Error)]
pub enum FeaturesError {
    /// Not the JSON that this release writes.
    #[error("features: {0}")]
    Json(#[from] serde_json::Error),
    /// Another hash.
    #[error("features: hash: expected version {HASH_VERSION}, got {0}")]
    Hash(u32),
    /// A name or number out of its range.
    #[error("features: {0}")]
    Invalid(String),
}

impl Features {
    /// Reads the JSON of a job or manifest and checks it.
    pub fn from_json(json: &str) -> Result<Self, FeaturesError> {
        let features: Features = serde_json::from_str(json)?;
        features.check()?;
        Ok(features)
    }

    fn check(&self) -> Result<(), FeaturesError> {
        if self.hash != HASH_VERSION {
            return Err(FeaturesError::Hash(self.hash));
        }
        if self.slots.len() > usize::from(u16::MAX) {
            return Err(invalid(format!("slots: expected at most 65535, got {}", self.slots.len())));
        }
        if self.slots.is_empty() && self.dense.is_empty() {
            return Err(invalid("expected at least one slot or dense column, got none".into()));
        }
        if self.labels.is_empty() {
            return Err(invalid("labels: expected at least one, got none".into()));
        }
        check_unique("slots", self.slots.iter().map(|slot| &slot.name))?;
        check_unique("dense", self.dense.iter().map(|dense| &dense.name))?;
        check_unique("labels", self.labels.iter())?;
        for dense in &self.dense {
            if let Normalize::MinMax { min, max } = dense.normalize
                && !(min.is_finite() && max.is_finite() && min < max)
            {
                return Err(invalid(format!("dense `{}`: expected min < max, got {min} and {max}", dense.name)));
            }
        }
        for slot in &self.slots {
            if let Some(share) = &slot.share
                && !self.slots.iter().any(|other| other.name == *share && other.share.is_none())
            {
                let name = &slot.name;
                return Err(invalid(format!(
                    "slot `{name}`: share: expected a slot with rows of its own, got `{share}`"
                )));
            }
            if slot.sequence == Some(0) {
                return Err(invalid(format!("slot `{}`: sequence: expected at least 1, got 0", slot.name)));
            }
        }
        self.check_buckets()?;
        if self.num_cells() > usize::from(u16::MAX) {
            return Err(invalid(format!("slots: expected at most 65535 cells, got {}", self.num_cells())));
        }
        if self.modulo == Some(0) {
            return Err(invalid("modulo: expected at least 1, got 0".into()));
        }
        self.check_format()
    }

    fn check_buckets(&self) -> Result<(), FeaturesError> {
        for slot in &self.slots {
            let Some(buckets) = &slot.buckets else { continue };
            let message = if buckets.steps == 0 {
                "steps: expected at least 1, got 0".into()
            } else if !self.dense.iter().any(|dense| dense.name == buckets.dense) {
                format!("expected buckets of a dense column, got `{}`", buckets.dense)
            } else if slot.sequence.is_some() {
                "expected no sequence of buckets".into()
            } else {
                continue;
            };
            return Err(invalid(format!("slot `{}`: {message}", slot.name)));
        }
        if !self.slots.is_sorted_by_key(|slot| slot.buckets.is_some()) {
            return Err(invalid("slots: expected those of buckets behind all others".into()));
        }
        Ok(())
    }

    fn check_format(&self) -> Result<(), FeaturesError> {
        match self.format {
            Format::Slots if !self.dense.is_empty() => {
                Err(invalid("dense: slot text has no dense columns, expected none".into()))
            }
            Format::Slots if self.padding.as_ref().is_some_and(|padding| padding.parse::<u64>().is_err()) => {
                Err(invalid("padding: expected a u64 for slot text".into()))
            }
            Format::Criteo if self.labels.len() != 1 => {
                Err(invalid(format!("labels: criteo rows have 1, got {}", self.labels.len())))
            }
            Format::Csv | Format::Parquet if self.columns.is_none() => {
                Err(invalid("columns: expected, got none".into()))
            }
            _ => Ok(()),
        }
    }

    /// Slots that stand in the data; those of buckets are behind them.
    pub fn read_slots(&self) -> &[Slot] {
        &self.slots[..self.slots.partition_point(|slot| slot.buckets.is_none())]
    }

    /// Vectors a sample: one for each slot, and one for each place of a sequence.
    pub fn num_cells(&self) -> usize {
        self.slots.iter().map(|slot| slot.sequence.map_or(1, usize::from)).sum()
    }
}

fn invalid(message: String) -> FeaturesError {
    FeaturesError::Invalid(message)
}

fn check_unique<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<(), FeaturesError> {
    let mut seen = std::collections::HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(invalid(format!("{what}: `{name}` is declared twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"format":"criteo","hash":1,"slots":[{"name":"C1","pooling":"sum"}],
        "dense":[{"name":"I1","normalize":{"kind":"log"}},{"name":"I2","normalize":{"kind":"minmax","min":0,"max":4}}],
        "labels":["click"]}"#;

    #[test]
    fn json_goes_there_and_back() {
        let features = Features::from_json(GOOD).unwrap();
        let again = Features::from_json(&serde_json::to_string(&features).unwrap()).unwrap();
        assert_eq!(features, again);
    }

    #[test]
    fn wrong_declarations_are_named() {
        let error = |from: &str, to: &str| Features::from_json(&GOOD.replace(from, to)).unwrap_err().to_string();
        assert_eq!(error("\"hash\":1", "\"hash\":2"), "features: hash: expected version 1, got 2");
        assert!(error("\"max\":4", "\"max\":0").contains("expected min < max"));
        assert!(error("\"I2\"", "\"I1\"").contains("`I1` is declared twice"));
        assert!(error("\"labels\"", "\"label\"").contains("unknown field `label`"));
    }

    #[test]
    fn slots_of_buckets_are_behind_all_others_and_of_a_dense_column() {
        let bucket = |dense: &str, steps: u16| {
            format!(r#"{{"name":"b","pooling":"sum","buckets":{{"dense":"{dense}","steps":{steps}}}}}"#)
        };
        let slot = r#"{"name":"C1","pooling":"sum"}"#;
        let read = |slots: &[&str]| Features::from_json(&GOOD.replace(slot, &slots.join(",")));
        assert_eq!(read(&[slot, &bucket("I1", 6)]).unwrap().read_slots().len(), 1);
        let error = |slots: &[&str]| read(slots).unwrap_err().to_string();
        assert!(error(&[&bucket("I1", 6), slot]).contains("behind all others"));
        assert!(error(&[slot, &bucket("I3", 6)]).contains("slot `b`: expected buckets of a dense column, got `I3`"));
        assert!(error(&[slot, &bucket("I1", 0)]).contains("steps: expected at least 1, got 0"));
    }

    #[test]
    fn buckets_are_steps_of_the_normalised_value() {
        assert_eq!([0.0, 0.16, 0.17, -0.1].map(|value| Buckets::of(6, value)), [0, 0, 1, -1]);
        assert_eq!(Buckets::of(u16::MAX, f32::MAX), i64::MAX);
    }

    #[test]
    fn normalisation() {
        assert_eq!(Normalize::Log.apply(0.0), 0.0);
        assert!((Normalize::Log.apply(-2.0) + 3f32.ln()).abs() < 1e-6);
        let minmax = Normalize::MinMax { min: 1.0, max: 3.0 };
        assert_eq!([minmax.apply(0.0), minmax.apply(2.0), minmax.apply(9.0)], [0.0, 0.5, 1.0]);
    }
}
