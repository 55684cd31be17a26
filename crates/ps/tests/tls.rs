//! TLS between servers and clients: accepted and rejected certificates, error messages, encryption of the traffic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_ps::client::{Credentials, PullOptions, ShardSplit};
use elasticrec_ps::{Client, ClientError, DenseOptimizer, Identity, Server, Shard, ShardSpec};
use elasticrec_table::TableSpec;
use elasticrec_wire::frame::{Header, Kind, write_frame};
use elasticrec_wire::{ClientTls, Hello, Reason, ServerTls, TlsError};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};

const TIMEOUT: Duration = Duration::from_secs(60);
const TOKEN: &str = "a-token-that-must-not-be-seen";

/// A certificate authority, with the files of the certificates that it signs.
struct Authority {
    dir: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        std::fs::write(dir.path().join("ca.key"), issuer.key().serialize_pem()).unwrap();
        Authority { dir, issuer }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns certificate and key of a server; `change` may modify the certificate before it is signed.
    fn sign(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> ServerTls {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(self.file("cert.key"), key.serialize_pem()).unwrap();
        ServerTls::from_pem(&self.file("cert.pem"), &self.file("cert.key")).unwrap()
    }

    fn server(&self) -> ServerTls {
        self.sign("127.0.0.1", |_| {})
    }

    fn client(&self) -> ClientTls {
        ClientTls::from_pem(&self.file("ca.pem")).unwrap()
    }
}

fn start(tls: Option<ServerTls>) -> Server {
    let table = r#"{"name":"main","seed":7,"partitions":8,"columns":[{"name":"deep","width":8,"init_scale":0.5}],
        "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
    let table = TableSpec::from_json(table).unwrap();
    let dense = DenseOptimizer::Sgd { learning_rate: 0.125 };
    let shard =
        Shard::new(ShardSpec { table, num_dense: 21, num_buffers: 0, dense, num_sums: 0, owned: 0..8 }, 1).unwrap();
    let identity = Identity { run: b"run".to_vec(), token: TOKEN.into(), incarnation: 1, epoch: 1 };
    let server = Server::start(shard, identity, "127.0.0.1:0", tls).unwrap();
    server.extend_lease(Instant::now(), Duration::from_secs(600));
    server
}

fn connect_to(address: &str, tls: Option<ClientTls>) -> Result<Client, ClientError> {
    let credentials = Credentials { run: b"run".to_vec(), token: TOKEN.into(), tls };
    Client::connect(&[address.to_owned()], &credentials, 8, TIMEOUT)
}

fn connect(server: &Server, tls: Option<ClientTls>) -> Result<Client, ClientError> {
    connect_to(&server.address().to_string(), tls)
}

/// Returns the error of a client that must not retry.
fn unfit(result: Result<Client, ClientError>) -> String {
    match result.unwrap_err() {
        ClientError::Permanent { what, .. } => what,
        other => panic!("expected `ClientError::Permanent`, got {other}"),
    }
}

#[test]
fn many_large_answers_may_be_in_flight() {
    let authority = Authority::new();
    let server = start(Some(authority.server()));
    let client = connect(&server, Some(authority.client())).unwrap();
    let signs: Vec<u64> = (0..50_000).collect();
    let mut split = ShardSplit::default();
    client.split(&signs, &mut split);
    let pulls: Vec<_> =
        (0..10).map(|_| client.pull(&split, PullOptions { dense: true, ..PullOptions::default() }).unwrap()).collect();
    for tickets in &pulls {
        let (mut rows, mut dense) = (vec![9.0; 8 * signs.len()], vec![9.0; 21]);
        client.receive(tickets, &split, &mut rows, Some(&mut dense)).unwrap();
        assert!(rows.iter().chain(&dense).all(|value| *value == 0.0));
    }
    assert_eq!(server.counters().pulled_signs.load(Ordering::Relaxed), 500_000);
}

#[test]
fn a_server_that_stops_ends_tls_connections() {
    let authority = Authority::new();
    let mut server = start(Some(authority.server()));
    let client = connect(&server, Some(authority.client())).unwrap();
    server.stop();
    let mut split = ShardSplit::default();
    client.split(&[1], &mut split);
    let sent = client.pull(&split, PullOptions::default());
    let lost = sent.and_then(|tickets| client.receive(&tickets, &split, &mut [0.0; 8], None)).unwrap_err();
    assert!(matches!(lost, ClientError::Lost { .. }), "{lost}");
}

#[test]
fn invalid_certificates_are_rejected() {
    let (authority, other) = (Authority::new(), Authority::new());
    let unfit = |tls: ServerTls, client: ClientTls| unfit(connect(&start(Some(tls)), Some(client)));
    let other_authority = "its certificate is not signed by an authority of the `ca` file";
    assert_eq!(unfit(authority.server(), other.client()), other_authority);
    let expired = authority.sign("127.0.0.1", |params| params.not_after = date_time_ymd(2020, 1, 1));
    assert_eq!(unfit(expired, authority.client()), "its certificate has expired");
    let early = authority.sign("127.0.0.1", |params| params.not_before = date_time_ymd(4000, 1, 1));
    assert_eq!(unfit(early, authority.client()), "its certificate is not valid yet");
    let elsewhere = unfit(authority.sign("ps-1.example.org", |_| {}), authority.client());
    let expected = "its certificate is for another host: expected `127.0.0.1`, got DnsName(\"ps-1.example.org\")";
    assert_eq!(elsewhere, expected);
    let itself = ServerTls::from_pem(&authority.file("ca.pem"), &authority.file("ca.key")).unwrap();
    let expected = "its certificate is the authority's own: expected a server certificate signed by the authority";
    assert_eq!(unfit(itself, authority.client()), expected);
}

#[test]
fn a_connection_with_tls_at_one_end_only_is_refused() {
    let authority = Authority::new();
    let server = start(Some(authority.server()));
    match connect(&server, None).unwrap_err() {
        ClientError::Refused { refused, .. } => {
            assert_eq!(refused.reason, Reason::Unauthorized);
            assert_eq!(refused.text, "expected TLS, got a plain connection");
        }
        other => panic!("expected a refusal, got {other}"),
    }
    connect(&server, Some(authority.client())).unwrap();
    let plain = start(None);
    let unfit = unfit(connect(&plain, Some(authority.client())));
    assert_eq!(unfit, "expected TLS, got something else: TLS is off at the other end");
    connect(&plain, None).unwrap();
}

#[test]
fn hostile_handshakes_do_not_block_other_clients() {
    let authority = Authority::new();
    let server = start(Some(authority.server()));
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let mut half_started = TcpStream::connect(server.address()).unwrap();
    half_started.write_all(&[22, 3, 1, 255, 255, 1]).unwrap();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[22, 3, 1, 0, 4, 1, 2, 3, 4], &[22; 100_000]] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        // The server may end the connection before it has read everything.
        drop(stream.write_all(bytes));
        drop(stream.read_to_end(&mut Vec::new()));
    }
    connect(&server, Some(authority.client())).unwrap();
    assert!(server.connections().malformed.load(Ordering::Relaxed) >= 3);
    drop((silent, half_started));
}

#[test]
fn a_handshake_and_a_hello_have_one_deadline() {
    let authority = Authority::new();
    // This server sends one byte at a time and never completes the handshake; the client must give up at its deadline.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        for byte in [22, 3, 3, 64, 0].into_iter().chain(std::iter::repeat(2)) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    });
    let credentials = Credentials { run: b"run".to_vec(), token: TOKEN.into(), tls: Some(authority.client()) };
    let started = Instant::now();
    let error = Client::connect(&[address], &credentials, 8, Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    assert!(error.to_string().ends_with("did not answer in time"), "{error}");
    assert!(started.elapsed() < TIMEOUT);
}

/// Starts a proxy that records what the client of one connection sends.
fn eavesdrop(target: &Server) -> (String, thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let target = target.address();
    let recorder = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(target).unwrap();
        let (mut back, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answers = thread::spawn(move || drop(std::io::copy(&mut back, &mut to)));
        let (mut recorded, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            recorded.extend_from_slice(&buffer[..count]);
            server.write_all(&buffer[..count]).unwrap();
        }
        drop(server.shutdown(std::net::Shutdown::Both));
        answers.join().unwrap();
        recorded
    });
    (address, recorder)
}

#[test]
fn an_eavesdropper_sees_no_token() {
    let authority = Authority::new();
    for tls in [false, true] {
        let server = start(tls.then(|| authority.server()));
        let (address, recorder) = eavesdrop(&server);
        drop(connect_to(&address, tls.then(|| authority.client())).unwrap());
        let recorded = recorder.join().unwrap();
        let has_token = recorded.windows(TOKEN.len()).any(|window| window == TOKEN.as_bytes());
        assert_eq!(has_token, !tls, "{} bytes", recorded.len());
    }
}

#[test]
fn another_protocol_version_is_named_in_the_error() {
    let server = start(None);
    let mut hello = Vec::new();
    let body = Hello { run: b"run", token: TOKEN.as_bytes() };
    write_frame(&mut hello, Header { kind: Kind::Hello, id: 0 }, &body.parts().slices()).unwrap();
    hello[4] += 1;
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer));
    let ours = hello[4] - 1;
    let text = format!("expected protocol version {ours}, got {}", hello[4]);
    assert!(String::from_utf8_lossy(&answer).contains(&text));
    // The client checks the version of the server's answer too.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    answer[4] += 1;
    let answering = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&answer).unwrap();
        drop(stream.read(&mut [0; 4096]));
    });
    assert_eq!(unfit(connect_to(&address, None)), text);
    answering.join().unwrap();
}

#[test]
fn unusable_files_are_named_in_the_error() {
    let (authority, other) = (Authority::new(), Authority::new());
    drop((authority.server(), other.server()));
    let empty = authority.file("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let broken = authority.file("broken.pem");
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    let (certificate, key) = (authority.file("cert.pem"), authority.file("cert.key"));
    let server = |certificate: &Path, key: &Path| ServerTls::from_pem(certificate, key).map(drop);
    let client = |path: &Path| ClientTls::from_pem(path).map(drop);
    let unfit = |result: Result<(), TlsError>, path: &Path| {
        let text = result.unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
        text.strip_prefix(&format!("tls: {}: ", path.display())).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert_eq!(unfit(client(&authority.file("none")), &authority.file("none")), "no such file");
    assert_eq!(unfit(client(&empty), &empty), "expected certificates in PEM, got none");
    assert_eq!(unfit(client(&key), &key), "expected certificates in PEM, got none");
    assert!(unfit(client(&broken), &broken).starts_with("cannot be used: "));
    assert_eq!(unfit(server(&certificate, &empty), &empty), "expected a private key in PEM, got none");
    assert_eq!(unfit(server(&certificate, &certificate), &certificate), "expected a private key in PEM, got none");
    let other_key = other.file("cert.key");
    let expected = format!("does not match the certificate in {}", certificate.display());
    assert_eq!(unfit(server(&certificate, &other_key), &other_key), expected);
    assert!(unfit(server(&broken, &key), &key).starts_with("cannot be used with "));
}
