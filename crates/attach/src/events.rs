//! What happens to a process' segments and connections, for those who wait for it and for those
//! who want to be called.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
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
    /// The far end is gone for good.
    lost: AtomicBool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Happening>,
    /// Whether there is somebody to call.
    called: bool,
    /// This end is over: who waits is to stop.
    over: bool,
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
            lost: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the far end is gone for good.
    pub fn lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
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

    /// Ends the waiting and the calling.
    pub(crate) fn end(&self) {
        self.lock().over = true;
        self.arrived.notify_all();
    }

    /// Something happened: who waits is woken, who wants to be called will be.
    pub(crate) fn happened(self: &Arc<Self>, happening: Happening, calls: &Calls) {
        if happening == Happening::Remote(Change::Lost) {
            self.lost.store(true, Ordering::Release);
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
        if self.lock().over {
            return;
        }
        let mut callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = match callback.as_mut() {
            Some(call) => call(happening),
            None => return,
        };
        if !goes_on {
            *callback = None;
        }
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
