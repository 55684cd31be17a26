//! Random numbers, and `exp` and `ln`, for drawing the demo data.
//!
//! Everything here is plain IEEE arithmetic on integers and `f64`: the system's `exp`, `ln` and `sin` differ in
//! the last digit from one machine to the next, and the same seed must give the same bytes on all of them.

/// The step of the SplitMix64 sequence (the golden ratio in 64 bits).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection of `u64` that spreads every input bit over all output bits.
pub(super) fn mix(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The finalizer of MurmurHash3: a bijection of `u32`.
pub(super) fn mix32(value: u32) -> u32 {
    let mut z = value;
    z = (z ^ (z >> 16)).wrapping_mul(0x85eb_ca6b);
    z = (z ^ (z >> 13)).wrapping_mul(0xc2b2_ae35);
    z ^ (z >> 16)
}

/// A SplitMix64 stream that is a function of `(seed, index)` alone, so that samples can be drawn in any order.
pub(super) struct Stream {
    state: u64,
}

impl Stream {
    pub(super) fn new(seed: u64, index: u64) -> Self {
        // Hashed twice: streams of neighbouring indices must not be shifted copies of each other.
        Self { state: mix(mix(seed.wrapping_add(GAMMA)) ^ index.wrapping_mul(0xd134_2543_de82_ef95)) }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// Returns a uniform number in [0, 1) with 53 bits.
    pub(super) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a bell-shaped number with mean 0 and variance 1, at most 3.5 in magnitude: the sum of four uniforms.
    pub(super) fn bell(&mut self) -> f64 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Four uniforms over 0..=65535: mean 2 * 65535, variance 4 * (65536^2 - 1) / 12.
        (sum as f64 - 131_070.0) * (1.732_050_807_568_877_2 / 65_536.0)
    }
}

/// Returns `e^x` with a relative error of about 1e-15.
pub(super) fn exp(x: f64) -> f64 {
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = x.clamp(-700.0, 700.0);
    let k = (x * std::f64::consts::LOG2_E + 0.5).floor();
    let r = (x - k * LN2_HIGH) - k * LN2_LOW;
    // |r| <= ln(2) / 2, where the Taylor series has converged after 13 terms.
    let series = (1..=13).rev().fold(1.0, |sum, n| 1.0 + sum * r / f64::from(n));
    series * f64::from_bits(((k as i64 + 1023) as u64) << 52)
}

/// Returns the natural logarithm of a positive, normal number with a relative error of about 1e-15.
pub(super) fn ln(x: f64) -> f64 {
    debug_assert!(x.is_normal() && x > 0.0);
    let mut exponent = (x.to_bits() >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((x.to_bits() & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln(m) = 2 atanh((m - 1) / (m + 1)), with an argument below 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let series = (0..=10).rev().fold(0.0, |sum, n| sum * s * s + 1.0 / f64::from(2 * n + 1));
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
}

/// A rotation of the plane, as cosine and sine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation {
    pub(super) cos: f64,
    pub(super) sin: f64,
}

impl Rotation {
    /// Creates a rotation by `steps` times the angle whose half has the tangent `half_tangent`.
    pub(super) fn new(half_tangent: f64, steps: u32) -> Self {
        let scale = 1.0 + half_tangent * half_tangent;
        let mut power = Self { cos: (1.0 - half_tangent * half_tangent) / scale, sin: 2.0 * half_tangent / scale };
        let mut rotation = Self { cos: 1.0, sin: 0.0 };
        let mut left = steps;
        while left > 0 {
            if left & 1 == 1 {
                rotation = rotation.then(power);
            }
            power = power.then(power);
            left >>= 1;
        }
        rotation
    }

    fn then(self, other: Self) -> Self {
        Self { cos: self.cos * other.cos - self.sin * other.sin, sin: self.cos * other.sin + self.sin * other.cos }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_ln_agree_with_the_system() {
        for i in -4000..4000 {
            let x = f64::from(i) * 0.01;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-14, "exp({x})");
            let y = x.exp();
            assert!((ln(y) - y.ln()).abs() < 1e-13, "ln({y})");
        }
    }

    #[test]
    fn bell_has_mean_0_and_variance_1() {
        let mut stream = Stream::new(1, 2);
        let draws: Vec<f64> = (0..100_000).map(|_| stream.bell()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.02, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
    }

    #[test]
    fn a_rotation_is_the_power_of_one_step() {
        let angle = 2.0 * (0.01f64).atan() * 37.0;
        let rotation = Rotation::new(0.01, 37);
        assert!((rotation.cos - angle.cos()).abs() < 1e-12);
        assert!((rotation.sin - angle.sin()).abs() < 1e-12);
    }
}
