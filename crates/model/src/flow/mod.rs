//! Flow-level bandwidth: what rate each of many long flows gets when they share links fairly,
//! without simulating a packet.
//!
//! The shares are weighted max-min fair. A flow's *level* is its rate divided by its weight. Rates
//! are feasible when no link carries more than its capacity and no flow exceeds its demand; they
//! are max-min fair when no flow's level can be raised without lowering that of another which is
//! not above it. There is exactly one such allocation, and it is known by this: each flow gets its
//! demand, or uses a full link on which no flow has a higher level (Bertsekas and Gallager, *Data
//! Networks*, 1992, section 6.5.2). That demand or link is its bottleneck.
//!
//! It is found by progressive filling: the level of all flows rises together; when a link is full,
//! or a demand is met, the flows concerned are fixed at that level and the others rise on. The
//! level at which a link will be full only rises as flows on it are fixed, so a heap of these
//! levels may be stale: a link that is popped too early is put back. Each return follows a flow
//! that was fixed, so the work is O(u log u), the memory O(u), in the number u of uses of links.
//!
//! Deterministic: sums of weights are integers; rates are `f64`, which are added in a fixed order
//! with operations that IEEE 754 rounds the same everywhere. When several bottlenecks come at the
//! same level, demands precede links, and lower indices higher ones.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

mod caches;
pub(crate) mod cost;
mod limit;
pub mod rack;
mod sure;

#[cfg(test)]
mod tests;

/// Bytes on a link for a million bytes of payload: the unit of [`Use::cost_ppm`].
const MILLION: f64 = 1e6;

/// What a flow takes of one link, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The link's index. Each direction of a full-duplex link is a link of its own.
    pub link: usize,
    /// Bytes on the link for each million bytes of payload: 1,090,000 where headers add 9 %. With
    /// 0 the flow does not load the link.
    pub cost_ppm: u64,
}

/// A flow that lasts: data that one part of the fabric keeps moving to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// The links it loads, in any order; a link that is listed twice is loaded twice. A read lists
    /// the links of its requests, too.
    pub uses: Vec<Use>,
    /// The most it asks for, in bytes of payload per second; `None` for all it can get.
    pub demand: Option<u64>,
    /// How many equal flows it counts for, such as its queue pairs; at least 1.
    pub weight: u32,
}

impl Flow {
    /// A flow of weight 1 that takes all it can get.
    pub fn new(uses: Vec<Use>) -> Flow {
        Flow { uses, demand: None, weight: 1 }
    }

    /// The links that it really loads: each with what one unit of level puts on it.
    fn loads(&self) -> impl Iterator<Item = (usize, u128)> {
        let loading = self.uses.iter().filter(|at| at.cost_ppm > 0);
        loading.map(|at| (at.link, u128::from(self.weight) * u128::from(at.cost_ppm)))
    }
}

/// What keeps a flow from going faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bottleneck {
    /// Nothing: it gets all it asks for.
    Demand,
    /// The link of this index, which is full.
    Link(usize),
}

/// What a flow gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FlowRate {
    /// Bytes of payload per second.
    pub rate: f64,
    /// What keeps it from getting more.
    pub bottleneck: Bottleneck,
}

/// What all flows get.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    /// What each flow gets, in the order in which the flows were given.
    pub flows: Vec<FlowRate>,
    /// By link: the part of its capacity that is used, 0 to 1 (but for rounding, below 1e-9).
    pub utilization: Vec<f64>,
}

/// Why flows have no fair shares.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// A link without capacity.
    #[error("link {link} has no capacity; give it at least one byte per second")]
    NoCapacity {
        /// Its index among the capacities that were given.
        link: usize,
    },
    /// A link that is not there.
    #[error("flow {flow} uses link {link}, but there are {links} links; name one below {links}")]
    NoLink {
        /// Its index among the flows that were given.
        flow: usize,
        /// The link that it names.
        link: usize,
        /// How many there are.
        links: usize,
    },
    /// A flow of weight 0.
    #[error("flow {flow} has weight 0; give it at least 1")]
    NoWeight {
        /// Its index among the flows that were given.
        flow: usize,
    },
    /// A flow that nothing bounds.
    #[error("flow {flow} loads no link and has no demand, so nothing bounds it; give it either")]
    Unbounded {
        /// Its index among the flows that were given.
        flow: usize,
    },
}

/// The weighted max-min fair shares of `flows` on links of these capacities, in bytes per second.
///
/// # Errors
/// [`FlowError`] for the first link or flow that is wrong.
pub fn fair_shares(capacities: &[u64], flows: &[Flow]) -> Result<Shares, FlowError> {
    check(capacities, flows)?;
    let mut filling = Filling::new(capacities, flows);
    filling.fill();
    Ok(filling.shares())
}

fn check(capacities: &[u64], flows: &[Flow]) -> Result<(), FlowError> {
    if let Some(link) = capacities.iter().position(|capacity| *capacity == 0) {
        return Err(FlowError::NoCapacity { link });
    }
    let links = capacities.len();
    for (flow, it) in flows.iter().enumerate() {
        if let Some(at) = it.uses.iter().find(|at| at.link >= links) {
            return Err(FlowError::NoLink { flow, link: at.link, links });
        }
        if it.weight == 0 {
            return Err(FlowError::NoWeight { flow });
        }
        if it.demand.is_none() && it.loads().next().is_none() {
            return Err(FlowError::Unbounded { flow });
        }
    }
    Ok(())
}

/// What happens next as the level rises; in this order at the same level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// This flow has all it asks for.
    Met(usize),
    /// This link may be full.
    Full(usize),
}

struct Link {
    /// What it carries, in millionths of a byte per second.
    capacity: f64,
    /// What fixed flows take of that.
    fixed: f64,
    /// What rising flows take for each unit of level: weight times cost. An integer, so that it is
    /// 0 exactly when no flow rises.
    rising: u128,
}

impl Link {
    /// The level at which it is full; `None` when no flow on it rises.
    fn level(&self) -> Option<f64> {
        // Rounding may leave less than nothing.
        let free = (self.capacity - self.fixed).max(0.0);
        (self.rising > 0).then(|| free / self.rising as f64)
    }
}

struct Filling<'a> {
    flows: &'a [Flow],
    links: Vec<Link>,
    /// The flows on each link, one link after the other: those of link `i` are
    /// `users[first_user[i]..first_user[i + 1]]`.
    users: Vec<usize>,
    first_user: Vec<usize>,
    /// By flow; `None` while it rises.
    shares: Vec<Option<FlowRate>>,
    /// By the bits of the level, which for numbers that are not negative order as the numbers do.
    events: BinaryHeap<Reverse<(u64, Event)>>,
}

impl<'a> Filling<'a> {
    fn new(capacities: &[u64], flows: &'a [Flow]) -> Self {
        let new =
            |capacity: &u64| Link { capacity: *capacity as f64 * MILLION, fixed: 0.0, rising: 0 };
        let mut links: Vec<Link> = capacities.iter().map(new).collect();
        let mut first_user = vec![0; links.len() + 1];
        for (link, load) in flows.iter().flat_map(Flow::loads) {
            links[link].rising += load;
            first_user[link + 1] += 1;
        }
        for link in 0..links.len() {
            first_user[link + 1] += first_user[link];
        }
        let mut users = vec![0; first_user[links.len()]];
        let mut free = first_user.clone();
        for (index, flow) in flows.iter().enumerate() {
            for (link, _) in flow.loads() {
                users[free[link]] = index;
                free[link] += 1;
            }
        }
        let met = flows.iter().enumerate().filter_map(|(index, flow)| {
            Some((flow.demand? as f64 / f64::from(flow.weight), Event::Met(index)))
        });
        let full = links.iter().enumerate();
        let full = full.filter_map(|(index, link)| Some((link.level()?, Event::Full(index))));
        let events = met.chain(full).map(|(level, event)| Reverse((level.to_bits(), event)));
        let events = events.collect();
        Filling { flows, links, users, first_user, shares: vec![None; flows.len()], events }
    }

    fn fill(&mut self) {
        while let Some(Reverse((bits, event))) = self.events.pop() {
            match event {
                Event::Met(flow) => self.fix(flow, f64::from_bits(bits), Bottleneck::Demand),
                Event::Full(link) => match self.links[link].level() {
                    None => {}
                    Some(now) if now.to_bits() > bits => {
                        self.events.push(Reverse((now.to_bits(), event)));
                    }
                    Some(_) => self.fix_users(link, f64::from_bits(bits)),
                },
            }
        }
    }

    /// Fixes all flows on a link that is full at `level`.
    fn fix_users(&mut self, link: usize, level: f64) {
        for at in self.first_user[link]..self.first_user[link + 1] {
            self.fix(self.users[at], level, Bottleneck::Link(link));
        }
    }

    /// Fixes a flow at `level`, unless it is fixed.
    fn fix(&mut self, index: usize, level: f64, bottleneck: Bottleneck) {
        if self.shares[index].is_some() {
            return;
        }
        let flow = &self.flows[index];
        let rate = level * f64::from(flow.weight);
        self.shares[index] = Some(FlowRate { rate, bottleneck });
        for (link, load) in flow.loads() {
            let link = &mut self.links[link];
            link.rising -= load;
            link.fixed += level * load as f64;
        }
    }

    fn shares(self) -> Shares {
        let utilization = self.links.iter().map(|link| link.fixed / link.capacity).collect();
        Shares { flows: self.shares.into_iter().flatten().collect(), utilization }
    }
}
