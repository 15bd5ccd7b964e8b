//! Sessions of mediums, and of functions in windows, over the link between machines: what their two sides do so that one
//! outlives its connection. What is decided about connections, [`rackbus_memory::exchange::session`] decides.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rackbus_fabric::rack::LINK_HOLD_MS;
use rackbus_link::{
    Connect, Hello, IsRevoked, LinkError, MediumSession, OnRevoked, Purpose, Secret,
    WatchedConnection,
};
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{
    CarriedSessionState, Exchange, ExchangeLayout, MESSAGE_BYTES, OnSessionChange,
};
use rackbus_memory::{Carried, CarriedSession, Carrier, Event, Stream};
use rackbus_rma::LaneOffer;
use serde::{Deserialize, Serialize};

/// For how long a front holds what is under way while its medium cannot be reached, where the rack file says
/// nothing.
pub const HOLD: Duration = Duration::from_millis(LINK_HOLD_MS);

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The lender's side of a session, as it goes on in another process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LentSessionState {
    secret: Secret,
    session: CarriedSessionState,
}

/// The lender's side of a session with a borrower.
#[derive(Debug, Clone)]
pub(crate) struct LentSession {
    secret: Secret,
    session: CarriedSession,
    /// What ends it when its borrower's host is revoked, which may be while no connection carries it.
    watched: Arc<Mutex<Option<WatchedConnection>>>,
}

impl LentSession {
    /// A session with `borrower`, whose front may go on trying for `hold`.
    pub(crate) fn begin(borrower: &str, hold: Duration) -> std::io::Result<LentSession> {
        let timing = SessionTiming::answering(millis(hold));
        let session = CarriedSession::new(borrower, SessionSide::Answers, timing, Box::new(drop))?;
        Ok(LentSession { secret: Secret::new(), session, watched: Arc::default() })
    }

    /// Ends it when the host is revoked that is at the other end of its newest connection, by which `watch` has that done: a lost
    /// connection alone is waited for, and what the borrower reaches beside it stays open meanwhile.
    pub(crate) fn end_when_revoked(
        &self,
        watch: impl FnOnce(OnRevoked) -> Result<Option<WatchedConnection>, IsRevoked>,
    ) {
        let session = self.session.clone();
        let watched = watch(Box::new(move || {
            tracing::warn!("a session is ended: the borrower's host was revoked");
            session.shut_down();
        }));
        let watched = watched.unwrap_or_else(|revoked| {
            tracing::warn!(%revoked, "a session is ended");
            self.session.shut_down();
            None
        });
        // What was watched before is dropped after the lock.
        let before = std::mem::replace(
            &mut *self.watched.lock().unwrap_or_else(PoisonError::into_inner),
            watched,
        );
        drop(before);
    }

    /// What carries the medium's messages, and goes on by another connection when one is lost.
    pub(crate) fn carried(&self) -> &CarriedSession {
        &self.session
    }

    /// What its borrower is told, with how it reaches what is exposed for the session beside the link.
    pub(crate) fn offer(&self, lane: Option<LaneOffer>) -> MediumSession {
        let kept_ms = self.session.timing().hold;
        MediumSession { secret: self.secret.clone(), kept_ms, lane }
    }

    /// The session, for who knows its secret.
    pub(crate) fn opened_by(&self, secret: &Secret) -> Option<&LentSession> {
        self.secret.is(secret).then_some(self)
    }

    /// As another process of this host goes on with it.
    pub(crate) fn save(&self) -> LentSessionState {
        LentSessionState { secret: self.secret.clone(), session: self.session.save() }
    }

    /// Goes on with a session with `borrower` that another process [saved](LentSession::save).
    pub(crate) fn resume(borrower: &str, state: &LentSessionState) -> std::io::Result<LentSession> {
        let session = CarriedSession::resume(borrower, &state.session, Box::new(drop))?;
        Ok(LentSession { secret: state.secret.clone(), session, watched: Arc::default() })
    }

    /// Whether no connection carries it now.
    pub(crate) fn is_away(&self) -> bool {
        self.session.status().lost_for.is_some()
    }
}

/// A session of the borrower's that begins, or that another process saved.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HeldSession<'s> {
    /// It goes on trying for so long, or less if the lender does not keep it for so long.
    Begins(Duration),
    /// It goes on as it was.
    Resumed(&'s CarriedSessionState),
}

/// The borrower's side of the session that `offered` is about; by a thread of its own that connects to `address` with
/// `hello`, changed as it must be, whenever a connection is wanted.
///
/// # Errors
/// When there are no descriptors or threads left.
pub(crate) fn hold_session(
    offered: &MediumSession,
    held: HeldSession<'_>,
    link: Arc<dyn Connect>,
    address: String,
    hello: Hello,
    on_change: OnSessionChange,
) -> std::io::Result<CarriedSession> {
    let session = match held {
        HeldSession::Begins(hold) => {
            let hold = millis(hold).min(SessionTiming::most(offered.kept_ms));
            let timing = SessionTiming::asking(hold);
            CarriedSession::new(&hello.to, SessionSide::Asks, timing, on_change)?
        }
        HeldSession::Resumed(state) => CarriedSession::resume(&hello.to, state, on_change)?,
    };
    let (held, secret) = (session.clone(), offered.secret.clone());
    std::thread::Builder::new().name("link".into()).spawn(move || {
        while let Some(connection) = held.wait_wanted() {
            let Some(hello) = resuming(&hello, &secret, connection) else { return };
            match link.connect(&address, &hello) {
                Ok(stream) => match stream.carrier() {
                    Some(carrier) => drop(held.connected(connection, carrier)),
                    None => held.failed(connection),
                },
                Err(LinkError::Refused { reason, .. }) => held.refused(&reason),
                Err(error) => {
                    tracing::debug!(%error, "the link is still lost");
                    held.failed(connection);
                }
            }
        }
    })?;
    Ok(session)
}

/// How large an exchange is in which nothing is said.
const SILENT: ExchangeLayout = ExchangeLayout { tags: 2, data_bytes: 0 };

/// Keeps a session in which nothing is said by a thread of its own, until it ends: by its `first` connection, or, where
/// another process of this host had that, by the next one.
///
/// # Errors
/// When there is no memory, or there are no descriptors or threads left.
pub(crate) fn keep_silent(
    session: &CarriedSession,
    side: SessionSide,
    first: Option<Box<dyn Carrier>>,
) -> std::io::Result<()> {
    let (name, session) = ("window session", session.clone());
    let exchange = match first {
        Some(carrier) => {
            Exchange::carried(name, Carried { carrier, session, side, lane: None }, SILENT)
        }
        None => Exchange::carried_again(name, session, side, SILENT),
    };
    let mut exchange = exchange.map_err(std::io::Error::other)?;
    let keep = move || {
        while !exchange.is_closed() {
            if exchange.receive(&mut [0; MESSAGE_BYTES]).is_some() {
                tracing::warn!("a node speaks where nothing is to be said, and is disconnected");
                exchange.close();
            } else if exchange.rest() {
                Event::wait_any(&[exchange.as_fd()], None);
            }
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(keep).map(drop)
}

/// What is said on another connection of the session that began with `hello`.
fn resuming(hello: &Hello, secret: &Secret, connection: u64) -> Option<Hello> {
    let (Purpose::Medium { device, lease, epoch, .. }
    | Purpose::Window { device, lease, epoch, .. }) = hello.service.clone()
    else {
        return None;
    };
    let secret = secret.clone();
    let service = Purpose::Resume { device, lease, epoch, secret, connection };
    Some(Hello { service, ..hello.clone() })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::fd::BorrowedFd;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use rackbus_identity::{Certified, Revocation, RevocationList, Revocations, Revoked, Subject};
    use rackbus_memory::StreamError;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A connection without TLS.
    #[derive(Debug)]
    struct Plain(UnixStream);

    fn outcome(done: std::io::Result<usize>) -> Result<usize, StreamError> {
        match done {
            Ok(count) => Ok(count),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            Err(_) => Err(StreamError::Socket(rustix::io::Errno::CONNRESET)),
        }
    }

    impl Carrier for Plain {
        fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
            outcome(self.0.write(bytes))
        }

        fn flush(&mut self) -> Result<bool, StreamError> {
            Ok(true)
        }

        fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
            match self.0.read(buffer) {
                // Cut off: nobody has said that nothing comes any more.
                Ok(0) => Err(StreamError::Socket(rustix::io::Errno::CONNRESET)),
                read => outcome(read),
            }
        }

        fn socket(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn shut_down(&self) {
            let _ = self.0.shutdown(Shutdown::Both);
        }
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < LIMIT, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn session(side: SessionSide) -> CarriedSession {
        let timing = match side {
            SessionSide::Asks => SessionTiming::asking(20_000),
            SessionSide::Answers => SessionTiming::answering(20_000),
        };
        CarriedSession::new("peer", side, timing, Box::new(drop)).unwrap()
    }

    /// Two ends of a connection, and what cuts it.
    fn cable() -> ([Box<dyn Carrier>; 2], UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let cable = near.try_clone().unwrap();
        let ends = [near, far].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            Box::new(Plain(stream)) as Box<dyn Carrier>
        });
        (ends, cable)
    }

    /// Gives both sides another connection, as the thread that connects and the lender do; what cuts it.
    fn connect(asks: &CarriedSession, answers: &CarriedSession) -> UnixStream {
        let number = asks.wait_wanted().unwrap();
        let ([near, far], cable) = cable();
        assert!(answers.connected(number, far) && asks.connected(number, near));
        until("it does not go on", || is_up(asks) && is_up(answers));
        cable
    }

    fn is_up(session: &CarriedSession) -> bool {
        session.status().lost_for.is_none()
    }

    #[test]
    fn a_session_in_which_nothing_is_said_goes_on_by_other_connections_and_in_another_process() {
        let [asks, answers] = [SessionSide::Asks, SessionSide::Answers].map(session);
        let ([near, far], cable) = cable();
        keep_silent(&asks, SessionSide::Asks, Some(near)).unwrap();
        keep_silent(&answers, SessionSide::Answers, Some(far)).unwrap();
        cable.shutdown(Shutdown::Both).unwrap();
        until("the loss is not seen", || !is_up(&asks) && !is_up(&answers));
        let cable = connect(&asks, &answers);

        // The connections of a process end with it.
        let state = answers.save();
        cable.shutdown(Shutdown::Both).unwrap();
        until("the loss is not seen", || !is_up(&asks));
        let answers = CarriedSession::resume("peer", &state, Box::new(drop)).unwrap();
        keep_silent(&answers, SessionSide::Answers, None).unwrap();
        let cable = connect(&asks, &answers);
        let state = asks.save();
        cable.shutdown(Shutdown::Both).unwrap();
        let asks = CarriedSession::resume("peer", &state, Box::new(drop)).unwrap();
        keep_silent(&asks, SessionSide::Asks, None).unwrap();
        until("the loss is not seen", || !is_up(&answers));
        connect(&asks, &answers);
        assert!(!asks.is_closed() && !answers.is_closed());
        asks.shut_down();
        answers.shut_down();
    }

    /// Its registers, and what it reaches of memory, need no connection.
    #[test]
    fn a_session_with_a_host_that_is_revoked_ends_although_its_connection_is_lost_already() {
        let revocations = Revocations::default();
        let session = LentSession::begin("beta", Duration::from_secs(3600)).unwrap();
        let ([near, _], cable) = cable();
        keep_silent(session.carried(), SessionSide::Answers, Some(near)).unwrap();
        let beta = || Certified::unshown(Subject::Node("beta".into()));
        let connection = revocations.watch(beta(), || ()).unwrap();
        session.end_when_revoked(|end| connection.watch_also(end).map(Some));
        cable.shutdown(Shutdown::Both).unwrap();
        drop(connection);
        until("the loss is not seen", || session.is_away());
        assert!(!session.carried().is_closed(), "it waits for the next connection");
        let what = Revoked::Host("beta".into());
        let revoked = vec![Revocation { number: 1, what, at: 100, until: 1000 }];
        revocations.learn(&RevocationList { version: 1, revoked }, 200);
        assert!(session.carried().is_closed());

        let late = LentSession::begin("beta", Duration::from_secs(3600)).unwrap();
        late.end_when_revoked(|end| revocations.watch(beta(), end).map(Some));
        assert!(late.carried().is_closed());
    }

    #[test]
    fn a_peer_that_speaks_in_a_silent_session_is_disconnected() {
        let [asks, answers] = [SessionSide::Asks, SessionSide::Answers].map(session);
        let ([near, far], _cable) = cable();
        keep_silent(&answers, SessionSide::Answers, Some(far)).unwrap();
        let carried = Carried { carrier: near, session: asks, side: SessionSide::Asks, lane: None };
        let mut speaks = Exchange::carried("speaks", carried, SILENT).unwrap();
        speaks.send(&[1], None).unwrap();
        let begun = Instant::now();
        while !answers.is_closed() {
            assert!(begun.elapsed() < LIMIT, "it is listened to");
            speaks.ring();
            speaks.receive(&mut [0; MESSAGE_BYTES]);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
