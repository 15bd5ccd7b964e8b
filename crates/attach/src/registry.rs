//! What a process has of its host's node, by handles, and the events about it.
//!
//! Events come on a socket of their own, in an order that holds; those about things whose making has not been
//! heard of yet are kept until it is. The thread that listens answers what concerns moved memory by itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use rackbus_memory::doorbell::Doorbell;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, Handles, PacketStream, ResourceHandle, StreamError};
use rackbus_segment::Handle;
use rackbus_segment::message::{ConnectionChange, Notice, Refusal, SessionEvent, decode, encode};

use crate::events::{Calls, SegmentEvent, Watch};
use crate::interrupts::Rings;
use crate::memory::MappedMemory;
use crate::session::{AttachError, Session, lock};

/// Events kept for what is not known yet.
const MOST_EARLY: usize = 1024;
/// Handles that were given back and are remembered: more than a node tells of before it hears of the last of them.
const MOST_FORGOTTEN: usize = 1024;

/// What events are about.
#[derive(Debug)]
pub(crate) struct Registry {
    watched: Mutex<HashMap<Handle, Watched>>,
    unwatched: Mutex<Unwatched>,
    /// Ranges that are hidden of memory that is not known yet.
    hidden: Mutex<HashMap<Handle, (u64, u64)>>,
    /// Held while an event is dealt with: they are in the order in which they came, those that
    /// came early too.
    order: Mutex<()>,
    pub(crate) finished: FinishedCall,
    pub(crate) gone: AtomicBool,
    pub(crate) calls: Calls,
}

/// What nobody watches: not yet, or not any more.
#[derive(Debug, Default)]
struct Unwatched {
    /// Events about things whose making has not been heard of yet: they come on another socket. The last one is first.
    early: VecDeque<(Handle, SessionEvent, Handles)>,
    /// What was given back last. Events about it may still come, which nobody is to keep, nor the handles beside them.
    forgotten: VecDeque<Handle>,
}

impl Unwatched {
    fn keep(&mut self, handle: Handle, event: SessionEvent, handles: Handles) {
        if self.forgotten.contains(&handle) {
            return;
        }
        // What is forgotten already is soon the oldest.
        self.early.truncate(MOST_EARLY);
        self.early.push_front((handle, event, handles));
    }

    /// Takes the events that came early for `handle`, the first one last.
    fn take(&mut self, handle: Handle) -> Vec<(Handle, SessionEvent, Handles)> {
        self.forgotten.retain(|it| *it != handle);
        let (mine, others): (Vec<_>, Vec<_>) =
            self.early.drain(..).partition(|(about, ..)| *about == handle);
        self.early = others.into();
        mine
    }

    fn forget(&mut self, handle: Handle) {
        self.early.retain(|(about, ..)| *about != handle);
        if self.forgotten.len() >= MOST_FORGOTTEN {
            self.forgotten.pop_front();
        }
        self.forgotten.push_back(handle);
    }
}

/// What has taken longer, and is done.
#[derive(Debug, Default)]
pub(crate) struct FinishedCall {
    state: Mutex<Outcomes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Outcomes {
    by_ticket: HashMap<Handle, Result<(), Refusal>>,
    /// Tickets that nobody waits for any more, until they are told of.
    given_up: HashSet<Handle>,
    /// Nothing will be told any more.
    ended: bool,
}

impl FinishedCall {
    fn tell(&self, ticket: Handle, outcome: Result<(), Refusal>) {
        let mut state = lock(&self.state);
        if !state.given_up.remove(&ticket) {
            state.by_ticket.insert(ticket, outcome);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn end(&self) {
        // Under the lock: whoever looked before sleeps by now, and is woken.
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    /// How what `ticket` is for ended; [`AttachError::Busy`] when it goes on after `limit`.
    pub(crate) fn wait(&self, ticket: Handle, limit: Duration) -> Result<(), AttachError> {
        let going_on =
            |state: &mut Outcomes| !state.by_ticket.contains_key(&ticket) && !state.ended;
        let waited = self.changed.wait_timeout_while(lock(&self.state), limit, going_on);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.by_ticket.remove(&ticket) {
            Some(outcome) => Ok(outcome?),
            None if state.ended => Err(AttachError::Gone(StreamError::Closed)),
            None => {
                state.given_up.insert(ticket);
                Err(AttachError::Busy)
            }
        }
    }
}

/// Where what is known of a handle goes; what is gone is told nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watched {
    pub watch: Weak<Watch>,
    pub memory: Weak<MappedMemory>,
    pub size: u64,
    pub rings: Weak<Rings>,
    /// The doorbell of an own interrupt.
    pub bell: Weak<Doorbell>,
}

impl Registry {
    pub(crate) fn new(calls: Calls) -> Registry {
        Registry {
            watched: Mutex::default(),
            unwatched: Mutex::default(),
            hidden: Mutex::default(),
            order: Mutex::default(),
            finished: FinishedCall::default(),
            gone: AtomicBool::new(false),
            calls,
        }
    }

    /// Tells what events about `handle` are for, and what has happened to it already.
    pub(crate) fn watch(&self, handle: Handle, watched: Watched, session: &Session) {
        self.watch_from(handle, watched, session.events());
    }

    fn watch_from(&self, handle: Handle, watched: Watched, events: &dyn PacketStream) {
        // What comes from now on waits until this is done with what came before.
        let _order = lock(&self.order);
        let early = {
            let mut unwatched = lock(&self.unwatched);
            lock(&self.watched).insert(handle, watched);
            unwatched.take(handle)
        };
        let hidden = lock(&self.hidden).get(&handle).copied();
        if let (Some((offset, length)), Some(memory)) = (hidden, self.memory(handle)) {
            memory.hide(offset, length);
        }
        for (_, event, handles) in early.into_iter().rev() {
            self.heard(event, handles, events);
        }
        if self.gone.load(Ordering::Acquire) {
            self.all_gone();
        }
    }

    /// What `handle` stood for was given back: whatever comes of it from now on is for nobody.
    pub(crate) fn forget(&self, handle: Handle) {
        // Both under one lock: no event is kept between the two steps.
        let mut unwatched = lock(&self.unwatched);
        lock(&self.watched).remove(&handle);
        unwatched.forget(handle);
    }

    fn get(&self, handle: Handle) -> Option<Watched> {
        lock(&self.watched).get(&handle).cloned()
    }

    fn memory(&self, handle: Handle) -> Option<Arc<MappedMemory>> {
        self.get(handle).and_then(|watched| watched.memory.upgrade())
    }

    fn rings(&self, handle: Handle) -> Option<Arc<Rings>> {
        self.get(handle).and_then(|watched| watched.rings.upgrade())
    }

    pub(crate) fn listen(&self, events: &dyn PacketStream) {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 20_000));
        while let Ok(packet) = events.receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            packet.handles.keep_room();
            match buffer.get(..packet.length).and_then(decode::<SessionEvent>) {
                Some(event) => self.came(event, packet.handles, events),
                None => break,
            }
        }
        {
            let _order = lock(&self.order);
            self.gone.store(true, Ordering::Release);
            self.all_gone();
        }
        self.finished.end();
    }

    fn came(&self, event: SessionEvent, handles: Handles, events: &dyn PacketStream) {
        let _order = lock(&self.order);
        self.heard(event, handles, events);
    }

    /// The node is gone, and with it everything that was had through it.
    fn all_gone(&self) {
        let all: Vec<Watched> = lock(&self.watched).values().cloned().collect();
        all.iter().filter_map(|watched| watched.memory.upgrade()).for_each(|it| it.end());
        for watch in all.iter().filter_map(|watched| watched.watch.upgrade()) {
            if !watch.lost() {
                watch.deliver(SegmentEvent::Remote(ConnectionChange::NotOperational), &self.calls);
                watch.deliver(SegmentEvent::Remote(ConnectionChange::Lost), &self.calls);
            }
        }
        // Those that could trigger own interrupts are told that the host is gone, and trigger them no more: who waits for one
        // would wait for ever.
        all.iter().filter_map(|watched| watched.bell.upgrade()).for_each(|bell| bell.leave());
    }

    fn deliver(&self, handle: Handle, event: SegmentEvent) {
        if let Some(watch) = self.get(handle).and_then(|watched| watched.watch.upgrade()) {
            watch.deliver(event, &self.calls);
        }
    }

    /// Deals with an event; the caller holds `order`.
    fn heard(&self, event: SessionEvent, mut handles: Handles, events: &dyn PacketStream) {
        if let Some(handle) = about(&event) {
            let mut unwatched = lock(&self.unwatched);
            if !lock(&self.watched).contains_key(&handle) {
                return unwatched.keep(handle, event, handles);
            }
        }
        match event {
            SessionEvent::Connected { segment, node } => {
                self.deliver(segment, SegmentEvent::Connected(node));
            }
            SessionEvent::Disconnected { segment, node } => {
                self.deliver(segment, SegmentEvent::Disconnected(node));
            }
            SessionEvent::Remote { connection, change } => {
                if let Some(memory) = self.memory(connection).filter(|_| change.is_final()) {
                    memory.end();
                }
                self.deliver(connection, SegmentEvent::Remote(change));
            }
            SessionEvent::Sender { interrupt, ring } => {
                let Some(rings) = self.rings(interrupt) else { return };
                let added = handles.resource().map_err(AttachError::from);
                if let Err(error) = added.and_then(|memory| Ok(rings.add(ring, &memory)?)) {
                    tracing::error!(%error, "a sender of data interrupts could not be added");
                }
            }
            SessionEvent::SenderGone { interrupt, ring } => {
                if let Some(rings) = self.rings(interrupt) {
                    rings.sender_gone(ring);
                }
            }
            SessionEvent::Freeze { ticket, keeper, offset, length } => {
                if self.freeze(keeper, (offset, length)) {
                    answer(events, Notice::Frozen { ticket, keeper });
                }
            }
            SessionEvent::Adopt { ticket, keeper, offset, length, from } => {
                match handles.resource() {
                    Ok(memory) => self.adopt(keeper, (offset, length), memory, from),
                    Err(error) => tracing::error!(%error, "memory that was moved did not come"),
                }
                answer(events, Notice::Adopted { ticket, keeper });
            }
            SessionEvent::Unfreeze { keeper, .. } => {
                if let Some(memory) = self.memory(keeper) {
                    memory.unfreeze();
                }
            }
            SessionEvent::Hide { turn, keeper, offset, length } => {
                match self.memory(keeper) {
                    Some(memory) => memory.hide(offset, length),
                    // It may be known, and mapped, before it is shown.
                    None => drop(lock(&self.hidden).insert(keeper, (offset, length))),
                }
                answer(events, Notice::Hidden { turn });
            }
            SessionEvent::Show { keeper } => {
                lock(&self.hidden).remove(&keeper);
                if let Some(memory) = self.memory(keeper) {
                    memory.show();
                }
            }
            SessionEvent::Finished { ticket, outcome } => self.finished.tell(ticket, outcome),
        }
    }

    /// Has writers of `(offset, length)` wait; `false` where that cannot be done, which ends the memory.
    fn freeze(&self, keeper: Handle, (offset, length): (u64, u64)) -> bool {
        if let Some(memory) = self.memory(keeper)
            && let Err(error) = memory.freeze(offset, length)
        {
            tracing::error!(%error, "memory that is being moved cannot be protected from its writers");
            memory.end();
            return false;
        }
        true
    }

    /// Maps `moved` from `from` in the place of the part `(offset, length)`, which was moved.
    fn adopt(&self, keeper: Handle, part: (u64, u64), moved: ResourceHandle, from: u64) {
        let watched = self.get(keeper);
        let whole = watched.as_ref().is_some_and(|it| part == (0, it.size));
        if let Some(memory) = watched.and_then(|it| it.memory.upgrade())
            && let Err(error) = memory.adopt(part, moved, from, whole)
        {
            tracing::error!(%error, "moved memory cannot be mapped");
        }
    }
}

/// What an event is about.
fn about(event: &SessionEvent) -> Option<Handle> {
    match event {
        SessionEvent::Connected { segment, .. } | SessionEvent::Disconnected { segment, .. } => {
            Some(*segment)
        }
        SessionEvent::Remote { connection, .. } => Some(*connection),
        SessionEvent::Sender { interrupt, .. } | SessionEvent::SenderGone { interrupt, .. } => {
            Some(*interrupt)
        }
        SessionEvent::Freeze { keeper, .. }
        | SessionEvent::Adopt { keeper, .. }
        | SessionEvent::Unfreeze { keeper, .. } => Some(*keeper),
        // What is not known yet is not mapped, and noted when it is hidden.
        SessionEvent::Hide { .. } | SessionEvent::Show { .. } | SessionEvent::Finished { .. } => {
            None
        }
    }
}

/// Sends an answer, and waits for room where the node has not read the earlier ones: a node that misses an answer cuts the
/// process off. That wait ends, as a node reads notices on a thread of its own, and a session that closes ends it too.
fn answer(events: &dyn PacketStream, notice: Notice) {
    let bytes = encode(&notice);
    loop {
        match events.send(&bytes, &[]) {
            Ok(()) => return,
            Err(StreamError::TimedOut) => events.wait_sendable(),
            // The session is over, and whoever listens finds that.
            Err(error) => return tracing::warn!(%error, "the node could not be answered"),
        }
    }
}

#[cfg(test)]
mod tests;
