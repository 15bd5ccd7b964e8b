//! The fabric's state: what each host's address space maps, what each requester may reach, and
//! the two questions asked of it, `resolve` and `route`.
//!
//! A requester's address is translated by its IOMMU domain (an address it was never given is
//! refused, I1), then looked up in its host's address space. That leads to the host's memory, to
//! a device's BAR, or into a window: an NTB carries the access to a peer NTB in another host,
//! which is the requester there, with the window's address. Both questions take the same walk, so
//! they cannot disagree.

mod walk;

use std::collections::{BTreeMap, BTreeSet};

use crate::coverage::Coverage;
use crate::domain::{Access, Domain, DomainMapError, Fault, UnmapError};
use crate::topology::{ComponentId, ComponentKind, FabricPath, HostId, Topology};

/// The most windows one access may pass; more are windows that lead in a circle.
pub const MOST_WINDOWS: usize = 16;

/// Who makes an access, and so whose mappings count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Requester {
    /// A processor of this host.
    Cpu(HostId),
    /// A device, by its IOMMU domain.
    Device(ComponentId),
    /// A device that raises an interrupt, by its host's interrupt remapping: a table apart from its IOMMU domain, in which
    /// the address is the [place](FunctionInterrupt::place) of the interrupt.
    Interrupts(ComponentId),
}

/// An interrupt of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FunctionInterrupt {
    /// A vector of MSI-X or MSI.
    Vector(u16),
    /// The INTx pin, of which a function has one at most.
    Pin,
}

impl FunctionInterrupt {
    /// Bytes of the message that raises it (PCIe base 6.0, section 6.1.4).
    pub const MESSAGE: u64 = 4;

    /// Where its entry begins in the table of interrupt remapping; that of the pin is behind those of all vectors.
    pub fn place(self) -> u64 {
        let number = match self {
            FunctionInterrupt::Vector(vector) => u64::from(vector),
            FunctionInterrupt::Pin => 1 << 16,
        };
        number * FunctionInterrupt::MESSAGE
    }
}

/// A file, or whatever else its host keeps memory in, as that host knows it: two numbers that no other
/// has at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(pub u64, pub u64);

/// What a range of a host's address space leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressTarget {
    /// The host's memory, from `offset` on.
    Memory {
        /// Bytes from the memory's beginning.
        offset: u64,
    },
    /// Memory that a process of the host lends, from `offset` of the object that it is in.
    Lent {
        /// The object that holds the memory.
        object: ObjectKey,
        /// Bytes from its beginning.
        offset: u64,
    },
    /// An interrupt of the host: who writes there raises it.
    Interrupt {
        /// Number of the interrupt on its host.
        number: u32,
        /// Whether data goes with it.
        data: bool,
    },
    /// What a process of the host has wired to an interrupt of a function.
    Wired(FunctionInterrupt),
    /// A BAR of one of the host's devices, from `offset` on.
    Bar {
        /// The device whose BAR it is.
        device: ComponentId,
        /// The BAR, 0 to 5.
        bar: u8,
        /// Bytes from the BAR's beginning.
        offset: u64,
    },
    /// Another host's address space, from `address` on.
    Window {
        /// The NTB in this host.
        ntb: ComponentId,
        /// The NTB in the other host, which is the requester there.
        peer: ComponentId,
        /// What the window's beginning is called there.
        address: u64,
    },
}

/// Where an access ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In a host's memory.
    Memory {
        /// The host whose memory it is.
        host: HostId,
        /// Bytes from the memory's beginning.
        offset: u64,
    },
    /// In memory that a process of a host lends.
    Lent {
        /// The host whose address space the window leads to.
        host: HostId,
        /// The object that it is in.
        object: ObjectKey,
        /// Bytes from its beginning.
        offset: u64,
    },
    /// At an interrupt of a host.
    Interrupt {
        /// The host that takes the interrupt.
        host: HostId,
        /// Number of the interrupt on its host.
        number: u32,
        /// Whether data goes with it.
        data: bool,
    },
    /// At what a process of a host has wired to an interrupt of a function.
    Wired {
        /// The host that takes the interrupt.
        host: HostId,
        /// Which interrupt of the function.
        interrupt: FunctionInterrupt,
    },
    /// In a device's BAR.
    Bar {
        /// The device whose BAR it is.
        device: ComponentId,
        /// Number of the BAR, 0 to 5.
        bar: u8,
        /// Bytes from the BAR's beginning.
        offset: u64,
    },
}

/// What [`Fabric::resolve`] found: whose memory an address leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// Where the access begins to take effect.
    pub place: Place,
    /// How many of the asked bytes follow each other there.
    pub length: u64,
    /// How many windows it passed.
    pub windows: usize,
}

/// What [`Fabric::route`] found: which way an access takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Where it ends, as `resolve` says.
    pub place: Place,
    /// Components and links from the requester to the target.
    pub path: FabricPath,
}

/// Why an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// A host's address space or an IOMMU domain refuses it.
    #[error("{fault}, after {windows} windows")]
    Fault {
        /// The host where it stopped.
        host: HostId,
        /// The component that was refused; `None` for a processor.
        requester: Option<ComponentId>,
        /// What was refused: the address as it was called there.
        fault: Fault,
        /// How many windows it had passed.
        windows: usize,
    },
    /// Windows lead in a circle.
    #[error("the access passes more than {MOST_WINDOWS} windows: they lead in a circle")]
    Circle,
    /// The requester is not one that accesses memory, or is not in a host.
    #[error("the requester is no device of a host")]
    Requester,
    /// The parts are not joined.
    #[error("there is no way from the requester to what it addresses")]
    NoWay,
}

/// Why something cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// The range is empty, not aligned, or taken.
    #[error(transparent)]
    Range(#[from] DomainMapError),
    /// What it would lead to goes past its end.
    #[error("{start:#x}+{length:#x} would lead past the end of what it leads to")]
    TooLong {
        /// Where the mapping would begin.
        start: u64,
        /// Length of the mapping in bytes.
        length: u64,
    },
    /// What it would lead to is not there.
    #[error("{0} cannot be mapped there")]
    Misplaced(String),
}

/// Topology, address spaces and IOMMU domains.
#[derive(Debug, Clone)]
pub struct Fabric {
    pub(crate) topology: Topology,
    spaces: BTreeMap<HostId, Domain<AddressTarget>>,
    /// By requester: addresses to host addresses.
    domains: BTreeMap<ComponentId, Domain<u64>>,
    /// By device: the table of interrupt remapping, to host addresses.
    remapping: BTreeMap<ComponentId, Domain<u64>>,
    /// By owner: bytes that are lent, and of which objects.
    pub(crate) lent: BTreeMap<HostId, (u64, BTreeMap<ObjectKey, Coverage>)>,
    /// Where each host's processors have a loan, by their addresses.
    pub(crate) shared: BTreeMap<HostId, BTreeSet<u64>>,
    /// The NTBs between two hosts, once they were looked for: the topology's parts stay joined.
    pub(crate) bridges: BTreeMap<(HostId, HostId), (ComponentId, ComponentId)>,
}

impl Fabric {
    /// A fabric in which nothing is mapped.
    pub fn new(topology: Topology) -> Self {
        Fabric {
            topology,
            spaces: BTreeMap::new(),
            domains: BTreeMap::new(),
            remapping: BTreeMap::new(),
            lent: BTreeMap::new(),
            shared: BTreeMap::new(),
            bridges: BTreeMap::new(),
        }
    }

    /// Hosts, devices, switches and the links between them.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Maps `[start, start + length)` of a host's address space to `target`.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing changes then.
    pub fn map(
        &mut self,
        host: HostId,
        start: u64,
        length: u64,
        access: Access,
        target: AddressTarget,
    ) -> Result<(), SpaceError> {
        self.check(host, start, length, &target)?;
        Ok(self.spaces.entry(host).or_default().map(start, length, access, target)?)
    }

    fn check(
        &self,
        host: HostId,
        start: u64,
        length: u64,
        target: &AddressTarget,
    ) -> Result<(), SpaceError> {
        let part = |id: ComponentId, kind: ComponentKind, host: Option<HostId>| {
            let component = self.topology.component(id);
            let fits = component.kind == kind && (host.is_none() || component.host == host);
            if fits { Ok(()) } else { Err(SpaceError::Misplaced(component.name.clone())) }
        };
        let (first, end) = match *target {
            AddressTarget::Memory { offset } => {
                (offset, Some(self.topology.host(host).memory_size))
            }
            AddressTarget::Lent { offset, .. } => (offset, None),
            AddressTarget::Interrupt { .. } | AddressTarget::Wired(_) => (0, None),
            AddressTarget::Bar { device, offset, .. } => {
                part(device, ComponentKind::Device, Some(host))?;
                (offset, None)
            }
            AddressTarget::Window { ntb, peer, address } => {
                part(ntb, ComponentKind::Ntb, Some(host))?;
                part(peer, ComponentKind::Ntb, None)?;
                if self.topology.component(peer).host.is_none_or(|other| other == host) {
                    let name = self.topology.component(peer).name.clone();
                    return Err(SpaceError::Misplaced(name));
                }
                (address, None)
            }
        };
        // The last byte must exist: also when the range ends with the 64-bit address space.
        let last = length.checked_sub(1).map_or(Some(first), |more| first.checked_add(more));
        match (last, end) {
            (Some(last), Some(end)) if last < end => Ok(()),
            (Some(_), None) => Ok(()),
            _ => Err(SpaceError::TooLong { start, length }),
        }
    }

    /// Takes away exactly `[start, start + length)` of a host's address space.
    ///
    /// # Errors
    /// [`UnmapError`] when it is not mapped as one.
    pub fn unmap(
        &mut self,
        host: HostId,
        start: u64,
        length: u64,
    ) -> Result<AddressTarget, UnmapError> {
        let missing = UnmapError { start, length };
        self.spaces.get_mut(&host).ok_or(missing)?.unmap(start, length)
    }

    /// Lets a device or NTB use `[iova, iova + length)`, which its host calls `address`.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing changes then.
    pub fn grant(
        &mut self,
        requester: ComponentId,
        iova: u64,
        length: u64,
        access: Access,
        address: u64,
    ) -> Result<(), SpaceError> {
        self.check_grant(requester, iova, length, address)?;
        Ok(self.domains.entry(requester).or_default().map(iova, length, access, address)?)
    }

    /// Lets a device raise the interrupt whose entry is at `place` by a message to `address` of its host.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing changes then.
    pub(crate) fn remap(
        &mut self,
        device: ComponentId,
        place: u64,
        address: u64,
    ) -> Result<(), SpaceError> {
        let length = FunctionInterrupt::MESSAGE;
        self.check_grant(device, place, length, address)?;
        Ok(self.remapping.entry(device).or_default().map(place, length, Access::WRITE, address)?)
    }

    /// Takes the interrupt away whose entry is at `place`; gives the address that it led to.
    ///
    /// # Errors
    /// [`UnmapError`] when the device may not raise it.
    pub(crate) fn unremap(&mut self, device: ComponentId, place: u64) -> Result<u64, UnmapError> {
        let length = FunctionInterrupt::MESSAGE;
        let missing = UnmapError { start: place, length };
        self.remapping.get_mut(&device).ok_or(missing)?.unmap(place, length)
    }

    fn check_grant(
        &self,
        requester: ComponentId,
        iova: u64,
        length: u64,
        address: u64,
    ) -> Result<(), SpaceError> {
        let component = self.topology.component(requester);
        if !matches!(component.kind, ComponentKind::Device | ComponentKind::Ntb)
            || component.host.is_none()
        {
            return Err(SpaceError::Misplaced(component.name.clone()));
        }
        if length.checked_sub(1).is_some_and(|more| address.checked_add(more).is_none()) {
            return Err(SpaceError::TooLong { start: iova, length });
        }
        Ok(())
    }

    /// Takes exactly `[iova, iova + length)` away from a requester; gives what its host calls it.
    ///
    /// # Errors
    /// [`UnmapError`] when it was not granted as one.
    pub fn withdraw(
        &mut self,
        requester: ComponentId,
        iova: u64,
        length: u64,
    ) -> Result<u64, UnmapError> {
        let missing = UnmapError { start: iova, length };
        self.domains.get_mut(&requester).ok_or(missing)?.unmap(iova, length)
    }

    /// A host's address space.
    pub fn space(&self, host: HostId) -> Option<&Domain<AddressTarget>> {
        self.spaces.get(&host)
    }

    /// A requester's IOMMU domain.
    pub fn domain(&self, requester: ComponentId) -> Option<&Domain<u64>> {
        self.domains.get(&requester)
    }

    /// The interrupts that a device may raise, by their [places](FunctionInterrupt::place).
    pub fn interrupts(&self, device: ComponentId) -> Option<&Domain<u64>> {
        self.remapping.get(&device)
    }

    /// What memory is `[address, address + length)` to `requester`?
    ///
    /// # Errors
    /// [`AccessError`] when it is nothing that the requester may use so.
    pub fn resolve(
        &self,
        requester: Requester,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<Resolved, AccessError> {
        self.walk(requester, address, length, access, |_| {})
    }

    /// Which way does an access of one byte at `address` go?
    ///
    /// # Errors
    /// [`AccessError`] as [`resolve`](Fabric::resolve) has it, or when the parts are not joined.
    pub fn route(
        &self,
        requester: Requester,
        address: u64,
        access: Access,
    ) -> Result<Route, AccessError> {
        let mut stops = Vec::new();
        let resolved = self.walk(requester, address, 1, access, |stop| stops.push(stop))?;
        let path = self.topology.through(&stops).ok_or(AccessError::NoWay)?;
        Ok(Route { place: resolved.place, path })
    }
}
