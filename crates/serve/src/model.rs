//! A model version in memory: what all scorers share.

use std::path::Path;
use std::sync::Arc;

use elasticrec_cube::{CubeError, View};
use elasticrec_sample::{FeaturesError, Parser};
use thiserror::Error;

use crate::chain::Chain;
use crate::engine::{EngineError, Network};
use crate::manifest::{Manifest, ManifestError};
use crate::registry::PlanError;
use crate::score::{ScoreError, Scorer};
use crate::version::{self, VersionError};

/// Why a model cannot be served.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ModelError {
    #[error(transparent)]
    Version(#[from] VersionError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Cube(#[from] CubeError),
    #[error("{name}: {source}")]
    Features { name: String, source: FeaturesError },
    #[error("{name}: {source}")]
    Engine { name: String, source: EngineError },
    #[error("{name}: {what}")]
    Mismatch { name: String, what: String },
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{name}: warm-up: {source}")]
    WarmUp { name: String, source: ScoreError },
}

/// A version: its manifest, parser, cube and network.
pub struct Model {
    /// The directory, for messages.
    name: String,
    manifest: Manifest,
    parser: Parser,
    cube: View,
    network: Network,
}

impl Model {
    /// Loads the version that `path` stands for (see [`version::resolve`]) and checks every byte of it.
    pub fn load(path: &Path) -> Result<Arc<Model>, ModelError> {
        let dir = version::resolve(path)?;
        let name = dir.display().to_string();
        let chain = Chain::load(&dir)?;
        let network = Network::read(&chain)?;
        let manifest = chain.newest().manifest.clone();
        let parser = Parser::new(manifest.features.clone())
            .map_err(|source| ModelError::Features { name: name.clone(), source })?;
        let cube = chain.open_cube()?;
        Ok(Arc::new(Model { name, manifest, parser, cube, network }))
    }

    /// A scorer for one thread, warm: its session is built, checked against the manifest, and has run once.
    pub fn scorer(self: &Arc<Self>) -> Result<Scorer, ModelError> {
        let mut scorer =
            Scorer::new(self.clone()).map_err(|source| ModelError::Engine { name: self.name.clone(), source })?;
        scorer.warm_up().map_err(|source| ModelError::WarmUp { name: self.name.clone(), source })?;
        Ok(scorer)
    }

    /// What the version says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The parser of its training.
    pub fn parser(&self) -> &Parser {
        &self.parser
    }

    /// Its rows.
    pub fn cube(&self) -> &View {
        &self.cube
    }

    /// Its dense network.
    pub fn network(&self) -> &Network {
        &self.network
    }
}
