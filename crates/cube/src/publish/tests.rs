use std::collections::BTreeMap;

use elasticrec_table::partition::partition_of;
use elasticrec_table::{Eviction, Push};
use proptest::prelude::*;

use super::*;
use crate::{Cube, DeltaFile, View};

const PARTITIONS: u32 = 4;

/// A table and its publish states.
struct TableWithStates {
    table: Table,
    states: Vec<PublishState>,
}

impl TableWithStates {
    fn new() -> Self {
        let spec = r#"{"name":"main","seed":7,"partitions":4,"columns":[{"name":"deep","width":2,"init_scale":0.5}],
            "optimizer":{"kind":"sgd","learning_rate":0.125}}"#;
        let table = Table::new(TableSpec::from_json(spec).unwrap()).unwrap();
        TableWithStates { table, states: (0..PARTITIONS).map(|_| PublishState::default()).collect() }
    }

    fn push(&mut self, seen: u32, signs: &[u64]) {
        let (counts, gradients) = (vec![(1, 0); signs.len()], vec![1.0; 2 * signs.len()]);
        let push = Push { signs, handles: None, gradients: &gradients, counts: &counts, seen, is_increment: false };
        self.table.push(push).unwrap();
    }

    fn evict(&mut self, now: u32, max_age: u32) {
        let eviction = Eviction { nonclk_coeff: 1.0, click_coeff: 1.0, min_score: None, now, max_age: Some(max_age) };
        self.table.evict(&eviction);
    }

    fn rows(&self) -> Rows {
        let signs = (0..PARTITIONS).flat_map(|partition| self.table.rows_of(partition).signs());
        signs.map(|sign| (sign, self.table.get(sign).unwrap().weights)).collect()
    }

    /// Takes the rows of the first partitions only, like a publish that fails then.
    fn take(&mut self, request: &PublishRequest, num_partitions: u32) -> Vec<PartitionRows> {
        let states = self.states.iter_mut().zip(0..num_partitions);
        states.map(|(state, partition)| state.take_rows(&mut self.table, partition, request)).collect()
    }
}

type Rows = BTreeMap<u64, Vec<f32>>;

fn request(name: &str, committed: Option<&str>, is_base: bool) -> PublishRequest {
    let committed = committed.map(Into::into);
    PublishRequest { name: name.into(), committed, is_base, row_type: RowType::F32, path: PathBuf::new() }
}

/// Applies a version with these rows to the rows that are online.
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
            RowSelection::Changed(changes, weights) => {
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
    /// Number of partitions that are taken before the publish fails, more than all for a commit; whether it is a base.
    Publish(u32, bool),
    Save,
    Reload,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop::collection::vec(0u64..200, 1..30).prop_map(Step::Push),
        2 => (0u32..8).prop_map(Step::Evict),
        5 => (0..=PARTITIONS + 3, any::<bool>()).prop_map(|(taken, is_base)| Step::Publish(taken, is_base)),
        1 => Just(Step::Save),
        1 => Just(Step::Reload),
    ];
    prop::collection::vec(step, 1..50)
}

proptest! {
    /// After any failures, the rows online after a commit are those of the table.
    #[test]
    fn committed_versions_equal_the_table(steps in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let (mut source, mut saved) = (TableWithStates::new(), None);
        let (mut online, mut committed): (Rows, Option<String>) = Default::default();
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                Step::Push(mut signs) => {
                    signs.sort_unstable();
                    signs.dedup();
                    source.push(at as u32, &signs);
                }
                Step::Evict(max_age) => source.evict(at as u32, max_age),
                Step::Publish(num_taken, is_base) => {
                    let is_base = is_base || committed.is_none();
                    let request = request(&at.to_string(), committed.as_deref(), is_base);
                    let taken = source.take(&request, num_taken);
                    if num_taken > PARTITIONS {
                        apply(&mut online, &taken);
                        committed = Some(at.to_string());
                        prop_assert_eq!(&online, &source.rows());
                        prop_assert_eq!(taken.iter().map(|taken| taken.num_rows).sum::<usize>(), online.len());
                    }
                }
                Step::Save => {
                    let path = directory.path().join(at.to_string());
                    source.table.snapshot(&path).unwrap();
                    saved = Some(path);
                }
                Step::Reload => {
                    source = TableWithStates::new();
                    if let Some(path) = &saved {
                        source.table.load(&[path]).unwrap();
                    }
                }
            }
        }
    }
}

#[test]
fn a_publish_takes_the_changes_since_the_committed_publish() {
    let mut source = TableWithStates::new();
    source.push(0, &(0..100).collect::<Vec<u64>>());
    assert_eq!(num_whole(&source.take(&request("a", None, true), PARTITIONS)), 4);
    let changed = |all: &[PartitionRows]| {
        let mut signs: Vec<u64> = Vec::new();
        for taken in all {
            let RowSelection::Changed(changes, _) = &taken.rows else {
                panic!("partition {} is whole", taken.partition)
            };
            signs.extend(&changes.changed);
        }
        signs.sort_unstable();
        signs
    };
    source.push(1, &[3, 5]);
    assert_eq!(changed(&source.take(&request("b", Some("a"), false), PARTITIONS)), [3, 5]);
    source.push(2, &[5, 7]);
    assert_eq!(changed(&source.take(&request("c", Some("a"), false), PARTITIONS)), [3, 5, 7], "b was not committed");
    source.push(3, &[8]);
    assert_eq!(changed(&source.take(&request("d", Some("c"), false), PARTITIONS)), [8]);
    assert!(changed(&source.take(&request("e", Some("d"), false), PARTITIONS)).is_empty());
}

#[test]
fn a_partition_that_does_not_know_the_committed_publish_is_written_as_a_whole() {
    let mut source = TableWithStates::new();
    let mut whole = |request: &PublishRequest, signs: &[u64]| {
        source.push(0, signs);
        num_whole(&source.take(request, PARTITIONS))
    };
    assert_eq!(whole(&request("b", Some("a"), false), &(0..100).collect::<Vec<u64>>()), 4, "as after a load");
    assert_eq!(whole(&request("c", Some("b"), false), &[3, 5]), 0);
    assert_eq!(whole(&request("d", Some("x"), false), &[]), 4, "x is neither the basis nor pending");
    assert_eq!(whole(&request("e", Some("d"), false), &[]), 0);
}

/// A base and deltas are read back from their files. One publish fails half-way, one has no changes, and the last one
/// follows the replacement of the table by a new one.
#[test]
fn written_files_have_the_rows_of_the_table() {
    let directory = tempfile::tempdir().unwrap();
    let (mut source, mut view): (TableWithStates, Option<View>) = (TableWithStates::new(), None);
    let mut committed: Option<String> = None;
    for step in 0..7u64 {
        if step == 6 {
            source = TableWithStates::new();
        }
        if step != 4 {
            let signs: Vec<u64> = if step == 0 { (0..400).collect() } else { (step * 7..step * 7 + 40).collect() };
            source.push(1000 + step as u32, &signs);
            // The next eviction removes these rows.
            source.push(step as u32, &(500 + step * 10..510 + step * 10).collect::<Vec<u64>>());
            source.evict(1000, 1000 - step as u32);
        }
        if step == 2 {
            let failed = request("half", committed.as_deref(), false);
            source.take(&failed, 2);
        }
        let path = directory.path().join(step.to_string());
        let request =
            PublishRequest { path: path.clone(), ..request(&step.to_string(), committed.as_deref(), step == 0) };
        let TableWithStates { table, states } = &mut source;
        let published = publish_table(table, states, &request).unwrap();
        assert_eq!(published.num_rows, table.len() as u64);
        assert_eq!(published.written.bytes, std::fs::metadata(&path).unwrap().len());
        assert_eq!(published.num_whole, if [0, 6].contains(&step) { 4 } else { 0 });
        if step == 4 {
            assert_eq!((published.num_changed, published.num_removed), (0, 0), "nothing changed");
        }
        let next = match view.take() {
            None => View::of_base(Arc::new(Cube::open(&[path]).unwrap())),
            Some(view) => view.with_delta(&[DeltaFile::open(&path).unwrap()]).unwrap(),
        };
        committed = Some(step.to_string());
        let expected = source.rows();
        let all: Vec<u64> = (0..600).collect();
        let mut found = vec![0.0; 2 * all.len()];
        assert_eq!(next.lookup(&all, &mut found), expected.len());
        assert_eq!(next.num_rows(), expected.len() as u64);
        for (sign, row) in all.iter().zip(found.chunks(2)) {
            assert_eq!(row, expected.get(sign).map_or(&[0.0; 2][..], |weights| weights), "step {step}, sign {sign}");
        }
        view = Some(next);
    }
}

/// A base is the same file whether or not the table records its changes.
#[test]
fn a_published_base_equals_a_written_cube() {
    let directory = tempfile::tempdir().unwrap();
    let mut source = TableWithStates::new();
    source.push(1, &(0..300).collect::<Vec<u64>>());
    let [plain, listed] = ["plain", "listed"].map(|name| directory.path().join(name));
    crate::write_table(&source.table, &plain, RowType::F32).unwrap();
    let request = PublishRequest { path: listed.clone(), ..request("a", None, true) };
    publish_table(&mut source.table, &mut source.states, &request).unwrap();
    assert_eq!(std::fs::read(plain).unwrap(), std::fs::read(listed).unwrap());
}
