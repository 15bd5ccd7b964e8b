#![forbid(unsafe_code)]
//! Drivers in user space: for programs that want a borrowed function without a VM, for tests and for
//! measuring. Of a drive (NVMe) here, of an accelerator in [`accel`], of a network function (virtio) in [`net`].
//!
//! [`Drive`] opens a drive at a vfio-user socket, or one of this machine's, and reads and writes it; each of
//! its [`DriveQueue`]s keeps many commands in flight. The driver polls for completions and uses shadow doorbells, so
//! neither side makes a system call while both are busy; when the drive sleeps, a doorbell write
//! through the socket wakes it. It lives in one thread and takes no interrupts.

pub mod accel;
pub mod device;
mod drive;
pub mod net;
mod queue;

pub use accel::{Accel, AccelError};
pub use device::{DmaAddresses, DrivenFunction, FunctionPlace, InThreadFunction};
pub use drive::{Drive, DriveInfo, DriveOptions};
pub use net::{Net, NetError};
pub use queue::{Completed, DriveBuffer, DriveQueue};
pub use rackbus_pci::machine::{MachineError, MachineFunction};

use rackbus_spec::nvme::Status;

/// Why the drive did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The connection to the drive failed, or the drive turned us away.
    #[error("drive: {0}")]
    Client(#[from] rackbus_pci::vfio_user::ClientError),
    /// A function of this machine cannot be used.
    #[error("{0}")]
    Machine(#[from] rackbus_pci::machine::MachineError),
    /// Whether a function of this machine was borrowed through an NTB, and where it reaches memory then, is not known.
    #[error("whether it was borrowed through an NTB: {0}")]
    Borrowed(#[from] rackbus_metal::MetalError),
    /// The process has no descriptors left for interrupts.
    #[error("descriptors for interrupts: {0}")]
    Descriptors(std::io::Error),
    /// Memory to share with the drive could not be obtained.
    #[error("drive: memory to share with it: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// A command completed with an error.
    #[error("drive: {command} failed: {status}")]
    Command {
        /// Name of the command that failed.
        command: &'static str,
        /// What the drive answered.
        status: Status,
    },
    /// The drive did not answer in time.
    #[error("drive: no answer to {0} in time; its lender may be gone")]
    TimedOut(&'static str),
    /// The controller reports that it can go on no more.
    #[error("drive: the controller failed (CSTS {0:#x}); open it again")]
    Failed(u32),
    /// The controller is not there any more: all its registers read as ones.
    #[error("drive: the controller does not answer; its lender is gone, borrow it anew")]
    Absent,
    /// What was stored in a persistent memory region may be lost.
    #[error(
        "drive: what was stored in its persistent memory region may be lost; return it and borrow it anew"
    )]
    NotDurable,
    /// The controller is not one that this driver can use.
    #[error("drive: {0}")]
    Unsupported(&'static str),
    /// A request is not within what the drive or the queue can do.
    #[error("drive: {0}")]
    Request(&'static str),
}
