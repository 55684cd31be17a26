//! Where a version lies: a path a user gives to the directory that is loaded.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::manifest;

/// The file in a model's directory that says which version is served.
pub const CURRENT: &str = "CURRENT";

/// What `CURRENT` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Current {
    /// The version's number, and the name of its directory.
    pub version: u64,
    /// Goes up with every change of the file.
    pub generation: u64,
}

/// Why a path leads to no version.
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

/// The version directory that `path` stands for: itself, or the one that its `CURRENT` names.
pub fn resolve(path: &Path) -> Result<PathBuf, VersionError> {
    if path.join(manifest::FILE_NAME).is_file() {
        return Ok(path.into());
    }
    let current_path = path.join(CURRENT);
    let text = match std::fs::read(&current_path) {
        Ok(text) => text,
        Err(source) if source.kind() == io::ErrorKind::NotFound => {
            // a path that is not there at all deserves its own words
            path.metadata().map_err(|source| VersionError::Io { path: path.into(), source })?;
            return Err(VersionError::Neither { path: path.into() });
        }
        Err(source) => return Err(VersionError::Io { path: current_path, source }),
    };
    let Current { version, .. } =
        serde_json::from_slice(&text).map_err(|source| VersionError::Json { path: current_path.clone(), source })?;
    let dir = path.join(version.to_string());
    if !dir.join(manifest::FILE_NAME).is_file() {
        return Err(VersionError::Gone { path: current_path, version });
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_a_model_and_what_is_neither() {
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
        std::fs::write(model.join(CURRENT), "{\"version\":\"../3\"}").unwrap();
        assert!(error().contains("CURRENT: invalid type"));
    }
}
