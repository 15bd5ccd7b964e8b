//! PCI functions of this machine, for drivers in user space: in a guest that borrowed one, or on bare metal.
//!
//! Linux gives a function to a program in two ways, and [`MachineFunction::open`] takes the one that the
//! function is set up for:
//!
//! * `vfio` (the function is bound to `vfio-pci`, and an IOMMU translates what it reaches): addresses are those
//!   that the program chose, memory is any, and it takes no more than the right to open `/dev/vfio/GROUP`.
//!   Interrupts come by MSI-X or MSI.
//! * `sysfs` (bound to `uio_pci_generic`, or to nothing): BAR 0 is mapped from the function's folder in sysfs, by
//!   root. Addresses are physical, so memory is in huge pages, which lie in one piece each and stay where
//!   they are ([`physical`]). There are no interrupts. A function that was borrowed through an NTB finds physical memory
//!   in a window of its lender's ([`MemoryWindow`]).

pub mod physical;
mod sysfs;
mod vfio;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rackbus_memory::{Event, RegionError, SharedMemory};
use rackbus_spec::pcie::{Command, header};
use rackbus_vfio::{PciAddress, VfioError};

/// Where Linux lists PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";

/// Why a function of this machine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// There is another device.
    #[error(
        "{address} is another device than {wanted}; name the address of one, as lspci shows it"
    )]
    Another {
        /// The PCI address that was named.
        address: String,
        /// What it should be.
        wanted: FunctionKind,
    },
    /// This machine has none at that address.
    #[error("there is no PCI function {0} on this machine; `lspci -D` lists them")]
    NotFound(String),
    /// A driver of the kernel's has it.
    #[error(
        "{address} is driven by {driver}; take it away first: echo {address} \
         >{DEVICES}/{address}/driver/unbind"
    )]
    InUse {
        /// PCI address of the function.
        address: String,
        /// Name of the kernel's driver that has it.
        driver: String,
    },
    /// A file of the kernel's could not be used.
    #[error("{path}: {cause}")]
    File {
        /// The file that cannot be used.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// An IOMMU is in the way of physical addresses.
    #[error("an IOMMU translates what {0} reaches; bind it to vfio-pci")]
    Translated(String),
    /// VFIO cannot be used for it.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// The function's BAR 0 is not what its driver needs.
    #[error("{0:#x} is not inside of BAR 0")]
    OutOfBar(u64),
    /// The function was removed.
    #[error("the function was removed from this machine")]
    Gone,
    /// Memory could not be shared with it.
    #[error(
        "memory in huge pages, which a function without an IOMMU takes: {0}; echo 8 >/proc/sys/vm/nr_hugepages"
    )]
    HugePages(RegionError),
    /// Memory of another function's driver may be moved by the kernel.
    #[error(
        "a function without an IOMMU reaches memory in huge pages alone, and the other function's driver has none: drive \
         both in the same way, by vfio-pci with an IOMMU or both without one"
    )]
    SmallPages,
    /// Memory could not be shared with it.
    #[error("memory: {0}")]
    Memory(#[from] RegionError),
    /// A window of the lender's does not lead to all of the memory.
    #[error(
        "memory at {address:#x} is not in the window by which its lender's host reaches {size:#x} bytes of this one; \
         have the NTB's window 2 cover all memory"
    )]
    OutsideWindow {
        /// Physical address of memory that is not in it.
        address: u64,
        /// Bytes that are in it, from physical address 0 on.
        size: u64,
    },
    /// Physical addresses are told to root only.
    #[error(
        "the kernel tells no physical addresses to this user; be root, or use an IOMMU and vfio-pci"
    )]
    NoAddresses,
}

/// What a function of this machine is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionKind {
    /// Of this vendor, with this device number.
    Identity(u16, u16),
    /// Of this class: base class, sub-class and programming interface, 24 bits together.
    Class(u32),
}

impl FunctionKind {
    /// Whether the function in this folder of sysfs is one.
    fn is(self, path: &Path) -> bool {
        match self {
            FunctionKind::Identity(vendor, device) => {
                is(path, "vendor", vendor.into()) && is(path, "device", device.into())
            }
            FunctionKind::Class(class) => is(path, "class", class),
        }
    }
}

impl std::fmt::Display for FunctionKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FunctionKind::Identity(vendor, device) => write!(f, "{vendor:04x}:{device:04x}"),
            FunctionKind::Class(class) => write!(f, "one of class {class:06x}"),
        }
    }
}

pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> MachineError {
    let path = path.into();
    move |cause| MachineError::File { path, cause }
}

/// A run of memory that a function reaches in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReachedRun {
    /// Where it begins in the memory, in bytes.
    pub offset: u64,
    /// Where the function reaches that byte.
    pub address: u64,
}

/// Where a function of another host's, which was borrowed through an NTB, finds this host's physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryWindow {
    /// What it adds to a physical address.
    pub base: u64,
    /// Bytes of physical memory that it finds there, from address 0 on.
    pub size: u64,
}

/// A function of this machine in use. When it is dropped, it is stopped and given back.
#[derive(Debug)]
pub struct MachineFunction(MachineDevice);

#[derive(Debug)]
enum MachineDevice {
    Vfio(vfio::MachineVfioDevice),
    Sysfs(sysfs::SysfsDevice),
}

impl MachineFunction {
    /// Opens the function at `address`, `0000:01:00.0` or `01:00.0`.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn open(address: &str) -> Result<MachineFunction, MachineError> {
        MachineFunction::at(Place::find(Path::new(DEVICES), address)?)
    }

    /// The same for a function of this kind alone: opening resets it, and another one is left as it is.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn open_only(address: &str, wanted: FunctionKind) -> Result<MachineFunction, MachineError> {
        let place = Place::find(Path::new(DEVICES), address)?;
        if !wanted.is(&place.path) {
            return Err(MachineError::Another { address: place.address, wanted });
        }
        MachineFunction::at(place)
    }

    /// Whether it is given physical addresses: no IOMMU is in between.
    pub fn has_physical_addresses(&self) -> bool {
        matches!(self.0, MachineDevice::Sysfs(_))
    }

    /// The same, where it was borrowed through an NTB and reaches this host's memory by `window`. With an IOMMU of this host's
    /// in between addresses are the program's, and nothing changes.
    #[must_use]
    pub fn behind(self, window: MemoryWindow) -> MachineFunction {
        match self.0 {
            MachineDevice::Sysfs(device) => {
                MachineFunction(MachineDevice::Sysfs(device.behind(window)))
            }
            vfio => MachineFunction(vfio),
        }
    }

    fn at(place: Place) -> Result<MachineFunction, MachineError> {
        match place.driver().as_deref() {
            Some("vfio-pci") => {
                Ok(MachineFunction(MachineDevice::Vfio(vfio::MachineVfioDevice::open(&place)?)))
            }
            None | Some("uio_pci_generic") => {
                Ok(MachineFunction(MachineDevice::Sysfs(sysfs::SysfsDevice::open(&place)?)))
            }
            Some(driver) => {
                Err(MachineError::InUse { address: place.address, driver: driver.to_owned() })
            }
        }
    }

    /// Reads from BAR 0, words of four bytes.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), MachineError> {
        for (at, word) in words(offset, data.len())?.zip(data.chunks_exact_mut(4)) {
            let value = match &self.0 {
                MachineDevice::Vfio(device) => device.read(at)?,
                MachineDevice::Sysfs(device) => device.read(at)?,
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    /// Writes to BAR 0, words of four bytes.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), MachineError> {
        for (at, word) in words(offset, data.len())?.zip(data.chunks_exact(4)) {
            let mut value = [0; 4];
            value.copy_from_slice(word);
            let value = u32::from_le_bytes(value);
            match &self.0 {
                MachineDevice::Vfio(device) => device.write(at, value)?,
                MachineDevice::Sysfs(device) => device.write(at, value)?,
            }
        }
        Ok(())
    }

    /// Memory that it can reach, of `length` bytes at least.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn memory(&self, name: &str, length: u64) -> Result<SharedMemory, MachineError> {
        match &self.0 {
            MachineDevice::Vfio(_) => Ok(SharedMemory::create(name, length)?),
            MachineDevice::Sysfs(_) => {
                SharedMemory::create_huge(name, length).map_err(MachineError::HugePages)
            }
        }
    }

    /// Resets it, lets it reach `memory`, which came from [`memory`](MachineFunction::memory), and enables it. With
    /// an IOMMU the memory is at `iova`, else where it happens to lie.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn start(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> Result<Vec<ReachedRun>, MachineError> {
        match &mut self.0 {
            MachineDevice::Vfio(device) => device.start(iova, memory),
            MachineDevice::Sysfs(device) => device.start(memory),
        }
    }

    /// Lets it read memory of another function's driver, at `iova` where there is an IOMMU, and else where it happens to lie,
    /// in huge pages. One at a time.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn share(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> Result<Vec<ReachedRun>, MachineError> {
        match &mut self.0 {
            MachineDevice::Vfio(device) => device.share(iova, memory),
            MachineDevice::Sysfs(device) => device.share(memory),
        }
    }

    /// Takes `length` bytes of such memory away. What is reached by physical addresses is, for as long as it is there: it
    /// stays until there is other memory in its place, or the function is stopped.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn unshare(&mut self, iova: u64, length: u64) -> Result<(), MachineError> {
        match &mut self.0 {
            MachineDevice::Vfio(device) => device.unshare(iova, length),
            MachineDevice::Sysfs(_) => Ok(()),
        }
    }

    /// Interrupts of it by up to `count` vectors, each with its event: as many as it has, or none.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, MachineError> {
        match &mut self.0 {
            MachineDevice::Vfio(device) => device.interrupts(count),
            MachineDevice::Sysfs(_) => Ok(Vec::new()),
        }
    }
}

/// The addresses of this machine's functions of that vendor and device, in order.
///
/// # Errors
/// When sysfs cannot be read. A machine without PCI has none.
pub fn find(vendor: u16, device: u16) -> Result<Vec<String>, MachineError> {
    find_in(Path::new(DEVICES), vendor, device)
}

fn find_in(devices: &Path, vendor: u16, device: u16) -> Result<Vec<String>, MachineError> {
    let entries = match fs::read_dir(devices) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(file(devices)(cause)),
    };
    let mut found: Vec<String> = entries
        .flatten()
        .filter(|entry| FunctionKind::Identity(vendor, device).is(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    found.sort();
    Ok(found)
}

/// Whether sysfs says of the function in `path` that its `name` is `wanted`.
fn is(path: &Path, name: &str, wanted: u32) -> bool {
    let text = fs::read_to_string(path.join(name)).unwrap_or_default();
    let number = text.trim().strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok());
    number == Some(wanted)
}

/// Whether a text has the form of a PCI address, `0000:01:00.0` or `01:00.0`.
pub fn is_address(text: &str) -> bool {
    text.parse::<PciAddress>().is_ok()
}

/// Where sysfs has a function.
#[derive(Debug)]
struct Place {
    address: String,
    path: PathBuf,
}

impl Place {
    fn find(devices: &Path, address: &str) -> Result<Place, MachineError> {
        let known = |c: char| c.is_ascii_hexdigit() || matches!(c, ':' | '.');
        let named = |address: &str| {
            let path = devices.join(address);
            (address.chars().all(known) && !address.starts_with('.') && path.is_dir())
                .then(|| Place { address: address.to_owned(), path })
        };
        let found = named(address).filter(|_| !address.is_empty());
        let found = found.or_else(|| named(&format!("0000:{address}")));
        found.ok_or_else(|| MachineError::NotFound(address.to_owned()))
    }

    /// The last part of what a link of it leads to.
    fn link(&self, name: &str) -> Option<String> {
        let target = fs::read_link(self.path.join(name)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    fn driver(&self) -> Option<String> {
        self.link("driver")
    }

    fn iommu_group(&self) -> Option<String> {
        self.link("iommu_group")
    }
}

/// The words of an access.
fn words(offset: u64, length: usize) -> Result<impl Iterator<Item = u64>, MachineError> {
    match offset.is_multiple_of(4) && length.is_multiple_of(4) {
        true => Ok((offset..).step_by(4)),
        false => Err(MachineError::OutOfBar(offset)),
    }
}

/// Where the command register is, and with what it enables a function, or takes its bus mastering away.
const COMMAND: u64 = header::COMMAND as u64;

fn enabled(command: u16) -> u16 {
    command | (Command::MEMORY_SPACE | Command::BUS_MASTER).bits()
}

fn disabled(command: u16) -> u16 {
    command & !Command::BUS_MASTER.bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as sysfs has it.
    fn devices() -> PathBuf {
        let name =
            format!("rackbus-machine-{}-{:?}", std::process::id(), std::thread::current().id());
        let root = std::env::temp_dir().join(name);
        for (address, device) in
            [("0000:02:00.0", "0x7261"), ("0000:01:00.0", "0x7261"), ("0001:00:00.0", "0x0001")]
        {
            let path = root.join(address);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("vendor"), "0x1234\n").unwrap();
            fs::write(path.join("device"), format!("{device}\n")).unwrap();
            fs::write(path.join("class"), "0x010802\n").unwrap();
        }
        std::os::unix::fs::symlink("../../bus/pci/drivers/nvme", root.join("0001:00:00.0/driver"))
            .unwrap();
        root
    }

    #[test]
    fn functions_are_found_by_their_ids_and_by_either_form_of_their_address() {
        let root = devices();
        assert_eq!(find_in(&root, 0x1234, 0x7261).unwrap(), ["0000:01:00.0", "0000:02:00.0"]);
        assert!(find_in(&root, 0x1234, 0x7262).unwrap().is_empty());
        assert!(find_in(&root.join("none"), 0x1234, 0x7261).unwrap().is_empty());
        for address in ["01:00.0", "0000:01:00.0"] {
            let place = Place::find(&root, address).unwrap();
            assert_eq!((place.address.as_str(), place.driver()), ("0000:01:00.0", None));
        }
        let path = root.join("0000:01:00.0");
        assert!(FunctionKind::Class(0x01_0802).is(&path) && !FunctionKind::Class(0x0802).is(&path));
        assert_eq!(Place::find(&root, "0001:00:00.0").unwrap().driver().as_deref(), Some("nvme"));
        for wrong in ["", ".", "..", "03:00.0", "../x", "0000:01:00.0/vendor"] {
            let error = Place::find(&root, wrong).unwrap_err();
            assert!(matches!(error, MachineError::NotFound(_)), "{wrong}");
        }
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_socket_is_not_taken_for_an_address() {
        assert!(is_address("01:00.0") && is_address("0000:01:00.0"));
        for other in ["", "01:00", "/run/01:00.0", "nvme0.1.sock", "01:00.0.sock", "01:00.8"] {
            assert!(!is_address(other), "{other}");
        }
    }

    #[test]
    fn accesses_are_words() {
        assert_eq!(words(8, 8).unwrap().take(2).collect::<Vec<_>>(), [8, 12]);
        assert!(words(2, 4).is_err() && words(4, 2).is_err());
    }
}
