//! The table against a plain map that does everything the slow way: pushes, late columns, decay, eviction, snapshots,
//! with one thread and with several.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;

use elasticrec_table::partition::mix;
use elasticrec_table::{Counters, Eviction, Handles, Push, Table, TableSpec};
use proptest::prelude::*;

const WIDTH: usize = 4;
const RATE: f32 = 0.1;

fn spec(admit_after: u32, late: bool) -> TableSpec {
    let json = format!(
        r#"{{"name":"main","seed":7,"partitions":5,"admit_after":{admit_after},
        "columns":[{{"name":"wide","width":1,"init_scale":0.5}},{{"name":"deep","width":3,"init_scale":0.5,"late":{late}}}],
        "optimizer":{{"kind":"adagrad","learning_rate":{RATE},"initial_accumulator":0.25,"epsilon":1e-8}}}}"#
    );
    TableSpec::from_json(&json).unwrap()
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    counters: Counters,
    weights: [f32; WIDTH],
    sums: [f32; WIDTH],
}

struct Model {
    spec: TableSpec,
    rows: BTreeMap<u64, Row>,
}

impl Model {
    fn initial(&self, sign: u64) -> [f32; WIDTH] {
        let mut weights = [0.0; WIDTH];
        self.spec.init(sign, &mut weights);
        weights
    }

    fn push(&mut self, sign: u64, gradient: &[f32], (show, click): (u32, u32), seen: u32, finite: bool) {
        let initial = self.initial(sign);
        let late = self.spec.columns[1].late;
        let row = self.rows.entry(sign).or_insert_with(|| {
            let weights = if late { [initial[0], 0.0, 0.0, 0.0] } else { initial };
            Row { counters: Counters::default(), weights, sums: [0.25; WIDTH] }
        });
        let counters = &mut row.counters;
        counters.show += show;
        counters.click += click;
        counters.seen = counters.seen.max(seen);
        if !counters.admitted && counters.show >= self.spec.admit_after {
            counters.admitted = true;
            if late {
                row.weights[1..].copy_from_slice(&initial[1..]);
            }
        }
        let learns = |at: usize| at == 0 || !late || row.counters.admitted;
        for at in (0..WIDTH).filter(|&at| finite && learns(at)) {
            row.sums[at] += gradient[at] * gradient[at];
            row.weights[at] -= RATE * gradient[at] / (row.sums[at].sqrt() + 1e-8);
        }
    }

    fn decay(&mut self, rate: f64, step: u32) {
        for (&sign, row) in &mut self.rows {
            let chance = (mix(sign ^ mix(u64::from(step))) >> 32) as f64 / 4_294_967_296.0;
            for count in [&mut row.counters.show, &mut row.counters.click] {
                *count = (f64::from(*count) * rate + chance).floor() as u32;
            }
        }
    }

    fn evict(&mut self, eviction: &Eviction) -> usize {
        let before = self.rows.len();
        self.rows.retain(|_, row| {
            let Counters { show, click, seen, .. } = row.counters;
            let score = eviction.nonclk_coeff * f64::from(show - click) + eviction.click_coeff * f64::from(click);
            let old = eviction.max_age.is_some_and(|most| eviction.now > seen + most);
            !old && eviction.min_score.is_none_or(|least| score >= least)
        });
        before - self.rows.len()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Push { signs: Vec<u64>, click: bool, finite: bool, evict_between: bool },
    Decay(f64),
    Evict { min_score: Option<f64>, max_age: Option<u32> },
    Reload,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let signs = prop::collection::btree_set(prop_oneof![4 => 0u64..200, 1 => any::<u64>()], 0..80);
    let push = (signs, any::<bool>(), prop::bool::weighted(0.9), prop::bool::weighted(0.2)).prop_map(
        |(signs, click, finite, evict_between)| Step::Push {
            signs: signs.into_iter().collect(),
            click,
            finite,
            evict_between,
        },
    );
    let evict = (prop::option::of(0.0..2.0), prop::option::of(0u32..6))
        .prop_map(|(min_score, max_age)| Step::Evict { min_score, max_age });
    let step = prop_oneof![8 => push, 1 => (0.3..1.0).prop_map(Step::Decay), 2 => evict, 1 => Just(Step::Reload)];
    prop::collection::vec(step, 1..30)
}

fn reload(table: &Table, spec: &TableSpec) -> Table {
    let dir = tempfile::tempdir().unwrap();
    table.snapshot(&dir.path().join("a")).unwrap();
    let mut loaded = Table::new(spec.clone()).unwrap().with_threads(2);
    loaded.load(&[dir.path().join("a")]).unwrap();
    loaded
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_table_is_a_map(steps in steps(), admit_after in 0u32..6, late in any::<bool>()) {
        let spec = spec(admit_after, late);
        let mut table = Table::new(spec.clone()).unwrap();
        let mut model = Model { spec: spec.clone(), rows: BTreeMap::new() };
        for (now, step) in steps.into_iter().enumerate() {
            let now = now as u32;
            match step {
                Step::Push { signs, click, finite, evict_between } => {
                    let (mut out, mut handles) = (vec![9.0; signs.len() * WIDTH], Handles::default());
                    table.pull(&signs, &mut out, &mut handles);
                    for (sign, pulled) in signs.iter().zip(out.chunks(WIDTH)) {
                        let expected = model.rows.get(sign).map_or([0.0; WIDTH], |row| row.weights);
                        prop_assert_eq!(pulled, &expected);
                    }
                    if evict_between {
                        let eviction = Eviction { nonclk_coeff: 0.1, click_coeff: 1.0, min_score: Some(0.3), now, max_age: None };
                        prop_assert_eq!(table.evict(&eviction), model.evict(&eviction));
                    }
                    let mut gradients: Vec<f32> = (0..out.len()).map(|i| (i % 7) as f32 * 0.3 - 1.0).collect();
                    if !finite && !gradients.is_empty() {
                        let at = now as usize % gradients.len();
                        gradients[at] = f32::NAN;
                    }
                    let finite = finite || gradients.is_empty();
                    let counts: Vec<(u32, u32)> = signs.iter().map(|sign| (1 + (sign % 2) as u32, u32::from(click))).collect();
                    let known = model.rows.len();
                    for (at, &sign) in signs.iter().enumerate() {
                        model.push(sign, &gradients[at * WIDTH..], counts[at], now, finite);
                    }
                    let pushed = table.push(Push { signs: &signs, handles: Some(&handles), gradients: &gradients, counts: &counts, seen: now });
                    prop_assert_eq!(pushed.created, model.rows.len() - known);
                    prop_assert_eq!(pushed.non_finite, !finite);
                }
                Step::Decay(rate) => {
                    table.decay(rate, now);
                    model.decay(rate, now);
                }
                Step::Evict { min_score, max_age } => {
                    let eviction = Eviction { nonclk_coeff: 0.1, click_coeff: 1.0, min_score, now, max_age };
                    prop_assert_eq!(table.evict(&eviction), model.evict(&eviction));
                }
                Step::Reload => table = reload(&table, &spec),
            }
            prop_assert_eq!(table.len(), model.rows.len());
        }
        for (&sign, expected) in &model.rows {
            let row = table.get(sign).unwrap();
            prop_assert_eq!(row.counters, expected.counters);
            prop_assert_eq!(&row.weights[..], &expected.weights[..]);
            prop_assert_eq!(&row.state[..], &expected.sums[..]);
        }
    }
}

/// Batches large enough for several threads, evictions between them: the snapshots are the same, byte for byte.
#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let run = |threads: usize| {
        let mut table = Table::new(spec(2, true)).unwrap().with_threads(threads);
        let (mut out, mut handles) = (Vec::new(), Handles::default());
        for step in 0..4u32 {
            let signs: Vec<u64> =
                (0..50_000u64).map(|i| mix(i % 35_000 + u64::from(step) * 10_000 + i / 35_000 * 200_000)).collect();
            out.resize(signs.len() * WIDTH, 0.0);
            table.pull(&signs, &mut out, &mut handles);
            let gradients: Vec<f32> =
                out.iter().enumerate().map(|(i, weight)| weight + (i % 13) as f32 * 0.01).collect();
            let counts: Vec<(u32, u32)> = signs.iter().map(|sign| (1, (sign % 3 == 0) as u32)).collect();
            table.push(Push {
                signs: &signs,
                handles: Some(&handles),
                gradients: &gradients,
                counts: &counts,
                seen: step,
            });
            table.decay(0.9, step);
            let eviction =
                Eviction { nonclk_coeff: 0.1, click_coeff: 1.0, min_score: Some(0.05), now: step, max_age: Some(2) };
            assert!(table.evict(&eviction) > 0 || step == 0);
        }
        let dir = tempfile::tempdir().unwrap();
        table.snapshot(&dir.path().join("a")).unwrap();
        let mut loaded = Table::new(spec(2, true)).unwrap().with_threads(threads);
        loaded.load(&[dir.path().join("a")]).unwrap();
        loaded.snapshot(&dir.path().join("b")).unwrap();
        let bytes = std::fs::read(dir.path().join("a")).unwrap();
        assert_eq!(bytes, std::fs::read(dir.path().join("b")).unwrap());
        (bytes, table.len())
    };
    let one = run(1);
    assert!(one.1 > 20_000);
    for threads in [2, 3] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

#[test]
fn changes_are_those_since_the_last_time() {
    let mut table = Table::new(spec(0, false)).unwrap();
    let push = |table: &mut Table, signs: &[u64]| {
        let (gradients, counts) = (vec![1.0; signs.len() * WIDTH], vec![(1, 0); signs.len()]);
        table.push(Push { signs, handles: None, gradients: &gradients, counts: &counts, seen: 0 });
    };
    let take = |table: &mut Table| (0..5).flat_map(|partition| table.take_changed(partition)).collect::<Vec<u64>>();
    push(&mut table, &(0..100).collect::<Vec<u64>>());
    assert_eq!(take(&mut table).len(), 100);
    push(&mut table, &[3, 200]);
    push(&mut table, &[3]);
    let bytes = |table: &Table| {
        let dir = tempfile::tempdir().unwrap();
        table.snapshot(&dir.path().join("a")).unwrap();
        std::fs::read(dir.path().join("a")).unwrap()
    };
    let before = bytes(&table);
    let mut changed = take(&mut table);
    changed.sort_unstable();
    assert_eq!(changed, [3, 200]);
    assert!(take(&mut table).is_empty());
    assert!(bytes(&table) == before, "marks are not part of a snapshot");
    let mut loaded = reload(&table, &spec(0, false));
    assert_eq!(take(&mut loaded).len(), 101, "all after a load");
}

#[test]
fn decay_is_right_on_average_and_the_same_again() {
    let mut table = Table::new(spec(0, false)).unwrap();
    let signs: Vec<u64> = (0..20_000).collect();
    let (gradients, counts) = (vec![0.0; signs.len() * WIDTH], vec![(3, 1); signs.len()]);
    table.push(Push { signs: &signs, handles: None, gradients: &gradients, counts: &counts, seen: 0 });
    table.decay(0.9, 1);
    let total = |table: &Table| {
        signs.iter().map(|&sign| table.get(sign).unwrap().counters).fold((0u64, 0u64), |(show, click), counters| {
            assert!(counters.click <= counters.show && counters.show <= 3);
            (show + u64::from(counters.show), click + u64::from(counters.click))
        })
    };
    let (show, click) = total(&table);
    assert!((53_500..54_500).contains(&show) && (17_700..18_300).contains(&click), "{show} {click}");
    table.decay(1.0, 2);
    assert_eq!(total(&table), (show, click), "a rate of 1 changes nothing");
}
