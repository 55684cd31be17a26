//! From a version directory to scores, through ONNX Runtime.

use std::path::Path;

use elasticrec_sample::hash::{sign_of, slot_seed};
use elasticrec_serve::model::{Chain, Engine, Network};
use elasticrec_serve::{Model, Predictor, init_onnxruntime};
use serde_json::json;

use crate::support::{TestModel, assert_close, edit_manifest, ort_library};

#[test]
fn slot_text_with_unseen_signs_and_empty_slots() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    model.write(dir.path());
    let mut predictor = Predictor::load(dir.path(), &library).unwrap();
    let text = format!("- - 5:0 5:0 6:7 777777:7 {}:7 8:12\n0 0\n1 1 424242:0\n", u64::MAX);
    let expected = [
        model.expected(&[("0", &[5, 5]), ("7", &[6, 777_777, u64::MAX])], &[]),
        model.expected(&[], &[]),
        model.expected(&[("0", &[424_242])], &[]),
    ];
    assert_close(&predictor.predict_text(text.as_bytes()).unwrap(), &expected.concat());
    assert_eq!(expected[1], expected[2]);
    // Values of the longer batch do not remain in the buffers.
    assert_close(&predictor.predict_text(b"0 0").unwrap(), &expected[1]);
    assert!(predictor.predict_text(b"\n").unwrap().is_empty());
    let error = predictor.predict_text(b"0 0\n0 0 x:7").unwrap_err();
    assert_eq!(error.to_string(), "line 2: slot `7`: sign `x` is not a u64");
}

#[test]
fn criteo_rows_with_dense_columns() {
    let Some(library) = ort_library() else { return };
    let signs = [sign_of(slot_seed("C1"), b"68fd1e64"), sign_of(slot_seed("C26"), b"ab")];
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::criteo(&signs));
    model.write(dir.path());
    let mut predictor = Predictor::load(dir.path(), &library).unwrap();
    let mut fields = vec![""; 40];
    (fields[1], fields[2], fields[14], fields[39]) = ("3", "-1.5", "68fd1e64", "ab");
    let scores = predictor.predict_text(fields.join("\t").as_bytes()).unwrap();
    let expected = model.expected(&[("C1", &signs[..1]), ("C26", &signs[1..])], &[3f32.ln_1p(), -1.5]);
    assert_close(&scores, &expected);
}

#[test]
fn a_model_directory_resolves_to_its_current_version() {
    let Some(library) = ort_library() else { return };
    let root = tempfile::tempdir().unwrap();
    TestModel::slots().write(&root.path().join("demo/3"));
    TestModel { version: 4, ..TestModel::slots() }.write(&root.path().join("demo/4"));
    std::fs::write(root.path().join("demo/CURRENT"), "{\"version\":4,\"generation\":2}\n").unwrap();
    let version = |path: &Path| Predictor::load(path, &library).unwrap().manifest().version;
    assert_eq!(version(&root.path().join("demo")), 4);
    assert_eq!(version(&root.path().join("demo/3")), 3);
}

/// The error of a version after `damage`, without the path of its directory.
fn error_after(damage: impl FnOnce(&Path)) -> Option<String> {
    init_onnxruntime(&ort_library()?).unwrap();
    let dir = tempfile::tempdir().unwrap();
    TestModel::slots().write(dir.path());
    damage(dir.path());
    let error = Model::load(dir.path())
        .and_then(|model| model.scorer())
        .err()
        .expect("the damage was not detected")
        .to_string();
    assert!(!error.contains('\n'), "{error}");
    Some(error.replace(&dir.path().display().to_string(), "DIR"))
}

#[test]
fn a_flipped_bit_or_a_lost_byte_in_any_file_is_named() {
    for name in ["graph.onnx", "dense.bin", "cube/part-00000"] {
        let flip = |dir: &Path| {
            let mut bytes = std::fs::read(dir.join(name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            std::fs::write(dir.join(name), bytes).unwrap();
        };
        let Some(error) = error_after(flip) else { return };
        assert_eq!(error, format!("DIR/{name}: sha-256 differs from the manifest, the file is damaged"));
        let mut length = 0;
        let shorten = |dir: &Path| {
            let bytes = std::fs::read(dir.join(name)).unwrap();
            length = bytes.len();
            std::fs::write(dir.join(name), &bytes[..length - 1]).unwrap();
        };
        let Some(error) = error_after(shorten) else { return };
        assert_eq!(error, format!("DIR/{name}: expected {length} bytes, got {}", length - 1));
        let Some(error) = error_after(|dir| std::fs::remove_file(dir.join(name)).unwrap()) else { return };
        assert_eq!(error, format!("DIR/{name}: No such file or directory (os error 2)"));
    }
}

#[test]
fn a_manifest_that_contradicts_its_files_is_refused() {
    let edited = |pointer: &'static str, value| error_after(move |dir| edit_manifest(dir, pointer, value));
    let Some(error) = edited("/format", json!(3)) else { return };
    assert_eq!(error, "DIR/manifest.json: expected format 1 or 2, got 3");
    let error = edited("/table/rows", json!(7)).unwrap();
    assert_eq!(error, "DIR: cube: expected 7 rows, got 100");
    let error = edited("/table/columns", json!([{"name": "wide", "width": 1}])).unwrap();
    assert!(error.starts_with("DIR: cube: expected columns [Column { name: \"wide\", width: 1 }], got ["), "{error}");
    let error = edited("/table/partitions", json!(8)).unwrap();
    assert_eq!(error, "DIR: cube: expected 8 partitions, got 4");
    let error = edited("/features/labels", json!(["click"])).unwrap();
    assert_eq!(error, "DIR: graph: output `scores`: expected f32 [batch, 1], got f32 [-1, 2]");
    let error = edited("/features/slots", json!([{"name": "0", "pooling": "sum"}])).unwrap();
    assert_eq!(error, "DIR: graph: input `pooled`: expected f32 [batch, 1, 3], got f32 [-1, 2, 3]");
    let error = edited("/graph/inputs", json!(["dense"])).unwrap();
    assert_eq!(error, "DIR: graph: inputs: expected [\"dense\"] as in the manifest, got [\"pooled\"]");
}

#[test]
fn an_invalid_graph_is_refused() {
    let garbage = |dir: &Path| {
        std::fs::write(dir.join("graph.onnx"), b"not a graph").unwrap();
        edit_manifest(dir, "/version", json!(3));
    };
    let Some(error) = error_after(garbage) else { return };
    assert!(error.starts_with("DIR: onnxruntime: "), "{error}");
}

#[test]
fn scores_that_are_not_finite_are_errors() {
    let Some(library) = ort_library() else { return };
    init_onnxruntime(&library).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut model = TestModel::slots();
    model.rows.insert(666, vec![f32::NAN; 3]);
    model.write(dir.path());
    let mut predictor = Predictor::load(dir.path(), &library).unwrap();
    let error = predictor.predict_text(b"0 0\n0 0 666:0").unwrap_err();
    assert_eq!(error.to_string(), "sample 1: label `click`: expected a finite score, got NaN");
    assert_eq!(predictor.predict_text(b"0 0").unwrap().len(), 2);
    *model.dense.last_mut().unwrap() = f32::NAN;
    model.write(dir.path());
    let error = Model::load(dir.path()).unwrap().scorer().err().unwrap().to_string();
    assert!(error.ends_with("warm-up: sample 0: label `buy`: expected a finite score, got NaN"), "{error}");
}

#[test]
fn the_runtime_is_loaded_once_from_one_path() {
    let Some(library) = ort_library() else { return };
    init_onnxruntime(&library).unwrap();
    init_onnxruntime(&library).unwrap();
    let error = init_onnxruntime(Path::new("no/such/library.so")).unwrap_err().to_string();
    assert_eq!(error, "onnxruntime: no/such/library.so: No such file or directory (os error 2)");
    let other = tempfile::NamedTempFile::new().unwrap();
    let error = init_onnxruntime(other.path()).unwrap_err().to_string();
    assert!(error.starts_with("onnxruntime: already loaded from "), "{error}");
}

#[test]
fn the_bare_engine_runs_without_a_cube() {
    let Some(library) = ort_library() else { return };
    let dir = tempfile::tempdir().unwrap();
    TestModel::slots().write(dir.path());
    std::fs::remove_file(dir.path().join("cube/part-00000")).unwrap();
    init_onnxruntime(&library).unwrap();
    let network = Network::read(&Chain::load(dir.path()).unwrap()).unwrap();
    let shape = network.shape();
    let mut scores = Vec::new();
    let pooled = vec![0.5; 8 * shape.num_cells * shape.width];
    Engine::new(&network).unwrap().run(8, &pooled, &[], &mut scores).unwrap();
    assert_eq!(scores.len(), 8 * shape.num_labels);
}
