//! What the roles of a system say to each other on TCP.
//!
//! `frame` puts bytes on the wire and takes them off it: length, version, checksum, nothing about what they mean.
//! `message` is what they mean: pulls, pushes, lookups and their answers, with arrays that are used where they lie. The bytes
//! are described in `docs/formats/wire.md`. `stream` is a connection, with or without `tls`; `listen` the end of it that lets
//! others in.

pub mod frame;
pub mod listen;
pub mod message;
pub mod stream;
pub mod tls;

pub use frame::{Body, FrameError, Header, Incoming, Kind, read_frame, write_frame};
pub use listen::{Expected, Gate, Listening, Service};
pub use message::{
    Group, Hello, Inventory, Lookup, LookupResult, MessageError, Pull, Push, PushAck, Reason, Refusal, Rows, StepQuery,
    StepStatus, Welcome,
};
pub use stream::Stream;
pub use tls::{ClientTls, ServerTls, TlsError};
