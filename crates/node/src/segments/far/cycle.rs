//! The thread that sends what was stored here, to one other host.
//!
//! A cycle is: look at all memory that both hosts have in common, send what was stored, and wait until it has taken
//! effect there. Looks are soon after one another while something changes ([`BUSY`]), else less and less often
//! ([`IDLE`]); they take at most half of the time ([`BUSY_SHARE`]), and a tenth when they find nothing ([`SHARE`]).
//!
//! What was stored to memory of both [`FarConversation`]s takes effect in one: what goes over the first is held there, and only
//! when that is known is the rest sent.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use rackbus_memory::prompt::run_promptly;
use rackbus_segment::coherence::Batch;
use rackbus_segment::message::CarriedMessage;

use super::pair::{CommonMemory, collect};
use super::{Closing, ConnectionKey, End, Far, FarConversation, State};

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
/// Between two looks whether the other side still exists, and whether there is anything in common.
const REST: Duration = Duration::from_secs(1);
/// Bytes of stores in one message.
const PART: usize = 24 << 10;

/// What a cycle found.
struct Cycle {
    /// Whether anything was sent.
    some: bool,
    /// Whether there is anything to look at again.
    any: bool,
    /// How long the look took.
    looked: Duration,
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
        let resting = |it: &mut State| !it.now;
        let waited = self.kick.wait_timeout_while(self.lock(), pause, resting);
        waited.unwrap_or_else(PoisonError::into_inner).0.now = false;
    }

    /// Waits, as long as a conversation is there; whether `until` is so. One in which nothing goes on for too long is
    /// ended: its peer would keep everybody else here from being told.
    fn wait_until(&self, way: FarConversation, until: impl Fn(&State) -> bool) -> bool {
        let (mut left, mut since) = (usize::MAX, Instant::now());
        loop {
            self.hand_on_all();
            self.catch_up();
            {
                let state = self.lock();
                if until(&state) {
                    return true;
                }
                let Some(outbox) = state.ways.get(&way) else { return false };
                let waiting = outbox.waiting();
                if waiting != left {
                    (left, since) = (waiting, Instant::now());
                } else if since.elapsed() > self.limit {
                    tracing::warn!("a node does not apply what it is sent and is disconnected");
                    outbox.give_up();
                    return false;
                }
            }
            self.rest(IDLE);
        }
    }

    /// One round: looks at all pairs and sends what differs, so that it takes effect at once.
    fn cycle(&self) -> Cycle {
        let waiting = self.hand_on_all();
        self.catch_up();
        // What is wanted from now on is not in what is looked at now.
        let (wanted, links, closing) = {
            let state = self.lock();
            (state.wanted, state.memories(), state.closing.len())
        };
        let pairs: Vec<Arc<CommonMemory>> = links.iter().map(|(_, pair)| pair.clone()).collect();
        let any = !links.is_empty() || waiting;
        // Until it is on its way: what takes effect here later is answered behind it.
        let effects = self.effects.read().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let (batches, all) = collect(&pairs);
        let looked = begun.elapsed();
        let batches: Vec<(ConnectionKey, Batch)> =
            batches.into_iter().map(|(at, batch)| (links[at].0, batch)).collect();
        let some = !batches.is_empty();
        self.send(&batches, effects);
        let mut state = self.lock();
        state.close(closing);
        if all {
            state.done = wanted;
        }
        drop(state);
        self.flushed.notify_all();
        Cycle { some, any, looked }
    }

    /// Sends batches that take effect in one, and waits until they have.
    fn send(&self, batches: &[(ConnectionKey, Batch)], effects: RwLockReadGuard<'_, ()>) {
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
        self.send_over(&first, both);
        if !both {
            self.send_over(&second, false);
        }
        drop(effects);
        if both {
            let count = first.len() as u64;
            // Without the one conversation, what goes over the other has to take effect alone.
            self.wait_until(FarConversation::ToOwner, |state| state.held >= known + count);
            self.send_over(&second, false);
            self.lock().answer_behind();
        }
        // What makes all take effect comes first.
        for way in ways.into_iter().rev() {
            let of_way = || batches.iter().map(|(link, _)| link).filter(|link| link.0 == way);
            // What is told of a connection that is over there is not answered.
            let waits = |state: &State, link| state.is_waiting(link).unwrap_or(false);
            self.wait_until(way, |state| !of_way().any(|link| waits(state, link)));
            let state = self.lock();
            let unknown = |link| state.is_waiting(link).unwrap_or(true);
            if both && way == FarConversation::ToConnector && of_way().any(unknown) {
                // It may be lost, and would be waited for over there.
                state.send(FarConversation::ToOwner, &CarriedMessage::Release);
            }
        }
    }

    /// Sends batches over one conversation: the last of them makes all take effect, unless it is held as well.
    fn send_over(&self, batches: &[&(ConnectionKey, Batch)], held: bool) {
        for (at, ((way, connection), batch)) in batches.iter().enumerate() {
            let held = held || at + 1 < batches.len();
            for part in batch.parts(PART) {
                let stores = CarriedMessage::Stores {
                    connection: *connection,
                    batch: part.batch,
                    last: part.last,
                    held,
                    runs: part.places,
                    data: Cow::Borrowed(part.data),
                };
                self.lock().send(*way, &stores);
            }
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

impl State {
    /// Says what was to be said when all that was stored before was sent: the first `count`.
    fn close(&mut self, count: usize) {
        for Closing { way, connection, said } in self.closing.drain(..count.min(self.closing.len()))
        {
            if let Some(connection) = connection {
                self.ends.remove(&(way, connection));
            }
            if let Some(outbox) = self.ways.get(&way) {
                outbox.send(said);
            }
        }
    }

    /// Whether a batch of a connection is under way; `None` when the connection has ended.
    fn is_waiting(&self, link: &ConnectionKey) -> Option<bool> {
        match self.ends.get(link) {
            Some(End::Memory(pair)) => Some(pair.is_waiting()),
            _ => None,
        }
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
