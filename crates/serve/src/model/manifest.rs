//! The manifest of a model version. It is written last, so a directory with a manifest is complete; its files are checked
//! on load.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use elasticrec_cube::RowType;
use elasticrec_sample::{Features, FeaturesError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::model::seal;

/// The manifest's name in a version directory.
pub const FILE_NAME: &str = "manifest.json";
/// The user's own reader that parsed the lines in training; `data.reader` names the class.
pub(crate) const READER_FILE: &str = "reader.py";
/// The format of base versions with f32 rows and all labels; the previous release reads it too.
const FIRST_FORMAT: u64 = 1;
/// The format of all other versions.
const FORMAT: u64 = 2;
const KIND: &str = "model";
/// The prefix of the part files of the cube.
const CUBE_PREFIX: &str = "cube/";
/// Bytes read at once for a checksum.
const CHUNK_BYTES: usize = 1 << 20;

/// The reason a version directory cannot be loaded; `path` is the file concerned.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ManifestError {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: expected format {FIRST_FORMAT} or {FORMAT}, got {got}", path.display())]
    Format { path: PathBuf, got: u64 },
    #[error("{}: {source}", path.display())]
    Features { path: PathBuf, source: FeaturesError },
    #[error("{}: {what}", path.display())]
    Invalid { path: PathBuf, what: String },
    #[error("{}: expected {expected} bytes, got {got}", path.display())]
    Size { path: PathBuf, expected: u64, got: u64 },
    #[error("{}: sha-256 differs from the manifest, the file is damaged", path.display())]
    Checksum { path: PathBuf },
    #[error("{}: self_sha256 differs from the content, the file is damaged", path.display())]
    Seal { path: PathBuf },
}

/// The description of a version. Unknown keys are refused, because they may change its meaning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Number of the format.
    pub format: u64,
    /// Always `model`.
    pub kind: String,
    /// Checksum of the manifest itself.
    pub self_sha256: String,
    /// The model's name.
    pub model: String,
    /// The version's number.
    pub version: u64,
    /// The time at which it was written, RFC 3339.
    pub created: String,
    /// The run that trained it.
    pub run: String,
    /// The checkpoint that it was published from.
    pub checkpoint: String,
    /// The base of a delta; None for a base.
    pub base: Option<u64>,
    /// The version that a delta applies to: the base, or another delta of that base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// The declaration of slots, dense columns and labels.
    pub features: Features,
    /// The sparse table.
    pub table: Table,
    /// The dense network.
    pub graph: Graph,
    /// The weights of the network.
    pub dense: DenseWeights,
    /// Metrics of the last pass, as free-form JSON.
    #[serde(default)]
    pub metrics: serde_json::Value,
    /// The training data, as free-form JSON.
    #[serde(default)]
    pub data: serde_json::Value,
    /// All other files of the directory, by path inside it.
    pub files: BTreeMap<String, FileEntry>,
}

/// The sparse table that the cube holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Partitions of the table.
    pub partitions: u32,
    /// The columns of a row.
    pub columns: Vec<elasticrec_cube::Column>,
    /// Number of rows of the version; for a delta, including the rows of its parents.
    pub rows: u64,
    /// The type of the stored values.
    pub row_type: RowType,
    /// Number of rows in the files of a delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<u64>,
    /// Number of signs that the files of a delta list as removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<u64>,
    /// First and end partition of each part file, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<BTreeMap<String, [u32; 2]>>,
}

/// The ONNX graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    /// Its file.
    pub file: String,
    /// Its inputs in their order: `pooled`, `dense`.
    pub inputs: Vec<String>,
    /// Its outputs: `scores`.
    pub outputs: Vec<String>,
    /// The labels of the scores; None for all labels of `features`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<Vec<String>>,
}

/// The flat vector of dense weights, which the graph's initializers point into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseWeights {
    /// Its file.
    pub file: String,
    /// The tensors in the vector.
    pub tensors: Vec<Tensor>,
}

/// A tensor of the flat vector.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its name in the network.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its first byte in the file.
    pub offset: u64,
}

/// The expected size and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes, in lower-case hex.
    pub sha256: String,
}

impl Table {
    /// Values in a row.
    pub fn width(&self) -> usize {
        self.columns.iter().map(|column| column.width as usize).sum()
    }
}

impl Manifest {
    /// Reads and checks the manifest of a version directory; the files that it names are not read.
    pub fn load(dir: &Path) -> Result<Manifest, ManifestError> {
        let path = dir.join(FILE_NAME);
        let bytes = std::fs::read(&path).map_err(|source| ManifestError::Io { path: path.clone(), source })?;
        Manifest::parse(&path, &bytes)
    }

    /// Parses and checks a manifest; `path` is for error messages.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Manifest, ManifestError> {
        /// The key that every format has.
        #[derive(Deserialize)]
        struct Head {
            format: u64,
        }
        let json = |source| ManifestError::Json { path: path.into(), source };
        // The format is checked first: an error should name a later format, not its unknown keys.
        let Head { format } = serde_json::from_slice(bytes).map_err(json)?;
        if ![FIRST_FORMAT, FORMAT].contains(&format) {
            return Err(ManifestError::Format { path: path.into(), got: format });
        }
        if !seal::is_intact(bytes) {
            return Err(ManifestError::Seal { path: path.into() });
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(json)?;
        // `from_json` validates the declaration.
        let features = serde_json::to_string(&manifest.features).map_err(json)?;
        Features::from_json(&features).map_err(|source| ManifestError::Features { path: path.into(), source })?;
        manifest.check().map_err(|what| ManifestError::Invalid { path: path.into(), what })?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if self.kind != KIND {
            return Err(format!("kind: expected `{KIND}`, got `{}`", self.kind));
        }
        self.check_format()?;
        self.check_base()?;
        for name in self.files.keys() {
            check_name(name)?;
        }
        let graph = (!self.is_delta()).then_some(("graph.file", &self.graph.file));
        for (key, name) in graph.into_iter().chain([("dense.file", &self.dense.file)]) {
            if !self.files.contains_key(name) {
                return Err(format!("{key}: `{name}` is not one of the files"));
            }
        }
        if !self.is_delta() && self.cube_names().next().is_none() {
            return Err(format!("files: expected at least one `{CUBE_PREFIX}…`, got none"));
        }
        self.check_parts()?;
        self.check_graph()?;
        self.check_tensors()
    }

    fn check_parts(&self) -> Result<(), String> {
        let Some(parts) = &self.table.parts else { return Ok(()) };
        if !parts.keys().eq(self.cube_names()) {
            return Err("table.parts: expected each part file of `files` once".into());
        }
        let most = self.table.partitions;
        match parts.iter().find(|(_, [first, end])| first >= end || *end > most) {
            Some((name, bounds)) => {
                Err(format!("table.parts: {name}: expected two ascending partitions from 0 to {most}, got {bounds:?}"))
            }
            None => Ok(()),
        }
    }

    /// Refuses a version that needs format 2 but claims format 1; keys of format 2 may be null.
    fn check_format(&self) -> Result<(), String> {
        let key = [
            ("base", self.base.is_some()),
            ("parent", self.parent.is_some()),
            ("table.changed", self.table.changed.is_some()),
            ("table.removed", self.table.removed.is_some()),
            ("table.parts", self.table.parts.is_some()),
            ("graph.labels", self.graph.labels.is_some()),
        ];
        let is_f32 = self.table.row_type == RowType::F32;
        match key.iter().find(|(_, is_present)| *is_present) {
            _ if self.format != FIRST_FORMAT => Ok(()),
            Some((key, _)) => Err(format!("{key}: unknown key in format {FIRST_FORMAT}")),
            None if !is_f32 => Err(format!("table.row_type: expected `f32`, got `{}`", self.table.row_type)),
            None => Ok(()),
        }
    }

    fn check_base(&self) -> Result<(), String> {
        let (version, table) = (self.version, &self.table);
        match (self.base, self.parent) {
            (None, None) if table.changed.is_none() && table.removed.is_none() => Ok(()),
            (None, None) => Err("table: expected `changed` and `removed` only in a delta, but `base` is null".into()),
            (Some(base), Some(parent)) if base <= parent && parent < version => {
                let is_counted = table.changed.is_some() && table.removed.is_some();
                is_counted.then_some(()).ok_or_else(|| "table: expected `changed` and `removed` in a delta".into())
            }
            (Some(base), Some(parent)) => {
                Err(format!("parent: expected at least base {base} and less than version {version}, got {parent}"))
            }
            _ => Err("expected both `base` and `parent` (a delta) or neither, got one".into()),
        }
    }

    fn check_graph(&self) -> Result<(), String> {
        let inputs = &self.graph.inputs;
        let wrong = inputs
            .iter()
            .enumerate()
            .find(|&(i, name)| !matches!(name.as_str(), "pooled" | "dense") || inputs[..i].contains(name));
        if let Some((_, name)) = wrong {
            return Err(format!("graph.inputs: expected `pooled` and `dense`, each at most once, got `{name}`"));
        }
        if inputs.is_empty() {
            return Err("graph.inputs: expected `pooled`, `dense` or both, got none".into());
        }
        if self.graph.outputs != ["scores"] {
            return Err(format!("graph.outputs: expected [\"scores\"], got {:?}", self.graph.outputs));
        }
        let labels = self.labels();
        let is_wrong = |(i, label)| !self.features.labels.contains(label) || labels[..i].contains(label);
        if labels.is_empty() || labels.iter().enumerate().any(is_wrong) {
            let known = &self.features.labels;
            return Err(format!("graph.labels: expected some of {known:?}, each at most once, got {labels:?}"));
        }
        Ok(())
    }

    fn check_tensors(&self) -> Result<(), String> {
        let available = self.files.get(&self.dense.file).map_or(0, |entry| entry.bytes);
        for Tensor { name, shape, offset } in &self.dense.tensors {
            let values = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
            let end = values.and_then(|values| values.checked_mul(4)).and_then(|bytes| bytes.checked_add(*offset));
            if end.is_none_or(|end| end > available) {
                return Err(format!("dense.tensors: `{name}` ends beyond the {available} bytes of its file"));
            }
        }
        Ok(())
    }

    /// Returns whether the version is a delta.
    pub fn is_delta(&self) -> bool {
        self.base.is_some()
    }

    /// Returns the labels of the scores.
    pub fn labels(&self) -> &[String] {
        self.graph.labels.as_ref().unwrap_or(&self.features.labels)
    }

    fn cube_names(&self) -> impl Iterator<Item = &String> {
        self.files.keys().filter(|name| name.starts_with(CUBE_PREFIX))
    }

    /// Returns the part files of the cube, in the order of their names.
    pub fn cube_paths(&self, dir: &Path) -> Vec<PathBuf> {
        self.cube_names().map(|name| dir.join(name)).collect()
    }

    /// Checks the size and checksum of the cube's part files, without keeping their bytes.
    pub fn verify_cube(&self, dir: &Path) -> Result<(), ManifestError> {
        self.cube_names().try_for_each(|name| self.check_file(dir, name, |_| ()))
    }

    /// Returns the bytes of a file of the manifest; size and checksum are checked on the bytes that are returned.
    pub fn read(&self, dir: &Path, name: &str) -> Result<Vec<u8>, ManifestError> {
        let mut bytes = Vec::new();
        self.check_file(dir, name, |chunk| bytes.extend_from_slice(chunk))?;
        Ok(bytes)
    }

    fn check_file(&self, dir: &Path, name: &str, mut each: impl FnMut(&[u8])) -> Result<(), ManifestError> {
        let path = dir.join(name);
        let Some(entry) = self.files.get(name) else {
            return Err(ManifestError::Invalid { path: dir.join(FILE_NAME), what: format!("files: no `{name}`") });
        };
        let io = |source| ManifestError::Io { path: path.clone(), source };
        let mut file = File::open(&path).map_err(io)?;
        let got = file.metadata().map_err(io)?.len();
        if got != entry.bytes {
            return Err(ManifestError::Size { path, expected: entry.bytes, got });
        }
        let mut hash = Sha256::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let length = file.read(&mut chunk).map_err(io)?;
            if length == 0 {
                break;
            }
            hash.update(&chunk[..length]);
            each(&chunk[..length]);
        }
        if seal::hex(&hash.finalize()) != entry.sha256 {
            return Err(ManifestError::Checksum { path });
        }
        Ok(())
    }
}

/// Checks that a name is a path inside the directory, with plain components only.
fn check_name(name: &str) -> Result<(), String> {
    let plain = Path::new(name).components().all(|component| matches!(component, Component::Normal(_)));
    // `components` reads `a//b` and `a/./b` as `a/b`, but a file must have a single name.
    let single = name.split('/').all(|part| !part.is_empty() && part != ".") && !name.contains(['\\', '\0']);
    if plain && single && name != FILE_NAME {
        return Ok(());
    }
    Err(format!("files: expected a path within the directory, got `{}`", name.escape_debug()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn good() -> Value {
        json!({
            "format": 1, "kind": "model", "self_sha256": "0".repeat(64), "model": "demo", "version": 3, "created": "2026-01-02T03:04:05Z",
            "run": "demo", "checkpoint": "runs/demo/checkpoints/7", "base": null,
            "features": {"format": "slots", "hash": 1, "slots": [{"name": "0", "pooling": "sum"}], "dense": [],
                "labels": ["click"]},
            "table": {"partitions": 4, "columns": [{"name": "deep", "width": 2}], "rows": 1, "row_type": "f32"},
            "graph": {"file": "graph.onnx", "inputs": ["pooled"], "outputs": ["scores"]},
            "dense": {"file": "dense.bin", "tensors": [{"name": "w", "shape": [1, 1], "offset": 0}]},
            "metrics": {"auc": 0.7}, "data": {"any": ["thing"]},
            "files": {
                "graph.onnx": {"bytes": 2, "sha256": seal::hex(&Sha256::digest(b"ab"))},
                "dense.bin": {"bytes": 4, "sha256": seal::hex(&Sha256::digest(b"abcd"))},
                "cube/part-00000": {"bytes": 1, "sha256": seal::hex(&Sha256::digest(b"c"))},
            },
        })
    }

    fn sealed(manifest: &Value) -> Vec<u8> {
        let mut bytes = manifest.to_string().into_bytes();
        seal::seal(&mut bytes);
        bytes
    }

    fn parse(manifest: &Value) -> Result<Manifest, String> {
        Manifest::parse(Path::new("m.json"), &sealed(manifest)).map_err(|error| error.to_string())
    }

    fn error_with(pointer: &str, value: Value) -> String {
        let mut manifest = good();
        *manifest.pointer_mut(pointer).unwrap() = value;
        parse(&manifest).unwrap_err()
    }

    #[test]
    fn a_manifest_survives_a_round_trip() {
        let manifest = parse(&good()).unwrap();
        assert_eq!(manifest.table.width(), 2);
        assert_eq!(parse(&serde_json::to_value(&manifest).unwrap()).unwrap(), manifest);
    }

    #[test]
    fn an_unknown_format_is_named_before_its_keys() {
        let mut manifest = good();
        manifest["format"] = json!(3);
        manifest["new"] = json!(1);
        assert_eq!(parse(&manifest).unwrap_err(), "m.json: expected format 1 or 2, got 3");
        manifest["format"] = json!(1);
        assert!(parse(&manifest).unwrap_err().starts_with("m.json: unknown field `new`"));
    }

    #[test]
    fn invalid_values_are_refused() {
        assert_eq!(error_with("/kind", json!("checkpoint")), "m.json: kind: expected `model`, got `checkpoint`");
        assert_eq!(error_with("/table/row_type", json!("f16")), "m.json: table.row_type: expected `f32`, got `f16`");
        assert_eq!(error_with("/features/hash", json!(2)), "m.json: features: hash: expected version 1, got 2");
        assert_eq!(error_with("/dense/file", json!("x")), "m.json: dense.file: `x` is not one of the files");
        assert_eq!(error_with("/base", json!(2)), "m.json: base: unknown key in format 1");
        assert!(error_with("/table/row_type", json!("int4")).starts_with("m.json: unknown variant `int4`, expected"));
        assert!(error_with("/graph/inputs", json!(["pooled", "pooled"])).contains("each at most once, got `pooled`"));
        assert!(error_with("/graph/outputs", json!(["y"])).contains("graph.outputs"));
        let tensor = |offset: u64| error_with("/dense/tensors/0/offset", json!(offset));
        assert_eq!(tensor(1), "m.json: dense.tensors: `w` ends beyond the 4 bytes of its file");
        assert_eq!(tensor(u64::MAX), tensor(1));
    }

    /// A delta with base 1 and parent 2.
    fn delta() -> Value {
        let mut manifest = good();
        (manifest["format"], manifest["base"], manifest["parent"]) = (json!(2), json!(1), json!(2));
        (manifest["table"]["changed"], manifest["table"]["removed"]) = (json!(1), json!(0));
        manifest["files"] = json!({"dense.bin": good()["files"]["dense.bin"]});
        manifest
    }

    #[test]
    fn the_second_format_has_deltas_row_types_and_chosen_labels() {
        let manifest = parse(&delta()).unwrap();
        assert!(manifest.is_delta());
        assert_eq!(parse(&serde_json::to_value(&manifest).unwrap()).unwrap(), manifest);
        let mut chosen = good();
        (chosen["format"], chosen["parent"], chosen["table"]["row_type"]) = (json!(2), json!(null), json!("int8"));
        chosen["features"]["labels"] = json!(["click", "buy"]);
        assert_eq!(parse(&chosen).unwrap().labels(), ["click", "buy"]);
        chosen["graph"]["labels"] = json!(["buy"]);
        assert_eq!(parse(&chosen).unwrap().labels(), ["buy"]);
        chosen["graph"]["labels"] = json!(["share"]);
        assert!(parse(&chosen).unwrap_err().contains("graph.labels: expected some of [\"click\", \"buy\"]"));

        for (pointer, value, expected) in [
            ("/parent", json!(null), "expected both `base` and `parent` (a delta) or neither, got one"),
            ("/parent", json!(0), "parent: expected at least base 1 and less than version 3, got 0"),
            ("/parent", json!(3), "parent: expected at least base 1 and less than version 3, got 3"),
            ("/table/changed", json!(null), "table: expected `changed` and `removed` in a delta"),
            ("/files", json!({}), "dense.file: `dense.bin` is not one of the files"),
            ("/format", json!(1), "base: unknown key in format 1"),
        ] {
            let mut manifest = delta();
            *manifest.pointer_mut(pointer).unwrap() = value;
            assert_eq!(parse(&manifest).unwrap_err(), format!("m.json: {expected}"));
        }
        let mut whole = delta();
        (whole["base"], whole["parent"]) = (json!(null), json!(null));
        assert!(parse(&whole).unwrap_err().contains("expected `changed` and `removed` only in a delta"));
    }

    #[test]
    fn the_partitions_of_part_files_are_checked() {
        let mut manifest = good();
        (manifest["format"], manifest["table"]["parts"]) = (json!(2), json!({"cube/part-00000": [0, 4]}));
        assert_eq!(parse(&serde_json::to_value(parse(&manifest).unwrap()).unwrap()), parse(&manifest));
        manifest["table"]["parts"]["cube/part-00000"] = json!([1, 5]);
        let expected =
            "m.json: table.parts: cube/part-00000: expected two ascending partitions from 0 to 4, got [1, 5]";
        assert_eq!(parse(&manifest).unwrap_err(), expected);
        manifest["table"]["parts"] = json!({});
        assert!(parse(&manifest).unwrap_err().starts_with("m.json: table.parts: expected each part file"));
        manifest["format"] = json!(1);
        assert_eq!(parse(&manifest).unwrap_err(), "m.json: table.parts: unknown key in format 1");
    }

    #[test]
    fn names_stay_within_the_directory() {
        for name in ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a/.", "", "a\\b", "manifest.json", "a\0"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name("cube/part-00000").is_ok());
        let mut manifest = good();
        manifest["files"]["../x"] = json!({"bytes": 1, "sha256": ""});
        assert_eq!(parse(&manifest).unwrap_err(), "m.json: files: expected a path within the directory, got `../x`");
    }

    #[test]
    fn damaged_and_truncated_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("cube")).unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        write("manifest.json", &sealed(&good()));
        write("graph.onnx", b"ab");
        write("dense.bin", b"abcd");
        write("cube/part-00000", b"c");
        let manifest = Manifest::load(dir.path()).unwrap();
        manifest.verify_cube(dir.path()).unwrap();
        assert_eq!(manifest.read(dir.path(), "dense.bin").unwrap(), b"abcd");
        let error = || manifest.read(dir.path(), "dense.bin").unwrap_err().to_string();
        let dense = dir.path().join("dense.bin").display().to_string();
        write("dense.bin", b"abcx");
        assert_eq!(error(), format!("{dense}: sha-256 differs from the manifest, the file is damaged"));
        write("dense.bin", b"ab");
        assert_eq!(error(), format!("{dense}: expected 4 bytes, got 2"));
        std::fs::remove_file(&dense).unwrap();
        assert!(error().starts_with(&format!("{dense}: No such file")));
        let mut changed = sealed(&good());
        let at = changed.iter().position(|&byte| byte == b'3').unwrap();
        changed[at] = b'4';
        write("manifest.json", &changed);
        assert!(Manifest::load(dir.path()).unwrap_err().to_string().contains("self_sha256 differs from the content"));
        write("manifest.json", &good().to_string().as_bytes()[..90]);
        assert!(Manifest::load(dir.path()).unwrap_err().to_string().contains("manifest.json: EOF while parsing"));
    }
}
