//! Tests of the writer: reproducible bytes, well-formed lines, other files untouched.

use super::*;
use crate::demo::{DemoFormat, DemoKind};

const SPEC: DemoSpec = DemoSpec {
    samples: 20_000,
    slots: 12,
    hours: 5,
    seed: 7,
    format: DemoFormat::Slots,
    kind: DemoKind::Pairwise,
    structure: true,
};

fn write(spec: &DemoSpec, out: &Path, overwrite: bool, threads: usize) -> Result<DemoSummary, DemoError> {
    generate(spec, out, overwrite, threads, &mut |_| ControlFlow::Continue(()))
}

fn text_of(spec: &DemoSpec, threads: usize) -> (Vec<(String, Vec<u8>)>, DemoSummary) {
    let out = tempfile::tempdir().unwrap();
    let summary = write(spec, out.path(), false, threads).unwrap();
    let mut files = Vec::new();
    for hour in &summary.hours {
        let dir = out.path().join(&hour.path);
        let mut names: Vec<String> =
            fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        files.extend(names.into_iter().map(|name| {
            let bytes = fs::read(dir.join(&name)).unwrap();
            (format!("{}/{name}", hour.path), bytes)
        }));
    }
    (files, DemoSummary { seconds: 0.0, ..summary })
}

#[test]
fn a_seed_gives_the_same_bytes_with_any_number_of_threads() {
    let (files, summary) = text_of(&SPEC, 1);
    assert_eq!((files.clone(), summary.clone()), text_of(&SPEC, 3));
    assert_eq!(files.len(), 2 * 5);
    assert_eq!(files[0], ("20260101/00/.done".to_owned(), Vec::new()));
    assert_eq!(files[9].0, "20260101/04/part-00000.txt");
    assert_eq!(summary.bytes, files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    let (others, _) = text_of(&DemoSpec { seed: 8, ..SPEC }, 1);
    assert_ne!(files[1].1, others[1].1);
}

#[test]
fn the_bytes_of_a_seed_do_not_change_between_releases() {
    // A change here changes the demo data, and all figures about it in docs and benchmarks.
    let hash_of = |spec: &DemoSpec| {
        let (files, _) = text_of(spec, 1);
        let bytes: Vec<u8> = files.into_iter().flat_map(|(_, bytes)| bytes).collect();
        xxhash_rust::xxh3::xxh3_64(&bytes)
    };
    let criteo = DemoSpec { slots: 26, format: DemoFormat::Criteo, ..SPEC };
    assert_eq!((hash_of(&SPEC), hash_of(&criteo)), (15_425_944_366_246_488_156, 11_728_249_122_122_478_432));
    let of_kind = |kind, structure| hash_of(&DemoSpec { samples: 500, slots: 6, kind, structure, ..SPEC });
    assert_eq!(
        [of_kind(DemoKind::Pairwise, false), of_kind(DemoKind::Multitask, true), of_kind(DemoKind::Sequence, true)],
        [10_992_250_113_997_439_173, 16_042_124_579_095_792_374, 5_496_926_097_532_850_680]
    );
}

#[test]
fn lines_of_two_labels_are_well_formed() {
    let (files, summary) = text_of(&DemoSpec { kind: DemoKind::Multitask, ..SPEC }, 2);
    let mut buys = 0;
    for line in files.iter().flat_map(|(_, bytes)| std::str::from_utf8(bytes).unwrap().lines()) {
        let fields: Vec<&str> = line.splitn(4, ' ').collect();
        assert_eq!(fields[0], "1");
        assert!(matches!((fields[1], fields[2]), ("0" | "1", "buy=0") | ("1", "buy=1")), "{line}");
        buys += u64::from(fields[2] == "buy=1");
    }
    let buy = summary.buy.unwrap();
    assert_eq!(buy.positives, buys);
    assert_eq!(summary.hours.iter().map(|hour| hour.buy.as_ref().unwrap().positives).sum::<u64>(), buys);
    assert!(buy.best_auc > buy.linear_auc);
}

#[test]
fn structure_changes_only_the_labels() {
    let unlabelled = |structure, kind| {
        let (files, _) = text_of(&DemoSpec { samples: 500, slots: 6, kind, structure, ..SPEC }, 1);
        let text = files.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect::<String>();
        let signs: String = text.lines().map(|line| &line[line.find(':').unwrap()..]).collect();
        (text, signs)
    };
    for kind in [DemoKind::Pairwise, DemoKind::Multitask, DemoKind::Sequence] {
        let (with, without) = (unlabelled(true, kind), unlabelled(false, kind));
        assert_eq!(with.1, without.1, "{kind:?}");
        assert_ne!(with.0, without.0, "{kind:?}");
    }
}

#[test]
fn slot_lines_are_well_formed() {
    let (files, summary) = text_of(&SPEC, 1);
    let mut clicks = 0;
    let mut num_lines = 0;
    let mut lengths = [0; 12];
    let (mut empty, mut multi) = (0, 0);
    for line in files.iter().flat_map(|(_, bytes)| std::str::from_utf8(bytes).unwrap().lines()) {
        num_lines += 1;
        let mut fields = line.split(' ');
        assert_eq!(fields.next(), Some("1"));
        clicks += fields.next().unwrap().parse::<u64>().unwrap();
        lengths.fill(0);
        for field in fields {
            let (sign, slot) = field.split_once(':').unwrap();
            sign.parse::<u64>().unwrap();
            lengths[slot.parse::<usize>().unwrap()] += 1;
        }
        assert!(lengths.iter().all(|&length| length <= 5));
        empty += lengths.iter().filter(|&&length| length == 0).count();
        multi += lengths.iter().filter(|&&length| length > 1).count();
    }
    assert_eq!((num_lines, clicks), (summary.samples, summary.clicks));
    assert!(empty > 1000 && multi > 1000, "{empty} empty, {multi} with several signs");
    let click_rate = clicks as f64 / num_lines as f64;
    assert!((0.2..0.25).contains(&click_rate), "click rate {click_rate}");
    assert!(summary.hours.iter().all(|hour| hour.samples == 4000));
}

#[test]
fn criteo_rows_are_well_formed() {
    let spec = DemoSpec { slots: 26, format: DemoFormat::Criteo, ..SPEC };
    let (files, summary) = text_of(&spec, 2);
    let (mut empty_numbers, mut empty_categories, mut negative) = (0, 0, 0);
    for line in files.iter().flat_map(|(_, bytes)| std::str::from_utf8(bytes).unwrap().lines()) {
        let fields: Vec<&str> = line.split('\t').collect();
        assert_eq!(fields.len(), 1 + 13 + 26);
        assert!(matches!(fields[0], "0" | "1"));
        for number in &fields[1..14] {
            match number.parse::<i64>() {
                Ok(number) => negative += i32::from(number < 0),
                Err(_) => {
                    assert_eq!(*number, "");
                    empty_numbers += 1;
                }
            }
        }
        for category in &fields[14..] {
            if category.is_empty() {
                empty_categories += 1;
            } else {
                assert_eq!(category.len(), 8);
                u32::from_str_radix(category, 16).unwrap();
            }
        }
    }
    assert!(empty_numbers > 1000 && empty_categories > 1000 && negative > 1000);
    assert!(summary.best_auc.unwrap() > summary.linear_auc.unwrap() + 0.05);
}

#[test]
fn a_large_hour_has_several_even_parts() {
    let parts = parts_of(&DemoSpec { samples: 4_000_002, hours: 2, ..SPEC });
    let sizes: Vec<(u32, u64, u64)> =
        parts.iter().map(|part| (part.hour, part.number, part.end - part.first)).collect();
    assert_eq!(
        sizes,
        [(0, 0, 666_667), (0, 1, 666_667), (0, 2, 666_667), (1, 0, 666_667), (1, 1, 666_667), (1, 2, 666_667)]
    );
}

#[test]
fn hours_follow_the_calendar() {
    assert_eq!(hour_path(0), "20260101/00");
    assert_eq!(hour_path(24 * 31 + 5), "20260201/05");
    assert_eq!(hour_path(24 * 365 - 1), "20261231/23");
    assert_eq!(hour_path(24 * (365 + 365 + 59)), "20280229/00");
}

#[test]
fn existing_hours_are_refused_or_replaced() {
    let out = tempfile::tempdir().unwrap();
    let small = DemoSpec { samples: 100, ..SPEC };
    write(&small, out.path(), false, 1).unwrap();
    let kept = out.path().join("20260101/04/notes.md");
    fs::write(&kept, "mine").unwrap();
    let error = write(&small, out.path(), false, 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{}: expected no hours of data, got `20260101/00` (--overwrite replaces all hours)",
            out.path().display()
        )
    );
    write(&DemoSpec { hours: 2, ..small }, out.path(), true, 1).unwrap();
    assert!(out.path().join("20260101/01/.done").exists());
    assert!(!out.path().join("20260101/02").exists());
    assert!(!out.path().join("20260101/04/.done").exists());
    assert_eq!(fs::read_to_string(kept).unwrap(), "mine");
}

#[test]
fn invalid_specs_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let refused = |spec: DemoSpec| write(&spec, out.path(), false, 1).unwrap_err().to_string();
    assert_eq!(refused(DemoSpec { samples: 0, ..SPEC }), "demo data: samples: expected at least 1, got 0");
    let hours = "demo data: hours: expected 1 to the number of samples (20000), got ";
    assert_eq!(refused(DemoSpec { hours: 0, ..SPEC }), format!("{hours}0"));
    assert_eq!(refused(DemoSpec { hours: 20_001, ..SPEC }), format!("{hours}20001"));
    assert_eq!(refused(DemoSpec { slots: 0, ..SPEC }), "demo data: slots: expected 1 to 10000, got 0");
    assert_eq!(refused(DemoSpec { slots: 10_001, ..SPEC }), "demo data: slots: expected 1 to 10000, got 10001");
    let criteo = DemoSpec { format: DemoFormat::Criteo, ..SPEC };
    assert_eq!(refused(criteo), "demo data: slots: expected 26 for criteo, got 12");
    let sequence = DemoSpec { kind: DemoKind::Sequence, ..SPEC };
    let two = "demo data: slots: expected 3 to 10000, got 2";
    assert_eq!(refused(DemoSpec { slots: 2, ..sequence }), two);
    let criteo = DemoSpec { slots: 26, format: DemoFormat::Criteo, ..sequence };
    assert_eq!(refused(criteo), "demo data: kind: expected `pairwise` for criteo");
}

#[test]
fn few_and_many_slots_work() {
    for slots in [1, 2, 300] {
        let (_, summary) = text_of(&DemoSpec { samples: 3000, slots, hours: 1, ..SPEC }, 1);
        assert!(summary.best_auc.unwrap() > 0.6, "{slots} slots");
    }
}

#[test]
fn stopping_leaves_only_complete_parts() {
    let out = tempfile::tempdir().unwrap();
    let mut reports = 0;
    let error = generate(&SPEC, out.path(), false, 1, &mut |_| {
        reports += 1;
        if reports == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap_err();
    assert!(matches!(error, DemoError::Stopped { samples: 8000 }), "{error}");
    for hour in 0..5 {
        for entry in fs::read_dir(out.path().join(hour_path(hour))).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("part-00000.txt") {
                assert_eq!(fs::read_to_string(path).unwrap().lines().count(), 4000);
            } else {
                assert!(path.ends_with(DONE), "{}", path.display());
            }
        }
    }
}

#[test]
fn an_unwritable_path_is_named() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("file");
    fs::write(&file, "").unwrap();
    let error = write(&SPEC, &file.join("data"), false, 1).unwrap_err();
    assert!(error.to_string().starts_with(&file.display().to_string()), "{error}");
}
