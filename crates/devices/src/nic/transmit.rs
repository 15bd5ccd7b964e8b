//! Frames from the driver's buffers to the port.

use rackbus_memory::{Access, DmaSlice, DmaSpace};
use rackbus_net::offload::{GSO_NONE, NEEDS_CSUM, OFFLOAD_BYTES};
use rackbus_net::port::{MAX_FRAME, MIN_FRAME};
use rackbus_net::{Cause, NetworkPort, Offload, SendOutcome};
use rackbus_pci::Bus;
use rackbus_pci::operations::Tally;
use rackbus_spec::virtio::net::HEADER_SIZE;
use zerocopy::FromBytes;

use super::counters::count;
use super::features;
use super::function::{Nic, PollOutcome, TRANSMIT};
use crate::virtio::{BufferChain, QueueError, UsedRequest};

/// Frames of a queue in one poll.
const BURST: usize = 64;
/// A receiver without room rings when it has some, and never if it is stopped: then its frames are to be dropped.
const RETRY_NS: u64 = 1_000_000;

impl Nic {
    /// Sends what the transmit queues hold, a bounded number from each.
    pub(super) fn transmit(&mut self, bus: &Bus<'_>) -> PollOutcome {
        let mut outcome = PollOutcome::default();
        let pairs = self.sending_pairs();
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
        let mut parts = Vec::new();
        // They are completed together: each store to the queue's memory takes a cache line from the driver.
        let (mut used, mut done) = ([UsedRequest::default(); BURST], 0);
        let mut failed = None;
        while done < BURST {
            if let Err(at) = self.outward.ready(bus.now_ns) {
                count(&self.counters.throttled);
                outcome.wait_until(at);
                break;
            }
            let accepted = self.transport.accepted();
            let Some(queue_registers) = self.transport.queue(queue) else { break };
            let Some(ring) = &mut queue_registers.ring else { break };
            let cursor = ring.cursor();
            let sent = match ring.take(bus.dma, &mut self.chain) {
                Ok(false) => {
                    queue_registers.unreachable_since = None;
                    break;
                }
                Ok(true) => send(bus.dma, &self.chain, accepted, self.port.get_mut(), &mut parts),
                Err(error) => Err(error),
            };
            parts.clear();
            match sent {
                Ok((SendOutcome::Full, _)) => {
                    ring.rewind(cursor);
                    queue_registers.unreachable_since = None;
                    outcome.wait_until(bus.now_ns.saturating_add(RETRY_NS));
                    break;
                }
                Ok((sent, bytes)) => {
                    let BufferChain { id, slots, .. } = self.chain;
                    used[done] = UsedRequest { id, slots, written: 0 };
                    done += 1;
                    queue_registers.unreachable_since = None;
                    self.outward.spend(bytes);
                    tally.count(bytes as u64, sent == SendOutcome::Done);
                    if sent != SendOutcome::Done {
                        count(&self.counters.not_sent);
                    }
                }
                Err(error) => {
                    ring.rewind(cursor);
                    failed = Some(error);
                    break;
                }
            }
        }
        if done > 0
            && let Some(ring) = self.transport.queue(queue).and_then(|it| it.ring.as_mut())
        {
            ring.complete(&used[..done]);
        }
        if let Some(error) = failed {
            self.stopped(bus, queue, error, outcome);
        }
        outcome.done |= tally.done > 0;
        self.transport.interrupt(bus.irq, queue);
        self.tally(TRANSMIT, tally, bus.user.ticks().saturating_sub(begun));
    }
}

/// Sends the frame of a request; also how many bytes it has.
fn send<'d>(
    dma: &'d DmaSpace,
    chain: &BufferChain,
    accepted: u64,
    port: Option<&mut dyn NetworkPort>,
    parts: &mut Vec<DmaSlice<'d>>,
) -> Result<(SendOutcome, usize), QueueError> {
    let length = chain.readable_bytes.saturating_sub(HEADER_SIZE as u64);
    if length < MIN_FRAME as u64 || length > MAX_FRAME as u64 {
        return Ok((SendOutcome::Dropped(Cause::Length), 0));
    }
    let length = length as usize;
    let mut header = [0; HEADER_SIZE];
    let mut read = 0;
    for buffer in &chain.readable {
        let walked = dma.walk(buffer.address, buffer.length as usize, Access::READ, |part| {
            let of_header = part.copy_to(&mut header[read..]);
            read += of_header;
            let rest = part.part(of_header, part.len() - of_header);
            parts.extend(rest.filter(|rest| !rest.is_empty()));
        });
        walked.map_err(|_| QueueError::Unreachable)?;
    }
    let Some(offload) = offload(&header, accepted, length) else {
        return Ok((SendOutcome::Dropped(Cause::Offload), length));
    };
    Ok((port.map_or(SendOutcome::Dropped(Cause::Down), |port| port.send(offload, parts)), length))
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
