//! The registers of a function, by four bytes.

use rackbus_spec::accel::{Operation, queue_state, registers as reg};

use super::super::medium::Medium;
use super::super::{CONTEXTS, ENTRIES, LARGEST, QUEUES};
use super::Front;

impl<M: Medium> Front<M> {
    /// The queue pair and the offset in its registers, or in its doorbells.
    pub(in super::super) fn queue_at(
        &self,
        offset: u64,
        base: u64,
        stride: u64,
    ) -> Option<(usize, u64)> {
        let at = offset.checked_sub(base)?;
        let queue = usize::try_from(at / stride).ok()?;
        (queue < self.queues.len()).then_some((queue, at % stride))
    }

    /// Four bytes of the registers.
    pub(in super::super) fn read4(&self, offset: u64) -> u32 {
        let half = |value: u64, at: u64| (value >> (8 * (offset - at))) as u32;
        let operations = self.medium.operations() | 1 << Operation::Wait as u8;
        match offset {
            reg::MAGIC => reg::MAGIC_VALUE,
            reg::VERSION => reg::VERSION_VALUE,
            reg::QUEUES => QUEUES.into(),
            reg::ENTRIES => ENTRIES.into(),
            reg::CONTEXTS => CONTEXTS.into(),
            reg::LARGEST => LARGEST,
            reg::OPERATIONS..reg::CONTROL => half(operations, reg::OPERATIONS),
            reg::CONTROL | reg::STATUS => self.running.into(),
            reg::SHADOW..0x30 => half(self.shadow, reg::SHADOW),
            reg::DOORBELL.. => {
                let found = self.queue_at(offset, reg::DOORBELL, reg::DOORBELL_STRIDE);
                found.map_or(0, |(queue, at)| {
                    let (tail, head) = self.queues[queue].doorbells();
                    if at == 0 { tail } else { head }
                })
            }
            _ => {
                let found = self.queue_at(offset, reg::QUEUE, reg::QUEUE_STRIDE);
                found.map_or(0, |(queue, at)| {
                    let queue = &self.queues[queue];
                    match at {
                        reg::SUBMISSION..reg::COMPLETION => (queue.submission >> (8 * at)) as u32,
                        reg::COMPLETION..reg::RING_ENTRIES => {
                            (queue.completion >> (8 * (at - reg::COMPLETION))) as u32
                        }
                        reg::RING_ENTRIES => queue.entries,
                        reg::VECTOR => queue.vector,
                        reg::ENABLE => u32::from(queue.state != queue_state::OFF),
                        reg::STATE => queue.state,
                        _ => 0,
                    }
                })
            }
        }
    }

    /// A driver writes four bytes of the registers.
    pub(in super::super) fn write4(&mut self, offset: u64, value: u32) {
        let half = |old: u64, high: bool| match high {
            false => old & !0xffff_ffff | u64::from(value),
            true => old & 0xffff_ffff | u64::from(value) << 32,
        };
        match offset {
            reg::CONTROL if value & 1 == 1 => self.running = true,
            reg::CONTROL => self.stop(),
            reg::SHADOW..0x30 if !self.running => {
                self.shadow = half(self.shadow, offset > reg::SHADOW);
            }
            reg::DOORBELL.. => {
                let found = self.queue_at(offset, reg::DOORBELL, reg::DOORBELL_STRIDE);
                if let Some((queue, at)) = found
                    && self.queues[queue].is_on()
                {
                    let (tail, head) = self.queues[queue].doorbells();
                    let (tail, head) = if at == 0 { (value, head) } else { (tail, value) };
                    self.queues[queue].ring(tail, head);
                }
            }
            _ => {
                let found = self.queue_at(offset, reg::QUEUE, reg::QUEUE_STRIDE);
                let Some((number, at)) = found.filter(|_| self.running) else { return };
                let queue = &mut self.queues[number];
                match at {
                    reg::ENABLE => {
                        queue.enable(value & 1 == 1);
                        self.cancel(|pending| usize::from(pending.queue) == number);
                        self.medium.forget_given_up();
                    }
                    _ if queue.is_on() => {}
                    reg::SUBMISSION..reg::COMPLETION => {
                        queue.submission = half(queue.submission, at > reg::SUBMISSION);
                    }
                    reg::COMPLETION..reg::RING_ENTRIES => {
                        queue.completion = half(queue.completion, at > reg::COMPLETION);
                    }
                    reg::RING_ENTRIES => queue.entries = value,
                    reg::VECTOR => queue.vector = value,
                    _ => {}
                }
            }
        }
    }
}
