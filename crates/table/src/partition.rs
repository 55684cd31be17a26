//! The partition of a sign, the same in tables, part files and cubes.

/// Spreads a sign over all 64 bits (the finaliser of MurmurHash3, a bijection).
///
/// The high bits choose the partition and the low bits the line of a partition's index. The two must not share bits, or
/// every index would use only some of its lines.
#[inline]
#[must_use]
pub fn mix(sign: u64) -> u64 {
    let mut hash = sign;
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// The partition of a sign in a table of `num_partitions`, fixed for the life of the table.
#[inline]
#[must_use]
pub fn partition_of(sign: u64, num_partitions: u32) -> u32 {
    partition_of_mixed(mix(sign), num_partitions)
}

/// [`partition_of`] for a caller that needs [`mix`] for its index as well.
#[inline]
#[must_use]
pub fn partition_of_mixed(mixed: u64, num_partitions: u32) -> u32 {
    ((u128::from(mixed) * u128::from(num_partitions)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These values are also in `docs/formats/part.md`. A change makes all existing files unreadable.
    #[test]
    fn golden_values_never_change() {
        let golden: [(u64, u64, u32, u32); 6] = [
            (0, 0x0000_0000_0000_0000, 0, 0),
            (1, 0xb456_bcfc_34c2_cb2c, 180, 704),
            (2, 0x3abf_2a20_6506_83e7, 58, 229),
            (1_234_567_890_123_456_789, 0x9c49_c609_8a8f_367e, 156, 610),
            (1 << 63, 0x8f78_0810_af31_a493, 143, 560),
            (u64::MAX, 0x64b5_720b_4b82_5f21, 100, 393),
        ];
        for (sign, mixed, of_256, of_1000) in golden {
            assert_eq!(mix(sign), mixed, "mix({sign})");
            assert_eq!(partition_of(sign, 256), of_256, "partition_of({sign}, 256)");
            assert_eq!(partition_of(sign, 1000), of_1000, "partition_of({sign}, 1000)");
        }
    }

    #[test]
    fn partitions_are_in_range_and_even() {
        for num_partitions in [1, 2, 3, 255, 256, 257, u32::MAX] {
            for sign in [0, 1, u64::MAX, 1 << 63] {
                assert!(partition_of(sign, num_partitions) < num_partitions);
            }
        }
        let mut counts = [0_u32; 256];
        for sign in 0..256_000_u64 {
            counts[partition_of(sign << 20, 256) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }
}
