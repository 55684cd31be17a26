use std::collections::BTreeMap;

use proptest::prelude::*;
use tempfile::TempDir;

use super::upkeep::INDEX_BYTES;
use super::*;
use crate::snapshot::SnapshotFiles;

const PARTITIONS: u32 = 8;
const NUM_DENSE: usize = 21;

/// With SGD, sums do not depend on the order of pushes, so a run with failures can be compared with a run without.
fn spec(owned: Range<u32>) -> ShardSpec {
    let table = r#"{"name":"main","seed":7,"partitions":8,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
        "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
    let dense = DenseOptimizer::Sgd { learning_rate: 0.125 };
    ShardSpec {
        table: TableSpec::from_json(table).unwrap(),
        num_dense: NUM_DENSE,
        num_buffers: 0,
        dense,
        num_sums: 4,
        owned,
    }
}

/// A batch of a few samples; batches of the same name have the same samples.
#[derive(Debug, Clone)]
struct Batch {
    name: BatchName,
    is_last: bool,
    signs: Vec<u64>,
}

fn batches(sizes: &[u32]) -> Vec<Batch> {
    let all = sizes.iter().zip(0u64..).flat_map(|(&size, unit)| (0..size).map(move |batch| (unit, batch, size)));
    all.map(|(unit, batch, size)| {
        let start = unit * 31 + u64::from(batch) * 7;
        let signs = (start..start + 12).map(|sign: u64| (sign % 40).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        Batch { name: BatchName { unit, batch }, is_last: batch + 1 == size, signs }
    })
    .collect()
}

/// The last push of unit 0, without content.
const PUSH: Push<'_> = Push {
    epoch: 1,
    incarnation: 1,
    header: PushHeader {
        unit: 0,
        batch: 0,
        is_last: true,
        checksum: 1,
        num_samples: 1,
        seen: 0,
        weight: 1.0,
        group: None,
        is_increment: false,
    },
    signs: &[],
    counts: &[],
    gradients: &[],
    dense: &[],
    sum_indices: &[],
    sum_values: &[],
};

/// Sends the part of a batch that belongs to a shard.
fn send(shard: &mut Shard, batch: &Batch) -> Result<PushOutcome, Refusal> {
    let owned = shard.spec().owned.clone();
    let signs: Vec<u64> =
        batch.signs.iter().copied().filter(|sign| owned.contains(&partition_of(*sign, PARTITIONS))).collect();
    let counts = vec![[1, 1]; signs.len()];
    let gradients = vec![1.0; 2 * signs.len()];
    let dense = vec![1.0; shard.dense().len()];
    let has_sums = owned.contains(&0);
    let Batch { name: BatchName { unit, batch }, is_last, .. } = *batch;
    shard.push(&Push {
        header: PushHeader { unit, batch, is_last, checksum: u64::from(batch), num_samples: 3, ..PUSH.header },
        signs: &signs,
        counts: &counts,
        gradients: &gradients,
        dense: &dense,
        sum_indices: if has_sums { &[2] } else { &[] },
        sum_values: if has_sums { &[1.0] } else { &[] },
        ..PUSH
    })
}

fn send_all(shard: &mut Shard, batches: &[Batch]) {
    for batch in batches {
        send(shard, batch).unwrap();
    }
}

/// Counts the shows of each sign in the batches.
fn shows_of(batches: &[Batch]) -> BTreeMap<u64, u32> {
    let mut shows = BTreeMap::new();
    for sign in batches.iter().flat_map(|batch| &batch.signs) {
        *shows.entry(*sign).or_default() += 1;
    }
    shows
}

fn check(shards: &[Shard], batches: &[Batch]) {
    let shows = shows_of(batches);
    let mut seen = 0;
    for shard in shards {
        for (&sign, &count) in &shows {
            if !shard.spec().owned.contains(&partition_of(sign, PARTITIONS)) {
                continue;
            }
            let row = shard.table().get(sign).unwrap();
            assert_eq!((row.counters.show, row.counters.click), (count, count));
            let mut start = [0.0; 2];
            shard.spec().table.init(sign, &mut start);
            for (weight, start) in row.weights.iter().zip(start) {
                assert!((weight - (start - 0.125 * count as f32)).abs() < 1e-5);
            }
            seen += 1;
        }
        assert!(shard.dense().iter().all(|value| (value + 0.125 * batches.len() as f32).abs() < 1e-5));
        assert!(shard.samples().iter().all(|samples| *samples == 3 * batches.len() as u64));
        if shard.spec().owned.contains(&0) {
            assert_eq!(shard.sums().0, [0.0, 0.0, batches.len() as f64, 0.0]);
        }
        assert_eq!(shard.status().records.len(), 1, "equal records are stored once");
    }
    assert_eq!(seen, shows.len());
}

/// Writes a snapshot whose partitions are cut at different times: `between` is called before each copy.
fn snapshot(shard: &mut Shard, dir: &TempDir, number: usize, mut between: impl FnMut(&mut Shard)) -> SnapshotFiles {
    let name = |kind: &str| dir.path().join(format!("{kind}-{}-{number}", shard.spec().owned.start));
    let files = SnapshotFiles { rows: name("rows"), dense: name("dense") };
    let mut writer = shard.snapshot_writer(&files).unwrap();
    for partition in shard.spec().owned.clone() {
        between(shard);
        writer.add(&shard.copy(partition)).unwrap();
    }
    writer.finish().unwrap();
    files
}

fn reloaded(owned: Range<u32>, files: &[SnapshotFiles]) -> Shard {
    let mut shard = Shard::new(spec(owned), 1).unwrap();
    shard.load(files).unwrap();
    shard
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Batches arrive in any order and any number of times, and shards reload older snapshots that were taken during
    /// pushes. After all batches are sent once more, each has been counted exactly once.
    #[test]
    fn every_push_counts_once(
        sizes in prop::collection::vec(1u32..4, 1..6),
        events in prop::collection::vec((0u8..10, any::<prop::sample::Index>(), 0usize..2), 1..60),
    ) {
        let dir = TempDir::new().unwrap();
        let all = batches(&sizes);
        let mut shards = [Shard::new(spec(0..3), 1).unwrap(), Shard::new(spec(3..8), 1).unwrap()];
        let mut saved: [Option<SnapshotFiles>; 2] = [None, None];
        for (number, (kind, index, which)) in events.into_iter().enumerate() {
            let owned = shards[which].spec().owned.clone();
            match kind {
                0 => {
                    let mut next = all.iter().cycle().skip(index.index(all.len()));
                    let between = |shard: &mut Shard| drop(send(shard, next.next().unwrap()));
                    saved[which] = Some(snapshot(&mut shards[which], &dir, number, between));
                }
                1 => {
                    shards[which] = match &saved[which] {
                        Some(files) => reloaded(owned, std::slice::from_ref(files)),
                        None => Shard::new(spec(owned), 1).unwrap(),
                    };
                }
                // A trainer that died may have reached only one of the shards.
                _ => drop(send(&mut shards[which], index.get(&all))),
            }
        }
        shards.iter_mut().for_each(|shard| send_all(shard, &all));
        check(&shards, &all);
    }
}

#[test]
fn a_snapshot_of_two_shards_loads_on_three_and_on_one() {
    let dir = TempDir::new().unwrap();
    let all = batches(&[2, 3, 1]);
    let mut shards = [Shard::new(spec(0..3), 1).unwrap(), Shard::new(spec(3..8), 1).unwrap()];
    let (first, rest) = all.split_at(3);
    let files: Vec<SnapshotFiles> = shards
        .iter_mut()
        .map(|shard| {
            send_all(shard, first);
            snapshot(shard, &dir, 0, |_| {})
        })
        .collect();
    for ends in [&[0, 1, 6, 8][..], &[0, 8]] {
        let mut shards: Vec<Shard> = ends.windows(2).map(|pair| reloaded(pair[0]..pair[1], &files)).collect();
        for shard in &mut shards {
            assert!(send(shard, &first[1]).unwrap().was_known);
            rest.iter().for_each(|batch| assert!(!send(shard, batch).unwrap().was_known));
        }
        check(&shards, &all);
    }
    let missing = Shard::new(spec(0..8), 1).unwrap().load(&files[..1]).unwrap_err();
    assert!(missing.to_string().ends_with("partition 3 is missing"), "{missing}");
}

#[test]
fn a_boundary_is_applied_after_all_earlier_units_and_before_all_later_ones() {
    let boundary = Boundary {
        before_unit: 1,
        decay: Some(0.0),
        decay_step: 0,
        coefficients: (1.0, 1.0),
        min_score: None,
        now: 0,
        max_age: None,
    };
    let all = batches(&[2, 1]);
    let mut shard = Shard::new(spec(0..8), 1).unwrap();
    shard.set_boundaries(vec![boundary]);
    send(&mut shard, &all[1]).unwrap();
    assert_eq!(send(&mut shard, &all[2]).unwrap_err().reason, Reason::NotYet);
    assert_eq!(shard.status().records[0].1.boundaries(), 0);
    send(&mut shard, &all[0]).unwrap();
    assert_eq!(shard.status().records[0].1.boundaries(), 1);
    let show = |shard: &Shard, sign| shard.table().get(sign).unwrap().counters.show;
    assert_eq!(show(&shard, all[0].signs[0]), 0, "the decay removed all earlier shows");
    send(&mut shard, &all[2]).unwrap();
    assert_eq!(show(&shard, all[2].signs[0]), 1);
}

/// After a reload, partitions that were saved before a boundary apply it again, and the others do not.
#[test]
fn a_boundary_is_applied_once_to_each_partition() {
    let boundary = |before_unit| Boundary {
        before_unit,
        decay: Some(0.5),
        decay_step: 1,
        coefficients: (1.0, 1.0),
        min_score: None,
        now: 0,
        max_age: None,
    };
    let dir = TempDir::new().unwrap();
    let all = batches(&[2, 2, 1]);
    let boundaries = vec![boundary(1), boundary(2)];
    let mut uninterrupted = Shard::new(spec(0..8), 1).unwrap();
    uninterrupted.set_boundaries(boundaries.clone());
    send_all(&mut uninterrupted, &all);

    let mut shard = Shard::new(spec(0..8), 1).unwrap();
    shard.set_boundaries(boundaries.clone());
    let mut next = all.iter();
    // Five batches and two boundaries are applied while the eight partitions are copied.
    let files = snapshot(&mut shard, &dir, 0, |shard| send_all(shard, next.next().map_or(&[], std::slice::from_ref)));
    let mut shard = reloaded(0..8, &[files]);
    assert!(shard.status().records.len() > 3);
    shard.set_boundaries(boundaries);
    send_all(&mut shard, &all);
    for sign in shows_of(&all).keys() {
        assert_eq!(shard.table().get(*sign), uninterrupted.table().get(*sign));
    }
    assert_eq!(shard.status().records, uninterrupted.status().records);
}

#[test]
fn a_push_with_nan_updates_counts_but_no_weights() {
    let mut shard = Shard::new(spec(0..8), 1).unwrap();
    let dense = [f32::NAN; NUM_DENSE];
    let push = Push { signs: &[5], counts: &[[2, 1]], gradients: &[1.0, 1.0], dense: &dense, ..PUSH };
    assert_eq!(shard.push(&push).unwrap(), PushOutcome { was_known: false, non_finite: true });
    let row = shard.table().get(5).unwrap();
    assert_eq!((row.counters.show, row.counters.click), (2, 1));
    let mut start = [0.0; 2];
    shard.spec().table.init(5, &mut start);
    assert_eq!(row.weights, start);
    assert!(shard.dense().iter().all(|value| *value == 0.0));
    let mut push_with = |header: PushHeader| shard.push(&Push { header, ..push });
    let other = PushHeader { checksum: 2, ..push.header };
    assert!(push_with(other).unwrap().was_known, "checksums of complete units are forgotten");
    let open = PushHeader { unit: 1, is_last: false, ..push.header };
    push_with(open).unwrap();
    assert_eq!(push_with(PushHeader { checksum: 2, ..open }).unwrap_err().reason, Reason::NameClash);
}

#[test]
fn a_push_of_another_shape_is_refused_and_changes_nothing() {
    let mut shard = Shard::new(spec(0..4), 1).unwrap();
    let dense = vec![1.0; shard.dense().len()];
    let (mine, other): (Vec<u64>, Vec<u64>) = (0..50).partition(|sign| partition_of(*sign, PARTITIONS) < 4);
    let good = Push {
        signs: &mine[..1],
        counts: &[[1, 1]],
        gradients: &[1.0, 1.0],
        dense: &dense,
        sum_indices: &[3],
        sum_values: &[1.0],
        ..PUSH
    };
    let mut error = |push: Push<'_>| {
        let refused = shard.push(&push).unwrap_err();
        assert_eq!(refused.reason, Reason::Malformed);
        refused.text
    };
    assert_eq!(error(Push { gradients: &[1.0], ..good }), "push: expected 2 gradients, got 1");
    assert_eq!(error(Push { dense: &[1.0], ..good }), format!("push: expected {} dense gradients, got 1", dense.len()));
    assert_eq!(error(Push { sum_indices: &[4], ..good }), "push: expected sum indices below 4, got 4");
    assert!(error(Push { signs: &other[..1], ..good }).contains("expected one of partitions 0 to 3, got "));
    assert!(shard.table().is_empty());
    shard.push(&good).unwrap();
}

/// Pushes a batch with the shard's share of `signs`, each shown twice.
fn flood(shard: &mut Shard, unit: u64, signs: Range<u64>) -> Result<PushOutcome, Refusal> {
    let owned = shard.spec().owned.clone();
    let signs: Vec<u64> = signs.filter(|sign| owned.contains(&partition_of(*sign, PARTITIONS))).collect();
    let (counts, gradients) = (vec![[2, 1]; signs.len()], vec![1.0; 2 * signs.len()]);
    let dense = vec![1.0; shard.dense().len()];
    let header = PushHeader { unit, num_samples: 3, ..PUSH.header };
    shard.push(&Push { header, signs: &signs, counts: &counts, gradients: &gradients, dense: &dense, ..PUSH })
}

#[test]
fn a_full_shard_drops_new_signs_and_evicts_rows_at_a_boundary() {
    let row_bytes = Shard::new(spec(0..4), 1).unwrap().table().row_bytes() as u64 + INDEX_BYTES as u64;
    let limit = |rows: u64| 4 * 21 / 2 + 4 + 8 * 8 + row_bytes * 4 * rows;
    let mut shard = Shard::new(spec(0..4), 1).unwrap();
    assert!(shard.limit_memory(limit(9)).unwrap_err().starts_with("expected at least "));
    shard.limit_memory(limit(1000)).unwrap();
    assert_eq!(shard.status().max_rows, Some(1000));
    let end = Boundary {
        before_unit: 2,
        decay: None,
        decay_step: 0,
        coefficients: (0.1, 1.0),
        min_score: None,
        now: 0,
        max_age: None,
    };
    shard.set_boundaries(vec![end]);
    flood(&mut shard, 0, 0..100_000).unwrap();
    let Status { num_rows, overflow, .. } = shard.status();
    assert_eq!(num_rows, 4 * 900, "90 % of each partition");
    let own = (0..100_000u64).filter(|sign| partition_of(*sign, PARTITIONS) < 4).count() as u64;
    let expected = OverflowCounts { dropped_signs: own - 3600, dropped_shows: 2 * (own - 3600), limit_evicted: 0 };
    assert_eq!(overflow, expected);
    // A repeated push is known although most of its signs were dropped: they are not counted as dropped again.
    assert!(flood(&mut shard, 0, 0..100_000).unwrap().was_known);
    assert_eq!(shard.status().overflow, expected);

    // The counts of dropped signs are part of a snapshot.
    let directory = TempDir::new().unwrap();
    let files = snapshot(&mut shard, &directory, 0, |_| {});
    let mut again = reloaded(2..4, std::slice::from_ref(&files));
    assert_eq!((again.status().num_rows, again.overflow.clone()), (1800, shard.overflow[2..].to_vec()));
    again.limit_memory(limit(200) / 2).unwrap();
    assert_eq!(again.status().num_rows, 2 * 160, "the partitions were loaded with more rows than their limit");
    assert_eq!(again.status().overflow.limit_evicted, 2 * 740);

    // At the end of the pass the least valuable rows are evicted, and there is room for new signs.
    flood(&mut shard, 1, 0..1000).unwrap();
    let status = shard.status();
    assert_eq!((status.num_rows, status.overflow.limit_evicted), (4 * 800, 4 * 100));
    let valuable = (0..1000u64).filter(|sign| partition_of(*sign, PARTITIONS) < 4);
    for sign in valuable {
        assert_eq!(shard.table().get(sign).unwrap().counters.show, 4, "rows with more shows are kept");
    }
    flood(&mut shard, 2, 200_000..200_010).unwrap();
    assert_eq!(shard.status().overflow.dropped_signs, expected.dropped_signs, "there is room for new signs");
}
