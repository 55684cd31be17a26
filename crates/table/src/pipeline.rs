//! The order in which a batch of keys is worked on, so that the cache misses of many keys overlap.
//!
//! A key takes three turns: its index line is asked for, the line is read and the row asked for, the row is used.
//! Between two turns of a key those of other keys have theirs, while memory answers.

use crate::index::ABSENT;
use crate::rows::Rows;

/// Keys between two turns of one: what the core can wait for at once, and no more than the first cache holds.
const AHEAD: usize = 20;
/// Keys under way are at most two times `AHEAD` and one for each turn.
const RING: usize = (2 * AHEAD + 2).next_power_of_two();

/// A key under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// Its place in the batch.
    pub position: usize,
    pub partition: u32,
    /// The row it most likely has, or `ABSENT`.
    pub row: u32,
    pub hash: u64,
}

/// What is done with the row of each key.
pub(crate) trait Visit {
    fn rows(&self, partition: u32) -> &Rows;
    /// Asks for what `visit` uses of a row.
    fn prefetch(&self, rows: &Rows, row: u32);
    fn visit(&mut self, key: &Key);
}

/// Visits the keys in their order.
#[inline]
pub(crate) fn run(mut keys: impl Iterator<Item = Key>, visitor: &mut impl Visit) {
    let mut ring = [Key { position: 0, partition: 0, row: ABSENT, hash: 0 }; RING];
    let (mut asked, mut guessed, mut visited) = (0usize, 0usize, 0usize);
    let mut ahead = AHEAD;
    loop {
        match keys.next() {
            Some(key) => {
                if key.row == ABSENT {
                    visitor.rows(key.partition).prefetch_entry(key.hash);
                }
                ring[asked % RING] = key;
                asked += 1;
            }
            None if visited == asked => return,
            None => ahead = 0,
        }
        if asked - guessed > ahead {
            let key = &mut ring[guessed % RING];
            let rows = visitor.rows(key.partition);
            if key.row as usize >= rows.len() {
                key.row = rows.guess(key.hash);
            }
            if key.row != ABSENT {
                visitor.prefetch(rows, key.row);
            }
            guessed += 1;
        }
        if guessed - visited > ahead {
            visitor.visit(&ring[visited % RING]);
            visited += 1;
        }
    }
}
