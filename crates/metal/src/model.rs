//! The model of a function, as it is lent in a window: registers that it looks at, DMA through the lender's end of the
//! NTB, and interrupts that are stored to the borrower's local APICs.
//!
//! Nothing traps: the borrower's loads and stores arrive in memory of the lender. So it takes a class whose registers
//! may be polled ([`rackbus_pci::polled`]). The MSI-X table is memory too, which only this looks at: a thread waits for
//! the model's interrupts and stores the messages that their entries say.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rackbus_fabric::Loan;
use rackbus_memory::{Access, Event, Lending, MappedRegisters, Region, Revoker, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion as DeviceRegion, IrqChange};
use rackbus_pci::vfio_user::{RequestRefused, ServedDevice, SharedPart};
use rackbus_spec::pcie::{Command, header, msix};

use crate::device::{
    BarMap, ReadyDevice, VECTOR_CONTROL, WindowDevice, event, not_lendable, table_of,
};
use crate::error::MetalError;
use crate::image::{self, Image, MsixTable};
use crate::lender::locked;
use crate::messages::{MASKED, MsiEffect, message};
use crate::ntb::Ntb;
use crate::window::PAGE;

/// The BAR with the registers.
const REGISTERS: u8 = 0;
/// Between two looks whether a masked vector still is.
const UNMASKED: Duration = Duration::from_millis(1);
/// Bits of a BAR as configuration space has it: of 64 bits, prefetchable.
const WIDE: u8 = 1 << 2;
const PREFETCHABLE: u8 = 1 << 3;

/// A modelled function that is lent. Dropping it drops the model's session, which scrubs it.
pub(crate) struct ModelledDevice {
    name: String,
    vectors: Arc<Vectors>,
    thread: Option<JoinHandle<()>>,
    device: Box<dyn ServedDevice>,
    /// Takes away the memory that it reaches.
    memory: Revoker,
    /// Offset of the message control register of MSI-X.
    msix_control: u64,
    /// The BAR with the MSI-X table, which the borrower has as memory of the lender's. Its other BARs are lent by the
    /// model's session.
    _table: Loan,
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
        let plan = ntb.plan();
        let (start, length) = (plan.memory.start, plan.memory.end - plan.memory.start);
        let both = Access::READ | Access::WRITE;
        let mapped = device.map(start, length, both, Some(ntb.memory()?));
        mapped.map_err(failed("lending it the borrower's memory"))?;
        let (events, wires) = wires(place.entries)?;
        let wired = device.set_irqs(IrqChange::WireVectors(0, wires));
        wired.map_err(failed("wiring its interrupts"))?;
        let vectors = Arc::new(Vectors {
            name: name.to_owned(),
            events,
            table,
            place,
            pending: pending_bits(&image, place),
            interrupts: ntb.outbound().clone(),
            addresses: plan.interrupts.clone(),
            held: Mutex::new(vec![false; place.entries.into()]),
            cut: AtomicBool::new(false),
            stop: event()?,
            stopped: AtomicBool::new(false),
        });
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::Builder::new().name("lent interrupts".to_owned());
        let thread = thread.spawn(move || serving.deliver());
        let thread =
            thread.map_err(|cause| MetalError::System { what: "starting a thread", cause })?;
        let modelled = ModelledDevice {
            name: name.to_owned(),
            vectors,
            thread: Some(thread),
            device,
            memory,
            msix_control: image.writable.msix_control.into(),
            _table: table_loan,
        };
        modelled.answer()?;
        Ok(ReadyDevice { device: Box::new(modelled), image, bars })
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

    fn trouble(&self) -> Option<&'static str> {
        // One that has stopped does not answer.
        let answer = self.device.read(DeviceRegion::Config, header::VENDOR_ID.into(), 2);
        answer.is_err().then_some("its model has failed")
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for ModelledDevice {
    fn drop(&mut self) {
        self.vectors.stopped.store(true, Ordering::Relaxed);
        self.vectors.stop.ring();
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

/// The interrupts of a model.
struct Vectors {
    name: String,
    /// By vector; the model rings them.
    events: Vec<Event>,
    /// The BAR with the MSI-X table, which the borrower has mapped.
    table: SharedMemory,
    place: MsixTable,
    /// Where the pending bits are in it, if they are.
    pending: Option<usize>,
    /// The range that leads to the borrower's local APICs.
    interrupts: Arc<MappedRegisters>,
    addresses: std::ops::Range<u64>,
    /// Which are pending. Whoever looks at the table, or stores a message, holds this.
    held: Mutex<Vec<bool>>,
    /// Nothing is stored to the borrower any more. Changed while `held` is held.
    cut: AtomicBool,
    stop: Event,
    stopped: AtomicBool,
}

impl Vectors {
    /// Masks every entry of the table, which is the borrower's from then on, and forgets what rang before.
    fn reset(&self) {
        let mut held = locked(&self.held);
        for (vector, event) in self.events.iter().enumerate() {
            let control = self.entry(vector) + VECTOR_CONTROL as usize;
            self.table.whole().store_u32(control, MASKED.to_le(), Ordering::Release);
            event.drain();
        }
        held.fill(false);
        self.show_pending(&held);
    }

    /// Stores no messages from here on, whatever the borrower unmasks.
    fn cut(&self) {
        let _held = locked(&self.held);
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Offset of a vector's entry in its BAR.
    fn entry(&self, vector: usize) -> usize {
        self.place.offset as usize + msix::ENTRY_SIZE as usize * vector
    }

    /// Stores messages as the model rings, until it is stopped.
    fn deliver(&self) {
        let mut nowhere = false;
        let mut pending = false;
        while !self.stopped.load(Ordering::Relaxed) {
            let mut events: Vec<_> = self.events.iter().map(AsFd::as_fd).collect();
            events.push(self.stop.as_fd());
            // Nobody says when a vector is unmasked.
            Event::wait_any(&events, pending.then_some(UNMASKED.as_nanos() as u64));
            let mut held = locked(&self.held);
            if self.cut.load(Ordering::Relaxed) {
                return;
            }
            for (vector, event) in self.events.iter().enumerate() {
                if !event.drain() && !held[vector] {
                    continue;
                }
                // One that is being changed is as one that is masked.
                let outcome = match self.words(vector) {
                    Some(words) => message(words, &self.addresses),
                    None => MsiEffect::Pending,
                };
                match outcome {
                    MsiEffect::Store { offset, data } => drop(self.interrupts.write(offset, data)),
                    MsiEffect::Nowhere if !std::mem::replace(&mut nowhere, true) => {
                        tracing::warn!(device = self.name, vector, "an interrupt leads nowhere");
                    }
                    MsiEffect::Nowhere | MsiEffect::Pending => {}
                }
                held[vector] = outcome == MsiEffect::Pending;
            }
            self.show_pending(&held);
            pending = held.contains(&true);
        }
    }

    /// Stores the pending bits.
    fn show_pending(&self, pending: &[bool]) {
        let Some(start) = self.pending else { return };
        for (number, vectors) in pending.chunks(32).enumerate() {
            let bits =
                vectors.iter().rev().fold(0u32, |bits, pending| bits << 1 | u32::from(*pending));
            self.table.whole().store_u32(start + 4 * number, bits.to_le(), Ordering::Release);
        }
    }

    /// The words of a vector's entry, which two looks in a row have found: who changes an entry masks it, stores its words
    /// one by one, and unmasks it, and nobody makes it wait for a look that is under way. `None` while it is being changed.
    fn words(&self, vector: usize) -> Option<[u32; 4]> {
        let word = |at: usize| {
            let found = self.table.whole().load_u32(self.entry(vector) + 4 * at, Ordering::Acquire);
            u32::from_le(found.unwrap_or(0))
        };
        let look = || [word(3), word(0), word(1), word(2)];
        let [control, low, high, data] = look();
        let again = look();
        ([control, low, high, data] == again).then_some([low, high, data, control])
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const ADDRESSES: std::ops::Range<u64> = 0x1_0000_0000..0x1_0000_1000;

    /// Two vectors whose messages are stored to memory.
    fn vectors() -> (Arc<Vectors>, SharedMemory) {
        let apics = SharedMemory::create("apics", 4096).unwrap();
        let vectors = Vectors {
            name: "test".to_owned(),
            events: vec![Event::new().unwrap(), Event::new().unwrap()],
            table: SharedMemory::create("table", 8192).unwrap(),
            place: MsixTable { bar: 4, offset: 0, entries: 2 },
            pending: Some(4096),
            interrupts: Arc::new(MappedRegisters::map(apics.as_fd(), 4096).unwrap()),
            addresses: ADDRESSES,
            held: Mutex::new(vec![false; 2]),
            cut: AtomicBool::new(false),
            stop: Event::new().unwrap(),
            stopped: AtomicBool::new(false),
        };
        (Arc::new(vectors), apics)
    }

    fn set(vectors: &Vectors, vector: usize, entry: [u32; 4]) {
        for (number, word) in entry.into_iter().enumerate() {
            let at = vectors.entry(vector) + 4 * number;
            vectors.table.whole().store_u32(at, word, Ordering::Release).unwrap();
        }
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn interrupts_are_stored_where_their_entries_say_and_held_back_while_masked() {
        let (vectors, apics) = vectors();
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::spawn(move || serving.deliver());
        let word = |at| apics.whole().load_u32(at, Ordering::Acquire).unwrap();
        let pending = || vectors.table.whole().load_u32(4096, Ordering::Acquire).unwrap();

        vectors.events[1].ring();
        until("a masked vector is pending", || pending() == 0b10);
        set(&vectors, 1, [0x20, 1, 77, 0]);
        until("it is delivered when it is unmasked", || word(0x20) == 77);
        until("it is pending no more", || pending() == 0);

        // One that leads nowhere is lost, and holds nobody up.
        set(&vectors, 0, [0x20, 2, 5, 0]);
        vectors.events[0].ring();
        set(&vectors, 1, [0x24, 1, 78, 0]);
        vectors.events[1].ring();
        until("others are delivered", || word(0x24) == 78);
        assert_eq!((word(0x20), pending()), (77, 0));

        // A reset forgets what is pending.
        set(&vectors, 1, [0x28, 1, 79, 1]);
        vectors.events[1].ring();
        until("a masked vector is pending", || pending() == 0b10);
        vectors.reset();
        assert_eq!(pending(), 0);
        set(&vectors, 1, [0x28, 1, 80, 0]);
        set(&vectors, 0, [0x2c, 1, 81, 0]);
        vectors.events[0].ring();
        until("the other one is delivered", || word(0x2c) == 81);
        assert_eq!(word(0x28), 0, "what rang before the reset");

        vectors.stopped.store(true, Ordering::Relaxed);
        vectors.stop.ring();
        thread.join().unwrap();
    }

    #[test]
    fn a_vector_that_is_unmasked_after_the_cut_is_not_stored() {
        let (vectors, apics) = vectors();
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::spawn(move || serving.deliver());
        vectors.events[0].ring();
        let pending = || vectors.table.whole().load_u32(4096, Ordering::Acquire).unwrap();
        until("a masked vector is pending", || pending() == 0b01);
        vectors.cut();
        set(&vectors, 0, [0x20, 1, 77, 0]);
        // It looks every millisecond while one is pending.
        until("nobody delivers after the cut", || thread.is_finished());
        thread.join().unwrap();
        assert_eq!(apics.whole().load_u32(0x20, Ordering::Acquire), Some(0));
    }
}
