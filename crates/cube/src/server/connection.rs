//! A connection at the server: lookups are answered in their order.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use elasticrec_table::partition::partition_of;
use elasticrec_wire::message::{MAX_LOOKUP_BYTES, MAX_RESULT_BYTES};
use elasticrec_wire::{Access, FrameError, Inventory, Kind, Lookup, LookupResult, Peer, Reason, Refusal, Stream};

use super::Shared;
use crate::meta::Meta;
use crate::versions::VersionError;

/// Most memory that a connection keeps for its next answer.
const KEPT_BYTES: usize = 4 << 20;

/// The connection of one client.
pub(super) struct Connection<'a> {
    shared: &'a Shared,
    peer: Peer,
    /// Buffers of the answers, kept to save allocations.
    rows: Vec<u8>,
    present: Vec<u64>,
}

impl<'a> Connection<'a> {
    pub(super) fn new(shared: &'a Shared, stream: Stream) -> io::Result<Self> {
        Ok(Connection { shared, peer: Peer::new(stream)?, rows: Vec::new(), present: Vec::new() })
    }

    /// Answers requests until the connection ends; returns early if there is no valid hello by the deadline.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(), FrameError> {
        let (id, checked) = self.peer.read_hello(self.shared.access(), deadline)?;
        if !self.greet(id, checked)? {
            return Ok(());
        }
        let mut has_announced_stop = false;
        loop {
            let read = self.peer.read(MAX_LOOKUP_BYTES);
            if self.shared.connections.is_stopping() && !has_announced_stop {
                // The client sends further requests to another replica; requests that have arrived are still answered.
                has_announced_stop = true;
                self.peer.refuse(0, &Refusal::new(Reason::Stopping, "the server is stopping"))?;
            }
            let header = read?;
            let start = Instant::now();
            match header.kind {
                Kind::Lookup => {
                    if let Err(refusal) = self.look_up(header.id)? {
                        self.refuse(header.id, &refusal)?;
                        if refusal.reason == Reason::Malformed {
                            return Ok(());
                        }
                    } else {
                        self.shared.counters.latency.note(start.elapsed());
                    }
                }
                // Clients repeat the hello to learn of new versions.
                Kind::Hello => {
                    let checked = self.shared.access().check(header.kind, self.peer.body.bytes());
                    if !self.greet(header.id, checked)? {
                        return Ok(());
                    }
                }
                other => {
                    let text = format!("expected a request, got {other:?}");
                    self.refuse(header.id, &Refusal::new(Reason::Malformed, text))?;
                    return Ok(());
                }
            }
        }
    }

    /// Answers hello `id` with the inventory, or with the refusal; false if the client is refused.
    fn greet(&mut self, id: u64, checked: Result<(), Refusal>) -> Result<bool, FrameError> {
        if let Err(refusal) = checked {
            self.refuse(id, &refusal)?;
            return Ok(false);
        }
        let held = &self.shared.versions;
        let all = held.all();
        let (layouts, versions) = layouts_of(all.iter().map(|(version, view)| (*version, view.base().meta())));
        let about = self.shared.about.read().unwrap_or_else(PoisonError::into_inner).clone();
        let inventory = Inventory {
            first_partition: held.partitions().start,
            end_partition: held.partitions().end,
            num_partitions: held.num_partitions(),
            model: self.shared.identity.model.as_bytes(),
            layouts: layouts.as_bytes(),
            versions: &versions,
            about: about.as_bytes(),
        };
        self.peer.send(Kind::Inventory, id, &inventory.parts())?;
        Ok(true)
    }

    fn refuse(&self, id: u64, refusal: &Refusal) -> io::Result<()> {
        self.shared.connections.count_refused();
        if refusal.reason == Reason::Malformed {
            self.shared.connections.count_malformed();
        }
        self.peer.refuse(id, refusal)
    }

    fn look_up(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let Connection { shared, peer, rows, present } = self;
        let lookup = match Lookup::decode(peer.body.bytes()) {
            Ok(lookup) => lookup,
            Err(error) => return Ok(Err(error.into())),
        };
        let result = match shared.look_up(&lookup, rows, present) {
            Ok(result) => result,
            Err(refusal) => return Ok(Err(refusal)),
        };
        peer.send(Kind::LookupResult, id, &result.parts())?;
        if self.rows.capacity() > KEPT_BYTES {
            self.rows = Vec::new();
        }
        Ok(Ok(()))
    }
}

impl Shared {
    fn access(&self) -> Access<'_> {
        Access { scope: "model", name: self.identity.model.as_bytes(), token: &self.identity.token }
    }

    /// Looks signs up in a version. The buffers grow as needed; the result borrows them.
    pub(super) fn look_up<'a>(
        &self,
        lookup: &Lookup<'_>,
        rows: &'a mut Vec<u8>,
        present: &'a mut Vec<u64>,
    ) -> Result<LookupResult<'a>, Refusal> {
        let num_signs = lookup.signs.len();
        // The view is released before the answer is written, so that a slow peer does not keep a retired version in memory.
        let view = self.versions.get(lookup.version).map_err(|error| match error {
            VersionError::NoVersion { .. } => Refusal::new(Reason::NoVersion, error.to_string()),
            other => Refusal::new(Reason::Internal, other.to_string()),
        })?;
        let row_bytes = view.row_bytes();
        // Checked before memory is allocated for the answer.
        if num_signs.saturating_mul(row_bytes) > MAX_RESULT_BYTES {
            let text = format!("lookup: expected rows of at most {MAX_RESULT_BYTES} bytes, got {num_signs} signs");
            return Err(Refusal::new(Reason::Malformed, text));
        }
        self.check_partitions(lookup.signs)?;
        let (row_len, word_len) = (num_signs * row_bytes, num_signs.div_ceil(64));
        // Buffers are not cleared: every byte is written below.
        if rows.len() < row_len {
            rows.resize(row_len, 0);
        }
        if present.len() < word_len {
            present.resize(word_len, 0);
        }
        let (rows, present) = (&mut rows[..row_len], &mut present[..word_len]);
        let hits = view.stored_rows(lookup.signs, rows, present);
        let counters = &self.counters;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        counters.keys.fetch_add(num_signs as u64, Ordering::Relaxed);
        counters.misses.fetch_add((num_signs - hits) as u64, Ordering::Relaxed);
        counters.bytes.fetch_add(row_len as u64, Ordering::Relaxed);
        Ok(LookupResult { version: lookup.version, row_bytes: row_bytes as u32, present, rows, num_signs })
    }

    /// Rejects signs of other servers, which would read as absent here: the client has another partition map.
    fn check_partitions(&self, signs: &[u64]) -> Result<(), Refusal> {
        let (range, num_partitions) = (self.versions.partitions(), self.versions.num_partitions());
        if range.len() == num_partitions as usize {
            return Ok(());
        }
        let is_foreign = |sign: &&u64| !range.contains(&partition_of(**sign, num_partitions));
        match signs.iter().find(is_foreign) {
            None => Ok(()),
            Some(&sign) => {
                let (start, end, partition) = (range.start, range.end, partition_of(sign, num_partitions));
                let text = format!("expected signs of partitions {start} to {end}, got {sign} of {partition}");
                Err(Refusal::new(Reason::Outdated, text))
            }
        }
    }
}

/// Returns the distinct layouts of the versions as JSON, and for each version its number and the index of its layout.
fn layouts_of<'a>(versions: impl Iterator<Item = (u64, &'a Meta)>) -> (String, Vec<[u64; 2]>) {
    let mut layouts: Vec<&Meta> = Vec::new();
    let mut indices = Vec::new();
    for (version, meta) in versions {
        let index = layouts.iter().position(|layout| *layout == meta).unwrap_or_else(|| {
            layouts.push(meta);
            layouts.len() - 1
        });
        indices.push([version, index as u64]);
    }
    // Names and numbers can always be written as JSON.
    (serde_json::to_string(&layouts).unwrap_or_default(), indices)
}
