//! A function of this machine, as it is lent in a window: held by VFIO, in the container of the NTB, where it reaches all that the
//! window onto the borrower's memory covers.
//!
//! While it is *isolated* it is in a container of its own, with the borrower's local APICs and the mappings that the borrower's
//! kernel asks for, and nothing else. VFIO moves a function from one container to another only when nobody has it open: so it is
//! closed for that, and opened and reset anew.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use rackbus_fabric::{CountedBytes, FunctionInterrupt, Loan};
use rackbus_memory::{Access, Event, Lending, MappedRegisters, MemoryHandle};
use rackbus_spec::pcie::msix;
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{Container, Facts, InterruptIndex, RangeTarget, VfioDevice};

use crate::device::{
    BarMap, LentBars, ReadyDevice, RefusedMappings, VECTOR_CONTROL, WindowDevice, event,
    not_lendable, table_of,
};
use crate::error::MetalError;
use crate::image::{self, Image, MsixTable};
use crate::isolated::{IsolatedMapping, MAPPED_MSI, MOST_MAPPINGS, MappingRefusal};
use crate::lender::locked;
use crate::ntb::{BorrowerWindows, Ntb};
use crate::requests::DEVICE_CONTROL_BITS;
use crate::saved::{MachineDescriptors, MachineState, SavedDevice, impossible};
use crate::window::PAGE;

/// What a function may do with the borrower's memory.
const BOTH: Access = Access::READ.union(Access::WRITE);

type MemoryLoan = Loan<Option<MemoryHandle>>;

/// A function of this machine, held by VFIO.
pub(crate) struct PhysicalDevice {
    facts: Facts,
    opened: Mutex<Option<OpenedDevice>>,
    /// The borrower's memory, by where the function finds it: what the IOMMU lets its DMA through to.
    memory: Mutex<BTreeMap<u64, MemoryLoan>>,
    /// The window, while it is isolated: it is to have all of that again, whatever else its borrower lends meanwhile.
    counted: Mutex<Option<CountedBytes>>,
    windows: BorrowerWindows,
    lending: Lending,
    /// Where the MSI-X table is, which is in a BAR.
    table: MsixTable,
    /// Offset of the device control register, 0 where there is none.
    device_control: u16,
    refusals: RefusedMappings,
    events: DeviceEvents,
    /// Its BARs, which the borrower's processors reach through the window, and its interrupts, which it stores through the
    /// NTB's window 1 to the borrower's local APICs.
    _loans: Vec<Loan>,
}

/// The function as it is open.
struct OpenedDevice {
    /// Those of the BAR with the MSI-X table. Before the function, which they keep open.
    registers: Arc<MappedRegisters>,
    device: VfioDevice,
}

/// What the kernel signals of the function.
struct DeviceEvents {
    /// Rings when the kernel wants the device back, or it reported an error that it cannot correct.
    given_up: Event,
    /// Enables MSI-X in the device; nothing rings it, as the table is the borrower's.
    vector: Event,
}

impl PhysicalDevice {
    /// Resets a function and makes it ready. `lending` lends it the borrower's memory, which it reaches through the NTB.
    ///
    /// # Errors
    /// When it cannot be lent through a window, the borrower's memory cannot be lent to it, or VFIO refuses.
    pub fn prepare(
        device: VfioDevice,
        ntb: &Ntb,
        lending: &Lending,
    ) -> Result<ReadyDevice, MetalError> {
        let address = device.address();
        if !device.resets_itself() {
            return Err(not_lendable(
                address,
                "it has no reset of its own, and a reset of its bus would take other functions with it",
            ));
        }
        let windows = ntb.windows()?;
        let memory = lend_window(&windows, lending)?;
        let facts = device.facts().clone();
        let events = DeviceEvents { given_up: event()?, vector: event()? };
        // Reset before anybody has it.
        let (opened, image, table, bars) = OpenedDevice::reset(device, &events)?;
        let device = PhysicalDevice {
            facts,
            opened: Mutex::new(Some(opened)),
            memory: Mutex::new(memory),
            counted: Mutex::default(),
            windows,
            lending: lending.clone(),
            table,
            device_control: image.writable.device_control,
            refusals: RefusedMappings::default(),
            events,
            _loans: lend_bars(&bars, table, lending)?,
        };
        Ok(ReadyDevice { device: Box::new(device), image, bars })
    }

    /// Goes on with a function that another process had lent through an NTB, by its file in the NTB's container. Nothing about
    /// it changes.
    ///
    /// # Errors
    /// When the file is not that of the function with these facts, which is the one that the state is of, or it is not lent
    /// here.
    pub fn again(
        facts: Facts,
        ntb: &Ntb,
        lending: &Lending,
        (state, descriptors): (&MachineState, MachineDescriptors),
    ) -> Result<PhysicalDevice, MetalError> {
        let MachineDescriptors { function, given_up, vector } = descriptors;
        if facts.address != state.address {
            return Err(impossible("which function of the machine was lent"));
        }
        let device = VfioDevice::inherited(ntb.container(), facts.clone(), function)?;
        let windows = ntb.windows()?;
        let memory = lend_window(&windows, lending)?;
        let (opened, image, table, bars) = OpenedDevice::of(device)?;
        if table != state.table {
            return Err(impossible("where the MSI-X table of a function is"));
        }
        let failed = |cause| MetalError::System { what: "an event that was passed on", cause };
        let adopt = |event| Event::adopt(event).map_err(failed);
        Ok(PhysicalDevice {
            facts,
            opened: Mutex::new(Some(opened)),
            memory: Mutex::new(memory),
            counted: Mutex::default(),
            windows,
            lending: lending.clone(),
            table,
            device_control: image.writable.device_control,
            refusals: RefusedMappings::default(),
            events: DeviceEvents { given_up: adopt(given_up)?, vector: adopt(vector)? },
            _loans: lend_bars(&bars, table, lending)?,
        })
    }

    /// Does something with the function, which is closed only after it could not be opened again.
    fn with<R>(
        &self,
        job: impl FnOnce(&OpenedDevice) -> Result<R, MetalError>,
    ) -> Result<R, MetalError> {
        let opened = locked(&self.opened);
        let closed = || not_lendable(self.facts.address, "it could not be opened again");
        job(opened.as_ref().ok_or_else(closed)?)
    }

    /// The container in which it is isolated, with nothing but the borrower's local APICs, or the NTB's.
    fn open_in(&self, on: bool) -> Result<VfioDevice, MetalError> {
        let windows = &self.windows;
        if !on {
            return Ok(VfioDevice::open(&windows.container, self.facts.clone())?);
        }
        let container = Arc::new(Container::new()?);
        let device = VfioDevice::open(&container, self.facts.clone())?;
        let interrupts = windows.local_apics().ok_or_else(|| {
            not_lendable(self.facts.address, "the NTB's window 1 is smaller than 1 MiB")
        })?;
        container.map(MAPPED_MSI, interrupts, BOTH)?;
        Ok(device)
    }

    /// Makes a mapping in the function's own container.
    fn map_in(&self, mapping: &IsolatedMapping) -> Result<(), MetalError> {
        let IsolatedMapping { iova, offset, size, access } = *mapping;
        let handle = self.windows.handle.further(offset);
        let loan = self.lending.lend(iova, size, access, Some(handle))?;
        let target = RangeTarget::part(&self.windows.memory, offset, size)
            .ok_or_else(|| not_lendable(self.facts.address, "its memory ends before"))?;
        self.with(|opened| Ok(opened.device.container().map_unexplained(iova, target, access)?))?;
        locked(&self.memory).insert(iova, loan);
        Ok(())
    }
}

impl OpenedDevice {
    /// A function that is as it was left, what is shown of it, and its BARs.
    fn of(device: VfioDevice) -> Result<(OpenedDevice, Image, MsixTable, Vec<BarMap>), MetalError> {
        let address = device.address();
        let mut config = vec![0; PAGE.min(device.region(region::CONFIG).size as usize)];
        device.read(region::CONFIG, 0, &mut config)?;
        let image = image::of(&config).ok_or_else(|| not_lendable(address, "it is a bridge"))?;
        let (bars, mut registers): (Vec<BarMap>, Vec<_>) = map_bars(&device)?.into_iter().unzip();
        let (table, nth) = table_of(&address.to_string(), &image, &bars)?;
        let opened = OpenedDevice { registers: registers.swap_remove(nth), device };
        Ok((opened, image, table, bars))
    }

    /// The same of one that is reset: its memory answers from here to the end, MSI-X is enabled, and each vector masked.
    fn reset(
        device: VfioDevice,
        events: &DeviceEvents,
    ) -> Result<(OpenedDevice, Image, MsixTable, Vec<BarMap>), MetalError> {
        device.reset()?;
        device.enable_memory()?;
        let (opened, image, table, bars) = OpenedDevice::of(device)?;
        opened.device.wire(InterruptIndex::Msix, 0, &[Some(events.vector.as_fd())])?;
        for kind in [InterruptIndex::Request, InterruptIndex::Error] {
            // Not every kernel and device has both.
            let _ = opened.device.wire(kind, 0, &[Some(events.given_up.as_fd())]);
        }
        opened.mask_all(table);
        Ok((opened, image, table, bars))
    }

    /// Masks every entry of the MSI-X table, which is the borrower's from then on.
    fn mask_all(&self, MsixTable { offset, entries, .. }: MsixTable) {
        for entry in 0..u64::from(entries) {
            let at = u64::from(offset) + msix::ENTRY_SIZE * entry + VECTOR_CONTROL;
            self.registers.write(at, 1);
        }
    }
}

/// Lends a device all of the borrower's memory that the NTB's window covers.
fn lend_window(
    windows: &BorrowerWindows,
    lending: &Lending,
) -> Result<BTreeMap<u64, MemoryLoan>, MetalError> {
    let Range { start, end } = windows.plan.memory;
    let loan = lending.lend(start, end - start, BOTH, Some(windows.handle.clone()))?;
    Ok(BTreeMap::from([(start, loan)]))
}

/// Lends the borrower the BARs of a device, and the device the borrower's interrupts.
fn lend_bars(
    bars: &[BarMap],
    table: MsixTable,
    lending: &Lending,
) -> Result<Vec<Loan>, MetalError> {
    let loans = bars.iter().map(|bar| lending.share_bar(bar.number, (0, bar.size)));
    // What a message says is the borrower's to write, so each of its vectors may ring from the beginning.
    let vectors = (0..table.entries).map(FunctionInterrupt::Vector);
    let loans = loans.chain(vectors.map(|vector| lending.lend_interrupt(vector)));
    Ok(loans.collect::<Result<Vec<_>, _>>()?)
}

/// Maps the BARs of a device; those of I/O ports are not lent.
fn map_bars(device: &VfioDevice) -> Result<Vec<(BarMap, Arc<MappedRegisters>)>, MetalError> {
    let mut bars = Vec::new();
    for bar in device.facts().bars.iter().filter(|bar| !bar.io) {
        let index = u32::from(bar.bar);
        let facts = device.region(index);
        let no_whole = || {
            not_lendable(device.address(), format!("BAR {} cannot be mapped as a whole", bar.bar))
        };
        if facts.size != bar.size || facts.areas != [(0, bar.size)] {
            return Err(no_whole());
        }
        let registers = device.map(index, 0, bar.size)?;
        let kind = (bar.wide, bar.prefetchable);
        let map = BarMap::new((bar.bar, bar.size), kind, registers.clone());
        bars.push((map.ok_or_else(no_whole)?, registers));
    }
    Ok(bars)
}

impl WindowDevice for PhysicalDevice {
    fn name(&self) -> String {
        self.facts.address.to_string()
    }

    fn cut(&self) -> bool {
        false
    }

    fn set_master(&self, on: bool) -> Result<(), MetalError> {
        self.with(|OpenedDevice { device, .. }| match on {
            true => Ok(device.enable(true)?),
            false => Ok(device.stop_mastering()?),
        })
    }

    fn set_device_control(&self, bits: u16) -> Result<(), MetalError> {
        let at = self.device_control.into();
        self.with(|OpenedDevice { device, .. }| {
            let mut control = [0; 2];
            device.read(region::CONFIG, at, &mut control)?;
            let value = u16::from_le_bytes(control) & !DEVICE_CONTROL_BITS | bits;
            Ok(device.write(region::CONFIG, at, &value.to_le_bytes())?)
        })
    }

    fn reset(&self) -> Result<(), MetalError> {
        self.with(|opened| {
            opened.device.stop_mastering()?;
            opened.device.reset()?;
            opened.device.enable_memory()?;
            opened.mask_all(self.table);
            Ok(())
        })
    }

    fn most_mappings(&self) -> u32 {
        MOST_MAPPINGS
    }

    /// Others of its group that are lent through the same NTB stay in that one's container, and it with them.
    fn may_isolate(&self) -> Result<(), MappingRefusal> {
        let alone = self.with(|opened| Ok(opened.device.is_alone_in_group()));
        alone.unwrap_or(false).then_some(()).ok_or(MappingRefusal::Busy)
    }

    fn isolate(&self, on: bool, bars: &mut dyn LentBars) -> Result<(), MetalError> {
        let Range { start, end } = self.windows.plan.memory;
        let window = || self.lending.count(&self.windows.handle, end - start);
        let counted = on.then(window).transpose()?;
        bars.end_bars()?;
        // Closed: the kernel stops and resets it.
        *locked(&self.opened) = None;
        self.windows.container.leave_idle_groups();
        locked(&self.memory).clear();
        let memory = if on { BTreeMap::new() } else { lend_window(&self.windows, &self.lending)? };
        let device = self.open_in(on)?;
        let (opened, _, table, new_bars) = OpenedDevice::reset(device, &self.events)?;
        if table != self.table {
            return Err(not_lendable(self.facts.address, "its MSI-X table is elsewhere now"));
        }
        bars.lend_bars(new_bars)?;
        *locked(&self.memory) = memory;
        *locked(&self.counted) = counted;
        *locked(&self.opened) = Some(opened);
        Ok(())
    }

    fn map(&self, mapping: &IsolatedMapping) -> Result<(), MappingRefusal> {
        let refused = |error| self.refusals.refuse(&self.name(), mapping, &error);
        self.map_in(mapping).map_err(refused)
    }

    fn unmap(&self, mapping: &IsolatedMapping) -> Result<(), MetalError> {
        let IsolatedMapping { iova, size, .. } = *mapping;
        self.with(|opened| Ok(opened.device.container().unmap(iova, size)?))?;
        locked(&self.memory).remove(&iova);
        Ok(())
    }

    fn trouble(&self) -> Option<&'static str> {
        let given_up = self.events.given_up.drain();
        given_up.then_some("the kernel wants it back, or it reported an error")
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.given_up.as_fd())
    }

    /// Nothing of it stops. It is not isolated.
    fn save(&self) -> std::io::Result<SavedDevice> {
        let state = MachineState { address: self.facts.address, table: self.table };
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let opened = locked(&self.opened);
        let function = opened.as_ref().map(|opened| copy(opened.device.as_fd()));
        let descriptors = MachineDescriptors {
            function: function.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()))?,
            given_up: copy(self.events.given_up.as_fd())?,
            vector: copy(self.events.vector.as_fd())?,
        };
        Ok(SavedDevice::Machine(state, descriptors))
    }
}
