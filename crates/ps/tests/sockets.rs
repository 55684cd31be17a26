//! Servers and clients over real sockets.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_ps::client::{Credentials, Dealt, Learned};
use elasticrec_ps::{Client, ClientError, DenseOptimizer, Files, Identity, Server, Shard, ShardSpec};
use elasticrec_table::TableSpec;
use elasticrec_wire::frame::{Body, Header, Kind, read_frame, write_frame};
use elasticrec_wire::{Hello, Refusal, Refused};

const PARTITIONS: u32 = 8;
const NUM_DENSE: usize = 21;
const LEASE: Duration = Duration::from_secs(60);

fn shard(owned: std::ops::Range<u32>) -> Shard {
    let table = r#"{"name":"main","seed":7,"partitions":8,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
        "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
    let dense = DenseOptimizer::Sgd { learning_rate: 0.125 };
    let table = TableSpec::from_json(table).unwrap();
    Shard::new(ShardSpec { table, num_dense: NUM_DENSE, dense, num_sums: 2, owned }, 1).unwrap()
}

fn start(owned: std::ops::Range<u32>, incarnation: u64) -> Server {
    let identity = Identity { run: b"run".to_vec(), token: b"secret".to_vec(), incarnation, epoch: 1 };
    let server = Server::start(shard(owned), identity, "127.0.0.1:0").unwrap();
    server.extend_lease(Instant::now(), LEASE);
    server
}

fn credentials(token: &str) -> Credentials {
    Credentials { run: b"run".to_vec(), token: token.into() }
}

fn connect(servers: &[&Server]) -> Client {
    let addresses: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
    Client::connect(&addresses, &credentials("secret"), PARTITIONS, Duration::from_secs(10)).unwrap()
}

fn signs_of(batch: u32) -> Vec<u64> {
    (0..100).map(|at| (u64::from(batch) * 37 + at).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// Pulls, then pushes a gradient of ones; returns the rows and the dense values that were pulled.
fn step(client: &Client, unit: u64, batch: u32, is_last: bool) -> Result<(Vec<f32>, Vec<f32>), ClientError> {
    let signs = signs_of(batch);
    let mut dealt = Dealt::default();
    client.deal(&signs, &mut dealt);
    let (mut rows, mut dense) = (vec![9.0; 200], vec![9.0; NUM_DENSE]);
    client.receive(&client.pull(&dealt, true)?, &dealt, &mut rows, Some(&mut dense))?;
    let learned = Learned {
        unit,
        batch,
        is_last,
        checksum: 1,
        num_samples: 4,
        seen: 0,
        counts: &[(1, 0); 100],
        gradients: &[1.0; 200],
        dense: &[1.0; NUM_DENSE],
        sum_places: &[1],
        sum_values: &[0.5],
    };
    client.acknowledged(&client.push(&dealt, &learned)?)?;
    Ok((rows, dense))
}

fn reason(error: &ClientError) -> Refusal {
    match error {
        ClientError::Refused { refused: Refused { reason, .. }, .. } => *reason,
        other => panic!("expected a refusal, got {other}"),
    }
}

#[test]
fn what_was_pushed_to_several_shards_is_pulled_from_them() {
    let servers = [start(0..3, 1), start(3..4, 2), start(4..8, 3)];
    let client = connect(&servers.iter().collect::<Vec<_>>());
    assert_eq!((client.width(), client.num_dense(), client.incarnations()), (2, NUM_DENSE, vec![1, 2, 3]));
    let (rows, dense) = step(&client, 0, 0, false).unwrap();
    assert_eq!((rows, dense), (vec![0.0; 200], vec![0.0; NUM_DENSE]));
    let (rows, dense) = step(&client, 1, 0, true).unwrap();
    let spec = shard(0..8).spec().table.clone();
    for (sign, row) in signs_of(0).into_iter().zip(rows.chunks(2)) {
        let mut expected = [0.0; 2];
        spec.init(sign, &mut expected);
        assert_eq!(row, expected.map(|value| value - 0.125));
    }
    assert_eq!(dense, vec![-0.125; NUM_DENSE]);
    assert_eq!(servers[0].sums(), (vec![0.0, 1.0], vec![0.0; 2]));
    assert!(servers[1].sums().0.is_empty());
    let rows: usize = servers.iter().map(|server| server.status().num_rows).sum();
    assert_eq!(rows, 100);
}

#[test]
fn trainers_push_side_by_side_and_every_push_counts_once() {
    let servers = [start(0..4, 1), start(4..8, 2)];
    thread::scope(|scope| {
        for unit in 0..4u64 {
            let servers = &servers;
            scope.spawn(move || {
                let client = connect(&servers.iter().collect::<Vec<_>>());
                for batch in 0..25 {
                    step(&client, unit, batch, batch == 24).unwrap();
                    // a repeat is known
                    step(&client, unit, batch, batch == 24).unwrap();
                }
            });
        }
    });
    for server in &servers {
        let status = server.status();
        assert_eq!((status.applied, status.repeated, status.records.len()), (100, 100, 1));
        assert_eq!(status.records[0].1.watermark(), 4);
        assert!(server.read(|shard| shard.samples().iter().all(|samples| *samples == 400)));
        let applied = server.read(|shard| shard.dense().to_vec());
        assert!(applied.iter().all(|value| (value + 12.5).abs() < 1e-4));
    }
    assert_eq!(servers[0].sums().0, [0.0, 50.0]);
}

#[test]
fn a_snapshot_is_cut_while_pushes_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files { rows: dir.path().join("rows"), dense: dir.path().join("dense") };
    let server = start(0..8, 1);
    let client = connect(&[&server]);
    thread::scope(|scope| {
        let pushing = scope.spawn(|| (0..300).for_each(|batch| drop(step(&client, 0, batch, false).unwrap())));
        server.snapshot(&files).unwrap();
        pushing.join().unwrap();
    });
    let mut again = shard(0..8);
    again.load(&[files]).unwrap();
    let identity = Identity { run: b"run".to_vec(), token: b"secret".to_vec(), incarnation: 2, epoch: 1 };
    let again = Server::start(again, identity, "127.0.0.1:0").unwrap();
    again.extend_lease(Instant::now(), LEASE);
    let replaying = connect(&[&again]);
    (0..300).for_each(|batch| drop(step(&replaying, 0, batch, batch == 299).unwrap()));
    step(&client, 0, 299, true).unwrap();
    for batch in 0..300 {
        for sign in signs_of(batch) {
            assert_eq!(server.read(|shard| shard.table().get(sign)), again.read(|shard| shard.table().get(sign)));
        }
    }
    assert_eq!(server.sums(), again.sums());
    assert_eq!(server.read(|shard| shard.samples().to_vec()), again.read(|shard| shard.samples().to_vec()));
}

#[test]
fn a_server_without_a_lease_does_nothing() {
    let server = start(0..8, 1);
    let client = connect(&[&server]);
    server.end_lease();
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Refusal::Fenced);
    server.extend_lease(Instant::now(), Duration::from_millis(1));
    thread::sleep(Duration::from_millis(5));
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Refusal::Fenced);
    // an answer that came late extends nothing
    server.extend_lease(Instant::now() - Duration::from_secs(2), Duration::from_secs(1));
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Refusal::Fenced);
    assert_eq!(server.status().num_rows, 0);
    server.extend_lease(Instant::now(), LEASE);
    step(&client, 0, 0, true).unwrap();
}

#[test]
fn strangers_are_refused() {
    let server = start(0..8, 1);
    let address = [server.address().to_string()];
    let wrong = |credentials: &Credentials| {
        Client::connect(&address, credentials, PARTITIONS, Duration::from_secs(5)).unwrap_err()
    };
    let error = wrong(&credentials("guess"));
    assert_eq!(reason(&error), Refusal::Unauthorized);
    assert!(error.to_string().ends_with("expected the token of the run, got another one"), "{error}");
    let other = Credentials { run: b"other".to_vec(), ..credentials("secret") };
    assert_eq!(reason(&wrong(&other)), Refusal::Unauthorized);
    let error = Client::connect(&address, &credentials("secret"), 16, Duration::from_secs(5)).unwrap_err();
    assert_eq!(error.to_string(), "ps shards: expected 16 partitions, rows of one width and one epoch, got 8");
    let error = Client::connect(&["127.0.0.1:1".into()], &credentials(""), 8, Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().starts_with("ps shard 0 at 127.0.0.1:1: "), "{error}");
}

#[test]
fn hostile_bytes_end_their_connection_alone() {
    let server = start(0..8, 1);
    let client = connect(&[&server]);
    let hello = Hello { run: b"run", token: b"secret" };
    let mut greeting = Vec::new();
    write_frame(&mut greeting, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices()).unwrap();
    let mut pull = Vec::new();
    write_frame(&mut pull, Header { kind: Kind::Pull, id: 1 }, &[&[255; 64]]).unwrap();
    let mut damaged = pull.clone();
    damaged[40] ^= 1;
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"[..],
        &[&greeting[..], &pull].concat(),
        &[&greeting[..], &damaged].concat(),
    ] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let mut rest = answer.as_slice();
        let mut body = Body::default();
        let mut last = None;
        while let Ok(header) = read_frame(&mut rest, 1 << 20, &mut body) {
            last = Some((header.kind, Refused::decode(body.bytes()).map(|refused| refused.reason)));
        }
        assert_eq!(last, Some((Kind::Refused, Ok(Refusal::Malformed))));
    }
    // cut in the middle of a frame
    TcpStream::connect(server.address()).unwrap().write_all(&greeting[..20]).unwrap();
    step(&client, 0, 0, true).unwrap();
}

#[test]
fn connections_that_ended_leave_nothing_open() {
    let open = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let server = start(0..8, 1);
    step(&connect(&[&server]), 0, 0, false).unwrap();
    let before = open();
    for batch in 1..60 {
        step(&connect(&[&server]), 0, batch, false).unwrap();
    }
    // other tests of this process come and go; sixty connections would be two or three hundred
    let deadline = Instant::now() + Duration::from_secs(20);
    while open() > before + 50 {
        assert!(Instant::now() < deadline, "{} descriptors are open, {before} before", open());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_that_stops_is_lost_and_its_successor_is_not_taken_for_it() {
    let mut server = start(0..8, 1);
    let address = server.address().to_string();
    let client = connect(&[&server]);
    step(&client, 0, 0, false).unwrap();
    server.stop();
    let error = step(&client, 0, 1, true).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    let identity = Identity { run: b"run".to_vec(), token: b"secret".to_vec(), incarnation: 2, epoch: 2 };
    let deadline = Instant::now() + Duration::from_secs(10);
    let successor = loop {
        match Server::start(shard(0..8), identity.clone(), &address) {
            Ok(server) => break server,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    successor.extend_lease(Instant::now(), LEASE);
    assert!(step(&client, 0, 1, true).is_err(), "a connection belongs to one start of a server");
    step(&connect(&[&successor]), 0, 1, true).unwrap();
}
