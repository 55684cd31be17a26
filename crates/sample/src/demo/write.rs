//! Writes demo data: several threads draw the part files, and the calling thread sums up their content.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

use super::auc::Ranking;
use super::truth::{Outcome, Truth};
use super::{DemoError, DemoSpec, DemoSummary, HourSummary, LabelSummary, Progress};

const MAX_PART_SAMPLES: u64 = 1_000_000;
/// Samples between two writes to the file and two reports of progress.
const BLOCK_SAMPLES: u64 = 4096;
/// 2026-01-01 in days since 1970-01-01.
const FIRST_DAY: i64 = 20_454;
const DONE: &str = ".done";

/// Writes `OUT/YYYYMMDD/HH/part-NNNNN.txt` from 20260101/00 on, each hour followed by an empty `.done`.
///
/// The bytes do not depend on `threads`. Existing hours are an error; with `overwrite` they are removed first. A part file
/// has a temporary name until it is complete.
pub fn generate(
    spec: &DemoSpec,
    out_dir: &Path,
    overwrite: bool,
    threads: usize,
    progress: Progress<'_>,
) -> Result<DemoSummary, DemoError> {
    let start = Instant::now();
    spec.check()?;
    clear(out_dir, overwrite)?;
    let truth = Truth::new(spec);
    let parts = parts_of(spec);
    for hour in 0..spec.hours {
        let dir = out_dir.join(hour_path(hour));
        fs::create_dir_all(&dir).map_err(DemoError::io(&dir))?;
    }
    let mut collector = Collector::new(spec, out_dir, &parts);
    let next_part = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers = threads.clamp(1, parts.len());
        // Bounded, because a finished part carries megabytes of counts.
        let (sender, receiver) = sync_channel(workers);
        for _ in 0..workers {
            let worker = Worker { truth: &truth, out_dir, stop: &stop, events: sender.clone() };
            let (parts, next_part) = (&parts, &next_part);
            scope.spawn(move || worker.run(parts, next_part));
        }
        drop(sender);
        let mut outcome = Ok(());
        // Receive events until the last worker has ended, even after a failure: a full channel would block a worker.
        for event in receiver {
            if outcome.is_ok() {
                outcome = collector.take(event, progress);
                stop.store(outcome.is_err(), Ordering::Relaxed);
            }
        }
        outcome
    })?;
    Ok(collector.finish(start.elapsed().as_secs_f64()))
}

/// A file to write: samples `first..end` of the data set.
#[derive(Clone, Copy, Debug)]
struct Part {
    hour: u32,
    number: u64,
    first: u64,
    end: u64,
}

impl Part {
    fn path(&self, out_dir: &Path) -> PathBuf {
        out_dir.join(hour_path(self.hour)).join(format!("part-{:05}.txt", self.number))
    }
}

fn parts_of(spec: &DemoSpec) -> Vec<Part> {
    let mut parts = Vec::new();
    for hour in 0..spec.hours {
        let first = start_of_piece(spec.samples, hour.into(), spec.hours.into());
        let count = start_of_piece(spec.samples, u64::from(hour) + 1, spec.hours.into()) - first;
        let num_parts = count.div_ceil(MAX_PART_SAMPLES);
        parts.extend((0..num_parts).map(|number| Part {
            hour,
            number,
            first: first + start_of_piece(count, number, num_parts),
            end: first + start_of_piece(count, number + 1, num_parts),
        }));
    }
    parts
}

/// Returns the start of piece `index` when `total` is split into `num_pieces` even pieces.
fn start_of_piece(total: u64, index: u64, num_pieces: u64) -> u64 {
    (u128::from(total) * u128::from(index) / u128::from(num_pieces)) as u64
}

/// Returns `YYYYMMDD/HH`, by the proleptic Gregorian calendar in eras of 400 years from 1 March of year 0.
fn hour_path(hour: u32) -> String {
    let days = FIRST_DAY + i64::from(hour / 24) + 719_468;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = days / 146_097 * 400 + year_of_era + i64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}/{:02}", hour % 24)
}

/// Removes existing hours; without `overwrite` an hour that is not empty is an error.
fn clear(out_dir: &Path, overwrite: bool) -> Result<(), DemoError> {
    for day in numeric_dirs(out_dir, 8)? {
        for hour in numeric_dirs(&day, 2)? {
            let is_empty = fs::read_dir(&hour).map_err(DemoError::io(&hour))?.next().is_none();
            if !overwrite && !is_empty {
                let name = hour.strip_prefix(out_dir).unwrap_or(&hour).display().to_string();
                return Err(DemoError::HoursPresent { out: out_dir.to_path_buf(), hour: name });
            }
            remove_hour(&hour)?;
        }
    }
    Ok(())
}

/// Returns the directories in `dir` with names of `digits` digits, in order; none if `dir` does not exist.
fn numeric_dirs(dir: &Path, digits: usize) -> Result<Vec<PathBuf>, DemoError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(DemoError::io(dir))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(DemoError::io(dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.len() == digits && name.bytes().all(|byte| byte.is_ascii_digit()) && path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Removes the files that `generate` writes into an hour, `.done` first; other files stay.
fn remove_hour(dir: &Path) -> Result<(), DemoError> {
    let done = dir.join(DONE);
    if done.exists() {
        fs::remove_file(&done).map_err(DemoError::io(&done))?;
    }
    for entry in fs::read_dir(dir).map_err(DemoError::io(dir))? {
        let path = entry.map_err(DemoError::io(dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_part =
            name.trim_start_matches('.').starts_with("part-") && (name.ends_with(".txt") || name.ends_with(".txt.tmp"));
        if is_part {
            fs::remove_file(&path).map_err(DemoError::io(&path))?;
        }
    }
    // Fails if the directory has other files, which stay.
    let _ = fs::remove_dir(dir);
    Ok(())
}

/// Counts of one part, one hour or everything.
struct Tally {
    samples: u64,
    bytes: u64,
    click: LabelTally,
    /// `None` if no sample has this label.
    buy: Option<LabelTally>,
}

struct LabelTally {
    positives: u64,
    best: Ranking,
    linear: Ranking,
}

impl Tally {
    fn new() -> Self {
        Self { samples: 0, bytes: 0, click: LabelTally::new(), buy: None }
    }

    fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.bytes += other.bytes;
        self.click.merge(&other.click);
        if let Some(buy) = &other.buy {
            self.buy.get_or_insert_with(LabelTally::new).merge(buy);
        }
    }
}

impl LabelTally {
    fn new() -> Self {
        Self { positives: 0, best: Ranking::new(), linear: Ranking::new() }
    }

    fn add(&mut self, outcome: Outcome) {
        self.positives += u64::from(outcome.happened);
        self.best.add(outcome.best, outcome.happened);
        self.linear.add(outcome.linear, outcome.happened);
    }

    fn merge(&mut self, other: &Self) {
        self.positives += other.positives;
        self.best.merge(&other.best);
        self.linear.merge(&other.linear);
    }

    fn summary(&self) -> LabelSummary {
        LabelSummary { positives: self.positives, best_auc: self.best.auc(), linear_auc: self.linear.auc() }
    }
}

enum Event {
    /// Number of samples written since the last event of this worker.
    Wrote(u64),
    Finished(Part, Box<Tally>),
    Failed(DemoError),
}

struct Worker<'a> {
    truth: &'a Truth,
    out_dir: &'a Path,
    stop: &'a AtomicBool,
    events: SyncSender<Event>,
}

impl Worker<'_> {
    fn run(&self, parts: &[Part], next_part: &AtomicUsize) {
        while let Some(part) = parts.get(next_part.fetch_add(1, Ordering::Relaxed)) {
            let event = match self.write_part(part) {
                Ok(Some(tally)) => Event::Finished(*part, Box::new(tally)),
                Ok(None) => return,
                Err(error) => Event::Failed(error),
            };
            if self.events.send(event).is_err() {
                return;
            }
        }
    }

    /// Writes a part file; returns `None` if it was asked to stop.
    fn write_part(&self, part: &Part) -> Result<Option<Tally>, DemoError> {
        let path = part.path(self.out_dir);
        let temporary = path.with_file_name(format!(".part-{:05}.txt.tmp", part.number));
        let written = File::create(&temporary)
            .map_err(DemoError::io(&temporary))
            .and_then(|mut file| self.write_samples(part, &mut file, &path));
        match written {
            Ok(Some(tally)) => {
                fs::rename(&temporary, &path).map_err(DemoError::io(&path))?;
                Ok(Some(tally))
            }
            other => {
                // Report the original error, not a failure to remove the temporary file.
                let _ = fs::remove_file(&temporary);
                other
            }
        }
    }

    fn write_samples(&self, part: &Part, file: &mut File, path: &Path) -> Result<Option<Tally>, DemoError> {
        let rotation = Truth::rotation(part.hour);
        let mut tally = Tally::new();
        let mut block = Vec::new();
        let mut first = part.first;
        while first < part.end {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let end = part.end.min(first + BLOCK_SAMPLES);
            block.clear();
            for index in first..end {
                let drawn = self.truth.draw(index, rotation, &mut block);
                tally.click.add(drawn.click);
                if let Some(buy) = drawn.buy {
                    tally.buy.get_or_insert_with(LabelTally::new).add(buy);
                }
            }
            file.write_all(&block).map_err(DemoError::io(path))?;
            tally.samples += end - first;
            tally.bytes += block.len() as u64;
            if self.events.send(Event::Wrote(end - first)).is_err() {
                return Ok(None);
            }
            first = end;
        }
        Ok(Some(tally))
    }
}

/// An hour with parts that are not written yet.
struct OpenHour {
    parts_left: u64,
    tally: Option<Box<Tally>>,
}

/// Sums up the events of the workers, on the calling thread.
struct Collector<'a> {
    out_dir: &'a Path,
    open: Vec<OpenHour>,
    hours: Vec<HourSummary>,
    total: Tally,
    samples_written: u64,
}

impl<'a> Collector<'a> {
    fn new(spec: &DemoSpec, out_dir: &'a Path, parts: &[Part]) -> Self {
        let mut open: Vec<OpenHour> = (0..spec.hours).map(|_| OpenHour { parts_left: 0, tally: None }).collect();
        for part in parts {
            open[part.hour as usize].parts_left += 1;
        }
        Self { out_dir, open, hours: Vec::new(), total: Tally::new(), samples_written: 0 }
    }

    fn take(&mut self, event: Event, progress: Progress<'_>) -> Result<(), DemoError> {
        match event {
            Event::Wrote(samples) => {
                self.samples_written += samples;
                match progress(self.samples_written) {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => Err(DemoError::Stopped { samples: self.samples_written }),
                }
            }
            Event::Finished(part, tally) => self.finish_part(part, tally),
            Event::Failed(error) => Err(error),
        }
    }

    fn finish_part(&mut self, part: Part, tally: Box<Tally>) -> Result<(), DemoError> {
        self.total.merge(&tally);
        let open = &mut self.open[part.hour as usize];
        open.parts_left -= 1;
        let hour = match open.tally.take() {
            None => tally,
            Some(mut others) => {
                others.merge(&tally);
                others
            }
        };
        if open.parts_left > 0 {
            open.tally = Some(hour);
            return Ok(());
        }
        let path = hour_path(part.hour);
        let done = self.out_dir.join(&path).join(DONE);
        File::create(&done).map_err(DemoError::io(&done))?;
        self.hours.push(HourSummary {
            hour: part.hour,
            path,
            samples: hour.samples,
            clicks: hour.click.positives,
            best_auc: hour.click.best.auc(),
            linear_auc: hour.click.linear.auc(),
            buy: hour.buy.as_ref().map(LabelTally::summary),
        });
        Ok(())
    }

    fn finish(mut self, seconds: f64) -> DemoSummary {
        self.hours.sort_by_key(|hour| hour.hour);
        DemoSummary {
            samples: self.total.samples,
            clicks: self.total.click.positives,
            best_auc: self.total.click.best.auc(),
            linear_auc: self.total.click.linear.auc(),
            buy: self.total.buy.as_ref().map(LabelTally::summary),
            hours: self.hours,
            bytes: self.total.bytes,
            seconds,
        }
    }
}

#[cfg(test)]
mod tests;
