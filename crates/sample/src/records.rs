//! Divides units into named batches of records, before parsing.

use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::lines::{Pieces, UnitLines};
use crate::parser::Parser;
use crate::reader::{BatchName, ReadError};
use crate::unit::Unit;

/// The division of units into batches.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// Records per batch; the last batch of a piece may have fewer.
    pub batch_size: usize,
    /// Whether to permute the records of a piece by (seed, epoch, unit, piece).
    pub shuffle: bool,
    /// Seed of the permutation.
    pub seed: u64,
    /// Number of batches of the first unit to skip.
    pub skip_batches: usize,
    /// Approximate size of the pieces of a compressed file.
    pub piece_bytes: usize,
    /// The records to read.
    pub selection: Selection,
}

/// The records to read: all, or one side of a split that depends on the record alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Selection {
    /// All.
    All,
    /// A share of the records, chosen by their hash, or the rest.
    Ratio {
        /// The share that is held out.
        ratio: f64,
        /// Whether to read the held-out records instead of the rest.
        held_out: bool,
    },
    /// The records from a time on, or the earlier ones.
    Time {
        /// Seconds since 1970.
        from: f64,
        /// Whether to read the held-out records instead of the rest.
        held_out: bool,
    },
}

impl Selection {
    /// Whether a record is selected. A record without a time counts as earlier; it is reported as bad when it is parsed.
    fn includes(self, parser: &Parser, record: &[u8]) -> bool {
        match self {
            Selection::All => true,
            Selection::Ratio { ratio, held_out } => Selection::is_held_out(xxh3_64(record), ratio) == held_out,
            Selection::Time { from, held_out } => parser.time_of(record).is_some_and(|time| time >= from) == held_out,
        }
    }

    /// Whether a record with this hash is in the held-out share.
    pub fn is_held_out(hash: u64, ratio: f64) -> bool {
        // 53 bits, the precision of an f64.
        ((hash >> 11) as f64) < ratio * (1u64 << 53) as f64
    }
}

/// The records of a batch before parsing.
#[derive(Debug, Clone)]
pub struct RecordBatch {
    /// Name of the batch.
    pub name: BatchName,
    /// Unit of the batch.
    pub unit: Arc<Unit>,
    lines: Arc<UnitLines>,
    records: Range<usize>,
}

impl RecordBatch {
    /// Number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The bytes of a record.
    pub fn get(&self, index: usize) -> &[u8] {
        self.lines.record(self.records.start + index)
    }

    /// Offset in the file on disk after this batch, for progress.
    pub fn file_bytes(&self) -> u64 {
        self.lines.file_bytes(self.records.end)
    }

    /// Offset of a record in its decompressed file.
    pub fn offset(&self, index: usize) -> u64 {
        self.lines.file_offset(self.records.start + index)
    }

    /// Returns the location of a record, as `file:line`.
    pub fn location_of(&self, index: usize) -> String {
        let (path, index) = (&self.unit.path, self.records.start + index);
        match self.lines.line_number(path, index) {
            Ok(line) => format!("{}:{line}", path.display()),
            Err(_) => format!("{} at byte {}", path.display(), self.lines.file_offset(index)),
        }
    }

    /// Returns the location of all records, as `file: lines 3, 8, 9 and 509 more up to 1530`.
    pub fn location(&self) -> String {
        const SHOWN: usize = 5;
        let mut indices: Vec<usize> = self.records.clone().collect();
        indices.sort_unstable_by_key(|&index| self.lines.file_offset(index));
        let path = &self.unit.path;
        let line = |index: &usize| {
            self.lines.line_number(path, *index).map_or_else(|_| "?".to_owned(), |line| line.to_string())
        };
        let mut text = format!("{}: lines ", path.display());
        let shown: Vec<String> = indices.iter().take(SHOWN).map(line).collect();
        text.push_str(&shown.join(", "));
        if let (Some(last), true) = (indices.last(), indices.len() > SHOWN) {
            // Writing to a string does not fail.
            let _ = write!(text, " and {} more up to {}", indices.len() - SHOWN, line(last));
        }
        text
    }
}

/// An iterator over the batches of units.
#[derive(Debug)]
pub struct RecordBatches {
    parser: Arc<Parser>,
    units: std::vec::IntoIter<Unit>,
    options: RecordOptions,
    open: Option<OpenUnit>,
}

/// The unit that is being read.
#[derive(Debug)]
struct OpenUnit {
    unit: Arc<Unit>,
    pieces: Pieces,
    num_pieces: u64,
    lines: Option<Arc<UnitLines>>,
    /// The next record of the piece.
    next_record: usize,
    next_index: u32,
}

impl RecordBatches {
    /// Divides `units` into batches, in the given order.
    pub fn new(parser: Arc<Parser>, units: Vec<Unit>, options: RecordOptions) -> Self {
        RecordBatches { parser, units: units.into_iter(), options, open: None }
    }

    fn next_batch(&mut self) -> std::io::Result<Option<RecordBatch>> {
        let Some(open) = &mut self.open else { return Ok(None) };
        loop {
            let Some(lines) = open.lines.as_ref().filter(|lines| open.next_record < lines.num_records()) else {
                let (parser, selection) = (&self.parser, self.options.selection);
                let is_record = |line: &[u8]| parser.is_record(line) && selection.includes(parser, line);
                let Some(mut lines) = open.pieces.next_piece(is_record)? else { return Ok(None) };
                if self.options.shuffle {
                    lines.shuffle(self.options.seed, open.unit.epoch, open.unit.id, open.num_pieces);
                }
                open.num_pieces += 1;
                open.lines = Some(Arc::new(lines));
                open.next_record = 0;
                continue;
            };
            let records = open.next_record..lines.num_records().min(open.next_record + self.options.batch_size);
            open.next_record = records.end;
            let name = BatchName { unit: open.unit.id, index: open.next_index };
            open.next_index += 1;
            if self.options.skip_batches > 0 {
                self.options.skip_batches -= 1;
                continue;
            }
            return Ok(Some(RecordBatch { name, unit: open.unit.clone(), lines: lines.clone(), records }));
        }
    }
}

impl Iterator for RecordBatches {
    type Item = Result<RecordBatch, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_batch() {
                Ok(Some(batch)) => return Some(Ok(batch)),
                Err(source) => {
                    let path = self.open.take().map_or_else(Default::default, |open| open.unit.path.clone());
                    self.units = Vec::new().into_iter();
                    return Some(Err(ReadError { path, source }));
                }
                Ok(None) => {}
            }
            if self.open.take().is_some() {
                self.options.skip_batches = 0;
            }
            let unit = self.units.next()?;
            let pieces = match Pieces::open(&unit, self.options.piece_bytes) {
                Ok(pieces) => pieces,
                Err(source) => {
                    self.units = Vec::new().into_iter();
                    return Some(Err(ReadError { path: unit.path, source }));
                }
            };
            self.open = Some(OpenUnit {
                unit: Arc::new(unit),
                pieces,
                num_pieces: 0,
                lines: None,
                next_record: 0,
                next_index: 0,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::Features;

    fn parser() -> Arc<Parser> {
        let json = r#"{"format":"csv","hash":1,"slots":[{"name":"a","pooling":"sum"}],"dense":[],"labels":["click"],
            "columns":{"names":["click","a","at"],"header":true,"time":"at"}}"#;
        Arc::new(Parser::new(Features::from_json(json).unwrap()).unwrap())
    }

    fn file(compress: bool) -> tempfile::NamedTempFile {
        let mut text = b"click,a,at\n".to_vec();
        for number in 0..1000 {
            writeln!(text, "0,{number},{}", 1_000_000 + number).unwrap();
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes = if compress { zstd::encode_all(text.as_slice(), 1).unwrap() } else { text };
        file.write_all(&bytes).unwrap();
        file
    }

    fn read(file: &tempfile::NamedTempFile, change: impl FnOnce(&mut RecordOptions)) -> Vec<(u32, Vec<String>)> {
        let end = file.path().metadata().unwrap().len();
        let unit = Unit { id: 4, path: file.path().into(), start: 0, end, epoch: 0, stamp: None };
        let mut options = RecordOptions {
            batch_size: 64,
            shuffle: true,
            seed: 3,
            skip_batches: 0,
            piece_bytes: 4096,
            selection: Selection::All,
        };
        change(&mut options);
        let batches = RecordBatches::new(parser(), vec![unit], options).map(Result::unwrap);
        batches
            .map(|batch| {
                let text = |index| String::from_utf8(batch.get(index).to_vec()).unwrap();
                (batch.name.index, (0..batch.len()).map(text).collect())
            })
            .collect()
    }

    #[test]
    fn skipping_batches_keeps_names_and_records() {
        for compress in [false, true] {
            let file = file(compress);
            let all = read(&file, |_| {});
            assert_eq!(all.iter().map(|(_, records)| records.len()).sum::<usize>(), 1000);
            for skip in [1, 7, 15] {
                assert_eq!(read(&file, |options| options.skip_batches = skip), all[skip..]);
            }
        }
    }

    #[test]
    fn the_two_sides_of_a_split_together_have_all_records() {
        let file = file(true);
        let side = |selection| {
            let batches = read(&file, |options| options.selection = selection);
            batches.into_iter().flat_map(|(_, records)| records).collect::<Vec<_>>()
        };
        for (held, rest) in [
            (Selection::Ratio { ratio: 0.2, held_out: true }, Selection::Ratio { ratio: 0.2, held_out: false }),
            (
                Selection::Time { from: 1_000_800.0, held_out: true },
                Selection::Time { from: 1_000_800.0, held_out: false },
            ),
        ] {
            let (held, mut both) = (side(held), side(rest));
            assert!((150..=250).contains(&held.len()), "{}", held.len());
            both.extend(held);
            both.sort();
            both.dedup();
            assert_eq!(both.len(), 1000);
        }
        let late = side(Selection::Time { from: 1_000_800.0, held_out: true });
        assert!(late.len() == 200 && late.contains(&"0,800,1000800".to_owned()));
    }

    #[test]
    fn locations_name_the_file_and_lines() {
        let file = file(false);
        let end = file.path().metadata().unwrap().len();
        let unit = Unit { id: 4, path: file.path().into(), start: 0, end, epoch: 0, stamp: None };
        let options = RecordOptions {
            batch_size: 8,
            shuffle: false,
            seed: 3,
            skip_batches: 1,
            piece_bytes: 4096,
            selection: Selection::All,
        };
        let batch = RecordBatches::new(parser(), vec![unit], options).next().unwrap().unwrap();
        let expected = format!("{}: lines 10, 11, 12, 13, 14 and 3 more up to 17", file.path().display());
        assert_eq!(batch.location(), expected);
        assert_eq!(batch.location_of(0), format!("{}:10", file.path().display()));
    }
}
