//! The handlers of SIGBUS and SIGSEGV.
//!
//! What is not about a registered range goes to whoever handled the signal before. A program that
//! installs a handler of its own later, without calling the one that it found, takes the guard's
//! place: each freeze looks, and puts the guard before it again, so that the program's handler gets
//! what is not the guard's. A thread that has SIGSEGV blocked cannot be helped by a handler: the
//! kernel ends the process. Where the kernel protects by itself (`uffd`) neither matters.

use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use super::slot::GuardSlot;
use super::{find, note_truncated};

/// Writes that may be tried again before a fault is somebody's mistake: those that were under way
/// when a range was unfrozen, at most one of each thread.
const RETRIES: u32 = 4096;
/// How many of these are left. Not a range's own: a writer may get here when the range that it
/// waited for is registered no more. A mistake faults again, and takes that much longer.
static RETRIES_LEFT: AtomicU32 = AtomicU32::new(0);

/// The process that froze last: its forks have nobody who unfreezes.
static FREEZER: AtomicU32 = AtomicU32::new(0);

/// In a field of the signal's information that these signals do not use: the guard has passed it
/// on already, and now comes back from whoever it was passed to.
const PASSED_ON: libc::c_int = 0x7261_636b;

/// One signal's handlers beside the guard's.
struct Chain {
    /// Who handled it before the guard came first.
    first: AtomicPtr<libc::sigaction>,
    /// Who does now, where the guard does not.
    next: AtomicPtr<libc::sigaction>,
    /// Whether a program's handler has displaced the guard's since.
    displaced: AtomicBool,
}

impl Chain {
    const fn new() -> Chain {
        let none = ptr::null_mut();
        let (first, next) = (AtomicPtr::new(none), AtomicPtr::new(none));
        Chain { first, next, displaced: AtomicBool::new(false) }
    }
}

static BUS: Chain = Chain::new();
static SEGV: Chain = Chain::new();

/// Handles SIGBUS from now on.
pub(super) fn catch_truncation() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| install(libc::SIGBUS, &BUS));
}

/// Who looks whether the guard's handlers are there: one at a time.
static CHECK: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Sees to it that SIGSEGV is handled, whatever the program has installed meanwhile.
pub(super) fn catch_writes() {
    let _one = CHECK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    FREEZER.store(std::process::id(), Ordering::Relaxed);
    install(libc::SIGSEGV, &SEGV);
}

/// The same of each signal that was handled before.
pub(super) fn catch_again() {
    let _one = CHECK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (signal, chain) in [(libc::SIGBUS, &BUS), (libc::SIGSEGV, &SEGV)] {
        if !chain.first.load(Ordering::Acquire).is_null() {
            install(signal, chain);
        }
    }
}

/// Writers that are about to be handled may try again.
pub(super) fn allow_retries() {
    RETRIES_LEFT.store(RETRIES, Ordering::Relaxed);
}

fn current(signal: libc::c_int) -> Option<libc::sigaction> {
    // SAFETY: plain data for which zero is valid; the call only writes to it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, ptr::null(), &raw mut action) == 0).then_some(action)
    }
}

/// Installs the guard's handler before the one that there is, unless that is the guard's.
fn install(signal: libc::c_int, chain: &Chain) {
    let ours = handler as *const () as usize;
    let Some(before) = current(signal).filter(|action| action.sa_sigaction != ours) else { return };
    // SAFETY: null or leaked.
    let known = unsafe { chain.next.load(Ordering::Acquire).as_ref() };
    let same = |known: &libc::sigaction| {
        (known.sa_sigaction, known.sa_flags) == (before.sa_sigaction, before.sa_flags)
    };
    if !known.is_some_and(same) {
        // Known before it can be needed: a signal may come as soon as the handler is there. Leaked,
        // because a handler may be reading it at any time; once for each that displaces another.
        chain.next.store(Box::leak(Box::new(before)), Ordering::Release);
    }
    let (none, next) = (ptr::null_mut(), chain.next.load(Ordering::Acquire));
    let first = chain.first.compare_exchange(none, next, Ordering::AcqRel, Ordering::Relaxed);
    if first.is_err() && !chain.displaced.swap(true, Ordering::Relaxed) {
        tracing::info!(signal, "the program handles a signal that shared memory needs: both do");
    }
    // SAFETY: the structure is plain data, zero is valid for it; the handler only touches atomics
    // and calls mmap, mprotect, futex, getpid, raise and sigaction, all async-signal-safe on Linux.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ours;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(signal, &raw const action, ptr::null_mut());
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
    // Sent by somebody (kill, raise), and not raised by an access: there is no address.
    let sent = code <= 0;
    let chain = if signal == libc::SIGSEGV {
        /// A page is there, but does not allow the access.
        const SEGV_ACCERR: libc::c_int = 2;
        if code == SEGV_ACCERR && (wait_for_unfreeze(address) || tries_again()) {
            return;
        }
        &SEGV
    } else {
        if !sent && replace(address) {
            return;
        }
        &BUS
    };
    pass_on(chain, signal, sent, info, context);
}

/// Lets who handled the signal before the guard handle it.
fn pass_on(
    chain: &Chain,
    signal: libc::c_int,
    sent: bool,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the siginfo is the kernel's copy for this handler, on this thread's stack. `next` and
    // `first` are null or leaked, and were installed as they say they are to be called.
    unsafe {
        // A program's handler that displaced the guard's may call it in its turn.
        let returned = (*info).si_errno == PASSED_ON;
        let next = if returned { &chain.first } else { &chain.next };
        let Some(next) = next.load(Ordering::Acquire).as_ref() else { libc::abort() };
        if next.sa_sigaction == libc::SIG_IGN && sent {
            return;
        }
        if next.sa_sigaction == libc::SIG_DFL || next.sa_sigaction == libc::SIG_IGN {
            // The default action: when the faulting instruction runs again, or now.
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
            if sent {
                libc::raise(signal);
            }
            return;
        }
        let before = (*info).si_errno;
        (*info).si_errno = PASSED_ON;
        if next.sa_flags & libc::SA_SIGINFO != 0 {
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(next.sa_sigaction);
            call(signal, info, context);
        } else {
            let call: extern "C" fn(libc::c_int) = std::mem::transmute(next.sa_sigaction);
            call(signal);
        }
        (*info).si_errno = before;
    }
}

/// Waits while the range around an address is frozen; whether it was.
fn wait_for_unfreeze(address: usize) -> bool {
    let Some((slot, range)) = find(address).filter(|(slot, _)| slot.frozen()) else { return false };
    if FREEZER.load(Ordering::Relaxed) != std::process::id() {
        // A fork, made while it was frozen. It keeps nothing, so what it writes is its own affair.
        slot.unfreeze();
        // SAFETY: the range is a mapping of this process that was writable before it was frozen.
        unsafe {
            let both = libc::PROT_READ | libc::PROT_WRITE;
            libc::mprotect(range.0 as *mut libc::c_void, range.1 - range.0, both);
        }
        return true;
    }
    // It may return early.
    super::futex(slot, libc::FUTEX_WAIT, 1);
    true
}

/// Whether a write that faulted may have been to a range that was unfrozen since.
fn tries_again() -> bool {
    let take = |left: u32| left.checked_sub(1);
    RETRIES_LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
}

/// Replaces a faulting page of a registered range.
fn replace(address: usize) -> bool {
    find(address).is_some_and(|(slot, range)| replace_in(slot, range, address))
}

/// Replaces the page; where that is refused (a huge page cannot be replaced in part), the whole
/// range.
fn replace_in(slot: &GuardSlot, (start, end): (usize, usize), address: usize) -> bool {
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
            slot.tear();
            note_truncated();
            return true;
        }
    }
    false
}
