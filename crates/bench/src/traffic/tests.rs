//! Traffic to servers that stall, refuse, disconnect and stay silent.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::Notify;

use super::*;

/// What a test server does with a request.
enum Reply {
    Status(u16),
    /// Answer with `connection: close` and close.
    Close,
    /// Answer without `connection: close` and close.
    CloseQuietly,
    /// Close without an answer.
    Break,
    /// Neither answer nor close.
    Silence,
}

/// Starts a server whose replies depend on the body and on the number of earlier requests.
fn server(reply: impl Fn(&[u8], usize) -> Reply + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let shared = Arc::new((reply, AtomicUsize::new(0)));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let shared = shared.clone();
            thread::spawn(move || answer_all(stream.unwrap(), &shared.0, &shared.1));
        }
    });
    address
}

fn answer_all(stream: TcpStream, reply: &dyn Fn(&[u8], usize) -> Reply, count: &AtomicUsize) {
    stream.set_nodelay(true).unwrap();
    let mut input = BufReader::new(stream.try_clone().unwrap());
    let mut output = stream;
    while let Some(body) = read_request(&mut input) {
        let answer = |status, more| format!("HTTP/1.1 {status} Said\r\ncontent-length: 2\r\n{more}\r\nok");
        let (text, is_last) = match reply(&body, count.fetch_add(1, Ordering::Relaxed)) {
            Reply::Status(status) => (answer(status, ""), false),
            Reply::Close => (answer(200, "connection: close\r\n"), true),
            Reply::CloseQuietly => (answer(200, ""), true),
            Reply::Break => (String::new(), true),
            Reply::Silence => (String::new(), false),
        };
        if output.write_all(text.as_bytes()).is_err() || is_last {
            return;
        }
    }
}

fn read_request(input: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if input.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            let mut body = vec![0; length];
            input.read_exact(&mut body).ok()?;
            return Some(body);
        }
    }
}

fn traffic_to(address: String) -> Traffic {
    Traffic {
        address,
        protocol: Protocol::Http1 { content_type: "text/plain".into() },
        path: "/v1/models/demo:predict".into(),
        headers: Vec::new(),
        bodies: vec![b"x".to_vec()],
        connections: 4,
        pace: Pace::Closed,
        length: Duration::from_millis(300),
        timeout: Duration::from_secs(30),
    }
}

fn open(rate: f64) -> Pace {
    Pace::Open { rate, arrivals: Arrivals::Even }
}

fn run_quietly(traffic: &Traffic) -> TrafficReport {
    let report = run(traffic, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(report.offered, report.answered + report.failed() + report.unsent);
    report
}

#[test]
fn answers_and_failures_are_counted_by_status() {
    let address = server(|body, _| Reply::Status(if body == b"x" { 200 } else { 429 }));
    for connections in [1, 4] {
        let traffic =
            Traffic { bodies: vec![b"x".to_vec(), b"bad".to_vec()], connections, ..traffic_to(address.clone()) };
        let report = run_quietly(&traffic);
        let [(Failure::Status(429), failed)] = report.failures[..] else { panic!("{report:?}") };
        assert!(report.answered > 0 && report.answered.abs_diff(failed) <= 1 + connections as u64, "{report:?}");
        let Latency { p50_us, p90_us, p99_us, p999_us, max_us } = report.latency;
        assert!(p50_us > 0.0 && [p50_us, p90_us, p99_us, p999_us, max_us].is_sorted(), "{report:?}");
        assert_eq!((report.late, report.unsent, report.lag_p99_us), (0, 0, 0.0));
    }
}

#[test]
fn each_connection_starts_at_another_body_and_bodies_are_sent_in_turn() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let address = server(move |body, _| {
        noted.lock().unwrap().push(body[0]);
        // Silence, so that each connection sends only its first request.
        Reply::Silence
    });
    let bodies = (0..200).map(|number| vec![number]).collect();
    let traffic = Traffic { bodies, connections: 100, timeout: Duration::from_millis(500), ..traffic_to(address) };
    let report = run_quietly(&traffic);
    assert_eq!(report.failures, [(Failure::Timeout, 100)]);
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, (0..200).step_by(2).collect::<Vec<u8>>());
}

#[test]
fn requests_due_while_the_server_stalls_count_their_waiting_time() {
    const STALL: Duration = Duration::from_millis(200);
    let gate = Mutex::new(());
    let address = server(move |_, number| {
        let _gate = gate.lock().unwrap();
        if number == 300 {
            thread::sleep(STALL);
        }
        Reply::Status(200)
    });
    let traffic = Traffic { pace: open(1000.0), length: Duration::from_secs(1), ..traffic_to(address) };
    let report = run_quietly(&traffic);
    assert_eq!((report.offered, report.failed()), (1000, 0), "{report:?}");
    // Four requests wait for their answers, the two hundred that are due meanwhile for a connection.
    assert!(report.late > 150, "{report:?}");
    assert!(
        report.latency.p90_us > 50e3 && report.latency.p99_us > 150e3 && report.latency.max_us > 199e3,
        "{report:?}"
    );
}

#[test]
fn requests_without_a_connection_until_the_end_are_unsent() {
    let address = server(|_, _| {
        thread::sleep(Duration::from_millis(20));
        Reply::Status(200)
    });
    let report = run_quietly(&Traffic { pace: open(1000.0), connections: 2, ..traffic_to(address) });
    assert_eq!(report.offered, 300);
    assert!(report.answered <= 32 && report.unsent >= 268, "{report:?}");
    assert!(report.late > 0 && report.late < report.answered, "{report:?}");
}

#[test]
fn random_arrivals_are_all_sent() {
    let arrivals = Arrivals::Poisson { seed: 1 };
    let traffic = traffic_to(server(|_, _| Reply::Status(200)));
    let report = run_quietly(&Traffic { pace: Pace::Open { rate: 1000.0, arrivals }, ..traffic.clone() });
    let expected = DueTimes::new(1000.0, arrivals, traffic.length).count() as u64;
    assert_eq!(report.offered, expected);
    assert!(report.failures.is_empty(), "{report:?}");
}

#[test]
fn broken_connections_are_counted_and_reopened() {
    let address = server(|_, number| if number % 3 == 2 { Reply::Break } else { Reply::Status(200) });
    let report = run_quietly(&traffic_to(address));
    let [(Failure::Broken, broken)] = report.failures[..] else { panic!("{report:?}") };
    assert!(broken > 1 && report.answered > broken, "{report:?}");
}

#[test]
fn connections_closed_between_requests_are_reopened_without_a_failure() {
    let report = run_quietly(&traffic_to(server(|_, _| Reply::Close)));
    assert!(report.answered > 4 && report.failures.is_empty(), "{report:?}");
    let traffic = Traffic { pace: open(20.0), connections: 2, ..traffic_to(server(|_, _| Reply::CloseQuietly)) };
    let report = run_quietly(&traffic);
    assert!(report.answered > 2 && report.failures.is_empty(), "{report:?}");
}

#[test]
fn a_timeout_is_a_failure_and_the_next_request_uses_a_new_connection() {
    const HALF: Duration = Duration::from_millis(500);
    let address = server(|_, number| if number == 1 { Reply::Silence } else { Reply::Status(200) });
    let traffic = Traffic { connections: 1, timeout: HALF, length: 2 * HALF, ..traffic_to(address) };
    let report = run_quietly(&traffic);
    assert_eq!(report.failures, [(Failure::Timeout, 1)]);
    assert!(report.answered > 1, "{report:?}");
}

#[test]
fn requests_larger_than_a_socket_buffer_are_sent() {
    let address = server(|body, _| Reply::Status(if body.len() == 20 << 20 { 200 } else { 400 }));
    let traffic = Traffic { bodies: vec![vec![7; 20 << 20]], connections: 2, ..traffic_to(address) };
    let report = run_quietly(&traffic);
    assert!(report.answered > 1 && report.failures.is_empty(), "{report:?}");
}

#[test]
fn the_progress_callback_may_stop_the_traffic() {
    let traffic = Traffic { length: Duration::from_secs(600), ..traffic_to(server(|_, _| Reply::Status(200))) };
    let mut reports = Vec::new();
    let report = run(&traffic, |progress| {
        reports.push(progress);
        ControlFlow::Break(())
    });
    assert!(reports[0].answered > 0 && reports[0].failed == 0);
    assert!(report.unwrap().seconds < 60.0);
}

#[test]
fn invalid_traffic_is_refused_with_a_reason() {
    let refused = |traffic: Traffic| run(&traffic, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    drop(taken);
    let traffic = traffic_to(address.clone());
    assert!(refused(traffic.clone()).starts_with(&format!("bench: {address}: Connection refused")));
    assert!(refused(Traffic { address: "nowhere".into(), ..traffic.clone() }).starts_with("bench: nowhere: "));
    assert_eq!(refused(Traffic { bodies: vec![], ..traffic.clone() }), "bench: bodies: expected at least 1, got 0");
    let numbers = "bench: rate: expected more than 0 and at most 1e7, got NaN";
    assert_eq!(refused(Traffic { pace: open(f64::NAN), ..traffic.clone() }), numbers);
    assert_eq!(
        refused(Traffic { connections: 0, ..traffic.clone() }),
        "bench: connections: expected at least 1, got 0"
    );
    assert!(refused(Traffic { length: Duration::ZERO, ..traffic }).starts_with("bench: seconds: "));
    let traffic = traffic_to(server(|_, _| Reply::Status(200)));
    for headers in [vec![("a".into(), "b\r\nc: d".into())], vec![("ä".into(), String::new())]] {
        for protocol in [Protocol::Grpc, traffic.protocol.clone()] {
            let traffic = Traffic { headers: headers.clone(), protocol, ..traffic.clone() };
            assert!(refused(traffic).ends_with("`: cannot be sent in a request"));
        }
    }
}

/// Starts a gRPC server that does what the message says.
fn grpc_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = async {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let stream = TokioIo::new(listener.accept().await.unwrap().0);
            let disconnect = Arc::new(Notify::new());
            let answer = {
                let disconnect = disconnect.clone();
                move |request| grpc_answer(request, disconnect.clone())
            };
            let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let connection = builder.serve_connection(stream, service_fn(answer));
            tokio::spawn(async move {
                tokio::select! {
                    _ = connection => (),
                    () = disconnect.notified() => (),
                }
            });
        }
    };
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(serve);
    });
    address
}

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

async fn grpc_answer(request: Request<Incoming>, disconnect: Arc<Notify>) -> Result<Answer, Infallible> {
    let (head, body) = request.into_parts();
    let message = body.collect().await.unwrap().to_bytes();
    assert_eq!((head.method.as_str(), head.uri.path()), ("POST", "/test.Service/Call"));
    assert_eq!(
        (&head.headers["content-type"], &head.headers["te"]),
        (&"application/grpc".parse().unwrap(), &"trailers".parse().unwrap())
    );
    assert_eq!(head.headers["authorization"], "Bearer secret");
    assert_eq!(message[..5], [0, 0, 0, 0, message.len() as u8 - 5]);
    let trailers = |status: u32| {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from(status));
        trailers
    };
    let answer = |trailers: Option<HeaderMap>| {
        let body = Full::new(Bytes::from_static(b"\0\0\0\0\x02ok"));
        Response::new(body.with_trailers(async move { trailers.map(Ok) }).boxed_unsync())
    };
    Ok(match &message[5..] {
        b"busy at once" => {
            let mut response = Response::new(Full::default().boxed_unsync());
            *response.headers_mut() = trailers(8);
            response
        }
        b"busy" => answer(Some(trailers(8))),
        b"without" => answer(None),
        b"gone" => {
            let mut response = Response::new(Full::default().boxed_unsync());
            *response.status_mut() = hyper::StatusCode::SERVICE_UNAVAILABLE;
            response
        }
        b"break" => {
            disconnect.notify_one();
            std::future::pending().await
        }
        _ => answer(Some(trailers(0))),
    })
}

fn calls_to(address: String, messages: &[&str]) -> Traffic {
    Traffic {
        protocol: Protocol::Grpc,
        path: "/test.Service/Call".into(),
        headers: vec![("authorization".into(), "Bearer secret".into())],
        bodies: messages.iter().map(|message| message.as_bytes().to_vec()).collect(),
        ..traffic_to(address)
    }
}

#[test]
fn calls_are_counted_by_their_grpc_status_in_headers_or_trailers() {
    let messages = ["fine", "busy at once", "busy", "without", "gone"];
    let traffic = Traffic { connections: 1, pace: open(100.0), ..calls_to(grpc_server(), &messages) };
    let report = run_quietly(&traffic);
    let sent = report.offered - report.unsent;
    let num_of = |message: u64| (sent + 4 - message) / 5;
    assert!(sent >= 5 && report.answered == num_of(0), "{report:?}");
    let busy = (Failure::Grpc(8), num_of(1) + num_of(2));
    assert_eq!(report.failures, [(Failure::Status(503), num_of(4)), (Failure::Grpc(2), num_of(3)), busy]);
    let names: Vec<String> = report.failures.iter().map(|(failure, _)| failure.to_string()).collect();
    assert_eq!(names, ["status 503", "grpc-status 2", "grpc-status 8"]);
}

#[test]
fn calls_run_in_a_closed_loop_over_many_connections() {
    let report = run_quietly(&Traffic { connections: 16, ..calls_to(grpc_server(), &["fine", "too"]) });
    assert!(report.answered > 16 && report.failures.is_empty(), "{report:?}");
}

#[test]
fn calls_on_broken_connections_are_counted_and_the_connections_reopened() {
    let traffic = Traffic { connections: 2, pace: open(100.0), ..calls_to(grpc_server(), &["fine", "break"]) };
    let report = run_quietly(&traffic);
    let [(Failure::Broken, broken)] = report.failures[..] else { panic!("{report:?}") };
    assert!(broken > 1 && report.answered > 1 && report.answered.abs_diff(broken) <= 2, "{report:?}");
}
