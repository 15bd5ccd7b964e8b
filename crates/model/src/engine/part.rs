//! What happens to a packet at a part: it is passed on after a delay, checked and split at a root
//! complex, or served where its route ends.

use std::collections::VecDeque;

use crate::time::Time;

use super::direction::LEVELS;
use super::iommu::Iommu;
use super::kinds::PartParameters;
use super::requester::upto;
use super::{Event, NONE, PacketClass, PacketHop, Tlp, World};

/// The trackers of requests of one level, and what waits for them.
#[derive(Debug)]
struct TrackerPool {
    free: u32,
    waiting: VecDeque<u32>,
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) parameters: PartParameters,
    /// Whether packets may have to wait here on their way: to be translated, or for others from link to link.
    pub(super) checks: bool,
    pub(super) iommu: Option<Iommu>,
    /// Until when it serves what has come.
    pub(super) busy_until: Time,
    /// By level: trackers that are free, and requests that wait for one.
    pools: [TrackerPool; LEVELS],
    /// Since when all trackers of a level are taken while requests wait, and how long that was.
    pub(super) full_since: Time,
    pub(super) full: Time,
    /// How long it served writes, and reads.
    pub(super) served: [Time; 2],
    /// Until when it passes on writes from link to link, and how long it did.
    pub(super) peers_until: Time,
    pub(super) peers: Time,
    /// By direction: until when packets that came by it wait for the translation of an earlier one.
    pub(super) held: Vec<(u32, Time)>,
    /// By direction: for how long packets that came by it waited for page walks, while that was measured.
    pub(super) walked: Vec<(u32, Time)>,
    /// By direction: until when the last write stays that came by it, and by another part of the chip.
    pub(super) writes: Vec<(u32, Time)>,
}

/// The entry of a direction.
fn last(times: &mut Vec<(u32, Time)>, direction: u32) -> &mut Time {
    let nth = times.iter().position(|(by, _)| *by == direction).unwrap_or_else(|| {
        times.push((direction, Time::ZERO));
        times.len() - 1
    });
    &mut times[nth].1
}

impl Part {
    pub(super) fn new(parameters: PartParameters) -> Part {
        Part {
            checks: parameters.iommu.is_some() || parameters.peer_per_byte > 0,
            iommu: parameters.iommu.map(Iommu::new),
            busy_until: Time::ZERO,
            pools: std::array::from_fn(|_| TrackerPool {
                free: parameters.trackers,
                waiting: VecDeque::new(),
            }),
            full_since: Time::MAX,
            full: Time::ZERO,
            served: [Time::ZERO; 2],
            peers_until: Time::ZERO,
            peers: Time::ZERO,
            held: Vec::new(),
            walked: Vec::new(),
            writes: Vec::new(),
            parameters,
        }
    }

    pub(super) fn delay(&self, class: PacketClass) -> Time {
        self.parameters.delay[class as usize]
    }

    pub(super) fn is_whole(&self) -> bool {
        let whole =
            |pool: &TrackerPool| pool.free == self.parameters.trackers && pool.waiting.is_empty();
        self.pools.iter().all(whole)
    }

    /// Whether it counts the reads that it passes on.
    pub(super) fn tracks(&self) -> bool {
        self.parameters.split != 0 || self.parameters.trackers != u32::MAX
    }

    /// Whether packets that have it before them wait apart from those that have not.
    pub(super) fn turns(&self) -> bool {
        self.parameters.turns || self.tracks()
    }

    /// Until when a packet stays that came at `now` from another part of the chip: no shorter than a write
    /// before it that came by the same direction.
    fn stay_inside(&mut self, now: Time, tlp: &Tlp) -> Time {
        let at = now + self.delay(tlp.class);
        let [write, request, completion] = self.parameters.delay;
        if request.min(completion) >= write {
            return at;
        }
        let writes = last(&mut self.writes, tlp.ingress);
        if tlp.class == PacketClass::Posted {
            *writes = at;
        }
        at.max(*writes)
    }

    /// Serves `bytes` from when it is free on; gives the end, and how long it takes.
    fn serve(&mut self, now: Time, bytes: u32, more: Time) -> (Time, Time) {
        let service = (u64::from(bytes) * self.parameters.service_per_byte).div_ceil(1024);
        let service = Time::from_ps(service) + more;
        let end = now.max(self.busy_until) + service;
        self.busy_until = end;
        (end, service)
    }

    /// When a write that passes from link to link has passed.
    fn pass_on(&mut self, now: Time, bytes: u32, counted: bool) -> Time {
        let span = Time::from_ps((u64::from(bytes) * self.parameters.peer_per_byte).div_ceil(1024));
        self.peers_until = now.max(self.peers_until) + span;
        self.peers += if counted { span } else { Time::ZERO };
        self.peers_until
    }

    /// What a write costs besides its bytes: lines that it fills in part are read first.
    fn partial(&self, address: u64, bytes: u32) -> Time {
        let line = u64::from(self.parameters.line.max(1));
        let whole = address.is_multiple_of(line) && u64::from(bytes).is_multiple_of(line);
        if whole { Time::ZERO } else { self.parameters.partial_write }
    }
}

impl World {
    /// The hop where a packet is.
    #[inline]
    pub(super) fn hop_of(&self, tlp: &Tlp) -> &PacketHop {
        &self.hops[tlp.hop as usize]
    }

    /// The direction that a packet takes next; `None` where its route ends.
    #[inline]
    pub(super) fn next_direction(&self, tlp: &Tlp) -> Option<u32> {
        self.hop_of(tlp).next(tlp.back())
    }

    /// A packet's delay where it is, has ended.
    pub(super) fn ready(&mut self, id: u32) {
        let tlp = &self.tlps[id];
        let (back, translated) = (tlp.back(), tlp.translated);
        let hop = self.hop_of(tlp);
        let (next, part) = (hop.next(back), &self.parts[hop.part as usize]);
        let (checks, combines) = (part.checks, part.parameters.combine != 0);
        // Both at once, as packets come and go back in turns, and few parts check them.
        if back & checks && self.held_back(id) {
            return;
        }
        match next {
            None => self.arrived(id),
            Some(direction) if back => {
                if !(combines && self.hold_back(id, direction)) {
                    self.go(direction, id);
                }
            }
            Some(direction) => {
                if translated || !checks || self.translate(id) {
                    self.forward(direction, id);
                }
            }
        }
    }

    /// Moves a packet on by `direction`: at once inside of a chip, else through its queue.
    pub(super) fn go(&mut self, direction: u32, id: u32) {
        if self.directions[direction as usize].wire.is_some() {
            return self.enqueue(direction, id);
        }
        if self.trace.is_some() {
            self.note_inside(direction, id);
        }
        let tlp = &mut self.tlps[id];
        // The room that it took where its last link ended stays taken until it leaves the chip.
        let maker = std::mem::replace(&mut tlp.maker, NONE);
        tlp.translated = false;
        tlp.hop = if tlp.back() { tlp.hop - 1 } else { tlp.hop + 1 };
        let now = self.now;
        if maker != NONE {
            self.left_maker(maker);
        }
        // Packets are not copied as a whole on their way: just after parts of one are written, that takes long.
        let tlp = &self.tlps[id];
        // A processor's completions cross its root complex last.
        let stays = tlp.back() || self.next_direction(tlp).is_some();
        let index = self.hop_of(tlp).part as usize;
        let at = if stays { self.parts[index].stay_inside(now, tlp) } else { now };
        if at == now {
            self.ready(id);
        } else {
            self.events.schedule(at, Event::Ready(id));
        }
    }

    /// Whether a completion waits for the translation of a write that came before it by the same direction.
    fn held_back(&mut self, id: u32) -> bool {
        let now = self.now;
        let tlp = &mut self.tlps[id];
        let part = &mut self.parts[self.hops[tlp.hop as usize].part as usize];
        let until = *last(&mut part.held, tlp.ingress);
        // At that very time, the write may still be among the events to come.
        let waits = !tlp.translated && until >= now && until > Time::ZERO;
        if waits {
            tlp.translated = true;
            self.events.schedule(until, Event::Ready(id));
        }
        waits
    }

    /// Has a request's address translated where it is, and a write that goes on by a link wait for its turn;
    /// `false` when it has to wait for that.
    fn translate(&mut self, id: u32) -> bool {
        let now = self.now;
        let measuring = self.measuring();
        let tlp = &mut self.tlps[id];
        let hop = &self.hops[tlp.hop as usize];
        let route = &self.routes[hop.route as usize];
        // What begins here is the processor's own, and translated already.
        if tlp.hop == route.first {
            return true;
        }
        let turned = tlp.class == PacketClass::Posted && hop.from_link_to_link;
        let part = &mut self.parts[hop.part as usize];
        let limited = turned && part.parameters.peer_per_byte > 0;
        let (there, hit) = match &mut part.iommu {
            Some(iommu) => (iommu.translate(now, route.pages, tlp.address, measuring), iommu.hit()),
            None => (now, Time::ZERO),
        };
        let translated = if limited { part.pass_on(there, tlp.bytes, measuring) } else { there };
        let held = last(&mut part.held, tlp.ingress);
        if measuring && there > now + hit {
            *last(&mut part.walked, tlp.ingress) += there.since(now.max(*held));
        }
        // At that very time, the earlier packet may still be among the events to come.
        if translated <= now && (*held < now || *held == Time::ZERO) {
            return true;
        }
        let at = translated.max(*held);
        *held = at;
        tlp.translated = true;
        self.events.schedule(at, Event::Ready(id));
        false
    }

    /// Whether a packet is, or completes, a read that the part where it is passes on from link to link,
    /// and counts.
    pub(super) fn is_tracked(&self, tlp: &Tlp) -> bool {
        let hop = self.hop_of(tlp);
        tlp.class != PacketClass::Posted
            && hop.from_link_to_link
            && self.parts[hop.part as usize].tracks()
    }

    /// Whether a completion, the last of a request at the target, is the last too of one that the part where it is has
    /// passed on and counts: parts behind may have cut that into several.
    pub(super) fn answers(&self, tlp: &Tlp) -> bool {
        if !self.is_tracked(tlp) {
            return false;
        }
        let end = tlp.address + u64::from(tlp.bytes);
        // Where the part, or one before it, cuts requests.
        let first = self.routes[self.hop_of(tlp).route as usize].first;
        let hops = self.hops[first as usize..=tlp.hop as usize].iter();
        let mut splits = hops
            .filter(|hop| hop.from_link_to_link)
            .map(|hop| self.parts[hop.part as usize].parameters.split);
        end == self.requests[tlp.owner].end
            || splits.any(|split| split != 0 && upto(split, end) == split)
    }

    /// Passes a request on.
    fn forward(&mut self, direction: u32, id: u32) {
        let tlp = &self.tlps[id];
        if !self.is_tracked(tlp) {
            return self.go(direction, id);
        }
        let here = self.hop_of(tlp).part as usize;
        let nth = self.level(tlp);
        let part = &mut self.parts[here];
        part.pools[nth].waiting.push_back(id);
        self.track(here, nth);
    }

    /// The level of the room that a packet takes behind the next direction: roots that it has before it there.
    pub(super) fn level_ahead(&self, tlp: &Tlp) -> u8 {
        // Completions end at roots and devices with room for all; they wait in no ring.
        if tlp.back() { 0 } else { self.hop_of(tlp).level }
    }

    /// How many parts with trackers a packet, or the request that it completes, has before it there.
    pub(super) fn level(&self, tlp: &Tlp) -> usize {
        usize::from(self.hop_of(tlp).level)
    }

    /// Passes on what there are trackers for of the reads that wait at a part, in pieces.
    fn track(&mut self, here: usize, nth: usize) {
        while let Some(id) = self.parts[here].pools[nth].waiting.front().copied() {
            let part = &mut self.parts[here];
            let pool = &mut part.pools[nth];
            if pool.free == 0 {
                part.full_since = part.full_since.min(self.now);
                return;
            }
            let since = std::mem::replace(&mut part.full_since, Time::MAX);
            part.full += self.now.since(since.max(self.measured_from));
            pool.free -= u32::from(pool.free != u32::MAX);
            let tlp = self.tlps[id];
            let split = match part.parameters.split {
                0 => tlp.bytes,
                split => upto(split, tlp.address),
            };
            let Some(direction) = self.next_direction(&tlp) else { return };
            if tlp.bytes <= split {
                self.parts[here].pools[nth].waiting.pop_front();
                self.go(direction, id);
                continue;
            }
            let request = &mut self.requests[tlp.owner];
            request.split_at = request.split_at.min(tlp.hop);
            let rest = &mut self.tlps[id];
            rest.bytes -= split;
            rest.address += u64::from(split);
            // The request's room here is free when its last piece has gone; all keep its order.
            let piece = Tlp { bytes: split, piece: true, maker: NONE, ..tlp };
            let piece = self.make(piece);
            self.number_as_piece(piece, id);
            self.go(direction, piece);
        }
    }

    /// All of a completion that ends what the part at a direction's end tracks has come.
    pub(super) fn untrack(&mut self, direction: u32, nth: usize) {
        let here = self.directions[direction as usize].to as usize;
        let pool = &mut self.parts[here].pools[nth];
        pool.free += u32::from(pool.free != u32::MAX);
        self.track(here, nth);
    }

    /// Whether a completion is held where its request was split, until more of it has come; what was held
    /// before goes with this one otherwise.
    fn hold_back(&mut self, id: u32, next: u32) -> bool {
        let combine = self.parts[self.directions[next as usize].from as usize].parameters.combine;
        let tlp = self.tlps[id];
        let request = &mut self.requests[tlp.owner];
        if request.split_at != tlp.hop {
            return false;
        }
        request.back += tlp.bytes;
        let last = request.back == request.whole;
        // What does not fit with this one goes before it, and leaves the room to it.
        let before = if request.held + tlp.bytes > combine { request.held } else { 0 };
        request.held = request.held + tlp.bytes - before;
        if before > 0 {
            let before = self.make(Tlp { bytes: before, last: false, piece: true, ..tlp });
            self.number_as_held(before, tlp.owner);
            self.go(next, before);
        }
        let request = &mut self.requests[tlp.owner];
        if request.held < combine && !last {
            self.note_held(tlp.owner, id);
            self.tlps.remove(id);
            let now = self.now;
            self.release(tlp.ingress, tlp.room(), now);
            return true;
        }
        let combined = &mut self.tlps[id];
        combined.address += u64::from(combined.bytes);
        combined.bytes = std::mem::replace(&mut request.held, 0);
        combined.address -= u64::from(combined.bytes);
        combined.last = last;
        false
    }

    /// A packet has come to the end of its route.
    fn arrived(&mut self, id: u32) {
        let now = self.now;
        // One by one: some were written just now, and a copy of the whole would wait for them.
        let tlp = &self.tlps[id];
        let Tlp { class, last, hop, bytes, owner, ingress, maker, address, .. } = *tlp;
        let room = tlp.room();
        if maker != NONE {
            // A route to where it begins: no link tells when it has left.
            self.left_maker(maker);
        }
        if class == PacketClass::Completion {
            self.release(ingress, room, now);
            self.tlps.remove(id);
            return self.completed(owner, bytes);
        }
        let part = &mut self.parts[self.hops[hop as usize].part as usize];
        let more = match class {
            PacketClass::Posted => part.partial(address, bytes),
            _ => Time::ZERO,
        };
        let (end, service) = part.serve(now, bytes, more);
        if now >= self.measured_from {
            part.served[usize::from(class == PacketClass::NonPosted)] += service;
        }
        let seen = end + part.parameters.access;
        if class == PacketClass::Posted {
            self.moved(self.ops[owner].flow, u64::from(bytes));
        }
        self.release(ingress, room, end);
        if class == PacketClass::NonPosted {
            // The completions' delay behind a direction inside of the chip is waited for once, not by each.
            let part = self.inner_hop(hop).map(|before| &self.parts[before.part as usize]);
            let delay = part.map_or(Time::ZERO, |part| part.delay(PacketClass::Completion));
            self.events.schedule(seen + delay, Event::Served(id));
        } else if last {
            self.events.schedule(seen, Event::Served(id));
        } else {
            self.tlps.remove(id);
        }
    }

    /// The hop before the last one of a route where that is behind a direction inside of the chip, by which
    /// completions of a request leave its target.
    fn inner_hop(&self, last: u32) -> Option<&PacketHop> {
        let back = self.hops[last as usize].next(true)?;
        (!self.is_link(back)).then(|| &self.hops[last as usize - 1])
    }

    /// A target has done what a request asked for.
    pub(super) fn served(&mut self, id: u32) {
        let tlp = self.tlps[id];
        self.tlps.remove(id);
        if tlp.class == PacketClass::Posted {
            return self.landed(tlp.owner);
        }
        let part = &self.parts[self.hop_of(&tlp).part as usize];
        let most = part.parameters.completion_of(tlp.bytes);
        let hop = tlp.hop - u32::from(self.inner_hop(tlp.hop).is_some());
        let (mut address, mut left) = (tlp.address, tlp.bytes);
        while left > 0 {
            let bytes = left.min(upto(most, address));
            left -= bytes;
            let completion = Tlp {
                address,
                class: PacketClass::Completion,
                last: left == 0,
                translated: true,
                hop,
                bytes,
                ingress: NONE,
                maker: NONE,
                level: 0,
                room_level: 0,
                room_bytes: 0,
                piece: false,
                order: 0,
                ..tlp
            };
            address += u64::from(bytes);
            let completion = self.make(completion);
            self.ready(completion);
        }
    }
}
