//! Peer-to-peer: the functions that one user of this host has borrowed reach each other's BARs.
//!
//! Which windows there are to be, [`Peers`] decides; here it is told what the user programs into each
//! function's configuration space, and each window is opened at the lender of the function whose DMA goes
//! through it, with the memory of the BAR that the other lender gave. No process of this host touches the
//! bytes. The functions of one user are those of one VM, or those of leases with the same group.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard, Weak};

use rackbus_control::api::{PeerReport, PeerWindowReport};
use rackbus_fabric::BarPlace;
use rackbus_fabric::peer::{BarPart, Member, PeerFunction, PeerWindow, Peers, Step};
use rackbus_memory::{Access, Gate, MemoryHandle};
use rackbus_pci::endpoint::{IrqChange, Region};
use rackbus_pci::programmed::{LOOKED_AT, programmed};
use rackbus_pci::vfio_user::{Device, DeviceError, DeviceShape, SharedPart};

/// Opens and closes windows at the lender of one function.
pub trait Windows: Send + Sync {
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
    groups: Mutex<BTreeMap<String, Weak<Group>>>,
    /// Written while functions join that another process of this node followed.
    resuming: Arc<RwLock<()>>,
}

/// The functions of one user.
#[derive(Default)]
struct Group {
    state: Mutex<State>,
    /// What was reported last, for while the state is locked.
    reported: Mutex<BTreeMap<String, PeerReport>>,
}

#[derive(Default)]
struct State {
    peers: Peers,
    members: BTreeMap<Member, Joined>,
    /// Windows that were opened by another process of this node, as initiator, address and length, until all
    /// that it followed were looked at: those that are not to be any more are closed then.
    inherited: Vec<(Member, u64, u64)>,
    /// Functions that it followed, and that were not looked at.
    unseen: BTreeSet<Member>,
}

/// What is needed of a function to carry steps out.
struct Joined {
    /// By BAR.
    memory: BTreeMap<u8, SharedPart>,
    /// None of a function whose front runs here, for which no windows are opened.
    windows: Option<Box<dyn Windows>>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("peers", &self.lock().peers).finish_non_exhaustive()
    }
}

impl PeerGroups {
    /// `user` has opened the function `name`, which looks like `shape`. `windows` opens windows for its DMA;
    /// without, its front runs here and it is isolated.
    pub fn join(
        &self,
        user: &str,
        name: &str,
        shape: &DeviceShape,
        windows: Option<Box<dyn Windows>>,
    ) -> Membership {
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
        state.members.insert(member, Joined { memory, windows });
        drop(state);
        Membership { group, member }
    }

    /// What each function reaches of others, by its name; those that reach nothing and are refused nothing
    /// are left out.
    pub fn report(&self) -> BTreeMap<String, PeerReport> {
        let groups: Vec<Arc<Group>> = self.lock().values().filter_map(Weak::upgrade).collect();
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weak<Group>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Does what is to be done now.
    fn settle(&mut self) {
        self.take_steps();
        if self.unseen.is_empty() && !self.inherited.is_empty() {
            self.close_inherited();
            self.peers.try_again();
            self.take_steps();
        }
    }

    /// Closes what another process opened and is not to be any more.
    fn close_inherited(&mut self) {
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
                tracing::warn!(address, length, reason, "a window of before is not closed");
            }
        }
    }

    fn take_steps(&mut self) {
        while let Some(step) = self.peers.next() {
            let outcome = match step {
                Step::Open(window) => self.open(&window),
                Step::Close(window) => self.close(&window),
            };
            if let Err(reason) = &outcome {
                tracing::warn!(?step, reason, "peer-to-peer");
            }
            self.peers.done(step, outcome);
        }
    }

    fn open(&self, window: &PeerWindow) -> Result<(), String> {
        let PeerWindow { initiator, target, part, address } = *window;
        let gone = || "the function is gone".to_owned();
        let windows = self.members.get(&initiator).and_then(|joined| joined.windows.as_ref());
        let shared = self.members.get(&target).and_then(|joined| joined.memory.get(&part.bar));
        let (windows, shared) = windows.zip(shared).ok_or_else(gone)?;
        let function = self.peers.name(target).ok_or_else(gone)?.to_owned();
        let place = BarPlace { function, bar: part.bar, offset: part.offset };
        let memory = shared.memory.descriptor();
        let at = shared.offset.saturating_add(part.offset);
        let memory = memory.and_then(|file| MemoryHandle::new(file, at));
        let memory = memory.map_err(|error| error.to_string())?;
        windows.open(address, part.length, &place, &memory)?;
        let initiator = self.peers.name(initiator);
        tracing::debug!(initiator, target = place.function, bar = part.bar, address, "window");
        Ok(())
    }

    fn close(&self, window: &PeerWindow) -> Result<(), String> {
        let joined = self.members.get(&window.initiator);
        match joined.and_then(|joined| joined.windows.as_ref()) {
            Some(windows) => windows.close(window.address, window.part.length),
            None => Ok(()),
        }
    }

    fn report(&self, reports: &mut BTreeMap<String, PeerReport>) {
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

/// A function that a user has open: as long as this lives, or until it [leaves](Membership::leave).
#[derive(Debug)]
pub struct Membership {
    group: Arc<Group>,
    member: Member,
}

impl Membership {
    /// The function's configuration space was written, or the function reset: `device` tells what it says
    /// now. On return the windows are as it says.
    fn look(&self, device: &dyn Device) {
        let config = device.read(Region::Config, 0, LOOKED_AT).unwrap_or_default();
        let mut state = self.group.lock();
        state.peers.programmed(self.member, programmed(&config));
        state.settle();
    }

    /// The same beside the user, who may program the function meanwhile: what is read under the lock is not
    /// older than what the user's last look found.
    fn look_beside(&self, device: &dyn Device) {
        let mut state = self.group.lock();
        let config = device.read(Region::Config, 0, LOOKED_AT).unwrap_or_default();
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

    /// The user lets the function go, or its lender is lost. On return no other function reaches it.
    pub fn leave(&self) {
        let mut state = self.group.lock();
        state.peers.leave(self.member);
        state.members.remove(&self.member);
        state.unseen.remove(&self.member);
        state.inherited.retain(|(initiator, ..)| *initiator != self.member);
        state.settle();
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A device whose configuration space is followed.
#[derive(Debug)]
pub struct Followed<D> {
    device: Arc<D>,
    membership: Arc<Membership>,
}

impl<D: Device + 'static> Followed<D> {
    /// `device`, which is the member of a group.
    pub fn new(device: D, membership: Arc<Membership>) -> Self {
        Followed { device: Arc::new(device), membership }
    }

    /// The same of a device that its user has programmed already: what it reaches and what reaches it follows
    /// from that, on a thread of its own, for its lender may be on its way into another process as well.
    /// Windows that are open already are opened again. Nobody may take up the conversations meanwhile: it is
    /// done inside of `gate`.
    pub(crate) fn again(
        device: D,
        membership: Arc<Membership>,
        groups: &PeerGroups,
        gate: Gate,
    ) -> Self {
        let followed = Followed::new(device, membership);
        let (device, membership) = (followed.device.clone(), followed.membership.clone());
        let resuming = groups.resuming.clone();
        let look = move || {
            drop(resuming.read());
            let _passage = gate.enter();
            membership.look_beside(&*device);
        };
        if let Err(cause) = std::thread::Builder::new().name("peers".into()).spawn(look) {
            tracing::error!(%cause, "functions of one user may not reach each other any more");
        }
        followed
    }
}

impl<D> Drop for Followed<D> {
    fn drop(&mut self) {
        // Before the device: what others reach of it is closed while it is there.
        self.membership.leave();
    }
}

impl<D: Device> Device for Followed<D> {
    fn shape(&self) -> &DeviceShape {
        self.device.shape()
    }

    fn read(&self, region: Region, offset: u64, count: usize) -> Result<Vec<u8>, DeviceError> {
        self.device.read(region, offset, count)
    }

    fn write(
        &self,
        region: Region,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), DeviceError> {
        let written = self.device.write(region, offset, data, posted);
        if region == Region::Config {
            self.membership.look(&*self.device);
        }
        written
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), DeviceError> {
        self.device.map(iova, length, access, memory)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), DeviceError> {
        self.device.unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), DeviceError> {
        self.device.unmap_all()
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), DeviceError> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        let reset = self.device.reset();
        self.membership.look(&*self.device);
        reset
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rackbus_fabric::peer::Programmed;
    use rackbus_memory::SharedMemory;
    use rackbus_pci::BarMemory;
    use rackbus_pci::vfio_user::RegionShape;

    use super::*;
    use crate::remote::AbsentDevice;

    const LONG: Duration = Duration::from_secs(30);

    /// A lender that is told of what is closed.
    struct Closed(mpsc::Sender<(u64, u64)>);

    impl Windows for Closed {
        fn open(
            &self,
            _iova: u64,
            _length: u64,
            _place: &BarPlace,
            _memory: &MemoryHandle,
        ) -> Result<(), String> {
            Ok(())
        }

        fn close(&self, iova: u64, length: u64) -> Result<(), String> {
            self.0.send((iova, length)).map_err(|error| error.to_string())
        }
    }

    /// A function with a BAR 2 of memory.
    fn with_memory(memory: &SharedMemory) -> DeviceShape {
        let mut shape = DeviceShape::new(Vec::new(), 0, 0);
        let file = BarMemory::new(memory.descriptor().unwrap());
        let mappable = Some(SharedPart { memory: file, offset: 0, areas: vec![(0, 0x1000)] });
        shape.regions[2] = RegionShape { size: 0x1000, mappable };
        shape
    }

    fn looked_at(membership: &Membership, bars: &[(u8, u64)]) {
        let bars = bars.iter().copied().collect();
        let mut state = membership.group.lock();
        state.peers.programmed(membership.member, Programmed { masters_bus: true, bars });
        state.unseen.remove(&membership.member);
        state.settle();
    }

    /// The lender of a function was lost while the node was restarted: nobody knows it any more, but others
    /// still have windows to it.
    #[test]
    fn windows_that_another_process_opened_are_closed_when_they_are_not_to_be_any_more() {
        let memory = SharedMemory::create("bar", 0x1000).unwrap();
        let (sender, closed) = mpsc::channel();
        let groups = PeerGroups::default();
        let own = DeviceShape::new(Vec::new(), 0, 0);
        let drive = groups.join("db", "alpha/nvme0", &own, Some(Box::new(Closed(sender.clone()))));
        let here = (0x10_0000, 0x1000);
        let lost = (0x20_0000, 0x1000);
        drive.inherit(vec![here, lost]);
        let shape = with_memory(&memory);
        let target = groups.join("db", "gamma/ram0", &shape, Some(Box::new(Closed(sender))));
        target.inherit(Vec::new());
        assert_eq!(drive.windows(), [here, lost]);
        looked_at(&drive, &[]);
        assert_eq!(closed.try_iter().count(), 0, "not all were looked at");
        looked_at(&target, &[(2, here.0)]);
        assert_eq!(closed.try_iter().collect::<Vec<_>>(), [lost]);
        assert_eq!(drive.windows(), [here]);
    }

    /// It asks lenders: a process that took the conversations up meanwhile would find another's answers.
    #[test]
    fn a_node_is_not_replaced_while_windows_are_opened_again() {
        let (groups, gate) = (PeerGroups::default(), Gate::new().unwrap());
        let shape = DeviceShape::new(Vec::new(), 0, 0);
        let membership = Arc::new(groups.join("db", "alpha/nvme0", &shape, None));
        let group = membership.group.clone();
        // As if a lender took its time.
        let waits = group.lock();
        let followed = Followed::again(AbsentDevice(shape), membership, &groups, gate.clone());
        let begun = Instant::now();
        let busy = || gate.close(Duration::from_millis(10)).is_err();
        while !busy() {
            assert!(begun.elapsed() < LONG, "it is done outside of the gate");
        }
        drop(waits);
        drop(gate.close(LONG).expect("it has ended"));
        drop(followed);
    }

    /// A lender that is told of what is opened.
    struct Told(mpsc::Sender<(u64, u64, BarPlace)>);

    impl Windows for Told {
        fn open(
            &self,
            iova: u64,
            length: u64,
            place: &BarPlace,
            _memory: &MemoryHandle,
        ) -> Result<(), String> {
            self.0.send((iova, length, place.clone())).map_err(|error| error.to_string())
        }

        fn close(&self, _iova: u64, _length: u64) -> Result<(), String> {
            Ok(())
        }
    }

    /// A lender may say of its function what it likes.
    #[test]
    fn nothing_beyond_a_bar_is_reached_whatever_its_lender_says() {
        let memory = SharedMemory::create("bar", 0x4000).unwrap();
        let mut shape = DeviceShape::new(Vec::new(), 0, 0);
        let file = BarMemory::new(memory.descriptor().unwrap());
        let areas = vec![(0, 0x1000), (0x1000, 0x4000), (u64::MAX, 2), (0x3000, 0x1000)];
        let mappable = Some(SharedPart { memory: file, offset: 0, areas });
        shape.regions[2] = RegionShape { size: 0x4000, mappable };
        let (sender, told) = mpsc::channel();
        let groups = PeerGroups::default();
        let own = DeviceShape::new(Vec::new(), 0, 0);
        let drive = groups.join("db", "alpha/nvme0", &own, Some(Box::new(Told(sender.clone()))));
        let target = groups.join("db", "gamma/ram0", &shape, Some(Box::new(Told(sender))));
        let program = |membership: &Membership, masters_bus, bars: &[(u8, u64)]| {
            let bars = bars.iter().copied().collect();
            let mut state = membership.group.lock();
            state.peers.programmed(membership.member, Programmed { masters_bus, bars });
            state.settle();
        };
        program(&drive, true, &[]);
        program(&target, false, &[(2, 0x10_0000)]);
        let opened: Vec<_> =
            told.try_iter().map(|(at, length, place)| (at, length, place.offset)).collect();
        assert_eq!(opened, [(0x10_0000, 0x1000, 0), (0x10_3000, 0x1000, 0x3000)]);
        let reaches = |of: &str| groups.report().get(of).map_or(0, |report| report.reaches.len());
        assert_eq!((reaches("alpha/nvme0"), reaches("gamma/ram0")), (2, 0));
        drop(target);
        assert_eq!(reaches("alpha/nvme0"), 0);
    }
}
