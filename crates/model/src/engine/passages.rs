//! Which packet went where when, for a trace.

use super::{DirectionId, PacketClass, RouteId, World};
use crate::time::Time;

/// A packet's delay on one hop, for a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passage {
    /// The packet, numbered in the order of making. Pieces of a request that was split, or of completions
    /// that were combined, have their own.
    pub packet: u64,
    /// The packet of which it is a piece, which may be one of another; itself where it is none.
    pub whole: u64,
    /// Its way; completions go it backwards.
    pub route: RouteId,
    /// What flow control and ordering tell it by.
    pub class: PacketClass,
    /// Bytes that it carries, or that a read asks for.
    pub bytes: u32,
    /// The direction that it took.
    pub direction: DirectionId,
    /// When its delay at the part before had ended and it could be sent.
    pub ready: Time,
    /// When its first bit was sent.
    pub begin: Time,
    /// When its last bit had arrived.
    pub end: Time,
}

impl World {
    /// Keeps each packet's passages from now on. Packets that are under way are numbered as if they were
    /// made now.
    pub fn keep_trace(&mut self) {
        let slots = self.tlps.items.len() as u64;
        self.numbers = (self.made..self.made + slots).map(|number| (number, number)).collect();
        self.made += slots;
        self.trace = Some(Vec::new());
    }

    /// The passages since [`World::keep_trace`], in the order in which packets were sent.
    pub fn trace(&self) -> &[Passage] {
        self.trace.as_deref().unwrap_or_default()
    }

    /// Gives the packet that is made now its number.
    #[cold]
    pub(super) fn number(&mut self, id: u32) {
        let slot = id as usize;
        self.numbers.resize(self.numbers.len().max(slot + 1), (0, 0));
        self.numbers[slot] = (self.made, self.made);
    }

    /// Tells a trace that a packet is a piece of another.
    #[cold]
    pub(super) fn number_as_piece(&mut self, piece: u32, of: u32) {
        if self.trace.is_some() {
            self.numbers[piece as usize].1 = self.numbers[of as usize].0;
        }
    }

    /// A completion is held where the request `owner` was split.
    pub(super) fn note_held(&mut self, owner: u32, id: u32) {
        if self.trace.is_some() {
            self.held_last.insert(owner, self.numbers[id as usize].0);
        }
    }

    /// `piece` is what was held of the request: it came with the last completion of that, not with the one that it goes
    /// before.
    pub(super) fn number_as_held(&mut self, piece: u32, owner: u32) {
        if self.trace.is_some()
            && let Some(last) = self.held_last.get(&owner)
        {
            self.numbers[piece as usize].1 = *last;
        }
    }

    /// Notes a packet that passes inside of a chip, which takes no time.
    #[cold]
    pub(super) fn note_inside(&mut self, direction: u32, id: u32) {
        self.note_ready(direction, id);
        let now = self.now;
        self.note_sent(direction, id, now, now);
    }

    #[cold]
    pub(super) fn note_ready(&mut self, direction: u32, id: u32) {
        let tlp = &self.tlps[id];
        let (packet, whole) = self.numbers[id as usize];
        let passage = Passage {
            packet,
            whole,
            route: RouteId(self.hop_of(tlp).route),
            class: tlp.class,
            bytes: tlp.bytes,
            direction: DirectionId(direction),
            ready: self.now,
            begin: Time::MAX,
            end: Time::MAX,
        };
        if let Some(trace) = &mut self.trace {
            trace.push(passage);
        }
    }

    #[cold]
    pub(super) fn note_sent(&mut self, direction: u32, id: u32, begin: Time, end: Time) {
        let (packet, _) = self.numbers[id as usize];
        let open = self.trace.iter_mut().flatten().rev().find(|passage| {
            passage.packet == packet
                && passage.direction.0 == direction
                && passage.begin == Time::MAX
        });
        if let Some(passage) = open {
            (passage.begin, passage.end) = (begin, end);
        }
    }
}
