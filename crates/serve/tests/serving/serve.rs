//! The whole request path over a real socket: JSON and text in, scores of ONNX Runtime out.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use elasticrec_serve::server::DrainOutcome;
use elasticrec_serve::{Manifest, ModelPlan, Server, ServerHandle, ServerOptions, VariantPlan, init_onnxruntime};
use serde_json::{Value, json};

use crate::support::{TestModel, assert_close, ort_library};

const LONG: Duration = Duration::from_secs(60);

/// Starts a server of the model `demo` in a directory.
fn start(options: ServerOptions, dir: &Path) -> ServerHandle {
    let variants = vec![VariantPlan { name: String::new(), weight: 1.0 }];
    let server = Server::start(options, &[ModelPlan { name: "demo".into(), variants }]).unwrap();
    server.load("demo", "", dir, None, None).unwrap();
    server
}

pub fn serve(model: &TestModel, dir: &Path, library: &Path) -> ServerHandle {
    init_onnxruntime(library).unwrap();
    model.write(dir);
    start(ServerOptions { max_instances: 100, workers: 2, ..ServerOptions::default() }, dir)
}

fn send(server: &ServerHandle, request: &str, content_type: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let length = body.len();
    let head = format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {content_type}\r\n");
    write!(stream, "{head}content-length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_string())
}

fn predict(server: &ServerHandle, content_type: &str, body: &str) -> (u16, String) {
    send(server, "POST /v1/models/demo:predict", content_type, body)
}

/// The scores in an answer, in the order of instances and labels.
fn scores(answer: &(u16, String)) -> Vec<f32> {
    assert_eq!(answer.0, 200, "{}", answer.1);
    let answer: Value = serde_json::from_str(&answer.1).unwrap();
    let predictions = answer["predictions"].as_array().unwrap();
    let labels = |prediction: &Value| ["click", "buy"].map(|label| prediction[label].as_f64().unwrap() as f32);
    predictions.iter().flat_map(labels).collect()
}

#[test]
fn json_and_text_get_the_scores_of_the_model() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, dir.path(), &library);
    let expected = [model.expected(&[("0", &[5]), ("7", &[6, u64::MAX, 1_000_000])], &[]), model.expected(&[], &[])];
    let body = r#"{"instances":[{"7":[6,"18446744073709551615",1000000],"0":5},{}]}"#;
    let answer = predict(&server, "application/json", body);
    assert!(answer.1.starts_with(r#"{"model":"demo","version":3,"predictions":[{"click":0."#), "{}", answer.1);
    assert_close(&scores(&answer), &expected.concat());
    let text = format!("0 0 5:0 6:7 {}:7 1000000:7\n0 0\n", u64::MAX);
    assert_eq!(predict(&server, "text/plain", &text), answer);
    let empty = (200, r#"{"model":"demo","version":3,"predictions":[]}"#.to_string());
    assert_eq!(predict(&server, "application/json", r#"{"instances":[]}"#), empty);
    assert_eq!(predict(&server, "text/plain", ""), empty);
}

#[test]
fn refusals_have_messages_and_answers_are_counted() {
    let Some(library) = ort_library() else { return };
    let (dir, mut model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    model.rows.insert(666, vec![f32::NAN; 3]);
    let server = serve(&model, dir.path(), &library);
    let json = |body: &str| predict(&server, "application/json", body);
    let error = |message: &str| json!({ "error": message }).to_string();
    assert_eq!(json(r#"{"instances":[{},{"C99":1}]}"#), (400, error("instances[1]: unknown slot `C99`")));
    let text = predict(&server, "text/plain", "0 0\n0\n");
    assert_eq!(text, (400, error("line 2: click: expected `show click sign:slot …`, got ``")));
    let many = "0 0\n".repeat(101);
    assert_eq!(
        predict(&server, "text/plain", &many),
        (413, error("expected at most 100 lines in a request, got more"))
    );
    let nan = (500, error("sample 0: label `click`: expected a finite score, got NaN"));
    assert_eq!(json(r#"{"instances":[{"0":666}]}"#), nan);
    assert_eq!(json(r#"{"instances":[{"0":[5,5,6,777777],"7":5},{"0":888888}]}"#).0, 200);
    let (_, metrics) = send(&server, "GET /metrics", "x", "");
    for line in [
        "elasticrec_serve_requests_total{protocol=\"http\",code=\"200\"} 1",
        "elasticrec_serve_requests_total{protocol=\"http\",code=\"500\"} 1",
        "elasticrec_serve_instances_total{model=\"demo\",variant=\"\"} 2",
        "elasticrec_serve_signs_total{model=\"demo\",variant=\"\"} 7",
        "elasticrec_serve_signs_missed_total{model=\"demo\",variant=\"\"} 2",
        "elasticrec_serve_model_version{model=\"demo\",variant=\"\"} 3",
        "elasticrec_serve_stage_seconds_count{model=\"demo\",variant=\"\",stage=\"infer\"} 2",
    ] {
        assert!(metrics.lines().any(|got| got == line), "{line} is not in\n{metrics}");
    }
}

#[test]
fn requests_are_scored_together_and_answered_apart() {
    let options = ServerOptions { max_wait: Duration::from_millis(5), ..ServerOptions::default() };
    if let Some((joined, batches)) = compare_with_scoring_alone(options) {
        assert!(batches < joined, "{joined} requests in {batches} batches: none were joined");
    }
}

/// Without `max_wait`, small requests are scored by the socket threads.
#[test]
fn requests_are_scored_by_socket_threads_and_answered_apart() {
    compare_with_scoring_alone(ServerOptions::default());
}

/// A socket thread that scores one request per batch must go on with the rest of the queue, even if no request follows.
#[test]
fn requests_left_in_the_queue_are_scored_too() {
    let options = ServerOptions { io_threads: 1, max_batch: 1, ..ServerOptions::default() };
    compare_with_scoring_alone(options);
}

/// Sends requests over many connections to one scorer, and checks that each gets the same answer as when it is scored
/// alone. Returns the number of scored requests and of batches.
fn compare_with_scoring_alone(options: ServerOptions) -> Option<(f64, f64)> {
    const CLIENTS: u64 = 32;
    const REQUESTS: u64 = 20;
    let library = ort_library()?;
    let (dir, mut model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    model.rows.insert(666, vec![f32::NAN; 3]);
    init_onnxruntime(&library).unwrap();
    model.write(dir.path());
    let alone = start(ServerOptions { max_batch: 1, ..ServerOptions::default() }, dir.path());
    let server = start(ServerOptions { workers: 1, ..options }, dir.path());
    let body = |client: u64, request: u64| match (client + request) % 8 {
        0 => r#"{"instances":[{"C99":1}]}"#.to_string(),
        1 => r#"{"instances":[{"0":1},{"0":666}]}"#.to_string(),
        2 => r#"{"instances":[]}"#.to_string(),
        // More instances than a socket thread scores, which it learns only by decoding them.
        3 if request.is_multiple_of(4) => format!(r#"{{"instances":[{}{{"0":{client}}}]}}"#, "{},".repeat(300)),
        _ => format!(r#"{{"instances":[{{"0":{client},"7":{request}}},{{"7":[{request},{client}]}}]}}"#),
    };
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, alone) = (&server, &alone);
            scope.spawn(move || {
                for request in 0..REQUESTS {
                    let body = body(client, request);
                    let answer = predict(server, "application/json", &body);
                    let expected = predict(alone, "application/json", &body);
                    if expected.0 == 200 {
                        assert_close(&scores(&answer), &scores(&expected));
                    } else {
                        assert_eq!(answer, expected, "{body}");
                    }
                }
            });
        }
    });
    let (_, metrics) = send(&server, "GET /metrics", "x", "");
    let figure = |name: &str| -> f64 {
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(&format!("elasticrec_serve_{name}{{model=\"demo\",variant=\"\"}} ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{metrics}")).parse().unwrap()
    };
    let (joined, batches) = (figure("joined_requests_sum"), figure("joined_requests_count"));
    assert_eq!(joined, (CLIENTS * REQUESTS * 7 / 8) as f64, "expected all requests in a batch, except refused ones");
    Some((joined, batches))
}

#[test]
fn metadata_describes_the_model() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, dir.path(), &library);
    let (status, body) = send(&server, "GET /v1/models/demo", "x", "");
    let expected = json!({
        "model": "demo", "version": 3, "created": "2026-01-02T03:04:05Z", "format": "slots", "slots": ["0", "7"],
        "dense": [], "labels": ["click", "buy"], "columns": [{"name": "wide", "width": 1}, {"name": "deep", "width": 2}],
        "rows": 100,
    });
    let mut got: Value = serde_json::from_str(&body).unwrap();
    let features = got.as_object_mut().unwrap().remove("features").unwrap();
    assert_eq!((status, got), (200, expected));
    let manifest = Manifest::load(dir.path()).unwrap();
    assert_eq!(features, serde_json::to_value(&manifest.features).unwrap());
}

#[test]
fn many_clients_each_get_their_own_scores_across_a_switch_of_versions() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, &dir.path().join("3"), &library);
    TestModel { version: 4, ..TestModel::slots() }.write(&dir.path().join("4"));
    std::thread::scope(|scope| {
        for client in 0..4u64 {
            let (server, model) = (&server, &model);
            scope.spawn(move || {
                for round in 0..25 {
                    let sign = 1 + (client * 25 + round) % 99;
                    let answer = predict(server, "text/plain", &format!("0 0 {sign}:0\n"));
                    assert_close(&scores(&answer), &model.expected(&[("0", &[sign])], &[]));
                }
            });
        }
        server.load("demo", "", &dir.path().join("4"), None, None).unwrap();
    });
    let answer = predict(&server, "text/plain", "");
    assert_eq!(answer.1, r#"{"model":"demo","version":4,"predictions":[]}"#);
    assert_eq!(server.stop(LONG), DrainOutcome(true));
}
