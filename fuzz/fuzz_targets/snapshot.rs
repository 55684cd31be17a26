//! Any bytes as a table snapshot, also with corrected checksums.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elasticrec_table::snapshot::fuzz_load(bytes));
