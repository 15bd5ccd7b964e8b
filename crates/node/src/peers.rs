//! Peer-to-peer: the functions that one user of this host has borrowed reach each other's BARs.
//!
//! Which windows there are to be, [`Peers`](rackbus_fabric::peer::PeerFunctions) decides; here it is told what the user programs into each
//! function's configuration space, and each window is opened at the lender of the function whose DMA goes
//! through it, with the memory of the BAR that the other lender gave. No process of this host touches the
//! bytes. The functions of one user are those of one VM, or those of leases with the same group.

mod followed;
mod group;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard, Weak};

use rackbus_control::api::PeerReport;
use rackbus_fabric::BarPlace;
use rackbus_fabric::peer::{BarPart, PeerFunction, PeerMember};
use rackbus_memory::{Access, MemoryHandle};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::programmed::{LOOKED_AT, programmed};
use rackbus_pci::vfio_user::{DeviceShape, ServedDevice, SharedPart};

pub use followed::Followed;
use group::{JoinedFunction, PeerGroup};

/// Opens and closes windows at the lender of one function.
pub trait PeerWindows: Send + Sync {
    /// Lets the function reach `memory`, which is at `place`, at `[iova, iova + length)`.
    ///
    /// # Errors
    /// Why it does not.
    fn open(
        &self,
        iova: u64,
        length: u64,
        place: &BarPlace,
        memory: &MemoryHandle,
    ) -> Result<(), String>;

    /// Takes it away again.
    ///
    /// # Errors
    /// Why it is not taken away now: it is gone already, or the lender is.
    fn close(&self, iova: u64, length: u64) -> Result<(), String>;
}

/// Windows of every function to every other may be read and written.
pub(crate) const ACCESS: Access = Access::READ.union(Access::WRITE);

/// The users of a host that have functions.
#[derive(Debug, Default)]
pub struct PeerGroups {
    groups: Mutex<BTreeMap<String, Weak<PeerGroup>>>,
    /// Written while functions join that another process of this node followed.
    resuming: Arc<RwLock<()>>,
}

impl PeerGroups {
    /// `user` has opened the function `name`, which looks like `shape`. `windows` opens windows for its DMA;
    /// without, its front runs here and it is isolated.
    pub fn join(
        &self,
        user: &str,
        name: &str,
        shape: &DeviceShape,
        windows: Option<Box<dyn PeerWindows>>,
    ) -> PeerMembership {
        let mut groups = self.lock();
        groups.retain(|_, group| group.strong_count() > 0);
        let known = groups.get(user).and_then(Weak::upgrade);
        let group = known.unwrap_or_default();
        groups.insert(user.to_owned(), Arc::downgrade(&group));
        drop(groups);
        let isolated = windows.is_none();
        let memory: BTreeMap<u8, SharedPart> = (0u8..6)
            .filter_map(|bar| Some((bar, shape.regions.get(usize::from(bar))?.mappable.clone()?)))
            .collect();
        let parts = memory.iter().flat_map(|(bar, shared)| {
            let size = shape.regions[usize::from(*bar)].size;
            // What a lender says lies beyond its BAR is none of it.
            let part = move |(offset, length): &(u64, u64)| {
                let end = offset.checked_add(*length).filter(|end| *end <= size);
                end.map(|_| BarPart { bar: *bar, offset: *offset, length: *length })
            };
            shared.areas.iter().filter_map(part)
        });
        let function = PeerFunction { name: name.to_owned(), isolated, parts: parts.collect() };
        let mut state = group.lock();
        let member = state.peers.join(function);
        state.members.insert(member, JoinedFunction { memory, windows });
        drop(state);
        PeerMembership { group, member }
    }

    /// What each function reaches of others, by its name; those that reach nothing and are refused nothing
    /// are left out.
    pub fn report(&self) -> BTreeMap<String, PeerReport> {
        let groups: Vec<Arc<PeerGroup>> = self.lock().values().filter_map(Weak::upgrade).collect();
        let mut reports = BTreeMap::<String, PeerReport>::new();
        for group in groups {
            // Who opens a window waits for a lender; the report does not, and says what it said before.
            let mut reported = group.reported.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(state) = group.state.try_lock() {
                reported.clear();
                state.report(&mut reported);
            }
            reports.extend(reported.clone());
        }
        reports
    }

    /// As long as what is returned is there, functions that another process followed are not looked at.
    pub(crate) fn resuming(&self) -> RwLockWriteGuard<'_, ()> {
        self.resuming.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<PeerGroup>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A function that a user has open: as long as this lives, or until it [leaves](PeerMembership::leave).
#[derive(Debug)]
pub struct PeerMembership {
    group: Arc<PeerGroup>,
    member: PeerMember,
}

impl PeerMembership {
    /// The function's configuration space was written, or the function reset: `device` tells what it says
    /// now. On return the windows are as it says.
    fn look(&self, device: &dyn ServedDevice) {
        let config = device.read(FunctionRegion::Config, 0, LOOKED_AT).unwrap_or_default();
        let mut state = self.group.lock();
        state.peers.programmed(self.member, programmed(&config));
        state.settle();
    }

    /// The same beside the user, who may program the function meanwhile: what is read under the lock is not
    /// older than what the user's last look found.
    fn look_beside(&self, device: &dyn ServedDevice) {
        let mut state = self.group.lock();
        let config = device.read(FunctionRegion::Config, 0, LOOKED_AT).unwrap_or_default();
        state.peers.programmed(self.member, programmed(&config));
        state.unseen.remove(&self.member);
        state.settle();
    }

    /// Another process of this node followed the function, which `had` these windows.
    pub(crate) fn inherit(&self, had: Vec<(u64, u64)>) {
        let mut state = self.group.lock();
        state.unseen.insert(self.member);
        let had = had.into_iter().map(|(address, length)| (self.member, address, length));
        state.inherited.extend(had);
    }

    /// The windows that its lender has opened for it, each an address and a length.
    pub(crate) fn windows(&self) -> Vec<(u64, u64)> {
        let state = self.group.lock();
        let own = state.peers.windows().filter(|window| window.initiator == self.member);
        let opened = own.map(|window| (window.address, window.part.length));
        // Those of before that were not looked at yet may be the same.
        let before = state.inherited.iter().filter(|(initiator, ..)| *initiator == self.member);
        let before = before.map(|(_, address, length)| (*address, *length));
        opened.chain(before).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The user releases the function, or its lender is lost. On return no other function reaches it.
    pub fn leave(&self) {
        let mut state = self.group.lock();
        state.peers.leave(self.member);
        state.members.remove(&self.member);
        state.unseen.remove(&self.member);
        state.inherited.retain(|(initiator, ..)| *initiator != self.member);
        state.settle();
    }
}

impl Drop for PeerMembership {
    fn drop(&mut self) {
        self.leave();
    }
}
