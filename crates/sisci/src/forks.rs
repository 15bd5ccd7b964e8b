//! Forks: the child has no handle of its parent's, and no lock that another thread of the parent
//! held.
//!
//! While a process forks, the forking thread holds every lock of the library that a child could
//! want. So none of them is held by a thread that the child has not got, and what they protect is
//! whole there. The child then forgets what is its parent's, and begins anew. Where a lock could not be had in time, the
//! child must not touch what it protects, and cannot tell when it may: the library is unusable there, and each call says
//! that it is not initialised, or that a handle is none.

use std::any::Any;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, RwLock, TryLockError};
use std::time::{Duration, Instant};

use crate::error::explain;

/// A lock that is held.
pub(crate) type HeldLock = Box<dyn Any>;

/// How long a fork waits for a lock. A handler of a signal may fork during a call, whose
/// locks are its own thread's: it must not wait for ever.
const PATIENCE: Duration = Duration::from_secs(1);

thread_local! {
    /// What this thread holds while it forks; `None` for a lock that it could not have.
    static HELD: RefCell<Vec<Option<HeldLock>>> = const { RefCell::new(Vec::new()) };
}

/// The process is a fork, and some lock may be held for ever by a thread that it has not got.
static UNUSABLE: AtomicBool = AtomicBool::new(false);

/// Whether the process is a fork that must not use the library.
#[inline]
pub(crate) fn is_unusable() -> bool {
    UNUSABLE.load(Ordering::Relaxed)
}

/// Sees to forks from now on.
pub(crate) fn expect() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Once for a process, and not held while it forks: a child must not find them under way in another thread.
        rackbus_memory::copy::calibrate();
        let _ = rackbus_memory::copy::published();
        // SAFETY: the functions are there as long as the library; glibc forgets them with it.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
        if failed != 0 {
            explain("no memory to see to forks: a fork may hang in its calls");
        }
    });
}

/// A mutex, held; nothing when that takes too long.
pub(crate) fn hold_mutex<T>(mutex: &'static Mutex<T>) -> Option<HeldLock> {
    let held = patiently(|| match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    })?;
    Some(Box::new(held))
}

/// The same for a lock of readers and writers.
pub(crate) fn hold_lock<T>(lock: &'static RwLock<T>) -> Option<HeldLock> {
    let held = patiently(|| match lock.try_write() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    })?;
    Some(Box::new(held))
}

fn patiently<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(got) = attempt() {
            return Some(got);
        }
        if begun.elapsed() > PATIENCE {
            return None;
        }
        std::thread::yield_now();
    }
}

extern "C" fn before() {
    if is_unusable() {
        // Neither is the fork of such a fork usable.
        return HELD.set(vec![None]);
    }
    let mut held: Vec<Option<HeldLock>> = Vec::new();
    // In the order in which calls take them one inside of the other.
    held.extend(crate::library::hold());
    held.extend(crate::dma::hold());
    held.extend(crate::interrupts::hold());
    held.extend(crate::copy::hold());
    held.extend(crate::maps::hold());
    held.extend(crate::devices::hold());
    held.extend(crate::remote::hold());
    held.extend(crate::local::hold());
    let registrations = patiently(rackbus_memory::guard::try_hold_registrations);
    held.push(registrations.map(|held| Box::new(held) as HeldLock));
    HELD.set(held);
}

extern "C" fn after() {
    drop(HELD.take());
}

extern "C" fn in_child() {
    let held = HELD.take();
    let all = held.iter().all(Option::is_some);
    drop(held);
    match all {
        true => crate::library::begin_anew(),
        false => {
            UNUSABLE.store(true, Ordering::Relaxed);
            crate::library::end_in_fork();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::errors::{SCI_ERR_NOT_INITIALIZED, SCI_ERR_OK};
    use crate::library::{SCIInitialize, SCITerminate};

    /// Runs a function in a fork of this process, which is to end in time; what the child answers.
    fn in_fork(child: impl FnOnce() -> i32) -> Option<i32> {
        // SAFETY: the child of a test with several threads calls nothing but what is tested, and ends at once.
        let process = unsafe { libc::fork() };
        if process == 0 {
            let answer = child();
            // SAFETY: ends the child without what the parent would do at its end.
            unsafe { libc::_exit(answer) };
        }
        assert!(process > 0);
        let begun = Instant::now();
        loop {
            let mut status = 0;
            // SAFETY: the child is this test's, and `status` can be written to.
            if unsafe { libc::waitpid(process, &raw mut status, libc::WNOHANG) } == process {
                return libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
            }
            if begun.elapsed() > Duration::from_secs(20) {
                // SAFETY: the child was not waited for yet, so the number is still its.
                unsafe { libc::kill(process, libc::SIGKILL) };
                // SAFETY: as above.
                unsafe { libc::waitpid(process, &raw mut status, 0) };
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// As with a fork in a handler of a signal that came during a call: the lock is not free before the fork is over.
    #[test]
    fn a_fork_without_a_lock_ends_and_is_told_that_the_library_is_not_initialised() {
        expect();
        let (held, is_held) = std::sync::mpsc::channel();
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let holder = std::thread::spawn(move || {
            let _held = rackbus_memory::guard::try_hold_registrations();
            held.send(()).unwrap();
            let _ = is_over.recv();
        });
        is_held.recv().unwrap();
        let answer = in_fork(|| {
            let mut error = SCI_ERR_OK;
            // SAFETY: `error` can be written to.
            unsafe { SCIInitialize(0, &raw mut error) };
            // SAFETY: there is nothing to be promised.
            unsafe { SCITerminate() };
            i32::from(error == SCI_ERR_NOT_INITIALIZED)
        });
        over.send(()).unwrap();
        holder.join().unwrap();
        assert_eq!(answer, Some(1));
        assert!(!is_unusable(), "the parent goes on");
    }
}
