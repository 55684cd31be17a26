//! Resolves a user's path to the directory of a version.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::model::manifest;

/// The file in a model's directory that names the current version.
pub const CURRENT: &str = "CURRENT";

/// The content of `CURRENT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Current {
    /// The version's number, and the name of its directory.
    pub version: u64,
    /// Increases with every change of the file.
    pub generation: u64,
    /// Whether newer versions wait until the rollout is resumed, after a rollback.
    #[serde(default)]
    pub held: bool,
    /// The target of a rollback that the store has not loaded yet.
    #[serde(default)]
    pub wanted: Option<u64>,
}

/// The reason a path does not resolve to a version.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum VersionError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: expected a version (`{}`) or a model (`{CURRENT}`), got neither", path.display(), manifest::FILE_NAME)]
    Neither { path: PathBuf },
    #[error("{}: names version {version}, which has no `{}`", path.display(), manifest::FILE_NAME)]
    Gone { path: PathBuf, version: u64 },
}

/// The directory of the deltas inside the directory of their base.
const DELTAS: &str = "deltas";

/// Returns the directory of the version: `path` itself, or the version that its `CURRENT` names.
pub fn resolve(path: &Path) -> Result<PathBuf, VersionError> {
    if path.join(manifest::FILE_NAME).is_file() {
        return Ok(path.into());
    }
    let current_path = path.join(CURRENT);
    let text = match std::fs::read(&current_path) {
        Ok(text) => text,
        Err(source) if source.kind() == io::ErrorKind::NotFound => {
            // A missing path has its own error.
            path.metadata().map_err(|source| VersionError::Io { path: path.into(), source })?;
            return Err(VersionError::Neither { path: path.into() });
        }
        Err(source) => return Err(VersionError::Io { path: current_path, source }),
    };
    let Current { version, .. } =
        serde_json::from_slice(&text).map_err(|source| VersionError::Json { path: current_path.clone(), source })?;
    let base = Some(path.join(version.to_string()));
    let found = base.into_iter().chain(deltas_of(path, version)).find(|dir| dir.join(manifest::FILE_NAME).is_file());
    found.ok_or(VersionError::Gone { path: current_path, version })
}

/// Returns the possible directories of a delta: inside every base with a smaller number.
fn deltas_of(model: &Path, version: u64) -> impl Iterator<Item = PathBuf> {
    let is_before = move |dir: &PathBuf| number_of(dir).is_some_and(|base| base < version);
    let dirs = std::fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
    dirs.filter(is_before).map(move |dir| dir.join(DELTAS).join(version.to_string()))
}

/// Returns the directory of another version of the chain of the delta at `dir`.
pub(crate) fn sibling(dir: &Path, base: u64, version: u64) -> io::Result<PathBuf> {
    // Resolve links and dots first, so that parents are those of the real directory.
    let dir = dir.canonicalize()?;
    let deltas = dir.parent().filter(|deltas| deltas.ends_with(DELTAS));
    let Some((deltas, base_dir)) = deltas.and_then(|deltas| Some((deltas, deltas.parent()?))) else {
        let what = format!("expected the directory of a delta, `{base}/{DELTAS}/<version>`");
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    };
    Ok(if version == base { base_dir.to_owned() } else { deltas.join(version.to_string()) })
}

fn number_of(dir: &Path) -> Option<u64> {
    dir.file_name()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_resolves_to_a_version_or_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("demo");
        let error = || resolve(&model).unwrap_err().to_string();
        assert!(error().ends_with("demo: No such file or directory (os error 2)"), "{}", error());
        std::fs::create_dir_all(model.join("3")).unwrap();
        assert!(error().ends_with("demo: expected a version (`manifest.json`) or a model (`CURRENT`), got neither"));
        std::fs::write(model.join(CURRENT), "{\"version\":3,\"generation\":9}\n").unwrap();
        assert!(error().ends_with("CURRENT: names version 3, which has no `manifest.json`"));
        std::fs::write(model.join("3/manifest.json"), "{}").unwrap();
        assert_eq!(resolve(&model).unwrap(), model.join("3"));
        assert_eq!(resolve(&model.join("3")).unwrap(), model.join("3"));
        std::fs::write(model.join(CURRENT), "{\"version\":5,\"generation\":10,\"held\":true}\n").unwrap();
        assert!(error().ends_with("CURRENT: names version 5, which has no `manifest.json`"));
        std::fs::create_dir_all(model.join("3/deltas/5")).unwrap();
        std::fs::write(model.join("3/deltas/5/manifest.json"), "{}").unwrap();
        assert_eq!(resolve(&model).unwrap(), model.join("3/deltas/5"));
        let siblings =
            [sibling(&model.join("3/deltas/5"), 3, 3).unwrap(), sibling(&model.join("3/deltas/5"), 3, 4).unwrap()];
        assert!(siblings[0].ends_with("demo/3") && siblings[1].ends_with("demo/3/deltas/4"));
        assert!(sibling(&model.join("3"), 2, 2).is_err());
        std::fs::write(model.join(CURRENT), "{\"version\":\"../3\"}").unwrap();
        assert!(error().contains("CURRENT: invalid type"));
    }
}
