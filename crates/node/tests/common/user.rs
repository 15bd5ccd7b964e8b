//! What programs do with borrowed functions in tests: a drive and its connection, a memory function.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::api::Lease;
use rackbus_devices::memory::BAR;
use rackbus_driver::{DmaAddresses, Drive, DriveError, DriveOptions, DrivenFunction};
use rackbus_memory::{Access, Region as Mapping, SharedMemory};
use rackbus_pci::vfio_user::Client as User;
use rackbus_spec::nvme::Status;
use rackbus_spec::vfio_user::region;

/// The size of a memory function.
pub const SIZE: u64 = 4 << 20;

/// The socket of a lease.
pub fn socket(lease: &Lease) -> &Path {
    Path::new(lease.socket.as_deref().unwrap())
}

/// What a program does with a memory function: it programs its BAR and maps it.
pub struct Memory {
    pub user: User,
    memory: Mapping,
}

impl Memory {
    /// Opens the function of a lease.
    pub fn open(lease: &Lease) -> Memory {
        let user = User::connect(socket(lease), Duration::from_secs(60)).unwrap();
        let memory = user.map_region(BAR.into(), 0, SIZE).unwrap();
        Memory { user, memory }
    }

    /// Writes the address at which the user wants the BAR.
    pub fn place(&self, address: u64) {
        let register = 0x10 + 4 * u64::from(BAR);
        self.user.write(region::CONFIG, register, &address.to_le_bytes()).unwrap();
    }

    /// Turns memory space on or off.
    pub fn decode(&self, on: bool) {
        self.user.write(region::CONFIG, 4, &[if on { 2 } else { 0 }, 0]).unwrap();
    }

    /// Stores into the BAR.
    pub fn store(&self, offset: usize, data: &[u8]) {
        self.memory.slice(offset, data.len()).unwrap().copy_from(data);
    }

    /// Loads from the BAR.
    pub fn load(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.slice(offset, length).unwrap().copy_to(&mut data);
        data
    }
}

/// A connection that the driver shares with a test, which maps by it as it likes.
struct Shared(Arc<User>);

impl DrivenFunction for Shared {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), DriveError> {
        Ok(self.0.read(region::BAR0, offset, data)?)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), DriveError> {
        Ok(self.0.post(region::BAR0, offset, data)?)
    }

    fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<DmaAddresses, DriveError> {
        let length = memory.len() as u64;
        self.0.dma_map(iova, length, Access::all(), Some((memory.as_fd(), 0)))?;
        self.0.write(region::CONFIG, 4, &[6, 0])?;
        Ok(DmaAddresses::contiguous(iova, memory.len()))
    }
}

/// Opens the drive of a lease, and gives the connection too.
pub fn open_shared(lease: &Lease) -> (Drive, Arc<User>) {
    let user = Arc::new(User::connect(socket(lease), Duration::from_secs(60)).unwrap());
    let device = Box::new(Shared(user.clone()));
    (Drive::with_device(device, DriveOptions::default()).unwrap(), user)
}

/// Whether a drive could not reach what it was told to.
pub fn is_refused(outcome: Result<(), DriveError>) -> bool {
    match outcome {
        Err(DriveError::Command { status, .. }) => status.code() == Status::DATA_TRANSFER_ERROR,
        _ => false,
    }
}
