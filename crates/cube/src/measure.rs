//! What `elasticrec bench cube` measures in one process: building, opening and looking up, next to memory and nothing else.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use elasticrec_table::measure::{draw_lines, gather};
use elasticrec_table::partition::{mix, partition_of};
use elasticrec_table::prefetch::prefetch_far;

use crate::{Changes, Column, Cube, CubeError, CubeWriter, DeltaFile, DeltaWriter, RowType, View};

const NUM_PARTITIONS: u32 = 256;
const WIDTH: u32 = 10;
/// Keys of a lookup.
pub const BATCH: usize = 1000;
/// Of a thousand keys so many have no row.
const MISSES: u64 = 50;
const LINE: usize = 64;

/// A cube of many rows, loaded; its own memory is what it is compared with.
pub struct Bench {
    dir: PathBuf,
    num_rows: u64,
    view: View,
    num_deltas: u64,
    drawn: u64,
    signs: Vec<u64>,
    lines: Vec<u32>,
    gathered: Vec<[u8; LINE]>,
    /// Seconds to write the file, checksums and sync included.
    pub build_s: f64,
    /// Seconds to load and check it.
    pub open_s: f64,
    /// Its size.
    pub file_bytes: u64,
}

impl Bench {
    /// Writes a cube of `num_rows` rows into `dir` and opens it.
    pub fn new(dir: &Path, num_rows: u64, row_type: RowType) -> Result<Bench, CubeError> {
        let path = dir.join("part-00000");
        let mut partitions = vec![Vec::new(); NUM_PARTITIONS as usize];
        for sign in (0..num_rows).map(sign_of) {
            partitions[partition_of(sign, NUM_PARTITIONS) as usize].push(sign);
        }
        let started = Instant::now();
        let mut writer = CubeWriter::create(&path, columns(), row_type, NUM_PARTITIONS)?;
        for (partition, signs) in (0..).zip(&partitions) {
            writer.write_partition(partition, signs, |i, values| fill(signs[i], values))?;
        }
        let written = writer.finish()?;
        let build_s = started.elapsed().as_secs_f64();
        drop(partitions);
        let started = Instant::now();
        let view = View::of_base(Arc::new(Cube::load(&[path], None)?));
        let open_s = started.elapsed().as_secs_f64();
        Ok(Bench {
            dir: dir.to_owned(),
            num_rows,
            view,
            num_deltas: 0,
            drawn: 0,
            signs: Vec::new(),
            lines: Vec::new(),
            gathered: Vec::new(),
            build_s,
            open_s,
            file_bytes: written.bytes,
        })
    }

    /// The version that is looked up now.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Publishes a delta of so many changed rows. Returns the seconds to write it, to open it and to apply it, and its bytes.
    pub fn change(&mut self, num_changed: usize) -> Result<[f64; 4], CubeError> {
        let mut signs: Vec<u64> = (0..num_changed).map(|_| self.draw_sign()).collect();
        signs.sort_unstable_by_key(|sign| mix(*sign));
        signs.dedup();
        self.num_deltas += 1;
        let path = self.dir.join(format!("delta-{}", self.num_deltas));
        let started = Instant::now();
        let mut writer = DeltaWriter::create(&path, columns(), self.view.row_type(), NUM_PARTITIONS)?;
        let partition_of = |sign: &u64| partition_of(*sign, NUM_PARTITIONS);
        for signs in signs.chunk_by(|a, b| partition_of(a) == partition_of(b)) {
            let changes = Changes { signs, ..Changes::default() };
            writer.add(partition_of(&signs[0]), changes, |i, values| fill(signs[i], values))?;
        }
        let bytes = writer.finish()?.bytes;
        let written = Instant::now();
        let delta = DeltaFile::open(&path)?;
        let opened = Instant::now();
        self.view = self.view.with_delta(&[delta])?;
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        Ok([seconds(started, written), seconds(written, opened), opened.elapsed().as_secs_f64(), bytes as f64])
    }

    /// Seconds a key of (lookup, its probe): the median of `num_batches` of each, taken in turns.
    ///
    /// In turns and by the median, for on a shared machine the same code runs at half its speed for milliseconds at a
    /// time.
    pub fn measure(&mut self, num_batches: usize) -> [f64; 2] {
        let mut times = [Vec::new(), Vec::new()];
        let mut out = vec![0.0; BATCH * self.view.width()];
        for _ in 0..num_batches {
            self.draw();
            times[0].push(seconds(|| self.view.lookup(&self.signs, black_box(&mut out))));
            times[1].push(self.probe());
        }
        times.map(|mut times| {
            times.sort_unstable_by(f64::total_cmp);
            times.get(times.len() / 2).map_or(0.0, |time| time / BATCH as f64)
        })
    }

    fn draw(&mut self) {
        self.signs.clear();
        for i in 0..BATCH as u64 {
            let sign = self.draw_sign();
            // those beyond the rows have none
            let is_miss = i * MISSES % BATCH as u64 >= BATCH as u64 - MISSES;
            self.signs.push(if is_miss { sign_of(self.num_rows + self.drawn) } else { sign });
        }
    }

    fn draw_sign(&mut self) -> u64 {
        self.drawn += 1;
        sign_of(((u128::from(mix(self.drawn)) * u128::from(self.num_rows)) >> 64) as u64)
    }

    /// What the memory allows: for each key as many random cache lines as its index line and its row are, gathered with
    /// prefetch and nothing else.
    ///
    /// Of the memory of the cube, for two areas of one size need not be equally fast: the pages below those that a
    /// virtual machine sees may be small or large.
    fn probe(&mut self) -> f64 {
        let lines_a_key = 1 + self.view.row_bytes().div_ceil(LINE);
        let memory = self.view.base().memory().as_chunks().0;
        draw_lines(memory.len(), BATCH * lines_a_key, &mut self.drawn, &mut self.lines);
        self.gathered.resize(self.lines.len(), [0; LINE]);
        let out = black_box(&mut self.gathered[..]);
        seconds(|| gather(memory, &self.lines, lines_a_key, out, prefetch_far))
    }
}

fn columns() -> Vec<Column> {
    vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: WIDTH - 1 }]
}

fn fill(sign: u64, values: &mut [f32]) {
    for (i, value) in (0_u32..).zip(values) {
        *value = (sign as u32 ^ i) as f32;
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
