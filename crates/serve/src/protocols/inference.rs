//! The server and its models in the terms of the Open Inference Protocol, for HTTP and gRPC.

use elasticrec_sample::parser::excerpt;

use crate::codecs::tensors::{self, TensorInfo};
use crate::refusal::Refusal;
use crate::server::registry::{Choice, Entry, Registry};

pub(crate) const SERVER_NAME: &str = "elasticrec";
pub(crate) const SERVER_VERSION: &str = env!("CARGO_PKG_VERSION");
pub(crate) const EXTENSIONS: [&str; 1] = ["binary_tensor_data"];
pub(crate) const PLATFORM: &str = "elasticrec";

/// The description of a model for clients.
#[derive(Debug)]
pub(crate) struct ModelInfo {
    pub(crate) name: String,
    /// The current versions of its variants.
    pub(crate) versions: Vec<String>,
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
}

/// An entry of the index of models.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub(crate) name: String,
    /// Empty while no version is ready.
    pub(crate) version: String,
    pub(crate) is_ready: bool,
    pub(crate) reason: String,
}

impl IndexEntry {
    pub(crate) fn state(&self) -> &'static str {
        if self.is_ready { "READY" } else { "UNAVAILABLE" }
    }
}

/// Parses the version in a path or a message; empty means the current one.
pub(crate) fn parse_version(model: &str, text: &str) -> Result<Option<u64>, Refusal> {
    if text.is_empty() {
        return Ok(None);
    }
    let unknown = |_| Refusal::Unknown(format!("model `{model}`: version: expected a number, got `{}`", excerpt(text)));
    text.parse().map(Some).map_err(unknown)
}

/// Describes a model, or one version of it.
pub(crate) fn model_info(registry: &Registry, name: &str, version: Option<u64>) -> Result<ModelInfo, Refusal> {
    let entry = registry.model(Some(name))?;
    // All variants of a model have the same inputs, so the first one stands for them.
    let variant = entry.variants.first().map(|variant| variant.name.as_str()).filter(|_| version.is_none());
    let deployment = registry.choose(Choice { model: Some(name), variant, version, key: None })?;
    let outputs = tensors::outputs(&deployment.info.labels);
    Ok(ModelInfo { name: name.into(), versions: versions(entry), inputs: deployment.inputs.clone(), outputs })
}

fn versions(entry: &Entry) -> Vec<String> {
    let current = entry.variants.iter().filter_map(|variant| Some(variant.current()?.info.version));
    let mut versions: Vec<u64> = current.collect();
    versions.sort_unstable();
    versions.dedup();
    versions.iter().map(u64::to_string).collect()
}

/// Refuses if a model, or a version of it, is not ready.
pub(crate) fn model_ready(registry: &Registry, name: &str, version: Option<u64>) -> Result<(), Refusal> {
    registry.model(Some(name))?.ready()?;
    match version {
        Some(_) => model_info(registry, name, version).map(|_| ()),
        None => Ok(()),
    }
}

/// Returns every version of every model, or of the models that are ready.
pub(crate) fn index(registry: &Registry, only_ready: bool) -> Vec<IndexEntry> {
    let mut models = Vec::new();
    for entry in registry.models() {
        let reason = entry.ready().err().map(|refusal| refusal.to_string()).unwrap_or_default();
        let is_ready = reason.is_empty();
        let mut versions = versions(entry);
        if versions.is_empty() {
            versions.push(String::new());
        }
        let line = |version| IndexEntry { name: entry.name.clone(), version, is_ready, reason: reason.clone() };
        models.extend(versions.into_iter().map(line));
    }
    models.retain(|model| model.is_ready || !only_ready);
    models
}
