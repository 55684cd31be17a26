//! Cubes whose rows contain their version and their sign, and servers of these cubes.
#![allow(clippy::unwrap_used, dead_code, reason = "a test fails by panicking, and no test file uses all of this")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticrec_cube::client::Credentials;
use elasticrec_cube::server::Identity;
use elasticrec_cube::{Client, ClientError, Column, Cube, CubeWriter, RowType, Server, VersionSet, View};
use elasticrec_table::partition::partition_of;

pub const PARTITIONS: u32 = 8;
pub const WIDTH: usize = 3;
pub const NUM_ROWS: u64 = 5000;
pub const TIMEOUT: Duration = Duration::from_secs(60);

pub fn columns() -> Vec<Column> {
    vec![Column { name: "version".into(), width: 1 }, Column { name: "deep".into(), width: 2 }]
}

/// Signs below `NUM_ROWS` have a row, others have none.
pub fn row_of(version: u64, sign: u64) -> [f32; WIDTH] {
    if sign < NUM_ROWS { [version as f32, sign as f32, -1.0] } else { [0.0; WIDTH] }
}

/// A folder of part files.
pub struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    pub fn new() -> Files {
        Files { dir: tempfile::tempdir().unwrap() }
    }

    /// Returns the part file of a version, and writes it first if it does not exist.
    pub fn write(&self, version: u64, row_type: RowType) -> PathBuf {
        let path = self.dir.path().join(format!("{version}-{row_type}"));
        if path.exists() {
            return path;
        }
        let mut writer = CubeWriter::create(&path, columns(), row_type, PARTITIONS).unwrap();
        for partition in 0..PARTITIONS {
            let own: Vec<u64> = (0..NUM_ROWS).filter(|sign| partition_of(*sign, PARTITIONS) == partition).collect();
            let fill = |i: usize, values: &mut [f32]| values.copy_from_slice(&row_of(version, own[i]));
            writer.write_partition(partition, &own, fill).unwrap();
        }
        writer.finish().unwrap();
        path
    }

    /// Opens some partitions of a version.
    pub fn view(&self, version: u64, range: Range<u32>) -> View {
        View::of_base(Arc::new(Cube::open_range(&[self.write(version, RowType::F32)], range).unwrap()))
    }

    /// Starts a server of some partitions with these versions.
    pub fn serve(&self, range: Range<u32>, versions: &[u64]) -> Server {
        self.serve_at("127.0.0.1:0", range, versions)
    }

    /// Like [`serve`](Files::serve), at the address of an earlier server.
    pub fn serve_at(&self, address: &str, range: Range<u32>, versions: &[u64]) -> Server {
        let set = Arc::new(VersionSet::new(range.clone(), PARTITIONS));
        for version in versions {
            set.install(*version, self.view(*version, range.clone())).unwrap();
        }
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match Server::start(set.clone(), identity(), address, None) {
                Ok(server) => return server,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    }
}

pub fn identity() -> Identity {
    Identity { model: "ctr".into(), token: b"secret".to_vec() }
}

pub fn credentials() -> Credentials {
    Credentials { model: "ctr".into(), token: b"secret".to_vec(), tls: None }
}

pub fn address(server: &Server) -> String {
    server.address().to_string()
}

/// Connects to shards with one replica each.
pub fn connect(servers: &[&Server]) -> Client {
    let addresses: Vec<Vec<String>> = servers.iter().map(|server| vec![address(server)]).collect();
    connect_to(&addresses).unwrap()
}

pub fn connect_to(addresses: &[Vec<String>]) -> Result<Client, ClientError> {
    Client::connect(addresses, credentials(), TIMEOUT)
}

/// Returns signs in random order; some have no row, and some are repeated.
pub fn signs(count: u64, seed: u64) -> Vec<u64> {
    let sign = |at: u64| (at.wrapping_add(seed)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (0..count).map(|at| sign(at) % (NUM_ROWS + NUM_ROWS / 10)).collect()
}

/// Looks signs up and checks every row.
pub fn check(client: &Client, version: u64, signs: &[u64]) -> Result<(), ClientError> {
    let (mut rows, mut present) = (vec![f32::NAN; signs.len() * WIDTH], vec![false; signs.len()]);
    let hits = client.get(version, signs, &mut rows, &mut present)?;
    assert_rows(version, signs, &rows, &present);
    assert_eq!(hits, signs.iter().filter(|sign| **sign < NUM_ROWS).count());
    Ok(())
}

pub fn assert_rows(version: u64, signs: &[u64], rows: &[f32], present: &[bool]) {
    for ((sign, row), present) in signs.iter().zip(rows.chunks(WIDTH)).zip(present) {
        assert_eq!(row, row_of(version, *sign), "row of {sign}");
        assert_eq!(*present, *sign < NUM_ROWS, "{sign}");
    }
}

/// Waits until a condition holds; `what` names it if it never does.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
