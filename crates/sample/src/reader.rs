//! Reads units ahead of the trainer: one thread loads, several parse, and batches are returned in order.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use thiserror::Error;

use crate::batch::{Batch, BatchBuilder};
use crate::parser::{LabelMode, Parser};
use crate::records::{RecordBatch, RecordBatches, RecordOptions};
use crate::unique::Unique;
use crate::unit::Unit;

/// Options of a reader.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    /// The division of units into batches of records.
    pub records: RecordOptions,
    /// Whether records must have labels.
    pub labels: LabelMode,
    /// Parsing threads.
    pub workers: usize,
}

/// The name of a batch; it always stands for the same records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchName {
    /// The unit's id.
    pub unit: u64,
    /// The number of the batch in the unit.
    pub index: u32,
}

/// A parsed batch with its distinct signs.
#[derive(Debug)]
pub struct ParsedBatch {
    /// Its name.
    pub name: BatchName,
    /// The samples.
    pub batch: Batch,
    /// The distinct signs.
    pub unique: Unique,
    /// Show and click of each distinct sign.
    pub counts: Vec<(u32, u32)>,
    /// Number of records, including bad ones.
    pub num_records: usize,
    /// Number of bad records.
    pub num_bad: usize,
    /// The first few bad records of the reader, as `file:line: what`, in file order.
    pub bad: Vec<String>,
    /// The records, if they are from a file.
    pub source: Option<RecordBatch>,
}

impl ParsedBatch {
    /// A batch whose samples are not from a file.
    pub fn of(name: BatchName, batch: Batch) -> Self {
        let unique = Unique::of(&batch);
        let counts = unique.counts(&batch);
        let num_records = batch.num_samples();
        ParsedBatch { name, batch, unique, counts, num_records, num_bad: 0, bad: Vec::new(), source: None }
    }
}

/// A unit cannot be read.
#[derive(Debug, Error)]
#[error("{}: {source}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

/// Number of bad records that are reported; the rest are only counted.
pub const SHOWN_BAD: usize = 5;
/// Batches parsed ahead, in addition to one per worker.
const AHEAD: usize = 4;

type Result<T> = std::result::Result<T, ReadError>;

struct Task {
    records: RecordBatch,
    done: SyncSender<Result<ParsedBatch>>,
}

/// Time that the threads of a reader have spent.
#[derive(Debug, Default)]
struct Times {
    read_ns: AtomicU64,
    parse_ns: AtomicU64,
}

/// An iterator over the batches of units.
#[derive(Debug)]
pub struct BatchReader {
    /// One channel per batch, in batch order; a worker sends the parsed batch into it.
    queue: Option<Receiver<Receiver<Result<ParsedBatch>>>>,
    threads: Vec<JoinHandle<()>>,
    times: Arc<Times>,
}

impl BatchReader {
    /// Starts threads that read `units` in the given order.
    pub fn start(parser: Arc<Parser>, units: Vec<Unit>, options: ReaderOptions) -> Self {
        let workers = options.workers.max(1);
        let (queue_in, queue) = sync_channel(workers + AHEAD);
        let (tasks_in, tasks) = sync_channel::<Task>(workers + AHEAD);
        let tasks = Arc::new(Mutex::new(tasks));
        let shown = Arc::new(AtomicUsize::new(0));
        let times = Arc::new(Times::default());
        let mut threads = Vec::with_capacity(workers + 1);
        for _ in 0..workers {
            let (parser, tasks, shown, times) = (parser.clone(), tasks.clone(), shown.clone(), times.clone());
            let mode = options.labels;
            threads.push(std::thread::spawn(move || {
                loop {
                    let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(task) = task else { return };
                    let started = Instant::now();
                    let parsed = parse(&parser, task.records, mode, &shown);
                    times.parse_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    // The receiver is gone if the reader was dropped.
                    let _ = task.done.send(Ok(parsed));
                }
            }));
        }
        let batches = RecordBatches::new(parser, units, options.records);
        let loader_times = times.clone();
        threads.push(std::thread::spawn(move || load(batches, &queue_in, &tasks_in, &loader_times)));
        BatchReader { queue: Some(queue), threads, times }
    }

    /// Returns the seconds that the threads have spent (reading, parsing).
    pub fn times(&self) -> (f64, f64) {
        let seconds = |nanos: &AtomicU64| nanos.load(Ordering::Relaxed) as f64 / 1e9;
        (seconds(&self.times.read_ns), seconds(&self.times.parse_ns))
    }
}

impl Iterator for BatchReader {
    type Item = Result<ParsedBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.queue.as_ref()?.recv().ok()?;
        // A panic in a worker is a bug. Ending the stream early would lose samples silently.
        Some(batch.recv().expect("a parsing thread panicked"))
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

/// Reads the units and queues their batches for parsing; ends early if the reader is dropped.
fn load(
    mut batches: RecordBatches,
    queue: &SyncSender<Receiver<Result<ParsedBatch>>>,
    tasks: &SyncSender<Task>,
    times: &Times,
) {
    loop {
        let started = Instant::now();
        let next = batches.next();
        times.read_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let (done, batch) = sync_channel(1);
        match next {
            None => return,
            Some(Err(error)) => {
                let _ = done.send(Err(error));
                let _ = queue.send(batch);
                return;
            }
            Some(Ok(records)) => {
                if queue.send(batch).is_err() || tasks.send(Task { records, done }).is_err() {
                    return;
                }
            }
        }
    }
}

fn parse(parser: &Parser, records: RecordBatch, mode: LabelMode, shown: &AtomicUsize) -> ParsedBatch {
    let num_records = records.len();
    let mut builder = parser.builder(num_records);
    let (mut num_bad, mut refused) = (0, Vec::new());
    for index in 0..num_records {
        if let Err(error) = parser.parse_line(records.get(index), mode, &mut builder) {
            num_bad += 1;
            if shown.load(Ordering::Relaxed) < SHOWN_BAD {
                refused.push((index, error));
            }
        }
    }
    // In file order, because people look the records up in the file.
    refused.sort_unstable_by_key(|&(index, _)| records.offset(index));
    let bad = refused
        .into_iter()
        .take_while(|_| shown.fetch_add(1, Ordering::Relaxed) < SHOWN_BAD)
        .map(|(index, error)| format!("{}: {error}", records.location_of(index)))
        .collect();
    let parsed = ParsedBatch::of(records.name, builder.finish());
    ParsedBatch { num_records, num_bad, bad, source: Some(records), ..parsed }
}

/// Parses lines in memory; the first bad line is an error, as `line 3: what`.
pub fn parse_text(parser: &Parser, text: &[u8], mode: LabelMode) -> std::result::Result<Batch, String> {
    let mut builder = parser.builder(memchr::memchr_iter(b'\n', text).count() + 1);
    parse_text_into(parser, text, mode, &mut builder)?;
    Ok(builder.finish())
}

/// Like [`parse_text`], but appends to `into`; samples before a bad line stay in it.
pub fn parse_text_into(
    parser: &Parser,
    text: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> std::result::Result<(), String> {
    let ends = memchr::memchr_iter(b'\n', text).chain([text.len()]);
    let mut start = 0;
    for (number, end) in ends.enumerate() {
        let line = &text[start..end];
        start = end + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if !parser.is_record(line) {
            continue;
        }
        parser.parse_line(line, mode, into).map_err(|error| format!("line {}: {error}", number + 1))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::Features;
    use crate::records::Selection;
    use crate::unit::split;

    fn parser() -> Arc<Parser> {
        let json =
            r#"{"format":"slots","hash":1,"slots":[{"name":"0","pooling":"sum"}],"dense":[],"labels":["click"]}"#;
        Arc::new(Parser::new(Features::from_json(json).unwrap()).unwrap())
    }

    fn options(workers: usize) -> ReaderOptions {
        let records = RecordOptions {
            batch_size: 7,
            shuffle: true,
            seed: 3,
            skip_batches: 0,
            piece_bytes: 1 << 20,
            selection: Selection::All,
        };
        ReaderOptions { records, labels: LabelMode::Required, workers }
    }

    fn with(change: impl FnOnce(&mut RecordOptions), workers: usize) -> ReaderOptions {
        let mut options = options(workers);
        change(&mut options.records);
        options
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
        let ranges = split(size, 300).into_iter().enumerate();
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
            BatchReader::start(parser(), vec![unit], with(|records| records.seed = seed, 2))
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
    fn skipping_batches_of_the_first_unit_keeps_the_names() {
        let file = file(500, &[]);
        let names = |skip_batches| {
            BatchReader::start(parser(), units(&file), with(|records| records.skip_batches = skip_batches, 2))
                .map(|batch| batch.map(|batch| (batch.name, batch.batch.signs)).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(0)[3..], names(3)[..]);
    }

    #[test]
    fn bad_records_are_counted_and_the_first_few_are_reported_with_their_line() {
        let bad: Vec<usize> = (10..30).collect();
        let file = file(100, &bad);
        let options = with(|records| records.shuffle = false, 1);
        let batches: Vec<ParsedBatch> =
            BatchReader::start(parser(), units(&file), options).collect::<Result<_>>().unwrap();
        assert_eq!(batches.iter().map(|batch| batch.num_bad).sum::<usize>(), 20);
        assert_eq!(batches.iter().map(|batch| batch.num_records).sum::<usize>(), 100);
        let shown: Vec<String> = batches.into_iter().flat_map(|batch| batch.bad).collect();
        assert_eq!(shown.len(), SHOWN_BAD);
        assert_eq!(shown[0], format!("{}:11: slot `0`: sign `x` is not a u64", file.path().display()));
    }

    #[test]
    fn bad_records_of_a_shuffled_batch_are_reported_in_file_order() {
        let file = file(40, &(0..40).collect::<Vec<_>>());
        let size = file.path().metadata().unwrap().len();
        let unit = Unit { id: 0, path: file.path().into(), start: 0, end: size, epoch: 0, stamp: None };
        let options = with(|records| records.batch_size = 40, 1);
        let batch = BatchReader::start(parser(), vec![unit], options).next().unwrap().unwrap();
        let location = |line| format!("{}:{line}: slot `0`: sign `x` is not a u64", file.path().display());
        assert_eq!(batch.bad, (1..=SHOWN_BAD).map(location).collect::<Vec<_>>());
        assert_eq!(batch.num_bad, 40);
    }

    #[test]
    fn a_reader_can_be_dropped_at_any_time() {
        let file = file(2_000, &[]);
        let mut reader = BatchReader::start(parser(), units(&file), options(2));
        reader.next().unwrap().unwrap();
        drop(reader);
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let unit = Unit { id: 0, path: "no/such/file".into(), start: 0, end: 10, epoch: 0, stamp: None };
        let mut reader = BatchReader::start(parser(), vec![unit], options(1));
        assert!(reader.next().unwrap().unwrap_err().to_string().starts_with("no/such/file: "));
        assert!(reader.next().is_none());
    }

    #[test]
    fn a_bad_line_in_memory_is_named() {
        let parser = parser();
        assert_eq!(parse_text(&parser, b"1 0 5:0\r\n\n1 1 6:0", LabelMode::Required).unwrap().signs, [5, 6]);
        let error = parse_text(&parser, b"1 0 5:0\n\n1 1 z:0\n", LabelMode::Required).unwrap_err();
        assert_eq!(error, "line 3: slot `0`: sign `z` is not a u64");
    }
}
