//! A connection: requests are begun as they come and answered as they are done. What is under way is bounded by its
//! memory, until the client has taken the answer: one that does not read is not read from.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::net::sockopt;
use subtle::ConstantTimeEq;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use super::frame::{self, FrameError, Request, RpcMeta, RpcResponseMeta};
use super::service::Method;
use super::{Fault, code, compress};
use crate::memory::Share;
use crate::server::App;

/// Requests and answers of a connection that are in memory at once, in kilobytes: 1024 small ones, or a large one.
const BUDGET_KB: usize = 16 << 10;
const SMALLEST_KB: usize = 16;
/// Read at once.
const READ_BYTES: usize = 64 << 10;
/// Probes that a client who is gone without a word leaves unanswered.
const PROBES: u32 = 3;

/// An answer, and its part of the budget until it is sent.
type Outgoing = (Bytes, Option<OwnedSemaphorePermit>);

/// Answers the calls on a connection until it ends, or the server does.
pub(crate) async fn serve(stream: TcpStream, app: Arc<App>, stop: watch::Receiver<Option<Instant>>) {
    // clients keep their connections, idle or not; those who are gone hold their place no longer than one that idles
    let idle = app.options.header_timeout.max(Duration::from_secs(1));
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, idle);
    let _ = sockopt::set_tcp_keepintvl(&stream, (idle / PROBES).max(Duration::from_secs(1)));
    let _ = sockopt::set_tcp_keepcnt(&stream, PROBES);
    let (reader, writer) = stream.into_split();
    let (answers, outbox) = mpsc::unbounded_channel();
    let writing = tokio::spawn(write(writer, outbox, app.options.body_timeout));
    let is_known = app.options.token.is_none();
    let budget = Arc::new(Semaphore::new(BUDGET_KB));
    let mut connection = Connection { app, answers, budget, calls: JoinSet::new(), is_known };
    connection.read(reader, stop).await;
    let Connection { answers, calls, .. } = connection;
    // ends when all that is under way is answered, or nobody takes it; then nobody waits for the rest either
    drop(answers);
    let _ = writing.await;
    drop(calls);
}

/// Sends answers in the order in which they are done.
async fn write(mut writer: OwnedWriteHalf, mut outbox: mpsc::UnboundedReceiver<Outgoing>, timeout: Duration) {
    while let Some((frame, permit)) = outbox.recv().await {
        let sent = tokio::time::timeout(timeout, writer.write_all(&frame)).await;
        drop(permit);
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
    let _ = writer.shutdown().await;
}

struct Connection {
    app: Arc<App>,
    /// Bounded by the budget, not by its length.
    answers: mpsc::UnboundedSender<Outgoing>,
    budget: Arc<Semaphore>,
    calls: JoinSet<()>,
    /// Whether the client has shown the token, or none is asked for: bRPC sends it once a connection.
    is_known: bool,
}

impl Connection {
    async fn read(&mut self, mut reader: OwnedReadHalf, mut stop: watch::Receiver<Option<Instant>>) {
        let max_bytes = self.app.options.max_body_bytes;
        let mut buffer = BytesMut::new();
        let mut share = self.app.memory.share();
        // when the frame that is not whole yet began
        let mut begun = None;
        loop {
            match frame::take(&mut buffer, max_bytes) {
                Ok(Some(request)) => {
                    begun = None;
                    let share = std::mem::replace(&mut share, self.app.memory.share());
                    if !self.begin(request, share).await {
                        return;
                    }
                }
                Ok(None) => {
                    // who has not shown the token gets no memory
                    if !self.is_known
                        && let Some(meta) = frame::meta(&buffer)
                        && !self.is_allowed(meta.authentication_data.as_deref())
                    {
                        self.refuse_unknown(meta.correlation_id.unwrap_or(0));
                        return;
                    }
                    if let Err(refusal) = share.cover(buffer.len()) {
                        // what is left of the frame cannot be told from the next one
                        self.refuse(
                            frame::meta(&buffer).and_then(|meta| meta.correlation_id).unwrap_or(0),
                            refusal.into(),
                        );
                        return;
                    }
                    begun = (!buffer.is_empty()).then(|| begun.unwrap_or_else(Instant::now));
                    tokio::select! {
                        biased;
                        _ = stop.wait_for(Option::is_some) => {
                            self.turn_away(&mut buffer);
                            return;
                        }
                        () = self.answers.closed() => return,
                        is_more = read_more(&mut reader, &mut buffer, begun, self.app.options.body_timeout) => {
                            if !is_more {
                                return;
                            }
                        }
                    }
                }
                Err(FrameError::TooLong { correlation_id }) => {
                    let fault = Fault::new(code::BAD_REQUEST, compress::too_long(max_bytes));
                    self.refuse(correlation_id, fault);
                    return;
                }
                Err(FrameError::Malformed) => return,
            }
            // those that are done
            while self.calls.try_join_next().is_some() {}
        }
    }

    /// Begins a call as soon as there is room for it; false if there is nothing more to be done here.
    async fn begin(&mut self, request: Request, mut share: Share) -> bool {
        let Request { call, correlation_id, compress_type, authentication_data, payload } = request;
        if !self.is_allowed(authentication_data.as_deref()) {
            self.refuse_unknown(correlation_id);
            return false;
        }
        let max_bytes = self.app.options.max_body_bytes;
        let method = Method::of(&call.service_name, &call.method_name);
        let payload = share.cover(payload.len()).map(|()| share.keep(payload)).map_err(Fault::from);
        let message = match (&method, compress_type, payload) {
            (Err(_), _, payload) | (_, compress::NONE, payload) | (_, _, payload @ Err(_)) => payload,
            (_, _, Ok(payload)) => {
                let share = self.app.memory.share();
                // takes a while: not here, where other connections wait
                run(move || compress::inflate(compress_type, &payload, max_bytes, share)).await
            }
        };
        let (method, message) = match method.and_then(|method| Ok((method, message?))) {
            Ok(found) => found,
            Err(fault) => {
                // answers that nobody takes are bounded too
                let Some(permit) = self.room(0).await else { return false };
                self.send(correlation_id, Err(fault), compress::NONE, Some(permit));
                return true;
            }
        };
        let Some(permit) = self.room(method.weight(&self.app, &message)).await else { return false };
        let (app, answers) = (self.app.clone(), self.answers.clone());
        self.calls.spawn(async move {
            let mut answer = method.answer(&app, &call, message).await;
            if compress_type != compress::NONE
                && let Ok(message) = answer
            {
                answer = run(move || compress::deflate(compress_type, message)).await;
            }
            send(&app, &answers, (correlation_id, answer, compress_type), Some(permit));
        });
        true
    }

    /// Waits for a part of the budget; nothing if the client takes no answers any more.
    async fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kilobytes = bytes.div_ceil(1024).clamp(SMALLEST_KB, BUDGET_KB) as u32;
        tokio::select! {
            permit = self.budget.clone().acquire_many_owned(kilobytes) => permit.ok(),
            () = self.answers.closed() => None,
        }
    }

    /// Whether the client may call.
    fn is_allowed(&mut self, shown: Option<&[u8]>) -> bool {
        if let (Some(token), Some(shown)) = (&self.app.options.token, shown) {
            self.is_known = bool::from(shown.ct_eq(token.0.as_bytes()));
        }
        self.is_known
    }

    /// What has come but was not begun when the server stops is for another one.
    fn turn_away(&self, buffer: &mut BytesMut) {
        while let Ok(Some(request)) = frame::take(buffer, self.app.options.max_body_bytes) {
            self.refuse(request.correlation_id, Fault::new(code::LOG_OFF, "the server is stopping"));
        }
    }

    fn refuse_unknown(&self, correlation_id: i64) {
        let text = "expected the token of this server as authentication data";
        self.refuse(correlation_id, Fault::new(code::UNAUTHORIZED, text));
    }

    /// One of the last answers of a connection.
    fn refuse(&self, correlation_id: i64, fault: Fault) {
        self.send(correlation_id, Err(fault), compress::NONE, None);
    }

    fn send(
        &self,
        correlation_id: i64,
        answer: Result<Bytes, Fault>,
        compress_type: i32,
        permit: Option<OwnedSemaphorePermit>,
    ) {
        send(&self.app, &self.answers, (correlation_id, answer, compress_type), permit);
    }
}

/// Reads more of a frame, in time, or of the next one, whenever it comes; false if there is nothing more.
async fn read_more(
    reader: &mut OwnedReadHalf,
    buffer: &mut BytesMut,
    begun: Option<Instant>,
    timeout: Duration,
) -> bool {
    // as much as has come, not as much as a frame says that it has
    buffer.reserve(READ_BYTES);
    let read = reader.read_buf(buffer);
    let read = match begun {
        Some(begun) => tokio::time::timeout_at((begun + timeout).into(), read).await,
        None => Ok(read.await),
    };
    matches!(read, Ok(Ok(1..)))
}

/// Counts an answer and hands it to the writer.
fn send(
    app: &App,
    answers: &mpsc::UnboundedSender<Outgoing>,
    (correlation_id, answer, compress_type): (i64, Result<Bytes, Fault>, i32),
    permit: Option<OwnedSemaphorePermit>,
) {
    let mut share = app.memory.share();
    let (code, text, message) = match answer.and_then(|message| Ok(share.cover(message.len()).map(|()| message)?)) {
        Ok(message) => (code::OK, None, message),
        Err(fault) => (fault.code, Some(fault.text), Bytes::new()),
    };
    app.metrics.count_answer("brpc", code);
    let response = RpcResponseMeta { error_code: Some(code.into()), error_text: text };
    let meta = RpcMeta {
        response: Some(response),
        correlation_id: Some(correlation_id),
        compress_type: (code == code::OK).then_some(compress_type),
        ..RpcMeta::default()
    };
    let _ = answers.send((share.keep(frame::encode(&meta, &message)), permit));
}

/// Runs what takes a while.
async fn run(work: impl FnOnce() -> Result<Bytes, Fault> + Send + 'static) -> Result<Bytes, Fault> {
    let lost = |_| Err(Fault::new(code::INTERNAL, "the request failed, this is a bug"));
    tokio::task::spawn_blocking(work).await.unwrap_or_else(lost)
}
