//! Who reaches what now, and by which way.

use super::{UnknownPart, front_name};
use crate::domain::Access;
use crate::system::{Fabric, Requester, Route};
use crate::topology::ComponentKind;

/// A range that a requester reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reached {
    /// What the requester calls its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// What it may do.
    pub access: Access,
    /// Where it leads, and which way.
    pub route: Route,
}

impl Fabric {
    /// What the function or host of that name reaches by loans: a function's front elsewhere included,
    /// a host's processors. In the order of their addresses, memory before interrupts.
    ///
    /// # Errors
    /// [`UnknownPart`].
    pub fn reached(&self, name: &str) -> Result<Vec<Reached>, UnknownPart> {
        let topology = self.topology();
        if let Some(host) = topology.host_named(name) {
            // Its address space also has the windows that its functions use, and what others reach.
            let loans = self.shared.get(&host).into_iter().flatten();
            let space = self.space(host);
            let ranges = loans.filter_map(|at| space?.starting_at(*at));
            let ranges = ranges.map(|m| (m.start, m.length(), m.access));
            return Ok(self.routes(Requester::Cpu(host), ranges));
        }
        let function =
            topology.named(name).filter(|id| topology.component(*id).kind == ComponentKind::Device);
        let function = function.ok_or_else(|| UnknownPart(name.to_owned()))?;
        let fronts =
            topology.hosts().filter_map(|(_, host)| topology.named(&front_name(name, &host.name)));
        let mut all = Vec::new();
        for id in [function].into_iter().chain(fronts) {
            let ranges = self.domain(id).into_iter().flat_map(|domain| domain.iter());
            let ranges = ranges.map(|m| (m.start, m.length(), m.access));
            all.extend(self.routes(Requester::Device(id), ranges));
            let interrupts = self.interrupts(id).into_iter().flat_map(|table| table.iter());
            let interrupts = interrupts.map(|m| (m.start, m.length(), m.access));
            all.extend(self.routes(Requester::Interrupts(id), interrupts));
        }
        Ok(all)
    }

    fn routes(
        &self,
        requester: Requester,
        ranges: impl Iterator<Item = (u64, Option<u64>, Access)>,
    ) -> Vec<Reached> {
        let reached = |(address, length, access): (u64, Option<u64>, Access)| {
            let length = length.unwrap_or(u64::MAX);
            let route = self.route(requester, address, access).ok()?;
            Some(Reached { address, length, access, route })
        };
        ranges.filter_map(reached).collect()
    }
}
