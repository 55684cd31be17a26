//! gRPC through the front: frames in, frames and codes out. The tests replace the workers.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Frame;
use prost::Message;

use super::health::{CheckRequest, CheckResponse, Health};
use super::tensors::{
    BoolResponse, ModelMetadataResponse, ModelRequest, RepositoryIndexRequest, RepositoryIndexResponse,
    ServerMetadataResponse,
};
use super::*;
use crate::protocols::http::testing::{LONG, echo, install, start, start_echo};
use crate::queue::job::Job;
use crate::server::{ServerHandle, ServerOptions, Token};

pub(super) struct CallResult {
    pub(super) code: u16,
    pub(super) message: String,
    head: HeaderMap,
    pub(super) body: Bytes,
}

pub(super) fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    [&[flag][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

pub(super) fn call(server: &ServerHandle, path: &str, headers: &[(&str, &str)], body: Body) -> CallResult {
    let mut request = Request::post(path).header("content-type", "application/grpc").body(body).unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let response = crate::protocols::http::Front::new(server.app.clone()).answer(request).await;
        let (parts, body) = response.into_parts();
        let collected = body.collect().await.unwrap();
        let trailers = collected.trailers().cloned().unwrap_or_default();
        let status = Status::from_header_map(&trailers).or(Status::from_header_map(&parts.headers)).unwrap();
        CallResult {
            code: status.code() as u16,
            message: status.message().into(),
            head: parts.headers,
            body: collected.to_bytes(),
        }
    })
}

fn check(server: &ServerHandle, service: &str) -> Result<Health, (u16, String)> {
    let message = CheckRequest { service: service.into() }.encode_to_vec();
    let got = call(server, CHECK, &[], framed(0, &message).into());
    if got.code != 0 {
        return Err((got.code, got.message));
    }
    Ok(CheckResponse::decode(&got.body[5..]).unwrap().status())
}

#[test]
fn health_is_that_of_the_server_or_of_a_model_and_needs_no_token() {
    let server = start(ServerOptions { token: Some(Token("s3cret".into())), ..ServerOptions::default() });
    for service in ["", "demo", "inference.GRPCInferenceService"] {
        assert_eq!(check(&server, service), Ok(Health::NotServing));
    }
    install(&server, 3, echo);
    for service in ["", "demo", "inference.GRPCInferenceService"] {
        assert_eq!(check(&server, service), Ok(Health::Serving));
    }
    assert_eq!(check(&server, "other"), Err((5, "unknown model `other`, expected one of `demo`".into())));
}

#[test]
fn unknown_methods_and_wrong_tokens_are_refused_in_grpc_and_counted() {
    let server = start(ServerOptions { token: Some(Token("s3cret".into())), ..ServerOptions::default() });
    let got = call(&server, "/a.Service/Method", &[("authorization", "Bearer s3cre")], framed(0, b"").into());
    assert_eq!(got.code, 16);
    assert!(got.message.contains("authorization: expected metadata `Bearer TOKEN"), "{}", got.message);
    let got = call(&server, "/a.Service/Method", &[("authorization", "Bearer s3cret")], framed(0, b"").into());
    assert_eq!((got.code, got.message.as_str()), (12, "no such method: /a.Service/Method"));
    let text = server.app.metrics.encode().unwrap();
    for code in [12, 16] {
        let line = format!("elasticrec_serve_requests_total{{protocol=\"grpc\",code=\"{code}\"}} 1");
        assert!(text.contains(&line), "{text}");
    }
    assert!(!text.contains("protocol=\"http\""), "{text}");
    // A path that is not for gRPC answers in HTTP, and counts as HTTP.
    let request = Request::post("/v1/models/demo:predict").header("content-type", "application/grpc");
    let request = request.header("authorization", "Bearer s3cret").body(Body::empty()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let response =
        runtime.block_on(async { crate::protocols::http::Front::new(server.app.clone()).answer(request).await });
    assert_eq!(response.status(), 415);
    let text = server.app.metrics.encode().unwrap();
    assert!(text.contains("requests_total{protocol=\"http\",code=\"415\"} 1"), "{text}");
    assert!(!text.contains("protocol=\"grpc\",code=\"0\""), "{text}");
}

#[test]
fn malformed_frames_are_refused() {
    let server = start(ServerOptions { max_body_bytes: 10, ..ServerOptions::default() });
    let refusal = |bytes: Vec<u8>| {
        let got = call(&server, CHECK, &[], bytes.into());
        (got.code, got.message)
    };
    assert_eq!(refusal(vec![]), (3, "expected one message, got none".into()));
    assert_eq!(refusal([framed(0, b""), framed(0, b"")].concat()), (3, "expected one message, got several".into()));
    assert_eq!(refusal(framed(0, b"0123456789a")).0, 11);
    assert_eq!(refusal(framed(0, b"\x0a\x05abc")).0, 3);
    // Two truncated frames, an unknown flag, and a compressed message without the header.
    for bytes in [vec![0, 0], vec![0, 0, 0, 0, 5, 1], framed(7, b""), framed(1, b"")] {
        assert_eq!(refusal(bytes).0, 13);
    }
    let got = call(&server, CHECK, &[("grpc-encoding", "snappy")], framed(0, b"").into());
    assert_eq!(got.code, 12);
    let got = call(&server, CHECK, &[("content-type", "application/grpc+proto")], framed(0, b"").into());
    assert_eq!((got.code, got.head["content-type"].as_bytes()), (0, &b"application/grpc"[..]));
}

#[test]
fn a_message_that_does_not_arrive_times_out() {
    let server = start(ServerOptions { body_timeout: Duration::from_millis(20), ..ServerOptions::default() });
    let never = || Body::new(SilentBody);
    let got = call(&server, CHECK, &[], never());
    assert_eq!((got.code, got.message.as_str()), (4, "message: did not arrive within 0.02 s"));
    let got = call(&server, CHECK, &[("grpc-timeout", "5m")], never());
    assert_eq!((got.code, got.message.as_str()), (4, "deadline: not scored within 5 ms"));
    let got = call(&server, CHECK, &[("grpc-timeout", "soon")], never());
    assert_eq!((got.code, got.message.contains("grpc-timeout: expected")), (3, true));
}

/// A body that never arrives.
struct SilentBody;

impl hyper::body::Body for SilentBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Pending
    }
}

fn method(name: &str) -> String {
    format!("/inference.GRPCInferenceService/{name}")
}

fn ask<M: Message + Default>(server: &ServerHandle, name: &str, message: &impl Message) -> Result<M, (u16, String)> {
    let got = call(server, &method(name), &[], framed(0, &message.encode_to_vec()).into());
    if got.code == 0 { Ok(M::decode(&got.body[5..]).unwrap()) } else { Err((got.code, got.message)) }
}

/// The head of a `ModelInferRequest` has the same first fields.
fn named(name: &str, version: &str) -> ModelRequest {
    ModelRequest { name: name.into(), version: version.into() }
}

#[test]
fn the_inference_service_describes_the_server_and_its_models() {
    let server = start(ServerOptions::default());
    let nothing = RepositoryIndexRequest::default();
    let is =
        |name: &str, message: &ModelRequest| ask::<BoolResponse>(&server, name, message).map(|answer| answer.value);
    assert_eq!(is("ServerLive", &named("", "")), Ok(true));
    assert_eq!(is("ServerReady", &named("", "")), Ok(false));
    assert_eq!(is("ModelReady", &named("demo", "")), Ok(false));
    assert_eq!(
        ask::<ModelMetadataResponse>(&server, "ModelMetadata", &named("demo", "")),
        Err((14, "model `demo`: no version is ready yet".into()))
    );
    install(&server, 3, echo);
    assert_eq!(is("ServerReady", &named("", "")), Ok(true));
    for version in ["", "3"] {
        assert_eq!(is("ModelReady", &named("demo", version)), Ok(true));
        let metadata: ModelMetadataResponse = ask(&server, "ModelMetadata", &named("demo", version)).unwrap();
        assert_eq!((metadata.name.as_str(), metadata.versions), ("demo", vec!["3".to_string()]));
        assert_eq!(metadata.outputs[0].name, "click");
    }
    let unknown = Err((5, "model `demo`: no version 4, the current one is 3".to_string()));
    assert_eq!(is("ModelReady", &named("demo", "4")), unknown);
    assert_eq!(is("ModelReady", &named("x", "")), Err((5, "unknown model `x`, expected one of `demo`".into())));
    let metadata: ServerMetadataResponse = ask(&server, "ServerMetadata", &nothing).unwrap();
    assert_eq!((metadata.name.as_str(), metadata.extensions), ("elasticrec", vec!["binary_tensor_data".to_string()]));
    let index: RepositoryIndexResponse = ask(&server, "RepositoryIndex", &nothing).unwrap();
    assert_eq!((index.models[0].name.as_str(), index.models[0].state.as_str()), ("demo", "READY"));
    let (code, refusal) = ask::<BoolResponse>(&server, "ModelStreamInfer", &nothing).unwrap_err();
    assert_eq!(code, 12);
    assert!(refusal.contains("ModelStreamInfer, expected one of ServerLive, "), "{refusal}");
}

#[test]
fn a_message_reaches_the_scorer_and_its_answer_names_the_version() {
    let server = start_echo(ServerOptions::default());
    let message = named("demo", "3").encode_to_vec();
    let infer = |headers: &[(&str, &str)], body: Vec<u8>| call(&server, &method("ModelInfer"), headers, body.into());
    let got = infer(&[("elasticrec-timing", "1")], framed(0, &message));
    let answer = format!("TensorsProto:{}", String::from_utf8_lossy(&message));
    assert_eq!((got.code, &got.body[5..]), (0, answer.as_bytes()));
    assert_eq!(got.head["elasticrec-version"], "3");
    assert!(got.head["server-timing"].to_str().unwrap().starts_with("queue;dur="));
    assert_eq!(got.head.get("grpc-encoding"), None);
    let both = [("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip")];
    let got = infer(&both, framed(1, &gzip(&message)));
    assert_eq!((got.code, got.body[0], &got.head["grpc-encoding"]), (0, 1, &HeaderValue::from_static("gzip")));
    let mut inflated = String::new();
    flate2::read::GzDecoder::new(&got.body[5..]).read_to_string(&mut inflated).unwrap();
    assert_eq!(
        (inflated, got.body.len()),
        (answer, 5 + u32::from_be_bytes(got.body[1..5].try_into().unwrap()) as usize)
    );
    // The header allows compression; this message is plain.
    assert_eq!(infer(&both, framed(0, &message)).code, 0);
    let refusal = |name: &str, version: &str| {
        let got = infer(&[], framed(0, &named(name, version).encode_to_vec()));
        (got.code, got.message)
    };
    assert_eq!(refusal("x", ""), (5, "unknown model `x`, expected one of `demo`".into()));
    assert_eq!(refusal("demo", "4"), (5, "model `demo`: no version 4, the current one is 3".into()));
    assert_eq!(refusal("demo", "x"), (5, "model `demo`: version: expected a number, got `x`".into()));
    assert_eq!(infer(&[("elasticrec-variant", "z")], framed(0, &message)).code, 5);
}

#[test]
fn a_call_waits_until_its_deadline() {
    let server = start(ServerOptions::default());
    let (kept, keeps) = mpsc::channel();
    // Keep the requests unanswered.
    install(&server, 3, move |job: Job| kept.send(job).unwrap());
    let body = framed(0, &named("demo", "").encode_to_vec());
    let got = call(&server, &method("ModelInfer"), &[("grpc-timeout", "20m")], body.into());
    assert_eq!((got.code, got.message.as_str()), (4, "deadline: not scored within 20 ms"));
    drop(keeps);
}

#[test]
fn timeouts_are_read_in_all_units() {
    let read = |text: &str| parse_timeout(text.as_bytes());
    assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
    assert_eq!(read("3M"), Some(Duration::from_secs(180)));
    assert_eq!(read("99999999S"), Some(Duration::from_secs(99_999_999)));
    assert_eq!(read("5m"), Some(Duration::from_millis(5)));
    assert_eq!(read("7u"), Some(Duration::from_micros(7)));
    assert_eq!(read("9n"), Some(Duration::from_nanos(9)));
    for wrong in ["", "m", "5", "-5m", "5 m", "123456789m", "5s", "5µ"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
}

#[test]
fn every_refusal_has_a_code() {
    let code = |refusal: Refusal| Status::from(refusal).code();
    assert_eq!(code(Refusal::Bad("x".into())), Code::InvalidArgument);
    assert_eq!(code(Refusal::TooLarge("x".into())), Code::OutOfRange);
    assert_eq!(code(Refusal::Unknown("x".into())), Code::NotFound);
    assert_eq!(code(Refusal::Unavailable("x".into())), Code::Unavailable);
    assert_eq!(code(Refusal::Gone("x".into())), Code::Unavailable);
    assert_eq!(code(Refusal::QueueFull { queue: 1 }), Code::ResourceExhausted);
    assert_eq!(code(Refusal::DeadlineExceeded { after_ms: 1 }), Code::DeadlineExceeded);
    assert_eq!(code(Refusal::Internal("x".into())), Code::Internal);
}

#[test]
fn large_messages_share_the_memory_limit() {
    let server = start(ServerOptions { max_pending_bytes: 150_000, ..ServerOptions::default() });
    let (kept, keeps) = mpsc::channel();
    install(&server, 3, move |job: Job| kept.send(job).unwrap());
    // Field 15 does not exist and is ignored.
    let message = [&named("demo", "").encode_to_vec()[..], &[0x7a, 0xa0, 0x8d, 0x06], &[7; 100_000]].concat();
    let infer = |flag: u8, message: &[u8], headers: &[(&str, &str)]| {
        call(&server, &method("ModelInfer"), headers, framed(flag, message).into())
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| infer(0, &message, &[]));
        // The first request holds its memory while it waits for its score.
        let job: Job = keeps.recv_timeout(LONG).unwrap();
        assert_eq!(server.app.memory.used_bytes(), framed(0, &message).len());
        let got = infer(0, &message, &[]);
        assert_eq!((got.code, got.message.contains("use the limit of 150000 bytes")), (8, true), "{}", got.message);
        let gzipped = gzip(&message);
        assert_eq!(infer(1, &gzipped, &[("grpc-encoding", "gzip")]).code, 8);
        echo(job);
        assert_eq!(first.join().unwrap().code, 0);
    });
    assert_eq!(server.app.memory.used_bytes(), 0);
}

#[test]
fn arrived_bytes_of_a_message_count_and_probes_must_be_short() {
    let body_timeout = Duration::from_secs(2);
    let server = start(ServerOptions { body_timeout, ..ServerOptions::default() });
    let half = || Body::new(StalledBody(Some(vec![0; 100_000].into())));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&server, &method("ModelInfer"), &[], half()));
        let deadline = Instant::now() + LONG;
        while server.app.memory.used_bytes() != 100_000 {
            assert!(Instant::now() < deadline && !waiting.is_finished());
            std::thread::yield_now();
        }
        assert_eq!(waiting.join().unwrap().code, 4);
    });
    assert_eq!(server.app.memory.used_bytes(), 0);
    assert_eq!(call(&server, CHECK, &[], half()).code, 11);
    let bomb = framed(1, &gzip(&[0; 100_000]));
    let got = call(&server, CHECK, &[("grpc-encoding", "gzip")], bomb.into());
    assert_eq!((got.code, got.message.as_str()), (11, "message: expected at most 4096 bytes, got more"));
}

fn gzip(message: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    encoder.write_all(message).unwrap();
    encoder.finish().unwrap()
}

/// A body that stops after its first piece.
struct StalledBody(Option<Bytes>);

impl hyper::body::Body for StalledBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.take().map_or(Poll::Pending, |piece| Poll::Ready(Some(Ok(Frame::data(piece)))))
    }
}
