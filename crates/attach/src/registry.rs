//! What a process has of its host's node, by handles, and the events about it.
//!
//! Events come on a socket of their own, in an order that holds; those about things whose making has not been
//! heard of yet are kept until it is. The thread that listens answers what concerns moved memory by itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use rackbus_memory::descriptors::keep_room;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, PacketStream, StreamError};
use rackbus_segment::Handle;
use rackbus_segment::message::{ConnectionChange, Notice, Refusal, SessionEvent, decode, encode};

use crate::events::{Calls, SegmentEvent, Watch};
use crate::interrupts::Rings;
use crate::memory::MappedMemory;
use crate::session::{AttachError, Session, lock};

/// Events kept for what is not known yet.
const MOST_EARLY: usize = 1024;

/// What events are about.
#[derive(Debug)]
pub(crate) struct Registry {
    watched: Mutex<HashMap<Handle, Watched>>,
    /// Events about things whose making has not been heard of yet: they come on another socket.
    early: Mutex<VecDeque<(Handle, SessionEvent, Vec<OwnedFd>)>>,
    /// Ranges that are hidden of memory that is not known yet.
    hidden: Mutex<HashMap<Handle, (u64, u64)>>,
    /// Held while an event is dealt with: they are in the order in which they came, those that
    /// came early too.
    order: Mutex<()>,
    pub(crate) finished: FinishedCall,
    pub(crate) gone: AtomicBool,
    pub(crate) calls: Calls,
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
}

impl Registry {
    pub(crate) fn new(calls: Calls) -> Registry {
        Registry {
            watched: Mutex::default(),
            early: Mutex::default(),
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
        let early: Vec<_> = {
            let mut early = lock(&self.early);
            lock(&self.watched).insert(handle, watched);
            let (mine, others): (Vec<_>, Vec<_>) =
                early.drain(..).partition(|(about, ..)| *about == handle);
            *early = others.into();
            mine
        };
        let hidden = lock(&self.hidden).get(&handle).copied();
        if let (Some((offset, length)), Some(memory)) = (hidden, self.memory(handle)) {
            memory.hide(offset, length);
        }
        for (_, event, fds) in early.into_iter().rev() {
            self.heard(event, fds, events);
        }
        if self.gone.load(Ordering::Acquire) {
            self.all_gone();
        }
    }

    pub(crate) fn forget(&self, handle: Handle) {
        lock(&self.watched).remove(&handle);
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
            packet.fds.iter().for_each(keep_room);
            match buffer.get(..packet.length).and_then(decode::<SessionEvent>) {
                Some(event) => self.came(event, packet.fds, events),
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

    fn came(&self, event: SessionEvent, fds: Vec<OwnedFd>, events: &dyn PacketStream) {
        let _order = lock(&self.order);
        self.heard(event, fds, events);
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
    }

    fn deliver(&self, handle: Handle, event: SegmentEvent) {
        if let Some(watch) = self.get(handle).and_then(|watched| watched.watch.upgrade()) {
            watch.deliver(event, &self.calls);
        }
    }

    /// Deals with an event; the caller holds `order`.
    fn heard(&self, event: SessionEvent, fds: Vec<OwnedFd>, events: &dyn PacketStream) {
        if let Some(handle) = about(&event) {
            let mut early = lock(&self.early);
            if !lock(&self.watched).contains_key(&handle) {
                // What is forgotten already is soon the oldest.
                early.truncate(MOST_EARLY);
                early.push_front((handle, event, fds));
                return;
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
                if let (Some(rings), Some(file)) = (self.rings(interrupt), fds.into_iter().next())
                    && let Err(error) = rings.add(ring, file)
                {
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
                if let Some(file) = fds.into_iter().next() {
                    self.adopt(keeper, (offset, length), file, from);
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

    /// Maps `file` from `from` in the place of the part `(offset, length)`, which was moved.
    fn adopt(&self, keeper: Handle, part: (u64, u64), file: OwnedFd, from: u64) {
        let watched = self.get(keeper);
        let whole = watched.as_ref().is_some_and(|it| part == (0, it.size));
        if let Some(memory) = watched.and_then(|it| it.memory.upgrade())
            && let Err(error) = memory.adopt(part, file, from, whole)
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
mod tests {
    use std::sync::Arc;

    use rackbus_memory::{Packets, SharedMemory};

    use super::*;

    /// Far above what anything here takes.
    const MOVED: Duration = Duration::from_secs(120);

    const NOW: Option<Duration> = Some(Duration::ZERO);

    /// More answers than the system keeps for a node that is busy.
    #[test]
    fn no_answer_is_lost_while_the_node_reads_nothing() {
        const ASKED: u64 = 2000;
        let (events, node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        let asked = std::thread::spawn(move || {
            for turn in 0..ASKED {
                let hide = SessionEvent::Hide { turn, keeper: Handle(1), offset: 0, length: 1 };
                registry.came(hide, Vec::new(), &events);
            }
        });
        // Until it cannot go on without being read.
        let begun = std::time::Instant::now();
        while !asked.is_finished() && begun.elapsed() < Duration::from_millis(300) {
            std::thread::yield_now();
        }
        let mut buffer = vec![0; rackbus_memory::packets::MAX_PACKET];
        for turn in 0..ASKED {
            let deadline = Some(std::time::Instant::now() + MOVED);
            let packet = node.receive(&mut buffer, &mut AdaptiveSpin::default(), deadline).unwrap();
            assert_eq!(decode(&buffer[..packet.length]), Some(Notice::Hidden { turn }));
        }
        asked.join().unwrap();
    }

    #[test]
    fn what_came_early_stays_before_what_comes_next() {
        let (events, _node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        for number in 0..50 {
            let segment = Handle(number);
            let event = |node| match node {
                0 => SessionEvent::Connected { segment, node: 4 },
                _ => SessionEvent::Disconnected { segment, node: 4 },
            };
            let watch = Watch::new(None);
            let watched = Watched { watch: Arc::downgrade(&watch), ..Watched::default() };
            registry.came(event(0), Vec::new(), &events);
            // Many that came early take long enough for the next one to come meanwhile.
            (0..64).for_each(|_| registry.came(event(0), Vec::new(), &events));
            std::thread::scope(|scope| {
                scope.spawn(|| registry.watch_from(segment, watched, &events));
                while lock(&registry.early).iter().any(|(about, ..)| *about == segment) {
                    std::hint::spin_loop();
                }
                registry.came(event(1), Vec::new(), &events);
            });
            (0..64).for_each(|_| assert_eq!(watch.wait(NOW), Some(SegmentEvent::Connected(4))));
            let heard = [watch.wait(NOW), watch.wait(NOW)].map(Option::unwrap);
            assert_eq!(heard, [SegmentEvent::Connected(4), SegmentEvent::Disconnected(4)]);
        }
    }

    /// Brings `first` before `watched` is known, and `second` while what came early is dealt with.
    fn one_early_one_late(
        watched: Watched,
        first: (SessionEvent, Option<OwnedFd>),
        second: SessionEvent,
    ) {
        let (events, _node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        let (early, fds) = first;
        let handle = about(&early).unwrap();
        // Many that came early take long enough for the next one to come meanwhile.
        let other = SessionEvent::Connected { segment: handle, node: 4 };
        (0..64).for_each(|_| registry.came(other.clone(), Vec::new(), &events));
        registry.came(early, fds.into_iter().collect(), &events);
        std::thread::scope(|scope| {
            scope.spawn(|| registry.watch_from(handle, watched, &events));
            while lock(&registry.early).iter().any(|(about, ..)| *about == handle) {
                std::hint::spin_loop();
            }
            registry.came(second, Vec::new(), &events);
        });
    }

    #[test]
    fn a_freeze_that_came_early_ends_with_the_loss_that_followed_it() {
        for number in 0..50 {
            let file = SharedMemory::reserve("test", 4096).unwrap();
            let (memory, keeper) = (MappedMemory::new(Some(file), true, 4096), Handle(number));
            let watch = Watch::new(None);
            let watched = Watched {
                watch: Arc::downgrade(&watch),
                memory: Arc::downgrade(&memory),
                size: 4096,
                ..Watched::default()
            };
            let freeze =
                SessionEvent::Freeze { ticket: Handle(1), keeper, offset: 0, length: 4096 };
            let lost = SessionEvent::Remote { connection: keeper, change: ConnectionChange::Lost };
            one_early_one_late(watched, (freeze, None), lost);
            assert!(!memory.is_frozen(), "its writers wait for ever");
        }
    }

    #[test]
    fn what_is_hidden_before_it_is_known_is_until_it_is_shown() {
        let (events, node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        for (number, shown_before) in [(1, false), (2, true)] {
            let keeper = Handle(number);
            let file = SharedMemory::reserve("test", 4096).unwrap();
            let memory = MappedMemory::new(Some(file), true, 4096);
            let watched = Watched { memory: Arc::downgrade(&memory), ..Watched::default() };
            let hide = SessionEvent::Hide { turn: number, keeper, offset: 0, length: 16 };
            registry.came(hide, Vec::new(), &events);
            let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
            let answer = node.receive(&mut buffer, &mut spin, None).unwrap();
            assert_eq!(decode(&buffer[..answer.length]), Some(Notice::Hidden { turn: number }));
            if shown_before {
                registry.came(SessionEvent::Show { keeper }, Vec::new(), &events);
            }
            registry.watch_from(keeper, watched, &events);
            assert_eq!(memory.is_hidden(), !shown_before);
            registry.came(SessionEvent::Show { keeper }, Vec::new(), &events);
            assert!(!memory.is_hidden());
        }
    }

    #[test]
    fn a_sender_that_came_early_goes_when_it_is_gone() {
        for number in 0..50 {
            let (rings, interrupt) = (Rings::silent(), Handle(number));
            let watched = Watched { rings: Arc::downgrade(&rings), ..Watched::default() };
            let ring = Handle(7);
            let file = SharedMemory::reserve("ring", 1 << 20).unwrap();
            let sender = (SessionEvent::Sender { interrupt, ring }, Some(file));
            one_early_one_late(watched, sender, SessionEvent::SenderGone { interrupt, ring });
            assert_eq!(rings.count(), 0, "its ring stays for ever");
        }
    }

    #[test]
    fn who_waits_for_the_end_of_a_move_learns_that_the_node_is_gone() {
        for number in 0..2_000 {
            let finished = FinishedCall::default();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| finished.wait(Handle(number), MOVED));
                finished.end();
                let gone = waiting.join().unwrap();
                assert!(matches!(gone, Err(AttachError::Gone(StreamError::Closed))));
            });
        }
        let finished = FinishedCall::default();
        finished.tell(Handle(1), Ok(()));
        finished.end();
        finished.wait(Handle(1), MOVED).unwrap();
    }

    #[test]
    fn a_move_that_takes_too_long_is_no_lost_node_and_its_end_is_not_kept() {
        let finished = FinishedCall::default();
        let late = finished.wait(Handle(1), Duration::ZERO);
        assert!(matches!(late, Err(AttachError::Busy)), "{late:?}");
        finished.tell(Handle(1), Ok(()));
        let state = lock(&finished.state);
        assert!(state.by_ticket.is_empty() && state.given_up.is_empty(), "{state:?}");
    }

    /// Whoever has looked and does not sleep yet would miss it, and sleep for as long as moves may
    /// take.
    #[test]
    fn that_the_node_is_gone_is_not_told_between_a_look_and_the_sleep_that_follows() {
        let finished = FinishedCall::default();
        std::thread::scope(|scope| {
            let looking = lock(&finished.state);
            let (told, telling) = std::sync::mpsc::channel();
            let finished = &finished;
            scope.spawn(move || {
                finished.end();
                told.send(()).unwrap();
            });
            assert!(telling.recv_timeout(Duration::from_millis(20)).is_err(), "nobody is woken");
            drop(looking);
            telling.recv().unwrap();
        });
    }
}
