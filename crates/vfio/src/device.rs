//! A function in use: regions, configuration space, interrupts, resets.

mod inherited;

pub use inherited::PassedOnFunction;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rackbus_memory::{MappedRegisters, MemoryHandle};
use rackbus_spec::pcie::{Command, header};
use rackbus_spec::vfio_user::{
    CAP_SPARSE_MMAP, DeviceInfoFlags, IrqInfo, IrqInfoFlags, IrqSetFlags, RegionInfo,
    RegionInfoFlags, irq, region,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::container::Container;
use crate::error::{VfioError, refused};
use crate::facts::{Facts, PciAddress, Sysfs};
use crate::kernel;
use crate::reset::ResetMethod;

/// Bytes of a page, of which registers are mapped in whole ones.
const PAGE: u64 = 4096;

/// A region of a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegionFacts {
    /// Its bytes; 0 for one that is not there.
    pub size: u64,
    /// Whether it can be read.
    pub readable: bool,
    /// Whether it can be written.
    pub writable: bool,
    /// The parts that can be mapped, each an offset and a length.
    pub areas: Vec<(u64, u64)>,
    /// Where it begins in the function's file.
    pub offset: u64,
}

/// The kind of interrupts of a function, by VFIO's index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum InterruptIndex {
    /// The interrupt pin, one vector, which the kernel masks at each interrupt.
    Intx,
    /// Message signalled interrupts, up to 32 vectors.
    Msi,
    /// Message signalled interrupts by a table in a BAR, up to 2048 vectors.
    Msix,
    /// Rings when the function reports an error that it cannot correct (AER).
    Error,
    /// Rings when the kernel wants the function back: it is being removed or unbound.
    Request,
}

impl InterruptIndex {
    fn index(self) -> u32 {
        match self {
            InterruptIndex::Intx => irq::INTX,
            InterruptIndex::Msi => irq::MSI,
            InterruptIndex::Msix => irq::MSIX,
            InterruptIndex::Error => irq::ERR,
            InterruptIndex::Request => irq::REQ,
        }
    }
}

/// A function that is bound to `vfio-pci`, opened. When it is closed, it is stopped, and the kernel resets it.
#[derive(Debug)]
pub struct VfioDevice {
    /// Closed before the group and the container.
    file: File,
    /// Its group, of which the container keeps the other reference.
    group: Arc<File>,
    container: Arc<Container>,
    facts: Facts,
    regions: Vec<RegionFacts>,
    irqs: Vec<IrqInfo>,
    resets_itself: bool,
}

impl VfioDevice {
    /// Opens a function into a container: from then on it reaches what is mapped there, once it masters the bus.
    ///
    /// # Errors
    /// When it is not bound to `vfio-pci`, its group cannot be obtained, or the kernel refuses.
    pub fn open(container: &Arc<Container>, facts: Facts) -> Result<VfioDevice, VfioError> {
        let address = facts.address;
        if !facts.driver.as_deref().is_some_and(crate::facts::is_vfio) {
            let found = facts.driver.clone().unwrap_or_else(|| "no driver".to_owned());
            return Err(VfioError::NotBound { address, wanted: "vfio-pci".to_owned(), found });
        }
        let group = container.add_group(&facts)?;
        let file = kernel::device(&group, &address.to_string());
        let file = file.map_err(refused("opening", address))?;
        VfioDevice::describe(file, group, container.clone(), facts)
    }

    /// The function of a file, by what the kernel says of it.
    fn describe(
        file: File,
        group: Arc<File>,
        container: Arc<Container>,
        facts: Facts,
    ) -> Result<VfioDevice, VfioError> {
        let address = facts.address;
        let info = kernel::device_info(&file).map_err(refused("the description", address))?;
        let mut regions = Vec::new();
        for index in 0..region::COUNT.min(info.num_regions) {
            regions.push(region(&file, index).map_err(refused("a region", address))?);
        }
        regions.resize(region::COUNT as usize, RegionFacts::default());
        let mut irqs = Vec::new();
        for index in 0..irq::COUNT {
            // Not every function has all kinds.
            let none = IrqInfo { argsz: 0, flags: 0, index, count: 0 };
            irqs.push(kernel::irq_info(&file, index).unwrap_or(none));
        }
        let resets_itself = info.flags & DeviceInfoFlags::RESET.bits() != 0;
        Ok(VfioDevice { file, group, container, facts, regions, irqs, resets_itself })
    }

    /// What sysfs said of it when it was opened.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// PCI address of the device.
    pub fn address(&self) -> PciAddress {
        self.facts.address
    }

    /// The container that it is in.
    pub fn container(&self) -> &Arc<Container> {
        &self.container
    }

    /// Whether no other function of its group is open here.
    pub fn is_alone_in_group(&self) -> bool {
        // Its own reference, and the container's.
        Arc::strong_count(&self.group) <= 2
    }

    /// A region by its number; one that is not there has no bytes.
    pub fn region(&self, index: u32) -> &RegionFacts {
        const NONE: &RegionFacts = &RegionFacts {
            size: 0,
            readable: false,
            writable: false,
            areas: Vec::new(),
            offset: 0,
        };
        usize::try_from(index).ok().and_then(|index| self.regions.get(index)).unwrap_or(NONE)
    }

    /// How many vectors it has of a kind of interrupts.
    pub fn vectors(&self, kind: InterruptIndex) -> u32 {
        self.irqs.get(kind.index() as usize).map_or(0, |info| info.count)
    }

    /// Whether vectors of this kind can be added while others are in use.
    pub fn grows(&self, kind: InterruptIndex) -> bool {
        let info = self.irqs.get(kind.index() as usize);
        info.is_some_and(|info| info.flags & IrqInfoFlags::NORESIZE.bits() == 0)
    }

    /// Reads `data.len()` bytes of a region of the function from `offset` on.
    ///
    /// # Errors
    /// When the range is not inside of it, or the function does not answer: its memory is off, or it is gone.
    pub fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), VfioError> {
        let at = self.at(region, offset, data.len())?;
        let read = self.file.read_exact_at(data, at);
        read.map_err(|error| refused("reading", self.address())(errno(&error)))
    }

    /// Writes `data` to a region of the function from `offset` on.
    ///
    /// # Errors
    /// As [`read`](VfioDevice::read).
    pub fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), VfioError> {
        let at = self.at(region, offset, data.len())?;
        let written = self.file.write_all_at(data, at);
        written.map_err(|error| refused("writing", self.address())(errno(&error)))
    }

    fn at(&self, region: u32, offset: u64, length: usize) -> Result<u64, VfioError> {
        let facts = self.region(region);
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= facts.size);
        match inside {
            true => Ok(facts.offset + offset),
            false => Err(VfioError::OutOfRegion { region, offset, length }),
        }
    }

    /// Maps a part of a region's registers, whole pages. The mapping keeps the function open by itself; the kernel
    /// takes its pages away while the function's memory is off, and at each reset.
    ///
    /// # Errors
    /// When that part cannot be mapped.
    pub fn map(
        &self,
        region: u32,
        offset: u64,
        length: u64,
    ) -> Result<Arc<MappedRegisters>, VfioError> {
        let facts = self.region(region);
        let inside = |(start, size): &(u64, u64)| {
            let end = offset.checked_add(length);
            offset >= *start && end.is_some_and(|end| end <= start.saturating_add(*size))
        };
        if !facts.areas.iter().any(inside) {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            return Err(VfioError::OutOfRegion { region, offset, length });
        }
        let registers =
            MappedRegisters::map_device(self.file.as_fd(), facts.offset + offset, length)?;
        Ok(Arc::new(registers))
    }

    /// A region that is memory, for functions that are modelled here to reach. It keeps the function open by itself.
    ///
    /// # Errors
    /// When it cannot be mapped as a whole, or the process has no descriptors left.
    pub fn memory(&self, region: u32) -> Result<MemoryHandle, VfioError> {
        let facts = self.region(region);
        if facts.size == 0 || facts.areas != [(0, facts.size)] {
            let length = usize::try_from(facts.size).unwrap_or(usize::MAX);
            return Err(VfioError::OutOfRegion { region, offset: 0, length });
        }
        let file = self.file.try_clone();
        let file = file.map_err(|error| refused("a descriptor", self.address())(errno(&error)))?;
        let PciAddress { domain, bus, device, function } = self.address();
        let place = u64::from(bus) << 8 | u64::from(device << 3 | function);
        let number = u64::from(domain) << 32 | place << 8 | u64::from(region);
        Ok(MemoryHandle::of_device(file, number, facts.offset))
    }

    /// Lets it master the bus and answer at its memory, or neither.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn enable(&self, on: bool) -> Result<(), VfioError> {
        let bits = (Command::MEMORY_SPACE | Command::BUS_MASTER).bits();
        self.command(|command| if on { command | bits } else { command & !bits })
    }

    /// Lets it answer at its memory, and not master the bus.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn enable_memory(&self) -> Result<(), VfioError> {
        let (memory, master) = (Command::MEMORY_SPACE.bits(), Command::BUS_MASTER.bits());
        self.command(|command| command & !master | memory)
    }

    /// Takes its bus mastering away: what is under way ends, and nothing begins.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn stop_mastering(&self) -> Result<(), VfioError> {
        self.command(|command| command & !Command::BUS_MASTER.bits())
    }

    fn command(&self, change: impl Fn(u16) -> u16) -> Result<(), VfioError> {
        let mut bytes = [0; 2];
        self.read(region::CONFIG, header::COMMAND.into(), &mut bytes)?;
        let command = change(u16::from_le_bytes(bytes));
        self.write(region::CONFIG, header::COMMAND.into(), &command.to_le_bytes())
    }

    /// Wires vectors from `start` on to eventfds, which the kernel signals; `None` takes a vector's wire away. The
    /// first wire of a kind enables it: MSI or MSI-X with as many vectors as are named here, and nothing else may
    /// be wired then.
    ///
    /// # Errors
    /// When the kernel refuses: there are fewer vectors, another kind is enabled, or it is no eventfd.
    pub fn wire(
        &self,
        kind: InterruptIndex,
        start: u32,
        events: &[Option<BorrowedFd<'_>>],
    ) -> Result<(), VfioError> {
        let at = (kind.index(), start);
        let wired = kernel::wire(&self.file, at, IrqSetFlags::ACTION_TRIGGER, events);
        wired.map_err(refused("interrupts", self.address()))
    }

    /// Disables a kind of interrupts.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unwire(&self, kind: InterruptIndex) -> Result<(), VfioError> {
        self.set_irqs(kind, (0, 0), IrqSetFlags::ACTION_TRIGGER)
    }

    /// Signals a vector by software.
    ///
    /// # Errors
    /// When it is not wired.
    pub fn fire(&self, kind: InterruptIndex, vector: u32) -> Result<(), VfioError> {
        self.set_irqs(kind, (vector, 1), IrqSetFlags::ACTION_TRIGGER)
    }

    /// Masks the pin, or unmasks it. It masks itself when it rings.
    ///
    /// # Errors
    /// When it is not wired.
    pub fn mask_intx(&self, masked: bool) -> Result<(), VfioError> {
        let action = if masked { IrqSetFlags::ACTION_MASK } else { IrqSetFlags::ACTION_UNMASK };
        self.set_irqs(InterruptIndex::Intx, (0, 1), action)
    }

    /// Has the pin unmasked whenever `event` rings.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unmask_intx_by(&self, event: BorrowedFd<'_>) -> Result<(), VfioError> {
        let at = (irq::INTX, 0);
        let wired = kernel::wire(&self.file, at, IrqSetFlags::ACTION_UNMASK, &[Some(event)]);
        wired.map_err(refused("interrupts", self.address()))
    }

    fn set_irqs(
        &self,
        kind: InterruptIndex,
        vectors: (u32, u32),
        action: IrqSetFlags,
    ) -> Result<(), VfioError> {
        let set = kernel::set_irqs(&self.file, kind.index(), vectors, action);
        set.map_err(refused("interrupts", self.address()))
    }

    /// Whether it is reset by itself, and not with its bus.
    pub fn resets_itself(&self) -> bool {
        self.resets_itself
    }

    /// Resets it, by itself or with its bus. Registers that are mapped are taken away until its memory is on again.
    ///
    /// # Errors
    /// When there is no way, or others are on its bus that are not in this container.
    pub fn reset(&self) -> Result<ResetMethod, VfioError> {
        if self.resets_itself {
            let reset = kernel::reset(&self.file);
            reset.map_err(refused("the reset", self.address()))?;
            return Ok(ResetMethod::of_kernel(&self.facts.reset_methods));
        }
        let none = |_| VfioError::NoReset(self.address());
        let dependents = kernel::dependents(&self.file).map_err(none)?;
        let groups = self.container.groups();
        let held: Vec<BorrowedFd<'_>> = groups
            .iter()
            .filter(|(number, _)| dependents.iter().any(|dependent| dependent.group == **number))
            .map(|(_, file)| file.as_fd())
            .collect();
        kernel::hot_reset(&self.file, &held).map_err(none)?;
        Ok(ResetMethod::Bus)
    }
}

impl VfioDevice {
    /// Opens a function by its address into a container of its own.
    ///
    /// # Errors
    /// As [`open`](VfioDevice::open).
    pub fn open_alone(address: PciAddress) -> Result<VfioDevice, VfioError> {
        let facts = Sysfs::here().facts(address)?;
        VfioDevice::open(&Arc::new(Container::new()?), facts)
    }
}

/// The function's file: whoever has it may do all that VFIO lets a program do with the function, apart from what
/// it reaches. It keeps the function open.
impl AsFd for VfioDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        // A function that is gone cannot be stopped, and masters nothing.
        let _ = self.enable(false);
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Asks for a region. Those that a function may have and has not are refused with `EINVAL`.
fn region(file: &File, index: u32) -> rustix::io::Result<RegionFacts> {
    match kernel::region_info(file, index) {
        Ok((info, answer)) => Ok(describe(&info, &answer)),
        Err(Errno::INVAL) => Ok(RegionFacts::default()),
        Err(errno) => Err(errno),
    }
}

/// What an answer says: without a list of areas, all of a region that can be mapped.
fn describe(info: &RegionInfo, answer: &[u8]) -> RegionFacts {
    let flags = RegionInfoFlags::from_bits_retain(info.flags);
    let whole = vec![(0, info.size)];
    let areas = match flags.contains(RegionInfoFlags::MMAP) && info.size >= PAGE {
        true if flags.contains(RegionInfoFlags::CAPS) => {
            sparse(answer, info.cap_offset).unwrap_or(whole)
        }
        true => whole,
        false => Vec::new(),
    };
    let inside = |(offset, length): &(u64, u64)| {
        let end = offset.checked_add(*length);
        *length > 0 && end.is_some_and(|end| end <= info.size) && offset.is_multiple_of(PAGE)
    };
    RegionFacts {
        size: info.size,
        readable: flags.contains(RegionInfoFlags::READ),
        writable: flags.contains(RegionInfoFlags::WRITE),
        areas: areas.into_iter().filter(inside).collect(),
        offset: info.offset,
    }
}

/// The areas of the sparse mmap capability among those that begin at `first`; `None` where there is none.
fn sparse(answer: &[u8], first: u32) -> Option<Vec<(u64, u64)>> {
    let u16_at = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_ne_bytes(answer.get(at..at + 8)?.try_into().ok()?));
    let mut at = first as usize;
    // More than there are kinds: a list that goes in a circle ends.
    for _ in 0..16 {
        if at == 0 {
            break;
        }
        if u16_at(at)? == CAP_SPARSE_MMAP {
            let areas = 0..u32_at(at + 8)? as usize;
            let area =
                |index: usize| Some((u64_at(at + 16 + 16 * index)?, u64_at(at + 24 + 16 * index)?));
            return Some(areas.map_while(area).collect());
        }
        at = u32_at(at + 4)? as usize;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(flags: RegionInfoFlags, size: u64, cap_offset: u32) -> RegionInfo {
        RegionInfo { argsz: 0, flags: flags.bits(), index: 0, cap_offset, size, offset: 1 << 40 }
    }

    /// An answer with the capability of MSI-X tables that can be mapped (3), and one of two areas.
    fn answer() -> Vec<u8> {
        let mut answer = vec![0; 32];
        answer.extend(3u16.to_ne_bytes());
        answer.extend(1u16.to_ne_bytes());
        answer.extend(40u32.to_ne_bytes());
        answer.extend(CAP_SPARSE_MMAP.to_ne_bytes());
        answer.extend(1u16.to_ne_bytes());
        answer.extend(0u32.to_ne_bytes());
        answer.extend(2u32.to_ne_bytes());
        answer.extend(0u32.to_ne_bytes());
        for value in [0, 0x2000, 0x3000, 0x1000u64] {
            answer.extend(value.to_ne_bytes());
        }
        answer
    }

    #[test]
    fn areas_are_those_of_the_capability_or_the_whole_region() {
        let all = RegionInfoFlags::READ | RegionInfoFlags::MMAP;
        let facts = describe(&info(all | RegionInfoFlags::CAPS, 0x4000, 32), &answer());
        assert_eq!(facts.areas, [(0, 0x2000), (0x3000, 0x1000)]);
        assert_eq!((facts.readable, facts.writable, facts.offset), (true, false, 1 << 40));
        assert_eq!(describe(&info(all, 0x4000, 0), &answer()).areas, [(0, 0x4000)]);
        assert!(describe(&info(RegionInfoFlags::READ, 0x4000, 0), &[]).areas.is_empty());
        // A region that is smaller than a page shares it with others.
        assert!(describe(&info(all, 0x100, 0), &[]).areas.is_empty());
    }

    #[test]
    fn areas_beyond_the_region_and_lists_that_are_cut_off_do_no_harm() {
        let all = RegionInfoFlags::MMAP | RegionInfoFlags::CAPS;
        assert_eq!(describe(&info(all, 0x2000, 32), &answer()).areas, [(0, 0x2000)]);
        assert_eq!(describe(&info(all, 0x4000, 32), &answer()[..80]).areas, [(0, 0x2000)]);
        assert_eq!(describe(&info(all, 0x4000, 4000), &answer()).areas, [(0, 0x4000)]);
        let mut circle = answer();
        circle[40..42].copy_from_slice(&7u16.to_ne_bytes());
        circle[44..48].copy_from_slice(&32u32.to_ne_bytes());
        assert_eq!(describe(&info(all, 0x4000, 32), &circle).areas, [(0, 0x4000)]);
    }
}
