//! HTTP over real sockets. The tests replace the workers.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::testing::{LONG, connect, demo_plan, done, echo, install, install_gated, poll, start, start_echo};
use crate::codecs::Reply;
use crate::queue::job::{Job, Prediction, Timing};
use crate::server::{DrainOutcome, Server, ServerHandle, ServerOptions, Token};

struct Response {
    status: u16,
    head: String,
    body: String,
}

/// Reads the answer until the server closes the connection.
fn read_to_close(mut stream: TcpStream) -> Response {
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    Response { status: head.split(' ').nth(1).unwrap().parse().unwrap(), head: head.to_lowercase(), body: body.into() }
}

fn send(server: &ServerHandle, head: &str, body: &str) -> Response {
    let mut stream = connect(server);
    let length = body.len();
    write!(stream, "{head}\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    read_to_close(stream)
}

const PREDICT: &str = "POST /v1/models/demo:predict HTTP/1.1\r\ncontent-type: text/plain";

fn predict(server: &ServerHandle, body: &str) -> Response {
    send(server, PREDICT, body)
}

fn get(server: &ServerHandle, path: &str) -> Response {
    send(server, &format!("GET {path} HTTP/1.1"), "")
}

#[test]
fn a_server_is_healthy_at_once_and_ready_with_a_version() {
    let server = start(ServerOptions::default());
    assert_eq!(get(&server, "/health").status, 200);
    let response = get(&server, "/ready");
    assert_eq!(
        (response.status, response.body.as_str()),
        (503, r#"{"error":"model `demo`: no version is ready yet"}"#)
    );
    assert_eq!(predict(&server, "x").status, 503);
    install(&server, 3, echo);
    assert_eq!(get(&server, "/ready").status, 200);
    assert_eq!(get(&server, "/v1/models/demo").body, r#"{"model":"demo"}"#);
    assert_eq!(get(&server, "/v1/models").body, r#"{"models":[{"name":"demo","version":3}]}"#);
}

#[test]
fn both_content_types_reach_the_scorer() {
    let server = start_echo(ServerOptions::default());
    assert_eq!(predict(&server, "a b").body, "Text:a b");
    let head = "POST /v1/models/demo:predict HTTP/1.1\r\nContent-Type: Application/JSON ; charset=utf-8";
    let response = send(&server, head, "{}");
    assert_eq!((response.status, response.body.as_str()), (200, "Json:{}"));
    assert!(response.head.contains("content-type: application/json"));
}

#[test]
fn a_body_in_pieces_arrives_whole() {
    let server = start_echo(ServerOptions::default());
    let mut stream = connect(&server);
    write!(stream, "{PREDICT}\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
    for piece in ["ab", "", "cde", "f"] {
        if !piece.is_empty() {
            write!(stream, "{:x}\r\n{piece}\r\n", piece.len()).unwrap();
        }
        stream.flush().unwrap();
    }
    write!(stream, "0\r\n\r\n").unwrap();
    assert_eq!(read_to_close(stream).body, "Text:abcdef");
}

#[test]
fn every_refusal_has_its_code_and_one_line() {
    let server = start_echo(ServerOptions { max_body_bytes: 10, ..ServerOptions::default() });
    let check = |response: Response, status, error: &str| {
        assert_eq!(response.status, status, "{}", response.body);
        assert_eq!(response.body, serde_json::json!({ "error": error }).to_string());
        response.head
    };
    let post = |rest: &str| send(&server, &format!("POST {rest}"), "");
    check(predict(&server, "bad"), 400, "line 1: bad");
    check(post("/v1/models/other:predict HTTP/1.1"), 404, "unknown model `other`, expected one of `demo`");
    check(get(&server, "/v1/models/other"), 404, "unknown model `other`, expected one of `demo`");
    check(post("/v1/models/demo:learn HTTP/1.1"), 404, "unknown action `learn`, expected `predict` or `explain`");
    check(get(&server, "/nothing/here"), 404, "no such path: /nothing/here");
    let head = check(get(&server, "/v1/models/demo:predict"), 405, "method: expected POST, got GET");
    assert!(head.contains("allow: post"));
    check(post("/v1/models/demo HTTP/1.1"), 405, "method: expected GET, got POST");
    check(post("/health HTTP/1.1"), 405, "method: expected GET, got POST");
    check(post("/v2/models/infer HTTP/1.1"), 405, "method: expected GET, got POST");
    check(predict(&server, "many"), 413, "expected at most 1 lines in a request, got more");
    check(predict(&server, "0123456789a"), 413, "body: expected at most 10 bytes, got more");
    let none = "content type: expected `application/json` or `text/plain`, got none";
    check(post("/v1/models/demo:predict HTTP/1.1"), 415, none);
    let form = "content type: expected `application/json` or `text/plain`, got `application/x-www-form-urlencoded`";
    check(post("/v1/models/demo:predict HTTP/1.1\r\ncontent-type: application/x-www-form-urlencoded"), 415, form);
    let brotli = format!("{PREDICT}\r\ncontent-encoding: br");
    check(send(&server, &brotli, "x"), 415, "content encoding: expected `gzip`, `deflate` or none, got `br`");
    check(predict(&server, "nan"), 500, "sample 0: expected a finite score");
}

#[test]
fn a_chunked_body_beyond_the_limit_is_refused() {
    let server = start_echo(ServerOptions { max_body_bytes: 10, ..ServerOptions::default() });
    let mut stream = connect(&server);
    write!(stream, "{PREDICT}\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
    write!(stream, "8\r\n01234567\r\n8\r\n01234567\r\n0\r\n\r\n").unwrap();
    assert_eq!(read_to_close(stream).status, 413);
}

#[test]
fn a_panic_is_the_error_of_one_request() {
    let server = start_echo(ServerOptions::default());
    let response = predict(&server, "panic");
    assert_eq!(response.status, 500);
    assert_eq!(response.body, r#"{"error":"scoring this request failed; this is a bug"}"#);
    assert_eq!(predict(&server, "x").body, "Text:x");
}

#[test]
fn the_token_guards_all_but_health_and_readiness() {
    let token = Some(Token("s3cret".into()));
    let server = start_echo(ServerOptions { token, ..ServerOptions::default() });
    for path in ["/health", "/ready"] {
        assert_eq!(get(&server, path).status, 200);
    }
    for path in ["/metrics", "/v1/models/demo", "/nothing"] {
        assert_eq!(get(&server, path).status, 401);
    }
    let with = |value: &str| send(&server, &format!("{PREDICT}\r\nauthorization: {value}"), "x");
    let wrong_values =
        ["Bearer s3cre", "Bearer s3cretx", "Bearer S3cret", "Bearer", "s3cret", "Bearer ", "Basic s3cret"];
    // The token after seven other bytes than `Bearer `.
    let wrong_schemes = ["Digest s3cret", "Basic!!s3cret", "Bearer:s3cret"];
    for wrong in wrong_values.into_iter().chain(wrong_schemes) {
        let response = with(wrong);
        assert_eq!(response.status, 401, "{wrong}");
        assert!(response.head.contains("www-authenticate: bearer"));
        assert!(!response.body.contains("s3cret"));
    }
    assert_eq!(with("Bearer s3cret").status, 200);
    assert_eq!(with("bearer s3cret").status, 200);
    assert!(!format!("{:?}", server.app.options).contains("s3cret"));
}

/// Installs a gated scorer and sends it a prediction; returns the connection and the gate.
fn begin_gated(server: &ServerHandle, body: &str) -> (TcpStream, mpsc::Sender<()>) {
    let (begun, go) = install_gated(server);
    let stream = begin_predict(server, body);
    begun.recv_timeout(LONG).unwrap();
    (stream, go)
}

/// Sends a prediction without reading its answer.
fn begin_predict(server: &ServerHandle, body: &str) -> TcpStream {
    let mut stream = connect(server);
    let length = body.len();
    write!(stream, "{PREDICT}\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    stream
}

fn wait_for_queue(server: &ServerHandle, num_queued: usize) {
    poll("the queue does not get its requests", || {
        server.app.registry.deployments().next().unwrap().queue.num_queued() == num_queued
    });
}

#[test]
fn a_full_queue_is_429_at_once() {
    let server = start(ServerOptions { queue: 1, ..ServerOptions::default() });
    let (first, go) = begin_gated(&server, "first");
    let second = begin_predict(&server, "second");
    wait_for_queue(&server, 1);
    let third = predict(&server, "third");
    assert_eq!(third.status, 429);
    assert_eq!(third.body, r#"{"error":"the queue of 1 requests is full (`serve.queue`); retry later"}"#);
    assert!(get(&server, "/metrics").body.contains("elasticrec_serve_queue{model=\"demo\",variant=\"\"} 1"));
    go.send(()).unwrap();
    go.send(()).unwrap();
    assert_eq!(read_to_close(first).body, "Text:first");
    assert_eq!(read_to_close(second).body, "Text:second");
}

#[test]
fn a_switch_of_versions_leaves_requests_with_the_version_they_started_with() {
    let server = start(ServerOptions::default());
    let (old, go) = begin_gated(&server, "old");
    install(&server, 4, |job: Job| {
        let _ = job.answer.send(Ok(done("version 4".into())));
    });
    let new = predict(&server, "new");
    assert_eq!((new.body.as_str(), new.head.contains("\r\nelasticrec-version: 4\r\n")), ("version 4", true));
    assert!(get(&server, "/metrics").body.contains("elasticrec_serve_model_version{model=\"demo\",variant=\"\"} 4"));
    go.send(()).unwrap();
    let old = read_to_close(old);
    assert_eq!((old.body.as_str(), old.head.contains("\r\nelasticrec-version: 3\r\n")), ("Text:old", true));
}

#[test]
fn stopping_finishes_accepted_requests_and_accepts_no_new_ones() {
    let server = Arc::new(start(ServerOptions::default()));
    let (first, go) = begin_gated(&server, "first");
    let second = begin_predict(&server, "second");
    wait_for_queue(&server, 1);
    let idle = connect(&server);
    let stopping = {
        let server = server.clone();
        std::thread::spawn(move || server.stop(LONG))
    };
    poll("the socket stays open", || TcpStream::connect(server.addr()).is_err());
    assert_eq!(server.wait(Some(Duration::ZERO)), None);
    go.send(()).unwrap();
    go.send(()).unwrap();
    assert_eq!(read_to_close(first).body, "Text:first");
    assert_eq!(read_to_close(second).body, "Text:second");
    assert_eq!(stopping.join().unwrap(), DrainOutcome(true));
    assert_eq!(server.wait(None), Some(DrainOutcome(true)));
    drop(idle);
}

#[test]
fn stopping_ends_at_the_deadline() {
    let server = start(ServerOptions::default());
    let (_stuck, go) = begin_gated(&server, "stuck");
    assert_eq!(server.stop(Duration::from_millis(50)), DrainOutcome(false));
    drop(go);
}

#[test]
fn an_answer_has_its_version_and_on_request_its_timing() {
    let server = start_echo(ServerOptions::default());
    let head = predict(&server, "x").head;
    assert!(head.contains("elasticrec-version: 3") && !head.contains("server-timing"), "{head}");
    let head = send(&server, &format!("{PREDICT}\r\nelasticrec-timing: 1"), "x").head;
    assert!(head.contains("server-timing: queue;dur=0.000, parse;dur=0.000, lookup"), "{head}");
}

#[test]
fn a_request_waits_until_its_deadline() {
    let server = start(ServerOptions::default());
    let (stuck, go) = begin_gated(&server, "stuck");
    let response = send(&server, &format!("{PREDICT}\r\nelasticrec-timeout-ms: 20"), "x");
    assert_eq!(response.status, 504);
    assert_eq!(response.body, r#"{"error":"deadline: not scored within 20 ms"}"#);
    for wrong in ["0", "x", "-1", "99999999999"] {
        let response = send(&server, &format!("{PREDICT}\r\nelasticrec-timeout-ms: {wrong}"), "x");
        assert_eq!(response.status, 400);
        assert!(response.body.contains("elasticrec-timeout-ms: expected milliseconds from 1 to 3600000"));
    }
    // Let the scorer end, so that the server can stop.
    drop(go);
    drop(stuck);
}

#[test]
fn slow_clients_are_disconnected_and_do_not_block_others() {
    let options = ServerOptions {
        queue: 1,
        header_timeout: Duration::from_secs(3),
        body_timeout: Duration::from_secs(3),
        ..ServerOptions::default()
    };
    let server = start_echo(options);
    let mut slow_heads: Vec<TcpStream> = (0..20).map(|_| connect(&server)).collect();
    let mut slow_bodies: Vec<TcpStream> = (0..20).map(|_| connect(&server)).collect();
    for stream in &mut slow_heads {
        write!(stream, "POST /v1/mod").unwrap();
    }
    for stream in &mut slow_bodies {
        write!(stream, "{PREDICT}\r\nhost: x\r\ncontent-length: 9\r\n\r\nab").unwrap();
    }
    assert_eq!(predict(&server, "x").body, "Text:x");
    for stream in slow_bodies {
        let response = read_to_close(stream);
        assert_eq!((response.status, response.body.as_str()), (408, r#"{"error":"body: did not arrive within 3 s"}"#));
    }
    for mut stream in slow_heads {
        // The connection is closed, with or without a 408 before.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
    }
    assert_eq!(predict(&server, "x").body, "Text:x");
}

#[test]
fn connections_beyond_the_limit_wait_their_turn() {
    let server = start_echo(ServerOptions { max_connections: 1, ..ServerOptions::default() });
    let first = connect(&server);
    let second = begin_predict(&server, "second");
    drop(first);
    assert_eq!(read_to_close(second).body, "Text:second");
}

/// Checks that a server with a limit of one connection closes the connection of `hold` and answers the next client.
fn check_next_client_is_answered(hold: impl Fn(&ServerHandle) -> TcpStream) {
    let timeout = Duration::from_millis(300);
    let server = start(ServerOptions {
        max_connections: 1,
        header_timeout: timeout,
        body_timeout: timeout,
        ..ServerOptions::default()
    });
    install(&server, 3, echo);
    let held = hold(&server);
    assert_eq!(predict(&server, "x").body, "Text:x");
    drop(held);
}

#[test]
fn a_connection_that_sends_only_its_start_is_closed() {
    for beginning in ["", "P", "PR", "PRI", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "PO", "PUT / H"] {
        check_next_client_is_answered(|server| {
            let mut stream = connect(server);
            stream.write_all(beginning.as_bytes()).unwrap();
            stream
        });
    }
}

#[test]
fn a_client_that_never_reads_its_answers_is_disconnected() {
    check_next_client_is_answered(|server| {
        let mut stream = connect(server);
        stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        // Send until the server reads no more, because the answers fill all buffers.
        let requests = "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(100);
        while stream.write_all(requests.as_bytes()).is_ok() {}
        stream
    });
}

#[test]
fn answers_are_counted_by_code_but_probes_are_not() {
    let server = start_echo(ServerOptions::default());
    predict(&server, "x");
    predict(&server, "bad");
    predict(&server, "bad");
    get(&server, "/health");
    get(&server, "/ready");
    get(&server, "/metrics");
    let response = get(&server, "/metrics");
    assert!(response.head.contains("content-type: application/openmetrics-text"));
    for line in [
        "elasticrec_serve_requests_total{protocol=\"http\",code=\"200\"} 1",
        "elasticrec_serve_requests_total{protocol=\"http\",code=\"400\"} 2",
        "elasticrec_serve_request_seconds_count 3",
        "elasticrec_serve_model_version{model=\"demo\",variant=\"\"} 3",
        "elasticrec_serve_stage_seconds_count{model=\"demo\",variant=\"\",stage=\"infer\"} 0",
        "elasticrec_serve_instances_total{model=\"demo\",variant=\"\"} 0",
    ] {
        assert!(response.body.lines().any(|got| got == line), "{line} is not in\n{}", response.body);
    }
}

#[test]
fn bytes_that_are_not_http_are_answered_or_closed() {
    let server = start_echo(ServerOptions::default());
    for bytes in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"GET / HTTP/9\r\n\r\n",
        // The preface of HTTP/2, then an invalid frame.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff",
        b"POST /v1/models/demo:predict HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ] {
        let mut stream = connect(&server);
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert_eq!(predict(&server, "x").body, "Text:x");
}

#[test]
fn an_address_in_use_is_named() {
    let server = start(ServerOptions::default());
    let options = ServerOptions { addr: server.addr(), ..ServerOptions::default() };
    let error = Server::start(options, &[demo_plan()]).err().unwrap().to_string();
    assert!(error.starts_with(&format!("serve: {}: Address already in use", server.addr())), "{error}");
}

/// Compresses a body as gzip or, with a zlib header, deflate.
fn compressed(encoding: &str, body: &str) -> Vec<u8> {
    let level = flate2::Compression::fast();
    if encoding == "gzip" {
        let mut encoder = flate2::write::GzEncoder::new(vec![], level);
        encoder.write_all(body.as_bytes()).unwrap();
        return encoder.finish().unwrap();
    }
    let mut encoder = flate2::write::ZlibEncoder::new(vec![], level);
    encoder.write_all(body.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn send_compressed(server: &ServerHandle, encoding: &str, body: &[u8]) -> Response {
    let mut stream = connect(server);
    let length = body.len();
    let head = format!("{PREDICT}\r\ncontent-encoding: {encoding}");
    write!(stream, "{head}\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n").unwrap();
    stream.write_all(body).unwrap();
    read_to_close(stream)
}

#[test]
fn compressed_bodies_are_inflated_within_the_limit() {
    let server = start_echo(ServerOptions { max_body_bytes: 1000, ..ServerOptions::default() });
    for encoding in ["gzip", "deflate"] {
        assert_eq!(send_compressed(&server, encoding, &compressed(encoding, "a b")).body, "Text:a b");
        let loud = encoding.to_uppercase();
        assert_eq!(send_compressed(&server, &loud, &compressed(encoding, "a b")).body, "Text:a b");
        let most = "x".repeat(1000);
        assert_eq!(send_compressed(&server, encoding, &compressed(encoding, &most)).status, 200);
        let response = send_compressed(&server, encoding, &compressed(encoding, &"x".repeat(1001)));
        let expected = r#"{"error":"body: expected at most 1000 bytes after inflating, got more"}"#;
        assert_eq!((response.status, response.body.as_str()), (413, expected));
        for broken in [&b"plain text"[..], &compressed(encoding, "a b")[..9]] {
            let response = send_compressed(&server, encoding, broken);
            assert_eq!(response.status, 400);
            assert!(response.body.contains("body: cannot be inflated: "), "{}", response.body);
        }
    }
}

#[test]
fn long_answers_are_gzipped_for_clients_that_accept_it() {
    let server = start_echo(ServerOptions::default());
    let ask = |accept: &str, body: &str| {
        let mut stream = connect(&server);
        let length = body.len();
        let head = format!("{PREDICT}\r\naccept-encoding: {accept}");
        write!(stream, "{head}\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = vec![];
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        (String::from_utf8(answer[..end].to_vec()).unwrap(), answer[end + 4..].to_vec())
    };
    let long = "x".repeat(600);
    for accept in ["gzip", "deflate, GZIP;q=0.5, br"] {
        let (head, body) = ask(accept, &long);
        assert!(head.contains("content-encoding: gzip") && body.len() < 100, "{head}");
        let mut text = String::new();
        flate2::read::GzDecoder::new(&body[..]).read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("Text:{long}"));
    }
    for (accept, body) in [("gzip", "short"), ("deflate", &long), ("gzip;q=0", &long), ("gzippy", &long)] {
        let (head, answer) = ask(accept, body);
        assert!(!head.contains("content-encoding"), "{head}");
        assert_eq!(answer, format!("Text:{body}").into_bytes());
    }
}

#[test]
fn the_open_inference_protocol_has_its_paths() {
    let token = Some(Token("s3cret".into()));
    let server = start(ServerOptions { token, ..ServerOptions::default() });
    let ask = |method: &str, path: &str, body: &str| {
        send(&server, &format!("{method} {path} HTTP/1.1\r\nauthorization: Bearer s3cret"), body)
    };
    let answer_of = |response: Response| (response.status, response.body);
    let not_ready = r#"{"error":"model `demo`: no version is ready yet"}"#;
    // Probes need no token.
    assert_eq!(answer_of(get(&server, "/v2/health/live")), (200, r#"{"live":true}"#.into()));
    assert_eq!(answer_of(get(&server, "/v2/health/ready")), (503, not_ready.into()));
    assert_eq!(get(&server, "/v2/models/demo/ready").status, 401);
    assert_eq!(answer_of(ask("GET", "/v2/models/demo/ready", "")), (503, not_ready.into()));
    let index = r#"[{"name":"demo","reason":"model `demo`: no version is ready yet","state":"UNAVAILABLE"}]"#;
    assert_eq!(answer_of(ask("POST", "/v2/repository/index", "")), (200, index.into()));
    assert_eq!(answer_of(ask("POST", "/v2/repository/index", r#"{"ready":true}"#)), (200, "[]".into()));
    install(&server, 3, echo);
    assert_eq!(answer_of(get(&server, "/v2/health/ready")), (200, r#"{"ready":true}"#.into()));
    assert!(ask("GET", "/v2", "").body.contains(r#""extensions":["binary_tensor_data"],"name":"elasticrec""#));
    let model = concat!(
        r#"{"inputs":[],"name":"demo","outputs":[{"datatype":"FP32","name":"click","shape":[-1]}],"#,
        r#""platform":"elasticrec","versions":["3"]}"#
    );
    let index = r#"[{"name":"demo","state":"READY","version":"3"}]"#;
    assert_eq!(answer_of(ask("POST", "/v2/repository/index", r#"{"ready":true}"#)), (200, index.into()));
    for version in ["", "/versions/3"] {
        assert_eq!(answer_of(ask("GET", &format!("/v2/models/demo{version}"), "")), (200, model.into()));
        let ready = ask("GET", &format!("/v2/models/demo{version}/ready"), "");
        assert_eq!(answer_of(ready), (200, r#"{"name":"demo","ready":true}"#.into()));
        let response = ask("POST", &format!("/v2/models/demo{version}/infer"), "{}");
        assert_eq!(answer_of(response), (200, "TensorsJson { json_bytes: None }:{}".into()));
    }
    for (path, error) in [
        ("/v2/models/other", "unknown model `other`, expected one of `demo`"),
        ("/v2/models/other/ready", "unknown model `other`, expected one of `demo`"),
        ("/v2/models/demo/versions/4", "model `demo`: no version 4, the current one is 3"),
        ("/v2/models/demo/versions/x/ready", "model `demo`: version: expected a number, got `x`"),
    ] {
        assert_eq!(answer_of(ask("GET", path, "")), (404, serde_json::json!({ "error": error }).to_string()));
    }
    assert_eq!(ask("POST", "/v2/models/demo/versions/4/infer", "{}").status, 404);
    assert_eq!(ask("POST", "/v2/models/other/infer", "{}").status, 404);
    let wrong = ask("GET", "/v2/models/demo/infer", "");
    assert_eq!(answer_of(wrong), (405, r#"{"error":"method: expected POST, got GET"}"#.into()));
    let with = |value: &str| {
        let head = "POST /v2/models/demo/infer HTTP/1.1\r\nauthorization: Bearer s3cret";
        send(&server, &format!("{head}\r\ninference-header-content-length: {value}"), "{}")
    };
    assert_eq!(answer_of(with("1")), (200, "TensorsJson { json_bytes: Some(1) }:{}".into()));
    let error = r#"{"error":"inference-header-content-length: expected a number of bytes, got `x`"}"#;
    assert_eq!(answer_of(with("x")), (400, error.into()));
}

#[test]
fn a_header_has_the_length_of_json_before_binary_data() {
    let server = start(ServerOptions::default());
    install(&server, 3, |job: Job| {
        let reply = Reply { body: "{}abcd".into(), json_bytes: Some(2) };
        let _ = job.answer.send(Ok(Prediction { reply, timing: Timing::default() }));
    });
    let response = send(&server, "POST /v2/models/demo/infer HTTP/1.1", "{}");
    assert_eq!((response.status, response.body.as_str()), (200, "{}abcd"));
    assert!(response.head.contains("inference-header-content-length: 2"), "{}", response.head);
    assert!(response.head.contains("content-type: application/octet-stream"), "{}", response.head);
}

#[test]
fn large_bodies_share_the_memory_limit() {
    let server = start(ServerOptions { max_pending_bytes: 150_000, ..ServerOptions::default() });
    let large = "x".repeat(100_000);
    let (first, go) = begin_gated(&server, &large);
    assert!(get(&server, "/metrics").body.contains("\nelasticrec_serve_pending_bytes 100000\n"));
    let expected = r#"{"error":"in-flight requests already use the limit of 150000 bytes (`serve.max_pending_bytes`); retry later"}"#;
    for encoding in ["gzip", "deflate"] {
        let response = send_compressed(&server, encoding, &compressed(encoding, &large));
        assert_eq!((response.status, response.body.as_str()), (429, expected));
    }
    // Refused while it arrives: the rest is not read, so the connection may be reset after the answer.
    let mut start = [0; 12];
    begin_predict(&server, &large).read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 429");
    let small = begin_predict(&server, "small");
    wait_for_queue(&server, 1);
    (0..2).for_each(|_| go.send(()).unwrap());
    assert_eq!(read_to_close(first).body.len(), "Text:".len() + large.len());
    assert_eq!(read_to_close(small).body, "Text:small");
    poll("memory is not released", || server.app.memory.used_bytes() == 0);
    go.send(()).unwrap();
    assert_eq!(predict(&server, &large).status, 200);
}

#[test]
fn a_path_that_is_not_utf8_is_refused_in_json() {
    let server = start_echo(ServerOptions::default());
    for path in ["/v1/models/%ff", "/v2/models/%ff/ready", "/v2/models/%ff"] {
        let response = get(&server, path);
        assert_eq!((response.status, response.body.starts_with(r#"{"error":""#)), (400, true), "{}", response.body);
    }
    let post = |path: &str| send(&server, &format!("POST {path} HTTP/1.1\r\ncontent-type: text/plain"), "a b");
    assert_eq!(post("/v1/models/%ff:predict").status, 400);
    // A percent-encoded letter means the same.
    assert_eq!(post("/v1/models/d%65mo:predict").body, predict(&server, "a b").body);
    assert_eq!(post("/v2/models/d%65mo/infer").body, post("/v2/models/demo/infer").body);
}
