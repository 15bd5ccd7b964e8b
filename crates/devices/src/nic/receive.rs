//! Frames from the port to the driver's buffers.

use rackbus_memory::{Access, DmaSlice, DmaSpace};
use rackbus_net::cut::{Cut, complete_checksum};
use rackbus_net::offload::{DATA_VALID, GSO_NONE, OFFLOAD_BYTES};
use rackbus_net::port::MIN_FRAME;
use rackbus_net::{Frame, Offload};
use rackbus_pci::Bus;
use rackbus_pci::operations::Tally;
use rackbus_spec::virtio::net::{HEADER_BUFFERS, HEADER_SIZE, feature};
use zerocopy::IntoBytes;

use super::counters::count;
use super::function::{Nic, PollOutcome, RECEIVE};
use super::{features, steering};
use crate::virtio::{
    Buffer, BufferChain, DriverFault, QueueError, Transport, UsedRequest, VirtioRing,
};

/// Frames in one poll.
const BURST: usize = 64;
/// Requests that are completed together: each time takes cache lines of the queue from the driver, and the driver sees
/// none of them before.
const TOGETHER: usize = 16;

/// How long a frame waits for buffers: where its pair is the only one, and where it holds up those of others.
const PATIENCE_NS: [u64; 2] = [100_000_000, 20_000_000];

/// A frame that its driver takes in pieces only.
#[derive(Debug)]
pub(super) struct Cutting {
    cut: Cut,
    /// Where the next piece of a frame is put together.
    piece: Vec<u8>,
    /// The pair of queues that it goes to.
    pub pair: u16,
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivered {
    Done,
    /// The driver has to make buffers available first.
    NoBuffers,
    /// All buffers that the driver can have do not hold it.
    TooLarge,
}

/// Bytes of a frame.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// In the port's ring.
    Shared(&'a DmaSlice<'a>),
    /// The frame was copied, because it is changed before it is delivered.
    Own(&'a [u8]),
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Source::Shared(slice) => slice.len(),
            Source::Own(bytes) => bytes.len(),
        }
    }

    /// Fills `room` from `offset` on.
    #[inline]
    fn copy_to(&self, offset: usize, room: DmaSlice<'_>) {
        match self {
            Source::Shared(slice) => {
                if let Some(part) = slice.part(offset, room.len()) {
                    room.copy_from_slice(part);
                }
            }
            Source::Own(bytes) => {
                room.copy_from(&bytes[offset..]);
            }
        }
    }
}

/// What is used again for each frame.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    chain: BufferChain,
    buffers: Vec<Buffer>,
    /// What was filled and is not completed yet, of the queue with this number.
    used: Vec<UsedRequest>,
    queue: u16,
    /// The first of a frame that is being delivered.
    first: usize,
}

impl Delivery {
    /// Puts a frame into buffers of a queue: one request's, or as many as it takes where they are `mergeable`.
    fn deliver(
        &mut self,
        dma: &DmaSpace,
        ring: &mut VirtioRing,
        (size, mergeable): (u16, bool),
        offload: &Offload,
        source: Source<'_>,
    ) -> Result<Delivered, QueueError> {
        let cursor = ring.cursor();
        self.first = self.used.len();
        let delivered = self.take(dma, ring, size, mergeable, HEADER_SIZE + source.len());
        let delivered = match delivered {
            Ok(Delivered::Done) => self.fill(dma, offload, source).map(|()| Delivered::Done),
            other => other,
        };
        match delivered {
            Ok(Delivered::Done) if self.used.len() < TOGETHER => {}
            Ok(Delivered::Done) => self.complete(ring),
            Ok(_) | Err(_) => {
                self.used.truncate(self.first);
                ring.rewind(cursor);
            }
        }
        delivered
    }

    /// Delivers to this queue next, and completes what was filled of another.
    fn turn_to(&mut self, transport: &mut Transport, queue: u16) {
        if self.queue != queue {
            self.complete_queue(transport);
            self.queue = queue;
        }
    }

    /// Completes what was filled of the queue.
    fn complete_queue(&mut self, transport: &mut Transport) {
        if let Some(ring) = transport.queue(self.queue).and_then(|it| it.ring.as_mut()) {
            self.complete(ring);
        }
    }

    fn complete(&mut self, ring: &mut VirtioRing) {
        if !self.used.is_empty() {
            ring.complete(&self.used);
            self.used.clear();
        }
    }

    /// Takes requests that have room for `total` bytes.
    fn take(
        &mut self,
        dma: &DmaSpace,
        ring: &mut VirtioRing,
        size: u16,
        mergeable: bool,
        total: usize,
    ) -> Result<Delivered, QueueError> {
        self.buffers.clear();
        let (mut left, mut slots) = (total as u64, 0u16);
        while left > 0 {
            if !ring.take(dma, &mut self.chain)? {
                let all = slots >= size;
                return Ok(if all { Delivered::TooLarge } else { Delivered::NoBuffers });
            }
            let room = self.chain.writable_bytes;
            if room < HEADER_SIZE as u64 {
                return Err(DriverFault::Header.into());
            }
            if !mergeable && room < left {
                return Ok(Delivered::TooLarge);
            }
            let written = room.min(left) as u32;
            let BufferChain { id, slots: taken, .. } = self.chain;
            self.used.push(UsedRequest { id, slots: taken, written });
            self.buffers.extend_from_slice(&self.chain.writable);
            slots = slots.saturating_add(taken);
            left -= u64::from(written);
        }
        Ok(Delivered::Done)
    }

    /// Fills what was taken with a header and the frame.
    fn fill(
        &self,
        dma: &DmaSpace,
        offload: &Offload,
        source: Source<'_>,
    ) -> Result<(), QueueError> {
        let total = HEADER_SIZE + source.len();
        if let [Buffer { address, length }] = self.buffers[..]
            && length as usize >= total
            && let Some(room) = dma.slice_if_mapped(address, total, Access::WRITE)
            && let Some(rest) = room.part(HEADER_SIZE, source.len())
        {
            // Most frames: in one buffer, which is looked up once. The header is stored from where its parts are:
            // one that is put together elsewhere is loaded once more.
            room.copy_from(offload.as_bytes());
            room.write_obj(HEADER_BUFFERS, &1u16.to_le());
            source.copy_to(0, rest);
            return Ok(());
        }
        let mut header = [0; HEADER_SIZE];
        header[..OFFLOAD_BYTES].copy_from_slice(offload.as_bytes());
        header[HEADER_BUFFERS..]
            .copy_from_slice(&((self.used.len() - self.first) as u16).to_le_bytes());
        let (mut of_header, mut of_frame) = (0, 0);
        for buffer in &self.buffers {
            let mut at = buffer.address;
            let mut room = buffer.length as usize;
            let head = (HEADER_SIZE - of_header).min(room);
            if head > 0 {
                let written = dma.write(at, &header[of_header..of_header + head]);
                written.map_err(|_| QueueError::Unreachable)?;
                of_header += head;
                at = at.saturating_add(head as u64);
                room -= head;
            }
            let count = room.min(source.len() - of_frame);
            if count == 0 {
                continue;
            }
            let walked = dma.walk(at, count, Access::WRITE, |part| {
                source.copy_to(of_frame, part);
                of_frame += part.len();
            });
            walked.map_err(|_| QueueError::Unreachable)?;
        }
        Ok(())
    }
}

impl Nic {
    /// Hands over what the port has, a bounded number of frames.
    pub(super) fn receive(&mut self, bus: &Bus<'_>) -> PollOutcome {
        let mut outcome = PollOutcome::default();
        let mut tally = Tally::default();
        let mut touched = 0u32;
        let mut begun = None;
        for _ in 0..BURST {
            let taken = match self.cutting.is_some() {
                true => {
                    begun.get_or_insert_with(|| bus.user.before_access());
                    self.receive_piece(bus, &mut tally, &mut outcome)
                }
                false => self.receive_frame(bus, &mut begun, &mut tally, &mut outcome),
            };
            match taken {
                Ok(DeliveryOutcome::Delivered(pair)) => touched |= 1 << pair,
                Ok(DeliveryOutcome::Gone) => {}
                Ok(DeliveryOutcome::Nothing) => break,
                Ok(DeliveryOutcome::Waits) => {
                    outcome.stalled = true;
                    break;
                }
                Err((queue, error)) => {
                    self.delivery.complete_queue(&mut self.transport);
                    self.stopped(bus, queue, error, &mut outcome);
                    break;
                }
            }
            outcome.done = true;
        }
        self.delivery.complete_queue(&mut self.transport);
        for pair in (0..self.settings.pairs).filter(|pair| touched & 1 << pair != 0) {
            self.transport.interrupt(bus.irq, 2 * pair);
        }
        if let Some(begun) = begun {
            self.tally(RECEIVE, tally, bus.user.ticks().saturating_sub(begun));
        }
        outcome
    }

    /// Hands the port's next frame over; `begun` is when the first of the poll was looked at.
    fn receive_frame(
        &mut self,
        bus: &Bus<'_>,
        begun: &mut Option<u64>,
        tally: &mut Tally,
        outcome: &mut PollOutcome,
    ) -> Result<DeliveryOutcome, (u16, QueueError)> {
        let Some(port) = self.port.get_mut() else { return Ok(DeliveryOutcome::Nothing) };
        // Not moved, and its parts neither: a load of fields together that were stored one by one can wait until all that was
        // stored before has left the processor, and some of that is to lines that the driver's processor has.
        let next = port.next();
        let Some(frame) = &next else { return Ok(DeliveryOutcome::Nothing) };
        begun.get_or_insert_with(|| bus.user.before_access());
        if let Err(at) = self.inward.ready(bus.now_ns) {
            count(&self.counters.throttled);
            outcome.wait_until(at);
            return Ok(DeliveryOutcome::Waits);
        }
        let (mut begin, length) = ([0; 16], frame.bytes.len());
        frame.bytes.copy_to(&mut begin);
        if length < MIN_FRAME || !self.settings.filter.wants(self.settings.mac(), &begin) {
            count(&self.counters.filtered);
            port.consume();
            return Ok(DeliveryOutcome::Gone);
        }
        let pairs = self.settings.pairs;
        let pair = match pairs {
            1 => 0,
            _ => {
                let mut head = [0; steering::LOOKED_AT];
                let seen = frame.bytes.copy_to(&mut head);
                steering::pair(steering::flow(&head[..seen]), pairs)
            }
        };
        self.delivery.turn_to(&mut self.transport, 2 * pair);
        let mergeable = self.transport.has(feature::MRG_RXBUF);
        let queue = self.transport.queue(2 * pair);
        let Some((ring, size)) = queue.and_then(|q| Some((q.ring.as_mut()?, q.place.size))) else {
            count(&self.counters.no_queue);
            port.consume();
            return Ok(DeliveryOutcome::Gone);
        };
        let (dma, how) = (bus.dma, (size, mergeable));
        let delivered = match adapt(frame, self.settings.offloads) {
            Adapted::AsItIs(offload) => {
                self.delivery.deliver(dma, ring, how, &offload, Source::Shared(&frame.bytes))
            }
            Adapted::Completed(copy) => {
                self.delivery.deliver(dma, ring, how, &Offload::default(), Source::Own(&copy))
            }
            Adapted::Cut(cut) => {
                self.cutting = cut.map(|cut| Cutting { cut, piece: Vec::new(), pair });
                if self.cutting.is_none() {
                    count(&self.counters.not_cut);
                }
                self.inward.spend(length);
                port.consume();
                return Ok(DeliveryOutcome::Gone);
            }
        };
        let delivered = delivered.map_err(|error| (2 * pair, error))?;
        if delivered != Delivered::NoBuffers {
            self.inward.spend(length);
            tally.count(length as u64, delivered == Delivered::Done);
            port.consume();
        }
        let taken = self.after(delivered, pair, bus.now_ns, outcome);
        if let (Delivered::NoBuffers, DeliveryOutcome::Gone, Some(port)) =
            (delivered, &taken, self.port.get_mut())
        {
            port.consume();
        }
        Ok(taken)
    }

    /// What becomes of a frame whose queue could be reached: without buffers for too long it is gone.
    fn after(
        &mut self,
        delivered: Delivered,
        pair: u16,
        now_ns: u64,
        outcome: &mut PollOutcome,
    ) -> DeliveryOutcome {
        self.reached(2 * pair);
        let several = usize::from(self.settings.pairs > 1);
        let since = &mut self.without_buffers[usize::from(pair)];
        match delivered {
            Delivered::Done => *since = None,
            Delivered::TooLarge => count(&self.counters.too_large),
            Delivered::NoBuffers => {
                let until = since.get_or_insert(now_ns).saturating_add(PATIENCE_NS[several]);
                if now_ns < until {
                    outcome.patient_until = Some(until);
                    return DeliveryOutcome::Waits;
                }
                // Those behind it do not wait, either, until there are some.
                count(&self.counters.no_buffers);
                return DeliveryOutcome::Gone;
            }
        }
        DeliveryOutcome::Delivered(pair)
    }

    /// Hands the next piece of a frame over.
    fn receive_piece(
        &mut self,
        bus: &Bus<'_>,
        tally: &mut Tally,
        outcome: &mut PollOutcome,
    ) -> Result<DeliveryOutcome, (u16, QueueError)> {
        let Some(cutting) = &mut self.cutting else { return Ok(DeliveryOutcome::Gone) };
        if cutting.piece.is_empty() && !cutting.cut.next(&mut cutting.piece) {
            self.cutting = None;
            return Ok(DeliveryOutcome::Gone);
        }
        let pair = cutting.pair;
        self.delivery.turn_to(&mut self.transport, 2 * pair);
        let mergeable = self.transport.has(feature::MRG_RXBUF);
        let queue = self.transport.queue(2 * pair);
        let Some((ring, size)) = queue.and_then(|q| Some((q.ring.as_mut()?, q.place.size))) else {
            count(&self.counters.no_queue);
            self.cutting = None;
            return Ok(DeliveryOutcome::Gone);
        };
        let source = Source::Own(&cutting.piece);
        let (none, how) = (Offload::default(), (size, mergeable));
        let delivered = self.delivery.deliver(bus.dma, ring, how, &none, source);
        let delivered = delivered.map_err(|error| (2 * pair, error))?;
        if delivered != Delivered::NoBuffers {
            tally.count(cutting.piece.len() as u64, delivered == Delivered::Done);
            cutting.piece.clear();
        }
        let taken = self.after(delivered, pair, bus.now_ns, outcome);
        if matches!((delivered, &taken), (Delivered::NoBuffers, DeliveryOutcome::Gone)) {
            self.cutting = None;
        }
        Ok(taken)
    }

    fn reached(&mut self, queue: u16) {
        if let Some(queue) = self.transport.queue(queue) {
            queue.unreachable_since = None;
        }
    }
}

/// What became of what was next.
enum DeliveryOutcome {
    /// It lies with the driver, or was dropped, by this pair's queue.
    Delivered(u16),
    /// The port has no frame for this function now.
    Nothing,
    /// It was dropped, or is cut.
    Gone,
    /// It is still next.
    Waits,
}

/// A frame as its driver takes it.
enum Adapted {
    AsItIs(Offload),
    /// A copy, with nothing left to do.
    Completed(Vec<u8>),
    /// In pieces; `None` when that is not possible.
    Cut(Option<Cut>),
}

fn adapt(frame: &Frame<'_>, offloads: u64) -> Adapted {
    let mut offload = frame.offload;
    if features::takes(offloads, &offload) {
        if offloads & feature::GUEST_CSUM == 0 {
            offload.flags &= !DATA_VALID;
        }
        return Adapted::AsItIs(offload);
    }
    let mut copy = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut copy);
    if offload.gso_type == GSO_NONE {
        complete_checksum(&mut copy, &offload);
        return Adapted::Completed(copy);
    }
    Adapted::Cut(Cut::new(copy, &offload).ok())
}
