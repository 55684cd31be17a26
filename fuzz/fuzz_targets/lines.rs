//! Any bytes as lines of every text format.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elasticrec_sample::parser::fuzz_lines(bytes));
