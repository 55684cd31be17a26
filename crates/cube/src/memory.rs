//! Memory for indices and rows: zeroed, aligned to a cache line, and on huge pages if it is large and the system has them.

use std::io;
use std::ops::{Deref, DerefMut};

use elasticrec_table::{HUGE_PAGE_BYTES, map_huge_pages};
use memmap2::MmapMut;

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
        let (map, start) = map_huge_pages(length, 0)?;
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
