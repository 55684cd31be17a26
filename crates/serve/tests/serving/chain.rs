//! Deltas: loaded with their base and parents; errors name the part that is missing, damaged or does not match.

use std::path::{Path, PathBuf};

use elasticrec_serve::{Model, Predictor};
use serde_json::json;
use tempfile::TempDir;

use crate::support::{TestModel, assert_close, edit_manifest, ort_library};

/// Version 3 and its deltas 4 (rows changed, added, removed) and 6 (on 4, with other dense weights).
fn publish() -> (TempDir, [TestModel; 3]) {
    let root = tempfile::tempdir().unwrap();
    let base = TestModel::slots();
    let mut first = TestModel { version: 4, ..TestModel::slots() };
    first.rows.insert(5, vec![2.0, -1.0, 0.5]);
    first.rows.insert(424_242, vec![1.0, 1.0, 1.0]);
    first.rows.remove(&6);
    let mut second = TestModel { version: 6, rows: first.rows.clone(), ..TestModel::slots() };
    second.rows.insert(6, vec![-0.5, 0.25, 4.0]);
    second.rows.remove(&5);
    second.dense[3] = 0.75;
    base.write(&root.path().join("demo/3"));
    first.write_delta(&root.path().join("demo/3/deltas/4"), 3, &base);
    second.write_delta(&root.path().join("demo/3/deltas/6"), 3, &first);
    (root, [base, first, second])
}

#[test]
fn every_version_of_a_chain_has_its_rows_and_weights() {
    let Some(library) = ort_library() else { return };
    let (root, models) = publish();
    let demo = root.path().join("demo");
    for (model, path) in models.iter().zip(["3", "3/deltas/4", "3/deltas/6"]) {
        let mut predictor = Predictor::load(&demo.join(path), &library).unwrap();
        assert_eq!(predictor.manifest().version, model.version);
        let got = predictor.predict_text(b"0 0 5:0 6:7 424242:7\n0 0 7:0").unwrap();
        let expected = [model.expected(&[("0", &[5]), ("7", &[6, 424_242])], &[]), model.expected(&[("0", &[7])], &[])];
        assert_close(&got, &expected.concat());
    }
    std::fs::write(demo.join("CURRENT"), "{\"version\":6,\"generation\":9,\"held\":true}\n").unwrap();
    assert_eq!(Predictor::load(&demo, &library).unwrap().manifest().version, 6);
}

/// The error of version 6 after `damage` to the model's directory, without its path.
fn error_after(damage: impl FnOnce(&Path)) -> String {
    let (root, _) = publish();
    // Errors contain paths with links resolved.
    let demo: PathBuf = root.path().canonicalize().unwrap().join("demo");
    damage(&demo);
    let error = Model::load(&demo.join("3/deltas/6")).err().expect("the damage was not detected").to_string();
    error.replace(&demo.display().to_string(), "DIR")
}

#[test]
fn missing_parts_of_a_chain_are_named() {
    let error = error_after(|demo| std::fs::remove_file(demo.join("3/manifest.json")).unwrap());
    assert_eq!(error, "DIR/3/deltas/4/manifest.json: base: version 3 is missing: no `manifest.json` in DIR/3");
    let error = error_after(|demo| std::fs::remove_dir_all(demo.join("3/deltas/4")).unwrap());
    let expected = "DIR/3/deltas/6/manifest.json: parent: version 4 is missing: no `manifest.json` in DIR/3/deltas/4";
    assert_eq!(error, expected);
    let error = error_after(|demo| std::fs::remove_file(demo.join("3/deltas/4/cube/part-00000")).unwrap());
    assert_eq!(error, "DIR/3/deltas/4/cube/part-00000: No such file or directory (os error 2)");
}

#[test]
fn a_delta_applies_only_to_its_parent() {
    let edited = |path: &'static str, pointer: &'static str, value| {
        error_after(move |demo| edit_manifest(&demo.join(path), pointer, value))
    };
    // Applied to the base, which lacks the rows of version 4.
    let error = edited("3/deltas/6", "/parent", json!(3));
    assert!(error.starts_with("DIR/3/deltas/6: cube: expected 100 rows, got "), "{error}");
    let error = edited("3/deltas/4", "/version", json!(5));
    let got = "in DIR/3/deltas/4, got 5 of 3";
    assert_eq!(error, format!("DIR/3/deltas/6/manifest.json: parent: expected version 4 of base 3 {got}"));
    let error = edited("3/deltas/6", "/features/labels", json!(["click", "share"]));
    let expected = "DIR/3/deltas/6/manifest.json: features: expected the value of its parent, version 4";
    assert_eq!(error, expected);
    let error = edited("3/deltas/6", "/table/row_type", json!("int8"));
    assert!(error.contains("table.row_type: expected the value of its parent, version 4"), "{error}");
    let error = edited("3/deltas/4", "/table/rows", json!(7));
    assert_eq!(error, "DIR/3/deltas/4: cube: expected 7 rows, got 100");
}

#[test]
fn a_flipped_bit_in_any_delta_is_named() {
    for path in ["3/deltas/4/cube/part-00000", "3/deltas/6/cube/part-00000", "3/deltas/6/dense.bin", "3/graph.onnx"] {
        let error = error_after(|demo| {
            let mut bytes = std::fs::read(demo.join(path)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(demo.join(path), bytes).unwrap();
        });
        assert_eq!(error, format!("DIR/{path}: sha-256 differs from the manifest, the file is damaged"));
    }
}
