//! Memory for the bytes of copies that go to another machine. A part of a long copy has up to 1 MiB: taken anew for each, the
//! system would have to clear as many pages and to map them one by one, which takes longer than to copy the bytes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_segment::coherence::{Batch, MOST_UNDER_WAY};

/// As many are kept as may be under way, and one that is filled meanwhile.
const MOST_KEPT: usize = MOST_UNDER_WAY + 1;

/// Memory that waits for the next copies, of one host's.
#[derive(Debug, Default)]
pub(super) struct CopyBuffers(Mutex<KeptBuffers>);

#[derive(Debug, Default)]
struct KeptBuffers {
    buffers: Vec<Vec<u8>>,
    /// When the last of them was kept.
    since: Option<Instant>,
}

impl CopyBuffers {
    fn lock(&self) -> MutexGuard<'_, KeptBuffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of `length` bytes for a copy, with anything in it.
    pub(super) fn take(&self, length: usize) -> Vec<u8> {
        let mut buffer = self.lock().buffers.pop().unwrap_or_default();
        buffer.resize(length, 0);
        buffer
    }

    /// Keeps that of a batch which was sent.
    pub(super) fn put(&self, sent: Batch) {
        let buffer = sent.into_copied();
        let mut kept = self.lock();
        if buffer.capacity() > 0 && kept.buffers.len() < MOST_KEPT {
            kept.buffers.push(buffer);
            kept.since = Some(Instant::now());
        }
    }

    /// Gives all of it back to the system when no copy was sent for so long, whatever is stored meanwhile.
    pub(super) fn clear_unused(&self, time: Duration) {
        let mut kept = self.lock();
        if kept.since.is_some_and(|since| since.elapsed() >= time) {
            let unused = std::mem::take(&mut *kept);
            drop(kept);
            drop(unused);
        }
    }
}

#[cfg(test)]
mod tests {
    use rackbus_segment::coherence::{ConnectionSide, ConnectionWindow};

    use super::*;

    #[test]
    fn memory_of_batches_that_were_sent_is_taken_again_and_not_without_limit() {
        let buffers = CopyBuffers::default();
        let mut window = ConnectionWindow::new(ConnectionSide::Home, 1 << 20, true);
        for number in 1..=2 * MOST_KEPT as u64 {
            let batch = window.go_on_with((0, vec![7; 5000])).unwrap();
            window.applied(number).unwrap();
            buffers.put(batch);
        }
        assert_eq!(buffers.lock().buffers.len(), MOST_KEPT);
        let taken = buffers.take(4000);
        assert!(taken.len() == 4000 && taken.capacity() >= 5000);
        assert_eq!(buffers.lock().buffers.len(), MOST_KEPT - 1);
        buffers.clear_unused(Duration::from_secs(3600));
        assert_eq!(buffers.lock().buffers.len(), MOST_KEPT - 1, "used lately");
        buffers.clear_unused(Duration::ZERO);
        assert_eq!(buffers.take(10), [0; 10]);
    }
}
