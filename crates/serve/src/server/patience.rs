//! A connection whose other end has to go on: to begin, and to take what it is sent.
//!
//! HTTP itself limits heads and bodies; what comes before the protocol is known, and answers that nobody reads, are limited here.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A wait that ends in an error.
#[derive(Default)]
struct Limit(Option<Pin<Box<Sleep>>>);

impl Limit {
    fn begun(timeout: Duration) -> Limit {
        Limit(Some(Box::pin(sleep(timeout))))
    }

    /// What was tried; an error once it has been in vain for `timeout`.
    fn check<T>(
        &mut self,
        tried: Poll<io::Result<T>>,
        timeout: Duration,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.0 = None;
            return tried;
        }
        let sleep = self.0.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(sleep.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// A stream that fails when its other end does not go on.
pub(super) struct Patient<S> {
    stream: S,
    /// Bytes that have to come before `beginning` is over.
    missing: usize,
    beginning: Limit,
    /// How long a write may wait.
    timeout: Duration,
    writing: Limit,
    flushing: Limit,
    is_gathered: bool,
}

impl<S> Patient<S> {
    /// What is written has to be taken within `timeout`.
    pub(super) fn new(stream: S, timeout: Duration) -> Patient<S> {
        let (missing, beginning, writing, flushing) = Default::default();
        Patient { stream, missing, beginning, timeout, writing, flushing, is_gathered: false }
    }

    /// The first `missing` bytes have to come within `timeout`.
    pub(super) fn beginning(self, missing: usize, timeout: Duration) -> Patient<S> {
        Patient { missing, beginning: Limit::begun(timeout), ..self }
    }

    /// Takes no vectors. HTTP/2 then copies pieces of up to a kilobyte, so that a small answer and its trailers are one
    /// write; with vectors each piece of 256 bytes is a write of its own.
    pub(super) fn gathered(self) -> Patient<S> {
        Patient { is_gathered: true, ..self }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, into);
        if this.missing == 0 {
            return read;
        }
        this.missing = this.missing.saturating_sub(into.filled().len() - before);
        match (&mut this.beginning.0, read) {
            // all of it counts, not each piece
            (Some(sleep), Poll::Pending) => {
                ready!(sleep.as_mut().poll(context));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            (_, read) => read,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let tried = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.writing.check(tried, this.timeout, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let tried = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.writing.check(tried, this.timeout, context)
    }

    fn is_write_vectored(&self) -> bool {
        !self.is_gathered && self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let tried = Pin::new(&mut this.stream).poll_flush(context);
        this.flushing.check(tried, this.timeout, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let tried = Pin::new(&mut this.stream).poll_shutdown(context);
        this.flushing.check(tried, this.timeout, context)
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
    async fn a_beginning_that_drips_is_over_in_time_and_one_that_is_there_may_rest() {
        let (mut client, server) = duplex(64);
        let mut server = Patient::new(server, LONG).beginning(3, SHORT);
        let mut bytes = [0; 8];
        client.write_all(b"PR").await.unwrap();
        assert_eq!(server.read(&mut bytes).await.unwrap(), 2);
        let error = server.read(&mut bytes).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        client.write_all(b"I").await.unwrap();
        assert_eq!(server.read(&mut bytes).await.unwrap(), 1);
        let rest = tokio::time::timeout(2 * SHORT, server.read(&mut bytes)).await;
        assert!(rest.is_err(), "it has begun and waits as long as it likes");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_takes_fails_and_one_that_is_taken_slowly_does_not() {
        let (mut client, server) = duplex(4);
        let mut server = Patient::new(server, 10 * SHORT);
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
