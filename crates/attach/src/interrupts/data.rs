//! Interrupts that carry data: a ring for each sender, in memory that both have mapped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_memory::ResourceHandle;
use rackbus_memory::doorbell::Doorbell;
use rackbus_memory::region::RegionError;
use rackbus_memory::ring::Consumer;
use rackbus_segment::Handle;

use super::{InterruptError, Line, RING, after, in_time, shared};

/// An interrupt of this process that carries messages. It ends when it is dropped.
#[derive(Debug)]
pub struct DataInterrupt {
    pub(super) line: Line,
    pub(super) rings: Arc<Rings>,
}

/// The rings of a data interrupt's senders.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(super) bell: Arc<Doorbell>,
    pub(super) state: Mutex<RingsState>,
}

#[derive(Debug, Default)]
pub(super) struct RingsState {
    pub(super) rings: Vec<IncomingData>,
    /// Which ring is looked into first: each in turn.
    pub(super) first: usize,
}

#[derive(Debug)]
pub(super) struct IncomingData {
    pub(super) ring: Handle,
    pub(super) messages: Consumer,
    /// Once the sender is gone, so many messages are the last of it, whatever it puts in later.
    pub(super) left: Option<usize>,
}

impl Rings {
    pub(super) fn lock(&self) -> MutexGuard<'_, RingsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, ring: Handle, memory: &ResourceHandle) -> Result<(), RegionError> {
        let region = shared(memory, RING.bytes().unwrap_or(1))?;
        let Some(messages) = Consumer::new(region, 0, RING) else { return Ok(()) };
        self.lock().rings.push(IncomingData { ring, messages, left: None });
        // It may have sent already.
        self.bell.ring();
        Ok(())
    }

    pub(crate) fn sender_gone(&self, ring: Handle) {
        let mut state = self.lock();
        for incoming in state.rings.iter_mut().filter(|incoming| incoming.ring == ring) {
            incoming.left = Some(incoming.messages.len());
        }
        state.rings.retain(|incoming| incoming.left != Some(0));
    }

    /// Rings of an interrupt that nobody triggers.
    #[cfg(test)]
    pub(crate) fn silent() -> Arc<Rings> {
        use rackbus_memory::doorbell::DOORBELL_BYTES;
        use rackbus_memory::{AsHandle, Event, Handles, SharedMemory};

        let mut handles = Handles::new();
        let line = SharedMemory::create("line", DOORBELL_BYTES as u64).unwrap();
        handles.push(line.as_handle()).unwrap();
        handles.push(Event::new().unwrap().as_handle()).unwrap();
        let bell = super::bell(&mut handles).unwrap();
        Arc::new(Rings { bell: Arc::new(bell), state: Mutex::default() })
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock().rings.len()
    }

    /// The oldest message of the next sender that has one.
    pub(super) fn take(&self, buffer: &mut [u8]) -> Option<usize> {
        let mut state = self.lock();
        state.rings.retain(|incoming| incoming.left != Some(0));
        let count = state.rings.len();
        for nth in 0..count {
            let at = (state.first + nth) % count;
            let incoming = &mut state.rings[at];
            let Some(length) = incoming.messages.pop(buffer) else {
                // What was left of a sender that is gone was rubbish.
                incoming.left = incoming.left.and(Some(0));
                continue;
            };
            if length <= buffer.len() {
                incoming.left = incoming.left.map(|left| left.saturating_sub(1));
                state.first = at + 1;
            }
            return Some(length);
        }
        None
    }
}

impl DataInterrupt {
    /// Its number on this host.
    pub fn number(&self) -> u32 {
        self.line.number
    }

    /// Takes the oldest message of a sender, each sender in turn; its length.
    ///
    /// # Errors
    /// As [`Interrupt::wait`](super::Interrupt::wait), and [`InterruptError::BufferTooShort`].
    pub fn receive(
        &self,
        buffer: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<usize, InterruptError> {
        let deadline = after(timeout);
        loop {
            let seen = self.line.bell.count();
            match self.rings.take(buffer) {
                Some(length) if length <= buffer.len() => return Ok(length),
                Some(length) => return Err(InterruptError::BufferTooShort(length)),
                None => {}
            }
            in_time(deadline)?;
            self.line.wait(seen, deadline)?;
        }
    }

    /// Ends it now; who waits for it is woken.
    pub fn remove(&self) {
        self.line.remove();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rackbus_memory::SharedMemory;
    use rackbus_memory::ring::Producer;
    use rackbus_segment::message::MAX_DATA;

    use super::*;

    fn sender(rings: &Rings, ring: Handle) -> (SharedMemory, Producer) {
        let memory = SharedMemory::create("ring", RING.bytes().unwrap() as u64).unwrap();
        let handle = ResourceHandle::of_descriptor(memory.descriptor().unwrap());
        rings.add(ring, &handle).unwrap();
        let producer = Producer::new(memory.region().clone(), 0, RING).unwrap();
        (memory, producer)
    }

    #[test]
    fn the_ring_of_a_sender_that_wrote_garbage_is_dropped() {
        let rings = Rings::silent();
        let (memory, mut producer) = sender(&rings, Handle(1));
        producer.push(&[1]).unwrap();
        // Behind the indices is the length of the first message.
        memory.whole().store_u32(128, MAX_DATA + 1, Ordering::Relaxed).unwrap();
        rings.sender_gone(Handle(1));
        let mut buffer = [0; 8];
        assert_eq!([rings.take(&mut buffer), rings.take(&mut buffer)], [None; 2]);
        assert_eq!(rings.count(), 0);
    }

    #[test]
    fn a_sender_that_is_gone_sends_nothing_more() {
        let rings = Rings::silent();
        let (_memory, mut producer) = sender(&rings, Handle(1));
        producer.push(&[1]).unwrap();
        producer.push(&[2]).unwrap();
        rings.sender_gone(Handle(1));
        let mut buffer = [0; 8];
        for message in 1..=2 {
            // It has the memory still.
            producer.push(&[3]).unwrap();
            assert_eq!((rings.take(&mut buffer), buffer[0]), (Some(1), message));
        }
        assert_eq!(rings.take(&mut buffer), None);
        assert_eq!(rings.count(), 0);
    }
}
