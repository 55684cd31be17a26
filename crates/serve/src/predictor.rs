//! The request path without the socket: lines of the training format to scores, for `predict --model`.

use std::path::Path;
use std::sync::Arc;

use elasticrec_sample::LabelMode;
use elasticrec_sample::reader::parse_text;
use thiserror::Error;

use crate::codecs::{Codec, Limits};
use crate::model::{EngineError, Manifest, Model, ModelError, ScoreError, Scorer, init_onnxruntime};

/// The reason scoring failed.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum PredictError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("{0}")]
    Record(String),
    #[error(transparent)]
    Score(#[from] ScoreError),
}

/// A model version and one scorer in this process.
pub struct Predictor {
    model: Arc<Model>,
    scorer: Scorer,
}

impl Predictor {
    /// Loads a version directory, or the current version of a model directory.
    pub fn load(path: &Path, ort_library: &Path) -> Result<Predictor, PredictError> {
        init_onnxruntime(ort_library)?;
        let model = Model::load(path)?;
        let scorer = model.scorer()?;
        Ok(Predictor { model, scorer })
    }

    /// Returns the scores `[num_lines, num_labels]` of lines in the training format; their labels are ignored.
    pub fn predict_text(&mut self, text: &[u8]) -> Result<Vec<f32>, PredictError> {
        let batch = parse_text(self.model.parser(), text, LabelMode::Ignored).map_err(PredictError::Record)?;
        self.scorer.score(&batch, None)?;
        Ok(self.scorer.scores_of(0..batch.num_samples())?.to_vec())
    }

    /// Returns the scores `[num_samples, num_labels]` of samples as a reader process sends them.
    pub fn predict_parsed(&mut self, parsed: &[u8]) -> Result<Vec<f32>, PredictError> {
        let mut builder = self.model.parser().builder(0);
        let limits = Limits { max_instances: usize::MAX };
        let decoded = Codec::Parsed.decode(self.model.parser(), parsed, limits, &mut builder);
        decoded.map_err(|error| PredictError::Record(error.to_string()))?;
        let batch = builder.finish();
        self.scorer.score(&batch, None)?;
        Ok(self.scorer.scores_of(0..batch.num_samples())?.to_vec())
    }

    /// Returns the manifest of the version.
    pub fn manifest(&self) -> &Manifest {
        self.model.manifest()
    }
}
