//! Steps of strategy `sync`: the pushes of a step are queued until every shard has all of them, then merged in the order of
//! their units and applied as one.
//!
//! A trainer pulls for the next step once it knows that all shards have all pushes of this step, and its pull commits the
//! step. So no shard applies a step that another shard may lack, and a batch that is trained again reads the same rows.

use std::collections::BTreeMap;

use elasticrec_wire::{Group, Push, PushHeader, Reason, Refusal};

use crate::merge::{MergedUpdate, UpdatePart};
use crate::record::BatchName;
use crate::shard::{PushOutcome, Shard, is_finite};

/// The current group and the queued pushes of its next step.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    group: Option<Group>,
    num_applied: u32,
    queued: BTreeMap<u64, QueuedPush>,
    merged: MergedUpdate,
}

/// A push that waits for the other pushes of its step.
#[derive(Debug)]
struct QueuedPush {
    header: PushHeader,
    signs: Vec<u64>,
    counts: Vec<[u32; 2]>,
    gradients: Vec<f32>,
    dense: Vec<f32>,
    sum_indices: Vec<u32>,
    sum_values: Vec<f64>,
}

impl QueuedPush {
    fn of(push: &Push<'_>) -> Self {
        QueuedPush {
            header: push.header,
            signs: push.signs.to_vec(),
            counts: push.counts.to_vec(),
            gradients: push.gradients.to_vec(),
            dense: push.dense.to_vec(),
            sum_indices: push.sum_indices.to_vec(),
            sum_values: push.sum_values.to_vec(),
        }
    }

    fn part(&self) -> UpdatePart<'_> {
        UpdatePart {
            signs: &self.signs,
            gradients: &self.gradients,
            dense: &self.dense,
            weight: self.header.weight,
            num_samples: self.header.num_samples,
            checksum: self.header.checksum,
            sum_indices: &self.sum_indices,
            sum_values: &self.sum_values,
        }
    }
}

fn end_of(group: Group) -> u64 {
    group.first_unit.saturating_add(u64::from(group.num_units))
}

impl Shard {
    /// Queues a push until its step is committed.
    pub(crate) fn queue(&mut self, push: &Push<'_>, group: Group) -> Result<PushOutcome, Refusal> {
        let PushHeader { unit, batch, checksum, is_increment, .. } = push.header;
        if is_increment {
            let text = format!("push: unit {unit}: expected gradients for a step of a group, got increments");
            return Err(Refusal::new(Reason::Malformed, text));
        }
        if !(group.first_unit..end_of(group)).contains(&unit) {
            let (first, end) = (group.first_unit, end_of(group));
            let text = format!("push: expected a unit of the group, from {first} to below {end}, got {unit}");
            return Err(Refusal::new(Reason::Malformed, text));
        }
        let lacks = self.groups_that_lack(BatchName { unit, batch }, checksum)?;
        if lacks.iter().all(|lacks| !lacks) {
            self.count_repeat();
            return Ok(PushOutcome { was_known: true, non_finite: false });
        }
        if lacks.iter().any(|lacks| !lacks) {
            let text = format!("unit {unit}: a step was applied to some partitions only");
            return Err(Refusal::new(Reason::Internal, text));
        }
        self.enter(group)?;
        if batch != self.steps.num_applied {
            let text = format!("unit {unit} batch {batch}: expected step {} first", self.steps.num_applied);
            return Err(Refusal::new(Reason::NotYet, text));
        }
        match self.steps.queued.get(&unit) {
            Some(queued) if queued.header.checksum != checksum => {
                let text = format!("unit {unit} batch {batch}: already received with other samples");
                Err(Refusal::new(Reason::NameClash, text))
            }
            Some(_) => {
                self.count_repeat();
                Ok(PushOutcome { was_known: true, non_finite: false })
            }
            None => {
                self.steps.queued.insert(unit, QueuedPush::of(push));
                Ok(PushOutcome { was_known: false, non_finite: false })
            }
        }
    }

    /// Starts a group; all units before it must be complete.
    fn enter(&mut self, group: Group) -> Result<(), Refusal> {
        if self.steps.group == Some(group) {
            return Ok(());
        }
        if self.watermark() != group.first_unit {
            let text = format!("unit {}: expected a group that starts at unit {}", group.first_unit, self.watermark());
            return Err(Refusal::new(Reason::NotYet, text));
        }
        self.steps.queued.clear();
        (self.steps.group, self.steps.num_applied) = (Some(group), 0);
        Ok(())
    }

    /// Returns the number of applied steps of a group, and whether all pushes of a step are queued or applied.
    pub fn step_progress(&self, group: Group, step: u32) -> (u32, bool) {
        let num_applied = self.steps_of(group.first_unit);
        let has_all = |unit: u64| self.is_complete(unit) || self.steps.queued.contains_key(&unit);
        let is_full = step < num_applied
            || (step == num_applied
                && self.steps.group == Some(group)
                && (group.first_unit..end_of(group)).all(has_all));
        (num_applied, is_full)
    }

    /// Number of applied steps of the group that starts at a unit; `u32::MAX` for a complete group.
    fn steps_of(&self, first_unit: u64) -> u32 {
        match self.steps.group {
            Some(group) if group.first_unit == first_unit && self.watermark() < end_of(group) => self.steps.num_applied,
            Some(group) if group.first_unit == first_unit => u32::MAX,
            _ if self.watermark() > first_unit => u32::MAX,
            _ => 0,
        }
    }

    /// Returns true if exactly `num_steps` steps of a group are applied, false if [`commit`](Shard::commit) would apply the
    /// last of them, and a refusal otherwise.
    pub fn is_at(&self, first_unit: u64, num_steps: u32) -> Result<bool, Refusal> {
        let Some(group) = self.steps.group.filter(|group| group.first_unit == first_unit) else {
            return match self.steps_of(first_unit) {
                0 if num_steps == 0 => Ok(true),
                0 => Err(Refusal::new(Reason::NotYet, format!("unit {first_unit}: its group has not started"))),
                _ => Err(Refusal::new(Reason::Passed, format!("unit {first_unit}: its group is complete"))),
            };
        };
        let applied = self.steps.num_applied;
        if num_steps == applied {
            return Ok(true);
        }
        if num_steps < applied {
            let text = format!("unit {first_unit}: step {num_steps} of its group is already applied");
            return Err(Refusal::new(Reason::Passed, text));
        }
        if num_steps == applied + 1 && self.step_progress(group, applied).1 {
            return Ok(false);
        }
        let text = format!("unit {first_unit}: step {applied} of its group lacks pushes");
        Err(Refusal::new(Reason::NotYet, text))
    }

    /// Applies the step whose pushes are all queued.
    pub fn commit(&mut self) -> Result<(), Refusal> {
        let queued = std::mem::take(&mut self.steps.queued);
        let mut merged = std::mem::take(&mut self.steps.merged);
        merged.clear();
        for push in queued.values() {
            merged.add(&push.part(), push.counts.iter().map(|&[show, click]| (show, click)));
        }
        let counts: Vec<[u32; 2]> = merged.counts.iter().map(|&(show, click)| [show, click]).collect();
        let push = Push {
            epoch: 0,
            incarnation: 0,
            header: PushHeader {
                batch: self.steps.num_applied,
                num_samples: merged.num_samples,
                seen: queued.values().map(|push| push.header.seen).max().unwrap_or(0),
                weight: 1.0,
                ..PushHeader::default()
            },
            signs: &merged.signs,
            counts: &counts,
            gradients: &merged.gradients,
            dense: &merged.dense,
            sum_indices: &merged.sum_indices,
            sum_values: &merged.sum_values,
        };
        let non_finite = !is_finite(push.gradients) || !is_finite(push.dense);
        self.apply_to_all(&push, non_finite)?;
        for (&unit, push) in &queued {
            let name = BatchName { unit, batch: self.steps.num_applied };
            self.add_to_records(name, push.header.checksum, push.header.is_last);
        }
        self.steps.merged = merged;
        self.steps.num_applied += 1;
        self.finish_step(non_finite);
        Ok(())
    }
}
