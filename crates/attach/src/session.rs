//! A process' conversation with its host's node.
//!
//! Requests go over one socket and are answered there, one after the other; events come over a
//! second one, on which a thread answers what concerns moved memory by itself. So a call never
//! waits for an event, and an event never for a callback.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rackbus_memory::descriptors::keep_room;
use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::region::RegionError;
use rackbus_memory::{AdaptiveSpin, Packets, StreamError};
use rackbus_segment::message::{
    Change, Event, Holder, NodeId, Notice, Refusal, Reply, Request, SegmentEntry, SegmentId, Share,
    VERSION, Welcome, decode, encode,
};
use rackbus_segment::{Handle, SessionId};

use crate::events::{Calls, SegmentEvent, Watch};
use crate::interrupts::Rings;
use crate::line::Line;
use crate::location::Location;
use crate::memory::Memory;

/// How long moving memory may take: tens of gigabytes are copied.
const MOVED: Duration = Duration::from_secs(120);
/// How long to try again while memory is being moved.
const BUSY: Duration = Duration::from_secs(5);

/// Events kept for what is not known yet.
const MOST_EARLY: usize = 1024;

/// Why something could not be had.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No node listens on this host.
    #[error("no node answers at {}: {cause}; is the rack up?", path.display())]
    NoNode {
        /// Its socket.
        path: std::path::PathBuf,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The node is gone.
    #[error("the host's node is gone ({0}); what is mapped stays, nothing new can be had")]
    Gone(StreamError),
    /// The node, or another's, said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The process is a fork of the one that attached.
    #[error("this process is a fork of the one that attached; attach anew")]
    Forked,
    /// The node answered something that makes no sense.
    #[error("the host's node does not speak this protocol; use the library of its version")]
    Protocol,
    /// The process may not have another descriptor. Nothing was made, all that it has stays.
    #[error("this process may not have more descriptors; raise its limit of open files")]
    NoDescriptors,
    /// Memory could not be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The system refused.
    #[error("{what}: {cause}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The memory is being moved and that takes too long.
    #[error("the memory is being moved; try again")]
    Busy,
    /// An empty segment has no memory yet.
    #[error("the segment has no memory yet")]
    NoMemory,
    /// Memory may only be read.
    #[error("the memory may only be read")]
    ReadOnly,
    /// A lock cannot be where it was asked for.
    #[error("a lock lies inside of writable memory, at a multiple of 64, between its own parties")]
    Misplaced,
    /// A range is not inside of the area.
    #[error("{length} bytes from {offset} are not inside of {size} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Bytes there are.
        size: u64,
    },
}

/// A conversation with the host's node. Clones are the same one; it ends with the last of them and
/// of what was had through it.
#[derive(Debug, Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    welcome: Welcome,
    calls: Mutex<Line>,
    events: Arc<Packets>,
    registry: Arc<Registry>,
    /// The process that attached. A fork of it has the same sockets, and must not use them.
    process: u32,
}

/// What events are about.
#[derive(Debug)]
pub(crate) struct Registry {
    watched: Mutex<HashMap<Handle, Watched>>,
    /// Events about things whose making has not been heard of yet: they come on another socket.
    early: Mutex<VecDeque<(Handle, Event, Vec<OwnedFd>)>>,
    /// Held while an event is dealt with: they are in the order in which they came, those that
    /// came early too.
    order: Mutex<()>,
    finished: Finished,
    gone: AtomicBool,
    calls: Calls,
}

/// What has taken longer, and is done.
#[derive(Debug, Default)]
struct Finished {
    state: Mutex<Outcomes>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Outcomes {
    by_ticket: HashMap<Handle, Result<(), Refusal>>,
    /// Nothing will be told any more.
    ended: bool,
}

impl Finished {
    fn tell(&self, ticket: Handle, outcome: Result<(), Refusal>) {
        lock(&self.state).by_ticket.insert(ticket, outcome);
        self.changed.notify_all();
    }

    fn end(&self) {
        // Under the lock: whoever looked before sleeps by now, and is woken.
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    fn wait(&self, ticket: Handle, limit: Duration) -> Result<(), AttachError> {
        let going_on =
            |state: &mut Outcomes| !state.by_ticket.contains_key(&ticket) && !state.ended;
        let waited = self.changed.wait_timeout_while(lock(&self.state), limit, going_on);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.by_ticket.remove(&ticket) {
            Some(outcome) => Ok(outcome?),
            None if state.ended => Err(AttachError::Gone(StreamError::Closed)),
            None => Err(AttachError::Gone(StreamError::TimedOut)),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Watched {
    pub watch: Weak<Watch>,
    pub memory: Weak<Memory>,
    pub size: u64,
    pub rings: Weak<Rings>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// Attaches to the node of the host that the process is on.
    ///
    /// # Errors
    /// [`AttachError`] when no node is there, or does not let this process in.
    pub fn open(location: &Location) -> Result<Session, AttachError> {
        let path = location.socket();
        let packets = Packets::connect(&path)
            .map_err(|cause| AttachError::NoNode { path: path.clone(), cause })?;
        let failed = |what| move |cause| AttachError::System { what, cause };
        let (events, theirs) = Packets::pair().map_err(failed("socketpair"))?;
        let mut line = Line::new(packets);
        let hello = Request::Hello { version: VERSION };
        let welcome = match line.call(&hello, &[theirs.as_fd()])? {
            (Reply::Welcome(welcome), _) => welcome,
            (Reply::Refused(refusal), _) => return Err(refusal.into()),
            _ => return Err(AttachError::Protocol),
        };
        let calls = Calls::start().map_err(failed("a thread for callbacks"))?;
        let registry = Arc::new(Registry::new(calls));
        let events = Arc::new(events);
        let (listening, registered) = (events.clone(), registry.clone());
        let listen = move || registered.listen(&listening);
        std::thread::Builder::new()
            .name("rackbus events".into())
            .spawn(listen)
            .map_err(failed("a thread for events"))?;
        let (calls, process) = (Mutex::new(line), std::process::id());
        Ok(Session(Arc::new(Inner { welcome, calls, events, registry, process })))
    }

    /// This host's node id.
    pub fn node(&self) -> NodeId {
        self.0.welcome.node
    }

    /// The rack's hosts and their node ids, by id.
    pub fn hosts(&self) -> &[(NodeId, String)] {
        &self.0.welcome.hosts
    }

    /// Who this session is, in the whole rack: what it holds locks as.
    pub fn holder(&self) -> Holder {
        Holder { node: self.0.welcome.node, session: self.0.welcome.session }
    }

    /// Whether the node is gone.
    pub fn is_gone(&self) -> bool {
        self.0.registry.gone.load(Ordering::Acquire)
    }

    /// Ends the conversation now, whoever still has a clone of it. All that was had is given back.
    pub fn close(&self) {
        if !self.is_own() {
            return;
        }
        self.0.events.shut_down();
        lock(&self.0.calls).packets.shut_down();
    }

    /// Whether a host's node answers.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when it does not, or there is no such host.
    pub fn probe(&self, node: NodeId) -> Result<(), AttachError> {
        self.done(&Request::Probe { node })
    }

    /// Whether a session of any host still lives. False is certain; true may only mean that
    /// nobody could be asked.
    ///
    /// # Errors
    /// [`AttachError`] when that cannot be told.
    pub fn alive(&self, holder: Holder) -> Result<bool, AttachError> {
        match self.call(&Request::Alive { holder })? {
            (Reply::Alive(alive), _) => Ok(alive),
            _ => Err(AttachError::Protocol),
        }
    }

    /// Changes who may use this host's segments, connected already or not. When it returns, who
    /// lost the right reads and writes nothing of these segments any more.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn set_share(
        &self,
        segments: std::ops::RangeInclusive<SegmentId>,
        node: Option<NodeId>,
        share: Share,
    ) -> Result<(), AttachError> {
        let (first, last) = segments.into_inner();
        self.done(&Request::SetShare { first, last, node, share })
    }

    /// All segments of this host.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn segments(&self) -> Result<Vec<SegmentEntry>, AttachError> {
        let mut all = Vec::new();
        loop {
            let skip = u32::try_from(all.len()).unwrap_or(u32::MAX);
            match self.call(&Request::ListSegments { skip })? {
                (Reply::Segments { list, more }, _) => {
                    all.extend(list);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(AttachError::Protocol),
            }
        }
    }

    /// Whether this is the process that attached, and not a fork of it.
    pub(crate) fn is_own(&self) -> bool {
        self.0.is_own()
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// Asks the node; a refusal is an error.
    pub(crate) fn call(&self, request: &Request) -> Result<(Reply, Vec<OwnedFd>), AttachError> {
        if !self.is_own() {
            return Err(AttachError::Forked);
        }
        let begun = Instant::now();
        loop {
            match lock(&self.0.calls).call(request, &[])? {
                (Reply::Refused(Refusal::Busy), _) if begun.elapsed() < BUSY => {}
                (Reply::Refused(refusal), _) => return Err(refusal.into()),
                answer => return Ok(answer),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends a connection. Nobody waits for that: what is asked next comes after it.
    pub(crate) fn disconnect(&self, connection: Handle) {
        if self.is_own() {
            // A node that is gone has ended it already.
            let _ = lock(&self.0.calls).post(&Request::Disconnect { connection });
        }
    }

    /// Gives back what the node knows by `handle`: asks first, so that a move that is under way
    /// goes on to its end or is abandoned, then lets go those who wait for it, and only then hears
    /// no more of it.
    pub(crate) fn give_back(
        &self,
        handle: Handle,
        memory: &Memory,
        request: &Request,
    ) -> Result<(), AttachError> {
        let outcome = self.done(request);
        memory.end();
        self.registry().forget(handle);
        outcome
    }

    /// Asks the node for something that has no result, and waits until it is done.
    pub(crate) fn done(&self, request: &Request) -> Result<(), AttachError> {
        match self.call(request)? {
            (Reply::Done, _) => Ok(()),
            (Reply::Started { ticket }, _) => self.0.registry.finished.wait(ticket, MOVED),
            _ => Err(AttachError::Protocol),
        }
    }
}

impl Inner {
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Ends the thread of events, which ends that of callbacks. A fork has neither, and what it
        // shut down would be its parent's.
        if self.is_own() {
            self.events.shut_down();
        }
    }
}

impl Registry {
    fn new(calls: Calls) -> Registry {
        Registry {
            watched: Mutex::default(),
            early: Mutex::default(),
            order: Mutex::default(),
            finished: Finished::default(),
            gone: AtomicBool::new(false),
            calls,
        }
    }

    /// Tells what events about `handle` are for, and what has happened to it already.
    pub(crate) fn watch(&self, handle: Handle, watched: Watched, session: &Session) {
        self.watch_from(handle, watched, &session.0.events);
    }

    fn watch_from(&self, handle: Handle, watched: Watched, events: &Packets) {
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

    fn listen(&self, events: &Packets) {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 20_000));
        while let Ok(packet) = events.receive(&mut buffer, &mut spin, None).and_then(Packet::whole)
        {
            packet.fds.iter().for_each(keep_room);
            match buffer.get(..packet.length).and_then(decode::<Event>) {
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

    fn came(&self, event: Event, fds: Vec<OwnedFd>, events: &Packets) {
        let _order = lock(&self.order);
        self.heard(event, fds, events);
    }

    /// The node is gone, and with it everything that was had through it.
    fn all_gone(&self) {
        let all: Vec<Watched> = lock(&self.watched).values().cloned().collect();
        all.iter().filter_map(|watched| watched.memory.upgrade()).for_each(|it| it.end());
        for watch in all.iter().filter_map(|watched| watched.watch.upgrade()) {
            if !watch.lost() {
                watch.deliver(SegmentEvent::Remote(Change::NotOperational), &self.calls);
                watch.deliver(SegmentEvent::Remote(Change::Lost), &self.calls);
            }
        }
    }

    fn deliver(&self, handle: Handle, event: SegmentEvent) {
        if let Some(watch) = self.get(handle).and_then(|watched| watched.watch.upgrade()) {
            watch.deliver(event, &self.calls);
        }
    }

    /// Deals with an event; the caller holds `order`.
    fn heard(&self, event: Event, fds: Vec<OwnedFd>, events: &Packets) {
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
            Event::Connected { segment, node } => {
                self.deliver(segment, SegmentEvent::Connected(node));
            }
            Event::Disconnected { segment, node } => {
                self.deliver(segment, SegmentEvent::Disconnected(node));
            }
            Event::Remote { connection, change } => {
                let memory = self.get(connection).and_then(|watched| watched.memory.upgrade());
                if let Some(memory) = memory.filter(|_| change.is_final()) {
                    memory.end();
                }
                self.deliver(connection, SegmentEvent::Remote(change));
            }
            Event::Sender { interrupt, ring } => {
                let rings = self.get(interrupt).and_then(|watched| watched.rings.upgrade());
                if let (Some(rings), Some(file)) = (rings, fds.into_iter().next())
                    && let Err(error) = rings.add(ring, file)
                {
                    tracing::error!(%error, "a sender of data interrupts cannot be heard");
                }
            }
            Event::SenderGone { interrupt, ring } => {
                if let Some(rings) = self.get(interrupt).and_then(|watched| watched.rings.upgrade())
                {
                    rings.sender_gone(ring);
                }
            }
            Event::Freeze { ticket, keeper, offset, length } => {
                let memory = self.get(keeper).and_then(|watched| watched.memory.upgrade());
                if let Some(memory) = memory
                    && let Err(error) = memory.freeze(offset, length)
                {
                    tracing::error!(%error, "memory cannot be kept from its writers");
                    memory.end();
                    return;
                }
                answer(events, Notice::Frozen { ticket, keeper });
            }
            Event::Adopt { ticket, keeper, offset, length, from } => {
                let watched = self.get(keeper);
                let whole = watched.as_ref().is_some_and(|it| (offset, length) == (0, it.size));
                let memory = watched.and_then(|watched| watched.memory.upgrade());
                if let (Some(memory), Some(file)) = (memory, fds.into_iter().next())
                    && let Err(error) = memory.adopt((offset, length), file, from, whole)
                {
                    tracing::error!(%error, "moved memory cannot be mapped");
                }
                answer(events, Notice::Adopted { ticket, keeper });
            }
            Event::Unfreeze { keeper, .. } => {
                if let Some(memory) = self.get(keeper).and_then(|it| it.memory.upgrade()) {
                    memory.unfreeze();
                }
            }
            Event::Finished { ticket, outcome } => self.finished.tell(ticket, outcome),
        }
    }
}

/// What an event is about.
fn about(event: &Event) -> Option<Handle> {
    match event {
        Event::Connected { segment, .. } | Event::Disconnected { segment, .. } => Some(*segment),
        Event::Remote { connection, .. } => Some(*connection),
        Event::Sender { interrupt, .. } | Event::SenderGone { interrupt, .. } => Some(*interrupt),
        Event::Freeze { keeper, .. }
        | Event::Adopt { keeper, .. }
        | Event::Unfreeze { keeper, .. } => Some(*keeper),
        Event::Finished { .. } => None,
    }
}

fn answer(events: &Packets, notice: Notice) {
    if let Err(error) = events.send(&encode(&notice), &[]) {
        tracing::warn!(%error, "the node could not be answered");
    }
}

/// Only its number, not what it is for.
impl From<&Session> for SessionId {
    fn from(session: &Session) -> SessionId {
        session.0.welcome.session
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rackbus_memory::SharedMemory;

    const NOW: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn what_came_early_stays_before_what_comes_next() {
        let (events, _node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        for number in 0..50 {
            let segment = Handle(number);
            let event = |node| match node {
                0 => Event::Connected { segment, node: 4 },
                _ => Event::Disconnected { segment, node: 4 },
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
    fn one_early_one_late(watched: Watched, first: (Event, Option<OwnedFd>), second: Event) {
        let (events, _node) = Packets::pair().unwrap();
        let registry = Registry::new(Calls::start().unwrap());
        let (early, fds) = first;
        let handle = about(&early).unwrap();
        // Many that came early take long enough for the next one to come meanwhile.
        let other = Event::Connected { segment: handle, node: 4 };
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
            let (memory, keeper) = (Memory::new(Some(file), true), Handle(number));
            let watch = Watch::new(None);
            let watched = Watched {
                watch: Arc::downgrade(&watch),
                memory: Arc::downgrade(&memory),
                size: 4096,
                ..Watched::default()
            };
            let freeze = Event::Freeze { ticket: Handle(1), keeper, offset: 0, length: 4096 };
            let lost = Event::Remote { connection: keeper, change: Change::Lost };
            one_early_one_late(watched, (freeze, None), lost);
            assert!(!memory.is_frozen(), "its writers wait for ever");
        }
    }

    #[test]
    fn a_sender_that_came_early_goes_when_it_is_gone() {
        for number in 0..50 {
            let (rings, interrupt) = (Rings::silent(), Handle(number));
            let watched = Watched { rings: Arc::downgrade(&rings), ..Watched::default() };
            let ring = Handle(7);
            let file = SharedMemory::reserve("ring", 1 << 20).unwrap();
            let sender = (Event::Sender { interrupt, ring }, Some(file));
            one_early_one_late(watched, sender, Event::SenderGone { interrupt, ring });
            assert_eq!(rings.count(), 0, "its ring stays for ever");
        }
    }

    #[test]
    fn who_waits_for_the_end_of_a_move_learns_that_the_node_is_gone() {
        for number in 0..2_000 {
            let finished = Finished::default();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| finished.wait(Handle(number), MOVED));
                finished.end();
                let gone = waiting.join().unwrap();
                assert!(matches!(gone, Err(AttachError::Gone(StreamError::Closed))));
            });
        }
        let finished = Finished::default();
        finished.tell(Handle(1), Ok(()));
        finished.end();
        finished.wait(Handle(1), MOVED).unwrap();
    }

    /// Whoever has looked and does not sleep yet would miss it, and sleep for as long as moves may
    /// take.
    #[test]
    fn that_the_node_is_gone_is_not_told_between_a_look_and_the_sleep_that_follows() {
        let finished = Finished::default();
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
