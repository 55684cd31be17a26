//! Pushes: apply the gradients and counts of a batch to the rows of its signs; missing rows are created.

use std::ops::Range;
use std::sync::Arc;

use crate::arena::{Arena, GrowError};
use crate::index::ABSENT;
use crate::partition::{mix, partition_of_mixed};
use crate::pipeline::{self, Key, Visit};
use crate::rows::{Counters, RowMut, Rows, Tail};
use crate::spec::TableSpec;
use crate::table::{Handles, Table};
use crate::threads::{share, threads_for};

/// A push: the distinct signs of a batch with their gradients and counts.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// The distinct signs.
    pub signs: &'a [u64],
    /// The handles of a pull of the same signs, which save the lookup.
    pub handles: Option<&'a Handles>,
    /// `[signs, width]`, or `[signs, width + state]` for a geo increment.
    pub gradients: &'a [f32],
    /// Show and click of each sign.
    pub counts: &'a [(u32, u32)],
    /// Data time; limited to [`MAX_SEEN`].
    pub seen: u32,
    /// Whether `gradients` is a geo increment, which is added to weights and state without an optimizer step.
    pub is_increment: bool,
}

/// The result of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PushResult {
    /// Number of rows created.
    pub created: usize,
    /// Signs without a row because their partition is full.
    pub dropped: usize,
    /// Whether a gradient was not finite. Then the push counts shows and clicks but applies no gradient.
    pub non_finite: bool,
}

impl Table {
    /// Counts and updates every sign once; a sign without a row gets one with its initial values.
    ///
    /// Each partition belongs to one thread, so the rows are the same, bit for bit, for any number of threads. After
    /// an error some signs are updated and others are not.
    pub fn push(&mut self, push: Push<'_>) -> Result<PushResult, GrowError> {
        let num_keys = push.signs.len();
        let num_values = if push.is_increment { self.full_width() } else { self.width() };
        assert_eq!(push.gradients.len(), num_keys * num_values);
        assert_eq!(push.counts.len(), num_keys);
        let non_finite = !all_finite(push.gradients);
        let threads = threads_for(num_keys, self.num_threads());
        let late = self.spec().late_columns();
        // With several threads hints are unused: a hint may name a row of another thread's partition.
        let hints = push.handles.filter(|_| threads == 1).map_or(&[][..], |handles| self.hints(handles));
        let num_bytes = self.row_bytes();
        let arenas = self.arenas();
        let max_rows = self.max_rows;
        let (spec, partitions) = self.spec_and_partitions_mut();
        let created = share(partitions, threads, |first, partitions| {
            let owned = first as u32..(first + partitions.len()) as u32;
            let scratch = Vec::new();
            let mut visitor = PushVisitor {
                spec,
                late: &late,
                num_values,
                push,
                partitions,
                arenas: &arenas,
                first,
                num_bytes,
                non_finite,
                max_rows,
                created: 0,
                dropped: 0,
                failed: None,
                scratch,
            };
            pipeline::run::<6>(keys_of(push.signs, hints, spec.partitions, owned), &mut visitor);
            visitor.failed.map_or(Ok((visitor.created, visitor.dropped)), Err)
        });
        let mut pushed = PushResult { created: 0, dropped: 0, non_finite };
        for share in created {
            let (created, dropped) = share?;
            pushed.created += created;
            pushed.dropped += dropped;
        }
        Ok(pushed)
    }
}

/// Returns the keys in the `owned` partitions.
#[inline]
fn keys_of(signs: &[u64], hints: &[u32], num_partitions: u32, owned: Range<u32>) -> impl Iterator<Item = Key> {
    signs.iter().enumerate().filter_map(move |(position, &sign)| {
        let hash = mix(sign);
        let partition = partition_of_mixed(hash, num_partitions);
        let row = hints.get(position).copied().unwrap_or(ABSENT);
        owned.contains(&partition).then_some(Key { position, partition, row, hash })
    })
}

/// Whether all values are finite. The loop has no early exit, so that the compiler vectorises it.
fn all_finite(values: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    !values.iter().fold(false, |found, value| found | (value.to_bits() & EXPONENT == EXPONENT))
}

/// Visits the rows of a push in the partitions from `first` on.
struct PushVisitor<'a> {
    spec: &'a TableSpec,
    late: &'a [Range<usize>],
    /// Gradient values per sign.
    num_values: usize,
    push: Push<'a>,
    partitions: &'a mut [Rows],
    arenas: &'a (Arc<Arena>, Arc<Arena>),
    first: usize,
    /// Bytes of a row.
    num_bytes: usize,
    non_finite: bool,
    max_rows: usize,
    created: usize,
    dropped: usize,
    /// The error of a row that could not be created.
    failed: Option<GrowError>,
    /// Buffer for initial weights, or for a gradient without the late columns.
    scratch: Vec<f32>,
}

impl Visit for PushVisitor<'_> {
    #[inline]
    fn rows(&self, partition: u32) -> &Rows {
        &self.partitions[partition as usize - self.first]
    }

    #[inline]
    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    #[inline]
    fn arenas(&self) -> (&Arena, &Arena) {
        (&self.arenas.0, &self.arenas.1)
    }

    #[inline]
    fn has_moved_lines(&self) -> bool {
        self.created > 0
    }

    #[inline]
    fn visit(&mut self, key: &Key, _: *const u8) {
        let Push { signs, gradients, counts, seen, .. } = self.push;
        let sign = signs[key.position];
        let Some(row) = self.find_or_create(sign, key) else { return };
        let rows = &mut self.partitions[key.partition as usize - self.first];
        let RowMut { weights, state, tail } = rows.parts_mut(row);
        let (show, click) = counts[key.position];
        let before = Counters::of(tail);
        let show = before.show.saturating_add(show);
        let admitted = before.admitted || show >= self.spec.admit_after;
        let click = before.click.saturating_add(click);
        Counters { show, click, seen: before.seen.max(seen), admitted }.write(tail);
        let is_new = admitted && !before.admitted;
        if is_new {
            self.scratch.resize(weights.len(), 0.0);
            self.spec.init(sign, &mut self.scratch);
            for range in self.late {
                for (weight, value) in weights[range.clone()].iter_mut().zip(&self.scratch[range.clone()]) {
                    *weight = value.to_le_bytes();
                }
                self.spec.optimizer.start_columns(range.clone(), &self.scratch, state);
            }
        }
        if self.non_finite {
            if is_new {
                rows.note_change(row);
            }
            return;
        }
        if self.push.is_increment {
            let increment = &gradients[key.position * self.num_values..][..self.num_values];
            self.spec.optimizer.add(weights, state, increment);
            rows.note_change(row);
        } else {
            let width = weights.len();
            let mut gradient = &gradients[key.position * width..][..width];
            if !admitted {
                self.scratch.clear();
                self.scratch.extend_from_slice(gradient);
                self.late.iter().for_each(|range| self.scratch[range.clone()].fill(0.0));
                gradient = &self.scratch;
            }
            self.spec.optimizer.step(weights, state, gradient, self.late);
            rows.note_change(row);
        }
    }
}

impl PushVisitor<'_> {
    #[inline]
    fn find_or_create(&mut self, sign: u64, key: &Key) -> Option<u32> {
        debug_assert!(
            key.row == ABSENT || self.partitions.iter().any(|rows| rows.has(key.row)),
            "the row belongs to another thread"
        );
        let rows = &mut self.partitions[key.partition as usize - self.first];
        if key.row != ABSENT && rows.sign(key.row) == sign {
            return Some(key.row);
        }
        // Another push created the row since the pull, or another sign has the same tag.
        match rows.find(sign, key.hash) {
            ABSENT => self.create(sign, key),
            row => Some(row),
        }
    }

    #[cold]
    fn create(&mut self, sign: u64, key: &Key) -> Option<u32> {
        let rows = &mut self.partitions[key.partition as usize - self.first];
        if rows.len() >= self.max_rows {
            let (show, click) = self.push.counts[key.position];
            rows.overflow.count_rejected(show, click);
            self.dropped += 1;
            return None;
        }
        let row = match rows.insert(sign, key.hash) {
            Ok(row) => row,
            Err(error) => {
                self.failed = Some(error);
                return None;
            }
        };
        let parts = rows.parts_mut(row);
        self.scratch.resize(parts.weights.len(), 0.0);
        self.spec.init(sign, &mut self.scratch);
        self.late.iter().for_each(|range| self.scratch[range.clone()].fill(0.0));
        for (weight, value) in parts.weights.iter_mut().zip(&self.scratch) {
            *weight = value.to_le_bytes();
        }
        self.spec.optimizer.init_state(&self.scratch, parts.state);
        *parts.tail = Tail::default();
        rows.note_change(row);
        self.created += 1;
        Some(row)
    }
}
