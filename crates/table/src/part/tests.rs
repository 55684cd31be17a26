use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;

type Blocks = Vec<(u32, Vec<u8>)>;

fn write_part(blocks: &[(u32, Vec<u8>)], num_partitions: u32) -> (Vec<u8>, FileInfo) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("part-00000");
    let mut writer = PartWriter::create(&path, Kind::TableSnapshot, num_partitions).unwrap();
    for (partition, block) in blocks {
        writer.begin_block(*partition).unwrap();
        for piece in block.chunks(1000) {
            writer.write(piece).unwrap();
        }
        writer.end_block(block.len() as u64 / 2, [7, 0]).unwrap();
    }
    let written = writer.finish(&json!({"columns": ["wide", "deep"]})).unwrap();
    (std::fs::read(path).unwrap(), written)
}

fn open(bytes: Vec<u8>) -> Result<PartFile, PartError> {
    PartFile::from_bytes("part-00000", bytes)
}

fn open_and_verify(bytes: Vec<u8>) -> Result<(), PartError> {
    let part = open(bytes)?;
    (0..part.entries().len()).try_for_each(|i| part.verify_block(i))
}

fn message(bytes: Vec<u8>) -> String {
    open_and_verify(bytes).unwrap_err().to_string()
}

fn small_part() -> Vec<u8> {
    write_part(&[(0, vec![1; 70]), (3, Vec::new()), (5, vec![2; 64])], 8).0
}

#[test]
fn golden_bytes() {
    let (bytes, written) = write_part(&[(1, b"abc".to_vec())], 2);
    assert_eq!(bytes.len(), 320);
    assert_eq!(&bytes[..16], b"ERECPART\x01\0\0\0\x01\0\0\0");
    assert_eq!(&bytes[64..67], b"abc");
    assert_eq!(&bytes[128..155], br#"{"columns":["wide","deep"]}"#);
    assert_eq!(&bytes[192..200], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&bytes[216..232], [64, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    // xxh3_64("abc")
    assert_eq!(bytes[232..240], 0x78af_5f94_892f_3950_u64.to_le_bytes());
    assert_eq!(written.bytes, 320);
    assert_eq!(written.sha256, "038d3abbb6e88bf2113dd28f8a77216d99f4a8c147e484d59a3e8602c894a4c8");
}

#[test]
fn every_flipped_bit_is_rejected() {
    let bytes = small_part();
    open_and_verify(bytes.clone()).unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(open_and_verify(damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn truncated_and_extended_files_are_rejected() {
    let bytes = small_part();
    for length in 0..bytes.len() {
        let error = message(bytes[..length].to_vec());
        assert!(error.starts_with("part-00000: "), "{error}");
        assert!(error.contains("the file is truncated"), "{length}: {error}");
    }
    for extra in [1, 63, 64, 128] {
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + extra, 0);
        assert!(open(longer).is_err(), "{extra} more bytes");
    }
}

#[test]
fn messages_name_the_problem() {
    assert_eq!(message(b"PK".to_vec()), "part-00000: expected a part file, which starts with `ERECPART`");
    let bytes = small_part();
    assert_eq!(message(bytes[..100].to_vec()), "part-00000: expected 128 bytes, got 100: the file is truncated");

    let mut other_format = bytes.clone();
    other_format[8] = 7;
    assert_eq!(message(other_format), "part-00000: expected format 1, got 7");
    let mut other_kind = bytes.clone();
    other_kind[12] = 9;
    assert_eq!(message(other_kind), "part-00000: expected kind 1 to 4, got 9");
    let wrong_kind = open(bytes.clone()).unwrap().expect_kind(Kind::Cube).unwrap_err();
    assert_eq!(wrong_kind.to_string(), "part-00000: expected kind 2 (cube), got 1");

    let mut damaged = bytes;
    damaged[200] ^= 1;
    assert_eq!(message(damaged), "part-00000: partition 5: the checksum does not match, the file is damaged");
}

#[test]
fn crafted_directories_are_rejected() {
    let bytes = small_part();
    let directory = bytes.len() - LINE - 3 * LINE;
    // Offset of a field of the first entry, the crafted value, part of the message.
    for (at, value, expected) in [
        (0, 4_u64, "partition 3: out of order"),
        (0, 8, "partition 8: out of order or above"),
        (4, 1, "reserved"),
        (24, 0, "expected a block at 64"),
        (24, 128, "expected a block at 64"),
        (32, u64::MAX, "expected a block at 64"),
        (32, 69, "partition 0: reserved bytes: expected zeros"),
        (32, 0, "partition 3: expected a block at 64"),
    ] {
        let mut crafted = bytes.clone();
        let width = if at < 8 { 4 } else { 8 };
        crafted[directory + at..][..width].copy_from_slice(&value.to_le_bytes()[..width]);
        repair_checksums(&mut crafted);
        let error = message(crafted);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_table_without_partitions_is_rejected() {
    let mut bytes = write_part(&[], 1).0;
    let trailer = bytes.len() - LINE;
    bytes[trailer + 44] = 0;
    repair_checksums(&mut bytes);
    assert_eq!(message(bytes), "part-00000: expected at least 1 partition, got 0");
}

#[test]
fn a_full_disk_names_the_file() {
    let Ok(file) = std::fs::OpenOptions::new().write(true).open("/dev/full") else {
        return; // Only Linux has /dev/full.
    };
    let mut writer = PartWriter::for_file(file, Path::new("v1/part-00000"), Kind::Cube, 1).unwrap();
    writer.begin_block(0).unwrap();
    let error = writer.write(&vec![0; 1 << 20]).unwrap_err().to_string();
    assert!(error.starts_with("v1/part-00000: ") && error.contains("space"), "{error}");
}

#[test]
fn an_existing_file_is_not_overwritten() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("part-00000");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(PartWriter::create(&path, Kind::Cube, 1), Err(PartError::Io { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(matches!(PartFile::open(dir.path().join("none")), Err(PartError::Io { .. })));
}

#[test]
fn partitions_out_of_order_are_rejected() {
    let dir = TempDir::new().unwrap();
    let mut writer = PartWriter::create(dir.path().join("part"), Kind::Cube, 4).unwrap();
    writer.begin_block(2).unwrap();
    writer.end_block(0, [0, 0]).unwrap();
    for partition in [1, 2, 4] {
        assert!(writer.begin_block(partition).is_err());
    }
    writer.begin_block(3).unwrap();
}

fn any_blocks() -> impl Strategy<Value = Blocks> {
    let block = prop_oneof![
        3 => prop::collection::vec(any::<u8>(), 0..300),
        1 => (any::<u8>(), 0..600_000_usize).prop_map(|(byte, length)| vec![byte; length]),
    ];
    prop::collection::btree_map(0..20_u32, block, 0..6).prop_map(|blocks| blocks.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn reads_back_what_was_written(blocks in any_blocks()) {
        let (bytes, written) = write_part(&blocks, 20);
        prop_assert_eq!(written.bytes, bytes.len() as u64);
        open_and_verify(bytes.clone()).unwrap();
        let part = open(bytes).unwrap();
        part.expect_kind(Kind::TableSnapshot).unwrap();
        prop_assert_eq!(part.num_partitions(), 20);
        prop_assert_eq!(part.meta(), &json!({"columns": ["wide", "deep"]}));
        prop_assert_eq!(part.entries().len(), blocks.len());
        for (i, (partition, block)) in blocks.iter().enumerate() {
            let entry = part.entries()[i];
            prop_assert_eq!((entry.partition, entry.num_rows), (*partition, block.len() as u64 / 2));
            prop_assert_eq!(entry.offset % 64, 0);
            prop_assert_eq!(entry.aux, [7, 0]);
            prop_assert_eq!(part.block(i), &block[..]);
        }
    }

    #[test]
    fn hostile_bytes_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12)) {
        let mut bytes = small_part();
        for (at, byte) in edits {
            // Mostly in the trailer and the directory, which contain the lengths.
            let at = if byte % 4 == 0 { at.index(bytes.len()) } else { bytes.len() - 1 - at.index(320) };
            bytes[at] = byte;
        }
        let _ = open_and_verify(bytes.clone());
        repair_checksums(&mut bytes);
        let _ = open_and_verify(bytes);
    }
}
