//! What the Open Inference Protocol says of a server and its models, for its faces in HTTP and gRPC.

use crate::face::tensors::{self, TensorInfo};
use crate::refusal::Refusal;
use crate::registry::{Choice, Entry, Registry};

pub(crate) const SERVER_NAME: &str = "elasticrec";
pub(crate) const SERVER_VERSION: &str = env!("CARGO_PKG_VERSION");
pub(crate) const EXTENSIONS: [&str; 1] = ["binary_tensor_data"];
pub(crate) const PLATFORM: &str = "elasticrec";

/// A model as clients are told of it.
#[derive(Debug)]
pub(crate) struct ModelInfo {
    pub(crate) name: String,
    /// Of its variants.
    pub(crate) versions: Vec<String>,
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
}

/// A line of the index of models.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Indexed {
    pub(crate) name: String,
    /// Empty before the first.
    pub(crate) version: String,
    pub(crate) is_ready: bool,
    pub(crate) reason: String,
}

impl Indexed {
    pub(crate) fn state(&self) -> &'static str {
        if self.is_ready { "READY" } else { "UNAVAILABLE" }
    }
}

/// A version as it stands in a path or a message; empty for the current one.
pub(crate) fn parse_version(model: &str, text: &str) -> Result<Option<u64>, Refusal> {
    if text.is_empty() {
        return Ok(None);
    }
    let unknown = |_| {
        let shown: String = text.chars().take(40).flat_map(char::escape_debug).collect();
        Refusal::Unknown(format!("model `{model}`: no version `{shown}`, expected a number"))
    };
    text.parse().map(Some).map_err(unknown)
}

/// What a model takes and gives.
pub(crate) fn model_info(registry: &Registry, name: &str, version: Option<u64>) -> Result<ModelInfo, Refusal> {
    let entry = registry.model(Some(name))?;
    // all variants of a model are asked in the same words
    let variant = entry.variants.first().map(|variant| variant.name.as_str()).filter(|_| version.is_none());
    let deployment = registry.choose(Choice { model: Some(name), variant, version, key: None })?;
    let outputs = tensors::outputs(&deployment.about.labels);
    Ok(ModelInfo { name: name.into(), versions: versions(entry), inputs: deployment.inputs.clone(), outputs })
}

fn versions(entry: &Entry) -> Vec<String> {
    let current = entry.variants.iter().filter_map(|variant| Some(variant.current()?.about.version));
    let mut versions: Vec<u64> = current.collect();
    versions.sort_unstable();
    versions.dedup();
    versions.iter().map(u64::to_string).collect()
}

/// Whether a model, or a version of it, is ready.
pub(crate) fn model_ready(registry: &Registry, name: &str, version: Option<u64>) -> Result<(), Refusal> {
    registry.model(Some(name))?.ready()?;
    match version {
        Some(_) => model_info(registry, name, version).map(|_| ()),
        None => Ok(()),
    }
}

/// All models, or those that are ready, each of their versions once.
pub(crate) fn index(registry: &Registry, only_ready: bool) -> Vec<Indexed> {
    let mut models = Vec::new();
    for entry in registry.models() {
        let reason = entry.ready().err().map(|refusal| refusal.to_string()).unwrap_or_default();
        let is_ready = reason.is_empty();
        let mut versions = versions(entry);
        if versions.is_empty() {
            versions.push(String::new());
        }
        let line = |version| Indexed { name: entry.name.clone(), version, is_ready, reason: reason.clone() };
        models.extend(versions.into_iter().map(line));
    }
    models.retain(|model| model.is_ready || !only_ready);
    models
}
