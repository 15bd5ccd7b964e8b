//! The functions of one user: the steps that [`PeerFunctions`] decides are carried out, one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_control::api::{PeerReport, PeerWindowReport};
use rackbus_fabric::BarPlace;
use rackbus_fabric::peer::{BarPart, PeerFunctions, PeerMember, PeerStep, PeerWindow};
use rackbus_memory::MemoryHandle;
use rackbus_pci::vfio_user::SharedPart;

use super::PeerWindows;

/// The functions of one user.
#[derive(Default)]
pub(super) struct PeerGroup {
    pub(super) state: Mutex<GroupState>,
    /// What was reported last, for while the state is locked.
    pub(super) reported: Mutex<BTreeMap<String, PeerReport>>,
}

#[derive(Default)]
pub(super) struct GroupState {
    pub(super) peers: PeerFunctions,
    pub(super) members: BTreeMap<PeerMember, JoinedFunction>,
    /// Windows that were opened by another process of this node, as initiator, address and length, until all
    /// that it followed were looked at: those that are not to be any more are closed then.
    pub(super) inherited: Vec<(PeerMember, u64, u64)>,
    /// Functions that it followed, and that were not looked at.
    pub(super) unseen: BTreeSet<PeerMember>,
}

/// A function that is in a group: what steps need of it.
pub(super) struct JoinedFunction {
    /// Memory of its BARs that can be mapped, by the BAR's number.
    pub(super) memory: BTreeMap<u8, SharedPart>,
    /// None of a function whose front runs here, for which no windows are opened.
    pub(super) windows: Option<Box<dyn PeerWindows>>,
}

impl std::fmt::Debug for PeerGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerGroup").field("peers", &self.lock().peers).finish_non_exhaustive()
    }
}

impl PeerGroup {
    pub(super) fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupState {
    /// Does what is to be done now.
    pub(super) fn settle(&mut self) {
        self.take_steps();
        if self.unseen.is_empty() && !self.inherited.is_empty() {
            self.close_inherited();
            self.peers.try_again();
            self.take_steps();
        }
    }

    /// Closes what another process opened and is not to be any more.
    pub(super) fn close_inherited(&mut self) {
        for (initiator, address, length) in std::mem::take(&mut self.inherited) {
            let same = |window: &PeerWindow| {
                (window.initiator, window.address, window.part.length)
                    == (initiator, address, length)
            };
            let joined = self.members.get(&initiator);
            let windows = joined.and_then(|joined| joined.windows.as_ref());
            if let Some(windows) = windows
                && !self.peers.windows().any(same)
                && let Err(reason) = windows.close(address, length)
            {
                tracing::warn!(
                    address,
                    length,
                    reason,
                    "a window that is no longer needed could not be closed"
                );
            }
        }
    }

    pub(super) fn take_steps(&mut self) {
        while let Some(step) = self.peers.next() {
            let outcome = match step {
                PeerStep::Open(window) => self.open(&window),
                PeerStep::Close(window) => self.close(&window),
            };
            if let Err(reason) = &outcome {
                tracing::warn!(
                    ?step,
                    reason,
                    "a peer-to-peer window could not be opened or closed"
                );
            }
            self.peers.done(step, outcome);
        }
    }

    pub(super) fn open(&self, window: &PeerWindow) -> Result<(), String> {
        let PeerWindow { initiator, target, part, address } = *window;
        let gone = || "the function is gone".to_owned();
        let windows = self.members.get(&initiator).and_then(|joined| joined.windows.as_ref());
        let shared = self.members.get(&target).and_then(|joined| joined.memory.get(&part.bar));
        let (windows, shared) = windows.zip(shared).ok_or_else(gone)?;
        let function = self.peers.name(target).ok_or_else(gone)?.to_owned();
        let place = BarPlace { function, bar: part.bar, offset: part.offset };
        let memory = shared.memory.descriptor();
        let at = shared.offset.saturating_add(part.offset);
        let memory = memory.and_then(|file| MemoryHandle::of_bar(Arc::new(file), at, &place));
        let memory = memory.map_err(|error| error.to_string())?;
        windows.open(address, part.length, &place, &memory)?;
        let initiator = self.peers.name(initiator);
        tracing::debug!(initiator, target = place.function, bar = part.bar, address, "window");
        Ok(())
    }

    pub(super) fn close(&self, window: &PeerWindow) -> Result<(), String> {
        let joined = self.members.get(&window.initiator);
        match joined.and_then(|joined| joined.windows.as_ref()) {
            Some(windows) => windows.close(window.address, window.part.length),
            None => Ok(()),
        }
    }

    pub(super) fn report(&self, reports: &mut BTreeMap<String, PeerReport>) {
        for window in self.peers.windows() {
            let names = (self.peers.name(window.initiator), self.peers.name(window.target));
            let (Some(initiator), Some(target)) = names else { continue };
            let PeerWindow { part: BarPart { bar, offset, length }, address, .. } = *window;
            let function = target.to_owned();
            let report = PeerWindowReport { address, length, function, bar, offset };
            reports.entry(initiator.to_owned()).or_default().reaches.push(report);
        }
        for refusal in self.peers.refused() {
            let report = reports.entry(refusal.initiator().to_owned()).or_default();
            report.refused.push(refusal.to_string());
        }
    }
}
