//! The simulation's parts and links: what each component of the fabric is like in time, and each direction of each
//! link between them.

use rackbus_fabric::{ComponentId, ComponentKind, HostId, TopologyLink};

use super::Assembly;
use crate::engine::{Credits, DirectionParameters, IommuParameters, PartId, PartParameters};
use crate::time::Time;
use crate::timing::{HostTiming, PartTiming, Timing};
use crate::wire::{self, CXL_SLOT, Dllps, Wire};

impl Assembly {
    pub(super) fn add_parts(&mut self) {
        let topology = self.topology();
        let mut found = Vec::new();
        for (id, component) in topology.components() {
            let host = component.host.map(|host| topology.host(host));
            let iommu = host.is_some_and(|host| host.iommu);
            let own = self.timing.parts.get(&component.name).cloned().unwrap_or_default();
            let of = self.timing.of_host(host.map_or("", |host| &host.name));
            found.push((id, part(component.kind, iommu, (&self.timing, of), &own)));
        }
        let cxl = |id: &ComponentId| is_cxl(topology.component(*id).kind);
        let hosts = topology
            .hosts()
            .filter(|(_, host)| topology.neighbours(host.root).iter().any(|(other, _)| cxl(other)));
        let hosts: Vec<(HostId, ComponentId)> = hosts.map(|(id, host)| (id, host.root)).collect();
        for (id, parameters) in found {
            let part = self.world.add_part(parameters);
            self.parts.insert(id, part);
            self.components.push(id);
        }
        for (host, root) in hosts {
            // Messages of CXL.mem do not go the way of PCIe's through a root complex.
            let delay = [self.timing.cxl.port; 3];
            let port = self.world.add_part(PartParameters { delay, ..PartParameters::default() });
            self.ports.insert(host, port);
            self.components.push(root);
        }
    }

    /// The part of the simulation at a component's end of a link to another: of a host's root complex that is
    /// joined to CXL, the host's port.
    pub(super) fn part_towards(&self, of: ComponentId, to: ComponentId) -> PartId {
        let topology = self.topology();
        let port = topology.component(of).host.and_then(|host| self.ports.get(&host));
        match port.filter(|_| is_cxl(topology.component(to).kind)) {
            Some(port) => *port,
            None => self.parts[&of],
        }
    }

    pub(super) fn add_links(&mut self) {
        let topology = self.topology();
        let mut found = Vec::new();
        for (a, _) in topology.components() {
            // Both ends have it; the one that was added first adds it.
            let later = topology.neighbours(a).iter().filter(|(b, _)| *b > a);
            found.extend(later.map(|(b, link)| (a, *b, *link)));
        }
        for (a, b, link) in found {
            if self.directions.contains_key(&(a, b)) {
                continue;
            }
            let (there, back) = (self.direction_into(link, a, b), self.direction_into(link, b, a));
            let ends = (self.part_towards(a, b), self.part_towards(b, a));
            let direction = self.world.add_link(ends, there, back);
            self.directions.insert((a, b), direction);
            self.directions.insert((b, a), direction.back());
        }
    }

    /// The direction of a link that leads from one component into another.
    fn direction_into(
        &self,
        link: TopologyLink,
        from: ComponentId,
        into: ComponentId,
    ) -> DirectionParameters {
        let topology = self.topology();
        let kind = |id| topology.component(id).kind;
        let timing = &self.timing.link;
        // Behind its root complex, memory itself is what bounds it.
        let wire = ![kind(from), kind(into)].contains(&ComponentKind::Memory);
        let cxl = is_cxl(kind(from)) || is_cxl(kind(into));
        let wire = wire.then(|| match link {
            TopologyLink::Pcie { generation, lanes } if cxl => Wire::cxl(generation, lanes),
            link => Wire::of(link),
        });
        let Some(wire) = wire else {
            return DirectionParameters {
                wire: None,
                propagation: Time::ZERO,
                credits: Credits::ENDLESS,
                credit_return: Time::ZERO,
                dllps: Dllps::NONE,
            };
        };
        let shared = [kind(from), kind(into)].contains(&ComponentKind::SharedMemory);
        let propagation = match link {
            TopologyLink::Internal if shared => Time::ZERO,
            // Where no link is written, the part is joined as by an ample one without a length.
            TopologyLink::Internal | TopologyLink::Pcie { .. } => self.propagation(from, into),
        };
        let delay = self.world.part(self.part_towards(into, from)).delay;
        let longest = delay.into_iter().max().unwrap_or_default();
        let room = |set| timing.room(set, wire.rate(), longest, propagation);
        let (posted, requests) = (room(timing.posted), room((timing.nonposted, 0)).0);
        // Requesters have room for all that they asked for.
        let completion = match kind(into) {
            ComponentKind::Device | ComponentKind::RootComplex => (u32::MAX, u32::MAX),
            _ => room(timing.completion),
        };
        let units = |bytes: u32| if bytes == u32::MAX { bytes } else { bytes / wire::CREDIT_BYTES };
        DirectionParameters {
            wire: Some(wire),
            propagation,
            credits: Credits {
                packets: [posted.0, requests, completion.0],
                data: [units(posted.1), u32::MAX, units(completion.1)],
            },
            credit_return: timing.credit_return,
            dllps: match cxl {
                // What comes back for a message takes a slot: a write's response, the header before data.
                true if kind(into) == ComponentKind::RootComplex
                    || kind(from) == ComponentKind::CxlMemory =>
                {
                    Dllps::whole(CXL_SLOT)
                }
                true => Dllps::NONE,
                false => wire.dllps(timing.acknowledge_every, timing.update_every),
            },
        }
    }

    /// How long a bit takes on the link between two neighbours.
    fn propagation(&self, a: ComponentId, b: ComponentId) -> Time {
        let topology = self.topology();
        // A rack file calls a root complex by its host's name.
        let name = |id| {
            let component = topology.component(id);
            match component.host.filter(|_| component.kind == ComponentKind::RootComplex) {
                Some(host) => topology.host(host).name.clone(),
                None => component.name.clone(),
            }
        };
        let lengths = &self.timing.lengths;
        let own = [[a, b], [b, a]].iter().find_map(|ends| lengths.get(&ends.map(name)));
        own.copied().unwrap_or(self.timing.link.propagation)
    }
}

/// Whether a component speaks CXL on its links.
fn is_cxl(kind: ComponentKind) -> bool {
    matches!(kind, ComponentKind::CxlMemory | ComponentKind::CxlSwitch)
}

/// Picoseconds per byte, times 1024, of a rate in bytes per second.
fn per_byte(rate: u64) -> u64 {
    1_024_000_000_000_000 / rate.max(1)
}

fn part(
    kind: ComponentKind,
    iommu: bool,
    (timing, host): (&Timing, &HostTiming),
    own: &PartTiming,
) -> PartParameters {
    let default = PartParameters { completion: timing.device.mps, ..PartParameters::default() };
    match kind {
        ComponentKind::Switch => {
            PartParameters { delay: [own.latency.unwrap_or(timing.switch.latency); 3], ..default }
        }
        ComponentKind::Ntb => {
            let ntb = &timing.ntb;
            let latency = own.latency.unwrap_or(ntb.latency);
            let request = latency + own.translation.unwrap_or(ntb.translation);
            let back = own.completion_translation.unwrap_or(ntb.completion_translation);
            // Its registers are behind its port, which request and completion cross.
            let access = latency * 2;
            PartParameters { delay: [request, request, latency + back], access, ..default }
        }
        ComponentKind::RootComplex => {
            let (root, iommu_of) = (&host.root, &host.iommu);
            let latency = own.latency.unwrap_or(root.latency);
            PartParameters {
                delay: [latency, latency, root.completion_latency],
                access: latency,
                iommu: iommu.then_some(IommuParameters {
                    entries: iommu_of.entries,
                    page: iommu_of.page,
                    hit: iommu_of.hit,
                    walk: iommu_of.walk,
                    walkers: iommu_of.walkers,
                }),
                turns: true,
                peer_per_byte: if root.peer_writes == 0 { 0 } else { per_byte(root.peer_writes) },
                split: root.split,
                trackers: root.trackers,
                combine: root.combine.min(timing.device.mps),
                ..default
            }
        }
        ComponentKind::Memory => {
            let memory = &host.memory;
            let most = |set: u32| if set == 0 { u32::MAX } else { set }.min(timing.device.mps);
            PartParameters {
                access: own.latency.unwrap_or(memory.latency),
                service_per_byte: per_byte(own.bandwidth.unwrap_or(memory.bandwidth)),
                partial_write: memory.partial_write,
                completion: most(memory.completion),
                long_read: memory.long_read,
                long_completion: most(memory.long_completion),
                ..default
            }
        }
        ComponentKind::CxlSwitch => {
            PartParameters { delay: [own.latency.unwrap_or(timing.cxl.switch); 3], ..default }
        }
        ComponentKind::CxlMemory => PartParameters {
            access: own.latency.unwrap_or(timing.cxl.latency),
            service_per_byte: per_byte(own.bandwidth.unwrap_or(timing.cxl.bandwidth)),
            completion: 64,
            ..default
        },
        // Racks are modelled as one machine's, or with their cables.
        ComponentKind::SharedMemory | ComponentKind::Network => {
            PartParameters { delay: [host.memory.latency; 3], ..default }
        }
        ComponentKind::Device => PartParameters {
            access: own.latency.unwrap_or(timing.device.latency),
            service_per_byte: per_byte(own.bandwidth.unwrap_or(timing.device.bandwidth)),
            ..default
        },
    }
}
