//! The topology that a rack file describes, or that follows from it where it describes none.

use crate::rack::{Physical, Rack};
use crate::topology::{ComponentId, Kind, Link, Topology, TopologyError};

/// What joins the parts of a host where the file does not say.
const INSIDE: Link = Link::Internal;

/// Builds the topology of `rack`. Without a physical fabric, each host's devices sit at its root
/// complex, and the hosts, all on one machine, are joined by the memory they share (`shm`).
///
/// # Errors
/// [`TopologyError`] when parts are joined that cannot be.
pub fn topology(rack: &Rack) -> Result<Topology, TopologyError> {
    let mut topology = Topology::new();
    for host in &rack.hosts {
        let id = topology.add_host(&host.name, host.memory, host.iommu)?;
        for device in &host.devices {
            topology.add(Some(id), Kind::Device, &format!("{}/{}", host.name, device.name))?;
        }
    }
    match &rack.fabric {
        Some(physical) => join_as_told(&mut topology, physical)?,
        None => join_by_memory(&mut topology)?,
    }
    join_the_rest(&mut topology)?;
    Ok(topology)
}

/// The topology of `rack` as it runs on this machine, whatever fabric its file describes: its
/// hosts share memory, software checks every access of a lent function, and what a borrower lays
/// open is bounded by the descriptor it gives, not by the memory that the file tells of.
///
/// # Errors
/// [`TopologyError`] as [`topology`] has it.
pub fn here(rack: &Rack) -> Result<Topology, TopologyError> {
    let mut rack = Rack { fabric: None, ..rack.clone() };
    for host in &mut rack.hosts {
        (host.iommu, host.memory) = (true, u64::MAX);
    }
    topology(&rack)
}

fn join_by_memory(topology: &mut Topology) -> Result<(), TopologyError> {
    let hosts: Vec<_> = topology.hosts().map(|(id, host)| (id, host.name.clone())).collect();
    if hosts.len() < 2 {
        return Ok(());
    }
    let shared = topology.add(None, Kind::SharedMemory, "shm")?;
    for (id, name) in hosts {
        let ntb = topology.add(Some(id), Kind::Ntb, &format!("{name}/ntb"))?;
        topology.connect(ntb, shared, Link::Internal)?;
    }
    Ok(())
}

fn join_as_told(topology: &mut Topology, physical: &Physical) -> Result<(), TopologyError> {
    for adapter in &physical.adapters {
        let host = topology.host_named(&adapter.host);
        topology.add(host, Kind::Ntb, &adapter.name)?;
    }
    for switch in &physical.switches {
        let host = switch.host.as_ref().and_then(|name| topology.host_named(name));
        topology.add(host, Kind::Switch, &switch.name)?;
    }
    for cable in &physical.links {
        let [a, b] = cable.ends.each_ref().map(|name| end(topology, name));
        if let (Some(a), Some(b)) = (a, b) {
            let link = Link::Pcie { generation: cable.generation, lanes: cable.lanes };
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
