//! No data at all: what the protocol costs by itself.

use rackbus_memory::DmaSlice;
use rackbus_pci::Health;

use super::{Background, Backing, InlineResult, MediumRequest};

/// Accepts everything, moves nothing: a read leaves the host's buffer as it was.
#[derive(Debug)]
pub struct NullBacking {
    capacity: u64,
    /// Of the drive's persistent memory region.
    health: Health,
}

impl NullBacking {
    /// One that pretends to hold `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        NullBacking { capacity, health: Health::default() }
    }
}

impl Backing for NullBacking {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    fn volatile_cache(&self) -> bool {
        false
    }

    fn attempt(&mut self, _request: &MediumRequest<&[DmaSlice<'_>]>) -> InlineResult {
        InlineResult::Done(Ok(()))
    }

    fn background(&mut self) -> Option<&mut dyn Background> {
        None
    }
}
