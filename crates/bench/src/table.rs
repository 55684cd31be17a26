//! `elasticrec bench table`: pulls and pushes of random signs, compared with a memory probe.

use std::hint::black_box;

use elasticrec_table::prefetch::prefetch_read;
use elasticrec_table::{GrowError, Handles, Push, PushResult, Table};

use crate::keys::{Random, sign_of};
use crate::memory::{Area, CacheLine, LINE, draw_lines, gather};
use crate::timing::{median, seconds};

/// Keys of a pull or push: about those of a batch of 512 samples with 26 slots.
const BATCH: usize = 8192;

/// A full table, and an area of the same size for the memory probe.
pub struct TableBench {
    table: Table,
    num_rows: u64,
    random: Random,
    signs: Vec<u64>,
    values: Vec<f32>,
    counts: Vec<(u32, u32)>,
    area: Option<Area>,
    lines: Vec<u32>,
    gathered: Vec<CacheLine>,
}

impl TableBench {
    /// Fills an empty table with `num_rows` rows.
    pub fn new(table: Table, num_rows: u64) -> Result<Self, GrowError> {
        let values = (0..BATCH * table.width()).map(|i| (i % 17) as f32 * 1e-3 - 8e-3).collect();
        let mut bench = TableBench {
            table,
            num_rows,
            random: Random::default(),
            signs: Vec::with_capacity(BATCH),
            values,
            counts: vec![(1, 0); BATCH],
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

    /// Returns the median seconds per key of (pull, its probe, push, its probe) over `num_batches` of each.
    pub fn measure(&mut self, num_batches: usize) -> Result<[f64; 4], GrowError> {
        if self.area.is_none() {
            // Allocated only now, so that the memory of the table alone can be measured before.
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
        Ok(times.map(|times| median(times) / BATCH as f64))
    }

    /// Takes the changes of all partitions; returns their number and the seconds it took. The table records its changes
    /// from the first call on, as in a job that publishes.
    pub fn take_changes(&mut self) -> (usize, f64) {
        let mut num_changed = 0;
        let seconds = seconds(|| {
            for partition in 0..self.table.spec().partitions {
                num_changed += self.table.take_changes(partition).changed.len();
            }
        });
        (num_changed, seconds)
    }

    fn push_batch(&mut self) -> Result<PushResult, GrowError> {
        let num_keys = self.signs.len();
        let gradients = &self.values[..num_keys * self.table.width()];
        let push = Push {
            signs: &self.signs,
            handles: None,
            gradients,
            counts: &self.counts[..num_keys],
            seen: 1,
            is_increment: false,
        };
        self.table.push(push)
    }

    /// Draws a batch of signs that have a row; with ten million rows a batch has hardly any sign twice.
    fn draw(&mut self) {
        self.signs.clear();
        self.signs.extend((0..BATCH).map(|_| sign_of(self.random.below(self.num_rows))));
    }

    /// Returns the seconds that memory alone needs: for each key as many random cache lines as its index line and its
    /// row have, gathered, and written back if `write`.
    fn probe(&mut self, write: bool) -> f64 {
        let lines_per_key = 1 + self.table.row_bytes().div_ceil(LINE);
        let Some(area) = &mut self.area else { return 0.0 };
        draw_lines(area.lines().len(), BATCH * lines_per_key, &mut self.random, &mut self.lines);
        self.gathered.resize(self.lines.len(), [0; LINE / 8]);
        let out = black_box(&mut self.gathered[..]);
        match write {
            true => seconds(|| area.update(&self.lines, lines_per_key, out)),
            false => seconds(|| gather(area.lines(), &self.lines, lines_per_key, out, prefetch_read)),
        }
    }
}
