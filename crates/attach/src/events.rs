//! What happens to a process' segments and connections, for those who wait for it and for those
//! who want to be called.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rackbus_segment::NodeId;
use rackbus_segment::message::Change;

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// A host's process connected to the segment.
    Connected(NodeId),
    /// A host's process disconnected from the segment, or is gone.
    Disconnected(NodeId),
    /// What the process is connected to changed.
    Remote(Change),
}

/// Called for each happening, on the session's thread for that; false ends it.
pub type Callback = Box<dyn FnMut(Happening) -> bool + Send>;

/// Happenings that nobody has taken yet, at most; the oldest give way.
const MOST: usize = 4096;

/// What happens to one segment or connection.
#[derive(Default)]
pub struct Watch {
    state: Mutex<State>,
    arrived: Condvar,
    callback: Mutex<Option<Callback>>,
    /// How the far end ended.
    ending: OnceLock<Change>,
    /// The far end's host is out of reach.
    unreachable: AtomicBool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Happening>,
    /// Whether there is somebody to call.
    called: bool,
    /// This end is over: who waits is to stop.
    over: bool,
    /// The thread that is in the callback.
    calling: Option<ThreadId>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Watch {
    pub(crate) fn new(callback: Option<Callback>) -> Arc<Watch> {
        let state = State { called: callback.is_some(), ..State::default() };
        Arc::new(Watch {
            state: Mutex::new(state),
            arrived: Condvar::new(),
            callback: Mutex::new(callback),
            ending: OnceLock::new(),
            unreachable: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the far end is gone for good.
    pub fn lost(&self) -> bool {
        self.ending.get().is_some()
    }

    /// How the far end went, if it is gone for good.
    pub fn ending(&self) -> Option<Change> {
        self.ending.get().copied()
    }

    /// Whether the far end went with its host, or this host's own node.
    pub fn is_unreachable(&self) -> bool {
        self.unreachable.load(Ordering::Acquire)
    }

    /// Waits for the next happening. `None` after `timeout` (`None` waits for ever), or when this
    /// end is over meanwhile ([`is_over`](Watch::is_over)).
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Happening> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        loop {
            if let Some(happening) = state.queue.pop_front() {
                return Some(happening);
            }
            if state.over {
                return None;
            }
            state = match deadline {
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Whether this end is over: removed, disconnected, or its session has ended.
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Ends the waiting and the calling: nobody is called any more when this returns, unless it is
    /// that call that ends it.
    pub(crate) fn end(&self) {
        let own = std::thread::current().id();
        let mut state = self.lock();
        state.over = true;
        self.arrived.notify_all();
        let by_others = |state: &mut State| state.calling.is_some_and(|by| by != own);
        // The result is that nobody else is in it; there is nothing to look at.
        drop(self.arrived.wait_while(state, by_others));
    }

    /// Something happened: who waits is woken, who wants to be called will be.
    pub(crate) fn happened(self: &Arc<Self>, happening: Happening, calls: &Calls) {
        if let Happening::Remote(change) = happening {
            if change == Change::NotOperational {
                self.unreachable.store(true, Ordering::Release);
            }
            if change.is_final() {
                // The first one is how it was.
                let _ = self.ending.set(change);
            }
        }
        let mut state = self.lock();
        if state.called {
            // The thread lives as long as the session.
            let _ = calls.0.send((self.clone(), happening));
            return;
        }
        if state.queue.len() >= MOST {
            state.queue.pop_front();
        }
        state.queue.push_back(happening);
        self.arrived.notify_all();
    }

    fn call(&self, happening: Happening) {
        {
            let mut state = self.lock();
            if state.over {
                return;
            }
            state.calling = Some(std::thread::current().id());
        }
        let mut callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner);
        if !callback.as_mut().is_none_or(|call| call(happening)) {
            *callback = None;
        }
        drop(callback);
        self.lock().calling = None;
        self.arrived.notify_all();
    }
}

/// Where callbacks are asked for.
#[derive(Debug, Clone)]
pub(crate) struct Calls(mpsc::Sender<(Arc<Watch>, Happening)>);

impl Calls {
    /// With a thread that calls, one after the other in the order in which things happened, until
    /// the last sender is gone.
    pub(crate) fn start() -> std::io::Result<Calls> {
        let (sender, receiver) = mpsc::channel::<(Arc<Watch>, Happening)>();
        let call = move || {
            for (watch, happening) in receiver {
                watch.call(happening);
            }
        };
        std::thread::Builder::new().name("rackbus callbacks".into()).spawn(call)?;
        Ok(Calls(sender))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_ends_it_waits_for_the_call_that_is_under_way() {
        let calls = Calls::start().unwrap();
        let (entered, is_in) = mpsc::channel();
        let (go_on, may_return) = mpsc::channel::<()>();
        let returned = Arc::new(AtomicBool::new(false));
        let says = returned.clone();
        let watch = Watch::new(Some(Box::new(move |_| {
            entered.send(()).unwrap();
            may_return.recv().unwrap();
            says.store(true, Ordering::Release);
            true
        })));
        watch.happened(Happening::Connected(4), &calls);
        watch.happened(Happening::Connected(8), &calls);
        is_in.recv().unwrap();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                watch.end();
                returned.load(Ordering::Acquire)
            });
            while !watch.is_over() {
                std::thread::yield_now();
            }
            go_on.send(()).unwrap();
            assert!(ended.join().unwrap());
        });
        // The second is for nobody any more.
        let (called, was_called) = mpsc::channel();
        let last = Watch::new(Some(Box::new(move |_| called.send(()).is_ok())));
        last.happened(Happening::Connected(4), &calls);
        was_called.recv().unwrap();
        assert!(is_in.try_recv().is_err());
    }

    #[test]
    fn a_call_may_end_what_it_is_called_for() {
        let calls = Calls::start().unwrap();
        let (done, ended) = mpsc::channel();
        let own: Arc<Mutex<Option<Arc<Watch>>>> = Arc::default();
        let itself = own.clone();
        let watch = Watch::new(Some(Box::new(move |_| {
            itself.lock().unwrap().as_ref().unwrap().end();
            done.send(()).is_ok()
        })));
        *own.lock().unwrap() = Some(watch.clone());
        watch.happened(Happening::Connected(4), &calls);
        ended.recv().unwrap();
    }
}
