//! A set of versions that is updated with deltas while segments are merged in the background.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use common::{Files, NUM_ROWS, PARTITIONS, WIDTH, columns, row_of, until};
use elasticrec_cube::{Changes, DeltaFile, DeltaWriter, RowType, VersionSet, View};
use elasticrec_table::partition::partition_of;

/// Version v changes the signs equal to v modulo 7, and removes the signs equal to v + 3 modulo 700.
fn is_changed(version: u64, sign: u64) -> bool {
    sign % 7 == version % 7 && !is_removed(version, sign)
}

fn is_removed(version: u64, sign: u64) -> bool {
    sign % 700 == (version + 3) % 700
}

fn write(dir: &tempfile::TempDir, version: u64) -> PathBuf {
    let path = dir.path().join(format!("delta-{version}"));
    if path.exists() {
        return path;
    }
    let mut writer = DeltaWriter::create(&path, columns(), RowType::F32, PARTITIONS).unwrap();
    for partition in 0..PARTITIONS {
        let own = |is: fn(u64, u64) -> bool| -> Vec<u64> {
            let own = |sign: &u64| partition_of(*sign, PARTITIONS) == partition && is(version, *sign);
            (0..NUM_ROWS).filter(own).collect()
        };
        let (signs, removed) = (own(is_changed), own(is_removed));
        let changes = Changes { signs: &signs, removed: &removed, is_whole: false };
        writer.add(partition, changes, |i, row| row.copy_from_slice(&row_of(version, signs[i]))).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// Returns the row of a sign in a version: the row of the last version that changed it, or zeros if the last change was its
/// removal.
fn expected(version: u64, sign: u64) -> [f32; WIDTH] {
    let last = (2..=version).rev().find(|at| is_changed(*at, sign) || is_removed(*at, sign));
    match last {
        Some(at) if is_removed(at, sign) => [0.0; WIDTH],
        Some(at) => row_of(at, sign),
        None => row_of(1, sign),
    }
}

fn assert_version(view: &View, version: u64, signs: &[u64]) {
    let mut rows = vec![9.0; signs.len() * WIDTH];
    view.lookup(signs, &mut rows);
    for (sign, row) in signs.iter().zip(rows.chunks(WIDTH)) {
        assert_eq!(row, expected(version, *sign), "version {version}, sign {sign}");
    }
}

#[test]
fn background_merges_do_not_change_versions() {
    let (files, dir) = (Files::new(), tempfile::tempdir().unwrap());
    let set = Arc::new(VersionSet::new(0..PARTITIONS, PARTITIONS));
    set.install(1, files.view(1, 0..PARTITIONS)).unwrap();
    let (current, is_done) = (AtomicU64::new(1), AtomicBool::new(false));
    let signs: Vec<u64> = (0..NUM_ROWS).step_by(37).collect();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let version = current.load(Ordering::Acquire);
                    // It may have been retired meanwhile.
                    let Ok(view) = set.get(version) else { continue };
                    assert_version(&view, version, &signs);
                }
            });
        }
        for version in 2..=60 {
            let part = DeltaFile::open(write(&dir, version)).unwrap();
            let parent = set.get(version - 1).unwrap();
            set.install(version, set.apply_delta(&parent, &[part]).unwrap()).unwrap();
            set.start_merge();
            current.store(version, Ordering::Release);
            if version > 4 {
                set.retire(version - 3).unwrap();
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
    until("segments are merged", || !set.get(60).unwrap().is_mergeable());
    assert!(set.get(60).unwrap().num_segments() <= 4);
    for version in set.numbers() {
        let view = set.get(version).unwrap();
        assert_version(&view, version, &(0..NUM_ROWS).collect::<Vec<_>>());
        let num_rows = (0..NUM_ROWS).filter(|sign| expected(version, *sign)[0] > 0.0).count();
        assert_eq!(view.num_rows(), num_rows as u64);
    }
}

#[test]
fn merged_segments_replace_only_the_segments_they_were_merged_from() {
    let (files, dir) = (Files::new(), tempfile::tempdir().unwrap());
    let delta = |view: &View, version| view.stacked(&[DeltaFile::open(write(&dir, version)).unwrap()]).unwrap();
    let base = files.view(1, 0..PARTITIONS);
    let second = delta(&base, 2);
    let third = delta(&second, 3);
    let fourth = delta(&third, 4);
    assert_eq!((third.num_segments(), third.is_mergeable()), (2, true));
    let merged = third.merged().unwrap();
    assert_eq!((merged.num_segments(), merged.is_mergeable()), (1, false));
    let later = fourth.with_merged(&third, &merged).unwrap();
    assert_eq!((fourth.num_segments(), later.num_segments()), (3, 2));
    let all: Vec<u64> = (0..NUM_ROWS).collect();
    for (view, version) in [(&second, 2), (&third, 3), (&merged, 3), (&fourth, 4), (&later, 4)] {
        assert_version(view, version, &all);
    }
    assert!(second.with_merged(&third, &merged).is_none(), "the version before the merged one");
    assert!(delta(&base, 2).with_merged(&second, &merged).is_none(), "an equal version with other segments");
    let elsewhere = delta(&files.view(1, 0..PARTITIONS), 2);
    assert!(elsewhere.with_merged(&base, &base).is_none(), "another base");
}
