//! Reader processes: they run a user's own reader for lines in the user's format, one request at a time each.
//!
//! A request is a `u32` length and the lines. The answer is a `u8` status, a `u32` length, and a batch (`codecs::parsed`)
//! or a message about a line. All numbers are little-endian. Answers are validated. A process that dies, hangs or sends
//! an invalid answer is given up; [`Readers::lost`] reports it to its owner.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use elasticrec_wire::lock;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use super::job::Deadline;
use crate::codecs::parsed::{ParsedSamples, Shape};
use crate::codecs::{Limits, count_lines};
use crate::refusal::Refusal;

/// Maximum length of an answer: enough for all signs in a body of the default maximum size.
const MAX_ANSWER_BYTES: u32 = 64 << 20;
/// Maximum length of a message about a line.
const MAX_MESSAGE_BYTES: u32 = 1 << 16;
/// Maximum number of characters of such a message in the answer to the client.
const MAX_SHOWN_CHARS: usize = 1000;
const BATCH: u8 = 0;
const REFUSED: u8 = 1;

/// The reader processes of a version.
pub struct Readers {
    idle: Mutex<Vec<Process>>,
    /// A permit for each idle process, acquired in the order in which requests arrived.
    permits: Semaphore,
    /// Processes that are idle or busy.
    num_alive: AtomicUsize,
    num_waiting: AtomicUsize,
    next_id: AtomicU64,
    /// Processes given up since the last call of [`lost`](Readers::lost).
    lost: Mutex<Vec<u64>>,
    losses: OnceLock<Counter>,
    timeout: Duration,
}

/// A process and this end of its socket pair.
struct Process {
    id: u64,
    stream: UnixStream,
}

/// The limits on the lines of a request, and the shape of the model's samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReaderLimits {
    pub(crate) shape: Shape,
    pub(crate) limits: Limits,
    /// Requests that may wait for a process.
    pub(crate) queue: usize,
}

/// Lines that a reader process has parsed.
#[derive(Debug)]
pub(crate) struct ParsedLines {
    /// A body for `Codec::Parsed`.
    pub(crate) body: Bytes,
    pub(crate) time: ReaderTime,
}

/// The time of reader processes for one request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReaderTime {
    /// Waiting for an idle process.
    pub(crate) waited: Duration,
    /// Parsing.
    pub(crate) took: Duration,
}

/// The answer of a process.
enum Answer {
    Batch(Bytes),
    Refused(String),
}

/// The reason a process is given up.
#[derive(Debug)]
enum Failure {
    Died,
    InvalidAnswer(String),
    TimedOut,
}

impl From<io::Error> for Failure {
    fn from(_: io::Error) -> Failure {
        Failure::Died
    }
}

/// A request to a process.
#[derive(Clone)]
struct Lines {
    text: Bytes,
    num_lines: usize,
    shape: Shape,
}

impl Readers {
    /// Starts without processes; `timeout` is the time limit for an answer.
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

    /// Adds a process that waits for lines; returns its number, which [`lost`](Readers::lost) uses.
    pub fn add(&self, stream: UnixStream) -> io::Result<u64> {
        stream.set_nonblocking(true)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.num_alive.fetch_add(1, Ordering::Relaxed);
        self.put(Process { id, stream });
        Ok(id)
    }

    /// Returns the numbers of processes given up since the last call; their sockets are closed.
    pub fn lost(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.lost))
    }

    /// Returns the number of processes that are idle or busy.
    pub(crate) fn num_alive(&self) -> usize {
        self.num_alive.load(Ordering::Relaxed)
    }

    /// Counts losses with this counter from now on.
    pub(crate) fn count_losses(&self, counter: Counter) {
        let _ = self.losses.set(counter);
    }

    /// Parses lines in a reader process. If it dies, a second process gets them.
    pub(crate) async fn read(
        self: &Arc<Self>,
        text: &Bytes,
        limits: ReaderLimits,
        deadline: Option<Deadline>,
    ) -> Result<ParsedLines, Refusal> {
        let num_lines = count_lines(text, limits.limits)?;
        let lines = Lines { text: text.clone(), num_lines, shape: limits.shape };
        let mut time = ReaderTime::default();
        match self.attempt(&lines, limits.queue, deadline, &mut time).await? {
            Err(Failure::Died) => match self.attempt(&lines, limits.queue, deadline, &mut time).await? {
                Err(Failure::Died) => {
                    Err(Refusal::Internal("reader: two reader processes died on this request".into()))
                }
                outcome => self.conclude(outcome, time),
            },
            outcome => self.conclude(outcome, time),
        }
    }

    fn conclude(&self, outcome: Result<Answer, Failure>, time: ReaderTime) -> Result<ParsedLines, Refusal> {
        let failed = |what: String| Err(Refusal::Internal(format!("reader: {what}")));
        match outcome {
            Ok(Answer::Batch(body)) => Ok(ParsedLines { body, time }),
            Ok(Answer::Refused(message)) => Err(Refusal::Bad(message)),
            Err(Failure::TimedOut) => {
                let ms = self.timeout.as_millis();
                failed(format!("no answer within {ms} ms (`serve.reader_timeout_ms`); the reader process was ended"))
            }
            Err(Failure::InvalidAnswer(what)) => failed(format!("invalid answer of the reader process: {what}")),
            Err(Failure::Died) => failed("the reader process died".into()),
        }
    }

    async fn attempt(
        self: &Arc<Self>,
        lines: &Lines,
        queue: usize,
        deadline: Option<Deadline>,
        time: &mut ReaderTime,
    ) -> Result<Result<Answer, Failure>, Refusal> {
        let started = Instant::now();
        let process = self.take(queue, deadline).await?;
        let taken = Instant::now();
        time.waited += taken - started;
        // In a separate task, because a cancelled request must not leave its answer in the socket for the next request.
        let exchange = tokio::spawn(self.clone().exchange(process, lines.clone()));
        let outcome = match deadline {
            Some(deadline) => {
                tokio::time::timeout_at(deadline.at.into(), exchange).await.map_err(|_| deadline.refusal())?
            }
            None => exchange.await,
        };
        time.took += taken.elapsed();
        outcome.map_err(|_| Refusal::Internal("reader: the exchange with the process failed; this is a bug".into()))
    }

    /// Takes an idle process that has not died or sent anything unasked.
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

    /// Waits for an idle process. If no process is alive, waiting ends after the time limit for an answer.
    async fn wait(&self, queue: usize, deadline: Option<Deadline>) -> Result<(), Refusal> {
        let _waiting = WaitGuard::new(&self.num_waiting, queue)?;
        // Keep one future: a new one would go to the end of the semaphore's queue.
        let mut acquired = pin!(self.permits.acquire());
        loop {
            let check = Instant::now() + self.timeout;
            let until = deadline.map_or(check, |deadline| deadline.at.min(check));
            match tokio::time::timeout_at(until.into(), acquired.as_mut()).await {
                Ok(Ok(permit)) => {
                    permit.forget();
                    return Ok(());
                }
                Ok(Err(_)) => return Err(no_process()),
                Err(_) => {}
            }
            if let Some(deadline) = deadline.filter(|deadline| deadline.at <= Instant::now()) {
                return Err(deadline.refusal());
            }
            if self.num_alive() == 0 {
                return Err(no_process());
            }
        }
    }

    /// Sends a request and reads its answer; then the process is idle again or given up.
    async fn exchange(self: Arc<Self>, process: Process, lines: Lines) -> Result<Answer, Failure> {
        let Process { id, stream } = process;
        let outcome = match tokio::time::timeout(self.timeout, talk(stream, &lines)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::TimedOut),
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
    /// Returns whether the process is alive and has sent nothing unasked.
    fn is_quiet(&self) -> bool {
        matches!((&self.stream).read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Counts a waiting request; refuses it if too many are waiting.
struct WaitGuard<'a>(&'a AtomicUsize);

impl WaitGuard<'_> {
    fn new(num_waiting: &AtomicUsize, queue: usize) -> Result<WaitGuard<'_>, Refusal> {
        let guard = WaitGuard(num_waiting);
        if num_waiting.fetch_add(1, Ordering::Relaxed) >= queue { Err(Refusal::QueueFull { queue }) } else { Ok(guard) }
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn no_process() -> Refusal {
    Refusal::Unavailable("reader: no reader process is running, see the log of the server; retry later".into())
}

async fn talk(stream: UnixStream, lines: &Lines) -> Result<(UnixStream, Answer), Failure> {
    let mut stream = tokio::net::UnixStream::from_std(stream)?;
    let too_long = |_| Failure::InvalidAnswer("request: expected less than 4 GiB, got more".into());
    let length = u32::try_from(lines.text.len()).map_err(too_long)?;
    stream.write_all(&length.to_le_bytes()).await?;
    stream.write_all(&lines.text).await?;
    let status = stream.read_u8().await?;
    let length = stream.read_u32_le().await?;
    let most = match status {
        BATCH => MAX_ANSWER_BYTES,
        REFUSED => MAX_MESSAGE_BYTES,
        status => return Err(Failure::InvalidAnswer(format!("status: expected {BATCH} or {REFUSED}, got {status}"))),
    };
    if length > most {
        return Err(Failure::InvalidAnswer(format!("expected at most {most} bytes, got {length}")));
    }
    let mut body = Vec::new();
    // Allocate for the bytes that arrive, not for the announced length.
    (&mut stream).take(u64::from(length)).read_to_end(&mut body).await?;
    if body.len() != length as usize {
        return Err(Failure::Died);
    }
    let answer = if status == REFUSED { Answer::Refused(one_line(&body)) } else { batch_of(body, lines)? };
    Ok((stream.into_std()?, answer))
}

fn batch_of(body: Vec<u8>, lines: &Lines) -> Result<Answer, Failure> {
    let parsed = ParsedSamples::read(lines.shape, &body).map_err(Failure::InvalidAnswer)?;
    if parsed.num_samples() > lines.num_lines {
        let (samples, most) = (parsed.num_samples(), lines.num_lines);
        return Err(Failure::InvalidAnswer(format!("expected at most {most} samples, got {samples}")));
    }
    Ok(Answer::Batch(body.into()))
}

/// Returns a message on one line, shortened, for an answer.
fn one_line(message: &[u8]) -> String {
    let text = String::from_utf8_lossy(message);
    text.chars().take(MAX_SHOWN_CHARS).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;
