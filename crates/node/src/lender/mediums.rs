//! Mediums that are lent: handed to fronts elsewhere, and on other machines by connections that come and go.

use std::sync::Arc;

use rackbus_control::lease_span;
use rackbus_lease::{ArmedFor, Placement};
use rackbus_link::{IncomingConnection, OfferedMedium, Purpose, Secret};
use rackbus_memory::exchange::lane::CarriedLane;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, Carrier, GatePassage, Stream};
use rackbus_rma::RmaTarget;

use super::{InUse, LentFunction, LentFunctions};
use crate::lendable::Attached;
use crate::sessions::LentSession;

impl LentFunctions {
    /// Who `incoming` is as a user, and what carries a medium's operations to its front on another machine, or the session of
    /// a function in a window.
    pub(super) fn caller(
        &self,
        incoming: &IncomingConnection,
        placement: Placement,
    ) -> std::io::Result<(InUse, Option<Box<dyn Carrier>>)> {
        let held = match incoming.hello.service {
            Purpose::Window { held, .. } => held,
            _ => placement == Placement::Borrower,
        };
        let carrier = held.then(|| incoming.stream.carrier()).flatten();
        let begin = || LentSession::begin(&incoming.hello.from, self.hold);
        let session = carrier.is_some().then(begin).transpose()?;
        if let Some(session) = &session {
            session.end_when_revoked(|end| incoming.stream.when_revoked(end));
        }
        let stream: Arc<dyn Stream> = match &session {
            // What ends it is not the loss of its connection.
            Some(session) => Arc::new(session.carried().clone()),
            None => incoming.stream.clone(),
        };
        Ok((InUse { stream, session, at: None }, carrier))
    }

    /// Gives a session another connection, if `holder` is attached and knows the session's secret.
    pub(super) fn resume_session(
        &self,
        incoming: IncomingConnection,
        device: &str,
        holder: &ArmedFor,
        (secret, connection): (&Secret, u64),
    ) {
        let _about = lease_span(holder.lease).entered();
        let resumed = self.find(device).and_then(|lent| {
            self.fence.lock().resumes(device, holder)?;
            Ok(lent.lock().session.as_ref().and_then(|it| it.session.clone()))
        });
        let session = match &resumed {
            Ok(session) => session.as_ref().and_then(|session| session.opened_by(secret)),
            Err(error) => return incoming.refuse(&error.to_string()),
        };
        let Some(session) = session.filter(|session| !session.carried().is_closed()) else {
            tracing::warn!(
                device,
                from = holder.borrower,
                "a connection for no session is refused"
            );
            return incoming.refuse("this session is over, or was never there");
        };
        if let Ok(stream) = incoming.accept()
            && let Some(carrier) = stream.carrier()
        {
            session.end_when_revoked(|end| stream.when_revoked(end));
            session.carried().connected(connection, carrier);
        }
    }
}

/// Hands the medium of `session`'s function to the front that connected, and waits for its end; on another
/// machine, that of what is `carried`.
pub(super) fn serve(
    lent: &LentFunction,
    incoming: IncomingConnection,
    session: &dyn Attached,
    carried: Option<(Box<dyn Carrier>, LentSession)>,
    lane: Option<Arc<RmaTarget>>,
    passage: &GatePassage,
) {
    let (carrier, lasting) = carried.unzip();
    let exposed = lane.clone().map(|lane| CarriedLane::Answers(lane));
    let carried = carrier.zip(lasting.as_ref()).map(|(carrier, lasting)| Carried {
        carrier,
        session: lasting.carried().clone(),
        side: SessionSide::Answers,
        lane: exposed,
    });
    let offer = match session.serve_medium(carried) {
        Ok(offer) => offer,
        Err(refused) => return incoming.refuse(&refused),
    };
    let Ok(stream) = incoming.accept() else { return };
    let lane = lane.and_then(|lane| lane.offer());
    let session = lasting.as_ref().map(|lasting| lasting.offer(lane));
    let (class, description) = (offer.class.to_owned(), offer.description);
    let medium = OfferedMedium { class, description, session };
    if medium.send(&*stream, &offer.handles).is_err() {
        return;
    }
    match lasting {
        Some(lasting) => lent.hold_medium(lasting.carried(), passage),
        None => lent.hold_medium(&*stream, passage),
    }
}
