//! Demo data: click logs like those of users, drawn from known click probabilities.
//!
//! The same parsers read the files of [`generate`] and real click logs. The true probability of every sample is known,
//! and so is the best AUC that any model can reach.

mod auc;
mod column;
mod history;
mod random;
mod truth;
mod write;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use write::generate;

const MAX_SLOTS: u32 = 10_000;

/// The format of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoFormat {
    /// `show click sign:slot sign:slot …`
    Slots,
    /// Label, 13 numbers and 26 categories, separated by tabs.
    Criteo,
}

impl DemoFormat {
    /// Number of slots of a Criteo row.
    pub const CRITEO_CATEGORIES: u32 = 26;
}

/// The structure that a model can learn in addition to linear effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoKind {
    /// Pairs of slots.
    Pairwise,
    /// Two labels: a click, and a rare buy that depends mostly on the same effects.
    Multitask,
    /// A slot `history` with items; those with the hidden category of slot `item` make a click more likely.
    Sequence,
}

impl DemoKind {
    /// Number of slots with names instead of numbers: `item` and `history`.
    fn num_named_slots(self) -> u32 {
        if self == Self::Sequence { 2 } else { 0 }
    }
}

/// The specification of a data set. The same spec gives the same bytes on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemoSpec {
    /// Samples over all hours.
    pub samples: u64,
    /// Slots of a sample; Criteo rows have [`DemoFormat::CRITEO_CATEGORIES`].
    pub slots: u32,
    /// Hours over which the samples are spread evenly.
    pub hours: u32,
    /// Decides the effects of all signs and every sample.
    pub seed: u64,
    /// Format of the files.
    pub format: DemoFormat,
    /// The structure beyond linear effects.
    pub kind: DemoKind,
    /// Whether the structure can be learned. If not, it is taken from other samples, and the rates stay the same.
    pub structure: bool,
}

/// The summary of a generated data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemoSummary {
    /// Samples written.
    pub samples: u64,
    /// Samples with click 1.
    pub clicks: u64,
    /// AUC of the true probabilities against the drawn labels; `None` without both a clicked and another sample.
    pub best_auc: Option<f64>,
    /// AUC of the linear part of the true model, the best that a linear model can reach.
    pub linear_auc: Option<f64>,
    /// The second label of [`DemoKind::Multitask`].
    pub buy: Option<LabelSummary>,
    /// One entry per hour, in order.
    pub hours: Vec<HourSummary>,
    /// Bytes written.
    pub bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

/// The summary of one hour.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HourSummary {
    /// The hour, from 0.
    pub hour: u32,
    /// The directory of the hour in the output directory, such as `20260101/00`.
    pub path: String,
    /// Samples of this hour.
    pub samples: u64,
    /// Samples with click 1.
    pub clicks: u64,
    /// As in [`DemoSummary`], of this hour alone.
    pub best_auc: Option<f64>,
    /// As in [`DemoSummary`], of this hour alone.
    pub linear_auc: Option<f64>,
    /// As in [`DemoSummary`], of this hour alone.
    pub buy: Option<LabelSummary>,
}

/// The summary of a second label.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabelSummary {
    /// Samples that have the label.
    pub positives: u64,
    /// AUC of the true probabilities of the label.
    pub best_auc: Option<f64>,
    /// AUC of the linear part of the true model.
    pub linear_auc: Option<f64>,
}

/// The reason demo data could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A number of the spec is out of range.
    #[error("demo data: {field}: expected {expected}, got {got}")]
    Spec {
        /// Name of the field of [`DemoSpec`].
        field: &'static str,
        /// The allowed values.
        expected: String,
        /// The given value.
        got: u64,
    },
    /// Criteo rows have one label and no sequence.
    #[error("demo data: kind: expected `pairwise` for criteo")]
    Kind,
    /// The output directory already has data.
    #[error("{}: expected no hours of data, got `{hour}` (--overwrite replaces all hours)", .out.display())]
    HoursPresent {
        /// The output directory.
        out: PathBuf,
        /// The directory of the first hour found.
        hour: String,
    },
    /// The progress callback asked to stop.
    #[error("demo data: stopped after {samples} samples")]
    Stopped {
        /// Samples written so far.
        samples: u64,
    },
    /// A file could not be written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
}

impl DemoError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// Called from time to time, on the calling thread, with the number of samples written so far; may ask to stop.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> ControlFlow<()>;

impl DemoSpec {
    fn check(&self) -> Result<(), DemoError> {
        let refuse = |field, expected: String, got| Err(DemoError::Spec { field, expected, got });
        if self.samples == 0 {
            return refuse("samples", "at least 1".to_owned(), 0);
        }
        if self.hours == 0 || u64::from(self.hours) > self.samples {
            return refuse("hours", format!("1 to the number of samples ({})", self.samples), self.hours.into());
        }
        let min_slots = 1 + self.kind.num_named_slots();
        match self.format {
            DemoFormat::Slots if !(min_slots..=MAX_SLOTS).contains(&self.slots) => {
                refuse("slots", format!("{min_slots} to {MAX_SLOTS}"), self.slots.into())
            }
            DemoFormat::Criteo if self.kind != DemoKind::Pairwise => Err(DemoError::Kind),
            DemoFormat::Criteo if self.slots != DemoFormat::CRITEO_CATEGORIES => {
                refuse("slots", format!("{} for criteo", DemoFormat::CRITEO_CATEGORIES), self.slots.into())
            }
            _ => Ok(()),
        }
    }
}
