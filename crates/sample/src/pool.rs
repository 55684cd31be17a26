//! Pooling: the rows of a slot become one vector, and the vector's gradient goes back to the rows.

use std::ops::Range;

use crate::batch::Batch;
use crate::features::Pooling;
use crate::unique::Unique;

/// Writes `[num_samples, num_slots, width]` into `out` from the rows `[num_unique, width]`; an empty slot is zero.
pub fn pool(batch: &Batch, unique: &Unique, poolings: &[Pooling], rows: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(out.len(), batch.num_samples() * batch.num_slots * width);
    pool_samples(batch, unique, poolings, rows, 0..batch.num_samples(), out);
}

/// As [`pool`], for some of the samples: writes `[samples, num_slots, width]`.
pub fn pool_samples(
    batch: &Batch,
    unique: &Unique,
    poolings: &[Pooling],
    rows: &[f32],
    samples: Range<usize>,
    out: &mut [f32],
) {
    let first = samples.start * batch.num_slots;
    let width = out.len().checked_div(samples.len() * batch.num_slots).unwrap_or(0);
    assert_eq!(rows.len(), unique.signs.len() * width);
    if width == 0 {
        return;
    }
    for (cell, vector) in (first..).zip(out.chunks_exact_mut(width)) {
        let places = places_of(batch, unique, cell);
        let [first, rest @ ..] = places else {
            vector.fill(0.0);
            continue;
        };
        vector.copy_from_slice(row(rows, *first, width));
        for &place in rest {
            for (sum, value) in vector.iter_mut().zip(row(rows, place, width)) {
                *sum += value;
            }
        }
        let factor = poolings[cell % batch.num_slots].factor(places.len());
        if factor != 1.0 {
            vector.iter_mut().for_each(|value| *value *= factor);
        }
    }
}

/// Adds the gradient `[num_samples, num_slots, width]`, times `scale`, to the rows' gradients `[num_unique, width]`.
pub fn pool_gradient(
    batch: &Batch,
    unique: &Unique,
    poolings: &[Pooling],
    gradient: &[f32],
    scale: f32,
    row_gradients: &mut [f32],
) {
    let num_cells = batch.num_samples() * batch.num_slots;
    let width = gradient.len().checked_div(num_cells).unwrap_or(0);
    assert_eq!(gradient.len(), num_cells * width);
    if width == 0 {
        return;
    }
    assert_eq!(row_gradients.len(), unique.signs.len() * width);
    for (cell, vector) in gradient.chunks_exact(width).enumerate() {
        let places = places_of(batch, unique, cell);
        if places.is_empty() {
            continue;
        }
        let factor = scale * poolings[cell % batch.num_slots].factor(places.len());
        for &place in places {
            let start = place as usize * width;
            for (sum, value) in row_gradients[start..start + width].iter_mut().zip(vector) {
                *sum += factor * value;
            }
        }
    }
}

#[inline]
fn places_of<'a>(batch: &Batch, unique: &'a Unique, cell: usize) -> &'a [u32] {
    &unique.inverse[batch.offsets[cell] as usize..batch.offsets[cell + 1] as usize]
}

#[inline]
fn row(rows: &[f32], place: u32, width: usize) -> &[f32] {
    &rows[place as usize * width..][..width]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BatchBuilder;

    fn sample() -> (Batch, Unique) {
        let mut builder = BatchBuilder::new(3, 0, 1, 1);
        builder.begin();
        for (slot, sign) in [(0, 10), (0, 10), (1, 10), (1, 11), (1, 11), (1, 11)] {
            builder.add_sign(slot, sign);
        }
        builder.end(1, 0);
        let batch = builder.finish();
        let unique = Unique::of(&batch);
        (batch, unique)
    }

    const ROWS: [f32; 4] = [1.0, 2.0, 10.0, 20.0];

    #[test]
    fn repeats_count_and_empty_slots_are_zero() {
        let (batch, unique) = sample();
        let mut out = [9.0; 6];
        pool(&batch, &unique, &[Pooling::Sum, Pooling::Mean, Pooling::Sum], &ROWS, 2, &mut out);
        assert_eq!(out, [2.0, 4.0, 31.0 / 4.0, 62.0 / 4.0, 0.0, 0.0]);
        pool(&batch, &unique, &[Pooling::Sqrtn; 3], &ROWS, 2, &mut out);
        assert_eq!(out[2..4], [15.5, 31.0]);
    }

    #[test]
    fn the_gradient_is_the_transpose() {
        let (batch, unique) = sample();
        let gradient = [1.0, 2.0, 4.0, 8.0, 100.0, 100.0];
        let mut rows = [0.0; 4];
        pool_gradient(&batch, &unique, &[Pooling::Sum, Pooling::Mean, Pooling::Sum], &gradient, 2.0, &mut rows);
        assert_eq!(rows, [2.0 * (2.0 + 1.0), 2.0 * (4.0 + 2.0), 2.0 * 3.0, 2.0 * 6.0]);
    }
}
