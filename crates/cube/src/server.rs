//! The cube server: answers lookups in versions of some partitions. Each connection has a thread that answers its requests
//! in order; connections do not wait for each other.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use elasticrec_wire::{Connections, FrameError, Listener, Lookup, Refusal, ServerTls, Service, Stream};

use self::connection::Connection;
pub use self::latency::Latency;
use crate::versions::VersionSet;

mod connection;
mod latency;

/// Counters of a server since its start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Lookups answered.
    pub requests: AtomicU64,
    /// Signs in these lookups.
    pub keys: AtomicU64,
    /// Signs without a row.
    pub misses: AtomicU64,
    /// Bytes of rows sent.
    pub bytes: AtomicU64,
    /// Time from a complete request to its answer in the socket.
    pub latency: Latency,
}

/// The model of a server and the token of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The model.
    pub model: String,
    /// The token that clients must show; empty for none.
    pub token: Vec<u8>,
}

/// A set of versions that answers lookups on a socket.
pub struct Server {
    shared: Arc<Shared>,
    listener: Listener,
}

struct Shared {
    versions: Arc<VersionSet>,
    identity: Identity,
    counters: Counters,
    connections: Arc<Connections>,
    /// The server's description of itself in every inventory.
    about: RwLock<String>,
}

impl Server {
    /// Listens and answers on its own threads, with TLS if there is a certificate.
    pub fn start(
        versions: Arc<VersionSet>,
        identity: Identity,
        address: &str,
        tls: Option<ServerTls>,
    ) -> io::Result<Server> {
        let connections = Arc::new(Connections::default());
        let (counters, about) = (Counters::default(), RwLock::default());
        let shared = Arc::new(Shared { versions, identity, counters, connections: connections.clone(), about });
        let listener = Listener::start("cube", address, tls, connections, shared.clone())?;
        Ok(Server { shared, listener })
    }

    /// The address that the server listens at.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// The versions that the server holds.
    pub fn versions(&self) -> &Arc<VersionSet> {
        &self.shared.versions
    }

    /// Sets the server's description of itself, a JSON object, which it sends with every inventory.
    pub fn set_about(&self, about: String) {
        *self.shared.about.write().unwrap_or_else(PoisonError::into_inner) = about;
    }

    /// The counters since the start.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Looks signs up like a client; the buffers grow as needed. Returns the bytes of a row.
    pub fn look_up(
        &self,
        version: u64,
        signs: &[u64],
        rows: &mut Vec<u8>,
        present: &mut Vec<u64>,
    ) -> Result<usize, Refusal> {
        let result = self.shared.look_up(&Lookup { version, signs }, rows, present)?;
        Ok(result.row_bytes as usize)
    }

    /// The connections of the server.
    pub fn connections(&self) -> &Connections {
        &self.shared.connections
    }

    /// Stops the server: it sends clients to other replicas and answers the requests that have arrived.
    pub fn stop(&self) {
        self.listener.stop();
    }
}

impl Service for Shared {
    fn serve(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError> {
        Connection::new(self, stream)?.run(deadline)
    }
}
