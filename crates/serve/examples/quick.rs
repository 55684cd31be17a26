#![allow(missing_docs, clippy::unwrap_used, dead_code)]
#[path = "../tests/serving/support/mod.rs"]
mod support;
use elasticrec_cube::Column;
use elasticrec_serve::*;
use serde_json::json;
use std::time::Instant;
fn main() {
    let library = support::ort_library().unwrap();
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("load") {
        let n: usize = args[3].parse().unwrap();
        let conns: usize = args[4].parse().unwrap();
        let ct = args[5].as_str();
        let mut x = 88172645463325252u64;
        let mut rnd = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        let bodies: Vec<Vec<u8>> = (0..200)
            .map(|_| {
                if ct == "text/plain" {
                    (0..n)
                        .map(|_| {
                            let s: Vec<String> = (0..26).map(|s| format!("{}:{s}", 1 + rnd() % 1_100_000)).collect();
                            format!("1 0 {}\n", s.join(" "))
                        })
                        .collect::<String>()
                        .into_bytes()
                } else {
                    let i: Vec<String> = (0..n)
                        .map(|_| {
                            let s: Vec<String> =
                                (0..26).map(|s| format!("\"{s}\":{}", 1 + rnd() % 1_100_000)).collect();
                            format!("{{{}}}", s.join(","))
                        })
                        .collect();
                    format!("{{\"instances\":[{}]}}", i.join(",")).into_bytes()
                }
            })
            .collect();
        let load = Load {
            addr: args[2].parse().unwrap(),
            path: "/v1/models/demo:predict".into(),
            content_type: ct.into(),
            token: None,
            bodies,
            connections: conns,
            seconds: 4.0,
        };
        let r = load::run(&load).unwrap();
        println!(
            "{ct} n={n} conns={conns}: rps {:.0} instances/s {:.0} failures {} p50 {:.0}us p99 {:.0}us",
            r.requests as f64 / r.seconds,
            r.requests as f64 * n as f64 / r.seconds,
            r.failures,
            r.p50_us,
            r.p99_us
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let slots: Vec<_> = (0..26).map(|i| json!({"name": i.to_string(), "pooling": "sum"})).collect();
    let layers = vec![400, 400, 400, 1];
    let mut last = 260;
    let mut num = 0;
    for &l in &layers {
        num += (last + 1) * l;
        last = l;
    }
    let model = support::TestModel {
        version: 1,
        features: json!({"format": "slots", "hash": 1, "slots": slots, "dense": [], "labels": ["click"]}),
        columns: vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: 9 }],
        rows: (1..=1_000_000u64).map(|s| (s, vec![0.01 * (s % 7) as f32; 10])).collect(),
        layers,
        dense: (0..num).map(|i| ((i * 7919) % 1000) as f32 / 10000.0 - 0.05).collect(),
    };
    model.write(dir.path());
    let t = Instant::now();
    init_onnxruntime(&library).unwrap();
    let m = Model::load(dir.path()).unwrap();
    println!("load {:?}", t.elapsed());
    let t = Instant::now();
    let server = Server::start(ServerOptions {
        workers: args.get(1).map_or(1, |a| a.parse().unwrap()),
        io_threads: 1,
        ..Default::default()
    })
    .unwrap();
    server.install(&m).unwrap();
    println!("install {:?}", t.elapsed());
    for (batch, threads) in [(1, 1), (128, 1), (128, 2)] {
        println!(
            "engine {batch}x{threads}: {:.0}/s",
            engine_rate(dir.path(), &library, EngineRate { batch, seconds: 2.0, threads }).unwrap()
        );
    }
    if std::env::var_os("ENGINE").is_some() { return; }
    for (n, conns, ct) in [
        ("1", "1", "application/json"),
        ("1", "16", "application/json"),
        ("1", "16", "text/plain"),
        ("128", "4", "application/json"),
        ("128", "4", "text/plain"),
    ] {
        let s = std::process::Command::new(&args[0])
            .args(["load", &server.addr().to_string(), n, conns, ct])
            .status()
            .unwrap();
        assert!(s.success());
    }
    let mut s = std::net::TcpStream::connect(server.addr()).unwrap();
    use std::io::{Read, Write};
    write!(s, "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut t = String::new();
    s.read_to_string(&mut t).unwrap();
    for l in t.lines().filter(|l| l.contains("_sum") || l.contains("_count") || l.contains("_total")) {
        println!("{l}");
    }
}
