//! Deltas: rows go to a trainer with all they have, are stepped there, and what changed is added to them here.

use crate::arena::GrowError;
use crate::index::ABSENT;
use crate::partition::{mix, partition_of};
use crate::rows::{Counters, Word};
use crate::table::Table;

/// Counters of a row beside its values: show, click, and data time with two bits.
pub type RowTail = [u32; 3];

/// The bit of a [`RowTail`] of a sign that has a row.
const PRESENT: u32 = 1 << 31;
/// The bit of one that has its late columns.
const ADMITTED: u32 = 1 << 30;

fn tail_of(counters: Counters) -> RowTail {
    let Counters { show, click, seen, admitted } = counters;
    [show, click, seen | PRESENT | if admitted { ADMITTED } else { 0 }]
}

/// The counters of a sign that has a row.
fn counters_of([show, click, stamp]: RowTail) -> Option<Counters> {
    let seen = stamp & !(PRESENT | ADMITTED);
    (stamp & PRESENT != 0).then_some(Counters { show, click, seen, admitted: stamp & ADMITTED != 0 })
}

/// Rows of signs with all they have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FullRows {
    /// `[signs, width + state]`; zeros for a sign without a row.
    pub values: Vec<f32>,
    /// Of each sign.
    pub tails: Vec<RowTail>,
}

impl Table {
    /// Values of a row, weights and state.
    pub fn full_width(&self) -> usize {
        self.width() + self.spec().state_width()
    }

    /// Reads whole rows; creates nothing.
    pub fn pull_full(&self, signs: &[u64], out: &mut FullRows) {
        out.values.clear();
        out.values.resize(signs.len() * self.full_width(), 0.0);
        out.tails.clear();
        out.tails.resize(signs.len(), [0; 3]);
        let places = out.values.chunks_exact_mut(self.full_width()).zip(&mut out.tails);
        for (&sign, (values, tail)) in signs.iter().zip(places) {
            let rows = &self.partitions()[partition_of(sign, self.spec().partitions) as usize];
            let row = rows.find(sign, mix(sign));
            if row == ABSENT {
                continue;
            }
            for (value, word) in values.iter_mut().zip(rows.weights(row).iter().chain(rows.state(row))) {
                *value = f32::from_le_bytes(*word);
            }
            *tail = tail_of(rows.counters(row));
        }
    }

    /// Takes rows of another table in; those of signs without a row there have none here.
    pub fn adopt(&mut self, signs: &[u64], full: &FullRows) -> Result<(), GrowError> {
        let width = self.full_width();
        let (spec, partitions) = self.for_change();
        for ((&sign, values), tail) in signs.iter().zip(full.values.chunks_exact(width)).zip(&full.tails) {
            let Some(counters) = counters_of(*tail) else { continue };
            let rows = &mut partitions[partition_of(sign, spec.partitions) as usize];
            let row = match rows.find(sign, mix(sign)) {
                ABSENT => rows.insert(sign, mix(sign))?,
                row => row,
            };
            let parts = rows.parts_mut(row);
            for (word, value) in parts.weights.iter_mut().chain(parts.state).zip(values) {
                *word = value.to_le_bytes();
            }
            counters.write(parts.tail);
        }
        Ok(())
    }

    /// What has changed in rows since they were as `before` says: `[signs, width + state]`, to be pushed as a delta.
    ///
    /// A row, or late columns of it, that started meanwhile changed from where the push that adds it will start it.
    pub fn deltas(&self, signs: &[u64], before: &FullRows) -> Vec<f32> {
        let (width, full_width) = (self.width(), self.full_width());
        let late = self.spec().late_columns();
        let mut now = FullRows::default();
        self.pull_full(signs, &mut now);
        let (mut start, mut initial) = (vec![0f32; width], vec![0f32; full_width]);
        let mut state = vec![Word::default(); full_width - width];
        for (at, &sign) in signs.iter().enumerate() {
            let values = &mut now.values[at * full_width..(at + 1) * full_width];
            let Some(counters) = counters_of(now.tails[at]) else { continue };
            let earlier = counters_of(before.tails[at]);
            let had_late = earlier.is_some_and(|earlier| earlier.admitted);
            initial.copy_from_slice(&before.values[at * full_width..(at + 1) * full_width]);
            if earlier.is_none() || (counters.admitted && !had_late) {
                self.spec().init(sign, &mut start);
                if earlier.is_none() {
                    initial[..width].copy_from_slice(&start);
                    late.iter().for_each(|range| initial[range.clone()].fill(0.0));
                    self.spec().optimizer.init_state(&initial[..width], &mut state);
                } else {
                    state.iter_mut().zip(&initial[width..]).for_each(|(word, value)| *word = value.to_le_bytes());
                }
                if counters.admitted && !had_late {
                    for range in &late {
                        initial[range.clone()].copy_from_slice(&start[range.clone()]);
                        self.spec().optimizer.start_columns(range.clone(), &start, &mut state);
                    }
                }
                initial[width..].iter_mut().zip(&state).for_each(|(value, word)| *value = f32::from_le_bytes(*word));
            }
            values.iter_mut().zip(&initial).for_each(|(value, before)| *value -= before);
        }
        now.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::push::Push;
    use crate::spec::{TableSpec, test_spec};

    fn specs() -> Vec<TableSpec> {
        let optimizers = [
            r#"{"kind":"sgd","learning_rate":0.1}"#,
            r#"{"kind":"adagrad","learning_rate":0.1,"initial_accumulator":0.25,"epsilon":1e-8}"#,
            r#"{"kind":"row_adagrad","learning_rate":0.1,"initial_accumulator":0.25,"epsilon":1e-8}"#,
            r#"{"kind":"ftrl","learning_rate":0.1,"beta":1.0,"l1":0.01,"l2":0.1}"#,
        ];
        let of = |optimizer: &&str| {
            let mut spec = test_spec(4);
            spec.columns[1].late = true;
            spec.admit_after = 3;
            spec.optimizer = serde_json::from_str(optimizer).unwrap();
            spec
        };
        optimizers.iter().map(of).collect()
    }

    fn step(table: &mut Table, signs: &[u64], by: f32) {
        let gradients: Vec<f32> = (0..signs.len() * table.width()).map(|at| by + at as f32 * 0.01).collect();
        let counts = vec![(1, 0); signs.len()];
        let push = Push { signs, handles: None, gradients: &gradients, counts: &counts, seen: 2, is_delta: false };
        table.push(push).unwrap();
    }

    /// Steps on a copy, added to the rows, are those steps: of new rows, of old ones, and of columns that come late.
    #[test]
    fn steps_elsewhere_come_to_the_same() {
        for spec in specs() {
            let mut table = Table::new(spec.clone()).unwrap();
            let signs: Vec<u64> = (0..40).collect();
            step(&mut table, &signs[..20], 0.3);
            step(&mut table, &signs[..10], -0.2);
            let mut expected = Table::new(spec.clone()).unwrap();
            step(&mut expected, &signs[..20], 0.3);
            step(&mut expected, &signs[..10], -0.2);

            let mut copy = Table::new(TableSpec { partitions: 1, ..spec.clone() }).unwrap();
            let mut before = FullRows::default();
            table.pull_full(&signs, &mut before);
            assert_eq!(table.len(), 20, "a pull creates nothing");
            copy.adopt(&signs, &before).unwrap();
            for by in [0.5, -0.1] {
                step(&mut copy, &signs, by);
                step(&mut expected, &signs, by);
            }
            let deltas = copy.deltas(&signs, &before);
            let push = Push {
                signs: &signs,
                handles: None,
                gradients: &deltas,
                counts: &vec![(2, 0); signs.len()],
                seen: 2,
                is_delta: true,
            };
            assert_eq!(table.push(push).unwrap().created, 20);
            for &sign in &signs {
                let (got, wanted) = (table.get(sign).unwrap(), expected.get(sign).unwrap());
                assert_eq!(got.counters, wanted.counters);
                for (got, wanted) in
                    got.weights.iter().chain(&got.state).zip(wanted.weights.iter().chain(&wanted.state))
                {
                    assert!((got - wanted).abs() < 1e-6, "{} sign {sign}: {got} {wanted}", spec.optimizer.kind());
                }
            }
        }
    }

    #[test]
    fn a_delta_that_is_not_a_number_is_counted_not_added() {
        let mut table = Table::new(test_spec(2)).unwrap();
        step(&mut table, &[1], 0.5);
        let before = table.get(1).unwrap();
        let deltas = [f32::NAN; 8];
        let push = Push { signs: &[1], handles: None, gradients: &deltas, counts: &[(1, 1)], seen: 0, is_delta: true };
        assert!(table.push(push).unwrap().non_finite);
        let after = table.get(1).unwrap();
        assert_eq!((before.weights, before.state), (after.weights, after.state));
        assert_eq!((after.counters.show, after.counters.click), (2, 1));
    }
}
