//! The changes of a partition since the last publish: changed rows, and signs of removed rows.
//!
//! Changes are listed only after they were taken for the first time, and as long as the lists are shorter than the
//! partition. Otherwise the whole partition counts as changed.

use super::{CHANGED, Rows, mark, stamp_of};
use crate::index::ABSENT;
use crate::partition::mix;

/// The changes of a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Signs with changed weights, sorted; all of them have a row. Empty if `is_whole`.
    pub changed: Vec<u64>,
    /// Signs of removed rows, sorted; none of them has a row. Empty if `is_whole`.
    pub removed: Vec<u64>,
    /// Whether all rows count as changed and all other signs as removed.
    pub is_whole: bool,
}

/// The lists of a partition.
#[derive(Debug, Default)]
pub(super) struct ChangeLists {
    /// Changed rows; each has its `CHANGED` bit set.
    rows: Vec<u32>,
    /// Signs of removed rows, some of which may have a row again.
    removed: Vec<u64>,
}

impl Rows {
    /// Adds the row to the changes.
    #[inline]
    pub(crate) fn note_change(&mut self, row: u32) {
        if self.changes.is_none() {
            return;
        }
        let tail = self.parts_mut(row).tail;
        if stamp_of(tail) & CHANGED == 0 {
            mark(tail, true);
            self.changes.get_or_insert_default().rows.push(row);
        }
    }

    /// Adds the row's sign to the removed ones.
    #[inline]
    pub(super) fn note_removal(&mut self, row: u32) {
        if self.changes.is_some() {
            let sign = self.sign(row);
            self.changes.get_or_insert_default().removed.push(sign);
        }
    }

    /// Lists the changed rows again after rows moved.
    pub(super) fn relist_changes(&mut self) {
        if self.changes.is_some() {
            let rows = self.numbers().filter(|&row| stamp_of(self.tail(row)) & CHANGED != 0).collect();
            self.changes.get_or_insert_default().rows = rows;
            self.limit_lists();
        }
    }

    /// Drops lists that are longer than the partition.
    fn limit_lists(&mut self) {
        if self.changes.as_ref().is_some_and(|listed| listed.rows.len() + listed.removed.len() > self.len()) {
            self.mark_all_changed();
        }
    }

    /// Makes the whole partition count as changed.
    pub(crate) fn mark_all_changed(&mut self) {
        for row in self.changes.take().unwrap_or_default().rows {
            mark(self.parts_mut(row).tail, false);
        }
    }

    /// Takes the changes since the last call; the first time the whole partition.
    pub(crate) fn take_changes(&mut self) -> Changes {
        let Some(ChangeLists { mut rows, mut removed }) = self.changes.take() else {
            self.changes = Some(ChangeLists::default());
            return Changes { is_whole: true, ..Changes::default() };
        };
        rows.iter().for_each(|&row| mark(self.parts_mut(row).tail, false));
        let mut changed: Vec<u64> = rows.iter().map(|&row| self.sign(row)).collect();
        // The next list is about as long; keep the allocation.
        rows.clear();
        self.changes = Some(ChangeLists { rows, removed: Vec::new() });
        changed.sort_unstable();
        removed.sort_unstable();
        removed.dedup();
        // A removed sign that has a row again is among the changed ones.
        removed.retain(|&sign| self.find(sign, mix(sign)) == ABSENT);
        Changes { changed, removed, is_whole: false }
    }

    /// Restores taken changes that were not published.
    pub(crate) fn put_back(&mut self, taken: &Changes) {
        if taken.is_whole {
            return self.mark_all_changed();
        }
        for &sign in taken.changed.iter().chain(&taken.removed) {
            let row = self.find(sign, mix(sign));
            match &mut self.changes {
                None => return,
                Some(listed) if row == ABSENT => listed.removed.push(sign),
                Some(_) => self.note_change(row),
            }
        }
        self.limit_lists();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::index::line_arena;
    use crate::rows::{Counters, row_arena};

    fn new() -> Rows {
        Rows::new(1, Arc::new(row_arena(1, 0)), Arc::new(line_arena()))
    }

    /// Pushes a sign; creates its row if it has none.
    fn touch(rows: &mut Rows, sign: u64, show: u32) {
        let row = match rows.find(sign, mix(sign)) {
            ABSENT => {
                let row = rows.insert(sign, mix(sign)).unwrap();
                *rows.parts_mut(row).tail = Default::default();
                row
            }
            row => row,
        };
        let parts = rows.parts_mut(row);
        parts.weights.fill((show as f32).to_le_bytes());
        Counters { show, ..Counters::default() }.write(parts.tail);
        rows.note_change(row);
    }

    fn held(rows: &Rows) -> BTreeMap<u64, u32> {
        rows.numbers().map(|row| (rows.sign(row), rows.counters(row).show)).collect()
    }

    /// Applies a delta to the published rows.
    fn apply(online: &mut BTreeMap<u64, u32>, rows: &Rows, changes: &Changes) {
        let now = held(rows);
        if changes.is_whole {
            assert!(changes.changed.is_empty() && changes.removed.is_empty());
            online.clone_from(&now);
        }
        for sign in &changes.removed {
            assert!(!now.contains_key(sign), "a removed sign has no row");
            online.remove(sign);
        }
        for sign in &changes.changed {
            online.insert(*sign, now[sign]);
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Touch(Vec<u64>),
        Evict(u32),
        /// A publish; the flag tells whether it is committed.
        Publish(bool),
        MarkAll,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => prop::collection::vec(0u64..300, 1..60).prop_map(Step::Touch),
            2 => (0u32..3000).prop_map(Step::Evict),
            3 => any::<bool>().prop_map(Step::Publish),
            1 => Just(Step::MarkAll),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        /// After every committed publish the published rows equal the partition.
        #[test]
        fn committed_deltas_reproduce_the_partition(steps in steps()) {
            let (mut rows, mut online, mut show) = (new(), BTreeMap::new(), 0);
            let mut pending: Option<Changes> = None;
            for step in steps {
                match step {
                    Step::Touch(signs) => for sign in signs {
                        show += 1;
                        touch(&mut rows, sign, show);
                    },
                    Step::Evict(limit) => _ = rows.retain(|counters| counters.show > limit.min(show)),
                    Step::MarkAll => rows.mark_all_changed(),
                    Step::Publish(is_committed) => {
                        if let Some(taken) = pending.take() {
                            rows.put_back(&taken);
                        }
                        let changes = rows.take_changes();
                        prop_assert!(changes.changed.is_sorted() && changes.removed.is_sorted());
                        prop_assert!(changes.changed.len() + changes.removed.len() <= rows.len().max(1) * 2);
                        if is_committed {
                            apply(&mut online, &rows, &changes);
                            prop_assert_eq!(&online, &held(&rows));
                        } else {
                            pending = Some(changes);
                        }
                    }
                }
            }
            let marked = rows.numbers().filter(|&row| stamp_of(rows.tail(row)) & CHANGED != 0).collect::<BTreeSet<u32>>();
            let listed = rows.changes.as_ref().map(|listed| listed.rows.iter().copied().collect::<BTreeSet<u32>>());
            prop_assert_eq!(marked, listed.unwrap_or_default(), "marks and list agree");
        }
    }

    #[test]
    fn changes_are_taken_once() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        assert!(rows.take_changes().is_whole, "the whole partition the first time");
        assert_eq!(rows.take_changes(), Changes::default());
        [7, 3, 7, 200].iter().for_each(|&sign| touch(&mut rows, sign, 500));
        assert_eq!(rows.take_changes(), Changes { changed: vec![3, 7, 200], removed: vec![], is_whole: false });
        assert_eq!(rows.take_changes(), Changes::default());
    }

    #[test]
    fn removed_signs_are_listed_unless_they_have_a_row_again() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        rows.take_changes();
        rows.retain(|counters| counters.show >= 3);
        touch(&mut rows, 1, 500);
        assert_eq!(rows.take_changes(), Changes { changed: vec![1], removed: vec![0, 2], is_whole: false });
    }

    #[test]
    fn lists_longer_than_the_partition_are_dropped() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        rows.take_changes();
        rows.retain(|counters| counters.show >= 51);
        assert!(rows.changes.is_none(), "51 rows were removed, 49 are left");
        (0..100).for_each(|sign| touch(&mut rows, sign, 100 + sign as u32));
        assert!(rows.take_changes().is_whole);
        // New rows are removed again and again: the list of removed signs stays bounded.
        for sign in 1000..2000 {
            touch(&mut rows, sign, 0);
            rows.retain(|counters| counters.show > 0);
            let listed = rows.changes.as_ref().map_or(0, |listed| listed.rows.len() + listed.removed.len());
            assert!(listed <= rows.len());
        }
    }
}
