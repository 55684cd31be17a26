//! The server: connections to a shard. A thread each reads requests and answers them in order; pulls share the shard, a
//! push has it alone.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elasticrec_table::part::Written;
use elasticrec_wire::frame::{MAX_BODY_BYTES, MAX_HELLO_BYTES};
use elasticrec_wire::{
    Body, FrameError, Header, Hello, Kind, Pull, Push, Pushed, Refusal, Refused, Rows, Welcome, read_frame, write_frame,
};

use crate::shard::{Boundary, Shard, Status};
use crate::snapshot::{Files, ShardError};

/// A peer that does not say hello in this time is none.
const HELLO_SECONDS: u64 = 10;
/// Copies of partitions that wait for the disk.
const COPIES_AHEAD: usize = 2;

/// Who a server is and whom it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// What all roles of a run know of it.
    pub run: Vec<u8>,
    /// Their secret; empty for none.
    pub token: Vec<u8>,
    /// Of this start of the server.
    pub incarnation: u64,
    /// Of the partition map.
    pub epoch: u64,
}

/// What a server did so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Pulls that were answered.
    pub pulls: AtomicU64,
    /// Signs in them.
    pub pulled_signs: AtomicU64,
    /// Pushes that were answered.
    pub pushes: AtomicU64,
    /// Signs in them.
    pub pushed_signs: AtomicU64,
    /// Requests that were refused.
    pub refused: AtomicU64,
    /// Connections that ended with bytes that are no request.
    pub malformed: AtomicU64,
    /// Nanoseconds in which pushes had the shard.
    pub push_nanos: AtomicU64,
    /// Nanoseconds in which pulls had it.
    pub pull_nanos: AtomicU64,
}

/// A shard that answers on a socket.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    shard: RwLock<Shard>,
    identity: Identity,
    counters: Counters,
    /// Nanoseconds from `start` on until which it may apply and acknowledge.
    lease: AtomicU64,
    start: Instant,
    stopping: AtomicBool,
    /// Why it cannot go on: a push that was applied in part.
    failure: Mutex<Option<String>>,
    /// The open connections, by the number of each.
    streams: Mutex<HashMap<u64, TcpStream>>,
}

/// Nobody who holds one of these locks can leave what it guards half changed, but a push that panicked: see `fail`.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Listens and answers on threads of its own. Nothing is applied before the first lease.
    pub fn start(shard: Shard, identity: Identity, address: &str) -> io::Result<Server> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            shard: RwLock::new(shard),
            identity,
            counters: Counters::default(),
            lease: AtomicU64::new(0),
            start: Instant::now(),
            stopping: AtomicBool::new(false),
            failure: Mutex::new(None),
            streams: Mutex::new(HashMap::new()),
        });
        let accepting = shared.clone();
        let acceptor = thread::Builder::new().name("ps-accept".into()).spawn(move || accepting.accept(&listener))?;
        Ok(Server { shared, address, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets it apply and acknowledge for so long from the moment at which the lease was asked for.
    pub fn extend_lease(&self, asked: Instant, length: Duration) {
        let until = (asked + length).saturating_duration_since(self.shared.start);
        self.shared.lease.fetch_max(until.as_nanos() as u64, Ordering::Release);
    }

    /// Takes its lease away: nothing is applied from now on.
    pub fn end_lease(&self) {
        self.shared.lease.store(0, Ordering::Release);
        // a push that is being applied ends first
        drop(self.shared.shard.write());
    }

    /// Learns of the boundaries between passes.
    pub fn set_boundaries(&self, boundaries: Vec<Boundary>) {
        self.shared.write(|shard| shard.set_boundaries(boundaries));
    }

    /// For the coordinator.
    pub fn status(&self) -> Status {
        self.shared.read(Shard::status)
    }

    /// The metric sums of this pass, and of the pass before.
    pub fn sums(&self) -> (Vec<f64>, Vec<f64>) {
        self.shared.read(|shard| {
            let (now, before) = shard.sums();
            (now.to_vec(), before.to_vec())
        })
    }

    /// What it did so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Why it cannot go on, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Reads the shard.
    pub fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        self.shared.read(read)
    }

    /// Writes the shard's part of a checkpoint; pushes wait for the copy of one partition at a time.
    pub fn snapshot(&self, files: &Files) -> Result<(Written, Written), ShardError> {
        let mut writer = self.shared.read(|shard| shard.snapshot_writer(files))?;
        let owned = self.shared.read(|shard| shard.spec().owned.clone());
        thread::scope(|scope| {
            let (sender, copies) = sync_channel(COPIES_AHEAD);
            let writing = scope.spawn(move || {
                copies.iter().try_for_each(|copy| writer.add(&copy))?;
                writer.finish()
            });
            for partition in owned {
                let copy = self.shared.read(|shard| shard.copy(partition));
                if sender.send(copy).is_err() {
                    // the writer failed and says why
                    break;
                }
            }
            drop(sender);
            writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Stops answering; requests that are being answered end first.
    pub fn stop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        // wakes the acceptor; it may be gone, and then that is all that is wanted
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
        self.shared.end_streams();
        drop(acceptor.join());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn read<T>(&self, read: impl FnOnce(&Shard) -> T) -> T {
        read(&self.shard.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, write: impl FnOnce(&mut Shard) -> T) -> T {
        write(&mut self.shard.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut connections: Vec<JoinHandle<()>> = Vec::new();
        for (number, stream) in (0..).zip(listener.incoming()) {
            if self.stopping.load(Ordering::Acquire) {
                break;
            }
            // a connection that ended before it was taken is none
            let Ok(stream) = stream else { continue };
            connections.retain(|connection| !connection.is_finished());
            let shared = self.clone();
            let serving = thread::Builder::new().name("ps-serve".into()).spawn(move || shared.serve(number, stream));
            connections.extend(serving);
        }
        self.end_streams();
        for connection in connections {
            drop(connection.join());
        }
    }

    /// Lets every connection end after the request that it is at.
    fn end_streams(&self) {
        for stream in lock(&self.streams).values() {
            // one that has ended is what is wanted
            drop(stream.shutdown(Shutdown::Read));
        }
    }

    /// Answers the requests of a connection until it ends.
    fn serve(&self, number: u64, stream: TcpStream) {
        let (Ok(reader), Ok(kept)) = (stream.try_clone(), stream.try_clone()) else { return };
        lock(&self.streams).insert(number, kept);
        if self.stopping.load(Ordering::Acquire) {
            // those that stand in the list were told before this one stood there
            drop(stream.shutdown(Shutdown::Both));
        }
        let mut connection = Connection {
            shared: self,
            reader: BufReader::with_capacity(1 << 16, reader),
            stream,
            body: Body::default(),
            rows: Vec::new(),
            dense: Vec::new(),
        };
        match connection.run() {
            Ok(()) | Err(FrameError::Closed | FrameError::Io(_)) => {}
            Err(error) => {
                self.counters.malformed.fetch_add(1, Ordering::Relaxed);
                drop(connection.refuse(0, &Refused::new(Refusal::Malformed, error.to_string())));
            }
        }
        drop(connection.stream.shutdown(Shutdown::Both));
        lock(&self.streams).remove(&number);
    }

    /// Whether it may apply and acknowledge.
    fn check_lease(&self) -> Result<(), Refused> {
        if let Some(failure) = &*lock(&self.failure) {
            return Err(Refused::new(Refusal::Internal, failure.clone()));
        }
        if self.stopping.load(Ordering::Acquire) {
            return Err(Refused::new(Refusal::Stopping, "the server stops"));
        }
        if self.start.elapsed().as_nanos() as u64 >= self.lease.load(Ordering::Acquire) {
            return Err(Refused::new(Refusal::Fenced, "the lease of the server ran out"));
        }
        Ok(())
    }

    fn check_target(&self, epoch: u64, incarnation: u64) -> Result<(), Refused> {
        let Identity { epoch: our_epoch, incarnation: ours, .. } = self.identity;
        if epoch != our_epoch {
            let text = format!("expected epoch {our_epoch} of the partition map, got {epoch}");
            return Err(Refused::new(Refusal::Outdated, text));
        }
        if incarnation != ours {
            return Err(Refused::new(Refusal::Outdated, "the server was started anew"));
        }
        Ok(())
    }

    fn push(&self, push: &Push<'_>) -> Result<Pushed, Refused> {
        self.check_target(push.epoch, push.incarnation)?;
        let start = Instant::now();
        let applied = self.write(|shard| {
            // a process that was stopped may wake up anywhere, so that the lease is looked at with the shard in hand
            self.check_lease()?;
            let applied = shard.push(push)?;
            Ok::<_, Refused>((applied, shard.applied()))
        });
        self.counters.push_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let (done, applied) = applied.inspect_err(|refused| {
            if refused.reason == Refusal::Internal {
                lock(&self.failure).get_or_insert_with(|| refused.text.clone());
            }
        })?;
        self.counters.pushes.fetch_add(1, Ordering::Relaxed);
        self.counters.pushed_signs.fetch_add(push.signs.len() as u64, Ordering::Relaxed);
        let incarnation = self.identity.incarnation;
        Ok(Pushed { incarnation, applied, was_known: done.was_known, non_finite: done.non_finite })
    }
}

struct Connection<'a> {
    shared: &'a Shared,
    reader: BufReader<TcpStream>,
    stream: TcpStream,
    body: Body,
    /// What answers are made of; kept to save the allocation.
    rows: Vec<f32>,
    dense: Vec<f32>,
}

impl Connection<'_> {
    fn run(&mut self) -> Result<(), FrameError> {
        self.stream.set_nodelay(true)?;
        if !self.greet()? {
            return Ok(());
        }
        loop {
            let header = read_frame(&mut self.reader, MAX_BODY_BYTES, &mut self.body)?;
            let answered = match header.kind {
                Kind::Pull => self.pull(header.id)?,
                Kind::Push => self.push(header.id)?,
                other => Err(Refused::new(Refusal::Malformed, format!("expected a pull or a push, got {other:?}"))),
            };
            if let Err(refused) = answered {
                self.refuse(header.id, &refused)?;
                if refused.reason == Refusal::Malformed {
                    return Ok(());
                }
            }
        }
    }

    /// Reads the hello; false if the peer is not one of ours.
    fn greet(&mut self) -> Result<bool, FrameError> {
        self.stream.set_read_timeout(Some(Duration::from_secs(HELLO_SECONDS)))?;
        let header = read_frame(&mut self.reader, MAX_HELLO_BYTES, &mut self.body)?;
        self.stream.set_read_timeout(None)?;
        let identity = &self.shared.identity;
        let refused = match (header.kind, Hello::decode(self.body.bytes())) {
            (Kind::Hello, Ok(hello)) if !is_equal(hello.token, &identity.token) => {
                Refused::new(Refusal::Unauthorized, "expected the token of the run, got another one")
            }
            (Kind::Hello, Ok(hello)) if hello.run != identity.run => {
                Refused::new(Refusal::Unauthorized, "expected a client of this run, got one of another run")
            }
            (Kind::Hello, Ok(_)) => {
                let welcome = self.shared.read(|shard| Welcome {
                    incarnation: identity.incarnation,
                    epoch: identity.epoch,
                    first_partition: shard.spec().owned.start,
                    end_partition: shard.spec().owned.end,
                    width: shard.table().width() as u32,
                    num_dense: shard.dense().len() as u32,
                });
                let header = Header { kind: Kind::Welcome, id: header.id };
                write_frame(&mut self.stream, header, &welcome.parts().slices())?;
                return Ok(true);
            }
            (Kind::Hello, Err(error)) => Refused::new(Refusal::Malformed, error.to_string()),
            (other, _) => Refused::new(Refusal::Malformed, format!("expected a hello, got {other:?}")),
        };
        self.refuse(header.id, &refused)?;
        Ok(false)
    }

    fn refuse(&mut self, id: u64, refused: &Refused) -> io::Result<()> {
        self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        write_frame(&mut self.stream, Header { kind: Kind::Refused, id }, &refused.parts().slices())
    }

    fn pull(&mut self, id: u64) -> io::Result<Result<(), Refused>> {
        let Connection { shared, rows, dense, body, .. } = self;
        let pull = match Pull::decode(body.bytes()) {
            Ok(pull) => pull,
            Err(error) => return Ok(Err(Refused::new(Refusal::Malformed, error.to_string()))),
        };
        let start = Instant::now();
        let found = shared.check_target(pull.epoch, pull.incarnation).and_then(|()| {
            shared.read(|shard| {
                shared.check_lease()?;
                rows.resize(pull.signs.len() * shard.table().width(), 0.0);
                shard.pull(pull.signs, rows)?;
                dense.clear();
                if pull.wants_dense {
                    dense.extend_from_slice(shard.dense());
                }
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
        let answer = Rows { incarnation: shared.identity.incarnation, applied, rows, dense };
        write_frame(&mut self.stream, Header { kind: Kind::Rows, id }, &answer.parts().slices())?;
        Ok(Ok(()))
    }

    fn push(&mut self, id: u64) -> io::Result<Result<(), Refused>> {
        let push = match Push::decode(self.body.bytes()) {
            Ok(push) => push,
            Err(error) => return Ok(Err(Refused::new(Refusal::Malformed, error.to_string()))),
        };
        match self.shared.push(&push) {
            Ok(pushed) => {
                write_frame(&mut self.stream, Header { kind: Kind::Pushed, id }, &pushed.parts().slices())?;
                Ok(Ok(()))
            }
            Err(refused) => Ok(Err(refused)),
        }
    }
}

/// Whether two secrets are equal, in a time that does not tell how much of them is.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}
