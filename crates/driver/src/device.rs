//! How the driver reaches the controller's registers, and the controller the driver's memory.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::Region;
use rackbus_pci::vfio_user::Client;
use rackbus_pci::{Endpoint, Function};
use rackbus_spec::vfio_user::region;

use crate::DriveError;

/// Offset of the command register in configuration space (PCIe base 6.0, section 7.5.1.1.3).
const COMMAND: u64 = 4;
/// Command register: memory space and bus master enable.
const ENABLE: u16 = 0b110;

/// A PCI function with a controller behind BAR 0.
pub trait Device: Send {
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

    /// Resets the function, lets it reach `memory` from address `iova` on, and enables it.
    ///
    /// # Errors
    /// When the device refuses.
    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<(), DriveError>;

    /// Called while waiting: lets a device that has no thread of its own work.
    fn progress(&mut self) {}
}

/// A device at the other end of a vfio-user connection.
impl Device for Client {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(Client::read(self, region::BAR0, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(self.post(region::BAR0, offset, data)?)
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<(), DriveError> {
        self.reset()?;
        let length = memory.len() as u64;
        self.dma_map(iova, length, Access::READ | Access::WRITE, Some((memory.as_fd(), 0)))?;
        Ok(Client::write(self, region::CONFIG, COMMAND, &ENABLE.to_le_bytes())?)
    }
}

/// Connects to the drive at `path`; each register access takes at most `limit`.
///
/// # Errors
/// When nobody listens there, or the device turns us away.
pub fn connect(path: &Path, limit: Duration) -> Result<Client, DriveError> {
    Ok(Client::connect(path, limit)?)
}

/// A device model that runs in this very thread: what a drive costs without lending it.
#[derive(Debug)]
pub struct Local {
    endpoint: Endpoint,
    polls: u32,
    now_ns: u64,
}

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;

impl Local {
    /// Runs `model` on an engine in this process.
    pub fn new(model: Box<dyn Function>) -> Self {
        Local { endpoint: Endpoint::new(model), polls: 0, now_ns: 0 }
    }
}

impl Device for Local {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        self.endpoint
            .read(Region::Bar(0), offset, data)
            .map_err(|_| DriveError::Unsupported("its BAR 0 is too small"))
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        self.endpoint
            .write(Region::Bar(0), offset, data)
            .map_err(|_| DriveError::Unsupported("its BAR 0 is too small"))
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<(), DriveError> {
        self.endpoint.scrub();
        let refused = |_| DriveError::Unsupported("it cannot map the driver's memory");
        let access = Access::READ | Access::WRITE;
        self.endpoint
            .map(iova, memory.len() as u64, access, Some(memory.handle(0)))
            .map_err(refused)?;
        self.endpoint
            .write(Region::Config, COMMAND, &ENABLE.to_le_bytes())
            .map_err(|_| DriveError::Unsupported("it has no configuration space"))
    }

    fn progress(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            self.now_ns = self.endpoint.clock();
        }
        self.endpoint.poll(self.now_ns);
    }
}
