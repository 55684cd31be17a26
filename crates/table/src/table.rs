//! The table: a map from signs to rows, divided into partitions. Pulls never create rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::Arena;
use crate::index::{ABSENT, line_arena};
use crate::partition::{mix, partition_of, partition_of_mixed};
use crate::pipeline::{self, Key, Visit};
use crate::rows::{Changes, Counters, Rows, Word, row_arena, sign_at, weights_at};
use crate::spec::{SpecError, TableSpec};
use crate::threads::threads_for;

/// The rows that a pull found. The table ignores handles of another table and handles from before an eviction.
#[derive(Debug, Clone, Default)]
pub struct Handles {
    generation: u64,
    rows: Vec<u32>,
}

impl Handles {
    /// Number of signs of the pull.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no sign was pulled.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// A copy of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Show, click, last seen, admitted.
    pub counters: Counters,
    /// The weights.
    pub weights: Vec<f32>,
    /// The optimizer's state.
    pub state: Vec<f32>,
}

/// A sparse table: any sign may have a row.
#[derive(Debug)]
pub struct Table {
    spec: TableSpec,
    width: usize,
    partitions: Vec<Rows>,
    rows: Arc<Arena>,
    lines: Arc<Arena>,
    num_threads: usize,
    /// Unique among all tables; changes when rows move.
    generation: u64,
    /// A partition with this many rows rejects new signs.
    pub(crate) max_rows: usize,
}

fn new_generation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Table {
    /// Creates an empty table that uses one thread.
    pub fn new(spec: TableSpec) -> Result<Self, SpecError> {
        spec.check()?;
        let rows = row_arena(spec.width(), spec.state_width());
        Ok(Self::with_arenas(spec, rows, line_arena()))
    }

    fn with_arenas(spec: TableSpec, rows: Arena, lines: Arena) -> Self {
        let (width, rows, lines) = (spec.width(), Arc::new(rows), Arc::new(lines));
        let partitions = (0..spec.partitions).map(|_| Rows::new(width, rows.clone(), lines.clone())).collect();
        Table {
            spec,
            width,
            partitions,
            rows,
            lines,
            num_threads: 1,
            generation: new_generation(),
            max_rows: usize::MAX,
        }
    }

    /// Uses up to `num_threads` threads for large batches and for work on the whole table.
    #[must_use]
    pub fn with_threads(self, num_threads: usize) -> Self {
        Table { num_threads: num_threads.max(1), ..self }
    }

    /// Its declaration.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Weights per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of a row, in memory and in a snapshot.
    pub fn row_bytes(&self) -> usize {
        self.rows.item_bytes()
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.partitions.iter().map(Rows::len).sum()
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocated bytes, including spare capacity.
    pub fn bytes(&self) -> usize {
        [&self.rows, &self.lines].iter().map(|arena| arena.num_items() * arena.item_bytes()).sum()
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// The rows of a pull's handles, or none if rows may have moved since.
    pub(crate) fn hints<'a>(&self, handles: &'a Handles) -> &'a [u32] {
        if handles.generation == self.generation { &handles.rows } else { &[] }
    }

    /// Invalidates all handles and returns the rows of all partitions; for work that moves rows.
    pub(crate) fn invalidate_handles(&mut self) -> &mut [Rows] {
        self.generation = new_generation();
        &mut self.partitions
    }

    pub(crate) fn partitions(&self) -> &[Rows] {
        &self.partitions
    }

    /// The arenas of the rows and of the index lines of all partitions.
    pub(crate) fn arenas(&self) -> (Arc<Arena>, Arc<Arena>) {
        (self.rows.clone(), self.lines.clone())
    }

    /// The declaration and the mutable rows of all partitions.
    pub(crate) fn spec_and_partitions_mut(&mut self) -> (&TableSpec, &mut [Rows]) {
        (&self.spec, &mut self.partitions)
    }

    /// Writes the weights of each sign into `out`, zeros for an absent sign; creates no rows.
    pub fn pull(&self, signs: &[u64], out: &mut [f32], handles: &mut Handles) {
        assert_eq!(out.len(), signs.len() * self.width);
        handles.generation = self.generation;
        handles.rows.clear();
        handles.rows.resize(signs.len(), ABSENT);
        let handles = &mut handles.rows[..];
        let num_threads = threads_for(signs.len(), self.num_threads);
        if num_threads == 1 {
            return self.pull_share(signs, out, handles);
        }
        let length = signs.len().div_ceil(num_threads);
        std::thread::scope(|scope| {
            let shares = signs.chunks(length).zip(out.chunks_mut(length * self.width)).zip(handles.chunks_mut(length));
            for ((signs, out), handles) in shares {
                scope.spawn(|| self.pull_share(signs, out, handles));
            }
        });
    }

    fn pull_share(&self, signs: &[u64], out: &mut [f32], handles: &mut [u32]) {
        let keys = signs.iter().enumerate().map(|(position, &sign)| {
            let hash = mix(sign);
            Key { position, partition: partition_of_mixed(hash, self.spec.partitions), row: ABSENT, hash }
        });
        pipeline::run::<8>(keys, &mut PullVisitor { table: self, signs, out, handles });
    }

    /// Returns a copy of the row of `sign`, if it has one.
    pub fn get(&self, sign: u64) -> Option<Row> {
        let rows = &self.partitions[partition_of(sign, self.spec.partitions) as usize];
        let values = |words: &[Word]| words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        match rows.find(sign, mix(sign)) {
            ABSENT => None,
            row => Some(Row {
                counters: rows.counters(row),
                weights: values(rows.weights(row)),
                state: values(rows.state(row)),
            }),
        }
    }

    /// The rows of a partition in the order of their signs.
    pub fn rows_of(&self, partition: u32) -> SortedRows<'_> {
        let rows = &self.partitions[partition as usize];
        SortedRows { rows, order: rows.sorted() }
    }

    /// Takes the changes of a partition since the last call; after a load the whole partition.
    pub fn take_changes(&mut self, partition: u32) -> Changes {
        self.partitions[partition as usize].take_changes()
    }

    /// Restores taken changes that were not published, so that the next `take_changes` includes them.
    pub fn put_back_changes(&mut self, partition: u32, taken: &Changes) {
        self.partitions[partition as usize].put_back(taken);
    }

    /// Makes a whole partition count as changed.
    pub fn mark_all_changed(&mut self, partition: u32) {
        self.partitions[partition as usize].mark_all_changed();
    }

    /// Number of rows of a partition.
    pub fn num_rows(&self, partition: u32) -> usize {
        self.partitions[partition as usize].len()
    }
}

/// The rows of a partition in the order of their signs.
pub struct SortedRows<'a> {
    rows: &'a Rows,
    order: Vec<u32>,
}

impl SortedRows<'_> {
    /// The signs.
    pub fn signs(&self) -> Vec<u64> {
        self.order.iter().map(|&row| self.rows.sign(row)).collect()
    }

    /// Writes the weights of the sign at `position`.
    pub fn weights(&self, position: usize, out: &mut [f32]) {
        copy(self.rows.weights(self.order[position]), out);
    }
}

#[inline]
fn copy(words: &[Word], out: &mut [f32]) {
    // Copies four values at a time; the last four may overlap, which is faster than a loop over the rest.
    let four = |words: &[Word; 4], out: &mut [f32; 4]| *out = words.map(f32::from_le_bytes);
    match (words.last_chunk(), out.last_chunk_mut()) {
        (Some(words), Some(out)) => four(words, out),
        _ => out.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(*word)),
    }
    for (words, out) in words.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        four(words, out);
    }
}

/// Visits the rows of a pull.
struct PullVisitor<'a> {
    table: &'a Table,
    signs: &'a [u64],
    out: &'a mut [f32],
    handles: &'a mut [u32],
}

impl Visit for PullVisitor<'_> {
    #[inline]
    fn rows(&self, partition: u32) -> &Rows {
        &self.table.partitions[partition as usize]
    }

    #[inline]
    fn num_bytes(&self) -> usize {
        self.table.partitions[0].weights_end()
    }

    #[inline]
    fn arenas(&self) -> (&Arena, &Arena) {
        (&self.table.rows, &self.table.lines)
    }

    #[inline]
    fn has_moved_lines(&self) -> bool {
        false
    }

    #[inline(always)]
    fn visit(&mut self, key: &Key, address: *const u8) {
        let rows = &self.table.partitions[key.partition as usize];
        let sign = self.signs[key.position];
        // SAFETY: an address that is not null is that of a row of this table.
        let (row, address) = if !address.is_null() && unsafe { sign_at(address) } == sign {
            (key.row, address)
        } else {
            match rows.find(sign, key.hash) {
                ABSENT => (ABSENT, std::ptr::null()),
                row => (row, rows.address(row)),
            }
        };
        self.handles[key.position] = row;
        let width = self.table.width;
        let out = &mut self.out[key.position * width..][..width];
        match row {
            ABSENT => out.fill(0.0),
            // SAFETY: as above.
            _ => copy(unsafe { weights_at(address, width) }, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::push::{Push, PushResult};
    use crate::spec::test_spec;
    use crate::upkeep::Eviction;

    fn push(table: &mut Table, signs: &[u64], gradients: &[f32], counts: &[(u32, u32)]) -> (Vec<f32>, PushResult) {
        let mut out = vec![9.0; signs.len() * table.width()];
        let mut handles = Handles::default();
        table.pull(signs, &mut out, &mut handles);
        let pushed = table
            .push(Push { signs, handles: Some(&handles), gradients, counts, seen: 5, is_increment: false })
            .unwrap();
        (out, pushed)
    }

    #[test]
    fn absent_signs_read_as_zero_and_pulls_create_nothing() {
        let table = Table::new(test_spec(3)).unwrap();
        let signs: Vec<u64> = (0..100).collect();
        let mut out = vec![9.0; 400];
        table.pull(&signs, &mut out, &mut Default::default());
        assert!(out.iter().all(|&x| x == 0.0));
        assert_eq!(table.len(), 0);
        assert_eq!(table.get(5), None);
    }

    #[test]
    fn the_push_that_creates_a_row_starts_from_its_initial_values() {
        let mut table = Table::new(test_spec(3)).unwrap();
        let (_, pushed) = push(&mut table, &[42, u64::MAX], &[0.5; 8], &[(2, 1), (1, 0)]);
        assert_eq!(pushed, PushResult { created: 2, dropped: 0, non_finite: false });
        let row = table.get(42).unwrap();
        let mut expected = [0.0; 4];
        test_spec(3).init(42, &mut expected);
        for weight in &mut expected {
            *weight -= 0.1 * 0.5 / (0.5f32.sqrt() + 1e-8);
        }
        assert_eq!(row.weights, expected);
        assert_eq!(row.state, [0.5; 4]);
        assert_eq!(row.counters, Counters { show: 2, click: 1, seen: 5, admitted: true });
        let (pulled, pushed) = push(&mut table, &[42], &[0.0; 4], &[(1, 1)]);
        assert_eq!(pulled, expected);
        assert_eq!(pushed.created, 0);
        assert_eq!(table.get(42).unwrap().counters.show, 3);
    }

    #[test]
    fn counts_saturate() {
        let mut table = Table::new(test_spec(1)).unwrap();
        push(&mut table, &[7], &[0.0; 4], &[(u32::MAX, u32::MAX - 1)]);
        push(&mut table, &[7], &[0.0; 4], &[(2, 2)]);
        let counters = table.get(7).unwrap().counters;
        assert_eq!((counters.show, counters.click), (u32::MAX, u32::MAX));
    }

    #[test]
    fn last_seen_never_decreases() {
        let mut table = Table::new(test_spec(1)).unwrap();
        let (mut out, mut handles) = (vec![0.0; 4], Handles::default());
        table.pull(&[7], &mut out, &mut handles);
        for (seen, expected) in [(5, 5), (3, 5), (6, 6)] {
            let push = Push {
                signs: &[7],
                handles: Some(&handles),
                gradients: &[0.0; 4],
                counts: &[(1, 0)],
                seen,
                is_increment: false,
            };
            table.push(push).unwrap();
            assert_eq!(table.get(7).unwrap().counters.seen, expected);
        }
    }

    #[test]
    fn a_stale_handle_of_an_absent_sign_finds_the_new_row() {
        let mut table = Table::new(test_spec(1)).unwrap();
        let (mut out, mut handles) = (vec![0.0; 4], Handles::default());
        table.pull(&[7], &mut out, &mut handles);
        let one = Push {
            signs: &[7],
            handles: Some(&handles),
            gradients: &[1.0; 4],
            counts: &[(1, 0)],
            seen: 0,
            is_increment: false,
        };
        assert_eq!(table.push(one).unwrap().created, 1);
        assert_eq!(table.push(one).unwrap().created, 0);
        assert_eq!(table.get(7).unwrap().counters.show, 2);
    }

    #[test]
    fn a_push_with_nan_counts_but_applies_no_gradient() {
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
    fn partitions_are_even_and_do_not_change_the_rows() {
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
            let share = many.rows_of(partition).signs().len();
            assert!((1_000..1_500).contains(&share), "{share}");
        }
    }

    /// Holds for one thread and for several.
    #[test]
    fn a_full_table_is_an_error_and_keeps_its_rows() {
        let signs: Vec<u64> = (0..40_000).collect();
        let (gradients, counts) = (vec![0.5; 4 * signs.len()], vec![(1, 0); signs.len()]);
        // The first table runs out of rows, the second out of index lines in the middle of a rebuild.
        for (max_rows, max_lines) in [(20_000, usize::MAX), (usize::MAX, 8 * 256)] {
            for threads in [1, 2] {
                let spec = test_spec(3);
                let rows = row_arena(spec.width(), spec.state_width()).with_max_items(max_rows);
                let lines = line_arena().with_max_items(max_lines);
                let mut table = Table::with_arenas(spec, rows, lines).with_threads(threads);
                let all = Push {
                    signs: &signs,
                    handles: None,
                    gradients: &gradients,
                    counts: &counts,
                    seen: 0,
                    is_increment: false,
                };
                let error = table.push(all).unwrap_err().to_string();
                let most = if max_rows == usize::MAX { 2048 } else { 19_968 };
                assert!(error.starts_with(&format!("table: expected at most {most} rows in one process")), "{error}");
                let held: Vec<u64> = signs.iter().copied().filter(|&sign| table.get(sign).is_some()).collect();
                assert_eq!(held.len(), table.len());
                assert!((15_000..30_000).contains(&held.len()), "{}", held.len());
                let mut pulled = vec![0.0; 4 * signs.len()];
                table.pull(&signs, &mut pulled, &mut Handles::default());
                assert_eq!(pulled.chunks(4).filter(|weights| weights[0] != 0.0).count(), held.len());
                let eviction =
                    Eviction { nonclk_coeff: 1.0, click_coeff: 1.0, min_score: Some(2.0), now: 0, max_age: None };
                assert_eq!(table.evict(&eviction), held.len());
                let few = Push {
                    signs: &[1, 2],
                    handles: None,
                    gradients: &[0.5; 8],
                    counts: &[(1, 0); 2],
                    seen: 0,
                    is_increment: false,
                };
                assert_eq!(table.push(few).unwrap().created, 2, "an eviction makes room");
            }
        }
    }
}
