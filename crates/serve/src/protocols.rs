//! Protocols: bytes of a connection in, a body with its codec and its model out; a prediction in, bytes out.
//!
//! - [`http`] and [`grpc`] share a front, which checks the token, routes and counts; [`brpc`] has its own connections.
//! - [`predict`] scores a request: it chooses the version and repeats the request once if that version is gone.
//! - [`inference`] describes the server and its models in the terms of the Open Inference Protocol, for HTTP and gRPC.
//! - [`dict`] looks up rows by sign, for the clients of Cube's `DictService`.
//! - [`compression`] inflates requests within their limits and compresses answers.

pub(crate) mod brpc;
pub(crate) mod compression;
pub(crate) mod dict;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod inference;
pub(crate) mod predict;

#[doc(hidden)]
pub use brpc::fuzz_brpc;
