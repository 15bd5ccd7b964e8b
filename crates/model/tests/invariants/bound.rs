//! The least time that a job can take, written down apart from the engine: what its route takes for
//! the head of a packet, and the slowest link for all of the bytes.

use rackbus_fabric::{ComponentId, ComponentKind, TopologyLink};
use rackbus_model::assembly::{Assembly, End};
use rackbus_model::time::Time;

/// Picoseconds per byte of a link, and the bytes that frame a packet there.
fn wire(link: TopologyLink) -> Option<(f64, f64)> {
    let TopologyLink::Pcie { generation, lanes } = link else { return None };
    // Gigatransfers per second, and which share of them is data.
    let (rate, share, framing) = match generation {
        1 => (2.5, 0.8, 8.0),
        2 => (5.0, 0.8, 8.0),
        3 => (8.0, 128.0 / 130.0, 8.0),
        4 => (16.0, 128.0 / 130.0, 8.0),
        5 => (32.0, 128.0 / 130.0, 8.0),
        _ => (64.0, 236.0 / 256.0, 0.0),
    };
    Some((8_000.0 / (rate * share * f64::from(lanes)), framing))
}

/// A route's components, and how long they keep what passes.
pub struct Bound<'a> {
    it: &'a Assembly,
    components: Vec<ComponentId>,
}

impl Bound<'_> {
    pub fn new(it: &mut Assembly, from: End, to: End) -> Bound<'_> {
        let components = it.components(from, to).unwrap();
        Bound { it, components }
    }

    /// How long component `nth` of the route keeps a request, or a completion.
    fn stay(&self, nth: usize, back: bool) -> Time {
        let timing = self.it.timing();
        let component = self.it.topology().component(self.components[nth]);
        let host = component.host.map(|host| self.it.topology().host(host));
        match (component.kind, back) {
            (ComponentKind::Switch, _) => timing.switch.latency,
            (ComponentKind::Ntb, false) => timing.ntb.latency + timing.ntb.translation,
            (ComponentKind::Ntb, true) => timing.ntb.latency + timing.ntb.completion_translation,
            (ComponentKind::RootComplex, true) => timing.host.root.completion_latency,
            (ComponentKind::RootComplex, false)
                if nth > 0 && host.is_some_and(|host| host.iommu) =>
            {
                timing.host.root.latency + timing.host.iommu.hit
            }
            (ComponentKind::RootComplex, false) => timing.host.root.latency,
            _ => Time::ZERO,
        }
    }

    /// The least time for `bytes` in so many packets of such a header, in picoseconds.
    fn pass(&self, back: bool, header: f64, packets: f64, bytes: f64) -> f64 {
        let topology = self.it.topology();
        // What begins or ends at a processor crosses its root; the target's share is its access.
        let passed = 0..self.components.len() - 1;
        let stays: f64 = passed.map(|nth| self.stay(nth, back).ps() as f64).sum();
        let links = self.components.windows(2).filter_map(|pair| topology.link(pair[0], pair[1]));
        let mut wires: Vec<(f64, f64)> = links.filter_map(wire).collect();
        if back {
            wires.reverse();
        }
        let propagation = self.it.timing().link.propagation.ps() as f64 * wires.len() as f64;
        let mut before = 0.0;
        let mut longest: f64 = 0.0;
        for (per_byte, framing) in wires {
            let head = (header + framing) * per_byte;
            longest = longest.max(before + head * packets + bytes * per_byte);
            before += head;
        }
        stays + propagation + longest
    }

    /// From a request's coming to the target until the first bytes of `bytes` go, or are seen.
    fn access(&self, bytes: f64) -> f64 {
        let timing = self.it.timing();
        let target = self.it.topology().component(self.components[self.components.len() - 1]);
        let (latency, rate) = match target.kind {
            ComponentKind::Memory => (timing.host.memory.latency, timing.host.memory.bandwidth),
            _ => (timing.device.latency, timing.device.bandwidth),
        };
        latency.ps() as f64 + bytes * 1e12 / rate as f64
    }

    pub fn write(&self, bytes: u64) -> f64 {
        let mps = f64::from(self.it.timing().device.mps);
        let bytes = bytes as f64;
        self.pass(false, 12.0, (bytes / mps).ceil(), bytes) + self.access(1.0)
    }

    pub fn read(&self, bytes: u64) -> f64 {
        let mps = f64::from(self.it.timing().device.mps);
        let bytes = bytes as f64;
        let request = self.pass(false, 12.0, 1.0, 0.0);
        request + self.access(1.0) + self.pass(true, 12.0, (bytes / mps).ceil(), bytes)
    }
}
