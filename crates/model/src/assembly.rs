//! A rack put together for the simulation: the engine's parts, links and routes, made of the fabric's
//! topology, its routes and the rack's timing.
//!
//! Routes are the fabric's own ([`DemandMapped`]): an access is mapped as lending or connecting would map
//! it, and then asked for with [`Fabric::route`], so that the model and the live system never disagree about where
//! an address leads, or which way.

mod build;

use std::collections::BTreeMap;

use rackbus_fabric::demand::BAR;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{
    AccessError, ComponentId, ComponentKind, DemandMapped, Destination, Fabric, HostId, Requester,
    SpaceError, Topology, TopologyError, TopologyLink, WayError, derive,
};

use crate::engine::{
    DirectionId, PartId, RequesterId, RequesterParameters, RouteId, StreamId, World,
};
use crate::time::Time;
use crate::timing::{HostTiming, Timing};

/// Why a rack or a route cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssemblyError {
    /// The rack file's parts and links make no topology.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// An address space has no room for, or refuses, a mapping.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The rack has no part of that name.
    #[error(
        "the rack has no `{0}`; an end is a host, HOST/DEVICE, an adapter, a CXL memory, or HOST@ADDRESS"
    )]
    Unknown(String),
    /// It is there, but no end.
    #[error(
        "`{0}` is a {1}; an end is a host, HOST/DEVICE, an adapter, a CXL memory, or HOST@ADDRESS"
    )]
    Between(String, ComponentKind),
    /// It is CXL memory, and what asks is no processor.
    #[error("`{from}` does not reach the CXL memory `{to}`; processors do: name a host")]
    NotCoherent {
        /// The name of the source.
        from: String,
        /// The name of the memory.
        to: String,
    },
    /// It is the memory of the host whose processor asks.
    #[error(
        "`{0}` reaches its own memory by its caches, which are not modelled; name another end, and for what a \
         processor copies from its memory to elsewhere a flow of kind `write`"
    )]
    OwnMemory(String),
    /// It is an adapter of another host.
    #[error(
        "`{from}` does not reach the registers of `{to}`, which is another host's; name an adapter of its own host"
    )]
    Registers {
        /// The name of the source.
        from: String,
        /// The name of the adapter.
        to: String,
    },
    /// It makes no requests.
    #[error("`{0}` makes no requests; name a host (its processor) or HOST/DEVICE")]
    Passive(String),
    /// It cannot be reached.
    #[error("no way leads from `{from}` to `{to}`; join them with links, or name other ends")]
    NoWay {
        /// The name of the source.
        from: String,
        /// The name of the target.
        to: String,
    },
    /// An address leads nowhere.
    #[error("`{from}` cannot reach {to}: {cause}; map it with [[fabric.windows]]")]
    Unmapped {
        /// The name of the source.
        from: String,
        /// The name of the target.
        to: String,
        /// What the fabric refused it for.
        cause: AccessError,
    },
}

/// One end of what moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// A host: its processor as a source, its memory as a target.
    Host(HostId),
    /// A device: its DMA engine as a source, its registers and memory as a target.
    Device(ComponentId),
    /// An NTB's registers, seen by its host.
    Adapter(ComponentId),
    /// An address in a host's address space.
    Address(HostId, u64),
    /// A CXL memory device, which processors of hosts read and write.
    Cxl(ComponentId),
}

/// A source of requests: whose, and a stream of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The host or device that makes them.
    pub end: End,
    /// The stream that they are made in, of the end's requester.
    pub stream: StreamId,
}

/// A rack, put together.
#[derive(Debug)]
pub struct Assembly {
    /// The simulation that the rack's parts, links and routes have been added to.
    pub world: World,
    fabric: DemandMapped,
    timing: Timing,
    parts: BTreeMap<ComponentId, PartId>,
    /// By host: the port by which its processor reaches CXL memory, where there is any.
    ports: BTreeMap<HostId, PartId>,
    components: Vec<ComponentId>,
    directions: BTreeMap<(ComponentId, ComponentId), DirectionId>,
    requesters: BTreeMap<ComponentId, RequesterId>,
    routes: BTreeMap<(End, End), RouteId>,
}

impl Assembly {
    /// Puts `rack` together; `seed` is that of the simulation's random numbers.
    ///
    /// # Errors
    /// [`AssemblyError`] when its topology cannot be.
    pub fn new(rack: &Rack, timing: &Timing, seed: u64) -> Result<Assembly, AssemblyError> {
        let fabric =
            derive::fabric(rack, derive::topology_with_ntbs(rack)?).map_err(|(_, error)| error)?;
        Ok(Assembly::of(fabric, timing, seed))
    }

    /// Puts together what a fabric consists of.
    pub fn of(fabric: Fabric, timing: &Timing, seed: u64) -> Assembly {
        let mut assembly = Assembly {
            world: World::new(seed),
            fabric: DemandMapped::new(fabric),
            timing: timing.clone(),
            parts: BTreeMap::new(),
            ports: BTreeMap::new(),
            components: Vec::new(),
            directions: BTreeMap::new(),
            requesters: BTreeMap::new(),
            routes: BTreeMap::new(),
        };
        assembly.add_parts();
        assembly.add_links();
        assembly
    }

    /// The fabric, with all that was mapped for routes.
    pub fn fabric(&self) -> &Fabric {
        self.fabric.fabric()
    }

    /// The timing that it was put together with.
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// The components and links that its parts and directions stand for.
    pub fn topology(&self) -> &Topology {
        self.fabric().topology()
    }

    /// The part that stands for a component.
    pub fn part(&self, component: ComponentId) -> PartId {
        self.parts[&component]
    }

    /// The component that a part stands for.
    pub fn component(&self, part: PartId) -> ComponentId {
        self.components[part.index()]
    }

    /// The name of a part.
    pub fn name(&self, part: PartId) -> &str {
        &self.topology().component(self.components[part.index()]).name
    }

    /// The links: their ends, what they are, and the direction from the first to the second.
    pub fn links(
        &self,
    ) -> impl Iterator<Item = (ComponentId, ComponentId, TopologyLink, DirectionId)> {
        let topology = self.topology();
        let first =
            self.directions.iter().filter(|(_, direction)| direction.index().is_multiple_of(2));
        first.filter_map(move |((a, b), direction)| {
            Some((*a, *b, topology.link(*a, *b)?, *direction))
        })
    }

    /// The direction from one component to its neighbour.
    pub fn direction(&self, from: ComponentId, to: ComponentId) -> Option<DirectionId> {
        self.directions.get(&(from, to)).copied()
    }

    /// The end of that name: a host, `HOST/DEVICE`, an adapter, or `HOST@ADDRESS`.
    ///
    /// # Errors
    /// [`AssemblyError::Unknown`].
    pub fn end(&self, name: &str) -> Result<End, AssemblyError> {
        let unknown = || AssemblyError::Unknown(name.to_owned());
        let topology = self.topology();
        if let Some((host, address)) = name.split_once('@') {
            let host = topology.host_named(host).ok_or_else(unknown)?;
            let address = match address.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16),
                None => address.parse(),
            };
            return Ok(End::Address(host, address.map_err(|_| unknown())?));
        }
        if let Some(host) = topology.host_named(name) {
            return Ok(End::Host(host));
        }
        let id = topology.named(name).ok_or_else(unknown)?;
        match topology.component(id).kind {
            ComponentKind::Device => Ok(End::Device(id)),
            ComponentKind::Ntb => Ok(End::Adapter(id)),
            ComponentKind::CxlMemory => Ok(End::Cxl(id)),
            kind => Err(AssemblyError::Between(name.to_owned(), kind)),
        }
    }

    /// What an end is called.
    pub fn end_name(&self, end: End) -> String {
        let topology = self.topology();
        match end {
            End::Host(host) => topology.host(host).name.clone(),
            End::Device(id) | End::Adapter(id) | End::Cxl(id) => {
                topology.component(id).name.clone()
            }
            End::Address(host, address) => format!("{}@{address:#x}", topology.host(host).name),
        }
    }

    /// A source of requests at an end: a stream (queue pair, channel) of a device, or a core of a
    /// host's processor.
    ///
    /// # Errors
    /// [`AssemblyError::Passive`].
    pub fn source(&mut self, end: End) -> Result<Source, AssemblyError> {
        let requester = match end {
            End::Host(host) => {
                let root = self.parts[&self.topology().host(host).root];
                let own = self.timing.of_host(&self.topology().host(host).name);
                let cpu = &own.cpu;
                // Those that cross the root complex wait for nothing.
                let crossing = own.root.latency.ps().div_ceil(cpu.fill.ps().max(1));
                let parameters = RequesterParameters {
                    payload: cpu.line.min(self.timing.device.mps),
                    read: cpu.line,
                    tags: cpu.loads,
                    window: cpu.window.saturating_add(crossing as u32),
                    gap: cpu.fill,
                    write_gap: Time::ZERO,
                    write_setup: Time::ZERO,
                    alignment: 0,
                    turn: 0,
                    engine: None,
                };
                self.world.add_requester(root, parameters)
            }
            End::Device(id) => match self.requesters.get(&id) {
                Some(requester) => *requester,
                None => {
                    let requester = self.world.add_requester(self.parts[&id], self.dma(id));
                    self.requesters.insert(id, requester);
                    requester
                }
            },
            End::Adapter(_) | End::Address(..) | End::Cxl(_) => {
                return Err(AssemblyError::Passive(self.end_name(end)));
            }
        };
        Ok(Source { end, stream: self.world.add_stream(requester) })
    }

    /// A source of requests at an end, for what goes to a target: a core reads and writes lines of CXL memory by
    /// its caches, and not as it does windows and registers.
    ///
    /// # Errors
    /// [`AssemblyError::Passive`].
    pub fn source_towards(&mut self, end: End, to: End) -> Result<Source, AssemblyError> {
        let port = match (end, to) {
            (End::Host(host), End::Cxl(_)) => self.ports.get(&host).copied(),
            _ => None,
        };
        let Some(port) = port else { return self.source(end) };
        let cpu = &self.host_of(end).cpu;
        let parameters = RequesterParameters {
            payload: cpu.line.min(self.timing.device.mps),
            read: cpu.line,
            tags: self.timing.cxl.loads,
            window: self.timing.cxl.loads,
            ..RequesterParameters::default()
        };
        let requester = self.world.add_requester(port, parameters);
        Ok(Source { end, stream: self.world.add_stream(requester) })
    }

    /// The requester of a device, when it has made one.
    pub fn requester(&self, end: End) -> Option<RequesterId> {
        match end {
            End::Device(id) => self.requesters.get(&id).copied(),
            _ => None,
        }
    }

    /// What a device's DMA engine is like.
    pub fn dma(&self, id: ComponentId) -> RequesterParameters {
        let device = &self.timing.device;
        let name = &self.topology().component(id).name;
        let own = self.timing.parts.get(name).cloned().unwrap_or_default();
        let engine = own.engine.unwrap_or(device.engine);
        let payload = own.payload.unwrap_or(device.payload);
        RequesterParameters {
            payload: if payload == 0 { device.mps } else { payload.min(device.mps) },
            read: own.mrrs.unwrap_or(device.mrrs),
            tags: own.tags.unwrap_or(device.tags),
            window: own.window.unwrap_or(device.window),
            gap: own.packet_gap.unwrap_or(device.packet_gap),
            write_gap: own.write_gap.unwrap_or(device.write_gap),
            write_setup: own.write_setup.unwrap_or(device.write_setup),
            alignment: own.alignment.unwrap_or(device.alignment),
            turn: own.turn.unwrap_or(device.turn),
            engine: (engine > 0).then_some(engine),
        }
    }

    /// Between two messages of a queue pair of a device.
    pub fn message(&self, id: ComponentId) -> Time {
        let own = self.timing.parts.get(&self.topology().component(id).name);
        own.and_then(|own| own.message).unwrap_or(self.timing.device.message)
    }

    /// The way from one end to another, and what the source calls the address where it ends.
    ///
    /// # Errors
    /// [`AssemblyError`] when there is none, or the fabric refuses it.
    pub fn route(&mut self, from: End, to: End) -> Result<RouteId, AssemblyError> {
        if let Some(route) = self.routes.get(&(from, to)) {
            return Ok(*route);
        }
        let components = self.components(from, to)?;
        let directions: Vec<DirectionId> =
            components.windows(2).filter_map(|pair| self.direction(pair[0], pair[1])).collect();
        let first = components
            .get(1)
            .map_or(self.parts[&components[0]], |next| self.part_towards(components[0], *next));
        let route = self.world.add_route(first, &directions);
        if matches!(to, End::Cxl(_)) {
            self.world.set_slots(route);
        }
        self.shorten(route, (from, to), &components);
        self.routes.insert((from, to), route);
        Ok(route)
    }

    /// What the processor of an end's host brings: of a device, of the host that it is in.
    pub fn host_of(&self, end: End) -> &HostTiming {
        let topology = self.topology();
        let host = match end {
            End::Host(host) | End::Address(host, _) => Some(host),
            End::Device(id) | End::Adapter(id) => topology.component(id).host,
            End::Cxl(_) => None,
        };
        self.timing.of_host(host.map_or("", |host| &topology.host(host).name))
    }

    /// Tells a route where its addresses are below 4 GiB: in the source's address space up to the NTB by which
    /// it enters another host, and in that host's from there on.
    fn shorten(&mut self, route: RouteId, (from, to): (End, End), components: &[ComponentId]) {
        const LOW: u64 = 1 << 32;
        let topology = self.topology();
        let length = destination(to).map_or(BAR, |to| self.fabric.length(to));
        let low = |host: Option<HostId>| {
            let at = match (host, to) {
                (Some(host), End::Host(own)) if host == own => Some(0),
                (Some(host), _) => destination(to).and_then(|to| self.fabric.mapped(host, to)),
                (None, _) => None,
            };
            at.is_some_and(|at| at.saturating_add(length) <= LOW)
        };
        let own = match from {
            End::Host(host) => Some(host),
            _ => components.first().and_then(|id| topology.component(*id).host),
        };
        let there = components.last().and_then(|id| topology.component(*id).host);
        let turn =
            components.iter().position(|id| topology.component(*id).host == there && there != own);
        let low = [low(own), low(there)];
        self.world.set_low(route, turn.unwrap_or(components.len()), low);
    }

    /// The components on the route from one end to another, both included.
    ///
    /// # Errors
    /// [`AssemblyError`] when there is none, or the fabric refuses it.
    pub fn components(&mut self, from: End, to: End) -> Result<Vec<ComponentId>, AssemblyError> {
        let topology = self.topology();
        // Whatever checks its accesses of others: to its own memory a device has a way inside.
        if let (End::Device(own), true) = (from, from == to) {
            return Ok(vec![own]);
        }
        if let End::Cxl(memory) = to {
            let End::Host(host) = from else {
                let (from, to) = (self.end_name(from), self.end_name(to));
                return Err(AssemblyError::NotCoherent { from, to });
            };
            let way = topology.way(topology.host(host).root, memory);
            return way.ok_or_else(|| self.no_route(from, to));
        }
        let (requester, first) = match from {
            End::Host(host) => (Requester::Cpu(host), topology.host(host).root),
            End::Device(id) => (Requester::Device(id), id),
            End::Adapter(_) | End::Address(..) | End::Cxl(_) => {
                return Err(AssemblyError::Passive(self.end_name(from)));
            }
        };
        let Some(destination) = destination(to) else {
            let End::Adapter(ntb) = to else { return Err(self.no_route(from, to)) };
            let host_of = |id| topology.component(id).host;
            if host_of(first) != host_of(ntb) {
                let (from, to) = (self.end_name(from), self.end_name(to));
                return Err(AssemblyError::Registers { from, to });
            }
            let path = topology.path(first, ntb);
            let path = path.ok_or_else(|| self.no_route(from, to))?;
            return Ok(path.components().to_vec());
        };
        let route = self.fabric.route(requester, destination).map_err(|error| match error {
            WayError::Space(error) => AssemblyError::Space(error),
            WayError::NotJoined => self.no_route(from, to),
            WayError::Access(cause) => {
                AssemblyError::Unmapped { from: self.end_name(from), to: self.end_name(to), cause }
            }
        })?;
        Ok(route.path.components().to_vec())
    }

    /// Whether an end is a processor, and the route from it ends in its own host's memory at once.
    pub fn is_own_memory(&self, from: End, route: RouteId) -> bool {
        let End::Host(host) = from else { return false };
        let own = |part| {
            let component = self.topology().component(self.component(part));
            component.host == Some(host) && component.kind == ComponentKind::Memory
        };
        let parts: Vec<PartId> = self.world.parts_of(route).collect();
        parts.len() == 2 && own(parts[1])
    }

    fn no_route(&self, from: End, to: End) -> AssemblyError {
        AssemblyError::NoWay { from: self.end_name(from), to: self.end_name(to) }
    }
}

/// What accesses to an end are meant for; `None` for an adapter's registers and for CXL memory, which are not mapped.
fn destination(end: End) -> Option<Destination> {
    match end {
        End::Host(host) => Some(Destination::Memory(host)),
        End::Device(id) => Some(Destination::Device(id)),
        End::Address(host, address) => Some(Destination::Address(host, address)),
        End::Adapter(_) | End::Cxl(_) => None,
    }
}
