//! Sessions of mediums over the link between machines: what their two sides do so that one outlives its
//! connection. What is decided about connections, [`rackbus_memory::exchange::session`] decides.

use std::sync::Arc;
use std::time::Duration;

use rackbus_fabric::rack::LINK_HOLD_MS;
use rackbus_link::{Connect, Hello, LinkError, MediumSession, Purpose, Secret};
use rackbus_memory::CarriedSession;
use rackbus_memory::exchange::session::{SessionSide, SessionTiming};
use rackbus_memory::exchange::{CarriedSessionState, OnSessionChange};
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
}

impl LentSession {
    /// A session with `borrower`, whose front may go on trying for `hold`.
    pub(crate) fn begin(borrower: &str, hold: Duration) -> std::io::Result<LentSession> {
        let timing = SessionTiming::answering(millis(hold));
        let session = CarriedSession::new(borrower, SessionSide::Answers, timing, Box::new(drop))?;
        Ok(LentSession { secret: Secret::new(), session })
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
    pub(crate) fn opened_by(&self, secret: &Secret) -> Option<&CarriedSession> {
        self.secret.is(secret).then_some(&self.session)
    }

    /// As another process of this host goes on with it.
    pub(crate) fn save(&self) -> LentSessionState {
        LentSessionState { secret: self.secret.clone(), session: self.session.save() }
    }

    /// Goes on with a session with `borrower` that another process [saved](LentSession::save).
    pub(crate) fn resume(borrower: &str, state: &LentSessionState) -> std::io::Result<LentSession> {
        let session = CarriedSession::resume(borrower, &state.session, Box::new(drop))?;
        Ok(LentSession { secret: state.secret.clone(), session })
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

/// What is said on another connection of the session that began with `hello`.
fn resuming(hello: &Hello, secret: &Secret, connection: u64) -> Option<Hello> {
    let Purpose::Medium { device, lease, epoch, .. } = hello.service.clone() else { return None };
    let secret = secret.clone();
    let service = Purpose::Resume { device, lease, epoch, secret, connection };
    Some(Hello { service, ..hello.clone() })
}
