//! A connection that has a place among all until it ends, and may have to end in time.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use rackbus_identity::WatchedConnection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{oneshot, watch};

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

/// How often the clock is looked at for the end of a certificate, and whether its authority is still one of the rack's.
const LOOKED_AT: Duration = Duration::from_secs(5);

/// A connection with its place.
pub(super) struct Counted<S> {
    stream: S,
    _place: Box<dyn Send>,
    /// When this ends, nothing is read or written any more. Nothing, once it has.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    is_revoked: bool,
    issuer: String,
}

impl<S> Counted<S> {
    /// One of somebody who is known, by a certificate of the authority with the fingerprint `issuer`, until their certificate is revoked, when `ended` changes, or is over, at `until`, or they
    /// are let in no more, as `is_let_in` says: their authority was retired.
    pub(super) fn known(
        stream: S,
        place: impl Send + 'static,
        watched: WatchedConnection,
        mut ended: watch::Receiver<bool>,
        (until, issuer): (SystemTime, String),
        is_let_in: impl FnMut() -> bool + Send + 'static,
    ) -> Counted<S> {
        let end = async move {
            let _watched = watched;
            // Who is to say so is gone when it has been said.
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => {}
                () = moment(until, is_let_in) => {}
            }
        };
        let (_place, end) = (Box::new(place), Some(Box::pin(end) as Pin<Box<_>>));
        Counted { stream, _place, end, is_revoked: false, issuer }
    }

    /// One of somebody who is not known, or no more, for so long at most, and until it is told that others need its place.
    pub(super) fn stranger(
        stream: S,
        place: impl Send + 'static,
        (limit, ended): (Duration, oneshot::Receiver<()>),
        is_revoked: bool,
    ) -> Counted<S> {
        let end = async move {
            tokio::select! {
                Ok(()) = ended => {}
                () = tokio::time::sleep(limit) => {}
            }
        };
        let (_place, end) = (Box::new(place), Some(Box::pin(end) as Pin<Box<_>>));
        Counted { stream, _place, end, is_revoked, issuer: String::new() }
    }

    pub(super) fn get(&self) -> &S {
        &self.stream
    }

    /// Whether the certificate was revoked before the connection was made.
    pub(super) fn is_revoked(&self) -> bool {
        self.is_revoked
    }

    /// The fingerprint of the authority that made the certificate; empty where none was let in.
    pub(super) fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Whether its time is over; who asks is woken then.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        let ended = self.end.as_mut().is_none_or(|end| end.as_mut().poll(context).is_ready());
        if ended {
            self.end = None;
        }
        ended
    }
}

/// Waits until `until` by the clock of the machine, which may be set meanwhile, or until this is no more.
async fn moment(until: SystemTime, mut is: impl FnMut() -> bool) {
    while let Ok(left) = until.duration_since(SystemTime::now())
        && is()
    {
        tokio::time::sleep(left.clamp(Duration::from_millis(1), LOOKED_AT)).await;
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

    use rackbus_identity::{Certified, Revocations, Subject};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_ends_in_time_and_gives_its_place_back() {
        let places = Arc::new(Semaphore::new(1));
        let (_other, stream) = tokio::io::duplex(16);
        let place = places.clone().try_acquire_owned().unwrap();
        let (_end, ended) = oneshot::channel();
        let limit = Duration::from_secs(10);
        let mut counted = Counted::stranger(stream, place, (limit, ended), false);
        let error = counted.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(places.available_permits(), 0);
        // Who asks again is told the same.
        let again = counted.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::TimedOut);
        drop(counted);
        assert_eq!(places.available_permits(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_ends_when_others_need_its_place() {
        let (_other, stream) = tokio::io::duplex(16);
        let (end, ended) = oneshot::channel();
        let limit = Duration::from_secs(10);
        let mut counted = Counted::stranger(stream, (), (limit, ended), false);
        let begun = tokio::time::Instant::now();
        end.send(()).unwrap();
        let error = counted.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    fn known(
        until: SystemTime,
        ended: watch::Receiver<bool>,
    ) -> (tokio::io::DuplexStream, Counted<tokio::io::DuplexStream>) {
        let (other, stream) = tokio::io::duplex(16);
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let certified = Certified::new(Subject::Node("beta".to_owned()), Duration::from_secs(60));
        let watched = Revocations::default().watch(certified, || {}).unwrap();
        (other, Counted::known(stream, place, watched, ended, (until, String::new()), || true))
    }

    #[tokio::test]
    async fn one_ends_with_its_certificate_and_when_that_is_revoked() {
        let hour = Duration::from_secs(3600);
        let (_kept, ended) = watch::channel(false);
        let (_other, mut over) = known(SystemTime::now() - hour, ended.clone());
        for _ in 0..2 {
            let error = over.read(&mut [0; 1]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        let (revoke, ended) = watch::channel(false);
        let (mut other, mut good) = known(SystemTime::now() + hour, ended);
        other.write_all(b"a").await.unwrap();
        assert_eq!(good.read(&mut [0; 1]).await.unwrap(), 1);
        revoke.send_replace(true);
        for _ in 0..2 {
            let error = good.read(&mut [0; 1]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
    }
}
