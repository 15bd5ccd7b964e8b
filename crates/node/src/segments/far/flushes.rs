//! What was stored here is at the other machine, and where it is told on from there, when a flush has ended.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rackbus_segment::Handle;
use rackbus_segment::flushing::FlushLedger;

use super::{End, Far, FarConversation, FarState, PATIENCE};

impl Far {
    /// Waits until what was triggered by a connection, or stored to memory, is there; false when it is not in time,
    /// or the connection has ended.
    pub fn flush_connection(&self, connection: Handle) -> bool {
        let end = self.lock().ends.get(&(FarConversation::ToOwner, connection)).cloned();
        match end {
            Some(End::Sender(sender)) => sender.flush(PATIENCE),
            Some(End::Memory(_)) => self.flush() && self.has_connection(connection),
            Some(End::Receiver(_)) | None => false,
        }
    }

    /// Waits until what was stored here before has taken effect there, and where it was told on from there; whether it
    /// has in time.
    pub fn flush(&self) -> bool {
        self.has_flushed_within(self.begin_flush(), PATIENCE)
    }

    /// Waits for at most `limit` until a flush has taken effect, also where it is told on; whether it has.
    pub fn has_flushed_within(&self, flush: u64, limit: Duration) -> bool {
        self.has_flushed(flush, Instant::now() + limit, FlushLedger::is_done)
    }

    /// Asks for a flush; its number.
    pub fn begin_flush(&self) -> u64 {
        let mut state = self.lock();
        let flush = state.flushes.want();
        state.now = true;
        self.kick.notify_all();
        flush
    }

    /// Waits for a flush until it is as far as `is_so` says; whether it is in time.
    fn has_flushed(&self, flush: u64, until: Instant, is_so: FlushStage) -> bool {
        let waiting = |it: &mut FarState| !is_so(&it.flushes, flush) && !it.ways.is_empty();
        let limit = until.saturating_duration_since(Instant::now());
        let waited = self.flushed.wait_timeout_while(self.lock(), limit, waiting);
        is_so(&waited.unwrap_or_else(PoisonError::into_inner).0.flushes, flush)
    }
}

/// How far a flush of this number is to be.
type FlushStage = fn(&FlushLedger, u64) -> bool;

/// Flushes at all of them at once, within the time that one has: several that stand still would take longer together
/// than a process waits for its node.
pub fn flush_each(fars: &[Arc<Far>], is_so: FlushStage) -> Vec<bool> {
    let flushes: Vec<u64> = fars.iter().map(|far| far.begin_flush()).collect();
    let until = Instant::now() + PATIENCE;
    let each = fars.iter().zip(flushes);
    each.map(|(far, flush)| far.has_flushed(flush, until, is_so)).collect()
}

/// As [`Far::flush`], at all of them at once.
pub fn flush_all(fars: &[Arc<Far>]) -> bool {
    flush_each(fars, FlushLedger::is_done).into_iter().all(|done| done)
}
