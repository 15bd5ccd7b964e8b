//! The way from one place of the rack to another.

use rackbus_fabric::{
    ComponentId, ComponentKind, DemandMapped, Destination, HostId, Requester, Topology, derive,
};

use rackbus_identity::{Certified, Subject};
use rackbus_lease::Placement;

use super::Service;
use super::views::problem;
use crate::api::{AccessPath, ApiError, Crossing, Hop};

/// Where a path begins or ends.
enum End {
    Host(HostId),
    Device(ComponentId),
}

/// How two machines on a path are joined.
enum BetweenMachines {
    /// The NTBs of the two map it.
    Bridge,
    /// A link through the NTBs of the two carries it.
    ThroughNtbs(Crossing),
    /// A link carries it.
    Link(Crossing),
}

impl Service {
    /// The way that memory accesses take from a host's processor or a function to a host's memory
    /// or a function, mapped as lending maps it.
    ///
    /// # Errors
    /// [`ApiError`] when a name is unknown, or the two are not joined.
    pub fn path(&self, from: &str, to: &str) -> Result<AccessPath, ApiError> {
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
        let network = |id: &ComponentId| topology.component(*id).kind == ComponentKind::Network;
        let is_apart = path.components().iter().any(network);
        let (between, hidden) = match self.crossing(from, to) {
            Some(BetweenMachines::Link(crossing)) => (Some(crossing), ComponentKind::Ntb),
            Some(BetweenMachines::Bridge) => (None, ComponentKind::Network),
            Some(BetweenMachines::ThroughNtbs(crossing)) => {
                (Some(crossing), ComponentKind::Network)
            }
            None if is_apart => {
                let cause = "they are on different machines, which nothing but the network joins";
                return Err(no_way(cause.to_owned()));
            }
            None => (None, ComponentKind::Network),
        };
        let components = hops_without(hidden, topology, &path);
        Ok(AccessPath {
            from: from.to_owned(),
            to: to.to_owned(),
            hops: components.len().saturating_sub(2),
            components,
            roots: path.roots(topology),
            between,
        })
    }

    /// The host of these two whose revocation is kept: all between them goes by TCP for as long, where certificates are asked for.
    fn revoked_of<'h>(&self, hosts: [&'h str; 2]) -> Option<&'h str> {
        let is_revoked = |host: &&str| {
            let node = Certified::unshown(Subject::Node((*host).to_owned()));
            self.revocations().check(&node).is_err()
        };
        hosts.into_iter().find(is_revoked)
    }

    /// The way of a segment's content where an NTB is for the link, and why that is not used, as the nodes say.
    fn through_ntbs(&self, writer: &str, reader: &str) -> Crossing {
        let copies = [
            format!("{writer}: bytes that were stored, out of the segment's memory there"),
            format!("{writer}: through a socket, and into {reader}'s memory by the NTB's window"),
            format!("{reader}: through a socket, and into the memory that is mapped there"),
        ];
        let known = self.shared.known();
        let unused = known.unused_ntb(writer, reader).or_else(|| known.unused_ntb(reader, writer));
        let link = match unused {
            Some(why) => format!("an NTB, which is not used just now: {why}"),
            None => "an NTB, by posted stores".to_owned(),
        };
        Crossing { link, lane: None, copies: copies.into() }
    }

    /// How a way goes on between machines; `None` where it is within one, or nothing joins them.
    fn crossing(&self, from: &str, to: &str) -> Option<BetweenMachines> {
        let inventory = self.shared.inventory();
        let host = |name: &str| name.split('/').next().unwrap_or(name).to_owned();
        let (here, there) = (host(from), host(to));
        if !inventory.apart || here == there {
            return None;
        }
        let known = |name: &str| inventory.devices.get(&name.parse().ok()?);
        let (lent, borrower, lender) = match (known(from), known(to)) {
            (Some(device), None) => (&device.function, there, here),
            (None, Some(device)) => (&device.function, here, there),
            // Functions reach each other within a machine only.
            (Some(_), Some(_)) => return None,
            (None, None) => {
                let pair = (here, there);
                let by_tcp = between_hosts(&pair.0, &pair.1);
                if !inventory.ntb_linked.contains(&pair) {
                    return Some(BetweenMachines::Link(by_tcp));
                }
                return Some(match self.revoked_of([&pair.0, &pair.1]) {
                    Some(host) => {
                        let link = format!("{LINK}, and not the NTB, as {host} was revoked");
                        BetweenMachines::Link(Crossing { link, ..by_tcp })
                    }
                    None => BetweenMachines::ThroughNtbs(self.through_ntbs(&pair.0, &pair.1)),
                });
            }
        };
        let state = self.shared.known();
        let mut leases = state.leases.values().filter(|lease| lease.is_live());
        if leases.any(|lease| {
            let is_its = lease.borrower == borrower && lease.function == *lent;
            is_its && lease.placement == Placement::Host
        }) {
            return Some(BetweenMachines::Bridge);
        }
        let link = state.front(&borrower, lent).and_then(|front| front.link.as_ref());
        let lane = link.and_then(|link| link.lane.as_ref()).filter(|lane| lane.up);
        let lane = lane.map(|lane| lane.provider.clone());
        Some(BetweenMachines::Link(to_a_medium(&borrower, &lender, lane)))
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

/// What the link between machines is.
const LINK: &str = "TLS over TCP";

/// The way of a segment's content.
fn between_hosts(writer: &str, reader: &str) -> Crossing {
    let copies = [
        format!("{writer}: bytes that were stored, out of the segment's memory there"),
        format!("{writer} and {reader}: encrypted and decrypted, and through the sockets of both"),
        format!("{reader}: into the memory that is mapped there"),
    ];
    Crossing { link: LINK.to_owned(), lane: None, copies: copies.into() }
}

/// The way between a front and its medium.
fn to_a_medium(borrower: &str, lender: &str, lane: Option<String>) -> Crossing {
    let over = match &lane {
        Some(_) => format!(
            "{borrower} and {lender}: none by either processor for data that the lane moves; the others encrypted and \
             decrypted, and through the sockets of both"
        ),
        None => format!(
            "{borrower} and {lender}: encrypted and decrypted, and through the sockets of both"
        ),
    };
    let copies = [
        format!("{borrower}: between its user's memory and the node's place for the operation"),
        over,
        format!("{lender}: between the node's place for the operation and what is lent"),
    ];
    Crossing { link: LINK.to_owned(), lane, copies: copies.into() }
}

/// The components of a way, each with the link that leads to it. Where the network joins two machines, no bridge does.
pub(crate) fn hops(topology: &Topology, path: &rackbus_fabric::FabricPath) -> Vec<Hop> {
    let is_network = |id: &ComponentId| topology.component(*id).kind == ComponentKind::Network;
    match path.components().iter().any(is_network) {
        true => hops_without(ComponentKind::Ntb, topology, path),
        false => hops_without(ComponentKind::Network, topology, path),
    }
}

/// The same without those of a kind: machines are joined by their bridges or by the network, and a topology tells of both.
fn hops_without(
    hidden: ComponentKind,
    topology: &Topology,
    path: &rackbus_fabric::FabricPath,
) -> Vec<Hop> {
    let kind = |id: &ComponentId| topology.component(*id).kind;
    let is_network = |id: &ComponentId| kind(id) == ComponentKind::Network;
    let mut before = None;
    let hop = |id: &ComponentId| {
        let component = topology.component(*id);
        let link = before.replace(*id).and_then(|last| match [last, *id].iter().any(is_network) {
            true => Some(LINK.to_owned()),
            false => topology.link(last, *id).map(|link| link.to_string()),
        });
        Hop { kind: component.kind.to_string(), name: component.name.clone(), link }
    };
    path.components().iter().filter(|id| kind(id) != hidden).map(hop).collect()
}
