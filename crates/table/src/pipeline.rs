//! The order in which a batch of keys is worked on, so that the cache misses of many keys overlap.
//!
//! Keys go in groups, and a group takes three turns: its index lines are asked for, the lines are read and the rows
//! asked for, the rows are used. Between two turns of a group others have theirs, while memory answers. Asking is a
//! loop of its own with nothing else in it: a prefetch waits for its address to be translated, and the core looks only
//! some hundred instructions ahead for others that could wait at the same time.

use crate::index::ABSENT;
use crate::prefetch::prefetch_read;
use crate::rows::Rows;

/// Keys a group: few enough that what is asked for, and its translated addresses, is still there when it is used.
const GROUP: usize = 8;
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
    /// Bytes at the front of a row that `visit` uses.
    fn num_bytes(&self) -> usize;
    fn visit(&mut self, key: &Key);
}

#[derive(Clone, Copy)]
struct Group {
    keys: [Key; GROUP],
    /// What is to be asked for; null for nothing.
    places: [*const u8; GROUP],
    len: usize,
}

impl Group {
    fn new() -> Self {
        let key = Key { position: 0, partition: 0, row: ABSENT, hash: 0 };
        Group { keys: [key; GROUP], places: [std::ptr::null(); GROUP], len: 0 }
    }

    /// Takes the next keys and asks for their index lines.
    #[inline(always)]
    fn ask(&mut self, keys: &mut impl Iterator<Item = Key>, visitor: &impl Visit) {
        self.len = 0;
        for ((slot, place), key) in self.keys.iter_mut().zip(&mut self.places).zip(keys) {
            *slot = key;
            *place = if key.row == ABSENT { visitor.rows(key.partition).line(key.hash) } else { std::ptr::null() };
            self.len += 1;
        }
        for &place in &self.places[..self.len] {
            prefetch_read(place);
        }
    }

    /// Reads the index lines and asks for the rows that they name.
    #[inline(always)]
    fn guess(&mut self, visitor: &impl Visit) {
        for (key, place) in self.keys[..self.len].iter_mut().zip(&mut self.places) {
            let rows = visitor.rows(key.partition);
            if key.row == ABSENT {
                key.row = rows.guess(key.hash);
            }
            *place = if key.row == ABSENT { std::ptr::null() } else { rows.place(key.row) };
        }
        let num_bytes = visitor.num_bytes();
        let num_lines = (num_bytes / LINE_BYTES).min(MAX_LINES);
        for &place in self.places[..self.len].iter().filter(|place| !place.is_null()) {
            for line in 0..num_lines {
                prefetch_read(place.wrapping_add(LINE_BYTES * line));
            }
            // rows are not aligned: what is left may lie in one line or two
            prefetch_read(place.wrapping_add(LINE_BYTES * num_lines));
            prefetch_read(place.wrapping_add(num_bytes - 1));
        }
    }
}

const LINE_BYTES: usize = 64;

/// Visits the keys in their order.
#[inline]
pub(crate) fn run(mut keys: impl Iterator<Item = Key>, visitor: &mut impl Visit) {
    let [mut a, mut b, mut c] = [Group::new(); 3];
    // three turns at a time, so that no group has to move
    while turn(&mut keys, visitor, [&mut a, &mut b, &mut c])
        && turn(&mut keys, visitor, [&mut b, &mut c, &mut a])
        && turn(&mut keys, visitor, [&mut c, &mut a, &mut b])
    {}
}

/// Whether there is more to do.
#[inline(always)]
fn turn(keys: &mut impl Iterator<Item = Key>, visitor: &mut impl Visit, groups: [&mut Group; 3]) -> bool {
    let [asked, visited, guessed] = groups;
    asked.ask(keys, visitor);
    guessed.guess(visitor);
    visited.keys[..visited.len].iter().for_each(|key| visitor.visit(key));
    asked.len != 0 || guessed.len != 0
}
