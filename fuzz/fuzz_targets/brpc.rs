//! Any bytes as the input of a bRPC connection: frames, their meta, compressed messages.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elasticrec_serve::fuzz_brpc(bytes));
