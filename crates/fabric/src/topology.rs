//! The topology: what the hosts are made of and which links join the parts. It knows no address;
//! it answers which way leads from one component to another.
//!
//! A host is a tree of PCIe components below one root complex, with its memory behind the root.
//! Hosts are joined by their NTBs: a way between two hosts leads through one of each, and through
//! what lies between them (cables, switches outside of hosts, the memory two hosts on one machine
//! share). Devices and memory are ends of ways, never on them; no way crosses a third host.

use std::collections::BTreeMap;
use std::fmt;

use crate::search;

/// A host of a topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(usize);

/// A component of a topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComponentId(usize);

/// What a component is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ComponentKind {
    /// A host's root complex: its processor's side of PCIe.
    RootComplex,
    /// Memory of a host.
    Memory,
    /// An endpoint: a device that is no bridge or switch.
    Device,
    /// A transparent switch, in a host or between hosts.
    Switch,
    /// A non-transparent bridge, real or played by software.
    Ntb,
    /// Memory that hosts on one machine share in place of a cable.
    SharedMemory,
    /// The network that joins hosts which are machines, in place of a cable: it carries operations and stores, and no
    /// accesses to mapped memory.
    Network,
    /// A CXL memory device (CXL type 3) outside of hosts, which all hosts that are joined to it may use.
    CxlMemory,
    /// A CXL switch between hosts and CXL memory.
    CxlSwitch,
}

impl fmt::Display for ComponentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ComponentKind::RootComplex => "root complex",
            ComponentKind::Memory => "memory",
            ComponentKind::Device => "device",
            ComponentKind::Switch => "switch",
            ComponentKind::Ntb => "ntb",
            ComponentKind::SharedMemory => "shared memory",
            ComponentKind::Network => "network",
            ComponentKind::CxlMemory => "CXL memory",
            ComponentKind::CxlSwitch => "CXL switch",
        })
    }
}

/// A part of the fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    /// Its name, unique in the topology: `alpha/nvme0`, `alpha/root`.
    pub name: String,
    /// What the component does with packets.
    pub kind: ComponentKind,
    /// The host it is in; `None` between hosts.
    pub host: Option<HostId>,
}

/// What joins two components.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TopologyLink {
    /// PCIe of a generation (1 to 6) and lanes (1 to 16).
    Pcie {
        /// PCIe generation, 1 to 6.
        generation: u8,
        /// Number of lanes, 1 to 16.
        lanes: u8,
    },
    /// Inside a chip or a process: nothing that could be measured.
    Internal,
}

impl fmt::Display for TopologyLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TopologyLink::Pcie { generation, lanes } => write!(f, "Gen{generation} x{lanes}"),
            TopologyLink::Internal => f.write_str("internal"),
        }
    }
}

/// Why a topology cannot be built so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Two parts of one name.
    #[error("there are two parts named {0}; give each a name of its own")]
    Duplicate(String),
    /// Two ends that cannot be joined.
    #[error(
        "{0} and {1} cannot be joined; parts of two hosts are joined by their NTBs, memory by its root, and CXL \
         memory and CXL switches by hosts and CXL switches"
    )]
    Joined(String, String),
}

/// A host as the topology has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologyHost {
    /// Name of the host.
    pub name: String,
    /// The component that is its root complex.
    pub root: ComponentId,
    /// The component that is its memory.
    pub memory: ComponentId,
    /// Size of its memory in bytes.
    pub memory_size: u64,
    /// Whether its IOMMU checks what its devices and NTBs reach. Their traffic crosses the root
    /// then, also where a switch could pass it on.
    pub iommu: bool,
}

/// Hosts, components and links.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    hosts: Vec<TopologyHost>,
    components: Vec<Component>,
    /// By component: its neighbours.
    joined: Vec<Vec<(ComponentId, TopologyLink)>>,
    names: BTreeMap<String, ComponentId>,
    host_names: BTreeMap<String, HostId>,
}

impl Topology {
    /// A topology without hosts and components.
    pub fn new() -> Self {
        Topology::default()
    }

    /// Adds a host with its root complex and memory.
    ///
    /// # Errors
    /// [`TopologyError::Duplicate`].
    pub fn add_host(
        &mut self,
        name: &str,
        memory_size: u64,
        iommu: bool,
    ) -> Result<HostId, TopologyError> {
        if self.host_named(name).is_some() {
            return Err(TopologyError::Duplicate(name.to_owned()));
        }
        let id = HostId(self.hosts.len());
        let root = self.add(Some(id), ComponentKind::RootComplex, &format!("{name}/root"))?;
        let memory = self.add(Some(id), ComponentKind::Memory, &format!("{name}/memory"))?;
        self.put_link(root, memory, TopologyLink::Internal);
        self.hosts.push(TopologyHost { name: name.to_owned(), root, memory, memory_size, iommu });
        self.host_names.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Adds a component to a host, or between hosts.
    ///
    /// # Errors
    /// [`TopologyError::Duplicate`].
    pub fn add(
        &mut self,
        host: Option<HostId>,
        kind: ComponentKind,
        name: &str,
    ) -> Result<ComponentId, TopologyError> {
        let id = ComponentId(self.components.len());
        if self.names.contains_key(name) {
            return Err(TopologyError::Duplicate(name.to_owned()));
        }
        self.names.insert(name.to_owned(), id);
        self.components.push(Component { name: name.to_owned(), kind, host });
        self.joined.push(Vec::new());
        Ok(id)
    }

    /// Adds a link between two components.
    ///
    /// # Errors
    /// [`TopologyError::Joined`] when parts of two hosts are not both NTBs, or one is memory.
    pub fn connect(
        &mut self,
        a: ComponentId,
        b: ComponentId,
        link: TopologyLink,
    ) -> Result<(), TopologyError> {
        let (one, other) = (self.component(a), self.component(b));
        let both_ntbs = one.kind == ComponentKind::Ntb && other.kind == ComponentKind::Ntb;
        let outward = |inner: &Component, outer: &Component| {
            inner.kind == ComponentKind::Ntb && outer.host.is_none()
        };
        let is_cxl = |part: &Component| {
            matches!(part.kind, ComponentKind::CxlMemory | ComponentKind::CxlSwitch)
        };
        let fits = match (is_cxl(one), is_cxl(other)) {
            (false, false) => {
                one.host == other.host || both_ntbs || outward(one, other) || outward(other, one)
            }
            (true, true) => {
                one.kind != ComponentKind::CxlMemory || other.kind != ComponentKind::CxlMemory
            }
            (true, false) => other.kind == ComponentKind::RootComplex,
            (false, true) => one.kind == ComponentKind::RootComplex,
        };
        let memory = one.kind == ComponentKind::Memory || other.kind == ComponentKind::Memory;
        if a == b || !fits || memory {
            return Err(TopologyError::Joined(one.name.clone(), other.name.clone()));
        }
        self.put_link(a, b, link);
        Ok(())
    }

    fn put_link(&mut self, a: ComponentId, b: ComponentId, link: TopologyLink) {
        self.joined[a.0].push((b, link));
        self.joined[b.0].push((a, link));
    }

    /// The component with this number.
    pub fn component(&self, id: ComponentId) -> &Component {
        &self.components[id.0]
    }

    /// The host with this number.
    pub fn host(&self, id: HostId) -> &TopologyHost {
        &self.hosts[id.0]
    }

    /// All hosts with their numbers, in order.
    pub fn hosts(&self) -> impl Iterator<Item = (HostId, &TopologyHost)> {
        self.hosts.iter().enumerate().map(|(index, host)| (HostId(index), host))
    }

    /// All components with their numbers, in order.
    pub fn components(&self) -> impl Iterator<Item = (ComponentId, &Component)> {
        self.components.iter().enumerate().map(|(index, part)| (ComponentId(index), part))
    }

    /// What a component is joined to.
    pub fn neighbours(&self, id: ComponentId) -> &[(ComponentId, TopologyLink)] {
        &self.joined[id.0]
    }

    /// The link between two neighbours; of several, the first that was made.
    pub fn link(&self, a: ComponentId, b: ComponentId) -> Option<TopologyLink> {
        // Both know their links in that order; a switch may have very many.
        let few = self.joined[a.0].len() <= self.joined[b.0].len();
        let (one, other) = if few { (a, b) } else { (b, a) };
        self.joined[one.0].iter().find(|(id, _)| *id == other).map(|(_, link)| *link)
    }

    /// The component of that name.
    pub fn named(&self, name: &str) -> Option<ComponentId> {
        self.names.get(name).copied()
    }

    /// The host of that name.
    pub fn host_named(&self, name: &str) -> Option<HostId> {
        self.host_names.get(name).copied()
    }

    /// The shortest way from `from` to `to`, both included, as the wires go: the first found of
    /// the shortest, in the order in which links were made. `None` when there is none.
    pub fn way(&self, from: ComponentId, to: ComponentId) -> Option<Vec<ComponentId>> {
        let ends = [self.component(from).host, self.component(to).host];
        search::shortest(self, from, to, |id| self.passes(id, ends))
    }

    /// Whether a way between hosts `ends` may lead through `id`.
    fn passes(&self, id: ComponentId, ends: [Option<HostId>; 2]) -> bool {
        let component = self.component(id);
        let here = component.host.is_none() || ends.contains(&component.host);
        let through = match component.kind {
            ComponentKind::Memory | ComponentKind::Device | ComponentKind::CxlMemory => false,
            // What is between hosts and not theirs is reached through it, other hosts are not.
            ComponentKind::CxlSwitch => ends.contains(&None),
            // Inside one host an NTB leads nowhere.
            ComponentKind::Ntb => ends[0] != ends[1],
            ComponentKind::RootComplex
            | ComponentKind::Switch
            | ComponentKind::SharedMemory
            | ComponentKind::Network => true,
        };
        here && through
    }

    /// The nearest NTBs by which `from` reaches `to`: its own and the peer's.
    pub fn bridge(&self, from: HostId, to: HostId) -> Option<(ComponentId, ComponentId)> {
        let way = self.way(self.host(from).root, self.host(to).root)?;
        let of = |host| {
            move |id: &&ComponentId| {
                let component = self.component(**id);
                component.kind == ComponentKind::Ntb && component.host == Some(host)
            }
        };
        Some((*way.iter().rfind(of(from))?, *way.iter().find(of(to))?))
    }

    /// The way that memory accesses take from `from` to `to` when they are let through: past the
    /// root of each host whose IOMMU must see them. Both ends are included. `None` when there is
    /// no way.
    pub fn path(&self, from: ComponentId, to: ComponentId) -> Option<FabricPath> {
        let (one, other) = (self.component(from).host?, self.component(to).host?);
        if one == other {
            let mut stops = vec![from];
            self.checkpoint(one, from, &mut stops);
            stops.push(to);
            return self.through(&stops);
        }
        let (out, entry) = self.bridge(one, other)?;
        let mut stops = vec![from];
        self.checkpoint(one, from, &mut stops);
        stops.extend([out, entry]);
        self.checkpoint(other, entry, &mut stops);
        stops.push(to);
        self.through(&stops)
    }

    /// Adds the root of `host` to `stops` when an access that enters the host at `entry` is
    /// checked by its IOMMU.
    pub(crate) fn checkpoint(
        &self,
        host: HostId,
        entry: ComponentId,
        stops: &mut Vec<ComponentId>,
    ) {
        let host = self.host(host);
        if host.iommu && entry != host.root {
            stops.push(host.root);
        }
    }

    /// The shortest way past each of `stops` in turn.
    pub(crate) fn through(&self, stops: &[ComponentId]) -> Option<FabricPath> {
        let mut components = vec![*stops.first()?];
        for pair in stops.windows(2) {
            let way = self.way(pair[0], pair[1])?;
            components.extend_from_slice(&way[1..]);
        }
        Some(FabricPath { components })
    }
}

/// A way through the fabric, both ends included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricPath {
    components: Vec<ComponentId>,
}

impl FabricPath {
    /// All components of it, from where it begins to where it ends.
    pub fn components(&self) -> &[ComponentId] {
        &self.components
    }

    /// The hops: the components between its ends, as Device Lending (2019, Table 1) counts them.
    pub fn hops(&self) -> &[ComponentId] {
        match self.components.len() {
            0 | 1 => &[],
            length => &self.components[1..length - 1],
        }
    }

    /// How many of the hops are root complexes.
    pub fn roots(&self, topology: &Topology) -> usize {
        let is_root =
            |id: &&ComponentId| topology.component(**id).kind == ComponentKind::RootComplex;
        self.hops().iter().filter(is_root).count()
    }
}
