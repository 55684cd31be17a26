//! The chain of a version: its base and the deltas up to it, each applied to the parent that it names.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use elasticrec_cube::{Cube, DeltaFile, View};

use crate::model::manifest::{FILE_NAME, Manifest, ManifestError};
use crate::model::version;
use crate::model::{Model, ModelError};

/// One version of a chain.
pub struct Step {
    /// Its directory.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

/// A base and the deltas up to a version.
pub struct Chain {
    base: Step,
    /// In the order in which they are applied.
    deltas: Vec<Step>,
}

impl Chain {
    /// Reads the manifests of the version in `dir` and of its ancestors.
    pub fn load(dir: &Path) -> Result<Chain, ManifestError> {
        let mut deltas = Vec::new();
        let mut step = Step { dir: dir.into(), manifest: Manifest::load(dir)? };
        // A parent has a smaller number than its delta, so this ends.
        while let (Some(base), Some(parent)) = (step.manifest.base, step.manifest.parent) {
            let before = step.parent(base, parent)?;
            deltas.push(step);
            step = before;
        }
        deltas.reverse();
        Ok(Chain { base: step, deltas })
    }

    /// Returns the base.
    pub fn base(&self) -> &Step {
        &self.base
    }

    /// Returns the version itself.
    pub fn newest(&self) -> &Step {
        self.deltas.last().unwrap_or(&self.base)
    }

    /// Checks the part files and opens the rows of the chain; rows that `loaded` shares with it are not read again.
    pub fn open_cube(&self, loaded: Option<&Model>) -> Result<View, ModelError> {
        let (mut view, num_done) = match loaded.and_then(|loaded| self.shared_with(loaded)) {
            Some(shared) => shared,
            None => {
                let Step { dir, manifest } = &self.base;
                manifest.verify_cube(dir)?;
                let view = View::of_base(Arc::new(Cube::load(&manifest.cube_paths(dir), None)?));
                self.base.check_cube(&view)?;
                (view, 0)
            }
        };
        for step in &self.deltas[num_done..] {
            step.manifest.verify_cube(&step.dir)?;
            let paths = step.manifest.cube_paths(&step.dir);
            let parts = paths.iter().map(DeltaFile::open).collect::<Result<Vec<_>, _>>()?;
            view = view.with_delta(&parts)?;
            step.check_cube(&view)?;
        }
        Ok(view)
    }

    /// Returns the rows that a loaded version shares with this chain, and the number of deltas they include.
    fn shared_with(&self, loaded: &Model) -> Option<(View, usize)> {
        let view = loaded.rows().held()?;
        // A manifest is sealed and never changes: an equal one, checksum included, describes the same files.
        if *loaded.manifest() == self.base.manifest {
            return Some((view.clone(), 0));
        }
        let index = self.deltas.iter().position(|step| step.manifest == *loaded.manifest())?;
        Some((view.clone(), index + 1))
    }
}

impl Step {
    /// Reads the version that this delta applies to.
    fn parent(&self, base: u64, parent: u64) -> Result<Step, ManifestError> {
        let invalid = |what| ManifestError::Invalid { path: self.dir.join(FILE_NAME), what };
        let dir = version::sibling(&self.dir, base, parent).map_err(|error| invalid(format!("base: {error}")))?;
        if !dir.join(FILE_NAME).is_file() {
            let key = if parent == base { "base" } else { "parent" };
            return Err(invalid(format!("{key}: version {parent} is missing: no `{FILE_NAME}` in {}", dir.display())));
        }
        let before = Step { manifest: Manifest::load(&dir)?, dir };
        self.check_parent(&before, base, parent).map_err(invalid)?;
        Ok(before)
    }

    /// Checks that a delta differs from its parent only in rows and dense weights.
    fn check_parent(&self, before: &Step, base: u64, parent: u64) -> Result<(), String> {
        let (own, other) = (&self.manifest, &before.manifest);
        let dir = before.dir.display();
        if other.version != parent || other.base.unwrap_or(other.version) != base {
            let (version, of) = (other.version, other.base.unwrap_or(other.version));
            return Err(format!("parent: expected version {parent} of base {base} in {dir}, got {version} of {of}"));
        }
        let (table, old) = (&own.table, &other.table);
        let same = [
            ("model", own.model == other.model),
            ("features", own.features == other.features),
            ("table.partitions", table.partitions == old.partitions),
            ("table.columns", table.columns == old.columns),
            ("table.row_type", table.row_type == old.row_type),
            ("graph", own.graph == other.graph),
            ("dense", own.dense == other.dense),
        ];
        match same.iter().find(|(_, is_same)| !is_same) {
            Some((key, _)) => Err(format!("{key}: expected the value of its parent, version {parent}")),
            None => Ok(()),
        }
    }

    fn check_cube(&self, cube: &View) -> Result<(), ModelError> {
        let mismatch = |what| Err(ModelError::Mismatch { name: self.dir.display().to_string(), what });
        let table = &self.manifest.table;
        if cube.columns() != table.columns {
            return mismatch(format!("cube: expected columns {:?}, got {:?}", table.columns, cube.columns()));
        }
        if cube.row_type() != table.row_type {
            return mismatch(format!("cube: expected {} rows, got {}", table.row_type, cube.row_type()));
        }
        if cube.num_partitions() != table.partitions {
            return mismatch(format!("cube: expected {} partitions, got {}", table.partitions, cube.num_partitions()));
        }
        if cube.num_rows() != table.rows {
            return mismatch(format!("cube: expected {} rows, got {}", table.rows, cube.num_rows()));
        }
        Ok(())
    }
}
