//! The way from one place of the rack to another.

use rackbus_fabric::{
    ComponentId, ComponentKind, DemandMapped, Destination, HostId, Requester, Topology, derive,
};

use super::Service;
use super::views::problem;
use crate::api::{ApiError, Hop, Path};

/// Where a path begins or ends.
enum End {
    Host(HostId),
    Device(ComponentId),
}

impl Service {
    /// The way that memory accesses take from a host's processor or a function to a host's memory
    /// or a function, mapped as lending maps it.
    ///
    /// # Errors
    /// [`ApiError`] when a name is unknown, or the two are not joined.
    pub fn path(&self, from: &str, to: &str) -> Result<Path, ApiError> {
        let no_way = |cause: String| {
            let error = format!("no way leads from {from} to {to}: {cause}");
            problem("no_way", error, "see to the links in the rack file")
        };
        let fabric = derive::own_memory(self.shared.inventory().topology.clone());
        let mut fabric = DemandMapped::new(fabric.map_err(|error| no_way(error.to_string()))?);
        let requester = match self.end(from)? {
            End::Host(host) => Requester::Cpu(host),
            End::Device(id) => Requester::Device(id),
        };
        let destination = match self.end(to)? {
            End::Host(host) => Destination::Memory(host),
            End::Device(id) => Destination::Device(id),
        };
        let route = fabric.route(requester, destination);
        let path = route.map_err(|error| no_way(error.to_string()))?.path;
        let topology = fabric.fabric().topology();
        Ok(Path {
            from: from.to_owned(),
            to: to.to_owned(),
            components: hops(topology, &path),
            hops: path.hops().len(),
            roots: path.roots(topology),
        })
    }

    /// The host or function of that name.
    fn end(&self, name: &str) -> Result<End, ApiError> {
        let inventory = self.shared.inventory();
        let topology = &inventory.topology;
        if let Some(host) = topology.host_named(name) {
            return Ok(End::Host(host));
        }
        let device = |id: &ComponentId| topology.component(*id).kind == ComponentKind::Device;
        topology.named(name).filter(device).map(End::Device).ok_or_else(|| {
            let devices =
                topology.components().filter(|(_, part)| part.kind == ComponentKind::Device);
            let known = inventory.hosts.iter().chain(devices.map(|(_, part)| &part.name));
            let known: Vec<&str> = known.map(String::as_str).collect();
            let error = format!("rack {} has no host or function {name}", inventory.rack);
            problem("unknown_place", error, &format!("it has {}", known.join(", ")))
        })
    }
}

/// The components of a way, each with the link that leads to it.
pub(crate) fn hops(topology: &Topology, path: &rackbus_fabric::Path) -> Vec<Hop> {
    let mut before = None;
    let hop = |id: &ComponentId| {
        let component = topology.component(*id);
        let link = before.replace(*id).and_then(|last| topology.link(last, *id));
        Hop {
            kind: component.kind.to_string(),
            name: component.name.clone(),
            link: link.map(|link| link.to_string()),
        }
    };
    path.components().iter().map(hop).collect()
}
