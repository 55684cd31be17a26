//! The order in which a batch of keys is worked on, so that the cache misses of many keys overlap.
//!
//! Keys go in groups, and a group takes three turns: its index lines are asked for, the lines are read and the rows
//! asked for, the rows are used. Between two turns of a group others have theirs, while memory answers. Asking is a
//! loop of its own with nothing else in it: a prefetch waits for its address to be translated, and the core looks only
//! some hundred instructions ahead for others that could wait at the same time.

use crate::arena::Arena;
use crate::index::ABSENT;
use crate::prefetch::prefetch_far;
use crate::rows::Rows;

/// Lines of a row that are asked for ahead: the hardware follows by itself where there are more.
const MAX_LINES: usize = 8;

/// A key under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// Its place in the batch.
    pub position: usize,
    pub partition: u32,
    /// The row it most likely has, or `ABSENT` if that is to be looked up.
    pub row: u32,
    pub hash: u64,
}

/// What is done with the row of each key.
pub(crate) trait Visit {
    fn rows(&self, partition: u32) -> &Rows;
    /// Where the rows and the index lines of all partitions are.
    fn arenas(&self) -> (&Arena, &Arena);
    /// Bytes at the front of a row that `visit` uses.
    fn num_bytes(&self) -> usize;
    /// Whether index lines may lie elsewhere than where they were asked for.
    fn has_moved_lines(&self) -> bool;
    /// `place` is where the row is, null for `ABSENT`.
    fn visit(&mut self, key: &Key, place: *const u8);
}

#[derive(Clone, Copy)]
struct Group<const KEYS: usize> {
    keys: [Key; KEYS],
    /// Where each key's index line is, then its row; null for nothing.
    places: [*const u8; KEYS],
    len: usize,
}

impl<const KEYS: usize> Group<KEYS> {
    fn new() -> Self {
        let key = Key { position: 0, partition: 0, row: ABSENT, hash: 0 };
        Group { keys: [key; KEYS], places: [std::ptr::null(); KEYS], len: 0 }
    }

    /// Takes the next keys and asks for their index lines.
    #[inline(always)]
    fn ask(&mut self, keys: &mut impl Iterator<Item = Key>, visitor: &impl Visit) {
        self.len = 0;
        let (_, lines) = visitor.arenas();
        for ((slot, place), key) in self.keys.iter_mut().zip(&mut self.places).zip(keys) {
            *slot = key;
            *place =
                if key.row == ABSENT { visitor.rows(key.partition).line(key.hash, lines) } else { std::ptr::null() };
            self.len += 1;
        }
        for &place in &self.places[..self.len] {
            prefetch_far(place);
        }
    }

    /// Reads the index lines and asks for the rows that they name.
    #[inline(always)]
    fn guess(&mut self, visitor: &impl Visit) {
        let (units, lines) = visitor.arenas();
        let has_moved_lines = visitor.has_moved_lines();
        let num_bytes = visitor.num_bytes();
        // a few keys of a hundred: a row that is asked for in vain costs less than one that is waited for
        let ask_too = |row: u32| {
            if row != ABSENT {
                prefetch_far(units.at(row));
                prefetch_far(units.at(row).wrapping_add(num_bytes - 1));
            }
        };
        for (key, place) in self.keys[..self.len].iter_mut().zip(&mut self.places) {
            let rows = visitor.rows(key.partition);
            if has_moved_lines && key.row == ABSENT {
                *place = rows.line(key.hash, lines);
            }
            if !place.is_null() {
                debug_assert_eq!(*place, rows.line(key.hash, lines), "an index line has moved");
                // SAFETY: it is where `line` said, and no line has moved since.
                key.row = unsafe { rows.guess(*place, key.hash, ask_too) };
            }
            *place = if key.row == ABSENT { std::ptr::null() } else { units.at(key.row) };
        }
        let num_lines = (num_bytes / LINE_BYTES).min(MAX_LINES);
        for &place in self.places[..self.len].iter().filter(|place| !place.is_null()) {
            for line in 0..num_lines {
                prefetch_far(place.wrapping_add(LINE_BYTES * line));
            }
            // rows are not aligned: what is left may lie in one line or two
            prefetch_far(place.wrapping_add(LINE_BYTES * num_lines));
            prefetch_far(place.wrapping_add(num_bytes - 1));
        }
    }
}

const LINE_BYTES: usize = 64;

/// Visits the keys in their order, in groups of so many: few enough that what is asked for, and its translated
/// addresses, is still there when it is used.
#[inline]
pub(crate) fn run<const KEYS: usize>(mut keys: impl Iterator<Item = Key>, visitor: &mut impl Visit) {
    let [mut a, mut b, mut c] = [Group::<KEYS>::new(); 3];
    // three turns at a time, so that no group has to move
    while turn(&mut keys, visitor, [&mut a, &mut b, &mut c])
        && turn(&mut keys, visitor, [&mut b, &mut c, &mut a])
        && turn(&mut keys, visitor, [&mut c, &mut a, &mut b])
    {}
}

/// Whether there is more to do.
#[inline(always)]
fn turn<const KEYS: usize>(
    keys: &mut impl Iterator<Item = Key>,
    visitor: &mut impl Visit,
    groups: [&mut Group<KEYS>; 3],
) -> bool {
    let [asked, visited, guessed] = groups;
    asked.ask(keys, visitor);
    guessed.guess(visitor);
    for (key, &place) in visited.keys[..visited.len].iter().zip(&visited.places) {
        visitor.visit(key, place);
    }
    asked.len != 0 || guessed.len != 0
}
