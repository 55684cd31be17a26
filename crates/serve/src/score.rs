//! A batch to scores: unique signs → cube lookup → pooling → dense network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_sample::pool::pool;
use elasticrec_sample::{Batch, Unique};
use thiserror::Error;

use crate::engine::{Engine, EngineError};
use crate::model::Model;

/// Why a batch has no scores.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ScoreError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("sample {sample}: label `{label}`: expected a finite score, got {got}")]
    NotFinite { sample: usize, label: String, got: f32 },
}

/// What scoring a batch took.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScoreStats {
    /// Distinct signs looked up.
    pub num_signs: usize,
    /// Those that have no row.
    pub num_missed: usize,
    /// From signs to pooled rows.
    pub lookup: Duration,
    /// The dense network.
    pub infer: Duration,
}

/// Scores batches on one thread; its buffers live from one to the next.
pub struct Scorer {
    model: Arc<Model>,
    engine: Engine,
    rows: Vec<f32>,
    pooled: Vec<f32>,
    scores: Vec<f32>,
    stats: ScoreStats,
}

impl Scorer {
    pub(crate) fn new(model: Arc<Model>) -> Result<Scorer, EngineError> {
        let engine = Engine::new(model.network())?;
        let (rows, pooled, scores) = Default::default();
        Ok(Scorer { model, engine, rows, pooled, scores, stats: ScoreStats::default() })
    }

    /// Runs a batch that touches nothing but the network: what the runtime puts off to its first run is done then.
    pub(crate) fn warm_up(&mut self) -> Result<(), ScoreError> {
        let mut builder = self.model.parser().builder(1);
        builder.begin();
        builder.end(1, 0);
        self.score(&builder.finish()).map(|_| ())
    }

    /// The scores `[num_samples, num_labels]` of a batch of this model's parser; an empty batch has none.
    pub fn score(&mut self, batch: &Batch) -> Result<&[f32], ScoreError> {
        self.stats = ScoreStats::default();
        self.scores.clear();
        if batch.num_samples() == 0 {
            return Ok(&self.scores);
        }
        let started = Instant::now();
        self.look_up(batch);
        let looked_up = Instant::now();
        self.engine.run(batch.num_samples(), &self.pooled, &batch.dense, &mut self.scores)?;
        self.stats.lookup = looked_up - started;
        self.stats.infer = looked_up.elapsed();
        self.check_finite()?;
        Ok(&self.scores)
    }

    fn look_up(&mut self, batch: &Batch) {
        let cube = self.model.cube();
        let width = cube.width();
        let unique = Unique::of(batch);
        let num_signs = unique.signs.len();
        // every value is written below; what a longer batch left behind is cut off, not cleared
        self.rows.resize(num_signs * width, 0.0);
        self.pooled.resize(batch.num_samples() * batch.num_slots * width, 0.0);
        let hits = cube.lookup(&unique.signs, &mut self.rows);
        pool(batch, &unique, self.model.parser().poolings(), &self.rows, width, &mut self.pooled);
        self.stats.num_signs = num_signs;
        self.stats.num_missed = num_signs - hits;
    }

    fn check_finite(&self) -> Result<(), ScoreError> {
        let Some(at) = self.scores.iter().position(|score| !score.is_finite()) else {
            return Ok(());
        };
        let labels = &self.model.manifest().features.labels;
        let label = labels[at % labels.len()].clone();
        Err(ScoreError::NotFinite { sample: at / labels.len(), label, got: self.scores[at] })
    }

    /// The scores of the last batch.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// What the last batch took.
    pub fn stats(&self) -> ScoreStats {
        self.stats
    }

    /// The model it scores with.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}
