//! Brings the threads that hold conversations to rest, all of them at a moment where each can be taken up
//! again: between two messages. Then the process can be replaced by another one that continues.
//!
//! Who begins something that must not be cut off [enters](Gate::enter), and has left when its [`GatePassage`] is
//! dropped. While the gate is closed nobody enters, and who is inside [rests](GatePassage::rest) as soon as it
//! can; to hear of that, it waits for the gate's descriptor besides its own.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::event::Event;

/// The gate of a process; clones are the same gate.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Rung, and not drained, while the gate is closed.
    closed: Event,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    inside: usize,
    at_rest: usize,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_open<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        let waited = self.changed.wait_while(state, |state| state.closed);
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a gate was not closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotClosed {
    /// Somebody else has closed it.
    #[error("it is already in progress")]
    Closed,
    /// So many did not come to rest in time.
    #[error("{0} conversations did not come to rest")]
    Busy(usize),
}

impl Gate {
    /// A gate that is open.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> std::io::Result<Gate> {
        let (state, changed) = Default::default();
        Ok(Gate(Arc::new(Inner { closed: Event::new()?, state, changed })))
    }

    /// Begins something that must not be cut off; waits while the gate is closed.
    pub fn enter(&self) -> GatePassage {
        let mut state = self.0.wait_open(self.0.lock());
        state.inside += 1;
        drop(state);
        GatePassage(self.clone())
    }

    /// Waits until `descriptor` is readable, and enters. What was readable may have been dealt with by
    /// others meanwhile: look once more.
    pub fn enter_when_readable(&self, descriptor: BorrowedFd<'_>) -> GatePassage {
        loop {
            Event::wait_any(&[descriptor, self.as_fd()], None);
            let passage = self.enter();
            // It may have been the gate, which was closed and opened again.
            if Event::wait_any(&[descriptor], Some(0)) {
                return passage;
            }
        }
    }

    /// Closes the gate and waits until everybody inside rests or has left. It opens when what is returned
    /// is dropped, and at once where it fails.
    ///
    /// # Errors
    /// [`NotClosed`], after `limit` at the latest.
    pub fn close(&self, limit: Duration) -> Result<ClosedGate<'_>, NotClosed> {
        let mut state = self.0.lock();
        if state.closed {
            return Err(NotClosed::Closed);
        }
        state.closed = true;
        self.0.closed.ring();
        let closed = ClosedGate(self);
        let busy = |state: &mut State| state.inside > state.at_rest;
        let waited = self.0.changed.wait_timeout_while(state, limit, busy);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        let left = state.inside - state.at_rest;
        drop(state);
        if waited.timed_out() { Err(NotClosed::Busy(left)) } else { Ok(closed) }
    }
}

impl AsFd for Gate {
    /// Readable while the gate is closed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.closed.as_fd()
    }
}

/// The gate is closed as long as this lives; dropping it opens it.
#[derive(Debug)]
pub struct ClosedGate<'g>(&'g Gate);

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        let inner = &*self.0.0;
        let mut state = inner.lock();
        inner.closed.drain();
        state.closed = false;
        drop(state);
        inner.changed.notify_all();
    }
}

/// Somebody inside of a gate.
#[derive(Debug)]
pub struct GatePassage(Gate);

impl GatePassage {
    /// The gate that this is a passage of.
    pub fn gate(&self) -> &Gate {
        &self.0
    }

    /// Rests while the gate is closed: what this thread does can be taken up by another process.
    pub fn rest(&self) {
        let inner = &*self.0.0;
        let mut state = inner.lock();
        state.at_rest += 1;
        inner.changed.notify_all();
        let mut state = inner.wait_open(state);
        state.at_rest -= 1;
    }
}

impl Drop for GatePassage {
    fn drop(&mut self) {
        self.0.0.lock().inside -= 1;
        self.0.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn it_closes_when_all_inside_rest_or_left_and_goes_on_when_it_opens() {
        let gate = Gate::new().unwrap();
        let busy = gate.enter();
        let (done, ended) = mpsc::channel();
        let resting = std::thread::spawn({
            let passage = gate.enter();
            move || {
                while !Event::wait_any(&[passage.gate().as_fd()], None) {}
                passage.rest();
                done.send(()).unwrap();
            }
        });
        // Long enough for the other one to rest.
        assert_eq!(gate.close(Duration::from_secs(1)).unwrap_err(), NotClosed::Busy(1));
        ended.recv_timeout(LONG).expect("it was opened again");
        resting.join().unwrap();
        drop(busy);
        let closed = gate.close(LONG).unwrap();
        assert_eq!(gate.close(LONG).unwrap_err(), NotClosed::Closed);
        let (entered, enters) = mpsc::channel();
        let late = std::thread::spawn({
            let gate = gate.clone();
            move || entered.send(gate.enter()).unwrap()
        });
        assert!(enters.recv_timeout(Duration::from_millis(20)).is_err(), "it is closed");
        drop(closed);
        drop(enters.recv_timeout(LONG).expect("it is open"));
        late.join().unwrap();
        assert!(!Event::wait_any(&[gate.as_fd()], Some(0)));
    }
}
