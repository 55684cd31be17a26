//! What `elasticrec bench table` measures: pulls and pushes of random signs, next to memory and nothing else.

use std::hint::black_box;
use std::time::Instant;

use memmap2::MmapMut;

use crate::arena::{GrowError, map_huge_pages};
use crate::partition::mix;
use crate::prefetch::prefetch_read;
use crate::push::{Push, Pushed};
use crate::table::{Handles, Table};

/// Keys of a pull or push: about what a batch of 512 samples with 26 slots has.
const BATCH: usize = 8192;
/// Keys whose lines the probe asks for ahead.
const AHEAD: usize = 16;
const LINE: usize = 64;

type CacheLine = [u64; LINE / 8];

/// A full table, and an area of as many bytes to compare it with.
pub struct Bench {
    table: Table,
    num_rows: u64,
    drawn: u64,
    signs: Vec<u64>,
    values: Vec<f32>,
    counts: Vec<(u32, u32)>,
    area: Option<Area>,
    lines: Vec<u32>,
    gathered: Vec<CacheLine>,
}

impl Bench {
    /// Fills an empty table with `num_rows` rows.
    pub fn new(table: Table, num_rows: u64) -> Result<Self, GrowError> {
        let values = (0..BATCH * table.width()).map(|i| (i % 17) as f32 * 1e-3 - 8e-3).collect();
        let signs = Vec::with_capacity(BATCH);
        let counts = vec![(1, 0); BATCH];
        let mut bench = Bench {
            table,
            num_rows,
            drawn: 0,
            signs,
            values,
            counts,
            area: None,
            lines: Vec::new(),
            gathered: Vec::new(),
        };
        for start in (0..num_rows).step_by(BATCH) {
            bench.signs.clear();
            bench.signs.extend((start..num_rows.min(start + BATCH as u64)).map(sign_of));
            bench.push_batch()?;
        }
        Ok(bench)
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Seconds a key of (pull, its probe, push, its probe): the median of `num_batches` of each, taken in turns.
    ///
    /// In turns and by the median, for on a shared machine the same code runs at half its speed for milliseconds at a
    /// time.
    pub fn measure(&mut self, num_batches: usize) -> Result<[f64; 4], GrowError> {
        if self.area.is_none() {
            // not before: what the table alone holds is measured too
            self.area = Some(Area::new(self.table.bytes())?);
        }
        let mut times = [const { Vec::new() }; 4];
        let mut out = vec![0.0; self.values.len()];
        let mut handles = Handles::default();
        for _ in 0..num_batches {
            self.draw();
            times[0].push(seconds(|| self.table.pull(&self.signs, black_box(&mut out), &mut handles)));
            times[1].push(self.probe(false));
            self.draw();
            times[2].push(seconds(|| self.push_batch()));
            times[3].push(self.probe(true));
        }
        Ok(times.map(|mut times| {
            times.sort_unstable_by(f64::total_cmp);
            times[times.len() / 2] / BATCH as f64
        }))
    }

    /// Takes what changed, and has changes listed from then on, as a job that publishes does; returns how many there were
    /// and the seconds that it took.
    pub fn take_changes(&mut self) -> (usize, f64) {
        let mut num_changed = 0;
        let seconds = seconds(|| {
            for partition in 0..self.table.spec().partitions {
                num_changed += self.table.take_changes(partition).changed.len();
            }
        });
        (num_changed, seconds)
    }

    fn push_batch(&mut self) -> Result<Pushed, GrowError> {
        let num_keys = self.signs.len();
        let gradients = &self.values[..num_keys * self.table.width()];
        let push = Push {
            signs: &self.signs,
            handles: None,
            gradients,
            counts: &self.counts[..num_keys],
            seen: 1,
            is_delta: false,
        };
        self.table.push(push)
    }

    /// Random signs that have a row; of ten million hardly one is twice in a batch.
    fn draw(&mut self) {
        self.signs.clear();
        for _ in 0..BATCH {
            self.drawn += 1;
            self.signs.push(sign_of(((u128::from(mix(self.drawn)) * u128::from(self.num_rows)) >> 64) as u64));
        }
    }

    /// What the memory allows: for each key as many random cache lines as its index line and its row are, gathered, and
    /// written back if `write`, with prefetch and nothing else.
    fn probe(&mut self, write: bool) -> f64 {
        let lines_a_key = 1 + self.table.row_bytes().div_ceil(LINE);
        let Some(area) = &mut self.area else { return 0.0 };
        draw_lines(area.lines.len(), BATCH * lines_a_key, &mut self.drawn, &mut self.lines);
        self.gathered.resize(self.lines.len(), [0; LINE / 8]);
        let out = black_box(&mut self.gathered[..]);
        match write {
            true => seconds(|| area.update(&self.lines, lines_a_key, out)),
            false => seconds(|| gather(area.lines, &self.lines, lines_a_key, out, prefetch_read)),
        }
    }
}

fn seconds<R>(work: impl FnOnce() -> R) -> f64 {
    let start = Instant::now();
    black_box(work());
    start.elapsed().as_secs_f64()
}

fn sign_of(number: u64) -> u64 {
    // any odd multiplier: distinct numbers are distinct signs
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Chooses `count` of `num_lines` cache lines at random; `drawn` counts what was drawn so far.
pub fn draw_lines(num_lines: usize, count: usize, drawn: &mut u64, lines: &mut Vec<u32>) {
    lines.clear();
    for _ in 0..count {
        *drawn += 1;
        lines.push(((u128::from(mix(*drawn)) * num_lines as u128) >> 64) as u32);
    }
}

/// Copies cache lines side by side with prefetch and nothing else: what the memory allows. `prefetch` is the kind that
/// whoever is compared with it uses.
#[inline(never)]
pub fn gather<L: Copy>(
    memory: &[L],
    lines: &[u32],
    lines_a_key: usize,
    out: &mut [L],
    prefetch: impl Fn(*const L) + Copy,
) {
    let ahead = AHEAD * lines_a_key;
    for (at, out) in out.iter_mut().enumerate() {
        if let Some(&next) = lines.get(at + ahead) {
            prefetch(&raw const memory[next as usize]);
        }
        *out = memory[lines[at] as usize];
    }
}

/// Cache lines on the same kind of pages as the table's.
struct Area {
    lines: &'static mut [CacheLine],
    _map: MmapMut,
}

impl Area {
    fn new(num_bytes: usize) -> Result<Self, GrowError> {
        let (map, start) = map_huge_pages(num_bytes, 0)?;
        // SAFETY: so many bytes are mapped, aligned to a line, for as long as the map beside the slice lives.
        let lines = unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast(), num_bytes / LINE) };
        lines.fill([1; LINE / 8]);
        Ok(Area { lines, _map: map })
    }

    /// Copies the lines side by side and writes each back, changed.
    #[inline(never)]
    fn update(&mut self, lines: &[u32], lines_a_key: usize, out: &mut [CacheLine]) {
        let ahead = AHEAD * lines_a_key;
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
