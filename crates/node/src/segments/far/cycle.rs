//! The thread that sends what was stored here, to one other host.
//!
//! A cycle is: look at all memory that both hosts have in common, send what was stored, and wait until it has taken
//! effect there. Looks are soon after one another while something changes ([`BUSY`]), else less and less often
//! ([`IDLE`]); they take at most half of the time ([`BUSY_SHARE`]), and a tenth when they find nothing ([`SHARE`]).
//!
//! What was stored to memory of both [`FarConversation`]s takes effect in one: what goes over the first is held there, and only
//! when that is known is the rest sent.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::prompt::run_promptly;
use rackbus_segment::coherence::Batch;
use rackbus_segment::message::CarriedMessage;

use super::super::outbox::LetterQueue;
use super::copying::{self, LandedPlaces};
use super::pair::{CommonMemory, collect};
use super::{Closing, ConnectionKey, End, Far, FarConversation, FarState};

/// Between two looks while something was stored lately.
const BUSY: Duration = Duration::from_micros(50);
/// And at most, when nothing is.
const IDLE: Duration = Duration::from_millis(1);
/// How long after the last store it counts as busy.
const LATELY: Duration = Duration::from_millis(20);
/// A look that found nothing is followed by a pause of at least so many times what it took.
const SHARE: u32 = 9;
/// And one that found something by at least so many times, unless somebody waits for the next.
const BUSY_SHARE: u32 = 1;
/// After copies that needed no look, the pause is the time of the last look divided by this. When the next copy is asked for
/// in that pause, a single look comes between the two.
const COPIES_PART: u32 = 8;
/// Between two looks whether the other side still exists, and whether there is anything in common.
const REST: Duration = Duration::from_secs(1);
/// Bytes of stores in one message.
const PART: usize = 24 << 10;
/// And bytes that were copied: as many as fit into a packet, with what is said of them.
const COPIED_PART: usize = MAX_PACKET - 64;

/// What a cycle found.
struct Cycle {
    /// Whether anything was sent.
    some: bool,
    /// Whether there is anything to look at again.
    any: bool,
    /// How long the look took, or what is to be waited for as for one.
    looked: Duration,
}

/// Batches with the connections that they are for, instead of their places among these.
pub(super) fn of_links(
    links: &[(ConnectionKey, Arc<CommonMemory>)],
    batches: Vec<(usize, Batch)>,
) -> Vec<(ConnectionKey, Batch)> {
    batches.into_iter().map(|(at, batch)| (links[at].0, batch)).collect()
}

/// Keeps memory the same for as long as `far` is there.
pub(super) fn keep_the_same(far: &Weak<Far>) {
    let (mut pause, mut changed) = (BUSY, Instant::now());
    run_promptly();
    loop {
        let Some(far) = far.upgrade() else { return };
        let Cycle { some, any, looked } = far.cycle();
        if some {
            changed = Instant::now();
        }
        far.buffers.clear_unused(LATELY);
        pause = match (any, changed.elapsed() < LATELY) {
            (false, _) => REST,
            (true, true) => BUSY,
            (true, false) => (pause * 2).min(IDLE),
        };
        // Not kept for the next: one long look does not make those after it rare.
        far.rest(pause.max(looked * if some { BUSY_SHARE } else { SHARE }));
    }
}

impl Far {
    /// Waits until there is something to look at, at most for so long.
    fn rest(&self, pause: Duration) {
        let resting = |it: &mut FarState| !it.now;
        let waited = self.kick.wait_timeout_while(self.lock(), pause, resting);
        waited.unwrap_or_else(PoisonError::into_inner).0.now = false;
    }

    /// Waits, as long as a conversation is there and no other one in its place; whether `until` is so. One in which
    /// nothing goes on for too long is ended: its peer would keep everybody else here from being told.
    pub(super) fn wait_until(
        &self,
        way: FarConversation,
        with: Option<&Arc<LetterQueue>>,
        until: impl Fn() -> bool,
    ) -> bool {
        let Some(with) = with else { return until() };
        let (mut left, mut since) = (usize::MAX, Instant::now());
        loop {
            self.settle();
            self.hand_on_all();
            self.catch_up();
            if until() {
                return true;
            }
            if !self.lock().is_with(way, with) {
                return false;
            }
            let waiting = with.waiting();
            if waiting != left {
                (left, since) = (waiting, Instant::now());
            } else if since.elapsed() > self.limit {
                tracing::warn!("a node does not apply what it is sent and is disconnected");
                with.give_up();
                return false;
            }
            self.rest(IDLE);
        }
    }

    /// One round: looks at all pairs and sends what differs, so that it takes effect at once.
    fn cycle(&self) -> Cycle {
        self.settle();
        let waiting = self.hand_on_all();
        self.catch_up();
        if self.continue_copies() {
            let mut state = self.lock();
            // What is to be said behind stores needs a look. If it was asked for while this thread waited for copies, the
            // wake-up was used up by that wait.
            state.now |= !state.closing.is_empty();
            return Cycle { some: true, any: true, looked: state.looked / COPIES_PART };
        }
        // Until it is on its way: what takes effect here later is answered behind it. First, because memory is complete at
        // a connector when its first batch takes effect: what is stored to it from then on is looked at with all else.
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        // What is wanted from now on is not in what is looked at now.
        let (wanted, links, closing, ways, mut copies) = {
            let mut state = self.lock();
            let links = state.told_memories();
            let copies = state.take_copies(&links);
            (state.flushes.wanted(), links, state.closings, state.ways.clone(), copies)
        };
        let pairs: Vec<Arc<CommonMemory>> = links.iter().map(|(_, pair)| pair.clone()).collect();
        let any = !links.is_empty() || waiting;
        let (begun, taken) = (Instant::now(), copying::taken_of(&links, &copies));
        let landed = copying::landed_of(&links, &copies);
        let (batches, all) = collect(&pairs, &mut copies);
        let (looked, batches) = (begun.elapsed(), of_links(&links, batches));
        let some = !batches.is_empty();
        self.send((&batches, &landed), &ways, effects);
        copying::note_effects(&batches, &landed);
        let outcomes = copying::outcomes(&taken);
        // What is lost with its conversation has not taken effect, also before the end of that is heard.
        let is_lost = |(link, _): &(ConnectionKey, Batch)| self.is_waiting(link).unwrap_or(false);
        let all = all && copies.is_empty() && !batches.iter().any(is_lost);
        let mut state = self.lock();
        state.copies_ended(&outcomes, copies);
        state.looked = looked;
        state.look_due = Some(Instant::now() + looked * SHARE);
        state.close(closing, all);
        if all && let Some(number) = state.flushes.cycle_ended(wanted) {
            state.send(FarConversation::ToOwner, &CarriedMessage::PassOn { number });
        }
        // If the next look was asked for while this thread waited for what was sent, the wake-up was used up by that wait.
        state.now |= state.closings > closing || state.flushes.wanted() > wanted;
        drop(state);
        self.flushed.notify_all();
        batches.into_iter().for_each(|(_, batch)| self.buffers.put(batch));
        Cycle { some, any, looked }
    }

    /// Sends batches that take effect in one, and waits until they have: in the conversations that they were taken for, and
    /// in no others that began meanwhile.
    pub(super) fn send(
        &self,
        (batches, landed): (&[(ConnectionKey, Batch)], &LandedPlaces),
        with: &BTreeMap<FarConversation, Arc<LetterQueue>>,
        effects: RwLockReadGuard<'_, ()>,
    ) {
        let of = |way| -> Vec<&(ConnectionKey, Batch)> {
            batches.iter().filter(|(link, _)| link.0 == way).collect()
        };
        let (first, second) = (of(FarConversation::ToOwner), of(FarConversation::ToConnector));
        let ways: Vec<FarConversation> =
            [(FarConversation::ToOwner, &first), (FarConversation::ToConnector, &second)]
                .into_iter()
                .filter(|(_, batches)| !batches.is_empty())
                .map(|(way, _)| way)
                .collect();
        let both = ways.len() == 2;
        let known = {
            let mut state = self.lock();
            state.behind = both.then(Vec::new);
            state.held
        };
        let (to_owner, to_connector) =
            (with.get(&FarConversation::ToOwner), with.get(&FarConversation::ToConnector));
        self.send_over((&first, to_owner), landed, both);
        if !both {
            self.send_over((&second, to_connector), landed, false);
        }
        drop(effects);
        if both {
            let count = first.len() as u64;
            // Without the one conversation, what goes over the other has to take effect alone.
            let held = || self.lock().held >= known + count;
            self.wait_until(FarConversation::ToOwner, to_owner, held);
            self.send_over((&second, to_connector), landed, false);
            self.lock().answer_behind();
        }
        // What makes all take effect comes first.
        for way in ways.into_iter().rev() {
            let of_way = || batches.iter().map(|(link, _)| link).filter(|link| link.0 == way);
            // What is told of a connection that is over there is not answered.
            let waits = |link| self.is_waiting(link).unwrap_or(false);
            self.wait_until(way, with.get(&way), || !of_way().any(waits));
            let unknown = |link| self.is_waiting(link).unwrap_or(true);
            if both && way == FarConversation::ToConnector && of_way().any(unknown) {
                // It may be lost, and would be waited for over there.
                self.lock().send(FarConversation::ToOwner, &CarriedMessage::Release);
            }
        }
    }

    /// Sends batches over one conversation: the last of them makes all take effect, unless it is held as well.
    pub(super) fn send_over(
        &self,
        (batches, to): (&[&(ConnectionKey, Batch)], Option<&Arc<LetterQueue>>),
        landed: &LandedPlaces,
        held: bool,
    ) {
        let Some(to) = to else { return };
        for (at, ((way, connection), batch)) in batches.iter().enumerate() {
            let held = held || at + 1 < batches.len();
            let say = |carried: &CarriedMessage<'_>| {
                let state = self.lock();
                if state.is_with(*way, to) {
                    state.send(*way, carried);
                }
            };
            for part in batch.parts(PART) {
                let stores = CarriedMessage::Stores {
                    connection: *connection,
                    batch: part.batch,
                    last: part.last,
                    held,
                    runs: part.places,
                    data: Cow::Borrowed(part.data),
                };
                say(&stores);
            }
            if let Some(((landed, _), (offset, bytes))) =
                landed.get(&(*way, *connection)).zip(batch.copied())
            {
                say(&CarriedMessage::Landed {
                    connection: *connection,
                    batch: batch.number(),
                    held,
                    offset,
                    place: landed.place(),
                    length: bytes.len() as u32,
                });
                continue;
            }
            for part in batch.copied_parts(COPIED_PART) {
                say(&CarriedMessage::Copied {
                    connection: *connection,
                    batch: part.batch,
                    last: part.last,
                    held,
                    offset: part.offset,
                    data: Cow::Borrowed(part.data),
                });
            }
        }
    }

    /// Whether a batch of a connection is under way; `None` when the connection has ended. Waits for who reads or stores
    /// to the memory, and so without the lock that everybody else here needs.
    fn is_waiting(&self, link: &ConnectionKey) -> Option<bool> {
        Some(self.memory(*link)?.is_waiting())
    }

    /// Answers for memory that is being moved: this is the thread that takes snapshots of it, and so waits for none.
    fn settle(&self) {
        // The service, which hears of it, asks here for other things under its own lock.
        let settling = std::mem::take(&mut self.lock().settling);
        for (memory, answer) in settling {
            memory.settle();
            (self.host.settled)(answer);
        }
    }

    /// Hands messages on to this host's interrupts; whether some wait for room.
    fn hand_on_all(&self) -> bool {
        let receivers: Vec<_> = {
            let state = self.lock();
            let receiver = |(link, end): (&ConnectionKey, &End)| match end {
                End::Receiver(receiver) => Some((link.1, receiver.clone())),
                End::Memory(_) | End::Sender(_) => None,
            };
            state.ends.iter().filter_map(receiver).collect()
        };
        receivers.iter().fold(false, |waiting, (connection, receiver)| {
            self.hand_on(*connection, receiver) || waiting
        })
    }
}

impl FarState {
    /// Says what was to be said when all that was stored before was sent: those up to number `last`, without what waits
    /// for `all` to have taken effect, where it has not; and up to the end of memory that is to be told first, behind an
    /// answer that was said now.
    fn close(&mut self, last: u64, all: bool) {
        let is_due = |it: &Closing| it.number <= last && (all || !it.admits);
        let mut begun = BTreeSet::new();
        while let Some(due) = self.closing.iter().position(is_due) {
            let ends =
                |it: &Closing| it.connection.is_some_and(|ended| begun.contains(&(it.way, ended)));
            if self.closing.get(due).is_some_and(ends) {
                return;
            }
            let Some(Closing { way, connection, begins, said, .. }) = self.closing.remove(due)
            else {
                return;
            };
            if let Some(connection) = connection {
                self.ends.remove(&(way, connection));
            }
            if let Some(outbox) = self.ways.get(&way) {
                outbox.send(said);
            }
            if let Some(connection) = begins {
                begun.insert((way, connection));
                self.now = true;
            }
        }
    }

    /// The memory of connections that the other side knows of: not of those that it is answered later.
    pub(super) fn told_memories(&self) -> Vec<(ConnectionKey, Arc<CommonMemory>)> {
        let begins = |closing: &Closing| Some((closing.way, closing.begins?));
        let later: BTreeSet<ConnectionKey> = self.closing.iter().filter_map(begins).collect();
        let mut all = self.memories();
        all.retain(|(link, _)| !later.contains(link));
        all
    }

    /// All memory, with the connections.
    pub(super) fn memories(&self) -> Vec<(ConnectionKey, Arc<CommonMemory>)> {
        let memory = |(link, end): (&ConnectionKey, &End)| match end {
            End::Memory(pair) => Some((*link, pair.clone())),
            End::Sender(_) | End::Receiver(_) => None,
        };
        self.ends.iter().filter_map(memory).collect()
    }
}
