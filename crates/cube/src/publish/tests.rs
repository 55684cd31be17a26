use std::collections::BTreeMap;

use elasticrec_table::partition::partition_of;
use elasticrec_table::{Eviction, Push};
use proptest::prelude::*;

use super::*;
use crate::{Cube, DeltaFile, View};

const PARTITIONS: u32 = 4;

/// A table and its publish states.
struct World {
    table: Table,
    states: Vec<PublishState>,
}

impl World {
    fn new() -> Self {
        let spec = r#"{"name":"main","seed":7,"partitions":4,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
            "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
        let table = Table::new(TableSpec::from_json(spec).unwrap()).unwrap();
        World { table, states: (0..PARTITIONS).map(|_| PublishState::default()).collect() }
    }

    fn push(&mut self, seen: u32, signs: &[u64]) {
        let (counts, gradients) = (vec![(1, 0); signs.len()], vec![1.0; 2 * signs.len()]);
        let push = Push { signs, handles: None, gradients: &gradients, counts: &counts, seen, is_delta: false };
        self.table.push(push).unwrap();
    }

    fn evict(&mut self, now: u32, max_age: u32) {
        let eviction = Eviction { nonclk_coeff: 1.0, click_coeff: 1.0, min_score: None, now, max_age: Some(max_age) };
        self.table.evict(&eviction);
    }

    fn held(&self) -> Rows {
        let signs = (0..PARTITIONS).flat_map(|partition| self.table.rows_of(partition).signs());
        signs.map(|sign| (sign, self.table.get(sign).unwrap().weights)).collect()
    }

    /// What the first partitions give; the others do not come to their turn.
    fn take(&mut self, order: &PublishRequest, num_partitions: u32) -> Vec<PartitionRows> {
        let states = self.states.iter_mut().zip(0..num_partitions);
        states.map(|(states, partition)| states.take_rows(&mut self.table, partition, order)).collect()
    }
}

type Rows = BTreeMap<u64, Vec<f32>>;

fn order(name: &str, committed: Option<&str>, is_base: bool) -> PublishRequest {
    let committed = committed.map(Into::into);
    PublishRequest { name: name.into(), committed, is_base, row_type: RowType::F32, path: PathBuf::new() }
}

/// What is online after a version of what was taken.
fn apply(online: &mut Rows, all: &[PartitionRows]) {
    for taken in all {
        match &taken.rows {
            RowSelection::Whole(rows) => {
                online.retain(|sign, _| partition_of(*sign, PARTITIONS) != taken.partition);
                for (at, sign) in rows.signs().into_iter().enumerate() {
                    let mut weights = vec![0.0; 2];
                    rows.weights(at, &mut weights);
                    online.insert(sign, weights);
                }
            }
            RowSelection::Some(changes, weights) => {
                changes.removed.iter().for_each(|sign| _ = online.remove(sign));
                for (sign, weights) in changes.changed.iter().zip(weights.chunks(2)) {
                    online.insert(*sign, weights.to_vec());
                }
            }
        }
    }
}

fn num_whole(all: &[PartitionRows]) -> usize {
    all.iter().filter(|taken| matches!(taken.rows, RowSelection::Whole(_))).count()
}

#[derive(Debug, Clone)]
enum Step {
    Push(Vec<u64>),
    Evict(u32),
    /// How many partitions come to their turn before it fails; all of them and one more is a commit.
    Publish(u32, bool),
    Save,
    GoBack,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop::collection::vec(0u64..200, 1..30).prop_map(Step::Push),
        2 => (0u32..8).prop_map(Step::Evict),
        5 => (0..=PARTITIONS + 3, any::<bool>()).prop_map(|(taken, is_base)| Step::Publish(taken, is_base)),
        1 => Just(Step::Save),
        1 => Just(Step::GoBack),
    ];
    prop::collection::vec(step, 1..50)
}

proptest! {
    /// After any failures, the rows online after a commit are those of the table.
    #[test]
    fn what_is_committed_is_what_the_table_holds(steps in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let (mut world, mut saved) = (World::new(), None);
        let (mut online, mut committed): (Rows, Option<String>) = Default::default();
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                Step::Push(mut signs) => {
                    signs.sort_unstable();
                    signs.dedup();
                    world.push(at as u32, &signs);
                }
                Step::Evict(max_age) => world.evict(at as u32, max_age),
                Step::Publish(num_taken, is_base) => {
                    let is_base = is_base || committed.is_none();
                    let order = order(&at.to_string(), committed.as_deref(), is_base);
                    let taken = world.take(&order, num_taken);
                    if num_taken > PARTITIONS {
                        apply(&mut online, &taken);
                        committed = Some(at.to_string());
                        prop_assert_eq!(&online, &world.held());
                        prop_assert_eq!(taken.iter().map(|taken| taken.num_rows).sum::<usize>(), online.len());
                    }
                }
                Step::Save => {
                    let path = directory.path().join(at.to_string());
                    world.table.snapshot(&path).unwrap();
                    saved = Some(path);
                }
                Step::GoBack => {
                    world = World::new();
                    if let Some(path) = &saved {
                        world.table.load(&[path]).unwrap();
                    }
                }
            }
        }
    }
}

#[test]
fn only_what_changed_since_the_committed_one_is_taken() {
    let mut world = World::new();
    world.push(0, &(0..100).collect::<Vec<u64>>());
    assert_eq!(num_whole(&world.take(&order("a", None, true), PARTITIONS)), 4);
    let changed = |all: &[PartitionRows]| {
        let mut signs: Vec<u64> = Vec::new();
        for taken in all {
            let RowSelection::Some(changes, _) = &taken.rows else { panic!("partition {} is whole", taken.partition) };
            signs.extend(&changes.changed);
        }
        signs.sort_unstable();
        signs
    };
    world.push(1, &[3, 5]);
    assert_eq!(changed(&world.take(&order("b", Some("a"), false), PARTITIONS)), [3, 5]);
    world.push(2, &[5, 7]);
    assert_eq!(changed(&world.take(&order("c", Some("a"), false), PARTITIONS)), [3, 5, 7], "b was not committed");
    world.push(3, &[8]);
    assert_eq!(changed(&world.take(&order("d", Some("c"), false), PARTITIONS)), [8]);
    assert!(changed(&world.take(&order("e", Some("d"), false), PARTITIONS)).is_empty());
}

#[test]
fn a_partition_that_does_not_know_the_committed_publish_is_written_as_a_whole() {
    let mut world = World::new();
    let mut whole = |order: &PublishRequest, signs: &[u64]| {
        world.push(0, signs);
        num_whole(&world.take(order, PARTITIONS))
    };
    assert_eq!(whole(&order("b", Some("a"), false), &(0..100).collect::<Vec<u64>>()), 4, "as after a load");
    assert_eq!(whole(&order("c", Some("b"), false), &[3, 5]), 0);
    assert_eq!(whole(&order("d", Some("x"), false), &[]), 4, "neither its basis nor pending");
    assert_eq!(whole(&order("e", Some("d"), false), &[]), 0);
}

/// A base, deltas, one that fails half-way, one of nothing, one of a table that began anew: all read back through the files.
#[test]
fn the_files_are_what_the_table_holds() {
    let directory = tempfile::tempdir().unwrap();
    let (mut world, mut view): (World, Option<View>) = (World::new(), None);
    let mut committed: Option<String> = None;
    for step in 0..7u64 {
        if step == 6 {
            world = World::new();
        }
        if step != 4 {
            let signs: Vec<u64> = if step == 0 { (0..400).collect() } else { (step * 7..step * 7 + 40).collect() };
            world.push(1000 + step as u32, &signs);
            // these go with the next step
            world.push(step as u32, &(500 + step * 10..510 + step * 10).collect::<Vec<u64>>());
            world.evict(1000, 1000 - step as u32);
        }
        if step == 2 {
            let failed = order("half", committed.as_deref(), false);
            world.take(&failed, 2);
        }
        let path = directory.path().join(step.to_string());
        let order = PublishRequest { path: path.clone(), ..order(&step.to_string(), committed.as_deref(), step == 0) };
        let World { table, states } = &mut world;
        let published = publish_table(table, states, &order).unwrap();
        assert_eq!(published.num_rows, table.len() as u64);
        assert_eq!(published.written.bytes, std::fs::metadata(&path).unwrap().len());
        assert_eq!(published.num_whole, if [0, 6].contains(&step) { 4 } else { 0 });
        if step == 4 {
            assert_eq!((published.num_changed, published.num_removed), (0, 0), "nothing happened");
        }
        let next = match view.take() {
            None => View::of_base(Arc::new(Cube::open(&[path]).unwrap())),
            Some(view) => view.with_delta(&[DeltaFile::open(&path).unwrap()]).unwrap(),
        };
        committed = Some(step.to_string());
        let held = world.held();
        let all: Vec<u64> = (0..600).collect();
        let mut found = vec![0.0; 2 * all.len()];
        assert_eq!(next.lookup(&all, &mut found), held.len());
        assert_eq!(next.num_rows(), held.len() as u64);
        for (sign, row) in all.iter().zip(found.chunks(2)) {
            assert_eq!(row, held.get(sign).map_or(&[0.0; 2][..], |weights| weights), "step {step}, sign {sign}");
        }
        view = Some(next);
    }
}

/// A base is the same file with and without lists of what changes.
#[test]
fn a_base_is_the_table() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = World::new();
    world.push(1, &(0..300).collect::<Vec<u64>>());
    let [plain, listed] = ["plain", "listed"].map(|name| directory.path().join(name));
    crate::write_table(&world.table, &plain, RowType::F32).unwrap();
    let order = PublishRequest { path: listed.clone(), ..order("a", None, true) };
    publish_table(&mut world.table, &mut world.states, &order).unwrap();
    assert_eq!(std::fs::read(plain).unwrap(), std::fs::read(listed).unwrap());
}
