//! Processes the keys of a batch in groups, so that the cache misses of many keys overlap.
//!
//! A group has three stages: prefetch its index lines; read the lines and prefetch the rows; use the rows. Three groups
//! are in flight, each in another stage, so one group is used while the cache lines of the others arrive. Prefetches
//! run in loops without other work: a prefetch waits for its address to be translated, and the core looks only some
//! hundred instructions ahead for further prefetches that can wait at the same time.

use crate::arena::Arena;
use crate::index::ABSENT;
use crate::prefetch::prefetch_far;
use crate::rows::Rows;

/// Lines of a row that are prefetched; the hardware prefetches the rest of longer rows.
const MAX_LINES: usize = 8;

/// A key in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// Its position in the batch.
    pub position: usize,
    pub partition: u32,
    /// The row that the key most likely has, or `ABSENT` if the index must be read.
    pub row: u32,
    pub hash: u64,
}

/// The work on the row of each key.
pub(crate) trait Visit {
    fn rows(&self, partition: u32) -> &Rows;
    /// The arenas of the rows and of the index lines of all partitions.
    fn arenas(&self) -> (&Arena, &Arena);
    /// Bytes at the front of a row that `visit` uses.
    fn num_bytes(&self) -> usize;
    /// Whether index lines may have moved since they were prefetched.
    fn has_moved_lines(&self) -> bool;
    /// Uses the row of a key; `address` is null for `ABSENT`.
    fn visit(&mut self, key: &Key, address: *const u8);
}

#[derive(Clone, Copy)]
struct Group<const KEYS: usize> {
    keys: [Key; KEYS],
    /// The address of each key's index line, then of its row; null if there is none.
    addresses: [*const u8; KEYS],
    len: usize,
}

impl<const KEYS: usize> Group<KEYS> {
    fn new() -> Self {
        let key = Key { position: 0, partition: 0, row: ABSENT, hash: 0 };
        Group { keys: [key; KEYS], addresses: [std::ptr::null(); KEYS], len: 0 }
    }

    /// Takes the next keys and prefetches their index lines.
    #[inline(always)]
    fn fill(&mut self, keys: &mut impl Iterator<Item = Key>, visitor: &impl Visit) {
        self.len = 0;
        let (_, lines) = visitor.arenas();
        for ((entry, address), key) in self.keys.iter_mut().zip(&mut self.addresses).zip(keys) {
            *entry = key;
            *address = match key.row {
                ABSENT => visitor.rows(key.partition).line_address(key.hash, lines),
                _ => std::ptr::null(),
            };
            self.len += 1;
        }
        for &address in &self.addresses[..self.len] {
            prefetch_far(address);
        }
    }

    /// Reads the index lines and prefetches the rows that they name.
    #[inline(always)]
    fn guess(&mut self, visitor: &impl Visit) {
        let (row_arena, lines) = visitor.arenas();
        let has_moved_lines = visitor.has_moved_lines();
        let num_bytes = visitor.num_bytes();
        // A few keys in a hundred have several candidates; a useless prefetch costs less than a cache miss.
        let prefetch_candidate = |row: u32| {
            if row != ABSENT {
                prefetch_far(row_arena.at(row));
                prefetch_far(row_arena.at(row).wrapping_add(num_bytes - 1));
            }
        };
        for (key, address) in self.keys[..self.len].iter_mut().zip(&mut self.addresses) {
            let rows = visitor.rows(key.partition);
            if has_moved_lines && key.row == ABSENT {
                *address = rows.line_address(key.hash, lines);
            }
            if !address.is_null() {
                debug_assert_eq!(*address, rows.line_address(key.hash, lines), "an index line has moved");
                // SAFETY: the address is that of the key's line, and no line has moved since.
                key.row = unsafe { rows.guess(*address, key.hash, prefetch_candidate) };
            }
            *address = if key.row == ABSENT { std::ptr::null() } else { row_arena.at(key.row) };
        }
        let num_lines = (num_bytes / LINE_BYTES).min(MAX_LINES);
        for &address in self.addresses[..self.len].iter().filter(|address| !address.is_null()) {
            for line in 0..num_lines {
                prefetch_far(address.wrapping_add(LINE_BYTES * line));
            }
            // Rows are not aligned: the rest may span one line or two.
            prefetch_far(address.wrapping_add(LINE_BYTES * num_lines));
            prefetch_far(address.wrapping_add(num_bytes - 1));
        }
    }
}

const LINE_BYTES: usize = 64;

/// Visits the keys in order, in groups of `KEYS`: few enough that prefetched lines and translated addresses are still
/// cached when they are used.
#[inline]
pub(crate) fn run<const KEYS: usize>(mut keys: impl Iterator<Item = Key>, visitor: &mut impl Visit) {
    let [mut a, mut b, mut c] = [Group::<KEYS>::new(); 3];
    // Three rounds per loop, so that the groups change roles without being moved.
    while advance(&mut keys, visitor, [&mut a, &mut b, &mut c])
        && advance(&mut keys, visitor, [&mut b, &mut c, &mut a])
        && advance(&mut keys, visitor, [&mut c, &mut a, &mut b])
    {}
}

/// Advances three groups by one stage each; returns whether keys are left.
#[inline(always)]
fn advance<const KEYS: usize>(
    keys: &mut impl Iterator<Item = Key>,
    visitor: &mut impl Visit,
    groups: [&mut Group<KEYS>; 3],
) -> bool {
    let [first, third, second] = groups;
    first.fill(keys, visitor);
    second.guess(visitor);
    for (key, &address) in third.keys[..third.len].iter().zip(&third.addresses) {
        visitor.visit(key, address);
    }
    first.len != 0 || second.len != 0
}
