//! The memory of a table: blocks carved from large mappings, on huge pages where the system has them.
//!
//! All partitions share one arena, so that 256 of them do not each hold a mapping that is half empty. A partition
//! takes a block for hundreds of rows at a time, which is how often the lock is taken.

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;

/// Blocks start at a cache line.
const ALIGNMENT: usize = 64;
/// The first mapping is small and of ordinary pages: small tables stay small.
const FIRST_BYTES: usize = 1 << 20;
/// Later ones take a whole number of huge pages; what is not touched yet costs nothing.
const MAPPING_BYTES: usize = 32 << 20;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory that its holder alone may touch, until it gives it back.
#[derive(Debug)]
pub(crate) struct Block(NonNull<u8>);

// SAFETY: a block is owned like a box; nothing about it belongs to a thread.
unsafe impl Send for Block {}
// SAFETY: through a shared block memory is only read.
unsafe impl Sync for Block {}

impl Block {
    #[inline]
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    #[inline]
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_ptr()
    }
}

/// Hands out blocks and takes them back; its memory goes with it.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mappings: Vec<MmapMut>,
    /// What is left of the last mapping.
    rest: Option<(NonNull<u8>, usize)>,
    /// Blocks that came back, by their size: a table has two.
    free: Vec<(usize, Vec<Block>)>,
    /// Bytes carved so far.
    num_bytes: usize,
}

// SAFETY: `rest` points into `mappings`, which the state owns.
unsafe impl Send for State {}

impl Arena {
    /// A block of at least `bytes` bytes: zeroes, or what the holder before left in it.
    pub(crate) fn take(&self, bytes: usize) -> Block {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        if let Some((_, blocks)) = state.free.iter_mut().find(|(size, _)| *size == bytes)
            && let Some(block) = blocks.pop()
        {
            return block;
        }
        state.carve(bytes)
    }

    /// Takes back a block that was asked for with the same `bytes`.
    pub(crate) fn give_back(&self, block: Block, bytes: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        match state.free.iter_mut().find(|(size, _)| *size == bytes) {
            Some((_, blocks)) => blocks.push(block),
            None => state.free.push((bytes, vec![block])),
        }
    }

    /// Bytes handed out so far, those that came back included.
    pub(crate) fn num_bytes(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).num_bytes
    }
}

impl State {
    fn carve(&mut self, bytes: usize) -> Block {
        let (start, left) = match self.rest {
            Some((start, left)) if left >= bytes => (start, left),
            _ => self.map(bytes),
        };
        // SAFETY: `left` bytes from `start` on are mapped and nobody's, and `bytes` are no more than that.
        self.rest = Some((unsafe { start.add(bytes) }, left - bytes));
        self.num_bytes += bytes;
        Block(start)
    }

    /// Maps memory for at least `bytes` more.
    fn map(&mut self, bytes: usize) -> (NonNull<u8>, usize) {
        let first = self.mappings.is_empty() && bytes <= FIRST_BYTES;
        let length = if first { FIRST_BYTES } else { MAPPING_BYTES.max(bytes.next_multiple_of(HUGE_PAGE_BYTES)) };
        // room to start at a huge page
        let slack = if first { 0 } else { HUGE_PAGE_BYTES };
        let mut mapping = MmapMut::map_anon(length + slack)
            .unwrap_or_else(|error| panic!("table: no memory for {length} bytes more: {error}"));
        let offset = if first { 0 } else { mapping.as_ptr().align_offset(HUGE_PAGE_BYTES) };
        if !first {
            advise_huge_pages(&mapping, offset, length);
        }
        let start = NonNull::from(&mut mapping[offset]);
        self.mappings.push(mapping);
        (start, length)
    }
}

#[cfg(all(target_os = "linux", not(feature = "portable")))]
fn advise_huge_pages(mapping: &MmapMut, offset: usize, length: usize) {
    // a kernel without them serves ordinary pages: slower, not wrong
    let _ = mapping.advise_range(memmap2::Advice::HugePage, offset, length);
}

/// The portable twin: pages as the system gives them.
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
fn advise_huge_pages(_: &MmapMut, _: usize, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_come_back() {
        let arena = Arena::default();
        let sizes = [64usize, 4096, 100, 600_000, 600_000, 40 << 20, 64];
        let mut blocks: Vec<(Block, usize)> = sizes.iter().map(|&size| (arena.take(size), size)).collect();
        for (number, (block, size)) in blocks.iter_mut().enumerate() {
            assert_eq!(block.as_ptr() as usize % ALIGNMENT, 0);
            // SAFETY: the block has `size` bytes and is ours.
            unsafe { block.as_mut_ptr().write_bytes(number as u8 + 1, *size) };
        }
        for (number, (block, size)) in blocks.iter().enumerate() {
            // SAFETY: as above, and written before.
            let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), *size) };
            assert!(bytes.iter().all(|&byte| byte == number as u8 + 1), "block {number}");
        }
        let held = arena.num_bytes();
        let (block, size) = blocks.remove(3);
        let address = block.as_ptr();
        arena.give_back(block, size);
        assert_eq!(arena.take(600_000).as_ptr(), address);
        assert_eq!(arena.num_bytes(), held);
    }
}
