//! The memory of a table: units of one size, by number, in large mappings on huge pages where the system has them.
//!
//! All partitions share one arena, so that 256 of them do not each hold a mapping that is half empty. A partition
//! takes a block of hundreds of units at a time, which is how often the lock is taken. A number says where its unit
//! is with one look into a short list, so a row is found without a directory that would have to be fetched first.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

/// What is not touched of a mapping costs nothing. Of small units it has 2^21, which is whole huge pages of any size.
const MAPPING_BYTES: usize = 256 << 20;
const MAX_MAPPINGS: usize = 1 << 12;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The start of the first mapping has ordinary pages: small tables stay small.
const SMALL_BYTES: usize = 2 * HUGE_PAGE_BYTES;

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
        Arena { bases, unit_bytes, mapping_bits, block_bits, state: Mutex::default() }
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
    pub(crate) fn take(&self) -> u32 {
        let mut state = self.state();
        if let Some(block) = state.free.pop() {
            return block;
        }
        let first = state.next;
        let mapping = first as usize >> self.mapping_bits;
        if mapping == state.mappings.len() {
            assert!(
                mapping < MAX_MAPPINGS && mapping < 1 << (31 - self.mapping_bits),
                "table: full, at {first} rows in one process: raise the number of processes"
            );
            let (map, start) =
                map_huge_pages(self.unit_bytes << self.mapping_bits, if mapping == 0 { SMALL_BYTES } else { 0 });
            self.bases[mapping].store(start.as_ptr(), Ordering::Release);
            state.mappings.push(map);
        }
        state.next += 1 << self.block_bits;
        first
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
pub(crate) fn map_huge_pages(bytes: usize, small_bytes: usize) -> (MmapMut, NonNull<u8>) {
    let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let mut map = MmapMut::map_anon(bytes + HUGE_PAGE_BYTES)
        .unwrap_or_else(|error| panic!("table: no memory for {bytes} bytes more: {error}"));
    let offset = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
    advise(&map, offset + small_bytes, bytes.saturating_sub(small_bytes));
    assert!(offset + bytes <= map.len(), "the mapping has room for what comes before its first huge page");
    // SAFETY: inside the mapping, as asserted, which does not begin at 0.
    let start = unsafe { NonNull::new_unchecked(map.as_mut_ptr().add(offset)) };
    (map, start)
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
            let blocks: Vec<u32> = (0..num_blocks).map(|_| arena.take()).collect();
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
            assert_eq!(arena.take(), blocks[3]);
            assert_eq!(arena.num_units(), held);
        }
    }
}
