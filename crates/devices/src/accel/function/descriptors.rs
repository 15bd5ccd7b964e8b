//! From a descriptor in a ring to an operation before the engines.

use rackbus_memory::ticks;
use rackbus_pci::Bus;
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus};

use super::super::medium::{Medium, OperationOrder, RefusedDescriptor, SubmitOutcome};
use super::super::request::check;
use super::super::waiting::{self, NextDescriptor};
use super::{Front, PendingOperation, count};

/// Descriptors that are taken from a queue at once, so that one does not keep the others waiting.
const BATCH: usize = 64;

/// What became of a descriptor.
pub(in super::super) enum DescriptorOutcome {
    /// It is under way.
    UnderWay,
    /// It is completed; the processor's counter when its operation ended.
    Ended(u64),
    /// Nothing was under way of it; what its completion, which is not written, has as its value.
    Over(u32),
}

impl<M: Medium> Front<M> {
    /// Takes descriptors from a queue.
    pub(super) fn take(&mut self, bus: &Bus<'_>, number: u16) -> bool {
        let mut some = false;
        let mut looked = ticks::now();
        for _ in 0..BATCH.min(self.medium.room(self.pending.len())) {
            let queue = &mut self.queues[usize::from(number)];
            let Some(descriptor) = queue.peek(bus) else { break };
            let creates = descriptor.stages[0] == Operation::CreateContext as u8;
            let over = match waiting::look(bus, queue, &descriptor) {
                NextDescriptor::NotYet => break,
                NextDescriptor::Begin if creates && !self.medium.may_create() => {
                    // What is behind it may need it, and waits too.
                    queue.waits_until = Some(bus.now_ns);
                    break;
                }
                NextDescriptor::Over(Ok(())) => DescriptorOutcome::Over(0),
                // It costs what one costs that is refused.
                NextDescriptor::Over(Err(status)) => {
                    let refused = RefusedDescriptor { number: self.medium.number(), begun: looked };
                    self.refuse(bus, (number, &descriptor), refused, status)
                }
                NextDescriptor::Begin => {
                    queue.take();
                    self.begin(bus, (number, &descriptor), looked)
                }
            };
            some = true;
            // What ended here ended when the next one is looked at: the counter takes as long as a short operation.
            looked = match &over {
                DescriptorOutcome::Ended(ended) => *ended,
                _ => ticks::now(),
            };
            if let DescriptorOutcome::Over(value) = over {
                count(&self.operations, descriptor.stages[0], 0, true, [0; 2]);
                self.complete(bus, number, descriptor.id, OperationStatus::Success, 0, value);
            }
            // Patterns may take long to compile, and who takes the function back waits for that.
            if creates {
                self.created = true;
                break;
            }
        }
        self.medium.submit(number);
        some
    }

    /// Begins what a descriptor asks for, or has it refused. It was taken up at `taken` by the processor's counter.
    fn begin(
        &mut self,
        bus: &Bus<'_>,
        (queue, from): (u16, &Descriptor),
        taken: u64,
    ) -> DescriptorOutcome {
        let number = self.medium.number();
        let outcome = check(from).and_then(|plan| {
            let order = OperationOrder { number, queue, descriptor: from, plan: &plan };
            self.medium.begin(bus.dma, &order, taken)
        });
        match outcome {
            Ok(begun) => self.note(bus, number, (queue, from), begun),
            Err(status) => {
                let refused = RefusedDescriptor { number, begun: taken };
                self.refuse(bus, (queue, from), refused, status)
            }
        }
    }

    /// Ends with `status` what is refused, in the turn of its tenant.
    fn refuse(
        &mut self,
        bus: &Bus<'_>,
        from: (u16, &Descriptor),
        refused: RefusedDescriptor,
        status: OperationStatus,
    ) -> DescriptorOutcome {
        let number = refused.number;
        let refused = self.medium.refuse(refused, status);
        self.note(bus, number, from, refused)
    }

    /// Keeps what is under way of a descriptor, or completes it.
    pub(in super::super) fn note(
        &mut self,
        bus: &Bus<'_>,
        number: u64,
        (queue, descriptor): (u16, &Descriptor),
        begun: SubmitOutcome<M::Work>,
    ) -> DescriptorOutcome {
        match begun {
            SubmitOutcome::Work(work) => {
                let (descriptor, begun) = (*descriptor, bus.user.ticks());
                let pending = PendingOperation { queue, descriptor, work, begun };
                self.pending.insert(number, pending);
                DescriptorOutcome::UnderWay
            }
            SubmitOutcome::Ended(finished, time) => {
                self.end(bus, (queue, descriptor), finished, time);
                DescriptorOutcome::Ended(time[1])
            }
            SubmitOutcome::Over(value) => DescriptorOutcome::Over(value),
        }
    }
}
