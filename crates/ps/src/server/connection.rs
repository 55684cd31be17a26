//! A connection at the server: requests are answered in their order.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use elasticrec_table::FullRows;
use elasticrec_wire::frame::MAX_BODY_BYTES;
use elasticrec_wire::{Access, FrameError, Kind, Peer, Pull, Push, Reason, Refusal, Rows, StepQuery, Stream, Welcome};

use super::Shared;
use crate::shard::Shard;

/// The connection of one client.
pub(super) struct Connection<'a> {
    shared: &'a Shared,
    peer: Peer,
    /// Buffers of the answers, kept to save allocations.
    rows: FullRows,
    dense: Vec<f32>,
}

impl<'a> Connection<'a> {
    pub(super) fn new(shared: &'a Shared, stream: Stream) -> io::Result<Self> {
        Ok(Connection { shared, peer: Peer::new(stream)?, rows: FullRows::default(), dense: Vec::new() })
    }

    /// Answers requests until the connection ends; returns early if there is no valid hello by the deadline.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(), FrameError> {
        if !self.greet(deadline)? {
            return Ok(());
        }
        loop {
            let header = self.peer.read(MAX_BODY_BYTES)?;
            let result = match header.kind {
                Kind::Pull => self.pull(header.id)?,
                Kind::Push => self.push(header.id)?,
                Kind::StepQuery => self.step_status(header.id)?,
                other => Err(Refusal::new(Reason::Malformed, format!("expected a request, got {other:?}"))),
            };
            if let Err(refusal) = result {
                self.refuse(header.id, &refusal)?;
                if refusal.reason == Reason::Malformed {
                    return Ok(());
                }
            }
        }
    }

    /// Reads and answers the hello; false if the client is refused.
    fn greet(&mut self, deadline: Instant) -> Result<bool, FrameError> {
        let identity = &self.shared.identity;
        let access = Access { scope: "run", name: &identity.run, token: &identity.token };
        let (id, checked) = self.peer.read_hello(access, deadline)?;
        if let Err(refusal) = checked {
            self.refuse(id, &refusal)?;
            return Ok(false);
        }
        let welcome = self.shared.read(|shard| Welcome {
            incarnation: identity.incarnation,
            epoch: identity.epoch,
            first_partition: shard.spec().owned.start,
            end_partition: shard.spec().owned.end,
            width: shard.table().width() as u32,
            num_dense: shard.dense().len() as u32,
            state_width: (shard.table().full_width() - shard.table().width()) as u32,
            num_dense_states: shard.dense_state().states().len() as u32,
        });
        self.peer.send(Kind::Welcome, id, &welcome.parts())?;
        Ok(true)
    }

    fn refuse(&self, id: u64, refusal: &Refusal) -> io::Result<()> {
        self.shared.connections.count_refused();
        self.peer.refuse(id, refusal)
    }

    fn pull(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let Connection { shared, rows, dense, peer } = self;
        let pull = match Pull::decode(peer.body.bytes()) {
            Ok(pull) => pull,
            Err(error) => return Ok(Err(error.into())),
        };
        let start = Instant::now();
        let result = shared.check_target(pull.epoch, pull.incarnation).and_then(|()| {
            if let Some((first_unit, num_steps)) = pull.after {
                shared.commit(first_unit, num_steps)?;
            }
            shared.read(|shard| {
                shared.check_lease()?;
                if let Some((first_unit, num_steps)) = pull.after {
                    shard.is_at(first_unit, num_steps)?;
                }
                answer_pull(shard, &pull, rows, dense)?;
                Ok(shard.applied())
            })
        });
        let counters = &shared.counters;
        counters.pull_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let applied = match result {
            Ok(applied) => applied,
            Err(refusal) => return Ok(Err(refusal)),
        };
        counters.pulls.fetch_add(1, Ordering::Relaxed);
        counters.pulled_signs.fetch_add(pull.signs.len() as u64, Ordering::Relaxed);
        let incarnation = shared.identity.incarnation;
        let answer = Rows { incarnation, applied, rows: &rows.values, dense, tails: &rows.tails };
        peer.send(Kind::Rows, id, &answer.parts())?;
        Ok(Ok(()))
    }

    fn step_status(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let query = StepQuery::decode(self.peer.body.bytes()).map_err(Refusal::from);
        match query.and_then(|query| self.shared.step_status(&query)) {
            Ok(status) => self.peer.send(Kind::StepStatus, id, &status.parts()).map(Ok),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    fn push(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let push = Push::decode(self.peer.body.bytes()).map_err(Refusal::from);
        match push.and_then(|push| self.shared.push(&push)) {
            Ok(ack) => self.peer.send(Kind::PushAck, id, &ack.parts()).map(Ok),
            Err(refusal) => Ok(Err(refusal)),
        }
    }
}

/// Fills the buffers with the rows and dense values of a pull.
fn answer_pull(shard: &Shard, pull: &Pull<'_>, rows: &mut FullRows, dense: &mut Vec<f32>) -> Result<(), Refusal> {
    // Checked before memory is allocated for the answer.
    let row_bytes = 4 * if pull.wants_state { shard.table().full_width() + 3 } else { shard.table().width() };
    if pull.signs.len().saturating_mul(row_bytes) > MAX_BODY_BYTES {
        let text = format!("pull: expected rows of at most {MAX_BODY_BYTES} bytes, got {} signs", pull.signs.len());
        return Err(Refusal::new(Reason::Malformed, text));
    }
    if pull.wants_state {
        shard.pull_full(pull.signs, rows)?;
    } else {
        rows.tails.clear();
        rows.values.resize(pull.signs.len() * shard.table().width(), 0.0);
        shard.pull(pull.signs, &mut rows.values)?;
    }
    dense.clear();
    if pull.wants_dense {
        dense.extend_from_slice(shard.dense());
    }
    if pull.wants_dense && pull.wants_state {
        shard.dense_state().states().iter().for_each(|state| dense.extend_from_slice(state));
    }
    Ok(())
}
