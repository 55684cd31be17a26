//! Rows that were asked for: pieces of a request on their way to shards, and what becomes of those that fail.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use elasticrec_wire::message::MAX_LOOKUP_SIGNS;
use elasticrec_wire::{Body, Kind, Lookup, LookupResult, Reason, Refusal};

use super::ClientError;
use super::connection::{Connection, Failure, Ticket};
use super::inventory::Layout;
use super::shards::Shards;
use crate::RowType;
use crate::row::decode_f32;

/// Bytes of rows that a piece asks for at most, if it is more than one row.
const PIECE_BYTES: usize = 512 << 10;
/// Signs of it.
const PIECE_SIGNS: usize = 8192;
/// Pieces on their way.
const MAX_SENT: usize = 8;

const _: () = assert!(PIECE_SIGNS <= MAX_LOOKUP_SIGNS);

/// What becomes of signs whose shard gives no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardFailurePolicy {
    /// Nobody gets rows.
    Fail,
    /// They read as zero, without a wait where no replica is up.
    Zero,
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupSummary {
    /// Signs that have a row.
    pub hits: usize,
    /// Signs whose shard gave no answer.
    pub lost: usize,
}

/// Rows that were asked for.
#[derive(Debug)]
pub struct PendingLookup<'a> {
    shards: &'a Shards,
    version: u64,
    layout: Arc<Layout>,
    deadline: Instant,
    started: Instant,
    signs: &'a [u64],
    /// With several shards.
    split: Option<ShardSplit>,
    pieces: Vec<Piece>,
    num_sent: usize,
    lost: ShardFailurePolicy,
}

/// Signs in the order of their shards.
#[derive(Debug)]
struct ShardSplit {
    signs: Vec<u64>,
    /// For each its place among those that were asked for.
    places: Vec<u32>,
}

/// Signs that are asked for together.
#[derive(Debug)]
struct Piece {
    shard: usize,
    range: Range<usize>,
    flight: Option<Flight>,
    /// Connections that did not give an answer.
    tried: Vec<u64>,
    /// Whether one of them does not hold the version.
    is_lacking: bool,
    /// What one refused that no other would do.
    refused: Option<String>,
    /// Nobody answers for it.
    is_lost: bool,
}

/// A piece on its way.
#[derive(Debug)]
struct Flight {
    replica: usize,
    connection: Arc<Connection>,
    ticket: Ticket,
}

impl<'a> PendingLookup<'a> {
    pub(super) fn new(
        shards: &'a Shards,
        version: u64,
        signs: &'a [u64],
        deadline: Instant,
        lost: ShardFailurePolicy,
    ) -> Result<Self, ClientError> {
        let layout = shards.layout(version, deadline)?;
        let (starts, split) = split_by_shard(shards, signs);
        let most = (PIECE_BYTES / layout.row_bytes()).clamp(1, PIECE_SIGNS);
        let mut pieces = Vec::new();
        // first pieces first, so that all shards work at once
        for step in 0.. {
            let before = pieces.len();
            for shard in 0..shards.shards.len() {
                let start = starts[shard] + step * most;
                let end = starts[shard + 1].min(start + most);
                if start < end {
                    pieces.push(Piece::new(shard, start..end));
                }
            }
            if pieces.len() == before {
                break;
            }
        }
        let started = Instant::now();
        let mut asked =
            PendingLookup { shards, version, layout, deadline, started, signs, split, pieces, num_sent: 0, lost };
        asked.send_ahead(0)?;
        Ok(asked)
    }

    /// How the rows are laid out where they come from.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Waits for the rows: `[signs, width]`, zeros for signs without one, and which have one.
    ///
    /// # Panics
    /// If `out` or `present` have no room for all signs.
    pub fn wait(mut self, out: &mut [f32], present: &mut [bool]) -> Result<LookupSummary, ClientError> {
        assert_eq!(out.len(), self.signs.len() * self.layout.width(), "out has to hold a row for each sign");
        assert_eq!(present.len(), self.signs.len(), "present has to hold a flag for each sign");
        let mut sought = LookupSummary { hits: 0, lost: 0 };
        for at in 0..self.pieces.len() {
            match self.settle(at)? {
                Some((connection, body)) => {
                    sought.hits += self.put(at, &body, out, present);
                    connection.give_back(body);
                }
                None => sought.lost += self.put_zeros(at, out, present),
            }
            self.send_ahead(at + 1)?;
        }
        Ok(sought)
    }

    /// Sends pieces until enough are on their way; `num_done` have come.
    fn send_ahead(&mut self, num_done: usize) -> Result<(), ClientError> {
        while self.num_sent < self.pieces.len().min(num_done + MAX_SENT) {
            let at = self.num_sent;
            self.num_sent += 1;
            self.send(at)?;
        }
        Ok(())
    }

    /// Sends a piece to a replica that was not tried, or waits for one; one that nobody answers for may be lost.
    fn send(&mut self, at: usize) -> Result<(), ClientError> {
        let PendingLookup { shards, version, deadline, .. } = *self;
        let signs = self.split.as_ref().map_or(self.signs, |split| &split.signs);
        let piece = &mut self.pieces[at];
        let seek = Lookup { version, signs: &signs[piece.range.clone()] };
        loop {
            let before = shards.num_changes();
            let Some((replica, connection)) = shards.pick(piece.shard, version, &piece.tried) else {
                match piece.verdict(shards, version) {
                    Some(gone @ ClientError::Gone { .. }) => return Err(gone),
                    _ if self.lost == ShardFailurePolicy::Zero => {
                        piece.is_lost = true;
                        return Ok(());
                    }
                    Some(error) => return Err(error),
                    None if shards.wait_for_change(before, deadline) => continue,
                    None => return Err(self.late(at)),
                }
            };
            match connection.ask(Kind::Lookup, &seek.parts(), deadline) {
                Ok(ticket) => {
                    piece.flight = Some(Flight { replica, connection, ticket });
                    return Ok(());
                }
                Err(failure) => {
                    piece.tried.push(connection.serial);
                    if !matches!(failure, Failure::Late) {
                        shards.take_down(piece.shard, replica, &connection, &failure.text());
                    }
                }
            }
        }
    }

    /// The answer to a piece, from whichever replica gives one; none if it is lost.
    fn settle(&mut self, at: usize) -> Result<Option<(Arc<Connection>, Body)>, ClientError> {
        loop {
            if self.pieces[at].flight.is_none() && !self.pieces[at].is_lost {
                self.send(at)?;
            }
            if self.pieces[at].is_lost {
                return Ok(None);
            }
            let Piece { shard, flight, tried, .. } = &mut self.pieces[at];
            let Some(Flight { replica, connection, ticket }) = flight.take() else { continue };
            tried.push(connection.serial);
            // one that hangs must leave time for the others
            let num_left = self.shards.num_left(*shard, tried) as u32;
            let now = Instant::now();
            let patience = self.deadline.saturating_duration_since(now) / (num_left + 1);
            let failure = match connection.wait(&ticket, now + patience) {
                Ok((Kind::LookupResult, body)) => match self.check(at, &body) {
                    Ok(()) => {
                        if let Some(why) = connection.farewell() {
                            self.shards.take_down(self.pieces[at].shard, replica, &connection, &why);
                        }
                        return Ok(Some((connection, body)));
                    }
                    Err(what) => Failure::Lost(what),
                },
                Ok((Kind::Refusal, body)) => match Refusal::decode(body.bytes()) {
                    Ok(refused) => Failure::Refused(refused),
                    Err(error) => Failure::Lost(error.to_string()),
                },
                Ok((other, _)) => Failure::Lost(format!("expected rows, got {other:?}")),
                Err(failure) => failure,
            };
            self.note(at, replica, &connection, failure);
        }
    }

    /// What a failure says about the replica it came from.
    fn note(&mut self, at: usize, replica: usize, connection: &Connection, failure: Failure) {
        let PendingLookup { shards, version, .. } = *self;
        let piece = &mut self.pieces[at];
        let shard = piece.shard;
        let text = failure.text();
        match failure {
            Failure::Refused(Refusal { reason: Reason::NoVersion, .. }) => {
                piece.is_lacking = true;
                shards.unlearn(shard, replica, version);
            }
            Failure::Refused(Refusal { reason: Reason::Stopping, .. }) => {
                shards.take_down(shard, replica, connection, &text);
            }
            Failure::Refused(_) => {
                let address = shards.shards[shard].address(replica);
                piece.refused.get_or_insert_with(|| format!("{address}: {text}"));
            }
            // busy, not gone
            Failure::Late if !connection.is_silent() => {}
            Failure::Late | Failure::Lost(_) | Failure::Unfit(_) => {
                connection.end(&text);
                shards.take_down(shard, replica, connection, &text);
            }
        }
    }

    /// Whether an answer is one to what was asked.
    fn check(&self, at: usize, body: &Body) -> Result<(), String> {
        let found = LookupResult::decode(body.bytes()).map_err(|error| error.to_string())?;
        let expected = (self.version, self.pieces[at].range.len(), self.layout.row_bytes());
        let got = (found.version, found.num_signs, found.row_bytes as usize);
        if expected == got {
            return Ok(());
        }
        Err(format!("expected version, signs and row bytes {expected:?}, got {got:?}"))
    }

    /// Puts the rows of a piece where they were asked for; returns how many there are.
    fn put(&self, at: usize, body: &Body, out: &mut [f32], present: &mut [bool]) -> usize {
        // `check` read it before
        let Ok(found) = LookupResult::decode(body.bytes()) else { return 0 };
        let (codec, width) = (self.layout.codec(), self.layout.width());
        let range = self.pieces[at].range.clone();
        let is_present = |i: usize| found.present[i / 64] >> (i % 64) & 1 == 1;
        let mut hits = 0;
        let Some(split) = &self.split else {
            let out = &mut out[range.start * width..range.end * width];
            match codec.row_type() {
                // all rows as if they were one
                RowType::F32 => decode_f32(found.rows, out),
                RowType::F16 | RowType::Int8 => codec.decode(found.rows, out),
            }
            for (i, present) in present[range].iter_mut().enumerate() {
                *present = is_present(i);
                hits += usize::from(*present);
            }
            return hits;
        };
        for (i, (row, place)) in found.rows.chunks_exact(codec.row_bytes()).zip(&split.places[range]).enumerate() {
            let place = *place as usize;
            codec.decode_row(row, &mut out[place * width..][..width]);
            present[place] = is_present(i);
            hits += usize::from(present[place]);
        }
        hits
    }

    /// Zeros for a piece that is lost; returns how many signs it has.
    fn put_zeros(&self, at: usize, out: &mut [f32], present: &mut [bool]) -> usize {
        let width = self.layout.width();
        let range = self.pieces[at].range.clone();
        let place = |i: usize| self.split.as_ref().map_or(i, |split| split.places[i] as usize);
        for place in range.clone().map(place) {
            out[place * width..][..width].fill(0.0);
            present[place] = false;
        }
        range.len()
    }

    fn late(&self, at: usize) -> ClientError {
        let shard = &self.shards.shards[self.pieces[at].shard];
        let patience = self.deadline.saturating_duration_since(self.started);
        ClientError::Unavailable { shard: shard.number, patience, replicas: shard.whys() }
    }
}

impl Drop for PendingLookup<'_> {
    fn drop(&mut self) {
        for Flight { connection, ticket, .. } in self.pieces.iter_mut().filter_map(|piece| piece.flight.take()) {
            connection.forget(&ticket);
        }
    }
}

impl Piece {
    fn new(shard: usize, range: Range<usize>) -> Piece {
        Piece { shard, range, flight: None, tried: Vec::new(), is_lacking: false, refused: None, is_lost: false }
    }

    /// Why no replica that is up gives an answer, and no time would change that.
    fn verdict(&self, shards: &Shards, version: u64) -> Option<ClientError> {
        if self.is_lacking {
            return Some(ClientError::Gone { version, held: shards.versions() });
        }
        let shard = shards.shards[self.shard].number;
        self.refused.clone().map(|refused| ClientError::Unfit { shard, replicas: vec![refused] })
    }
}

/// Sorts signs by their shards: where those of each begin, one more at the end; and the signs, if there are several shards.
fn split_by_shard(shards: &Shards, signs: &[u64]) -> (Vec<usize>, Option<ShardSplit>) {
    let num_shards = shards.shards.len();
    let mut starts = vec![0; num_shards + 1];
    if num_shards == 1 {
        starts[1] = signs.len();
        return (starts, None);
    }
    let owners: Vec<u32> = signs.iter().map(|&sign| shards.shard_of(sign) as u32).collect();
    owners.iter().for_each(|&owner| starts[owner as usize + 1] += 1);
    for shard in 0..num_shards {
        starts[shard + 1] += starts[shard];
    }
    let mut next = starts.clone();
    let mut split = ShardSplit { signs: vec![0; signs.len()], places: vec![0; signs.len()] };
    for (place, (&sign, &owner)) in signs.iter().zip(&owners).enumerate() {
        let at = &mut next[owner as usize];
        (split.signs[*at], split.places[*at]) = (sign, place as u32);
        *at += 1;
    }
    (starts, Some(split))
}
