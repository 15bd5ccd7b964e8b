//! Survives a peer that truncates the file behind a mapping.
//!
//! Touching a page beyond the end of a mapped file raises SIGBUS, which by default kills the
//! process: a borrower could take its lender down, and every other borrower with it. The guard
//! catches the signal (`guard::signals`), and if the address lies in a registered
//! [`Region`](crate::Region), puts an anonymous page of zeroes in its place and marks the region as
//! *truncated*. The access then completes against that page; whoever owns the region sees
//! [`replaced_count`] move, and drops the peer. A SIGBUS anywhere else goes to the handler that was
//! installed before, as if the guard were not there.
//!
//! The second thing it does: a region whose memory is being moved elsewhere is *frozen*, which
//! means that it can be read but not written. A thread that writes to it anyway waits until
//! the region is unfrozen, and continues: in the kernel, where it can do that (`guard::uffd`), else in a
//! handler of SIGSEGV. What the handler cannot do: a thread that has SIGSEGV blocked ends the
//! process, and a system call that writes to frozen memory fails with `EFAULT`.

mod signals;
mod slot;
pub(crate) mod uffd;

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use slot::GuardSlot;

const SLOTS: usize = 1024;

/// A block of slots; blocks are never freed, so the handler may walk them at any time.
struct Block {
    slots: [GuardSlot; SLOTS],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Block { slots: [const { empty() }; SLOTS], next: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// A slot with nothing registered.
const fn empty() -> GuardSlot {
    GuardSlot {
        version: AtomicU32::new(0),
        state: AtomicU32::new(slot::FREE),
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        frozen: AtomicU32::new(0),
    }
}

static FIRST: Block = Block::new();
static REGISTRY: Mutex<Free> = Mutex::new(Free { slots: Vec::new(), begun: false });
static REPLACED_COUNT: AtomicU64 = AtomicU64::new(0);

/// The slots that are free.
struct Free {
    slots: Vec<&'static GuardSlot>,
    begun: bool,
}

/// How often pages of registered regions have been replaced since the process started. A shell
/// compares it before and after work on peers' memory: one load tells that nothing was replaced.
pub fn replaced_count() -> u64 {
    REPLACED_COUNT.load(Ordering::Acquire)
}

/// Keeps regions from being registered or taken out until what it returns is dropped: for a thread
/// that forks, so that its child does not find the registry held by a thread that it has not got. `None` while somebody is
/// at it, which may be the caller itself, in a handler of a signal.
pub fn try_hold_registrations() -> Option<impl Sized> {
    match REGISTRY.try_lock() {
        Ok(held) => Some(held),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Counts a replacement that is not the guard's: a region is being revoked.
pub(crate) fn note_replaced() {
    REPLACED_COUNT.fetch_add(1, Ordering::SeqCst);
}

/// Handles SIGBUS from now on, as from the first region on, and SIGSEGV if a region was ever frozen, before whoever took
/// them since: for what changes the signals of the whole process, and must not take the guard's.
pub fn catch_signals() {
    signals::catch_truncation();
    signals::catch_again();
}

fn note_truncated() {
    // Behind the truncation itself: who sees the count sees that.
    REPLACED_COUNT.fetch_add(1, Ordering::Release);
}

fn registry() -> MutexGuard<'static, Free> {
    // What is pushed and popped under the lock is whole whatever panics.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Free {
    fn take(&mut self) -> &'static GuardSlot {
        if !self.begun {
            self.begun = true;
            self.slots.extend(FIRST.slots.iter());
        }
        if let Some(slot) = self.slots.pop() {
            return slot;
        }
        let block: &'static Block = Box::leak(Box::new(Block::new()));
        let mut last = &FIRST;
        // SAFETY: `next` is null or a leaked block, which lives for ever.
        while let Some(next) = unsafe { last.next.load(Ordering::Acquire).as_ref() } {
            last = next;
        }
        last.next.store(ptr::from_ref(block).cast_mut(), Ordering::Release);
        self.slots.extend(block.slots.iter().skip(1));
        &block.slots[0]
    }
}

/// The registration of one mapped range; dropping it takes the range out again.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: &'static GuardSlot,
    start: usize,
    length: usize,
    /// Whether a part of the range is protected by the kernel, or was since it was frozen.
    in_kernel: AtomicBool,
}

impl Registration {
    /// Registers `[start, start + length)`; the range must stay mapped until the registration is
    /// dropped.
    pub(crate) fn new(start: usize, length: usize) -> Self {
        signals::catch_truncation();
        let slot = registry().take();
        slot.register(start as u64, (start + length) as u64);
        Registration { slot, start, length, in_kernel: AtomicBool::new(false) }
    }

    /// Lets writers to whole pages of the range wait from now on, until
    /// [`unfreeze`](Registration::unfreeze). They can still be read.
    ///
    /// # Errors
    /// When the system refuses; nobody waits then.
    pub(crate) fn freeze(&self, start: usize, length: usize) -> rustix::io::Result<()> {
        // First: whoever meets a page that it may not write to finds out why.
        signals::catch_writes();
        self.slot.freeze();
        if uffd::protect(start, length) {
            self.in_kernel.store(true, Ordering::Release);
            return Ok(());
        }
        // SAFETY: pages of our own mapping, which stay readable; writers wait.
        unsafe { libc_result(libc::mprotect(start as *mut _, length, libc::PROT_READ)) }
            .inspect_err(|_| self.release())
    }

    /// Other memory was mapped in a frozen range, read-only: writers to it wait as well.
    pub(crate) fn refreeze(&self, start: usize, length: usize) {
        if !self.in_kernel.load(Ordering::Acquire) || !uffd::protect(start, length) {
            return;
        }
        // SAFETY: pages of our own mapping, which the kernel protects from now on. If it fails they
        // stay read-only, and writers wait in the handler.
        unsafe { libc::mprotect(start as *mut _, length, libc::PROT_READ | libc::PROT_WRITE) };
    }

    /// Whether writes to the range wait, because its memory is being moved.
    pub(crate) fn frozen(&self) -> bool {
        self.slot.frozen()
    }

    /// Lets writers continue, in all of the range.
    ///
    /// # Errors
    /// When the system refuses; those that wait in the handler do so until the range is retired.
    pub(crate) fn unfreeze(&self) -> rustix::io::Result<()> {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: our own mapping, which could be written to before it was frozen.
        let outcome =
            unsafe { libc_result(libc::mprotect(self.start as *mut _, self.length, both)) };
        if outcome.is_ok() {
            self.release();
        } else {
            self.release_in_kernel();
        }
        outcome
    }

    /// Nobody waits any more; what protects the pages is gone already.
    fn release(&self) {
        signals::allow_retries();
        self.slot.unfreeze();
        self.release_in_kernel();
        futex(self.slot, libc::FUTEX_WAKE, u32::MAX >> 1);
    }

    fn release_in_kernel(&self) {
        if self.in_kernel.swap(false, Ordering::AcqRel) {
            uffd::release(self.start, self.length);
        }
    }

    /// From now on no fault in the range is the guard's: it is about to be unmapped, and what is
    /// mapped there next is somebody else's. Who waits to write tries again.
    pub(crate) fn retire(&self) {
        if self.slot.retire() {
            signals::allow_retries();
            self.release_in_kernel();
            futex(self.slot, libc::FUTEX_WAKE, u32::MAX >> 1);
        }
    }

    /// Whether a page of the range was replaced because its owner truncated the file.
    #[inline]
    pub(crate) fn truncated(&self) -> bool {
        self.slot.truncated()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.retire();
        registry().slots.push(self.slot);
    }
}

fn libc_result(outcome: libc::c_int) -> rustix::io::Result<()> {
    match outcome {
        0 => Ok(()),
        _ => Err(rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
            .unwrap_or(rustix::io::Errno::INVAL)),
    }
}

/// Waits while a slot is frozen, or wakes who does.
fn futex(slot: &GuardSlot, operation: libc::c_int, value: u32) {
    // SAFETY: the word lives for ever; a futex call is async-signal-safe and touches nothing else.
    unsafe {
        let none = ptr::null::<libc::timespec>();
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, slot.frozen.as_ptr(), operation, value, none);
    }
}

/// The registered range that `address` lies in.
fn find(address: usize) -> Option<(&'static GuardSlot, (usize, usize))> {
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            if let Some((start, end)) = slot.around(address as u64) {
                return Some((slot, (start as usize, end as usize)));
            }
        }
        // SAFETY: null or a leaked block.
        block = unsafe { block.next.load(Ordering::Acquire).as_ref() }?;
    }
}
