//! The declaration of features in jobs and manifests, from which the parser is built.

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
    /// Columns by name; there are no lines.
    Parquet,
    /// Lines that a user's own reader turns into named values.
    Reader,
}

impl Format {
    /// Whether the data contains signs; otherwise signs are hashes of values.
    pub fn has_signs(self) -> bool {
        matches!(self, Format::Slots)
    }
}

/// The pooling of the rows of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The sum, with repeats.
    Sum,
    /// The sum divided by the number of signs.
    Mean,
    /// The sum divided by the square root of the number of signs.
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

/// The normalisation of a dense value. The constants are part of the job; they are not fitted to the data.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Normalize {
    /// Unchanged.
    None,
    /// sign(x) · ln(1 + |x|).
    Log,
    /// (x − min) / (max − min), limited to 0 to 1.
    MinMax {
        /// The value that becomes 0.
        min: f32,
        /// The value that becomes 1.
        max: f32,
    },
}

impl Normalize {
    /// Returns the model's input for the value `x`.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Normalize::None => x,
            // In f64, because `log1p` of f32 differs between maths libraries; rounded to f32 the results agree.
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
    /// The pooling of its rows.
    pub pooling: Pooling,
    /// The slot whose rows it shares: equal values of both slots have one sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
    /// For a sequence: the number of its last signs that are kept, each in its own cell, without pooling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u16>,
    /// The column it is read from, if the name differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// The separator of several values in one field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separator: Option<String>,
    /// For a slot that is not read: the bucket of a dense value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<Buckets>,
}

/// The source of a bucket slot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buckets {
    /// The dense column.
    pub dense: String,
    /// Number of buckets per 1.0 of the model's input.
    pub steps: u16,
}

impl Buckets {
    /// Returns the bucket of a normalised dense value.
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
    /// Its normalisation.
    pub normalize: Normalize,
    /// The column it is read from, if the name differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
}

impl Dense {
    /// The column it is read from.
    pub fn column(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }
}

/// Settings of CSV and Parquet besides slots, dense columns and labels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Columns {
    /// CSV: the columns in the order of a line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// CSV: whether lines with the column names are skipped.
    #[serde(default)]
    pub header: bool,
    /// CSV: the delimiter of fields.
    #[serde(default = "comma")]
    pub delimiter: char,
    /// The column with the weight of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// The column with the time of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// Texts that mean a missing value, in addition to the empty text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub null: Vec<String>,
}

fn comma() -> char {
    ','
}

/// The declaration of features: everything that decides how a record is parsed.
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
    /// The modulus of all signs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modulo: Option<u64>,
    /// The sign or value that pads lines; it is ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<String>,
    /// Slot text: whether a sign is hashed with its slot, so that equal signs of two slots have different rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub separate_slots: bool,
    /// CSV and Parquet: further settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
}

/// An invalid declaration.
#[derive(Debug, Error)]
pub enum FeaturesError {
    /// The JSON is malformed.
    #[error("features: {0}")]
    Json(#[from] serde_json::Error),
    /// The hash has another version.
    #[error("features: hash: expected version {HASH_VERSION}, got {0}")]
    Hash(u32),
    /// A name or number is invalid.
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
                return Err(invalid(format!("slot `{name}`: share: expected a slot without `share`, got `{share}`")));
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
                "buckets: steps: expected at least 1, got 0".into()
            } else if !self.dense.iter().any(|dense| dense.name == buckets.dense) {
                format!("buckets: expected a dense column, got `{}`", buckets.dense)
            } else if slot.sequence.is_some() {
                "buckets: expected a slot without `sequence`, got one with it".into()
            } else {
                continue;
            };
            return Err(invalid(format!("slot `{}`: {message}", slot.name)));
        }
        if !self.slots.is_sorted_by_key(|slot| slot.buckets.is_some()) {
            return Err(invalid("slots: expected bucket slots after all others".into()));
        }
        Ok(())
    }

    fn check_format(&self) -> Result<(), FeaturesError> {
        match self.format {
            Format::Slots if !self.dense.is_empty() => {
                Err(invalid(format!("dense: expected none for slot text, got {}", self.dense.len())))
            }
            Format::Slots if self.padding.as_ref().is_some_and(|padding| padding.parse::<u64>().is_err()) => {
                Err(invalid("padding: expected a u64 for slot text".into()))
            }
            Format::Criteo if self.labels.len() != 1 => {
                Err(invalid(format!("labels: expected 1 for criteo, got {}", self.labels.len())))
            }
            Format::Csv | Format::Parquet if self.columns.is_none() => {
                Err(invalid("columns: required for csv and parquet, got none".into()))
            }
            _ => Ok(()),
        }
    }

    /// The slots that are read from the data. Bucket slots come after them.
    pub fn read_slots(&self) -> &[Slot] {
        &self.slots[..self.slots.partition_point(|slot| slot.buckets.is_none())]
    }

    /// Cells per sample: one for each slot, and one for each position of a sequence.
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
    fn json_round_trip() {
        let features = Features::from_json(GOOD).unwrap();
        let again = Features::from_json(&serde_json::to_string(&features).unwrap()).unwrap();
        assert_eq!(features, again);
    }

    #[test]
    fn invalid_declarations_are_rejected() {
        let error = |from: &str, to: &str| Features::from_json(&GOOD.replace(from, to)).unwrap_err().to_string();
        assert_eq!(error("\"hash\":1", "\"hash\":2"), "features: hash: expected version 1, got 2");
        assert!(error("\"max\":4", "\"max\":0").contains("expected min < max"));
        assert!(error("\"I2\"", "\"I1\"").contains("`I1` is declared twice"));
        assert!(error("\"labels\"", "\"label\"").contains("unknown field `label`"));
    }

    #[test]
    fn bucket_slots_come_last_and_have_a_dense_column() {
        let bucket = |dense: &str, steps: u16| {
            format!(r#"{{"name":"b","pooling":"sum","buckets":{{"dense":"{dense}","steps":{steps}}}}}"#)
        };
        let slot = r#"{"name":"C1","pooling":"sum"}"#;
        let read = |slots: &[&str]| Features::from_json(&GOOD.replace(slot, &slots.join(",")));
        assert_eq!(read(&[slot, &bucket("I1", 6)]).unwrap().read_slots().len(), 1);
        let error = |slots: &[&str]| read(slots).unwrap_err().to_string();
        assert!(error(&[&bucket("I1", 6), slot]).contains("bucket slots after all others"));
        assert!(error(&[slot, &bucket("I3", 6)]).contains("slot `b`: buckets: expected a dense column, got `I3`"));
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

    #[test]
    fn logarithms_are_computed_in_f64_and_rounded_to_f32() {
        for (x, expected) in
            [(1.0f32, std::f32::consts::LN_2), (1e-30, 1e-30), (8.472_636, 2.248_407_4), (f32::MAX, 88.722_84)]
        {
            assert_eq!(Normalize::Log.apply(x), expected);
            assert_eq!(Normalize::Log.apply(-x), -expected);
        }
        assert_eq!(Normalize::Log.apply(f32::INFINITY), f32::INFINITY);
        assert!(Normalize::Log.apply(f32::NAN).is_nan());
    }
}
