//! The client: a trainer's connections to all shards. Signs are split out to those that have them, answers put together.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use elasticrec_table::FullRows;
use elasticrec_table::partition::partition_of;
use elasticrec_wire::{
    ClientTls, Group, Kind, Pull, Push, PushAck, Refusal, Rows, StepQuery, StepStatus, Stream, Welcome,
};
use thiserror::Error;

use self::connection::Connection;

mod connection;

pub use self::connection::Ticket;

/// Why a shard did not do what it was asked for.
#[derive(Debug, Error)]
pub enum ClientError {
    /// It cannot be reached, or the connection ended.
    #[error("ps shard {shard} at {address}: {what}")]
    Lost {
        /// The shard's number.
        shard: usize,
        /// Where it was.
        address: String,
        /// What happened.
        what: String,
    },
    /// It said no.
    #[error("ps shard {shard} at {address}: {refused}")]
    Refused {
        /// The shard's number.
        shard: usize,
        /// Where it is.
        address: String,
        /// Why.
        refused: Refusal,
    },
    /// It is not one to talk to: no TLS, another certificate, another release.
    #[error("ps shard {shard} at {address}: {what}")]
    Unfit {
        /// The shard's number.
        shard: usize,
        /// Where it is.
        address: String,
        /// Why.
        what: String,
    },
    /// The shards do not make up the table.
    #[error("ps shards: {0}")]
    Map(String),
}

/// What every client of a run says.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// What all roles of the run know of it.
    pub run: Vec<u8>,
    /// Their secret.
    pub token: Vec<u8>,
    /// Whom they trust; without it connections are plain.
    pub tls: Option<ClientTls>,
}

/// Signs split out to the shards.
#[derive(Debug, Default)]
pub struct ShardSplit {
    /// For each shard where its signs begin in `signs`, one more at the end.
    starts: Vec<usize>,
    signs: Vec<u64>,
    /// For each of `signs` its place among those that were split.
    places: Vec<u32>,
}

impl ShardSplit {
    fn range(&self, shard: usize) -> Range<usize> {
        self.starts[shard]..self.starts[shard + 1]
    }
}

/// What a batch learned, for all shards.
#[derive(Debug, Clone, Copy)]
pub struct BatchUpdate<'a> {
    /// The unit of the batch's name.
    pub unit: u64,
    /// The batch in it.
    pub batch: u32,
    /// No other one of the unit comes behind it.
    pub is_last: bool,
    /// Of the samples.
    pub checksum: u64,
    /// Samples in it.
    pub num_samples: u32,
    /// Data time.
    pub seen: u32,
    /// Of all samples together.
    pub weight: f64,
    /// The group of units with which it makes a step; none if it is a step of its own.
    pub group: Option<Group>,
    /// Changes of weights and states, in place of gradients.
    pub is_delta: bool,
    /// Show and click of each sign that was split.
    pub counts: &'a [(u32, u32)],
    /// `[signs, width]`, of a delta with the states behind.
    pub gradients: &'a [f32],
    /// Of the whole dense vector; empty for a batch without samples; of a delta with the state vectors behind.
    pub dense: &'a [f32],
    /// Places of the metric sums
    pub sum_places: &'a [u32],
    /// and what is added to each.
    pub sum_values: &'a [f64],
}

/// What is asked for beside rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct PullOptions {
    /// Dense values.
    pub dense: bool,
    /// Optimizer states and counters.
    pub state: bool,
    /// The first unit of a group and how many of its steps are to be applied before; all shards have all pushes of them.
    pub after: Option<(u64, u32)>,
}

/// Ends the connections of a client, for a thread that knows more than the one that waits.
#[derive(Debug)]
pub struct Closer {
    streams: Vec<Stream>,
}

impl Closer {
    /// Whoever waits for an answer, or for a server to take a request, waits no longer.
    pub fn close(&self) {
        for stream in &self.streams {
            // one that has ended is what is wanted
            drop(stream.shutdown());
        }
    }
}

/// Connections to all shards of a table.
#[derive(Debug)]
pub struct Client {
    shards: Vec<Connection>,
    num_partitions: u32,
    width: usize,
    state_width: usize,
    num_dense: usize,
    num_dense_states: usize,
    timeout: Duration,
}

impl Client {
    /// Connects to the shards, which are given in the order of their partitions.
    pub fn connect(
        addresses: &[String],
        credentials: &Credentials,
        num_partitions: u32,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let open = |(shard, address): (usize, &String)| Connection::open(shard, address, credentials, timeout);
        let shards: Vec<Connection> = addresses.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let mut end = 0;
        for shard in &shards {
            let Welcome { first_partition, end_partition, .. } = shard.welcome;
            if first_partition != end || end_partition <= first_partition {
                let text = format!("expected partitions from {end} on at {}, got {first_partition}", shard.address);
                return Err(ClientError::Map(text));
            }
            end = end_partition;
        }
        let of = |shard: &Connection| {
            let Welcome { width, state_width, num_dense_states, epoch, .. } = shard.welcome;
            (width, state_width, num_dense_states, epoch)
        };
        let widths = shards.iter().map(of);
        if end != num_partitions || widths.clone().any(|width| Some(width) != widths.clone().next()) {
            let text = format!("expected {num_partitions} partitions, rows of one width and one epoch, got {end}");
            return Err(ClientError::Map(text));
        }
        let (width, state_width, num_dense_states, _) = shards.first().map(of).unwrap_or_default();
        let (width, state_width, num_dense_states) = (width as usize, state_width as usize, num_dense_states as usize);
        let num_dense = shards.iter().map(|shard| shard.welcome.num_dense as usize).sum();
        Ok(Client { shards, num_partitions, width, state_width, num_dense, num_dense_states, timeout })
    }

    /// Weights a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values a row, weights and state.
    pub fn full_width(&self) -> usize {
        self.width + self.state_width
    }

    /// Dense values of all shards.
    pub fn num_dense(&self) -> usize {
        self.num_dense
    }

    /// Dense values with the state vectors behind them.
    pub fn num_dense_full(&self) -> usize {
        self.num_dense * (1 + self.num_dense_states)
    }

    /// Incarnations of the shards, in their order.
    pub fn incarnations(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.welcome.incarnation).collect()
    }

    /// A handle that ends all connections.
    pub fn closer(&self) -> io::Result<Closer> {
        Ok(Closer { streams: self.shards.iter().map(Connection::handle).collect::<Result<_, _>>()? })
    }

    /// Sorts distinct signs by the shard that has them.
    pub fn split(&self, signs: &[u64], into: &mut ShardSplit) {
        let shard_of = |sign: u64| {
            let partition = partition_of(sign, self.num_partitions);
            self.shards.partition_point(|shard| shard.welcome.end_partition <= partition)
        };
        into.starts.clear();
        into.starts.resize(self.shards.len() + 1, 0);
        if self.shards.len() == 1 {
            into.starts[1] = signs.len();
            into.signs.clear();
            into.signs.extend_from_slice(signs);
            into.places.clear();
            into.places.extend(0..signs.len() as u32);
            return;
        }
        let owners: Vec<u16> = signs.iter().map(|&sign| shard_of(sign) as u16).collect();
        owners.iter().for_each(|&owner| into.starts[usize::from(owner) + 1] += 1);
        for shard in 0..self.shards.len() {
            into.starts[shard + 1] += into.starts[shard];
        }
        let mut next = into.starts.clone();
        into.signs.resize(signs.len(), 0);
        into.places.resize(signs.len(), 0);
        for (place, (&sign, &owner)) in signs.iter().zip(&owners).enumerate() {
            let at = &mut next[usize::from(owner)];
            into.signs[*at] = sign;
            into.places[*at] = place as u32;
            *at += 1;
        }
    }

    /// Asks every shard for the rows of its signs, and for its dense values.
    pub fn pull(&self, split: &ShardSplit, wanted: PullOptions) -> Result<Vec<Ticket>, ClientError> {
        let ask = |(at, shard): (usize, &Connection)| {
            let Welcome { epoch, incarnation, .. } = shard.welcome;
            let signs = &split.signs[split.range(at)];
            let PullOptions { dense: wants_dense, state: wants_state, after } = wanted;
            shard.ask(Kind::Pull, &Pull { epoch, incarnation, after, wants_dense, wants_state, signs }.parts())
        };
        self.shards.iter().enumerate().map(ask).collect()
    }

    /// Waits for the rows, in the order in which the signs were split, and for the dense values if they were wanted.
    /// Returns the pushes that each shard had applied.
    pub fn receive(
        &self,
        tickets: &[Ticket],
        split: &ShardSplit,
        rows: &mut [f32],
        dense: Option<&mut [f32]>,
    ) -> Result<Vec<u64>, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let (mut dense, mut applied) = (dense, Vec::with_capacity(self.shards.len()));
        for ((at, shard), ticket) in self.shards.iter().enumerate().zip(tickets) {
            let body = shard.wait(ticket, Kind::Rows, deadline)?;
            let answer = Rows::decode(body.bytes()).map_err(|error| shard.broken(&error))?;
            let places = &split.places[split.range(at)];
            let num_dense = if dense.is_some() { shard.welcome.num_dense as usize } else { 0 };
            if answer.rows.len() != places.len() * self.width || answer.dense.len() != num_dense {
                return Err(shard.lost("expected the rows and dense values that were asked for, got others"));
            }
            for (row, &place) in answer.rows.chunks_exact(self.width.max(1)).zip(places) {
                rows[place as usize * self.width..][..self.width].copy_from_slice(row);
            }
            if let Some(left) = dense.take() {
                let (mine, others) = left.split_at_mut(num_dense);
                mine.copy_from_slice(answer.dense);
                dense = Some(others);
            }
            applied.push(answer.applied);
            shard.give_back(body);
        }
        Ok(applied)
    }

    /// Waits for rows with all they have, and for the dense values with the state vectors behind them.
    pub fn receive_full(
        &self,
        tickets: &[Ticket],
        split: &ShardSplit,
        full: &mut FullRows,
        dense: &mut [f32],
    ) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.timeout;
        let width = self.full_width();
        full.values.resize(split.signs.len() * width, 0.0);
        full.tails.resize(split.signs.len(), [0; 3]);
        let mut start = 0;
        for ((at, shard), ticket) in self.shards.iter().enumerate().zip(tickets) {
            let body = shard.wait(ticket, Kind::Rows, deadline)?;
            let answer = Rows::decode(body.bytes()).map_err(|error| shard.broken(&error))?;
            let places = &split.places[split.range(at)];
            let num_dense = shard.welcome.num_dense as usize;
            let is_whole = answer.rows.len() == places.len() * width
                && answer.tails.len() == places.len()
                && answer.dense.len() == num_dense * (1 + self.num_dense_states);
            if !is_whole {
                return Err(shard.lost("expected the rows and dense values that were asked for, got others"));
            }
            for ((row, tail), &place) in answer.rows.chunks_exact(width).zip(answer.tails).zip(places) {
                full.values[place as usize * width..][..width].copy_from_slice(row);
                full.tails[place as usize] = *tail;
            }
            for (vector, values) in answer.dense.chunks_exact(num_dense.max(1)).enumerate() {
                dense[vector * self.num_dense + start..][..num_dense].copy_from_slice(values);
            }
            start += num_dense;
            shard.give_back(body);
        }
        Ok(())
    }

    /// Asks every shard whether it has all pushes of a step, and waits a little until all have.
    pub fn step_status(&self, group: Group, step: u32, wait: Duration) -> Result<Vec<StepStatus>, ClientError> {
        let wait_ms = wait.as_millis() as u32;
        let ask = |shard: &Connection| {
            let Welcome { epoch, incarnation, .. } = shard.welcome;
            shard.ask(Kind::StepQuery, &StepQuery { epoch, incarnation, group, step, wait_ms }.parts())
        };
        let tickets: Vec<Ticket> = self.shards.iter().map(ask).collect::<Result<_, _>>()?;
        let deadline = Instant::now() + self.timeout;
        let wait_for = |(shard, ticket): (&Connection, &Ticket)| {
            let body = shard.wait(ticket, Kind::StepStatus, deadline)?;
            let met = StepStatus::decode(body.bytes()).map_err(|error| shard.broken(&error))?;
            shard.give_back(body);
            Ok(met)
        };
        self.shards.iter().zip(&tickets).map(wait_for).collect()
    }

    /// Sends every shard what is of its partitions.
    pub fn push(&self, split: &ShardSplit, learned: &BatchUpdate<'_>) -> Result<Vec<Ticket>, ClientError> {
        let width = if learned.is_delta { self.full_width() } else { self.width };
        let (mut counts, mut gradients, mut dense, mut start) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut tickets = Vec::with_capacity(self.shards.len());
        for (at, shard) in self.shards.iter().enumerate() {
            let places = &split.places[split.range(at)];
            counts.clear();
            counts.extend(places.iter().map(|&place| {
                let (show, click) = learned.counts[place as usize];
                [show, click]
            }));
            // one shard takes them as they are
            let gradients = if self.shards.len() == 1 {
                learned.gradients
            } else {
                gradients.clear();
                places.iter().for_each(|&place| {
                    gradients.extend_from_slice(&learned.gradients[place as usize * width..][..width]);
                });
                gradients.as_slice()
            };
            let num_dense = if learned.dense.is_empty() { 0 } else { shard.welcome.num_dense as usize };
            let mine = if learned.dense.len() <= self.num_dense {
                &learned.dense[start..start + num_dense]
            } else {
                dense.clear();
                let vectors = learned.dense.chunks_exact(self.num_dense);
                vectors.for_each(|vector| dense.extend_from_slice(&vector[start..start + num_dense]));
                dense.as_slice()
            };
            start += num_dense;
            let has_sums = shard.welcome.first_partition == 0;
            let push = Push {
                epoch: shard.welcome.epoch,
                incarnation: shard.welcome.incarnation,
                unit: learned.unit,
                batch: learned.batch,
                is_last: learned.is_last,
                checksum: learned.checksum,
                num_samples: learned.num_samples,
                seen: learned.seen,
                weight: learned.weight,
                group: learned.group,
                is_delta: learned.is_delta,
                signs: &split.signs[split.range(at)],
                counts: &counts,
                gradients,
                dense: mine,
                sum_places: if has_sums { learned.sum_places } else { &[] },
                sum_values: if has_sums { learned.sum_values } else { &[] },
            };
            tickets.push(shard.ask(Kind::Push, &push.parts())?);
        }
        Ok(tickets)
    }

    /// Waits until every shard has applied a push.
    pub fn wait_for_ack(&self, tickets: &[Ticket]) -> Result<Vec<PushAck>, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let mut all = Vec::with_capacity(tickets.len());
        for (shard, ticket) in self.shards.iter().zip(tickets) {
            let body = shard.wait(ticket, Kind::PushAck, deadline)?;
            all.push(PushAck::decode(body.bytes()).map_err(|error| shard.broken(&error))?);
            shard.give_back(body);
        }
        Ok(all)
    }
}
