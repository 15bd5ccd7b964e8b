//! How operations that have ended come from the engines' threads to the function's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rackbus_memory::Event;

use super::job::FinishedJob;

/// Where engines put completed operations, for the function's thread to take.
#[derive(Debug)]
pub struct CompletionOutbox {
    finished: Mutex<Vec<FinishedJob>>,
    some: AtomicBool,
    asleep: AtomicBool,
    event: Event,
}

impl CompletionOutbox {
    /// An outbox without completions.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> std::io::Result<CompletionOutbox> {
        let (finished, some, asleep) = Default::default();
        Ok(CompletionOutbox { finished, some, asleep, event: Event::new()? })
    }

    /// Rings from now on when something is put in; false when something is in there.
    pub fn sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        !self.some.load(Ordering::SeqCst)
    }

    /// The event that rings when something comes while its reader sleeps.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Takes all that has come, and goes on without sleeping.
    pub fn take(&self) -> Vec<FinishedJob> {
        // Only this thread says that it sleeps.
        if self.asleep.load(Ordering::Relaxed) {
            self.asleep.store(false, Ordering::SeqCst);
            self.event.drain();
        }
        // What is put in later is seen the next time.
        if !self.some.load(Ordering::Relaxed) || !self.some.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *self.finished.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts operations' ends in, and wakes their reader if it sleeps.
    pub fn put(&self, finished: impl IntoIterator<Item = FinishedJob>) {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner).extend(finished);
        self.some.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.event.ring();
        }
    }
}
