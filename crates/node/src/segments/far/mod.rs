//! A conversation with the node of another machine: no memory goes along with messages, so something stands here
//! for it, and is kept the same.
//!
//! The directory knows nothing of this. Where it says that memory goes along with an answer, the answer says what
//! it is, and both ends get a [`Pair`]; where it says that an interrupt's doorbell does, they get the ends of
//! [`bells`]. A thread for each conversation looks at the memory of all of its connections, again and again: soon
//! while something changes ([`BUSY`]), else less and less often ([`IDLE`]), and never for more than a part of the
//! time ([`SHARE`]).

mod bells;
mod pair;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_segment::Handle;
use rackbus_segment::coherence::{Batch, Side};
use rackbus_segment::directory::LinePart;
use rackbus_segment::message::{Carried, StandIn, encode};

pub use bells::Line;
use bells::{Receiver, Said, Sender};
use pair::{Looked, Pair};

use super::objects::{Kind, Object};
use super::outbox::{Letter, Outbox};

/// Between two looks while something was stored lately.
const BUSY: Duration = Duration::from_micros(50);
/// And at most, when nothing is.
const IDLE: Duration = Duration::from_millis(1);
/// How long after the last store it counts as busy.
const LATELY: Duration = Duration::from_millis(20);
/// A look is followed by a pause of so many times what it took.
const SHARE: u32 = 3;
/// Bytes of stores in one message.
const PART: usize = 24 << 10;
/// How long a peer may take to apply what is to take effect before something else is said.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// What a connection has at this end.
#[derive(Debug, Clone)]
enum End {
    Memory(Arc<Pair>),
    Sender(Arc<Sender>),
    Receiver(Arc<Receiver>),
}

/// A conversation, from the one side or the other.
#[derive(Debug)]
pub struct Far {
    outbox: Arc<Outbox>,
    state: Mutex<State>,
    /// Signalled when there is something to look at.
    kick: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ends: HashMap<Handle, End>,
    /// Connections that end, with what is said when all that was stored before was sent.
    closing: Vec<(Handle, Arc<Pair>, Letter)>,
    /// Connections that are being asked for: of a question, the connection that its answer makes.
    asked: HashMap<u64, Handle>,
    /// Something is to be looked at now.
    now: bool,
    ended: bool,
}

/// A message of the directory's, as it goes to another machine.
fn carried(message: &[u8], given: Option<(Handle, Vec<StandIn>)>) -> Letter {
    let carried = Carried::Said { message: Cow::Borrowed(message), given };
    Letter { bytes: encode(&carried), fds: Vec::new() }
}

/// What stands for objects on the other machine; `None` when that cannot be.
pub fn stand_ins(objects: &[(Arc<Object>, bool)], size: u64) -> Option<Vec<StandIn>> {
    let one = |(object, write): &(Arc<Object>, bool)| match object.kind() {
        Kind::Memory => StandIn::Memory { size, write: *write },
        Kind::Event => StandIn::Event,
        Kind::Line(LinePart::Doorbell) => StandIn::Doorbell,
        Kind::Line(LinePart::Ring) => StandIn::Ring,
    };
    let all: Vec<StandIn> = objects.iter().map(one).collect();
    is_whole(&all).then_some(all)
}

/// Whether these are a segment's or an interrupt's.
pub fn is_whole(given: &[StandIn]) -> bool {
    use StandIn::{Doorbell, Event, Memory, Ring};
    matches!(given, [Memory { .. }] | [Doorbell, Event] | [Doorbell, Event, Ring])
}

impl Far {
    /// A conversation over this outbox, with a thread that looks at its memory until it ends.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn new(outbox: Arc<Outbox>) -> std::io::Result<Arc<Far>> {
        let far = Arc::new(Far { outbox, state: Mutex::default(), kick: Condvar::new() });
        let looking = far.clone();
        let look = move || looking.keep_the_same();
        std::thread::Builder::new().name("coherence".into()).spawn(look)?;
        Ok(far)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says a message of the directory's.
    pub fn say(&self, message: &[u8], given: Option<(Handle, Vec<StandIn>)>) {
        self.outbox.send(carried(message, given));
    }

    fn send(&self, carried: &Carried<'_>) {
        self.outbox.send(Letter { bytes: encode(carried), fds: Vec::new() });
    }

    fn send_batch(&self, connection: Handle, batch: &Batch) {
        for part in batch.parts(PART) {
            self.send(&Carried::Stores {
                connection,
                batch: part.batch,
                last: part.last,
                runs: part.places,
                data: Cow::Borrowed(part.data),
            });
        }
    }

    /// Looks soon.
    fn kick(&self) {
        self.lock().now = true;
        self.kick.notify_all();
    }

    /// A question was heard, of which the answer makes a connection.
    pub fn asked(&self, request: u64, connection: Handle) {
        self.lock().asked.insert(request, connection);
    }

    /// The connection that the answer to a question makes.
    pub fn answered(&self, request: u64) -> Option<Handle> {
        self.lock().asked.remove(&request)
    }

    /// A connection has memory at this end.
    pub fn add_memory(
        &self,
        connection: Handle,
        object: Arc<Object>,
        side: Side,
        form: (u64, bool),
    ) {
        let pair = Pair::new(object, side, form.0, form.1);
        self.lock().ends.insert(connection, End::Memory(pair));
        self.kick();
    }

    /// A connection has an interrupt of this host at this end. False when it cannot be mapped.
    pub fn add_receiver(&self, connection: Handle, line: &Line) -> bool {
        let Some(receiver) = Receiver::new(line) else { return false };
        self.lock().ends.insert(connection, End::Receiver(receiver));
        true
    }

    /// A connection has something at this end that stands for an interrupt: a thread says what is rung there, and
    /// calls `before` first. False when that cannot be.
    pub fn add_sender(
        self: &Arc<Self>,
        connection: Handle,
        line: &Line,
        before: impl Fn() + Send + 'static,
    ) -> bool {
        let Some(sender) = Sender::new(line) else { return false };
        let (far, hearing) = (self.clone(), sender.clone());
        let hear = move || {
            let say = |said| match said {
                Said::Rung(count) => far.send(&Carried::Rung { connection, count }),
                Said::Message(data) => {
                    far.send(&Carried::Message { connection, data: Cow::Owned(data) });
                }
            };
            if let Some(last) = hearing.hear(before, say) {
                far.outbox.send(last);
            }
        };
        if std::thread::Builder::new().name("far interrupt".into()).spawn(hear).is_err() {
            return false;
        }
        self.lock().ends.insert(connection, End::Sender(sender));
        true
    }

    /// A connection ends in order: what was stored and rung before it is said first, then `message`. False when
    /// there is nothing of the connection here, and nothing was said.
    pub fn close(&self, connection: Handle, message: &[u8]) -> bool {
        let mut state = self.lock();
        let last = carried(message, None);
        match state.ends.remove(&connection) {
            Some(End::Memory(pair)) => state.closing.push((connection, pair, last)),
            Some(End::Sender(sender)) => {
                sender.close(last);
                return true;
            }
            Some(End::Receiver(_)) | None => return false,
        }
        drop(state);
        self.kick();
        true
    }

    /// A connection is over: nothing of it is said or heard any more.
    pub fn forget(&self, connection: Handle) {
        let end = self.lock().ends.remove(&connection);
        end_one(end);
    }

    /// The memory of a connection.
    pub fn memory(&self, connection: Handle) -> Option<Arc<Pair>> {
        match self.lock().ends.get(&connection) {
            Some(End::Memory(pair)) => Some(pair.clone()),
            _ => None,
        }
    }

    /// Goes on after a move of a connection's memory.
    pub fn resume(&self, connection: Handle) {
        let Some(pair) = self.memory(connection) else { return };
        if let Some(batch) = pair.resume() {
            self.send(&Carried::Applied { connection, batch });
        }
        self.kick();
    }

    /// The memories of connections that `of` says are meant.
    pub fn memories(&self, of: impl Fn(Handle, &Pair) -> bool) -> Vec<(Handle, Arc<Pair>)> {
        let state = self.lock();
        let memory = |(connection, end): (&Handle, &End)| match end {
            End::Memory(pair) if of(*connection, pair) => Some((*connection, pair.clone())),
            _ => None,
        };
        state.ends.iter().filter_map(memory).collect()
    }

    /// Waits until what was stored to a connection's memory has taken effect on the other side; whether it has.
    pub fn flush(&self, (connection, pair): &(Handle, Arc<Pair>)) -> bool {
        pair.flush(PATIENCE, |batch| self.send_batch(*connection, batch))
    }

    /// Hears what is no message of the directory's. The connection whose memory has all that the other side had
    /// at first, when that has just come.
    ///
    /// # Errors
    /// What is wrong with it; the conversation ends.
    pub fn hear(&self, carried: Carried<'_>) -> Result<Option<Handle>, String> {
        let end = |connection| self.lock().ends.get(&connection).cloned();
        match carried {
            Carried::Said { .. } => {}
            Carried::Stores { connection, batch, last, runs, data } => {
                // What came too late for a connection that is over is nobody's.
                let Some(End::Memory(pair)) = end(connection) else { return Ok(None) };
                let heard = pair.hear(batch, last, &runs, &data);
                if heard.map_err(|violation| violation.to_string())? {
                    self.send(&Carried::Applied { connection, batch });
                    return Ok((batch == 1).then_some(connection));
                }
            }
            Carried::Applied { connection, batch } => {
                let pair = match end(connection) {
                    Some(End::Memory(pair)) => Some(pair),
                    _ => {
                        let state = self.lock();
                        let closing = state.closing.iter().find(|it| it.0 == connection);
                        closing.map(|(_, pair, _)| pair.clone())
                    }
                };
                if let Some(pair) = pair {
                    pair.applied(batch).map_err(|violation| violation.to_string())?;
                    self.kick();
                }
            }
            Carried::Rung { connection, count } => {
                if let Some(End::Receiver(receiver)) = end(connection) {
                    receiver.rung(count);
                }
            }
            Carried::Message { connection, data } => {
                if let Some(End::Receiver(receiver)) = end(connection) {
                    if !receiver.message(data.into_owned()) {
                        return Err("a message that there was no room for".to_owned());
                    }
                    if self.hand_on(connection, &receiver) {
                        self.kick();
                    }
                }
            }
            Carried::Taken { connection } => {
                if let Some(End::Sender(sender)) = end(connection) {
                    sender.taken();
                }
            }
        }
        Ok(None)
    }

    /// Hands messages on to an interrupt; whether some wait for room.
    fn hand_on(&self, connection: Handle, receiver: &Receiver) -> bool {
        let (taken, waiting) = receiver.hand_on();
        (0..taken).for_each(|_| self.send(&Carried::Taken { connection }));
        waiting
    }

    /// The conversation is over.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let ends: Vec<End> = state.ends.drain().map(|(_, end)| end).collect();
        let closing = std::mem::take(&mut state.closing);
        drop(state);
        self.kick.notify_all();
        ends.into_iter().for_each(|end| end_one(Some(end)));
        closing.into_iter().for_each(|(_, pair, _)| pair.end());
    }

    /// Looks at all memory, until the conversation ends.
    fn keep_the_same(&self) {
        let (mut pause, mut changed) = (BUSY, Instant::now());
        loop {
            let begun = Instant::now();
            let (some, any) = self.look();
            if some {
                changed = begun;
            }
            let spent = begun.elapsed();
            pause = match changed.elapsed() < LATELY {
                true => BUSY,
                false => (pause * 2).min(IDLE),
            };
            pause = pause.max(spent * SHARE);
            let mut state = self.lock();
            let resting = |it: &mut State| !it.now && !it.ended;
            state = match any {
                true => {
                    let waited = self.kick.wait_timeout_while(state, pause, resting);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                false => {
                    let waited = self.kick.wait_while(state, resting);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
            state.now = false;
            if state.ended {
                return;
            }
        }
    }

    /// Looks once: whether anything was stored, and whether there is anything to look at again.
    fn look(&self) -> (bool, bool) {
        let (ends, closing) = {
            let state = self.lock();
            let ends: Vec<(Handle, End)> =
                state.ends.iter().map(|(connection, end)| (*connection, end.clone())).collect();
            let closing: Vec<(Handle, Arc<Pair>)> =
                state.closing.iter().map(|it| (it.0, it.1.clone())).collect();
            (ends, closing)
        };
        let (mut some, mut any) = (false, !closing.is_empty());
        for (connection, end) in ends {
            match end {
                End::Memory(pair) => {
                    any = true;
                    if let Looked::Batch(batch) = pair.look() {
                        self.send_batch(connection, &batch);
                        some = true;
                    }
                }
                End::Receiver(receiver) => any |= self.hand_on(connection, &receiver),
                End::Sender(_) => {}
            }
        }
        for (connection, pair) in closing {
            match pair.look() {
                Looked::Batch(batch) => self.send_batch(connection, &batch),
                Looked::Same => {}
                Looked::Waiting => continue,
            }
            let mut state = self.lock();
            let at = state.closing.iter().position(|it| Arc::ptr_eq(&it.1, &pair));
            if let Some((_, _, last)) = at.map(|at| state.closing.remove(at)) {
                drop(state);
                self.outbox.send(last);
            }
            pair.end();
        }
        (some, any)
    }
}

fn end_one(end: Option<End>) {
    match end {
        Some(End::Memory(pair)) => pair.end(),
        Some(End::Sender(sender)) => sender.end(),
        Some(End::Receiver(_)) | None => {}
    }
}
