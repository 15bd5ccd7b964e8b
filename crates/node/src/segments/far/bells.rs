//! Interrupts of other machines: what is rung here is said there.
//!
//! A process triggers the doorbell that stands here for the interrupt's own. A thread for each connection hears
//! that, sees to it that what was stored before has taken effect, and says it. Messages of data interrupts are
//! taken from the ring that stands here for the owner's, as many as the owner has room for.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::ring::RingLayout;
use rackbus_memory::{AdaptiveSpin, Consumer, Doorbell, Producer, PushError};
use rackbus_segment::message::{DATA_SLOTS, MAX_DATA};

use super::super::objects::Object;
use super::super::outbox::Letter;

/// How a sender's ring lies in memory (as `attach` has it).
pub(super) const RING: RingLayout = RingLayout { slots: DATA_SLOTS, slot_bytes: MAX_DATA };
/// The most triggers of one message: a doorbell tells no more apart at once.
const MOST_RINGS: u32 = 1024;

/// What an interrupt is made of.
#[derive(Debug)]
pub struct InterruptParts {
    /// The memory of its doorbell.
    pub bell: Arc<Object>,
    /// The event for who sleeps.
    pub event: Arc<Object>,
    /// The ring of a sender of data.
    pub ring: Option<Arc<Object>>,
}

impl InterruptParts {
    pub(super) fn doorbell(&self) -> Option<Doorbell> {
        let event = self.event.event().ok()?;
        Doorbell::new(self.bell.region().ok()?, 0, event)
    }
}

/// The connector's end: triggers and messages are read here and sent to the owner's node.
#[derive(Debug)]
pub struct BellSender {
    bell: Doorbell,
    state: Mutex<Sending>,
    changed: Condvar,
}

#[derive(Debug)]
struct Sending {
    ring: Option<Consumer>,
    /// Messages that the owner has still room for.
    room: u32,
    /// Triggers up to here are said.
    said: u32,
    /// What was said and is not known to be there.
    under_way: u32,
    /// What is to be said when all before it was; the process hears nothing any more.
    last: Option<Letter>,
    /// Until when room is waited for: without a limit until the connection ends.
    until: Option<Instant>,
    ended: bool,
}

/// What a sender has to say.
#[derive(Debug)]
pub enum BellMessage {
    /// The interrupt was triggered so often since the last time.
    Rung(u32),
    /// A message for a data interrupt.
    Message(Vec<u8>),
}

impl BellSender {
    /// Over a line that stands for the owner's. `None` when it cannot be mapped.
    pub fn new(line: &InterruptParts) -> Option<Arc<BellSender>> {
        let ring = match &line.ring {
            Some(ring) => Some(Consumer::new(ring.region().ok()?, 0, RING)?),
            None => None,
        };
        let (said, under_way) = (0, 0);
        let (room, last, until) = (DATA_SLOTS, None, None);
        let state = Sending { ring, room, said, under_way, last, until, ended: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Some(Arc::new(BellSender { bell: line.doorbell()?, state, changed }))
    }

    fn lock(&self) -> MutexGuard<'_, Sending> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears the process until the connection has ended: calls `before` when there is something, then `say` for it.
    pub fn hear(&self, before: impl Fn(), say: impl Fn(BellMessage)) {
        let (mut seen, mut spin) = (0, AdaptiveSpin::new(0, 50_000));
        let mut message = vec![0; MAX_DATA as usize];
        loop {
            let over = self.bell.wait(seen, &mut spin, None).is_err();
            let count = self.bell.count();
            if count != seen {
                before();
                if self.lock().ring.is_some() {
                    while let Some(length) = self.take(&mut message) {
                        say(BellMessage::Message(message[..length].to_vec()));
                    }
                } else {
                    self.lock().under_way += 1;
                    say(BellMessage::Rung(count.wrapping_sub(seen)));
                }
                seen = count;
                self.lock().said = count;
                self.changed.notify_all();
            }
            if over {
                return;
            }
        }
    }

    /// The next message, when the owner has room for it.
    fn take(&self, buffer: &mut [u8]) -> Option<usize> {
        let mut state = self.lock();
        while state.room == 0 && !state.ended {
            let left = match state.until {
                Some(until) => until.checked_duration_since(Instant::now())?,
                None => Duration::MAX,
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ended {
            return None;
        }
        let length = state.ring.as_mut()?.pop(buffer).filter(|length| *length <= buffer.len())?;
        state.room -= 1;
        state.under_way += 1;
        Some(length)
    }

    /// The owner has room for one more.
    pub fn taken(&self) {
        let mut state = self.lock();
        state.room = (state.room + 1).min(DATA_SLOTS);
        self.changed.notify_all();
    }

    /// The oldest of what was said is there.
    pub fn reached(&self) {
        let mut state = self.lock();
        state.under_way = state.under_way.saturating_sub(1);
        self.changed.notify_all();
    }

    /// Waits until what was triggered before is there; false when the owner is gone, or `limit` has ended. Messages
    /// that the owner has no room for are not waited for.
    pub fn flush(&self, limit: Duration) -> bool {
        let count = self.bell.count();
        let waiting = |it: &mut Sending| {
            let full = it.ring.is_some() && it.room == 0;
            let behind = (count.wrapping_sub(it.said) as i32) > 0 && !full;
            !it.ended && (behind || it.under_way > 0)
        };
        let waited = self.changed.wait_timeout_while(self.lock(), limit, waiting);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.ended && !timeout.timed_out()
    }

    /// The process is to be heard no more; what it said is said first, as far as the owner has room within `limit`,
    /// and then `last`.
    pub fn close(&self, last: Letter, limit: Duration) {
        {
            let mut state = self.lock();
            (state.last, state.until) = (Some(last), Some(Instant::now() + limit));
        }
        self.changed.notify_all();
        self.bell.leave();
    }

    /// What is to be said last, if anything.
    pub fn take_last(&self) -> Option<Letter> {
        self.lock().last.take()
    }

    /// The owner is gone: nothing is said any more, and who triggers is told so.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
        self.bell.close();
    }
}

/// The owner's end: what was sent is triggered here.
#[derive(Debug)]
pub struct BellReceiver {
    bell: Doorbell,
    ring: Option<Mutex<Receiving>>,
}

#[derive(Debug)]
struct Receiving {
    ring: Producer,
    /// Messages that the ring has no room for yet.
    waiting: VecDeque<Vec<u8>>,
}

impl BellReceiver {
    /// Over the interrupt's own line. `None` when it cannot be mapped.
    pub fn new(line: &InterruptParts) -> Option<Arc<BellReceiver>> {
        let ring = match &line.ring {
            Some(ring) => {
                let ring = Producer::new(ring.region().ok()?, 0, RING)?;
                Some(Mutex::new(Receiving { ring, waiting: VecDeque::new() }))
            }
            None => None,
        };
        Some(Arc::new(BellReceiver { bell: line.doorbell()?, ring }))
    }

    /// So many triggers came from the connector.
    pub fn rung(&self, count: u32) {
        for _ in 0..count.min(MOST_RINGS) {
            self.bell.ring();
        }
    }

    /// A message came. False when it is one that there was no room for, or that cannot be.
    pub fn message(&self, data: Vec<u8>) -> bool {
        let Some(receiving) = &self.ring else { return false };
        let mut receiving = receiving.lock().unwrap_or_else(PoisonError::into_inner);
        if data.len() > MAX_DATA as usize || receiving.waiting.len() >= DATA_SLOTS as usize {
            return false;
        }
        receiving.waiting.push_back(data);
        true
    }

    /// Hands on what the ring has room for; how many messages that were, and whether some are left.
    pub fn hand_on(&self) -> (u32, bool) {
        let Some(receiving) = &self.ring else { return (0, false) };
        let mut receiving = receiving.lock().unwrap_or_else(PoisonError::into_inner);
        let Receiving { ring, waiting } = &mut *receiving;
        let mut count = 0;
        while let Some(message) = waiting.front() {
            match ring.push(message) {
                Ok(()) => count += 1,
                Err(PushError::Full) => break,
                // Looked at when it came.
                Err(PushError::TooLong { .. }) => {}
            }
            waiting.pop_front();
        }
        if count > 0 {
            self.bell.ring();
        }
        (count, !waiting.is_empty())
    }
}
