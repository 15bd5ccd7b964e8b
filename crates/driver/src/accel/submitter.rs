//! Many requests under way, each with data in several places: lists, identifiers and what a request is known
//! by are kept here.

use std::time::Duration;

use rackbus_memory::DmaSlice;
use rackbus_spec::accel::{Completion, Operation, OperationStatus, SEGMENTS, SglEntry};

use super::{Accel, AccelError, AccelInfo, AccelOptions, MessageSpan, MessageWork};

/// Places in the memory for data, one after the other: offset and length of each.
pub type Ranges<'a> = &'a [(usize, usize)];

/// A function in use, by requests.
#[derive(Debug)]
pub struct Submitter {
    accel: Accel,
    queues: Vec<Slots>,
    /// Bytes of memory for data; the lists are behind them.
    data: usize,
    /// Segments of a list at most.
    segments: usize,
}

/// The requests of a queue.
#[derive(Debug)]
struct Slots {
    /// Identifiers that are free.
    free: Vec<u16>,
    /// What the requests under way are known by, and the bytes that each has for its output.
    tokens: Vec<Option<(u64, u32)>>,
}

/// A request that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FinishedRequest {
    /// What it is known by.
    pub token: u64,
    /// The status of its completion, as the interface numbers them.
    pub status: OperationStatus,
    /// How many bytes of output the operation wrote.
    pub output: u32,
    /// Engine time that it took, in nanoseconds.
    pub engine_ns: u32,
}

impl Submitter {
    /// Brings up a function that `start` opens; a message is in `segments` places at most, 1 to 256.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn start(
        options: AccelOptions,
        segments: u16,
        start: impl FnOnce(AccelOptions) -> Result<Accel, AccelError>,
    ) -> Result<Submitter, AccelError> {
        let segments = usize::from(segments);
        if !(1..=SEGMENTS).contains(&segments) {
            return Err(AccelError::Request("a message is in 1 to 256 segments"));
        }
        // A power of two, so that none is across the boundary of a page.
        let segments = segments.next_power_of_two();
        let data = options.data.max(1).next_multiple_of(4096);
        let slots = usize::from(options.queues) * usize::from(options.depth);
        let lists = slots * 2 * segments * size_of::<SglEntry>();
        let accel = start(AccelOptions { data: data + lists, ..options })?;
        let queue = |_| Slots {
            free: (0..options.depth).rev().collect(),
            tokens: vec![None; usize::from(options.depth)],
        };
        Ok(Submitter { accel, queues: (0..options.queues).map(queue).collect(), data, segments })
    }

    /// What the function says of itself.
    pub fn info(&self) -> &AccelInfo {
        self.accel.info()
    }

    /// Bytes of memory for data.
    pub fn data_size(&self) -> usize {
        self.data
    }

    /// The function itself, and how many bytes of its memory for data may be used. Nothing may be under way when it
    /// is used beside requests.
    pub fn parts(&mut self) -> (&mut Accel, usize) {
        (&mut self.accel, self.data)
    }

    /// The memory for data: `length` bytes from `offset` on.
    pub fn data(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        let end = offset.checked_add(length)?;
        if end <= self.data { self.accel.data(offset, length) } else { None }
    }

    /// Puts a request into a queue: `work` on what `input` has, into `output`. The function sees it after
    /// [`ring`](Submitter::ring).
    ///
    /// # Errors
    /// [`AccelError::Full`], and when the request is not one that can be made.
    pub fn submit(
        &mut self,
        queue: usize,
        work: &MessageWork<'_>,
        (input, output): (Ranges<'_>, Ranges<'_>),
        token: u64,
    ) -> Result<(), AccelError> {
        let no_queue = AccelError::Request("there is no such queue");
        let Some(slots) = self.queues.get(queue) else { return Err(no_queue) };
        let Some(id) = slots.free.last().copied() else { return Err(AccelError::Full) };
        let slot = queue * slots.tokens.len() + usize::from(id);
        let input = self.message(2 * slot, input)?;
        let output = self.message(2 * slot + 1, output)?;
        let mut descriptor = Accel::describe_spans(work, input, output)?;
        descriptor.id = id;
        let room = descriptor.output_length;
        self.accel.push(queue, &descriptor)?;
        let slots = &mut self.queues[queue];
        slots.free.pop();
        slots.tokens[usize::from(id)] = Some((token, room));
        Ok(())
    }

    /// A message, with its list in list number `nth` where it needs one.
    fn message(&self, nth: usize, ranges: Ranges<'_>) -> Result<MessageSpan, AccelError> {
        for (offset, length) in ranges {
            if offset.checked_add(*length).is_none_or(|end| end > self.data) {
                return Err(AccelError::Request("a message is not in the memory for data"));
            }
        }
        if ranges.iter().all(|(_, length)| *length == 0) {
            return Ok(MessageSpan { address: 0, segments: 0, length: 0 });
        }
        if let [(offset, length)] = ranges
            && let Ok(span) = self.accel.span(*offset, *length)
        {
            return Ok(span);
        }
        let at = self.data + nth * self.segments * size_of::<SglEntry>();
        self.accel.list((at, self.segments), ranges)
    }

    /// Tells the function of the requests put in since the last time.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn ring(&mut self, queue: usize) -> Result<(), AccelError> {
        self.accel.ring(queue)
    }

    /// The next request of a queue that has ended, if there is one.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn poll(&mut self, queue: usize) -> Result<Option<FinishedRequest>, AccelError> {
        match self.accel.poll(queue)? {
            Some(completion) => self.finished(queue, &completion).map(Some),
            None => Ok(None),
        }
    }

    /// Waits until a request of a queue has ended, for so long at most.
    ///
    /// # Errors
    /// When the connection or the queue failed.
    pub fn wait_for(
        &mut self,
        queue: usize,
        limit: Duration,
    ) -> Result<Option<FinishedRequest>, AccelError> {
        match self.accel.wait_for(queue, limit)? {
            Some(completion) => self.finished(queue, &completion).map(Some),
            None => Ok(None),
        }
    }

    fn finished(&mut self, queue: usize, from: &Completion) -> Result<FinishedRequest, AccelError> {
        let slots = self.queues.get_mut(queue);
        let token = slots.and_then(|slots| {
            let token = slots.tokens.get_mut(usize::from(from.id))?.take()?;
            slots.free.push(from.id);
            Some(token)
        });
        let (token, room) =
            token.ok_or(AccelError::Unsupported("it completed what it was not given"))?;
        // Programs read so many bytes of their memory.
        if from.output > room {
            return Err(AccelError::Unsupported(
                "it says that more came out than there was room for",
            ));
        }
        let status = OperationStatus::from_number(from.status);
        let status =
            status.ok_or(AccelError::Unsupported("it answered with a status that is none"))?;
        Ok(FinishedRequest { token, status, output: from.output, engine_ns: from.value })
    }

    /// Requests of a queue that are under way.
    pub fn under_way(&self, queue: usize) -> usize {
        self.queues.get(queue).map_or(0, |slots| slots.tokens.len() - slots.free.len())
    }

    /// Keeps a key, or patterns, for `operation`; its handle. Nothing else is under way in queue 0.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn create_context(&mut self, operation: Operation, data: &[u8]) -> Result<u16, AccelError> {
        self.accel.create_context(operation, data)
    }

    /// Wipes a context. Nothing else is under way in queue 0.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn destroy_context(&mut self, handle: u16) -> Result<(), AccelError> {
        self.accel.destroy_context(handle)
    }

    /// Does `work` on `input` and waits for it; see [`Accel::run`]. It takes the memory for data.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn run(
        &mut self,
        work: &MessageWork<'_>,
        input: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, AccelError> {
        let needed = input.len().next_multiple_of(64).checked_add(room);
        if needed.is_none_or(|needed| needed > self.data) {
            return Err(AccelError::Request("the message does not fit into the memory for data"));
        }
        self.accel.run(work, input, room)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
    use rackbus_qos::TenantId;

    use super::*;
    use crate::device::stoppable::Stoppable;

    /// What a request wrote is for a program to read in its own memory.
    #[test]
    fn more_output_than_a_request_has_room_for_is_no_completion() {
        let pool = EnginePool::new(PoolOptions::default());
        let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
        let (device, _) = Stoppable::new(Box::new(model));
        let start = |options| Accel::start(Box::new(device), options);
        let mut submitter = Submitter::start(AccelOptions::default(), 16, start).unwrap();
        for (output, is_possible) in [(u32::MAX, false), (65, false), (64, true)] {
            submitter.submit(0, &COPY, (&[(0, 64)], &[(64, 64)]), 7).unwrap();
            let told = Completion { output, ..Completion::default() };
            let ended = submitter.finished(0, &told);
            assert_eq!(ended.is_ok(), is_possible, "{output}: {ended:?}");
        }
    }

    const COPY: MessageWork<'_> =
        MessageWork { stages: &[(Operation::Copy, 0)], nonce: [0; 16], associated: 0 };

    /// The completion of what was given up is not that of what is submitted next, in whichever queue.
    #[test]
    fn what_is_submitted_behind_a_request_that_was_given_up_ends_as_itself() {
        for queue in [0, 1] {
            let pool = EnginePool::new(PoolOptions::default());
            let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
            let (device, stopped) = Stoppable::new(Box::new(model));
            let options = AccelOptions { queues: 2, ..AccelOptions::default() };
            let start = |options| Accel::start(Box::new(device), options);
            let mut submitter = Submitter::start(options, 16, start).unwrap();
            stopped.store(true, Ordering::Relaxed);
            let late = submitter.run(&COPY, &[1; 32], 32);
            assert!(matches!(late, Err(AccelError::Device(_))), "{late:?}");
            let (input, output) = ([(0, 64)], [(64, 64)]);
            let mut submit = |token| submitter.submit(queue, &COPY, (&input, &output), token);
            let refused = submit(7);
            assert!(matches!(refused, Err(AccelError::Request(_))), "{refused:?}");
            stopped.store(false, Ordering::Relaxed);
            let begun = Instant::now();
            while let Err(error) = submit(8) {
                let waits = matches!(error, AccelError::Request(_));
                assert!(waits && begun.elapsed() < Duration::from_secs(10), "{error}");
            }
            submitter.data(0, 64).unwrap().copy_from(&[4; 64]);
            submitter.ring(queue).unwrap();
            let ended = submitter.wait_for(queue, Duration::from_secs(10)).unwrap().unwrap();
            assert_eq!(
                (ended.token, ended.status, ended.output),
                (8, OperationStatus::Success, 64)
            );
            let mut copy = [0; 64];
            submitter.data(64, 64).unwrap().copy_to(&mut copy);
            assert_eq!(copy, [4; 64]);
            assert_eq!(submitter.run(&COPY, b"on", 2).unwrap(), b"on");
        }
    }
}
