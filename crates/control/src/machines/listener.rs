//! Connections of other machines: over TLS, each known before anybody waits for it, and in bounded numbers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use rackbus_identity::{
    Certified, Credentials, Handshakes, KeyedCertificate, Renewed, Revocations, Subject, has_spoken,
};
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_rustls::{TlsAcceptor, server};

use super::HANDSHAKE;
use super::counted::{Counted, refuse};
use crate::access::ApiPeer;

/// Connections of each host at a time, so that none takes those of others; and of the other control planes.
const CONNECTIONS: usize = 512;
/// Connections at a time of those who are not known yet.
const HANDSHAKES: usize = 512;
/// Connections at a time of those who have no certificate, of all and from one address, each for so long at most:
/// they come to join.
const STRANGERS: usize = 64;
const STRANGERS_OF_ONE: usize = 8;
/// How those of them are counted that end since others need their places.
const STRANGERS_END: &str = "too many without a certificate";
const JOINING: Duration = Duration::from_secs(10);

/// Accepts connections whose handshake is done: of each, nobody else waits for it.
pub(super) struct TlsListener {
    ready: mpsc::Receiver<(CountedConnection, SocketAddr)>,
    local: SocketAddr,
}

/// A connection, and its place among all.
type CountedConnection = Counted<server::TlsStream<TcpStream>>;

impl TlsListener {
    pub(super) fn new(
        listener: TcpListener,
        credentials: Renewed,
        revocations: Revocations,
    ) -> std::io::Result<TlsListener> {
        let local = listener.local_addr()?;
        let (begun, ready) = mpsc::channel(16);
        tokio::spawn(accept(listener, credentials, revocations, begun));
        Ok(TlsListener { ready, local })
    }
}

async fn accept(
    listener: TcpListener,
    credentials: Renewed,
    revocations: Revocations,
    begun: mpsc::Sender<(CountedConnection, SocketAddr)>,
) {
    let unknown = Handshakes::new(HANDSHAKES);
    let strangers = Handshakes::with(STRANGERS, STRANGERS_OF_ONE);
    let own = credentials.clone();
    let places = ConnectionPlaces { known: Arc::default(), strangers, revocations, own };
    loop {
        let (socket, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::error!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (end, ended) = oneshot::channel();
        // Who has got a place by itself meanwhile does not hear it.
        let end = move || {
            let _ = end.send(());
        };
        let Some(place) = unknown.begin(address.ip(), has_spoken(&socket), end) else {
            refuse("too many not known yet", &address);
            continue;
        };
        let config = current(&credentials).open_server().clone();
        let (begun, places) = (begun.clone(), places.clone());
        tokio::spawn(async move {
            if watch(&socket).is_err() {
                return;
            }
            let handshake = async {
                // Nothing is made for who says nothing.
                socket.peek(&mut [0]).await?;
                place.note_heard();
                TlsAcceptor::from(config).accept(socket).await
            };
            let handshake = tokio::time::timeout(HANDSHAKE, handshake);
            let outcome = tokio::select! {
                biased;
                outcome = handshake => outcome,
                Ok(()) = ended => return refuse("too many not known yet", &address),
            };
            match outcome {
                Ok(Ok(stream)) => match places.take(stream, address) {
                    Some(counted) => drop(begun.send((counted, address)).await),
                    None => refuse("too many of one", &address),
                },
                Ok(Err(error)) => {
                    tracing::warn!(%address, %error, "a handshake failed");
                    refuse("handshake failed", &address);
                }
                Err(_) => refuse("silent", &address),
            }
        });
    }
}

/// Places for those who are known.
#[derive(Clone)]
struct ConnectionPlaces {
    known: Arc<Mutex<BTreeMap<String, Arc<Semaphore>>>>,
    strangers: Handshakes,
    revocations: Revocations,
    /// What is shown to them, and which authorities are trusted.
    own: Renewed,
}

impl ConnectionPlaces {
    /// Gives `stream` one; `None` where all are taken. Who is revoked is a stranger.
    fn take(
        &self,
        stream: server::TlsStream<TcpStream>,
        address: SocketAddr,
    ) -> Option<CountedConnection> {
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: Vec<_> = chain.iter().map(|it| it.clone().into_owned()).collect();
        let stranger = |stream, is_revoked| {
            let (end, ended) = stranger_end(address);
            let place = self.strangers.begin(address.ip(), true, end)?;
            Some(Counted::stranger(stream, place, (JOINING, ended), is_revoked))
        };
        let Some(certified) = chain.first().and_then(Certified::of) else {
            return stranger(stream, false);
        };
        let subject = certified.subject.to_string();
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(certified.until);
        let (end, ended) = tokio::sync::watch::channel(false);
        let watched = self.revocations.watch(certified, move || {
            end.send_replace(true);
        });
        let Ok(watched) = watched else { return stranger(stream, true) };
        // As many as there were ever certificates for; the other control planes are one of them.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let own = known.entry(subject).or_insert_with(|| Arc::new(Semaphore::new(CONNECTIONS)));
        let place = own.clone().try_acquire_owned().ok()?;
        // By whose authorities it was let in last: only where there are others it is verified again.
        let (own, mut trusted) = (self.own.clone(), Vec::new());
        let issuer = current(&own).issuer_of(&chain).unwrap_or_default();
        let is_let_in = move || {
            let own = own.read().unwrap_or_else(PoisonError::into_inner);
            let is = own.authorities() == trusted || own.let_in(&chain);
            trusted = own.authorities().to_vec();
            is
        };
        Some(Counted::known(stream, place, watched, ended, (until, issuer), is_let_in))
    }
}

/// What ends the connection of somebody without a certificate whose place others need, and counts it; and where that is
/// heard.
fn stranger_end(address: SocketAddr) -> (impl FnOnce() + Send, oneshot::Receiver<()>) {
    let (end, ended) = oneshot::channel();
    let end = move || {
        // One that has ended by itself was not refused.
        if end.send(()).is_ok() {
            refuse(STRANGERS_END, &address);
        }
    };
    (end, ended)
}

/// Has a machine that is gone noticed, also by who only listens.
pub(super) fn watch(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_tcp_user_timeout(socket, 5000)?;
    Ok(())
}

pub(super) fn current(credentials: &Renewed) -> Credentials {
    credentials.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Listener for TlsListener {
    type Io = CountedConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(ready) => ready,
            // Whoever accepts goes on for as long as this is there.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        Ok(self.local)
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for ApiPeer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        let (_, tls) = stream.io().get().get_ref();
        let certificate = tls.peer_certificates().and_then(|chain| chain.first());
        let Some(shown) = certificate.and_then(KeyedCertificate::of) else {
            return ApiPeer::Stranger;
        };
        if stream.io().is_revoked() {
            return ApiPeer::Revoked(Box::new(shown.certified));
        }
        match shown.certified.subject.clone() {
            Subject::Node(host) => ApiPeer::Node(host, Some(Box::new(shown))),
            Subject::Person(person) => ApiPeer::Person(person, Box::new(shown)),
            Subject::Control => ApiPeer::Control(stream.io().issuer().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::counted::refused;
    use super::*;

    #[test]
    fn a_stranger_whose_place_others_need_is_counted() {
        let count = || refused().get(STRANGERS_END).copied().unwrap_or_default();
        let strangers = Handshakes::with(1, 1);
        let begin = |address: &str| {
            let address: SocketAddr = address.parse().unwrap();
            let (end, ended) = stranger_end(address);
            (strangers.begin(address.ip(), true, end).unwrap(), ended)
        };
        let (first, mut told) = begin("10.0.0.1:1");
        assert_eq!(count(), 0);
        let (second, ended) = begin("10.0.0.2:1");
        assert_eq!((told.try_recv(), count()), (Ok(()), 1));
        // It goes by itself.
        drop((first, ended));
        let _third = begin("10.0.0.3:1");
        assert_eq!(count(), 1);
        drop(second);
    }
}
