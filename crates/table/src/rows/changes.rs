//! What a publish has to carry of a partition: rows that changed, and signs of rows that went.
//!
//! Nothing is listed until changes are first taken, and nothing while a list would be longer than the partition: then
//! the whole of it counts as changed.

use super::{CHANGED, Rows, mark, stamp_of};
use crate::index::ABSENT;
use crate::partition::mix;

/// What changed in a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Signs whose weights changed, all of which have a row; sorted. Empty if it is whole.
    pub changed: Vec<u64>,
    /// Signs whose rows went, none of which has one now; sorted. Empty if it is whole.
    pub removed: Vec<u64>,
    /// All rows count as changed, and all other signs as removed.
    pub is_whole: bool,
}

/// The lists of a partition.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// Rows that changed; each has the mark.
    rows: Vec<u32>,
    /// Signs of rows that went, some of which may have come back.
    removed: Vec<u64>,
}

impl Rows {
    /// Notes that the next publish has to carry the row.
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

    /// Notes that the row goes.
    #[inline]
    pub(super) fn note_removal(&mut self, row: u32) {
        if self.changes.is_some() {
            let sign = self.sign(row);
            self.changes.get_or_insert_default().removed.push(sign);
        }
    }

    /// Lists the rows that changed after rows moved.
    pub(super) fn list_anew(&mut self) {
        if self.changes.is_some() {
            let rows = self.numbers().filter(|&row| stamp_of(self.tail(row)) & CHANGED != 0).collect();
            self.changes.get_or_insert_default().rows = rows;
            self.limit_lists();
        }
    }

    /// Lists longer than the partition are worth less than all of it.
    fn limit_lists(&mut self) {
        if self.changes.as_ref().is_some_and(|listed| listed.rows.len() + listed.removed.len() > self.len()) {
            self.forget_changes();
        }
    }

    /// From now on all of it counts as changed.
    pub(crate) fn forget_changes(&mut self) {
        for row in self.changes.take().unwrap_or_default().rows {
            mark(self.parts_mut(row).tail, false);
        }
    }

    /// What changed since the last call; all of it the first time.
    pub(crate) fn take_changes(&mut self) -> Changes {
        let Some(Listed { mut rows, mut removed }) = self.changes.take() else {
            self.changes = Some(Listed::default());
            return Changes { is_whole: true, ..Changes::default() };
        };
        rows.iter().for_each(|&row| mark(self.parts_mut(row).tail, false));
        let mut changed: Vec<u64> = rows.iter().map(|&row| self.sign(row)).collect();
        // the next list is about as long, and need not grow again
        rows.clear();
        self.changes = Some(Listed { rows, removed: Vec::new() });
        changed.sort_unstable();
        removed.sort_unstable();
        removed.dedup();
        // one that came back is among those that changed
        removed.retain(|&sign| self.find(sign, mix(sign)) == ABSENT);
        Changes { changed, removed, is_whole: false }
    }

    /// Lists again what was taken: nobody got it.
    pub(crate) fn put_back(&mut self, taken: &Changes) {
        if taken.is_whole {
            return self.forget_changes();
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

    /// Pushes a sign: its row is made if it has none.
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

    /// What is online after a delta of what changed.
    fn apply(online: &mut BTreeMap<u64, u32>, rows: &Rows, changes: &Changes) {
        let now = held(rows);
        if changes.is_whole {
            assert!(changes.changed.is_empty() && changes.removed.is_empty());
            online.clone_from(&now);
        }
        for sign in &changes.removed {
            assert!(!now.contains_key(sign), "a row that is there wins over one that went");
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
        /// Whether it was committed.
        Publish(bool),
        Forget,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => prop::collection::vec(0u64..300, 1..60).prop_map(Step::Touch),
            2 => (0u32..3000).prop_map(Step::Evict),
            3 => any::<bool>().prop_map(Step::Publish),
            1 => Just(Step::Forget),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        /// Whatever was committed and whatever was not: what is online is what is here.
        #[test]
        fn deltas_that_were_committed_make_the_partition(steps in steps()) {
            let (mut rows, mut online, mut show) = (new(), BTreeMap::new(), 0);
            let mut pending: Option<Changes> = None;
            for step in steps {
                match step {
                    Step::Touch(signs) => for sign in signs {
                        show += 1;
                        touch(&mut rows, sign, show);
                    },
                    Step::Evict(limit) => _ = rows.retain(|counters| counters.show > limit.min(show)),
                    Step::Forget => rows.forget_changes(),
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
            prop_assert_eq!(marked, listed.unwrap_or_default(), "marks and list are one");
        }
    }

    #[test]
    fn changes_are_told_once() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        assert!(rows.take_changes().is_whole, "all of it the first time");
        assert_eq!(rows.take_changes(), Changes::default());
        [7, 3, 7, 200].iter().for_each(|&sign| touch(&mut rows, sign, 500));
        assert_eq!(rows.take_changes(), Changes { changed: vec![3, 7, 200], removed: vec![], is_whole: false });
        assert_eq!(rows.take_changes(), Changes::default());
    }

    #[test]
    fn rows_that_went_are_told_unless_they_came_back() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        rows.take_changes();
        rows.retain(|counters| counters.show >= 3);
        touch(&mut rows, 1, 500);
        assert_eq!(rows.take_changes(), Changes { changed: vec![1], removed: vec![0, 2], is_whole: false });
    }

    #[test]
    fn lists_longer_than_the_partition_are_not_kept() {
        let mut rows = new();
        (0..100).for_each(|sign| touch(&mut rows, sign, sign as u32));
        rows.take_changes();
        rows.retain(|counters| counters.show >= 51);
        assert!(rows.changes.is_none(), "51 went, 49 are left");
        (0..100).for_each(|sign| touch(&mut rows, sign, 100 + sign as u32));
        assert!(rows.take_changes().is_whole);
        // again and again what is new goes: the list of what went must not grow without end
        for sign in 1000..2000 {
            touch(&mut rows, sign, 0);
            rows.retain(|counters| counters.show > 0);
            let listed = rows.changes.as_ref().map_or(0, |listed| listed.rows.len() + listed.removed.len());
            assert!(listed <= rows.len());
        }
    }
}
