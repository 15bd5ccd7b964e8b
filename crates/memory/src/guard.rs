//! Survives a peer that truncates the file behind a mapping.
//!
//! Touching a page beyond the end of a mapped file raises SIGBUS, which by default kills the
//! process: a borrower could take its lender down, and every other borrower with it. The guard
//! catches the signal, and if the address lies in a registered [`Region`](crate::Region), puts an
//! anonymous page of zeroes in its place and marks the region as *torn*. The access then
//! completes against that page; whoever owns the region sees [`torn_count`] move, and drops the
//! peer. A SIGBUS anywhere else goes to the handler that was installed before, as if the guard
//! were not there.
//!
//! The second thing it does: a region whose memory is being moved elsewhere is *frozen*, which
//! means that it can be read but not written. A thread that writes to it all the same raises
//! SIGSEGV; the guard lets it wait until the region is thawed, and try again.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

const SLOTS: usize = 1024;
/// Slot state: nothing registered.
const FREE: u8 = 0;
/// Slot state: a region, whole.
const WHOLE: u8 = 1;
/// Slot state: a region that lost at least one page.
const TORN: u8 = 2;

/// One registered range. The signal handler only ever reads atomics; writers hold [`REGISTRY`].
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    state: AtomicU8,
    /// 1 while a part of the range may not be written: what writers wait on (a futex).
    frozen: AtomicU32,
}

/// Writes that may be tried again before a fault is somebody's mistake: those that were under way
/// when a range was thawed, at most one of each thread.
const RETRIES: u32 = 4096;
/// How many of these are left. Not a range's own: a writer may get here when the range that it
/// waited for is registered no more. A mistake faults again, and takes that much longer.
static RETRIES_LEFT: AtomicU32 = AtomicU32::new(0);

/// A block of slots; blocks are never freed, so the handler may walk them at any time.
struct Block {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Block {
            slots: [const {
                Slot {
                    start: AtomicUsize::new(0),
                    end: AtomicUsize::new(0),
                    state: AtomicU8::new(FREE),
                    frozen: AtomicU32::new(0),
                }
            }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

static FIRST: Block = Block::new();
/// Serialises writers and keeps the list of free slots.
static REGISTRY: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());
static INSTALL: Once = Once::new();
static TORN_COUNT: AtomicU64 = AtomicU64::new(0);
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
static PREVIOUS_SEGV: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// How often pages of registered regions have been replaced since the process started. A shell
/// compares it before and after work on peers' memory: one load tells that nothing was torn.
pub fn torn_count() -> u64 {
    TORN_COUNT.load(Ordering::Relaxed)
}

/// Counts a replacement that is not the guard's: a region is being severed.
pub(crate) fn note_replaced() {
    TORN_COUNT.fetch_add(1, Ordering::SeqCst);
}

/// The registration of one mapped range; dropping it takes the range out again.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: &'static Slot,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:#x})", self.start.load(Ordering::Relaxed))
    }
}

impl Registration {
    /// Registers `[start, start + length)`; the range must stay mapped until the registration is
    /// dropped.
    pub(crate) fn new(start: usize, length: usize) -> Self {
        INSTALL.call_once(|| {
            REGISTRY.lock().expect("no panic under the lock").extend(FIRST.slots.iter());
            install(libc::SIGBUS, &PREVIOUS);
        });
        let mut free = REGISTRY.lock().expect("no panic under the lock");
        if free.is_empty() {
            let block: &'static Block = Box::leak(Box::new(Block::new()));
            let mut last = &FIRST;
            // SAFETY: `next` is null or a leaked block, which lives for ever.
            while let Some(next) = unsafe { last.next.load(Ordering::Acquire).as_ref() } {
                last = next;
            }
            last.next.store(ptr::from_ref(block).cast_mut(), Ordering::Release);
            free.extend(block.slots.iter());
        }
        let slot = free.pop().expect("a block was just added");
        slot.start.store(start, Ordering::Relaxed);
        slot.end.store(start + length, Ordering::Relaxed);
        slot.frozen.store(0, Ordering::Relaxed);
        slot.state.store(WHOLE, Ordering::Release);
        Registration { slot }
    }

    /// From now on a write that faults waits until [`thaw`](Registration::thaw). To be called
    /// before any part of the range is protected.
    pub(crate) fn freeze(&self) {
        static FREEZES: Once = Once::new();
        FREEZES.call_once(|| install(libc::SIGSEGV, &PREVIOUS_SEGV));
        self.slot.frozen.store(1, Ordering::Release);
    }

    /// Whether writers wait.
    pub(crate) fn frozen(&self) -> bool {
        self.slot.frozen.load(Ordering::Acquire) == 1
    }

    /// Lets writers go on. To be called when every part of the range can be written again.
    pub(crate) fn thaw(&self) {
        RETRIES_LEFT.store(RETRIES, Ordering::Relaxed);
        self.slot.frozen.store(0, Ordering::Release);
        futex(&self.slot.frozen, libc::FUTEX_WAKE, u32::MAX >> 1);
    }

    /// From now on no fault in the range is the guard's: it is about to be unmapped, and what is
    /// mapped there next is somebody else's. Who waits to write tries again.
    pub(crate) fn retire(&self) {
        self.slot.state.store(FREE, Ordering::Release);
        if self.slot.frozen.swap(0, Ordering::AcqRel) == 1 {
            RETRIES_LEFT.store(RETRIES, Ordering::Relaxed);
            futex(&self.slot.frozen, libc::FUTEX_WAKE, u32::MAX >> 1);
        }
    }

    /// Whether a page of the range was replaced because its owner truncated the file.
    pub(crate) fn torn(&self) -> bool {
        self.slot.state.load(Ordering::Relaxed) == TORN
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.retire();
        REGISTRY.lock().expect("no panic under the lock").push(self.slot);
    }
}

/// Waits or wakes on a word of this process.
fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    // SAFETY: the word lives for ever; a futex call is async-signal-safe and touches nothing else.
    unsafe {
        let none = ptr::null::<libc::timespec>();
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, none);
    }
}

fn install(signal: libc::c_int, before: &AtomicPtr<libc::sigaction>) {
    // SAFETY: the structures are plain data, zero is a valid value for them; the handler only
    // touches atomics and calls mmap, futex and sigaction, all async-signal-safe on Linux.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        let previous = Box::leak(Box::new(std::mem::zeroed::<libc::sigaction>()));
        if libc::sigaction(signal, &raw const action, previous) == 0 {
            before.store(previous, Ordering::Release);
        }
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the thread's own errno, which whoever is interrupted may be about to look at.
    let errno = unsafe { *libc::__errno_location() };
    handle(signal, info, context);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to a SA_SIGINFO handler.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    let previous = if signal == libc::SIGSEGV {
        /// A page is there, but does not allow the access.
        const SEGV_ACCERR: libc::c_int = 2;
        if code == SEGV_ACCERR && (find(address).is_some_and(wait_for_thaw) || tries_again()) {
            return;
        }
        PREVIOUS_SEGV.load(Ordering::Acquire)
    } else {
        if find(address).is_some_and(|slot| replace_in(slot, address)) {
            return;
        }
        PREVIOUS.load(Ordering::Acquire)
    };
    // SAFETY: `previous` is null or the leaked action that was installed before ours, whose
    // handler is called in the way its flags say; restoring it lets the default action happen
    // when the faulting instruction runs again.
    unsafe {
        let Some(previous) = previous.as_ref() else {
            libc::abort();
        };
        if previous.sa_sigaction == libc::SIG_DFL || previous.sa_sigaction == libc::SIG_IGN {
            libc::sigaction(signal, previous, ptr::null_mut());
        } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(previous.sa_sigaction);
            call(signal, info, context);
        } else {
            let call: extern "C" fn(libc::c_int) = std::mem::transmute(previous.sa_sigaction);
            call(signal);
        }
    }
}

/// Waits while a range is frozen; whether it was.
fn wait_for_thaw(slot: &'static Slot) -> bool {
    let frozen = slot.frozen.load(Ordering::Acquire) == 1;
    if frozen {
        // It may return early.
        futex(&slot.frozen, libc::FUTEX_WAIT, 1);
    }
    frozen
}

/// Whether a write that faulted may have been to a range that was thawed since.
fn tries_again() -> bool {
    let take = |left: u32| left.checked_sub(1);
    RETRIES_LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
}

/// The registered range that `address` lies in.
fn find(address: usize) -> Option<&'static Slot> {
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            if slot.state.load(Ordering::Acquire) == FREE {
                continue;
            }
            let (start, end) =
                (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
            if (start..end).contains(&address) {
                return Some(slot);
            }
        }
        // SAFETY: null or a leaked block.
        block = unsafe { block.next.load(Ordering::Acquire).as_ref() }?;
    }
}

/// Replaces the faulting page; where that is refused (a huge page cannot be replaced in part),
/// the rest of the range from there on.
fn replace_in(slot: &Slot, address: usize) -> bool {
    const PAGE: usize = 4096;
    let (start, end) = (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
    let page = address & !(PAGE - 1);
    for (from, length) in [(page, PAGE), (start, end - start)] {
        // SAFETY: [from, from + length) is inside a range that its registration keeps mapped, so
        // MAP_FIXED replaces our own pages and nobody else's.
        let at = unsafe {
            libc::mmap(
                from as *mut libc::c_void,
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at != libc::MAP_FAILED {
            slot.state.store(TORN, Ordering::Release);
            TORN_COUNT.fetch_add(1, Ordering::Relaxed);
            return true;
        }
    }
    false
}
