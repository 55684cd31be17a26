//! The shard: the partitions of one server, each with rows, a slice of the dense vector and a record of applied pushes.
//!
//! A push is applied to the partitions whose record lacks its name. After a restart from a snapshot, each partition lacks
//! exactly the pushes after its cut, so it applies these when they are repeated and ignores the others.

mod upkeep;

use std::ops::Range;

use elasticrec_cube::publish::PublishState;
use elasticrec_table::partition::partition_of;
use elasticrec_table::{FullRows, GrowError, Handles, Overflow, SpecError, Table, TableSpec};
use elasticrec_wire::{Push, PushHeader, Reason, Refusal};
use serde::{Deserialize, Serialize};

use crate::dense::{Dense, DenseOptimizer};
use crate::fail::fail_point;
use crate::record::{BatchName, BatchState, Record};
use crate::records::Records;
use crate::steps::Steps;

/// Specification of a shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardSpec {
    /// The whole table.
    pub table: TableSpec,
    /// Length of the whole dense vector.
    pub num_dense: usize,
    /// Number of buffers at the end of the dense vector. Pushed values are added to buffers, without the optimizer.
    #[serde(default)]
    pub num_buffers: usize,
    /// Optimizer of the dense vector.
    pub dense: DenseOptimizer,
    /// Number of metric sums, which partition 0 holds.
    pub num_sums: usize,
    /// The partitions of this shard.
    pub owned: Range<u32>,
}

/// Decay and eviction of the whole table between two passes, at a fixed point in the order of units.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boundary {
    /// The boundary is before this unit and after all lower units.
    pub before_unit: u64,
    /// Factor for show and click.
    pub decay: Option<f64>,
    /// Seed of the rounding of decayed counts.
    pub decay_step: u32,
    /// Score of a show without a click, and of a click.
    pub coefficients: (f64, f64),
    /// Rows with a lower score are evicted.
    pub min_score: Option<f64>,
    /// Data time.
    pub now: u32,
    /// Rows that were not seen for longer are evicted.
    pub max_age: Option<u32>,
}

/// Status of a shard for the coordinator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Number of rows.
    pub num_rows: usize,
    /// Bytes of the table.
    pub num_bytes: usize,
    /// Number of pushes that at least one partition applied.
    pub applied: u64,
    /// Number of pushes that all partitions had applied before.
    pub repeated: u64,
    /// Number of pushes with a NaN or infinite value.
    pub non_finite: u64,
    /// Number of rows evicted at boundaries.
    pub evicted: u64,
    /// Row limit of a partition; None without a limit.
    pub max_rows: Option<u64>,
    /// Signs dropped and rows evicted because of the row limit since the start of the run.
    #[serde(flatten)]
    pub overflow: OverflowCounts,
    /// Distinct records with the partitions that have them.
    pub records: Vec<(Vec<u32>, Record)>,
}

/// [`Overflow`] of the whole shard, under the names of the metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverflowCounts {
    /// Number of pushed signs that got no row.
    pub dropped_signs: u64,
    /// Shows of these signs.
    pub dropped_shows: u64,
    /// Rows evicted because of the limit.
    pub limit_evicted: u64,
}

/// The outcome of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushOutcome {
    /// Whether all partitions had applied it before.
    pub was_known: bool,
    /// Whether it had a NaN or infinite value: such a push updates counts, but no weights.
    pub non_finite: bool,
}

/// The partitions of one server.
#[derive(Debug)]
pub struct Shard {
    pub(crate) spec: ShardSpec,
    pub(crate) table: Table,
    pub(crate) dense: Dense,
    /// Metric sums of this pass, then of the previous pass; empty unless the shard owns partition 0.
    pub(crate) sums: Vec<f64>,
    pub(crate) records: Records,
    /// Number of samples applied to each owned partition.
    pub(crate) samples: Vec<u64>,
    /// Signs dropped and rows evicted by each owned partition because of its row limit.
    pub(crate) overflow: Vec<Overflow>,
    /// For each owned partition, which of its changes are part of a version already.
    pub(crate) publish_states: Vec<PublishState>,
    /// Row limit of a partition.
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

/// Buffers for the part of a push that some partitions lack.
#[derive(Debug, Default)]
struct Scratch {
    signs: Vec<u64>,
    counts: Vec<(u32, u32)>,
    gradients: Vec<f32>,
}

impl Shard {
    /// Creates a shard without rows and with dense values of zero, which has applied nothing.
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

    /// The specification.
    pub fn spec(&self) -> &ShardSpec {
        &self.spec
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// The dense values of the shard's partitions.
    pub fn dense(&self) -> &[f32] {
        self.dense.values()
    }

    /// The dense values with optimizer states and step counts.
    pub fn dense_state(&self) -> &Dense {
        &self.dense
    }

    /// Sets the initial dense values and, optionally, the optimizer's state after `steps` steps. Must precede all pushes.
    pub fn start_dense(&mut self, values: &[f32], states: &[&[f32]], steps: u64) {
        assert_eq!(self.applied, 0, "dense values are set before the first push");
        assert!(states.is_empty() || states.len() == self.spec.dense.num_states(), "expected all states or none");
        for partition in self.spec.owned.clone() {
            let slice = self.dense.slice(partition);
            let missing = (self.spec.dense.num_states() - states.len()) * slice.len();
            let vectors = std::iter::once(&values).chain(states).flat_map(|vector| &vector[slice.clone()]).copied();
            let start: Vec<f32> = vectors.chain(std::iter::repeat_n(0.0, missing)).collect();
            assert!(self.dense.restore_slice(partition, steps, &start), "the slice has the right length");
        }
    }

    /// The metric sums of this pass and of the previous pass; empty unless the shard owns partition 0.
    pub fn sums(&self) -> (&[f64], &[f64]) {
        self.sums.split_at(self.sums.len() / 2)
    }

    /// Number of pushes that at least one partition applied.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// The rows.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Number of samples applied to each owned partition, in order.
    pub fn samples(&self) -> &[u64] {
        &self.samples
    }

    /// Returns the status for the coordinator.
    pub fn status(&self) -> Status {
        let of = |group: usize| {
            let partitions = self.spec.owned.clone().zip(&self.records.indices);
            partitions.filter(|(_, index)| **index == group).map(|(partition, _)| partition).collect()
        };
        let mut overflow = Overflow::default();
        self.overflow.iter().for_each(|of_partition| overflow.add(*of_partition));
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

    /// Reads the weights of signs of the shard's partitions.
    pub fn pull(&self, signs: &[u64], out: &mut [f32]) -> Result<(), Refusal> {
        self.check_signs(signs)?;
        self.table.pull(signs, out, &mut Handles::default());
        Ok(())
    }

    /// Reads full rows, with optimizer state and counters.
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
        let PushHeader { unit, batch, is_last, checksum, group, .. } = push.header;
        if let Some(group) = group {
            return self.queue(push, group);
        }
        let name = BatchName { unit, batch };
        let lacks = self.groups_that_lack(name, checksum)?;
        if lacks.iter().all(|lacks| !lacks) {
            self.count_repeat();
            return Ok(PushOutcome { was_known: true, non_finite: false });
        }
        let non_finite = !is_finite(push.gradients) || !is_finite(push.dense);
        // After an error, only some of the signs are updated, so no further push may be applied.
        self.step(push, &lacks, non_finite).map_err(|error| Refusal::new(Reason::Internal, error.to_string()))?;
        for (record, _) in self.records.groups.iter_mut().zip(&lacks).filter(|(_, lacks)| **lacks) {
            record.add(name, checksum, is_last);
        }
        self.finish_step(non_finite);
        Ok(PushOutcome { was_known: false, non_finite })
    }

    fn check(&self, push: &Push<'_>) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::new(Reason::Malformed, text));
        let (width, num_vectors) = match push.header.is_increment {
            true => (self.table.full_width(), 1 + self.spec.dense.num_states()),
            false => (self.table.width(), 1),
        };
        let expected = push.signs.len() * width;
        if push.gradients.len() != expected {
            return refuse(format!("push: expected {expected} gradients, got {}", push.gradients.len()));
        }
        // A batch without samples has no gradient.
        let num_dense = if push.header.num_samples == 0 { 0 } else { num_vectors * self.dense.values().len() };
        if push.dense.len() != num_dense {
            return refuse(format!("push: expected {num_dense} dense gradients, got {}", push.dense.len()));
        }
        let num_sums = self.sums.len() / 2;
        if let Some(index) = push.sum_indices.iter().find(|index| **index as usize >= num_sums) {
            return refuse(format!("push: expected sum indices below {num_sums}, got {index}"));
        }
        self.check_signs(push.signs)
    }

    /// Returns for each group of partitions whether it lacks a batch. Refuses batches that may not be applied yet.
    pub(crate) fn groups_that_lack(&self, name: BatchName, checksum: u64) -> Result<Vec<bool>, Refusal> {
        let passed = self.boundaries.iter().filter(|boundary| boundary.before_unit <= name.unit).count() as u64;
        let lacks = |record: &Record| match record.state_of(name, checksum) {
            BatchState::Applied => Ok(false),
            BatchState::Missing if record.boundaries() < passed => {
                let text = format!("unit {}: expected all units of the previous pass first", name.unit);
                Err(Refusal::new(Reason::NotYet, text))
            }
            BatchState::Missing => Ok(true),
            BatchState::Clash => {
                let text = format!("unit {} batch {}: already applied with other samples", name.unit, name.batch);
                Err(Refusal::new(Reason::NameClash, text))
            }
        };
        self.records.groups.iter().map(lacks).collect()
    }

    /// Applies a push to the rows and dense values of the groups that lack it.
    fn step(&mut self, push: &Push<'_>, lacks: &[bool], non_finite: bool) -> Result<(), GrowError> {
        let first = self.spec.owned.start;
        let takes = |partition: u32| lacks[self.records.indices[(partition - first) as usize]];
        let PushHeader { seen, is_increment, num_samples, .. } = push.header;
        let width = if is_increment { self.table.full_width() } else { self.table.width() };
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
            // The table updates the counts of signs with NaN gradients, but not their weights.
            gradients.clear();
            gradients.resize(signs.len() * width, f32::NAN);
        }
        let gradients = if takes_all && !non_finite { push.gradients } else { gradients };
        let pushed =
            self.table.push(elasticrec_table::Push { signs, handles: None, gradients, counts, seen, is_increment })?;
        if pushed.dropped > 0 {
            for (partition, overflow) in self.table.take_overflow() {
                self.overflow[(partition - first) as usize].add(overflow);
            }
        }
        fail_point("apply");
        for partition in self.spec.owned.clone().filter(|partition| takes(*partition)) {
            self.samples[(partition - first) as usize] += u64::from(num_samples);
            if push.dense.is_empty() || non_finite {
                continue;
            }
            match is_increment {
                true => self.dense.add(partition, push.dense),
                false => self.dense.step(partition, push.dense),
            }
        }
        if self.spec.owned.contains(&0) && takes(0) {
            for (&index, value) in push.sum_indices.iter().zip(push.sum_values) {
                self.sums[index as usize] += value;
            }
        }
        Ok(())
    }

    /// Applies a merged step to all partitions.
    pub(crate) fn apply_to_all(&mut self, push: &Push<'_>, non_finite: bool) -> Result<(), Refusal> {
        let all = vec![true; self.records.groups.len()];
        self.step(push, &all, non_finite).map_err(|error| Refusal::new(Reason::Internal, error.to_string()))
    }

    /// Adds a batch to all records.
    pub(crate) fn add_to_records(&mut self, name: BatchName, checksum: u64, is_last: bool) {
        self.records.groups.iter_mut().for_each(|record| record.add(name, checksum, is_last));
    }

    /// Updates counters, boundaries and records after a step.
    pub(crate) fn finish_step(&mut self, non_finite: bool) {
        self.applied += 1;
        self.non_finite += u64::from(non_finite);
        self.reach_boundaries();
        self.records.merge();
    }

    pub(crate) fn count_repeat(&mut self) {
        self.repeated += 1;
    }

    /// The watermark: all partitions have applied all units below it.
    pub fn watermark(&self) -> u64 {
        self.records.groups.iter().map(Record::watermark).min().unwrap_or(0)
    }

    /// Whether all partitions have applied a unit completely.
    pub(crate) fn is_complete(&self, unit: u64) -> bool {
        self.records.groups.iter().all(|record| record.is_complete(unit))
    }

    /// Marks units as complete although their data is lost: the pushes that partitions lack can never arrive.
    pub fn skip_units(&mut self, units: &[u64]) {
        for record in &mut self.records.groups {
            units.iter().for_each(|unit| record.skip(*unit));
        }
        self.reach_boundaries();
        self.records.merge();
    }
}

/// Whether all values are finite.
pub(crate) fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

#[cfg(test)]
mod tests;
