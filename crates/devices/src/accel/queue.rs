//! A queue pair of a function: descriptors in, completions out, both in the tenant's memory.

use std::sync::atomic::Ordering;

use rackbus_memory::{Access, DmaFault};
use rackbus_pci::Bus;
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Descriptor, OperationStatus, queue_state,
};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::ENTRIES;

/// The registers of a queue pair, and what follows from them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueuePair {
    pub submission: u64,
    pub completion: u64,
    pub entries: u32,
    pub vector: u32,
    pub state: u32,
    /// Where it reads next, and how far the tenant said that there is something.
    head: u16,
    tail: u16,
    /// Where it writes next, and how far the tenant said that it has read.
    written: u16,
    read: u16,
    phase: bool,
    /// Descriptors that were read and are not completed; another process counts them anew.
    #[serde(skip)]
    under_way: u16,
    /// Completions were written since the last interrupt.
    pub news: bool,
    /// The next descriptor waits for something, until then at most, in nanoseconds of the engine's clock.
    #[serde(skip)]
    pub waits_until: Option<u64>,
    /// The number of the status with which the next descriptor ends, because a wait before it failed.
    pub in_vain: Option<u16>,
}

impl Default for QueuePair {
    fn default() -> QueuePair {
        QueuePair {
            submission: 0,
            completion: 0,
            entries: 0,
            vector: u32::MAX,
            state: queue_state::OFF,
            head: 0,
            tail: 0,
            written: 0,
            read: 0,
            phase: true,
            under_way: 0,
            news: false,
            waits_until: None,
            in_vain: None,
        }
    }
}

impl QueuePair {
    /// Makes the queue pair, or takes it away. What was under way is completed nowhere.
    pub fn enable(&mut self, on: bool) {
        let QueuePair { submission, completion, entries, vector, .. } = *self;
        let fits = (2..=u32::from(ENTRIES)).contains(&entries)
            && entries.is_power_of_two()
            && submission.is_multiple_of(DESCRIPTOR_SIZE as u64)
            && completion.is_multiple_of(64);
        let state = match (on, fits) {
            (false, _) => queue_state::OFF,
            (true, true) => queue_state::ON,
            (true, false) => queue_state::ERROR,
        };
        *self =
            QueuePair { submission, completion, entries, vector, state, ..QueuePair::default() };
    }

    /// Whether a queue pair that was written down can be.
    pub fn is_possible(&self) -> bool {
        let QueuePair { submission, completion, entries, vector, state, .. } = *self;
        let mut made =
            QueuePair { submission, completion, entries, vector, ..QueuePair::default() };
        made.enable(true);
        let fits = made.is_on();
        match state {
            queue_state::ON => {
                let most = entries as u16;
                fits && [self.head, self.tail, self.written, self.read].iter().all(|at| *at < most)
            }
            queue_state::OFF | queue_state::ERROR => true,
            _ => false,
        }
    }

    /// A descriptor that an earlier life read is under way again; false where no more can be.
    pub fn go_on(&mut self) -> bool {
        let room = self.is_on() && self.under_way < self.mask();
        self.under_way += u16::from(room);
        room
    }

    /// Whether it takes descriptors: it was made, and nothing was wrong since.
    pub fn is_on(&self) -> bool {
        self.state == queue_state::ON
    }

    /// What the tenant's doorbells say. One that is no index ends the queue pair.
    pub fn ring(&mut self, tail: u32, head: u32) {
        if tail >= self.entries || head >= self.entries {
            self.state = queue_state::ERROR;
            return;
        }
        (self.tail, self.read) = (tail as u16, head as u16);
        if self.head == self.tail {
            // What waited was taken back.
            self.waits_until = None;
        }
    }

    /// Whether its next descriptor waits.
    pub fn waits(&self) -> bool {
        self.waits_until.is_some() && self.has_work()
    }

    /// The submission ring's tail and the completion ring's head, as the tenant last said.
    pub fn doorbells(&self) -> (u32, u32) {
        (self.tail.into(), self.read.into())
    }

    /// Whether there is a descriptor that has room for its completion.
    pub fn has_work(&self) -> bool {
        let unread = self.written.wrapping_sub(self.read) & self.mask();
        self.is_on() && self.head != self.tail && unread + self.under_way < self.mask()
    }

    /// The next descriptor, which stays in the ring until it is [taken](QueuePair::take). Nothing, and an end of the
    /// queue pair, where its ring cannot be reached.
    pub fn peek(&mut self, bus: &Bus<'_>) -> Option<Descriptor> {
        if !self.has_work() {
            return None;
        }
        let at = self.submission.wrapping_add(u64::from(self.head) * DESCRIPTOR_SIZE as u64);
        let near = bus.dma.slice_if_mapped(at, DESCRIPTOR_SIZE, Access::READ);
        let read = match near.and_then(|place| place.read_obj(0)) {
            Some(descriptor) => Ok(descriptor),
            None => bus.dma.read_obj(at),
        };
        if read.is_err() {
            self.state = queue_state::ERROR;
        }
        read.ok()
    }

    /// Takes the descriptor that was looked at.
    pub fn take(&mut self) {
        self.head = (self.head + 1) & self.mask();
        self.under_way += 1;
        self.waits_until = None;
    }

    /// Writes the completion of descriptor `id`.
    pub fn complete(
        &mut self,
        bus: &Bus<'_>,
        id: u16,
        status: OperationStatus,
        output: u32,
        value: u32,
    ) {
        if !self.is_on() {
            return;
        }
        let head = self.head;
        let status = (status as u16) << 1 | u16::from(self.phase);
        let completion = Completion { output, value, head, id, status, reserved: 0 };
        if self.put(bus, &completion).is_err() {
            self.state = queue_state::ERROR;
            return;
        }
        self.under_way = self.under_way.saturating_sub(1);
        self.written = (self.written + 1) & self.mask();
        if self.written == 0 {
            self.phase = !self.phase;
        }
        self.news = true;
    }

    /// The half with the phase tag last.
    fn put(&self, bus: &Bus<'_>, completion: &Completion) -> Result<(), DmaFault> {
        let at = self.completion.wrapping_add(u64::from(self.written) * COMPLETION_SIZE as u64);
        let slice = bus.dma.slice(at, COMPLETION_SIZE, Access::WRITE)?;
        let mut halves = [[0; 8]; 2];
        halves.as_mut_bytes().copy_from_slice(completion.as_bytes());
        let [low, high] = halves.map(u64::from_le_bytes);
        // Aligned, for the ring is.
        slice.store_u64(0, low, Ordering::Relaxed);
        slice.store_u64(8, high, Ordering::Release);
        Ok(())
    }

    fn mask(&self) -> u16 {
        (self.entries as u16).wrapping_sub(1)
    }
}
