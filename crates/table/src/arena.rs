//! The memory of a table: units of one size, by number, in large mappings on huge pages where the system has them.
//!
//! All partitions share one arena, so that 256 of them do not each hold a mapping that is half empty. A partition
//! takes a block of hundreds of units at a time, which is how often the lock is taken. A number says where its unit
//! is with one look into a short list, so a row is found without a directory that would have to be fetched first.

use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;
use thiserror::Error;

/// What is not touched of a mapping costs nothing. Of small units it has 2^21, which is whole huge pages of any size.
const MAPPING_BYTES: usize = 256 << 20;
const MAX_MAPPINGS: usize = 1 << 12;
/// The number of a unit plus one has to fit into 31 bits: an index entry needs one for the hash.
const MAX_UNITS: usize = (1 << 31) - 1;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The start of the first mapping has ordinary pages: small tables stay small.
const SMALL_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// Why a table has no room for another row; those it has are as they were.
#[derive(Debug, Error)]
pub enum GrowError {
    /// Rows have no numbers left.
    #[error("table: expected at most {max_rows} rows in one process, got more; `sparse.evict` keeps a table small")]
    Full {
        /// As many as there can be, whole blocks of a partition.
        max_rows: usize,
    },
    /// The system has no memory left.
    #[error("table: expected {bytes} bytes more, got none: {source}")]
    Memory {
        /// Asked for.
        bytes: usize,
        /// What the system says.
        source: io::Error,
    },
}

/// Hands out blocks of units and takes them back; its memory goes with it.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Where each mapping starts.
    bases: Box<[AtomicPtr<u8>]>,
    unit_bytes: usize,
    /// A mapping has `1 << mapping_bits` units.
    mapping_bits: u32,
    /// A block has `1 << block_bits` units.
    block_bits: u32,
    max_units: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mappings: Vec<MmapMut>,
    /// The first unit that was never handed out.
    next: u32,
    /// First units of blocks that came back.
    free: Vec<u32>,
}

impl Arena {
    /// Units of `unit_bytes` in blocks of a power of two of them, at most `block_bytes` if that holds one.
    pub(crate) fn new(unit_bytes: usize, block_bytes: usize) -> Self {
        let block_bits = (block_bytes / unit_bytes).max(1).ilog2();
        let mapping_bits = (MAPPING_BYTES / unit_bytes).max(1).ilog2().clamp(block_bits, 21);
        let bases = (0..MAX_MAPPINGS).map(|_| AtomicPtr::new(null_mut())).collect();
        let max_units = MAX_UNITS.min(MAX_MAPPINGS << mapping_bits);
        Arena { bases, unit_bytes, mapping_bits, block_bits, max_units, state: Mutex::default() }
    }

    /// The same arena with fewer units.
    #[cfg(test)]
    pub(crate) fn with_max_units(self, max_units: usize) -> Self {
        Arena { max_units, ..self }
    }

    #[inline]
    pub(crate) fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    #[inline]
    pub(crate) fn block_bits(&self) -> u32 {
        self.block_bits
    }

    /// The first unit of a block that is the caller's from now on: zeroes, or what its holder before left in it.
    pub(crate) fn take(&self) -> Result<u32, GrowError> {
        let mut state = self.state();
        if let Some(block) = state.free.pop() {
            return Ok(block);
        }
        let first = state.next;
        if first as usize + (1 << self.block_bits) > self.max_units {
            return Err(GrowError::Full { max_rows: self.max_units >> self.block_bits << self.block_bits });
        }
        let mapping = first as usize >> self.mapping_bits;
        if mapping == state.mappings.len() {
            let (map, start) =
                map_huge_pages(self.unit_bytes << self.mapping_bits, if mapping == 0 { SMALL_BYTES } else { 0 })?;
            self.bases[mapping].store(start.as_ptr(), Ordering::Release);
            state.mappings.push(map);
        }
        state.next += 1 << self.block_bits;
        Ok(first)
    }

    /// Takes back a block.
    pub(crate) fn give_back(&self, block: u32) {
        self.state().free.push(block);
    }

    /// Units handed out so far, those that came back included.
    pub(crate) fn num_units(&self) -> usize {
        self.state().next as usize
    }

    /// Where a unit is: null, or below a mapping's end, for any number.
    #[inline]
    pub(crate) fn at(&self, unit: u32) -> *mut u8 {
        let base = self.bases[unit as usize >> self.mapping_bits].load(Ordering::Relaxed);
        let place = unit as usize & ((1 << self.mapping_bits) - 1);
        base.wrapping_add(place * self.unit_bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Zeroed memory and its first byte, at a huge page; the first `small_bytes` are of ordinary pages.
pub fn map_huge_pages(bytes: usize, small_bytes: usize) -> Result<(MmapMut, NonNull<u8>), GrowError> {
    let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let mut map = MmapMut::map_anon(bytes + HUGE_PAGE_BYTES).map_err(|source| GrowError::Memory { bytes, source })?;
    let offset = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
    advise(&map, offset + small_bytes, bytes.saturating_sub(small_bytes));
    assert!(offset + bytes <= map.len(), "the mapping has room for what comes before its first huge page");
    // SAFETY: inside the mapping, as asserted, which does not begin at 0.
    let start = unsafe { NonNull::new_unchecked(map.as_mut_ptr().add(offset)) };
    Ok((map, start))
}

#[cfg(all(target_os = "linux", not(feature = "portable")))]
fn advise(map: &MmapMut, offset: usize, bytes: usize) {
    // a kernel without them serves ordinary pages: slower, not wrong
    let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
}

/// The portable twin: pages as the system gives them.
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
fn advise(_: &MmapMut, _: usize, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_come_back() {
        // several mappings, units that are no power of two, and units larger than a block
        for (unit_bytes, num_blocks) in [(98, 3000), (64, 40), (200_003, 400)] {
            let arena = Arena::new(unit_bytes, 32 << 10);
            let block_bytes = unit_bytes << arena.block_bits();
            let blocks: Vec<u32> = (0..num_blocks).map(|_| arena.take().unwrap()).collect();
            for (number, &block) in blocks.iter().enumerate() {
                // SAFETY: the block has so many bytes and is ours.
                unsafe { arena.at(block).write_bytes((number % 250) as u8 + 1, block_bytes) };
            }
            for (number, &block) in blocks.iter().enumerate() {
                // SAFETY: as above, and written before.
                let bytes = unsafe { std::slice::from_raw_parts(arena.at(block), block_bytes) };
                assert!(bytes.iter().all(|&byte| byte == (number % 250) as u8 + 1), "block {number}");
            }
            let held = arena.num_units();
            arena.give_back(blocks[3]);
            assert_eq!(arena.take().unwrap(), blocks[3]);
            assert_eq!(arena.num_units(), held);
        }
    }

    #[test]
    fn a_full_arena_is_an_error_until_something_comes_back() {
        let arena = Arena::new(64, 1024).with_max_units(50);
        let blocks = [arena.take().unwrap(), arena.take().unwrap(), arena.take().unwrap()];
        for _ in 0..2 {
            let error = arena.take().unwrap_err().to_string();
            let expected =
                "table: expected at most 48 rows in one process, got more; `sparse.evict` keeps a table small";
            assert_eq!(error, expected);
        }
        arena.give_back(blocks[1]);
        assert_eq!(arena.take().unwrap(), blocks[1]);
    }

    #[test]
    fn memory_that_there_is_not_is_an_error() {
        let error = map_huge_pages(1 << 60, 0).unwrap_err().to_string();
        assert!(error.starts_with("table: expected 1152921504606846976 bytes more, got none: "), "{error}");
    }
}
