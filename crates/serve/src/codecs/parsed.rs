//! Samples that a reader process has parsed: the arrays of a batch, validated before use.
//!
//! `u32` number of samples, `u32` number of signs; then a `u64` for each sign, a `u32` for each offset (samples × slots + 1)
//! and an `f32` for each dense value (samples × columns). All little-endian. Only reader processes send it.

use elasticrec_sample::{BatchBuilder, Parser};

use super::{DecodeError, Limits};

const HEAD_BYTES: usize = 8;

/// The number of slots and dense values of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) num_slots: usize,
    pub(crate) num_dense: usize,
}

impl Shape {
    pub(crate) fn of(parser: &Parser) -> Shape {
        let features = parser.features();
        Shape { num_slots: features.slots.len(), num_dense: features.dense.len() }
    }
}

/// The arrays of a batch, checked against each other.
pub(crate) struct ParsedSamples<'a> {
    shape: Shape,
    num_samples: usize,
    signs: &'a [[u8; 8]],
    offsets: &'a [[u8; 4]],
    dense: &'a [[u8; 4]],
}

impl<'a> ParsedSamples<'a> {
    pub(crate) fn read(shape: Shape, body: &'a [u8]) -> Result<ParsedSamples<'a>, String> {
        let short = || format!("expected at least {HEAD_BYTES} bytes, got {}", body.len());
        let (head, rest) = body.split_at_checked(HEAD_BYTES).ok_or_else(short)?;
        let (numbers, _) = head.as_chunks::<4>();
        let [num_samples, num_signs] = [0, 1].map(|at| u64::from(u32::from_le_bytes(numbers[at])));
        // Counts have 32 bits and slots 16, so that no product overflows 64 bits.
        let num_offsets = num_samples * shape.num_slots as u64 + 1;
        let num_dense = num_samples * shape.num_dense as u64;
        let expected = 8 * num_signs + 4 * (num_offsets + num_dense);
        if rest.len() as u64 != expected {
            return Err(format!(
                "{num_samples} samples and {num_signs} signs: expected {expected} bytes, got {}",
                rest.len()
            ));
        }
        let (signs, rest) = rest.split_at(8 * num_signs as usize);
        let (offsets, dense) = rest.split_at(4 * num_offsets as usize);
        let (signs, offsets, dense) = (signs.as_chunks().0, offsets.as_chunks().0, dense.as_chunks().0);
        let parsed = ParsedSamples { shape, num_samples: num_samples as usize, signs, offsets, dense };
        let ends = [0, offsets.len() - 1].map(|at| parsed.offset(at) as u64);
        if ends != [0, num_signs] || !offsets.is_sorted_by_key(|&bytes| u32::from_le_bytes(bytes)) {
            return Err(format!("offsets: expected ascending offsets from 0 to {num_signs}"));
        }
        if !dense.iter().all(|&bytes| f32::from_le_bytes(bytes).is_finite()) {
            return Err("dense: expected finite values".into());
        }
        Ok(parsed)
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn offset(&self, at: usize) -> usize {
        u32::from_le_bytes(self.offsets[at]) as usize
    }

    /// Adds the samples through the builder, which truncates sequences that are longer than the model's.
    fn add_to(&self, builder: &mut BatchBuilder) {
        let Shape { num_slots, num_dense } = self.shape;
        for sample in 0..self.num_samples {
            builder.begin();
            for slot in 0..num_slots {
                let at = sample * num_slots + slot;
                for &sign in &self.signs[self.offset(at)..self.offset(at + 1)] {
                    builder.add_sign(slot as u16, u64::from_le_bytes(sign));
                }
            }
            for (index, &value) in self.dense[sample * num_dense..(sample + 1) * num_dense].iter().enumerate() {
                builder.set_dense(index, f32::from_le_bytes(value));
            }
            builder.end(1, 0);
        }
    }
}

/// Adds the samples of a body to a batch.
pub(super) fn decode(
    parser: &Parser,
    body: &[u8],
    limits: Limits,
    builder: &mut BatchBuilder,
) -> Result<(), DecodeError> {
    let parsed = ParsedSamples::read(Shape::of(parser), body).map_err(DecodeError::Bad)?;
    if parsed.num_samples() > limits.max_instances {
        return Err(DecodeError::TooMany { what: "lines", max: limits.max_instances });
    }
    parsed.add_to(builder);
    Ok(())
}

/// Returns the bytes of a batch, as a reader process writes them.
#[cfg(test)]
pub(crate) fn encode(batch: &elasticrec_sample::Batch) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in [batch.num_samples() as u32, batch.signs.len() as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    batch.signs.iter().for_each(|sign| bytes.extend_from_slice(&sign.to_le_bytes()));
    batch.offsets.iter().for_each(|offset| bytes.extend_from_slice(&offset.to_le_bytes()));
    batch.dense.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use elasticrec_sample::{Batch, Features};
    use proptest::prelude::*;

    use super::*;

    fn parser() -> Parser {
        let json = r#"{"format":"reader","hash":1,"slots":[{"name":"user","pooling":"sum"},{"name":"tags","pooling":"sum"}],
            "dense":[{"name":"price","normalize":{"kind":"none"}}],"labels":["click"]}"#;
        Parser::new(Features::from_json(json).unwrap()).unwrap()
    }

    fn batch_of(samples: &[(Vec<u64>, Vec<u64>, f32)]) -> Batch {
        let mut builder = parser().builder(0);
        for (users, tags, price) in samples {
            builder.begin();
            users.iter().for_each(|&sign| builder.add_sign(0, sign));
            tags.iter().for_each(|&sign| builder.add_sign(1, sign));
            builder.set_dense(0, *price);
            builder.end(1, 0);
        }
        builder.finish()
    }

    fn decode_all(bytes: &[u8]) -> Result<Batch, DecodeError> {
        let mut builder = parser().builder(0);
        decode(&parser(), bytes, Limits { max_instances: 5 }, &mut builder).map(|()| builder.finish())
    }

    proptest! {
        #[test]
        fn a_batch_survives_encoding_and_decoding(samples in prop::collection::vec(
            (prop::collection::vec(any::<u64>(), 0..3), prop::collection::vec(any::<u64>(), 0..4), -1e3f32..1e3), 0..5,
        )) {
            let batch = batch_of(&samples);
            prop_assert_eq!(decode_all(&encode(&batch)).unwrap(), batch);
        }

        #[test]
        fn any_bytes_give_an_error_or_a_batch(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(batch) = decode_all(&bytes) {
                prop_assert!(batch.is_consistent());
            }
        }

        #[test]
        fn a_flipped_byte_gives_an_error_or_a_batch(at in 0usize..64, to in any::<u8>()) {
            let mut bytes = encode(&batch_of(&[(vec![1], vec![2, 3], 0.5), (vec![], vec![4], 1.5)]));
            let at = at % bytes.len();
            bytes[at] = to;
            if let Ok(batch) = decode_all(&bytes) {
                prop_assert!(batch.is_consistent() && batch.dense.iter().all(|value| value.is_finite()));
            }
        }
    }

    #[test]
    fn inconsistent_arrays_are_named() {
        let good = encode(&batch_of(&[(vec![1], vec![2, 3], 0.5)]));
        let message = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            decode_all(&bytes).unwrap_err().to_string()
        };
        assert_eq!(message(&|bytes| bytes.truncate(7)), "expected at least 8 bytes, got 7");
        assert_eq!(message(&|bytes| bytes.push(0)), "1 samples and 3 signs: expected 40 bytes, got 41");
        let huge = message(&|bytes| bytes[..8].fill(255));
        assert!(huge.starts_with("4294967295 samples and 4294967295 signs: expected "), "{huge}");
        let offsets = "offsets: expected ascending offsets from 0 to 3";
        // The offsets 0, 1 and 3 are at byte 8 + 3 * 8.
        assert_eq!(message(&|bytes| bytes[32] = 1), offsets);
        assert_eq!(message(&|bytes| bytes[36] = 200), offsets);
        assert_eq!(message(&|bytes| bytes[40] = 2), offsets);
        let at = good.len() - 4;
        assert_eq!(
            message(&|bytes| bytes[at..].copy_from_slice(&f32::NAN.to_le_bytes())),
            "dense: expected finite values"
        );
        let many = encode(&batch_of(&vec![(vec![], vec![], 0.0); 6]));
        assert_eq!(decode_all(&many).unwrap_err(), DecodeError::TooMany { what: "lines", max: 5 });
    }
}
