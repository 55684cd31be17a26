//! `elasticrec bench cube`, in one process: building, opening and looking up, compared with a memory probe.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use elasticrec_cube::{Changes, Column, Cube, CubeError, CubeWriter, DeltaFile, DeltaWriter, RowType, View};
use elasticrec_table::partition::{mix, partition_of};
use elasticrec_table::prefetch::prefetch_far;

use crate::keys::{Random, sign_of};
use crate::memory::{LINE, draw_lines, gather};
use crate::timing::{median, seconds};

const NUM_PARTITIONS: u32 = 256;
const WIDTH: u32 = 10;
/// Keys of a lookup.
const BATCH: usize = 1000;
/// Keys of a lookup that have no row.
const MISSES: u64 = 50;

/// A loaded cube; the memory probe reads the cube's own memory.
pub struct CubeBench {
    dir: PathBuf,
    num_rows: u64,
    view: View,
    num_deltas: u64,
    random: Random,
    signs: Vec<u64>,
    lines: Vec<u32>,
    gathered: Vec<[u8; LINE]>,
    /// Seconds to write the file, checksums and sync included.
    pub build_s: f64,
    /// Seconds to load and check it.
    pub open_s: f64,
    /// Size of the file.
    pub file_bytes: u64,
}

/// Cost of one published delta.
pub struct DeltaCost {
    /// Seconds to write the file.
    pub write_s: f64,
    /// Seconds to open and check it.
    pub open_s: f64,
    /// Seconds to apply it to the version before.
    pub apply_s: f64,
    /// Size of the file.
    pub file_bytes: u64,
}

impl CubeBench {
    /// Writes a cube of `num_rows` rows into `dir` and loads it.
    pub fn new(dir: &Path, num_rows: u64, row_type: RowType) -> Result<CubeBench, CubeError> {
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
        Ok(CubeBench {
            dir: dir.to_owned(),
            num_rows,
            view,
            num_deltas: 0,
            random: Random::default(),
            signs: Vec::new(),
            lines: Vec::new(),
            gathered: Vec::new(),
            build_s,
            open_s,
            file_bytes: written.bytes,
        })
    }

    /// The newest version.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Publishes a delta of `num_changed` changed rows on the newest version.
    pub fn change(&mut self, num_changed: usize) -> Result<DeltaCost, CubeError> {
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
        let file_bytes = writer.finish()?.bytes;
        let written = Instant::now();
        let delta = DeltaFile::open(&path)?;
        let opened = Instant::now();
        self.view = self.view.with_delta(&[delta])?;
        Ok(DeltaCost {
            write_s: (written - started).as_secs_f64(),
            open_s: (opened - written).as_secs_f64(),
            apply_s: opened.elapsed().as_secs_f64(),
            file_bytes,
        })
    }

    /// Returns the median seconds per key of (lookup, its probe) over `num_batches` of each.
    pub fn measure(&mut self, num_batches: usize) -> [f64; 2] {
        let mut times = [Vec::new(), Vec::new()];
        let mut out = vec![0.0; BATCH * self.view.width()];
        for _ in 0..num_batches {
            self.draw();
            times[0].push(seconds(|| self.view.lookup(&self.signs, black_box(&mut out))));
            times[1].push(self.probe());
        }
        times.map(|times| median(times) / BATCH as f64)
    }

    fn draw(&mut self) {
        self.signs.clear();
        for i in 0..BATCH as u64 {
            let sign = self.draw_sign();
            let is_miss = i * MISSES % BATCH as u64 >= BATCH as u64 - MISSES;
            self.signs.push(if is_miss { sign_of(self.num_rows + self.random.num_drawn()) } else { sign });
        }
    }

    fn draw_sign(&mut self) -> u64 {
        sign_of(self.random.below(self.num_rows))
    }

    /// Returns the seconds that memory alone needs: for each key as many random cache lines as its index line and its
    /// row have.
    ///
    /// The probe reads the memory of the cube, because two areas of one size are not always equally fast: a virtual
    /// machine does not see whether the pages below its own are small or large.
    fn probe(&mut self) -> f64 {
        let lines_per_key = 1 + self.view.row_bytes().div_ceil(LINE);
        let memory = self.view.base().memory().as_chunks().0;
        draw_lines(memory.len(), BATCH * lines_per_key, &mut self.random, &mut self.lines);
        self.gathered.resize(self.lines.len(), [0; LINE]);
        let out = black_box(&mut self.gathered[..]);
        seconds(|| gather(memory, &self.lines, lines_per_key, out, prefetch_far))
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
