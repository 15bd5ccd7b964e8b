//! A split virtqueue (virtio 1.2, section 2.7): a table of descriptors, a ring of heads that the driver makes
//! available, a ring of those that the device has used.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::{Access, DmaSpace};
use rackbus_spec::virtio::ring::{
    DESCRIPTOR_SIZE, SplitDescriptor, flags, passes, split as layout,
};

use super::ring::{Cursor, QueueAddresses, QueueError, RingArea, UsedRequest};
use super::{BufferChain, DriverFault};

/// The device's side of a split ring.
#[derive(Debug)]
pub struct SplitRing {
    size: u16,
    event_index: bool,
    descriptors: RingArea,
    available: RingArea,
    used: RingArea,
    /// The available index up to which requests were taken.
    next: u16,
    /// The available index as it was read last: it lies in a cache line that the driver writes.
    seen: u16,
    /// Requests that were put into the used ring so far, modulo 65,536.
    done: u16,
    /// Completed since interrupts were asked about.
    added: u16,
}

impl SplitRing {
    pub fn new(
        dma: &DmaSpace,
        place: QueueAddresses,
        event_index: bool,
    ) -> Result<SplitRing, DriverFault> {
        let QueueAddresses { size, descriptors, driver, device } = place;
        if !size.is_power_of_two() {
            return Err(DriverFault::Queue);
        }
        let table = DESCRIPTOR_SIZE * usize::from(size);
        let (read, write) = (Access::READ, Access::READ | Access::WRITE);
        Ok(SplitRing {
            size,
            event_index,
            descriptors: RingArea::new(dma, descriptors, table, 16, read)?,
            available: RingArea::new(dma, driver, layout::available_bytes(size), 2, read)?,
            used: RingArea::new(dma, device, layout::used_bytes(size), 4, write)?,
            next: 0,
            seen: 0,
            done: 0,
            added: 0,
        })
    }

    pub fn resolve(&mut self, dma: &DmaSpace) {
        self.descriptors.resolve(dma);
        self.available.resolve(dma);
        self.used.resolve(dma);
    }

    pub fn release_memory(&mut self) {
        self.descriptors.release_memory();
        self.available.release_memory();
        self.used.release_memory();
    }

    pub fn cursor(&self) -> Cursor {
        Cursor { next: self.next, wrap: false }
    }

    pub fn rewind(&mut self, cursor: Cursor) {
        self.next = cursor.next;
    }

    /// All that was taken was completed: both indices are the same.
    pub fn go_on(&mut self, cursor: Cursor) {
        (self.next, self.seen, self.done) = (cursor.next, cursor.next, cursor.next);
        // Whether the driver was interrupted for the last ones is not known: once more does no harm.
        self.added = self.size;
    }

    fn available_index(&self) -> Option<u16> {
        // What the driver wrote before it moved the index is seen by who sees the index.
        self.available.at(layout::INDEX, 2)?.load_u16(0, Ordering::Acquire).map(u16::from_le)
    }

    pub fn has_work(&self) -> bool {
        self.available_index().is_some_and(|index| index != self.next)
    }

    #[inline]
    pub fn take(&mut self, dma: &DmaSpace, chain: &mut BufferChain) -> Result<bool, QueueError> {
        if !self.descriptors.is_reached() || !self.used.is_reached() {
            return Err(QueueError::Unreachable);
        }
        if self.seen == self.next {
            self.seen = self.available_index().ok_or(QueueError::Unreachable)?;
        }
        let waiting = self.seen.wrapping_sub(self.next);
        if waiting == 0 {
            return Ok(false);
        }
        if waiting > self.size {
            return Err(DriverFault::Index.into());
        }
        let slot = usize::from(self.next & (self.size - 1));
        let entry = self.available.at(layout::RING + slot * layout::AVAILABLE_SIZE, 2);
        let head = entry.and_then(|entry| entry.load_u16(0, Ordering::Relaxed));
        let head = u16::from_le(head.ok_or(QueueError::Unreachable)?);
        chain.begin(head);
        chain.slots = 1;
        self.walk(dma, head, chain)?;
        self.next = self.next.wrapping_add(1);
        Ok(true)
    }

    fn walk(&self, dma: &DmaSpace, head: u16, chain: &mut BufferChain) -> Result<(), QueueError> {
        let mut at = head;
        for _ in 0..self.size {
            if at >= self.size {
                return Err(DriverFault::Outside.into());
            }
            let place = self.descriptors.at(usize::from(at) * DESCRIPTOR_SIZE, DESCRIPTOR_SIZE);
            let descriptor: SplitDescriptor =
                place.and_then(|place| place.read_obj(0)).ok_or(QueueError::Unreachable)?;
            let goes_on = descriptor.flags & flags::NEXT != 0;
            if descriptor.flags & flags::INDIRECT != 0 {
                if goes_on {
                    return Err(DriverFault::Nested.into());
                }
                return chain.add_table(dma, descriptor.address, descriptor.length);
            }
            chain.add(descriptor.address, descriptor.length, descriptor.flags)?;
            if !goes_on {
                return Ok(());
            }
            at = descriptor.next;
        }
        Err(DriverFault::Chain.into())
    }

    #[inline]
    pub fn complete(&mut self, used: &[UsedRequest]) {
        for entry in used {
            let slot = usize::from(self.done & (self.size - 1));
            // An entry is aligned to half of its size: each half lies in one page.
            let at = layout::RING + slot * layout::USED_SIZE;
            if let (Some(id), Some(length)) = (self.used.at(at, 4), self.used.at(at + 4, 4)) {
                id.store_u32(0, u32::from(entry.id).to_le(), Ordering::Relaxed);
                length.store_u32(0, entry.written.to_le(), Ordering::Relaxed);
            }
            self.done = self.done.wrapping_add(1);
            self.added = self.added.saturating_add(1);
        }
        if let Some(index) = self.used.at(layout::INDEX, 2) {
            index.store_u16(0, self.done.to_le(), Ordering::Release);
        }
    }

    pub fn wants_interrupt(&mut self) -> bool {
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        // The driver asks for an interrupt and then looks at the index; here it is the other way round.
        fence(Ordering::SeqCst);
        let field = |at| {
            let place = self.available.at(at, 2)?;
            place.load_u16(0, Ordering::Relaxed).map(u16::from_le)
        };
        match self.event_index {
            true => {
                let at = layout::RING + usize::from(self.size) * layout::AVAILABLE_SIZE;
                let old = self.done.wrapping_sub(added);
                field(at).is_none_or(|event| added >= self.size || passes(event, self.done, old))
            }
            false => field(layout::FLAGS).is_none_or(|flags| flags & layout::NO_INTERRUPT == 0),
        }
    }

    /// True when requests have come since this looked at what there is: for these the driver may have told nothing.
    pub fn ask_notifications(&mut self, wanted: bool) -> bool {
        let store = |at, value: u16| {
            if let Some(place) = self.used.at(at, 2) {
                place.store_u16(0, value.to_le(), Ordering::Relaxed);
            }
        };
        match (self.event_index, wanted) {
            // An index that is passed already asks for nothing until the driver has gone once around.
            (true, false) => {}
            (true, true) => {
                // By what comes next: there may be some that is not enough.
                return self.ask_behind(self.available_index().unwrap_or(self.next));
            }
            (false, wanted) => store(layout::FLAGS, if wanted { 0 } else { layout::NO_NOTIFY }),
        }
        false
    }

    /// Asks for a notification of what comes behind this index. True when the driver is further already: what it does
    /// next passes no index that it was asked for.
    pub fn ask_behind(&self, index: u16) -> bool {
        let at = layout::RING + usize::from(self.size) * layout::USED_SIZE;
        if let Some(place) = self.used.at(at, 2) {
            place.store_u16(0, index.to_le(), Ordering::Relaxed);
        }
        // The driver moves its index and then looks what it is asked; here it is the other way round.
        fence(Ordering::SeqCst);
        self.available_index().is_some_and(|now| now != index)
    }
}
