//! A virtqueue as its driver uses it, with the buffers that belong to it.

use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_spec::virtio::feature;
use rackbus_spec::virtio::ring::{DESCRIPTOR_SIZE, flags};

use super::NetError;
use super::packed::PackedDriverRing;
use super::split::SplitDriverRing;
use crate::device::DmaAddresses;

/// Where a queue's areas are, as the function addresses them.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueLayout {
    /// Address of the descriptor area, as the device sees it.
    pub descriptors: u64,
    /// Address of the driver area, as the device sees it.
    pub driver: u64,
    /// Address of the device area, as the device sees it.
    pub device: u64,
}

/// The memory of a queue: three areas, tables, then buffers.
#[derive(Debug, Clone, Copy)]
pub struct QueueMemory {
    /// Where it begins in the shared memory.
    pub offset: usize,
    /// Bytes of a buffer.
    pub buffer: usize,
    /// How many buffers there are.
    pub count: u16,
    /// Descriptors of a buffer at most.
    pub segments: u16,
}

const PAGE: usize = 4096;
/// Bytes of a buffer's table.
const TABLE: usize = 16 * DESCRIPTOR_SIZE;

impl QueueMemory {
    fn areas(size: u16) -> usize {
        (usize::from(size) * DESCRIPTOR_SIZE).next_multiple_of(PAGE)
            + (usize::from(size) * 2 + 8).next_multiple_of(PAGE)
            + (usize::from(size) * 8 + 8).next_multiple_of(PAGE)
    }

    fn tables(&self, size: u16) -> usize {
        self.offset + QueueMemory::areas(size)
    }

    fn buffers(&self, size: u16) -> usize {
        self.tables(size) + (usize::from(self.count) * TABLE).next_multiple_of(PAGE)
    }

    /// Bytes of all of it.
    pub fn length(&self, size: u16) -> usize {
        let buffers = self.buffers(size) - self.offset;
        buffers + (usize::from(self.count) * self.buffer).next_multiple_of(PAGE)
    }
}

/// A buffer of a request: address, length, flags.
pub type BufferPiece = (u64, u32, u16);

/// Descriptors that a frame is sent by at most.
pub const MOST_SEGMENTS: u16 = 16;

/// The buffers of a request, without an allocation.
#[derive(Debug, Default)]
struct PieceList {
    pieces: [BufferPiece; MOST_SEGMENTS as usize],
    count: usize,
}

impl PieceList {
    fn push(&mut self, piece: BufferPiece) {
        if let Some(place) = self.pieces.get_mut(self.count) {
            *place = piece;
            self.count += 1;
        }
    }

    fn all(&self) -> &[BufferPiece] {
        &self.pieces[..self.count]
    }
}

#[derive(Debug)]
enum Ring {
    Split(SplitDriverRing),
    Packed(PackedDriverRing),
}

/// The driver's side of a queue, with buffers of its own.
#[derive(Debug)]
pub struct NetQueue {
    /// The queue's number: even ones receive, odd ones send.
    pub number: u16,
    /// Where it is notified in BAR 0.
    pub notify_at: u64,
    /// The memory that has the queue's areas and buffers.
    pub span: QueueMemory,
    /// Where the queue's areas are in it.
    pub places: QueueLayout,
    /// Requests have a table.
    pub indirect: bool,
    ring: Ring,
    free: Vec<u16>,
    /// Which buffers the function has: it may report anything.
    busy: Vec<bool>,
    tables_at: usize,
    buffers_at: usize,
    addresses: DmaAddresses,
}

impl NetQueue {
    /// A queue of `size` descriptors in `span` of the memory.
    pub fn new(
        memory: &SharedMemory,
        addresses: &DmaAddresses,
        number: u16,
        size: u16,
        span: QueueMemory,
        features: u64,
    ) -> Result<NetQueue, NetError> {
        let descriptors = span.offset;
        let driver = descriptors + (usize::from(size) * DESCRIPTOR_SIZE).next_multiple_of(PAGE);
        let device = driver + (usize::from(size) * 2 + 8).next_multiple_of(PAGE);
        let address = |offset| {
            let (address, _) = addresses.at(offset)?;
            Some(address)
        };
        let place =
            |offset| address(offset).ok_or(NetError::Unsupported("memory out of its reach"));
        let places = QueueLayout {
            descriptors: place(descriptors)?,
            driver: place(driver)?,
            device: place(device)?,
        };
        if let Some(areas) = memory.whole().part(span.offset, QueueMemory::areas(size)) {
            areas.fill(0);
        }
        let ring = match features & feature::RING_PACKED != 0 {
            true => {
                Ring::Packed(PackedDriverRing::new(size, descriptors, driver, device, features))
            }
            false => Ring::Split(SplitDriverRing::new(
                size,
                span.segments,
                [descriptors, driver, device],
                features,
            )),
        };
        Ok(NetQueue {
            number,
            notify_at: 0,
            span,
            places,
            indirect: false,
            ring,
            free: (0..span.count).rev().collect(),
            busy: vec![false; span.count.into()],
            tables_at: span.tables(size),
            buffers_at: span.buffers(size),
            addresses: addresses.clone(),
        })
    }

    /// A buffer that nobody uses.
    #[inline]
    pub fn free(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Nobody uses it any more.
    pub fn give_back(&mut self, number: u16) {
        self.free.push(number);
    }

    /// How many such there are.
    pub fn unused(&self) -> usize {
        self.free.len()
    }

    /// Buffers that the function has.
    pub fn under_way(&self) -> usize {
        usize::from(self.span.count) - self.free.len()
    }

    /// The memory of a buffer.
    #[inline]
    pub fn buffer<'m>(&self, memory: &'m SharedMemory, number: u16) -> DmaSlice<'m> {
        let at = self.buffers_at + usize::from(number.min(self.span.count - 1)) * self.span.buffer;
        let whole = memory.whole();
        whole.part(at, self.span.buffer).unwrap_or(whole)
    }

    fn address(&self, offset: usize) -> u64 {
        self.addresses.at(offset).map_or(0, |(address, _)| address)
    }

    /// Puts a request in: the first bytes of a buffer are read, those behind them written.
    #[inline]
    pub fn push(&mut self, memory: &SharedMemory, number: u16, read: usize, write: usize) {
        let at = self.buffers_at + usize::from(number) * self.span.buffer;
        if let (false, 1, Some((length, kind))) =
            (self.indirect, self.span.segments, in_one(read, write))
        {
            return self.put(memory, number, &[(self.address(at), length as u32, kind)]);
        }
        self.push_parts(memory, number, (at, read, write));
    }

    /// Puts a request of several descriptors in, or one that has a table.
    fn push_parts(
        &mut self,
        memory: &SharedMemory,
        number: u16,
        (at, read, write): (usize, usize, usize),
    ) {
        let mut pieces = PieceList::default();
        let parts = usize::from(self.span.segments) - usize::from(write > 0 && read > 0);
        let mut done = 0;
        for part in 0..parts.max(1) {
            let end = read * (part + 1) / parts.max(1);
            if end > done {
                pieces.push((self.address(at + done), (end - done) as u32, 0));
                done = end;
            }
        }
        if write > 0 {
            pieces.push((self.address(at + read), write as u32, flags::WRITE));
        }
        if self.indirect {
            let table_at = self.tables_at + usize::from(number) * TABLE;
            let packed = matches!(self.ring, Ring::Packed(_));
            write_table(memory, table_at, pieces.all(), packed);
            let length = pieces.all().len() * DESCRIPTOR_SIZE;
            pieces = PieceList::default();
            pieces.push((self.address(table_at), length as u32, flags::INDIRECT));
        }
        self.put(memory, number, pieces.all());
    }

    #[inline]
    fn put(&mut self, memory: &SharedMemory, number: u16, pieces: &[BufferPiece]) {
        if let Some(busy) = self.busy.get_mut(usize::from(number)) {
            *busy = true;
        }
        match &mut self.ring {
            Ring::Split(ring) => ring.push(memory, number, pieces),
            Ring::Packed(ring) => ring.push(memory, number, pieces),
        }
    }

    /// Lets the function see what was put in; whether it wants to be notified.
    pub fn publish(&mut self, memory: &SharedMemory) -> bool {
        match &mut self.ring {
            Ring::Split(ring) => ring.publish(memory),
            Ring::Packed(ring) => ring.publish(memory),
        }
    }

    /// The next buffer that the function is done with, and how much it has written.
    ///
    /// # Errors
    /// When it says so of one that it does not have.
    #[inline]
    pub fn pop(&mut self, memory: &SharedMemory) -> Result<Option<(u16, u32)>, NetError> {
        let popped = match &mut self.ring {
            Ring::Split(ring) => ring.pop(memory),
            Ring::Packed(ring) => ring.pop(memory),
        };
        let Some((number, length)) = popped else { return Ok(None) };
        match self.busy.get_mut(usize::from(number)).is_some_and(std::mem::take) {
            true => Ok(Some((number, length))),
            false => Err(NetError::Unsupported("it returned a buffer that it did not have")),
        }
    }

    /// Whether there is such a one.
    pub fn has_used(&self, memory: &SharedMemory) -> bool {
        match &self.ring {
            Ring::Split(ring) => ring.has_used(memory),
            Ring::Packed(ring) => ring.has_used(memory),
        }
    }

    /// Asks for interrupts, or for none.
    pub fn want_interrupts(&mut self, memory: &SharedMemory, wanted: bool) {
        match &mut self.ring {
            Ring::Split(ring) => ring.want_interrupts(memory, wanted),
            Ring::Packed(ring) => ring.want_interrupts(memory, wanted),
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// Length and flags of a request that the function only reads, or only writes.
#[inline]
fn in_one(read: usize, write: usize) -> Option<(usize, u16)> {
    match (read, write) {
        (1.., 0) => Some((read, 0)),
        (0, 1..) => Some((write, flags::WRITE)),
        _ => None,
    }
}

fn write_table(memory: &SharedMemory, at: usize, pieces: &[BufferPiece], packed: bool) {
    use rackbus_spec::virtio::ring::{PackedDescriptor, SplitDescriptor};
    for (index, (address, length, kind)) in (0u16..).zip(pieces) {
        let at = at + usize::from(index) * DESCRIPTOR_SIZE;
        let (address, length) = (*address, *length);
        if packed {
            let entry = PackedDescriptor { address, length, id: 0, flags: *kind };
            memory.whole().write_obj(at, &entry);
            continue;
        }
        let last = usize::from(index) + 1 == pieces.len();
        let flags = kind | if last { 0 } else { flags::NEXT };
        memory.whole().write_obj(at, &SplitDescriptor { address, length, flags, next: index + 1 });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rackbus_spec::virtio::ring::{PACKED_FLAGS, PackedDescriptor, split};

    use super::*;

    const SIZE: u16 = 8;
    const SPAN: QueueMemory = QueueMemory { offset: 0, buffer: 256, count: 4, segments: 2 };

    fn queue(memory: &SharedMemory, features: u64) -> NetQueue {
        let addresses = DmaAddresses::contiguous(1 << 32, memory.len());
        NetQueue::new(memory, &addresses, 0, SIZE, SPAN, features).unwrap()
    }

    /// The function says for the `nth` time of a split queue that it is done with a chain of descriptors.
    fn use_split(memory: &SharedMemory, nth: u16, head: u32) {
        let used = 2 * PAGE;
        let at = used + split::RING + usize::from(nth % SIZE) * split::USED_SIZE;
        memory.whole().store_u32(at, head.to_le(), Ordering::Relaxed);
        memory.whole().store_u16(used + split::INDEX, nth + 1, Ordering::Release);
    }

    /// The same of a packed queue, of which each request has one descriptor, in the first round.
    fn use_packed(memory: &SharedMemory, nth: u16, id: u16) {
        let at = usize::from(nth) * DESCRIPTOR_SIZE;
        let entry = PackedDescriptor { address: 0, length: 0, id, flags: 0 };
        memory.whole().write_obj(at, &entry);
        let done = (flags::AVAIL | flags::USED).to_le();
        memory.whole().store_u16(at + PACKED_FLAGS, done, Ordering::Release);
    }

    /// Both buffers are with the function, which returns one twice, one that it never had, and one that there is not.
    fn returns(features: u64, done: impl Fn(&SharedMemory, u16, u16)) {
        for wrong in [0, 2, SPAN.count, 1000] {
            let memory = SharedMemory::create("ring", SPAN.length(SIZE) as u64).unwrap();
            let mut queue = queue(&memory, features);
            for number in [0, 1] {
                assert_eq!(queue.free(), Some(number));
                queue.push(&memory, number, 0, 256);
            }
            queue.publish(&memory);
            assert_eq!(queue.pop(&memory).unwrap(), None);
            done(&memory, 0, 0);
            assert_eq!(queue.pop(&memory).unwrap(), Some((0, 0)));
            queue.give_back(0);
            done(&memory, 1, wrong);
            assert!(queue.pop(&memory).is_err(), "buffer {wrong}");
            assert_eq!(queue.unused(), 3, "a buffer is free twice");
        }
    }

    #[test]
    fn the_function_sees_requests_together_when_they_are_published() {
        let available = |memory: &SharedMemory, features: u64| match features {
            0 => memory.whole().load_u16(PAGE + split::INDEX, Ordering::Relaxed).unwrap(),
            _ => (0..2)
                .take_while(|nth| {
                    let at = nth * DESCRIPTOR_SIZE + PACKED_FLAGS;
                    memory.whole().load_u16(at, Ordering::Relaxed).unwrap() & flags::AVAIL != 0
                })
                .count() as u16,
        };
        for features in [0, feature::RING_PACKED] {
            let memory = SharedMemory::create("ring", SPAN.length(SIZE) as u64).unwrap();
            let mut queue = queue(&memory, features);
            for number in [0, 1] {
                queue.push(&memory, number, 0, 256);
                assert_eq!(available(&memory, features), 0);
            }
            queue.publish(&memory);
            assert_eq!(available(&memory, features), 2);
        }
    }

    #[test]
    fn a_buffer_that_the_function_does_not_have_is_not_taken_from_it() {
        returns(0, |memory, nth, number| use_split(memory, nth, 2 * u32::from(number)));
        returns(feature::RING_PACKED, use_packed);
    }

    #[test]
    fn descriptors_within_a_request_and_beyond_all_are_no_requests() {
        for head in [1, u32::from(u16::MAX), 1 << 16, u32::MAX] {
            let memory = SharedMemory::create("ring", SPAN.length(SIZE) as u64).unwrap();
            let mut queue = queue(&memory, 0);
            let number = queue.free().unwrap();
            queue.push(&memory, number, 0, 256);
            queue.publish(&memory);
            use_split(&memory, 0, head);
            assert!(queue.pop(&memory).is_err(), "descriptor {head}");
        }
    }
}
