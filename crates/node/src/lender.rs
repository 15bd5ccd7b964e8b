//! The lender: runs this host's functions, and enforces what [`rackbus_lease::Lender`] decides.
//!
//! Who may attach, who is attached and which epochs are over is known in that one place
//! (`Fence`); here is only what carries it out: engines and conversations. Revoking closes the
//! borrower's conversation, which takes every mapping and interrupt away and scrubs the function,
//! and returns when that is done (invariant I4).
//!
//! A function's engine may hang (a disk does). Then its borrower's memory is taken away from it
//! after a while, and the revocation ends when the engine answers again.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_control::api::DeviceReport;
use rackbus_control::lease_span;
use rackbus_fabric::{FabricHandle, Lending, UnknownPart};
use rackbus_lease::{
    Epoch, Holder, Incarnation, LeaseId, LenderAction, Message, NotAdmitted, Placement,
};
use rackbus_link::{Incoming, Medium, Service};
use rackbus_memory::Stream;
use rackbus_pci::vfio_user::serve;

use crate::lendable::{Attached, Lendable, NotReady};

/// How long an attach waits for the same borrower's previous conversation to be cleaned up.
const SUCCESSION: Duration = Duration::from_secs(2);

/// How long a function's engine may take to answer, before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why the lender refused.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The host has no such device.
    #[error("{host} has no device {device}; it has {available}")]
    NoDevice {
        /// This host.
        host: String,
        /// What was asked for.
        device: String,
        /// What there is.
        available: String,
    },
    /// The rack has no such function or borrower.
    #[error(transparent)]
    Unknown(#[from] UnknownPart),
    /// The lease does not let this borrower in now.
    #[error(transparent)]
    NotAdmitted(#[from] NotAdmitted),
    /// The device cannot be run.
    #[error("{device} cannot be run: {cause}")]
    Device {
        /// The device.
        device: String,
        /// Why.
        cause: std::io::Error,
    },
    /// Its engine hangs. Nothing of the old borrower's can be reached.
    #[error(
        "{device} does not answer for {limit:?}, most likely its storage hangs; what its borrower \
         had lent it is taken away, and it is offered again when it answers"
    )]
    Hangs {
        /// The device.
        device: String,
        /// How long was waited.
        limit: Duration,
    },
}

/// What the lending protocol decided for this host's functions: the one record of who may attach and
/// who is attached. It is locked for a decision only, never while something is done about it.
#[derive(Debug, Clone)]
struct Fence(Arc<Mutex<rackbus_lease::Lender>>);

impl Fence {
    fn lock(&self) -> MutexGuard<'_, rackbus_lease::Lender> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All functions that this host lends.
#[derive(Debug)]
pub struct LentFunctions {
    host: String,
    fence: Fence,
    lent: BTreeMap<String, Arc<Lent>>,
    fabric: FabricHandle,
    patience: Duration,
}

struct Lent {
    name: String,
    fence: Fence,
    lendable: Arc<dyn Lendable>,
    patience: Duration,
    state: Mutex<State>,
    seen: Mutex<Seen>,
    /// Signalled when a conversation has ended and the function is scrubbed.
    idle: Condvar,
}

/// What others may see of a device, whatever holds its state.
#[derive(Debug, Default)]
struct Seen {
    /// Why it cannot be had now.
    trouble: Option<String>,
    /// How many were not let in, and why the last was not.
    attach_refused: u64,
    last_attach_refused: Option<String>,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    /// The conversation of who is attached, to close it.
    session: Option<Arc<dyn Stream>>,
}

impl LentFunctions {
    /// A lender without devices. `fabric` decides which memory its functions reach.
    pub fn new(host: &str, fabric: FabricHandle) -> Self {
        let host = host.to_owned();
        let fence = Fence(Arc::new(Mutex::new(rackbus_lease::Lender::new(0, []))));
        LentFunctions { host, fence, lent: BTreeMap::new(), fabric, patience: PATIENCE }
    }

    /// The same, whose devices added from now on may take so long to answer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        LentFunctions { patience, ..self }
    }

    /// Adds a device, and has it ready to be lent.
    ///
    /// # Errors
    /// [`LendError::Device`] when it cannot be run.
    pub fn add(&mut self, device: &str, lendable: Arc<dyn Lendable>) -> Result<(), LendError> {
        let lent = Lent {
            name: device.to_owned(),
            fence: self.fence.clone(),
            lendable,
            patience: self.patience,
            seen: Mutex::default(),
            state: Mutex::default(),
            idle: Condvar::new(),
        };
        lent.start(&lent.lock())?;
        self.fence.lock().add(device.to_owned());
        self.lent.insert(device.to_owned(), Arc::new(lent));
        Ok(())
    }

    /// The number of this life of the node, before anything was armed in it.
    pub fn set_incarnation(&self, incarnation: Incarnation) {
        self.fence.lock().set_incarnation(incarnation);
    }

    /// The devices, each with the newest epoch that this life was told of.
    pub fn newest_epochs(&self) -> BTreeMap<String, Epoch> {
        self.fence.lock().newest_epochs()
    }

    /// The greatest lease number that this life was told of.
    pub fn newest_lease(&self) -> LeaseId {
        self.fence.lock().newest_lease()
    }

    /// Decides on a message of the control plane's. From now on the decision holds; what it says is
    /// to be done takes time: [`arm`](LentFunctions::arm), [`revoke`](LentFunctions::revoke).
    pub fn receive(&self, message: Message) -> Vec<LenderAction> {
        self.fence.lock().receive(message)
    }

    /// The devices' names.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.lent.keys().map(String::as_str)
    }

    /// Makes `device` ready for the borrower of `epoch`, who may attach when this has returned
    /// without an error in what is to be sent.
    pub fn arm(&self, device: &str, epoch: Epoch) -> Vec<LenderAction> {
        let outcome = self.find(device).and_then(|lent| lent.start(&lent.lock()));
        self.fence.lock().arm_done(device, epoch, outcome.map_err(|error| error.to_string()))
    }

    /// Takes the function back from `epoch` and everything older. On return nothing of that
    /// borrower's is read or written any more, and the function is reset and scrubbed. Revoking
    /// again, or what was never armed, changes nothing.
    ///
    /// # Errors
    /// [`LendError::Hangs`] when it is not reset and scrubbed yet: [`finish`](LentFunctions::finish)
    /// waits for that.
    pub fn revoke(&self, device: &str, epoch: Epoch) -> Result<Vec<LenderAction>, LendError> {
        let outcome = self.find(device).and_then(|lent| lent.cut(epoch));
        self.revoked(device, epoch, outcome)
    }

    /// Waits for the end of a revocation whose function [hangs](LendError::Hangs).
    pub fn finish(&self, device: &str, epoch: Epoch) -> Vec<LenderAction> {
        loop {
            let outcome = self.find(device).and_then(|lent| lent.wait_cut(epoch));
            if let Ok(actions) = self.revoked(device, epoch, outcome) {
                return actions;
            }
        }
    }

    /// The function is back, and runs or not.
    fn revoked(
        &self,
        device: &str,
        epoch: Epoch,
        outcome: Result<(), LendError>,
    ) -> Result<Vec<LenderAction>, LendError> {
        match outcome {
            Err(hangs @ LendError::Hangs { .. }) => return Err(hangs),
            // One that cannot be run again is reported when it is next armed.
            Err(error) => tracing::error!(device, %error, "the function is back, but broken"),
            Ok(()) => {}
        }
        Ok(self.fence.lock().revoke_done(device, epoch))
    }

    /// Whether a borrower is attached to each device.
    pub fn attached(&self) -> BTreeMap<String, bool> {
        let fence = self.fence.lock();
        let attached = |name: &String| (name.clone(), fence.attached_up_to(name, Epoch::MAX));
        self.lent.keys().map(attached).collect()
    }

    /// How the devices are, without waiting for any of them.
    pub fn report(&self) -> BTreeMap<String, DeviceReport> {
        self.lent.iter().map(|(name, lent)| (name.clone(), lent.report())).collect()
    }

    /// A node connected and wants a function: lets it in, or tells it why not. Holds the
    /// conversation on this thread until it ends.
    pub fn attend(&self, incoming: Incoming) {
        let (device, lease, epoch, placement) = match incoming.hello.service.clone() {
            Service::Function { device, lease, epoch } => (device, lease, epoch, Placement::Lender),
            Service::Medium { device, lease, epoch } => (device, lease, epoch, Placement::Borrower),
            Service::Segments => return incoming.refuse("this is for functions"),
        };
        let _about = lease_span(lease).entered();
        let from = incoming.hello.from.clone();
        let lent = match self.find(&device) {
            Ok(lent) => lent.clone(),
            Err(error) => return incoming.refuse(&error.to_string()),
        };
        let stream = incoming.stream.clone();
        let wanted = Holder { lease, epoch, borrower: from.clone(), placement };
        let function = format!("{}/{device}", self.host);
        let lending = self.fabric.lending(&function, &from).map_err(LendError::from);
        let attached = lending.and_then(|lending| lent.attach(&wanted, lending, &stream));
        let (end, session) = match attached {
            Ok(attached) => attached,
            Err(error) => {
                tracing::warn!(device, from, epoch, %error, "attach refused");
                let mut seen = lent.seen();
                seen.attach_refused += 1;
                seen.last_attach_refused = Some(format!("{from}, by lease {lease}: {error}"));
                drop(seen);
                return incoming.refuse(&error.to_string());
            }
        };
        tracing::info!(device, from, epoch, %placement, "function attached");
        match placement {
            Placement::Lender => {
                if incoming.accept().is_ok()
                    && let Err(error) = serve(&*stream, &session)
                {
                    tracing::warn!(device, from, %error, "conversation ended");
                }
            }
            Placement::Borrower => serve_medium(incoming, &*session),
        }
        // Dropping the session scrubs the function, which gives up what a front asked of its medium and
        // ends all loans; only then may anybody else have it.
        drop(session);
        drop(end);
        tracing::info!(device, from, epoch, "function released");
    }

    fn find(&self, device: &str) -> Result<&Arc<Lent>, LendError> {
        self.lent.get(device).ok_or_else(|| LendError::NoDevice {
            host: self.host.clone(),
            device: device.to_owned(),
            available: match self.lent.len() {
                0 => "none".to_owned(),
                _ => self.devices().collect::<Vec<_>>().join(", "),
            },
        })
    }
}

/// Hands the medium of `session`'s function to the front that connected, and waits for its end.
fn serve_medium(incoming: Incoming, session: &dyn Attached) {
    let offer = match session.serve_medium() {
        Ok(offer) => offer,
        Err(refused) => return incoming.refuse(&refused),
    };
    let Ok(stream) = incoming.accept() else { return };
    let medium = Medium { class: offer.class.to_owned(), description: offer.description };
    if medium.send(&*stream, &offer.files).is_ok() {
        stream.wait_closed();
    }
}

/// Ends what was [attached](Lent::attach), however its conversation ended: a revocation waits for it.
/// Dropped after the session, and so after the function was scrubbed.
struct SessionEnd<'a>(&'a Lent);

impl Drop for SessionEnd<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.session = None;
        self.0.fence.lock().detached(&self.0.name);
        drop(state);
        self.0.idle.notify_all();
    }
}

impl Lent {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self) -> DeviceReport {
        let seen = self.seen();
        let report = DeviceReport {
            trouble: seen.trouble.clone(),
            attach_refused: seen.attach_refused,
            last_attach_refused: seen.last_attach_refused.clone(),
            ..DeviceReport::default()
        };
        drop(seen);
        self.lendable.describe(report)
    }

    fn hangs(&self) -> LendError {
        LendError::Hangs { device: self.name.clone(), limit: self.patience }
    }

    /// Has the function ready, and notes why it is not. Who has `_state` is alone with it.
    fn start(&self, _state: &State) -> Result<(), LendError> {
        let outcome = self.lendable.arm(self.patience).map_err(|error| match error {
            NotReady::Hangs => self.hangs(),
            NotReady::Failed(cause) => self.broken(cause),
        });
        self.seen().trouble = outcome.as_ref().err().map(LendError::to_string);
        outcome
    }

    fn broken(&self, cause: std::io::Error) -> LendError {
        LendError::Device { device: self.name.clone(), cause }
    }

    /// Ends the conversation of who is attached under `epoch` or an older one, and waits for its end
    /// and for the engine.
    fn cut(&self, epoch: Epoch) -> Result<(), LendError> {
        let state = self.lock();
        let attached = |_: &mut State| self.fence.lock().attached_up_to(&self.name, epoch);
        if let Some(session) = &state.session
            && self.fence.lock().attached_up_to(&self.name, epoch)
        {
            session.shut_down();
        }
        let waited = self.idle.wait_timeout_while(state, self.patience, attached);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if !waited.timed_out() {
            return self.start(&state);
        }
        // The conversation waits for the function.
        self.lendable.revoke();
        let hangs = self.hangs();
        self.seen().trouble = Some(hangs.to_string());
        Err(hangs)
    }

    /// Waits for the end of a conversation that was cut, however long it takes.
    fn wait_cut(&self, epoch: Epoch) -> Result<(), LendError> {
        let attached = |_: &mut State| self.fence.lock().attached_up_to(&self.name, epoch);
        let waited = self.idle.wait_while(self.lock(), attached);
        self.start(&waited.unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets `wanted` attach, if the lease says so. Its own former conversation may need a moment to
    /// end. Dropping the session and then the other half ends it.
    fn attach(
        &self,
        wanted: &Holder,
        lending: Lending,
        stream: &Arc<dyn Stream>,
    ) -> Result<(SessionEnd<'_>, Box<dyn Attached>), LendError> {
        let deadline = Instant::now() + SUCCESSION;
        let mut state = self.lock();
        loop {
            let decided = self.fence.lock().attach(&self.name, wanted);
            let left = deadline.saturating_duration_since(Instant::now());
            match decided {
                Ok(()) => break,
                Err(NotAdmitted::InUse { .. }) if !left.is_zero() => {}
                Err(refused) => return Err(refused.into()),
            }
            let waited = self.idle.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match self.open(&mut state, lending, stream) {
            Ok(session) => Ok((SessionEnd(self), session)),
            Err(error) => {
                // The guard would lock the state again.
                self.fence.lock().detached(&self.name);
                drop(state);
                self.idle.notify_all();
                Err(error)
            }
        }
    }

    fn open(
        &self,
        state: &mut State,
        lending: Lending,
        stream: &Arc<dyn Stream>,
    ) -> Result<Box<dyn Attached>, LendError> {
        self.start(state)?;
        let attached = self.lendable.attach(lending, stream);
        let attached = attached.map_err(|cause| self.broken(cause))?;
        state.session = Some(stream.clone());
        Ok(attached)
    }
}
