//! Reads units ahead of the trainer: one thread loads, several parse, batches come out in order and by name.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use thiserror::Error;

use crate::batch::Batch;
use crate::parser::{LabelMode, Parser};
use crate::unique::Unique;
use crate::unit::{Unit, UnitLines, line_number};

/// How a reader cuts and orders batches.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    /// Records a batch; the last one of a unit may have fewer.
    pub batch_size: usize,
    /// Permute the records of a unit by (seed, epoch, unit).
    pub shuffle: bool,
    /// Seed of the permutation.
    pub seed: u64,
    /// Whether records must have labels.
    pub labels: LabelMode,
    /// Parsing threads.
    pub workers: usize,
    /// Batches of the first unit to leave out: they were done before.
    pub skip_batches: usize,
}

/// The name of a batch: the same records whoever reads it, whenever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchName {
    /// The unit's id.
    pub unit: u64,
    /// Its place in the unit.
    pub index: u32,
}

/// A batch ready for look-ups.
#[derive(Debug)]
pub struct ParsedBatch {
    /// Its name.
    pub name: BatchName,
    /// The samples.
    pub batch: Batch,
    /// Each sign once.
    pub unique: Unique,
    /// Show and click of each distinct sign.
    pub counts: Vec<(u32, u32)>,
    /// Records read, good or bad.
    pub num_records: usize,
    /// Bad records among them.
    pub num_bad: usize,
    /// The first few bad ones of this reader, as `file:line: what`.
    pub bad: Vec<String>,
}

/// A unit that could not be read.
#[derive(Debug, Error)]
#[error("{}: {source}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Bad records that are shown in full; the rest are only counted.
const SHOWN_BAD: usize = 5;
/// Batches parsed ahead, beyond one for each worker.
const AHEAD: usize = 4;

type Result<T> = std::result::Result<T, ReadError>;

struct Task {
    unit: Arc<Unit>,
    lines: Arc<UnitLines>,
    index: u32,
    records: Range<usize>,
    done: SyncSender<Result<ParsedBatch>>,
}

/// An iterator over the batches of units.
#[derive(Debug)]
pub struct BatchReader {
    /// In batch order; each holds one batch as soon as its worker is done.
    queue: Option<Receiver<Receiver<Result<ParsedBatch>>>>,
    threads: Vec<JoinHandle<()>>,
}

impl BatchReader {
    /// Starts reading `units` in the given order.
    pub fn start(parser: Arc<Parser>, units: Vec<Unit>, options: ReaderOptions) -> Self {
        let workers = options.workers.max(1);
        let (queue_in, queue) = sync_channel(workers + AHEAD);
        let (tasks_in, tasks) = sync_channel::<Task>(workers + AHEAD);
        let tasks = Arc::new(Mutex::new(tasks));
        let shown = Arc::new(AtomicUsize::new(0));
        let mut threads = Vec::with_capacity(workers + 1);
        for _ in 0..workers {
            let (parser, tasks, shown) = (parser.clone(), tasks.clone(), shown.clone());
            let mode = options.labels;
            threads.push(std::thread::spawn(move || {
                loop {
                    let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(task) = task else { return };
                    let parsed = parse(&parser, &task, mode, &shown);
                    // nobody waits for it once the reader is dropped
                    let _ = task.done.send(Ok(parsed));
                }
            }));
        }
        threads.push(std::thread::spawn(move || load(units, &options, &queue_in, &tasks_in)));
        BatchReader { queue: Some(queue), threads }
    }
}

impl Iterator for BatchReader {
    type Item = Result<ParsedBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.queue.as_ref()?.recv().ok()?;
        // a worker that panicked is a bug of ours; ending the stream early would lose samples in silence
        Some(batch.recv().expect("a parsing thread has died"))
    }
}

impl Drop for BatchReader {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Reads the units one after the other and hands their batches out; ends early when the reader is dropped.
fn load(
    units: Vec<Unit>,
    options: &ReaderOptions,
    queue: &SyncSender<Receiver<Result<ParsedBatch>>>,
    tasks: &SyncSender<Task>,
) {
    let mut skip = options.skip_batches;
    for unit in units {
        let mut lines = match UnitLines::read(&unit) {
            Ok(lines) => lines,
            Err(source) => {
                let (done, batch) = sync_channel(1);
                let _ = done.send(Err(ReadError { path: unit.path, source }));
                let _ = queue.send(batch);
                return;
            }
        };
        if options.shuffle {
            lines.shuffle(options.seed, unit.epoch, unit.id);
        }
        let (unit, lines) = (Arc::new(unit), Arc::new(lines));
        for index in skip..lines.num_records().div_ceil(options.batch_size) {
            let start = index * options.batch_size;
            let (done, batch) = sync_channel(1);
            let records = start..lines.num_records().min(start + options.batch_size);
            let task = Task { unit: unit.clone(), lines: lines.clone(), index: index as u32, records, done };
            if queue.send(batch).is_err() || tasks.send(task).is_err() {
                return;
            }
        }
        skip = 0;
    }
}

fn parse(parser: &Parser, task: &Task, mode: LabelMode, shown: &AtomicUsize) -> ParsedBatch {
    let num_records = task.records.len();
    let mut builder = parser.builder(num_records);
    let (mut num_bad, mut bad) = (0, Vec::new());
    for index in task.records.clone() {
        if let Err(error) = parser.parse_line(task.lines.record(index), mode, &mut builder) {
            num_bad += 1;
            if shown.fetch_add(1, Ordering::Relaxed) < SHOWN_BAD {
                bad.push(format!("{}: {error}", place(&task.unit.path, task.lines.file_offset(index))));
            }
        }
    }
    let batch = builder.finish();
    let unique = Unique::of(&batch);
    let counts = unique.counts(&batch);
    let name = BatchName { unit: task.unit.id, index: task.index };
    ParsedBatch { name, batch, unique, counts, num_records, num_bad, bad }
}

fn place(path: &Path, offset: u64) -> String {
    match line_number(path, offset) {
        Ok(line) => format!("{}:{line}", path.display()),
        Err(_) => format!("{} at byte {offset}", path.display()),
    }
}

/// Parses lines that are already in memory; the first bad one ends it, as `line 3: what`.
pub fn parse_text(parser: &Parser, text: &[u8], mode: LabelMode) -> std::result::Result<Batch, String> {
    let mut builder = parser.builder(memchr::memchr_iter(b'\n', text).count() + 1);
    let ends = memchr::memchr_iter(b'\n', text).chain([text.len()]);
    let mut start = 0;
    for (number, end) in ends.enumerate() {
        let line = &text[start..end];
        start = end + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.iter().all(|&byte| byte == b' ' || byte == b'\t') {
            continue;
        }
        parser.parse_line(line, mode, &mut builder).map_err(|error| format!("line {}: {error}", number + 1))?;
    }
    Ok(builder.finish())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::Features;
    use crate::unit::cut;

    fn parser() -> Arc<Parser> {
        let json =
            r#"{"format":"slots","hash":1,"slots":[{"name":"0","pooling":"sum"}],"dense":[],"labels":["click"]}"#;
        Arc::new(Parser::new(Features::from_json(json).unwrap()).unwrap())
    }

    fn options(workers: usize) -> ReaderOptions {
        ReaderOptions { batch_size: 7, shuffle: true, seed: 3, labels: LabelMode::Required, workers, skip_batches: 0 }
    }

    fn file(lines: usize, bad: &[usize]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for number in 0..lines {
            let sign = if bad.contains(&number) { "x".into() } else { number.to_string() };
            writeln!(file, "1 0 {sign}:0").unwrap();
        }
        file
    }

    fn units(file: &tempfile::NamedTempFile) -> Vec<Unit> {
        let size = file.path().metadata().unwrap().len();
        let ranges = cut(size, 300).into_iter().enumerate();
        ranges
            .map(|(id, (start, end))| Unit {
                id: id as u64,
                path: file.path().into(),
                start,
                end,
                epoch: 1,
                stamp: None,
            })
            .collect()
    }

    #[test]
    fn any_number_of_workers_gives_the_same_batches() {
        let file = file(500, &[]);
        let read = |workers| {
            BatchReader::start(parser(), units(&file), options(workers))
                .map(|batch| batch.map(|batch| (batch.name, batch.batch.signs)).unwrap())
                .collect::<Vec<_>>()
        };
        let one = read(1);
        assert_eq!(one, read(3));
        let mut signs: Vec<u64> = one.into_iter().flat_map(|(_, signs)| signs).collect();
        signs.sort_unstable();
        assert_eq!(signs, (0..500).collect::<Vec<_>>());
    }

    #[test]
    fn the_order_depends_on_the_seed_the_epoch_and_the_unit() {
        let file = file(100, &[]);
        let size = file.path().metadata().unwrap().len();
        let order = |seed, epoch, id| {
            let unit = Unit { id, path: file.path().into(), start: 0, end: size, epoch, stamp: None };
            BatchReader::start(parser(), vec![unit], ReaderOptions { seed, ..options(2) })
                .flat_map(|batch| batch.unwrap().batch.signs)
                .collect::<Vec<_>>()
        };
        let first = order(3, 1, 0);
        assert_eq!(first, order(3, 1, 0));
        assert_ne!(first, order(4, 1, 0));
        assert_ne!(first, order(3, 2, 0));
        assert_ne!(first, order(3, 1, 1));
        assert_ne!(first, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn skipped_batches_are_those_of_the_first_unit_and_names_stay() {
        let file = file(500, &[]);
        let names = |skip_batches| {
            BatchReader::start(parser(), units(&file), ReaderOptions { skip_batches, ..options(2) })
                .map(|batch| batch.map(|batch| (batch.name, batch.batch.signs)).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(0)[3..], names(3)[..]);
    }

    #[test]
    fn bad_records_are_counted_and_the_first_few_shown_with_their_line() {
        let bad: Vec<usize> = (10..30).collect();
        let file = file(100, &bad);
        let options = ReaderOptions { shuffle: false, ..options(1) };
        let batches: Vec<ParsedBatch> =
            BatchReader::start(parser(), units(&file), options).collect::<Result<_>>().unwrap();
        assert_eq!(batches.iter().map(|batch| batch.num_bad).sum::<usize>(), 20);
        assert_eq!(batches.iter().map(|batch| batch.num_records).sum::<usize>(), 100);
        let shown: Vec<String> = batches.into_iter().flat_map(|batch| batch.bad).collect();
        assert_eq!(shown.len(), SHOWN_BAD);
        assert_eq!(shown[0], format!("{}:11: slot `0`: sign `x` is not a u64", file.path().display()));
    }

    #[test]
    fn a_reader_can_be_dropped_at_any_time() {
        let file = file(2_000, &[]);
        let mut reader = BatchReader::start(parser(), units(&file), options(2));
        reader.next().unwrap().unwrap();
        drop(reader);
    }

    #[test]
    fn a_missing_file_is_an_error_of_the_stream() {
        let unit = Unit { id: 0, path: "no/such/file".into(), start: 0, end: 10, epoch: 0, stamp: None };
        let mut reader = BatchReader::start(parser(), vec![unit], options(1));
        assert!(reader.next().unwrap().unwrap_err().to_string().starts_with("no/such/file: "));
        assert!(reader.next().is_none());
    }

    #[test]
    fn text_in_memory_names_the_bad_line() {
        let parser = parser();
        assert_eq!(parse_text(&parser, b"1 0 5:0\r\n\n1 1 6:0", LabelMode::Required).unwrap().signs, [5, 6]);
        let error = parse_text(&parser, b"1 0 5:0\n\n1 1 z:0\n", LabelMode::Required).unwrap_err();
        assert_eq!(error, "line 3: slot `0`: sign `z` is not a u64");
    }
}
