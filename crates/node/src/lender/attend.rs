//! Other nodes connect and want a function: each is let in, or told why not.

use rackbus_control::lease_span;
use rackbus_lease::{ArmedFor, Placement};
use rackbus_link::{InWindow, IncomingConnection, Purpose, Secret};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carrier, GatePassage};
use rackbus_pci::vfio_user::RestingConversation;

use super::{LendError, LentFunctions, mediums};
use crate::lendable::{Attached, LentInWindow};
use crate::sessions::{LentSession, keep_silent};

impl LentFunctions {
    /// A node connected and wants a function: lets it in, or tells it why not. Holds the
    /// conversation on this thread until it ends, and rests as `passage` says.
    pub fn attend(&self, incoming: IncomingConnection, passage: &GatePassage) {
        let (device, lease, epoch, placement) = match incoming.hello.service.clone() {
            Purpose::Function { device, lease, epoch } => (device, lease, epoch, Placement::Lender),
            Purpose::Medium { device, lease, epoch, .. } => {
                (device, lease, epoch, Placement::Borrower)
            }
            Purpose::Window { device, lease, epoch, .. } => (device, lease, epoch, Placement::Host),
            Purpose::Resume { device, lease, epoch, secret, connection } => {
                let resumed = (lease, epoch);
                return self.attend_resumption(incoming, &device, resumed, (&secret, connection));
            }
            Purpose::Segments | Purpose::Network => {
                return incoming.refuse("this is for functions");
            }
        };
        let _about = lease_span(lease).entered();
        let from = incoming.hello.from.clone();
        let lent = match self.find(&device) {
            Ok(lent) => lent,
            Err(error) => return incoming.refuse(&error.to_string()),
        };
        let (caller, carrier) = match self.caller(&incoming, placement) {
            Ok(caller) => caller,
            Err(error) => return incoming.refuse(&error.to_string()),
        };
        let (stream, carried) = (caller.stream.clone(), caller.session.clone());
        let wanted = ArmedFor { lease, epoch, borrower: from.clone(), placement };
        let function = format!("{}/{device}", self.host);
        let lending = self.fabric.lending(&function, &from).map_err(LendError::from);
        let attached = lending.and_then(|lending| {
            lent.attach(&wanted, caller, |lendable| match placement {
                Placement::Host => {
                    lendable.lend_in_window(&from, epoch, lending, &stream).map(LentUsage::InWindow)
                }
                Placement::Lender | Placement::Borrower => {
                    lendable.attach(lending, &stream).map(LentUsage::Attached)
                }
            })
        });
        let (end, session) = match attached {
            Ok(attached) => attached,
            Err(error) => {
                tracing::warn!(device, from, epoch, %error, "attach refused");
                lent.note_refusal(format!("{from}, by lease {lease}: {error}"));
                return incoming.refuse(&error.to_string());
            }
        };
        tracing::info!(device, from, epoch, %placement, "function attached");
        match &session {
            LentUsage::Attached(session) if placement == Placement::Borrower => {
                session.share_medium(carrier.is_some());
                let carried = carrier.zip(carried);
                // Files are given on the same machine, and nothing is to be moved.
                let lane = carried.as_ref().and_then(|_| self.lanes.target(&incoming));
                mediums::serve(&lent, incoming, &**session, carried, lane, passage);
            }
            LentUsage::Attached(session) => {
                if incoming.accept().is_ok() {
                    lent.hold(&*stream, session, RestingConversation::default(), passage);
                }
            }
            LentUsage::InWindow(LentInWindow { offset, .. }) => {
                let offer = carried.as_ref().map(|session| session.offer(None));
                let place = InWindow { offset: *offset, epoch, session: offer };
                let carried = carried.map(|session| (carrier, session));
                if is_told(incoming, &place) && is_kept(carried) {
                    lent.hold_medium(&*stream, passage);
                }
            }
        }
        // Dropping the session scrubs the function, which gives up what a front asked of its medium and
        // ends all loans; only then may anybody else have it.
        drop(session);
        drop(end);
        tracing::info!(device, from, epoch, "function released");
    }

    /// A borrower goes on with a session of a lease, by another connection.
    fn attend_resumption(
        &self,
        incoming: IncomingConnection,
        device: &str,
        (lease, epoch): (u64, u64),
        proof: (&Secret, u64),
    ) {
        let borrower = incoming.hello.from.clone();
        // A lease has one placement, and the secret is what proves that the session is the borrower's.
        let admitted = self.fence.lock().admitted(device).map(|holder| holder.placement);
        let placement = admitted.unwrap_or(Placement::Borrower);
        let holder = ArmedFor { lease, epoch, borrower, placement };
        self.resume_session(incoming, device, &holder, proof);
    }
}

/// Lets in who connected, and says where in the window its function is; false when that cannot be said.
fn is_told(incoming: IncomingConnection, place: &InWindow) -> bool {
    incoming.accept().is_ok_and(|stream| place.send(&*stream).is_ok())
}

/// Has the session of a function in a window go on by itself, by this connection or the next one, where it outlives its
/// connections; false when it cannot.
pub(super) fn is_kept(session: Option<(Option<Box<dyn Carrier>>, LentSession)>) -> bool {
    let Some((first, session)) = session else { return true };
    let kept = keep_silent(session.carried(), SessionSide::Answers, first);
    let kept =
        kept.inspect_err(|error| tracing::error!(%error, "a window's session cannot be kept"));
    kept.is_ok()
}

/// A function in the hands of a borrower.
pub(super) enum LentUsage {
    /// Of a driver or a front.
    Attached(Box<dyn Attached>),
    /// Of a host's kernel.
    InWindow(LentInWindow),
}
