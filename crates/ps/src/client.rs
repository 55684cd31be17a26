//! The client: a trainer's connections to all shards. Requests are sent without waiting; a thread a connection takes the
//! answers off and hands each to whoever asked.

use std::collections::HashMap;
use std::io::BufReader;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use elasticrec_table::partition::partition_of;
use elasticrec_wire::frame::MAX_BODY_BYTES;
use elasticrec_wire::message::Parts;
use elasticrec_wire::{
    Body, FrameError, Header, Hello, Kind, MessageError, Pull, Push, Pushed, Refused, Rows, Welcome, read_frame,
    write_frame,
};
use thiserror::Error;

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
        refused: Refused,
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
}

/// An answer: its kind and its body.
type Answer = (Kind, Body);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to one shard.
#[derive(Debug)]
struct Connection {
    shard: usize,
    address: String,
    stream: TcpStream,
    welcome: Welcome,
    next_id: Mutex<u64>,
    shared: Arc<Waiting>,
}

/// Who waits for which answer.
#[derive(Debug, Default)]
struct Waiting {
    asked: Mutex<HashMap<u64, SyncSender<Answer>>>,
    /// Why no more answers come.
    ended: Mutex<Option<String>>,
    /// Bodies to read the next answers into.
    spare: Mutex<Vec<Body>>,
}

impl Waiting {
    /// Takes answers off the connection until it ends.
    fn receive(&self, stream: TcpStream) {
        let mut reader = BufReader::with_capacity(1 << 16, stream);
        let ended = loop {
            let mut body = lock(&self.spare).pop().unwrap_or_default();
            match read_frame(&mut reader, MAX_BODY_BYTES, &mut body) {
                Ok(Header { kind, id }) => {
                    // nobody waits for it any more
                    let Some(sender) = lock(&self.asked).remove(&id) else { continue };
                    drop(sender.send((kind, body)));
                }
                Err(FrameError::Closed) => break "the connection was closed".into(),
                Err(error) => break error.to_string(),
            }
        };
        *lock(&self.ended) = Some(ended);
        lock(&self.asked).clear();
    }
}

/// An answer that is waited for.
#[derive(Debug)]
pub struct Ticket {
    /// Only one waits for it; the lock lets a ticket go from thread to thread.
    answer: Mutex<Receiver<Answer>>,
}

impl Connection {
    fn open(shard: usize, address: &str, credentials: &Credentials, timeout: Duration) -> Result<Self, ClientError> {
        let lost = |what: String| ClientError::Lost { shard, address: address.into(), what };
        let mut targets = address.to_socket_addrs().map_err(|error| lost(error.to_string()))?;
        let target = targets.next().ok_or_else(|| lost("expected an address, got none".into()))?;
        let mut stream = TcpStream::connect_timeout(&target, timeout).map_err(|error| lost(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| lost(error.to_string()))?;
        stream.set_read_timeout(Some(timeout)).map_err(|error| lost(error.to_string()))?;
        let hello = Hello { run: &credentials.run, token: &credentials.token };
        write_frame(&mut stream, Header { kind: Kind::Hello, id: 0 }, &hello.parts().slices())
            .map_err(|error| lost(error.to_string()))?;
        let mut body = Body::default();
        let header = read_frame(&mut stream, MAX_BODY_BYTES, &mut body).map_err(|error| lost(error.to_string()))?;
        let welcome = match header.kind {
            Kind::Welcome => Welcome::decode(body.bytes()).map_err(|error| lost(error.to_string()))?,
            Kind::Refused => {
                let refused = Refused::decode(body.bytes()).map_err(|error| lost(error.to_string()))?;
                return Err(ClientError::Refused { shard, address: address.into(), refused });
            }
            other => return Err(lost(format!("expected a welcome, got {other:?}"))),
        };
        stream.set_read_timeout(None).map_err(|error| lost(error.to_string()))?;
        let reader = stream.try_clone().map_err(|error| lost(error.to_string()))?;
        let shared = Arc::new(Waiting::default());
        let receiving = shared.clone();
        thread::Builder::new()
            .name("ps-answers".into())
            .spawn(move || receiving.receive(reader))
            .map_err(|error| lost(error.to_string()))?;
        Ok(Connection { shard, address: address.into(), stream, welcome, next_id: Mutex::new(1), shared })
    }

    fn lost(&self, what: impl Into<String>) -> ClientError {
        ClientError::Lost { shard: self.shard, address: self.address.clone(), what: what.into() }
    }

    /// Sends a request; its answer comes to the ticket.
    fn ask(&self, kind: Kind, parts: &Parts<'_>) -> Result<Ticket, ClientError> {
        // held while the frame is written: frames of two threads must not mix
        let mut next_id = lock(&self.next_id);
        let id = *next_id;
        *next_id += 1;
        let (sender, answer) = sync_channel(1);
        lock(&self.shared.asked).insert(id, sender);
        if let Some(ended) = &*lock(&self.shared.ended) {
            return Err(self.lost(ended.clone()));
        }
        write_frame(&mut &self.stream, Header { kind, id }, &parts.slices())
            .map_err(|error| self.lost(error.to_string()))?;
        Ok(Ticket { answer: Mutex::new(answer) })
    }

    fn wait(&self, ticket: &Ticket, expected: Kind, deadline: Instant) -> Result<Body, ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        match lock(&ticket.answer).recv_timeout(left) {
            Ok((kind, body)) if kind == expected => Ok(body),
            Ok((Kind::Refused, body)) => {
                let refused = Refused::decode(body.bytes()).map_err(|error| self.broken(&error))?;
                Err(ClientError::Refused { shard: self.shard, address: self.address.clone(), refused })
            }
            Ok((kind, _)) => Err(self.lost(format!("expected {expected:?}, got {kind:?}"))),
            Err(RecvTimeoutError::Timeout) => Err(self.lost("did not answer in time")),
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.lost(lock(&self.shared.ended).clone().unwrap_or_else(|| "the connection ended".into())))
            }
        }
    }

    fn broken(&self, error: &MessageError) -> ClientError {
        self.lost(error.to_string())
    }

    fn give_back(&self, body: Body) {
        lock(&self.shared.spare).push(body);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.stream.shutdown(Shutdown::Both));
    }
}

/// Signs dealt out to the shards.
#[derive(Debug, Default)]
pub struct Dealt {
    /// For each shard where its signs begin in `signs`, one more at the end.
    starts: Vec<usize>,
    signs: Vec<u64>,
    /// For each of `signs` its place among those that were dealt.
    places: Vec<u32>,
}

impl Dealt {
    fn range(&self, shard: usize) -> Range<usize> {
        self.starts[shard]..self.starts[shard + 1]
    }
}

/// What a batch learned, for all shards.
#[derive(Debug, Clone, Copy)]
pub struct Learned<'a> {
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
    /// Show and click of each sign that was dealt.
    pub counts: &'a [(u32, u32)],
    /// `[signs, width]`.
    pub gradients: &'a [f32],
    /// Of the whole dense vector; empty for a batch without samples.
    pub dense: &'a [f32],
    /// Places of the metric sums
    pub sum_places: &'a [u32],
    /// and what is added to each.
    pub sum_values: &'a [f64],
}

/// Connections to all shards of a table.
#[derive(Debug)]
pub struct Client {
    shards: Vec<Connection>,
    num_partitions: u32,
    width: usize,
    num_dense: usize,
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
        let widths = shards.iter().map(|shard| (shard.welcome.width, shard.welcome.epoch));
        if end != num_partitions || widths.clone().any(|width| Some(width) != widths.clone().next()) {
            let text = format!("expected {num_partitions} partitions, rows of one width and one epoch, got {end}");
            return Err(ClientError::Map(text));
        }
        let width = shards.first().map_or(0, |shard| shard.welcome.width as usize);
        let num_dense = shards.iter().map(|shard| shard.welcome.num_dense as usize).sum();
        Ok(Client { shards, num_partitions, width, num_dense, timeout })
    }

    /// Weights a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Dense values of all shards.
    pub fn num_dense(&self) -> usize {
        self.num_dense
    }

    /// Incarnations of the shards, in their order.
    pub fn incarnations(&self) -> Vec<u64> {
        self.shards.iter().map(|shard| shard.welcome.incarnation).collect()
    }

    /// Sorts distinct signs by the shard that has them.
    pub fn deal(&self, signs: &[u64], into: &mut Dealt) {
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
    pub fn pull(&self, dealt: &Dealt, wants_dense: bool) -> Result<Vec<Ticket>, ClientError> {
        let ask = |(at, shard): (usize, &Connection)| {
            let Welcome { epoch, incarnation, .. } = shard.welcome;
            let signs = &dealt.signs[dealt.range(at)];
            shard.ask(Kind::Pull, &Pull { epoch, incarnation, after_step: 0, wants_dense, signs }.parts())
        };
        self.shards.iter().enumerate().map(ask).collect()
    }

    /// Waits for the rows, in the order in which the signs were dealt, and for the dense values if they were wanted.
    /// Returns the pushes that each shard had applied.
    pub fn receive(
        &self,
        tickets: &[Ticket],
        dealt: &Dealt,
        rows: &mut [f32],
        dense: Option<&mut [f32]>,
    ) -> Result<Vec<u64>, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let (mut dense, mut applied) = (dense, Vec::with_capacity(self.shards.len()));
        for ((at, shard), ticket) in self.shards.iter().enumerate().zip(tickets) {
            let body = shard.wait(ticket, Kind::Rows, deadline)?;
            let answer = Rows::decode(body.bytes()).map_err(|error| shard.broken(&error))?;
            let places = &dealt.places[dealt.range(at)];
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

    /// Sends every shard what is of its partitions.
    pub fn push(&self, dealt: &Dealt, learned: &Learned<'_>) -> Result<Vec<Ticket>, ClientError> {
        let mut dense = learned.dense;
        let (mut counts, mut gradients) = (Vec::new(), Vec::new());
        let mut tickets = Vec::with_capacity(self.shards.len());
        for (at, shard) in self.shards.iter().enumerate() {
            let places = &dealt.places[dealt.range(at)];
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
                    gradients.extend_from_slice(&learned.gradients[place as usize * self.width..][..self.width]);
                });
                gradients.as_slice()
            };
            let num_dense = if learned.dense.is_empty() { 0 } else { shard.welcome.num_dense as usize };
            let (mine, others) = dense.split_at(num_dense);
            dense = others;
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
                signs: &dealt.signs[dealt.range(at)],
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
    pub fn acknowledged(&self, tickets: &[Ticket]) -> Result<Vec<Pushed>, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let mut all = Vec::with_capacity(tickets.len());
        for (shard, ticket) in self.shards.iter().zip(tickets) {
            let body = shard.wait(ticket, Kind::Pushed, deadline)?;
            all.push(Pushed::decode(body.bytes()).map_err(|error| shard.broken(&error))?);
            shard.give_back(body);
        }
        Ok(all)
    }
}
