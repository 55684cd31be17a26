//! The memory of a table: numbered items of one size in large mappings, on huge pages where the system has them.
//!
//! All partitions share one arena, so that 256 partitions do not each hold a half-empty mapping. A partition takes
//! blocks of hundreds of items, so the lock is rarely taken. The address of an item is computed from its number and
//! one short list that stays in the cache.

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;
use thiserror::Error;

/// Untouched pages cost nothing. A mapping of small items has 2^21 of them, which is a whole number of huge pages for
/// any item size.
const MAPPING_BYTES: usize = 256 << 20;
const MAX_MAPPINGS: usize = 1 << 12;
/// The number of an item plus one has to fit into 31 bits: an index entry needs one bit for the hash.
const MAX_ITEMS: usize = (1 << 31) - 1;
/// Size of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The start of the first mapping has ordinary pages, so that small tables stay small.
const SMALL_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// A table cannot hold another row; existing rows are unchanged.
#[derive(Debug, Error)]
pub enum GrowError {
    /// All row numbers are in use.
    #[error("table: expected at most {max_rows} rows in one process, got more; use `sparse.evict` to limit the table")]
    Full {
        /// The largest number of rows, in whole blocks.
        max_rows: usize,
    },
    /// The system is out of memory.
    #[error("table: cannot allocate {bytes} bytes: {source}")]
    Memory {
        /// The size of the allocation.
        bytes: usize,
        /// The error of the system.
        source: io::Error,
    },
}

/// Allocates and frees blocks of items; its memory is released when it is dropped.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The start of each mapping.
    bases: Box<[AtomicPtr<u8>]>,
    item_bytes: usize,
    /// A mapping has `1 << mapping_bits` items.
    mapping_bits: u32,
    /// A block has `1 << block_bits` items.
    block_bits: u32,
    max_items: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mappings: Vec<MmapMut>,
    /// The first item that was never allocated.
    next: u32,
    /// First items of freed blocks.
    free: Vec<u32>,
}

impl Arena {
    /// Creates an arena of items of `item_bytes`. A block is the largest power of two of items within `block_bytes`, at
    /// least one.
    pub(crate) fn new(item_bytes: usize, block_bytes: usize) -> Self {
        let block_bits = (block_bytes / item_bytes).max(1).ilog2();
        let mapping_bits = (MAPPING_BYTES / item_bytes).max(1).ilog2().clamp(block_bits, 21);
        let bases = (0..MAX_MAPPINGS).map(|_| AtomicPtr::new(null_mut())).collect();
        let max_items = MAX_ITEMS.min(MAX_MAPPINGS << mapping_bits);
        Arena { bases, item_bytes, mapping_bits, block_bits, max_items, state: Mutex::default() }
    }

    /// Limits the number of items.
    #[cfg(test)]
    pub(crate) fn with_max_items(self, max_items: usize) -> Self {
        Arena { max_items, ..self }
    }

    #[inline]
    pub(crate) fn item_bytes(&self) -> usize {
        self.item_bytes
    }

    #[inline]
    pub(crate) fn block_bits(&self) -> u32 {
        self.block_bits
    }

    /// Allocates a block and returns its first item. The bytes are zero, or those of an earlier owner.
    pub(crate) fn allocate(&self) -> Result<u32, GrowError> {
        let mut state = self.state();
        if let Some(block) = state.free.pop() {
            return Ok(block);
        }
        let first = state.next;
        if first as usize + (1 << self.block_bits) > self.max_items {
            return Err(GrowError::Full { max_rows: self.max_items >> self.block_bits << self.block_bits });
        }
        let mapping = first as usize >> self.mapping_bits;
        if mapping == state.mappings.len() {
            let bytes = self.item_bytes << self.mapping_bits;
            let small_bytes = if mapping == 0 { SMALL_BYTES } else { 0 };
            let mapped = map_huge_pages(bytes, small_bytes);
            let (mut map, start) = mapped.map_err(|source| GrowError::Memory { bytes, source })?;
            self.bases[mapping].store(map[start..].as_mut_ptr(), Ordering::Release);
            state.mappings.push(map);
        }
        state.next += 1 << self.block_bits;
        Ok(first)
    }

    /// Frees a block.
    pub(crate) fn free(&self, block: u32) {
        self.state().free.push(block);
    }

    /// Items allocated so far, including freed ones.
    pub(crate) fn num_items(&self) -> usize {
        self.state().next as usize
    }

    /// Returns the address of an item. The address of an unallocated item is inside a mapping or near null.
    #[inline]
    pub(crate) fn at(&self, item: u32) -> *mut u8 {
        let base = self.bases[item as usize >> self.mapping_bits].load(Ordering::Relaxed);
        let offset = item as usize & ((1 << self.mapping_bits) - 1);
        base.wrapping_add(offset * self.item_bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps zeroed memory; returns the mapping and the offset of its first huge page, where `bytes` begin. The first
/// `small_bytes` of them have ordinary pages.
pub fn map_huge_pages(bytes: usize, small_bytes: usize) -> io::Result<(MmapMut, usize)> {
    let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let map = MmapMut::map_anon(bytes + HUGE_PAGE_BYTES)?;
    let start = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
    advise(&map, start + small_bytes, bytes.saturating_sub(small_bytes));
    Ok((map, start))
}

#[cfg(all(target_os = "linux", not(feature = "portable")))]
fn advise(map: &MmapMut, offset: usize, bytes: usize) {
    // A kernel without huge pages uses ordinary ones, which is only slower.
    let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
}

/// The portable fallback: the system chooses the pages.
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
fn advise(_: &MmapMut, _: usize, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_are_reused() {
        // Several mappings, item sizes that are no power of two, and items larger than a block.
        for (item_bytes, num_blocks) in [(98, 3000), (64, 40), (200_003, 400)] {
            let arena = Arena::new(item_bytes, 32 << 10);
            let block_bytes = item_bytes << arena.block_bits();
            let blocks: Vec<u32> = (0..num_blocks).map(|_| arena.allocate().unwrap()).collect();
            for (number, &block) in blocks.iter().enumerate() {
                // SAFETY: the block has `block_bytes` bytes and was allocated above.
                unsafe { arena.at(block).write_bytes((number % 250) as u8 + 1, block_bytes) };
            }
            for (number, &block) in blocks.iter().enumerate() {
                // SAFETY: as above, and the bytes were written.
                let bytes = unsafe { std::slice::from_raw_parts(arena.at(block), block_bytes) };
                assert!(bytes.iter().all(|&byte| byte == (number % 250) as u8 + 1), "block {number}");
            }
            let held = arena.num_items();
            arena.free(blocks[3]);
            assert_eq!(arena.allocate().unwrap(), blocks[3]);
            assert_eq!(arena.num_items(), held);
        }
    }

    #[test]
    fn a_full_arena_is_an_error_until_a_block_is_freed() {
        let arena = Arena::new(64, 1024).with_max_items(50);
        let blocks = [arena.allocate().unwrap(), arena.allocate().unwrap(), arena.allocate().unwrap()];
        for _ in 0..2 {
            let error = arena.allocate().unwrap_err().to_string();
            let expected =
                "table: expected at most 48 rows in one process, got more; use `sparse.evict` to limit the table";
            assert_eq!(error, expected);
        }
        arena.free(blocks[1]);
        assert_eq!(arena.allocate().unwrap(), blocks[1]);
    }

    #[test]
    fn a_failed_allocation_is_an_error() {
        let error = Arena::new(1 << 60, 1024).allocate().unwrap_err().to_string();
        assert!(error.starts_with("table: cannot allocate 1152921504606846976 bytes: "), "{error}");
    }
}
