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
    /// The hop of its route where it is, of those of all routes.
    pub(super) hop: u32,
    /// The bytes that it carries, or that a read asks for.
    pub(super) bytes: u32,
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
    /// The hop of its route where it was split, or [`NONE`].
    pub(super) split_at: u32,
    /// Bytes of its completions that have come there.
    pub(super) back: u32,
    /// Of these, those that wait there for more.
    pub(super) held: u32,
    /// All that it asks for, and the address where that ends.
    pub(super) whole: u32,
    pub(super) end: u64,
}

impl Request {
    /// A request of an operation, of which nothing has come.
    pub(super) fn new(op: u32, address: u64, whole: u32) -> Request {
        let end = address + u64::from(whole);
        Request { op, left: whole, split_at: NONE, back: 0, held: 0, whole, end }
    }
}

/// A part on a route, and how packets go on from there: all that is asked for each packet at each part, in one
/// place.
#[derive(Debug, Clone, Copy)]
pub(super) struct PacketHop {
    pub(super) route: u32,
    pub(super) part: u32,
    /// The direction to the next part, and that back to the one before; [`NONE`] where the route ends.
    pub(super) next: [u32; 2],
    /// Bytes of the header of a packet that leaves the part, by class.
    pub(super) headers: [u8; 3],
    /// How many of the parts after it are root complexes that pass packets from link to link.
    pub(super) level: u8,
    /// Whether packets come by a link and leave by one.
    pub(super) from_link_to_link: bool,
}

impl PacketHop {
    /// The direction that a request takes next, or what completes it; `None` where it ends.
    #[inline]
    pub(super) fn next(&self, back: bool) -> Option<u32> {
        let next = self.next[usize::from(back)];
        (next != NONE).then_some(next)
    }
}

/// A route through the fabric: hops that follow each other among those of all routes.
#[derive(Debug, Clone)]
pub(super) struct PacketRoute {
    pub(super) first: u32,
    pub(super) last: u32,
    /// Whose page table its addresses are in: of what begins at its first part, for what ends at its last.
    pub(super) pages: u64,
    /// From this hop of its on, and up to the one before it, whether addresses are below 4 GiB.
    pub(super) low: (usize, [bool; 2]),
    /// Whether it is one of CXL.mem, whose messages have slots of flits.
    pub(super) slots: bool,
}

impl PacketRoute {
    /// Where its hops are.
    pub(super) fn hops(&self) -> std::ops::RangeInclusive<usize> {
        self.first as usize..=self.last as usize
    }

    /// Bytes of the headers of packets that leave a hop of its, by class.
    pub(super) fn headers(&self, nth: usize) -> [u8; 3] {
        let (turn, low) = self.low;
        let low = low[usize::from(nth >= turn)];
        let request = if low { wire::LOW_REQUEST_HEADER } else { wire::REQUEST_HEADER };
        let bytes = match self.slots {
            // The slot before data that comes back goes with what the request causes there.
            true => [wire::CXL_SLOT, wire::CXL_SLOT, 0],
            false => [request, request, wire::COMPLETION_HEADER],
        };
        bytes.map(|bytes| bytes as u8)
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

    #[inline(always)]
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
