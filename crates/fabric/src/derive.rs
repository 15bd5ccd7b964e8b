//! The topology that a rack file describes, or that follows from it where it describes none.

use crate::domain::Access;
use crate::rack::{PhysicalFabric, Rack, Window};
use crate::system::{AddressTarget, Fabric, SpaceError};
use crate::topology::{ComponentId, ComponentKind, Topology, TopologyError, TopologyLink};

/// What joins the parts of a host where the file does not say.
const INSIDE: TopologyLink = TopologyLink::Internal;

/// Builds the topology of `rack`. Without a physical fabric, each host's devices sit at its root
/// complex, and the hosts, all on one machine, are joined by the memory they share (`shm`).
///
/// # Errors
/// [`TopologyError`] when parts are joined that cannot be.
pub fn topology(rack: &Rack) -> Result<Topology, TopologyError> {
    joined(rack, HostsJoinedBy::SharedMemory)
}

/// The same as the timing model goes along it: without a physical fabric, what moves between two hosts whose rack file names an
/// NTB for their link goes through that NTB's windows.
///
/// # Errors
/// As [`topology`].
pub fn topology_with_ntbs(rack: &Rack) -> Result<Topology, TopologyError> {
    let mut topology = topology(rack)?;
    if rack.fabric.as_ref().is_none_or(|physical| !physical.joins()) {
        join_by_ntbs(&mut topology, rack)?;
    }
    Ok(topology)
}

/// The same for hosts that are machines: without a physical fabric they are joined by the network.
///
/// # Errors
/// As [`topology`].
pub fn topology_of_machines(rack: &Rack) -> Result<Topology, TopologyError> {
    joined(rack, HostsJoinedBy::Network)
}

/// What joins hosts that no cable joins.
#[derive(Debug, Clone, Copy)]
enum HostsJoinedBy {
    SharedMemory,
    Network,
}

fn joined(rack: &Rack, by: HostsJoinedBy) -> Result<Topology, TopologyError> {
    let mut topology = Topology::new();
    for host in &rack.hosts {
        let id = topology.add_host(&host.name, host.memory, host.iommu)?;
        for device in &host.devices {
            topology.add(
                Some(id),
                ComponentKind::Device,
                &format!("{}/{}", host.name, device.function()),
            )?;
        }
    }
    match rack.fabric.as_ref().filter(|physical| physical.joins()) {
        Some(physical) => join_as_told(&mut topology, physical)?,
        None => join_hosts(&mut topology, by)?,
    }
    join_the_rest(&mut topology)?;
    Ok(topology)
}

/// The topology of `rack` as it runs on this machine, whatever fabric its file describes: its
/// hosts share memory. A host whose memory the file does not tell of may lend as much as it has, which
/// the descriptors that it gives bound.
///
/// # Errors
/// [`TopologyError`] as [`topology`] has it.
pub fn here(rack: &Rack) -> Result<Topology, TopologyError> {
    running(rack, HostsJoinedBy::SharedMemory)
}

/// The same for hosts that are machines, which the network joins.
///
/// # Errors
/// [`TopologyError`] as [`topology`] has it.
pub fn here_of_machines(rack: &Rack) -> Result<Topology, TopologyError> {
    running(rack, HostsJoinedBy::Network)
}

fn running(rack: &Rack, by: HostsJoinedBy) -> Result<Topology, TopologyError> {
    let mut rack = Rack { fabric: None, ..rack.clone() };
    for host in rack.hosts.iter_mut().filter(|host| !host.memory_stated) {
        host.memory = u64::MAX;
    }
    joined(&rack, by)
}

/// The fabric of `topology`, which is that of `rack`, with what its file maps: each host has its own
/// memory from address 0 on, and the windows that it names.
///
/// # Errors
/// The number of the window that cannot be, and why.
pub fn fabric(rack: &Rack, topology: Topology) -> Result<Fabric, (usize, SpaceError)> {
    let mut fabric = own_memory(topology).map_err(|error| (usize::MAX, error))?;
    let windows = rack.fabric.iter().flat_map(|physical| &physical.windows);
    for (nth, window) in windows.enumerate() {
        open_window(&mut fabric, window).map_err(|error| (nth, error))?;
    }
    Ok(fabric)
}

/// The fabric of `topology` in which each host has its own memory from address 0 on, and nothing else.
///
/// # Errors
/// [`SpaceError`] when a host has none.
pub fn own_memory(topology: Topology) -> Result<Fabric, SpaceError> {
    let mut fabric = Fabric::new(topology);
    let hosts: Vec<_> =
        fabric.topology().hosts().map(|(id, host)| (id, host.memory_size)).collect();
    for (id, size) in hosts {
        fabric.map(id, 0, size, Access::all(), AddressTarget::Memory { offset: 0 })?;
    }
    Ok(fabric)
}

fn open_window(fabric: &mut Fabric, window: &Window) -> Result<(), SpaceError> {
    let nowhere = |name: &String| SpaceError::Misplaced(name.clone());
    let topology = fabric.topology();
    let host = topology.host_named(&window.host).ok_or_else(|| nowhere(&window.host))?;
    let to = topology.host_named(&window.to).ok_or_else(|| nowhere(&window.to))?;
    let (ntb, peer) = topology.bridge(host, to).ok_or_else(|| nowhere(&window.to))?;
    let (size, address) = (window.size, window.address);
    let target = AddressTarget::Window { ntb, peer, address };
    fabric.map(host, window.at, size, Access::all(), target)?;
    // Another host's window may lead to the same.
    let granted = fabric.domain(peer).and_then(|d| d.resolve(address, size, Access::all()).ok());
    if granted.is_some_and(|hit| hit.length == size) {
        return Ok(());
    }
    fabric.grant(peer, address, size, Access::all(), address)
}

/// Hosts of these names that share memory, each of any size, with nothing in them.
///
/// # Errors
/// [`TopologyError::Duplicate`].
pub(crate) fn of_hosts<'n>(
    names: impl IntoIterator<Item = &'n str>,
) -> Result<Topology, TopologyError> {
    let mut topology = Topology::new();
    for name in names {
        topology.add_host(name, u64::MAX, true)?;
    }
    join_hosts(&mut topology, HostsJoinedBy::SharedMemory)?;
    join_the_rest(&mut topology)?;
    Ok(topology)
}

fn join_hosts(topology: &mut Topology, by: HostsJoinedBy) -> Result<(), TopologyError> {
    let hosts: Vec<_> = topology.hosts().map(|(id, host)| (id, host.name.clone())).collect();
    if hosts.len() < 2 {
        return Ok(());
    }
    let (kind, name) = match by {
        HostsJoinedBy::SharedMemory => (ComponentKind::SharedMemory, "shm"),
        HostsJoinedBy::Network => (ComponentKind::Network, "network"),
    };
    let shared = topology.add(None, kind, name)?;
    for (id, name) in hosts {
        let ntb = topology.add(Some(id), ComponentKind::Ntb, &format!("{name}/ntb"))?;
        topology.connect(ntb, shared, TopologyLink::Internal)?;
    }
    Ok(())
}

/// Joins hosts by the NTBs that are for their link, an adapter of its own for each: `alpha/ntb/beta`. How wide they are is not
/// written.
fn join_by_ntbs(topology: &mut Topology, rack: &Rack) -> Result<(), TopologyError> {
    for host in &rack.hosts {
        // The file names both ends: the one that comes first joins them.
        for peer in host.link_ntbs.keys().filter(|peer| host.name < **peer) {
            let mut end = |host: &str, peer: &str| {
                let id = topology.host_named(host);
                let root = id.map(|id| topology.host(id).root);
                let ntb = topology.add(id, ComponentKind::Ntb, &format!("{host}/ntb/{peer}"))?;
                root.map_or(Ok(()), |root| topology.connect(root, ntb, INSIDE)).map(|()| ntb)
            };
            let ends = (end(&host.name, peer)?, end(peer, &host.name)?);
            topology.connect(ends.0, ends.1, INSIDE)?;
        }
    }
    Ok(())
}

fn join_as_told(topology: &mut Topology, physical: &PhysicalFabric) -> Result<(), TopologyError> {
    for adapter in &physical.adapters {
        let host = topology.host_named(&adapter.host);
        topology.add(host, ComponentKind::Ntb, &adapter.name)?;
    }
    for switch in &physical.switches {
        let host = switch.host.as_ref().and_then(|name| topology.host_named(name));
        let kind = if switch.cxl { ComponentKind::CxlSwitch } else { ComponentKind::Switch };
        topology.add(host, kind, &switch.name)?;
    }
    for memory in &physical.memories {
        topology.add(None, ComponentKind::CxlMemory, &memory.name)?;
    }
    for cable in &physical.links {
        let [a, b] = cable.ends.each_ref().map(|name| end(topology, name));
        if let (Some(a), Some(b)) = (a, b) {
            let link = TopologyLink::Pcie { generation: cable.generation, lanes: cable.lanes };
            topology.connect(a, b, link)?;
        }
    }
    Ok(())
}

/// The component that a link's end names; a host's name means its root complex.
fn end(topology: &Topology, name: &str) -> Option<ComponentId> {
    let root = topology.host_named(name).map(|host| topology.host(host).root);
    root.or_else(|| topology.named(name))
}

/// Whatever is in a host and was not joined to anything in it sits at its root complex.
fn join_the_rest(topology: &mut Topology) -> Result<(), TopologyError> {
    let loose: Vec<(ComponentId, ComponentId)> = topology
        .components()
        .filter_map(|(id, component)| {
            let root = topology.host(component.host?).root;
            let inside = topology
                .neighbours(id)
                .iter()
                .any(|(other, _)| topology.component(*other).host == component.host);
            (id != root && !inside).then_some((root, id))
        })
        .collect();
    loose.into_iter().try_for_each(|(root, id)| topology.connect(root, id, INSIDE))
}
