//! The client: a trainer's connections to all shards. Signs are split by shard, and the answers are put together.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use elasticrec_table::FullRows;
use elasticrec_table::partition::partition_of;
use elasticrec_wire::{
    ClientTls, ConnectError, Group, Kind, Pull, Push, PushAck, PushHeader, Refusal, Rows, StepQuery, StepStatus,
    Stream, Welcome,
};
use thiserror::Error;

use self::connection::Connection;

mod connection;

pub use self::connection::Ticket;

/// The reason a request to the shards failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The shard cannot be reached, or the connection ended.
    #[error("ps shard {shard} at {address}: {what}")]
    Lost {
        /// Number of the shard.
        shard: usize,
        /// Its address.
        address: String,
        /// The error.
        what: String,
    },
    /// The shard refused the request.
    #[error("ps shard {shard} at {address}: {refused}")]
    Refused {
        /// Number of the shard.
        shard: usize,
        /// Its address.
        address: String,
        /// The server's answer.
        refused: Refusal,
    },
    /// A retry does not help: the server is the wrong one (no TLS, another certificate, another release), or the request is
    /// too long for a frame.
    #[error("ps shard {shard} at {address}: {what}")]
    Permanent {
        /// Number of the shard.
        shard: usize,
        /// Its address.
        address: String,
        /// The problem.
        what: String,
    },
    /// The partitions of the shards do not make up the table.
    #[error("ps shards: {0}")]
    Map(String),
}

impl ClientError {
    /// The error of one shard.
    fn at(shard: usize, address: &str, error: ConnectError) -> Self {
        let address = address.into();
        match error {
            ConnectError::Lost(what) => ClientError::Lost { shard, address, what },
            ConnectError::WrongServer(what) => ClientError::Permanent { shard, address, what },
            ConnectError::Refused(refused) => ClientError::Refused { shard, address, refused },
        }
    }
}

/// The credentials of a client, and the authorities that it trusts.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The id of the run.
    pub run: Vec<u8>,
    /// The shared secret of the run.
    pub token: Vec<u8>,
    /// The authorities to trust; without them connections are plain.
    pub tls: Option<ClientTls>,
}

/// Signs sorted by the shard that owns them.
#[derive(Debug, Default)]
pub struct ShardSplit {
    /// Start of the signs of each shard in `signs`, then the number of signs.
    starts: Vec<usize>,
    signs: Vec<u64>,
    /// For each of `signs`, its index in the caller's list.
    indices: Vec<u32>,
}

impl ShardSplit {
    fn range(&self, shard: usize) -> Range<usize> {
        self.starts[shard]..self.starts[shard + 1]
    }
}

/// The update of a batch, for all shards.
#[derive(Debug, Clone, Copy)]
pub struct BatchUpdate<'a> {
    /// The batch and how its update is applied.
    pub header: PushHeader,
    /// Show and click of each sign, in the order of the caller's list.
    pub counts: &'a [(u32, u32)],
    /// `[signs, width]`; in an increment `[signs, width + state]`.
    pub gradients: &'a [f32],
    /// For the whole dense vector, empty for a batch without samples; in an increment followed by the state vectors.
    pub dense: &'a [f32],
    /// Indices of the metric sums that change.
    pub sum_indices: &'a [u32],
    /// The amount to add to each of these sums.
    pub sum_values: &'a [f64],
}

/// The content of a pull besides weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct PullOptions {
    /// Dense values.
    pub dense: bool,
    /// Optimizer states and counters.
    pub state: bool,
    /// The first unit of a group and the number of its steps to apply first; all shards have all pushes of these steps.
    pub after: Option<(u64, u32)>,
}

/// Ends the connections of a client while another thread waits on them.
#[derive(Debug)]
pub struct Closer {
    streams: Vec<Stream>,
}

impl Closer {
    /// Ends all connections; threads that wait on them get an error.
    pub fn close(&self) {
        for stream in &self.streams {
            // An error means that the connection has ended already.
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
    /// Connects to the shards; addresses are in the order of the partitions.
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
                let got = format!("{first_partition} to {end_partition}");
                let text = format!("{}: expected partitions that begin at {end}, got {got}", shard.address);
                return Err(ClientError::Map(text));
            }
            end = end_partition;
        }
        let of = |shard: &Connection| {
            let Welcome { width, state_width, num_dense_states, epoch, .. } = shard.welcome;
            (width, state_width, num_dense_states, epoch)
        };
        let widths = shards.iter().map(of);
        if end != num_partitions {
            return Err(ClientError::Map(format!("expected {num_partitions} partitions, got {end}")));
        }
        if widths.clone().any(|width| Some(width) != widths.clone().next()) {
            let text = "expected the same row width, optimizer state and partition map epoch at all shards, got others";
            return Err(ClientError::Map(text.into()));
        }
        let (width, state_width, num_dense_states, _) = shards.first().map(of).unwrap_or_default();
        let (width, state_width, num_dense_states) = (width as usize, state_width as usize, num_dense_states as usize);
        let num_dense = shards.iter().map(|shard| shard.welcome.num_dense as usize).sum();
        Ok(Client { shards, num_partitions, width, state_width, num_dense, num_dense_states, timeout })
    }

    /// Weights of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values of a row, weights and optimizer state.
    pub fn full_width(&self) -> usize {
        self.width + self.state_width
    }

    /// Dense values of all shards.
    pub fn num_dense(&self) -> usize {
        self.num_dense
    }

    /// Dense values and state vectors of all shards.
    pub fn num_dense_full(&self) -> usize {
        self.num_dense * (1 + self.num_dense_states)
    }

    /// Incarnations of the shards in order.
    pub fn incarnations(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.welcome.incarnation).collect()
    }

    /// Returns a handle with which another thread can end all connections.
    pub fn closer(&self) -> io::Result<Closer> {
        Ok(Closer { streams: self.shards.iter().map(Connection::handle).collect::<Result<_, _>>()? })
    }

    /// Sorts distinct signs by the shard that owns them.
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
            into.indices.clear();
            into.indices.extend(0..signs.len() as u32);
            return;
        }
        let owners: Vec<u16> = signs.iter().map(|&sign| shard_of(sign) as u16).collect();
        owners.iter().for_each(|&owner| into.starts[usize::from(owner) + 1] += 1);
        for shard in 0..self.shards.len() {
            into.starts[shard + 1] += into.starts[shard];
        }
        let mut next = into.starts.clone();
        into.signs.resize(signs.len(), 0);
        into.indices.resize(signs.len(), 0);
        for (index, (&sign, &owner)) in signs.iter().zip(&owners).enumerate() {
            let at = &mut next[usize::from(owner)];
            into.signs[*at] = sign;
            into.indices[*at] = index as u32;
            *at += 1;
        }
    }

    /// Sends a pull to every shard: the rows of its signs and, optionally, its dense values.
    pub fn pull(&self, split: &ShardSplit, options: PullOptions) -> Result<Vec<Ticket>, ClientError> {
        let send = |(at, shard): (usize, &Connection)| {
            let Welcome { epoch, incarnation, .. } = shard.welcome;
            let signs = &split.signs[split.range(at)];
            let PullOptions { dense: wants_dense, state: wants_state, after } = options;
            shard.send(Kind::Pull, &Pull { epoch, incarnation, after, wants_dense, wants_state, signs }.parts())
        };
        self.shards.iter().enumerate().map(send).collect()
    }

    /// Waits for the rows, in the order of the caller's signs, and for the dense values if they were pulled.
    /// Returns the number of pushes that each shard had applied.
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
            let indices = &split.indices[split.range(at)];
            let num_dense = if dense.is_some() { shard.welcome.num_dense as usize } else { 0 };
            if answer.rows.len() != indices.len() * self.width || answer.dense.len() != num_dense {
                return Err(shard.lost("expected as many rows and dense values as requested, got another number"));
            }
            for (row, &index) in answer.rows.chunks_exact(self.width.max(1)).zip(indices) {
                rows[index as usize * self.width..][..self.width].copy_from_slice(row);
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

    /// Waits for full rows, with state and counters, and for the dense values with their state vectors.
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
            let indices = &split.indices[split.range(at)];
            let num_dense = shard.welcome.num_dense as usize;
            let is_whole = answer.rows.len() == indices.len() * width
                && answer.tails.len() == indices.len()
                && answer.dense.len() == num_dense * (1 + self.num_dense_states);
            if !is_whole {
                return Err(shard.lost("expected as many rows and dense values as requested, got another number"));
            }
            for ((row, tail), &index) in answer.rows.chunks_exact(width).zip(answer.tails).zip(indices) {
                full.values[index as usize * width..][..width].copy_from_slice(row);
                full.tails[index as usize] = *tail;
            }
            for (vector, values) in answer.dense.chunks_exact(num_dense.max(1)).enumerate() {
                dense[vector * self.num_dense + start..][..num_dense].copy_from_slice(values);
            }
            start += num_dense;
            shard.give_back(body);
        }
        Ok(())
    }

    /// Returns each shard's progress with a step; shards answer when they have all its pushes, or after `wait`.
    pub fn step_status(&self, group: Group, step: u32, wait: Duration) -> Result<Vec<StepStatus>, ClientError> {
        let wait_ms = wait.as_millis() as u32;
        let send = |shard: &Connection| {
            let Welcome { epoch, incarnation, .. } = shard.welcome;
            shard.send(Kind::StepQuery, &StepQuery { epoch, incarnation, group, step, wait_ms }.parts())
        };
        let tickets: Vec<Ticket> = self.shards.iter().map(send).collect::<Result<_, _>>()?;
        let deadline = Instant::now() + self.timeout;
        let wait_for = |(shard, ticket): (&Connection, &Ticket)| {
            let body = shard.wait(ticket, Kind::StepStatus, deadline)?;
            let status = StepStatus::decode(body.bytes()).map_err(|error| shard.broken(&error))?;
            shard.give_back(body);
            Ok(status)
        };
        self.shards.iter().zip(&tickets).map(wait_for).collect()
    }

    /// Sends every shard its part of an update.
    pub fn push(&self, split: &ShardSplit, update: &BatchUpdate<'_>) -> Result<Vec<Ticket>, ClientError> {
        let width = if update.header.is_increment { self.full_width() } else { self.width };
        let (mut counts, mut gradients, mut dense, mut start) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut tickets = Vec::with_capacity(self.shards.len());
        for (at, shard) in self.shards.iter().enumerate() {
            let indices = &split.indices[split.range(at)];
            counts.clear();
            counts.extend(indices.iter().map(|&index| {
                let (show, click) = update.counts[index as usize];
                [show, click]
            }));
            // A single shard needs no copy.
            let gradients = if self.shards.len() == 1 {
                update.gradients
            } else {
                gradients.clear();
                indices.iter().for_each(|&index| {
                    gradients.extend_from_slice(&update.gradients[index as usize * width..][..width]);
                });
                gradients.as_slice()
            };
            let num_dense = if update.dense.is_empty() { 0 } else { shard.welcome.num_dense as usize };
            let mine = if update.dense.len() <= self.num_dense {
                &update.dense[start..start + num_dense]
            } else {
                dense.clear();
                let vectors = update.dense.chunks_exact(self.num_dense);
                vectors.for_each(|vector| dense.extend_from_slice(&vector[start..start + num_dense]));
                dense.as_slice()
            };
            start += num_dense;
            let has_sums = shard.welcome.first_partition == 0;
            let push = Push {
                epoch: shard.welcome.epoch,
                incarnation: shard.welcome.incarnation,
                header: update.header,
                signs: &split.signs[split.range(at)],
                counts: &counts,
                gradients,
                dense: mine,
                sum_indices: if has_sums { update.sum_indices } else { &[] },
                sum_values: if has_sums { update.sum_values } else { &[] },
            };
            tickets.push(shard.send(Kind::Push, &push.parts())?);
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
