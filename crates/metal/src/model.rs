//! The model of a function, as it is lent in a window: registers that it looks at, DMA through the lender's end of the
//! NTB, and interrupts that are stored to the borrower's local APICs.
//!
//! Nothing traps: the borrower's loads and stores arrive in memory of the lender. So it takes a class whose registers
//! may be polled ([`rackbus_pci::polled`]). The MSI-X table is memory too, which only this looks at: a thread waits for
//! the model's interrupts and stores the messages that their entries say.
//!
//! While it is *isolated* it reaches the mappings that the borrower's kernel asks for, each by a loan of its own, and nothing of
//! the window else. It is reset in between; its registers stay where they are.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rackbus_fabric::{CountedBytes, Loan};
use rackbus_memory::space::max_mappings;
use rackbus_memory::{Access, Event, Lending, MemoryHandle, Region, Revoker, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion as DeviceRegion, IrqChange};
use rackbus_pci::vfio_user::{RequestRefused, ServedDevice, SharedPart};
use rackbus_spec::pcie::{Command, header, msix};

use crate::device::{
    BarMap, LentBars, ReadyDevice, RefusedMappings, WindowDevice, event, not_lendable, table_of,
};
use crate::error::MetalError;
use crate::image::{self, Image, MsixTable};
use crate::isolated::{IsolatedMapping, MOST_MAPPINGS, MappingRefusal};
use crate::lender::locked;
use crate::messages::ApicWindow;
use crate::ntb::Ntb;
use crate::plan::WindowPlan;
use crate::saved::{SavedDevice, VectorDescriptors, VectorState};
use crate::vectors::LentVectors;
use crate::window::PAGE;

/// The BAR with the registers.
const REGISTERS: u8 = 0;
/// The step in which a model is given all of the window.
const LENDING: &str = "lending it the borrower's memory";
/// Bits of a BAR as configuration space has it: of 64 bits, prefetchable.
const WIDE: u8 = 1 << 2;
const PREFETCHABLE: u8 = 1 << 3;

/// A modelled function that is lent. Dropping it drops the model's session, which scrubs it.
pub(crate) struct ModelledDevice {
    name: String,
    vectors: Arc<LentVectors>,
    thread: Option<JoinHandle<()>>,
    device: Box<dyn ServedDevice>,
    /// Takes away the memory that it reaches.
    memory: Revoker,
    window: ModelWindow,
    lending: Lending,
    refusals: RefusedMappings,
    /// The window, while it is isolated: it is to have all of that again, whatever else its borrower lends meanwhile.
    counted: Mutex<Option<CountedBytes>>,
    /// Offset of the message control register of MSI-X.
    msix_control: u64,
    /// The BAR with the MSI-X table, which the borrower has as memory of the lender's. Its other BARs are lent by the
    /// model's session.
    _table: Loan,
}

/// The borrower's memory, as a model reaches it.
struct ModelWindow {
    plan: WindowPlan,
    /// What is behind all of the plan's range of memory.
    memory: MemoryHandle,
}

impl ModelWindow {
    fn of(ntb: &Ntb) -> Result<ModelWindow, MetalError> {
        Ok(ModelWindow { plan: ntb.plan().clone(), memory: ntb.memory()? })
    }

    /// How many bytes it has.
    fn length(&self) -> u64 {
        self.plan.memory.end - self.plan.memory.start
    }

    /// Has a model reach all of it.
    fn lend_whole(&self, device: &dyn ServedDevice) -> Result<(), RequestRefused> {
        let (start, length) = (self.plan.memory.start, self.length());
        device.map(start, length, Access::READ | Access::WRITE, Some(self.memory.clone()))
    }
}

impl ModelledDevice {
    /// Makes a model ready to be lent through an NTB. `lending` is its session's.
    ///
    /// # Errors
    /// When its registers cannot be shared as memory, or the borrower's memory cannot be lent to it.
    pub fn prepare(
        name: &str,
        (device, memory): (Box<dyn ServedDevice>, Revoker),
        ntb: &Ntb,
        lending: &Lending,
    ) -> Result<ReadyDevice, MetalError> {
        let failed = |what| {
            let device = name.to_owned();
            move |cause: RequestRefused| MetalError::Model { device, what, cause }
        };
        let config = device.read(DeviceRegion::Config, 0, PAGE);
        let config = config.map_err(failed("reading its configuration space"))?;
        let image = image::of(&config).ok_or_else(|| not_lendable(name, "it is a bridge"))?;
        let (bars, table) = bars_of(name, &*device, &config, &image)?;
        let (place, nth) = table_of(name, &image, &bars)?;
        let table_loan = lending.share_bar(place.bar, (0, bars[nth].size))?;
        let window = ModelWindow::of(ntb)?;
        window.lend_whole(&*device).map_err(failed(LENDING))?;
        let (events, wires) = wires(place.entries)?;
        let wired = device.set_irqs(IrqChange::WireVectors(0, wires));
        wired.map_err(failed("wiring its interrupts"))?;
        let table = (table, place, pending_bits(&image, place));
        let vectors = LentVectors::new(name, events, table, ntb)?;
        vectors.reset();
        let msix_control = image.writable.msix_control;
        let parts = (device, memory, table_loan);
        let reached = (window, lending.clone());
        let modelled = ModelledDevice::serving(name, parts, reached, vectors, msix_control)?;
        modelled.answer()?;
        Ok(ReadyDevice { device: Box::new(modelled), image, bars })
    }

    /// The model that goes on with the state of one that another process had lent through an NTB. It reaches the borrower's
    /// memory, and rings its vectors, as that one did.
    ///
    /// # Errors
    /// When what came of its vectors is not what the state says, or its table is not lent here.
    pub fn again(
        name: &str,
        (device, memory): (Box<dyn ServedDevice>, Revoker),
        ntb: &Ntb,
        lending: &Lending,
        (state, descriptors): (&VectorState, VectorDescriptors),
        msix_control: u16,
    ) -> Result<ModelledDevice, MetalError> {
        let vectors = LentVectors::again(name, state, descriptors, ntb)?;
        let table_loan = lending.share_bar(state.table().bar, (0, state.table_bytes))?;
        let (parts, reached) =
            ((device, memory, table_loan), (ModelWindow::of(ntb)?, lending.clone()));
        ModelledDevice::serving(name, parts, reached, vectors, msix_control)
    }

    /// A model whose interrupts are stored from now on.
    fn serving(
        name: &str,
        (device, memory, table): (Box<dyn ServedDevice>, Revoker, Loan),
        (window, lending): (ModelWindow, Lending),
        vectors: LentVectors,
        msix_control: u16,
    ) -> Result<ModelledDevice, MetalError> {
        let vectors = Arc::new(vectors);
        let serving = vectors.clone();
        let thread = std::thread::Builder::new().name("lent interrupts".to_owned());
        let thread = thread.spawn(move || serving.deliver());
        let thread =
            thread.map_err(|cause| MetalError::System { what: "starting a thread", cause })?;
        Ok(ModelledDevice {
            name: name.to_owned(),
            vectors,
            thread: Some(thread),
            device,
            memory,
            window,
            lending,
            refusals: RefusedMappings::default(),
            counted: Mutex::default(),
            msix_control: msix_control.into(),
            _table: table,
        })
    }

    /// Has its memory answer and its vectors ring, as after a reset they do not.
    fn answer(&self) -> Result<(), MetalError> {
        self.set_command(Command::MEMORY_SPACE)?;
        self.write(self.msix_control, msix::CONTROL_ENABLE)
    }

    fn set_command(&self, command: Command) -> Result<(), MetalError> {
        self.write(header::COMMAND.into(), command.bits())
    }

    /// Writes a register of its configuration space.
    fn write(&self, at: u64, value: u16) -> Result<(), MetalError> {
        let bytes = value.to_le_bytes().to_vec();
        let written = self.device.write(DeviceRegion::Config, at, bytes, false);
        written.map_err(|cause| self.failed("writing its configuration space", cause))
    }

    /// Makes a mapping of the borrower's memory.
    fn map_in(&self, mapping: &IsolatedMapping) -> Result<(), MetalError> {
        let IsolatedMapping { iova, offset, size, access } = *mapping;
        let memory = self.window.memory.further(offset);
        // The model is asked for nothing that the borrower's host does not lend.
        drop(self.lending.count(&memory, size)?);
        let mapped = self.device.map(iova, size, access, Some(memory));
        mapped.map_err(|cause| self.failed("a mapping", cause))
    }

    fn failed(&self, what: &'static str, cause: RequestRefused) -> MetalError {
        MetalError::Model { device: self.name.clone(), what, cause }
    }
}

impl WindowDevice for ModelledDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn cut(&self) -> bool {
        self.vectors.cut();
        self.memory.revoke();
        *locked(&self.counted) = None;
        true
    }

    fn set_master(&self, on: bool) -> Result<(), MetalError> {
        let master = if on { Command::BUS_MASTER } else { Command::empty() };
        self.set_command(Command::MEMORY_SPACE | master)
    }

    /// Its payloads are no packets of a bus.
    fn set_device_control(&self, _bits: u16) -> Result<(), MetalError> {
        Ok(())
    }

    fn reset(&self) -> Result<(), MetalError> {
        self.device.reset().map_err(|cause| self.failed("its reset", cause))?;
        self.vectors.reset();
        self.answer()
    }

    /// As many as the system lets the model's process have of them.
    fn most_mappings(&self) -> u32 {
        u32::try_from(max_mappings()).unwrap_or(u32::MAX).min(MOST_MAPPINGS)
    }

    fn may_isolate(&self) -> Result<(), MappingRefusal> {
        let apics = ApicWindow::isolated(&self.window.plan);
        apics.map(drop).ok_or(MappingRefusal::Unsupported)
    }

    /// What its borrower's processors have of it stays: they are the same registers.
    fn isolate(&self, on: bool, _bars: &mut dyn LentBars) -> Result<(), MetalError> {
        let plan = &self.window.plan;
        let apics = if on { ApicWindow::isolated(plan) } else { Some(ApicWindow::whole(plan)) };
        let apics = apics
            .ok_or_else(|| not_lendable(&self.name, "the NTB's window 1 is smaller than 1 MiB"))?;
        let window = &self.window;
        let counted =
            on.then(|| self.lending.count(&window.memory, window.length())).transpose()?;
        // It masters the bus no more then, and nothing is under way.
        self.device.reset().map_err(|cause| self.failed("its reset", cause))?;
        let ended = self.device.unmap_all();
        ended.map_err(|cause| self.failed("taking the borrower's memory away", cause))?;
        if !on {
            let lent = self.window.lend_whole(&*self.device);
            lent.map_err(|cause| self.failed(LENDING, cause))?;
        }
        *locked(&self.counted) = counted;
        self.vectors.lead(apics);
        self.answer()
    }

    fn map(&self, mapping: &IsolatedMapping) -> Result<(), MappingRefusal> {
        self.map_in(mapping).map_err(|error| self.refusals.refuse(&self.name, mapping, &error))
    }

    fn unmap(&self, mapping: &IsolatedMapping) -> Result<(), MetalError> {
        let ended = self.device.unmap(mapping.iova, mapping.size);
        ended.map_err(|cause| self.failed("ending a mapping", cause))
    }

    fn trouble(&self) -> Option<&'static str> {
        // One that has stopped does not answer.
        let answer = self.device.read(DeviceRegion::Config, header::VENDOR_ID.into(), 2);
        answer.is_err().then_some("its model has failed")
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn pause(&self, on: bool) {
        self.vectors.pause(on);
    }

    fn save(&self) -> std::io::Result<SavedDevice> {
        let (state, descriptors) = self.vectors.save()?;
        Ok(SavedDevice::Model(state, descriptors))
    }
}

impl Drop for ModelledDevice {
    fn drop(&mut self) {
        self.vectors.stop();
        // One that panicked has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// An event for each vector, and the descriptors by which the model rings them.
#[allow(clippy::type_complexity, reason = "both halves of the same wires")]
fn wires(entries: u16) -> Result<(Vec<Event>, Vec<Option<OwnedFd>>), MetalError> {
    let events: Vec<Event> = (0..entries).map(|_| event()).collect::<Result<_, _>>()?;
    let wires = events.iter().map(|event| event.as_fd().try_clone_to_owned().map(Some));
    let failed = |cause| MetalError::System { what: "a descriptor for an interrupt", cause };
    let wires = wires.collect::<Result<_, _>>().map_err(failed)?;
    Ok((events, wires))
}

/// Its BARs as memory: the registers that it looks at, an MSI-X table of the lender's, and what may be mapped of it
/// anyway.
fn bars_of(
    name: &str,
    device: &dyn ServedDevice,
    config: &[u8],
    image: &Image,
) -> Result<(Vec<BarMap>, SharedMemory), MetalError> {
    let shape = device.shape();
    let mut table = None;
    let mut bars = Vec::new();
    for number in 0..6u8 {
        let facts = &shape.regions[usize::from(number)];
        let size = facts.size;
        if size == 0 {
            continue;
        }
        let refused = |reason: &str| not_lendable(name, format!("BAR {number} {reason}"));
        let low = config[0x10 + 4 * usize::from(number)];
        let kind = (low & WIDE != 0, low & PREFETCHABLE != 0);
        let of_table = image.msix.is_some_and(|msix| msix.bar == number);
        let region = match &facts.mappable {
            _ if number == REGISTERS => registers(name, device, size)?,
            _ if of_table => {
                let memory = SharedMemory::create("msix", size)?;
                let region = memory.region().clone();
                table = Some(memory);
                region
            }
            Some(part) => {
                whole(part, size).ok_or_else(|| refused("cannot be mapped as a whole"))??
            }
            None => return Err(refused("has registers that are only accessible by messages")),
        };
        let bar = BarMap::new((number, size), kind, region);
        bars.push(bar.ok_or_else(|| refused("has no size that a window has"))?);
    }
    let none = "its MSI-X table is beside registers that are polled";
    Ok((bars, table.ok_or_else(|| not_lendable(name, none))?))
}

/// The registers that a model looks at.
fn registers(name: &str, device: &dyn ServedDevice, size: u64) -> Result<Arc<Region>, MetalError> {
    let polled = device.registers(REGISTERS);
    let (file, length) = polled.map_err(|error| not_lendable(name, error.to_string()))?;
    if length != size {
        return Err(not_lendable(name, "BAR 0 is more than its registers"));
    }
    let both = Access::READ | Access::WRITE;
    Ok(Arc::new(Region::map(file.as_fd(), 0, length, both)?))
}

/// A BAR that may be mapped; `None` when a part of it may not.
fn whole(part: &SharedPart, size: u64) -> Option<Result<Arc<Region>, MetalError>> {
    (part.areas == [(0, size)]).then(|| {
        let failed = |cause| MetalError::System { what: "a descriptor for a BAR", cause };
        let file = part.memory.descriptor().map_err(failed)?;
        let both = Access::READ | Access::WRITE;
        Ok(Arc::new(Region::map_stored(file.as_fd(), part.offset, size, both)?))
    })
}

/// Where the pending bits are, if they are in the BAR of the table.
fn pending_bits(image: &Image, table: MsixTable) -> Option<usize> {
    let at = usize::from(image.writable.msix_control - msix::CONTROL + msix::PBA);
    let word = image.bytes.get(at..at + 4)?.try_into().map(u32::from_le_bytes).ok()?;
    (word & 7 == u32::from(table.bar)).then_some((word & !7) as usize)
}

#[cfg(test)]
mod tests;
