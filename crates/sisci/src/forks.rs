//! Forks: the child has no handle of its parent's, and no lock that another thread of the parent
//! held.
//!
//! While a process forks, the forking thread holds every lock of the library that a child could
//! want. So none of them is held by a thread that the child has not got, and what they protect is
//! whole there. The child then forgets what is its parent's, and begins anew.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Mutex, Once, RwLock, TryLockError};
use std::time::{Duration, Instant};

use crate::error::explain;

/// A lock that is held.
pub(crate) type HeldLock = Box<dyn Any>;

/// How long a fork waits for a lock. A handler of a signal may fork during a call, whose
/// locks are its own thread's: it must not wait for ever.
const PATIENCE: Duration = Duration::from_secs(1);

thread_local! {
    /// What this thread holds while it forks.
    static HELD: RefCell<Vec<HeldLock>> = const { RefCell::new(Vec::new()) };
}

/// Sees to forks from now on.
pub(crate) fn expect() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
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
    let mut held = Vec::new();
    // In the order in which calls take them one inside of the other.
    held.extend(crate::library::hold());
    held.extend(crate::dma::hold());
    held.extend(crate::interrupts::hold());
    held.extend(crate::copy::hold());
    held.extend(crate::maps::hold());
    held.extend(crate::devices::hold());
    held.extend(crate::remote::hold());
    held.extend(crate::local::hold());
    held.push(Box::new(rackbus_memory::guard::hold_registrations()) as HeldLock);
    HELD.set(held);
}

extern "C" fn after() {
    drop(HELD.take());
}

extern "C" fn in_child() {
    after();
    crate::library::begin_anew();
}
