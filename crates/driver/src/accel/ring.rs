//! A queue pair as the driver sees it: where it is in the shared memory, and how far each side came.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::SharedMemory;
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Descriptor, queue_state, registers as reg, shadow,
};

use super::AccelError;
use super::registers::{read4, settled, write4};
use crate::device::{DmaAddresses, DrivenFunction};

#[derive(Debug)]
pub struct AccelRing {
    pub number: u16,
    /// Offsets of the two rings in the shared memory.
    pub submission: usize,
    pub completion: usize,
    pub entries: u32,
    pub depth: u32,
    /// Where the next descriptor goes, and how far the function was told.
    pub tail: u32,
    rung: u32,
    head: u32,
    /// How far the function was told that completions were taken.
    told: u32,
    phase: bool,
    pub under_way: u32,
    /// What is under way was given up by who waited for it: its completions are nobody's.
    pub given_up: bool,
    /// The interrupt of its completions: all ones for none.
    pub vector: u32,
}

impl AccelRing {
    pub fn new(number: u16, (submission, completion): (usize, usize), depth: u16) -> AccelRing {
        AccelRing {
            number,
            submission,
            completion,
            entries: entries(depth),
            depth: depth.into(),
            tail: 0,
            rung: 0,
            head: 0,
            told: 0,
            phase: true,
            under_way: 0,
            given_up: false,
            vector: u32::MAX,
        }
    }

    /// Makes the queue pair in the function.
    pub fn make(
        &self,
        device: &mut dyn DrivenFunction,
        addresses: &DmaAddresses,
    ) -> Result<(), AccelError> {
        let base = reg::QUEUE + u64::from(self.number) * reg::QUEUE_STRIDE;
        for (register, offset, entry) in [
            (reg::SUBMISSION, self.submission, DESCRIPTOR_SIZE),
            (reg::COMPLETION, self.completion, COMPLETION_SIZE),
        ] {
            let whole = self.entries as usize * entry;
            let at = addresses.at(offset).filter(|(_, length)| *length >= whole);
            let (address, _) = at.ok_or(AccelError::Unsupported("a ring is not in one piece"))?;
            device.write(base + register, &address.to_le_bytes())?;
        }
        write4(device, base + reg::RING_ENTRIES, self.entries)?;
        write4(device, base + reg::VECTOR, self.vector)?;
        write4(device, base + reg::ENABLE, 1)?;
        match settled(device, base + reg::STATE, |state| state != queue_state::OFF)? {
            queue_state::ON => Ok(()),
            _ => Err(AccelError::Unsupported("it refuses the queue pair")),
        }
    }

    /// The function's word about the queue pair.
    pub fn state(&self, device: &mut dyn DrivenFunction) -> Result<u32, AccelError> {
        let base = reg::QUEUE + u64::from(self.number) * reg::QUEUE_STRIDE;
        read4(device, base + reg::STATE)
    }

    #[inline]
    pub fn push(&mut self, memory: &SharedMemory, descriptor: &Descriptor) {
        let at = self.submission + self.tail as usize * DESCRIPTOR_SIZE;
        memory.whole().write_obj(at, descriptor);
        self.tail = (self.tail + 1) & (self.entries - 1);
        self.under_way += 1;
    }

    /// Tells the function of what was put in, and of the completions that were taken before: it needs to know of these
    /// when there is something new for it, since all that was put in before has room for its completion.
    #[inline]
    pub fn ring(
        &mut self,
        memory: &SharedMemory,
        device: &mut dyn DrivenFunction,
    ) -> Result<(), AccelError> {
        if self.tail == self.rung {
            return Ok(());
        }
        let taken = self.told != self.head;
        (self.rung, self.told) = (self.tail, self.head);
        let shared = memory.whole();
        if taken {
            shared.store_u32(self.doorbells() + 4, self.head, Ordering::Relaxed);
        }
        shared.store_u32(self.doorbells(), self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        if shared.load_u32(shadow::ASLEEP, Ordering::Relaxed) == Some(1) {
            let register = reg::DOORBELL + u64::from(self.number) * reg::DOORBELL_STRIDE;
            if taken {
                device.write(register + 4, &self.head.to_le_bytes())?;
            }
            device.write(register, &self.tail.to_le_bytes())?;
        }
        Ok(())
    }

    /// Whether there is a completion.
    #[inline]
    pub fn some(&self, memory: &SharedMemory) -> bool {
        (self.high(memory) >> 32 & 1 != 0) == self.phase
    }

    /// The half of the next completion that was written last, with the phase tag.
    #[inline]
    fn high(&self, memory: &SharedMemory) -> u64 {
        let at = self.completion + self.head as usize * COMPLETION_SIZE;
        memory.whole().load_u64(at + 8, Ordering::Acquire).unwrap_or(0)
    }

    /// Takes the next completion, if there is one.
    #[inline]
    pub fn take(&mut self, memory: &SharedMemory) -> Option<Completion> {
        let high = self.high(memory);
        if (high >> 32 & 1 != 0) != self.phase {
            return None;
        }
        let at = self.completion + self.head as usize * COMPLETION_SIZE;
        let low = memory.whole().load_u64(at, Ordering::Relaxed).unwrap_or(0);
        self.head = (self.head + 1) & (self.entries - 1);
        if self.head == 0 {
            self.phase = !self.phase;
        }
        self.under_way = self.under_way.saturating_sub(1);
        Some(Completion {
            output: low as u32,
            value: (low >> 32) as u32,
            head: high as u16,
            id: (high >> 16) as u16,
            status: (high >> 32) as u16 >> 1,
            reserved: 0,
        })
    }

    /// Takes the completions that there are of what was given up, for nobody.
    pub fn take_given_up(&mut self, memory: &SharedMemory) {
        while self.given_up && self.take(memory).is_some() {
            self.given_up = self.under_way > 0;
        }
    }

    /// Says whether the driver polls, or wants interrupts from now on.
    pub fn polls(&self, memory: &SharedMemory, polls: bool) {
        let at = self.doorbells() + shadow::POLLS;
        memory.whole().store_u32(at, polls.into(), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn doorbells(&self) -> usize {
        shadow::DOORBELL + usize::from(self.number) * shadow::STRIDE
    }
}

/// Entries of rings for `depth` descriptors under way: one stays free.
pub fn entries(depth: u16) -> u32 {
    (u32::from(depth) + 1).next_power_of_two()
}
