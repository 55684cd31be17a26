//! Version directories served through ONNX Runtime: one binary, because a process loads the runtime once.

#![allow(clippy::unwrap_used, reason = "test code: a failure is a panic")]

mod chain;
mod model;
mod serve;
mod services;
mod support;
