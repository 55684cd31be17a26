//! The shard: partitions of one server, each with rows, a slice of the dense vector and a record of what it has applied.
//!
//! A push goes to the partitions whose record lacks its name. After a shard came back from a snapshot its partitions
//! lack what they were too old for, and nothing else: repeats are ignored where they are known.

use std::ops::Range;

use elasticrec_table::partition::partition_of;
use elasticrec_table::{Eviction, GrowError, Handles, SpecError, Table, TableSpec};
use elasticrec_wire::{Push, Refusal, Refused};
use serde::{Deserialize, Serialize};

use crate::dense::{Dense, DenseOptimizer};
use crate::record::{Known, Name, Record};

/// What a shard is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardSpec {
    /// The whole table.
    pub table: TableSpec,
    /// Values of the whole dense vector.
    pub num_dense: usize,
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
    /// Each record once, with the partitions that have it.
    pub records: Vec<(Vec<u32>, Record)>,
}

/// What a push did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
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
    num_threads: usize,
    boundaries: Vec<Boundary>,
    applied: u64,
    repeated: u64,
    non_finite: u64,
    evicted: u64,
    scratch: Scratch,
}

/// Room for the part of a push that some partitions lack.
#[derive(Debug, Default)]
struct Scratch {
    signs: Vec<u64>,
    counts: Vec<(u32, u32)>,
    gradients: Vec<f32>,
}

/// Records by partition: partitions with equal ones share one.
#[derive(Debug)]
pub(crate) struct Records {
    /// For each owned partition its place in `groups`.
    places: Vec<usize>,
    groups: Vec<Record>,
}

impl Records {
    fn new(num_partitions: usize) -> Self {
        Records { places: vec![0; num_partitions], groups: vec![Record::default()] }
    }

    /// From one record a partition.
    pub(crate) fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut found = Records { places: Vec::new(), groups: Vec::new() };
        for record in records {
            let place = found.groups.iter().position(|group| *group == record).unwrap_or(found.groups.len());
            if place == found.groups.len() {
                found.groups.push(record);
            }
            found.places.push(place);
        }
        found
    }

    /// The record of the owned partition at `at`.
    pub(crate) fn get(&self, at: usize) -> &Record {
        &self.groups[self.places[at]]
    }

    /// Joins groups that became equal.
    fn merge(&mut self) {
        if self.groups.len() > 1 {
            *self = Records::of(self.places.iter().map(|&place| self.groups[place].clone()).collect::<Vec<_>>());
        }
    }
}

impl Shard {
    /// A shard without rows, all dense values zero, that has applied nothing.
    pub fn new(spec: ShardSpec, num_threads: usize) -> Result<Self, SpecError> {
        let table = Table::new(spec.table.clone())?.with_threads(num_threads);
        let dense = Dense::new(spec.dense, spec.num_dense, spec.table.partitions, spec.owned.clone());
        Ok(Shard {
            table,
            dense,
            sums: vec![0.0; if spec.owned.contains(&0) { 2 * spec.num_sums } else { 0 }],
            records: Records::new(spec.owned.len()),
            samples: vec![0; spec.owned.len()],
            num_threads,
            boundaries: Vec::new(),
            applied: 0,
            repeated: 0,
            non_finite: 0,
            evicted: 0,
            scratch: Scratch::default(),
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

    /// Sets the dense values before anything is applied.
    pub fn start_dense(&mut self, values: &[f32]) {
        assert_eq!(self.applied, 0, "dense values start before the first push");
        for partition in self.spec.owned.clone() {
            let slice = self.dense.slice(partition);
            let states = self.spec.dense.num_states() * slice.len();
            let start: Vec<f32> = values[slice].iter().copied().chain(std::iter::repeat_n(0.0, states)).collect();
            assert!(self.dense.restore_slice(partition, 0, &start), "a slice has the length of a slice");
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
        Status {
            num_rows: self.table.len(),
            num_bytes: self.table.bytes(),
            applied: self.applied,
            repeated: self.repeated,
            non_finite: self.non_finite,
            evicted: self.evicted,
            records: self.records.groups.iter().enumerate().map(|(at, record)| (of(at), record.clone())).collect(),
        }
    }

    /// Writes the rows of signs, all of its partitions, into `out`.
    pub fn pull(&self, signs: &[u64], out: &mut [f32]) -> Result<(), Refused> {
        self.check_signs(signs)?;
        self.table.pull(signs, out, &mut Handles::default());
        Ok(())
    }

    fn check_signs(&self, signs: &[u64]) -> Result<(), Refused> {
        let num_partitions = self.spec.table.partitions;
        match signs.iter().find(|sign| !self.spec.owned.contains(&partition_of(**sign, num_partitions))) {
            None => Ok(()),
            Some(sign) => {
                let Range { start, end } = self.spec.owned;
                let got = partition_of(*sign, num_partitions);
                let text = format!("sign {sign}: expected one of partitions {start} to {}, got {got}", end - 1);
                Err(Refused::new(Refusal::Malformed, text))
            }
        }
    }

    /// Applies a push to the partitions that lack it.
    pub fn push(&mut self, push: &Push<'_>) -> Result<Applied, Refused> {
        self.check(push)?;
        let name = Name { unit: push.unit, batch: push.batch };
        let lacks = self.groups_that_lack(name, push.checksum)?;
        if lacks.iter().all(|lacks| !lacks) {
            self.repeated += 1;
            return Ok(Applied { was_known: true, non_finite: false });
        }
        let non_finite = !is_finite(push.gradients) || !is_finite(push.dense);
        // some signs may be stepped and some not: nothing may be applied after that
        self.step(push, &lacks, non_finite).map_err(|error| Refused::new(Refusal::Internal, error.to_string()))?;
        for (record, _) in self.records.groups.iter_mut().zip(&lacks).filter(|(_, lacks)| **lacks) {
            record.add(name, push.checksum, push.is_last);
        }
        self.applied += 1;
        self.non_finite += u64::from(non_finite);
        self.reach_boundaries();
        self.records.merge();
        Ok(Applied { was_known: false, non_finite })
    }

    fn check(&self, push: &Push<'_>) -> Result<(), Refused> {
        let refuse = |text: String| Err(Refused::new(Refusal::Malformed, text));
        let expected = push.signs.len() * self.table.width();
        if push.gradients.len() != expected {
            return refuse(format!("push: expected {expected} gradients, got {}", push.gradients.len()));
        }
        // a batch without a sample has no gradient
        let num_dense = if push.num_samples == 0 { 0 } else { self.dense.values().len() };
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
    fn groups_that_lack(&self, name: Name, checksum: u64) -> Result<Vec<bool>, Refused> {
        let passed = self.boundaries.iter().filter(|boundary| boundary.before_unit <= name.unit).count() as u64;
        let lacks = |record: &Record| match record.knows(name, checksum) {
            Known::Yes => Ok(false),
            Known::No if record.boundaries() < passed => {
                let text = format!("unit {}: all units of the pass before come first", name.unit);
                Err(Refused::new(Refusal::NotYet, text))
            }
            Known::No => Ok(true),
            Known::Clash => {
                let text = format!("unit {} batch {}: it was applied with other samples", name.unit, name.batch);
                Err(Refused::new(Refusal::NameClash, text))
            }
        };
        self.records.groups.iter().map(lacks).collect()
    }

    /// Counts and steps rows and dense values of the groups that lack the push.
    fn step(&mut self, push: &Push<'_>, lacks: &[bool], non_finite: bool) -> Result<(), GrowError> {
        let first = self.spec.owned.start;
        let takes = |partition: u32| lacks[self.records.places[(partition - first) as usize]];
        let width = self.table.width();
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
        self.table.push(elasticrec_table::Push { signs, handles: None, gradients, counts, seen: push.seen })?;
        for partition in self.spec.owned.clone().filter(|partition| takes(*partition)) {
            self.samples[(partition - first) as usize] += u64::from(push.num_samples);
            if !push.dense.is_empty() && !non_finite {
                self.dense.step(partition, push.dense);
            }
        }
        if self.spec.owned.contains(&0) && takes(0) {
            for (&place, value) in push.sum_places.iter().zip(push.sum_values) {
                self.sums[place as usize] += value;
            }
        }
        Ok(())
    }

    /// Learns of the boundaries between passes, all of them so far; those known do not change.
    pub fn set_boundaries(&mut self, boundaries: Vec<Boundary>) {
        debug_assert!(boundaries.starts_with(&self.boundaries));
        self.boundaries = boundaries;
        self.reach_boundaries();
        self.records.merge();
    }

    /// Applies every boundary to the partitions that have all names before it.
    fn reach_boundaries(&mut self) {
        for group in 0..self.records.groups.len() {
            let record = &self.records.groups[group];
            let next = record.boundaries() as usize;
            let Some(&boundary) = self.boundaries.get(next) else { continue };
            if record.watermark() < boundary.before_unit {
                continue;
            }
            let (first, places) = (self.spec.owned.start, &self.records.places);
            let owned = self.spec.owned.clone();
            let chosen = |partition: u32| owned.contains(&partition) && places[(partition - first) as usize] == group;
            if let Some(rate) = boundary.decay {
                self.table.decay_in(chosen, rate, boundary.decay_step);
            }
            if boundary.min_score.is_some() || boundary.max_age.is_some() {
                let Boundary { coefficients: (nonclk_coeff, click_coeff), min_score, now, max_age, .. } = boundary;
                let eviction = Eviction { nonclk_coeff, click_coeff, min_score, now, max_age };
                self.evicted += self.table.evict_in(chosen, &eviction) as u64;
            }
            if self.spec.owned.contains(&0) && self.records.places[0] == group {
                let (now, before) = self.sums.split_at_mut(self.spec.num_sums);
                before.copy_from_slice(now);
                now.fill(0.0);
            }
            self.records.groups[group].pass_boundary();
        }
        // a group may have reached several at once, when all are told after a load
        let is_due = |record: &Record| {
            let next = self.boundaries.get(record.boundaries() as usize);
            next.is_some_and(|boundary| record.watermark() >= boundary.before_unit)
        };
        if self.records.groups.iter().any(is_due) {
            self.reach_boundaries();
        }
    }
}

/// Whether none is infinite or not a number.
fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

#[cfg(test)]
mod tests;
