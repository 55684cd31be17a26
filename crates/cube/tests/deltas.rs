//! Deltas end to end: chains of versions compared with a `HashMap`, damaged files and crafted files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elasticrec_cube::{
    Changes, Column, Cube, CubeError, CubeWriter, DeltaFile, DeltaWriter, RowType, View, fuzz_delta, repair_checksums,
};
use elasticrec_table::part::{Kind, PartFile, PartWriter};
use elasticrec_table::partition::{mix, partition_of};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;
use support::{any_sign, unmix};
use tempfile::TempDir;

const WIDTH: usize = 3;
type Row = [f32; WIDTH];
/// The rows of a version as a map, for comparison.
type Model = BTreeMap<u64, Row>;

fn columns() -> Vec<Column> {
    vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: 2 }]
}

/// A row that contains its version and sign, and that every row type represents exactly.
fn row_of(sign: u64, version: usize) -> Row {
    [version as f32 + 1.0, (sign % 127) as f32, 127.0]
}

fn write_base(path: &Path, rows: &Model, row_type: RowType, num_partitions: u32) {
    let mut writer = CubeWriter::create(path, columns(), row_type, num_partitions).unwrap();
    for partition in 0..num_partitions {
        let own: Vec<u64> =
            rows.keys().filter(|sign| partition_of(**sign, num_partitions) == partition).copied().collect();
        writer.write_partition(partition, &own, |i, values| values.copy_from_slice(&rows[&own[i]])).unwrap();
    }
    writer.finish().unwrap();
}

/// What changes from one version to the next.
#[derive(Clone, Debug, Default)]
struct Delta {
    rows: Model,
    removed: BTreeSet<u64>,
    whole: BTreeSet<u32>,
}

impl Delta {
    fn apply(&self, model: &mut Model, num_partitions: u32) {
        model.retain(|sign, _| !self.whole.contains(&partition_of(*sign, num_partitions)));
        model.retain(|sign, _| !self.removed.contains(sign));
        model.extend(&self.rows);
    }

    /// Writes the partitions that are equal to `part` modulo `num_parts`; returns the size of the file.
    fn write(&self, path: &Path, row_type: RowType, num_partitions: u32, [part, num_parts]: [u32; 2]) -> u64 {
        let mut writer = DeltaWriter::create(path, columns(), row_type, num_partitions).unwrap();
        for partition in (0..num_partitions).filter(|partition| partition % num_parts == part) {
            let own = |sign: &&u64| partition_of(**sign, num_partitions) == partition;
            let signs: Vec<u64> = self.rows.keys().filter(own).copied().collect();
            let removed: Vec<u64> = self.removed.iter().filter(own).copied().collect();
            let is_whole = self.whole.contains(&partition);
            let changes = Changes { signs: &signs, removed: &removed, is_whole };
            writer.add(partition, changes, |i, values| values.copy_from_slice(&self.rows[&signs[i]])).unwrap();
        }
        writer.finish().unwrap().bytes
    }
}

fn assert_is(view: &View, model: &Model, others: &[u64], num_partitions: u32) {
    let is_held = |sign: &u64| view.partitions().contains(&partition_of(*sign, num_partitions));
    let held: Model = model.iter().filter(|(sign, _)| is_held(sign)).map(|(sign, row)| (*sign, *row)).collect();
    assert_eq!(view.num_rows(), held.len() as u64);
    let signs: Vec<u64> = others.iter().chain(model.keys()).chain(others).copied().collect();
    let mut values = vec![f32::NAN; signs.len() * WIDTH];
    let hits = signs.iter().filter(|sign| held.contains_key(sign)).count();
    assert_eq!(view.lookup(&signs, &mut values), hits);
    let mut rows = vec![7; signs.len() * view.row_bytes()];
    let mut present = vec![u64::MAX; signs.len().div_ceil(64)];
    assert_eq!(view.stored_rows(&signs, &mut rows, &mut present), hits);
    for (i, sign) in signs.iter().enumerate() {
        let expected = held.get(sign).copied();
        assert_eq!(values[i * WIDTH..][..WIDTH], expected.unwrap_or_default(), "{sign}");
        assert_eq!(present[i / 64] >> (i % 64) & 1 == 1, expected.is_some(), "{sign}");
        let stored = &rows[i * view.row_bytes()..][..view.row_bytes()];
        assert_eq!(view.get(*sign).is_some(), expected.is_some(), "{sign}");
        assert_eq!(stored, view.get(*sign).unwrap_or(&vec![0; view.row_bytes()]), "{sign}");
    }
    let mut all = Model::new();
    for partition in 0..num_partitions {
        for (sign, row) in view.rows_of(partition) {
            let mut values = [0.0; WIDTH];
            view.codec().decode(row, &mut values);
            assert_eq!(partition_of(sign, num_partitions), partition);
            assert!(all.insert(sign, values).is_none(), "{sign} is repeated");
        }
    }
    assert_eq!(all, held);
}

/// What a delta does with a sign.
#[derive(Clone, Copy, Debug)]
enum Action {
    Keep,
    Change,
    Remove,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    // Deltas of very different sizes, so that some of their segments are merged.
    (0..100_u32).prop_flat_map(|keep| {
        let action = prop_oneof![1 + keep => Just(Action::Keep), 4 => Just(Action::Change), 2 => Just(Action::Remove)];
        prop::collection::vec(action, 120)
    })
}

/// A base and the deltas that follow it.
#[derive(Clone, Debug)]
struct VersionChain {
    /// All signs that occur.
    universe: Vec<u64>,
    num_partitions: u32,
    row_type: RowType,
    /// Whether each sign has a row in the base.
    base: Vec<bool>,
    /// For each delta the action on each sign, the partitions that it replaces as a whole, and the number of part files.
    deltas: Vec<(Vec<Action>, BTreeSet<u32>, u32)>,
    /// The partitions of a view that does not have all.
    range: Range<u32>,
}

fn version_chains() -> impl Strategy<Value = VersionChain> {
    (prop_oneof![Just(1_u32), 2..6_u32, Just(64)], prop::sample::select(RowType::ALL.to_vec())).prop_flat_map(
        |(num_partitions, row_type)| {
            let whole = prop::collection::btree_set(0..num_partitions, 0..2);
            let whole = prop_oneof![3 => Just(BTreeSet::new()), 1 => whole];
            let universe = prop::collection::hash_set(any_sign(), 120);
            let deltas = prop::collection::vec((actions(), whole, 1..4_u32), 1..14);
            let range = (0..=num_partitions, 0..=num_partitions).prop_map(|(a, b)| a.min(b)..a.max(b));
            let base = prop::collection::vec(any::<bool>(), 120);
            (universe, base, deltas, range).prop_map(move |(universe, base, deltas, range)| VersionChain {
                universe: universe.into_iter().collect(),
                num_partitions,
                row_type,
                base,
                deltas,
                range,
            })
        },
    )
}

impl VersionChain {
    fn delta(&self, version: usize) -> (Delta, u32) {
        let (actions, whole, num_parts) = &self.deltas[version];
        let mut delta = Delta { whole: whole.clone(), ..Delta::default() };
        for (sign, action) in self.universe.iter().zip(actions) {
            match action {
                Action::Change => drop(delta.rows.insert(*sign, row_of(*sign, version + 1))),
                Action::Remove => drop(delta.removed.insert(*sign)),
                Action::Keep => (),
            }
        }
        (delta, *num_parts)
    }

    /// Writes and applies the chain, and compares every version with a map.
    fn check(&self) {
        let dir = TempDir::new().unwrap();
        let n = self.num_partitions;
        let chosen = self.universe.iter().zip(&self.base).filter(|(_, has_row)| **has_row);
        let mut model: Model = chosen.map(|(sign, _)| (*sign, row_of(*sign, 0))).collect();
        let base = dir.path().join("base");
        write_base(&base, &model, self.row_type, n);
        let base = std::slice::from_ref(&base);
        let mut view = View::of_base(Arc::new(Cube::open(base).unwrap()));
        let mut part = View::of_base(Arc::new(Cube::load(base, Some(self.range.clone())).unwrap()));
        let mut versions = vec![(model.clone(), view.clone(), part.clone())];
        for version in 0..self.deltas.len() {
            let (delta, num_parts) = self.delta(version);
            let open = |i| {
                let path = dir.path().join(format!("{version}-{i}"));
                delta.write(&path, self.row_type, n, [i, num_parts]);
                DeltaFile::open(path).unwrap()
            };
            let parts: Vec<DeltaFile> = (0..num_parts).map(open).collect();
            delta.apply(&mut model, n);
            view = view.with_delta(&parts).unwrap();
            part = part.with_delta(&parts).unwrap();
            versions.push((model.clone(), view.clone(), part.clone()));
        }
        // Later versions have not changed earlier ones.
        for (model, view, part) in &versions {
            assert_is(view, model, &self.universe, n);
            assert_is(part, model, &self.universe, n);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn versions_equal_a_map(chain in version_chains()) {
        chain.check();
    }

    #[test]
    fn hostile_bytes_never_panic(
        signs in prop::collection::btree_set(any_sign(), 0..60),
        edits in prop::collection::vec((any::<Index>(), any::<u8>()), 0..10),
        truncation in prop::option::weighted(0.1, any::<Index>()),
    ) {
        let mut bytes = delta_bytes(&small_delta(&signs), 4);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(length) = truncation {
            bytes.truncate(length.index(bytes.len()));
        }
        fuzz_delta(&bytes);
    }
}

/// Returns a delta that removes every third sign, changes the others, and replaces partition 0 as a whole.
fn small_delta(signs: &BTreeSet<u64>) -> Delta {
    let mut delta = Delta { whole: BTreeSet::from([0]), ..Delta::default() };
    for (i, sign) in signs.iter().enumerate() {
        if i % 3 == 2 {
            delta.removed.insert(*sign);
        } else {
            delta.rows.insert(*sign, row_of(*sign, 0));
        }
    }
    delta
}

fn delta_bytes(delta: &Delta, num_partitions: u32) -> Vec<u8> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("delta");
    delta.write(&path, RowType::F32, num_partitions, [0, 1]);
    std::fs::read(path).unwrap()
}

fn open_bytes(bytes: Vec<u8>) -> Result<DeltaFile, CubeError> {
    DeltaFile::from_part(PartFile::from_bytes("delta", bytes)?)
}

fn message<T>(result: Result<T, CubeError>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn every_flipped_bit_and_every_truncation_is_rejected() {
    let bytes = delta_bytes(&small_delta(&(0..9).collect()), 4);
    open_bytes(bytes.clone()).unwrap();
    let part = PartFile::from_bytes("delta", bytes.clone()).unwrap();
    let (num_rows, [num_removed, num_whole]) = (part.entries()[0].num_rows, part.entries()[0].aux);
    // Removed signs in partition 0 are not in the file, because the partition is replaced as a whole.
    assert!((num_rows, num_whole) == (6, 1) && (1..=3).contains(&num_removed));
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(open_bytes(damaged).is_err(), "bit {bit}");
    }
    for length in 0..bytes.len() {
        let error = message(open_bytes(bytes[..length].to_vec()));
        assert!(error.contains("the file is truncated"), "{length}: {error}");
    }
}

/// Crafted bytes with correct checksums: (position in the file, new bytes, the error).
#[test]
fn crafted_changes_are_rejected() {
    // Each quarter of the mixed signs is one of the four partitions.
    let sign = |quarter: u64, i: u64| unmix((quarter << 62) + i);
    let mut delta = Delta { whole: BTreeSet::from([1]), ..Delta::default() };
    delta.rows.extend([(sign(0, 1), row_of(0, 0)), (sign(0, 5), row_of(1, 0)), (sign(2, 1), row_of(2, 0))]);
    delta.removed.extend([sign(0, 2), sign(2, 7)]);
    let bytes = delta_bytes(&delta, 4);
    let record = 8 + 4 * WIDTH;
    let (rows, removed) = (64, 64 + 3 * record);
    let whole = removed + 2 * 8;
    let eight = |value: u64| value.to_le_bytes().to_vec();
    let four = |value: u32| value.to_le_bytes().to_vec();
    for (at, value, expected) in [
        (rows, eight(sign(0, 5)), "is out of order or repeated"),
        (rows + record, eight(sign(0, 0)), "is out of order or repeated"),
        (removed, eight(sign(3, 0)), "removed: sign"),
        (removed, eight(sign(0, 5)), "is both changed and removed"),
        (removed, eight(sign(1, 0)), "is removed from partition 1, which is replaced as a whole"),
        (whole, four(4), "whole partitions: out of order or beyond the number of partitions"),
        (whole, four(u32::MAX), "whole partitions: out of order or beyond the number of partitions"),
    ] {
        let mut crafted = bytes.clone();
        crafted[at..at + value.len()].copy_from_slice(&value);
        repair_checksums(&mut crafted);
        let error = message(open_bytes(crafted.clone()));
        assert!(error.starts_with("delta: ") && error.contains(expected), "{error}");
        fuzz_delta(&crafted);
    }
    // The counts in the directory, and the partition of the block.
    let entry = bytes.len() - 128;
    for (at, value) in [(0, 1), (16, 2), (16, 4), (23, 255), (48, 1), (48, 3), (55, 255), (56, 0), (56, 3), (63, 255)] {
        let mut crafted = bytes.clone();
        crafted[entry + at] = value;
        repair_checksums(&mut crafted);
        let error = message(open_bytes(crafted.clone()));
        assert!(error.contains("expected a block of") || error.contains("expected block 0, got 1"), "{error}");
        fuzz_delta(&crafted);
    }
}

#[test]
fn files_of_other_kinds_are_rejected_with_their_name() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("base");
    write_base(&path, &Model::new(), RowType::F32, 1);
    assert!(message(DeltaFile::open(&path)).ends_with("base: expected kind 4 (cube delta), got 2"));
    let delta = dir.path().join("delta");
    Delta::default().write(&delta, RowType::F32, 1, [0, 1]);
    assert!(message(Cube::open(&[delta])).ends_with("delta: expected kind 2 (cube), got 4"));
    let empty = dir.path().join("empty");
    PartWriter::create(&empty, Kind::CubeDelta, 1).unwrap().finish(&json!({})).unwrap();
    assert!(message(DeltaFile::open(&empty)).ends_with("empty: expected 1 block, got 0"));
    assert!(matches!(DeltaFile::open(dir.path().join("none")), Err(CubeError::Part(_))));
}

#[test]
fn the_writer_rejects_contradictory_changes() {
    let dir = TempDir::new().unwrap();
    let mut writer = DeltaWriter::create(dir.path().join("delta"), columns(), RowType::F32, 256).unwrap();
    let mut add = |partition, signs: &[u64], removed: &[u64]| {
        let changes = Changes { signs, removed, is_whole: false };
        message(writer.add(partition, changes, |_, _| ()))
    };
    assert_eq!(add(180, &[1, 1], &[]), "partition 180: sign 1 is repeated");
    assert_eq!(add(181, &[], &[1]), "partition 181: sign 1 belongs to partition 180");
    assert!(add(181, &[], &[]).ends_with("delta: expected a partition from 182 to below 256, got 181"));
    assert!(add(256, &[], &[]).ends_with("delta: expected a partition from 182 to below 256, got 256"));
    let mut writer = DeltaWriter::create(dir.path().join("other"), columns(), RowType::F32, 256).unwrap();
    let both = Changes { signs: &[1], removed: &[1], is_whole: false };
    assert_eq!(message(writer.add(180, both, |_, _| ())), "partition 180: sign 1 is both changed and removed");
}

#[test]
fn a_delta_is_applied_only_to_a_base_with_the_same_meta() {
    let dir = TempDir::new().unwrap();
    let base = dir.path().join("base");
    let rows: Model = (0..100).map(|sign| (sign, row_of(sign, 0))).collect();
    write_base(&base, &rows, RowType::F32, 4);
    let view = View::of_base(Arc::new(Cube::open(&[base]).unwrap()));
    let write = |name: &str, row_type, num_partitions, which| {
        let path = dir.path().join(name);
        let delta = Delta { rows: rows.clone(), ..Delta::default() };
        delta.write(&path, row_type, num_partitions, which);
        DeltaFile::open(path).unwrap()
    };
    let other_type = message(view.with_delta(&[write("f16", RowType::F16, 4, [0, 1])]));
    assert!(
        other_type.ends_with("f16: expected the columns and row type of the version that it changes, got other values")
    );
    let other_number = message(view.with_delta(&[write("five", RowType::F32, 5, [0, 1])]));
    assert!(
        other_number
            .ends_with("five: expected the number of partitions of the version that it changes, got other values")
    );
    let doubled =
        message(view.with_delta(&[write("all", RowType::F32, 4, [0, 1]), write("odd", RowType::F32, 4, [1, 2])]));
    assert!(doubled.contains("odd: partition 1 is also in "), "{doubled}");

    // A delta with changes adds a segment, a delta without changes none.
    let changed = view.with_delta(&[write("one", RowType::F32, 4, [0, 1])]).unwrap();
    assert_eq!((changed.num_segments(), changed.num_rows()), (1, 100));
    let nothing = view.with_delta(&[]).unwrap();
    assert_eq!((nothing.num_segments(), nothing.num_rows()), (0, 100));
}

#[test]
fn many_deltas_leave_few_segments() {
    let dir = TempDir::new().unwrap();
    let base = dir.path().join("base");
    write_base(&base, &Model::new(), RowType::F32, 16);
    let mut view = View::of_base(Arc::new(Cube::open(&[base]).unwrap()));
    for version in 0..200_u64 {
        let rows: Model = (0..20).map(|i| version * 20 + i).map(|sign| (sign, row_of(sign, 0))).collect();
        let path = dir.path().join(format!("{version}"));
        Delta { rows, ..Delta::default() }.write(&path, RowType::F32, 16, [0, 1]);
        view = view.with_delta(&[DeltaFile::open(path).unwrap()]).unwrap();
        assert!(view.num_segments() <= 8, "{} after {version}", view.num_segments());
    }
    assert_eq!((view.num_rows(), view.num_changes()), (4000, 4000));
}

/// For n rows, a file has at most 1.2 · n · (row bytes + 12) + 1024 bytes.
#[test]
fn a_delta_file_is_little_larger_than_its_rows() {
    let dir = TempDir::new().unwrap();
    for num_rows in [0, 1, 5, 256, 5000] {
        for (row_type, width) in [(RowType::F32, 1), (RowType::F32, 10), (RowType::F16, 3), (RowType::Int8, 32)] {
            let name = format!("{num_rows}-{row_type}-{width}");
            let columns = vec![Column { name: "deep".into(), width }];
            let mut writer = DeltaWriter::create(dir.path().join(name), columns.clone(), row_type, 256).unwrap();
            let mut signs: Vec<u64> = (0..num_rows).collect();
            signs.sort_by_key(|sign| mix(*sign));
            for signs in signs.chunk_by(|a, b| partition_of(*a, 256) == partition_of(*b, 256)) {
                let changes = Changes { signs, ..Changes::default() };
                writer.add(partition_of(signs[0], 256), changes, |_, values| values.fill(1.0)).unwrap();
            }
            let bytes = writer.finish().unwrap().bytes as f64;
            let row_bytes = elasticrec_cube::RowCodec::new(row_type, &columns).row_bytes();
            assert!(bytes < 1.2 * (num_rows as usize * (row_bytes + 12)) as f64 + 1024.0, "{num_rows}: {bytes}");
        }
    }
}

/// The order in which changes are added does not change the file.
#[test]
fn equal_changes_make_equal_files() {
    let dir = TempDir::new().unwrap();
    let write = |name: &str, signs: &[u64]| -> PathBuf {
        let path = dir.path().join(name);
        let mut writer = DeltaWriter::create(&path, columns(), RowType::F32, 1).unwrap();
        let changes = Changes { signs, removed: &[], is_whole: false };
        writer.add(0, changes, |i, values| values.copy_from_slice(&row_of(signs[i], 0))).unwrap();
        writer.finish().unwrap();
        path
    };
    let up: Vec<u64> = (0..500).collect();
    let down: Vec<u64> = (0..500).rev().collect();
    assert_eq!(std::fs::read(write("up", &up)).unwrap(), std::fs::read(write("down", &down)).unwrap());
}
