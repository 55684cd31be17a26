//! TLS certificates and keys from PEM files, and the messages for peers with the wrong ones.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use thiserror::Error;

/// The reason TLS could not be set up.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A certificate or key file cannot be used.
    #[error("tls: {path}: {what}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// The peer has the wrong certificate or does not speak TLS; a retry does not help.
    #[error("{0}")]
    Peer(String),
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        TlsError::Peer(describe(&error))
    }
}

fn describe(error: &rustls::Error) -> String {
    use CertificateError::{
        BadSignature, Expired, ExpiredContext, NotValidForName, NotValidForNameContext, NotValidYet,
        NotValidYetContext, UnknownIssuer,
    };
    match error {
        rustls::Error::InvalidCertificate(problem) => match problem {
            UnknownIssuer | BadSignature => "its certificate is not signed by an authority of the `ca` file".into(),
            Expired | ExpiredContext { .. } => "its certificate has expired".into(),
            NotValidYet | NotValidYetContext { .. } => "its certificate is not valid yet".into(),
            NotValidForName => "its certificate is for another host".into(),
            NotValidForNameContext { expected, presented } => {
                // The library formats names as `DnsName("a")` and `IpAddress(10.0.0.1)`.
                let names = if presented.is_empty() { "none".into() } else { presented.join(", ") };
                format!("its certificate is for another host: expected `{}`, got {names}", expected.to_str())
            }
            // The library has no variant for this error.
            other if format!("{other:?}").contains("CaUsedAsEndEntity") => {
                "its certificate is the authority's own: expected a server certificate signed by the authority".into()
            }
            other => format!("its certificate cannot be used: {other}"),
        },
        rustls::Error::InvalidMessage(_) => "expected TLS, got something else: TLS is off at the other end".into(),
        rustls::Error::AlertReceived(alert) => format!("the peer refused TLS: {alert:?}"),
        other => format!("tls: {other}"),
    }
}

fn file_error(path: &Path) -> impl Fn(rustls::pki_types::pem::Error) -> TlsError {
    move |error| {
        let what = match error {
            rustls::pki_types::pem::Error::Io(error) => match error.kind() {
                io::ErrorKind::NotFound => "no such file".into(),
                _ => error.to_string(),
            },
            rustls::pki_types::pem::Error::NoItemsFound => "expected a private key in PEM, got none".into(),
            _ => "expected PEM, got something else".into(),
        };
        TlsError::File { path: path.into(), what }
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(file_error(path))?.collect();
    let found = found.map_err(file_error(path))?;
    if found.is_empty() {
        return Err(TlsError::File { path: path.into(), what: "expected certificates in PEM, got none".into() });
    }
    Ok(found)
}

/// The certificate and key of a server.
#[derive(Debug, Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
}

impl ServerTls {
    /// Reads the certificate, followed by any intermediate certificates, and the key.
    pub fn from_pem(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let mut config = server_config(certificate, key, &[&rustls::version::TLS13])?;
        // Connections live as long as their processes, so session tickets would never be used.
        config.send_tls13_tickets = 0;
        Ok(ServerTls { config: Arc::new(config) })
    }

    /// Like [`from_pem`](ServerTls::from_pem), for clients other than ElasticREC's roles: also TLS 1.2, and ALPN for the
    /// given protocols.
    pub fn for_external_clients(certificate: &Path, key: &Path, protocols: &[&[u8]]) -> Result<Self, TlsError> {
        let mut config = server_config(certificate, key, rustls::ALL_VERSIONS)?;
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(ServerTls { config: Arc::new(config) })
    }

    /// Returns the rustls configuration.
    pub fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    pub(crate) fn session(&self) -> Result<ServerConnection, TlsError> {
        Ok(ServerConnection::new(self.config.clone())?)
    }
}

fn server_config(
    certificate: &Path,
    key: &Path,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> Result<ServerConfig, TlsError> {
    let chain = certificates(certificate)?;
    let key_bytes = PrivateKeyDer::from_pem_file(key).map_err(file_error(key))?;
    let unusable = |error: rustls::Error| {
        let what = match error {
            rustls::Error::InconsistentKeys(_) => {
                format!("does not match the certificate in {}", certificate.display())
            }
            other => format!("cannot be used with {}: {other}", certificate.display()),
        };
        TlsError::File { path: key.into(), what }
    };
    ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(versions)
        .map_err(unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key_bytes)
        .map_err(unusable)
}

/// The authorities that a client trusts.
#[derive(Debug, Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
}

impl ClientTls {
    /// Reads the certificates of the authorities.
    pub fn from_pem(authorities: &Path) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        let unusable = |error: rustls::Error| TlsError::File {
            path: authorities.into(),
            what: format!("cannot be used: {error}"),
        };
        for certificate in certificates(authorities)? {
            roots.add(certificate).map_err(unusable)?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unusable)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(ClientTls { config: Arc::new(config) })
    }

    pub(crate) fn session(&self, host: &str) -> Result<ClientConnection, TlsError> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| TlsError::Peer(format!("expected a host name or an address, got `{host}`")))?;
        Ok(ClientConnection::new(self.config.clone(), name)?)
    }
}
