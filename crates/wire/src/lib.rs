//! The TCP protocol between trainers and parameter servers, and between cube servers and their clients.
//!
//! `docs/formats/wire.md` describes the bytes. From the bottom up:
//!
//! - `frame`: length, version and checksum of each frame, nothing about its meaning;
//! - `message`: pulls, pushes, lookups and their answers, with arrays that are used in place;
//! - `tls`, `stream`: a connection, with or without TLS;
//! - `handshake`: hello, token and greeting, for clients and servers;
//! - `listen`, `peer`: the listening end of a server, and each of its connections.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod frame;
pub mod handshake;
pub mod listen;
pub mod message;
pub mod peer;
pub mod stream;
pub mod tls;

pub use frame::{Body, FrameError, FrameReader, Header, Kind, read_frame, write_frame};
pub use handshake::{Access, ConnectError, Connector, Greeting, read_greeting};
pub use listen::{Connections, Listener, Service};
pub use message::{
    Group, Hello, Inventory, Lookup, LookupResult, MessageError, Pull, Push, PushAck, PushHeader, Reason, Refusal,
    Rows, StepQuery, StepStatus, Welcome,
};
pub use peer::Peer;
pub use stream::Stream;
pub use tls::{ClientTls, ServerTls, TlsError};

/// Locks a mutex and ignores poison. Only for content that stays consistent if a holder panics, or whose next use then
/// fails.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
