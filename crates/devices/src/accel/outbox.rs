//! How operations that have ended come from the engines' threads to the function's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rackbus_memory::Event;

use super::job::Finished;

/// Where an operation's end is told.
#[derive(Debug)]
pub struct Outbox {
    finished: Mutex<Vec<Finished>>,
    some: AtomicBool,
    asleep: AtomicBool,
    event: Event,
}

impl Outbox {
    /// An empty one.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> std::io::Result<Outbox> {
        let (finished, some, asleep) = Default::default();
        Ok(Outbox { finished, some, asleep, event: Event::new()? })
    }

    /// Rings from now on when something is put in; false when something is in there.
    pub fn sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        !self.some.load(Ordering::SeqCst)
    }

    /// What rings.
    pub fn event(&self) -> &Event {
        &self.event
    }

    /// What has come.
    pub fn take(&self) -> Vec<Finished> {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.event.drain();
        }
        if !self.some.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *self.finished.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts one in.
    pub fn put(&self, finished: Finished) {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner).push(finished);
        self.some.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.event.ring();
        }
    }
}
