//! Any bytes as the body of a prediction request, with every codec.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elasticrec_serve::fuzz_body(bytes));
