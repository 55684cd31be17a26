//! Cube servers and clients over real sockets: lookups, refusals, limits and hostile bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use common::{
    Files, NUM_ROWS, PARTITIONS, TIMEOUT, WIDTH, address, assert_rows, check, connect, connect_to, credentials,
    identity, signs, until,
};
use elasticrec_cube::client::Credentials;
use elasticrec_cube::{Client, ClientError, Cube, RowType, Server, VersionSet, View};
use elasticrec_table::partition::partition_of;
use elasticrec_wire::message::MAX_LOOKUP_SIGNS;
use elasticrec_wire::{
    Body, Header, Hello, Inventory, Kind, Lookup, LookupResult, Reason, Refusal, read_frame, write_frame,
};
use proptest::prelude::*;

/// A connection that sends frames directly; the hello is done.
struct Peer {
    stream: TcpStream,
    body: Body,
}

impl Peer {
    fn new(server: &Server) -> Peer {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut peer = Peer { stream, body: Body::default() };
        let hello = Hello { run: b"ctr", token: b"secret" };
        peer.send(Kind::Hello, 7, &hello.parts().slices());
        assert_eq!(peer.receive(), Header { kind: Kind::Inventory, id: 7 });
        peer
    }

    fn send(&mut self, kind: Kind, id: u64, parts: &[&[u8]]) {
        write_frame(&mut self.stream, Header { kind, id }, parts).unwrap();
    }

    fn look_up(&mut self, id: u64, version: u64, signs: &[u64]) {
        self.send(Kind::Lookup, id, &Lookup { version, signs }.parts().slices());
    }

    fn receive(&mut self) -> Header {
        read_frame(&mut self.stream, 1 << 30, &mut self.body).unwrap()
    }

    fn refusal(&mut self) -> Refusal {
        assert_eq!(self.receive().kind, Kind::Refusal);
        Refusal::decode(self.body.bytes()).unwrap()
    }
}

#[test]
fn rows_of_several_shards_are_in_the_order_of_the_signs() {
    let files = Files::new();
    let servers = [files.serve(3..5, &[7]), files.serve(0..3, &[7]), files.serve(5..8, &[7])];
    let client = connect(&servers.iter().collect::<Vec<_>>());
    for count in [0, 1, 2, 63, 64, 65, 1000, 30_000] {
        check(&client, 7, &signs(count, count)).unwrap();
    }
    let layout = client.layout(7).unwrap();
    assert_eq!((layout.width(), layout.row_bytes(), layout.row_type()), (3, 12, RowType::F32));
    let keys: u64 = servers.iter().map(|server| server.counters().keys.load(Relaxed)).sum();
    assert_eq!(keys, 31_195);
}

#[test]
fn rows_of_every_type_are_decoded() {
    let files = Files::new();
    for row_type in RowType::ALL {
        let path = files.write(3, row_type);
        let view = View::of_base(Arc::new(Cube::open_range(&[path], 0..PARTITIONS).unwrap()));
        let keys = signs(2000, 1);
        let mut expected = vec![0.0; keys.len() * WIDTH];
        let expected_hits = view.lookup(&keys, &mut expected);
        // Once with one server, once with two.
        for ends in [[8].as_slice(), &[2, 8]] {
            let serve = |(at, end): (usize, &u32)| {
                let range = if at == 0 { 0..*end } else { ends[at - 1]..*end };
                let cube = Cube::open_range(&[files.write(3, row_type)], range.clone()).unwrap();
                let set = VersionSet::new(range.clone(), PARTITIONS);
                set.install(3, View::of_base(Arc::new(cube))).unwrap();
                Server::start(Arc::new(set), identity(), "127.0.0.1:0", None).unwrap()
            };
            let servers: Vec<Server> = ends.iter().enumerate().map(serve).collect();
            let client = connect(&servers.iter().collect::<Vec<_>>());
            let (mut rows, mut present) = (vec![9.0; keys.len() * WIDTH], vec![false; keys.len()]);
            assert_eq!(client.get(3, &keys, &mut rows, &mut present).unwrap(), expected_hits);
            assert_eq!(rows, expected);
        }
    }
}

#[test]
fn large_lookups_are_split_into_pieces() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let client = connect(&[&server]);
    let keys = signs(400_000, 3);
    check(&client, 1, &keys).unwrap();
    assert!(server.counters().requests.load(Relaxed) >= 48);
    assert_eq!(server.counters().keys.load(Relaxed), 400_000);
    assert_eq!(server.counters().bytes.load(Relaxed), 400_000 * 12);
    let absent = keys.iter().filter(|sign| **sign >= NUM_ROWS).count() as u64;
    assert_eq!(server.counters().misses.load(Relaxed), absent);
}

#[test]
fn lookups_in_flight_may_be_waited_for_in_any_order() {
    let files = Files::new();
    let server = files.serve(0..8, &[1, 2]);
    let client = connect(&[&server]);
    let batches: Vec<Vec<u64>> = (0..100).map(|seed| signs(1000, seed)).collect();
    let version_of = |at: usize| 1 + at as u64 % 2;
    let mut pending: Vec<_> =
        batches.iter().enumerate().map(|(at, signs)| Some(client.lookup(version_of(at), signs).unwrap())).collect();
    for step in 0..100 {
        let at = step * 37 % 100;
        // Every fifth lookup is dropped.
        let Some(lookup) = pending[at].take().filter(|_| step % 5 != 0) else { continue };
        let (mut rows, mut present) = (vec![9.0; 3000], vec![false; 1000]);
        lookup.wait(&mut rows, &mut present).unwrap();
        assert_rows(version_of(at), &batches[at], &rows, &present);
    }
    check(&client, 1, &batches[0]).unwrap();
}

#[test]
fn threads_share_a_connection() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let client = connect(&[&server]);
    thread::scope(|scope| {
        for seed in 0..8 {
            let client = &client;
            scope.spawn(move || (0..200).for_each(|at| check(client, 1, &signs(1 + at * 7, seed)).unwrap()));
        }
    });
    assert_eq!((server.connections().num_open(), server.counters().requests.load(Relaxed)), (1, 1600));
    let counted = || server.counters().latency.buckets().iter().map(|(_, count)| count).sum::<u64>();
    // A request is counted after its answer is sent.
    until("all requests are counted", || counted() == 1600);
}

#[test]
fn signs_of_other_partitions_and_unknown_versions_are_refused() {
    let files = Files::new();
    let server = files.serve(2..5, &[4, 6]);
    let mut peer = Peer::new(&server);
    let own = (0..).find(|sign| (2..5).contains(&partition_of(*sign, PARTITIONS))).unwrap();
    let foreign = (0..).find(|sign| partition_of(*sign, PARTITIONS) == 7).unwrap();
    peer.look_up(1, 4, &[own, foreign]);
    let refused = peer.refusal();
    assert_eq!(refused.reason, Reason::Outdated);
    assert_eq!(refused.text, format!("expected signs of partitions 2 to 5, got {foreign} of 7"));
    peer.look_up(2, 5, &[own]);
    let refused = peer.refusal();
    assert_eq!(
        (refused.reason, refused.text.as_str()),
        (Reason::NoVersion, "version 5: not held by this server, held: 4, 6")
    );
    // The connection can still be used.
    peer.look_up(3, 6, &[own]);
    assert_eq!(peer.receive(), Header { kind: Kind::LookupResult, id: 3 });
    assert_eq!(server.connections().refused.load(Relaxed), 2);
}

#[test]
fn an_inventory_lists_the_versions_and_can_be_requested_again() {
    let files = Files::new();
    let server = files.serve(2..5, &[4]);
    let mut peer = Peer::new(&server);
    server.versions().install(9, files.view(9, 2..5)).unwrap();
    let hello = Hello { run: b"ctr", token: b"secret" };
    peer.send(Kind::Hello, 8, &hello.parts().slices());
    assert_eq!(peer.receive(), Header { kind: Kind::Inventory, id: 8 });
    let inventory = Inventory::decode(peer.body.bytes()).unwrap();
    assert_eq!((inventory.first_partition, inventory.end_partition, inventory.num_partitions), (2, 5, 8));
    assert_eq!((inventory.model, inventory.versions), (&b"ctr"[..], &[[4, 0], [9, 0]][..]));
    let layouts: serde_json::Value = serde_json::from_slice(inventory.layouts).unwrap();
    let columns = serde_json::json!([{"name": "version", "width": 1}, {"name": "deep", "width": 2}]);
    assert_eq!(layouts, serde_json::json!([{"row_type": "f32", "row_bytes": 12, "columns": columns}]));
}

#[test]
fn requests_beyond_the_limit_are_refused() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let most = signs(MAX_LOOKUP_SIGNS as u64, 1);
    let mut peer = Peer::new(&server);
    peer.look_up(1, 1, &most);
    assert_eq!(peer.receive(), Header { kind: Kind::LookupResult, id: 1 });
    assert_eq!(LookupResult::decode(peer.body.bytes()).unwrap().num_signs, MAX_LOOKUP_SIGNS);
    peer.look_up(2, 1, &signs(MAX_LOOKUP_SIGNS as u64 + 1, 1));
    assert_eq!(peer.refusal().reason, Reason::Malformed);
    until("the connection ends", || server.connections().num_open() == 0);
}

#[test]
fn clients_without_the_token_or_of_another_model_are_refused() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let message = |credentials: Credentials| {
        Client::connect(&[vec![address(&server)]], credentials, TIMEOUT).unwrap_err().to_string()
    };
    let at = address(&server);
    let guess = Credentials { token: b"guess".to_vec(), ..credentials() };
    assert_eq!(message(guess), format!("cube shard 0: {at}: expected the token of the model, got another token"));
    let other = Credentials { model: "other".into(), ..credentials() };
    assert_eq!(
        message(other),
        format!("cube shard 0: {at}: expected a client of this model, got a client of another model")
    );
    let unreachable =
        Client::connect(&[vec!["127.0.0.1:1".into()]], credentials(), Duration::from_millis(500)).unwrap_err();
    assert!(matches!(unreachable, ClientError::Unavailable { shard: 0, .. }), "{unreachable}");
    let expected = "cube shard 0: no replica answered in 500 ms: 127.0.0.1:1: ";
    assert!(unreachable.to_string().starts_with(expected), "{unreachable}");
}

#[test]
fn shards_must_make_up_a_table() {
    let files = Files::new();
    let low = files.serve(0..3, &[1]);
    let high = files.serve(3..8, &[1]);
    let middle = files.serve(2..8, &[1]);
    let message = |shards: &[&[&Server]]| {
        let shards: Vec<Vec<String>> =
            shards.iter().map(|shard| shard.iter().map(|server| address(server)).collect()).collect();
        connect_to(&shards).unwrap_err().to_string()
    };
    assert_eq!(message(&[&[&low]]), "cube shards: expected 8 partitions, got 3");
    assert_eq!(message(&[&[&high]]), "cube shards: shard 0: expected partitions that begin at 0, got 3 to 8");
    assert_eq!(
        message(&[&[&low], &[&middle]]),
        "cube shards: shard 1: expected partitions that begin at 3, got 2 to 8"
    );
    let at = address(&high);
    let expected = format!("cube shards: {at} of shard 0: expected partitions 0 to 3 of 8, got 3 to 8 of 8");
    assert_eq!(message(&[&[&low, &high], &[&high]]), expected);
    assert_eq!(message(&[]), "cube shards: expected at least one shard and an address for each, got none");
    let path = files.write(1, RowType::Int8);
    let set = VersionSet::new(0..3, PARTITIONS);
    set.install(1, View::of_base(Arc::new(Cube::open_range(&[path], 0..3).unwrap()))).unwrap();
    let int8 = Server::start(Arc::new(set), identity(), "127.0.0.1:0", None).unwrap();
    let got = message(&[&[&low, &int8], &[&high]]);
    let expected =
        "version 1: expected f32 rows of version 1 + deep 2 as at other replicas, got int8 rows of version 1 + deep 2";
    assert!(got.ends_with(expected), "{got}");
}

#[test]
fn hostile_bytes_end_only_their_own_connection() {
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    let client = connect(&[&server]);
    let mut greeting = Vec::new();
    let hello = Hello { run: b"ctr", token: b"secret" };
    write_frame(&mut greeting, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices()).unwrap();
    let mut lookup = Vec::new();
    write_frame(&mut lookup, Header { kind: Kind::Lookup, id: 1 }, &[&[255; 64]]).unwrap();
    let mut damaged = lookup.clone();
    damaged[40] ^= 1;
    let mut pull = Vec::new();
    write_frame(&mut pull, Header { kind: Kind::Pull, id: 1 }, &[&[0; 64]]).unwrap();
    let mut huge = lookup.clone();
    huge[16..20].copy_from_slice(&(1u32 << 30).to_le_bytes());
    for (number, bytes) in [
        &b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"[..],
        &lookup,
        &[&greeting[..], &lookup].concat(),
        &[&greeting[..], &damaged].concat(),
        &[&greeting[..], &pull].concat(),
        &[&greeting[..], &huge].concat(),
    ]
    .iter()
    .enumerate()
    {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let (mut rest, mut body, mut last) = (answer.as_slice(), Body::default(), None);
        while let Ok(header) = read_frame(&mut rest, 1 << 20, &mut body) {
            last = Some((header.kind, Refusal::decode(body.bytes()).map(|refused| refused.reason)));
        }
        assert_eq!(last, Some((Kind::Refusal, Ok(Reason::Malformed))), "{number}");
        assert_eq!(server.connections().malformed.load(Relaxed), number as u64 + 1);
    }
    // A connection that ends in the middle of a frame.
    TcpStream::connect(server.address()).unwrap().write_all(&greeting[..20]).unwrap();
    check(&client, 1, &signs(1000, 1)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_server_survives_any_body(body in prop::collection::vec(prop::sample::select(vec![0u8, 0, 0, 1, 2, 255]), 0..120)) {
        thread_local! {
            static SERVER: (Files, Server) = {
                let files = Files::new();
                let server = files.serve(0..3, &[1]);
                (files, server)
            };
        }
        SERVER.with(|(_, server)| {
            let mut peer = Peer::new(server);
            peer.send(Kind::Lookup, 1, &[&body]);
            let header = peer.receive();
            assert!(matches!(header.kind, Kind::LookupResult | Kind::Refusal), "{header:?}");
        });
    }
}

#[test]
fn a_client_ends_a_connection_with_wrong_answers() {
    let files = Files::new();
    let good = files.serve(0..8, &[1]);
    // A server with the inventory of the good one. It answers with rows of another version, with an unknown request number, or
    // with too few rows.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let bad = listener.local_addr().unwrap().to_string();
    let mut peer = Peer::new(&good);
    let hello = Hello { run: b"ctr", token: b"secret" };
    peer.send(Kind::Hello, 0, &hello.parts().slices());
    peer.receive();
    let greeting = peer.body.bytes().to_vec();
    thread::spawn(move || {
        for number in 0.. {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut body = Body::default();
            drop(read_frame(&mut stream, 1 << 20, &mut body));
            drop(write_frame(&mut stream, Header { kind: Kind::Inventory, id: 0 }, &[&greeting]));
            let Ok(header) = read_frame(&mut stream, 1 << 20, &mut body) else { continue };
            let answer = |version, num_signs, id| {
                (LookupResult { version, row_bytes: 12, present: &[0], rows: &[0; 12], num_signs }, id)
            };
            let (found, id) =
                [answer(2, 1, header.id), answer(1, 1, header.id + 9), answer(1, 1, header.id)][number % 3];
            drop(write_frame(&mut stream, Header { kind: Kind::LookupResult, id }, &found.parts().slices()));
            drop(stream.read(&mut [0]));
        }
    });
    let client = connect_to(&[vec![bad, address(&good)]]).unwrap();
    for seed in 0..200 {
        check(&client, 1, &signs(100, seed)).unwrap();
    }
}

#[test]
fn closed_connections_leave_no_open_descriptors() {
    let open = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let files = Files::new();
    let server = files.serve(0..8, &[1]);
    check(&connect(&[&server]), 1, &[1]).unwrap();
    let before = open();
    for seed in 0..60 {
        check(&connect(&[&server]), 1, &signs(10, seed)).unwrap();
    }
    // Other tests of this process open a few descriptors too; 60 leaked connections would leave 200 to 300.
    until("descriptors are closed", || open() <= before + 50);
    until("connections end", || server.connections().num_open() == 0);
}
