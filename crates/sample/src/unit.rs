//! Units: byte ranges of files that always give the same records, in the same order, in the same batches.

use std::fs::File;
use std::io;
use std::path::PathBuf;

/// A byte range of a file: the records that begin in it. A compressed file is one unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Increases over the life of a run.
    pub id: u64,
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// The pass over the data that the unit belongs to.
    pub epoch: u32,
    /// The state of the file when it was split into units; readers reject the file if it changed since.
    pub stamp: Option<Stamp>,
}

/// The state of a file, which changes with every write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes.
    pub size: u64,
    /// Modification time in nanoseconds since 1970.
    pub modified_ns: u64,
}

impl Stamp {
    pub(crate) fn of(file: &File) -> io::Result<Stamp> {
        let metadata = file.metadata()?;
        let since_1970 = metadata.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Ok(Stamp { size: metadata.len(), modified_ns: since_1970.as_nanos() as u64 })
    }

    /// Rejects a file that has changed.
    pub(crate) fn check(self, file: &File) -> io::Result<()> {
        let now = Stamp::of(file)?;
        if now == self {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "changed since its units were recorded: expected {} bytes modified at {} ns, got {} bytes modified at {} ns",
                self.size, self.modified_ns, now.size, now.modified_ns
            ),
        ))
    }
}

/// Splits a file of `size` bytes into ranges of at most `unit_bytes`.
pub fn split(size: u64, unit_bytes: u64) -> Vec<(u64, u64)> {
    let num_units = size.div_ceil(unit_bytes.max(1));
    // In u128, because the product of a large size and the number of units exceeds a u64.
    let at = |i: u64| (u128::from(size) * u128::from(i) / u128::from(num_units)) as u64;
    (0..num_units).map(|i| (at(i), at(i + 1))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_cover_the_file(size in 0u64..10_000, unit_bytes in 1u64..3_000) {
            let ranges = split(size, unit_bytes);
            let mut at = 0;
            for (start, end) in ranges {
                prop_assert_eq!(start, at);
                prop_assert!(end > start && end - start <= unit_bytes);
                at = end;
            }
            prop_assert_eq!(at, size);
        }
    }

    #[test]
    fn ranges_cover_a_file_of_32_tib() {
        let ranges = split(1 << 45, 1 << 24);
        assert_eq!(ranges.len(), 1 << 21);
        assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, 1 << 45));
        assert!(ranges.iter().all(|(start, end)| end - start == 1 << 24));
        assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
    }
}
