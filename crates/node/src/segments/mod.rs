//! The segment service of a host: the sockets and descriptors around its
//! [`Directory`], which decides.
//!
//! Each process that attaches has a session: a socket for its requests, which it waits on, and one
//! for events (`sessions`). Each other node has up to two conversations with this one: the one in
//! which this host's processes are connectors, and the one in which they are owners (`peers`).
//! A thread for each of them receives, asks the directory under one lock, and sends what it says
//! itself, so that connecting takes two round trips and no thread in between. Nothing waits under
//! the lock: a peer that takes no messages is disconnected (`outbox`).

mod channels;
mod copies;
pub mod devices;
mod far;
mod hiding;
pub(crate) mod landing;
mod locks;
mod numbers;
mod objects;
mod outbox;
mod peers;
mod sessions;
mod telling;
mod unshared;
mod working;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rackbus_fabric::FabricHandle;
use rackbus_link::Connect;
use rackbus_memory::copy::Statistics;
use rackbus_memory::{Gate, Handles, PacketListener, ResourceHandle};
use rackbus_segment::directory::{AttachedObject, DirectorySettings};
use rackbus_segment::message::{ConnectorMessage, OwnerMessage, Refusal, encode};
use rackbus_segment::{Directory, DirectoryAction, NodeId, Objects, Recipient, SessionId};

use crate::lanes::Lanes;
use crate::sequencer::essential_thread;
use channels::ProcessChannels;
use devices::ProgramDevices;
use far::{EffectsLock, Far, FlushTargets, SenderSlots};
use landing::CopiedBytes;
use numbers::Numbers;
use objects::ObjectStore;
use outbox::{Letter, LetterQueue};
use peers::{is_too_long, refused_as_too_long};
use working::{Workers, empty};

/// The socket in a host's folder that processes attach to.
pub const SOCKET: &str = "segments.sock";

/// A host's segment service.
pub struct Segments {
    rack: String,
    host: String,
    link: Arc<dyn Connect>,
    begun: Instant,
    state: Mutex<SegmentsState>,
    hiding: hiding::Hiding,
    /// Who borrows devices for processes, where somebody does.
    devices: OnceLock<Arc<dyn ProgramDevices>>,
    /// Signalled when the directory may want to be told of time sooner.
    sooner: Condvar,
    channels: Mutex<ProcessChannels>,
    workers: Workers,
    /// What they have copied to other machines.
    copied: Arc<CopiedBytes>,
}

impl std::fmt::Debug for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments").field("host", &self.host).finish_non_exhaustive()
    }
}

struct SegmentsState {
    directory: Directory,
    store: ObjectStore,
    hosts: Vec<(NodeId, String)>,
    numbers: Numbers,
    sessions: HashMap<SessionId, Session>,
    owners: HashMap<NodeId, Owner>,
    connectors: HashMap<NodeId, Arc<LetterQueue>>,
    /// What this host has in common with those on other machines.
    fars: HashMap<NodeId, Arc<Far>>,
    effects: EffectsLock,
    passing: Arc<FlushTargets>,
    senders: Arc<SenderSlots>,
    /// By what copies to other machines may go beside the link.
    lanes: Lanes,
    copied: Arc<CopiedBytes>,
    /// What this node answers in the place of connectors on other machines.
    in_their_place: Vec<(NodeId, ConnectorMessage)>,
    held: unshared::HeldAnswers,
    /// When the thread that keeps time asks the directory next. It is woken for what is due sooner, and not for each
    /// question that has a deadline: it would take the lock and the processor from who answers.
    looks_at: u64,
}

struct Session {
    calls: Arc<LetterQueue>,
    /// Known from its hello on.
    events: Option<Arc<LetterQueue>>,
}

impl Session {
    fn shut_down(&self) {
        self.calls.packets().shut_down();
        if let Some(events) = &self.events {
            events.packets().shut_down();
        }
    }
}

/// The conversation with an owner's node.
enum Owner {
    /// Being connected to, with what is to be said then.
    Dialling(Vec<Letter>),
    Here(Arc<LetterQueue>),
}

impl Segments {
    /// The service of `host`, which finds other nodes by `link`. `fabric` lends what others reach.
    pub fn new(
        rack: &str,
        host: &str,
        link: Arc<dyn Connect>,
        settings: DirectorySettings,
        fabric: FabricHandle,
    ) -> Arc<Segments> {
        Segments::with_lanes(rack, host, link, settings, (fabric, Lanes::default()))
    }

    /// The same, whose copies to other machines may go by `lanes`.
    pub fn with_lanes(
        rack: &str,
        host: &str,
        link: Arc<dyn Connect>,
        settings: DirectorySettings,
        (fabric, lanes): (FabricHandle, Lanes),
    ) -> Arc<Segments> {
        let copied = Arc::<CopiedBytes>::default();
        let hosts = settings.hosts.iter().map(|(node, name)| (*node, name.clone())).collect();
        Arc::new(Segments {
            rack: rack.to_owned(),
            host: host.to_owned(),
            link,
            begun: Instant::now(),
            state: Mutex::new(SegmentsState {
                directory: Directory::new(settings, fabric),
                store: ObjectStore::default(),
                hosts,
                numbers: Numbers::default(),
                sessions: HashMap::new(),
                owners: HashMap::new(),
                connectors: HashMap::new(),
                fars: HashMap::new(),
                effects: EffectsLock::default(),
                passing: Arc::default(),
                senders: SenderSlots::of_system(),
                lanes,
                copied: copied.clone(),
                in_their_place: Vec::new(),
                held: Default::default(),
                looks_at: u64::MAX,
            }),
            hiding: hiding::Hiding::default(),
            devices: OnceLock::new(),
            sooner: Condvar::new(),
            channels: Mutex::default(),
            workers: Workers::default(),
            copied,
        })
    }

    /// Has `devices` borrow for processes; before it is started, and once.
    pub fn borrow_by(&self, devices: Arc<dyn ProgramDevices>) {
        // Who came first stays.
        let _ = self.devices.set(devices);
    }

    /// Listens for processes and keeps the time, on threads of its own.
    ///
    /// # Errors
    /// When the socket or a thread cannot be made, or the folder cannot be written to.
    pub fn start(self: &Arc<Self>, folder: &Path) -> std::io::Result<()> {
        let listener = PacketListener::bind(&folder.join(SOCKET))?;
        self.start_on(folder, listener, Gate::new()?)
    }

    /// The same on a socket that is there, in a process with this `gate`.
    ///
    /// # Errors
    /// As [`start`](Segments::start).
    pub fn start_on(
        self: &Arc<Self>,
        folder: &Path,
        listener: PacketListener,
        gate: Gate,
    ) -> std::io::Result<()> {
        self.lock().numbers = Numbers::of_new_life(folder, SystemTime::now())?;
        self.listen(listener, gate)?;
        let service = self.clone();
        let keep_time = move || service.keep_time();
        essential_thread("segments' time", keep_time)
    }

    /// How many there are now of what the host's processes share, each by its name.
    pub fn statistics(&self) -> [(&'static str, usize); 8] {
        self.lock().directory.statistics()
    }

    /// Bytes of what its processes have made, each by its name, and of what the host exports at most.
    pub fn sizes(&self) -> [(&'static str, u64); 4] {
        self.lock().directory.sizes()
    }

    /// What the copy channels of the host's processes did while these were attached.
    pub fn channels(&self) -> Statistics {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).total()
    }

    /// Bytes that its processes have copied to other machines, by what they went.
    pub fn copied(&self) -> [(&'static str, u64); 2] {
        let CopiedBytes { by_lane, by_link } = &*self.copied;
        [("lane", by_lane), ("link", by_link)].map(|(by, it)| (by, it.load(Ordering::Relaxed)))
    }

    /// How often other machines were refused what they had too much of, each by its name; and who was refused last, and why.
    pub fn refusals(&self) -> ([(&'static str, u64); 3], Option<String>) {
        let state = self.lock();
        (state.directory.refusals(), state.directory.last_refusal())
    }

    /// Copies to and from other machines go over the link from now on, for as long as the conversations with these last.
    pub(crate) fn give_lanes_up(&self) {
        let fars: Vec<Arc<Far>> = self.lock().fars.values().cloned().collect();
        fars.iter().for_each(|far| far.give_landings_up());
    }

    /// What would be lost with this process, for people.
    pub(crate) fn in_use(&self) -> Option<String> {
        let state = self.lock();
        let counts = state.directory.statistics();
        let mut used: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{what}: {count}"))
            .collect();
        if used.is_empty() && !state.sessions.is_empty() {
            used.push(format!("sessions: {}", state.sessions.len()));
        }
        let pending = self.devices.get().map_or(0, |devices| devices.pending());
        if pending > 0 {
            used.push(format!("devices on their way back: {pending}"));
        }
        (!used.is_empty()).then(|| used.join(", "))
    }

    fn lock(&self) -> MutexGuard<'_, SegmentsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Asks the directory, and does what it says.
    fn ask(
        self: &Arc<Self>,
        question: impl FnOnce(&mut Directory, u64, &mut dyn Objects) -> Vec<DirectoryAction>,
    ) {
        self.ask_in(&mut self.lock(), question);
    }

    /// The same for who has the lock: what it changed beside the directory and this are one step.
    fn ask_in(
        self: &Arc<Self>,
        state: &mut SegmentsState,
        question: impl FnOnce(&mut Directory, u64, &mut dyn Objects) -> Vec<DirectoryAction>,
    ) {
        let SegmentsState { directory, store, .. } = &mut *state;
        let outputs = question(directory, self.now(), store);
        self.perform(state, outputs);
        if state.directory.next_tick().is_some_and(|due| due < state.looks_at) {
            self.sooner.notify_one();
        }
    }

    fn perform(self: &Arc<Self>, state: &mut SegmentsState, outputs: Vec<DirectoryAction>) {
        let mut outputs = VecDeque::from(outputs);
        while let Some(output) = outputs.pop_front() {
            match output {
                DirectoryAction::Send(Recipient::Ask(node, ask), _) if is_too_long(&ask) => {
                    let Some(answer) = refused_as_too_long(ask) else { continue };
                    let (now, SegmentsState { directory, store, .. }) = (self.now(), &mut *state);
                    outputs.extend(directory.told(now, node, answer, Vec::new(), store));
                }
                DirectoryAction::Send(to, attached) => {
                    let Some(to) = Segments::deliver_far(state, to, &attached) else {
                        let (now, SegmentsState { directory, store, in_their_place, .. }) =
                            (self.now(), &mut *state);
                        for (node, ask) in in_their_place.drain(..) {
                            outputs.extend(directory.asked(now, node, ask, store));
                        }
                        continue;
                    };
                    match state.store.attach(&attached) {
                        Ok(handles) => self.deliver(state, to, handles),
                        Err(error) => outputs.extend(self.unsent(state, to, &error.to_string())),
                    }
                }
                DirectoryAction::Copy { ticket, from, to, length } => {
                    let ends = (state.store.get(from.0), state.store.get(to.0));
                    let (Some(source), Some(target)) = ends else { continue };
                    let ends = ((source.clone(), from.1), (target.clone(), to.1));
                    if let Err(error) = self.copy(ticket, ends, length) {
                        let outcome = Err(format!("no thread to move memory: {error}"));
                        let (now, SegmentsState { directory, store, .. }) =
                            (self.now(), &mut *state);
                        outputs.extend(directory.copied(now, ticket, outcome, store));
                    }
                }
                DirectoryAction::Empty { job, object, offset, length } => {
                    let Some(object) = state.store.get(object).cloned() else { continue };
                    let Some(job) = job else {
                        // Whoever could be told waits for nothing.
                        let _ = empty(&object, offset, length);
                        continue;
                    };
                    if let Err(error) = self.empty_aside(job, object.clone(), offset, length) {
                        tracing::warn!(%error, "there is no thread to empty memory; it is emptied at once");
                        let outcome = empty(&object, offset, length);
                        let (now, SegmentsState { directory, store, .. }) =
                            (self.now(), &mut *state);
                        outputs.extend(directory.emptied(now, job, outcome, store));
                    }
                }
                DirectoryAction::Forget(object) => state.store.forget(object),
                DirectoryAction::Cut(session) => {
                    tracing::warn!(
                        session = session.0,
                        "a process did not answer and is disconnected"
                    );
                    if let Some(session) = state.sessions.remove(&session) {
                        session.shut_down();
                    }
                    let (now, SegmentsState { directory, store, .. }) = (self.now(), &mut *state);
                    outputs.extend(directory.closed(now, session, store));
                }
            }
        }
    }

    /// A message cannot be sent with its memory: who waits for it is told so, and what was made for it is given back.
    fn unsent(
        self: &Arc<Self>,
        state: &mut SegmentsState,
        to: Recipient,
        error: &str,
    ) -> Vec<DirectoryAction> {
        tracing::error!(error, "a message could not be sent with its memory");
        match to {
            Recipient::Reply(session, reply) => {
                let (now, SegmentsState { directory, store, .. }) = (self.now(), &mut *state);
                directory.unsent(now, session, &reply, error.to_owned(), store)
            }
            // Its directory has what was made for it ended.
            Recipient::Tell(node, OwnerMessage::Answer { request, .. }) => {
                let answer = Err(Refusal::System(error.to_owned()));
                let tell = OwnerMessage::Answer { request, answer };
                self.deliver(state, Recipient::Tell(node, tell), Vec::new());
                Vec::new()
            }
            // A move that it belongs to is abandoned in time.
            Recipient::Event(..) | Recipient::Ask(..) | Recipient::Tell(..) => Vec::new(),
        }
    }

    fn deliver(
        self: &Arc<Self>,
        state: &mut SegmentsState,
        to: Recipient,
        handles: Vec<ResourceHandle>,
    ) {
        match to {
            Recipient::Reply(session, reply) => {
                if let Some(session) = state.sessions.get(&session) {
                    session.calls.send(Letter { bytes: encode(&reply), handles });
                }
            }
            Recipient::Event(session, event) => {
                if let Some(events) = state.sessions.get(&session).and_then(|it| it.events.as_ref())
                {
                    events.send(Letter { bytes: encode(&event), handles });
                }
            }
            Recipient::Ask(node, ask) => {
                let letter = Letter { bytes: encode(&ask), handles };
                match state.owners.get_mut(&node) {
                    Some(Owner::Here(outbox)) => outbox.send(letter),
                    Some(Owner::Dialling(waiting)) => waiting.push(letter),
                    None => {
                        state.owners.insert(node, Owner::Dialling(vec![letter]));
                        if let Err(error) = self.dial(state, node) {
                            tracing::error!(%error, "another host cannot be reached: cannot start a thread");
                            // Who waits is told in time; the next message tries again.
                            state.owners.remove(&node);
                        }
                    }
                }
            }
            Recipient::Tell(node, tell) => {
                if let Some(outbox) = state.connectors.get(&node) {
                    outbox.send(Letter { bytes: encode(&tell), handles });
                }
            }
        }
    }

    fn keep_time(self: &Arc<Self>) {
        let mut state = self.lock();
        loop {
            let now = self.now();
            let due = state.directory.next_tick();
            state.looks_at = due.unwrap_or(u64::MAX);
            state = match due {
                Some(due) if due <= now => {
                    let SegmentsState { directory, store, .. } = &mut *state;
                    let outputs = directory.tick(now, store);
                    self.perform(&mut state, outputs);
                    state
                }
                Some(due) => {
                    let wait = Duration::from_millis(due - now);
                    let woken = self.sooner.wait_timeout(state, wait);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.sooner.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// What a peer sent along, as objects; to be forgotten again when the message is dealt with.
    fn take_in(state: &mut SegmentsState, handles: Handles) -> Vec<AttachedObject> {
        // Whatever rights a handle has, it had them when the peer passed it.
        let object = |handle| AttachedObject { object: state.store.add(handle), write: true };
        handles.into_resources().map(object).collect()
    }
}
