//! An NTB's window, and what is lent in it, as values: another process of the host goes on with them, unnoticed by the borrower.
//!
//! What the borrower reaches is the kernel's to keep, by the descriptors of container and NTB: control areas, registers and
//! tables are memory that stays mapped for the NTB, and only the heartbeats stand still, until the next process has the
//! window: it may take a while longer to go on with each function. Beside the descriptors go
//! what only this process knew: which places of the window are taken, how far rings of requests were carried out, and which
//! interrupts wait to be stored. The device itself is its class' to save.
//!
//! Values are read with suspicion: one of another version, or that says what cannot be, is refused, and then nothing of the
//! window is reached any more.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rackbus_spec::pcie::msix;
use rackbus_vfio::PciAddress;
use serde::{Deserialize, Serialize};

use crate::error::MetalError;
use crate::image::MsixTable;
use crate::requests::RequestRing;
use crate::room::{LentRoom, LoanPlace};

/// The version of [`NtbWindowState`] and [`LoanState`].
pub const STATE_VERSION: u32 = 1;

/// What this process alone knows of a window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NtbWindowState {
    version: u32,
    ntb: PciAddress,
    /// The IOMMU groups of its container, in the order of their descriptors.
    groups: Vec<u32>,
    /// First address and length of each mapping.
    mapped: Vec<(u64, u64)>,
    room: LentRoom,
    /// How many functions have heartbeats.
    beating: u32,
}

/// A window, with its descriptors: the container, the NTB, the event of its doorbell, the groups, and the first parts of control
/// areas.
#[derive(Debug)]
pub struct SavedWindow {
    /// What can be written down.
    pub state: NtbWindowState,
    /// What the kernel has of it.
    pub descriptors: Vec<OwnedFd>,
}

/// The descriptors of a window, each by what it is.
#[derive(Debug)]
pub(crate) struct WindowDescriptors {
    pub container: OwnedFd,
    pub ntb: OwnedFd,
    pub doorbell: OwnedFd,
    pub groups: Vec<(u32, OwnedFd)>,
    /// The parts of control areas that have heartbeats.
    pub beating: Vec<OwnedFd>,
}

/// What this process alone knows of a function that is lent in a window, beside the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoanState {
    version: u32,
    pub(crate) place: LoanPlace,
    /// What is mapped for its borrower: first address and length of each range.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) requests: RequestRing,
    pub(crate) released: bool,
    pub(crate) carried_out: u64,
    pub(crate) resets: u64,
    pub(crate) device: LentDeviceState,
}

/// What a process goes on with of the device that is lent, by who moves it: the model in the process, which ended with that, or the
/// machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LentDeviceState {
    /// A model, whose class saves it: here are its interrupts. Its descriptors are the MSI-X table, and the events of its
    /// vectors.
    Model(VectorState),
    /// A function of the machine, which goes on by itself. Its descriptors are its file, the event by which the kernel wants it
    /// back, and the one by which MSI-X is enabled.
    Machine(MachineState),
}

/// A function of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachineState {
    pub address: PciAddress,
    pub table: MsixTable,
}

/// What the kernel has of a function of the machine.
#[derive(Debug)]
pub(crate) struct MachineDescriptors {
    pub function: OwnedFd,
    pub given_up: OwnedFd,
    pub vector: OwnedFd,
}

/// A lent device as another process goes on with it, with its descriptors.
pub(crate) enum SavedDevice {
    Model(VectorState, VectorDescriptors),
    Machine(MachineState, MachineDescriptors),
}

/// A function that is lent in a window, with its descriptors: the two parts of the control area, and those of the device.
#[derive(Debug)]
pub struct SavedLoan {
    /// What can be written down.
    pub state: LoanState,
    /// The memory that its borrower reaches, and the model's interrupts.
    pub descriptors: Vec<OwnedFd>,
}

/// The interrupts of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VectorState {
    table: MsixTable,
    /// Bytes of the BAR that has the table.
    pub table_bytes: u64,
    /// Offset of the pending bits in it, if they are there.
    pending: Option<u32>,
    /// Vectors that rang while they were masked.
    pub held: Vec<u16>,
}

/// What the kernel has of a model's interrupts.
#[derive(Debug)]
pub(crate) struct VectorDescriptors {
    pub table: OwnedFd,
    pub events: Vec<OwnedFd>,
}

fn check_version(version: u32) -> Result<(), MetalError> {
    match version {
        STATE_VERSION => Ok(()),
        other => Err(MetalError::Passed(format!(
            "its state has version {other}, this program knows {STATE_VERSION}"
        ))),
    }
}

/// A value that says what cannot be.
pub(crate) fn impossible(what: &str) -> MetalError {
    MetalError::Passed(what.to_owned())
}

impl NtbWindowState {
    pub(crate) fn new(
        ntb: PciAddress,
        groups: Vec<u32>,
        mapped: Vec<(u64, u64)>,
        (room, beating): (LentRoom, u32),
    ) -> NtbWindowState {
        let (version, room) = (STATE_VERSION, room.passed_on());
        NtbWindowState { version, ntb, groups, mapped, room, beating }
    }

    /// PCI address of the NTB.
    pub fn ntb(&self) -> PciAddress {
        self.ntb
    }

    pub(crate) fn mapped(&self) -> &[(u64, u64)] {
        &self.mapped
    }

    /// The room of a window of `size` bytes.
    pub(crate) fn room(&self, size: u64) -> Result<LentRoom, MetalError> {
        let possible = self.room.is_possible(size, &[]);
        possible.then(|| self.room.clone()).ok_or_else(|| impossible("what is taken of the window"))
    }
}

impl WindowDescriptors {
    /// Those that came with `state`.
    pub fn of(state: &NtbWindowState, all: Vec<OwnedFd>) -> Result<WindowDescriptors, MetalError> {
        check_version(state.version)?;
        let fits = all.len() == 3 + state.groups.len() + state.beating as usize;
        let mut all = all.into_iter();
        match (all.next(), all.next(), all.next()) {
            (Some(container), Some(ntb), Some(doorbell)) if fits => {
                let groups = all.by_ref().take(state.groups.len());
                let groups = state.groups.iter().copied().zip(groups).collect();
                Ok(WindowDescriptors { container, ntb, doorbell, groups, beating: all.collect() })
            }
            _ => Err(impossible("the number of its descriptors")),
        }
    }

    /// The same as they are passed on, beside the numbers of the groups.
    pub fn into_parts(self) -> (Vec<u32>, Vec<OwnedFd>) {
        let (numbers, groups): (Vec<u32>, Vec<OwnedFd>) = self.groups.into_iter().unzip();
        let own = [self.container, self.ntb, self.doorbell];
        (numbers, own.into_iter().chain(groups).chain(self.beating).collect())
    }
}

impl LoanState {
    pub(crate) fn new(
        place: LoanPlace,
        ranges: Vec<(u64, u64)>,
        requests: RequestRing,
        (released, carried_out, resets): (bool, u64, u64),
        device: LentDeviceState,
    ) -> LoanState {
        let version = STATE_VERSION;
        LoanState { version, place, ranges, requests, released, carried_out, resets, device }
    }

    /// PCI address of the function, of one of the machine.
    pub fn address(&self) -> Option<PciAddress> {
        match &self.device {
            LentDeviceState::Machine(machine) => Some(machine.address),
            LentDeviceState::Model(_) => None,
        }
    }

    /// Whether it can be that of a loan in a window at `inbound` with these mappings, where `room` is taken.
    pub(crate) fn check(
        &self,
        inbound: &Range<u64>,
        mapped: &[(u64, u64)],
        room: &LentRoom,
    ) -> Result<(), MetalError> {
        check_version(self.version)?;
        let size = inbound.end - inbound.start;
        if !room.is_possible(size, std::slice::from_ref(&self.place)) {
            return Err(impossible("the place of a function in the window"));
        }
        // Each at an offset that is its own: a range of another function's would be taken from that one later.
        let own = |at: u64| {
            let offset = at.wrapping_sub(inbound.start);
            self.place.contains(offset)
        };
        let known = |range: &(u64, u64)| mapped.contains(range) && inbound.contains(&range.0);
        match self.ranges.iter().all(|range| known(range) && own(range.0)) {
            true => self.device.check(),
            false => Err(impossible("what is mapped of a function")),
        }
    }
}

impl SavedLoan {
    /// A loan whose device was saved by itself.
    pub(crate) fn new(
        state: impl FnOnce(LentDeviceState) -> LoanState,
        area: [OwnedFd; 2],
        device: SavedDevice,
    ) -> SavedLoan {
        let (device, own) = match device {
            SavedDevice::Model(state, VectorDescriptors { table, events }) => {
                (LentDeviceState::Model(state), std::iter::once(table).chain(events).collect())
            }
            SavedDevice::Machine(state, MachineDescriptors { function, given_up, vector }) => {
                (LentDeviceState::Machine(state), vec![function, given_up, vector])
            }
        };
        SavedLoan { state: state(device), descriptors: area.into_iter().chain(own).collect() }
    }

    /// The state, the parts of the control area, and the device.
    pub(crate) fn into_parts(self) -> Result<(LoanState, [OwnedFd; 2], SavedDevice), MetalError> {
        let wrong = || impossible("the number of a function's descriptors");
        let mut all = self.descriptors.into_iter();
        let mut next = || all.next().ok_or_else(wrong);
        let area = [next()?, next()?];
        let (state, fits) = (self.state, |left: usize, expected: usize| left == expected);
        let device = match state.device.clone() {
            LentDeviceState::Model(vectors) => {
                let (table, events) = (next()?, all.collect::<Vec<_>>());
                let expected = usize::from(vectors.table.entries);
                fits(events.len(), expected).then_some(()).ok_or_else(wrong)?;
                SavedDevice::Model(vectors, VectorDescriptors { table, events })
            }
            LentDeviceState::Machine(machine) => {
                let (function, given_up, vector) = (next()?, next()?, next()?);
                fits(all.count(), 0).then_some(()).ok_or_else(wrong)?;
                SavedDevice::Machine(machine, MachineDescriptors { function, given_up, vector })
            }
        };
        Ok((state, area, device))
    }
}

impl LentDeviceState {
    fn check(&self) -> Result<(), MetalError> {
        match self {
            LentDeviceState::Model(vectors) => vectors.check(),
            LentDeviceState::Machine(machine) => check_table(machine.table, u64::MAX),
        }
    }
}

/// Whether a table can be in a BAR of so many bytes.
fn check_table(table: MsixTable, bar_bytes: u64) -> Result<(), MetalError> {
    let MsixTable { bar, offset, entries } = table;
    let end = u64::from(offset) + msix::ENTRY_SIZE * u64::from(entries);
    let possible = bar < 6 && (1..=2048).contains(&entries) && end <= bar_bytes;
    possible.then_some(()).ok_or_else(|| impossible("the MSI-X table of a function"))
}

impl VectorState {
    pub fn new(
        table: MsixTable,
        table_bytes: u64,
        pending: Option<usize>,
        held: Vec<u16>,
    ) -> VectorState {
        let pending = pending.and_then(|at| u32::try_from(at).ok());
        VectorState { table, table_bytes, pending, held }
    }

    pub fn table(&self) -> MsixTable {
        self.table
    }

    pub fn pending_at(&self) -> Option<usize> {
        self.pending.map(|at| at as usize)
    }

    fn check(&self) -> Result<(), MetalError> {
        check_table(self.table, self.table_bytes)?;
        let possible = self.held.iter().all(|vector| *vector < self.table.entries);
        possible.then_some(()).ok_or_else(|| impossible("the interrupts of a function"))
    }
}

#[cfg(test)]
mod tests {
    use rackbus_memory::Event;
    use rackbus_seeds::stored::StoredStates;

    use super::*;
    use crate::plan::WindowRoom;
    use crate::requests::Writable;
    use crate::window::{AREA, PAGE};

    const INBOUND: Range<u64> = 1 << 32..(1 << 32) + (1 << 20);
    const BAR: u64 = 16 << 10;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| Event::new().unwrap().into()).collect()
    }

    /// A loan with two BARs, and the room that it is in.
    fn loan() -> (LoanState, LentRoom) {
        let mut room = LentRoom::new(WindowRoom::new(1 << 20));
        room.take(&[BAR]).unwrap();
        let place = room.take(&[BAR, PAGE as u64]).unwrap();
        let at = |offset: u64| INBOUND.start + offset;
        let [registers, table] = [place.bars[0], place.bars[1]];
        let ranges = vec![
            (at(place.control), (AREA - PAGE) as u64),
            (at(registers), BAR),
            (at(table), PAGE as u64),
        ];
        let requests = RequestRing::new(7, Writable { msix_control: 0xb2, device_control: 0x68 });
        let table = MsixTable { bar: 4, offset: 0, entries: 3 };
        let vectors = VectorState::new(table, PAGE as u64, Some(2048), vec![1]);
        let device = LentDeviceState::Model(vectors);
        (LoanState::new(place, ranges, requests, (false, 5, 1), device), room)
    }

    fn vectors(state: &mut LoanState) -> &mut VectorState {
        match &mut state.device {
            LentDeviceState::Model(vectors) => vectors,
            LentDeviceState::Machine(_) => panic!("it is a model"),
        }
    }

    fn machine() -> LentDeviceState {
        let (address, table) =
            ("0000:03:00.0".parse().unwrap(), MsixTable { bar: 0, offset: 0x2000, entries: 65 });
        LentDeviceState::Machine(MachineState { address, table })
    }

    fn stored(name: &'static str) -> StoredStates {
        StoredStates::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/stored"), name, STATE_VERSION)
    }

    /// Reads what a program of each version wrote, the newest of which wrote `state`.
    fn read_again<T>(name: &'static str, state: &T)
    where
        T: Serialize + for<'de> Deserialize<'de> + PartialEq + std::fmt::Debug,
    {
        stored(name).compare(&serde_json::to_vec(state).unwrap());
        for version in 1..=STATE_VERSION {
            let read: T = serde_json::from_str(&stored(name).read(version)).unwrap();
            assert_eq!(read, *state, "version {version}");
        }
    }

    #[test]
    fn a_window_and_its_loans_go_on_from_what_each_version_wrote() {
        let (model, mut room) = loan();
        model.check(&INBOUND, &model.ranges, &room).unwrap();
        let of_machine = LoanState { device: machine(), ..model.clone() };
        of_machine.check(&INBOUND, &model.ranges, &room).unwrap();
        let mapped = model.ranges.clone();
        room.retire(&model.place);
        let address = "0000:05:00.0".parse().unwrap();
        let window = NtbWindowState::new(address, vec![7], mapped, (room, 2));
        assert!(window.room(1 << 20).is_ok());
        assert!(window.room(2 << 20).is_err(), "of another NTB");
        read_again("model", &model);
        read_again("machine", &of_machine);
        read_again("window", &window);
    }

    #[test]
    fn a_loan_that_cannot_be_is_refused() {
        let (state, room) = loan();
        let mapped = state.ranges.clone();
        type Change = (&'static str, fn(&mut LoanState));
        let changes: [Change; 7] = [
            ("another version", |it| it.version += 1),
            ("a place that is free", |it| it.place.control += AREA as u64),
            ("a range that is not mapped", |it| it.ranges[1].1 *= 2),
            ("a range of another function", |it| it.ranges[1].0 = INBOUND.start),
            ("a table of no entries", |it| vectors(it).table.entries = 0),
            ("a table that ends behind its BAR", |it| vectors(it).table.offset = 4090),
            ("a vector that it has not", |it| vectors(it).held = vec![3]),
        ];
        for (what, change) in changes {
            let mut other = state.clone();
            change(&mut other);
            let mut mapped = mapped.clone();
            mapped.push((INBOUND.start, BAR));
            assert!(other.check(&INBOUND, &mapped, &room).is_err(), "{what}");
        }
        assert!(state.check(&INBOUND, &mapped, &room).is_ok());
    }

    #[test]
    fn what_came_without_all_of_its_descriptors_is_refused() {
        let (state, room) = loan();
        for count in [0, 2, 5, 7] {
            let saved = SavedLoan { state: state.clone(), descriptors: descriptors(count) };
            assert!(saved.into_parts().is_err(), "{count}");
        }
        let saved = SavedLoan { state: state.clone(), descriptors: descriptors(6) };
        let (.., device) = saved.into_parts().unwrap();
        assert!(matches!(device, SavedDevice::Model(_, vectors) if vectors.events.len() == 3));
        let of_machine = LoanState { device: machine(), ..state };
        for count in [0, 2, 4, 6] {
            let (state, descriptors) = (of_machine.clone(), descriptors(count));
            assert!(SavedLoan { state, descriptors }.into_parts().is_err(), "{count}");
        }
        let saved = SavedLoan { state: of_machine, descriptors: descriptors(5) };
        assert!(matches!(saved.into_parts().unwrap().2, SavedDevice::Machine(..)));
        let address = "0000:05:00.0".parse().unwrap();
        let window = NtbWindowState::new(address, vec![7, 9], Vec::new(), (room, 1));
        for count in [0, 3, 5, 7] {
            assert!(WindowDescriptors::of(&window, descriptors(count)).is_err(), "{count}");
        }
        let (groups, all) = WindowDescriptors::of(&window, descriptors(6)).unwrap().into_parts();
        assert_eq!((groups, all.len()), (vec![7, 9], 6));
    }
}
