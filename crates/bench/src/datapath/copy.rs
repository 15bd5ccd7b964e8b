//! Copies by the thread that wants them, against the C library's.
#![allow(unsafe_code)] // the peer copies without checks

use std::time::Duration;

use rackbus_memory::SharedMemory;

use super::{Bench, rate};
use crate::BenchError;
use crate::machine::{SERVER_CPU, pin};

/// What a cold copy walks over: much more than any cache.
const COLD: usize = 512 << 20;

const SIZES: [(&str, usize); 6] = [
    ("4 KiB", 4 << 10),
    ("64 KiB", 64 << 10),
    ("1 MiB", 1 << 20),
    ("4 MiB", 4 << 20),
    ("16 MiB", 16 << 20),
    ("64 MiB", 64 << 20),
];

impl Bench<'_> {
    pub(super) fn copies(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        pin(SERVER_CPU);
        let (from, to) = memory(COLD)?;
        for (warmth, span) in [("cached", 0), ("cold", COLD)] {
            for (name, bytes) in SIZES {
                self.pairs(
                    &format!("copy {name}, {warmth}"),
                    "memcpy",
                    "GB/s",
                    || Ok(walk(time, bytes, span, |at| checked(&from, &to, at, bytes))),
                    || Ok(walk(time, bytes, span, |at| plain(&from, &to, at, bytes))),
                )?;
            }
        }
        Ok(())
    }
}

/// Two pieces of memory whose pages are there.
pub(super) fn memory(bytes: usize) -> Result<(SharedMemory, SharedMemory), BenchError> {
    let from = SharedMemory::create("bench-from", bytes as u64)?;
    let to = SharedMemory::create("bench-to", bytes as u64)?;
    from.whole().fill(1);
    to.whole().fill(2);
    Ok((from, to))
}

/// Gigabytes per second of copies of `bytes`: always the same, or through `span` bytes.
pub(super) fn walk(time: Duration, bytes: usize, span: usize, mut copy: impl FnMut(usize)) -> f64 {
    let batch = (1 << 20 >> 3).max(bytes) / bytes;
    let mut at = 0;
    let rate = rate(time, batch as u64, || {
        for _ in 0..batch {
            copy(at);
            at = if at + 2 * bytes > span { 0 } else { at + bytes };
        }
    });
    rate * bytes as f64 / 1e9
}

fn checked(from: &SharedMemory, to: &SharedMemory, at: usize, bytes: usize) {
    let source = from.region().slice(at, bytes).expect("inside");
    to.region().slice(at, bytes).expect("inside").copy_from_slice(source);
}

/// What the C library does.
pub(super) fn plain(from: &SharedMemory, to: &SharedMemory, at: usize, bytes: usize) {
    // SAFETY: both are that long, and apart.
    unsafe {
        let source = from.whole().as_ptr().add(at);
        std::ptr::copy_nonoverlapping(source, to.whole().as_ptr().add(at), bytes);
    }
}
