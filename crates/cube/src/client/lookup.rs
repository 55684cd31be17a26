//! A lookup: signs are split by shard and into pieces, and each piece is sent to a replica; failed pieces go to another.

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
use crate::sink::is_set;

/// Most bytes of rows in the answer to a piece, unless a single row is longer.
const PIECE_BYTES: usize = 512 << 10;
/// Most signs of a piece.
const PIECE_SIGNS: usize = 8192;
/// Most pieces in flight.
const MAX_IN_FLIGHT: usize = 8;

const _: () = assert!(PIECE_SIGNS <= MAX_LOOKUP_SIGNS);

/// The treatment of signs whose shard does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardFailurePolicy {
    /// Fail the lookup.
    Fail,
    /// Return zero rows, without waiting if no replica of the shard is up.
    Zero,
}

/// The outcome of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupSummary {
    /// Number of signs that have a row.
    pub hits: usize,
    /// Number of signs whose shard did not answer.
    pub lost: usize,
}

/// A lookup in flight.
#[derive(Debug)]
pub struct PendingLookup<'a> {
    shards: &'a Shards,
    version: u64,
    layout: Arc<Layout>,
    deadline: Instant,
    started: Instant,
    signs: &'a [u64],
    /// The signs sorted by shard, if there are several shards.
    split: Option<ShardSplit>,
    pieces: Vec<Piece>,
    num_sent: usize,
    policy: ShardFailurePolicy,
}

/// Signs in the order of their shards.
#[derive(Debug)]
struct ShardSplit {
    signs: Vec<u64>,
    /// For each of these, its index in the caller's list.
    indices: Vec<u32>,
}

/// Signs of one shard that are looked up with one request.
#[derive(Debug)]
struct Piece {
    shard: usize,
    range: Range<usize>,
    flight: Option<Flight>,
    /// Serial numbers of the connections that were tried.
    tried: Vec<u64>,
    /// Whether a server that was tried does not hold the version.
    version_is_missing: bool,
    /// A refusal that every other replica would repeat.
    refused: Option<String>,
    /// Whether the piece is given up and its rows read as zero.
    is_lost: bool,
}

/// The request of a piece in flight.
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
        policy: ShardFailurePolicy,
    ) -> Result<Self, ClientError> {
        let layout = shards.layout(version, deadline)?;
        let (starts, split) = split_by_shard(shards, signs);
        let most = (PIECE_BYTES / layout.row_bytes()).clamp(1, PIECE_SIGNS);
        let mut pieces = Vec::new();
        // The first piece of every shard goes first, so that all shards work at once.
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
        let mut lookup =
            PendingLookup { shards, version, layout, deadline, started, signs, split, pieces, num_sent: 0, policy };
        lookup.send_ahead(0)?;
        Ok(lookup)
    }

    /// The layout of the rows as stored.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Waits for the rows: `[signs, width]`, zeros for signs without a row, and which signs have one.
    ///
    /// # Panics
    /// If `out` or `present` does not have room for exactly these signs.
    pub fn wait(mut self, out: &mut [f32], present: &mut [bool]) -> Result<LookupSummary, ClientError> {
        assert_eq!(out.len(), self.signs.len() * self.layout.width(), "`out` must have a row for each sign");
        assert_eq!(present.len(), self.signs.len(), "`present` must have a flag for each sign");
        let mut summary = LookupSummary { hits: 0, lost: 0 };
        for at in 0..self.pieces.len() {
            match self.receive(at)? {
                Some((connection, body)) => {
                    summary.hits += self.put(at, &body, out, present);
                    connection.give_back(body);
                }
                None => summary.lost += self.put_zeros(at, out, present),
            }
            self.send_ahead(at + 1)?;
        }
        Ok(summary)
    }

    /// Sends further pieces up to the limit of pieces in flight; `num_done` have been answered.
    fn send_ahead(&mut self, num_done: usize) -> Result<(), ClientError> {
        while self.num_sent < self.pieces.len().min(num_done + MAX_IN_FLIGHT) {
            let at = self.num_sent;
            self.num_sent += 1;
            self.send(at)?;
        }
        Ok(())
    }

    /// Sends a piece to a replica that was not tried yet; if there is none, waits for one or gives the piece up.
    fn send(&mut self, at: usize) -> Result<(), ClientError> {
        let PendingLookup { shards, version, deadline, .. } = *self;
        let signs = self.split.as_ref().map_or(self.signs, |split| &split.signs);
        let piece = &mut self.pieces[at];
        let lookup = Lookup { version, signs: &signs[piece.range.clone()] };
        loop {
            let before = shards.num_changes();
            let Some((replica, connection)) = shards.pick(piece.shard, version, &piece.tried) else {
                match piece.final_error(shards, version) {
                    Some(gone @ ClientError::Gone { .. }) => return Err(gone),
                    _ if self.policy == ShardFailurePolicy::Zero => {
                        piece.is_lost = true;
                        return Ok(());
                    }
                    Some(error) => return Err(error),
                    None if shards.wait_for_change(before, deadline) => continue,
                    None => return Err(self.late(at)),
                }
            };
            match connection.send(Kind::Lookup, &lookup.parts(), deadline) {
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

    /// Waits for the answer to a piece, retrying with other replicas; None if the piece is lost.
    fn receive(&mut self, at: usize) -> Result<Option<(Arc<Connection>, Body)>, ClientError> {
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
            // A replica that hangs must leave time for the replicas that were not tried yet.
            let num_left = self.shards.num_left(*shard, tried) as u32;
            let now = Instant::now();
            let timeout = self.deadline.saturating_duration_since(now) / (num_left + 1);
            let failure = match connection.wait(&ticket, now + timeout) {
                Ok((Kind::LookupResult, body)) => match self.check(at, &body) {
                    Ok(()) => {
                        if let Some(why) = connection.end_reason() {
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
            self.note_failure(at, replica, &connection, failure);
        }
    }

    /// Updates the piece, the replica's versions and the connection after a failure.
    fn note_failure(&mut self, at: usize, replica: usize, connection: &Connection, failure: Failure) {
        let PendingLookup { shards, version, .. } = *self;
        let piece = &mut self.pieces[at];
        let shard = piece.shard;
        let text = failure.text();
        match failure {
            Failure::Refused(Refusal { reason: Reason::NoVersion, .. }) => {
                piece.version_is_missing = true;
                shards.forget_version(shard, replica, version);
            }
            Failure::Refused(Refusal { reason: Reason::Stopping, .. }) => {
                shards.take_down(shard, replica, connection, &text);
            }
            Failure::Refused(_) => {
                let address = shards.shards[shard].address(replica);
                piece.refused.get_or_insert_with(|| format!("{address}: {text}"));
            }
            // The replica is busy, not gone.
            Failure::Late if !connection.is_silent() => {}
            Failure::Late | Failure::Lost(_) | Failure::WrongServer(_) => {
                connection.end(&text);
                shards.take_down(shard, replica, connection, &text);
            }
        }
    }

    /// Checks that an answer fits its piece.
    fn check(&self, at: usize, body: &Body) -> Result<(), String> {
        let result = LookupResult::decode(body.bytes()).map_err(|error| error.to_string())?;
        let expected = (self.version, self.pieces[at].range.len(), self.layout.row_bytes());
        let got = (result.version, result.num_signs, result.row_bytes as usize);
        if expected == got {
            return Ok(());
        }
        Err(format!("expected version, signs and row bytes {expected:?}, got {got:?}"))
    }

    /// Decodes the rows of a piece into `out`; returns their number.
    fn put(&self, at: usize, body: &Body, out: &mut [f32], present: &mut [bool]) -> usize {
        // `check` has decoded it before.
        let Ok(result) = LookupResult::decode(body.bytes()) else { return 0 };
        let (codec, width) = (self.layout.codec(), self.layout.width());
        let range = self.pieces[at].range.clone();
        let is_present = |i: usize| is_set(result.present, i);
        let mut hits = 0;
        let Some(split) = &self.split else {
            let out = &mut out[range.start * width..range.end * width];
            match codec.row_type() {
                // Values of `f32` rows are contiguous: all rows are decoded as one.
                RowType::F32 => decode_f32(result.rows, out),
                RowType::F16 | RowType::Int8 => codec.decode(result.rows, out),
            }
            for (i, present) in present[range].iter_mut().enumerate() {
                *present = is_present(i);
                hits += usize::from(*present);
            }
            return hits;
        };
        for (i, (row, index)) in result.rows.chunks_exact(codec.row_bytes()).zip(&split.indices[range]).enumerate() {
            let index = *index as usize;
            codec.decode_row(row, &mut out[index * width..][..width]);
            present[index] = is_present(i);
            hits += usize::from(present[index]);
        }
        hits
    }

    /// Writes zeros for a lost piece; returns the number of its signs.
    fn put_zeros(&self, at: usize, out: &mut [f32], present: &mut [bool]) -> usize {
        let width = self.layout.width();
        let range = self.pieces[at].range.clone();
        let index = |i: usize| self.split.as_ref().map_or(i, |split| split.indices[i] as usize);
        for index in range.clone().map(index) {
            out[index * width..][..width].fill(0.0);
            present[index] = false;
        }
        range.len()
    }

    fn late(&self, at: usize) -> ClientError {
        let shard = &self.shards.shards[self.pieces[at].shard];
        let timeout = self.deadline.saturating_duration_since(self.started);
        ClientError::Unavailable { shard: shard.number, timeout, replicas: shard.failures() }
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
        Piece {
            shard,
            range,
            flight: None,
            tried: Vec::new(),
            version_is_missing: false,
            refused: None,
            is_lost: false,
        }
    }

    /// The error of a piece for which no replica is left, if waiting would not help.
    fn final_error(&self, shards: &Shards, version: u64) -> Option<ClientError> {
        if self.version_is_missing {
            return Some(ClientError::Gone { version, held: shards.versions() });
        }
        let shard = shards.shards[self.shard].number;
        self.refused.clone().map(|refused| ClientError::Permanent { shard, replicas: vec![refused] })
    }
}

/// Sorts signs by shard. Returns where the signs of each shard begin, then their number; and the sorted signs, unless there
/// is only one shard.
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
    let mut split = ShardSplit { signs: vec![0; signs.len()], indices: vec![0; signs.len()] };
    for (index, (&sign, &owner)) in signs.iter().zip(&owners).enumerate() {
        let at = &mut next[owner as usize];
        (split.signs[*at], split.indices[*at]) = (sign, index as u32);
        *at += 1;
    }
    (starts, Some(split))
}
