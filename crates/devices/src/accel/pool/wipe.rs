//! Engines' threads wipe what operations left in their own memory: expanded keys on their stacks, and text in the memory
//! between engines, in what is put out, and in the engines that wait for their next operation. It is done when a tenant
//! whose operations they did gives its function back, and not after each operation, which would take longer than a short
//! operation.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::PoolEngines;

/// An engine's thread, as long as it may be asked to wipe its memory.
#[derive(Debug)]
pub(super) struct WipingEngine<'a> {
    pool: &'a PoolEngines,
    number: u32,
}

impl<'a> WipingEngine<'a> {
    /// The engine with this number, in whose memory no operation left anything yet.
    pub(super) fn new(pool: &'a PoolEngines, number: u32) -> WipingEngine<'a> {
        let mut shared = pool.lock();
        let wanted = shared.wipes;
        shared.wiped.insert(number, wanted);
        WipingEngine { pool, number }
    }

    /// It has wiped its memory after it was asked to for the `done`-th time.
    pub(super) fn wiped(&self, done: u64) {
        self.pool.lock().wiped.insert(self.number, done);
        self.pool.wiped.notify_all();
    }
}

impl Drop for WipingEngine<'_> {
    /// The thread ends, and nobody is to wait for it.
    fn drop(&mut self) {
        self.pool.lock().wiped.remove(&self.number);
        self.pool.wiped.notify_all();
    }
}

impl PoolEngines {
    /// Has each engine's thread wipe what operations left in its memory, and waits until all have: the rest of a turn at
    /// most.
    pub fn wipe(&self) {
        let mut shared = self.lock();
        shared.wipes += 1;
        let wanted = shared.wipes;
        self.submitted.fetch_add(1, Ordering::Release);
        self.work.notify_all();
        while !shared.over && shared.wiped.values().any(|done| *done < wanted) {
            shared = self.wiped.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
