//! Memory for indices and rows: zeroed, aligned to a cache line, and on huge pages if it is large and the system has them.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A zeroed allocation.
pub(crate) struct Memory {
    map: Option<MmapMut>,
    start: usize,
    length: usize,
}

impl Memory {
    /// Allocates zeros; an empty allocation needs no mapping.
    pub(crate) fn zeroed(length: usize) -> io::Result<Memory> {
        if length == 0 {
            return Ok(Memory { map: None, start: 0, length });
        }
        if length < HUGE_PAGE_BYTES {
            return Ok(Memory { map: Some(MmapMut::map_anon(length)?), start: 0, length });
        }
        let map = MmapMut::map_anon(length.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES)?;
        let start = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        advise(&map, start, length.next_multiple_of(HUGE_PAGE_BYTES));
        Ok(Memory { map: Some(map), start, length })
    }
}

impl Deref for Memory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.map.as_ref().map_or(&[], |map| &map[self.start..self.start + self.length])
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_mut().map_or(&mut [], |map| &mut map[self.start..self.start + self.length])
    }
}

#[cfg(all(target_os = "linux", not(feature = "portable")))]
fn advise(map: &MmapMut, offset: usize, bytes: usize) {
    // A kernel without huge pages uses ordinary pages, which only costs speed.
    let _ = map.advise_range(memmap2::Advice::HugePage, offset, bytes);
}

/// The portable variant does not ask for huge pages.
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
fn advise(_: &MmapMut, _: usize, _: usize) {}
