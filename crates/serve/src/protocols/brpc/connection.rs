//! A connection: calls start as they arrive and are answered as they finish.
//!
//! A budget bounds the memory of calls and answers until the client has read them. The server stops reading from a client
//! that does not read its answers.

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
use super::{Fault, code, compression_of, too_long, unreadable};
use crate::memory::Reservation;
use crate::protocols::compression::Compression;
use crate::server::App;

/// The budget of a connection in kilobytes: 1024 small calls, or a large one.
const BUDGET_KB: usize = 16 << 10;
const SMALLEST_KB: usize = 16;
/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// Keep-alive probes without an answer after which a client counts as gone.
const PROBES: u32 = 3;

/// An answer with its part of the budget, which is released when the answer is sent.
type QueuedAnswer = (Bytes, Option<OwnedSemaphorePermit>);

/// Answers the calls of a connection until it or the server ends.
pub(crate) async fn serve(stream: TcpStream, app: Arc<App>, stop: watch::Receiver<Option<Instant>>) {
    // Clients keep idle connections open. Probes detect vanished clients within the time limit of an idle HTTP connection.
    let idle = app.options.header_timeout.max(Duration::from_secs(1));
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, idle);
    let _ = sockopt::set_tcp_keepintvl(&stream, (idle / PROBES).max(Duration::from_secs(1)));
    let _ = sockopt::set_tcp_keepcnt(&stream, PROBES);
    let (reader, writer) = stream.into_split();
    let (answers, outbox) = mpsc::unbounded_channel();
    let writing = tokio::spawn(write(writer, outbox, app.options.body_timeout));
    let is_authenticated = app.options.token.is_none();
    let budget = Arc::new(Semaphore::new(BUDGET_KB));
    let mut connection = Connection { app, answers, budget, calls: JoinSet::new(), is_authenticated };
    connection.read(reader, stop).await;
    let Connection { answers, calls, .. } = connection;
    // Ends when all calls are answered or the client reads no more; dropping `calls` then cancels the rest.
    drop(answers);
    let _ = writing.await;
    drop(calls);
}

/// Sends answers in the order in which they finish.
async fn write(mut writer: OwnedWriteHalf, mut outbox: mpsc::UnboundedReceiver<QueuedAnswer>, timeout: Duration) {
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
    /// Bounded by the budget instead of a length.
    answers: mpsc::UnboundedSender<QueuedAnswer>,
    budget: Arc<Semaphore>,
    calls: JoinSet<()>,
    /// Whether the client has sent the token, or the server has none. bRPC sends it once per connection.
    is_authenticated: bool,
}

impl Connection {
    async fn read(&mut self, mut reader: OwnedReadHalf, mut stop: watch::Receiver<Option<Instant>>) {
        let max_bytes = self.app.options.max_body_bytes;
        let mut buffer = BytesMut::new();
        let mut reservation = self.app.memory.reservation();
        // When the incomplete frame started to arrive.
        let mut frame_started = None;
        loop {
            match frame::take(&mut buffer, max_bytes) {
                Ok(Some(request)) => {
                    frame_started = None;
                    let reservation = std::mem::replace(&mut reservation, self.app.memory.reservation());
                    if !self.start(request, reservation).await {
                        return;
                    }
                }
                Ok(None) => {
                    // Unauthenticated clients may not reserve request memory.
                    if !self.is_authenticated
                        && let Some(meta) = frame::meta(&buffer)
                        && !self.authenticate(meta.authentication_data.as_deref())
                    {
                        self.refuse_unauthenticated(meta.correlation_id.unwrap_or(0));
                        return;
                    }
                    if let Err(refusal) = reservation.grow_to(buffer.len()) {
                        // The rest of the frame cannot be skipped, so the connection ends.
                        self.refuse(
                            frame::meta(&buffer).and_then(|meta| meta.correlation_id).unwrap_or(0),
                            refusal.into(),
                        );
                        return;
                    }
                    frame_started = (!buffer.is_empty()).then(|| frame_started.unwrap_or_else(Instant::now));
                    tokio::select! {
                        biased;
                        _ = stop.wait_for(Option::is_some) => {
                            self.refuse_unstarted(&mut buffer);
                            return;
                        }
                        () = self.answers.closed() => return,
                        has_read = read_more(&mut reader, &mut buffer, frame_started, self.app.options.body_timeout) => {
                            if !has_read {
                                return;
                            }
                        }
                    }
                }
                Err(FrameError::TooLong { correlation_id }) => {
                    self.refuse(correlation_id, too_long(max_bytes));
                    return;
                }
                Err(FrameError::Malformed) => return,
            }
            // Release the calls that have finished.
            while self.calls.try_join_next().is_some() {}
        }
    }

    /// Starts a call as soon as the budget allows it. Returns false if the connection must end.
    async fn start(&mut self, request: Request, mut reservation: Reservation) -> bool {
        let Request { call, correlation_id, compress_type, authentication_data, payload } = request;
        if !self.authenticate(authentication_data.as_deref()) {
            self.refuse_unauthenticated(correlation_id);
            return false;
        }
        let method = Method::of(&call.service_name, &call.method_name);
        let payload = reservation.grow_to(payload.len()).map(|()| reservation.attach(payload)).map_err(Fault::from);
        let compression = compression_of(compress_type);
        let message = match (&method, &compression, payload) {
            (Ok(_), Ok(Some(compression)), Ok(payload)) => self.inflate(*compression, payload).await,
            (_, _, payload) => payload,
        };
        let call_parts = method.and_then(|method| {
            let message = message?;
            Ok((method, compression?, message))
        });
        let (method, compression, message) = match call_parts {
            Ok(parts) => parts,
            Err(fault) => {
                // The budget bounds refusals that the client does not read, too.
                let Some(permit) = self.reserve(0).await else { return false };
                self.send(correlation_id, Err(fault), 0, Some(permit));
                return true;
            }
        };
        let Some(permit) = self.reserve(method.weight(&self.app, &message)).await else { return false };
        let (app, answers) = (self.app.clone(), self.answers.clone());
        self.calls.spawn(async move {
            let mut answer = method.answer(&app, &call, message).await;
            if let (Some(compression), Ok(message)) = (compression, &answer) {
                let compressed = compression.compress(message.clone()).await;
                answer = compressed.map_err(|error| Fault::new(code::INTERNAL, error.to_string()));
            }
            send(&app, &answers, (correlation_id, answer, compress_type), Some(permit));
        });
        true
    }

    async fn inflate(&self, compression: Compression, payload: Bytes) -> Result<Bytes, Fault> {
        let max_bytes = self.app.options.max_body_bytes;
        let inflated = compression.inflate(payload, max_bytes, self.app.memory.reservation()).await;
        inflated.map_err(|error| unreadable(error, max_bytes))
    }

    /// Waits for a part of the budget. Returns None if the client no longer reads answers.
    async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kilobytes = bytes.div_ceil(1024).clamp(SMALLEST_KB, BUDGET_KB) as u32;
        tokio::select! {
            permit = self.budget.clone().acquire_many_owned(kilobytes) => permit.ok(),
            () = self.answers.closed() => None,
        }
    }

    /// Checks the token, if one was sent; returns whether the client may call.
    fn authenticate(&mut self, sent: Option<&[u8]>) -> bool {
        if let (Some(token), Some(sent)) = (&self.app.options.token, sent) {
            self.is_authenticated = bool::from(sent.ct_eq(token.0.as_bytes()));
        }
        self.is_authenticated
    }

    /// Refuses the calls that arrived and did not start before the stop; clients send them to another server.
    fn refuse_unstarted(&self, buffer: &mut BytesMut) {
        while let Ok(Some(request)) = frame::take(buffer, self.app.options.max_body_bytes) {
            self.refuse(request.correlation_id, Fault::new(code::LOG_OFF, "the server is stopping"));
        }
    }

    fn refuse_unauthenticated(&self, correlation_id: i64) {
        let text = "authentication data: expected the token of this server";
        self.refuse(correlation_id, Fault::new(code::UNAUTHORIZED, text));
    }

    /// Refuses a call without waiting for the budget: the connection ends with it.
    fn refuse(&self, correlation_id: i64, fault: Fault) {
        self.send(correlation_id, Err(fault), 0, None);
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

/// Reads more bytes: within the time limit if a frame has started, else whenever they arrive. Returns false at the end.
async fn read_more(
    reader: &mut OwnedReadHalf,
    buffer: &mut BytesMut,
    frame_started: Option<Instant>,
    timeout: Duration,
) -> bool {
    // Room for what arrives, not for what a frame announces.
    buffer.reserve(READ_BYTES);
    let read = reader.read_buf(buffer);
    let read = match frame_started {
        Some(started) => tokio::time::timeout_at((started + timeout).into(), read).await,
        None => Ok(read.await),
    };
    matches!(read, Ok(Ok(1..)))
}

/// Counts an answer and hands it to the writer.
fn send(
    app: &App,
    answers: &mpsc::UnboundedSender<QueuedAnswer>,
    (correlation_id, answer, compress_type): (i64, Result<Bytes, Fault>, i32),
    permit: Option<OwnedSemaphorePermit>,
) {
    let mut reservation = app.memory.reservation();
    let (code, text, message) =
        match answer.and_then(|message| Ok(reservation.grow_to(message.len()).map(|()| message)?)) {
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
    let _ = answers.send((reservation.attach(frame::encode(&meta, &message)), permit));
}
