//! The logarithm of dense values, the nearest `f32`: trainers and servers may have libraries whose own differ in the last bit.
//!
//! In `f64`, from a table and a short series, and then rounded, which costs half of what the library's takes.

use std::sync::LazyLock;

/// Bits of the mantissa that choose the row of the table.
const TABLE_BITS: u32 = 7;
/// Below this ln(1 + x) is nearer to x than to any other `f32`.
const SMALL: f32 = 1.0 / (1 << 26) as f32;

const MANTISSA_BITS: u32 = f64::MANTISSA_DIGITS - 1;
const MANTISSA: u64 = (1 << MANTISSA_BITS) - 1;
const ONE: u64 = 1f64.to_bits();

/// For the mantissas from `1 + i / 128` on: about their inverse, in so few bits that products with it are exact, and what
/// its logarithm takes away.
#[derive(Clone, Copy)]
struct Step {
    inverse: f64,
    log: f64,
}

static STEPS: LazyLock<[Step; 1 << TABLE_BITS]> = LazyLock::new(|| {
    std::array::from_fn(|step| {
        let start = 1.0 + step as f64 / f64::from(1 << TABLE_BITS);
        let inverse = (65536.0 / start).round() / 65536.0;
        Step { inverse, log: -inverse.ln() }
    })
});

/// Those of small whole numbers: dense columns are mostly counts.
static OF_COUNTS: LazyLock<[f32; 1024]> = LazyLock::new(|| std::array::from_fn(|count| of_any(count as f32)));

/// ln(1 + x) of a number from 0 on.
#[inline]
pub(crate) fn ln_1p(x: f32) -> f32 {
    let whole = x as usize;
    match OF_COUNTS.get(whole) {
        Some(&log) if whole as f32 == x => log,
        _ => of_any(x),
    }
}

#[inline]
fn of_any(x: f32) -> f32 {
    // infinity and what is no number stay what they are
    if !(SMALL..f32::INFINITY).contains(&x) {
        return x;
    }
    let bits = (1.0 + f64::from(x)).to_bits();
    let exponent = (bits >> MANTISSA_BITS) as i32 - 1023;
    let Step { inverse, log } = STEPS[(bits & MANTISSA) as usize >> (MANTISSA_BITS - TABLE_BITS)];
    let r = f64::from_bits(bits & MANTISSA | ONE) * inverse - 1.0;
    // of ln(1 + r), where r is below 1/128
    let squared = r * r;
    let series = (1.0 / 7.0 - r / 8.0) * squared + (1.0 / 5.0 - r * (1.0 / 6.0));
    let series = series * squared + (1.0 / 3.0 - r / 4.0);
    let series = series * squared * r - 0.5 * squared;
    (f64::from(exponent) * std::f64::consts::LN_2 + log + (series + r)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(x: f32) -> f32 {
        f64::from(x).ln_1p() as f32
    }

    #[test]
    fn it_is_the_nearest_number() {
        // every 4,999th of all, and some at edges: of the table, of exponents, of where it is x itself
        let all = (0..f32::INFINITY.to_bits()).step_by(4999).map(f32::from_bits);
        let edges = [SMALL, 1.0 / 128.0, 0.5, 1.0, 3.0, 127.0, 16_777_215.0, f32::MAX];
        let edges = edges.into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]).filter(|x| x.is_finite());
        let counts = (0..2000u16).map(f32::from);
        for x in all.chain(edges).chain(counts) {
            assert_eq!(ln_1p(x).to_bits(), expected(x).to_bits(), "{x}");
        }
        assert_eq!(ln_1p(f32::INFINITY), f32::INFINITY);
        assert!(ln_1p(f32::NAN).is_nan());
    }

    #[test]
    #[ignore = "half a minute of a release build: all numbers there are"]
    fn it_is_the_nearest_number_nearly_everywhere() {
        let all = (0..f32::INFINITY.to_bits()).map(f32::from_bits);
        let differ: Vec<f32> = all.filter(|&x| ln_1p(x) != expected(x)).collect();
        // at the first of them ours is the nearest; all three are next to the middle of two
        assert_eq!(differ, [8.472636, 8.380116e18, 1.505_264_5e35]);
    }
}
