//! bRPC over real sockets: frames in, frames out. The tests replace the workers.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prost::Message;

use super::frame::{RpcMeta, RpcRequestMeta, encode};
use super::*;
use crate::protocols::http::testing::{LONG, connect, done, echo, install, install_gated, poll, start, start_echo};
use crate::queue::job::Job;
use crate::server::{DrainOutcome, ServerHandle, ServerOptions, Token};

fn meta(service: &str, method: &str, id: i64) -> RpcMeta {
    let request = RpcRequestMeta { service_name: service.into(), method_name: method.into(), ..Default::default() };
    RpcMeta { request: Some(request), correlation_id: Some(id), ..RpcMeta::default() }
}

fn infer(id: i64, message: &str) -> Bytes {
    encode(&meta("GeneralModelService", "inference", id), message.as_bytes())
}

/// The outcome of a call.
#[derive(Debug, PartialEq)]
struct CallResult {
    id: i64,
    code: i32,
    text: String,
    message: Vec<u8>,
}

impl CallResult {
    fn fault(id: i64, code: u16, text: &str) -> CallResult {
        CallResult { id, code: code.into(), text: text.into(), message: Vec::new() }
    }

    fn ok(id: i64, message: &str) -> CallResult {
        CallResult { id, code: 0, text: String::new(), message: message.into() }
    }
}

fn read_answer(stream: &mut TcpStream) -> (RpcMeta, Vec<u8>) {
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..4], MAGIC);
    let size = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()) as usize;
    let mut body = vec![0; size(4)];
    stream.read_exact(&mut body).unwrap();
    let message = body.split_off(size(8));
    (RpcMeta::decode(&body[..]).unwrap(), message)
}

fn read(stream: &mut TcpStream) -> CallResult {
    let (meta, message) = read_answer(stream);
    let response = meta.response.unwrap();
    let text = response.error_text.unwrap_or_default();
    CallResult { id: meta.correlation_id.unwrap(), code: response.error_code.unwrap(), text, message }
}

fn call(server: &ServerHandle, frame: &[u8]) -> CallResult {
    let mut stream = connect(server);
    stream.write_all(frame).unwrap();
    read(&mut stream)
}

fn assert_closed(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    // An error is a reset, because the server did not read all bytes.
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(rest, b"");
}

fn err_no_of(message: &[u8]) -> (i32, String, u64) {
    #[derive(Clone, PartialEq, Message)]
    struct Response {
        #[prost(uint64, tag = "4")]
        log_id: u64,
        #[prost(int32, tag = "5")]
        err_no: i32,
        #[prost(string, tag = "6")]
        err_msg: String,
    }
    let response = Response::decode(message).unwrap();
    (response.err_no, response.err_msg, response.log_id)
}

#[test]
fn calls_of_one_connection_are_answered_by_their_ids() {
    let server = start_echo(ServerOptions::default());
    let mut stream = connect(&server);
    let frames: Vec<u8> = (0..50).flat_map(|id| infer(id, &format!("m{id}"))).collect();
    stream.write_all(&frames).unwrap();
    let mut got: Vec<CallResult> = (0..50).map(|_| read(&mut stream)).collect();
    got.sort_by_key(|got| got.id);
    let expected: Vec<CallResult> = (0..50).map(|id| CallResult::ok(id, &format!("Paddle(Proto):m{id}"))).collect();
    assert_eq!(got, expected);
    // A client that has shut down its side still gets its answer.
    stream.write_all(&infer(-7, "last")).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read(&mut stream), CallResult::ok(-7, "Paddle(Proto):last"));
    assert_closed(&mut stream);
    assert!(server.app.metrics.encode().unwrap().contains("requests_total{protocol=\"brpc\",code=\"0\"} 51"));
}

#[test]
fn a_frame_in_pieces_arrives_whole_and_http_works_on_the_same_port() {
    let server = start_echo(ServerOptions::default());
    let mut stream = connect(&server);
    for piece in infer(1, "abc").chunks(3) {
        stream.write_all(piece).unwrap();
        stream.flush().unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(read(&mut stream), CallResult::ok(1, "Paddle(Proto):abc"));
    // A request of HTTP with the first byte of `PRPC`.
    let mut stream = connect(&server);
    stream.write_all(b"P").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    stream.write_all(b"UT /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 405"), "{text}");
}

#[test]
fn a_later_call_may_be_answered_first() {
    let server = start(ServerOptions::default());
    let (begun, go) = install_gated(&server);
    let mut stream = connect(&server);
    stream.write_all(&infer(1, "slow")).unwrap();
    begun.recv_timeout(LONG).unwrap();
    stream.write_all(&encode(&meta("Nobody", "x", 2), b"")).unwrap();
    assert_eq!((read(&mut stream).id, go.send(())), (2, Ok(())));
    assert_eq!(read(&mut stream), CallResult::ok(1, "Paddle(Proto):slow"));
}

#[test]
fn a_malformed_frame_closes_only_its_connection() {
    let server = start_echo(ServerOptions { max_body_bytes: 10, ..ServerOptions::default() });
    for bytes in [
        &b"PRPC\0\0\0\x01\0\0\0\x02"[..],
        b"PRPC\0\0\0\x01\0\0\0\x01\xff",
        b"PRPC\xff\xff\xff\xff\xff\xff\xff\xff",
        &encode(&RpcMeta::default(), b""),
        &encode(&RpcMeta { attachment_size: Some(9), ..meta("a", "b", 1) }, b""),
        &[&infer(1, "x")[..], b"GET / HTTP/1.1\r\n\r\n"].concat()[..5],
    ] {
        let mut stream = connect(&server);
        stream.write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_closed(&mut stream);
    }
    let mut stream = connect(&server);
    stream.write_all(&infer(8, "0123456789a")).unwrap();
    let long = CallResult::fault(8, 1003, "body: expected at most 10 bytes, got more");
    assert_eq!(read(&mut stream), long);
    assert_closed(&mut stream);
    // A frame that announces 4 GiB and sends none of them.
    let mut head = BytesMut::from(&infer(8, "")[..]);
    head[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(call(&server, &head), long);
    assert_eq!(call(&server, &infer(9, "0123456789")), CallResult::ok(9, "Paddle(Proto):0123456789"));
}

#[test]
fn unknown_services_and_failed_calls_have_their_codes() {
    let server = start(ServerOptions::default());
    let none = call(&server, &infer(1, "x"));
    assert_eq!(none, CallResult::fault(1, 2003, "model `demo`: no version is ready yet"));
    install(&server, 3, echo);
    let got = call(&server, &encode(&meta("GeneralModelService", "train", 2), b""));
    let text = "GeneralModelService: unknown method `train`, expected `inference` or `debug`";
    assert_eq!(got, CallResult::fault(2, 1002, text));
    let got = call(&server, &encode(&meta("Nobody", "x", 3), b""));
    assert_eq!((got.id, got.code), (3, 1001));
    assert!(got.text.starts_with("unknown service `Nobody`, expected `baidu.paddle_serving"), "{}", got.text);
    // Errors of the request or of the model are in the message.
    for (body, number) in [("bad", -5000), ("many", -5002), ("nan", -5100)] {
        let got = call(&server, &infer(4, body));
        assert_eq!((got.code, err_no_of(&got.message).0), (0, number));
    }
    let got = call(&server, &infer(4, "panic"));
    assert_eq!(err_no_of(&got.message).1, "scoring this request failed; this is a bug");
    let got = call(&server, &encode(&meta("DictService", "seek", 5), b"\xff"));
    assert_eq!((got.code, got.text.starts_with("body: ")), (1003, true));
    let got = call(&server, &encode(&meta("rec.mcube.DictService", "seek", 6), b""));
    assert_eq!(got, CallResult::fault(6, 2003, "model `demo`: has no rows"));
}

#[test]
fn messages_are_compressed_both_ways() {
    let server = start_echo(ServerOptions { max_body_bytes: 1000, ..ServerOptions::default() });
    for kind in [2, 3] {
        let with = RpcMeta { compress_type: Some(kind), ..meta("GeneralModelService", "debug", 1) };
        let packed = compress(kind, "x".repeat(1000));
        let mut stream = connect(&server);
        stream.write_all(&encode(&with, &packed)).unwrap();
        let (meta, message) = read_answer(&mut stream);
        assert_eq!(meta.compress_type, Some(kind));
        let message = inflate(kind, &message);
        assert_eq!(message, format!("Paddle(Proto):{}", "x".repeat(1000)));
        let bomb = compress(kind, "x".repeat(1001));
        let long = CallResult::fault(1, 1003, "body: expected at most 1000 bytes, got more");
        assert_eq!(call(&server, &encode(&with, &bomb)), long);
        assert_eq!(call(&server, &encode(&with, b"what?")).code, 1003);
    }
    let snappy = RpcMeta { compress_type: Some(1), ..meta("GeneralModelService", "debug", 1) };
    assert_eq!(call(&server, &encode(&snappy, b"x")).code, 1003);
}

#[test]
fn the_token_is_sent_once_per_connection() {
    let server = start_echo(ServerOptions { token: Some(Token("s3cret".into())), ..ServerOptions::default() });
    let with = |data: &'static [u8], id| {
        let authentication_data = Some(Bytes::from_static(data));
        encode(&RpcMeta { authentication_data, ..meta("GeneralModelService", "inference", id) }, b"x")
    };
    let mut stream = connect(&server);
    stream.write_all(&with(b"s3cret", 1)).unwrap();
    assert_eq!(read(&mut stream).code, 0);
    stream.write_all(&infer(2, "x")).unwrap();
    assert_eq!(read(&mut stream).code, 0);
    stream.write_all(&with(b"another", 3)).unwrap();
    let fault = |id| CallResult::fault(id, 1004, "authentication data: expected the token of this server");
    assert_eq!(read(&mut stream), fault(3));
    assert_closed(&mut stream);
    for (id, frame) in [(4, infer(4, "x")), (5, with(b"", 5)), (6, with(b"s3cre", 6)), (7, with(b"s3crets", 7))] {
        let mut stream = connect(&server);
        stream.write_all(&frame).unwrap();
        assert_eq!(read(&mut stream), fault(id));
        assert_closed(&mut stream);
    }
    assert!(server.app.metrics.encode().unwrap().contains("requests_total{protocol=\"brpc\",code=\"1004\"} 5"));
}

#[test]
fn a_full_queue_and_a_deadline_are_errors_of_the_protocol() {
    let server = start(ServerOptions { queue: 1, ..ServerOptions::default() });
    let (begun, go) = install_gated(&server);
    let mut stream = connect(&server);
    stream.write_all(&infer(1, "first")).unwrap();
    begun.recv_timeout(LONG).unwrap();
    stream.write_all(&infer(2, "second")).unwrap();
    let deployment = server.app.registry.deployments().next().unwrap();
    poll("the queue does not get its request", || deployment.queue.num_queued() == 1);
    stream.write_all(&infer(3, "third")).unwrap();
    assert_eq!(
        read(&mut stream),
        CallResult::fault(3, 2004, "the queue of 1 requests is full (`serve.queue`); retry later")
    );
    go.send(()).unwrap();
    assert_eq!(read(&mut stream).id, 1);
    begun.recv_timeout(LONG).unwrap();
    let mut short = meta("GeneralModelService", "inference", 4);
    short.request.as_mut().unwrap().timeout_ms = 20;
    stream.write_all(&encode(&short, b"fourth")).unwrap();
    let late = CallResult::fault(4, 1008, "deadline: not scored within 20 ms");
    assert_eq!(read(&mut stream), late);
    go.send(()).unwrap();
    assert_eq!(read(&mut stream).id, 2);
}

#[test]
fn an_incomplete_frame_times_out_but_an_idle_connection_does_not() {
    let timeout = Duration::from_millis(200);
    let server =
        start_echo(ServerOptions { body_timeout: timeout, header_timeout: timeout, ..ServerOptions::default() });
    let mut idle = connect(&server);
    idle.write_all(&infer(1, "x")).unwrap();
    assert_eq!(read(&mut idle).id, 1);
    for part in [2, 5, 20] {
        let mut slow = connect(&server);
        slow.write_all(&infer(2, "x")[..part]).unwrap();
        assert_closed(&mut slow);
    }
    idle.write_all(&infer(3, "x")).unwrap();
    assert_eq!(read(&mut idle).id, 3);
}

#[test]
fn stopping_answers_calls_in_flight_and_closes_idle_connections() {
    let server = Arc::new(start(ServerOptions::default()));
    let (begun, go) = install_gated(&server);
    let mut idle = connect(&server);
    idle.write_all(&encode(&meta("Nobody", "x", 1), b"")).unwrap();
    assert_eq!(read(&mut idle).id, 1);
    let mut busy = connect(&server);
    busy.write_all(&infer(2, "busy")).unwrap();
    begun.recv_timeout(LONG).unwrap();
    let stopping = {
        let server = server.clone();
        std::thread::spawn(move || server.stop(LONG))
    };
    assert_closed(&mut idle);
    assert_eq!(server.wait(Some(Duration::ZERO)), None);
    go.send(()).unwrap();
    assert_eq!(read(&mut busy), CallResult::ok(2, "Paddle(Proto):busy"));
    assert_closed(&mut busy);
    assert_eq!(stopping.join().unwrap(), DrainOutcome(true));
}

/// The server stops reading from a client that does not read its answers, so far fewer calls start than it sends.
#[test]
fn a_client_that_reads_no_answers_is_not_read_from() {
    const ANSWER_BYTES: usize = 64 << 10;
    const SENT: i64 = 20_000;
    let timeout = Duration::from_secs(5);
    let server = start(ServerOptions { body_timeout: timeout, queue: 1 << 16, ..ServerOptions::default() });
    install(&server, 3, |job: Job| {
        let _ = job.answer.send(Ok(done("x".repeat(ANSWER_BYTES))));
    });
    let mut stream = connect(&server);
    stream.set_write_timeout(Some(LONG)).unwrap();
    let frame = infer(1, &"y".repeat(1000));
    // Ends when the server disconnects.
    let sent = (0..SENT).take_while(|_| stream.write_all(&frame).is_ok()).count();
    assert!(sent < SENT as usize, "the server read everything");
    let text = server.app.metrics.encode().unwrap();
    let line = "requests_total{protocol=\"brpc\",code=\"0\"} ";
    let answered: usize = text.split(line).nth(1).unwrap().lines().next().unwrap().parse().unwrap();
    // The budget and the socket buffers bound the number of answers.
    assert!(answered < 3000, "{answered}");
    assert_eq!(call(&server, &infer(2, "z")).message.len(), ANSWER_BYTES);
}

#[test]
fn every_refusal_has_a_code() {
    let code = |refusal: Refusal| Fault::from(refusal).code;
    assert_eq!(code(Refusal::Bad("x".into())), 1003);
    assert_eq!(code(Refusal::TooLarge("x".into())), 1003);
    assert_eq!(code(Refusal::Unknown("x".into())), 1001);
    assert_eq!(code(Refusal::Unavailable("x".into())), 2003);
    assert_eq!(code(Refusal::Gone("x".into())), 2003);
    assert_eq!(code(Refusal::QueueFull { queue: 1 }), 2004);
    assert_eq!(code(Refusal::DeadlineExceeded { after_ms: 1 }), 1008);
    assert_eq!(code(Refusal::Internal("x".into())), 2001);
}

#[test]
fn large_messages_share_the_memory_limit() {
    let server = start_echo(ServerOptions { max_pending_bytes: 150_000, ..ServerOptions::default() });
    let large = "x".repeat(100_000);
    let mut taken = server.app.memory.reservation();
    taken.grow_to(100_000).unwrap();
    let got = call(&server, &infer(7, &large));
    assert_eq!((got.id, got.code), (7, code::LIMIT.into()));
    assert!(got.text.contains("use the limit of 150000 bytes"), "{}", got.text);
    let mut packed = meta("GeneralModelService", "inference", 8);
    packed.compress_type = Some(2);
    let bomb = compress(2, large.clone());
    assert_eq!(call(&server, &encode(&packed, &bomb)).code, i32::from(code::LIMIT));
    assert_eq!(call(&server, &infer(9, "small")), CallResult::ok(9, "Paddle(Proto):small"));
    // The frame arrives in one piece, and its answer would be short.
    install(&server, 4, |job: Job| {
        let _ = job.answer.send(Ok(done("x".into())));
    });
    taken.grow_to(130_000).unwrap();
    assert_eq!(call(&server, &infer(11, &large[..30_000])).code, i32::from(code::LIMIT));
    drop(taken);
    assert_eq!(call(&server, &infer(10, &large)).code, 0);
    poll("memory is not released", || server.app.memory.used_bytes() == 0);
}

#[test]
fn messages_count_while_they_arrive_and_while_they_are_scored() {
    let server = start(ServerOptions::default());
    let (begun, go) = install_gated(&server);
    let frame = infer(7, &"x".repeat(100_000));
    let mut stream = connect(&server);
    stream.write_all(&frame[..frame.len() - 1]).unwrap();
    poll("arrived bytes do not count", || server.app.memory.used_bytes() == frame.len() - 1);
    stream.write_all(&frame[frame.len() - 1..]).unwrap();
    begun.recv_timeout(LONG).unwrap();
    assert!((100_000..frame.len() + 100_000).contains(&server.app.memory.used_bytes()));
    go.send(()).unwrap();
    assert_eq!(read(&mut stream).code, 0);
    poll("memory is not released", || server.app.memory.used_bytes() == 0);
}

#[test]
fn unauthenticated_clients_get_no_memory() {
    let server = start(ServerOptions { token: Some(Token("s3cret".into())), ..ServerOptions::default() });
    let frame = infer(7, &"x".repeat(100_000));
    let mut stream = connect(&server);
    stream.write_all(&frame[..50_000]).unwrap();
    assert_eq!(read(&mut stream).code, i32::from(code::UNAUTHORIZED));
    assert_eq!(server.app.memory.used_bytes(), 0);
}

fn compress(kind: i32, text: String) -> Bytes {
    let compression = compression_of(kind).unwrap().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(compression.compress(text.into())).unwrap()
}

fn inflate(kind: i32, message: &[u8]) -> Bytes {
    let compression = compression_of(kind).unwrap().unwrap();
    compression.inflate_blocking(message, 2000, Memory::new(0).reservation()).unwrap()
}
