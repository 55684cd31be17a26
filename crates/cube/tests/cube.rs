//! Cubes end to end: compared with a `HashMap`, damaged files and crafted files.

mod support;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use elasticrec_cube::{Column, Cube, CubeError, CubeWriter, RowType, View, fuzz_open, presence_of, repair_checksums};
use elasticrec_table::part::{Kind, PartFile, PartWriter};
use elasticrec_table::partition::{mix, partition_of};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;
use support::{any_sign, unmix};
use tempfile::TempDir;

const WIDTH: usize = 3;

fn columns() -> Vec<Column> {
    vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: 2 }]
}

/// A row that identifies its sign and is never all zeros.
fn row_of(sign: u64) -> [f32; WIDTH] {
    [1.0, (sign % 1009) as f32, (sign >> 40) as f32]
}

fn fill_row(sign: u64, values: &mut [f32]) {
    assert!(values.iter().all(|value| *value == 0.0), "rows start from zero");
    values.copy_from_slice(&row_of(sign));
}

/// Writes the partitions `which` of a cube of `signs` to one part file.
fn write_part(path: &PathBuf, signs: &[u64], num_partitions: u32, which: impl Iterator<Item = u32>) {
    let mut writer = CubeWriter::create(path, columns(), RowType::F32, num_partitions).expect("create");
    for partition in which {
        let own = |sign: &&u64| partition_of(**sign, num_partitions) == partition;
        let own: Vec<u64> = signs.iter().filter(own).copied().collect();
        writer.write_partition(partition, &own, |i, values| fill_row(own[i], values)).expect("write");
    }
    writer.finish().expect("finish");
}

fn part_bytes(signs: &[u64], num_partitions: u32) -> Vec<u8> {
    let dir = TempDir::new().expect("temporary folder");
    let path = dir.path().join("part-00000");
    write_part(&path, signs, num_partitions, 0..num_partitions);
    std::fs::read(path).expect("read")
}

fn open(paths: &[PathBuf]) -> Result<View, CubeError> {
    Ok(View::of_base(Arc::new(Cube::open(paths)?)))
}

fn open_bytes(bytes: Vec<u8>) -> Result<View, CubeError> {
    Ok(View::of_base(Arc::new(Cube::from_parts(vec![PartFile::from_bytes("part-00000", bytes)?])?)))
}

fn message<T>(result: Result<T, CubeError>) -> String {
    result.err().expect("an error").to_string()
}

/// Signs with the same home bucket for any number of buckets, in a table of one partition.
fn colliding_signs(count: u64) -> Vec<u64> {
    (0..count).map(|i| unmix(i << 33)).collect()
}

/// Signs with the same tag and home bucket, so that only their records tell them apart: the worst case.
fn twin_signs(count: u64) -> Vec<u64> {
    (0..count).map(|i| unmix(i << 48 | 0xffff_ffff)).collect()
}

fn assert_holds(cube: &View, signs: &[u64], absent: &[u64]) {
    let keys: Vec<u64> = absent.iter().chain(signs).chain(absent).copied().collect();
    let mut rows = vec![f32::NAN; keys.len() * WIDTH];
    assert_eq!(cube.lookup(&keys, &mut rows), signs.len());
    for (sign, row) in keys.iter().zip(rows.chunks(WIDTH)) {
        let expected = if signs.contains(sign) { row_of(*sign) } else { [0.0; WIDTH] };
        assert_eq!(row, expected, "row of {sign}");
        assert_eq!(cube.contains(*sign), signs.contains(sign), "{sign}");
    }
}

#[test]
fn signs_that_all_collide_are_found() {
    assert_eq!(mix(colliding_signs(4)[3]), 3 << 33);
    assert_eq!(mix(twin_signs(4)[3]), 3 << 48 | 0xffff_ffff);
    for count in [1, 29, 30, 58, 100, 1000] {
        for signs in [colliding_signs(count + 5), twin_signs(count + 5)] {
            let (present, absent) = signs.split_at(count as usize);
            let cube = open_bytes(part_bytes(present, 1)).unwrap();
            assert_holds(&cube, present, absent);
        }
    }
}

#[test]
fn an_empty_cube_has_no_rows() {
    let cube = open_bytes(part_bytes(&[], 256)).unwrap();
    assert_eq!((cube.num_rows(), cube.num_partitions(), cube.width()), (0, 256, WIDTH));
    assert_eq!(cube.columns(), columns());
    assert_holds(&cube, &[], &[0, 1, u64::MAX]);
    assert_eq!(cube.base().iter().count(), 0);
}

#[test]
fn a_row_of_64_kb_is_found() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("part-00000");
    let mut writer =
        CubeWriter::create(&path, vec![Column { name: "deep".into(), width: 16384 }], RowType::F32, 1).unwrap();
    writer.write_partition(0, &[5, 6], |i, values| values.fill(i as f32 + 1.0)).unwrap();
    writer.finish().unwrap();
    let cube = open(&[path]).unwrap();
    let mut rows = vec![f32::NAN; 3 * 16384];
    assert_eq!(cube.lookup(&[6, 7, 5], &mut rows), 2);
    for (row, expected) in rows.chunks(16384).zip([2.0, 0.0, 1.0]) {
        assert!(row.iter().all(|value| *value == expected));
    }
}

#[test]
fn all_parts_are_needed_to_open_a_cube() {
    let dir = TempDir::new().unwrap();
    let path = |i: u32| dir.path().join(format!("part-0000{i}"));
    let signs: Vec<u64> = (0..500).collect();
    for i in 0..3 {
        write_part(&path(i), &signs, 16, (0..16).filter(|partition| partition % 3 == i));
    }
    let cube = open(&[path(2), path(0), path(1)]).unwrap();
    assert_holds(&cube, &signs, &[500, u64::MAX]);
    assert_eq!(cube.num_rows(), 500);
    let on_disk: u64 = (0..3).map(|i| path(i).metadata().unwrap().len()).sum();
    assert!(cube.bytes() < on_disk && cube.bytes() + 8192 > on_disk, "{} of {on_disk}", cube.bytes());

    assert_eq!(message(Cube::open(&[])), "cube: expected at least 1 part file, got 0");
    let missing = message(Cube::open(&[path(0), path(1)]));
    assert_eq!(missing, "cube of 2 part files: 5 of 16 partitions are missing: 2, 5, 8, 11, 14");
    let many = message(Cube::open(&[path(0)]));
    assert!(many.ends_with("10 of 16 partitions are missing: 1, 2, 4, 5, 7, 8, 10, 11, …"), "{many}");
    let doubled = message(Cube::open(&[path(0), path(1), path(2), path(1)]));
    assert!(doubled.contains("part-00001: partition 1 is also in "), "{doubled}");

    write_part(&path(3), &signs, 8, 2..3);
    let other = message(Cube::open(&[path(0), path(3)]));
    assert!(other.contains("part-00003: expected the number of partitions of "), "{other}");
    let mut writer =
        CubeWriter::create(path(4), vec![Column { name: "wide".into(), width: 3 }], RowType::F32, 16).unwrap();
    writer.write_partition(2, &[], |_, _| ()).unwrap();
    writer.finish().unwrap();
    let other = message(Cube::open(&[path(0), path(4)]));
    assert!(other.contains("part-00004: expected the columns and row type of "), "{other}");
}

#[test]
fn a_range_of_partitions_can_be_opened() {
    let dir = TempDir::new().unwrap();
    let path = |i: u32| dir.path().join(format!("part-0000{i}"));
    let signs: Vec<u64> = (0..2000).collect();
    for i in 0..2 {
        write_part(&path(i), &signs, 16, (0..16).filter(|partition| partition % 2 == i));
    }
    let in_range = |sign: &u64| (4..9).contains(&partition_of(*sign, 16));
    let (own, others): (Vec<u64>, Vec<u64>) = signs.iter().partition(|sign| in_range(sign));
    let view = View::of_base(Arc::new(Cube::open_range(&[path(0), path(1)], 4..9).unwrap()));
    assert_holds(&view, &own, &others);
    assert_eq!((view.num_rows(), view.num_partitions(), view.partitions()), (own.len() as u64, 16, 4..9));
    assert!(view.base().rows_of(3).next().is_none() && view.base().rows_of(9).next().is_none());

    let loaded = View::of_base(Arc::new(Cube::load(&[path(0), path(1)], Some(4..9)).unwrap()));
    assert_holds(&loaded, &own, &others);
    assert_eq!((loaded.num_rows(), loaded.bytes()), (view.num_rows(), view.bytes()));

    let one = View::of_base(Arc::new(Cube::open_range(&[path(1)], 5..6).unwrap()));
    assert_eq!(one.num_rows() as usize, signs.iter().filter(|sign| partition_of(**sign, 16) == 5).count());
    let missing = message(Cube::open_range(&[path(1)], 4..9));
    assert_eq!(missing, "cube of 1 part files: 3 of 5 partitions are missing: 4, 6, 8");
    let beyond = message(Cube::open_range(&[path(0)], 4..17));
    assert_eq!(beyond, "cube: expected partitions between 0 and 16, got 4 to 17");
    assert_eq!(View::of_base(Arc::new(Cube::open_range(&[path(0)], 3..3).unwrap())).num_rows(), 0);

    // Other partitions are not read: damage in partition 0 does not affect 4..9.
    let mut bytes = std::fs::read(path(0)).unwrap();
    bytes[64 + 1] ^= 1;
    std::fs::write(dir.path().join("damaged"), bytes).unwrap();
    let paths = [dir.path().join("damaged"), path(1)];
    assert!(Cube::open_range(&paths, 4..9).is_ok());
    assert!(Cube::load(&paths, Some(4..9)).is_ok());
    for result in [Cube::open(&paths), Cube::load(&paths, None)] {
        assert!(message(result).ends_with("partition 0: the checksum does not match, the file is damaged"));
    }
}

#[test]
fn a_lookup_returns_stored_rows() {
    let signs: Vec<u64> = (0..300).collect();
    let view = open_bytes(part_bytes(&signs, 4)).unwrap();
    let keys: Vec<u64> = (0..600).rev().collect();
    let mut rows = vec![7_u8; keys.len() * view.row_bytes()];
    let mut present = vec![u64::MAX; keys.len().div_ceil(64)];
    assert_eq!(view.stored_rows(&keys, &mut rows, &mut present), signs.len());
    let mut values = vec![0.0; keys.len() * WIDTH];
    view.codec().decode(&rows, &mut values);
    for ((sign, row), is_present) in keys.iter().zip(values.chunks(WIDTH)).zip(presence_of(&present, keys.len())) {
        assert_eq!(is_present, *sign < 300, "{sign}");
        assert_eq!(row, if *sign < 300 { row_of(*sign) } else { [0.0; WIDTH] });
    }
    assert_eq!(present[9] >> (600 % 64), 0, "no bits beyond the last key");
    let mut found = vec![0; present.len()];
    assert_eq!(view.find(&keys, &mut found), signs.len());
    assert_eq!(found, present);
}

#[test]
fn the_writer_rejects_repeated_and_foreign_signs() {
    let dir = TempDir::new().unwrap();
    let mut writer = CubeWriter::create(dir.path().join("part-00000"), columns(), RowType::F32, 1).unwrap();
    let twice = writer.write_partition(0, &[4, 9, 4], |_, _| ()).unwrap_err();
    assert_eq!(twice.to_string(), "partition 0: sign 4 is repeated");
    let mut many = colliding_signs(50);
    many.push(many[20]);
    assert!(matches!(writer.write_partition(0, &many, |_, _| ()), Err(CubeError::DuplicateSign { .. })));

    let mut writer = CubeWriter::create(dir.path().join("part-00001"), columns(), RowType::F32, 256).unwrap();
    let foreign = writer.write_partition(0, &[0, 1], |_, _| ()).unwrap_err();
    assert_eq!(foreign.to_string(), "partition 0: sign 1 belongs to partition 180");
    assert!(CubeWriter::create(dir.path().join("part-00002"), vec![], RowType::F32, 256).is_err());
    assert!(!dir.path().join("part-00002").exists());
}

#[test]
fn files_of_other_kinds_are_rejected_with_their_name() {
    let dir = TempDir::new().unwrap();
    let write = |name: &str, kind, meta| {
        let path = dir.path().join(name);
        PartWriter::create(&path, kind, 1).unwrap().finish(&meta).unwrap();
        message(Cube::open(&[path]))
    };
    let snapshot = write("snapshot", Kind::TableSnapshot, json!({}));
    assert!(snapshot.ends_with("snapshot: expected kind 2 (cube), got 1"), "{snapshot}");
    let int4 = write("int4", Kind::Cube, json!({"row_type": "int4"}));
    assert!(int4.ends_with("int4: row type `int4` is not known, expected `f32`, `f16` or `int8`"), "{int4}");
}

#[test]
fn every_flipped_bit_is_rejected() {
    let bytes = part_bytes(&[0, 1, 2, 3, u64::MAX], 2);
    assert_holds(&open_bytes(bytes.clone()).unwrap(), &[0, 1, 2, 3, u64::MAX], &[4]);
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(open_bytes(damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn every_truncation_is_rejected() {
    let bytes = part_bytes(&(0..40).collect::<Vec<u64>>(), 3);
    for length in 0..bytes.len() {
        let error = message(open_bytes(bytes[..length].to_vec()));
        assert!(error.contains("the file is truncated"), "{length}: {error}");
    }
}

/// Crafted bytes with correct checksums: (byte in the first bucket, its new value, the error).
#[test]
fn crafted_buckets_are_rejected() {
    let bytes = part_bytes(&colliding_signs(40), 1);
    let (bucket, records) = (64, 2 * 64);
    for (at, value, expected) in [
        (0, 1, "bucket 0: sign 0 cannot be found from its bucket 0"),
        (58, 28, "bucket 1: expected first row 28, got 29"),
        (58, 30, "bucket 0: invalid count or flags"),
        (58, 255, "bucket 0: invalid count or flags"),
        (59, 0, "cannot be found from its bucket 0"),
        (59, 2, "bucket 0: invalid count or flags"),
        (60, 1, "bucket 0: expected first row 0, got 1"),
        (63, 255, "bucket 0: expected first row 0, got 4278190080"),
        (64 + 58, 10, "expected 40 rows, got 39 in the index"),
        (64 + 58, 12, "bucket 1: expected 40 rows, got more in the index"),
        (records, 1, "bucket 0: sign 1 cannot be found from its bucket "),
    ] {
        let mut crafted = bytes.clone();
        crafted[bucket + at] = value;
        repair_checksums(&mut crafted);
        let error = message(open_bytes(crafted.clone()));
        assert!(error.starts_with("part-00000: partition 0: ") && error.contains(expected), "{error}");
        fuzz_open(&crafted);
    }
}

#[test]
fn a_sign_in_the_block_of_another_partition_is_rejected() {
    let mut bytes = part_bytes(&[unmix(1)], 2);
    assert_eq!(partition_of(unmix(1), 2), 0);
    // The only record follows the only bucket; tag and home bucket of the new sign are the same.
    bytes[64 + 64..][..8].copy_from_slice(&unmix(1 | 1 << 63).to_le_bytes());
    repair_checksums(&mut bytes);
    let error = message(open_bytes(bytes.clone()));
    assert!(error.ends_with(" belongs to another partition"), "{error}");
    fuzz_open(&bytes);
}

/// Crafted directory entries with correct checksums: (byte of the entry, its new value).
#[test]
fn crafted_directories_are_rejected() {
    let bytes = part_bytes(&colliding_signs(40), 1);
    let entry = bytes.len() - 128;
    // Byte 16 starts the number of rows, byte 48 the number of buckets.
    for (at, value) in [(16, 39), (16, 41), (23, 255), (48, 1), (48, 3), (48, 0), (55, 255)] {
        let mut crafted = bytes.clone();
        crafted[entry + at] = value;
        repair_checksums(&mut crafted);
        let error = message(open_bytes(crafted.clone()));
        assert!(error.contains("expected a block of"), "{error}");
        fuzz_open(&crafted);
    }
    let mut other = bytes.clone();
    other[entry + 56] = 2;
    repair_checksums(&mut other);
    assert_eq!(message(open_bytes(other)), "part-00000: partition 0: expected layout 0 or 1, got 2");
}

/// Writes a part file of the previous layout: buckets with seven signs, the first row and the count; then rows.
fn former_part(signs: &[u64]) -> Vec<u8> {
    let dir = TempDir::new().expect("a part file");
    let path = dir.path().join("part-00000");
    let mut part = PartWriter::create(&path, Kind::Cube, 1).expect("a part file");
    part.begin_block(0).expect("a part file");
    for (at, seven) in signs.chunks(7).enumerate() {
        let mut bucket = [0; 64];
        for (slot, sign) in seven.iter().enumerate() {
            bucket[8 * slot..][..8].copy_from_slice(&sign.to_le_bytes());
        }
        bucket[56..60].copy_from_slice(&(7 * at as u32).to_le_bytes());
        bucket[60] = seven.len() as u8;
        part.write(&bucket).expect("a part file");
    }
    for value in signs.iter().flat_map(|sign| row_of(*sign)) {
        part.write(&value.to_le_bytes()).expect("a part file");
    }
    part.end_block(signs.len() as u64, [signs.len().div_ceil(7) as u64, 0]).expect("a part file");
    let columns = json!([{"name": "wide", "width": 1}, {"name": "deep", "width": 2}]);
    part.finish(&json!({"columns": columns, "row_bytes": 12, "row_type": "f32"})).expect("a part file");
    std::fs::read(path).expect("a part file")
}

#[test]
fn a_cube_of_the_previous_layout_is_read() {
    let signs: Vec<u64> = (0..3000).chain(twin_signs(100)).collect();
    let bytes = former_part(&signs);
    let cube = open_bytes(bytes.clone()).unwrap();
    assert_holds(&cube, &signs, &[3000, u64::MAX]);
    assert_eq!((cube.num_rows(), cube.base().iter().count()), (3100, 3100));
    assert_holds(&open_bytes(former_part(&[])).unwrap(), &[], &[0, 1]);

    let dir = TempDir::new().unwrap();
    let path = dir.path().join("part-00000");
    std::fs::write(&path, &bytes).unwrap();
    assert_holds(&View::of_base(Arc::new(Cube::load(&[path], None).unwrap())), &signs, &[3000]);
    for (at, value, expected) in [
        (0, 7, "partition 0: sign 7 is repeated"),
        (56, 1, "bucket 0: expected first row 0"),
        (60, 6, "bucket 1: expected first row 6"),
        (64 * 442 + 60, 5, "expected 3100 rows, got 3099 in the index"),
    ] {
        let mut crafted = bytes.clone();
        crafted[64 + at] = value;
        repair_checksums(&mut crafted);
        let error = message(open_bytes(crafted.clone()));
        assert!(error.starts_with("part-00000: partition 0: ") && error.ends_with(expected), "{error}");
        fuzz_open(&crafted);
    }
    let mut damaged = bytes;
    damaged[100] ^= 1;
    assert!(message(open_bytes(damaged)).ends_with("partition 0: the checksum does not match, the file is damaged"));
}

/// A search must end even if all buckets are flagged as overflowed.
#[test]
fn a_search_ends_although_all_buckets_are_flagged() {
    let mut bytes = part_bytes(&(0..1000).collect::<Vec<u64>>(), 1);
    for bucket in 0..1000 / 22 {
        bytes[64 + 64 * bucket + 59] = 1;
    }
    repair_checksums(&mut bytes);
    let cube = open_bytes(bytes).unwrap();
    assert_holds(&cube, &(0..1000).collect::<Vec<u64>>(), &[1000, 1001, u64::MAX]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn agrees_with_a_hash_map(
        signs in prop::collection::hash_set(any_sign(), 0..1500),
        others in prop::collection::vec(any_sign(), 0..300),
        num_partitions in prop_oneof![Just(1_u32), 2..5_u32, Just(256)],
    ) {
        let signs: Vec<u64> = signs.into_iter().collect();
        let expected: HashMap<u64, [f32; WIDTH]> = signs.iter().map(|sign| (*sign, row_of(*sign))).collect();
        let bytes = part_bytes(&signs, num_partitions);
        let cube = open_bytes(bytes).unwrap();
        prop_assert_eq!(cube.num_rows(), expected.len() as u64);

        let keys: Vec<u64> = others.iter().chain(&signs).chain(&[0, u64::MAX]).copied().collect();
        let mut rows = vec![f32::NAN; keys.len() * WIDTH];
        let hits = cube.lookup(&keys, &mut rows);
        prop_assert_eq!(hits, keys.iter().filter(|sign| expected.contains_key(sign)).count());
        for (sign, row) in keys.iter().zip(rows.chunks(WIDTH)) {
            prop_assert_eq!(row, &expected.get(sign).copied().unwrap_or([0.0; WIDTH])[..]);
            prop_assert_eq!(cube.contains(*sign), expected.contains_key(sign));
        }
        let mut num_rows = 0;
        for (sign, row) in cube.base().iter() {
            let mut values = [0.0; WIDTH];
            cube.codec().decode(row, &mut values);
            prop_assert_eq!(expected[&sign], values);
            num_rows += 1;
        }
        prop_assert_eq!(num_rows, expected.len());
    }

    #[test]
    fn hostile_bytes_never_panic(
        signs in prop::collection::hash_set(any_sign(), 0..60),
        edits in prop::collection::vec((any::<Index>(), any::<u8>()), 0..10),
        truncation in prop::option::weighted(0.1, any::<Index>()),
    ) {
        let signs: Vec<u64> = signs.into_iter().collect();
        let mut bytes = part_bytes(&signs, 2);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(length) = truncation {
            bytes.truncate(length.index(bytes.len()));
        }
        fuzz_open(&bytes);
    }
}
