//! Encodings of a row: f32, f16, or int8 with a scale for each column.

use serde::{Deserialize, Serialize};

use crate::Column;

/// The type of the values of a stored row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    /// The values as trained.
    #[default]
    F32,
    /// Half precision: 11 significant bits, up to 65,504.
    F16,
    /// The first column in f32; every other column as an f32 scale and one byte per value.
    Int8,
}

/// The largest finite f16.
const MAX_F16: f32 = 65504.0;
/// The largest byte of an int8 row; its negative is the smallest.
const MAX_INT8: f32 = 127.0;
const F32_BYTES: usize = size_of::<f32>();

impl RowType {
    /// All row types, from the largest to the smallest row.
    pub const ALL: [RowType; 3] = [RowType::F32, RowType::F16, RowType::Int8];

    /// The name in files and manifests.
    pub fn name(self) -> &'static str {
        match self {
            RowType::F32 => "f32",
            RowType::F16 => "f16",
            RowType::Int8 => "int8",
        }
    }

    /// Returns the row type with a name.
    pub fn of_name(name: &str) -> Option<RowType> {
        RowType::ALL.into_iter().find(|row_type| row_type.name() == name)
    }

    /// Bytes of a row of these columns.
    pub(crate) fn row_bytes(self, columns: &[Column]) -> u64 {
        let widths = columns.iter().map(|column| u64::from(column.width));
        match self {
            RowType::F32 => 4 * widths.sum::<u64>(),
            RowType::F16 => 2 * widths.sum::<u64>(),
            RowType::Int8 => widths.enumerate().map(|(i, width)| if i == 0 { 4 * width } else { 4 + width }).sum(),
        }
    }
}

impl std::fmt::Display for RowType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Encodes and decodes rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowCodec {
    row_type: RowType,
    row_bytes: usize,
    width: usize,
    /// Width of the first column.
    first: usize,
    /// Widths of the other columns.
    others: Vec<usize>,
}

impl RowCodec {
    /// Creates the codec for rows of these columns.
    pub fn new(row_type: RowType, columns: &[Column]) -> RowCodec {
        let mut widths = columns.iter().map(|column| column.width as usize);
        let first = widths.next().unwrap_or_default();
        let others: Vec<usize> = widths.collect();
        let width = first + others.iter().sum::<usize>();
        RowCodec { row_type, row_bytes: row_type.row_bytes(columns) as usize, width, first, others }
    }

    /// The type of the stored values.
    #[inline]
    pub fn row_type(&self) -> RowType {
        self.row_type
    }

    /// Bytes of a stored row.
    #[inline]
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Values in a row.
    #[inline]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Encodes the values of one row.
    ///
    /// # Panics
    /// If `values` or `row` does not have the length of a row.
    pub fn encode(&self, values: &[f32], row: &mut [u8]) {
        assert!(values.len() == self.width && row.len() == self.row_bytes, "expected one row of this codec");
        match self.row_type {
            RowType::F32 => encode_f32(values, row),
            RowType::F16 => {
                for (two, value) in row.as_chunks_mut().0.iter_mut().zip(values) {
                    *two = f16_of(*value).to_le_bytes();
                }
            }
            RowType::Int8 => self.encode_int8(values, row),
        }
    }

    /// Decodes consecutive stored rows.
    ///
    /// # Panics
    /// If `rows` and `values` are not for the same number of rows.
    pub fn decode(&self, rows: &[u8], values: &mut [f32]) {
        assert_eq!(rows.len() / self.row_bytes, values.len() / self.width, "expected as many rows in as out");
        for (row, values) in rows.chunks_exact(self.row_bytes).zip(values.chunks_exact_mut(self.width)) {
            self.decode_row(row, values);
        }
    }

    #[inline]
    pub(crate) fn decode_row(&self, row: &[u8], values: &mut [f32]) {
        match self.row_type {
            RowType::F32 => decode_f32(row, values),
            RowType::F16 => decode_f16(row, values),
            RowType::Int8 => self.decode_int8(row, values),
        }
    }

    /// Writes the first column, then the scales, then the bytes of the other columns.
    fn encode_int8(&self, values: &[f32], row: &mut [u8]) {
        let (first, mut values) = values.split_at(self.first);
        let (head, rest) = row.split_at_mut(F32_BYTES * self.first);
        encode_f32(first, head);
        let (scales, mut bytes) = rest.split_at_mut(F32_BYTES * self.others.len());
        for (four, &width) in scales.as_chunks_mut().0.iter_mut().zip(&self.others) {
            let (column, later_values) = values.split_at(width);
            let (own, later_bytes) = bytes.split_at_mut(width);
            let scale = scale_of(column);
            *four = scale.to_le_bytes();
            for (byte, value) in own.iter_mut().zip(column) {
                // With a scale of 0 the quotient is NaN, and `as` converts NaN to 0.
                *byte = (value / scale).round_ties_even().clamp(-MAX_INT8, MAX_INT8) as i8 as u8;
            }
            (values, bytes) = (later_values, later_bytes);
        }
    }

    #[inline]
    pub(crate) fn decode_int8(&self, row: &[u8], values: &mut [f32]) {
        let (first, mut values) = values.split_at_mut(self.first);
        let (head, rest) = row.split_at(F32_BYTES * self.first);
        decode_f32(head, first);
        let (scales, mut bytes) = rest.split_at(F32_BYTES * self.others.len());
        for (four, &width) in scales.as_chunks().0.iter().zip(&self.others) {
            let (column, later_values) = values.split_at_mut(width);
            let (own, later_bytes) = bytes.split_at(width);
            let scale = f32::from_le_bytes(*four);
            for (value, byte) in column.iter_mut().zip(own) {
                *value = scale * f32::from(*byte as i8);
            }
            (values, bytes) = (later_values, later_bytes);
        }
    }
}

#[inline]
fn encode_f32(values: &[f32], row: &mut [u8]) {
    for (four, value) in row.as_chunks_mut().0.iter_mut().zip(values) {
        *four = value.to_le_bytes();
    }
}

#[inline]
pub(crate) fn decode_f32(row: &[u8], values: &mut [f32]) {
    for (value, four) in values.iter_mut().zip(row.as_chunks().0) {
        *value = f32::from_le_bytes(*four);
    }
}

#[inline]
pub(crate) fn decode_f16(row: &[u8], values: &mut [f32]) {
    for (value, two) in values.iter_mut().zip(row.as_chunks().0) {
        *value = f32_of(u16::from_le_bytes(*two));
    }
}

/// Returns max |x| / 127, or NaN if a value is not finite: the whole column then reads as NaN.
fn scale_of(column: &[f32]) -> f32 {
    if column.iter().any(|value| !value.is_finite()) {
        return f32::NAN;
    }
    column.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / MAX_INT8
}

/// Returns the nearest f16, ties to even. Finite values stay finite: values beyond the largest f16 become the largest.
fn f16_of(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    let bits = value.to_bits() & 0x7fff_ffff;
    const INFINITE: u32 = 0x7f80_0000;
    if bits >= INFINITE {
        return sign | if bits > INFINITE { 0x7e00 } else { 0x7c00 };
    }
    let size = f32::from_bits(bits).min(MAX_F16);
    const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
    if size < SMALLEST_NORMAL {
        // Subnormal numbers have a step of 2^-24; adding 0.5 lets the addition round to it.
        const ROUND: f32 = 0.5;
        return sign | ((size + ROUND).to_bits() - ROUND.to_bits()) as u16;
    }
    // The exponent changes from a bias of 127 to a bias of 15, and 13 bits are rounded away, ties to even.
    let bits = size.to_bits() - (112 << 23);
    sign | ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) as u16
}

#[inline]
fn f32_of(half: u16) -> f32 {
    /// 2^112 changes the exponent from a bias of 15 to a bias of 127, also for subnormal numbers.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    /// The result for the exponent of infinities and NaN.
    const BEYOND: f32 = 65536.0;
    let size = f32::from_bits((u32::from(half) & 0x7fff) << 13) * REBIAS;
    let infinite = if size >= BEYOND { 0xff << 23 } else { 0 };
    f32::from_bits(size.to_bits() | infinite | ((u32::from(half) & 0x8000) << 16))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn columns(widths: &[u32]) -> Vec<Column> {
        widths.iter().enumerate().map(|(i, width)| Column { name: i.to_string(), width: *width }).collect()
    }

    fn through(codec: &RowCodec, values: &[f32]) -> Vec<f32> {
        let mut row = vec![0xee; codec.row_bytes()];
        codec.encode(values, &mut row);
        let mut out = vec![f32::NAN; values.len()];
        codec.decode(&row, &mut out);
        out
    }

    /// Pairs (f32, f16) from the tables of IEEE 754: largest, smallest, and ties that round to even.
    #[test]
    fn known_f16_values() {
        for (value, half) in [
            (0.0, 0x0000),
            (-0.0, 0x8000),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65504.0, 0x7bff),
            (70000.0, 0x7bff),
            (-1e38, 0xfbff),
            (6.103_515_6e-5, 0x0400),
            (6.097_555e-5, 0x03ff),
            (5.960_464_5e-8, 0x0001),
            (2.980_232_2e-8, 0x0000),
            (2.980_233e-8, 0x0001),
            (1.0 + 1.0 / 2048.0, 0x3c00),
            (1.0 + 3.0 / 2048.0, 0x3c02),
            (f32::INFINITY, 0x7c00),
            (f32::NEG_INFINITY, 0xfc00),
        ] {
            assert_eq!(f16_of(value), half, "{value}");
        }
        assert!(f32_of(f16_of(f32::NAN)).is_nan());
        for half in 0..=u16::MAX {
            let value = f32_of(half);
            let again = f16_of(value);
            assert!(again == half || value.is_nan(), "{half:#06x} is {value} and then {again:#06x}");
        }
        assert_eq!([0x3c01, 0x7bff, 0x0001, 0x7c00].map(f32_of), [1.000_976_6, 65504.0, 5.960_464_5e-8, f32::INFINITY]);
    }

    #[test]
    fn int8_rows_have_the_first_column_in_f32_and_a_scale_for_each_other() {
        let codec = RowCodec::new(RowType::Int8, &columns(&[2, 3, 1]));
        assert_eq!((codec.row_bytes(), codec.width()), (8 + 2 * 4 + 4, 6));
        let mut row = vec![0; codec.row_bytes()];
        codec.encode(&[0.1, f32::MAX, 127.0, -3.2, 0.4, 0.0], &mut row);
        let expected =
            [&0.1_f32.to_le_bytes()[..], &f32::MAX.to_le_bytes(), &1_f32.to_le_bytes(), &[0; 4], &[127, 253, 0, 0]];
        assert_eq!(row, expected.concat());
        // A column with a value that is not finite reads as NaN; the other columns are not affected.
        let out = through(&codec, &[f32::NAN, 1.0, 2.0, f32::INFINITY, 3.0, 5.0]);
        assert!(out[0].is_nan() && out[2..5].iter().all(|value| value.is_nan()));
        assert_eq!((out[1], out[5]), (1.0, 5.0));
    }

    fn any_value() -> impl Strategy<Value = f32> {
        (any::<bool>(), -14.0..14.0_f32)
            .prop_map(|(is_negative, log)| if is_negative { -log.exp2() } else { log.exp2() })
    }

    proptest! {
        #[test]
        fn errors_stay_within_their_bounds(values in prop::collection::vec(any_value(), 24)) {
            let columns = columns(&[1, 16, 7]);
            prop_assert_eq!(&through(&RowCodec::new(RowType::F32, &columns), &values), &values);
            let f16 = through(&RowCodec::new(RowType::F16, &columns), &values);
            for (value, out) in values.iter().zip(f16) {
                prop_assert!((value - out).abs() <= value.abs() / 2048.0, "{} is {}", value, out);
            }
            let int8 = through(&RowCodec::new(RowType::Int8, &columns), &values);
            prop_assert_eq!(int8[0], values[0]);
            for range in [1..17, 17..24] {
                let most = values[range.clone()].iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                for (value, out) in values[range.clone()].iter().zip(&int8[range]) {
                    prop_assert!((value - out).abs() <= most / 127.0 * 0.501, "{} is {} of {}", value, out, most);
                }
            }
        }
    }
}
