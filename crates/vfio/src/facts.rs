//! What sysfs says of PCI functions: their IOMMU groups, drivers, BARs, virtual functions, and who uses them.
//!
//! Everything is read below a folder that is given ([`Sysfs`]), so that it is tested with one that is made up.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{VfioError, file};

/// Base class and subclass of bridges between PCI buses (PCI code and ID assignment, section 1.7).
const PCI_BRIDGE: u32 = 0x0604;
/// Base class of bridges.
/// Intel's NTB of the third generation, and the bridge in software with its registers.
pub const INTEL_NTB_GEN3: (u16, u16) = (0x8086, 0x201c);
const BRIDGE: u32 = 0x06;
/// Bits of a line of `resource` (Linux, `include/linux/ioport.h`).
const IO: u64 = 0x100;
const MEMORY: u64 = 0x200;
const PREFETCHABLE: u64 = 0x2000;
const WIDE: u64 = 0x10_0000;

/// Where a function is: domain, bus, device and function, as `lspci -D` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// PCI domain, which Linux calls segment too.
    pub domain: u32,
    /// Bus of the domain.
    pub bus: u8,
    /// Device of the bus, 0 to 31.
    pub device: u8,
    /// Function of the device, 0 to 7.
    pub function: u8,
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = VfioError;

    /// Reads `0000:03:00.0` or `03:00.0`.
    fn from_str(text: &str) -> Result<PciAddress, VfioError> {
        let wrong = || VfioError::NoAddress(text.to_owned());
        let number = |part: &str, most: u32| {
            let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = u32::from_str_radix(part, 16).ok().filter(|_| digits && part.len() <= 8);
            value.filter(|value| *value <= most).ok_or_else(wrong)
        };
        let (place, function) = text.rsplit_once('.').ok_or_else(wrong)?;
        let parts: Vec<&str> = place.split(':').collect();
        let (domain, bus, device) = match parts[..] {
            [bus, device] => ("0", bus, device),
            [domain, bus, device] => (domain, bus, device),
            _ => return Err(wrong()),
        };
        Ok(PciAddress {
            domain: number(domain, u32::MAX)?,
            bus: number(bus, 0xff)? as u8,
            device: number(device, 31)? as u8,
            function: number(function, 7)? as u8,
        })
    }
}

impl TryFrom<String> for PciAddress {
    type Error = VfioError;

    fn try_from(text: String) -> Result<PciAddress, VfioError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// A base address register, as the kernel found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BarFacts {
    /// Its number, 0 to 5.
    pub bar: u8,
    /// Size of the BAR in bytes.
    pub size: u64,
    /// Whether it is of I/O ports, not of memory.
    pub io: bool,
    /// Whether its address has 64 bits.
    pub wide: bool,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
}

/// What sysfs says of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// PCI address of the function.
    pub address: PciAddress,
    /// PCI vendor ID, as sysfs has it.
    pub vendor: u16,
    /// PCI device ID, as sysfs has it.
    pub device: u16,
    /// Class code: base class, subclass, programming interface.
    pub class: u32,
    /// The kernel's driver that has it.
    pub driver: Option<String>,
    /// Number of its IOMMU group; none on a machine without an IOMMU.
    pub group: Option<u32>,
    /// The other functions of the group.
    pub companions: Vec<PciAddress>,
    /// Its BARs, those that have a size.
    pub bars: Vec<BarFacts>,
    /// How many virtual functions it can have.
    pub virtual_total: u16,
    /// Those that it has, in order.
    pub virtual_functions: Vec<PciAddress>,
    /// The function that it is a virtual function of.
    pub physical: Option<PciAddress>,
    /// The ways to reset it, the kernel's choice first; none where the kernel does not tell.
    pub reset_methods: Vec<String>,
}

impl Facts {
    /// Whether it is a bridge, which belongs to the machine and not to a driver that could give it up.
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == BRIDGE && !self.is_ntb()
    }

    /// Whether it is a non-transparent bridge that rackbus knows: it leads to another machine.
    pub fn is_ntb(&self) -> bool {
        (self.vendor, self.device) == INTEL_NTB_GEN3
    }

    /// Whether it leads to another bus. VFIO's groups may have such ones among their members.
    pub fn is_pci_bridge(&self) -> bool {
        self.class >> 8 == PCI_BRIDGE
    }

    /// What it is, in a few words for people.
    pub fn kind(&self) -> &'static str {
        match self.class >> 8 {
            0x0108 => "NVMe drive",
            0x0106 => "SATA controller",
            0x0200 => "Ethernet card",
            0x0207 => "InfiniBand card",
            0x0c03 => "USB controller",
            0x1200 => "accelerator",
            PCI_BRIDGE => "bridge",
            class => match class >> 8 {
                0x01 => "storage controller",
                0x02 => "network card",
                0x03 => "display controller",
                0x04 => "multimedia device",
                0x05 => "memory",
                BRIDGE => "bridge",
                _ => "device",
            },
        }
    }
}

/// The folders of the kernel's that are read: `/sys`, and for what is in use `/proc/self/mountinfo`, `/proc/swaps`, and
/// the disks in `/dev`.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
    proc: PathBuf,
    dev: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Sysfs {
        let [root, proc, dev] = ["/sys", "/proc", "/dev"].map(PathBuf::from);
        Sysfs { root, proc, dev }
    }
}

impl Sysfs {
    /// Those of this machine.
    pub fn here() -> Sysfs {
        Sysfs::default()
    }

    /// Those below `root`, which has `sys`, `proc` and `dev`.
    pub fn below(root: &Path) -> Sysfs {
        let [root, proc, dev] = ["sys", "proc", "dev"].map(|name| root.join(name));
        Sysfs { root, proc, dev }
    }

    /// The folder of a function.
    pub fn function(&self, address: PciAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(address.to_string())
    }

    /// The folder of a driver.
    pub fn driver(&self, name: &str) -> PathBuf {
        self.root.join("bus/pci/drivers").join(name)
    }

    /// Whether the kernel has a module.
    pub fn has_module(&self, name: &str) -> bool {
        self.root.join("module").join(name).is_dir()
    }

    /// The file by which the kernel looks for a driver of a function.
    pub fn probe(&self) -> PathBuf {
        self.root.join("bus/pci/drivers_probe")
    }

    /// What there is to know of a function.
    ///
    /// # Errors
    /// When there is none, or it is not readable.
    pub fn facts(&self, address: PciAddress) -> Result<Facts, VfioError> {
        let path = self.function(address);
        if !path.is_dir() {
            return Err(VfioError::NotFound(address));
        }
        let group = link(&path, "iommu_group").and_then(|name| name.parse().ok());
        let mut companions = self.members(group)?;
        companions.retain(|member| *member != address);
        let virtual_function = |number| link(&path, &format!("virtfn{number}"))?.parse().ok();
        Ok(Facts {
            address,
            vendor: hex(&path, "vendor") as u16,
            device: hex(&path, "device") as u16,
            class: hex(&path, "class"),
            driver: link(&path, "driver"),
            group,
            companions,
            bars: bars(&text(&path, "resource")),
            virtual_total: number(&path, "sriov_totalvfs"),
            virtual_functions: (0..number(&path, "sriov_numvfs"))
                .map_while(virtual_function)
                .collect(),
            physical: link(&path, "physfn").and_then(|name| name.parse().ok()),
            reset_methods: text(&path, "reset_method")
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
        })
    }

    /// All functions of the machine, in order.
    ///
    /// # Errors
    /// When the kernel's list cannot be read. A machine without PCI has none.
    pub fn all(&self) -> Result<Vec<PciAddress>, VfioError> {
        addresses(&self.root.join("bus/pci/devices"))
    }

    /// The functions of an IOMMU group, in order.
    fn members(&self, group: Option<u32>) -> Result<Vec<PciAddress>, VfioError> {
        let Some(group) = group else { return Ok(Vec::new()) };
        addresses(&self.root.join(format!("kernel/iommu_groups/{group}/devices")))
    }

    /// Whether the IOMMU lets the functions of a group reach everything (`iommu=pt`), until VFIO has them.
    pub fn passes_through(&self, group: u32) -> bool {
        text(&self.root, &format!("kernel/iommu_groups/{group}/type")) == "identity"
    }

    /// Checks that a function can be lent: that it is no bridge, an IOMMU bounds it, and nothing that shares its
    /// group is in use. What shares the group and is not in use is told: lent or not, it is in the same hands.
    ///
    /// # Errors
    /// [`VfioError`], naming what is in the way.
    pub fn check(&self, address: PciAddress) -> Result<Facts, VfioError> {
        let facts = self.facts(address)?;
        if facts.is_bridge() {
            return Err(VfioError::Bridge(address));
        }
        let group = facts.group.ok_or(VfioError::NoIommu(address))?;
        let mut in_use = Vec::new();
        for companion in &facts.companions {
            let other = self.facts(*companion)?;
            let free =
                |driver: &str| is_vfio(driver) || (driver == "pcieport" && other.is_pci_bridge());
            match other.driver.as_deref() {
                Some(driver) if !free(driver) => in_use.push((*companion, driver.to_owned())),
                _ => {}
            }
        }
        let Some((first, _)) = in_use.first().cloned() else { return Ok(facts) };
        let named =
            |(address, driver): &(PciAddress, String)| format!("{address} (driven by {driver})");
        let others = in_use.iter().map(named).collect::<Vec<_>>().join(", ");
        Err(VfioError::GroupInUse { address, group, others, first })
    }

    /// What of this machine uses the function: mounted file systems, swap space, network interfaces that are up.
    ///
    /// # Errors
    /// The first that is found, with what to do.
    pub fn check_unused(&self, address: PciAddress) -> Result<(), VfioError> {
        let path = self.function(address);
        let interfaces = names(&path.join("net"));
        let up = |name: &&String| text(&path, &format!("net/{name}/operstate")) == "up";
        if let Some(name) = interfaces.iter().find(up) {
            let what = format!("its network interface {name} is up");
            let hint = "take it down first (ip link set NAME down), or add --force";
            return Err(VfioError::InUse { address, what, hint });
        }
        let Ok(place) = fs::canonicalize(&path) else { return Ok(()) };
        let places = self.places_of_disks(place);
        for disk in names(&self.root.join("block")) {
            let Ok(disk_place) = fs::canonicalize(self.root.join("block").join(&disk)) else {
                continue;
            };
            if places.iter().any(|place| disk_place.starts_with(place))
                && let Some(what) = self.use_of_disk(&disk, &disk_place)
            {
                let hint =
                    "unmount it (umount, swapoff) or take the volume apart first, or add --force";
                return Err(VfioError::InUse { address, what, hint });
            }
        }
        Ok(())
    }

    /// Below which folders the disks of the function at `place` are. A drive that may have several controllers has
    /// disks that stand for all ways to it, and these are not below any of its functions but below its NVMe subsystem.
    fn places_of_disks(&self, place: PathBuf) -> Vec<PathBuf> {
        let class = self.root.join("class/nvme-subsystem");
        let subsystems = names(&class).into_iter().map(|name| class.join(name));
        let is_of = |subsystem: &PathBuf| {
            let controllers = names(subsystem).into_iter().map(|name| subsystem.join(name));
            let mut places = controllers.filter_map(|link| fs::canonicalize(link).ok());
            places.any(|controller| controller.starts_with(&place))
        };
        let mut places: Vec<PathBuf> =
            subsystems.filter(is_of).filter_map(|path| fs::canonicalize(path).ok()).collect();
        places.push(place);
        places
    }

    /// Who uses a disk or a partition of it.
    fn use_of_disk(&self, disk: &str, place: &Path) -> Option<String> {
        let partitions = names(place).into_iter().filter(|name| name.starts_with(disk));
        let partitions = partitions.map(|name| (name.clone(), place.join(name)));
        let mounts = fs::read_to_string(self.proc.join("self/mountinfo")).unwrap_or_default();
        let swaps = fs::read_to_string(self.proc.join("swaps")).unwrap_or_default();
        for (name, place) in std::iter::once((disk.to_owned(), place.to_owned())).chain(partitions)
        {
            let number = text(&place, "dev");
            let mut mounted = mounts.lines().filter_map(Mounted::parse);
            let is_of = |it: &Mounted| it.number == number || self.names_disk(it.source, &name);
            if let Some(mounted) = mounted.find(is_of) {
                return Some(format!("{name} is mounted at {}", mounted.at));
            }
            if swaps
                .lines()
                .any(|line| line.split_whitespace().next() == Some(&format!("/dev/{name}")))
            {
                return Some(format!("{name} is swap space"));
            }
            if let Some(holder) = names(&place.join("holders")).first() {
                return Some(format!("{name} is part of {holder}"));
            }
            if self.is_claimed(&name) {
                return Some(format!("{name} is in use by a file system, a volume or a program"));
            }
        }
        None
    }

    /// Whether what a mount names as its source is this disk, by its own name or by a link in `/dev`.
    fn names_disk(&self, source: &str, disk: &str) -> bool {
        let Some(name) = source.strip_prefix("/dev/") else { return false };
        let real = fs::canonicalize(self.dev.join(name));
        name == disk || real.is_ok_and(|real| real.ends_with(disk))
    }

    /// Whether somebody has the disk for itself: file systems do with each of their disks, of which a mount names one,
    /// also those that are mounted in another namespace; and so do volumes, and programs that ask for it. Only the kernel
    /// knows all of them; it is asked by having the disk for a moment.
    fn is_claimed(&self, disk: &str) -> bool {
        let flags = (OFlags::EXCL | OFlags::NONBLOCK).bits();
        // `cciss/c0d0` is `cciss!c0d0` in sysfs.
        let path = self.dev.join(disk.replace('!', "/"));
        let opened = fs::File::options().read(true).custom_flags(flags as i32).open(path);
        opened.is_err_and(|cause| Errno::from_io_error(&cause) == Some(Errno::BUSY))
    }
}

/// A line of `mountinfo`.
struct Mounted<'a> {
    /// Of a file system that has one disk, the number of that.
    number: &'a str,
    at: &'a str,
    source: &'a str,
}

impl Mounted<'_> {
    /// proc(5): the third field is the device, the fifth where it is mounted; a hyphen ends the fields that may be
    /// missing, and type and source are next.
    fn parse(line: &str) -> Option<Mounted<'_>> {
        let mut fields = line.split(' ').skip(2);
        let (number, at) = (fields.next()?, fields.nth(1)?);
        let source = fields.skip_while(|field| *field != "-").nth(2).unwrap_or_default();
        Some(Mounted { number, at, source })
    }
}

/// Whether a driver hands functions to programs.
pub fn is_vfio(driver: &str) -> bool {
    driver == "vfio-pci" || driver.ends_with("-vfio-pci") || driver.ends_with("_vfio_pci")
}

/// The BARs of a `resource` file: a line for each of the first six, with first and last address, and flags.
fn bars(text: &str) -> Vec<BarFacts> {
    let line = |(bar, line): (u8, &str)| {
        let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        let words: Vec<u64> = line.split_whitespace().map_while(number).collect();
        let [first, last, flags] = words[..] else { return None };
        let known = flags & (IO | MEMORY) != 0 && last > first;
        let size = last.checked_sub(first)?.checked_add(1).filter(|_| known)?;
        Some(BarFacts {
            bar,
            size,
            io: flags & IO != 0,
            wide: flags & WIDE != 0,
            prefetchable: flags & PREFETCHABLE != 0,
        })
    };
    (0..6).zip(text.lines()).filter_map(line).collect()
}

/// The functions that a folder has entries of, in order.
fn addresses(folder: &Path) -> Result<Vec<PciAddress>, VfioError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(file(folder)(cause)),
    };
    let address = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let found: BTreeSet<PciAddress> = entries.flatten().filter_map(address).collect();
    Ok(found.into_iter().collect())
}

/// The entries of a folder, in order; none where there is no folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The last part of what a link leads to.
fn link(path: &Path, name: &str) -> Option<String> {
    let target = fs::read_link(path.join(name)).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

fn text(path: &Path, name: &str) -> String {
    fs::read_to_string(path.join(name)).unwrap_or_default().trim().to_owned()
}

fn hex(path: &Path, name: &str) -> u32 {
    let text = text(path, name);
    text.strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok()).unwrap_or(0)
}

fn number(path: &Path, name: &str) -> u16 {
    text(path, name).parse().unwrap_or(0)
}

#[cfg(test)]
pub(crate) mod tests;
