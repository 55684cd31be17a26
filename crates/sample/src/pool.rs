//! Pooling: sums the rows of a slot into one vector, and distributes the gradient of the vector to the rows.
//!
//! The vectors of a sample are its *cells*: one for each slot, but T for a sequence of length T. A sequence is filled from
//! the front; cells after the last sign are zero.

use std::ops::Range;

use crate::batch::Batch;
use crate::features::{Features, Pooling};
use crate::unique::Unique;

/// The cells of each slot.
#[derive(Debug, Clone)]
pub struct Layout {
    slots: Vec<Cells>,
    num_cells: usize,
}

#[derive(Debug, Clone, Copy)]
enum Cells {
    Pooled(Pooling),
    Sequence(usize),
}

impl Layout {
    /// Returns the layout of a declaration.
    pub fn of(features: &Features) -> Self {
        let cells = |slot: &crate::features::Slot| match slot.sequence {
            Some(length) => Cells::Sequence(usize::from(length)),
            None => Cells::Pooled(slot.pooling),
        };
        Layout { slots: features.slots.iter().map(cells).collect(), num_cells: features.num_cells() }
    }

    /// Cells per sample.
    pub fn num_cells(&self) -> usize {
        self.num_cells
    }
}

/// Pools the rows `[num_unique, width]` into `out`, `[num_samples, num_cells, width]`; an empty cell is zero.
pub fn pool(batch: &Batch, unique: &Unique, layout: &Layout, rows: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(out.len(), batch.num_samples() * layout.num_cells * width);
    pool_samples(batch, unique, layout, rows, 0..batch.num_samples(), out);
}

/// Like [`pool`], for a range of samples: writes `[samples, num_cells, width]`.
pub fn pool_samples(
    batch: &Batch,
    unique: &Unique,
    layout: &Layout,
    rows: &[f32],
    samples: Range<usize>,
    out: &mut [f32],
) {
    let width = out.len().checked_div(samples.len() * layout.num_cells).unwrap_or(0);
    assert_eq!(rows.len(), unique.signs.len() * width);
    if width == 0 {
        return;
    }
    let mut rest = out;
    for cell in samples.start * batch.num_slots..samples.end * batch.num_slots {
        let positions = positions_of(batch, unique, cell);
        match layout.slots[cell % batch.num_slots] {
            Cells::Pooled(pooling) => {
                let (vector, behind) = rest.split_at_mut(width);
                rest = behind;
                pool_cell(positions, pooling, rows, vector);
            }
            Cells::Sequence(length) => {
                let (vectors, behind) = rest.split_at_mut(length * width);
                rest = behind;
                let (filled, empty) = vectors.split_at_mut(positions.len() * width);
                for (vector, &position) in filled.chunks_exact_mut(width).zip(positions) {
                    vector.copy_from_slice(row(rows, position, width));
                }
                empty.fill(0.0);
            }
        }
    }
}

/// Like [`pool_samples`], but `rows` has one row for each sign of these samples, `[signs, width]`, with repeats.
pub fn pool_in_order(batch: &Batch, layout: &Layout, rows: &[f32], samples: Range<usize>, out: &mut [f32]) {
    let width = out.len().checked_div(samples.len() * layout.num_cells).unwrap_or(0);
    let cells = samples.start * batch.num_slots..samples.end * batch.num_slots;
    let first = batch.offsets[cells.start] as usize;
    assert_eq!(rows.len(), (batch.offsets[cells.end] as usize - first) * width);
    if width == 0 {
        return;
    }
    let mut rest = out;
    for cell in cells {
        let [start, end] = [cell, cell + 1].map(|at| (batch.offsets[at] as usize - first) * width);
        let rows = &rows[start..end];
        match layout.slots[cell % batch.num_slots] {
            Cells::Pooled(pooling) => {
                let (vector, behind) = rest.split_at_mut(width);
                rest = behind;
                let Some((row, more)) = rows.split_at_checked(width) else {
                    vector.fill(0.0);
                    continue;
                };
                vector.copy_from_slice(row);
                for row in more.chunks_exact(width) {
                    vector.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
                let factor = pooling.factor(rows.len() / width);
                if factor != 1.0 {
                    vector.iter_mut().for_each(|value| *value *= factor);
                }
            }
            Cells::Sequence(length) => {
                let (vectors, behind) = rest.split_at_mut(length * width);
                rest = behind;
                let (filled, empty) = vectors.split_at_mut(rows.len());
                filled.copy_from_slice(rows);
                empty.fill(0.0);
            }
        }
    }
}

/// Whether every cell of these samples has exactly one sign, so that one row per sign is already pooled.
pub fn is_pooled(batch: &Batch, layout: &Layout, samples: Range<usize>) -> bool {
    let offsets = &batch.offsets[samples.start * batch.num_slots..=samples.end * batch.num_slots];
    layout.num_cells == batch.num_slots
        && offsets.last().zip(offsets.first()).is_some_and(|(end, start)| (end - start) as usize == offsets.len() - 1)
        && offsets.windows(2).all(|pair| pair[1] - pair[0] == 1)
}

#[inline]
fn pool_cell(positions: &[u32], pooling: Pooling, rows: &[f32], vector: &mut [f32]) {
    let width = vector.len();
    let [first, rest @ ..] = positions else {
        vector.fill(0.0);
        return;
    };
    vector.copy_from_slice(row(rows, *first, width));
    for &position in rest {
        for (sum, value) in vector.iter_mut().zip(row(rows, position, width)) {
            *sum += value;
        }
    }
    let factor = pooling.factor(positions.len());
    if factor != 1.0 {
        vector.iter_mut().for_each(|value| *value *= factor);
    }
}

/// Adds `scale` times the gradient `[num_samples, num_cells, width]` to the gradients of the rows `[num_unique, width]`.
pub fn pool_gradient(
    batch: &Batch,
    unique: &Unique,
    layout: &Layout,
    gradient: &[f32],
    scale: f32,
    row_gradients: &mut [f32],
) {
    let num_cells = batch.num_samples() * layout.num_cells;
    let width = gradient.len().checked_div(num_cells).unwrap_or(0);
    assert_eq!(gradient.len(), num_cells * width);
    if width == 0 {
        return;
    }
    assert_eq!(row_gradients.len(), unique.signs.len() * width);
    let mut add = |position: u32, factor: f32, vector: &[f32]| {
        let start = position as usize * width;
        for (sum, value) in row_gradients[start..start + width].iter_mut().zip(vector) {
            *sum += factor * value;
        }
    };
    let mut rest = gradient;
    for cell in 0..batch.num_samples() * batch.num_slots {
        let positions = positions_of(batch, unique, cell);
        match layout.slots[cell % batch.num_slots] {
            Cells::Pooled(pooling) => {
                let (vector, behind) = rest.split_at(width);
                rest = behind;
                let factor = scale * pooling.factor(positions.len());
                positions.iter().for_each(|&position| add(position, factor, vector));
            }
            Cells::Sequence(length) => {
                let (vectors, behind) = rest.split_at(length * width);
                rest = behind;
                for (&position, vector) in positions.iter().zip(vectors.chunks_exact(width)) {
                    add(position, scale, vector);
                }
            }
        }
    }
}

#[inline]
fn positions_of<'a>(batch: &Batch, unique: &'a Unique, cell: usize) -> &'a [u32] {
    &unique.inverse[batch.offsets[cell] as usize..batch.offsets[cell + 1] as usize]
}

#[inline]
fn row(rows: &[f32], position: u32, width: usize) -> &[f32] {
    &rows[position as usize * width..][..width]
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

    fn pooled(poolings: [Pooling; 3]) -> Layout {
        Layout { slots: poolings.map(Cells::Pooled).to_vec(), num_cells: 3 }
    }

    const ROWS: [f32; 4] = [1.0, 2.0, 10.0, 20.0];

    #[test]
    fn repeats_count_and_empty_slots_are_zero() {
        let (batch, unique) = sample();
        let mut out = [9.0; 6];
        pool(&batch, &unique, &pooled([Pooling::Sum, Pooling::Mean, Pooling::Sum]), &ROWS, 2, &mut out);
        assert_eq!(out, [2.0, 4.0, 31.0 / 4.0, 62.0 / 4.0, 0.0, 0.0]);
        pool(&batch, &unique, &pooled([Pooling::Sqrtn; 3]), &ROWS, 2, &mut out);
        assert_eq!(out[2..4], [15.5, 31.0]);
    }

    #[test]
    fn pooling_rows_in_order_equals_pooling_unique_rows() {
        let mut builder = BatchBuilder::new(3, 0, 1, 3);
        for signs in [&[(0, 10), (0, 10), (1, 10), (1, 11), (2, 11), (2, 10)][..], &[], &[(0, 11), (1, 10), (2, 11)]] {
            builder.begin();
            signs.iter().for_each(|&(slot, sign)| builder.add_sign(slot, sign));
            builder.end(1, 0);
        }
        let batch = builder.finish();
        let unique = Unique::of(&batch);
        let in_order: Vec<f32> = unique.inverse.iter().flat_map(|&position| row(&ROWS, position, 2).to_vec()).collect();
        let layouts = [
            pooled([Pooling::Sum, Pooling::Mean, Pooling::Sqrtn]),
            Layout { slots: vec![Cells::Sequence(2), Cells::Pooled(Pooling::Mean), Cells::Sequence(3)], num_cells: 6 },
        ];
        for layout in &layouts {
            for samples in [0..3, 0..1, 1..3, 2..3] {
                let room = samples.len() * layout.num_cells * 2;
                let (mut expected, mut got) = (vec![9.0; room], vec![9.0; room]);
                pool_samples(&batch, &unique, layout, &ROWS, samples.clone(), &mut expected);
                let signs = [samples.start, samples.end].map(|at| batch.offsets[at * 3] as usize * 2);
                pool_in_order(&batch, layout, &in_order[signs[0]..signs[1]], samples.clone(), &mut got);
                assert_eq!(got, expected, "{samples:?}");
                let is_same = got == in_order[signs[0]..signs[1]];
                assert!(!is_pooled(&batch, layout, samples.clone()) || is_same, "{samples:?}");
            }
        }
        assert!(is_pooled(&batch, &layouts[0], 2..3) && !is_pooled(&batch, &layouts[0], 1..3));
        assert!(!is_pooled(&batch, &layouts[0], 0..1) && !is_pooled(&batch, &layouts[1], 2..3));
    }

    #[test]
    fn the_gradient_is_the_transpose() {
        let (batch, unique) = sample();
        let gradient = [1.0, 2.0, 4.0, 8.0, 100.0, 100.0];
        let mut rows = [0.0; 4];
        let layout = pooled([Pooling::Sum, Pooling::Mean, Pooling::Sum]);
        pool_gradient(&batch, &unique, &layout, &gradient, 2.0, &mut rows);
        assert_eq!(rows, [2.0 * (2.0 + 1.0), 2.0 * (4.0 + 2.0), 2.0 * 3.0, 2.0 * 6.0]);
    }

    #[test]
    fn a_sequence_has_a_cell_for_each_position() {
        let (batch, unique) = sample();
        let slots = vec![Cells::Sequence(3), Cells::Pooled(Pooling::Sum), Cells::Sequence(1)];
        let layout = Layout { slots, num_cells: 5 };
        let mut out = [9.0; 10];
        pool(&batch, &unique, &layout, &ROWS, 2, &mut out);
        assert_eq!(out, [1.0, 2.0, 1.0, 2.0, 0.0, 0.0, 31.0, 62.0, 0.0, 0.0]);
        let mut rows = [0.0; 4];
        let gradient = [1.0, 2.0, 3.0, 4.0, 50.0, 50.0, 1.0, 1.0, 70.0, 70.0];
        pool_gradient(&batch, &unique, &layout, &gradient, 1.0, &mut rows);
        assert_eq!(rows, [1.0 + 3.0 + 1.0, 2.0 + 4.0 + 1.0, 3.0, 3.0]);
    }
}
