//! Snapshots: a table to part files and back, as part of a checkpoint.
//!
//! Rows are in the order of their signs, so that equal tables give equal files. `docs/formats/table.md` describes the
//! bytes.

use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Scope;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::arena::GrowError;
use crate::optimizer::Optimizer;
use crate::part::{Entry, FileInfo, Kind, PartError, PartFile, PartWriter};
use crate::partition::{mix, partition_of};
use crate::rows::{Rows, TAIL_BYTES, clear_mark};
use crate::spec::TableSpec;
use crate::table::Table;
use crate::threads::share;

/// Approximate size of the pieces that the sorting threads send to the writing thread.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes at the end of Adam's state in tables with late columns.
const LATE_POWERS_BYTES: usize = 8;

/// A snapshot cannot be written or loaded.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The table has no room for its rows.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// The file belongs to another table.
    #[error("{name}: {what}")]
    Other {
        /// The file.
        name: String,
        /// The difference.
        what: String,
    },
}

/// The description of the table in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meta {
    table: TableSpec,
    row_bytes: usize,
}

impl Table {
    /// Writes every partition into one part file.
    pub fn snapshot(&self, path: &Path) -> Result<FileInfo, SnapshotError> {
        let spec = self.spec();
        let mut part = PartWriter::create(path, Kind::TableSnapshot, spec.partitions)?;
        std::thread::scope(|scope| {
            let readers = self.read_ahead(scope);
            for (partition, rows) in self.partitions().iter().enumerate() {
                part.begin_block(partition as u32)?;
                let reader = &readers[partition % readers.len()];
                let mut left = rows.len() * self.row_bytes();
                while left > 0 {
                    let piece = reader.recv().expect("a reader ends after its last piece");
                    part.write(&piece)?;
                    left -= piece.len();
                }
                part.end_block(rows.len() as u64, [0, 0])?;
            }
            Ok::<_, PartError>(())
        })?;
        Ok(part.finish(&self.snapshot_meta())?)
    }

    /// Returns the description of this table for the file.
    pub fn snapshot_meta(&self) -> serde_json::Value {
        let meta = Meta { table: self.spec().clone(), row_bytes: self.row_bytes() };
        serde_json::to_value(&meta).unwrap_or_else(|error| unreachable!("a declaration was read from JSON: {error}"))
    }

    /// Copies the rows of a partition, to be written later, so that a snapshot does not block pushes for long.
    pub fn copy_rows(&self, partition: u32) -> CopiedRows {
        let rows = &self.partitions()[partition as usize];
        let mut bytes = Vec::with_capacity(rows.len() * self.row_bytes());
        rows.copy_to(&mut bytes);
        CopiedRows { bytes, row_bytes: self.row_bytes() }
    }

    /// Starts threads that sort the rows. Thread t sorts the partitions t, t + num_threads, and so on.
    fn read_ahead<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Vec<Receiver<Vec<u8>>> {
        let num_threads = self.num_threads().min(self.partitions().len());
        let start = |thread| {
            let (sender, receiver) = sync_channel(2);
            scope.spawn(move || {
                for rows in self.partitions().iter().skip(thread).step_by(num_threads) {
                    for some in rows.sorted().chunks((PIECE_BYTES / self.row_bytes()).max(1)) {
                        let mut piece = Vec::with_capacity(some.len() * self.row_bytes());
                        some.iter().for_each(|&row| rows.write_to(row, &mut piece));
                        if sender.send(piece).is_err() {
                            // The writer failed and dropped its receiver.
                            return;
                        }
                    }
                }
            });
            receiver
        };
        (0..num_threads).map(start).collect()
    }

    /// Loads part files that together hold every partition exactly once into this empty table.
    pub fn load<P: AsRef<Path>>(&mut self, paths: &[P]) -> Result<(), SnapshotError> {
        let files: Vec<PartFile> = paths.iter().map(PartFile::open).collect::<Result<_, _>>()?;
        let all = 0..self.spec().partitions;
        self.load_files(&files, all)
    }

    /// Loads the wanted partitions, which the part files must hold exactly once, into this empty table.
    pub fn load_range<P: AsRef<Path>>(&mut self, paths: &[P], wanted: Range<u32>) -> Result<(), SnapshotError> {
        let files: Vec<PartFile> = paths.iter().map(PartFile::open).collect::<Result<_, _>>()?;
        self.load_files(&files, wanted)
    }

    fn load_files(&mut self, files: &[PartFile], wanted: Range<u32>) -> Result<(), SnapshotError> {
        assert!(self.is_empty(), "a snapshot is loaded into an empty table");
        let mut blocks: Vec<Option<Block<'_>>> = vec![None; self.partitions().len()];
        for file in files {
            file.expect_kind(Kind::TableSnapshot)?;
            let row_bytes = self.check_meta(file)?;
            let is_wanted = |(_, entry): &(usize, &Entry)| wanted.contains(&entry.partition);
            for (at, entry) in file.entries().iter().enumerate().filter(is_wanted) {
                if blocks[entry.partition as usize].replace(Block { file, at, row_bytes }).is_some() {
                    return Err(other(file.name(), format!("partition {} is in two files", entry.partition)));
                }
            }
        }
        if let Some(partition) = wanted.clone().find(|partition| blocks[*partition as usize].is_none()) {
            let name = files.first().map_or("snapshot", PartFile::name);
            return Err(other(name, format!("partition {partition} is missing")));
        }
        let (threads, row_bytes) = (self.num_threads(), self.row_bytes());
        let results = share(self.spec_and_partitions_mut().1, threads, |first, partitions| {
            let blocks = partitions.iter_mut().zip(&blocks[first..]);
            blocks
                .filter_map(|(rows, block)| Some((rows, block.as_ref()?)))
                .try_for_each(|(rows, block)| block.load(rows, row_bytes))
        });
        results.into_iter().collect()
    }

    /// Checks that the rows of the file fit this table; optimizer settings such as the step size may differ. Returns
    /// the bytes of a row of the file, which with Adam may differ by the powers of late columns.
    fn check_meta(&self, file: &PartFile) -> Result<usize, SnapshotError> {
        let meta: Meta = serde_json::from_value(file.meta().clone())
            .map_err(|error| other(file.name(), format!("meta: {error}")))?;
        let (ours, theirs) = (self.spec(), &meta.table);
        let columns = |spec: &TableSpec| {
            spec.columns.iter().map(|column| format!("{}:{}", column.name, column.width)).collect::<Vec<_>>().join(" ")
        };
        let is_adam = matches!(ours.optimizer, Optimizer::Adam { .. });
        let row_bytes = match meta.row_bytes.abs_diff(self.row_bytes()) {
            LATE_POWERS_BYTES if is_adam => self.row_bytes(),
            _ => meta.row_bytes,
        };
        let pairs = [
            ("table", ours.name.clone(), theirs.name.clone()),
            ("seed", ours.seed.to_string(), theirs.seed.to_string()),
            ("partitions", ours.partitions.to_string(), theirs.partitions.to_string()),
            ("partitions", ours.partitions.to_string(), file.num_partitions().to_string()),
            ("columns", columns(ours), columns(theirs)),
            ("optimizer", ours.optimizer.kind().into(), theirs.optimizer.kind().into()),
            ("row_bytes", self.row_bytes().to_string(), row_bytes.to_string()),
        ];
        for (what, expected, got) in pairs {
            if expected != got {
                return Err(other(file.name(), format!("{what}: expected {expected}, got {got}")));
            }
        }
        Ok(meta.row_bytes)
    }
}

/// A copy of the rows of a partition.
#[derive(Debug)]
pub struct CopiedRows {
    bytes: Vec<u8>,
    row_bytes: usize,
}

impl CopiedRows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The signs, in the order of the rows.
    pub fn signs(&self) -> Vec<u64> {
        self.bytes.chunks_exact(self.row_bytes).map(sign_of).collect()
    }

    /// Writes the first `out.len()` weights of the row at `position`.
    pub fn weights(&self, position: usize, out: &mut [f32]) {
        let values = &self.bytes[position * self.row_bytes + size_of::<u64>()..][..4 * out.len()];
        for (value, word) in out.iter_mut().zip(values.as_chunks().0) {
            *value = f32::from_le_bytes(*word);
        }
    }

    /// Writes the block of the partition, with the rows in the order of their signs.
    pub fn write(&self, part: &mut PartWriter, partition: u32) -> Result<(), PartError> {
        let mut rows: Vec<&[u8]> = self.bytes.chunks_exact(self.row_bytes).collect();
        rows.sort_unstable_by_key(|row| sign_of(row));
        part.begin_block(partition)?;
        let mut written = vec![0; self.row_bytes];
        for row in rows {
            written.copy_from_slice(row);
            clear_mark(&mut written);
            part.write(&written)?;
        }
        part.end_block(self.len() as u64, [0, 0])
    }
}

fn sign_of(row: &[u8]) -> u64 {
    row.first_chunk().map_or(0, |sign| u64::from_le_bytes(*sign))
}

/// The block of a partition in a file.
#[derive(Clone, Copy)]
struct Block<'a> {
    file: &'a PartFile,
    /// Its number in the directory.
    at: usize,
    row_bytes: usize,
}

impl Block<'_> {
    /// Loads the block into an empty partition whose rows have `row_bytes`.
    fn load(&self, rows: &mut Rows, row_bytes: usize) -> Result<(), SnapshotError> {
        self.file.verify_block(self.at)?;
        let (entry, block) = (&self.file.entries()[self.at], self.file.block(self.at));
        let reject = |what: String| Err(other(self.file.name(), format!("partition {}: {what}", entry.partition)));
        if !block.len().is_multiple_of(self.row_bytes) {
            return reject(format!("expected whole rows of {} bytes, got {} bytes", self.row_bytes, block.len()));
        }
        let num_rows = block.len() / self.row_bytes;
        if entry.num_rows != num_rows as u64 {
            return reject(format!("expected {} rows, got {num_rows}", entry.num_rows));
        }
        rows.reserve(num_rows)?;
        let (mut last, mut fitted) = (None, Vec::new());
        for bytes in block.chunks_exact(self.row_bytes) {
            let sign = bytes.first_chunk().map_or(0, |sign| u64::from_le_bytes(*sign));
            if last.is_some_and(|last| last >= sign)
                || partition_of(sign, self.file.num_partitions()) != entry.partition
            {
                return reject(format!("sign {sign} is out of order or in the wrong partition"));
            }
            last = Some(sign);
            let row = rows.insert(sign, mix(sign))?;
            if row_bytes == self.row_bytes {
                rows.read_from(row, bytes);
            } else {
                fit(bytes, row_bytes, &mut fitted);
                rows.read_from(row, &fitted);
            }
        }
        Ok(())
    }
}

/// Removes the powers of the late columns from a row of Adam, or adds them as copies of the row's powers.
fn fit(bytes: &[u8], row_bytes: usize, fitted: &mut Vec<u8>) {
    let (values, tail) = bytes.split_at(bytes.len() - TAIL_BYTES);
    let end = row_bytes - TAIL_BYTES;
    fitted.clear();
    fitted.extend_from_slice(&values[..end.min(values.len())]);
    if fitted.len() < end {
        fitted.extend_from_slice(&values[values.len() - LATE_POWERS_BYTES..]);
    }
    fitted.extend_from_slice(tail);
}

fn other(name: impl ToString, what: String) -> SnapshotError {
    SnapshotError::Other { name: name.to_string(), what }
}

/// Fuzz target: loads any bytes as a snapshot, also with corrected checksums.
#[doc(hidden)]
pub fn fuzz_load(bytes: &[u8]) {
    let mut repaired = bytes.to_vec();
    crate::part::repair_checksums(&mut repaired);
    for bytes in [bytes.to_vec(), repaired] {
        let Ok(file) = PartFile::from_bytes("fuzz", bytes) else { continue };
        let Ok(meta) = serde_json::from_value::<Meta>(file.meta().clone()) else { continue };
        if let Ok(mut table) = Table::new(meta.table)
            && table.load_files(&[file], 0..table.spec().partitions).is_ok()
        {
            let _ = table.get(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use tempfile::tempdir;

    use super::*;
    use crate::push::Push;
    use crate::spec::test_spec;
    use crate::table::Handles;

    fn filled(partitions: u32, signs: &[u64]) -> Table {
        let mut table = Table::new(test_spec(partitions)).unwrap();
        for (i, &sign) in signs.iter().enumerate() {
            let (mut out, mut handles) = ([0.0; 4], Handles::default());
            table.pull(&[sign], &mut out, &mut handles);
            let gradients = [i as f32 * 0.01; 4];
            let counts = &[(2, 1)];
            table
                .push(Push {
                    signs: &[sign],
                    handles: Some(&handles),
                    gradients: &gradients,
                    counts,
                    seen: 3,
                    is_increment: false,
                })
                .unwrap();
        }
        table
    }

    proptest! {
        #[test]
        fn a_loaded_snapshot_equals_the_table(signs in prop::collection::hash_set(any::<u64>(), 0..200)) {
            let dir = tempdir().unwrap();
            let signs: Vec<u64> = signs.into_iter().collect();
            let table = filled(5, &signs);
            table.snapshot(&dir.path().join("a")).unwrap();
            let mut loaded = Table::new(test_spec(5)).unwrap();
            loaded.load(&[dir.path().join("a")]).unwrap();
            for &sign in &signs {
                prop_assert_eq!(table.get(sign), loaded.get(sign));
            }
            loaded.snapshot(&dir.path().join("b")).unwrap();
            prop_assert_eq!(fs::read(dir.path().join("a")).unwrap(), fs::read(dir.path().join("b")).unwrap());
        }

        #[test]
        fn hostile_bytes_give_errors(flips in prop::collection::vec((0usize..4000, any::<u8>()), 1..20)) {
            let dir = tempdir().unwrap();
            filled(2, &[1, 2, 3, u64::MAX]).snapshot(&dir.path().join("a")).unwrap();
            let mut bytes = fs::read(dir.path().join("a")).unwrap();
            let length = bytes.len();
            for (at, value) in flips {
                bytes[at % length] = value;
            }
            fuzz_load(&bytes);
        }
    }

    #[test]
    fn partitions_copied_one_by_one_give_the_same_snapshot() {
        let dir = tempdir().unwrap();
        let table = filled(5, &(0..300).collect::<Vec<u64>>());
        table.snapshot(&dir.path().join("whole")).unwrap();
        let path = dir.path().join("copied");
        let mut part = PartWriter::create(&path, Kind::TableSnapshot, 5).unwrap();
        for partition in 0..5 {
            table.copy_rows(partition).write(&mut part, partition).unwrap();
        }
        part.finish(&table.snapshot_meta()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), fs::read(dir.path().join("whole")).unwrap());
        let mut some = Table::new(test_spec(5)).unwrap();
        some.load_range(&[&path], 1..3).unwrap();
        assert_eq!(some.len(), table.copy_rows(1).len() + table.copy_rows(2).len());
        let error = Table::new(test_spec(5)).unwrap().load_range(&[&path, &path], 1..3).unwrap_err();
        assert!(error.to_string().ends_with("partition 1 is in two files"), "{error}");
    }

    #[test]
    fn flipped_bits_and_truncated_files_are_rejected() {
        let dir = tempdir().unwrap();
        let path = dir.path().join("a");
        filled(2, &[1, 2, 3]).snapshot(&path).unwrap();
        let good = fs::read(&path).unwrap();
        let rejected = |bytes: Vec<u8>| match PartFile::from_bytes("a", bytes) {
            Err(_) => true,
            Ok(file) => Table::new(test_spec(2)).unwrap().load_files(&[file], 0..2).is_err(),
        };
        assert!(!rejected(good.clone()));
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(rejected(bytes), "bit {bit}");
        }
        for length in 0..good.len() {
            assert!(rejected(good[..length].to_vec()), "length {length}");
        }
    }

    #[test]
    fn a_snapshot_of_another_table_is_rejected() {
        let dir = tempdir().unwrap();
        let path = dir.path().join("a");
        filled(2, &[1]).snapshot(&path).unwrap();
        let error = |change: fn(&mut TableSpec)| {
            let mut spec = test_spec(2);
            change(&mut spec);
            Table::new(spec).unwrap().load(&[&path]).unwrap_err().to_string()
        };
        assert!(error(|spec| spec.seed = 8).ends_with("a: seed: expected 8, got 7"));
        assert!(error(|spec| spec.partitions = 3).ends_with("partitions: expected 3, got 2"));
        assert!(
            error(|spec| spec.columns[1].width = 5).ends_with("columns: expected wide:1 deep:5, got wide:1 deep:3")
        );
        assert!(error(|spec| spec.name = "other".into()).ends_with("a: table: expected other, got main"));
        let row_adagrad = |spec: &mut TableSpec| {
            spec.optimizer = Optimizer::RowAdagrad { learning_rate: 0.1, initial_accumulator: 0.25, epsilon: 1e-8 };
        };
        assert!(error(row_adagrad).ends_with("a: optimizer: expected row_adagrad, got adagrad"));
        let mut table = Table::new(test_spec(2)).unwrap();
        assert!(table.load(&[&path, &path]).unwrap_err().to_string().contains("partition 0 is in two files"));
    }

    /// Loads a file of 2 partitions with blocks of (partition, claimed number of rows, bytes).
    fn load_blocks(blocks: &[(u32, u64, Vec<u8>)]) -> Result<(), String> {
        let dir = tempdir().unwrap();
        let path = dir.path().join("a");
        let mut table = Table::new(test_spec(2)).unwrap();
        let mut part = PartWriter::create(&path, Kind::TableSnapshot, 2).unwrap();
        for (partition, num_rows, bytes) in blocks {
            part.begin_block(*partition).unwrap();
            part.write(bytes).unwrap();
            part.end_block(*num_rows, [0, 0]).unwrap();
        }
        let meta = Meta { table: test_spec(2), row_bytes: table.row_bytes() };
        part.finish(&serde_json::to_value(&meta).unwrap()).unwrap();
        table.load(&[&path]).map_err(|error| {
            error.to_string().strip_prefix(&format!("{}: ", path.display())).expect("the file is named").into()
        })
    }

    fn rows_of_zeroes(signs: &[u64]) -> Vec<u8> {
        let row_bytes = Table::new(test_spec(2)).unwrap().row_bytes();
        signs.iter().flat_map(|sign| [&sign.to_le_bytes()[..], &vec![0; row_bytes - 8]].concat()).collect()
    }

    #[test]
    fn rows_out_of_order_or_in_the_wrong_partition_are_rejected() {
        let share = |partition| (0..).filter(|&sign| partition_of(sign, 2) == partition).take(2).collect::<Vec<u64>>();
        let (first, second) = (share(0), share(1));
        let load = |signs: &[u64]| load_blocks(&[(0, signs.len() as u64, rows_of_zeroes(signs)), (1, 0, Vec::new())]);
        assert_eq!(load(&first), Ok(()));
        let rejected = |sign: u64| Err(format!("partition 0: sign {sign} is out of order or in the wrong partition"));
        assert_eq!(load(&second), rejected(second[0]), "wrong partition");
        assert_eq!(load(&[first[0], first[0]]), rejected(first[0]), "twice");
        assert_eq!(load(&[first[1], first[0]]), rejected(first[0]), "not sorted");
    }

    #[test]
    fn a_missing_partition_is_named() {
        assert_eq!(load_blocks(&[(0, 0, Vec::new())]), Err("partition 1 is missing".into()));
        assert_eq!(load_blocks(&[(1, 0, Vec::new())]), Err("partition 0 is missing".into()));
    }

    #[test]
    fn the_directory_must_count_the_rows_of_the_block() {
        let load = |num_rows, bytes: &[u8]| load_blocks(&[(0, num_rows, bytes.into()), (1, 0, Vec::new())]);
        let sign = (0..).find(|&sign| partition_of(sign, 2) == 0).unwrap();
        let one = rows_of_zeroes(&[sign]);
        assert_eq!(load(1, &one), Ok(()));
        assert_eq!(load(2, &one), Err("partition 0: expected 2 rows, got 1".into()));
        assert_eq!(load(0, &one), Err("partition 0: expected 0 rows, got 1".into()));
        assert_eq!(load(1, &one[1..]), Err("partition 0: expected whole rows of 50 bytes, got 49 bytes".into()));
    }
}
