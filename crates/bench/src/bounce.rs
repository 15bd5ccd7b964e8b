//! What peer-to-peer can gain on a machine at most: the copies of a transfer by themselves, between plain memory, by the two
//! processors that do them where a drive and a program do.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, SharedMemory};

use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU, pin, unpin};

/// Memory as large as what a drive, a program and a memory function have.
#[derive(Debug)]
pub struct BareCopies {
    store: SharedMemory,
    buffer: SharedMemory,
    target: SharedMemory,
    /// Bytes of a copy at a time.
    piece: usize,
}

impl BareCopies {
    /// Memory of these sizes, all of it there.
    ///
    /// # Errors
    /// When the system has none.
    pub fn new(
        [store, buffer, target]: [usize; 3],
        piece: usize,
    ) -> Result<BareCopies, BenchError> {
        let memory = |name: &str, bytes: usize| -> Result<SharedMemory, BenchError> {
            let memory = SharedMemory::create(name, bytes as u64)?;
            memory.whole().fill(1);
            Ok(memory)
        };
        let (store, buffer) = (memory("bare-store", store)?, memory("bare-buffer", buffer)?);
        Ok(BareCopies { store, buffer, target: memory("bare-target", target)?, piece })
    }

    /// Gigabytes per second of transfers of `size` bytes for about `time`: one processor copies to the target, or with
    /// `bounce` to the buffer, from which the other one copies then.
    pub fn run(&self, bounce: bool, size: usize, time: Duration) -> f64 {
        let (asked, done, stop) =
            (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(SERVER_CPU);
                while !stop.load(Ordering::Acquire) {
                    let nth = done.load(Ordering::Relaxed);
                    if asked.load(Ordering::Acquire) == nth {
                        std::hint::spin_loop();
                        continue;
                    }
                    let to = match bounce {
                        true => self.buffer.whole().part(0, size),
                        false => place(&self.target, nth, size),
                    };
                    self.copy(place(&self.store, nth, size), to);
                    done.store(nth + 1, Ordering::Release);
                }
            });
            pin(CLIENT_CPU);
            let (begun, mut moved) = (Instant::now(), 0);
            for nth in 0.. {
                asked.store(nth + 1, Ordering::Release);
                while done.load(Ordering::Acquire) == nth {
                    std::hint::spin_loop();
                }
                if bounce
                    && let (Some(from), Some(to)) =
                        (self.buffer.whole().part(0, size), place(&self.target, nth, size))
                {
                    to.copy_from_slice(from);
                }
                moved += size;
                if begun.elapsed() >= time {
                    break;
                }
            }
            let rate = moved as f64 / begun.elapsed().as_secs_f64() / 1e9;
            stop.store(true, Ordering::Release);
            unpin();
            rate
        })
    }

    /// Copies piece by piece, as a drive does with the commands of a transfer.
    fn copy(&self, from: Option<DmaSlice<'_>>, to: Option<DmaSlice<'_>>) {
        let Some((from, to)) = from.zip(to) else { return };
        let piece = self.piece.min(from.len());
        for at in (0..from.len()).step_by(piece) {
            if let (Some(from), Some(to)) = (from.part(at, piece), to.part(at, piece)) {
                to.copy_from_slice(from);
            }
        }
    }
}

/// Where the `nth` transfer of `size` bytes is in memory that is walked through.
fn place(memory: &SharedMemory, nth: usize, size: usize) -> Option<DmaSlice<'_>> {
    let all = memory.whole();
    all.part(nth * size % all.len(), size)
}
