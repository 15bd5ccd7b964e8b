//! Whole requests: descriptors for them, messages through the memory for data, contexts.

use std::time::{Duration, Instant};

use rackbus_spec::accel::{
    Completion, Condition, Descriptor, LONGEST_WAIT, Operation, OperationStatus, SEGMENTS, STAGES,
};
use zerocopy::transmute;

use super::layout::CONTEXT;
use super::{Accel, AccelError, LOOK, MessageSpan, MessageWork, layout};
use crate::DriveError;

impl Accel {
    /// A descriptor for `work` on data at offset `input` with room for output at offset `output`.
    ///
    /// # Errors
    /// As [`span`](Accel::span).
    pub fn describe(
        &self,
        work: &MessageWork<'_>,
        (input, input_length): (usize, usize),
        (output, output_length): (usize, usize),
    ) -> Result<Descriptor, AccelError> {
        let (input, output) = (self.span(input, input_length)?, self.span(output, output_length)?);
        Accel::describe_spans(work, input, output)
    }

    /// A descriptor for `work` on a message, with room for its output.
    ///
    /// # Errors
    /// When there are too many operations.
    pub fn describe_spans(
        work: &MessageWork<'_>,
        input: MessageSpan,
        output: MessageSpan,
    ) -> Result<Descriptor, AccelError> {
        if work.stages.len() > STAGES {
            return Err(AccelError::Request("a pipeline has 1 to 4 stages"));
        }
        let mut descriptor = Descriptor {
            associated: work.associated,
            input: input.address,
            input_segments: input.segments,
            input_length: input.length,
            output: output.address,
            output_segments: output.segments,
            output_length: output.length,
            nonce: work.nonce,
            ..Descriptor::default()
        };
        for (nth, (operation, context)) in work.stages.iter().enumerate() {
            (descriptor.stages[nth], descriptor.contexts[nth]) = (*operation as u8, *context);
        }
        Ok(descriptor)
    }

    /// A descriptor that waits, for up to `limit` (a minute at most), until the word at `address` is as `condition`
    /// says. What is behind it in the queue is not begun before; the next one ends with it when the wait fails.
    pub fn describe_wait(address: u64, condition: Condition, limit: Duration) -> Descriptor {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        Descriptor {
            stages: [Operation::Wait as u8, 0, 0, 0],
            input: address,
            input_length: 4,
            associated: limit.clamp(1, LONGEST_WAIT),
            nonce: transmute!(condition),
            ..Descriptor::default()
        }
    }

    /// Does `work` on `input` and waits for it. `room` is how many bytes may come out.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn run(
        &mut self,
        work: &MessageWork<'_>,
        input: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, AccelError> {
        self.check_idle()?;
        let output = input.len().next_multiple_of(64);
        let spans = (self.message(false, 0, input.len())?, self.message(true, output, room)?);
        let descriptor = Accel::describe_spans(work, spans.0, spans.1)?;
        if let Some(to) = self.data(0, input.len()) {
            to.copy_from(input);
        }
        let completion = self.finish(work, &descriptor);
        let written = completion.as_ref().map_or(0, |completion| completion.output as usize);
        let mut result = vec![0; written.min(room)];
        if let Some(from) = self.data(output, result.len()) {
            from.copy_to(&mut result);
        }
        // No message stays in memory that is used again, also of one that failed.
        let out = if completion.is_ok() { result.len() } else { room };
        for (at, length) in [(0, input.len()), (output, out)] {
            if let Some(used) = self.data(at, length) {
                used.fill(0);
            }
        }
        completion.map(|_| result)
    }

    /// A range of the memory for data, in however many pieces it is; one input and one output at a time.
    fn message(
        &self,
        output: bool,
        offset: usize,
        length: usize,
    ) -> Result<MessageSpan, AccelError> {
        let at = self.data_offset(offset, length)?;
        match self.addresses.at(at) {
            Some((_, run)) if run < length => {
                let list = self.layout.list(output);
                layout::list(
                    &self.memory,
                    &self.addresses,
                    (list, SEGMENTS),
                    [(at, length)].into_iter(),
                )
            }
            _ => layout::span(&self.addresses, at, length),
        }
    }

    /// Keeps a key, or patterns, for `operation`; its handle.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn create_context(&mut self, operation: Operation, data: &[u8]) -> Result<u16, AccelError> {
        self.check_idle()?;
        let stages = [(Operation::CreateContext, 0), (operation, 0)];
        let work = MessageWork { stages: &stages, ..MessageWork::default() };
        let at = self.layout.context;
        let room =
            if data.len() <= CONTEXT { self.memory.whole().part(at, data.len()) } else { None };
        let room = room.ok_or(AccelError::Request("a context is made of up to 16 KiB"))?;
        room.copy_from(data);
        let input = layout::span(&self.addresses, at, data.len())?;
        let none = MessageSpan { address: 0, segments: 0, length: 0 };
        let descriptor = Accel::describe_spans(&work, input, none)?;
        let completion = self.finish(&work, &descriptor);
        if let Some(used) = self.memory.whole().part(at, data.len()) {
            used.fill(0);
        }
        u16::try_from(completion?.value)
            .map_err(|_| AccelError::Unsupported("it answered with a handle that is none"))
    }

    /// Has the function wipe a context, with its key or patterns.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn destroy_context(&mut self, handle: u16) -> Result<(), AccelError> {
        let stages = [(Operation::DestroyContext, handle)];
        let work = MessageWork { stages: &stages, ..MessageWork::default() };
        let descriptor = self.describe(&work, (0, 0), (0, 0))?;
        self.finish(&work, &descriptor).map(drop)
    }

    /// What is under way in a queue was given up: its completions are forgotten when they come. Their identifiers say
    /// nothing of whose they are, so nothing else is under way until then.
    pub(super) fn give_up(&mut self, queue: usize) {
        let Some(ring) = self.queues.get_mut(queue) else { return };
        ring.given_up = ring.under_way > 0;
        self.late |= ring.given_up;
    }

    /// Forgets what has ended of what was given up.
    #[cold]
    pub(super) fn forget(&mut self) {
        self.device.progress();
        for ring in &mut self.queues {
            ring.take_given_up(&self.memory);
        }
        self.late = self.queues.iter().any(|ring| ring.given_up);
    }

    /// Refuses what is new as long as something that was given up is under way.
    #[inline]
    pub(super) fn check_late(&mut self) -> Result<(), AccelError> {
        if self.late {
            self.forget();
        }
        match self.late {
            true => self.look_at_given_up(),
            false => Ok(()),
        }
    }

    /// Of what was given up, nothing ever ends when the function is gone: then that is said, and not to try again.
    #[cold]
    fn look_at_given_up(&mut self) -> Result<(), AccelError> {
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            self.looked = Some(Instant::now());
            for queue in 0..self.queues.len() {
                if !self.queues[queue].given_up {
                    continue;
                }
                match self.look(queue) {
                    // Whoever did not answer in time is not known to be gone.
                    Ok(()) | Err(AccelError::Device(DriveError::TimedOut(_))) => {}
                    Err(error) => {
                        self.looked = None;
                        return Err(error);
                    }
                }
            }
        }
        Err(AccelError::Request("a request that was given up is still under way"))
    }

    /// A whole request waits for the next completion, which has to be its own, and uses memory for data that a descriptor
    /// under way may still read or write. A former request's descriptor may have ended meanwhile.
    pub(super) fn check_idle(&mut self) -> Result<(), AccelError> {
        self.check_late()?;
        match self.under_way(0) {
            0 => Ok(()),
            _ => Err(AccelError::Request("the queue has other descriptors under way")),
        }
    }

    fn finish(
        &mut self,
        work: &MessageWork<'_>,
        from: &Descriptor,
    ) -> Result<Completion, AccelError> {
        self.check_idle()?;
        self.push(0, from)?;
        let completion = self.ring(0).and_then(|()| self.wait(0));
        // Nothing is under way, unless that failed.
        self.give_up(0);
        let completion = completion?;
        match OperationStatus::from_number(completion.status) {
            Some(OperationStatus::Success) => Ok(completion),
            Some(status) => {
                let operation = work.stages.first().map_or("nothing", |stage| stage.0.name());
                Err(AccelError::Operation { operation, status })
            }
            None => Err(AccelError::Unsupported("it answered with a status that is none")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
    use rackbus_qos::TenantId;

    use super::super::AccelOptions;
    use super::*;
    use crate::device::stoppable::Stoppable;

    #[test]
    fn requests_are_possible_again_when_one_that_was_given_up_has_ended() {
        let pool = EnginePool::new(PoolOptions::default());
        let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
        let (device, stopped) = Stoppable::new(Box::new(model));
        let mut accel = Accel::start(Box::new(device), AccelOptions::default()).unwrap();
        let work = MessageWork { stages: &[(Operation::Copy, 0)], ..MessageWork::default() };
        stopped.store(true, Ordering::Relaxed);
        let late = accel.run(&work, &[1; 64], 64);
        assert!(matches!(late, Err(AccelError::Device(_))), "{late:?}");
        for refused in [
            accel.run(&work, &[2; 64], 64).map(drop),
            accel.create_context(Operation::Aes256Ctr, &[3; 32]).map(drop),
        ] {
            assert!(matches!(refused, Err(AccelError::Request(_))), "{refused:?}");
        }
        let mut input = [9; 64];
        accel.data(0, 64).unwrap().copy_to(&mut input);
        assert_eq!(input, [0; 64], "memory of a descriptor under way was written");
        stopped.store(false, Ordering::Relaxed);
        let begun = Instant::now();
        loop {
            match accel.run(&work, &[4; 64], 64) {
                Ok(copy) => return assert_eq!(copy, [4; 64]),
                Err(AccelError::Request(_)) if begun.elapsed() < Duration::from_secs(10) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}
