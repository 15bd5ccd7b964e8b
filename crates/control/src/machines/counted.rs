//! A connection that has a place among all until it ends, and may have to end in time.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rackbus_identity::Watched;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, watch};

/// Connections that were refused before anything was asked, by cause.
static REFUSED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a connection that is refused.
pub(super) fn refuse(cause: &'static str, address: &SocketAddr) {
    tracing::warn!(%address, cause, "a connection was refused");
    *REFUSED.lock().unwrap_or_else(PoisonError::into_inner).entry(cause).or_default() += 1;
}

/// How many connections of other machines this process has refused, by cause.
pub(crate) fn refused() -> BTreeMap<&'static str, u64> {
    REFUSED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// A connection with its place.
pub(super) struct Counted<S> {
    stream: S,
    _place: OwnedSemaphorePermit,
    /// When this ends, nothing is read or written any more.
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    is_revoked: bool,
}

impl<S> Counted<S> {
    /// One of somebody who is known, until their certificate is revoked: then `ended` changes.
    pub(super) fn known(
        stream: S,
        place: OwnedSemaphorePermit,
        watched: Watched,
        mut ended: watch::Receiver<bool>,
    ) -> Counted<S> {
        let end = async move {
            let _watched = watched;
            // Who is to say so is gone when it has been said.
            let _ = ended.wait_for(|ended| *ended).await;
        };
        Counted { stream, _place: place, end: Box::pin(end), is_revoked: false }
    }

    /// One of somebody who is not known, or no more, for so long at most.
    pub(super) fn stranger(
        stream: S,
        place: OwnedSemaphorePermit,
        limit: Duration,
        is_revoked: bool,
    ) -> Counted<S> {
        Counted { stream, _place: place, end: Box::pin(tokio::time::sleep(limit)), is_revoked }
    }

    pub(super) fn get(&self) -> &S {
        &self.stream
    }

    /// Whether the certificate was revoked before the connection was made.
    pub(super) fn is_revoked(&self) -> bool {
        self.is_revoked
    }

    /// Whether its time is over; who asks is woken then.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        self.end.as_mut().poll(context).is_ready()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::AsyncReadExt;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_that_says_nothing_ends_in_time_and_gives_its_place_back() {
        let places = Arc::new(Semaphore::new(1));
        let (_other, stream) = tokio::io::duplex(16);
        let place = places.clone().try_acquire_owned().unwrap();
        let mut counted = Counted::stranger(stream, place, Duration::from_secs(10), false);
        let error = counted.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(places.available_permits(), 0);
        drop(counted);
        assert_eq!(places.available_permits(), 1);
    }
}
