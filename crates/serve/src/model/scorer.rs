//! From a batch to scores: lookup, pooling, dense network.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_cube::{ClientError, View};
use elasticrec_sample::pool::{is_pooled, pool_in_order, pool_samples};
use elasticrec_sample::{Batch, Unique};
use thiserror::Error;

use crate::model::Model;
use crate::model::engine::{Engine, EngineError};
use crate::model::rows::{Rows, StoreRows};
use crate::refusal::Refusal;

/// The reason a batch was not scored.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ScoreError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Rows(#[from] ClientError),
    #[error("sample {sample}: label `{label}`: expected a finite score, got {got}")]
    NotFinite { sample: usize, label: String, got: f32 },
}

impl From<ScoreError> for Refusal {
    fn from(error: ScoreError) -> Refusal {
        match error {
            ScoreError::Rows(gone @ ClientError::Gone { .. }) => Refusal::Gone(gone.to_string()),
            ScoreError::Rows(error) => Refusal::Unavailable(error.to_string()),
            error => Refusal::Internal(error.to_string()),
        }
    }
}

/// The statistics of scoring a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScoreStats {
    /// Number of signs looked up; with a store, each sign of a batch once.
    pub num_signs: usize,
    /// Number of these signs that have no row.
    pub num_missed: usize,
    /// Number of these signs whose shard did not answer; they read as zero too.
    pub num_lost: usize,
    /// Time of lookup and pooling.
    pub lookup: Duration,
    /// Time of the dense network.
    pub infer: Duration,
}

/// Samples per run of the network, which bounds the memory of a large request.
const SLICE: usize = 1024;
/// Row values that a scorer keeps memory for between batches: 16 MB.
const KEPT_VALUES: usize = 4 << 20;

/// Scores batches on one thread and reuses its buffers.
pub struct Scorer {
    model: Arc<Model>,
    engine: Engine,
    rows: Vec<f32>,
    present: Vec<bool>,
    pooled: Vec<f32>,
    scores: Vec<f32>,
    stats: ScoreStats,
}

impl Scorer {
    pub(crate) fn new(model: Arc<Model>) -> Result<Scorer, EngineError> {
        let engine = Engine::new(model.network())?;
        let (rows, present, pooled, scores) = Default::default();
        Ok(Scorer { model, engine, rows, present, pooled, scores, stats: ScoreStats::default() })
    }

    /// Runs a batch without signs, so that ONNX Runtime does the work of its first run now.
    pub(crate) fn warm_up(&mut self) -> Result<(), ScoreError> {
        let mut builder = self.model.parser().builder(1);
        builder.begin();
        builder.end(1, 0);
        self.score(&builder.finish(), None)?;
        self.scores_of(0..1).map(|_| ())
    }

    /// Scores a batch of this model's parser; [`scores_of`](Scorer::scores_of) returns the scores. The deadline limits
    /// the wait for rows of a store.
    pub fn score(&mut self, batch: &Batch, deadline: Option<Instant>) -> Result<(), ScoreError> {
        self.stats = ScoreStats::default();
        self.scores.clear();
        if batch.num_samples() == 0 {
            return Ok(());
        }
        let model = self.model.clone();
        match model.rows() {
            Rows::Held(view) => self.score_with_view(batch, view)?,
            Rows::Store(store) => self.score_with_store(batch, store, deadline)?,
        }
        // A large request must not keep its memory after it.
        self.rows.truncate(KEPT_VALUES);
        self.rows.shrink_to(KEPT_VALUES);
        Ok(())
    }

    /// Scores with rows in this process, looked up in the order of the signs. If each slot has one sign, this is
    /// already the input of the network. Repeated signs are looked up again: finding repeats costs more, as their rows
    /// are in the CPU caches.
    fn score_with_view(&mut self, batch: &Batch, view: &View) -> Result<(), ScoreError> {
        let (model, width) = (self.model.clone(), view.width());
        let layout = model.parser().layout();
        for samples in slices(batch) {
            let started = Instant::now();
            let signs = &batch.signs[signs_of(batch, &samples)];
            // Every value is written below, so old values are not cleared.
            self.rows.resize(signs.len() * width, 0.0);
            self.stats.num_missed += signs.len() - view.lookup(signs, &mut self.rows);
            self.stats.num_signs += signs.len();
            if is_pooled(batch, layout, samples.clone()) {
                std::mem::swap(&mut self.rows, &mut self.pooled);
            } else {
                self.pooled.resize(samples.len() * layout.num_cells() * width, 0.0);
                pool_in_order(batch, layout, &self.rows, samples.clone(), &mut self.pooled);
            }
            self.stats.lookup += started.elapsed();
            self.infer(batch, samples)?;
        }
        Ok(())
    }

    /// Scores with rows of a store, which is asked for each sign of the batch once.
    fn score_with_store(
        &mut self,
        batch: &Batch,
        store: &StoreRows,
        deadline: Option<Instant>,
    ) -> Result<(), ScoreError> {
        let (model, width) = (self.model.clone(), store.width());
        let layout = model.parser().layout();
        let started = Instant::now();
        let unique = Unique::of(batch);
        let num_signs = unique.signs.len();
        self.rows.resize(num_signs * width, 0.0);
        let summary = store.look_up(&unique.signs, &mut self.rows, &mut self.present, deadline)?;
        self.stats.num_signs = num_signs;
        self.stats.num_missed = num_signs - summary.hits - summary.lost;
        self.stats.num_lost = summary.lost;
        self.stats.lookup = started.elapsed();
        for samples in slices(batch) {
            let started = Instant::now();
            self.pooled.resize(samples.len() * layout.num_cells() * width, 0.0);
            pool_samples(batch, &unique, layout, &self.rows, samples.clone(), &mut self.pooled);
            self.stats.lookup += started.elapsed();
            self.infer(batch, samples)?;
        }
        Ok(())
    }

    /// Runs the network on samples whose rows are pooled.
    fn infer(&mut self, batch: &Batch, samples: Range<usize>) -> Result<(), ScoreError> {
        let started = Instant::now();
        let dense = &batch.dense[samples.start * batch.num_dense..samples.end * batch.num_dense];
        self.engine.run(samples.len(), &self.pooled, dense, &mut self.scores)?;
        self.stats.infer += started.elapsed();
        Ok(())
    }

    /// Returns the scores `[samples, num_labels]` of samples of the last batch, if all are finite.
    pub fn scores_of(&self, samples: Range<usize>) -> Result<&[f32], ScoreError> {
        let labels = self.model.manifest().labels();
        let scores = &self.scores[samples.start * labels.len()..samples.end * labels.len()];
        let Some(at) = scores.iter().position(|score| !score.is_finite()) else {
            return Ok(scores);
        };
        let label = labels[at % labels.len()].clone();
        Err(ScoreError::NotFinite { sample: at / labels.len(), label, got: scores[at] })
    }

    /// Returns the statistics of the last batch.
    pub fn stats(&self) -> ScoreStats {
        self.stats
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}

/// Splits the samples of a batch into runs of the network.
fn slices(batch: &Batch) -> impl Iterator<Item = Range<usize>> + use<> {
    let num_samples = batch.num_samples();
    (0..num_samples).step_by(SLICE).map(move |start| start..num_samples.min(start + SLICE))
}

/// Returns the range of the signs of these samples.
fn signs_of(batch: &Batch, samples: &Range<usize>) -> Range<usize> {
    let [start, end] = [samples.start, samples.end].map(|at| batch.offsets[at * batch.num_slots] as usize);
    start..end
}
