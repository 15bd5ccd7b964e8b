//! The lender: runs this host's functions, and enforces what [`rackbus_lease::Lender`] decides.
//!
//! Who may attach, who is attached and which epochs are over is known in that one place
//! (`Fence`); here is only what carries it out: engines and conversations. Revoking closes the
//! borrower's conversation, which takes every mapping and interrupt away and scrubs the function,
//! and returns when that is done (invariant I4).
//!
//! All of it goes on in another process (`saved`).
//!
//! A function's engine may hang (a disk does). Then its borrower's memory is taken away from it
//! after a while, and the revocation ends when the engine answers again.

pub mod devices;
mod mediums;
pub(crate) mod saved;
mod tenancy;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::{Duration, Instant};

use rackbus_control::api::DeviceReport;
use rackbus_control::lease_span;
use rackbus_devices::class::LentTo;
use rackbus_fabric::{FabricHandle, UnknownPart};
use rackbus_lease::{
    Epoch, Holder, Incarnation, LeaseId, LenderAction, Message, NotAdmitted, Placement,
};
use rackbus_link::{InWindow, Incoming, Service};
use rackbus_memory::{Passage, Stream};
use rackbus_pci::vfio_user::{Conversation, Device, serve_within};

use crate::lendable::{Attached, Lendable, LentInWindow, NotReady};
use crate::sessions::{HOLD, LentSession};
use devices::OfferedFunctions;
use tenancy::Tenancy;

/// How long an attach waits for the same borrower's previous conversation to be cleaned up.
const SUCCESSION: Duration = Duration::from_secs(2);

/// Between two looks meanwhile whether that conversation's connection is lost.
const LOOK: Duration = Duration::from_millis(100);

/// How long a function's engine may take to answer, before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why the lender refused.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The host has no such device.
    #[error("{host} has no device {device}; it has {available}")]
    NoDevice {
        /// Name of the node's host.
        host: String,
        /// What was asked for.
        device: String,
        /// Names of the devices that the host has, separated by commas.
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
        /// Name of the device on its host.
        device: String,
        /// The error that it failed with.
        cause: std::io::Error,
    },
    /// The service level cannot be kept, or there are none for such a function.
    #[error("{0}")]
    Level(String),
    /// Its engine hangs. Nothing of the old borrower's can be reached.
    #[error(
        "{device} does not answer for {limit:?}, most likely its storage hangs; what its borrower \
         had lent it is taken away, and it is offered again when it answers"
    )]
    Hangs {
        /// Name of the device on its host.
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
pub struct LentFunctions {
    host: String,
    fence: Fence,
    /// Locked for moments only.
    lent: RwLock<BTreeMap<String, Arc<Lent>>>,
    fabric: FabricHandle,
    patience: Duration,
    offered: Option<OfferedFunctions>,
    hold: Duration,
}

impl std::fmt::Debug for LentFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentFunctions").field("lent", &self.lent).finish_non_exhaustive()
    }
}

struct Lent {
    name: String,
    fence: Fence,
    lendable: Arc<dyn Lendable>,
    patience: Duration,
    state: Mutex<State>,
    seen: Mutex<Seen>,
    /// The service level that its borrower was promised.
    promised: Mutex<Option<String>>,
    /// What its leases use.
    tenancy: Mutex<Tenancy>,
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
    session: Option<InUse>,
}

/// The conversation of who is attached.
struct InUse {
    stream: Arc<dyn Stream>,
    /// What outlives its connection, between machines.
    session: Option<LentSession>,
    /// Where it rests; nothing while it goes on.
    at: Option<Conversation>,
}

impl LentFunctions {
    /// A lender without devices. `fabric` decides which memory its functions reach.
    pub fn new(host: &str, fabric: FabricHandle) -> Self {
        let host = host.to_owned();
        let fence = Fence(Arc::new(Mutex::new(rackbus_lease::Lender::new(0, []))));
        LentFunctions {
            host,
            fence,
            lent: RwLock::default(),
            fabric,
            patience: PATIENCE,
            offered: None,
            hold: HOLD,
        }
    }

    /// The same, whose borrowers on other machines may go on trying to reach it for so long.
    #[must_use]
    pub fn with_hold(self, hold: Duration) -> Self {
        LentFunctions { hold, ..self }
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
    pub fn add(&self, device: &str, lendable: Arc<dyn Lendable>) -> Result<(), LendError> {
        let lent = self.insert(device, lendable)?;
        self.fence.lock().add(device.to_owned());
        let state = lent.lock();
        lent.start(&state)
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Arc<Lent>>> {
        self.lent.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<Lent>>> {
        self.lent.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a function in, where nobody may attach to it yet.
    fn insert(&self, device: &str, lendable: Arc<dyn Lendable>) -> Result<Arc<Lent>, LendError> {
        self.fabric.add_function(&self.host, device)?;
        let lent = Arc::new(Lent {
            name: device.to_owned(),
            fence: self.fence.clone(),
            lendable,
            patience: self.patience,
            seen: Mutex::default(),
            state: Mutex::default(),
            idle: Condvar::new(),
            promised: Mutex::default(),
            tenancy: Mutex::default(),
        });
        self.write().insert(device.to_owned(), lent.clone());
        Ok(lent)
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

    /// Names of the devices that the node lends, in order.
    pub fn devices(&self) -> Vec<String> {
        self.read().keys().cloned().collect()
    }

    /// Whom a function is lent to that `holder` has.
    fn lent_to(&self, holder: Option<&Holder>) -> LentTo {
        match holder {
            None => LentTo::Nobody,
            Some(holder) if holder.borrower == self.host => LentTo::Owner,
            Some(_) => LentTo::Borrower,
        }
    }

    /// Makes `device` ready for the borrower of `epoch`, with the service level that is asked for. The
    /// borrower may attach when this has returned without an error in what is to be sent.
    pub fn arm(&self, device: &str, epoch: Epoch, level: Option<&str>) -> Vec<LenderAction> {
        let outcome = self.find(device).and_then(|lent| {
            lent.start(&lent.lock())?;
            let holder = self.fence.lock().holder(device).cloned();
            let to = self.lent_to(holder.as_ref());
            lent.lendable.set_level(level, to).map_err(LendError::Level)?;
            *lent.promised() = level.map(str::to_owned);
            if let Some(Holder { lease, .. }) = holder {
                lent.tenancy().begin(lease, lent.describe());
            }
            Ok(())
        });
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
        // What was promised to the former borrower can be promised to others.
        let back = self.find(device).map(|lent| {
            *lent.promised() = None;
            lent.tenancy().end(&lent.describe());
            lent.lendable.set_level(None, LentTo::Nobody)
        });
        if let Ok(Err(reason)) = back {
            tracing::error!(device, reason, "the function's own service level is not kept");
        }
        Ok(self.fence.lock().revoke_done(device, epoch))
    }

    /// Whether a borrower is attached to each device.
    pub fn attached(&self) -> BTreeMap<String, bool> {
        let fence = self.fence.lock();
        let attached = |name: &String| (name.clone(), fence.attached_up_to(name, Epoch::MAX));
        self.devices().iter().map(attached).collect()
    }

    /// How the devices are, without waiting for any of them.
    pub fn report(&self) -> BTreeMap<String, DeviceReport> {
        let all = self.read().clone();
        all.into_iter().map(|(name, lent)| (name, lent.report())).collect()
    }

    /// A node connected and wants a function: lets it in, or tells it why not. Holds the
    /// conversation on this thread until it ends, and rests as `passage` says.
    pub fn attend(&self, incoming: Incoming, passage: &Passage) {
        let (device, lease, epoch, placement) = match incoming.hello.service.clone() {
            Service::Function { device, lease, epoch } => (device, lease, epoch, Placement::Lender),
            Service::Medium { device, lease, epoch } => (device, lease, epoch, Placement::Borrower),
            Service::Window { device, lease, epoch } => (device, lease, epoch, Placement::Host),
            Service::Resume { device, lease, epoch, secret, connection } => {
                let borrower = incoming.hello.from.clone();
                let holder = Holder { lease, epoch, borrower, placement: Placement::Borrower };
                return self.resume_session(incoming, &device, &holder, &secret, connection);
            }
            Service::Segments | Service::Network => {
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
        let wanted = Holder { lease, epoch, borrower: from.clone(), placement };
        let function = format!("{}/{device}", self.host);
        let attached = match placement {
            Placement::Host => lent.attach(&wanted, caller, |lendable| {
                lendable.lend_in_window(&from, epoch, &stream).map(Session::InWindow)
            }),
            Placement::Lender | Placement::Borrower => {
                let lending = self.fabric.lending(&function, &from).map_err(LendError::from);
                lending.and_then(|lending| {
                    lent.attach(&wanted, caller, |lendable| {
                        lendable.attach(lending, &stream).map(Session::Attached)
                    })
                })
            }
        };
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
            Session::Attached(session) if placement == Placement::Borrower => {
                let carried = carrier.zip(carried);
                mediums::serve(&lent, incoming, &**session, carried, passage);
            }
            Session::Attached(session) => {
                if incoming.accept().is_ok() {
                    lent.hold(&*stream, session, Conversation::default(), passage);
                }
            }
            Session::InWindow(LentInWindow { offset, .. }) => {
                let place = InWindow { offset: *offset, epoch };
                if incoming.accept().is_ok_and(|stream| place.send(&*stream).is_ok()) {
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

    fn find(&self, device: &str) -> Result<Arc<Lent>, LendError> {
        let found = self.read().get(device).cloned();
        found.ok_or_else(|| LendError::NoDevice {
            host: self.host.clone(),
            device: device.to_owned(),
            available: match &self.devices()[..] {
                [] => "none".to_owned(),
                names => names.join(", "),
            },
        })
    }
}

/// A function in the hands of a borrower.
enum Session {
    /// Of a driver or a front.
    Attached(Box<dyn Attached>),
    /// Of a host's kernel.
    InWindow(LentInWindow),
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

    fn promised(&self) -> MutexGuard<'_, Option<String>> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_refusal(&self, said: String) {
        let mut seen = self.seen();
        seen.attach_refused += 1;
        seen.last_attach_refused = Some(said);
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
        let mut report = self.lendable.describe(report);
        let lease = self.fence.lock().admitted(&self.name).map(|holder| holder.lease);
        (report.lease, report.last_lease) = self.tenancy().reports(lease, &report);
        report
    }

    fn hangs(&self) -> LendError {
        LendError::Hangs { device: self.name.clone(), limit: self.patience }
    }

    /// Holds the conversation of who is attached.
    fn hold(
        &self,
        stream: &dyn Stream,
        session: &dyn Device,
        from: Conversation,
        passage: &Passage,
    ) {
        let at = |paused| self.rests(paused);
        if let Err(error) = serve_within(stream, session, from, passage, at) {
            tracing::warn!(device = self.name, %error, "conversation ended");
        }
    }

    /// Holds the conversation of who has the medium: nothing is said in it.
    fn hold_medium(&self, stream: &dyn Stream, passage: &Passage) {
        if stream.socket().is_none() {
            // It cannot be passed on, so it does not rest for that.
            return stream.wait_closed();
        }
        while !stream.is_closed() {
            stream.wait_closed_or(passage.gate().as_fd());
            if !stream.is_closed() {
                self.rests(Some(Conversation::default()));
                passage.rest();
                self.rests(None);
            }
        }
    }

    fn rests(&self, at: Option<Conversation>) {
        if let Some(session) = &mut self.lock().session {
            session.at = at;
        }
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
            session.stream.shut_down();
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
    fn attach<T>(
        &self,
        wanted: &Holder,
        caller: InUse,
        give: impl FnOnce(&dyn Lendable) -> std::io::Result<T>,
    ) -> Result<(SessionEnd<'_>, T), LendError> {
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
            if let Some(InUse { session: Some(session), stream, .. }) = &state.session
                && session.is_away()
            {
                // Whoever begins anew does not come back to what was lost.
                stream.shut_down();
            }
            let waited = self.idle.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        match self.open(&mut state, caller, give) {
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

    fn open<T>(
        &self,
        state: &mut State,
        caller: InUse,
        give: impl FnOnce(&dyn Lendable) -> std::io::Result<T>,
    ) -> Result<T, LendError> {
        self.start(state)?;
        // A model that failed since it was armed was started anew just now, and knows of no promise.
        let promised = self.promised();
        if promised.is_some() {
            self.lendable.change_level(promised.as_deref()).map_err(LendError::Level)?;
        }
        drop(promised);
        let attached = give(&*self.lendable);
        let attached = attached.map_err(|cause| self.broken(cause))?;
        state.session = Some(caller);
        Ok(attached)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rackbus_devices::class::parse_rack;
    use rackbus_fabric::{Fabric, derive};

    use super::*;

    /// A function that remembers which levels it was given since it was started last.
    #[derive(Debug, Default)]
    struct Restarted(Mutex<Vec<Option<String>>>);

    impl Lendable for Restarted {
        fn arm(&self, _limit: Duration) -> Result<(), NotReady> {
            self.0.lock().unwrap().clear();
            Ok(())
        }

        fn set_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
            self.change_level(level)
        }

        fn change_level(&self, level: Option<&str>) -> Result<(), String> {
            self.0.lock().unwrap().push(level.map(str::to_owned));
            Ok(())
        }

        fn attach(
            &self,
            _lending: rackbus_fabric::Lending,
            _stream: &Arc<dyn Stream>,
        ) -> std::io::Result<Box<dyn Attached>> {
            Err(std::io::Error::other("it is not needed here"))
        }

        fn revoke(&self) {}

        fn describe(&self, known: DeviceReport) -> DeviceReport {
            known
        }
    }

    /// The lease goes on, and with it what it was promised.
    #[test]
    fn a_model_that_is_started_anew_for_the_same_lease_keeps_to_its_level() {
        let file = "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n";
        let (rack, _) = parse_rack("rack.toml", file).unwrap();
        let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
        let lender = LentFunctions::new("alpha", fabric.clone());
        let function = Arc::new(Restarted::default());
        lender.add("d0", function.clone()).unwrap();
        let (device, borrower, level) = ("d0".to_owned(), "beta".to_owned(), Some("10".to_owned()));
        let (lease, epoch, placement) = (1, 1, Placement::Lender);
        let holder = Holder { lease, epoch, borrower: borrower.clone(), placement };
        let level_of = level.clone();
        let arm = Message::Arm { incarnation: 0, device, lease, epoch, borrower, placement, level };
        assert_eq!(lender.receive(arm).len(), 1);
        lender.arm("d0", epoch, level_of.as_deref());
        let lending = fabric.lending("alpha/d0", "beta").unwrap();
        let stream: Arc<dyn Stream> = Arc::new(UnixStream::pair().unwrap().0);
        let caller = InUse { stream: stream.clone(), session: None, at: None };
        assert!(
            lender
                .find("d0")
                .unwrap()
                .attach(&holder, caller, |it| it.attach(lending, &stream))
                .is_err()
        );
        assert_eq!(*function.0.lock().unwrap(), [level_of]);
    }
}
