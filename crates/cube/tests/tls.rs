//! TLS between cube servers and clients: accepted clients, error messages, deadlines. The tests of `ps` cover TLS itself.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Files, PARTITIONS, TIMEOUT, address, check, credentials, identity, signs};
use elasticrec_cube::client::Credentials;
use elasticrec_cube::{Client, ClientError, Server, VersionSet};
use elasticrec_wire::{ClientTls, ServerTls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Creates a certificate for this machine, and a client configuration that trusts it.
fn certificates() -> (ServerTls, ClientTls) {
    let dir = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let signed = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    let file = |name: &str, text: String| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let server = ServerTls::from_pem(&file("cert.pem", signed.pem()), &file("key.pem", key.serialize_pem())).unwrap();
    (server, ClientTls::from_pem(&file("ca.pem", issuer.pem())).unwrap())
}

fn serve(files: &Files, tls: Option<ServerTls>) -> Server {
    let set = VersionSet::new(0..PARTITIONS, PARTITIONS);
    set.install(1, files.view(1, 0..PARTITIONS)).unwrap();
    Server::start(Arc::new(set), identity(), "127.0.0.1:0", tls).unwrap()
}

fn connect(server: &Server, tls: Option<ClientTls>) -> Result<Client, ClientError> {
    Client::connect(&[vec![address(server)]], Credentials { tls, ..credentials() }, TIMEOUT)
}

#[test]
fn rows_can_be_looked_up_over_tls() {
    let files = Files::new();
    let (server, client) = certificates();
    let server = serve(&files, Some(server));
    let client = connect(&server, Some(client)).unwrap();
    let batches: Vec<Vec<u64>> = (0..10).map(|seed| signs(50_000, seed)).collect();
    let pending: Vec<_> = batches.iter().map(|signs| client.lookup(1, signs).unwrap()).collect();
    drop(pending);
    std::thread::scope(|scope| {
        for signs in &batches {
            let client = &client;
            scope.spawn(move || check(client, 1, signs).unwrap());
        }
    });
}

#[test]
fn a_client_with_other_tls_settings_is_refused() {
    let files = Files::new();
    let (server_tls, client_tls) = certificates();
    let (_, other_authority) = certificates();
    let server = serve(&files, Some(server_tls));
    let message = |server: &Server, tls| {
        let error = connect(server, tls).unwrap_err();
        assert!(matches!(error, ClientError::Permanent { .. }), "{error}");
        error.to_string().replace(&address(server), "here")
    };
    assert_eq!(message(&server, None), "cube shard 0: here: expected TLS, got a plain connection");
    let expected = "cube shard 0: here: its certificate is not signed by an authority of the `ca` file";
    assert_eq!(message(&server, Some(other_authority)), expected);
    let plain = serve(&files, None);
    let expected = "cube shard 0: here: expected TLS, got something else: TLS is off at the other end";
    assert_eq!(message(&plain, Some(client_tls.clone())), expected);
    check(&connect(&server, Some(client_tls)).unwrap(), 1, &signs(10, 1)).unwrap();
}

#[test]
fn a_lookup_over_tls_ends_at_its_deadline() {
    let files = Files::new();
    let (server_tls, client_tls) = certificates();
    let server = serve(&files, Some(server_tls));
    let credentials = Credentials { tls: Some(client_tls), ..credentials() };
    let client = Client::connect(&[vec![address(&server)]], credentials, Duration::from_secs(4)).unwrap();
    check(&client, 1, &signs(100, 1)).unwrap();
    drop(server);
    let error = check(&client, 1, &signs(100, 1)).unwrap_err();
    assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
}
