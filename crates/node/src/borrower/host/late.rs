//! Returns of functions to the kernel module that did not end well: they are tried again until the module has forgotten the
//! function.
//!
//! Until then the function may reach this host's memory, so its front has not ended, and the module keeps its place in the
//! window. What the cause is does not matter: a driver that needs longer, or a process without descriptors.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use rackbus_metal::MetalError;
use rustix::io::Errno;

use crate::borrower::fence::FrontSlot;

/// Between two attempts, at first and at most.
const SOON: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_secs(10);

/// Tries a return once; done when the module has forgotten the function.
type Attempt = Box<dyn FnMut() -> Result<(), MetalError> + Send>;
/// What a thread does.
type Work = Box<dyn FnOnce() + Send>;

/// A return that goes on.
struct LateReturn {
    function: String,
    attempt: Attempt,
    /// Let go when the function is gone.
    slot: Option<FrontSlot>,
}

/// Returns that wait for a thread.
#[derive(Clone, Default)]
pub(super) struct LateReturns(Arc<Mutex<Vec<LateReturn>>>);

impl LateReturns {
    /// Goes on with a return that has failed, in a thread. `slot` is kept until it is done.
    pub fn add(&self, function: &str, attempt: Attempt, slot: Option<FrontSlot>) {
        self.all().push(LateReturn { function: function.to_owned(), attempt, slot });
        self.work_off();
    }

    /// Starts threads for the returns that have none yet, for lack of threads.
    pub fn work_off(&self) {
        self.work_off_by(|work| {
            std::thread::Builder::new().name("late return".into()).spawn(work).map(drop)
        });
    }

    fn work_off_by(&self, start: impl Fn(Work) -> io::Result<()>) {
        let waiting = self.all().len();
        for _ in 0..waiting {
            let returns = self.clone();
            let work = move || {
                // Another thread may have taken it.
                let late = returns.all().pop();
                if let Some(late) = late {
                    late.go_on(sleep);
                }
            };
            if let Err(cause) = start(Box::new(work)) {
                return tracing::error!(%cause, "no thread goes on with a return: it is tried again with the next function");
            }
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<LateReturn>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LateReturn {
    /// Tries it until it is done; `pause` lets time pass.
    fn go_on(mut self, pause: impl Fn(Duration)) {
        let mut again = SOON;
        let mut told = false;
        loop {
            match (self.attempt)() {
                Ok(()) => break,
                // The module has waited for the driver.
                Err(error) if is_under_way(&error) => {}
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::error!(function = self.function, %error, "the function cannot be returned yet");
                    }
                    pause(again);
                    again = (again * 2).min(LATER);
                }
            }
        }
        tracing::info!(function = self.function, "it is returned, late");
        drop(self.slot);
    }
}

/// Whether the module goes on with a return whose end it has not told.
pub(super) fn is_under_way(error: &MetalError) -> bool {
    matches!(error, MetalError::Refused { errno: Errno::TIMEDOUT | Errno::INTR, .. })
}

/// Whether the module knows no such function, or there is no module that could.
pub(super) fn is_gone(error: &MetalError) -> bool {
    match error {
        MetalError::Refused { errno, .. } => *errno == Errno::NOENT,
        MetalError::NoModule(cause) => {
            let none = [Errno::NOENT, Errno::NXIO, Errno::NODEV];
            Errno::from_io_error(cause).is_some_and(|errno| none.contains(&errno))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::borrower::fence::tests::{ended, granted};

    fn refused(errno: Errno) -> MetalError {
        MetalError::Refused { what: "returning".into(), errno }
    }

    fn no_module(errno: Errno) -> MetalError {
        MetalError::NoModule(errno.into())
    }

    #[test]
    fn a_return_is_tried_again_until_the_function_is_gone_whatever_it_fails_for() {
        let mut answers = vec![
            Ok(()),
            Err(refused(Errno::BUSY)),
            Err(refused(Errno::INTR)),
            Err(no_module(Errno::MFILE)),
            Err(refused(Errno::TIMEDOUT)),
            Err(MetalError::Version(2)),
        ];
        let left = Arc::new(AtomicUsize::new(answers.len()));
        let seen = left.clone();
        let attempt = move || {
            seen.store(answers.len() - 1, Ordering::Relaxed);
            answers.pop().unwrap()
        };
        let (fence, follows) = granted(&[(1, "alpha/d0")]);
        let slot = fence.begin_front(1, Duration::ZERO).unwrap();
        fence.decide(|it| it.receive(0, ended(1)));
        fence.decide(|it| it.close_done(1));
        let late = LateReturn {
            function: "alpha/d0".to_owned(),
            attempt: Box::new(attempt),
            slot: Some(slot),
        };
        let pauses = RefCell::new(Vec::new());
        late.go_on(|pause| {
            assert!(follows.try_recv().is_err(), "it has its slot");
            pauses.borrow_mut().push(pause);
        });
        assert_eq!(left.load(Ordering::Relaxed), 0);
        assert_eq!(*pauses.borrow(), [SOON, SOON * 2, SOON * 4]);
        assert!(follows.try_recv().is_ok(), "the slot is let go");
    }

    #[test]
    fn a_return_without_a_thread_waits_for_one() {
        let returns = LateReturns::default();
        let tried = Arc::new(AtomicUsize::new(0));
        let seen = tried.clone();
        let attempt = move || {
            seen.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let late =
            LateReturn { function: "alpha/d0".to_owned(), attempt: Box::new(attempt), slot: None };
        returns.all().push(late);
        returns.work_off_by(|_| Err(Errno::AGAIN.into()));
        assert_eq!((returns.all().len(), tried.load(Ordering::Relaxed)), (1, 0));
        returns.work_off_by(|work| {
            work();
            Ok(())
        });
        assert_eq!((returns.all().len(), tried.load(Ordering::Relaxed)), (0, 1));
    }

    #[test]
    fn a_function_is_gone_that_the_module_does_not_know_or_without_a_module() {
        for error in [refused(Errno::NOENT), no_module(Errno::NOENT), no_module(Errno::NXIO)] {
            assert!(is_gone(&error), "{error}");
        }
        for error in [refused(Errno::NODEV), no_module(Errno::MFILE), MetalError::Version(2)] {
            assert!(!is_gone(&error), "{error}");
        }
    }
}
