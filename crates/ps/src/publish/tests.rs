use std::ops::Range;
use std::sync::Arc;

use elasticrec_cube::{Cube, DeltaFile, RowType, View};
use elasticrec_table::{Eviction, TableSpec};
use elasticrec_wire::{Push, PushHeader};

use super::*;
use crate::dense::DenseOptimizer;
use crate::shard::ShardSpec;

const PARTITIONS: u32 = 4;

fn spec(owned: Range<u32>) -> ShardSpec {
    let table = r#"{"name":"main","seed":7,"partitions":4,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
        "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
    ShardSpec {
        table: TableSpec::from_json(table).unwrap(),
        num_dense: 10,
        num_buffers: 0,
        dense: DenseOptimizer::Sgd { learning_rate: 0.125 },
        num_sums: 0,
        owned,
    }
}

fn push(shard: &mut Shard, unit: u64, signs: &[u64]) {
    let (counts, gradients) = (vec![[1, 0]; signs.len()], vec![1.0; 2 * signs.len()]);
    let dense = vec![1.0; shard.dense().len()];
    let push = Push {
        epoch: 1,
        incarnation: 1,
        header: PushHeader {
            unit,
            is_last: true,
            checksum: unit,
            num_samples: 1,
            seen: unit as u32,
            ..PushHeader::default()
        },
        signs,
        counts: &counts,
        gradients: &gradients,
        dense: &dense,
        sum_indices: &[],
        sum_values: &[],
    };
    shard.push(&push).unwrap();
}

fn evict(shard: &mut Shard, now: u32, max_age: u32) {
    let eviction = Eviction { nonclk_coeff: 1.0, click_coeff: 1.0, min_score: None, now, max_age: Some(max_age) };
    shard.table.evict(&eviction);
}

fn publish(shard: &mut Shard, request: &PublishRequest) -> PublishedShard {
    let mut writer = shard.publish_writer(request).unwrap();
    for partition in shard.spec.owned.clone() {
        writer.add(&shard.take_rows(request, partition)).unwrap();
    }
    writer.finish().unwrap()
}

/// Two shards write a base and deltas, which are read back from their files. In between, an empty shard replaces one.
#[test]
fn published_files_have_the_rows_of_the_shards() {
    let directory = tempfile::tempdir().unwrap();
    let mut shards = [0..2, 2..4].map(|owned| Shard::new(spec(owned), 1).unwrap());
    let owner = |sign: u64| (elasticrec_table::partition::partition_of(sign, PARTITIONS) / 2) as usize;
    let mut view: Option<View> = None;
    let mut committed: Option<String> = None;
    for step in 0..6u64 {
        if step == 4 {
            shards[1] = Shard::new(spec(2..4), 1).unwrap();
        }
        for (at, shard) in shards.iter_mut().enumerate() {
            let own = |signs: Range<u64>| signs.filter(|sign| owner(*sign) == at).collect::<Vec<u64>>();
            push(shard, 1000 + step, &own(if step == 0 { 0..400 } else { step * 7..step * 7 + 40 }));
            // The next eviction removes these rows.
            push(shard, step, &own(500 + step * 10..510 + step * 10));
            evict(shard, 1000, 1000 - step as u32);
        }
        let mut paths = Vec::new();
        let (mut num_whole, mut num_removed) = (0, 0);
        for (at, shard) in shards.iter_mut().enumerate() {
            let path = directory.path().join(format!("{step}-{at}"));
            let request = PublishRequest {
                name: step.to_string().into(),
                committed: committed.as_deref().map(Into::into),
                is_base: step == 0,
                row_type: RowType::F32,
                path: path.clone(),
            };
            let published = publish(shard, &request);
            assert_eq!(published.rows.num_rows, shard.table.len() as u64);
            assert_eq!(published.dense, shard.dense());
            assert_eq!(published.num_samples, shard.samples()[0]);
            assert_eq!(published.rows.written.bytes, std::fs::metadata(&path).unwrap().len());
            num_whole += published.rows.num_whole;
            num_removed += published.rows.num_removed;
            paths.push(path);
        }
        // At step 5 the replaced shard has so few rows that its list of changes may be longer.
        assert!(step == 5 || num_whole == [4, 0, 0, 0, 2][step as usize], "step {step}: {num_whole}");
        assert!(step == 0 || step > 3 || num_removed == 10, "step {step}: {num_removed}");
        let next = match view.take() {
            None => View::of_base(Arc::new(Cube::open(&paths).unwrap())),
            Some(view) => {
                let parts: Vec<DeltaFile> = paths.iter().map(|path| DeltaFile::open(path).unwrap()).collect();
                view.with_delta(&parts).unwrap()
            }
        };
        committed = Some(step.to_string());
        let all: Vec<u64> = (0..600).collect();
        let (mut found, mut present) = (vec![0.0; 2 * all.len()], 0);
        let hits = next.lookup(&all, &mut found);
        for &sign in &all {
            let row = shards[owner(sign)].table.get(sign);
            present += usize::from(row.is_some());
            let weights = row.map_or(vec![0.0; 2], |row| row.weights);
            assert_eq!(found[2 * sign as usize..2 * sign as usize + 2], weights, "step {step}, sign {sign}");
        }
        assert_eq!((hits, next.num_rows()), (present, present as u64));
        view = Some(next);
    }
}
