//! Compares the table with a simple map in f64: pushes, late columns, decay, eviction and snapshots, with one thread and
//! with several.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;

use elasticrec_table::partition::{mix, partition_of};
use elasticrec_table::{Changes, Counters, Eviction, Handles, Push, Table, TableSpec};
use proptest::prelude::*;

const WIDTH: usize = 4;
const RATE: f64 = 0.1;
/// The settings of a table are f32, and 1 − beta in f32 differs from 1 − beta in f64.
const BETAS: [f64; 2] = [0.9f32 as f64, 0.99f32 as f64];
const FTRL_BETA: f64 = 1.0;
const L1: f64 = 0.05;
const L2: f64 = 0.1;

/// Optimizers with state per column.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Adagrad,
    Adam,
    Ftrl,
}

fn spec(admit_after: u32, late: bool) -> TableSpec {
    spec_of(Kind::Adagrad, admit_after, late)
}

fn spec_of(kind: Kind, admit_after: u32, late: bool) -> TableSpec {
    let optimizer = match kind {
        Kind::Adagrad => r#""kind":"adagrad","initial_accumulator":0.25,"epsilon":1e-8"#,
        Kind::Adam => r#""kind":"adam","beta1":0.9,"beta2":0.99,"epsilon":1e-8"#,
        Kind::Ftrl => r#""kind":"ftrl","beta":1,"l1":0.05,"l2":0.1"#,
    };
    let json = format!(
        r#"{{"name":"main","seed":7,"partitions":5,"admit_after":{admit_after},
        "columns":[{{"name":"wide","width":1,"init_scale":0.5}},{{"name":"deep","width":3,"init_scale":0.5,"late":{late}}}],
        "optimizer":{{{optimizer},"learning_rate":{RATE}}}}}"#
    );
    TableSpec::from_json(&json).unwrap()
}

/// A weight and its optimizer state.
#[derive(Debug, Clone, Copy)]
struct Weight {
    value: f64,
    /// Adam's mean, FTRL's z.
    first: f64,
    /// The sum or the mean of squares.
    second: f64,
    steps: i32,
}

impl Weight {
    fn start(kind: Kind, weight: f64) -> Self {
        let [first, second] = match kind {
            Kind::Adagrad => [0.0, 0.25],
            Kind::Adam => [0.0, 0.0],
            Kind::Ftrl => {
                [-weight * (FTRL_BETA / RATE + L2) - if weight == 0.0 { 0.0 } else { L1 * weight.signum() }, 0.0]
            }
        };
        Weight { value: weight, first, second, steps: 0 }
    }

    fn step(&mut self, kind: Kind, g: f64) {
        self.steps += 1;
        match kind {
            Kind::Adagrad => {
                self.second += g * g;
                self.value -= RATE * g / (self.second.sqrt() + 1e-8);
            }
            Kind::Adam => {
                self.first = BETAS[0] * self.first + (1.0 - BETAS[0]) * g;
                self.second = BETAS[1] * self.second + (1.0 - BETAS[1]) * g * g;
                let [mean, square] = self.powers().map(|power| 1.0 - power);
                self.value -= RATE * (self.first / mean) / ((self.second / square).sqrt() + 1e-8);
            }
            Kind::Ftrl => {
                let after = self.second + g * g;
                self.first += g - (after.sqrt() - self.second.sqrt()) / RATE * self.value;
                self.second = after;
                let evidence = self.first.abs() - L1;
                let strength = (FTRL_BETA + after.sqrt()) / RATE + L2;
                self.value = if evidence <= 0.0 { 0.0 } else { -self.first.signum() * evidence / strength };
            }
        }
    }

    fn powers(&self) -> [f64; 2] {
        BETAS.map(|beta| beta.powi(self.steps))
    }
}

#[derive(Debug, Clone)]
struct Row {
    counters: Counters,
    weights: [Weight; WIDTH],
}

impl Row {
    fn values(&self) -> [f64; WIDTH] {
        self.weights.map(|weight| weight.value)
    }

    /// The state in the table's layout.
    fn state(&self, kind: Kind) -> Vec<f64> {
        let (first, second) = (self.weights.map(|weight| weight.first), self.weights.map(|weight| weight.second));
        match kind {
            Kind::Adagrad => second.to_vec(),
            Kind::Adam => [&first[..], &second, &self.weights[0].powers(), &self.weights[1].powers()].concat(),
            Kind::Ftrl => [first, second].concat(),
        }
    }
}

/// Whether f32 values agree with the f64 reference.
fn is_close(values: &[f32], expected: &[f64]) -> bool {
    values
        .iter()
        .zip(expected)
        .all(|(value, expected)| (f64::from(*value) - expected).abs() <= 1e-5 * expected.abs().max(1.0))
}

struct Model {
    kind: Kind,
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
        let kind = self.kind;
        let row = self.rows.entry(sign).or_insert_with(|| {
            let weights = if late { [initial[0], 0.0, 0.0, 0.0] } else { initial };
            Row { counters: Counters::default(), weights: weights.map(|weight| Weight::start(kind, weight.into())) }
        });
        let counters = &mut row.counters;
        counters.show += show;
        counters.click += click;
        counters.seen = counters.seen.max(seen);
        if !counters.admitted && counters.show >= self.spec.admit_after {
            counters.admitted = true;
            if late {
                let late = initial.map(|weight| Weight::start(kind, weight.into()));
                row.weights[1..].copy_from_slice(&late[1..]);
            }
        }
        let learns = |at: usize| at == 0 || !late || row.counters.admitted;
        for at in (0..WIDTH).filter(|&at| finite && learns(at)) {
            row.weights[at].step(kind, gradient[at].into());
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
    fn the_table_agrees_with_a_map(
        steps in steps(),
        admit_after in 0u32..6,
        late in any::<bool>(),
        kind in prop::sample::select(vec![Kind::Adagrad, Kind::Adam, Kind::Ftrl]),
    ) {
        let spec = spec_of(kind, admit_after, late);
        let mut table = Table::new(spec.clone()).unwrap();
        let mut model = Model { kind, spec: spec.clone(), rows: BTreeMap::new() };
        for (now, step) in steps.into_iter().enumerate() {
            let now = now as u32;
            match step {
                Step::Push { signs, click, finite, evict_between } => {
                    let (mut out, mut handles) = (vec![9.0; signs.len() * WIDTH], Handles::default());
                    table.pull(&signs, &mut out, &mut handles);
                    for (sign, pulled) in signs.iter().zip(out.chunks(WIDTH)) {
                        let expected = model.rows.get(sign).map_or([0.0; WIDTH], Row::values);
                        prop_assert!(is_close(pulled, &expected), "{:?} {:?}", pulled, expected);
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
                    let pushed = table.push(Push { signs: &signs, handles: Some(&handles), gradients: &gradients, counts: &counts, seen: now, is_increment: false }).unwrap();
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
            prop_assert!(is_close(&row.weights, &expected.values()), "{:?} {:?}", row, expected);
            // The powers of late columns that do not exist yet have no meaning.
            let known = if expected.counters.admitted { row.state.len() } else { row.state.len().min(2 * WIDTH + 2) };
            prop_assert!(is_close(&row.state[..known], &expected.state(kind)), "{:?} {:?}", row, expected);
        }
    }
}

/// Uses batches large enough for several threads, with evictions between them.
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
            let push = Push {
                signs: &signs,
                handles: Some(&handles),
                gradients: &gradients,
                counts: &counts,
                seen: step,
                is_increment: false,
            };
            table.push(push).unwrap();
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

/// A hint may name a row of another thread's partition; `push` asserts that it is not used then.
#[test]
fn hints_of_other_signs_are_harmless_with_several_threads() {
    let signs: Vec<u64> = (0..40_000).map(mix).collect();
    let others: Vec<u64> = signs.iter().rev().copied().collect();
    let (gradients, counts) = (vec![0.5; signs.len() * WIDTH], vec![(1, 0); signs.len()]);
    let run = |threads: usize, hinted: bool| {
        let mut table = Table::new(spec(2, true)).unwrap().with_threads(threads);
        let (mut out, mut handles) = (vec![0.0; signs.len() * WIDTH], Handles::default());
        for seen in 0..2 {
            table.pull(&others, &mut out, &mut handles);
            let handles = hinted.then_some(&handles);
            table
                .push(Push {
                    signs: &signs,
                    handles,
                    gradients: &gradients,
                    counts: &counts,
                    seen,
                    is_increment: false,
                })
                .unwrap();
        }
        signs.iter().map(|&sign| table.get(sign)).collect::<Vec<_>>()
    };
    let expected = run(1, false);
    assert!(expected.iter().all(|row| row.as_ref().is_some_and(|row| row.counters.show == 2)));
    for threads in [1, 2, 3] {
        assert!(run(threads, true) == expected, "{threads} threads");
    }
}

/// Adam's state is longer with late columns; a warm start may add or drop late columns.
#[test]
fn a_snapshot_of_adam_loads_with_and_without_late_columns() {
    let dir = tempfile::tempdir().unwrap();
    let path_of = |from: u32, to: u32| dir.path().join(format!("{from}-{to}"));
    let push = |table: &mut Table| {
        let push = Push {
            signs: &[1, 2],
            handles: None,
            gradients: &[0.5; 8],
            counts: &[(1, 0), (2, 0)],
            seen: 0,
            is_increment: false,
        };
        table.push(push).unwrap();
    };
    for (from, to) in [(0, 2), (2, 0), (2, 2), (0, 0)] {
        let mut table = Table::new(spec_of(Kind::Adam, from, true)).unwrap();
        (0..3).for_each(|_| push(&mut table));
        table.snapshot(&path_of(from, to)).unwrap();
        let mut loaded = Table::new(spec_of(Kind::Adam, to, true)).unwrap();
        loaded.load(&[path_of(from, to)]).unwrap();
        for sign in [1, 2] {
            let (written, read) = (table.get(sign).unwrap(), loaded.get(sign).unwrap());
            assert_eq!((written.counters, &written.weights), (read.counters, &read.weights));
            let both = 2 * WIDTH + 2;
            assert_eq!(written.state[..both], read.state[..both]);
            let late =
                written.state.get(both..).filter(|late| !late.is_empty()).unwrap_or(&written.state[both - 2..both]);
            assert_eq!(read.state[both..], late[..if to == 0 { 0 } else { 2 }]);
        }
        push(&mut loaded);
    }
    let mut other = Table::new(spec_of(Kind::Ftrl, 2, true)).unwrap();
    assert!(other.load(&[path_of(0, 0)]).unwrap_err().to_string().ends_with("optimizer: expected ftrl, got adam"));
}

#[test]
fn changes_are_those_since_the_last_call() {
    let mut table = Table::new(spec(0, false)).unwrap();
    let push = |table: &mut Table, signs: &[u64]| {
        let (gradients, counts) = (vec![1.0; signs.len() * WIDTH], vec![(1, 0); signs.len()]);
        table
            .push(Push { signs, handles: None, gradients: &gradients, counts: &counts, seen: 0, is_increment: false })
            .unwrap();
    };
    let take = |table: &mut Table| {
        let changes: Vec<Changes> = (0..5).map(|partition| table.take_changes(partition)).collect();
        let mut changed: Vec<u64> = changes.iter().flat_map(|one| one.changed.clone()).collect();
        changed.sort_unstable();
        (changed, changes.iter().filter(|one| one.is_whole).count())
    };
    push(&mut table, &(0..100).collect::<Vec<u64>>());
    assert_eq!(take(&mut table), (vec![], 5));
    push(&mut table, &[3, 200]);
    push(&mut table, &[3]);
    let bytes = |table: &Table| {
        let dir = tempfile::tempdir().unwrap();
        table.snapshot(&dir.path().join("a")).unwrap();
        std::fs::read(dir.path().join("a")).unwrap()
    };
    let before = bytes(&table);
    assert_eq!(take(&mut table), (vec![3, 200], 0));
    assert_eq!(take(&mut table), (vec![], 0));
    assert!(bytes(&table) == before, "`CHANGED` bits are not part of a snapshot");
    let mut loaded = reload(&table, &spec(0, false));
    assert_eq!(take(&mut loaded), (vec![], 5), "all after a load");
}

#[test]
fn late_columns_created_by_a_non_finite_push_are_a_change() {
    let mut table = Table::new(TableSpec { admit_after: 2, ..spec(0, true) }).unwrap();
    let mut push = |gradient: f32| {
        table
            .push(Push {
                signs: &[7],
                handles: None,
                gradients: &[gradient; WIDTH],
                counts: &[(1, 0)],
                seen: 0,
                is_increment: false,
            })
            .unwrap();
        let partition = partition_of(7, table.spec().partitions);
        (table.get(7).unwrap().weights, table.take_changes(partition).changed)
    };
    let (before, _) = push(1.0);
    let (after, changed) = push(f32::NAN);
    assert_ne!(before, after);
    assert_eq!(changed, [7]);
}

#[test]
fn decay_is_unbiased_and_repeatable() {
    let mut table = Table::new(spec(0, false)).unwrap();
    let signs: Vec<u64> = (0..20_000).collect();
    let (gradients, counts) = (vec![0.0; signs.len() * WIDTH], vec![(3, 1); signs.len()]);
    table
        .push(Push {
            signs: &signs,
            handles: None,
            gradients: &gradients,
            counts: &counts,
            seen: 0,
            is_increment: false,
        })
        .unwrap();
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
