//! Version directories for the tests, and the path of ONNX Runtime.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticrec_cube::{Changes, Column, CubeWriter, DeltaWriter, RowType};
use elasticrec_table::partition::partition_of;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

mod onnx;

/// Returns the path of the ONNX Runtime library: `ORT_LIB`, or the library in the repository's virtual environment.
pub fn ort_library() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("ORT_LIB") {
        return Some(path.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let named =
        |path: &Path, prefix: &str| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    let found = entries(&root)
        .filter(|python| named(python, "python3"))
        .flat_map(|python| entries(&python.join("site-packages/onnxruntime/capi")).collect::<Vec<_>>())
        .find(|path| named(path, "libonnxruntime.so"));
    if found.is_none() {
        eprintln!("SKIPPED: no ONNX Runtime library: set ORT_LIB or install onnxruntime into .venv");
    }
    found
}

pub const NUM_PARTITIONS: u32 = 4;

/// The content of a version: a perceptron over pooled rows and dense values.
pub struct TestModel {
    pub version: u64,
    pub features: Value,
    pub columns: Vec<Column>,
    pub rows: BTreeMap<u64, Vec<f32>>,
    /// Sizes of the layers' outputs; the last is the number of labels.
    pub layers: Vec<usize>,
    /// Weights and biases of all layers in a row.
    pub dense: Vec<f32>,
}

impl TestModel {
    /// Slots `0` (sum) and `7` (mean), a wide and a 2-wide deep column, labels `click` and `buy`, one layer.
    pub fn slots() -> TestModel {
        let features = json!({"format": "slots", "hash": 1, "dense": [], "labels": ["click", "buy"],
            "slots": [{"name": "0", "pooling": "sum"}, {"name": "7", "pooling": "mean"}]});
        let row = |sign: u64| (sign, (0..3).map(|i| (sign % 17) as f32 / 8.0 - 1.0 + i as f32 / 4.0).collect());
        TestModel {
            version: 3,
            features,
            columns: vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: 2 }],
            rows: (1..100).chain([u64::MAX]).map(row).collect(),
            layers: vec![2],
            dense: (0..14).map(|i| i as f32 / 16.0 - 0.4).collect(),
        }
    }

    /// Criteo rows with two categories and two numbers.
    pub fn criteo(signs: &[u64]) -> TestModel {
        let features = json!({"format": "criteo", "hash": 1, "labels": ["click"],
            "slots": [{"name": "C1", "pooling": "sum"}, {"name": "C26", "pooling": "sum"}],
            "dense": [{"name": "I1", "normalize": {"kind": "log"}}, {"name": "I2", "normalize": {"kind": "none"}}]});
        let rows = signs.iter().enumerate().map(|(i, &sign)| (sign, vec![0.5 + i as f32, -0.25])).collect();
        TestModel {
            version: 1,
            features,
            columns: vec![Column { name: "deep".into(), width: 2 }],
            rows,
            layers: vec![1],
            dense: vec![0.1, 0.2, 0.3, 0.4, 0.5, -0.25, 0.05],
        }
    }

    fn width(&self) -> usize {
        self.columns.iter().map(|column| column.width as usize).sum()
    }

    /// Writes the directory of the version.
    pub fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir.join("cube")).unwrap();
        let count = |key: &str| self.features[key].as_array().unwrap().len();
        let graph = onnx::perceptron(count("slots"), self.width(), count("dense"), &self.layers);
        std::fs::write(dir.join("graph.onnx"), graph).unwrap();
        let dense: Vec<u8> = self.dense.iter().flat_map(|value| value.to_le_bytes()).collect();
        std::fs::write(dir.join("dense.bin"), dense).unwrap();
        self.write_cube(&dir.join("cube/part-00000"));
        let inputs = if count("dense") > 0 { json!(["pooled", "dense"]) } else { json!(["pooled"]) };
        let manifest = json!({
            "format": 1, "kind": "model", "model": "demo", "version": self.version, "created": "2026-01-02T03:04:05Z",
            "run": "demo", "checkpoint": "checkpoints/1", "base": null, "features": self.features,
            "table": {"partitions": NUM_PARTITIONS, "columns": self.columns, "rows": self.rows.len(), "row_type": "f32"},
            "graph": {"file": "graph.onnx", "inputs": inputs, "outputs": ["scores"]},
            "dense": {"file": "dense.bin", "tensors": [{"name": "all", "shape": [self.dense.len()], "offset": 0}]},
            "metrics": {"auc": 0.7}, "data": {}, "files": {},
        });
        write_manifest(dir, manifest);
    }

    fn write_cube(&self, path: &Path) {
        let _ = std::fs::remove_file(path);
        let mut writer = CubeWriter::create(path, self.columns.clone(), RowType::F32, NUM_PARTITIONS).unwrap();
        let mut partitions = vec![Vec::new(); NUM_PARTITIONS as usize];
        for &sign in self.rows.keys() {
            partitions[partition_of(sign, NUM_PARTITIONS) as usize].push(sign);
        }
        for (partition, signs) in (0..).zip(&partitions) {
            let row = |i: usize, values: &mut [f32]| values.copy_from_slice(&self.rows[&signs[i]]);
            writer.write_partition(partition, signs, row).unwrap();
        }
        writer.finish().unwrap();
    }

    /// Writes the directory of a delta on `parent`: the rows that differ, and the dense weights.
    pub fn write_delta(&self, dir: &Path, base: u64, parent: &TestModel) {
        std::fs::create_dir_all(dir.join("cube")).unwrap();
        let dense: Vec<u8> = self.dense.iter().flat_map(|value| value.to_le_bytes()).collect();
        std::fs::write(dir.join("dense.bin"), dense).unwrap();
        let path = dir.join("cube/part-00000");
        let mut writer = DeltaWriter::create(path, self.columns.clone(), RowType::F32, NUM_PARTITIONS).unwrap();
        let (mut num_changed, mut num_removed) = (0, 0);
        for partition in 0..NUM_PARTITIONS {
            let own = |sign: &&u64| partition_of(**sign, NUM_PARTITIONS) == partition;
            let is_new = |sign: &&u64| parent.rows.get(sign) != self.rows.get(sign);
            let signs: Vec<u64> = self.rows.keys().filter(own).filter(is_new).copied().collect();
            let is_gone = |sign: &&u64| !self.rows.contains_key(sign);
            let removed: Vec<u64> = parent.rows.keys().filter(own).filter(is_gone).copied().collect();
            (num_changed, num_removed) = (num_changed + signs.len(), num_removed + removed.len());
            let changes = Changes { signs: &signs, removed: &removed, is_whole: false };
            writer.add(partition, changes, |i, values| values.copy_from_slice(&self.rows[&signs[i]])).unwrap();
        }
        writer.finish().unwrap();
        let base_dir = dir.parent().and_then(Path::parent).unwrap();
        let mut manifest: Value =
            serde_json::from_slice(&std::fs::read(base_dir.join("manifest.json")).unwrap()).unwrap();
        (manifest["format"], manifest["version"], manifest["files"]) = (json!(2), json!(self.version), json!({}));
        (manifest["base"], manifest["parent"]) = (json!(base), json!(parent.version));
        let table = &mut manifest["table"];
        (table["rows"], table["changed"], table["removed"]) =
            (json!(self.rows.len()), json!(num_changed), json!(num_removed));
        write_manifest(dir, manifest);
    }

    /// Computes the scores of one sample in a simple, slow way, for models of one layer.
    pub fn expected(&self, slots: &[(&str, &[u64])], dense: &[f32]) -> Vec<f32> {
        let mut input = Vec::new();
        for slot in self.features["slots"].as_array().unwrap() {
            let signs = slots.iter().find(|(name, _)| slot["name"] == **name).map_or(&[][..], |&(_, signs)| signs);
            let mut pooled = vec![0.0; self.width()];
            for row in signs.iter().filter_map(|sign| self.rows.get(sign)) {
                pooled.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            let divisor = if slot["pooling"] == "mean" && !signs.is_empty() { signs.len() as f32 } else { 1.0 };
            input.extend(pooled.into_iter().map(|value| value / divisor));
        }
        input.extend_from_slice(dense);
        let num_labels = self.layers[0];
        let score = |label: usize| {
            let products = input.iter().enumerate().map(|(i, value)| value * self.dense[i * num_labels + label]);
            let logit = products.sum::<f32>() + self.dense[input.len() * num_labels + label];
            1.0 / (1.0 + (-logit).exp())
        };
        (0..num_labels).map(score).collect()
    }
}

/// Writes the manifest, with the sizes and checksums of the existing files.
pub fn write_manifest(dir: &Path, mut manifest: Value) {
    for name in ["graph.onnx", "dense.bin", "cube/part-00000"] {
        // A delta has no graph.
        let Ok(bytes) = std::fs::read(dir.join(name)) else { continue };
        let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        manifest["files"][name] = json!({"bytes": bytes.len(), "sha256": sha256});
    }
    manifest["self_sha256"] = json!("0".repeat(64));
    let mut bytes = manifest.to_string().into_bytes();
    elasticrec_serve::seal(&mut bytes);
    std::fs::write(dir.join("manifest.json"), bytes).unwrap();
}

/// Changes a value of the manifest and updates its checksums.
pub fn edit_manifest(dir: &Path, pointer: &str, value: Value) {
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    *manifest.pointer_mut(pointer).unwrap() = value;
    write_manifest(dir, manifest);
}

pub fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() < 1e-6, "{got} is not {expected}");
    }
}
