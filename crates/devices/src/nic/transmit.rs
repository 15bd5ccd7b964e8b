//! Frames from the driver's buffers to the port.

use std::ops::Range;

use rackbus_memory::{Access, DmaSlice};
use rackbus_net::offload::{GSO_NONE, NEEDS_CSUM, OFFLOAD_BYTES};
use rackbus_net::port::{MAX_FRAME, MIN_FRAME};
use rackbus_net::{Cause, NetworkPort, Offload, Sent};
use rackbus_pci::Bus;
use rackbus_pci::operations::Tally;
use rackbus_spec::virtio::net::HEADER_SIZE;
use zerocopy::FromBytes;

use super::features;
use super::function::{Nic, PollOutcome, TRANSMIT, count};
use crate::virtio::{Chain, Cursor, QueueError, UsedRequest, VirtioRing};

/// Frames of a queue in one poll.
const BURST: usize = 64;
/// Those that are taken at once: memory that the driver's processor has written is some hundred instructions away, and
/// that of one frame is brought while another is sent.
const TOGETHER: usize = 8;
/// Bytes of a frame that are brought: what the switch looks at, and the header. The processor sees what follows by itself.
const NEAR: usize = 128;
const _: () = assert!(BURST.is_multiple_of(TOGETHER));
/// A receiver without room rings when it has some, and never if it stands still: then its frames are to be dropped.
const RETRY_NS: u64 = 1_000_000;

impl Nic {
    /// Sends what the transmit queues hold, a bounded number from each.
    pub(super) fn transmit(&mut self, bus: &Bus<'_>) -> PollOutcome {
        let mut outcome = PollOutcome::default();
        let pairs = self.settings.pairs;
        let first = self.first_pair;
        for turn in 0..pairs {
            let pair = (first + turn) % pairs;
            let queue = 2 * pair + 1;
            if self.transport.has_work(queue) {
                self.transmit_queue(bus, queue, &mut outcome);
            }
        }
        self.first_pair = (first + 1) % pairs;
        if outcome.done
            && let Some(port) = self.port.get_mut()
        {
            port.flush();
        }
        outcome
    }

    fn transmit_queue(&mut self, bus: &Bus<'_>, queue: u16, outcome: &mut PollOutcome) {
        let begun = bus.user.before_access();
        let mut tally = Tally::default();
        let mut group = Group::default();
        // They are completed together: each store to the queue's memory takes a cache line from the driver.
        let (mut used, mut done) = ([UsedRequest::default(); BURST], 0);
        let mut stop = None;
        while done < BURST && stop.is_none() {
            stop = self.take(bus, queue, &mut group);
            for request in &group.requests[..group.count] {
                if let Err(end) = self.send(bus, request, &mut group.parts, &mut tally, outcome) {
                    if let Some(ring) = self.ring(queue) {
                        ring.rewind(request.cursor);
                    }
                    stop = Some(end);
                    break;
                }
                used[done] = UsedRequest { id: request.id, slots: request.slots, written: 0 };
                done += 1;
            }
        }
        if done > 0
            && let Some(queue) = self.transport.queue(queue)
        {
            queue.unreachable_since = None;
            if let Some(ring) = &mut queue.ring {
                ring.complete(&used[..done]);
            }
        }
        if let Some(Stop::Failed(error)) = stop {
            self.stopped(bus, queue, error, outcome);
        }
        outcome.done |= tally.done > 0;
        self.transport.interrupt(bus.irq, queue);
        self.tally(TRANSMIT, tally, bus.user.ticks().saturating_sub(begun));
    }

    fn ring(&mut self, queue: u16) -> Option<&mut VirtioRing> {
        self.transport.queue(queue)?.ring.as_mut()
    }

    /// Takes the next requests of a queue, and has their first bytes brought from the driver's processor. Why these are the
    /// last ones, if they are.
    fn take<'d>(&mut self, bus: &Bus<'d>, queue: u16, group: &mut Group<'d>) -> Option<Stop> {
        group.count = 0;
        group.parts.clear();
        let Some(ring) = self.transport.queue(queue).and_then(|it| it.ring.as_mut()) else {
            return Some(Stop::Ended);
        };
        while group.count < TOGETHER {
            let cursor = ring.cursor();
            match ring.take(bus.dma, &mut self.chain) {
                Ok(false) => return Some(Stop::Ended),
                Ok(true) => {}
                Err(error) => return Some(Stop::Failed(error)),
            }
            let Chain { id, slots, readable_bytes, .. } = self.chain;
            let first = group.parts.len();
            let mut request = Request { cursor, id, slots, readable_bytes, parts: first..first };
            if request.length().is_some() {
                for buffer in &self.chain.readable {
                    let (from, length) = (buffer.address, buffer.length as usize);
                    let parts = &mut group.parts;
                    let walked = bus.dma.walk(from, length, Access::READ, |part| {
                        part.part(0, part.len().min(NEAR)).unwrap_or(part).prefetch();
                        parts.push(part);
                    });
                    if walked.is_err() {
                        ring.rewind(cursor);
                        return Some(Stop::Failed(QueueError::Unreachable));
                    }
                }
            }
            request.parts.end = group.parts.len();
            group.requests[group.count] = request;
            group.count += 1;
        }
        None
    }

    /// Sends the frame of a request; an error when it has to be taken again, later.
    fn send(
        &mut self,
        bus: &Bus<'_>,
        request: &Request,
        parts: &mut [DmaSlice<'_>],
        tally: &mut Tally,
        outcome: &mut PollOutcome,
    ) -> Result<(), Stop> {
        if let Err(at) = self.outward.ready(bus.now_ns) {
            count(&self.counters.throttled);
            outcome.wait_until(at);
            return Err(Stop::Ended);
        }
        let accepted = self.transport.accepted();
        let parts = parts.get_mut(request.parts.clone()).unwrap_or_default();
        let (sent, bytes) = send(request.length(), accepted, self.port.get_mut(), parts);
        if sent == Sent::Full {
            outcome.wait_until(bus.now_ns.saturating_add(RETRY_NS));
            return Err(Stop::Ended);
        }
        self.outward.spend(bytes);
        tally.count(bytes as u64, sent == Sent::Done);
        if sent != Sent::Done {
            count(&self.counters.not_sent);
        }
        Ok(())
    }
}

/// Why no more of a queue is sent in this poll.
enum Stop {
    /// There is nothing, or it has to wait.
    Ended,
    Failed(QueueError),
}

/// A request that was taken.
#[derive(Debug, Default, Clone)]
struct Request {
    /// Where the queue was before it.
    cursor: Cursor,
    id: u16,
    slots: u16,
    readable_bytes: u64,
    /// Its memory among that of the group.
    parts: Range<usize>,
}

impl Request {
    /// Bytes of its frame; `None` when no frame is so long.
    fn length(&self) -> Option<usize> {
        let length = self.readable_bytes.saturating_sub(HEADER_SIZE as u64);
        (MIN_FRAME as u64..=MAX_FRAME as u64).contains(&length).then_some(length as usize)
    }
}

/// Requests that were taken together.
#[derive(Default)]
struct Group<'d> {
    requests: [Request; TOGETHER],
    count: usize,
    parts: Vec<DmaSlice<'d>>,
}

/// Sends the frame of a request that lies, behind its header, in `parts`; also how many bytes it has.
fn send(
    length: Option<usize>,
    accepted: u64,
    port: Option<&mut dyn NetworkPort>,
    parts: &mut [DmaSlice<'_>],
) -> (Sent, usize) {
    let Some(length) = length else { return (Sent::Dropped(Cause::Length), 0) };
    let mut header = [0; HEADER_SIZE];
    let (mut read, mut first) = (0, 0);
    for part in &mut *parts {
        let of_header = part.copy_to(&mut header[read..]);
        read += of_header;
        match part.part(of_header, part.len() - of_header) {
            Some(rest) if !rest.is_empty() => {
                *part = rest;
                break;
            }
            _ => first += 1,
        }
    }
    let Some(offload) = offload(&header, accepted, length) else {
        return (Sent::Dropped(Cause::Offload), length);
    };
    let frame = &parts[first..];
    (port.map_or(Sent::Dropped(Cause::Down), |port| port.send(offload, frame)), length)
}

/// What a header leaves to others, if its driver may.
fn offload(header: &[u8; HEADER_SIZE], accepted: u64, length: usize) -> Option<Offload> {
    let mut offload = Offload::read_from_bytes(&header[..OFFLOAD_BYTES]).ok()?;
    offload.flags &= NEEDS_CSUM;
    if offload.flags == 0 {
        (offload.csum_start, offload.csum_offset) = Default::default();
    }
    if offload.gso_type == GSO_NONE {
        (offload.gso_size, offload.hdr_len) = Default::default();
    }
    (offload.is_sound(length) && features::may_send(accepted, &offload)).then_some(offload)
}
