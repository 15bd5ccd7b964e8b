//! A packed virtqueue (virtio 1.2, section 2.8): one ring of descriptors, which both sides write.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::{Access, DmaSpace};
use rackbus_spec::virtio::ring::{
    DESCRIPTOR_SIZE, MAX_QUEUE_SIZE, PACKED_FLAGS, PackedDescriptor, event, flags, passes,
};

use super::chain::table;
use super::ring::{Cursor, QueueAddresses, QueueError, RingArea, UsedRequest};
use super::{BufferChain, DriverFault};

/// The queue. What was taken is completed in order, so a completion goes where its request came from.
#[derive(Debug)]
pub struct PackedRing {
    size: u16,
    ring: RingArea,
    driver: RingArea,
    device: RingArea,
    /// Where the driver makes its next request available.
    next: Cursor,
    /// Where the next completion goes.
    done: Cursor,
    /// Descriptors that were given back since interrupts were asked about.
    added: u16,
}

impl PackedRing {
    pub fn new(dma: &DmaSpace, place: QueueAddresses) -> Result<PackedRing, DriverFault> {
        let QueueAddresses { size, descriptors, driver, device } = place;
        if size == 0 || size > MAX_QUEUE_SIZE {
            return Err(DriverFault::Queue);
        }
        let length = DESCRIPTOR_SIZE * usize::from(size);
        let both = Access::READ | Access::WRITE;
        let begin = Cursor { next: 0, wrap: true };
        Ok(PackedRing {
            size,
            ring: RingArea::new(dma, descriptors, length, 16, both)?,
            driver: RingArea::new(dma, driver, event::SIZE, 4, Access::READ)?,
            device: RingArea::new(dma, device, event::SIZE, 4, both)?,
            next: begin,
            done: begin,
            added: 0,
        })
    }

    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.ring.resolve(dma);
        self.driver.resolve(dma);
        self.device.resolve(dma);
    }

    pub fn release_memory(&mut self) {
        self.ring.release_memory();
        self.driver.release_memory();
        self.device.release_memory();
    }

    pub fn cursor(&self) -> Cursor {
        self.next
    }

    pub fn rewind(&mut self, cursor: Cursor) {
        self.next = cursor;
    }

    pub fn go_on(&mut self, cursor: Cursor) -> Result<(), DriverFault> {
        if cursor.next >= self.size {
            return Err(DriverFault::Queue);
        }
        (self.next, self.done, self.added) = (cursor, cursor, self.size);
        Ok(())
    }

    /// The flags of a descriptor, in which the driver says that it is there.
    fn flags(&self, at: u16) -> Option<u16> {
        let place = self.ring.at(usize::from(at) * DESCRIPTOR_SIZE + PACKED_FLAGS, 2)?;
        place.load_u16(0, Ordering::Acquire).map(u16::from_le)
    }

    fn is_available(flags: u16, wrap: bool) -> bool {
        (flags & flags::AVAIL != 0) == wrap && (flags & flags::USED != 0) != wrap
    }

    pub fn has_work(&self) -> bool {
        let Cursor { next, wrap } = self.next;
        self.flags(next).is_some_and(|flags| PackedRing::is_available(flags, wrap))
    }

    #[inline]
    pub fn take(&mut self, dma: &DmaSpace, chain: &mut BufferChain) -> Result<bool, QueueError> {
        let Cursor { next, wrap } = self.next;
        let flags = self.flags(next).ok_or(QueueError::Unreachable)?;
        if !PackedRing::is_available(flags, wrap) {
            return Ok(false);
        }
        chain.begin(0);
        let mut at = next;
        for slots in 1..=self.size {
            let place = self.ring.at(usize::from(at) * DESCRIPTOR_SIZE, DESCRIPTOR_SIZE);
            let descriptor: PackedDescriptor =
                place.and_then(|place| place.read_obj(0)).ok_or(QueueError::Unreachable)?;
            let goes_on = descriptor.flags & flags::NEXT != 0;
            if descriptor.flags & flags::INDIRECT == 0 {
                chain.add(descriptor.address, descriptor.length, descriptor.flags)?;
            } else if goes_on {
                return Err(DriverFault::Nested.into());
            } else {
                let (table, count) =
                    table::<PackedDescriptor>(dma, descriptor.address, descriptor.length)?;
                for entry in &table[..count] {
                    if entry.flags & flags::INDIRECT != 0 {
                        return Err(DriverFault::Nested.into());
                    }
                    chain.add(entry.address, entry.length, entry.flags)?;
                }
            }
            if !goes_on {
                // The last descriptor of a chain has its name.
                (chain.id, chain.slots) = (descriptor.id, slots);
                self.next = self.beyond(self.next, slots);
                return Ok(true);
            }
            at = self.beyond(Cursor { next: at, wrap }, 1).next;
        }
        Err(DriverFault::Chain.into())
    }

    /// `count` places on, at most once around.
    fn beyond(&self, from: Cursor, count: u16) -> Cursor {
        let next = u32::from(from.next) + u32::from(count);
        match next.checked_sub(u32::from(self.size)) {
            None => Cursor { next: next as u16, ..from },
            Some(next) => Cursor { next: next as u16, wrap: !from.wrap },
        }
    }

    #[inline]
    pub fn complete(&mut self, used: &[UsedRequest]) {
        let mut first = None;
        for entry in used {
            let Cursor { next, wrap } = self.done;
            let mut flags = if wrap { flags::AVAIL | flags::USED } else { 0 };
            if entry.written > 0 {
                flags |= flags::WRITE;
            }
            let at = usize::from(next) * DESCRIPTOR_SIZE;
            if let Some(place) = self.ring.at(at, DESCRIPTOR_SIZE) {
                place.store_u32(8, entry.written.to_le(), Ordering::Relaxed);
                place.store_u16(12, entry.id.to_le(), Ordering::Relaxed);
                match first {
                    // The driver looks for the first one, and finds the others with it.
                    None => first = Some((at, flags)),
                    Some(_) => {
                        place.store_u16(PACKED_FLAGS, flags.to_le(), Ordering::Release);
                    }
                }
            }
            self.done = self.beyond(self.done, entry.slots);
            self.added = self.added.saturating_add(entry.slots);
        }
        if let Some((at, flags)) = first
            && let Some(place) = self.ring.at(at + PACKED_FLAGS, 2)
        {
            place.store_u16(0, flags.to_le(), Ordering::Release);
        }
    }

    pub fn wants_interrupt(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // As for a split queue.
        fence(Ordering::SeqCst);
        let Some(wish) = self.driver.at(0, event::SIZE) else { return true };
        let field = |at| wish.load_u16(at, Ordering::Relaxed).map(u16::from_le);
        match field(event::FLAGS) {
            Some(event::DISABLE) => false,
            Some(event::DESCRIPTOR) if added < self.size => {
                // The flags are written after the place.
                fence(Ordering::Acquire);
                let place = field(event::PLACE).unwrap_or(0);
                let wrap = place & event::WRAP != 0;
                let mut at = place & !event::WRAP;
                if wrap != self.done.wrap {
                    at = at.wrapping_sub(self.size);
                }
                passes(at, self.done.next, self.done.next.wrapping_sub(added))
            }
            _ => true,
        }
    }

    pub fn ask_notifications(&mut self, wanted: bool) -> bool {
        if let Some(wish) = self.device.at(0, event::SIZE) {
            let flags = if wanted { event::ENABLE } else { event::DISABLE };
            wish.store_u16(event::FLAGS, flags.to_le(), Ordering::Relaxed);
        }
        // It is asked for by no place: whatever comes is told.
        false
    }
}
