//! Survives a peer that truncates the file behind a mapping.
//!
//! Touching a page beyond the end of a mapped file raises SIGBUS, which by default kills the
//! process: a borrower could take its lender down, and every other borrower with it. The guard
//! catches the signal, and if the address lies in a registered [`Region`](crate::Region), puts an
//! anonymous page of zeroes in its place and marks the region as *torn*. The access then
//! completes against that page; whoever owns the region sees [`torn_count`] move, and drops the
//! peer. A SIGBUS anywhere else goes to the handler that was installed before, as if the guard
//! were not there.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};
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
}

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

/// How many pages of registered regions have been replaced since the process started. A shell
/// compares it before and after work on peers' memory: one load tells that nothing was torn.
pub fn torn_count() -> u64 {
    TORN_COUNT.load(Ordering::Relaxed)
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
            install();
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
        slot.state.store(WHOLE, Ordering::Release);
        Registration { slot }
    }

    /// Whether a page of the range was replaced because its owner truncated the file.
    pub(crate) fn torn(&self) -> bool {
        self.slot.state.load(Ordering::Relaxed) == TORN
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.slot.state.store(FREE, Ordering::Release);
        REGISTRY.lock().expect("no panic under the lock").push(self.slot);
    }
}

fn install() {
    // SAFETY: the structures are plain data, zero is a valid value for them; the handler only
    // touches atomics and calls mmap, sysconf-free, and sigaction, all async-signal-safe on Linux.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        let previous = Box::leak(Box::new(std::mem::zeroed::<libc::sigaction>()));
        if libc::sigaction(libc::SIGBUS, &raw const action, previous) == 0 {
            PREVIOUS.store(previous, Ordering::Release);
        }
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to a SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    if replace_page(address) {
        return;
    }
    let previous = PREVIOUS.load(Ordering::Acquire);
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

/// Puts a page of zeroes at `address` if it lies in a registered range.
fn replace_page(address: usize) -> bool {
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            if slot.state.load(Ordering::Acquire) == FREE {
                continue;
            }
            let (start, end) =
                (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
            if (start..end).contains(&address) {
                return replace_in(slot, start, end, address);
            }
        }
        // SAFETY: null or a leaked block.
        match unsafe { block.next.load(Ordering::Acquire).as_ref() } {
            Some(next) => block = next,
            None => return false,
        }
    }
}

/// Replaces the faulting page; where that is refused (a huge page cannot be replaced in part),
/// the rest of the range from there on.
fn replace_in(slot: &Slot, start: usize, end: usize, address: usize) -> bool {
    const PAGE: usize = 4096;
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
