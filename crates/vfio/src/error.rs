//! Why a function of this machine cannot be used.

use std::io;
use std::path::PathBuf;

use rackbus_memory::RegionError;
use rustix::io::Errno;

use crate::facts::PciAddress;

/// Why a function cannot be taken, opened, mapped or given back. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// All memory was taken away, and no more is given.
    #[error("the function's memory was taken away from it")]
    Revoked,
    /// It is no address of a PCI function.
    #[error(
        "{0:?} is no PCI address; it is DOMAIN:BUS:DEVICE.FUNCTION, such as 0000:03:00.0 (`lspci -D`)"
    )]
    NoAddress(String),
    /// This machine has no function there.
    #[error("there is no PCI function {0} on this machine; `lspci -D` lists them")]
    NotFound(PciAddress),
    /// No IOMMU bounds what it reaches.
    #[error(
        "{0} is in no IOMMU group, so nothing would bound what it reaches; switch the IOMMU on in the firmware \
         and with intel_iommu=on (Intel) on the kernel's command line"
    )]
    NoIommu(PciAddress),
    /// The kernel has no VFIO, or it is not loaded.
    #[error("{path}: {cause}; load the kernel's modules: modprobe vfio-pci")]
    NoVfio {
        /// The file that is missing.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// VFIO is there and is one that this program does not know.
    #[error("the kernel's VFIO has no IOMMU of type 1, version 2")]
    NoType1,
    /// A process was passed another function's file, or without its group.
    #[error("what was passed on as the function {0} is that of another one")]
    NotOfFile(PciAddress),
    /// Others of its IOMMU group are in use.
    #[error(
        "{address} shares IOMMU group {group} with {others}, so whoever has one reaches the others; take these \
         from their drivers too (rackbus lend {first}, or unbind them), or move the card to another slot"
    )]
    GroupInUse {
        /// PCI address of the function.
        address: PciAddress,
        /// Number of the group, which is given to one user as a whole.
        group: u32,
        /// The functions that are in use, each with its driver.
        others: String,
        /// The first of them.
        first: PciAddress,
    },
    /// Somebody has the group open.
    #[error(
        "another process has IOMMU group {group} open, or still maps registers of a function of it; \
         `fuser /dev/vfio/{group}` and /proc/*/maps name it"
    )]
    Busy {
        /// Number of the group that somebody has open.
        group: u32,
    },
    /// Somebody else took it, and still runs or uses it.
    #[error(
        "{address} is taken by {taker}; end that first, or have it given back: rackbus lend {address} --return"
    )]
    TakenBy {
        /// PCI address of the function.
        address: PciAddress,
        /// Who took it, as the note has it.
        taker: String,
    },
    /// Another process takes functions or gives them back, for long.
    #[error(
        "another process is taking functions of this machine, or giving them back, and does not end; `fuser {}` names it",
        lock.display()
    )]
    Locked {
        /// The file that it has locked.
        lock: PathBuf,
    },
    /// The function is what this machine runs on.
    #[error("{address} is in use: {what}; {hint}")]
    InUse {
        /// PCI address of the function.
        address: PciAddress,
        /// What it is in use for.
        what: String,
        /// What the user can do about it.
        hint: &'static str,
    },
    /// It is a bridge, which cannot be lent by itself.
    #[error("{0} is a bridge; lend the functions behind it")]
    Bridge(PciAddress),
    /// It has fewer virtual functions than are wanted.
    #[error("{address} can have {total} virtual functions, not {wanted}")]
    VirtualFunctions {
        /// PCI address of the function.
        address: PciAddress,
        /// How many it can have.
        total: u16,
        /// How many are wanted.
        wanted: u16,
    },
    /// It was taken, and somebody gave it back meanwhile.
    #[error("{0} was given back to its driver; take it again: rackbus lend {0}")]
    GivenBack(PciAddress),
    /// A driver does not release the function, or another one took the function.
    #[error("{address} is not bound to {wanted} but to {found}; `dmesg` may say why")]
    NotBound {
        /// PCI address of the function.
        address: PciAddress,
        /// The driver that it should have.
        wanted: String,
        /// The driver that the function has.
        found: String,
    },
    /// A file of the kernel's, or a note of ours, could not be used.
    #[error("{path}: {cause}")]
    File {
        /// Which file of the kernel's.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// More memory would be pinned than this process may.
    #[error(
        "{length} bytes of memory cannot be pinned: this process may lock {limit} bytes; run it as root, or \
         raise its limit (ulimit -l unlimited, LimitMEMLOCK=infinity)"
    )]
    LockedMemory {
        /// Bytes of the mapping.
        length: u64,
        /// The process' limit in bytes.
        limit: u64,
    },
    /// There are too many mappings.
    #[error(
        "the kernel allows no more mappings for this container; raise the module parameter \
         vfio_iommu_type1.dma_entry_limit"
    )]
    TooManyMappings,
    /// The IOMMU has no such addresses.
    #[error(
        "the IOMMU cannot map {iova:#x}+{length:#x}; it can map whole pages in {usable}, what is mapped \
         already left out"
    )]
    Range {
        /// First address of the range, as the device sees it.
        iova: u64,
        /// Length of the range in bytes.
        length: u64,
        /// The ranges that can be mapped.
        usable: String,
    },
    /// The IOMMU has no such addresses, or a part of them is mapped: a [range](VfioError::Range) that nobody looked at.
    #[error("the IOMMU cannot map {iova:#x}+{length:#x}, or a part of it is mapped already")]
    Unmappable {
        /// First address of the range, as the device sees it.
        iova: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// Nothing is mapped there, or a part of a mapping.
    #[error("no mapping is at {iova:#x}+{length:#x}")]
    NotMapped {
        /// First address of the range, as the device sees it.
        iova: u64,
        /// Length of the range in bytes.
        length: u64,
    },
    /// An access is not inside of a region.
    #[error("{length} bytes at {offset:#x} are not inside of region {region}")]
    OutOfRegion {
        /// Index of the region that was accessed.
        region: u32,
        /// Where the access begins.
        offset: u64,
        /// Length of the access in bytes.
        length: usize,
    },
    /// Registers cannot be mapped into this process.
    #[error("registers: {0}")]
    Registers(#[from] RegionError),
    /// The kernel knows no way to reset the function.
    #[error("{0} cannot be reset: neither by itself nor with its bus, nor by its power states")]
    NoReset(PciAddress),
    /// The kernel refused a request.
    #[error("VFIO, {what} of {of}: {cause}")]
    Refused {
        /// Name of the request to VFIO.
        what: &'static str,
        /// The function, group or container that it was for.
        of: String,
        /// What the kernel said.
        cause: Errno,
    },
}

/// Names the file in an error.
pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> VfioError {
    let path = path.into();
    move |cause| VfioError::File { path, cause }
}

/// Names the request in an error.
pub(crate) fn refused(what: &'static str, of: impl ToString) -> impl FnOnce(Errno) -> VfioError {
    let of = of.to_string();
    move |cause| VfioError::Refused { what, of, cause }
}
