//! A connection of the server: frames come in, requests are answered in their order.

use std::io::{self, BufReader};
use std::sync::atomic::Ordering;
use std::time::Instant;

use elasticrec_table::FullRows;
use elasticrec_wire::frame::{MAX_BODY_BYTES, MAX_HELLO_BYTES};
use elasticrec_wire::{
    Body, Expected, FrameError, Header, Kind, Pull, Push, Reason, Refusal, Rows, StepQuery, Stream, Welcome,
    read_frame, write_frame,
};

use super::Shared;
use crate::shard::Shard;

/// One peer.
pub(super) struct Connection<'a> {
    shared: &'a Shared,
    reader: BufReader<Stream>,
    stream: Stream,
    body: Body,
    /// What answers are made of; kept to save the allocation.
    rows: FullRows,
    dense: Vec<f32>,
}

impl<'a> Connection<'a> {
    /// With room for answers.
    pub(super) fn new(shared: &'a Shared, stream: Stream) -> io::Result<Self> {
        let reader = BufReader::with_capacity(1 << 16, stream.try_clone()?);
        let (body, rows) = (Body::default(), FullRows::default());
        Ok(Connection { shared, reader, stream, body, rows, dense: Vec::new() })
    }

    /// Answers requests until it ends; a peer that has not said hello by the deadline is none.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(), FrameError> {
        if !self.greet(deadline)? {
            return Ok(());
        }
        loop {
            let header = read_frame(&mut self.reader, MAX_BODY_BYTES, &mut self.body)?;
            let answered = match header.kind {
                Kind::Pull => self.pull(header.id)?,
                Kind::Push => self.push(header.id)?,
                Kind::StepQuery => self.step_status(header.id)?,
                other => Err(Refusal::new(Reason::Malformed, format!("expected a request, got {other:?}"))),
            };
            if let Err(refused) = answered {
                self.refuse(header.id, &refused)?;
                if refused.reason == Reason::Malformed {
                    return Ok(());
                }
            }
        }
    }

    /// Reads the hello; false if the peer is not one of ours.
    fn greet(&mut self, deadline: Instant) -> Result<bool, FrameError> {
        let header = read_frame(&mut self.stream.until(deadline), MAX_HELLO_BYTES, &mut self.body)?;
        let identity = &self.shared.identity;
        let expected = Expected { of: "run", run: &identity.run, token: &identity.token };
        if let Err(refused) = expected.check(header.kind, self.body.bytes()) {
            self.refuse(header.id, &refused)?;
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
        let header = Header { kind: Kind::Welcome, id: header.id };
        write_frame(&mut self.stream, header, &welcome.parts().slices())?;
        Ok(true)
    }

    /// Says no.
    fn refuse(&mut self, id: u64, refused: &Refusal) -> io::Result<()> {
        self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        write_frame(&mut self.stream, Header { kind: Kind::Refusal, id }, &refused.parts().slices())
    }

    fn pull(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let Connection { shared, rows, dense, body, .. } = self;
        let pull = match Pull::decode(body.bytes()) {
            Ok(pull) => pull,
            Err(error) => return Ok(Err(Refusal::new(Reason::Malformed, error.to_string()))),
        };
        let start = Instant::now();
        let found = shared.check_target(pull.epoch, pull.incarnation).and_then(|()| {
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
        let applied = match found {
            Ok(applied) => applied,
            Err(refused) => return Ok(Err(refused)),
        };
        counters.pulls.fetch_add(1, Ordering::Relaxed);
        counters.pulled_signs.fetch_add(pull.signs.len() as u64, Ordering::Relaxed);
        let incarnation = shared.identity.incarnation;
        let answer = Rows { incarnation, applied, rows: &rows.values, dense, tails: &rows.tails };
        write_frame(&mut self.stream, Header { kind: Kind::Rows, id }, &answer.parts().slices())?;
        Ok(Ok(()))
    }

    fn step_status(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let met = StepQuery::decode(self.body.bytes())
            .map_err(|error| Refusal::new(Reason::Malformed, error.to_string()))
            .and_then(|meet| self.shared.step_status(&meet));
        match met {
            Ok(met) => {
                write_frame(&mut self.stream, Header { kind: Kind::StepStatus, id }, &met.parts().slices())?;
                Ok(Ok(()))
            }
            Err(refused) => Ok(Err(refused)),
        }
    }

    fn push(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let push = match Push::decode(self.body.bytes()) {
            Ok(push) => push,
            Err(error) => return Ok(Err(Refusal::new(Reason::Malformed, error.to_string()))),
        };
        match self.shared.push(&push) {
            Ok(pushed) => {
                write_frame(&mut self.stream, Header { kind: Kind::PushAck, id }, &pushed.parts().slices())?;
                Ok(Ok(()))
            }
            Err(refused) => Ok(Err(refused)),
        }
    }
}

/// What a pull asks for, of a shard that nobody changes meanwhile.
fn answer_pull(shard: &Shard, pull: &Pull<'_>, rows: &mut FullRows, dense: &mut Vec<f32>) -> Result<(), Refusal> {
    // before anything is made for it
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
