//! The lender: runs this host's functions, and enforces what [`rackbus_lease::Lender`] decides.
//!
//! Who may attach, who is attached and which epochs are over is known in that one place
//! (`Fence`); here is only what carries it out: engines and conversations. Revoking closes the
//! borrower's conversation, which takes every mapping and interrupt away and scrubs the function,
//! and returns when that is done (invariant I4).
//!
//! All of it continues in another process (`saved`).
//!
//! A function's engine may hang (a disk does). Then its borrower's memory is taken away from it
//! after a while, and the revocation ends when the engine answers again.

mod attend;
pub mod devices;
mod error;
mod function;
mod mediums;
pub(crate) mod saved;
mod tenancy;

use std::collections::BTreeMap;
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use rackbus_control::api::DeviceReport;
use rackbus_devices::class::LentTo;
use rackbus_fabric::FabricHandle;
use rackbus_lease::{
    ArmFailure, ArmedFor, Epoch, Incarnation, LeaseId, LenderAction, Message, Millis,
};

use crate::lanes::Lanes;
use crate::lendable::Lendable;
use crate::sessions::HOLD;
use devices::OfferedFunctions;
pub use error::LendError;
use function::{InUse, LentFunction, SessionEnd};

/// How long a function's engine may take to answer, before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

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
    lent: RwLock<BTreeMap<String, Arc<LentFunction>>>,
    fabric: FabricHandle,
    patience: Duration,
    offered: Option<OfferedFunctions>,
    hold: Duration,
    lanes: Lanes,
}

impl std::fmt::Debug for LentFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentFunctions").field("lent", &self.lent).finish_non_exhaustive()
    }
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
            lanes: Lanes::default(),
        }
    }

    /// The same, which moves data of its mediums beside the link as `lanes` says.
    #[must_use]
    pub fn with_lanes(self, lanes: Lanes) -> Self {
        LentFunctions { lanes, ..self }
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

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Arc<LentFunction>>> {
        self.lent.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<LentFunction>>> {
        self.lent.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a function in, where nobody may attach to it yet.
    fn insert(
        &self,
        device: &str,
        lendable: Arc<dyn Lendable>,
    ) -> Result<Arc<LentFunction>, LendError> {
        self.fabric.add_function(&self.host, device)?;
        let lent = Arc::new(LentFunction {
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

    /// How many leases have a function here, by how far each is.
    pub fn lease_counts(&self) -> [(&'static str, usize); 3] {
        self.fence.lock().lease_counts()
    }

    /// Decides on a message of the control plane's. From now on the decision holds; what it says is
    /// to be done takes time: [`arm`](LentFunctions::arm), [`revoke`](LentFunctions::revoke). `now` is the node's time.
    pub fn receive(&self, now: Millis, message: Message) -> Vec<LenderAction> {
        self.fence.lock().receive(now, message)
    }

    /// Decides what ends because it was not renewed, as a [message](LentFunctions::receive) would.
    pub fn tick(&self, now: Millis) -> Vec<LenderAction> {
        self.fence.lock().tick(now)
    }

    /// When [`tick`](LentFunctions::tick) is to be called next, if nothing else happens before.
    pub fn next_tick(&self) -> Option<Millis> {
        self.fence.lock().next_tick()
    }

    /// Names of the devices that the node lends, in order.
    pub fn devices(&self) -> Vec<String> {
        self.read().keys().cloned().collect()
    }

    /// Whom a function is lent to that `holder` has.
    fn lent_to(&self, holder: Option<&ArmedFor>) -> LentTo {
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
            if let Some(ArmedFor { lease, .. }) = holder {
                lent.tenancy().begin(lease, lent.describe());
            }
            Ok(())
        });
        self.fence.lock().arm_done(device, epoch, outcome.map_err(ArmFailure::from))
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
            Err(error) => {
                tracing::error!(device, %error, "the function answers again, but is broken")
            }
            Ok(()) => {}
        }
        // What was promised to the former borrower can be promised to others.
        let back = self.find(device).map(|lent| {
            *lent.promised() = None;
            lent.tenancy().end(&lent.describe());
            lent.lendable.set_level(None, LentTo::Nobody)
        });
        if let Ok(Err(reason)) = back {
            tracing::error!(
                device,
                reason,
                "the function's own service level cannot be guaranteed"
            );
        }
        Ok(self.fence.lock().revoke_done(device, epoch))
    }

    /// Whether a borrower is attached to each device.
    pub fn attached(&self) -> BTreeMap<String, bool> {
        // Before the fence is locked, under which nothing else is waited for.
        let devices = self.devices();
        let fence = self.fence.lock();
        let attached = |name: String| {
            let attached = fence.attached_up_to(&name, Epoch::MAX);
            (name, attached)
        };
        devices.into_iter().map(attached).collect()
    }

    /// How the devices are, without waiting for any of them.
    pub fn report(&self) -> BTreeMap<String, DeviceReport> {
        let all = self.read().clone();
        all.into_iter().map(|(name, lent)| (name, lent.report())).collect()
    }

    fn find(&self, device: &str) -> Result<Arc<LentFunction>, LendError> {
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
