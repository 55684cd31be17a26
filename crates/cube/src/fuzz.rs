//! What the fuzz target and the property tests share: bytes from anywhere, opened and searched.

use elasticrec_table::part::PartFile;
pub use elasticrec_table::part::repair_checksums;

use crate::Cube;

/// Opens bytes as they are, and once more with right checksums, and uses whatever opens.
pub fn fuzz_open(bytes: &[u8]) {
    search(bytes.to_vec());
    let mut repaired = bytes.to_vec();
    repair_checksums(&mut repaired);
    search(repaired);
}

fn search(bytes: Vec<u8>) {
    let eights: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight)).collect();
    let Ok(cube) =
        PartFile::from_bytes("fuzz", bytes).map_err(Into::into).and_then(|part| Cube::from_parts(vec![part]))
    else {
        return;
    };
    // every aligned word of the file, so that all its signs are among them; in small batches, since
    // the rows may be wide
    for signs in eights.chunks(100) {
        let mut rows = vec![0.0; signs.len() * cube.width()];
        let hits = cube.lookup(signs, &mut rows);
        assert_eq!(hits, signs.iter().filter(|sign| cube.contains(**sign)).count());
    }
    for (sign, _) in cube.iter().take(1000) {
        assert!(cube.contains(sign), "a sign of the cube is not found");
    }
}
