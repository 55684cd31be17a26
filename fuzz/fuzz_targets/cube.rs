//! Any bytes as a cube file, also with corrected checksums.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elasticrec_cube::fuzz_open(bytes));
