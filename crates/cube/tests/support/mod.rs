//! Signs that collide in an index, for tests of cubes.

use proptest::prelude::*;

/// Any sign, with many that collide.
pub fn any_sign() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => any::<u64>(),
        2 => 0..2000_u64,
        2 => (0..2000_u64).prop_map(|i| u64::MAX - i),
        1 => (0..64_u32).prop_map(|bit| 1 << bit),
        2 => (0..500_u64).prop_map(|i| unmix(i << 33)),
        1 => (0..500_u64).prop_map(|i| unmix(i << 48 | 0xffff_ffff)),
    ]
}

/// The inverse of `mix`.
pub fn unmix(mixed: u64) -> u64 {
    let unshift = |hash: u64| hash ^ (hash >> 33);
    let hash = unshift(mixed).wrapping_mul(0x9cb4_b2f8_1293_37db);
    let hash = unshift(hash).wrapping_mul(0x4f74_430c_22a5_4005);
    unshift(hash)
}
