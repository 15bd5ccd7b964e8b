//! What goes wrong with functions that are lent or borrowed through an NTB.

use rackbus_vfio::{PciAddress, VfioError};
use rustix::io::Errno;

/// Why it does not continue.
#[derive(Debug, thiserror::Error)]
pub enum MetalError {
    /// A function or NTB cannot be used by VFIO.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// There is no memory for a control area.
    #[error("no memory for a control area: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// An event cannot be made, or a thread.
    #[error("{what}: {cause}")]
    System {
        /// The step that failed.
        what: &'static str,
        /// What the system says.
        cause: std::io::Error,
    },
    /// It is no NTB that is known.
    #[error("{address} is {vendor:04x}:{device:04x}, no NTB that is known (8086:201c)")]
    NotAnNtb {
        /// PCI address of the function or NTB.
        address: PciAddress,
        /// PCI vendor ID that was found.
        vendor: u16,
        /// PCI device ID that was found.
        device: u16,
    },
    /// The NTB's windows cannot be used.
    #[error("the NTB {address} cannot be used: {reason}")]
    Windows {
        /// PCI address of the function or NTB.
        address: PciAddress,
        /// What is wrong with it, for people.
        reason: &'static str,
    },
    /// The device cannot be lent through a window.
    #[error("{device} cannot be lent through an NTB: {reason}")]
    NotLendable {
        /// PCI address of the function, or the name of a modelled one.
        device: String,
        /// What is wrong with it, for people.
        reason: String,
    },
    /// The model of a device refuses.
    #[error("{device}: {what} failed: {cause}")]
    Model {
        /// Name of the device whose model refuses.
        device: String,
        /// The step that failed.
        what: &'static str,
        /// What the model says.
        cause: rackbus_pci::vfio_user::RequestRefused,
    },
    /// The borrower's memory cannot be lent to it, or its registers to the borrower.
    #[error("what the function and its borrower would reach of each other is not lent: {0}")]
    NotLent(#[from] rackbus_fabric::LoanError),
    /// The window has no room for its BARs.
    #[error(
        "the NTB's window has no room for the BARs of {0}: lend fewer devices, or give the NTB a larger window"
    )]
    NoRoom(String),
    /// What another process passed on cannot be gone on with.
    #[error("a window that another process passed on: {0}")]
    Passed(String),
    /// What a borrower asked of a lent function is still being done.
    #[error("{0} does not do what its borrower asked for in time")]
    Late(String),
    /// A function is isolated for a user at its borrower, whose mappings only this process makes.
    #[error("{0} is used by its borrower's vfio-pci")]
    Isolated(String),
    /// The NTB is not the kernel module's.
    #[error("the NTB {address} is not bound to the module rackbus: {reason}")]
    NotBound {
        /// PCI address of the function or NTB.
        address: PciAddress,
        /// What is wrong with it, for people.
        reason: String,
    },
    /// Functions that were borrowed through an NTB are listed still.
    #[error(
        "functions that were borrowed through the NTB {ntb} are there still: return them first, by rackbus metal return {handles}"
    )]
    Behind {
        /// PCI address of the NTB.
        ntb: PciAddress,
        /// The functions' handles, for people.
        handles: String,
    },
    /// The kernel module is not there.
    #[error("there is no /dev/rackbus: load the kernel module rackbus ({0})")]
    NoModule(std::io::Error),
    /// The kernel module is of another version.
    #[error(
        "the kernel module speaks version {0} of its interface, this program version 1: update either"
    )]
    Version(u32),
    /// The kernel module refuses.
    #[error("{what}: {} ({errno})", explain(*.errno))]
    Refused {
        /// The request to the module.
        what: String,
        /// The error number that the module returned.
        errno: Errno,
    },
    /// A name is too long for the module.
    #[error("the name '{0}' has more than 63 bytes, or a NUL")]
    Name(String),
}

/// What the kernel module means, in words (`kernel/include/uapi/linux/rackbus.h`).
fn explain(errno: Errno) -> &'static str {
    match errno {
        Errno::NODEV => "there is no such NTB, or it is not bound to the module rackbus",
        Errno::NOLINK => "the NTB's link is down; is the lender there?",
        Errno::SHUTDOWN => {
            "this host has closed the NTB, as a lender did not say that a device reaches memory no more; \
             rackbus metal reopen NTB opens it"
        }
        Errno::AGAIN => "its lender is still resetting it for its last user; try again",
        Errno::NXIO => "nothing is lent there",
        Errno::STALE => "another lease has that function now",
        Errno::PROTO => "what the lender says is wrong; the kernel's log says what",
        Errno::EXIST => "it overlaps a function that is borrowed already",
        Errno::NOSPC => "the NTB has no interrupt left, or too many functions are borrowed",
        Errno::PERM => {
            "the NTB's memory accesses pass by this host's IOMMU, which is on: boot with iommu=pt or without it"
        }
        Errno::RANGE => "the device does not reach all of this host's memory through the window",
        Errno::NOENT => "no such function is borrowed",
        Errno::BUSY => "it is in use; unmount its file systems first, or use force",
        Errno::TIMEDOUT => "its driver has not released it yet",
        _ => "the kernel module refuses",
    }
}
