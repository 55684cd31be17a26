//! Demo data that tell the truth: log files as users have them, drawn from click probabilities that are known.
//!
//! This is the very beginning of the data path: what [`generate`] writes is read by the same parsers as real logs.
//! Because the true probability of every sample is known, so is the best AUC that any model can reach.

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

/// How the samples are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoFormat {
    /// `show click sign:slot sign:slot …`
    Slots,
    /// Label, 13 numbers and 26 categories, separated by tabs.
    Criteo,
}

impl DemoFormat {
    /// The slots of a Criteo row.
    pub const CRITEO_CATEGORIES: u32 = 26;
}

/// What there is to learn beside linear effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoKind {
    /// Pairs of slots.
    Pairwise,
    /// Two labels: a click, and a rare buy that is much like it.
    Multitask,
    /// A slot `history` with items of which those like the slot `item` matter.
    Sequence,
}

impl DemoKind {
    /// The slots `item` and `history` are not among the numbered ones.
    fn num_own_slots(self) -> u32 {
        if self == Self::Sequence { 2 } else { 0 }
    }
}

/// What to generate. The same spec gives the same bytes on every machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemoSpec {
    /// Samples over all hours.
    pub samples: u64,
    /// Slots of a sample; Criteo rows have [`DemoFormat::CRITEO_CATEGORIES`].
    pub slots: u32,
    /// Hours the samples are spread over evenly.
    pub hours: u32,
    /// Decides the effects of all signs and every sample.
    pub seed: u64,
    /// How samples are written.
    pub format: DemoFormat,
    /// What there is to learn.
    pub kind: DemoKind,
    /// Whether it can be learned: without, it comes from other samples, and all rates stay as they are.
    pub structure: bool,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemoSummary {
    /// Samples written.
    pub samples: u64,
    /// Samples with click 1.
    pub clicks: u64,
    /// AUC of the true probabilities against the drawn labels; `None` without both a clicked and another sample.
    pub best_auc: Option<f64>,
    /// AUC of the linear part of the truth, the most that a linear model can learn.
    pub linear_auc: Option<f64>,
    /// The second label of [`DemoKind::Multitask`].
    pub buy: Option<LabelSummary>,
    /// One entry an hour, in order.
    pub hours: Vec<HourSummary>,
    /// Bytes written.
    pub bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

/// What was generated for one hour.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HourSummary {
    /// Counted from 0.
    pub hour: u32,
    /// The directory of the hour within the output directory, as `20260101/00`.
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

/// What was generated of a second label.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabelSummary {
    /// Samples that have it.
    pub positives: u64,
    /// AUC of its true probabilities.
    pub best_auc: Option<f64>,
    /// AUC of the linear part of them.
    pub linear_auc: Option<f64>,
}

/// Why demo data could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A number of the spec is out of range.
    #[error("demo data: {field}: expected {expected}, got {got}")]
    Spec {
        /// Name of the field of [`DemoSpec`].
        field: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: u64,
    },
    /// Criteo rows have one label and no sequence.
    #[error("demo data: kind: expected `pairwise` for criteo")]
    Kind,
    /// The output directory has data of an earlier run, or of somebody else.
    #[error("{}: expected no hours there, got `{hour}` (--overwrite replaces them)", .out.display())]
    HoursPresent {
        /// The output directory.
        out: PathBuf,
        /// The first hour found.
        hour: String,
    },
    /// The progress callback asked to stop.
    #[error("demo data: stopped after {samples} samples")]
    Stopped {
        /// Samples written before.
        samples: u64,
    },
    /// A file could not be written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl DemoError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// Told the number of samples written so far, now and then, on the thread of the caller; may ask to stop.
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
        let min_slots = 1 + self.kind.num_own_slots();
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
