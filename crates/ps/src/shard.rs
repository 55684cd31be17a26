//! The shard: partitions of one server, each with rows, a slice of the dense vector and a record of what it has applied.
//!
//! A push goes to the partitions whose record lacks its name. After a shard came back from a snapshot its partitions
//! lack what they were too old for, and nothing else: repeats are ignored where they are known.

mod upkeep;

use std::ops::Range;

use elasticrec_cube::publish::PublishState;
use elasticrec_table::partition::partition_of;
use elasticrec_table::{FullRows, GrowError, Handles, Overflow, SpecError, Table, TableSpec};
use elasticrec_wire::{Push, Reason, Refusal};
use serde::{Deserialize, Serialize};

use crate::dense::{Dense, DenseOptimizer};
use crate::fail::fail_point;
use crate::record::{BatchName, BatchState, Record};
use crate::records::Records;
use crate::steps::Steps;

/// What a shard is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardSpec {
    /// The whole table.
    pub table: TableSpec,
    /// Values of the whole dense vector.
    pub num_dense: usize,
    /// Of those the last ones are buffers, not stepped: what comes for them is added.
    #[serde(default)]
    pub num_buffers: usize,
    /// How they are stepped.
    pub dense: DenseOptimizer,
    /// Metric sums, which partition 0 holds.
    pub num_sums: usize,
    /// The partitions of this shard.
    pub owned: Range<u32>,
}

/// A whole-table step between two passes: it has a place in the order of names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boundary {
    /// All units below are before it, all others behind it.
    pub before_unit: u64,
    /// Show and click are multiplied by it.
    pub decay: Option<f64>,
    /// Part of how fractions of them are rounded.
    pub decay_step: u32,
    /// What a show without a click is worth, what a click is.
    pub coefficients: (f64, f64),
    /// Rows with a lower score go.
    pub min_score: Option<f64>,
    /// Data time.
    pub now: u32,
    /// Rows not seen for longer go.
    pub max_age: Option<u32>,
}

/// What a shard tells the coordinator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Rows.
    pub num_rows: usize,
    /// Bytes of the table.
    pub num_bytes: usize,
    /// Pushes that changed something.
    pub applied: u64,
    /// Pushes that were known everywhere.
    pub repeated: u64,
    /// Pushes with something that is not a number.
    pub non_finite: u64,
    /// Rows that went at boundaries.
    pub evicted: u64,
    /// Rows that a partition may have; none without a limit.
    pub max_rows: Option<u64>,
    /// What its partitions did not take or keep because of that, since the run began.
    #[serde(flatten)]
    pub overflow: OverflowCounts,
    /// Each record once, with the partitions that have it.
    pub records: Vec<(Vec<u32>, Record)>,
}

/// [`Overflow`] by the names that figures have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverflowCounts {
    /// Pushes of signs that got no row.
    pub dropped_signs: u64,
    /// Their shows.
    pub dropped_shows: u64,
    /// Rows that went to make room.
    pub limit_evicted: u64,
}

/// What a push did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushOutcome {
    /// All partitions had it before.
    pub was_known: bool,
    /// It held something that is not a number: counted, not stepped.
    pub non_finite: bool,
}

/// The partitions of one server.
#[derive(Debug)]
pub struct Shard {
    pub(crate) spec: ShardSpec,
    pub(crate) table: Table,
    pub(crate) dense: Dense,
    /// Of partition 0, those of this pass and those of the pass before; empty elsewhere.
    pub(crate) sums: Vec<f64>,
    pub(crate) records: Records,
    /// Samples applied to each owned partition.
    pub(crate) samples: Vec<u64>,
    /// What each did not take or keep for want of memory.
    pub(crate) overflow: Vec<Overflow>,
    /// Which changes of each owned partition became part of a version.
    pub(crate) publish_states: Vec<PublishState>,
    /// Rows that a partition may have.
    max_rows: Option<usize>,
    num_threads: usize,
    boundaries: Vec<Boundary>,
    applied: u64,
    repeated: u64,
    non_finite: u64,
    evicted: u64,
    scratch: Scratch,
    pub(crate) steps: Steps,
}

/// Room for the part of a push that some partitions lack.
#[derive(Debug, Default)]
struct Scratch {
    signs: Vec<u64>,
    counts: Vec<(u32, u32)>,
    gradients: Vec<f32>,
}

impl Shard {
    /// A shard without rows, all dense values zero, that has applied nothing.
    pub fn new(spec: ShardSpec, num_threads: usize) -> Result<Self, SpecError> {
        let table = Table::new(spec.table.clone())?.with_threads(num_threads);
        let dense = Dense::new(spec.dense, spec.num_dense, spec.table.partitions, spec.owned.clone())
            .with_buffers(spec.num_buffers);
        Ok(Shard {
            table,
            dense,
            sums: vec![0.0; if spec.owned.contains(&0) { 2 * spec.num_sums } else { 0 }],
            records: Records::new(spec.owned.len()),
            samples: vec![0; spec.owned.len()],
            overflow: vec![Overflow::default(); spec.owned.len()],
            publish_states: spec.owned.clone().map(|_| PublishState::default()).collect(),
            max_rows: None,
            num_threads,
            boundaries: Vec::new(),
            applied: 0,
            repeated: 0,
            non_finite: 0,
            evicted: 0,
            scratch: Scratch::default(),
            steps: Steps::default(),
            spec,
        })
    }

    /// What it was made from.
    pub fn spec(&self) -> &ShardSpec {
        &self.spec
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// The dense values of its partitions.
    pub fn dense(&self) -> &[f32] {
        self.dense.values()
    }

    /// The dense vector with its optimizer's states and steps.
    pub fn dense_state(&self) -> &Dense {
        &self.dense
    }

    /// Sets the dense values before anything is applied, and the state of their optimizer after so many steps.
    pub fn start_dense(&mut self, values: &[f32], states: &[&[f32]], steps: u64) {
        assert_eq!(self.applied, 0, "dense values start before the first push");
        assert!(states.is_empty() || states.len() == self.spec.dense.num_states(), "all states or none");
        for partition in self.spec.owned.clone() {
            let slice = self.dense.slice(partition);
            let missing = (self.spec.dense.num_states() - states.len()) * slice.len();
            let vectors = std::iter::once(&values).chain(states).flat_map(|vector| &vector[slice.clone()]).copied();
            let start: Vec<f32> = vectors.chain(std::iter::repeat_n(0.0, missing)).collect();
            assert!(self.dense.restore_slice(partition, steps, &start), "a slice has the length of a slice");
        }
    }

    /// The metric sums of this pass, and of the pass before; empty unless it has partition 0.
    pub fn sums(&self) -> (&[f64], &[f64]) {
        self.sums.split_at(self.sums.len() / 2)
    }

    /// Pushes that changed something.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// The table, to read.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Samples applied to each owned partition, in their order.
    pub fn samples(&self) -> &[u64] {
        &self.samples
    }

    /// For the coordinator.
    pub fn status(&self) -> Status {
        let of = |group: usize| {
            let partitions = self.spec.owned.clone().zip(&self.records.places);
            partitions.filter(|(_, place)| **place == group).map(|(partition, _)| partition).collect()
        };
        let mut overflow = Overflow::default();
        self.overflow.iter().for_each(|one| overflow.add(*one));
        Status {
            num_rows: self.table.len(),
            num_bytes: self.table.bytes(),
            applied: self.applied,
            repeated: self.repeated,
            non_finite: self.non_finite,
            evicted: self.evicted,
            max_rows: self.max_rows.map(|rows| rows as u64),
            overflow: OverflowCounts {
                dropped_signs: overflow.signs,
                dropped_shows: overflow.shows,
                limit_evicted: overflow.evicted,
            },
            records: self.records.groups.iter().enumerate().map(|(at, record)| (of(at), record.clone())).collect(),
        }
    }

    /// Writes the rows of signs, all of its partitions, into `out`.
    pub fn pull(&self, signs: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        self.check_signs(signs)?;
        self.table.pull(signs, out, &mut Handles::default());
        Ok(())
    }

    /// Reads the rows of signs with all they have.
    pub fn pull_full(&self, signs: &[u64], out: &mut FullRows) -> Result<(), Refusal> {
        self.check_signs(signs)?;
        self.table.pull_full(signs, out);
        Ok(())
    }

    fn check_signs(&self, signs: &[u64]) -> Result<(), Refusal> {
        let num_partitions = self.spec.table.partitions;
        match signs.iter().find(|sign| !self.spec.owned.contains(&partition_of(**sign, num_partitions))) {
            None => Ok(()),
            Some(sign) => {
                let Range { start, end } = self.spec.owned;
                let got = partition_of(*sign, num_partitions);
                let text = format!("sign {sign}: expected one of partitions {start} to {}, got {got}", end - 1);
                Err(Refusal::new(Reason::Malformed, text))
            }
        }
    }

    /// Applies a push to the partitions that lack it.
    pub fn push(&mut self, push: &Push<'_>) -> Result<PushOutcome, Refusal> {
        self.check(push)?;
        if let Some(group) = push.group {
            return self.hold(push, group);
        }
        let name = BatchName { unit: push.unit, batch: push.batch };
        let lacks = self.groups_that_lack(name, push.checksum)?;
        if lacks.iter().all(|lacks| !lacks) {
            self.count_repeat();
            return Ok(PushOutcome { was_known: true, non_finite: false });
        }
        let non_finite = !is_finite(push.gradients) || !is_finite(push.dense);
        // some signs may be stepped and some not: nothing may be applied after that
        self.step(push, &lacks, non_finite).map_err(|error| Refusal::new(Reason::Internal, error.to_string()))?;
        for (record, _) in self.records.groups.iter_mut().zip(&lacks).filter(|(_, lacks)| **lacks) {
            record.add(name, push.checksum, push.is_last);
        }
        self.finish_step(non_finite);
        Ok(PushOutcome { was_known: false, non_finite })
    }

    fn check(&self, push: &Push<'_>) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::new(Reason::Malformed, text));
        let (width, num_vectors) = match push.is_delta {
            true => (self.table.full_width(), 1 + self.spec.dense.num_states()),
            false => (self.table.width(), 1),
        };
        let expected = push.signs.len() * width;
        if push.gradients.len() != expected {
            return refuse(format!("push: expected {expected} gradients, got {}", push.gradients.len()));
        }
        // a batch without a sample has no gradient
        let num_dense = if push.num_samples == 0 { 0 } else { num_vectors * self.dense.values().len() };
        if push.dense.len() != num_dense {
            return refuse(format!("push: expected {num_dense} dense gradients, got {}", push.dense.len()));
        }
        let num_sums = self.sums.len() / 2;
        if let Some(place) = push.sum_places.iter().find(|place| **place as usize >= num_sums) {
            return refuse(format!("push: expected places of {num_sums} sums, got {place}"));
        }
        self.check_signs(push.signs)
    }

    /// For each group of partitions whether it lacks a name; a name that may not be applied yet is refused.
    pub(crate) fn groups_that_lack(&self, name: BatchName, checksum: u64) -> Result<Vec<bool>, Refusal> {
        let passed = self.boundaries.iter().filter(|boundary| boundary.before_unit <= name.unit).count() as u64;
        let lacks = |record: &Record| match record.knows(name, checksum) {
            BatchState::Applied => Ok(false),
            BatchState::Missing if record.boundaries() < passed => {
                let text = format!("unit {}: all units of the pass before come first", name.unit);
                Err(Refusal::new(Reason::NotYet, text))
            }
            BatchState::Missing => Ok(true),
            BatchState::Clash => {
                let text = format!("unit {} batch {}: it was applied with other samples", name.unit, name.batch);
                Err(Refusal::new(Reason::NameClash, text))
            }
        };
        self.records.groups.iter().map(lacks).collect()
    }

    /// Counts and steps rows and dense values of the groups that lack the push.
    fn step(&mut self, push: &Push<'_>, lacks: &[bool], non_finite: bool) -> Result<(), GrowError> {
        let first = self.spec.owned.start;
        let takes = |partition: u32| lacks[self.records.places[(partition - first) as usize]];
        let width = if push.is_delta { self.table.full_width() } else { self.table.width() };
        let Scratch { signs, counts, gradients } = &mut self.scratch;
        signs.clear();
        counts.clear();
        gradients.clear();
        let takes_all = lacks.iter().all(|lacks| *lacks);
        for (at, &sign) in push.signs.iter().enumerate() {
            if takes_all || takes(partition_of(sign, self.spec.table.partitions)) {
                let [show, click] = push.counts[at];
                signs.push(sign);
                counts.push((show, click));
                if !takes_all {
                    gradients.extend_from_slice(&push.gradients[at * width..(at + 1) * width]);
                }
            }
        }
        if non_finite {
            // the table counts and does not step what is not a number
            gradients.clear();
            gradients.resize(signs.len() * width, f32::NAN);
        }
        let gradients = if takes_all && !non_finite { push.gradients } else { gradients };
        let Push { seen, is_delta, .. } = *push;
        let pushed =
            self.table.push(elasticrec_table::Push { signs, handles: None, gradients, counts, seen, is_delta })?;
        if pushed.dropped > 0 {
            for (partition, overflow) in self.table.take_overflow() {
                self.overflow[(partition - first) as usize].add(overflow);
            }
        }
        fail_point("apply");
        for partition in self.spec.owned.clone().filter(|partition| takes(*partition)) {
            self.samples[(partition - first) as usize] += u64::from(push.num_samples);
            if push.dense.is_empty() || non_finite {
                continue;
            }
            match is_delta {
                true => self.dense.add(partition, push.dense),
                false => self.dense.step(partition, push.dense),
            }
        }
        if self.spec.owned.contains(&0) && takes(0) {
            for (&place, value) in push.sum_places.iter().zip(push.sum_values) {
                self.sums[place as usize] += value;
            }
        }
        Ok(())
    }

    /// Applies a step to all partitions.
    pub(crate) fn apply_to_all(&mut self, push: &Push<'_>, non_finite: bool) -> Result<(), Refusal> {
        let all = vec![true; self.records.groups.len()];
        self.step(push, &all, non_finite).map_err(|error| Refusal::new(Reason::Internal, error.to_string()))
    }

    /// Writes a name down in all records.
    pub(crate) fn add_to_records(&mut self, name: BatchName, checksum: u64, is_last: bool) {
        self.records.groups.iter_mut().for_each(|record| record.add(name, checksum, is_last));
    }

    /// What follows every step.
    pub(crate) fn finish_step(&mut self, non_finite: bool) {
        self.applied += 1;
        self.non_finite += u64::from(non_finite);
        self.reach_boundaries();
        self.records.merge();
    }

    pub(crate) fn count_repeat(&mut self) {
        self.repeated += 1;
    }

    /// All partitions have all units below it.
    pub fn watermark(&self) -> u64 {
        self.records.groups.iter().map(Record::watermark).min().unwrap_or(0)
    }

    /// Whether all partitions have all of a unit.
    pub(crate) fn is_complete(&self, unit: u64) -> bool {
        self.records.groups.iter().all(|record| record.is_complete(unit))
    }

    /// Learns of units whose data is lost: nobody can push what its partitions lack of them.
    pub fn skip_units(&mut self, units: &[u64]) {
        for record in &mut self.records.groups {
            units.iter().for_each(|unit| record.skip(*unit));
        }
        self.reach_boundaries();
        self.records.merge();
    }
}

/// Whether none is infinite or not a number.
pub(crate) fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

#[cfg(test)]
mod tests;
