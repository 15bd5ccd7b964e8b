//! One direction of a link: a queue for each class of packets, the receiver's credits, the order in
//! which packets may be sent, and the wire.
//!
//! Credits come back when the receiver has passed a packet on. Their return costs no event: a direction
//! that has enough of them never looks, and one that waits is woken by the return.
//!
//! Packets that still have root complexes to cross have queues and credits apart from those that have not,
//! by how many ([`LEVELS`]), as virtual channels would be. Up and down a tree nothing can wait in a ring,
//! but routes through several roots and NTBs go down and up again: with one set of buffers, traffic of both
//! ways between two hosts could wait for each other for ever.
//!
//! Ordering (PCI Express specification 2.4.1, table 2-40, without relaxed or ID-based ordering): a
//! write may pass everything but earlier writes; requests and completions pass no earlier write that
//! came the same way; completions pass requests, so that no ring of waiting parts can close.

use std::collections::VecDeque;

use crate::time::Time;
use crate::wire::{self, Dllps, Wire};

use super::shaper::DirectionShaper;
use super::turns::{self, QueuedPacket, TurnRounds};
use super::{DirectionId, Event, NONE, PacketClass, Room, Slab, Tlp, World};

/// Root complexes that a packet may have before it and still be told from those with fewer.
pub(super) const LEVELS: usize = 4;

/// What a receiver has room for, at each level and by class; `u32::MAX` for without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credits {
    /// Packets that there is room for, by [`PacketClass`]; `u32::MAX` for any number.
    pub packets: [u32; 3],
    /// Units of 16 bytes of payload, by [`PacketClass`].
    pub data: [u32; 3],
}

impl Credits {
    /// Credits that never run out, as inside of a chip.
    pub const ENDLESS: Credits = Credits { packets: [u32::MAX; 3], data: [u32::MAX; 3] };
}

/// What a link is like, the same both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectionParameters {
    /// Its speed; `None` inside of a chip.
    pub wire: Option<Wire>,
    /// How long a bit is on its way.
    pub propagation: Time,
    /// What each receiver has room for.
    pub credits: Credits,
    /// How long a receiver takes to give credits back, besides the way of a DLLP.
    pub credit_return: Time,
    /// DLLPs (acknowledgements and credits) that a packet causes the other way.
    pub dllps: Dllps,
}

/// What a direction counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectionStats {
    /// Packets of all classes that were sent.
    pub packets: u64,
    /// Bytes of payload in them, without headers and framing.
    pub payload: u64,
    /// Bytes on the wire, with headers, framing and DLLPs.
    pub wire: u64,
    /// How long it was sending.
    pub busy: Time,
    /// How often packets had to wait for credits.
    pub starved: u64,
    /// The most packets that waited at once.
    pub longest: u32,
    /// By [`PacketClass`]: how long packets of it could not be sent for want of credits.
    pub blocked: [Time; 3],
}

/// A queue: level and class.
type Place = (usize, PacketClass);

/// Queues of packets, by level and class.
pub(super) type Queues = [[VecDeque<QueuedPacket>; 3]; LEVELS];

pub(super) const CLASSES: [PacketClass; 3] =
    [PacketClass::Posted, PacketClass::NonPosted, PacketClass::Completion];

#[derive(Debug, Clone, Copy)]
struct Return {
    at: Time,
    class: PacketClass,
    level: u8,
    data: u32,
}

#[derive(Debug)]
pub(super) struct Direction {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) wire: Option<Wire>,
    propagation: Time,
    credit_return: Time,
    dllps: Dllps,
    queues: Queues,
    /// By the way that they came: the orders of writes in `queues`, rising.
    writes: Vec<(u32, VecDeque<u64>)>,
    /// What sends by tenants instead of from `queues`.
    pub(super) shaper: Option<Box<DirectionShaper>>,
    /// Packets in all queues.
    waiting: usize,
    turns: TurnRounds,
    busy_until: Time,
    /// When the next [`Event::Free`] is due.
    wake: Time,
    whole: Credits,
    left: [Credits; LEVELS],
    returns: VecDeque<Return>,
    starved: bool,
    /// By class: since when packets wait for credits; [`Time::MAX`] when none does.
    pub(super) blocked_since: [Time; 3],
    /// When the last write that it sent has been, or will be, ready to be passed on.
    writes_ready: Time,
    /// DLLPs that wait for the wire.
    debt: Dllps,
    pub(super) stats: DirectionStats,
}

impl Direction {
    pub(super) fn new(from: u32, to: u32, parameters: &DirectionParameters) -> Direction {
        Direction {
            from,
            to,
            wire: parameters.wire,
            propagation: parameters.propagation,
            credit_return: parameters.credit_return,
            dllps: parameters.dllps,
            queues: Default::default(),
            writes: Vec::new(),
            shaper: None,
            waiting: 0,
            turns: TurnRounds::default(),
            busy_until: Time::ZERO,
            wake: Time::MAX,
            whole: parameters.credits,
            left: [parameters.credits; LEVELS],
            returns: VecDeque::new(),
            starved: false,
            blocked_since: [Time::MAX; 3],
            writes_ready: Time::ZERO,
            debt: Dllps::NONE,
            stats: DirectionStats::default(),
        }
    }

    pub(super) fn memory(&self) -> usize {
        let queues = self.queues.iter().flatten().map(VecDeque::capacity).sum::<usize>();
        let shaped = self.shaper.as_ref().map_or(0, |shaper| shaper.memory());
        let shaped = shaped + self.turns.memory();
        queues * size_of::<QueuedPacket>() + shaped + self.returns.capacity() * size_of::<Return>()
    }

    pub(super) fn is_whole(&mut self, now: Time) -> bool {
        self.collect(now);
        self.left.iter().all(|left| *left == self.whole) && self.waiting == 0
    }

    /// Takes the credits that have come back.
    fn collect(&mut self, now: Time) {
        while let Some(back) = self.returns.front().filter(|back| back.at <= now) {
            let (class, left) = (back.class as usize, &mut self.left[usize::from(back.level)]);
            left.packets[class] += 1;
            left.data[class] += back.data;
            self.returns.pop_front();
        }
    }

    /// The writes that wait here and came by a direction.
    fn writes_from(&mut self, ingress: u32) -> &mut VecDeque<u64> {
        let nth = self.writes.iter().position(|(by, _)| *by == ingress).unwrap_or_else(|| {
            self.writes.push((ingress, VecDeque::new()));
            self.writes.len() - 1
        });
        &mut self.writes[nth].1
    }

    /// Whether an earlier write that came the same way waits here, which a packet must not pass.
    fn is_behind_a_write(&self, tlp: &Tlp) -> bool {
        let own = |(by, orders): &(u32, VecDeque<u64>)| {
            *by == tlp.ingress && orders.front().is_some_and(|first| *first < tlp.order)
        };
        tlp.class != PacketClass::Posted && self.writes.iter().any(own)
    }

    pub(super) fn note_blocked(&mut self, class: PacketClass, now: Time) {
        let since = &mut self.blocked_since[class as usize];
        *since = now.min(*since);
    }

    /// Owes the DLLPs that a packet of the other direction causes.
    fn owe(&mut self) {
        self.debt = self.debt + self.dllps;
    }

    /// Counts what a class was blocked for since `from`.
    fn unblock(&mut self, class: PacketClass, now: Time, from: Time) {
        let since = std::mem::replace(&mut self.blocked_since[class as usize], Time::MAX);
        self.stats.blocked[class as usize] += now.since(since.max(from));
    }

    /// Whether the receiver has room for any number of packets of a class.
    fn is_endless(&self, class: PacketClass) -> bool {
        self.whole.packets[class as usize] == u32::MAX
    }

    pub(super) fn has_credits(&self, tlp: &Tlp) -> bool {
        if self.is_endless(tlp.class) {
            return true;
        }
        let (class, left) = (tlp.class as usize, &self.left[usize::from(tlp.level)]);
        left.packets[class] > 0 && left.data[class] >= tlp.payload().div_ceil(wire::CREDIT_BYTES)
    }

    fn spend(&mut self, tlp: &Tlp) {
        if !self.is_endless(tlp.class) {
            let (class, left) = (tlp.class as usize, &mut self.left[usize::from(tlp.level)]);
            left.packets[class] -= 1;
            left.data[class] -= tlp.payload().div_ceil(wire::CREDIT_BYTES);
        }
    }

    fn give_back(&mut self, room: Room, at: Time) {
        let Room { class, level, payload } = room;
        if self.is_endless(class) {
            return;
        }
        let back = Return { at, class, level, data: payload.div_ceil(wire::CREDIT_BYTES) };
        let behind = self.returns.iter().rev().take_while(|other| other.at > at).count();
        self.returns.insert(self.returns.len() - behind, back);
    }

    /// Takes the packet that goes next of those that have credits.
    fn take_next(&mut self, tlps: &Slab<Tlp>, now: Time) -> Option<u32> {
        let (level, class) = self.choose(tlps, now)?;
        let (_, id) = self.queues[level][class as usize].pop_front()?;
        if class == PacketClass::Posted {
            let tlp = &tlps[id];
            let writes = self.writes_from(tlp.ingress);
            // The first, but where levels pass each other.
            if let Some(nth) = writes.iter().position(|order| *order == tlp.order) {
                writes.remove(nth);
            }
        }
        Some(id)
    }

    /// The queue whose first packet goes next: of those that may go, the one whose turn it is first.
    fn choose(&mut self, tlps: &Slab<Tlp>, now: Time) -> Option<Place> {
        // Mostly all that wait are of a kind, and there is nothing to choose.
        for class in [PacketClass::Completion, PacketClass::Posted, PacketClass::NonPosted] {
            let queue = &self.queues[0][class as usize];
            if queue.len() == self.waiting {
                if self.is_endless(class) || self.has_credits(&tlps[queue.front()?.1]) {
                    return Some((0, class));
                }
                self.note_blocked(class, now);
                return None;
            }
        }
        let mut best: Option<(u64, Place)> = None;
        for (level, class) in (0..LEVELS).flat_map(|level| CLASSES.map(|class| (level, class))) {
            let Some((_, first)) = self.queues[level][class as usize].front() else { continue };
            let tlp = &tlps[*first];
            if !self.has_credits(tlp) {
                self.note_blocked(class, now);
            } else if best.is_none_or(|(order, _)| tlp.order < order)
                && !self.is_behind_a_write(tlp)
            {
                best = Some((tlp.order, (level, class)));
            }
        }
        best.map(|(_, place)| place)
    }

    /// Sends a packet from now on; what counts, counts from `from` on. Nothing is sent inside of a chip.
    fn transmit(&mut self, tlp: &Tlp, headers: [u8; 3], (now, from): (Time, Time)) -> Option<Sent> {
        let wire = self.wire?;
        self.waiting -= 1;
        self.starved = false;
        self.unblock(tlp.class, now, from);
        self.turns.sent(tlp.order);
        self.spend(tlp);
        let (header, payload) = (u32::from(headers[tlp.class as usize]), tlp.payload());
        // DLLPs went out while the wire was idle; those still waiting go first.
        let idle = now.since(self.busy_until);
        if self.debt != Dllps::NONE && idle > Time::ZERO {
            self.debt = self.debt.after(wire.bytes_in(idle));
        }
        let debt = self.debt.take();
        let bytes = wire.packet(header, payload) + debt;
        let busy = wire.time(bytes);
        self.busy_until = now + busy;
        if now >= from {
            let stats = &mut self.stats;
            stats.packets += 1;
            stats.payload += u64::from(payload);
            stats.wire += u64::from(bytes);
            stats.busy += busy;
        }
        let lead = wire.time(debt) + wire.time(wire.packet(header, 0));
        let (head, tail) = (now + lead + self.propagation, self.busy_until + self.propagation);
        Some(Sent { head, tail, busy })
    }
}

/// When a packet that is sent arrives, head and tail, and how long it takes the wire.
struct Sent {
    head: Time,
    tail: Time,
    busy: Time,
}

impl World {
    /// What a direction is like.
    pub fn direction_parameters(&self, direction: DirectionId) -> DirectionParameters {
        let direction = &self.directions[direction.index()];
        DirectionParameters {
            wire: direction.wire,
            propagation: direction.propagation,
            credits: direction.whole,
            credit_return: direction.credit_return,
            dllps: direction.dllps,
        }
    }

    /// Puts a packet into the queue of `direction`.
    pub(super) fn enqueue(&mut self, direction: u32, id: u32) {
        let level = self.level_ahead(&self.tlps[id]);
        let shaped = self.directions[direction as usize].shaper.is_some();
        let tenant = if shaped { self.tenant_of(&self.tlps[id]) } else { 0 };
        let here = &mut self.directions[direction as usize];
        let tlp = &mut self.tlps[id];
        tlp.order = here.turns.order(tlp.ingress);
        tlp.level = level;
        let (ingress, order, class) = (tlp.ingress, tlp.order, tlp.class);
        match &mut here.shaper {
            None => {
                let queue = &mut here.queues[usize::from(level)][class as usize];
                turns::insert(queue, (order, id));
                if class == PacketClass::Posted {
                    here.writes_from(ingress).push_back(order);
                }
            }
            Some(shaper) => shaper.push(tenant, (usize::from(level), class), (order, id)),
        }
        here.waiting += 1;
        here.stats.longest = here.stats.longest.max(here.waiting as u32);
        if self.trace.is_some() {
            self.note_ready(direction, id);
        }
        self.send(direction);
    }

    pub(super) fn direction_free(&mut self, direction: u32) {
        let here = &mut self.directions[direction as usize];
        // Another wake, which was set later for earlier, has done this one's work.
        if here.wake == self.now {
            here.wake = Time::MAX;
            self.send(direction);
        }
    }

    /// Sends what can be sent now.
    #[inline]
    fn send(&mut self, direction: u32) {
        let here = &mut self.directions[direction as usize];
        if here.waiting == 0 {
            return;
        }
        let at = here.busy_until;
        if at <= self.now {
            self.send_next(direction);
        } else if at < here.wake {
            self.wake(direction, at);
        }
    }

    /// Sends a packet that may go, by a wire that is free.
    fn send_next(&mut self, direction: u32) {
        let here = &mut self.directions[direction as usize];
        here.collect(self.now);
        let taken = match here.shaper {
            None => here.take_next(&self.tlps, self.now).ok_or(None),
            Some(_) => self.take_shaped(direction),
        };
        match taken {
            Ok(id) => {
                self.transmit(direction, id);
                let here = &self.directions[direction as usize];
                if here.waiting > 0 {
                    let at = here.busy_until;
                    self.wake(direction, at);
                }
            }
            // When one may go that waits for no credits.
            Err(ready) => {
                let here = &mut self.directions[direction as usize];
                here.stats.starved += u64::from(ready.is_none());
                here.starved = true;
                let back = here.returns.front().map(|back| back.at);
                if let Some(at) = back.into_iter().chain(ready).min() {
                    self.wake(direction, at);
                }
            }
        }
    }

    fn wake(&mut self, direction: u32, at: Time) {
        let here = &mut self.directions[direction as usize];
        if at < here.wake {
            here.wake = at;
            self.events.schedule(at, Event::Free(direction));
        }
    }

    fn transmit(&mut self, direction: u32, id: u32) {
        let (now, from) = (self.now, self.measured_from);
        let here = &mut self.directions[direction as usize];
        let tlp = &mut self.tlps[id];
        let class = tlp.class;
        let headers = self.hops[tlp.hop as usize].headers;
        let from_lane = if tlp.piece { NONE } else { tlp.ingress };
        let (maker, room) = (tlp.maker, tlp.room());
        let Some(sent) = here.transmit(tlp, headers, (now, from)) else { return };
        let left_at = here.busy_until;
        let (shaped, endless) = (here.shaper.is_some(), here.is_endless(class));
        tlp.piece = false;
        (tlp.ingress, tlp.room_level, tlp.room_bytes) = (direction, tlp.level, tlp.payload());
        tlp.maker = NONE;
        tlp.translated = false;
        tlp.hop = if tlp.back() { tlp.hop - 1 } else { tlp.hop + 1 };
        self.directions[(direction ^ 1) as usize].owe();
        if shaped {
            self.charge_tenant(direction, id, sent.busy);
        }
        if self.trace.is_some() {
            self.note_sent(direction, id, now, sent.tail);
        }
        self.release(from_lane, room, left_at);
        if maker != NONE {
            self.left_maker(maker);
        }
        if class == PacketClass::Completion {
            let tlp = &self.tlps[id];
            if tlp.last && self.answers(tlp) {
                let level = self.level(tlp) as u8;
                self.events.schedule(sent.tail, Event::Answered(level, direction));
            }
            if endless && self.nobody_waits_for(id) {
                return;
            }
        }
        let at = self.stay_over(&self.tlps[id], &sent);
        // Whatever their stays: nothing that came by a direction passes a write that came before it.
        let here = &mut self.directions[direction as usize];
        let at = at.max(here.writes_ready);
        if class == PacketClass::Posted {
            here.writes_ready = at;
        }
        self.events.schedule(at, Event::Ready(id));
    }

    /// Whether nothing depends on when a completion arrives at its requester, which has room for any number: a
    /// later one of the same request ends what waits. It is taken then, which saves its event.
    fn nobody_waits_for(&mut self, id: u32) -> bool {
        let tlp = &self.tlps[id];
        let (owner, bytes) = (tlp.owner, tlp.bytes);
        let free = !tlp.last && self.next_direction(tlp).is_none();
        let taken = free && self.take_early(owner, bytes);
        if taken {
            self.tlps.remove(id);
        }
        taken
    }

    /// When a packet whose head and tail arrive then can be passed on, or has arrived as a whole.
    fn stay_over(&self, tlp: &Tlp, &Sent { head, tail, .. }: &Sent) -> Time {
        let hop = self.hop_of(tlp);
        let Some(next) = hop.next(tlp.back()) else {
            // A processor's completions cross its root complex last.
            let part = &self.parts[hop.part as usize];
            let back = tlp.back().then(|| part.delay(tlp.class));
            return tail + back.unwrap_or(Time::ZERO);
        };
        let delay = self.parts[hop.part as usize].delay(tlp.class);
        match self.directions[next as usize].wire {
            // Its tail must be here when it is to be sent.
            Some(wire) => {
                let header = u32::from(hop.headers[tlp.class as usize]);
                let bytes = wire.packet(header, tlp.payload());
                head.max(tail.since(wire.time(bytes))) + delay
            }
            None => tail + delay,
        }
    }

    /// The room that a packet took at the end of `direction` is free again at `at`.
    #[inline]
    pub(super) fn release(&mut self, direction: u32, room: Room, at: Time) {
        if direction != NONE {
            self.give_back(direction, room, at);
        }
    }

    fn give_back(&mut self, direction: u32, room: Room, at: Time) {
        let there = &mut self.directions[direction as usize];
        let back = at + there.propagation + there.credit_return;
        there.give_back(room, back);
        // Credits of a later packet may be back before those that the direction waits for.
        if there.starved {
            let first = there.returns.front().map_or(back, |back| back.at);
            self.wake(direction, first.max(self.now));
        }
    }
}
