//! The table: rows by sign, spread over partitions; pulls read, pushes create, count and step.

use crate::partition::{mix, partition_of, partition_of_mixed};
use crate::rows::{ABSENT, Counters, Rows};
use crate::spec::{SpecError, TableSpec};

/// Signs whose places are asked for ahead of their use.
const GROUP: usize = 32;

/// Where a row was found; valid for as long as the table lives, for rows never move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    partition: u32,
    row: u32,
}

/// What a push did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pushed {
    /// Rows it created.
    pub created: usize,
    /// The gradients held something that is not a number: counted, not applied.
    pub non_finite: bool,
}

/// A row as people see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Show, click, last seen, changed.
    pub counters: Counters,
    /// The weights.
    pub weights: Vec<f32>,
    /// The optimizer's state.
    pub state: Vec<f32>,
}

/// One push: every distinct sign of a batch with its gradient and its counts.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// Each sign once.
    pub signs: &'a [u64],
    /// Where the pull of the same signs found them.
    pub handles: &'a [Handle],
    /// `[signs, width]`.
    pub gradients: &'a [f32],
    /// Show and click of each sign.
    pub counts: &'a [(u32, u32)],
    /// Data time.
    pub seen: u32,
}

/// A sparse table of signs, never a fixed vocabulary.
#[derive(Debug)]
pub struct Table {
    spec: TableSpec,
    width: usize,
    pub(crate) partitions: Vec<Rows>,
    /// The publish that will carry what changes now.
    publish: u32,
}

impl Table {
    /// An empty table.
    pub fn new(spec: TableSpec) -> Result<Self, SpecError> {
        spec.check()?;
        let width = spec.width();
        let state_width = spec.optimizer.state_width(width);
        let partitions = (0..spec.partitions).map(|_| Rows::new(width, state_width)).collect();
        Ok(Table { spec, width, partitions, publish: 1 })
    }

    /// Its declaration.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Weights a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows in it.
    pub fn len(&self) -> usize {
        self.partitions.iter().map(Rows::len).sum()
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held, spare capacity included.
    pub fn bytes(&self) -> usize {
        self.partitions.iter().map(Rows::bytes).sum()
    }

    /// Writes the weights of each sign into `out`, zeroes for an absent one, and creates nothing.
    pub fn pull(&self, signs: &[u64], out: &mut [f32], handles: &mut Vec<Handle>) {
        assert_eq!(out.len(), signs.len() * self.width);
        handles.clear();
        handles.reserve(signs.len());
        let mut places = [(0u32, 0u64); GROUP];
        for (group, out) in signs.chunks(GROUP).zip(out.chunks_mut(GROUP * self.width)) {
            let places = &mut places[..group.len()];
            for (place, &sign) in places.iter_mut().zip(group) {
                let hash = mix(sign);
                *place = (partition_of_mixed(hash, self.spec.partitions), hash);
                self.partitions[place.0 as usize].prefetch_entry(place.1);
            }
            for &(partition, hash) in places.iter() {
                self.partitions[partition as usize].prefetch_row(hash);
            }
            for ((&(partition, hash), &sign), weights) in places.iter().zip(group).zip(out.chunks_exact_mut(self.width))
            {
                let rows = &self.partitions[partition as usize];
                let row = rows.find(sign, hash);
                handles.push(Handle { partition, row });
                match row {
                    ABSENT => weights.fill(0.0),
                    row => weights.copy_from_slice(rows.weights(row)),
                }
            }
        }
    }

    /// Counts and steps every sign once; a sign without a row starts from its initial values.
    pub fn push(&mut self, push: Push<'_>) -> Pushed {
        let Push { signs, handles, gradients, counts, seen } = push;
        assert_eq!(gradients.len(), signs.len() * self.width);
        assert!(handles.len() == signs.len() && counts.len() == signs.len());
        let mut pushed = Pushed { created: 0, non_finite: gradients.iter().any(|g| !g.is_finite()) };
        let gradients = gradients.chunks_exact(self.width);
        for (((&sign, &handle), gradient), &(show, click)) in signs.iter().zip(handles).zip(gradients).zip(counts) {
            let rows = &mut self.partitions[handle.partition as usize];
            let row = match handle.row {
                // another push may have created it since the pull
                ABSENT => match rows.find(sign, mix(sign)) {
                    ABSENT => {
                        pushed.created += 1;
                        let row = rows.insert(sign, mix(sign));
                        let (weights, state) = rows.values_mut(row);
                        self.spec.init(sign, weights);
                        self.spec.optimizer.init_state(weights, state);
                        row
                    }
                    row => row,
                },
                row => row,
            };
            let before = rows.counters(row);
            rows.set_counters(
                row,
                Counters {
                    show: before.show.saturating_add(show),
                    click: before.click.saturating_add(click),
                    seen: before.seen.max(seen),
                    changed: self.publish,
                },
            );
            if !pushed.non_finite {
                let (weights, state) = rows.values_mut(row);
                self.spec.optimizer.step(weights, state, gradient);
            }
        }
        pushed
    }

    /// The row of `sign`, if it has one.
    pub fn get(&self, sign: u64) -> Option<Row> {
        let rows = &self.partitions[partition_of(sign, self.spec.partitions) as usize];
        match rows.find(sign, mix(sign)) {
            ABSENT => None,
            row => Some(Row {
                counters: rows.counters(row),
                weights: rows.weights(row).to_vec(),
                state: rows.state(row).to_vec(),
            }),
        }
    }

    /// The rows of a partition in the order of their signs.
    pub fn rows_of(&self, partition: u32) -> (Vec<u64>, Vec<&[f32]>) {
        let rows = &self.partitions[partition as usize];
        rows.sorted().into_iter().map(|row| (rows.sign(row), rows.weights(row))).unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::test_spec;

    fn push(table: &mut Table, signs: &[u64], gradients: &[f32], counts: &[(u32, u32)]) -> (Vec<f32>, Pushed) {
        let mut out = vec![9.0; signs.len() * table.width()];
        let mut handles = Vec::new();
        table.pull(signs, &mut out, &mut handles);
        let pushed = table.push(Push { signs, handles: &handles, gradients, counts, seen: 5 });
        (out, pushed)
    }

    #[test]
    fn absent_reads_as_zero_and_pulls_create_nothing() {
        let table = Table::new(test_spec(3)).unwrap();
        let signs: Vec<u64> = (0..100).collect();
        let mut out = vec![9.0; 400];
        table.pull(&signs, &mut out, &mut Vec::new());
        assert!(out.iter().all(|&x| x == 0.0));
        assert_eq!(table.len(), 0);
        assert_eq!(table.get(5), None);
    }

    #[test]
    fn the_push_that_creates_a_row_starts_from_its_initial_values() {
        let mut table = Table::new(test_spec(3)).unwrap();
        let (_, pushed) = push(&mut table, &[42, u64::MAX], &[0.5; 8], &[(2, 1), (1, 0)]);
        assert_eq!(pushed, Pushed { created: 2, non_finite: false });
        let row = table.get(42).unwrap();
        let mut expected = [0.0; 4];
        test_spec(3).init(42, &mut expected);
        for weight in &mut expected {
            *weight -= 0.1 * 0.5 / (0.5f32.sqrt() + 1e-8);
        }
        assert_eq!(row.weights, expected);
        assert_eq!(row.state, [0.5; 4]);
        assert_eq!(row.counters, Counters { show: 2, click: 1, seen: 5, changed: 1 });
        let (pulled, pushed) = push(&mut table, &[42], &[0.0; 4], &[(1, 1)]);
        assert_eq!(pulled, expected);
        assert_eq!(pushed.created, 0);
        assert_eq!(table.get(42).unwrap().counters.show, 3);
    }

    #[test]
    fn counts_stop_at_the_largest() {
        let mut table = Table::new(test_spec(1)).unwrap();
        push(&mut table, &[7], &[0.0; 4], &[(u32::MAX, u32::MAX - 1)]);
        push(&mut table, &[7], &[0.0; 4], &[(2, 2)]);
        let counters = table.get(7).unwrap().counters;
        assert_eq!((counters.show, counters.click), (u32::MAX, u32::MAX));
    }

    #[test]
    fn last_seen_never_goes_back() {
        let mut table = Table::new(test_spec(1)).unwrap();
        let (mut out, mut handles) = (vec![0.0; 4], Vec::new());
        table.pull(&[7], &mut out, &mut handles);
        for (seen, expected) in [(5, 5), (3, 5), (6, 6)] {
            table.push(Push { signs: &[7], handles: &handles, gradients: &[0.0; 4], counts: &[(1, 0)], seen });
            assert_eq!(table.get(7).unwrap().counters.seen, expected);
        }
    }

    #[test]
    fn a_stale_handle_of_an_absent_sign_finds_the_row_made_since() {
        let mut table = Table::new(test_spec(1)).unwrap();
        let (mut out, mut handles) = (vec![0.0; 4], Vec::new());
        table.pull(&[7], &mut out, &mut handles);
        let one = Push { signs: &[7], handles: &handles, gradients: &[1.0; 4], counts: &[(1, 0)], seen: 0 };
        assert_eq!(table.push(one).created, 1);
        assert_eq!(table.push(one).created, 0);
        assert_eq!(table.get(7).unwrap().counters.show, 2);
    }

    #[test]
    fn gradients_that_are_not_numbers_are_counted_not_applied() {
        let mut table = Table::new(test_spec(2)).unwrap();
        push(&mut table, &[1], &[0.5; 4], &[(1, 0)]);
        let before = table.get(1).unwrap();
        let (_, pushed) = push(&mut table, &[1], &[0.1, f32::NAN, 0.0, 0.0], &[(1, 1)]);
        assert!(pushed.non_finite);
        let after = table.get(1).unwrap();
        assert_eq!(before.weights, after.weights);
        assert_eq!((after.counters.show, after.counters.click), (2, 1));
    }

    #[test]
    fn partitions_share_the_rows_evenly_and_do_not_change_them() {
        let signs: Vec<u64> = (0..20_000).collect();
        let gradients: Vec<f32> = (0..80_000).map(|i| (i % 7) as f32 - 3.0).collect();
        let counts = vec![(1, 0); signs.len()];
        let mut one = Table::new(test_spec(1)).unwrap();
        let mut many = Table::new(test_spec(16)).unwrap();
        push(&mut one, &signs, &gradients, &counts);
        push(&mut many, &signs, &gradients, &counts);
        for &sign in &signs {
            assert_eq!(one.get(sign), many.get(sign));
        }
        for partition in 0..16 {
            let share = many.rows_of(partition).0.len();
            assert!((1_000..1_500).contains(&share), "{share}");
        }
    }
}
