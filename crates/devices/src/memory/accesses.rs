//! Accesses to memory that come to a function one by one, counted.
//!
//! Loads and stores of a user that has mapped the memory are the processor's: nobody sees them, and to count them would
//! cost more than they do. What is counted has been a message to the function's engine already.

use rackbus_memory::ticks;
use rackbus_pci::Operations;
use rackbus_pci::operations::Tally;

/// The kinds of accesses, in the order of [`AccessKind`].
const NAMES: [&str; 2] = ["read", "write"];

/// What an access does with memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum AccessKind {
    /// A load from a BAR that traps, or is asked of another machine.
    Read,
    /// A store to a BAR that traps, or is sent to another machine.
    Write,
}

/// How many accesses came, how many bytes they moved and how long they took.
#[derive(Debug)]
pub(super) struct AccessCounts(Operations);

impl Default for AccessCounts {
    fn default() -> AccessCounts {
        AccessCounts(Operations::new(&NAMES))
    }
}

impl AccessCounts {
    /// What is read by others.
    pub fn operations(&self) -> Operations {
        self.0.clone()
    }

    /// An access to so many bytes has ended, which began at `begun` by the processor's counter.
    pub fn count(&self, kind: AccessKind, bytes: usize, succeeded: bool, begun: u64) {
        let mut tally = Tally::default();
        tally.count(bytes as u64, succeeded);
        self.0.add(kind as usize, tally, ticks::now().saturating_sub(begun));
    }
}
