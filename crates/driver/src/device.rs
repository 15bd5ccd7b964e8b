//! How a driver reaches a function's registers, and the function the driver's memory.
//!
//! A function is at the other end of a vfio-user socket ([`Client`]), in this very thread ([`InThreadFunction`]), or one
//! of this machine's own ([`MachineFunction`]). Drivers are the same above all three.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_memory::{Access, Event, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::machine::{FunctionKind, MachineFunction, ReachedRun, is_address};
use rackbus_pci::vfio_user::Client;
use rackbus_pci::{Endpoint, Function};
use rackbus_spec::vfio_user::{irq, region};

use crate::DriveError;

/// Offset of the command register in configuration space (PCIe base 6.0, section 7.5.1.1.3).
const COMMAND: u64 = 4;
/// Offset in configuration space of base address register `bar` (PCIe base 6.0, section 7.5.1.2.1).
pub(crate) fn bar_register(bar: u8) -> u64 {
    0x10 + 4 * u64::from(bar)
}
/// Command register: memory space and bus master enable.
const ENABLE: u16 = 0b110;

/// Where a function reaches the driver's memory: in one piece, or in runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DmaAddresses {
    /// In the order of their offsets; the first is of offset 0.
    runs: Vec<ReachedRun>,
    length: u64,
}

impl DmaAddresses {
    /// Memory of `length` bytes that is reached from `iova` on.
    pub fn contiguous(iova: u64, length: usize) -> DmaAddresses {
        DmaAddresses { runs: vec![ReachedRun { offset: 0, address: iova }], length: length as u64 }
    }

    /// Memory of `length` bytes that is reached in these runs, which are in the order of their offsets; the first is of
    /// offset 0.
    pub fn of(runs: Vec<ReachedRun>, length: usize) -> DmaAddresses {
        DmaAddresses { runs, length: length as u64 }
    }

    /// The address of the byte at `offset`, and how many bytes from there on are in one piece.
    pub fn at(&self, offset: usize) -> Option<(u64, usize)> {
        let offset = offset as u64;
        let next = self.runs.partition_point(|run| run.offset <= offset);
        let run = self.runs.get(next.checked_sub(1)?).filter(|_| offset < self.length)?;
        let end = self.runs.get(next).map_or(self.length, |next| next.offset);
        Some((run.address + (offset - run.offset), (end - offset) as usize))
    }

    /// The address of `length` bytes at `offset`, where they are in one piece.
    #[inline]
    pub fn piece(&self, offset: usize, length: usize) -> Option<u64> {
        self.at(offset).and_then(|(address, run)| (run >= length).then_some(address))
    }

    /// Up to `most` offsets from `from` on, beside each other where that can be, of `length` bytes each that are in one piece
    /// and end at `end` at the latest.
    pub fn places(&self, (from, end): (usize, usize), length: usize, most: usize) -> Vec<usize> {
        let (mut places, mut offset) = (Vec::new(), from);
        while places.len() < most && end.checked_sub(offset).is_some_and(|left| left >= length) {
            match self.at(offset) {
                None => break,
                Some((_, run)) if run < length => offset += run,
                Some(_) => {
                    places.push(offset);
                    offset += length;
                }
            }
        }
        places
    }
}

/// A PCI function with a controller behind BAR 0.
pub trait DrivenFunction: Send {
    /// Reads at `offset` of BAR 0.
    ///
    /// # Errors
    /// When the connection failed.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError>;

    /// Writes at `offset` of BAR 0; the write may still be on its way on return.
    ///
    /// # Errors
    /// When the connection failed.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError>;

    /// Reads at `offset` of configuration space.
    ///
    /// # Errors
    /// When the connection failed, or the configuration space cannot be read.
    fn read_config(&mut self, _offset: u64, _data: &mut [u8]) -> Result<(), DriveError> {
        Err(DriveError::Unsupported("its configuration space is not available"))
    }

    /// Writes at `offset` of configuration space.
    ///
    /// # Errors
    /// As [`read_config`](DrivenFunction::read_config).
    fn write_config(&mut self, _offset: u64, _data: &[u8]) -> Result<(), DriveError> {
        Err(DriveError::Unsupported("its configuration space is not available"))
    }

    /// Memory that the function can reach, of `length` bytes at least.
    ///
    /// # Errors
    /// When there is none.
    fn memory(&mut self, name: &str, length: usize) -> Result<SharedMemory, DriveError> {
        Ok(SharedMemory::create(name, length as u64)?)
    }

    /// Resets the function, lets it reach `memory`, which came from [`memory`](DrivenFunction::memory), and enables it.
    /// Where it can choose, the memory is at `iova`.
    ///
    /// # Errors
    /// When the device refuses.
    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError>;

    /// Interrupts of the function by up to `count` vectors, each with what rings: as many as there are, or
    /// none. Asked for once, after [`start`](DrivenFunction::start).
    ///
    /// # Errors
    /// When the device refuses.
    fn interrupts(&mut self, _count: u16) -> Result<Vec<Event>, DriveError> {
        Ok(Vec::new())
    }

    /// Lets the function read memory of another one's driver, until [`unshare`](DrivenFunction::unshare). Where it can choose,
    /// that is at `iova`.
    ///
    /// # Errors
    /// When the device refuses, or does not reach such memory.
    fn share(&mut self, _iova: u64, _memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        Err(DriveError::Unsupported("it reaches no memory of other functions' drivers"))
    }

    /// Takes away `length` bytes of memory that was shared with `iova`.
    ///
    /// # Errors
    /// When the connection failed.
    fn unshare(&mut self, _iova: u64, _length: usize) -> Result<(), DriveError> {
        Ok(())
    }

    /// Called while waiting: lets a device that has no thread of its own work. True where it has none, so that
    /// whoever waits goes on calling and does not sleep.
    fn progress(&mut self) -> bool {
        false
    }
}

/// A device at the other end of a vfio-user connection.
impl DrivenFunction for Client {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(Client::read(self, region::BAR0, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(self.post(region::BAR0, offset, data)?)
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(Client::read(self, region::CONFIG, offset, data)?)
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(Client::write(self, region::CONFIG, offset, data)?)
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        self.reset()?;
        let length = memory.len() as u64;
        self.dma_map(iova, length, Access::READ | Access::WRITE, Some((memory.as_fd(), 0)))?;
        Client::write(self, region::CONFIG, COMMAND, &ENABLE.to_le_bytes())?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }

    fn share(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        let length = memory.len() as u64;
        self.dma_map(iova, length, Access::READ, Some((memory.as_fd(), 0)))?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }

    fn unshare(&mut self, iova: u64, length: usize) -> Result<(), DriveError> {
        Ok(self.dma_unmap(iova, length as u64)?)
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, DriveError> {
        for index in [irq::MSIX, irq::MSI] {
            let has = self.irq_info(index)?.count;
            let wanted = has.min(count.into());
            if wanted == 0 {
                continue;
            }
            let (events, wires) = events(wanted as usize)?;
            self.wire_irqs(index, 0, &wires)?;
            return Ok(events);
        }
        Ok(Vec::new())
    }
}

/// A function of this machine.
impl DrivenFunction for MachineFunction {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(MachineFunction::read(self, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(MachineFunction::write(self, offset, data)?)
    }

    fn memory(&mut self, name: &str, length: usize) -> Result<SharedMemory, DriveError> {
        Ok(MachineFunction::memory(self, name, length as u64)?)
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        Ok(DmaAddresses::of(MachineFunction::start(self, iova, memory)?, memory.len()))
    }

    fn share(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        Ok(DmaAddresses::of(MachineFunction::share(self, iova, memory)?, memory.len()))
    }

    fn unshare(&mut self, iova: u64, length: usize) -> Result<(), DriveError> {
        Ok(MachineFunction::unshare(self, iova, length as u64)?)
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, DriveError> {
        Ok(MachineFunction::interrupts(self, count)?)
    }
}

/// Events, and what leads to each.
fn events(count: usize) -> Result<(Vec<Event>, Vec<Option<OwnedFd>>), DriveError> {
    let event = |_| {
        let event = Event::new()?;
        let wire = event.as_fd().try_clone_to_owned()?;
        Ok((event, Some(wire)))
    };
    let both = (0..count).map(event).collect::<std::io::Result<Vec<_>>>();
    Ok(both.map_err(DriveError::Descriptors)?.into_iter().unzip())
}

/// Where a function is that a program drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FunctionPlace {
    /// Behind the vfio-user socket of this path.
    Socket(PathBuf),
    /// At this PCI address of this machine.
    Machine(String),
}

impl FunctionPlace {
    /// What a text means: what has the form of a PCI address is one, and all else a socket's path.
    pub fn named(text: &str) -> FunctionPlace {
        match is_address(text) {
            true => FunctionPlace::Machine(text.to_owned()),
            false => FunctionPlace::Socket(text.into()),
        }
    }

    /// Opens the function there; each register access of one behind a socket takes at most `limit`. One of this machine has
    /// to be what is wanted.
    ///
    /// # Errors
    /// As [`connect`] and [`open_on_machine`].
    pub fn open(
        &self,
        limit: Duration,
        wanted: FunctionKind,
    ) -> Result<Box<dyn DrivenFunction>, DriveError> {
        Ok(match self {
            FunctionPlace::Socket(path) => Box::new(connect(path, limit)?),
            FunctionPlace::Machine(address) => Box::new(open_on_machine(address, wanted)?),
        })
    }
}

/// Connects to the function at `path`; each register access takes at most `limit`.
///
/// # Errors
/// When nobody listens there, or the device turns us away.
pub fn connect(path: &Path, limit: Duration) -> Result<Client, DriveError> {
    Ok(Client::connect(path, limit)?)
}

/// Opens the function of this kind at a PCI address of this machine, one of its own or one that it has borrowed through an
/// NTB.
///
/// # Errors
/// When there is no such function, it is in use, or it is not known how it reaches memory.
pub fn open_on_machine(address: &str, wanted: FunctionKind) -> Result<MachineFunction, DriveError> {
    let function = MachineFunction::open_only(address, wanted)?;
    let window = match address.parse() {
        // Who has one by an IOMMU need not be root, and is not let to ask.
        Ok(address) if function.has_physical_addresses() => rackbus_metal::window_of(address)?,
        _ => None,
    };
    Ok(match window {
        Some(window) => function.behind(window),
        None => function,
    })
}

/// A device model that runs in this very thread: what a drive costs without lending it.
#[derive(Debug)]
pub struct InThreadFunction {
    endpoint: Endpoint,
    polls: u32,
    now_ns: u64,
}

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;

impl InThreadFunction {
    /// Runs `model` on an engine in this process.
    pub fn new(model: Box<dyn Function>) -> Self {
        InThreadFunction { endpoint: Endpoint::new(model), polls: 0, now_ns: 0 }
    }
}

impl DrivenFunction for InThreadFunction {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.endpoint
            .read(FunctionRegion::Bar(0), offset, data)
            .map_err(|_| DriveError::Unsupported("its BAR 0 is too small"))
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.endpoint
            .write(FunctionRegion::Bar(0), offset, data)
            .map_err(|_| DriveError::Unsupported("its BAR 0 is too small"))
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.endpoint
            .read(FunctionRegion::Config, offset, data)
            .map_err(|_| DriveError::Unsupported("its configuration space is too small"))
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.endpoint
            .write(FunctionRegion::Config, offset, data)
            .map_err(|_| DriveError::Unsupported("its configuration space is too small"))
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        self.endpoint.scrub();
        let refused = |_| DriveError::Unsupported("it cannot map the driver's memory");
        let access = Access::READ | Access::WRITE;
        self.endpoint
            .map(iova, memory.len() as u64, access, Some(memory.handle(0)))
            .map_err(refused)?;
        self.endpoint
            .write(FunctionRegion::Config, COMMAND, &ENABLE.to_le_bytes())
            .map_err(|_| DriveError::Unsupported("it has no configuration space"))?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }

    fn share(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        let mapped =
            self.endpoint.map(iova, memory.len() as u64, Access::READ, Some(memory.handle(0)));
        mapped.map_err(|_| DriveError::Unsupported("it cannot map the memory"))?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }

    fn unshare(&mut self, iova: u64, length: usize) -> Result<(), DriveError> {
        let unmapped = self.endpoint.unmap(iova, length as u64);
        unmapped.map(drop).map_err(|_| DriveError::Unsupported("it has no such memory"))
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, DriveError> {
        let wanted = count.min(self.endpoint.info().msix_vectors);
        let (events, wires) = events(wanted.into())?;
        let wired = self.endpoint.set_irqs(IrqChange::WireVectors(0, wires));
        wired.map_err(|_| DriveError::Unsupported("it takes no interrupts"))?;
        Ok(events)
    }

    fn progress(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            self.now_ns = self.endpoint.clock();
        }
        self.endpoint.poll(self.now_ns);
        true
    }
}

#[cfg(test)]
pub(crate) mod stoppable {
    //! A function that a test stops and lets go on.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// While it is stopped, it does nothing and its registers cannot be read.
    pub(crate) struct Stoppable(InThreadFunction, Arc<AtomicBool>);

    impl Stoppable {
        /// It goes on until what is returned says otherwise.
        pub(crate) fn new(model: Box<dyn Function>) -> (Stoppable, Arc<AtomicBool>) {
            let stopped = Arc::new(AtomicBool::new(false));
            (Stoppable(InThreadFunction::new(model), stopped.clone()), stopped)
        }
    }

    impl DrivenFunction for Stoppable {
        fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
            match self.1.load(Ordering::Relaxed) {
                true => Err(DriveError::TimedOut("read")),
                false => self.0.read(offset, data),
            }
        }

        fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
            self.0.write(offset, data)
        }

        fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
            self.0.start(iova, memory)
        }

        fn share(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
            self.0.share(iova, memory)
        }

        fn unshare(&mut self, iova: u64, length: usize) -> Result<(), DriveError> {
            self.0.unshare(iova, length)
        }

        fn progress(&mut self) -> bool {
            self.1.load(Ordering::Relaxed) || self.0.progress()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_goes_with_the_bytes_that_follow_it_in_one_piece() {
        let one = DmaAddresses::contiguous(1 << 32, 8192);
        assert_eq!(one.at(0), Some((1 << 32, 8192)));
        assert_eq!((one.at(8191), one.at(8192)), (Some(((1 << 32) + 8191, 1)), None));
        let run = |offset, address| ReachedRun { offset, address };
        let two = DmaAddresses::of(vec![run(0, 0x9000), run(4096, 0x1000)], 6000);
        assert_eq!(two.at(4095), Some((0x9fff, 1)));
        assert_eq!(two.at(4096), Some((0x1000, 6000 - 4096)));
        assert_eq!((two.at(5999), two.at(6000)), (Some((0x1000 + 1903, 1)), None));
        assert_eq!((two.piece(0, 4096), two.piece(1, 4096)), (Some(0x9000), None));
        assert_eq!(two.places((0, 6000), 1500, 9), [0, 1500, 4096]);
        assert_eq!(two.places((100, 6000), 952, 9), [100, 1052, 2004, 2956, 4096, 5048]);
        assert_eq!(two.places((100, 5999), 952, 4), [100, 1052, 2004, 2956]);
        assert!(two.places((0, 6000), 4097, 9).is_empty() && two.places((9, 8), 0, 9).is_empty());
    }
}
