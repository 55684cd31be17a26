//! Shared by the fuzz targets and the property tests: opens and searches arbitrary bytes.

use std::sync::Arc;

use elasticrec_table::part::PartFile;
pub use elasticrec_table::part::repair_checksums;

use crate::{Cube, DeltaFile, View};

/// Opens bytes as a cube, as they are and with repaired checksums, and searches the result.
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
    let view = View::of_base(Arc::new(cube));
    // All signs of the file are among its aligned words. The batches are small, because rows may be wide.
    for signs in eights.chunks(100) {
        let mut rows = vec![0.0; signs.len() * view.width()];
        let hits = view.lookup(signs, &mut rows);
        assert_eq!(hits, signs.iter().filter(|sign| view.contains(**sign)).count());
    }
    for (sign, _) in view.base().iter().take(1000) {
        assert!(view.contains(sign), "a sign of the cube is not found");
    }
}

/// Opens bytes as a delta, as they are and with repaired checksums, and applies the result to a base without rows.
pub fn fuzz_delta(bytes: &[u8]) {
    apply(bytes.to_vec());
    let mut repaired = bytes.to_vec();
    repair_checksums(&mut repaired);
    apply(repaired);
}

fn apply(bytes: Vec<u8>) {
    /// More partitions would only take memory.
    const MAX_PARTITIONS: u32 = 1 << 16;
    let eights: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight)).collect();
    let Ok(delta) = PartFile::from_bytes("fuzz", bytes).map_err(Into::into).and_then(DeltaFile::from_part) else {
        return;
    };
    if delta.num_partitions() > MAX_PARTITIONS {
        return;
    }
    let half = delta.num_partitions() / 2;
    for range in [0..delta.num_partitions(), half..delta.num_partitions(), 0..half] {
        let base = Cube::empty(delta.meta(), delta.num_partitions(), range);
        let Ok(view) = View::of_base(Arc::new(base)).with_delta(std::slice::from_ref(&delta)) else {
            continue;
        };
        let mut hits = 0;
        for signs in eights.chunks(100) {
            let mut rows = vec![0.0; signs.len() * view.width()];
            hits += view.lookup(signs, &mut rows);
        }
        assert!(hits as u64 <= view.num_rows() * eights.len() as u64, "lookups find rows that do not exist");
        let all = view.partitions().flat_map(|partition| view.rows_of(partition)).count();
        assert_eq!(all as u64, view.num_rows(), "the number of rows is wrong");
    }
}
