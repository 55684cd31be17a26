//! A connection of the server: signs come in, rows go out, in the order of the requests.

use std::io::{self, BufReader};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use elasticrec_table::partition::partition_of;
use elasticrec_wire::frame::MAX_HELLO_BYTES;
use elasticrec_wire::message::{MAX_LOOKUP_BYTES, MAX_RESULT_BYTES};
use elasticrec_wire::{
    Body, Expected, FrameError, Header, Inventory, Kind, Lookup, LookupResult, Reason, Refusal, Service, Stream,
    read_frame, write_frame,
};

use super::Shared;
use crate::meta::Meta;
use crate::versions::VersionError;

/// Requests that are read at once: some of a thousand signs.
const READ_BYTES: usize = 1 << 16;
/// Memory that a connection keeps for its next answer.
const KEPT_BYTES: usize = 4 << 20;

/// One peer.
pub(super) struct Connection<'a> {
    shared: &'a Shared,
    reader: BufReader<Stream>,
    stream: Stream,
    body: Body,
    /// What answers are made of; kept to save the allocation.
    rows: Vec<u8>,
    present: Vec<u64>,
}

impl<'a> Connection<'a> {
    /// With room for answers.
    pub(super) fn new(shared: &'a Shared, stream: Stream) -> io::Result<Self> {
        let reader = BufReader::with_capacity(READ_BYTES, stream.try_clone()?);
        Ok(Connection { shared, reader, stream, body: Body::default(), rows: Vec::new(), present: Vec::new() })
    }

    /// Answers requests until it ends; a peer that has not said hello by the deadline is none.
    pub(super) fn run(&mut self, deadline: Instant) -> Result<(), FrameError> {
        let header = read_frame(&mut self.stream.until(deadline), MAX_HELLO_BYTES, &mut self.body)?;
        if !self.greet(header)? {
            return Ok(());
        }
        let mut is_told = false;
        loop {
            let read = read_frame(&mut self.reader, MAX_LOOKUP_BYTES, &mut self.body);
            if self.shared.gate.is_stopping() && !is_told {
                // whoever hears it asks another replica; what has come is answered all the same
                is_told = true;
                let refused = Refusal::new(Reason::Stopping, "the server stops");
                write_frame(&mut self.stream, Header { kind: Kind::Refusal, id: 0 }, &refused.parts().slices())?;
            }
            let header = read?;
            let start = Instant::now();
            match header.kind {
                Kind::Lookup => {
                    if let Err(refused) = self.seek(header.id)? {
                        self.refuse(header.id, &refused)?;
                        if refused.reason == Reason::Malformed {
                            return Ok(());
                        }
                    } else {
                        self.shared.counters.latency.note(start.elapsed());
                    }
                }
                // asked again: versions come and go
                Kind::Hello if self.greet(header)? => {}
                Kind::Hello => return Ok(()),
                other => {
                    let text = format!("expected a request, got {other:?}");
                    self.refuse(header.id, &Refusal::new(Reason::Malformed, text))?;
                    return Ok(());
                }
            }
        }
    }

    /// Answers a hello; false if the peer is not one of ours.
    fn greet(&mut self, header: Header) -> Result<bool, FrameError> {
        let identity = &self.shared.identity;
        let expected = Expected { of: "model", run: identity.model.as_bytes(), token: &identity.token };
        if let Err(refused) = expected.check(header.kind, self.body.bytes()) {
            self.refuse(header.id, &refused)?;
            return Ok(false);
        }
        let store = &self.shared.store;
        let held = store.all();
        let (layouts, versions) = layouts_of(held.iter().map(|(version, view)| (*version, view.base().meta())));
        let about = self.shared.about.read().unwrap_or_else(PoisonError::into_inner).clone();
        let holding = Inventory {
            first_partition: store.partitions().start,
            end_partition: store.partitions().end,
            num_partitions: store.num_partitions(),
            model: identity.model.as_bytes(),
            layouts: layouts.as_bytes(),
            versions: &versions,
            about: about.as_bytes(),
        };
        let header = Header { kind: Kind::Inventory, id: header.id };
        write_frame(&mut self.stream, header, &holding.parts().slices())?;
        Ok(true)
    }

    /// Says no.
    fn refuse(&mut self, id: u64, refused: &Refusal) -> io::Result<()> {
        self.shared.note_refused();
        if refused.reason == Reason::Malformed {
            self.shared.note_malformed();
        }
        write_frame(&mut self.stream, Header { kind: Kind::Refusal, id }, &refused.parts().slices())
    }

    fn seek(&mut self, id: u64) -> io::Result<Result<(), Refusal>> {
        let Connection { shared, body, rows, present, .. } = self;
        let seek = match Lookup::decode(body.bytes()) {
            Ok(seek) => seek,
            Err(error) => return Ok(Err(Refusal::new(Reason::Malformed, error.to_string()))),
        };
        let found = match shared.look_up(&seek, rows, present) {
            Ok(found) => found,
            Err(refused) => return Ok(Err(refused)),
        };
        write_frame(&mut self.stream, Header { kind: Kind::LookupResult, id }, &found.parts().slices())?;
        if self.rows.capacity() > KEPT_BYTES {
            self.rows = Vec::new();
        }
        Ok(Ok(()))
    }
}

impl Shared {
    pub(super) fn look_up<'a>(
        &self,
        seek: &Lookup<'_>,
        rows: &'a mut Vec<u8>,
        present: &'a mut Vec<u64>,
    ) -> Result<LookupResult<'a>, Refusal> {
        let num_signs = seek.signs.len();
        // given back before the answer is written: a slow peer holds up no retired version
        let view = self.store.get(seek.version).map_err(|error| match error {
            VersionError::NoVersion { .. } => Refusal::new(Reason::NoVersion, error.to_string()),
            other => Refusal::new(Reason::Internal, other.to_string()),
        })?;
        let row_bytes = view.row_bytes();
        // before anything is made for it
        if num_signs.saturating_mul(row_bytes) > MAX_RESULT_BYTES {
            let text = format!("seek: expected rows of at most {MAX_RESULT_BYTES} bytes, got {num_signs} signs");
            return Err(Refusal::new(Reason::Malformed, text));
        }
        self.check_partitions(seek.signs)?;
        let (row_len, word_len) = (num_signs * row_bytes, num_signs.div_ceil(64));
        // grown, never filled anew: every byte is written below
        if rows.len() < row_len {
            rows.resize(row_len, 0);
        }
        if present.len() < word_len {
            present.resize(word_len, 0);
        }
        let (rows, present) = (&mut rows[..row_len], &mut present[..word_len]);
        let hits = view.seek(seek.signs, rows, present);
        let counters = &self.counters;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        counters.keys.fetch_add(num_signs as u64, Ordering::Relaxed);
        counters.misses.fetch_add((num_signs - hits) as u64, Ordering::Relaxed);
        counters.bytes.fetch_add(row_len as u64, Ordering::Relaxed);
        Ok(LookupResult { version: seek.version, row_bytes: row_bytes as u32, present, rows, num_signs })
    }

    /// A sign of another server's would read as absent here: its client has another map.
    fn check_partitions(&self, signs: &[u64]) -> Result<(), Refusal> {
        let (range, num_partitions) = (self.store.partitions(), self.store.num_partitions());
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

/// The layouts of versions as JSON, each once, and for each version its number and the place of its layout.
fn layouts_of<'a>(versions: impl Iterator<Item = (u64, &'a Meta)>) -> (String, Vec<[u64; 2]>) {
    let mut layouts: Vec<&Meta> = Vec::new();
    let mut places = Vec::new();
    for (version, meta) in versions {
        let place = layouts.iter().position(|layout| *layout == meta).unwrap_or_else(|| {
            layouts.push(meta);
            layouts.len() - 1
        });
        places.push([version, place as u64]);
    }
    // names and numbers: nothing that JSON cannot say
    (serde_json::to_string(&layouts).unwrap_or_default(), places)
}
