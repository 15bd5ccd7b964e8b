//! Requests that wait for functions which others have, until it is their turn.

use std::sync::{Arc, MutexGuard, PoisonError};

use rackbus_lease::{Availability, BorrowRefused, FunctionId, Priority, QueuePlace, WaitingQueue};
use tokio::time::Instant;

use super::WriterShared;
use super::writer::QueueStanding;

/// Whether a request that waits goes on waiting: the function is there, and others have it or come
/// first.
pub(super) fn is_busy(refused: &BorrowRefused) -> bool {
    matches!(
        refused,
        BorrowRefused::Held { .. }
            | BorrowRefused::Returning { .. }
            | BorrowRefused::Queued { .. }
            | BorrowRefused::Shared { .. }
    )
}

/// A place in the queue for some functions, which is left when this is dropped.
pub(super) struct Turn {
    shared: Arc<WriterShared>,
    functions: Vec<FunctionId>,
    place: QueuePlace,
}

impl Turn {
    /// Waits for all of `functions` from now on.
    pub fn enter(shared: &Arc<WriterShared>, functions: &[FunctionId], priority: Priority) -> Turn {
        let place = shared.queue().enter(functions, priority);
        Turn { shared: shared.clone(), functions: functions.to_vec(), place }
    }

    /// Who the writer is asked by.
    pub fn asker(&self) -> QueueStanding {
        QueueStanding::Waits(self.place)
    }

    /// Waits until all functions are available and nobody comes first, or one of them is not there any more: the writer says
    /// what follows. False when neither is so until `until`. Nobody is asked meanwhile: those who wait cost the writer
    /// nothing.
    pub async fn come(&self, until: Instant) -> bool {
        let come = self.shared.wait(until, |known| {
            let queue = self.shared.queue();
            let mine = |function: &FunctionId| {
                let record = known.functions.get(function);
                record.is_some_and(|record| record.state == Availability::Offered)
                    && queue.before(function, self.place) == 0
                    && known.ring(function).next().is_none()
            };
            let gone = |function: &FunctionId| {
                let state = known.functions.get(function).map(|record| &record.state);
                state.is_none_or(|state| *state == Availability::Withdrawn)
            };
            (self.functions.iter().all(mine) || self.functions.iter().any(gone)).then_some(())
        });
        come.await.is_some()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.shared.queue().leave(&self.functions, self.place);
        // Who comes next may have waited for this.
        self.shared.steps.send_modify(|step| *step = step.wrapping_add(1));
    }
}

impl WriterShared {
    /// Locked for moments only, after what is known where both are.
    pub(super) fn queue(&self) -> MutexGuard<'_, WaitingQueue> {
        // It is changed in whole steps.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
