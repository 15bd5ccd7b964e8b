//! What this host has in common with one on another machine: no memory goes along with messages, so something
//! stands for it at the connector, and is kept the same.
//!
//! The directory knows nothing of this. Where it says that memory goes along with an answer, the answer says what
//! it is, and both ends get a [`CommonMemory`]; where it says that an interrupt's doorbell does, they get the ends of
//! [`bells`]. The two conversations with the other node (the one in which it is the owner, and the one in which it
//! is the connector) are two [`FarConversation`]s of one [`Far`]: a thread ([`cycle`]) sends what was stored here over both, in
//! one order.

mod bells;
mod buffers;
mod copying;
mod cycle;
mod flushes;
mod hearing;
mod landings;
mod pair;
mod passing;
mod senders;
mod streaming;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rackbus_segment::Handle;
use rackbus_segment::coherence::ConnectionSide;
use rackbus_segment::directory::LinePart;
use rackbus_segment::flushing::FlushLedger;
use rackbus_segment::message::{CarriedMessage, ConnectorMessage, StandIn, encode};

pub use bells::InterruptParts;
use bells::{BellReceiver, BellSender};
use buffers::CopyBuffers;
pub use copying::{BegunCopy, CopyPart};
use copying::{CopyProgress, QueuedCopy};
pub use flushes::{flush_all, flush_each};
use landings::Landings;
pub use pair::CommonMemory;
pub use passing::FlushTargets;
use passing::PassingOn;
pub use senders::SenderSlots;

use super::hiding::ConnectionRange;
use super::landing::CopiedBytes;
use super::objects::{Object, ObjectKind};
use super::outbox::{Letter, LetterQueue, MOST};
use crate::lanes::Lanes;
use crate::sequencer::essential_thread;

/// How long a peer may take to apply what is to take effect before something else is said.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// How long a peer may take nothing and apply nothing of what it was sent before its conversation is ended. It may be
/// moving the memory meanwhile.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Which of the two conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FarConversation {
    /// The other node is the owner.
    ToOwner,
    /// The other node is the connector.
    ToConnector,
}

/// A connection between the two hosts, as its connector's node calls it.
pub type ConnectionKey = (FarConversation, Handle);

/// What a connection has at this end.
#[derive(Debug, Clone)]
enum End {
    Memory(Arc<CommonMemory>),
    Sender(Arc<BellSender>),
    Receiver(Arc<BellReceiver>),
}

/// Batches that took effect: of which connections, and their numbers.
pub type Applied = Vec<(ConnectionKey, Vec<u64>)>;

/// Held by whoever reads all memory that a host has in common with another one, and alone by whoever stores what
/// came from one: so what took effect together is in no snapshot in part.
pub type EffectsLock = Arc<RwLock<()>>;

/// What is done about what came from the other host by the service that this host's processes talk to.
pub struct FarHost {
    hide: Box<HideBy>,
    complete: Box<dyn Fn(Handle) + Send + Sync>,
    settled: Box<dyn Fn(ConnectorMessage) + Send + Sync>,
    /// For interrupts of all other machines.
    senders: Arc<SenderSlots>,
    /// What copies may go by beside the link.
    lanes: Lanes,
    copied: Arc<CopiedBytes>,
}

type HideBy = dyn Fn(&[ConnectionRange], &dyn Fn() -> Applied) -> Applied + Send + Sync;

impl FarHost {
    /// `hide` does what it is given while processes are kept from ranges, so that none sees a part of them changed;
    /// `complete` hears of connections whose memory has all that the other side had at first; `settled` is what was to be
    /// [answered](Far::answer_settled) of a move. All are called without locks of [`Far`]'s but for the effects. Interrupts
    /// of the other host take their place of `senders`.
    pub fn new(
        hide: impl Fn(&[ConnectionRange], &dyn Fn() -> Applied) -> Applied + Send + Sync + 'static,
        complete: impl Fn(Handle) + Send + Sync + 'static,
        settled: impl Fn(ConnectorMessage) + Send + Sync + 'static,
        senders: Arc<SenderSlots>,
    ) -> FarHost {
        let (complete, settled) = (Box::new(complete), Box::new(settled));
        let (lanes, copied) = Default::default();
        FarHost { hide: Box::new(hide), complete, settled, senders, lanes, copied }
    }

    /// The same, whose copies may go by `lanes`; what goes by which way is counted.
    #[must_use]
    pub fn with_lanes(self, lanes: Lanes, copied: Arc<CopiedBytes>) -> FarHost {
        FarHost { lanes, copied, ..self }
    }
}

impl std::fmt::Debug for FarHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarHost").finish_non_exhaustive()
    }
}

/// What this host has in common with another one.
#[derive(Debug)]
pub struct Far {
    own: Weak<Far>,
    effects: EffectsLock,
    host: FarHost,
    /// All that this host has in common with others, to pass flushes on.
    passing: Arc<FlushTargets>,
    limit: Duration,
    /// For the bytes of copies.
    buffers: CopyBuffers,
    state: Mutex<FarState>,
    /// Signalled when there is something to look at or to go on with.
    kick: Condvar,
    /// Signalled when all that was asked for has taken effect.
    flushed: Condvar,
}

#[derive(Debug, Default)]
struct FarState {
    ways: BTreeMap<FarConversation, Arc<LetterQueue>>,
    ends: BTreeMap<ConnectionKey, End>,
    /// What is said when all that was stored before was sent, of a connection that ends; and what comes after it.
    closing: VecDeque<Closing>,
    /// How many of these there ever were.
    closings: u64,
    /// Of a question, the connection that its answer makes.
    asked: HashMap<(FarConversation, u64), Handle>,
    /// What came, and takes effect with the next that is not held.
    staged: Vec<ConnectionKey>,
    /// Memory that is being moved, and what is answered when it has settled.
    settling: Vec<(Arc<CommonMemory>, ConnectorMessage)>,
    /// Batches that the other side holds.
    held: u64,
    /// Batches for connectors were taken and are not sent yet: what took effect meanwhile, to be answered behind
    /// them. A replica that has its answer takes what comes next for newer than its own batch.
    behind: Option<Vec<(ConnectionKey, u64, bool)>>,
    /// Something is to be looked at now.
    now: bool,
    /// How often somebody wanted all that was stored before to take effect, and how often it had.
    flushes: FlushLedger,
    /// What the other side asked to be passed on.
    passing_on: PassingOn,
    /// What is to be copied to memory of the other side, in the order of asking.
    copies: VecDeque<QueuedCopy>,
    /// The number of the last one.
    last_copy: u64,
    /// How many copies were made since the last look at all memory.
    continued: usize,
    /// How long the last look at all memory took.
    looked: Duration,
    /// From when on the next look takes no more than its share of the time.
    look_due: Option<Instant>,
    /// How far those are that somebody waits for, by their numbers.
    copying: BTreeMap<u64, CopyProgress>,
    landings: Landings,
}

#[derive(Debug)]
struct Closing {
    /// Its number among all.
    number: u64,
    way: FarConversation,
    /// The connection that ends, unless it is something that is said behind one.
    connection: Option<Handle>,
    /// The connection that begins with this answer: its memory is told behind it.
    begins: Option<Handle>,
    /// Only when all that was stored before has taken effect.
    admits: bool,
    said: Letter,
}

impl Closing {
    /// What is said, and no more.
    fn of(way: FarConversation, said: Letter) -> Closing {
        Closing { number: 0, way, connection: None, begins: None, admits: false, said }
    }
}

/// A message of the directory's, as it goes to another machine.
fn said(message: &[u8], given: Option<(Handle, Vec<StandIn>)>) -> Letter {
    letter(&CarriedMessage::Said { message: Cow::Borrowed(message), given })
}

fn letter(carried: &CarriedMessage<'_>) -> Letter {
    Letter { bytes: encode(carried), handles: Vec::new() }
}

/// What stands for objects on the other machine; `None` when that cannot be.
pub fn stand_ins(objects: &[(Arc<Object>, bool)], size: u64) -> Option<Vec<StandIn>> {
    let one = |(object, write): &(Arc<Object>, bool)| match object.kind() {
        ObjectKind::Memory => StandIn::Memory { size, write: *write },
        ObjectKind::Event => StandIn::Event,
        ObjectKind::Line(LinePart::Doorbell) => StandIn::Doorbell,
        ObjectKind::Line(LinePart::Ring) => StandIn::Ring,
    };
    let all: Vec<StandIn> = objects.iter().map(one).collect();
    is_whole(&all).then_some(all)
}

/// Whether these are a segment's or an interrupt's.
pub fn is_whole(given: &[StandIn]) -> bool {
    use StandIn::{Doorbell, Event, Memory, Ring};
    matches!(given, [Memory { .. }] | [Doorbell, Event] | [Doorbell, Event, Ring])
}

impl FarState {
    fn send(&self, way: FarConversation, carried: &CarriedMessage<'_>) {
        if let Some(outbox) = self.ways.get(&way) {
            outbox.send(letter(carried));
        }
    }

    /// Whether this is the conversation that there is, and none before it.
    fn is_with(&self, way: FarConversation, outbox: &Arc<LetterQueue>) -> bool {
        self.ways.get(&way).is_some_and(|it| Arc::ptr_eq(it, outbox))
    }

    /// Says something behind what was stored. A peer that asks for ever more, and applies nothing of what is to be there
    /// before the answers, is disconnected.
    fn say_later(&mut self, closing: Closing) {
        if self.closing.len() < MOST {
            self.closings += 1;
            return self.closing.push_back(Closing { number: self.closings, ..closing });
        }
        if let Some(outbox) = self.ways.get(&closing.way).filter(|it| !it.is_given_up()) {
            tracing::warn!(
                "a node applies nothing of what it is to have before answers, and is disconnected"
            );
            outbox.give_up();
        }
    }

    /// Says that a batch took effect; `alone` where no further machine has the memory.
    fn answer(&mut self, link: ConnectionKey, batch: u64, alone: bool) {
        match &mut self.behind {
            Some(behind) if link.0 == FarConversation::ToConnector => {
                behind.push((link, batch, alone))
            }
            _ => {
                let connection = link.1;
                let outbox = self.ways.get(&link.0);
                let knows = outbox.is_some_and(|it| it.has_locks());
                let said = match link.0 == FarConversation::ToConnector && knows && alone {
                    true => CarriedMessage::AppliedAlone { connection, batch },
                    false => CarriedMessage::Applied { connection, batch },
                };
                self.send(link.0, &said);
            }
        }
    }

    /// The batches for connectors are sent.
    fn answer_behind(&mut self) {
        for (link, batch, alone) in self.behind.take().unwrap_or_default() {
            self.answer(link, batch, alone);
        }
    }
}

impl Far {
    /// With nothing in common yet; a thread looks at what there will be. A peer that is at a standstill for `limit`
    /// is given up.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn new(
        effects: EffectsLock,
        limit: Duration,
        passing: Arc<FlushTargets>,
        host: FarHost,
    ) -> std::io::Result<Arc<Far>> {
        let (kick, flushed) = (Condvar::new(), Condvar::new());
        let (buffers, state) = Default::default();
        let far = Arc::new_cyclic(|own: &Weak<Far>| {
            let own = own.clone();
            Far { own, effects, host, passing, limit, buffers, state, kick, flushed }
        });
        let looking = Arc::downgrade(&far);
        let look = move || cycle::keep_the_same(&looking);
        essential_thread("coherence", look)?;
        Ok(far)
    }

    fn lock(&self) -> MutexGuard<'_, FarState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A conversation has begun.
    pub fn begin(&self, way: FarConversation, outbox: Arc<LetterQueue>) {
        let mut state = self.lock();
        if way == FarConversation::ToConnector {
            state.passing_on = PassingOn::default();
        }
        let landings = state.landings.end(way);
        state.ways.insert(way, outbox);
        drop(state);
        landings.close();
    }

    /// Whether there is this conversation.
    pub fn has(&self, way: FarConversation) -> bool {
        self.lock().ways.contains_key(&way)
    }

    /// A conversation has ended, and with it all connections that it was about.
    pub fn end(&self, way: FarConversation) {
        let mut state = self.lock();
        state.ways.remove(&way);
        let of_way: Vec<ConnectionKey> =
            state.ends.keys().filter(|link| link.0 == way).copied().collect();
        let ends: Vec<End> = of_way.iter().filter_map(|link| state.ends.remove(link)).collect();
        state.closing.retain(|closing| closing.way != way);
        state.asked.retain(|(asked, _), _| *asked != way);
        state.staged.retain(|link| link.0 != way);
        if let Some(behind) = &mut state.behind {
            behind.retain(|(link, ..)| link.0 != way);
        }
        if way == FarConversation::ToOwner {
            state.flushes.end();
        }
        state.forget_copies();
        let landings = state.landings.end(way);
        state.now = true;
        drop(state);
        landings.close();
        self.kick.notify_all();
        self.flushed.notify_all();
        ends.into_iter().for_each(end_one);
    }

    /// Says a message of the directory's.
    pub fn say(&self, way: FarConversation, message: &[u8], given: Option<(Handle, Vec<StandIn>)>) {
        let mut state = self.lock();
        let begins = given.as_ref().map(|(connection, _)| *connection);
        let said = said(message, given);
        // Not before what ends; what admits somebody to a lock may be late, and nothing waits for it.
        if state.closing.iter().any(|closing| closing.way == way && !closing.admits) {
            return state.say_later(Closing { begins, ..Closing::of(way, said) });
        }
        if let Some(outbox) = state.ways.get(&way) {
            outbox.send(said);
        }
    }

    /// Says a message of the directory's when all that was stored here before has taken effect there.
    pub fn say_behind_stores(&self, way: FarConversation, message: &[u8]) {
        let said = said(message, None);
        self.lock().say_later(Closing { admits: true, ..Closing::of(way, said) });
        self.kick();
    }

    /// Has the next cycle begin without waiting for its time.
    fn kick(&self) {
        self.lock().now = true;
        self.kick.notify_all();
    }

    /// A question was asked or heard, of which the answer makes a connection.
    pub fn asked(&self, way: FarConversation, request: u64, connection: Handle) {
        self.lock().asked.insert((way, request), connection);
    }

    /// The connection that the answer to a question makes.
    pub fn answered(&self, way: FarConversation, request: u64) -> Option<Handle> {
        self.lock().asked.remove(&(way, request))
    }

    /// A connection has memory at this end, of so many bytes; whether it may be stored to there.
    pub fn add_memory(&self, link: ConnectionKey, object: Arc<Object>, (size, write): (u64, bool)) {
        let side = match link.0 {
            FarConversation::ToOwner => ConnectionSide::Replica,
            FarConversation::ToConnector => ConnectionSide::Home,
        };
        let pair = CommonMemory::new(object, side, size, write);
        self.lock().ends.insert(link, End::Memory(pair));
        self.kick();
    }

    /// A connection has an interrupt of this host at this end. False when it cannot be mapped.
    pub fn add_receiver(&self, connection: Handle, line: &InterruptParts) -> bool {
        let Some(receiver) = BellReceiver::new(line) else { return false };
        self.lock()
            .ends
            .insert((FarConversation::ToConnector, connection), End::Receiver(receiver));
        true
    }

    /// A connection ends in order: what was stored and rung before it is said first, then `message`. False when
    /// there is nothing of the connection here, and nothing was said.
    pub fn close(&self, link: ConnectionKey, message: &[u8]) -> bool {
        let mut state = self.lock();
        let (way, said) = (link.0, said(message, None));
        match state.ends.get(&link) {
            Some(End::Memory(_)) => {
                state.say_later(Closing { connection: Some(link.1), ..Closing::of(way, said) });
            }
            Some(End::Sender(sender)) => {
                sender.close(said, PATIENCE);
                return true;
            }
            Some(End::Receiver(_)) | None => {
                state.ends.remove(&link);
                return false;
            }
        }
        drop(state);
        self.kick();
        true
    }

    /// A connection has ended: nothing of it is said or heard any more.
    pub fn forget(&self, link: ConnectionKey) {
        let mut state = self.lock();
        state.staged.retain(|staged| *staged != link);
        let end = state.ends.remove(&link);
        drop(state);
        end.into_iter().for_each(end_one);
        // Somebody may wait for an answer about it.
        self.kick();
    }

    /// The memory of a connection.
    pub fn memory(&self, link: ConnectionKey) -> Option<Arc<CommonMemory>> {
        match self.lock().ends.get(&link) {
            Some(End::Memory(pair)) => Some(pair.clone()),
            _ => None,
        }
    }

    /// Has `answer` said to the service when memory that is being moved has [settled](CommonMemory::settle), without a
    /// wait for that.
    pub fn answer_settled(&self, memory: Arc<CommonMemory>, answer: ConnectorMessage) {
        let mut state = self.lock();
        state.settling.push((memory, answer));
        state.now = true;
        self.kick.notify_all();
    }

    /// Goes on after a move of a connection's memory, without a wait for who reads it: the thread that looks lets
    /// take effect what was to meanwhile.
    pub fn resume(&self, link: ConnectionKey) {
        if let Some(pair) = self.memory(link) {
            pair.resume();
            self.kick();
        }
    }

    /// Whether a connection leads there with this memory of this host.
    pub fn has_memory(&self, object: &Arc<Object>) -> bool {
        let state = self.lock();
        state.ends.values().any(|end| matches!(end, End::Memory(pair) if pair.is_of(object)))
    }

    /// Whether this is a connection to something there.
    pub fn has_connection(&self, connection: Handle) -> bool {
        self.lock().ends.contains_key(&(FarConversation::ToOwner, connection))
    }
}

fn end_one(end: End) {
    if let End::Sender(sender) = end {
        sender.end();
    }
}
