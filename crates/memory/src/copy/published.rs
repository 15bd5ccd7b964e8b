//! What the channels of a process did, in memory that others may read: so that the process' node can tell an operator of
//! it without asking the program.
//!
//! Each channel has a slot of eight numbers in one page of the process. A slot that a channel leaves keeps its numbers,
//! and the next one counts on from there: the sum of all slots never falls.

use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::fs::SealFlags;
use rustix::io::Errno;

use super::channel::Statistics;
use crate::{AsHandle, HandleRef, MemoryHandle, SharedMemory};

const PAGE: usize = 4096;
const SLOT: usize = 64;
/// Channels of a process that are counted at a time; more do their work and are not.
const SLOTS: u16 = (PAGE / SLOT) as u16;

#[derive(Debug)]
struct Page {
    memory: SharedMemory,
    free: Mutex<Vec<u16>>,
    /// A fork of the process has the same page, and must not write to it.
    process: u32,
}

static OF_THIS_PROCESS: LazyLock<Option<Page>> = LazyLock::new(|| {
    let memory = SharedMemory::create("rackbus channels", PAGE as u64).ok()?;
    let free = Mutex::new((0..SLOTS).rev().collect());
    Some(Page { memory, free, process: std::process::id() })
});

fn page() -> Option<&'static Page> {
    OF_THIS_PROCESS.as_ref().filter(|page| page.process == std::process::id())
}

/// The memory that this process' channels count in, for [`read_published`]; `None` when the system has none left, or in a
/// fork of a process that had it.
pub fn published() -> Option<HandleRef<'static>> {
    page().map(|page| page.memory.as_handle())
}

/// The sum of what the channels of another process did, from the memory that it passed. It may say anything.
///
/// # Errors
/// When that is no memory that keeps its size, as [`published`] gives it.
pub fn read_published(memory: &MemoryHandle) -> std::io::Result<Statistics> {
    let (memory, _) = memory.as_descriptor();
    let seals = rustix::fs::fcntl_get_seals(memory)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Errno::INVAL.into());
    }
    let mut page = [0; PAGE];
    if rustix::io::pread(memory, &mut page, 0)? < PAGE {
        return Err(Errno::INVAL.into());
    }
    let slots = page.as_chunks::<SLOT>().0.iter();
    Ok(slots.map(numbers).fold(Statistics::default(), Statistics::plus))
}

fn numbers(slot: &[u8; SLOT]) -> Statistics {
    let words = slot.as_chunks::<8>().0;
    let [transactions, pieces, merged, bytes, busy_ns, failures, aborts] =
        std::array::from_fn(|at| u64::from_ne_bytes(words[at]));
    Statistics { transactions, pieces, merged, bytes, busy_ns, failures, aborts }
}

/// Where a channel counts.
#[derive(Debug)]
pub(super) struct PublishedSlot {
    page: &'static Page,
    index: u16,
    /// What those did who had it before.
    before: Statistics,
}

impl PublishedSlot {
    /// One that is free, if any is.
    pub fn take() -> Option<PublishedSlot> {
        let page = page()?;
        let index = page.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        let slot = page.memory.whole().read_obj::<[u8; SLOT]>(usize::from(index) * SLOT);
        let before = slot.as_ref().map(numbers).unwrap_or_default();
        Some(PublishedSlot { page, index, before })
    }

    /// Tells what the channel did so far.
    pub fn publish(&self, done: Statistics) {
        let Statistics { transactions, pieces, merged, bytes, busy_ns, failures, aborts } =
            self.before.plus(done);
        let words = [transactions, pieces, merged, bytes, busy_ns, failures, aborts];
        for (at, word) in words.into_iter().enumerate() {
            let at = usize::from(self.index) * SLOT + at * 8;
            // Inside of the page, and aligned.
            let _ =
                self.page.memory.whole().store_u64(at, word, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

impl Drop for PublishedSlot {
    fn drop(&mut self) {
        self.page.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}
