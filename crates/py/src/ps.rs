//! Python bindings of the parameter servers: errors and TLS.

mod client;
mod server;

use std::path::PathBuf;

use elasticrec_ps::{ClientError, ShardError};
use elasticrec_wire::{ClientTls, Reason, ServerTls, TlsError};
use pyo3::prelude::*;

pub(crate) use self::client::{PsClient, PsCloser, PullTicket, PushTicket, Staleness};
pub(crate) use self::server::{Moment, PsServer, read_dense_parts};
use crate::errors::{ConfigError, IntoPyErr, ModelError, UnavailableError};

impl IntoPyErr for ShardError {
    fn into_py_err(self) -> PyErr {
        match self {
            ShardError::Rows(error) => error.into_py_err(),
            ShardError::Part(error) => error.into_py_err(),
            ShardError::Cube(error) => error.into_py_err(),
            error @ ShardError::Other { .. } => ModelError::new_err(error.to_string()),
        }
    }
}

impl IntoPyErr for ClientError {
    fn into_py_err(self) -> PyErr {
        match &self {
            // A retry would not help.
            ClientError::Permanent { .. } => ConfigError::new_err(self.to_string()),
            ClientError::Refused { refused, .. }
                if matches!(refused.reason, Reason::Unauthorized | Reason::Malformed) =>
            {
                ConfigError::new_err(self.to_string())
            }
            _ => UnavailableError::new_err(self.to_string()),
        }
    }
}

impl IntoPyErr for TlsError {
    fn into_py_err(self) -> PyErr {
        ConfigError::new_err(self.to_string())
    }
}

/// The TLS files of a role, read once: certificate and key of a server, authorities that a client trusts.
#[pyclass(frozen, module = "elasticrec._core")]
pub(crate) struct PsTls {
    pub(crate) server: Option<ServerTls>,
    pub(crate) client: Option<ClientTls>,
}

#[pymethods]
impl PsTls {
    /// Read PEM files; `cert` and `key` belong together.
    #[new]
    #[pyo3(signature = (*, cert, key, ca))]
    fn new(cert: Option<PathBuf>, key: Option<PathBuf>, ca: Option<PathBuf>) -> PyResult<Self> {
        let server = match (cert, key) {
            (Some(cert), Some(key)) => Some(ServerTls::from_pem(&cert, &key).map_err(IntoPyErr::into_py_err)?),
            (None, None) => None,
            _ => return Err(ConfigError::new_err("tls: expected a certificate and its key, got one of them")),
        };
        let client = ca.map(|ca| ClientTls::from_pem(&ca)).transpose().map_err(IntoPyErr::into_py_err)?;
        Ok(PsTls { server, client })
    }
}
