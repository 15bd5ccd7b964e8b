//! What happens to a process' segments and connections, for those who wait for it and for those
//! who want to be called.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rackbus_memory::copy::TransferParties;
use rackbus_memory::threads;
use rackbus_segment::NodeId;
use rackbus_segment::message::ConnectionChange;

/// What a process is told of a segment that it owns or is connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentEvent {
    /// A host's process connected to the segment.
    Connected(NodeId),
    /// A host's process disconnected from the segment, or is gone.
    Disconnected(NodeId),
    /// What the process is connected to changed.
    Remote(ConnectionChange),
    /// An attempt to connect has ended; who made it knows how. Told to callbacks of such attempts, before anything else.
    Attempted,
}

/// Called for each event, on the session's thread for that; false ends it.
pub type Callback = Box<dyn FnMut(SegmentEvent) -> bool + Send>;

/// Events that nobody has taken yet, at most; the oldest give way.
const MOST: usize = 4096;

/// What happens to one segment or connection.
///
/// Apart from the count of its holders, which each copy changes: a copy engine on another processor
/// looks here when it is done.
#[derive(Default)]
#[repr(align(64))]
pub struct Watch {
    state: Mutex<State>,
    arrived: Condvar,
    callback: Mutex<Option<Callback>>,
    /// How the far end ended.
    ending: OnceLock<ConnectionChange>,
    /// The far end's host is out of reach.
    unreachable: AtomicBool,
}

impl TransferParties for Watch {
    fn are_gone(&self) -> bool {
        self.lost()
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<SegmentEvent>,
    /// Whether there is somebody to call, or was.
    called: bool,
    /// Who was called wants to be called no more.
    cancelled: bool,
    /// This end has ended: who waits is to stop.
    ended: bool,
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
    #[inline]
    pub fn lost(&self) -> bool {
        self.ending.get().is_some()
    }

    /// How the far end went, if it is gone for good.
    pub fn ending(&self) -> Option<ConnectionChange> {
        self.ending.get().copied()
    }

    /// Whether the far end went with its host, or this host's own node.
    pub fn is_unreachable(&self) -> bool {
        self.unreachable.load(Ordering::Acquire)
    }

    /// Waits for the next event. `None` after `timeout` (`None` waits for ever), or when this
    /// end has ended meanwhile ([`has_ended`](Watch::has_ended)). Where there is a callback, events are for that alone.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<SegmentEvent> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        loop {
            let event = if state.called { None } else { state.queue.pop_front() };
            if event.is_some() {
                return event;
            }
            if state.ended {
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

    /// Whether its events are for a callback, and cannot be waited for.
    pub fn has_callback(&self) -> bool {
        self.lock().called
    }

    /// Whether this end has ended: removed, disconnected, or its session has ended.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Ends the waiting and the calling: nobody is called any more when this returns, unless it is
    /// that call that ends it.
    pub(crate) fn end(&self) {
        let own = std::thread::current().id();
        let mut state = self.lock();
        state.ended = true;
        self.arrived.notify_all();
        let by_others = |state: &mut State| state.calling.is_some_and(|by| by != own);
        // The result is that nobody else is in it; there is nothing to look at.
        drop(self.arrived.wait_while(state, by_others));
    }

    /// Something happened: who waits is woken, who wants to be called will be.
    pub(crate) fn deliver(self: &Arc<Self>, event: SegmentEvent, calls: &Calls) {
        if let SegmentEvent::Remote(change) = event {
            if change == ConnectionChange::NotOperational {
                self.unreachable.store(true, Ordering::Release);
            }
            if change.is_final() {
                // The first one is how it was.
                let _ = self.ending.set(change);
            }
        }
        let mut state = self.lock();
        if state.called && (state.cancelled || state.ended) {
            return;
        }
        let full = state.queue.len() >= MOST;
        if full {
            state.queue.pop_front();
        }
        state.queue.push_back(event);
        if !state.called {
            self.arrived.notify_all();
        } else if !full {
            // As many calls are asked for as there are events, so that events of several are in their order. The thread
            // lives as long as the session.
            let _ = calls.0.send(self.clone());
        }
    }

    /// Calls for the oldest event, if it is still wanted.
    fn call(&self) {
        let event = {
            let mut state = self.lock();
            if state.ended {
                return;
            }
            let Some(event) = state.queue.pop_front() else { return };
            state.calling = Some(std::thread::current().id());
            event
        };
        let mut callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner);
        let mut goes_on = || callback.as_mut().is_none_or(|call| call(event));
        // One that panics is not called again: who ends its watch does not wait for it, and others are called.
        let goes_on = std::panic::catch_unwind(AssertUnwindSafe(&mut goes_on));
        if goes_on.is_err() {
            tracing::error!("a callback for an event of a segment panicked, and is called no more");
        }
        let goes_on = goes_on.unwrap_or(false);
        if !goes_on {
            *callback = None;
        }
        drop(callback);
        let mut state = self.lock();
        state.calling = None;
        if !goes_on {
            state.cancelled = true;
            state.queue = VecDeque::new();
        }
        drop(state);
        self.arrived.notify_all();
    }
}

/// Where callbacks are asked for: what has an event to be called for, once for each event.
#[derive(Debug, Clone)]
pub(crate) struct Calls(mpsc::Sender<Arc<Watch>>);

impl Calls {
    /// With a thread that calls, one after the other in the order in which things happened, until
    /// the last sender is gone.
    pub(crate) fn start() -> std::io::Result<Calls> {
        let (sender, receiver) = mpsc::channel::<Arc<Watch>>();
        let call = move || receiver.into_iter().for_each(|watch| watch.call());
        threads::spawn("rackbus callbacks", call)?;
        Ok(Calls(sender))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ending_a_callback_waits_for_the_call_that_is_under_way() {
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
        watch.deliver(SegmentEvent::Connected(4), &calls);
        watch.deliver(SegmentEvent::Connected(8), &calls);
        is_in.recv().unwrap();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                watch.end();
                returned.load(Ordering::Acquire)
            });
            while !watch.has_ended() {
                std::thread::yield_now();
            }
            go_on.send(()).unwrap();
            assert!(ended.join().unwrap());
        });
        // The second is for nobody any more.
        let (called, was_called) = mpsc::channel();
        let last = Watch::new(Some(Box::new(move |_| called.send(()).is_ok())));
        last.deliver(SegmentEvent::Connected(4), &calls);
        was_called.recv().unwrap();
        assert!(is_in.try_recv().is_err());
    }

    #[test]
    fn events_for_a_call_that_does_not_return_are_not_kept_without_end() {
        let calls = Calls::start().unwrap();
        let (entered, is_in) = mpsc::channel();
        let (go_on, may_return) = mpsc::channel::<bool>();
        let watch = Watch::new(Some(Box::new(move |event| {
            entered.send(event).unwrap();
            may_return.recv().unwrap()
        })));
        watch.deliver(SegmentEvent::Connected(0), &calls);
        assert_eq!(is_in.recv().unwrap(), SegmentEvent::Connected(0));
        let last = 3 * MOST as u32;
        (1..=last).for_each(|node| watch.deliver(SegmentEvent::Connected(node), &calls));
        assert_eq!(watch.lock().queue.len(), MOST);
        // The newest are called for, in their order.
        let first = last - MOST as u32 + 1;
        for node in first..first + 10 {
            go_on.send(true).unwrap();
            assert_eq!(is_in.recv().unwrap(), SegmentEvent::Connected(node));
        }
        go_on.send(false).unwrap();
        let others = || Arc::strong_count(&watch) > 1;
        while others() {
            std::thread::yield_now();
        }
        // It is cancelled: nothing is kept, and nobody asks for a call.
        watch.deliver(SegmentEvent::Connected(4), &calls);
        assert!(watch.lock().queue.is_empty() && !others());
        assert!(is_in.try_recv().is_err());
    }

    #[test]
    fn calls_for_several_are_in_the_order_of_what_happened() {
        let calls = Calls::start().unwrap();
        let (called, was_called) = mpsc::channel();
        let both: Vec<Arc<Watch>> = (0..2)
            .map(|number| {
                let called = called.clone();
                Watch::new(Some(Box::new(move |event| called.send((number, event)).is_ok())))
            })
            .collect();
        let order = [0, 0, 1, 0, 1, 1, 1, 0];
        for (node, number) in (0..).zip(order) {
            both[number].deliver(SegmentEvent::Connected(node), &calls);
        }
        for (node, number) in (0..).zip(order) {
            assert_eq!(was_called.recv().unwrap(), (number, SegmentEvent::Connected(node)));
        }
    }

    #[test]
    fn a_call_that_panics_holds_up_neither_its_end_nor_other_calls() {
        let calls = Calls::start().unwrap();
        let watch = Watch::new(Some(Box::new(|_| panic!("a mistake of the program"))));
        watch.deliver(SegmentEvent::Connected(4), &calls);
        watch.deliver(SegmentEvent::Connected(8), &calls);
        let (called, was_called) = mpsc::channel();
        let other = Watch::new(Some(Box::new(move |_| called.send(()).is_ok())));
        other.deliver(SegmentEvent::Connected(4), &calls);
        was_called.recv().unwrap();
        watch.end();
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
        watch.deliver(SegmentEvent::Connected(4), &calls);
        ended.recv().unwrap();
    }
}
