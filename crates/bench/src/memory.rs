//! Memory probes: how fast random cache lines can be gathered with prefetch and no other work.

use elasticrec_table::prefetch::prefetch_read;
use elasticrec_table::{GrowError, map_huge_pages};
use memmap2::MmapMut;

use crate::keys::Random;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;
/// Keys whose lines are prefetched before their turn.
const AHEAD: usize = 16;

/// A cache line of memory that the probe writes.
pub(crate) type CacheLine = [u64; LINE / 8];

/// Fills `lines` with the numbers of `count` random cache lines out of `num_lines`.
pub(crate) fn draw_lines(num_lines: usize, count: usize, random: &mut Random, lines: &mut Vec<u32>) {
    lines.clear();
    lines.extend((0..count).map(|_| random.below(num_lines as u64) as u32));
}

/// Copies `lines` of `memory` side by side into `out`.
///
/// `prefetch` must be the kind of prefetch that the measured code uses.
#[inline(never)]
pub(crate) fn gather<L: Copy>(
    memory: &[L],
    lines: &[u32],
    lines_per_key: usize,
    out: &mut [L],
    prefetch: impl Fn(*const L) + Copy,
) {
    let ahead = AHEAD * lines_per_key;
    for (at, out) in out.iter_mut().enumerate() {
        if let Some(&next) = lines.get(at + ahead) {
            prefetch(&raw const memory[next as usize]);
        }
        *out = memory[lines[at] as usize];
    }
}

/// An area of cache lines on the same kind of pages as a table.
pub(crate) struct Area {
    lines: &'static mut [CacheLine],
    _map: MmapMut,
}

impl Area {
    /// Maps and touches `num_bytes`.
    pub(crate) fn new(num_bytes: usize) -> Result<Self, GrowError> {
        let mapped = map_huge_pages(num_bytes, 0);
        let (mut map, start) = mapped.map_err(|source| GrowError::Memory { bytes: num_bytes, source })?;
        let area = &mut map[start..][..num_bytes];
        // SAFETY: `num_bytes` are mapped, aligned to a line, for as long as the map beside the slice lives.
        let lines = unsafe { std::slice::from_raw_parts_mut(area.as_mut_ptr().cast(), num_bytes / LINE) };
        lines.fill([1; LINE / 8]);
        Ok(Area { lines, _map: map })
    }

    /// The lines.
    pub(crate) fn lines(&self) -> &[CacheLine] {
        self.lines
    }

    /// Copies `lines` side by side into `out` and writes each one back, changed.
    #[inline(never)]
    pub(crate) fn update(&mut self, lines: &[u32], lines_per_key: usize, out: &mut [CacheLine]) {
        let ahead = AHEAD * lines_per_key;
        for (at, out) in out.iter_mut().enumerate() {
            if let Some(&next) = lines.get(at + ahead) {
                prefetch_read(&raw const self.lines[next as usize]);
            }
            let line = &mut self.lines[lines[at] as usize];
            *out = *line;
            line.iter_mut().for_each(|word| *word += 1);
        }
    }
}
