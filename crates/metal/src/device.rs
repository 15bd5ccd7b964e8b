//! What is lent in a window: a function of this machine, or the model of one.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rackbus_fabric::{FunctionInterrupt, Loan};
use rackbus_memory::{Access, Event, Lending, MappedRegisters, MemoryHandle};
use rackbus_spec::pcie::msix;
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{Facts, InterruptIndex, RangeTarget, VfioDevice};

use crate::error::MetalError;
use crate::image::{self, Image, MsixTable};
use crate::ntb::Ntb;
use crate::requests::DEVICE_CONTROL_BITS;
use crate::saved::{MachineDescriptors, MachineState, SavedDevice, impossible};
use crate::window::{BAR_64, BAR_PREFETCH, PAGE};

/// Behind this offset of an entry of the MSI-X table is its mask.
pub(crate) const VECTOR_CONTROL: u64 = 12;

/// What the borrower asks of a lent device. Those that change it come one at a time.
pub(crate) trait WindowDevice: Send + Sync {
    /// Its name, for people: the address of a function of this machine, or the device's name in the rack.
    fn name(&self) -> String;

    /// Takes the borrower's memory away from it at once, whatever it does; false where only
    /// [`set_master`](WindowDevice::set_master) does that. From any thread.
    fn cut(&self) -> bool;

    /// Lets it master the bus and answer at its memory, or the latter alone. On return what was under way has ended
    /// when it may not.
    ///
    /// # Errors
    /// When it does not answer.
    fn set_master(&self, on: bool) -> Result<(), MetalError>;

    /// Sets the bits of the device control register that are the borrower's.
    ///
    /// # Errors
    /// When it does not answer.
    fn set_device_control(&self, bits: u16) -> Result<(), MetalError>;

    /// Resets it. It is as it was when it was lent then: its memory answers, it does not master the bus, and its vectors
    /// are masked.
    ///
    /// # Errors
    /// When it cannot be reset.
    fn reset(&self) -> Result<(), MetalError>;

    /// Why it is of no more use, if it is not. Asked some times a second, and when the [alarm](WindowDevice::alarm) rings.
    fn trouble(&self) -> Option<&'static str>;

    /// Rings when it may be of no more use.
    fn alarm(&self) -> Option<BorrowedFd<'_>>;

    /// Does nothing by itself for its borrower, or goes on with what came meanwhile: another process may go on with it.
    fn pause(&self, _on: bool) {}

    /// As another process goes on with it, beside what the class of a model saves.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn save(&self) -> std::io::Result<SavedDevice>;
}

/// A BAR as memory.
#[derive(Debug)]
pub(crate) struct BarMap {
    /// Its number, 0 to 5.
    pub number: u8,
    /// Its bytes, a power of two.
    pub size: u64,
    /// Its kind: [`BAR_64`] and [`BAR_PREFETCH`], or none.
    pub flags: u32,
    /// The memory or registers that the borrower's accesses reach.
    pub target: RangeTarget,
}

impl BarMap {
    /// `None` for sizes that no BAR in a window has.
    pub fn new(
        (number, size): (u8, u64),
        (wide, prefetchable): (bool, bool),
        target: impl Into<RangeTarget>,
    ) -> Option<BarMap> {
        if !size.is_power_of_two() || size < PAGE as u64 {
            return None;
        }
        let wide = if wide { BAR_64 } else { 0 };
        let prefetch = if prefetchable { BAR_PREFETCH } else { 0 };
        Some(BarMap { number, size, flags: wide | prefetch, target: target.into() })
    }
}

/// A device that is ready to be lent, and what its borrower sees of it.
pub(crate) struct ReadyDevice {
    pub device: Box<dyn WindowDevice>,
    pub image: Image,
    pub bars: Vec<BarMap>,
}

pub(crate) fn not_lendable(device: impl ToString, reason: impl Into<String>) -> MetalError {
    MetalError::NotLendable { device: device.to_string(), reason: reason.into() }
}

pub(crate) fn event() -> Result<Event, MetalError> {
    Event::new().map_err(|cause| MetalError::System { what: "making an event", cause })
}

/// Where the MSI-X table of a device is that has these BARs, and which of them has it.
pub(crate) fn table_of(
    device: &str,
    image: &Image,
    bars: &[BarMap],
) -> Result<(MsixTable, usize), MetalError> {
    let none = "it has no MSI-X, and other interrupts do not pass an NTB";
    let table = image.msix.ok_or_else(|| not_lendable(device, none))?;
    let end = u64::from(table.offset) + msix::ENTRY_SIZE * u64::from(table.entries);
    let nth = bars.iter().position(|bar| bar.number == table.bar && end <= bar.size);
    Ok((table, nth.ok_or_else(|| not_lendable(device, "its MSI-X table is in no BAR"))?))
}

/// A function of this machine, held by VFIO.
pub(crate) struct PhysicalDevice {
    device: VfioDevice,
    /// The registers of the BAR with the MSI-X table, and where it is in it.
    table: (Arc<MappedRegisters>, MsixTable),
    /// Offset of the device control register, 0 where there is none.
    device_control: u16,
    /// Rings when the kernel wants the device back, or it reported an error that it cannot correct.
    given_up: Event,
    /// Enables MSI-X in the device; nothing rings it, as the table is the borrower's.
    vector: Event,
    /// The borrower's memory: what the IOMMU lets its DMA through to.
    _memory: Loan<Option<MemoryHandle>>,
    /// Its BARs, which the borrower's processors reach through the window, and its interrupts, which it stores through the
    /// NTB's window 1 to the borrower's local APICs.
    _loans: Vec<Loan>,
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
        let memory = lend_memory(ntb, lending)?;
        // Reset before anybody has it, and its memory on from here to the end.
        device.reset()?;
        device.enable_memory()?;
        let mut config = vec![0; PAGE.min(device.region(region::CONFIG).size as usize)];
        device.read(region::CONFIG, 0, &mut config)?;
        let image = image::of(&config).ok_or_else(|| not_lendable(address, "it is a bridge"))?;
        let (bars, mut registers): (Vec<BarMap>, Vec<_>) = map_bars(&device)?.into_iter().unzip();
        let (table, nth) = table_of(&address.to_string(), &image, &bars)?;
        let loans = lend_bars(&bars, table, lending)?;
        let registers = registers.swap_remove(nth);
        let (given_up, vector) = (event()?, event()?);
        device.wire(InterruptIndex::Msix, 0, &[Some(vector.as_fd())])?;
        for kind in [InterruptIndex::Request, InterruptIndex::Error] {
            // Not every kernel and device has both.
            let _ = device.wire(kind, 0, &[Some(given_up.as_fd())]);
        }
        let device = PhysicalDevice {
            table: (registers, table),
            device_control: image.writable.device_control,
            given_up,
            vector,
            _memory: memory,
            _loans: loans,
            device,
        };
        device.mask_all();
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
        let device = VfioDevice::inherited(ntb.container(), facts, function)?;
        let memory = lend_memory(ntb, lending)?;
        let mut config = vec![0; PAGE.min(device.region(region::CONFIG).size as usize)];
        device.read(region::CONFIG, 0, &mut config)?;
        let image =
            image::of(&config).ok_or_else(|| not_lendable(device.address(), "it is a bridge"))?;
        let (bars, mut registers): (Vec<BarMap>, Vec<_>) = map_bars(&device)?.into_iter().unzip();
        let (table, nth) = table_of(&device.address().to_string(), &image, &bars)?;
        if table != state.table {
            return Err(impossible("where the MSI-X table of a function is"));
        }
        let loans = lend_bars(&bars, table, lending)?;
        let failed = |cause| MetalError::System { what: "an event that was passed on", cause };
        let adopt = |event| Event::adopt(event).map_err(failed);
        Ok(PhysicalDevice {
            table: (registers.swap_remove(nth), table),
            device_control: image.writable.device_control,
            given_up: adopt(given_up)?,
            vector: adopt(vector)?,
            _memory: memory,
            _loans: loans,
            device,
        })
    }

    /// Masks every entry of the MSI-X table, which is the borrower's from then on.
    fn mask_all(&self) {
        let (registers, MsixTable { offset, entries, .. }) = &self.table;
        for entry in 0..u64::from(*entries) {
            let at = u64::from(*offset) + msix::ENTRY_SIZE * entry + VECTOR_CONTROL;
            registers.write(at, 1);
        }
    }
}

/// Lends a device the borrower's memory, which it reaches through the NTB.
fn lend_memory(ntb: &Ntb, lending: &Lending) -> Result<Loan<Option<MemoryHandle>>, MetalError> {
    let Range { start, end } = ntb.plan().memory;
    let both = Access::READ | Access::WRITE;
    Ok(lending.lend(start, end - start, both, Some(ntb.memory()?))?)
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
        self.device.address().to_string()
    }

    fn cut(&self) -> bool {
        false
    }

    fn set_master(&self, on: bool) -> Result<(), MetalError> {
        match on {
            true => Ok(self.device.enable(true)?),
            false => Ok(self.device.stop_mastering()?),
        }
    }

    fn set_device_control(&self, bits: u16) -> Result<(), MetalError> {
        let at = self.device_control.into();
        let mut control = [0; 2];
        self.device.read(region::CONFIG, at, &mut control)?;
        let value = u16::from_le_bytes(control) & !DEVICE_CONTROL_BITS | bits;
        Ok(self.device.write(region::CONFIG, at, &value.to_le_bytes())?)
    }

    fn reset(&self) -> Result<(), MetalError> {
        self.device.stop_mastering()?;
        self.device.reset()?;
        self.device.enable_memory()?;
        self.mask_all();
        Ok(())
    }

    fn trouble(&self) -> Option<&'static str> {
        self.given_up.drain().then_some("the kernel wants it back, or it reported an error")
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        Some(self.given_up.as_fd())
    }

    /// Nothing of it stops.
    fn save(&self) -> std::io::Result<SavedDevice> {
        let state = MachineState { address: self.device.address(), table: self.table.1 };
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let descriptors = MachineDescriptors {
            function: copy(self.device.as_fd())?,
            given_up: copy(self.given_up.as_fd())?,
            vector: copy(self.vector.as_fd())?,
        };
        Ok(SavedDevice::Machine(state, descriptors))
    }
}
