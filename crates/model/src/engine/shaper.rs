//! Shaping at a switch: what leaves it by a direction of a link is sent by tenant, each by its weight and no faster
//! than its bucket fills, with the parts of [`rackbus_qos`] that shape accelerators.
//!
//! Packets of different tenants may pass each other, as those of different requesters may with ID-based ordering
//! (PCI Express specification 2.2.6.4); those of one keep their order. Tenants share the buffers that packets came into:
//! one that waits for its bucket there makes others wait that came by the same link.

use std::collections::{BTreeMap, VecDeque};

use rackbus_qos::bucket::Bucket;
use rackbus_qos::drr::Drr;

use super::direction::{CLASSES, LEVELS, Queues};
use super::turns::{self, QueuedPacket};
use super::{DirectionId, PacketClass, Tlp, World};
use crate::time::Time;

/// What a tenant may have of what a switch sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketShare {
    /// Its part of what is left, in wire time, against the others' weights; at least 1.
    pub weight: u32,
    /// Bytes of payload per second at most, each way of each link, and how many may go at once.
    pub rate: Option<(u64, u64)>,
}

impl Default for PacketShare {
    fn default() -> PacketShare {
        PacketShare { weight: 1, rate: None }
    }
}

/// Time on the wire that the heaviest tenant has in its turn: some packets of the largest usual size at Gen5 x16.
const TURN: Time = Time::from_ns(20);

#[derive(Debug)]
struct TenantQueues {
    queues: Queues,
    waiting: usize,
    bucket: Option<Bucket>,
    /// Since when it could send but for its bucket, or [`Time::MAX`], and how long it could.
    held_since: Time,
    held: Time,
}

/// The tenants of one direction.
#[derive(Debug)]
pub(super) struct DirectionShaper {
    shares: BTreeMap<u32, PacketShare>,
    tenants: BTreeMap<u32, TenantQueues>,
    turns: Drr<u32>,
}

impl DirectionShaper {
    fn new(shares: BTreeMap<u32, PacketShare>) -> DirectionShaper {
        DirectionShaper { shares, tenants: BTreeMap::new(), turns: Drr::new(TURN.ps()) }
    }

    pub(super) fn push(
        &mut self,
        tenant: u32,
        (level, class): (usize, PacketClass),
        waiting: QueuedPacket,
    ) {
        let of_tenant = match self.tenants.entry(tenant) {
            std::collections::btree_map::Entry::Occupied(of_tenant) => of_tenant.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                let share = self.shares.get(&tenant).copied().unwrap_or_default();
                self.turns.set(tenant, share.weight);
                let bucket = share.rate.map(|(rate, burst)| Bucket::full(rate, burst, 0));
                place.insert(TenantQueues {
                    queues: Queues::default(),
                    waiting: 0,
                    bucket,
                    held_since: Time::MAX,
                    held: Time::ZERO,
                })
            }
        };
        turns::insert(&mut of_tenant.queues[level][class as usize], waiting);
        of_tenant.waiting += 1;
    }

    pub(super) fn memory(&self) -> usize {
        let queues = self.tenants.values().flat_map(|of_tenant| of_tenant.queues.iter().flatten());
        queues.map(VecDeque::capacity).sum::<usize>() * size_of::<QueuedPacket>()
    }
}

impl World {
    /// Lets a direction send by tenants from now on, before anything was sent; a tenant that `shares` does not name
    /// has the share of [`PacketShare::default`].
    pub fn shape(&mut self, direction: DirectionId, shares: BTreeMap<u32, PacketShare>) {
        self.directions[direction.index()].shaper = Some(Box::new(DirectionShaper::new(shares)));
    }

    /// The share of the measured time for which a tenant could have sent more by a direction but for its rate.
    pub fn shaped_share(&self, direction: DirectionId, tenant: u32) -> f64 {
        let shaper = self.directions[direction.index()].shaper.as_ref();
        let of_tenant = shaper.and_then(|shaper| shaper.tenants.get(&tenant));
        of_tenant.map_or(0.0, |of_tenant| {
            let since = of_tenant.held_since.max(self.measured_from);
            self.share(of_tenant.held + self.now.since(since))
        })
    }

    /// Whose a packet is.
    pub(super) fn tenant_of(&self, tlp: &Tlp) -> u32 {
        let op = match tlp.class {
            PacketClass::Posted => tlp.owner,
            PacketClass::NonPosted | PacketClass::Completion => self.requests[tlp.owner].op,
        };
        self.flows[self.ops[op].flow as usize].flow.tenant
    }

    /// Takes the packet that a direction sends next, of the tenant whose turn it is among those that have one which
    /// may go; else when one may for its bucket's sake.
    pub(super) fn take_shaped(&mut self, direction: u32) -> Result<u32, Option<Time>> {
        let (now, from) = (self.now, self.measured_from);
        let mut next: Option<Time> = None;
        let mut found: BTreeMap<u32, (usize, PacketClass)> = BTreeMap::new();
        let here = &self.directions[direction as usize];
        let Some(shaper) = &here.shaper else { return Err(None) };
        let tenants: Vec<u32> = shaper
            .tenants
            .iter()
            .filter(|(_, of_tenant)| of_tenant.waiting > 0)
            .map(|(id, _)| *id)
            .collect();
        let mut held = Vec::new();
        for tenant in tenants {
            let Some(place) = self.first_of(direction, tenant) else { continue };
            let Some(shaper) = &mut self.directions[direction as usize].shaper else { continue };
            let Some(of_tenant) = shaper.tenants.get_mut(&tenant) else { continue };
            let ready =
                of_tenant.bucket.as_mut().is_none_or(|bucket| bucket.ready(now.ps() / 1000));
            if ready {
                found.insert(tenant, place);
                continue;
            }
            held.push(tenant);
            let at =
                of_tenant.bucket.as_ref().map_or(u64::MAX, Bucket::ready_at).min(u64::MAX / 1001);
            let at = Time::from_ns(at).max(now + Time::from_ps(1));
            next = Some(next.map_or(at, |other| other.min(at)));
        }
        let Some(shaper) = &mut self.directions[direction as usize].shaper else {
            return Err(next);
        };
        for (tenant, of_tenant) in &mut shaper.tenants {
            if held.contains(tenant) {
                of_tenant.held_since = of_tenant.held_since.min(now);
            } else {
                let since = std::mem::replace(&mut of_tenant.held_since, Time::MAX);
                of_tenant.held += now.since(since.max(from));
            }
        }
        found.keys().for_each(|tenant| shaper.turns.wake(*tenant, now.ps(), 1));
        let tenant = shaper.turns.pick(now.ps(), |tenant| found.contains_key(&tenant));
        let place = tenant.and_then(|tenant| Some((tenant, found.get(&tenant)?)));
        let Some((tenant, (level, class))) = place else { return Err(next) };
        let Some(of_tenant) = shaper.tenants.get_mut(&tenant) else { return Err(next) };
        let Some((_, id)) = of_tenant.queues[*level][*class as usize].pop_front() else {
            return Err(next);
        };
        of_tenant.waiting -= 1;
        Ok(id)
    }

    /// A packet that was taken is sent, and takes the wire for so long.
    pub(super) fn charge_tenant(&mut self, direction: u32, id: u32, busy: Time) {
        let tlp = self.tlps[id];
        let tenant = self.tenant_of(&tlp);
        let Some(shaper) = &mut self.directions[direction as usize].shaper else { return };
        shaper.turns.charge(tenant, busy.ps());
        if let Some(TenantQueues { bucket: Some(bucket), .. }) = shaper.tenants.get_mut(&tenant) {
            bucket.spend(tlp.payload().into());
        }
    }

    /// The queue of a tenant whose first packet has credits and is behind no write: that whose turn it is first.
    fn first_of(&mut self, direction: u32, tenant: u32) -> Option<(usize, PacketClass)> {
        let now = self.now;
        let mut best: Option<(u64, (usize, PacketClass))> = None;
        for (level, class) in (0..LEVELS).flat_map(|level| CLASSES.map(|class| (level, class))) {
            let here = &self.directions[direction as usize];
            let of_tenant = here.shaper.as_ref()?.tenants.get(&tenant)?;
            let Some((_, first)) = of_tenant.queues[level][class as usize].front() else {
                continue;
            };
            let tlp = &self.tlps[*first];
            if !here.has_credits(tlp) {
                self.directions[direction as usize].note_blocked(class, now);
            } else if best.is_none_or(|(order, _)| tlp.order < order)
                && !self.is_behind_own(&of_tenant.queues, tlp)
            {
                best = Some((tlp.order, (level, class)));
            }
        }
        best.map(|(_, place)| place)
    }

    /// Whether an earlier write that came the same way waits among a tenant's packets, which another of its must not pass.
    fn is_behind_own(&self, queues: &Queues, tlp: &Tlp) -> bool {
        let earlier = |queues: &[VecDeque<QueuedPacket>; 3]| {
            // Orders rise in a queue.
            let writes = queues[PacketClass::Posted as usize].iter();
            let mut before = writes.take_while(|(order, _)| *order < tlp.order);
            before.any(|(_, write)| self.tlps[*write].ingress == tlp.ingress)
        };
        tlp.class != PacketClass::Posted && queues.iter().any(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{
        Addresses, Arrivals, Credits, DirectionParameters, JobFlow, PartParameters,
        RequesterParameters, Step, Until,
    };
    use crate::wire::{Dllps, Wire};

    /// One device's many writes have used the credits up when another's write and read come: the read stays behind that
    /// write, though it is its turn before most of the other device's.
    #[test]
    fn reads_of_a_tenant_pass_no_write_that_came_the_same_way_among_those_of_another() {
        let ample = DirectionParameters {
            wire: Some(Wire::pcie(3, 8)),
            propagation: Time::ZERO,
            credits: Credits::ENDLESS,
            credit_return: Time::ZERO,
            dllps: Dllps::NONE,
        };
        let credits = Credits { packets: [1, 64, 64], data: [64; 3] };
        let slow = DirectionParameters { credits, credit_return: Time::from_us(5), ..ample };
        let mut world = World::new(1);
        let [one, other, switch, memory] =
            std::array::from_fn(|_| world.add_part(PartParameters::default()));
        let into = [one, other].map(|device| world.add_link((device, switch), ample, ample));
        let out = world.add_link((switch, memory), slow, ample);
        world.shape(out, BTreeMap::new());
        let begin = |world: &mut World, device, by, wait: Time, writes: u32, read| {
            let requester = RequesterParameters { window: 64, ..RequesterParameters::default() };
            let requester = world.add_requester(device, requester);
            let stream = world.add_stream(requester);
            let route = world.add_route(device, &[by, out]);
            let mut script = vec![Step::Wait(wait)];
            for _ in 0..writes {
                let (address, bytes, until) = (0, 256, Until::Begun);
                script.push(Step::Write { stream, route, address, bytes, until });
            }
            if read {
                script.push(Step::Read { stream, route, address: 0, bytes: 64 });
            }
            let script = world.add_script(script);
            let addresses = Addresses::sequential(0, 4096);
            let flow = JobFlow::new(script, Arrivals::Depth(1), 64);
            world.add_flow(JobFlow { count: 1, addresses, ..flow })
        };
        begin(&mut world, one, into[0], Time::ZERO, 8, false);
        let read = begin(&mut world, other, into[1], Time::from_us(2), 1, true);
        world.run(Time::MAX, 100_000).unwrap();
        // The second write to go is either's, and waits for the first one's credit.
        let took = world.flow(read).latency.mean();
        assert!(took > Time::from_us(5), "the read passed its write: {took}");
    }
}
