//! Servers and clients over real sockets.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_ps::client::{BatchUpdate, Credentials, PullOptions, ShardSplit};
use elasticrec_ps::{Client, ClientError, DenseOptimizer, Identity, Server, Shard, ShardSpec, SnapshotFiles};
use elasticrec_table::{FullRows, TableSpec};
use elasticrec_wire::frame::{Body, Header, Kind, read_frame, write_frame};
use elasticrec_wire::{Group, Hello, PushHeader, Reason, Refusal};

const PARTITIONS: u32 = 8;
const NUM_DENSE: usize = 21;
const LEASE: Duration = Duration::from_secs(600);
/// Long enough for a slow machine; only failing tests wait this long.
const LONG: Duration = Duration::from_secs(60);

fn shard(owned: std::ops::Range<u32>) -> Shard {
    let table = r#"{"name":"main","seed":7,"partitions":8,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
        "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
    let dense = DenseOptimizer::Sgd { learning_rate: 0.125 };
    let table = TableSpec::from_json(table).unwrap();
    Shard::new(ShardSpec { table, num_dense: NUM_DENSE, num_buffers: 0, dense, num_sums: 2, owned }, 1).unwrap()
}

fn start(owned: std::ops::Range<u32>, incarnation: u64) -> Server {
    let identity = Identity { run: b"run".to_vec(), token: b"secret".to_vec(), incarnation, epoch: 1 };
    let server = Server::start(shard(owned), identity, "127.0.0.1:0", None).unwrap();
    server.extend_lease(Instant::now(), LEASE);
    server
}

fn credentials(token: &str) -> Credentials {
    Credentials { run: b"run".to_vec(), token: token.into(), tls: None }
}

fn connect(servers: &[&Server]) -> Client {
    let addresses: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
    Client::connect(&addresses, &credentials("secret"), PARTITIONS, LONG).unwrap()
}

fn signs_of(batch: u32) -> Vec<u64> {
    (0..100).map(|at| (u64::from(batch) * 37 + at).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// The header of a push of four samples.
fn header(unit: u64, batch: u32, is_last: bool) -> PushHeader {
    PushHeader { unit, batch, is_last, checksum: 1, num_samples: 4, weight: 4.0, ..PushHeader::default() }
}

/// Pulls, then pushes a gradient of ones; returns the rows and the dense values that were pulled.
fn step(client: &Client, unit: u64, batch: u32, is_last: bool) -> Result<(Vec<f32>, Vec<f32>), ClientError> {
    let signs = signs_of(batch);
    let mut split = ShardSplit::default();
    client.split(&signs, &mut split);
    let (mut rows, mut dense) = (vec![9.0; 200], vec![9.0; NUM_DENSE]);
    client.receive(
        &client.pull(&split, PullOptions { dense: true, ..PullOptions::default() })?,
        &split,
        &mut rows,
        Some(&mut dense),
    )?;
    let update = BatchUpdate {
        header: header(unit, batch, is_last),
        counts: &[(1, 0); 100],
        gradients: &[1.0; 200],
        dense: &[1.0; NUM_DENSE],
        sum_indices: &[1],
        sum_values: &[0.5],
    };
    client.wait_for_ack(&client.push(&split, &update)?)?;
    Ok((rows, dense))
}

fn reason(error: &ClientError) -> Reason {
    match error {
        ClientError::Refused { refused: Refusal { reason, .. }, .. } => *reason,
        other => panic!("expected a refusal, got {other}"),
    }
}

#[test]
fn pushed_rows_can_be_pulled_from_several_shards() {
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
fn pushes_of_concurrent_trainers_count_once() {
    let servers = [start(0..4, 1), start(4..8, 2)];
    thread::scope(|scope| {
        for unit in 0..4u64 {
            let servers = &servers;
            scope.spawn(move || {
                let client = connect(&servers.iter().collect::<Vec<_>>());
                for batch in 0..25 {
                    step(&client, unit, batch, batch == 24).unwrap();
                    // The shards already know the repeated push.
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
fn a_server_above_its_memory_limit_delays_pushes() {
    let server = start(0..8, 1);
    let client = connect(&[&server]);
    server.slow_down(Duration::from_millis(30));
    let started = Instant::now();
    step(&client, 0, 0, false).unwrap();
    assert!(started.elapsed() >= Duration::from_millis(30));
    server.slow_down(Duration::ZERO);
    step(&client, 0, 1, true).unwrap();
    let slowed = server.counters().slowed.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!((slowed, server.status().applied), (1, 2));
}

/// Starts a server that sends a welcome and then reads nothing more.
fn start_hung_server(address: &mut String) -> thread::JoinHandle<TcpStream> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    *address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut body = Body::default();
        read_frame(&mut stream, 1 << 20, &mut body).unwrap();
        let welcome = elasticrec_wire::Welcome {
            incarnation: 1,
            epoch: 1,
            first_partition: 0,
            end_partition: PARTITIONS,
            width: 2,
            num_dense: NUM_DENSE as u32,
            state_width: 0,
            num_dense_states: 0,
        };
        write_frame(&mut stream, Header { kind: Kind::Welcome, id: 0 }, &welcome.parts().slices()).unwrap();
        stream
    })
}

/// Sends pulls until one fails; returns its error.
fn fill(client: &Client) -> ClientError {
    let signs: Vec<u64> = (0..1_000_000).collect();
    let mut split = ShardSplit::default();
    client.split(&signs, &mut split);
    loop {
        if let Err(error) = client.pull(&split, PullOptions::default()) {
            return error;
        }
    }
}

#[test]
fn a_hung_server_blocks_clients_only_until_the_deadline() {
    let mut address = String::new();
    let server = start_hung_server(&mut address);
    // Long enough for the handshake on a slow machine.
    let deadline = Duration::from_secs(3);
    let client = Client::connect(&[address], &credentials("secret"), PARTITIONS, deadline).unwrap();
    let error = fill(&client).to_string();
    assert!(error.ends_with("did not accept a request in time"), "{error}");
    drop(server.join());
}

#[test]
fn closing_a_client_wakes_threads_that_wait_for_a_replaced_server() {
    let mut address = String::new();
    let server = start_hung_server(&mut address);
    let client = Client::connect(&[address], &credentials("secret"), PARTITIONS, LONG).unwrap();
    let closer = client.closer().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| step(&client, 0, 0, true).unwrap_err());
        let full = scope.spawn(|| fill(&client));
        // The threads usually wait by then; if not, their next request fails in the same way.
        thread::sleep(Duration::from_millis(100));
        closer.close();
        assert!(matches!(waiting.join().unwrap(), ClientError::Lost { .. }));
        assert!(matches!(full.join().unwrap(), ClientError::Lost { .. }));
    });
    drop(server.join());
}

#[test]
fn a_client_that_does_not_read_cannot_keep_a_server_from_stopping() {
    let mut server = start(0..8, 1);
    let client = connect(&[&server]);
    step(&client, 0, 0, true).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let hello = Hello { run: b"run", token: b"secret" };
    write_frame(&mut stream, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices()).unwrap();
    let (mut body, signs) = (Body::default(), vec![7; 500_000]);
    read_frame(&mut stream, 1 << 20, &mut body).unwrap();
    let pull = elasticrec_wire::Pull {
        epoch: 1,
        incarnation: 1,
        after: None,
        wants_dense: false,
        wants_state: false,
        signs: &signs,
    };
    let mut writer = stream.try_clone().unwrap();
    thread::scope(|scope| {
        // Each answer has 4 MB, and none is read.
        scope.spawn(move || {
            let send = |id| write_frame(&mut writer, Header { kind: Kind::Pull, id }, &pull.parts().slices());
            (1..20).try_for_each(send)
        });
        let answered = |server: &Server| server.counters().pulls.load(std::sync::atomic::Ordering::Relaxed);
        let mut before = u64::MAX;
        while answered(&server) != before {
            before = answered(&server);
            thread::sleep(Duration::from_millis(500));
        }
        let started = Instant::now();
        server.stop();
        assert!(started.elapsed() < LONG);
    });
}

#[test]
fn a_snapshot_taken_during_pushes_is_consistent() {
    let dir = tempfile::tempdir().unwrap();
    let files = SnapshotFiles { rows: dir.path().join("rows"), dense: dir.path().join("dense") };
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
    let again = Server::start(again, identity, "127.0.0.1:0", None).unwrap();
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
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Reason::Fenced);
    server.extend_lease(Instant::now(), Duration::from_millis(1));
    thread::sleep(Duration::from_millis(5));
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Reason::Fenced);
    // The lease counts from the request, so a late answer does not extend it.
    server.extend_lease(Instant::now() - Duration::from_secs(2), Duration::from_secs(1));
    assert_eq!(reason(&step(&client, 0, 0, true).unwrap_err()), Reason::Fenced);
    assert_eq!(server.status().num_rows, 0);
    server.extend_lease(Instant::now(), LEASE);
    step(&client, 0, 0, true).unwrap();
}

#[test]
fn clients_of_other_runs_are_refused() {
    let server = start(0..8, 1);
    let address = [server.address().to_string()];
    let wrong = |credentials: &Credentials| Client::connect(&address, credentials, PARTITIONS, LONG).unwrap_err();
    let error = wrong(&credentials("guess"));
    assert_eq!(reason(&error), Reason::Unauthorized);
    assert!(error.to_string().ends_with("expected the token of the run, got another token"), "{error}");
    let other = Credentials { run: b"other".to_vec(), ..credentials("secret") };
    assert_eq!(reason(&wrong(&other)), Reason::Unauthorized);
    let error = Client::connect(&address, &credentials("secret"), 16, LONG).unwrap_err();
    assert_eq!(error.to_string(), "ps shards: expected 16 partitions, got 8");
    let error = Client::connect(&["127.0.0.1:1".into()], &credentials(""), 8, Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().starts_with("ps shard 0 at 127.0.0.1:1: "), "{error}");
}

#[test]
fn hostile_bytes_end_only_their_own_connection() {
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
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let mut rest = answer.as_slice();
        let mut body = Body::default();
        let mut last = None;
        while let Ok(header) = read_frame(&mut rest, 1 << 20, &mut body) {
            last = Some((header.kind, Refusal::decode(body.bytes()).map(|refused| refused.reason)));
        }
        assert_eq!(last, Some((Kind::Refusal, Ok(Reason::Malformed))));
    }
    // A connection that ends in the middle of a frame.
    TcpStream::connect(server.address()).unwrap().write_all(&greeting[..20]).unwrap();
    step(&client, 0, 0, true).unwrap();
}

#[test]
fn closed_connections_leave_no_open_descriptors() {
    let open = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let server = start(0..8, 1);
    step(&connect(&[&server]), 0, 0, false).unwrap();
    let before = open();
    for batch in 1..60 {
        step(&connect(&[&server]), 0, batch, false).unwrap();
    }
    // Other tests of this process open a few descriptors too; 60 leaked connections would leave 200 to 300.
    let deadline = Instant::now() + LONG;
    while open() > before + 50 {
        assert!(Instant::now() < deadline, "{} descriptors are open, {before} before", open());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_successor_is_not_mistaken_for_the_server_that_stopped() {
    let mut server = start(0..8, 1);
    let address = server.address().to_string();
    let client = connect(&[&server]);
    step(&client, 0, 0, false).unwrap();
    server.stop();
    let error = step(&client, 0, 1, true).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    let identity = Identity { run: b"run".to_vec(), token: b"secret".to_vec(), incarnation: 2, epoch: 2 };
    let deadline = Instant::now() + LONG;
    let successor = loop {
        match Server::start(shard(0..8), identity.clone(), &address, None) {
            Ok(server) => break server,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    successor.extend_lease(Instant::now(), LEASE);
    assert!(step(&client, 0, 1, true).is_err(), "a client belongs to one incarnation of a server");
    step(&connect(&[&successor]), 0, 1, true).unwrap();
}

const GROUP: Group = Group { first_unit: 0, num_units: 2 };

/// Pushes one batch of a step of the group; all its gradients are `gradient`.
fn push_in_group(client: &Client, unit: u64, batch: u32, is_last: bool, gradient: f32) -> Result<(), ClientError> {
    let mut split = ShardSplit::default();
    client.split(&signs_of(0), &mut split);
    let update = BatchUpdate {
        header: PushHeader { checksum: unit, group: Some(GROUP), ..header(unit, batch, is_last) },
        counts: &[(1, 0); 100],
        gradients: &[gradient; 200],
        dense: &[gradient; NUM_DENSE],
        sum_indices: &[1],
        sum_values: &[0.5],
    };
    client.wait_for_ack(&client.push(&split, &update)?).map(drop)
}

/// Pulls after `num_steps` steps of the group; returns the dense values.
fn pull_after(client: &Client, num_steps: u32) -> Result<Vec<f32>, ClientError> {
    let mut split = ShardSplit::default();
    client.split(&signs_of(0), &mut split);
    let (mut rows, mut dense) = (vec![9.0; 200], vec![9.0; NUM_DENSE]);
    let wanted = PullOptions { dense: true, after: Some((0, num_steps)), ..PullOptions::default() };
    client.receive(&client.pull(&split, wanted)?, &split, &mut rows, Some(&mut dense))?;
    Ok(dense)
}

fn has_all(client: &Client, step: u32, wait_ms: u64) -> Vec<bool> {
    client
        .step_status(GROUP, step, Duration::from_millis(wait_ms))
        .unwrap()
        .iter()
        .map(|status| status.is_full)
        .collect()
}

/// Repeats a step query until all shards have all pushes of the step; on a slow machine one query may not wait long enough.
fn wait_for_all(client: &Client, step: u32) -> Vec<bool> {
    let deadline = Instant::now() + LONG;
    loop {
        let full = has_all(client, step, 900);
        if full.iter().all(|is_full| *is_full) || Instant::now() >= deadline {
            return full;
        }
    }
}

#[test]
fn a_step_is_applied_once_a_client_knows_that_all_shards_have_all_its_pushes() {
    let servers = [start(0..5, 1), start(5..8, 2)];
    let (one, two) = (connect(&[&servers[0], &servers[1]]), connect(&[&servers[0], &servers[1]]));
    assert_eq!(pull_after(&one, 0).unwrap(), [0.0; NUM_DENSE]);
    push_in_group(&one, 0, 0, false, 1.0).unwrap();
    assert_eq!(reason(&pull_after(&one, 1).unwrap_err()), Reason::NotYet);
    // The first refusal ends the pull, and the other server may still receive its part after the push below, which would
    // commit the step. Servers answer in order, so once both have answered this request, both have refused the pull.
    assert_eq!(has_all(&one, 0, 1), [false, false]);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait_for_all(&one, 0));
        push_in_group(&two, 1, 0, true, 3.0).unwrap();
        assert_eq!(waiting.join().unwrap(), [true, true]);
    });
    // The step is applied by the next pull that asks for it, so a batch that is trained again reads the same rows.
    assert_eq!(pull_after(&two, 0).unwrap(), [0.0; NUM_DENSE]);
    push_in_group(&two, 1, 0, true, 3.0).unwrap();
    // The mean of both gradients is applied once.
    assert_eq!(pull_after(&one, 1).unwrap(), [-0.25; NUM_DENSE]);
    assert_eq!(pull_after(&two, 1).unwrap(), [-0.25; NUM_DENSE]);
    assert_eq!(reason(&pull_after(&two, 0).unwrap_err()), Reason::Passed);
    assert_eq!(servers[0].read(|shard| shard.samples().to_vec()), [8; 5]);
    // Unit 1 has ended, so the next step has pushes of unit 0 only.
    assert_eq!(has_all(&one, 1, 1), [false, false]);
    push_in_group(&one, 0, 1, true, 1.0).unwrap();
    assert_eq!(has_all(&one, 1, 1), [true, true]);
    assert_eq!(pull_after(&one, 2).unwrap(), [-0.375; NUM_DENSE]);
    let applied: Vec<u32> =
        one.step_status(GROUP, 0, Duration::ZERO).unwrap().iter().map(|status| status.num_applied).collect();
    assert_eq!(applied, [u32::MAX; 2], "the group is complete");
    for server in &servers {
        server.read(|shard| {
            let shows: Vec<u32> =
                signs_of(0).iter().filter_map(|sign| shard.table().get(*sign)).map(|row| row.counters.show).collect();
            assert!(!shows.is_empty() && shows.iter().all(|show| *show == 3));
        });
        assert_eq!(server.counters().steps.load(std::sync::atomic::Ordering::Relaxed), 2);
    }
    // A repeated push is known even after its group.
    push_in_group(&two, 1, 0, true, 3.0).unwrap();
    assert_eq!(pull_after(&one, 2).unwrap(), [-0.375; NUM_DENSE]);
}

#[test]
fn a_group_starts_when_all_earlier_units_are_complete() {
    let server = start(0..8, 1);
    let client = connect(&[&server]);
    push_in_group(&client, 0, 0, true, 1.0).unwrap();
    let later = Group { first_unit: 2, num_units: 2 };
    let mut split = ShardSplit::default();
    client.split(&[], &mut split);
    let empty = BatchUpdate {
        header: PushHeader { unit: 2, is_last: true, group: Some(later), ..PushHeader::default() },
        counts: &[],
        gradients: &[],
        dense: &[],
        sum_indices: &[],
        sum_values: &[],
    };
    let push = |update: &BatchUpdate<'_>| {
        client.push(&split, update).and_then(|tickets| client.wait_for_ack(&tickets)).map(drop)
    };
    assert_eq!(reason(&push(&empty).unwrap_err()), Reason::NotYet);
    let with = |header: PushHeader| BatchUpdate { header, ..empty };
    push(&with(PushHeader { unit: 1, group: Some(GROUP), ..empty.header })).unwrap();
    assert_eq!(pull_after(&client, 1).unwrap(), [-0.125; NUM_DENSE]);
    push(&empty).unwrap();
    assert_eq!(reason(&push(&with(PushHeader { unit: 4, ..empty.header })).unwrap_err()), Reason::Malformed);
}

#[test]
fn full_rows_can_be_pulled_and_increments_pushed() {
    let servers = [start(0..5, 1), start(5..8, 2)];
    let client = connect(&[&servers[0], &servers[1]]);
    step(&client, 0, 0, true).unwrap();
    let signs = signs_of(0);
    let mut split = ShardSplit::default();
    client.split(&signs, &mut split);
    let wanted = PullOptions { dense: true, state: true, after: None };
    let (mut full, mut dense) = (FullRows::default(), vec![9.0; client.num_dense_full()]);
    client.receive_full(&client.pull(&split, wanted).unwrap(), &split, &mut full, &mut dense).unwrap();
    assert_eq!(dense, [-0.125; NUM_DENSE]);
    assert!(full.tails.iter().all(|[show, click, _]| (*show, *click) == (1, 0)));
    let update = BatchUpdate {
        header: PushHeader { is_increment: true, ..header(1, 0, true) },
        counts: &[(1, 0); 100],
        gradients: &[0.5; 200],
        dense: &[0.25; NUM_DENSE],
        sum_indices: &[],
        sum_values: &[],
    };
    client.wait_for_ack(&client.push(&split, &update).unwrap()).unwrap();
    let mut after = FullRows::default();
    client.receive_full(&client.pull(&split, wanted).unwrap(), &split, &mut after, &mut dense).unwrap();
    assert_eq!(dense, [0.125; NUM_DENSE]);
    let changes: Vec<f32> = after.values.iter().zip(&full.values).map(|(after, before)| after - before).collect();
    assert!(changes.iter().all(|change| (change - 0.5).abs() < 1e-6), "{changes:?}");
}
