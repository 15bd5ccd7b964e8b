//! Devices of the rack that a process has borrowed: their registers as memory of the process, and memory of any
//! host as theirs.
//!
//! The host's node borrows, by a lease as any other, which ends with the process. The process then uses the
//! function by its vfio-user socket, as every driver in user space does, and asks for registers that are plain memory
//! ([`rackbus_pci::polled`]). Memory is mapped for a device by the loans of its lender's node; when the node moves
//! it, the device releases it first and takes it up where it is then.
//!
//! * [`Devices`]: which there are, and borrowing.
//! * [`BorrowedDevice`]: one that is borrowed. `addresses`: where devices find memory. [`DeviceMapping`]: memory
//!   that one of them reaches.

mod addresses;
mod borrowed;
mod mapping;

use std::path::Path;
use std::sync::{Arc, Mutex};

use rackbus_pci::vfio_user::ClientError;
use rackbus_segment::message::{DeviceEntry, Reply, SessionRequest};

use crate::location::NodeAddress;
use crate::session::{AttachError, Session};
use addresses::UsedAddresses;

pub(crate) use borrowed::DeviceSegment;
pub use borrowed::{BorrowedDevice, DeviceIdentity};
pub use mapping::DeviceMapping;

/// Why a device could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The host's node, or what was asked of it.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The device, or its lender's node.
    #[error("the device: {0}")]
    Device(#[from] ClientError),
    /// The lease is over, or its lender gone.
    #[error("the device is gone: its lease has ended, or its lender; borrow it again")]
    Gone,
    /// The process is in a virtual machine.
    #[error(
        "a process in a virtual machine borrows no devices; plug them into the machine with `rackbus vm add`"
    )]
    InGuest,
    /// Memory that was mapped for the device has moved, and the device does not reach it where it is now.
    #[error(
        "memory that was mapped for the device has moved, and the device does not reach it any more; unmap it and \
         map it again"
    )]
    Unreached,
    /// There is no such BAR.
    #[error("the device has no BAR {0}")]
    NoBar(u8),
    /// The BAR cannot be mapped.
    #[error(
        "BAR {0} of the device is only accessible by messages: its registers are no plain memory"
    )]
    NotMemory(u8),
    /// No memory of that number was made for the device.
    #[error("no segment {0} was made for this device")]
    NoSuchSegment(u32),
    /// There is one of that number already.
    #[error("this device has a segment {0} already")]
    SegmentInUse(u32),
    /// A device does not reach another one's BAR.
    #[error("{0}")]
    NoPeer(&'static str),
    /// The devices' addresses are used up.
    #[error("no addresses are left for the device")]
    NoAddress,
}

/// The rack's devices, for this process. Clones are the same; what was borrowed is returned when the process ends.
#[derive(Debug, Clone)]
pub struct Devices(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What is used beside devices.
    session: Session,
    /// Whose leases they are. One of its own: borrowing takes its time, and keeps nothing else.
    leases: Session,
    addresses: Mutex<UsedAddresses>,
}

impl Devices {
    /// Begins to use devices beside `session`, which was opened at `place`.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn open(session: &Session, place: impl Into<NodeAddress>) -> Result<Devices, DeviceError> {
        if session.in_guest() {
            return Err(DeviceError::InGuest);
        }
        let leases = Session::open(place)?;
        let (session, addresses) = (session.clone(), Mutex::default());
        Ok(Devices(Arc::new(Shared { session, leases, addresses })))
    }

    /// The session that it was opened beside.
    pub fn session(&self) -> &Session {
        &self.0.session
    }

    /// Every device of the rack that is there, in the order of their names.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn list(&self) -> Result<Vec<DeviceEntry>, DeviceError> {
        let mut all = Vec::new();
        loop {
            let skip = u32::try_from(all.len()).unwrap_or(u32::MAX);
            match self.0.leases.call(&SessionRequest::ListDevices { skip })? {
                (Reply::Devices { list, more }, _) if !more || !list.is_empty() => {
                    all.extend(list);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(AttachError::Protocol.into()),
            }
        }
    }

    /// Borrows a device by its fabric device id, resets it, and lets it reach memory that is mapped for it. With
    /// `strict`, its lender gets no memory of this host's.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn borrow(&self, fdid: u64, strict: bool) -> Result<BorrowedDevice, DeviceError> {
        let request = SessionRequest::BorrowDevice { fdid, strict };
        let (Reply::Borrowed(entry), _) = self.0.leases.call(&request)? else {
            return Err(AttachError::Protocol.into());
        };
        let (lease, socket) = (entry.lease, entry.socket.clone());
        let begun = BorrowedDevice::begin(self.0.clone(), entry, Path::new(&socket), strict);
        begun.inspect_err(|_| {
            // What went wrong before is said.
            let _ = self.0.give_back(lease);
        })
    }
}

impl Shared {
    fn give_back(&self, lease: u64) -> Result<(), AttachError> {
        self.leases.done(&SessionRequest::ReturnDevice { lease })
    }
}
