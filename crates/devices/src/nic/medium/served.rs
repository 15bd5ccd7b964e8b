//! The lender's end: its port, served to a front elsewhere.
//!
//! The front is hostile: a message is copied out once, and its slot and length are checked before anything is done. One
//! that breaks the rules is not listened to any more.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, Exchange, ExchangeError, ExchangeHandles, InheritedEnd};
use rackbus_net::{NetworkPort, SendOutcome};
use rackbus_pci::operations::Tally;
use rackbus_pci::{Bus, Work};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::super::counters::count;
use super::super::function::{Nic, PollOutcome, RECEIVE, TRANSMIT};
use super::{ATTEND, Answer, Ask, Batch, Filling, LAYOUT, WATCH, is_inward, is_outward, kind};
use crate::either::either_of;

/// Messages, and frames in each direction, in one poll: a revocation waits no longer than these take to begin. Frames that
/// are given up when the front's driver is reset come on top: their headers are read to count them, once for each reset.
const TURN: usize = 64;
/// A receiver without room rings when it has some, and never if it is stopped: then its frames are to be dropped.
const RETRY_NS: u64 = 1_000_000;

/// Serves a function's port to one front.
#[derive(Debug)]
pub struct ServedPort {
    exchange: Exchange,
    /// Batches of the front's that the port has not taken wholly, and how many frames of each were dropped.
    pending: VecDeque<(Batch, u32)>,
    /// Places for what comes.
    rooms: VecDeque<u16>,
    /// What the front knows of the link, if it wants to know of a change.
    watched: Option<bool>,
    /// The number of the next batch that comes.
    next: u32,
    attended: bool,
    /// The generation that the front said with that.
    generation: u8,
    /// Whether the port's link is up.
    up: bool,
    /// The front is not listened to any more.
    over: bool,
    /// The port was saved, and nothing happened since.
    saved: bool,
    /// Frames wait in the port that the front has no place for, or its rate.
    stalled: bool,
    /// Said whether frames are taken, and not done yet: the batches before it have one more turn.
    attend: Option<Ask>,
    /// Of the exchange's event and the port's: whoever polls waits for one descriptor.
    either: OwnedFd,
}

/// A served port that another process goes on with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedState {
    /// Slot, bytes, where the next frame is, and frames that were dropped.
    pending: Vec<(u16, u32, u32, u32)>,
    rooms: Vec<u16>,
    watched: Option<bool>,
    next: u32,
    attended: bool,
    #[serde(default)]
    generation: u8,
    over: bool,
}

impl ServedPort {
    /// In shared memory, with what the front joins by.
    ///
    /// # Errors
    /// When memory or descriptors cannot be had.
    pub fn new(port: &dyn NetworkPort) -> Result<(ServedPort, ExchangeHandles), ExchangeError> {
        let (exchange, handles) = Exchange::create("nic-medium", LAYOUT)?;
        Ok((ServedPort::with_exchange(exchange, port)?, handles))
    }

    /// The same for a front whose frames `carried` carries.
    ///
    /// # Errors
    /// As [`new`](ServedPort::new).
    pub fn carried(carried: Carried, port: &dyn NetworkPort) -> Result<ServedPort, ExchangeError> {
        let exchange = Exchange::carried("nic-medium", carried, LAYOUT)?;
        ServedPort::with_exchange(exchange, port)
    }

    fn with_exchange(
        exchange: Exchange,
        port: &dyn NetworkPort,
    ) -> Result<ServedPort, ExchangeError> {
        let either = either_of([Some(exchange.as_fd()), Some(port.wake_fd())]);
        let either = either.map_err(|cause| ExchangeError::Events(cause.into()))?;
        Ok(ServedPort {
            exchange,
            pending: VecDeque::new(),
            rooms: VecDeque::new(),
            watched: None,
            next: 0,
            attended: false,
            generation: 0,
            up: port.is_up(),
            over: false,
            saved: false,
            stalled: false,
            attend: None,
            either,
        })
    }

    /// What another process needs to go on with it.
    ///
    /// # Errors
    /// When there are no descriptors left; it continues as it was.
    pub fn save(&mut self) -> std::io::Result<(ServedState, Vec<OwnedFd>)> {
        self.exchange.ring();
        let files = self.exchange.pass_on()?;
        self.saved = true;
        let batch = |(batch, dropped): &(Batch, u32)| {
            (batch.slot, batch.place.get().len() as u32, batch.at as u32, *dropped)
        };
        let state = ServedState {
            pending: self.pending.iter().map(batch).collect(),
            rooms: self.rooms.iter().copied().collect(),
            watched: self.watched,
            next: self.next,
            attended: self.attended,
            generation: self.generation,
            over: self.over,
        };
        Ok((state, files))
    }

    /// Goes on here after all with what was [saved](ServedPort::save).
    pub fn take_back(&mut self) {
        self.saved = false;
        self.exchange.take_back();
    }

    /// Goes on where an earlier one was saved.
    ///
    /// # Errors
    /// As [`new`](ServedPort::new).
    pub fn resume(
        end: InheritedEnd,
        port: &mut dyn NetworkPort,
        state: &ServedState,
    ) -> Result<ServedPort, ExchangeError> {
        let exchange = Exchange::again(SessionSide::Answers, end, LAYOUT)?;
        let mut served = ServedPort::with_exchange(exchange, port)?;
        (served.watched, served.next, served.over) = (state.watched, state.next, state.over);
        (served.attended, served.generation) = (state.attended, state.generation);
        let mut good = true;
        for (slot, bytes, at, dropped) in &state.pending {
            good &= served.take_batch(*slot, *bytes, (*at, *dropped));
        }
        for slot in &state.rooms {
            good &= served.take_room(*slot);
        }
        if served.attended {
            port.attend(true);
        }
        if !good {
            served.close();
            served.give_up(port);
        }
        // The front may rest until it hears of what was answered here.
        served.exchange.ring();
        Ok(served)
    }

    fn take_batch(&mut self, slot: u16, bytes: u32, (at, dropped): (u32, u32)) -> bool {
        let is_free = is_outward(slot) && !self.pending.iter().any(|(it, _)| it.slot == slot);
        let place = self.exchange.data(slot.into(), bytes as usize).filter(|_| is_free);
        let Some(place) = place else { return false };
        self.pending.push_back((Batch::new(slot, place, at as usize), dropped));
        true
    }

    fn take_room(&mut self, slot: u16) -> bool {
        let is_free = is_inward(slot) && !self.rooms.contains(&slot);
        if is_free {
            self.rooms.push_back(slot);
        }
        is_free
    }

    /// Takes a question; false when it is none that there can be.
    fn take(&mut self, ask: &Ask) -> bool {
        let (slot, flag) = (ask.slot.get(), ask.flag != 0);
        match ask.kind {
            kind::SEND => self.take_batch(slot, ask.bytes.get(), (0, 0)),
            kind::ROOM => self.take_room(slot),
            kind::ATTEND if slot == ATTEND => {
                self.attend = Some(*ask);
                true
            }
            kind::WATCH if slot == WATCH && self.watched.is_none() => {
                self.watched = Some(flag);
                true
            }
            _ => false,
        }
    }

    /// Frames are taken from now on, or are not, as was said. What the port has not taken by now is given up, and counted.
    fn attend(&mut self, port: &mut dyn NetworkPort, ask: &Ask, not_sent: &AtomicU64) {
        while let Some((mut batch, dropped)) = self.pending.pop_front() {
            let Ok(left) = batch.skip_all() else { return self.break_off() };
            not_sent.fetch_add(left.into(), Ordering::Relaxed);
            self.answer(batch.slot, 0, dropped.saturating_add(left));
        }
        self.attended = ask.flag != 0;
        self.generation = ask.bytes.get() as u8;
        port.attend(self.attended);
        self.answer(ATTEND, 0, 0);
    }

    fn answer(&mut self, slot: u16, bytes: usize, number: u32) {
        let answer = Answer {
            slot: slot.into(),
            up: self.up.into(),
            generation: if is_inward(slot) { self.generation } else { 0 },
            bytes: (bytes as u32).into(),
            number: number.into(),
        };
        let data = (bytes > 0).then_some((u32::from(slot), bytes));
        // There is room for one answer of each slot, unless the front does not take them.
        if self.exchange.send(answer.as_bytes(), data).is_err() {
            self.close();
        }
    }

    /// A batch has come.
    fn came(&mut self, Filling { slot, bytes, .. }: Filling) {
        self.answer(slot, bytes, self.next);
        self.next = self.next.wrapping_add(1);
    }

    fn close(&mut self) {
        self.over = true;
        self.exchange.close();
    }

    /// Nobody sends or takes anything any more.
    fn give_up(&mut self, port: &mut dyn NetworkPort) {
        self.pending.clear();
        self.rooms.clear();
        if std::mem::take(&mut self.attended) {
            port.attend(false);
        }
    }

    /// Ends it: on return nothing that the front asked for is under way, and it hears no more.
    pub fn end(&mut self, port: &mut dyn NetworkPort) {
        // Otherwise somebody else continues with the exchange.
        if !self.saved {
            self.close();
        }
        self.give_up(port);
    }

    /// Takes what the front asks, up to whether it takes frames; how much that was.
    fn hear(&mut self, bus: &Bus<'_>) -> usize {
        let mut message = [0; MESSAGE_BYTES];
        for nth in 0..TURN {
            if self.over || self.attend.is_some() {
                return nth;
            }
            let Some(length) = self.exchange.receive(&mut message) else { return nth };
            if nth == 0 {
                bus.user.before_access();
            }
            if bus.dma.revoker().is_revoked() {
                // It was given up while this host stood still: what it asked for is not done.
                self.close();
                return nth;
            }
            let ask = message.get(..length).and_then(|bytes| Ask::read_from_bytes(bytes).ok());
            if !ask.is_some_and(|ask| self.take(&ask)) {
                self.break_off();
            }
        }
        TURN
    }

    fn break_off(&mut self) {
        tracing::warn!("a front violates the protocol and is disconnected");
        self.close();
    }

    /// Says that the link has changed, if the front wants to know.
    fn tell_link(&mut self) -> bool {
        let changed = self.watched.is_some_and(|known| known != self.up);
        if changed {
            self.watched = None;
            self.answer(WATCH, 0, 0);
        }
        changed
    }

    /// Readable when there is something to do.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.over).then(|| self.either.as_fd())
    }

    /// Whoever polls is about to sleep; false when there is something to do.
    pub fn rest(&mut self, port: &mut dyn NetworkPort) -> bool {
        let quiet = port.park();
        let rests = self.exchange.rest() || self.exchange.is_closed();
        self.over || (rests && (quiet || self.stalled))
    }
}

impl Nic {
    /// Serves the front that has the port for a while; `None` where there is none.
    pub(in super::super) fn serve(&mut self, bus: &Bus<'_>) -> Option<Work> {
        let mut served = self.served.take()?;
        let mut port = std::mem::take(&mut self.port);
        let work = match port.get_mut() {
            Some(port) => self.serve_port(&mut served, port, bus),
            None => Work::Asleep(None),
        };
        (self.served, self.port) = (Some(served), port);
        Some(work)
    }

    fn serve_port(
        &mut self,
        served: &mut ServedPort,
        port: &mut dyn NetworkPort,
        bus: &Bus<'_>,
    ) -> Work {
        served.saved = false;
        served.up = port.is_up();
        let heard = served.hear(bus);
        let outward = self.pass_outward(served, port, bus);
        if let Some(ask) = served.attend.take().filter(|_| !served.over) {
            served.attend(port, &ask, &self.counters.not_sent);
        }
        let inward = self.pass_inward(served, port, bus);
        served.stalled = inward.stalled;
        let told = served.tell_link();
        if heard > 0 || outward.done || inward.done || told {
            served.exchange.ring();
            return Work::Done;
        }
        if served.over || served.exchange.is_closed() {
            served.over = true;
            served.give_up(port);
            return Work::Asleep(None);
        }
        match [outward, inward].into_iter().filter_map(|it| it.until).min() {
            Some(until) => Work::Asleep(Some(until)),
            None => Work::Idle,
        }
    }

    /// Frames of the front's to the port.
    fn pass_outward(
        &mut self,
        served: &mut ServedPort,
        port: &mut dyn NetworkPort,
        bus: &Bus<'_>,
    ) -> PollOutcome {
        let (mut outcome, mut tally) = (PollOutcome::default(), Tally::default());
        let begun = bus.user.ticks();
        for _ in 0..TURN {
            let Some((batch, dropped)) = served.pending.front_mut() else { break };
            match batch.find() {
                Ok(true) => {}
                Ok(false) => {
                    let (slot, dropped) = (batch.slot, *dropped);
                    served.pending.pop_front();
                    served.answer(slot, 0, dropped);
                    outcome.done = true;
                    continue;
                }
                Err(_) => {
                    served.break_off();
                    break;
                }
            }
            if let Err(at) = self.outward.ready(bus.now_ns) {
                count(&self.counters.throttled);
                outcome.wait_until(at);
                break;
            }
            let Some(frame) = batch.frame() else { break };
            let length = frame.bytes.len();
            match port.send(frame.offload, &[frame.bytes]) {
                SendOutcome::Full => {
                    outcome.wait_until(bus.now_ns.saturating_add(RETRY_NS));
                    break;
                }
                sent => {
                    self.outward.spend(length);
                    tally.count(length as u64, sent == SendOutcome::Done);
                    if sent != SendOutcome::Done {
                        *dropped = dropped.saturating_add(1);
                        count(&self.counters.not_sent);
                    }
                    batch.consume();
                }
            }
        }
        if tally.done > 0 {
            port.flush();
            outcome.done = true;
        }
        self.tally(TRANSMIT, tally, bus.user.ticks().saturating_sub(begun));
        outcome
    }

    /// Frames of the port's to the front, as far as it has places for them.
    fn pass_inward(
        &mut self,
        served: &mut ServedPort,
        port: &mut dyn NetworkPort,
        bus: &Bus<'_>,
    ) -> PollOutcome {
        let (mut outcome, mut tally) = (PollOutcome::default(), Tally::default());
        let begun = bus.user.ticks();
        let mut filling: Option<Filling> = None;
        for _ in 0..TURN {
            if !served.attended {
                break;
            }
            let Some(frame) = port.next() else { break };
            if let Err(at) = self.inward.ready(bus.now_ns) {
                count(&self.counters.throttled);
                outcome.wait_until(at);
                break;
            }
            let length = frame.bytes.len();
            if filling.as_ref().is_some_and(|filling| !filling.has_room(length)) {
                filling.take().into_iter().for_each(|full| served.came(full));
            }
            if filling.is_none() {
                let Some(slot) = served.rooms.pop_front() else {
                    outcome.stalled = true;
                    break;
                };
                let place = served.exchange.data(slot.into(), LAYOUT.data_bytes);
                filling = place.map(|place| Filling::new(slot, place));
            }
            let Some(filling) = &mut filling else { break };
            filling.put(frame.offload, length, &[frame.bytes]);
            self.inward.spend(length);
            tally.count(length as u64, true);
            port.consume();
        }
        if let Some(last) = filling {
            served.came(last);
        }
        outcome.done = tally.done > 0;
        self.tally(RECEIVE, tally, bus.user.ticks().saturating_sub(begun));
        outcome
    }
}
