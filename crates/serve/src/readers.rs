//! Lines in a user's own format, between the socket and the scorers: processes that run the user's reader, each at one request
//! at a time.
//!
//! A request to a process is a `u32` length and the lines; its answer a `u8` status, a `u32` length, and either a batch
//! (`face::parsed`) or what is wrong with a line. All little-endian. What a process answers is checked, not believed; one that
//! dies, hangs or talks nonsense is given up, and whoever started it hears of it.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::deployment::Deadline;
use crate::face::parsed::{Parsed, Shape};
use crate::face::{Limits, count_lines};
use crate::refusal::Refusal;

/// Longest answer: as many signs as a body of the default size can name.
const MAX_ANSWER_BYTES: u32 = 64 << 20;
/// Longest message about a line that is read, and that is passed on.
const MAX_MESSAGE_BYTES: u32 = 1 << 16;
const SHOWN_MESSAGE: usize = 1000;
const BATCH: u8 = 0;
const REFUSED: u8 = 1;

/// Reader processes of a version: those that are idle, and how long others are waited for.
pub struct Readers {
    idle: Mutex<Vec<Process>>,
    /// One for each idle process, in the order in which requests came.
    permits: Semaphore,
    /// Processes, idle or at work.
    num_alive: AtomicUsize,
    num_waiting: AtomicUsize,
    next_id: AtomicU64,
    /// Those that were given up and that nobody was told of yet.
    lost: Mutex<Vec<u64>>,
    losses: OnceLock<Counter>,
    timeout: Duration,
}

/// A process by its end of the socket pair.
struct Process {
    id: u64,
    stream: UnixStream,
}

/// What lines are read under.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) shape: Shape,
    pub(crate) limits: Limits,
    /// Requests that may wait for a process.
    pub(crate) queue: usize,
}

/// Lines that were read.
#[derive(Debug)]
pub(crate) struct Read {
    /// For `Face::Parsed`.
    pub(crate) body: Bytes,
    pub(crate) time: ReaderTime,
}

/// What reading took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReaderTime {
    /// For an idle process.
    pub(crate) waited: Duration,
    /// In it.
    pub(crate) took: Duration,
}

/// What a process says of some lines.
enum Answer {
    Batch(Bytes),
    Refused(String),
}

/// Why a process is given up.
#[derive(Debug)]
enum Failure {
    Died,
    Nonsense(String),
    Silent,
}

impl From<io::Error> for Failure {
    fn from(_: io::Error) -> Failure {
        Failure::Died
    }
}

/// A request on its way to a process.
#[derive(Clone)]
struct Lines {
    text: Bytes,
    num_lines: usize,
    shape: Shape,
}

impl Readers {
    /// None yet; each has the given time for an answer.
    pub fn new(timeout: Duration) -> Readers {
        Readers {
            idle: Mutex::default(),
            permits: Semaphore::new(0),
            num_alive: AtomicUsize::new(0),
            num_waiting: AtomicUsize::new(0),
            next_id: AtomicU64::new(0),
            lost: Mutex::default(),
            losses: OnceLock::new(),
            timeout,
        }
    }

    /// Takes in a process that waits for lines; returns what [`lost`](Readers::lost) will call it.
    pub fn add(&self, stream: UnixStream) -> io::Result<u64> {
        stream.set_nonblocking(true)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.num_alive.fetch_add(1, Ordering::Relaxed);
        self.put(Process { id, stream });
        Ok(id)
    }

    /// Those that were given up since the last time that this was asked; their sockets are closed.
    pub fn lost(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.lost))
    }

    /// Processes, idle or at work.
    pub(crate) fn num_alive(&self) -> usize {
        self.num_alive.load(Ordering::Relaxed)
    }

    /// Counts losses from now on.
    pub(crate) fn count_losses(&self, counter: Counter) {
        let _ = self.losses.set(counter);
    }

    /// Has lines read. A process that dies over them costs them one more attempt, not the answer.
    pub(crate) async fn read(
        self: &Arc<Self>,
        text: &Bytes,
        terms: Terms,
        deadline: Option<Deadline>,
    ) -> Result<Read, Refusal> {
        let num_lines = count_lines(text, terms.limits)?;
        let lines = Lines { text: text.clone(), num_lines, shape: terms.shape };
        let mut time = ReaderTime::default();
        match self.attempt(&lines, terms, deadline, &mut time).await? {
            Err(Failure::Died) => match self.attempt(&lines, terms, deadline, &mut time).await? {
                Err(Failure::Died) => Err(Refusal::Internal(
                    "reader: its process ended before it answered, and so did another one".into(),
                )),
                outcome => self.conclude(outcome, time),
            },
            outcome => self.conclude(outcome, time),
        }
    }

    fn conclude(&self, outcome: Result<Answer, Failure>, time: ReaderTime) -> Result<Read, Refusal> {
        match outcome {
            Ok(Answer::Batch(body)) => Ok(Read { body, time }),
            Ok(Answer::Refused(message)) => Err(Refusal::Bad(message)),
            Err(Failure::Silent) => Err(Refusal::Internal(format!(
                "reader: no answer in {} ms (`serve.reader_timeout_ms`), its process was ended",
                self.timeout.as_millis()
            ))),
            Err(Failure::Nonsense(what)) => {
                Err(Refusal::Internal(format!("reader: its process answered nonsense: {what}")))
            }
            Err(Failure::Died) => Err(Refusal::Internal("reader: its process ended before it answered".into())),
        }
    }

    async fn attempt(
        self: &Arc<Self>,
        lines: &Lines,
        terms: Terms,
        deadline: Option<Deadline>,
        time: &mut ReaderTime,
    ) -> Result<Result<Answer, Failure>, Refusal> {
        let started = Instant::now();
        let process = self.take(terms.queue, deadline).await?;
        let taken = Instant::now();
        time.waited += taken - started;
        // by itself: a caller that goes away must not leave an answer behind for the next one
        let exchange = tokio::spawn(self.clone().exchange(process, lines.clone()));
        let outcome = match deadline {
            Some(deadline) => {
                tokio::time::timeout_at(deadline.at.into(), exchange).await.map_err(|_| deadline.refusal())?
            }
            None => exchange.await,
        };
        time.took += taken.elapsed();
        outcome.map_err(|_| Refusal::Internal("reader: the exchange with its process failed, this is a bug".into()))
    }

    /// An idle process that lives, as far as one can see.
    async fn take(&self, queue: usize, deadline: Option<Deadline>) -> Result<Process, Refusal> {
        loop {
            match self.permits.try_acquire() {
                Ok(permit) => permit.forget(),
                Err(_) => self.wait(queue, deadline).await?,
            }
            let Some(process) = lock(&self.idle).pop() else { continue };
            if process.is_quiet() {
                return Ok(process);
            }
            self.lose(process.id);
        }
    }

    /// Waits for an idle process; where there is none at all, not for ever.
    async fn wait(&self, queue: usize, deadline: Option<Deadline>) -> Result<(), Refusal> {
        let _place = Place::take(&self.num_waiting, queue)?;
        // one future all along: whoever asks anew goes to the end of the line
        let mut acquired = pin!(self.permits.acquire());
        loop {
            let patience = Instant::now() + self.timeout;
            let until = deadline.map_or(patience, |deadline| deadline.at.min(patience));
            match tokio::time::timeout_at(until.into(), acquired.as_mut()).await {
                Ok(Ok(permit)) => {
                    permit.forget();
                    return Ok(());
                }
                Ok(Err(_)) => return Err(none_at_work()),
                Err(_) => {}
            }
            if let Some(deadline) = deadline.filter(|deadline| deadline.at <= Instant::now()) {
                return Err(deadline.refusal());
            }
            if self.num_alive() == 0 {
                return Err(none_at_work());
            }
        }
    }

    /// One request and its answer; the process is idle again after it, or given up.
    async fn exchange(self: Arc<Self>, process: Process, lines: Lines) -> Result<Answer, Failure> {
        let Process { id, stream } = process;
        let outcome = match tokio::time::timeout(self.timeout, talk(stream, &lines)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::Silent),
        };
        match outcome {
            Ok((stream, answer)) => {
                self.put(Process { id, stream });
                Ok(answer)
            }
            Err(failure) => {
                self.lose(id);
                Err(failure)
            }
        }
    }

    fn put(&self, process: Process) {
        lock(&self.idle).push(process);
        self.permits.add_permits(1);
    }

    fn lose(&self, id: u64) {
        self.num_alive.fetch_sub(1, Ordering::Relaxed);
        lock(&self.lost).push(id);
        if let Some(losses) = self.losses.get() {
            losses.inc();
        }
    }
}

impl Process {
    /// Whether it lives and says nothing, as one that was not asked should.
    fn is_quiet(&self) -> bool {
        matches!((&self.stream).read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// A place among those that wait.
struct Place<'a>(&'a AtomicUsize);

impl Place<'_> {
    fn take(num_waiting: &AtomicUsize, queue: usize) -> Result<Place<'_>, Refusal> {
        let place = Place(num_waiting);
        if num_waiting.fetch_add(1, Ordering::Relaxed) >= queue { Err(Refusal::Full { queue }) } else { Ok(place) }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn none_at_work() -> Refusal {
    Refusal::Unavailable("reader: no process of it is at work, the log of the server says why; try again later".into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn talk(stream: UnixStream, lines: &Lines) -> Result<(UnixStream, Answer), Failure> {
    let mut stream = tokio::net::UnixStream::from_std(stream)?;
    let too_long = |_| Failure::Nonsense("a body of 4 GB or more cannot be asked for".into());
    let length = u32::try_from(lines.text.len()).map_err(too_long)?;
    stream.write_all(&length.to_le_bytes()).await?;
    stream.write_all(&lines.text).await?;
    let status = stream.read_u8().await?;
    let length = stream.read_u32_le().await?;
    let most = match status {
        BATCH => MAX_ANSWER_BYTES,
        REFUSED => MAX_MESSAGE_BYTES,
        status => return Err(Failure::Nonsense(format!("status: expected {BATCH} or {REFUSED}, got {status}"))),
    };
    if length > most {
        return Err(Failure::Nonsense(format!("expected at most {most} bytes, got {length}")));
    }
    let mut body = Vec::new();
    // room is made for what comes, not for what is announced
    (&mut stream).take(u64::from(length)).read_to_end(&mut body).await?;
    if body.len() != length as usize {
        return Err(Failure::Died);
    }
    let answer = if status == REFUSED { Answer::Refused(shown(&body)) } else { batch_of(body, lines)? };
    Ok((stream.into_std()?, answer))
}

fn batch_of(body: Vec<u8>, lines: &Lines) -> Result<Answer, Failure> {
    let parsed = Parsed::read(lines.shape, &body).map_err(Failure::Nonsense)?;
    if parsed.num_samples() > lines.num_lines {
        let (samples, most) = (parsed.num_samples(), lines.num_lines);
        return Err(Failure::Nonsense(format!("expected at most {most} samples, got {samples}")));
    }
    Ok(Answer::Batch(body.into()))
}

/// A message as it may stand in an answer: one line, not too long.
fn shown(message: &[u8]) -> String {
    let text = String::from_utf8_lossy(message);
    text.chars().take(SHOWN_MESSAGE).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;
