//! Strategy `geo`: a trainer copies whole rows, steps its copies, and sends back increments, which are added here.

use crate::arena::GrowError;
use crate::index::ABSENT;
use crate::partition::{mix, partition_of};
use crate::rows::{Counters, Word};
use crate::table::Table;

/// Counters of a row: show, click, and the data time with two flag bits.
pub type RowTail = [u32; 3];

/// Flag of a [`RowTail`]: the sign has a row.
const PRESENT: u32 = 1 << 31;
/// Flag of a [`RowTail`]: the row has its late columns.
const ADMITTED: u32 = 1 << 30;

fn tail_of(counters: Counters) -> RowTail {
    let Counters { show, click, seen, admitted } = counters;
    [show, click, seen | PRESENT | if admitted { ADMITTED } else { 0 }]
}

/// Returns the counters, or `None` for a sign without a row.
fn counters_of([show, click, stamp]: RowTail) -> Option<Counters> {
    let seen = stamp & !(PRESENT | ADMITTED);
    (stamp & PRESENT != 0).then_some(Counters { show, click, seen, admitted: stamp & ADMITTED != 0 })
}

/// Copies of whole rows: weights, optimizer state and counters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FullRows {
    /// `[signs, width + state]`; zeros for a sign without a row.
    pub values: Vec<f32>,
    /// Counters of each sign.
    pub tails: Vec<RowTail>,
}

impl Table {
    /// Weights and state values per row.
    pub fn full_width(&self) -> usize {
        self.width() + self.spec().state_width()
    }

    /// Copies the whole rows of `signs`; creates no rows.
    pub fn pull_full(&self, signs: &[u64], out: &mut FullRows) {
        out.values.clear();
        out.values.resize(signs.len() * self.full_width(), 0.0);
        out.tails.clear();
        out.tails.resize(signs.len(), [0; 3]);
        let outputs = out.values.chunks_exact_mut(self.full_width()).zip(&mut out.tails);
        for (&sign, (values, tail)) in signs.iter().zip(outputs) {
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

    /// Inserts rows that [`Table::pull_full`] copied from another table; a sign without a row in that table gets none in
    /// this one.
    pub fn insert_full(&mut self, signs: &[u64], full: &FullRows) -> Result<(), GrowError> {
        let width = self.full_width();
        let (spec, partitions) = self.spec_and_partitions_mut();
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

    /// Returns the changes of the rows since `before`: `[signs, width + state]`, to be pushed as a geo increment.
    ///
    /// A row or late columns that did not exist in `before` are compared with the initial values that the push will
    /// give them.
    pub fn increments(&self, signs: &[u64], before: &FullRows) -> Vec<f32> {
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
        let push = Push { signs, handles: None, gradients: &gradients, counts: &counts, seen: 2, is_increment: false };
        table.push(push).unwrap();
    }

    /// Holds for new rows, existing rows and late columns.
    #[test]
    fn increments_of_a_copy_equal_the_steps_on_the_table() {
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
            copy.insert_full(&signs, &before).unwrap();
            for by in [0.5, -0.1] {
                step(&mut copy, &signs, by);
                step(&mut expected, &signs, by);
            }
            let increments = copy.increments(&signs, &before);
            let push = Push {
                signs: &signs,
                handles: None,
                gradients: &increments,
                counts: &vec![(2, 0); signs.len()],
                seen: 2,
                is_increment: true,
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
    fn an_increment_with_nan_counts_but_is_not_added() {
        let mut table = Table::new(test_spec(2)).unwrap();
        step(&mut table, &[1], 0.5);
        let before = table.get(1).unwrap();
        let nan = [f32::NAN; 8];
        let push = Push { signs: &[1], handles: None, gradients: &nan, counts: &[(1, 1)], seen: 0, is_increment: true };
        assert!(table.push(push).unwrap().non_finite);
        let after = table.get(1).unwrap();
        assert_eq!((before.weights, before.state), (after.weights, after.state));
        assert_eq!((after.counters.show, after.counters.click), (2, 1));
    }
}
