//! The driver's side of a split virtqueue. Each buffer has descriptors of its own, so none has to be looked for.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::SharedMemory;
use rackbus_spec::virtio::feature;
use rackbus_spec::virtio::ring::{
    DESCRIPTOR_SIZE, SplitDescriptor, flags, passes, split as layout,
};

use super::ring::BufferPiece;

#[derive(Debug)]
pub struct SplitDriverRing {
    size: u16,
    per_buffer: u16,
    descriptors: usize,
    available: usize,
    used: usize,
    event_index: bool,
    /// Requests that were put in, and up to which the function sees them.
    next: u16,
    published: u16,
    taken: u16,
}

impl SplitDriverRing {
    pub fn new(size: u16, per_buffer: u16, areas: [usize; 3], features: u64) -> SplitDriverRing {
        let [descriptors, available, used] = areas;
        let event_index = features & feature::EVENT_IDX != 0;
        let (next, published, taken) = (0, 0, 0);
        SplitDriverRing {
            size,
            per_buffer,
            descriptors,
            available,
            used,
            event_index,
            next,
            published,
            taken,
        }
    }

    pub fn push(&mut self, memory: &SharedMemory, number: u16, pieces: &[BufferPiece]) {
        let head = number * self.per_buffer;
        for (index, (address, length, kind)) in (0u16..).zip(pieces) {
            let at = self.descriptors + usize::from(head + index) * DESCRIPTOR_SIZE;
            let last = usize::from(index) + 1 == pieces.len();
            let (address, length, next) = (*address, *length, head + index + 1);
            let flags = kind | if last { 0 } else { flags::NEXT };
            memory.whole().write_obj(at, &SplitDescriptor { address, length, flags, next });
        }
        let slot = usize::from(self.next % self.size);
        let at = self.available + layout::RING + slot * layout::AVAILABLE_SIZE;
        memory.whole().store_u16(at, head.to_le(), Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
    }

    pub fn publish(&mut self, memory: &SharedMemory) -> bool {
        let old = std::mem::replace(&mut self.published, self.next);
        if old == self.next {
            return false;
        }
        let at = self.available + layout::INDEX;
        memory.whole().store_u16(at, self.next.to_le(), Ordering::Release);
        // What the function wants is looked at after it can see the requests.
        fence(Ordering::SeqCst);
        let field = |at| memory.whole().load_u16(at, Ordering::Relaxed).map_or(0, u16::from_le);
        match self.event_index {
            true => {
                let at = self.used + layout::RING + usize::from(self.size) * layout::USED_SIZE;
                passes(field(at), self.next, old)
            }
            false => field(self.used + layout::FLAGS) & layout::NO_NOTIFY == 0,
        }
    }

    fn index(&self, memory: &SharedMemory) -> u16 {
        let at = self.used + layout::INDEX;
        memory.whole().load_u16(at, Ordering::Acquire).map_or(self.taken, u16::from_le)
    }

    pub fn has_used(&self, memory: &SharedMemory) -> bool {
        self.index(memory) != self.taken
    }

    pub fn pop(&mut self, memory: &SharedMemory) -> Option<(u16, u32)> {
        if !self.has_used(memory) {
            return None;
        }
        let slot = usize::from(self.taken % self.size);
        let at = self.used + layout::RING + slot * layout::USED_SIZE;
        let field = |at| memory.whole().load_u32(at, Ordering::Relaxed).map(u32::from_le);
        let (head, length) = (field(at)?, field(at + 4)?);
        self.taken = self.taken.wrapping_add(1);
        // A descriptor within a request, or beyond all, is no buffer's.
        let head = u16::try_from(head).ok().filter(|head| head.is_multiple_of(self.per_buffer));
        Some((head.map_or(u16::MAX, |head| head / self.per_buffer), length))
    }

    pub fn want_interrupts(&mut self, memory: &SharedMemory, wanted: bool) {
        let store = |at, value: u16| {
            memory.whole().store_u16(at, value.to_le(), Ordering::Relaxed);
        };
        match self.event_index {
            true => {
                let at = self.available + layout::RING + usize::from(self.size) * 2;
                // An index that is passed already asks for nothing.
                store(at, if wanted { self.taken } else { self.taken.wrapping_sub(1) });
            }
            false => {
                let flags = if wanted { 0 } else { layout::NO_INTERRUPT };
                store(self.available + layout::FLAGS, flags);
            }
        }
    }
}
