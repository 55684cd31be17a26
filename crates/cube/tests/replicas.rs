//! Replicas die, hang, stop and return, and versions change, while clients read: no lookup fails or mixes versions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    Files, NUM_ROWS, TIMEOUT, WIDTH, address, assert_rows, check, connect, connect_to, credentials, row_of, signs,
    until,
};
use elasticrec_cube::client::ShardFailurePolicy;
use elasticrec_cube::{Client, ClientError, Server, VersionError};
use elasticrec_table::partition::partition_of;
use elasticrec_wire::{Body, Header, Hello, Kind, read_frame, write_frame};

/// Runs threads that look signs up until `work` is done; returns the number of lookups. A failed lookup fails the test.
fn read_during(client: &Client, version: u64, work: impl FnOnce(&AtomicU64)) -> u64 {
    let (is_done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 0..3 {
            let (is_done, reads) = (&is_done, &reads);
            scope.spawn(move || {
                while !is_done.load(Ordering::Relaxed) {
                    let at = reads.fetch_add(1, Ordering::Relaxed);
                    check(client, version, &signs(300, seed + at)).unwrap();
                }
            });
        }
        work(&reads);
        is_done.store(true, Ordering::Relaxed);
    });
    reads.into_inner()
}

/// Waits for `more` further reads.
fn wait_for_reads(reads: &AtomicU64, more: u64) {
    let target = reads.load(Ordering::Relaxed) + more;
    until("reads continue", || reads.load(Ordering::Relaxed) >= target);
}

fn is_down(client: &Client, server: &str) -> bool {
    client.info().iter().any(|replica| replica.address == server && replica.down.is_some())
}

#[test]
fn no_lookup_fails_when_a_replica_dies_and_comes_back() {
    let files = Files::new();
    let mut shards: Vec<Vec<Option<Server>>> =
        [0..3, 3..8].map(|range| (0..2).map(|_| Some(files.serve(range.clone(), &[1]))).collect()).into();
    let addresses: Vec<Vec<String>> =
        shards.iter().map(|shard| shard.iter().flatten().map(address).collect()).collect();
    let client = connect_to(&addresses).unwrap();
    let ranges = [0..3, 3..8];
    read_during(&client, 1, |reads| {
        for round in 0..6 {
            let (shard, replica) = (round % 2, round / 2 % 2);
            wait_for_reads(reads, 50);
            shards[shard][replica] = None;
            wait_for_reads(reads, 50);
            let at = &addresses[shard][replica];
            until("the replica is down", || is_down(&client, at));
            shards[shard][replica] = Some(files.serve_at(at, ranges[shard].clone(), &[1]));
            until("the replica is up again", || !is_down(&client, at));
        }
    });
}

#[test]
fn replicas_share_the_requests() {
    let files = Files::new();
    let servers = [files.serve(0..8, &[1]), files.serve(0..8, &[1])];
    let client = connect_to(&[servers.iter().map(address).collect()]).unwrap();
    (0..100).for_each(|seed| check(&client, 1, &signs(10, seed)).unwrap());
    let batches: Vec<Vec<u64>> = (0..20).map(|seed| signs(10, seed)).collect();
    let pending: Vec<_> = batches.iter().map(|signs| client.lookup(1, signs).unwrap()).collect();
    let in_flight: Vec<usize> = client.info().iter().map(|replica| replica.num_in_flight).collect();
    drop(pending);
    let requests = servers.each_ref().map(|server| server.counters().requests.load(Ordering::Relaxed));
    assert!(requests.iter().all(|count| *count >= 50), "{requests:?}");
    assert!(in_flight.iter().all(|count| *count <= 10), "{in_flight:?}");
}

/// Starts a server that sends the inventory of `like` and then accepts requests without answering them.
fn start_hung_server(like: &Server) -> String {
    let mut stream = TcpStream::connect(like.address()).unwrap();
    let hello = Hello { run: b"ctr", token: b"secret" };
    write_frame(&mut stream, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices()).unwrap();
    let mut body = Body::default();
    read_frame(&mut stream, 1 << 20, &mut body).unwrap();
    let greeting = body.bytes().to_vec();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let mut kept = Vec::new();
        // Only the first connection gets an inventory.
        while let Ok((mut stream, _)) = listener.accept() {
            if kept.is_empty() {
                let mut body = Body::default();
                drop(read_frame(&mut stream, 1 << 20, &mut body));
                drop(write_frame(&mut stream, Header { kind: Kind::Inventory, id: 0 }, &[&greeting]));
            }
            kept.push(stream);
        }
    });
    address
}

#[test]
fn a_replica_that_hangs_leaves_time_for_another() {
    let files = Files::new();
    let good = files.serve(0..8, &[1]);
    let hung = start_hung_server(&good);
    // The client waits for the hung replica for half of this time.
    let timeout = Duration::from_secs(12);
    let client = Client::connect(&[vec![hung.clone(), address(&good)]], credentials(), timeout).unwrap();
    for seed in 0..20 {
        check(&client, 1, &signs(100, seed)).unwrap();
    }
    let info = client.info();
    assert!(info[0].down.is_some() && info[1].down.is_none(), "{info:?}");
}

#[test]
fn a_new_version_is_found_although_a_replica_hangs() {
    let files = Files::new();
    let good = files.serve(0..8, &[1]);
    let hung = start_hung_server(&good);
    let client = Client::connect(&[vec![hung, address(&good)]], credentials(), Duration::from_secs(12)).unwrap();
    good.versions().install(2, files.view(2, 0..8)).unwrap();
    check(&client, 2, &signs(100, 1)).unwrap();
}

#[test]
fn a_thread_with_many_requests_in_flight_does_not_block_others() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let client = connect(&[&server]);
    let batches: Vec<Vec<u64>> = (0..60).map(|seed| signs(1000, seed)).collect();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..200).for_each(|seed| check(&client, 1, &signs(50, seed)).unwrap()));
        }
        // This thread drops its lookups without waiting for rows, but reads answers for all threads while too many of its
        // own requests are in flight.
        for _ in 0..20 {
            let pending: Vec<_> = batches.iter().map(|signs| client.lookup(1, signs).unwrap()).collect();
            thread::sleep(Duration::from_millis(2));
            drop(pending);
        }
    });
}

#[test]
fn rows_of_a_shard_that_is_down_may_read_as_zero() {
    let files = Files::new();
    let (first, second) = (files.serve(0..3, &[1]), files.serve(3..8, &[1]));
    let client = connect(&[&first, &second]);
    let keys = signs(20_000, 1);
    let is_lost = |sign: &u64| partition_of(*sign, 8) >= 3;
    let look_up = || {
        let (mut rows, mut present) = (vec![f32::NAN; keys.len() * WIDTH], vec![true; keys.len()]);
        let deadline = Instant::now() + TIMEOUT;
        let pending = client.lookup_until(1, &keys, deadline, ShardFailurePolicy::Zero)?;
        let summary = pending.wait(&mut rows, &mut present)?;
        Ok::<_, ClientError>((summary, rows, present))
    };
    assert_eq!(look_up().unwrap().0.lost, 0);
    let at = address(&second);
    drop(second);
    until("the replica is down", || is_down(&client, &at));
    // Lookups do not wait for a shard that is known to be down.
    let (summary, rows, present) = look_up().unwrap();
    assert_eq!(summary.lost, keys.iter().filter(|sign| is_lost(sign)).count());
    assert_eq!(summary.hits, present.iter().filter(|is_present| **is_present).count());
    for ((sign, row), present) in keys.iter().zip(rows.chunks(WIDTH)).zip(present) {
        let expected = if is_lost(sign) { [0.0; WIDTH] } else { row_of(1, *sign) };
        assert_eq!((row, present), (&expected[..], !is_lost(sign) && *sign < NUM_ROWS), "{sign}");
    }
    let strict =
        client.lookup_until(1, &keys, Instant::now() + Duration::from_millis(50), ShardFailurePolicy::Fail).map(|_| ());
    assert!(matches!(strict, Err(ClientError::Unavailable { shard: 1, .. })), "{strict:?}");
    // The policy does not apply to versions that are gone.
    assert!(matches!(
        client.lookup_until(9, &keys, Instant::now(), ShardFailurePolicy::Zero).map(|_| ()),
        Err(ClientError::Gone { .. })
    ));
    let _again = files.serve_at(&at, 3..8, &[1]);
    until("the replica is up again", || !is_down(&client, &at));
    assert_eq!(look_up().unwrap().0.lost, 0);
}

#[test]
fn missed_short_deadlines_do_not_end_connections() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let client = connect(&[&server]);
    let keys = signs(60_000, 1);
    let (mut rows, mut present) = (vec![0.0; keys.len() * WIDTH], vec![false; keys.len()]);
    for _ in 0..20 {
        let soon = Instant::now() + Duration::from_micros(200);
        let got = client
            .lookup_until(1, &keys, soon, ShardFailurePolicy::Fail)
            .and_then(|lookup| lookup.wait(&mut rows, &mut present));
        assert!(matches!(got, Ok(_) | Err(ClientError::Unavailable { .. })), "{got:?}");
    }
    check(&client, 1, &keys).unwrap();
    assert_eq!(server.connections().num_open(), 1);
    assert_eq!(client.info()[0].down, None);
}

#[test]
fn a_hung_replica_is_taken_down_even_with_short_deadlines() {
    let files = Files::new();
    let good = files.serve(0..8, &[1]);
    let hung = start_hung_server(&good);
    // Half of it is less than the second of silence after which a replica counts as hung.
    let timeout = Duration::from_millis(1800);
    let client = Client::connect(&[vec![hung, address(&good)]], credentials(), timeout).unwrap();
    for seed in 0..50 {
        check(&client, 1, &signs(100, seed)).unwrap();
    }
    until("the hung replica is down", || client.info()[0].down.is_some());
    check(&client, 1, &signs(100, 1)).unwrap();
}

#[test]
fn a_lookup_without_a_replica_fails_at_its_deadline_with_the_reason() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let at = address(&server);
    let client = Client::connect(&[vec![at.clone()]], credentials(), Duration::from_secs(3)).unwrap();
    check(&client, 1, &[1]).unwrap();
    drop(server);
    let started = Instant::now();
    let error = check(&client, 1, &[1]).unwrap_err();
    assert!(started.elapsed() < TIMEOUT);
    assert!(matches!(error, ClientError::Unavailable { shard: 0, .. }), "{error}");
    assert!(error.to_string().contains(&format!(": {at}: ")), "{error}");
    // A lookup waits for a replica that returns before the deadline.
    let client = Client::connect(&[vec![at.clone()]], credentials(), TIMEOUT);
    assert!(client.is_err());
    let server = files.serve_at(&at, 0..8, &[1]);
    let client = connect(&[&server]);
    drop(server);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| check(&client, 1, &[1]));
        let _again = files.serve_at(&at, 0..8, &[1]);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn retired_versions_are_reported_and_new_versions_are_found() {
    let files = Files::new();
    let servers = [files.serve(0..8, &[1]), files.serve(0..8, &[1])];
    let client = connect_to(&[servers.iter().map(address).collect()]).unwrap();
    check(&client, 1, &[1]).unwrap();
    assert_eq!(check(&client, 2, &[1]).unwrap_err().to_string(), "version 2: no shards hold it, versions held: 1");
    // Only one of the replicas has version 2.
    servers[1].versions().install(2, files.view(2, 0..8)).unwrap();
    (0..50).for_each(|seed| check(&client, 2, &signs(50, seed)).unwrap());
    servers[0].versions().install(2, files.view(2, 0..8)).unwrap();
    servers[1].versions().retire(2).unwrap();
    (0..50).for_each(|seed| check(&client, 2, &signs(50, seed)).unwrap());
    servers.iter().for_each(|server| server.versions().retire(1).unwrap());
    let error = check(&client, 1, &[1]).unwrap_err();
    assert!(matches!(error, ClientError::Gone { version: 1, .. }), "{error}");
    assert_eq!(client.info()[0].versions, [2]);
    assert_eq!(client.versions(), [2]);
}

#[test]
fn every_answer_has_one_version_while_versions_are_replaced() {
    let files = Files::new();
    let servers = [files.serve(0..4, &[1]), files.serve(4..8, &[1])];
    let client = connect(&[&servers[0], &servers[1]]);
    let current = AtomicU64::new(1);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 0..3u64 {
            let (client, current, is_done) = (&client, &current, &is_done);
            scope.spawn(move || {
                let (mut rows, mut present) = (vec![9.0; 200 * WIDTH], vec![false; 200]);
                let mut seen = 0;
                for at in 0.. {
                    if is_done.load(Ordering::Relaxed) {
                        break;
                    }
                    let keys = signs(200, seed + at);
                    // If the version is gone, retry with the current one.
                    let version = loop {
                        let version = current.load(Ordering::Acquire);
                        match client.get(version, &keys, &mut rows, &mut present) {
                            Ok(_) => break version,
                            Err(ClientError::Gone { version: gone, .. }) => assert_eq!(gone, version),
                            Err(error) => panic!("{error}"),
                        }
                    };
                    assert_rows(version, &keys, &rows, &present);
                    assert!(version >= seen);
                    seen = version;
                }
            });
        }
        for version in 2..=200u64 {
            for (server, range) in servers.iter().zip([0..4, 4..8]) {
                server.versions().install(version, files.view(version, range)).unwrap();
            }
            current.store(version, Ordering::Release);
            if version > 2 {
                servers.iter().for_each(|server| server.versions().retire(version - 2).unwrap());
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(servers[0].versions().numbers(), [199, 200]);
}

#[test]
fn a_version_in_use_is_not_unloaded() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let versions = server.versions();
    let view = versions.get(1).unwrap();
    let weak = Arc::downgrade(&view);
    assert_eq!(versions.install(1, files.view(1, 0..8)), Err(VersionError::AlreadyHeld { version: 1 }));
    versions.retire(1).unwrap();
    let mut rows = [0.0; WIDTH];
    assert_eq!(view.lookup(&[5], &mut rows), 1);
    assert_eq!(versions.get(1).err(), Some(VersionError::NoVersion { version: 1, held: vec![] }));
    assert_eq!(versions.retire(1).unwrap_err().to_string(), "version 1: not held by this server, held: none");
    drop(view);
    assert!(weak.upgrade().is_some(), "a reader does not free the memory of a version");
    let error = versions.install(2, files.view(2, 0..4)).unwrap_err();
    assert_eq!(error.to_string(), "version 2: expected partitions 0 to 8 of 8, got 0 to 4 of 8");
    versions.install(2, files.view(2, 0..8)).unwrap();
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_server_that_stops_answers_the_requests_that_have_arrived() {
    let files = Files::new();
    for _ in 0..10 {
        let server = files.serve(0..8, &[1]);
        let client = connect(&[&server]);
        let batches: Vec<Vec<u64>> = (0..8).map(|seed| signs(2000, seed)).collect();
        let pending: Vec<_> = batches.iter().map(|signs| client.lookup(1, signs).unwrap()).collect();
        // All requests are sent. Once one is answered, the others have arrived: they are in the socket of the server.
        until("a request is answered", || server.counters().requests.load(Ordering::Relaxed) >= 1);
        server.stop();
        for (signs, lookup) in batches.iter().zip(pending) {
            let (mut rows, mut present) = (vec![9.0; 2000 * WIDTH], vec![false; 2000]);
            lookup.wait(&mut rows, &mut present).unwrap();
            assert_rows(1, signs, &rows, &present);
        }
    }
}

#[test]
fn replicas_can_be_restarted_one_after_the_other_during_lookups() {
    let files = Files::new();
    let mut servers: Vec<Option<Server>> = (0..2).map(|_| Some(files.serve(0..8, &[1]))).collect();
    let addresses: Vec<String> = servers.iter().flatten().map(address).collect();
    let client = connect_to(std::slice::from_ref(&addresses)).unwrap();
    let reads = read_during(&client, 1, |reads| {
        for round in 0..4 {
            let at = round % 2;
            if let Some(server) = &servers[at] {
                server.stop();
            }
            servers[at] = None;
            wait_for_reads(reads, 30);
            servers[at] = Some(files.serve_at(&addresses[at], 0..8, &[1]));
            until("the replica is up again", || !is_down(&client, &addresses[at]));
        }
    });
    assert!(reads > 120);
}
