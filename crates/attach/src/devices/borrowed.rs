//! A device that this process has borrowed: its BARs, segments in it, memory that is mapped for it, and its return.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rackbus_memory::ResourceHandle;
use rackbus_pci::PolledRegisters;
use rackbus_pci::vfio_user::{Client, ClientError};
use rackbus_segment::message::{BorrowedEntry, DeviceEntry, SegmentKind};
use rackbus_spec::pcie::{Command, header};
use rackbus_spec::vfio_user::region;

use super::mapping::{DeviceMapping, DmaFollower};
use super::{DeviceError, Shared};
use crate::memory::MappedMemory;
use crate::segments::{LocalSegment, RemoteSegment, SegmentOptions};
use crate::session::lock;

/// How long a device may take to answer.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Where numbers of segments begin that are made for devices: programs choose theirs from below.
const FIRST_ID: u32 = 0xf000_0000;
/// A PCI function has BARs 0 to 5.
const BARS: u8 = 6;

/// A borrowed device. Clones are the same; it is returned with the last of them.
#[derive(Debug, Clone)]
pub struct BorrowedDevice(Arc<Inner>);

/// What a segment is that leads to a device: memory that was made for it, or one of its BARs.
#[derive(Debug, Clone)]
pub(crate) struct DeviceSegment {
    pub(crate) device: BorrowedDevice,
    pub(crate) bar: Option<u8>,
}

/// What a device's configuration space says that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Vendor ID of its configuration space, which SISCI programs filter by.
    pub vendor_id: u16,
    /// Device ID, which its vendor gives.
    pub device_id: u16,
    /// Class code: base class, sub-class and programming interface, from bit 23 on down.
    pub class: u32,
    /// Vendor ID of the board or product that has the device.
    pub subsystem_vendor_id: u16,
    /// ID of that board or product, which its vendor gives.
    pub subsystem_id: u16,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    entry: DeviceEntry,
    lease: u64,
    strict: bool,
    client: Arc<Client>,
    /// Where BARs are that other devices reach.
    bars: Mutex<BTreeMap<u8, u64>>,
    /// Memory that was made for it, by its number.
    segments: Mutex<BTreeMap<u32, LocalSegment>>,
    returned: AtomicBool,
    /// Memory that it reached has moved to where it does not, and its program has not heard of that.
    unreached: Arc<AtomicBool>,
}

impl BorrowedDevice {
    /// Begins to use what was borrowed, at its socket.
    pub(super) fn begin(
        shared: Arc<Shared>,
        entry: BorrowedEntry,
        socket: &Path,
        strict: bool,
    ) -> Result<BorrowedDevice, DeviceError> {
        let client = Arc::new(Client::connect(socket, TIME_LIMIT)?);
        client.reset()?;
        let command = (Command::MEMORY_SPACE | Command::BUS_MASTER).bits();
        client.write(region::CONFIG, header::COMMAND.into(), &command.to_le_bytes())?;
        let BorrowedEntry { lease, device: entry, .. } = entry;
        let (bars, segments, returned, unreached) = Default::default();
        let inner =
            Inner { shared, entry, lease, strict, client, bars, segments, returned, unreached };
        let device = BorrowedDevice(Arc::new(inner));
        device.identity()?;
        Ok(device)
    }

    /// What is known of it: its name, its fabric device id, its host.
    pub fn entry(&self) -> &DeviceEntry {
        &self.0.entry
    }

    /// Number of its lease.
    pub fn lease(&self) -> u64 {
        self.0.lease
    }

    /// What it says that it is.
    ///
    /// # Errors
    /// [`DeviceError::Gone`] when the lease is over or the lender is lost: it reads all ones then, as a device that
    /// was pulled out. Once [`DeviceError::Unreached`] when memory was lost to it since the last call of this or any other
    /// function that begins something.
    pub fn identity(&self) -> Result<DeviceIdentity, DeviceError> {
        if self.0.unreached.swap(false, Ordering::AcqRel) {
            return Err(DeviceError::Unreached);
        }
        let mut bytes = [0; 0x40];
        match self.0.client.read(region::CONFIG, 0, &mut bytes) {
            Ok(()) => {}
            Err(ClientError::Wire(_)) => return Err(DeviceError::Gone),
            Err(error) => return Err(error.into()),
        }
        let half =
            |at: u16| u16::from_le_bytes([bytes[usize::from(at)], bytes[usize::from(at) + 1]]);
        let class = usize::from(header::CLASS_CODE);
        if half(header::VENDOR_ID) == u16::MAX {
            return Err(DeviceError::Gone);
        }
        Ok(DeviceIdentity {
            vendor_id: half(header::VENDOR_ID),
            device_id: half(header::DEVICE_ID),
            class: u32::from_le_bytes([bytes[class], bytes[class + 1], bytes[class + 2], 0]),
            subsystem_vendor_id: half(header::SUBSYSTEM_VENDOR_ID),
            subsystem_id: half(header::SUBSYSTEM_ID),
        })
    }

    /// Connects to BAR `bar`: its memory, or its registers where they are plain memory. The first such connection to
    /// registers has the device look at them.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn connect_bar(&self, bar: u8) -> Result<RemoteSegment, DeviceError> {
        self.identity()?;
        if bar >= BARS {
            return Err(DeviceError::NoBar(bar));
        }
        let info = self.0.client.region_info(region::BAR0 + u32::from(bar))?;
        if info.size == 0 {
            return Err(DeviceError::NoBar(bar));
        }
        let whole = info.areas == [(0, info.size)];
        let (memory, size) = match info.memory {
            // The file of a device of the machine is none that stands for memory.
            Some((file, 0)) if whole && file.metadata().is_ok_and(|it| it.is_file()) => {
                let memory = ResourceHandle::of_descriptor(file.into());
                (MappedMemory::new(Some(memory), true, info.size), info.size)
            }
            _ => self.connect_registers(bar)?,
        };
        let held = DeviceSegment { device: self.clone(), bar: Some(bar) };
        let from = (self.0.entry.node, bar.into());
        Ok(RemoteSegment::of_device(&self.0.shared.session, from, (memory, size), held))
    }

    fn connect_registers(&self, bar: u8) -> Result<(Arc<MappedMemory>, u64), DeviceError> {
        let (file, size) = match self.0.client.registers(bar) {
            Ok(given) => given,
            Err(ClientError::Refused(rustix::io::Errno::NODEV)) => return Err(DeviceError::Gone),
            Err(ClientError::Refused(_)) => return Err(DeviceError::NotMemory(bar)),
            Err(error) => return Err(error.into()),
        };
        let registers =
            PolledRegisters::adopt(file, size).map_err(|_| DeviceError::NotMemory(bar))?;
        let (file, size) = registers.descriptor().map_err(|_| DeviceError::NotMemory(bar))?;
        let memory = ResourceHandle::of_descriptor(file);
        Ok((MappedMemory::new(Some(memory), true, size), size))
    }

    /// Makes memory for the device, of `size` bytes, on this host.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn create_segment(&self, id: u32, size: u64) -> Result<(), DeviceError> {
        self.identity()?;
        let mut segments = lock(&self.0.segments);
        if segments.contains_key(&id) {
            return Err(DeviceError::SegmentInUse(id));
        }
        let options =
            SegmentOptions { id: FIRST_ID, choose: true, size, kind: SegmentKind::Private };
        segments.insert(id, self.0.shared.session.create_segment(&options)?);
        Ok(())
    }

    /// Connects to memory that was made for the device.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchSegment`].
    pub fn connect_segment(&self, id: u32) -> Result<RemoteSegment, DeviceError> {
        let segments = lock(&self.0.segments);
        let made = segments.get(&id).ok_or(DeviceError::NoSuchSegment(id))?;
        let held = DeviceSegment { device: self.clone(), bar: None };
        let session = &self.0.shared.session;
        let memory = (made.memory().clone(), made.size());
        Ok(RemoteSegment::of_device(session, (session.node(), id), memory, held))
    }

    /// Lets the device reach a part of a segment of this process, or of one that it shares with others of this host.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn map_local(
        &self,
        segment: &LocalSegment,
        range: (u64, u64),
    ) -> Result<DeviceMapping, DeviceError> {
        self.map_memory(segment.memory(), segment.size(), range)
    }

    /// Lets the device reach a part of what the process is connected to: memory of any host, memory that was made
    /// for a device, or another borrowed device's BAR, peer-to-peer.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn map_remote(
        &self,
        segment: &RemoteSegment,
        (offset, length): (u64, u64),
    ) -> Result<DeviceMapping, DeviceError> {
        match segment.device() {
            Some(DeviceSegment { device, bar: Some(bar) }) => {
                check(segment.size(), (offset, length))?;
                Ok(DeviceMapping::of_peer(
                    self.reach(device, *bar)? + offset,
                    segment.device().cloned(),
                ))
            }
            _ => self.map_memory(segment.memory(), segment.size(), (offset, length)),
        }
    }

    fn map_memory(
        &self,
        memory: &Arc<MappedMemory>,
        size: u64,
        (offset, length): (u64, u64),
    ) -> Result<DeviceMapping, DeviceError> {
        check(size, (offset, length))?;
        self.identity()?;
        let follower = DmaFollower::new(self, (offset, length), memory.writable())?;
        memory.lead((offset, length), &follower)?;
        follower.outcome()?;
        Ok(DeviceMapping::of_memory(follower))
    }

    /// The address at which this device reaches a BAR of another one.
    fn reach(&self, other: &BorrowedDevice, bar: u8) -> Result<u64, DeviceError> {
        if Arc::ptr_eq(&self.0, &other.0) {
            return Err(DeviceError::NoPeer("a device does not reach its own BAR by DMA"));
        }
        if !Arc::ptr_eq(&self.0.shared, &other.0.shared) {
            return Err(DeviceError::NoPeer("the devices were not borrowed together"));
        }
        if self.0.strict || other.0.strict || self.0.shared.session.between_machines() {
            return Err(DeviceError::NoPeer(
                "the device's controller runs at the borrower (strict isolation, or hosts that are machines): its DMA does not come from its lender, so it reaches no other device",
            ));
        }
        self.identity()?;
        other.program(bar)
    }

    /// Has the device decode BAR `bar`, whose memory other devices reach; where.
    fn program(&self, bar: u8) -> Result<u64, DeviceError> {
        // What there is to tell is told before the device decodes anything.
        self.identity()?;
        let mut bars = lock(&self.0.bars);
        if let Some(address) = bars.get(&bar) {
            return Ok(*address);
        }
        let info = self.0.client.region_info(region::BAR0 + u32::from(bar))?;
        if info.areas != [(0, info.size)] {
            return Err(DeviceError::NoPeer(
                "registers of a device are not reached by another one",
            ));
        }
        let at = u64::from(header::BAR0) + 4 * u64::from(bar);
        let mut low = [0; 4];
        self.0.client.read(region::CONFIG, at, &mut low)?;
        if !is_wide(u32::from_le_bytes(low)) {
            return Err(DeviceError::NoPeer(
                "the BAR decodes 32 bits of address, and devices reach each other above 4 GiB",
            ));
        }
        let address = self.0.shared.take(info.size, info.size)?;
        let written = self.0.client.write(region::CONFIG, at, &address.to_le_bytes());
        if let Err(error @ ClientError::Refused(_)) = written {
            self.0.shared.give_address_back(address);
            return Err(error.into());
        }
        // Where its answer was lost, it may decode the address all the same: until it is returned.
        bars.insert(bar, address);
        Ok(written.map(|()| address)?)
    }

    /// Says that memory was lost to it.
    pub(super) fn unreached(&self) -> &Arc<AtomicBool> {
        &self.0.unreached
    }

    pub(super) fn client(&self) -> &Arc<Client> {
        &self.0.client
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Returns the device. What is mapped of it, or for it, leads nowhere any more.
    ///
    /// # Errors
    /// [`DeviceError`] when the node does not answer; it is returned anyway when the process ends.
    pub fn give_back(&self) -> Result<(), DeviceError> {
        self.0.give_back()
    }
}

impl Inner {
    fn give_back(&self) -> Result<(), DeviceError> {
        if self.returned.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // First: the lender waits for nobody then.
        self.client.shut_down();
        lock(&self.segments).clear();
        // What was refused, or not heard, is tried again with the last handle.
        self.shared
            .give_back(self.lease)
            .inspect_err(|_| self.returned.store(false, Ordering::Release))?;
        let addresses = std::mem::take(&mut *lock(&self.bars));
        // Until then it may decode them.
        addresses.into_values().for_each(|address| self.shared.give_address_back(address));
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A node that is gone has ended it already.
        let _ = self.give_back();
    }
}

impl Shared {
    pub(super) fn take(&self, length: u64, align: u64) -> Result<u64, DeviceError> {
        lock(&self.addresses).take(length, align).ok_or(DeviceError::NoAddress)
    }

    pub(super) fn give_address_back(&self, address: u64) {
        lock(&self.addresses).give_back(address);
    }
}

/// Whether a BAR with this low half is memory that decodes 64 bits of address (PCIe base 6.0, section 7.5.1.2.1).
fn is_wide(low: u32) -> bool {
    const IS_IO: u32 = 1;
    const TYPE: u32 = 0b110;
    const TYPE_64: u32 = 0b100;
    low & IS_IO == 0 && low & TYPE == TYPE_64
}

/// A range is some bytes inside of the memory.
fn check(size: u64, (offset, length): (u64, u64)) -> Result<(), DeviceError> {
    match offset.checked_add(length) {
        Some(end) if length > 0 && end <= size => Ok(()),
        _ => Err(crate::session::AttachError::OutOfRange { offset, length, size }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_with_64_bits_of_address_is_wide() {
        // As a driver reads them: memory above 4 GiB, prefetchable and not; below; below 1 MiB; and I/O.
        let bars = [(0x0000_000c, true), (0xfe00_0004, true), (0xfe00_0000, false)];
        for (low, wide) in bars.into_iter().chain([(0x000d_0002, false), (0x0000_e005, false)]) {
            assert_eq!(is_wide(low), wide, "{low:#x}");
        }
    }
}
