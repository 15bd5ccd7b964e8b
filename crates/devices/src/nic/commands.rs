//! The control queue: its commands are taken, carried out by [`control`](super::control), and answered.

use rackbus_memory::DmaSpace;
use rackbus_pci::Bus;
use rackbus_spec::virtio::net::{control, feature};

use super::control::{LONGEST, NicSettings};
use super::function::{Nic, PollOutcome};
use crate::virtio::{DriverFault, QueueError, UsedRequest};

/// Commands in one poll.
const COMMANDS: usize = 8;

impl Nic {
    /// The number of the control queue: behind all others that the driver knows of.
    pub(super) fn control_queue(&self) -> u16 {
        if self.transport.has(feature::MQ) { 2 * self.most_pairs } else { 2 }
    }

    /// Carries out commands of the control queue.
    pub(super) fn control(&mut self, bus: &Bus<'_>) -> PollOutcome {
        let mut outcome = PollOutcome::default();
        let queue = self.control_queue();
        if !self.transport.has(feature::CTRL_VQ) || !self.transport.has_work(queue) {
            return outcome;
        }
        bus.user.before_access();
        for _ in 0..COMMANDS {
            let Some(ring) = self.transport.ring(queue) else { break };
            let cursor = ring.cursor();
            let done = match ring.take(bus.dma, &mut self.chain) {
                Ok(false) => break,
                Ok(true) => self.command(bus.dma),
                Err(error) => Err(error),
            };
            let Some(registers) = self.transport.queue(queue) else { break };
            let Some(ring) = &mut registers.ring else { break };
            if let Err(error) = done {
                ring.rewind(cursor);
                self.stopped(bus, queue, error, &mut outcome);
                break;
            }
            registers.unreachable_since = None;
            ring.complete(&[UsedRequest {
                id: self.chain.id,
                slots: self.chain.slots,
                written: 1,
            }]);
            outcome.done = true;
        }
        self.transport.interrupt(bus.irq, queue);
        outcome
    }

    /// Carries out the command that was taken.
    fn command(&mut self, dma: &DmaSpace) -> Result<(), QueueError> {
        let answer = self.chain.writable.iter().find(|buffer| buffer.length > 0);
        let answer = *answer.ok_or(DriverFault::Header)?;
        let mut said = vec![0; (self.chain.readable_bytes as usize).min(LONGEST)];
        let mut done = 0;
        for buffer in &self.chain.readable {
            let end = said.len().min(done + buffer.length as usize);
            let read = dma.read(buffer.address, &mut said[done..end]);
            read.map_err(|_| QueueError::Unreachable)?;
            done = end;
        }
        let whole = self.chain.readable_bytes <= LONGEST as u64;
        let accepted = self.transport.accepted();
        let NicSettings { announce, pairs, .. } = self.settings;
        let good = whole && self.settings.execute(accepted, self.most_pairs, &said);
        if announce != self.settings.announce {
            self.transport.config_moved();
        }
        if pairs != self.settings.pairs {
            self.without_buffers.fill(None);
        }
        if let Some(cutting) = &mut self.cutting {
            // Nothing more comes to a pair that is not used.
            cutting.pair %= self.settings.pairs;
        }
        let value = if good { control::OK } else { control::ERROR };
        dma.write(answer.address, &[value]).map_err(|_| QueueError::Unreachable)
    }
}
