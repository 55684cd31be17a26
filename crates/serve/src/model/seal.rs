//! The checksum of a manifest inside the manifest: SHA-256 of its bytes with zeros in place of the checksum.

use std::ops::Range;

use sha2::{Digest, Sha256};

const KEY: &[u8] = b"\"self_sha256\"";
const NUM_DIGITS: usize = 64;

/// Returns whether the bytes match their checksum.
pub(crate) fn is_intact(bytes: &[u8]) -> bool {
    digits(bytes).is_some_and(|range| bytes[range.clone()] == *digest(bytes, range).as_bytes())
}

/// Writes the checksum into the bytes, for tests that write manifests.
#[doc(hidden)]
pub fn seal(bytes: &mut [u8]) {
    if let Some(range) = digits(bytes) {
        let digest = digest(bytes, range.clone());
        bytes[range].copy_from_slice(digest.as_bytes());
    }
}

/// Returns the range of the checksum's digits: after the first key of that name and any spaces.
fn digits(bytes: &[u8]) -> Option<Range<usize>> {
    let key = memchr::memmem::find(bytes, KEY)? + KEY.len();
    let gap = bytes[key..].iter().position(|byte| !matches!(byte, b':' | b' '))?;
    let start = key + gap + 1;
    let is_text = bytes[key + gap] == b'"' && bytes.get(start + NUM_DIGITS) == Some(&b'"');
    is_text.then_some(start..start + NUM_DIGITS)
}

fn digest(bytes: &[u8], digits: Range<usize>) -> String {
    let mut hash = Sha256::new();
    hash.update(&bytes[..digits.start]);
    hash.update([b'0'; NUM_DIGITS]);
    hash.update(&bytes[digits.end..]);
    hex(&hash.finalize())
}

/// Returns bytes in lower-case hex.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_detected() {
        let mut good = format!(r#"{{"format": 1, "self_sha256": "{}", "steps": 12}}"#, "0".repeat(64)).into_bytes();
        assert!(!is_intact(&good));
        seal(&mut good);
        assert!(is_intact(&good));
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&bytes), "bit {bit}");
        }
        for length in 0..good.len() {
            assert!(!is_intact(&good[..length]), "length {length}");
        }
    }
}
