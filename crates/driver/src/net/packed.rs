//! The driver's side of a packed virtqueue.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::SharedMemory;
use rackbus_spec::virtio::feature;
use rackbus_spec::virtio::ring::{
    DESCRIPTOR_SIZE, PACKED_FLAGS, PackedDescriptor, event, flags, passes,
};

use super::ring::BufferPiece;

#[derive(Debug)]
pub struct PackedDriverRing {
    size: u16,
    ring: usize,
    driver: usize,
    device: usize,
    event_index: bool,
    /// Where the next request goes.
    next: u16,
    wrap: bool,
    /// Descriptors that the function was not told of.
    added: u16,
    /// Where the flags of the first of them are, and what they are to be: with them the function sees all of them.
    hidden: Option<(usize, u16)>,
    /// Where the next one that is done comes.
    taken: u16,
    taken_wrap: bool,
    /// Descriptors of each buffer that the function has.
    slots: Vec<u16>,
}

impl PackedDriverRing {
    pub fn new(
        size: u16,
        ring: usize,
        driver: usize,
        device: usize,
        features: u64,
    ) -> PackedDriverRing {
        PackedDriverRing {
            size,
            ring,
            driver,
            device,
            event_index: features & feature::EVENT_IDX != 0,
            next: 0,
            wrap: true,
            added: 0,
            hidden: None,
            taken: 0,
            taken_wrap: true,
            slots: vec![0; usize::from(size)],
        }
    }

    /// Puts a request in, which the function sees when it is [published](PackedDriverRing::publish): what it looks at
    /// meanwhile is in a cache line that it would take from here for each request.
    #[inline]
    pub fn push(&mut self, memory: &SharedMemory, number: u16, pieces: &[BufferPiece]) {
        for (index, (address, length, kind)) in pieces.iter().enumerate() {
            let at = self.ring + usize::from(self.next) * DESCRIPTOR_SIZE;
            let more = if index + 1 < pieces.len() { flags::NEXT } else { 0 };
            let mark = if self.wrap { flags::AVAIL } else { flags::USED };
            let flags = kind | more | mark;
            let (address, length) = (*address, *length);
            let written = match self.hidden {
                Some(_) => flags,
                None => {
                    self.hidden = Some((at + PACKED_FLAGS, flags));
                    let old = memory.whole().load_u16(at + PACKED_FLAGS, Ordering::Relaxed);
                    u16::from_le(old.unwrap_or(0))
                }
            };
            let entry = PackedDescriptor { address, length, id: number, flags: written };
            let [place, rest] = entry.words();
            memory.whole().store_u64(at, place, Ordering::Relaxed);
            memory.whole().store_u64(at + 8, rest, Ordering::Relaxed);
            self.next += 1;
            if self.next == self.size {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
        if let Some(slots) = self.slots.get_mut(usize::from(number)) {
            *slots = pieces.len() as u16;
        }
        self.added += pieces.len() as u16;
    }

    pub fn publish(&mut self, memory: &SharedMemory) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        if let Some((at, flags)) = self.hidden.take() {
            memory.whole().store_u16(at, flags.to_le(), Ordering::Release);
        }
        fence(Ordering::SeqCst);
        let field = |at| memory.whole().load_u16(at, Ordering::Relaxed).map_or(0, u16::from_le);
        match field(self.device + event::FLAGS) {
            event::DISABLE => false,
            event::DESCRIPTOR => {
                let place = field(self.device + event::PLACE);
                let mut at = place & !event::WRAP;
                if (place & event::WRAP != 0) != self.wrap {
                    at = at.wrapping_sub(self.size);
                }
                passes(at, self.next, self.next.wrapping_sub(added))
            }
            _ => true,
        }
    }

    pub fn has_used(&self, memory: &SharedMemory) -> bool {
        let at = self.ring + usize::from(self.taken) * DESCRIPTOR_SIZE + PACKED_FLAGS;
        let flags = memory.whole().load_u16(at, Ordering::Acquire).map_or(0, u16::from_le);
        let (available, used) = (flags & flags::AVAIL != 0, flags & flags::USED != 0);
        available == used && used == self.taken_wrap
    }

    #[inline]
    pub fn pop(&mut self, memory: &SharedMemory) -> Option<(u16, u32)> {
        if !self.has_used(memory) {
            return None;
        }
        let at = self.ring + usize::from(self.taken) * DESCRIPTOR_SIZE;
        let entry: PackedDescriptor = memory.whole().read_obj(at)?;
        self.taken += self.slots.get(usize::from(entry.id)).copied().unwrap_or(1).max(1);
        if self.taken >= self.size {
            (self.taken, self.taken_wrap) = (self.taken - self.size, !self.taken_wrap);
        }
        Some((entry.id, entry.length))
    }

    pub fn want_interrupts(&mut self, memory: &SharedMemory, wanted: bool) {
        let store = |at, value: u16| {
            memory.whole().store_u16(at, value.to_le(), Ordering::Release);
        };
        let flags = match (wanted, self.event_index) {
            (false, _) => event::DISABLE,
            (true, false) => event::ENABLE,
            (true, true) => {
                let wrap = if self.taken_wrap { event::WRAP } else { 0 };
                store(self.driver + event::PLACE, self.taken | wrap);
                event::DESCRIPTOR
            }
        };
        store(self.driver + event::FLAGS, flags);
    }
}
