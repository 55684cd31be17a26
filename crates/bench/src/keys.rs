//! Random signs, the same in every run.

use elasticrec_table::partition::mix;

/// Returns the sign of row `number`; distinct numbers have distinct signs.
pub(crate) fn sign_of(number: u64) -> u64 {
    // Any odd multiplier is a bijection.
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A reproducible sequence of random numbers.
#[derive(Debug, Default)]
pub(crate) struct Random {
    num_drawn: u64,
}

impl Random {
    /// Returns the next number, below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.num_drawn += 1;
        ((u128::from(mix(self.num_drawn)) * u128::from(bound)) >> 64) as u64
    }

    /// Returns the number of draws so far, to derive values that were not used before.
    pub(crate) fn num_drawn(&self) -> u64 {
        self.num_drawn
    }
}
