//! The cube server: versions of some partitions, looked up over connections. A thread each reads requests and answers them in
//! their order; nothing of one waits for another.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use elasticrec_wire::{FrameError, Gate, Listening, Lookup, Refusal, ServerTls, Service, Stream};

use self::connection::Connection;
pub use self::latency::Latency;
use crate::versions::VersionSet;

mod connection;
mod latency;

/// What a server did so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Lookups that were answered.
    pub requests: AtomicU64,
    /// Signs in them.
    pub keys: AtomicU64,
    /// Of those, signs without a row.
    pub misses: AtomicU64,
    /// Bytes of rows that were sent.
    pub bytes: AtomicU64,
    /// Requests and peers that were refused.
    pub refused: AtomicU64,
    /// Connections that ended with bytes that are no request.
    pub malformed: AtomicU64,
    /// From a request that is there in full to an answer that is with the socket.
    pub latency: Latency,
}

/// Who a server is and whom it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Whose rows it has.
    pub model: String,
    /// What clients have to show; empty for none.
    pub token: Vec<u8>,
}

/// A store that answers on a socket.
pub struct Server {
    shared: Arc<Shared>,
    listening: Listening,
}

struct Shared {
    store: Arc<VersionSet>,
    identity: Identity,
    counters: Counters,
    gate: Arc<Gate>,
    /// What it tells of itself in every greeting.
    about: RwLock<String>,
}

impl Server {
    /// Listens and answers on threads of its own, with TLS if it has a certificate.
    pub fn start(
        store: Arc<VersionSet>,
        identity: Identity,
        address: &str,
        tls: Option<ServerTls>,
    ) -> io::Result<Server> {
        let gate = Arc::new(Gate::default());
        let (counters, about) = (Counters::default(), RwLock::default());
        let shared = Arc::new(Shared { store, identity, counters, gate: gate.clone(), about });
        let listening = Listening::start("cube", address, tls, gate, shared.clone())?;
        Ok(Server { shared, listening })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listening.address()
    }

    /// The versions it holds.
    pub fn store(&self) -> &Arc<VersionSet> {
        &self.shared.store
    }

    /// Says how it is in every greeting from now on, a JSON object.
    pub fn set_about(&self, about: String) {
        *self.shared.about.write().unwrap_or_else(PoisonError::into_inner) = about;
    }

    /// What it did so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Looks rows up as a client would, into `rows` and `present`, which are grown; returns the bytes of a row.
    pub fn seek(
        &self,
        version: u64,
        signs: &[u64],
        rows: &mut Vec<u8>,
        present: &mut Vec<u64>,
    ) -> Result<usize, Refusal> {
        let found = self.shared.look_up(&Lookup { version, signs }, rows, present)?;
        Ok(found.row_bytes as usize)
    }

    /// Connections that are open.
    pub fn num_connections(&self) -> usize {
        self.shared.gate.num_open()
    }

    /// Tells clients to go elsewhere, answers what they have sent, and ends.
    pub fn stop(&self) {
        self.listening.stop();
    }
}

impl Service for Shared {
    fn talk(&self, stream: Stream, deadline: Instant) -> Result<(), FrameError> {
        Connection::new(self, stream)?.run(deadline)
    }

    fn note_refused(&self) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn note_malformed(&self) {
        self.counters.malformed.fetch_add(1, Ordering::Relaxed);
    }
}
