//! Whether the user of a function is still there, after a time in which this host stalled.
//!
//! A user waits for seconds at most; then it gives the function up, and what was its memory may be
//! somebody else's. A lender that was frozen meanwhile, at any point, must not
//! continue. So a model calls [`UserWatch::before_access`] when it has found work and before it touches
//! memory for it: a look at the processor's counter, and only after a gap one at the conversation.
//! What remains is a freeze between this look and the last access that follows it: for a drive, the
//! commands of one turn of one queue, some microseconds; for an accelerator, a short operation; and what the kernel was asked to do before
//! and does meanwhile. No check of one's own can close that; an IOMMU that the borrower rules could.
//!
//! The look costs a model nothing that can be measured where it waits for memory anyway, if it asks
//! for that memory first.

use std::cell::Cell;
use std::sync::Arc;

use rackbus_memory::{Revoker, Stream, ticks};

use crate::endpoint::Clock;

/// Finds out that a function's user has gone while nobody could tell.
pub struct UserWatch {
    clock: Box<dyn Clock>,
    /// The counter at the last look.
    looked: Cell<u64>,
    /// Knows the user's conversation.
    revoker: Revoker,
}

impl std::fmt::Debug for UserWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UserWatch").field("looked", &self.looked).finish_non_exhaustive()
    }
}

impl UserWatch {
    pub(crate) fn new(clock: Box<dyn Clock>, revoker: Revoker) -> UserWatch {
        UserWatch { looked: Cell::new(clock.ticks()), clock, revoker }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// The function has this user from now on, or none.
    pub(crate) fn is_of(&mut self, conversation: Option<Arc<dyn Stream>>) {
        self.revoker.used_by(conversation);
    }

    /// Something in memory is about to be used or written. If this thread stalled since the
    /// last look, and the user has given the function up meanwhile, all memory is taken away
    /// first: whatever is done with it afterwards reaches nobody. Returns the counter's
    /// [`ticks`](UserWatch::ticks).
    #[inline]
    pub fn before_access(&self) -> u64 {
        let ticks = self.clock.ticks();
        if ticks::is_gap(self.looked.replace(ticks), ticks) {
            self.check();
        }
        ticks
    }

    /// The processor's counter, to measure how long an operation takes.
    #[inline]
    pub fn ticks(&self) -> u64 {
        self.clock.ticks()
    }

    /// Takes all memory away if the user has gone.
    pub(crate) fn check(&self) {
        self.revoker.check_user();
    }
}
