//! Threads that a library starts inside of a program, whose signals are not the library's.
//!
//! The kernel gives a signal of the process to any thread that does not block it. A program that blocks signals in its
//! own threads, to take them by `sigwait` or `signalfd`, knows nothing of a library's threads: on one of these the
//! signal's default action would end the process.

use std::mem::MaybeUninit;
use std::ptr;
use std::thread::JoinHandle;

/// Signals that a thread causes by what it does itself. They must reach it: the handler of shared memory mends faults
/// ([`guard`](crate::guard)), and a thread that blocks the signal of a fault ends the process.
const OWN_FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Starts a thread that takes no signal but those of its own faults. Threads and programs that it starts take no others
/// either, unless they change that.
///
/// # Errors
/// When the system has no room for another thread.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    // A new thread begins with the mask of the one that starts it. Blocked from within, a signal could come before.
    let _blocked = BlockedSignals::block();
    std::thread::Builder::new().name(name.into()).spawn(work)
}

/// The calling thread takes no signal but those of its own faults until this is dropped, on the same thread.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn block() -> BlockedSignals {
        let (mut blocked, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: `sigfillset` makes a whole set, which the others change and read; the call with a valid operation
        // cannot fail, and writes the former mask.
        unsafe {
            libc::sigfillset(blocked.as_mut_ptr());
            for signal in OWN_FAULTS {
                libc::sigdelset(blocked.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr());
            BlockedSignals { before: before.assume_init() }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the mask that this thread had.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the calling thread blocks each of these signals.
    fn blocks(signals: &[libc::c_int]) -> Vec<bool> {
        let mut mask = MaybeUninit::uninit();
        // SAFETY: without a new mask the call only writes the present one.
        let mask = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), mask.as_mut_ptr());
            mask.assume_init()
        };
        // SAFETY: the mask is whole.
        signals.iter().map(|it| unsafe { libc::sigismember(&raw const mask, *it) } == 1).collect()
    }

    #[test]
    fn a_thread_takes_no_signal_but_its_own_faults() {
        let signals = [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGALRM, libc::SIGCHLD];
        let before = blocks(&signals);
        let thread = spawn("test", move || {
            assert_eq!(std::thread::current().name(), Some("test"));
            (blocks(&signals), blocks(&OWN_FAULTS))
        });
        assert_eq!(thread.unwrap().join().unwrap(), (vec![true; 5], vec![false; OWN_FAULTS.len()]));
        assert_eq!(blocks(&signals), before, "the caller takes what it took");
    }
}
