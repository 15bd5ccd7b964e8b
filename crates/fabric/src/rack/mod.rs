//! The rack file: the one description of a rack, its hosts, devices and, where wanted, the
//! physical fabric between them.
//!
//! ```toml
//! name = "demo"
//!
//! [hosts.alpha.devices.nvme0]
//! kind = "nvme"
//! size = "1 GiB"
//!
//! [hosts.beta]
//! ```
//!
//! Reading is pure: text in, [`Rack`] or [`RackError`] out. A wrong file is refused with line,
//! column, what is wrong and what is allowed; nothing is guessed and no key is passed over. What the
//! file says of a device is its class's to read, from a [`DeviceSection`].

mod capability;
mod composition;
mod file;
mod network;
mod share;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

pub use crate::names::{BadFunctionName, FunctionName, is_name};
pub use crate::text::FileError as RackError;
use crate::text::Parsed;
pub use crate::values::{format_rate, format_size};
pub use capability::{
    DeviceCapability, DeviceFacts, FunctionLimit, FunctionTiming, LimitCounts, TurnTiming,
};
pub use file::DeviceSection;

/// A rack, as its file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rack {
    /// Name of the rack, which its run directory has, too.
    pub name: String,
    /// Its hosts, in the file's order; at least one.
    pub hosts: Vec<Host>,
    /// Who may use whose segments; [`crate::sharing`] reads them. The first that fits counts.
    pub shares: Vec<ShareRule>,
    /// Functions that are borrowed together.
    pub compositions: Vec<CompositionConfig>,
    /// Time limits of the control plane.
    pub control: ControlConfig,
    /// The links between its hosts, where these are machines.
    pub links: Links,
    /// The Ethernet that the hosts have in common.
    pub network: Network,
    /// The physical fabric, where the file tells one.
    pub fabric: Option<PhysicalFabric>,
}

/// The last node id that a host may have.
pub const LAST_NODE_ID: u32 = 65_532;

/// The node id that means every member of a multicast group
/// (`DIS_BROADCAST_NODEID_GROUP_ALL`), and so no host.
pub const BROADCAST_NODE_ID: u32 = 252;

/// Bytes of a page: what memory is exported and given in.
pub const PAGE: u64 = 4096;

/// A host and what it brings into the rack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Name of the host, the key of its section.
    pub name: String,
    /// Its SISCI node id: a multiple of 4 from 4 to [`LAST_NODE_ID`], but not
    /// [`BROADCAST_NODE_ID`]; no two hosts have the same.
    pub node_id: u32,
    /// Its memory in bytes.
    pub memory: u64,
    /// Whether the file says how much that is.
    pub memory_stated: bool,
    /// How much of it other hosts may be given, in bytes, whole pages.
    pub export: u64,
    /// Whether its IOMMU checks what its devices reach (then their traffic crosses the root).
    pub iommu: bool,
    /// Its NTBs through which functions are lent: where each is on the host, by the host that it leads to.
    pub ntbs: BTreeMap<String, String>,
    /// The same of those NTBs that are for messages between the nodes, and not for functions.
    pub link_ntbs: BTreeMap<String, String>,
    /// Its devices, in the file's order, each with all of its functions.
    pub devices: Vec<DeclaredFunction>,
}

/// One function of a host's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredFunction {
    /// Its name on the host.
    pub name: String,
    /// Which of its virtual functions this is, from 1; `None` where the device is one function.
    pub vf: Option<u16>,
    /// Its class, as the file names it: `nvme`. What else the file says of it, its class reads.
    pub kind: String,
    /// What can be done with it, as its class says; nothing is known where the file was read without the classes.
    pub capabilities: Option<&'static [DeviceCapability]>,
    /// What its class tells the timing model of it; nothing where the file was read without the classes.
    pub timing: FunctionTiming,
}

impl DeclaredFunction {
    /// Whether its class says that it can do this; `None` where nobody asked its class.
    pub fn can(&self, capability: DeviceCapability) -> Option<bool> {
        self.capabilities.map(|all| all.contains(&capability))
    }

    /// Its function's name on the host: `nvme0`, `accel0.vf3`.
    pub fn function(&self) -> String {
        match self.vf {
            Some(vf) => format!("{}.vf{vf}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Who may use some of a host's segments, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareRule {
    /// The host that has the segments.
    pub owner: String,
    /// Their identifiers; at least one range, and none of them is empty.
    pub segments: Vec<RangeInclusive<u32>>,
    /// The hosts that are meant.
    pub with: With,
    /// What they may do.
    pub access: ShareAccess,
}

/// The hosts that a [`ShareRule`] is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum With {
    /// Every host of the rack.
    All,
    /// These; at least one.
    Hosts(Vec<String>),
}

/// How another host may use a segment. What comes later includes what comes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShareAccess {
    /// The host may not connect.
    None,
    /// The host may read.
    Read,
    /// Read and write it.
    Write,
}

impl ShareAccess {
    /// The word in the file: `read`.
    pub fn word(self) -> &'static str {
        match self {
            ShareAccess::None => "none",
            ShareAccess::Read => "read",
            ShareAccess::Write => "write",
        }
    }
}

/// Functions that a host borrows whole or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompositionConfig {
    /// Name of the composition, which no other has.
    pub name: String,
    /// Name of the host that borrows it.
    pub host: String,
    /// The functions, `HOST/DEVICE`; at least one, each once.
    pub functions: Vec<String>,
    /// Whether the lenders get no memory of the borrower's.
    pub strict: bool,
}

/// How the control plane runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlConfig {
    /// How long a lease lives without being renewed, in milliseconds.
    pub lease_ttl_ms: u64,
    /// How long a guest may take to release a device that is returned, in milliseconds.
    pub return_grace_ms: u64,
    /// Whether a lease also ends at its nodes by their own clocks when it was not renewed for its time to live.
    pub strict_ttl: bool,
}

impl Default for ControlConfig {
    fn default() -> Self {
        ControlConfig { lease_ttl_ms: 15_000, return_grace_ms: 20_000, strict_ttl: false }
    }
}

/// How long fronts hold what is under way where the file says nothing, in milliseconds: less than the 30 s after
/// which Linux's NVMe driver gives an operation up.
pub const LINK_HOLD_MS: u64 = 20_000;

/// The links between hosts that are machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Links {
    /// How long a borrower holds what is under way while it cannot reach the lender, in milliseconds, before it
    /// fails.
    pub hold_ms: u64,
    /// What moves the data of borrowed drives beside the link: `auto`, `off`, or the name of a provider of libfabric.
    pub rdma: String,
    /// Whether the kernel seals what goes over the link, where it can (kTLS).
    pub ktls: bool,
}

impl Default for Links {
    fn default() -> Self {
        // Unlike the link, RDMA is not encrypted: somebody decides that.
        Links { hold_ms: LINK_HOLD_MS, rdma: "off".to_owned(), ktls: true }
    }
}

/// The Ethernet that the hosts of a rack have in common. Without a section in the file:
/// `10.77.0.0/16`, `fd72:6163:6b62::/64`, an MTU of 1500 bytes and one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// The IPv4 network that hosts and network functions have addresses of.
    pub subnet: Subnet<Ipv4Addr>,
    /// The IPv6 network, with 64 bits for stations.
    pub subnet6: Subnet<Ipv6Addr>,
    /// Bytes of the longest IP packet: 1280 to 65,521.
    pub mtu: u16,
    /// Queues of each host's interface, each with a thread of the host's node: 1 to 16.
    pub queues: u16,
    /// Where the network goes on outside of the rack: the first of them that works.
    pub uplinks: Vec<Uplink>,
    /// How their frames are taken and sent.
    pub uplink_mode: UplinkMode,
    /// The VLANs that have tags there; without it, all that the file names nowhere.
    pub uplink_vlans: Option<Vec<u16>>,
    /// Frames for many stations that each queue of a station may send in a second.
    pub flood_limit: u64,
    /// What is said of the ports of hosts, by the host's name.
    pub hosts: BTreeMap<String, PortRules>,
}

/// How the frames of an uplink are taken and sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UplinkMode {
    /// By AF_XDP where its driver does that without copies, else by a packet socket.
    Auto,
    /// By AF_XDP, also where the kernel has to copy.
    Xdp,
    /// By a packet socket.
    #[default]
    Packet,
}

/// What the file says of a port of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortRules {
    /// The VLAN that its frames without tags are in.
    pub vlan: Option<u16>,
    /// The VLANs that it takes with tags.
    pub vlans: Option<Vec<u16>>,
    /// How many Ethernet addresses other than its own may be behind it.
    pub learned_addresses: u32,
}

/// An interface of a host's machine that leads outside of the rack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Name of the host.
    pub host: String,
    /// Name of the interface, in the network namespace of the host's node.
    pub interface: String,
}

/// An IP network: an address with its prefix length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet<A> {
    /// Its address, without bits of a station.
    pub address: A,
    /// Length of its prefix in bits.
    pub prefix: u8,
}

impl Subnet<Ipv4Addr> {
    /// Addresses in it, that of the network itself and the broadcast address included.
    pub fn stations(&self) -> u32 {
        1 << (32 - u32::from(self.prefix)).min(31)
    }
}

/// The physical fabric: adapters and switches in hosts, switches between hosts, links. What is in a
/// host and linked to nothing there sits at its root complex.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PhysicalFabric {
    /// NTB adapters, each in a slot of a host.
    pub adapters: Vec<Adapter>,
    /// Switches, in hosts and between them.
    pub switches: Vec<Switch>,
    /// CXL memory devices between hosts.
    pub memories: Vec<CxlMemory>,
    /// Cables between adapters and switches.
    pub links: Vec<Cable>,
    /// Windows of one host's address space to another's.
    pub windows: Vec<Window>,
}

impl PhysicalFabric {
    /// Whether it says how hosts are joined.
    pub fn joins(&self) -> bool {
        !(self.adapters.is_empty()
            && self.switches.is_empty()
            && self.memories.is_empty()
            && self.links.is_empty())
    }
}

/// A CXL memory device, which the hosts that it is joined to share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CxlMemory {
    /// Its name, unique among the rack's parts.
    pub name: String,
    /// Bytes that hosts may be given of it.
    pub size: u64,
}

/// A window: addresses of a host that lead to another's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The host that has it.
    pub host: String,
    /// Where it is in that host's address space.
    pub at: u64,
    /// Bytes that lead to the other host.
    pub size: u64,
    /// The host that it leads to.
    pub to: String,
    /// Where it leads to in that host's address space.
    pub address: u64,
}

/// An NTB adapter in a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// Name of the adapter, the key of its section.
    pub name: String,
    /// The host it is in.
    pub host: String,
}

/// A transparent PCIe switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    /// Name of the switch, the key of its section.
    pub name: String,
    /// The host it belongs to; `None` between hosts.
    pub host: Option<String>,
    /// Whether it is a CXL switch, between hosts and CXL memory.
    pub cxl: bool,
}

/// A link between two parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cable {
    /// Its ends: adapters, switches, functions (`alpha/gpu0`) or hosts (their root complexes).
    pub ends: [String; 2],
    /// PCIe generation, 1 to 6.
    pub generation: u8,
    /// Lanes: 1, 2, 4, 8 or 16.
    pub lanes: u8,
    /// Its length in millimetres, where the file tells it; the timing model's to read.
    pub length: Option<u64>,
}

impl Rack {
    /// Reads a rack file's `text`; `file` is its name, for messages. Of devices, nothing but `kind` is
    /// looked at: which classes there are and what they want to be told is not the fabric's to know. A composition may name
    /// any virtual function of them.
    ///
    /// # Errors
    /// [`RackError`] for the first thing that is wrong.
    pub fn parse(file: &str, text: &str) -> Result<Rack, RackError> {
        file::parse(text, None).map_err(|problem| problem.locate(file, text))
    }

    /// The same, with `read` for the sections of the devices, in the order of the hosts and of the
    /// devices of each.
    ///
    /// # Errors
    /// As [`parse`](Rack::parse), and what `read` finds wrong, with its place.
    pub fn parse_with(
        file: &str,
        text: &str,
        mut read: impl FnMut(&DeviceSection<'_>) -> Parsed<DeviceFacts>,
    ) -> Result<Rack, RackError> {
        file::parse(text, Some(&mut read)).map_err(|problem| problem.locate(file, text))
    }

    /// The host of that name.
    pub fn host(&self, name: &str) -> Option<&Host> {
        self.hosts.iter().find(|host| host.name == name)
    }

    /// All functions, by name.
    pub fn functions(&self) -> impl Iterator<Item = (FunctionName, &DeclaredFunction)> {
        self.hosts.iter().flat_map(|host| {
            host.devices.iter().map(|device| {
                (
                    FunctionName {
                        host: host.name.clone(),
                        device: device.name.clone(),
                        vf: device.vf,
                    },
                    device,
                )
            })
        })
    }
}

#[cfg(test)]
mod tests;
