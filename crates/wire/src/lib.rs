//! The protocol between trainers and parameter servers.
//!
//! `frame` puts bytes on the wire and takes them off it: length, version, checksum, nothing about what they mean.
//! `message` is what they mean: pulls, pushes and their answers, with arrays that are used where they lie. The bytes
//! are described in `docs/formats/wire.md`.

pub mod frame;
pub mod message;

pub use frame::{Body, FrameError, Header, Kind, read_frame, write_frame};
pub use message::{Hello, MessageError, Pull, Push, Pushed, Refusal, Refused, Rows, Welcome};
