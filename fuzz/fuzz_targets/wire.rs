//! Any bytes as a frame, and as the body of every message.

#![no_main]

use elasticrec_wire::frame::{Body, MAX_BODY_BYTES, read_frame};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut body = Body::default();
    if read_frame(&mut &bytes[..], MAX_BODY_BYTES, &mut body).is_ok() {
        elasticrec_wire::message::fuzz_messages(body.bytes());
    }
    elasticrec_wire::message::fuzz_messages(bytes);
});
