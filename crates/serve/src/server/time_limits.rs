//! Time limits on a connection: for its first bytes, and for a client to read its answers.
//!
//! hyper limits the time for headers, `protocols` the time for bodies, and this file the rest.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A timer that runs while an operation is pending.
#[derive(Default)]
struct TimeLimit(Option<Pin<Box<Sleep>>>);

impl TimeLimit {
    fn started(timeout: Duration) -> TimeLimit {
        TimeLimit(Some(Box::pin(sleep(timeout))))
    }

    /// Returns the result of an attempt, or an error once attempts have been pending for `timeout`.
    fn check<T>(
        &mut self,
        attempt: Poll<io::Result<T>>,
        timeout: Duration,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if attempt.is_ready() {
            self.0 = None;
            return attempt;
        }
        let sleep = self.0.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(sleep.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// A stream that fails when its client does not send or read in time.
pub(super) struct TimedStream<S> {
    stream: S,
    /// Bytes of the preface that have not arrived.
    num_missing: usize,
    preface: TimeLimit,
    /// Time limit for a pending write.
    timeout: Duration,
    writing: TimeLimit,
    flushing: TimeLimit,
    joins_writes: bool,
}

impl<S> TimedStream<S> {
    /// Limits each pending write to `timeout`.
    pub(super) fn new(stream: S, timeout: Duration) -> TimedStream<S> {
        let (num_missing, preface, writing, flushing) = Default::default();
        TimedStream { stream, num_missing, preface, timeout, writing, flushing, joins_writes: false }
    }

    /// Requires the first `num_bytes` within `timeout`.
    pub(super) fn with_preface(self, num_bytes: usize, timeout: Duration) -> TimedStream<S> {
        TimedStream { num_missing: num_bytes, preface: TimeLimit::started(timeout), ..self }
    }

    /// Refuses vectored writes. hyper's HTTP/2 then copies pieces of up to a kilobyte, so that a small answer and its
    /// trailers are one write; with vectored writes each piece of 256 bytes is a separate write.
    pub(super) fn joining_writes(self) -> TimedStream<S> {
        TimedStream { joins_writes: true, ..self }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, into);
        if this.num_missing == 0 {
            return read;
        }
        this.num_missing = this.num_missing.saturating_sub(into.filled().len() - before);
        match (&mut this.preface.0, read) {
            // The limit is for the whole preface, not for each piece.
            (Some(sleep), Poll::Pending) => {
                ready!(sleep.as_mut().poll(context));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            (_, read) => read,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let attempt = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.writing.check(attempt, this.timeout, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let attempt = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.writing.check(attempt, this.timeout, context)
    }

    fn is_write_vectored(&self) -> bool {
        !self.joins_writes && self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let attempt = Pin::new(&mut this.stream).poll_flush(context);
        this.flushing.check(attempt, this.timeout, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let attempt = Pin::new(&mut this.stream).poll_shutdown(context);
        this.flushing.check(attempt, this.timeout, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_preface_has_a_time_limit_and_later_bytes_have_none() {
        let (mut client, server) = duplex(64);
        let mut server = TimedStream::new(server, LONG).with_preface(3, SHORT);
        let mut bytes = [0; 8];
        client.write_all(b"PR").await.unwrap();
        assert_eq!(server.read(&mut bytes).await.unwrap(), 2);
        let error = server.read(&mut bytes).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        client.write_all(b"I").await.unwrap();
        assert_eq!(server.read(&mut bytes).await.unwrap(), 1);
        let rest = tokio::time::timeout(2 * SHORT, server.read(&mut bytes)).await;
        assert!(rest.is_err(), "after the preface a connection may be idle");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_read_fails_and_one_that_is_read_slowly_does_not() {
        let (mut client, server) = duplex(4);
        let mut server = TimedStream::new(server, 10 * SHORT);
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 4];
            for _ in 0..4 {
                tokio::time::sleep(4 * SHORT).await;
                client.read_exact(&mut bytes).await.unwrap();
            }
            client
        });
        let started = Instant::now();
        server.write_all(&[7; 16]).await.unwrap();
        assert!(started.elapsed() > 10 * SHORT, "longer than one write may take");
        let _client = reader.await.unwrap();
        let error = server.write_all(&[7; 16]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
