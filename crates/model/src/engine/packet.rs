//! Packets, the requests that they answer, the routes that they go, and where they are kept.

use super::{NONE, PacketClass};
use crate::wire;

/// A packet (TLP), or a piece of one, from its making to its end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tlp {
    pub(super) class: PacketClass,
    /// A completion: the last of its packet of request. A write: the last of its operation.
    pub(super) last: bool,
    /// Its address has been translated at the part where it is.
    pub(super) translated: bool,
    /// The place on its route where it is: an index of the route's parts.
    pub(super) hop: u16,
    /// The bytes that it carries, or that a read asks for.
    pub(super) bytes: u32,
    pub(super) route: u32,
    /// For writes the operation, else the request.
    pub(super) owner: u32,
    /// The direction by which it came; [`NONE`] where it was made.
    pub(super) ingress: u32,
    /// The requester to tell when it leaves the part where it was made.
    pub(super) maker: u32,
    pub(super) address: u64,
    /// The level of the queue that it is in, and of the room that it takes where it is.
    pub(super) level: u8,
    pub(super) room_level: u8,
    /// Bytes of payload that it takes room for where it is.
    pub(super) room_bytes: u32,
    /// It is a piece of a packet, whose room is its last piece's to give back.
    pub(super) piece: bool,
    /// When it joined the queue that it is in, counted.
    pub(super) order: u64,
}

/// Room that a packet takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) class: PacketClass,
    pub(super) level: u8,
    pub(super) payload: u32,
}

impl Tlp {
    pub(super) fn payload(&self) -> u32 {
        if self.class == PacketClass::NonPosted { 0 } else { self.bytes }
    }

    pub(super) fn room(&self) -> Room {
        Room { class: self.class, level: self.room_level, payload: self.room_bytes }
    }

    pub(super) fn back(&self) -> bool {
        self.class == PacketClass::Completion
    }
}

/// A read request, until all of it has come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) op: u32,
    pub(super) left: u32,
    /// The place on its route where it was split, or [`NO_HOP`](super::NO_HOP).
    pub(super) split_at: u16,
    /// Bytes of its completions that have come there.
    pub(super) back: u32,
    /// Of these, those that wait there for more.
    pub(super) held: u32,
    /// All that it asks for.
    pub(super) whole: u32,
}

/// A route through the fabric.
#[derive(Debug, Clone)]
pub(super) struct Route {
    pub(super) parts: Box<[u32]>,
    /// `directions[i]` leads from `parts[i]` to `parts[i + 1]`.
    pub(super) directions: Box<[u32]>,
    /// By part: how many of those after it are root complexes that pass packets from link to link.
    pub(super) levels: Box<[u8]>,
    /// From this part on, and up to the one before it, whether addresses are below 4 GiB.
    pub(super) low: (usize, [bool; 2]),
    /// Whether it is one of CXL.mem, whose messages have slots of flits.
    pub(super) slots: bool,
}

impl Route {
    /// Whose page table its addresses are in: of what begins at its first part, for what ends at its last.
    pub(super) fn pages(&self) -> u64 {
        let ends = [self.parts.first(), self.parts.last()];
        let [from, to] = ends.map(|part| u64::from(part.copied().unwrap_or(NONE)));
        from << 32 | to
    }

    /// Bytes of the header of a packet that leaves the part where it is.
    pub(super) fn header(&self, tlp: &Tlp) -> u32 {
        self.header_at(usize::from(tlp.hop), tlp.class)
    }

    pub(super) fn header_at(&self, nth: usize, class: PacketClass) -> u32 {
        if self.slots {
            // The slot before data that comes back goes with what the request causes there.
            return if class == PacketClass::Completion { 0 } else { wire::CXL_SLOT };
        }
        let (turn, [first, then]) = self.low;
        let low = if nth < turn { first } else { then };
        match class {
            PacketClass::Completion => wire::COMPLETION_HEADER,
            PacketClass::Posted | PacketClass::NonPosted if low => wire::LOW_REQUEST_HEADER,
            PacketClass::Posted | PacketClass::NonPosted => wire::REQUEST_HEADER,
        }
    }
}

/// Places that are used again.
#[derive(Debug)]
pub(super) struct Slab<T> {
    pub(super) items: Vec<T>,
    pub(super) free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Slab { items: Vec::new(), free: Vec::new() }
    }

    pub(super) fn put(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(id) => {
                self.items[id as usize] = item;
                id
            }
            None => {
                self.items.push(item);
                (self.items.len() - 1) as u32
            }
        }
    }

    pub(super) fn remove(&mut self, id: u32) {
        self.free.push(id);
    }

    pub(super) fn memory(&self) -> usize {
        self.items.capacity() * size_of::<T>() + self.free.capacity() * size_of::<u32>()
    }

    pub(super) fn used(&self) -> usize {
        self.items.len() - self.free.len()
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, id: u32) -> &T {
        &self.items[id as usize]
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.items[id as usize]
    }
}
