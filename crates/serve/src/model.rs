//! A version in memory: a directory in, scores of a batch out.
//!
//! - `version` resolves a path to the directory of a version; `manifest` reads and checks its manifest, sealed with the
//!   checksum of `seal`; `chain` follows a delta to its base;
//! - `rows` looks rows up in this process or in a store; `engine` runs the network with ONNX Runtime;
//! - `scorer` scores a batch on one thread: lookup, pooling, network.

use std::path::Path;
use std::sync::Arc;

use elasticrec_cube::client::ShardFailurePolicy;
use elasticrec_cube::{Client, ClientError, CubeError};
use elasticrec_sample::{FeaturesError, Parser};
use thiserror::Error;

use crate::server::PlanError;

pub mod chain;
pub mod engine;
pub mod manifest;
pub mod rows;
pub mod scorer;
pub(crate) mod seal;
pub mod version;

pub use chain::Chain;
pub use engine::{Engine, EngineError, Network, init_onnxruntime};
pub use manifest::{Manifest, ManifestError};
pub use rows::{Rows, StoreRows};
pub use scorer::{ScoreError, ScoreStats, Scorer};
pub use version::VersionError;

/// The reason a model cannot be served.
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
    Store { name: String, source: ClientError },
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

/// A version: its manifest, parser, rows and network.
pub struct Model {
    /// The directory, for messages.
    name: String,
    manifest: Manifest,
    parser: Parser,
    rows: Rows,
    network: Network,
}

/// The source of the rows of a version.
#[derive(Clone)]
pub enum RowSource {
    /// The files of the version, except files whose rows the given loaded version has in memory already.
    Files(Option<Arc<Model>>),
    /// A store, and the policy for signs whose shard is down.
    Store(Arc<Client>, ShardFailurePolicy),
}

impl Model {
    /// Loads the version that `path` resolves to (see [`version::resolve`]) and checks every byte of it.
    pub fn load(path: &Path) -> Result<Arc<Model>, ModelError> {
        Model::load_with(path, &RowSource::Files(None))
    }

    /// Like [`load`](Model::load), with rows from `source`.
    pub fn load_with(path: &Path, source: &RowSource) -> Result<Arc<Model>, ModelError> {
        let dir = version::resolve(path)?;
        let name = dir.display().to_string();
        let chain = Chain::load(&dir)?;
        let network = Network::read(&chain)?;
        let manifest = chain.newest().manifest.clone();
        let parser = Parser::new(manifest.features.clone())
            .map_err(|source| ModelError::Features { name: name.clone(), source })?;
        let rows = match source {
            RowSource::Files(loaded) => Rows::Held(chain.open_cube(loaded.as_deref())?),
            RowSource::Store(client, policy) => {
                let failed = |source| ModelError::Store { name: name.clone(), source };
                let rows = StoreRows::new(client.clone(), manifest.version, *policy).map_err(failed)?;
                let columns = rows.layout().map_err(failed)?.columns().to_vec();
                if columns != manifest.table.columns {
                    let what = format!("cube: expected columns {:?}, got {columns:?}", manifest.table.columns);
                    return Err(ModelError::Mismatch { name, what });
                }
                Rows::Store(rows)
            }
        };
        Ok(Arc::new(Model { name, manifest, parser, rows, network }))
    }

    /// Returns a warm scorer for one thread: its session is checked against the manifest and has run once.
    pub fn scorer(self: &Arc<Self>) -> Result<Scorer, ModelError> {
        let mut scorer =
            Scorer::new(self.clone()).map_err(|source| ModelError::Engine { name: self.name.clone(), source })?;
        scorer.warm_up().map_err(|source| ModelError::WarmUp { name: self.name.clone(), source })?;
        Ok(scorer)
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the parser of the training format.
    pub fn parser(&self) -> &Parser {
        &self.parser
    }

    /// Returns the rows.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the dense network.
    pub fn network(&self) -> &Network {
        &self.network
    }
}
