//! What of an answer was held against no measurement: hosts, links, devices and traffic that no row of
//! `rackbus model reproduce` is of, or of which rows miss.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_fabric::{ComponentKind, TopologyLink};

use super::scripts::Run;
use super::{FlowKind, FlowSpec};
use crate::assembly::End;
use crate::engine::{DirectionId, PartId, RouteId};
use crate::timing::profiles;

/// The generation from which on no link was measured.
const UNTRIED_GENERATION: u8 = 6;
/// Ports of a switch that each send to several, from which on throughput is lost.
const CROWD: usize = 3;
/// From this load of such a port on that is seen: queues that keep their order pass on 58.6 % of random traffic
/// (Karol, Hluchyj and Morgan, 1987).
const CROWDED: f64 = 0.5;
/// From this load of a link on its payload's size tells what a flow gets.
const LOADED: f64 = 0.8;
/// Names in a sentence, at most.
const NAMED: usize = 8;

/// What was held against no measurement, by what is said of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Untried {
    /// By profile, and whether the rack file sets some of its values anew: hosts whose root complex, memory or processor
    /// flows use.
    hosts: BTreeMap<(String, bool), BTreeSet<String>>,
    flits: bool,
    /// Whether anything moves between hosts that no cable joins.
    one_machine: bool,
    cxl: BTreeSet<String>,
    rings: BTreeSet<String>,
    drives: BTreeSet<String>,
    shaped: BTreeSet<String>,
    /// Flows whose writes an IOMMU's cache has no room for.
    missing: BTreeSet<String>,
    /// Flows on loaded links of a rack file that does not say what the MPS is.
    payloads: BTreeSet<String>,
    switches: BTreeMap<String, Crossings>,
}

/// What of a workload crosses a switch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Crossings {
    /// From which port to which.
    pairs: BTreeSet<(PartId, PartId)>,
    /// The ports that are busy sending.
    busy: BTreeSet<PartId>,
}

impl Crossings {
    /// Whether several busy ports send to several at once.
    fn are_crowded(&self) -> bool {
        let several = |end: fn(&(PartId, PartId)) -> PartId| {
            let mut counts: BTreeMap<PartId, usize> = BTreeMap::new();
            self.pairs.iter().for_each(|pair| *counts.entry(end(pair)).or_default() += 1);
            counts.retain(|_, others| *others > 1);
            counts
        };
        let (from, to) = (several(|pair| pair.0), several(|pair| pair.1));
        from.len() >= CROWD && to.keys().filter(|part| self.busy.contains(part)).count() >= CROWD
    }
}

impl Untried {
    /// Adds what another part of the same workload uses.
    pub(super) fn merge(&mut self, other: Untried) {
        for (profile, hosts) in other.hosts {
            self.hosts.entry(profile).or_default().extend(hosts);
        }
        self.flits |= other.flits;
        self.one_machine |= other.one_machine;
        self.cxl.extend(other.cxl);
        self.rings.extend(other.rings);
        self.drives.extend(other.drives);
        self.shaped.extend(other.shaped);
        self.missing.extend(other.missing);
        self.payloads.extend(other.payloads);
        for (switch, crossings) in other.switches {
            let own = self.switches.entry(switch).or_default();
            own.pairs.extend(crossings.pairs);
            own.busy.extend(crossings.busy);
        }
    }

    /// The same in sentences, without their full stops.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let mut said = Vec::new();
        for ((profile, changed), hosts) in &self.hosts {
            if let Some(why) = why(profile, *changed) {
                said.push(format!("{profile} ({}): {why}", names(hosts)));
            }
        }
        if self.flits {
            said.push("Gen6 links: no measurement was of one".to_owned());
        }
        if self.one_machine {
            said.push(ONE_MACHINE.to_owned());
        }
        let crowded = self.switches.iter().filter(|(_, crossings)| crossings.are_crowded());
        let crowded: BTreeSet<String> = crowded.map(|(switch, _)| switch.clone()).collect();
        for (flows, why) in [
            (&self.cxl, CXL),
            (&self.rings, "no measurement was of an all-reduce"),
            (&self.drives, DRIVES),
            (&self.shaped, "no measurement was of a device or switch that shapes"),
            (&self.missing, MISSING),
            (&self.payloads, PAYLOADS),
            (&crowded, CROSSING),
        ] {
            if !flows.is_empty() {
                said.push(format!("{}: {why}", names(flows)));
            }
        }
        said
    }
}

const ONE_MACHINE: &str = "hosts that no cable joins are taken to share the memory of one machine, and no measurement was \
                           of such";
const CXL: &str = "CXL memory's parts are estimates that were held against no measurement; a lone load of real devices took 140 \
                   to 410 ns, by device and processor (Liu and others, ASPLOS 2025)";
const DRIVES: &str =
    "of drives one published difference of latencies was modelled alone, and missed (DL8)";
const MISSING: &str = "more pages are written than an IOMMU's cache has room for, where half of the measured rates were within 15 % \
                       of the model's (P4)";
const PAYLOADS: &str = "packets are taken to have payloads of 256 B; where firmware has set 128 B (MaxPayload in `lspci -vv`), as in \
                        some machines of H1, links carry 8 % less: set `mps` in [timing.device]";
const CROSSING: &str = "several ports send to several at once, where switches passed on 126 to 164 GB/s of the 224 that \
                        their links have (G2, G3): expect less than is modelled";

/// What of a profile was held against no measurement; `None` where measurements were of it, as it is.
fn why(profile: &str, changed: bool) -> Option<String> {
    if !profiles::all().contains_key(profile) {
        return Some("the rack file's own, of which nothing was measured here".to_owned());
    }
    let changed = changed.then(|| "with values of the rack file's own".to_owned());
    let said: Vec<String> = changed.into_iter().chain(profiles::untried(profile)).collect();
    (!said.is_empty()).then(|| said.join("; "))
}

/// Names, of which there may be many.
fn names(all: &BTreeSet<String>) -> String {
    let first: Vec<&str> = all.iter().take(NAMED).map(String::as_str).collect();
    match all.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

impl Run {
    /// What was held against no measurement; `load` is the share of the time for which a direction is sending.
    pub(crate) fn untried(&self, load: &dyn Fn(DirectionId) -> f64) -> Untried {
        let mut found = Untried::default();
        for (spec, queues, routes) in self.flows() {
            self.note_kind(spec, &mut found);
            for route in routes {
                self.note_hosts(*route, &mut found);
                self.note_translations(spec, queues.len(), *route, &mut found);
                self.note_crossings(spec, *route, load, &mut found);
                self.note_payload(spec, *route, load, &mut found);
            }
        }
        found
    }

    fn note_kind(&self, spec: &FlowSpec, found: &mut Untried) {
        let name = || spec.name.clone();
        match &spec.kind {
            FlowKind::AllReduce { .. } => _ = found.rings.insert(name()),
            FlowKind::Ring { drive: true, .. } => _ = found.drives.insert(name()),
            _ => {}
        }
        let is_cxl = |name: &str| matches!(self.assembly.end(name), Ok(End::Cxl(_)));
        if spec.kind.ends().into_iter().any(is_cxl) {
            found.cxl.insert(name());
        }
        if !self.workload().shaping.is_empty() && spec.tenant.is_some() {
            found.shaped.insert(name());
        }
    }

    fn note_hosts(&self, route: RouteId, found: &mut Untried) {
        let topology = self.assembly.topology();
        let world = &self.assembly.world;
        for part in world.parts_of(route) {
            let component = topology.component(self.assembly.component(part));
            found.one_machine |= component.kind == ComponentKind::SharedMemory;
            let own = matches!(component.kind, ComponentKind::RootComplex | ComponentKind::Memory);
            if let Some(host) = component.host.filter(|_| own) {
                let host = &topology.host(host).name;
                let timing = self.assembly.timing();
                let (of, parts) = (timing.of_host(host), &timing.parts);
                let own = |part: &str| parts.contains_key(&format!("{host}/{part}"));
                let as_it_is = profiles::all().get(&of.profile) == Some(of);
                let changed = !as_it_is || own("root") || own("memory");
                let hosts = found.hosts.entry((of.profile.clone(), changed)).or_default();
                hosts.insert(host.clone());
            }
        }
        found.flits |= world.directions_of(route).into_iter().any(|direction| {
            self.pcie_generation(direction)
                .is_some_and(|generation| generation >= UNTRIED_GENERATION)
        });
    }

    /// The generation of a link that the rack file tells.
    fn pcie_generation(&self, direction: DirectionId) -> Option<u8> {
        let (from, to) = self.assembly.world.ends_of(direction);
        let [from, to] = [from, to].map(|part| self.assembly.component(part));
        match self.assembly.topology().link(from, to) {
            Some(TopologyLink::Pcie { generation, .. }) => Some(generation),
            _ => None,
        }
    }

    /// Notes writes by an IOMMU that has not all of their pages at a time: each queue has pages of its own.
    fn note_translations(
        &self,
        spec: &FlowSpec,
        queues: usize,
        route: RouteId,
        found: &mut Untried,
    ) {
        let world = &self.assembly.world;
        let bytes = u128::from(spec.span) * queues as u128;
        let misses = |part: PartId| {
            let iommu = world.part(part).iommu.as_ref();
            iommu.is_some_and(|it| bytes > u128::from(it.entries) * u128::from(it.page))
        };
        let reads = matches!(spec.kind, FlowKind::Read { .. });
        if !reads && world.parts_of(route).any(misses) {
            found.missing.insert(spec.name.clone());
        }
    }

    /// Notes flows whose links are nearly full, where the MPS is this model's and not the rack file's.
    fn note_payload(
        &self,
        spec: &FlowSpec,
        route: RouteId,
        load: &dyn Fn(DirectionId) -> f64,
        found: &mut Untried,
    ) {
        if self.assembly.timing().mps_stated {
            return;
        }
        let world = &self.assembly.world;
        let is_full = |direction: &DirectionId| {
            self.pcie_generation(*direction).is_some()
                && load(*direction).max(load(direction.back())) >= LOADED
        };
        if world.directions_of(route).iter().any(is_full) {
            found.payloads.insert(spec.name.clone());
        }
    }

    /// Notes from which port to which a flow's bytes cross switches.
    fn note_crossings(
        &self,
        spec: &FlowSpec,
        route: RouteId,
        load: &dyn Fn(DirectionId) -> f64,
        found: &mut Untried,
    ) {
        let parts: Vec<PartId> = self.assembly.world.parts_of(route).collect();
        let topology = self.assembly.topology();
        for three in parts.windows(3) {
            let switch = self.assembly.component(three[1]);
            let component = topology.component(switch);
            if component.kind != ComponentKind::Switch {
                continue;
            }
            let crossings = found.switches.entry(component.name.clone()).or_default();
            let mut cross = |from: PartId, to: PartId| {
                crossings.pairs.insert((from, to));
                let out = self.assembly.direction(switch, self.assembly.component(to));
                if out.is_some_and(|out| load(out) >= CROWDED) {
                    crossings.busy.insert(to);
                }
            };
            if !matches!(spec.kind, FlowKind::Read { .. }) {
                cross(three[0], three[2]);
            }
            if !matches!(spec.kind, FlowKind::Write { .. }) {
                cross(three[2], three[0]);
            }
        }
    }
}
