//! The front's end: a port of the network that another node has.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_memory::{
    Carried, DmaSlice, Event, ExchangeError, ExchangeHandles, InheritedEnd, PinnedSlice,
};
use rackbus_net::port::MAX_FRAME;
use rackbus_net::{Cause, Frame, MacAddress, NetworkPort, Offload, SendOutcome};
use serde::{Deserialize, Serialize};

use super::super::counters::NicCounters;
use super::{
    ATTEND, Answer, Ask, BATCHES, Batch, Filling, LAYOUT, NicDescription, WATCH, is_inward,
    is_outward, kind,
};
use crate::front_exchange::FrontExchange;
use crate::lost::Lost;

/// A port of the network that another node has.
#[derive(Debug)]
pub struct RemotePort {
    exchange: FrontExchange,
    counters: Arc<NicCounters>,
    mac: MacAddress,
    mtu: u16,
    /// Whether the link at the other node is up.
    up: bool,
    /// Slots of batches to be sent.
    free: Vec<u16>,
    /// The batch that frames are put into.
    filling: Option<Filling>,
    /// Places that the other node may fill, by slot.
    lent: [bool; BATCHES as usize],
    /// Batches that came before another that is still to come, by number; `false` for what is given up.
    early: BTreeMap<u32, ((u16, u32), bool)>,
    /// The number of the next batch that comes.
    next: u32,
    /// Batches that came, each a slot and its bytes.
    came: VecDeque<(u16, u32)>,
    /// The batch that frames are taken from.
    current: Option<Batch>,
    /// Whether frames are taken; what the other node was told; whether it is still to answer that.
    wanted: bool,
    told: bool,
    telling: bool,
    /// Number of what it was told last, from 1 to 255; 0 before.
    generation: u8,
    /// Frames were not taken meanwhile, which the other node is to be told before anything else.
    ended: bool,
    /// The other node says when the link changes.
    watching: bool,
    /// The port was saved, and nothing happened since: somebody else continues with the exchange.
    saved: bool,
    /// Never rings: to be waited for when the other node is lost.
    quiet: Event,
}

/// What a saved front has of its port.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemotePortState {
    up: bool,
    free: Vec<u16>,
    lent: Vec<u16>,
    early: Vec<(u32, (u16, u32), bool)>,
    next: u32,
    /// Each with where its next frame is.
    came: Vec<(u16, u32, u32)>,
    wanted: bool,
    told: bool,
    telling: bool,
    #[serde(default)]
    generation: u8,
    ended: bool,
    watching: bool,
}

impl RemotePort {
    /// Over what the other node offered.
    ///
    /// # Errors
    /// [`ExchangeError`] when that is not fit, or the process has no descriptors left.
    pub fn join(
        description: &NicDescription,
        handles: ExchangeHandles,
        lost: Lost,
        counters: Arc<NicCounters>,
    ) -> Result<RemotePort, ExchangeError> {
        let exchange = FrontExchange::join(handles, LAYOUT, lost)?;
        let mut port = RemotePort::new(description, exchange, counters)?;
        port.begin();
        Ok(port)
    }

    /// The same over what `carried` carries.
    ///
    /// # Errors
    /// As [`join`](RemotePort::join).
    pub fn carried(
        description: &NicDescription,
        carried: Carried,
        lost: Lost,
        counters: Arc<NicCounters>,
    ) -> Result<RemotePort, ExchangeError> {
        let exchange = FrontExchange::carried("nic-front", carried, LAYOUT, lost)?;
        let mut port = RemotePort::new(description, exchange, counters)?;
        port.begin();
        Ok(port)
    }

    /// The same where an earlier life of the front is gone on with, which is [restored](RemotePort::restore) next.
    ///
    /// # Errors
    /// As [`join`](RemotePort::join).
    pub fn again(
        description: &NicDescription,
        end: InheritedEnd,
        lost: Lost,
        counters: Arc<NicCounters>,
    ) -> Result<RemotePort, ExchangeError> {
        RemotePort::new(description, FrontExchange::again(end, LAYOUT, lost)?, counters)
    }

    fn new(
        description: &NicDescription,
        exchange: FrontExchange,
        counters: Arc<NicCounters>,
    ) -> Result<RemotePort, ExchangeError> {
        Ok(RemotePort {
            exchange,
            counters,
            mac: MacAddress(description.mac),
            mtu: description.mtu,
            up: description.up,
            free: (0..BATCHES).rev().collect(),
            filling: None,
            lent: [false; BATCHES as usize],
            early: BTreeMap::new(),
            next: 0,
            came: VecDeque::new(),
            current: None,
            wanted: false,
            told: false,
            telling: false,
            generation: 0,
            ended: false,
            watching: false,
            saved: false,
            quiet: Event::new()?,
        })
    }

    /// Lends the places for what comes, and asks for news of the link.
    fn begin(&mut self) {
        (BATCHES..ATTEND).for_each(|slot| self.lend(slot));
        self.watch();
        self.exchange.ring();
    }

    fn ask(&mut self, slot: u16, kind: u8, flag: bool) {
        let ask = Ask { slot: slot.into(), kind, flag: flag.into(), bytes: 0.into() };
        self.exchange.send(&ask, None);
    }

    fn lend(&mut self, slot: u16) {
        self.lent[usize::from(slot - BATCHES)] = true;
        self.ask(slot, kind::ROOM, false);
    }

    fn watch(&mut self) {
        self.watching = true;
        self.ask(WATCH, kind::WATCH, self.up);
    }

    /// Tells the other node whether frames are taken, once it has answered what it was told before.
    fn tell(&mut self) {
        if !self.is_agreed() && !self.telling && !self.exchange.is_lost() {
            (self.told, self.telling) = (self.wanted && !self.ended, true);
            self.ended = false;
            self.generation = self.generation % u8::MAX + 1;
            let (slot, kind, flag) = (ATTEND.into(), kind::ATTEND, self.told.into());
            let bytes = u32::from(self.generation).into();
            self.exchange.send(&Ask { slot, kind, flag, bytes }, None);
            self.exchange.ring();
        }
    }

    /// Whether the other node was told, or is by now, whether frames are taken.
    fn is_agreed(&self) -> bool {
        self.wanted == self.told && !self.ended
    }

    /// Takes what the other node has answered.
    fn hear(&mut self) {
        self.saved = false;
        // As many as there can be: a peer that answers without pause keeps nobody.
        for _ in 0..LAYOUT.tags {
            let Some(answer) = self.exchange.receive::<Answer>() else { break };
            if !self.take(&answer) {
                self.exchange.break_off();
                break;
            }
        }
    }

    /// Takes an answer; false when it is none that there can be.
    fn take(&mut self, answer: &Answer) -> bool {
        let Answer { slot, up, generation, bytes, number } = *answer;
        let (slot, bytes, number) = (slot.get(), bytes.get(), number.get());
        if is_outward(slot) {
            let is_filled = self.filling.as_ref().is_some_and(|filling| filling.slot == slot);
            if is_filled || self.free.contains(&slot) {
                return false;
            }
            self.counters.not_sent.fetch_add(number.into(), Ordering::Relaxed);
            self.free.push(slot);
            return true;
        }
        if is_inward(slot) {
            let lent = std::mem::take(&mut self.lent[usize::from(slot - BATCHES)]);
            let fits = bytes > 0 && bytes as usize <= LAYOUT.data_bytes;
            let is_new = number.wrapping_sub(self.next) < u32::from(BATCHES)
                && !self.early.contains_key(&number);
            if !lent || !fits || !is_new {
                return false;
            }
            // One that is late is of the time before the driver's reset. Older nodes do not say.
            let is_of_now = generation == 0 || generation == self.generation;
            self.early.insert(number, ((slot, bytes), is_of_now && self.told && !self.ended));
            while let Some((batch, is_wanted)) = self.early.remove(&self.next) {
                self.next = self.next.wrapping_add(1);
                match is_wanted {
                    true => self.came.push_back(batch),
                    false => self.lend(batch.0),
                }
            }
            return true;
        }
        match slot {
            ATTEND if self.telling => {
                self.telling = false;
                self.tell();
            }
            WATCH if self.watching => {
                self.up = up != 0;
                self.watch();
                self.exchange.ring();
            }
            _ => return false,
        }
        true
    }

    /// Sends the batch that frames were put into.
    fn dispatch(&mut self) {
        let Some(Filling { slot, bytes, .. }) = self.filling.take() else { return };
        let ask =
            Ask { slot: slot.into(), kind: kind::SEND, flag: 0, bytes: (bytes as u32).into() };
        self.exchange.send(&ask, Some((u32::from(slot), bytes)));
    }

    /// A batch with room for a frame of so many bytes.
    fn batch(&mut self, length: usize) -> Option<&mut Filling> {
        if self.filling.as_ref().is_some_and(|filling| !filling.has_room(length)) {
            self.dispatch();
            self.exchange.ring();
        }
        if self.filling.is_none() {
            if self.free.is_empty() {
                self.hear();
            }
            let slot = self.free.pop()?;
            let Some(place) = self.place(slot, LAYOUT.data_bytes) else {
                self.free.push(slot);
                return None;
            };
            self.filling = Some(Filling::new(slot, place));
        }
        self.filling.as_mut()
    }

    fn place(&self, slot: u16, bytes: usize) -> Option<PinnedSlice> {
        self.exchange.data(slot.into(), bytes)
    }

    /// The port as a value, and what goes along with it. It does nothing until it is used again.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn save(&mut self) -> std::io::Result<(RemotePortState, Vec<OwnedFd>)> {
        self.dispatch();
        self.exchange.ring();
        let files = self.exchange.pass_on()?;
        self.saved = true;
        let current = self.current.iter().map(|it| (it.slot, it.place.get().len() as u32, it.at));
        let came = self.came.iter().map(|(slot, bytes)| (*slot, *bytes, 0));
        let lent = (BATCHES..).zip(self.lent).filter_map(|(slot, lent)| lent.then_some(slot));
        let state = RemotePortState {
            up: self.up,
            free: self.free.clone(),
            lent: lent.collect(),
            early: self
                .early
                .iter()
                .map(|(number, (batch, told))| (*number, *batch, *told))
                .collect(),
            next: self.next,
            came: current.map(|(slot, bytes, at)| (slot, bytes, at as u32)).chain(came).collect(),
            wanted: self.wanted,
            told: self.told,
            telling: self.telling,
            generation: self.generation,
            ended: self.ended,
            watching: self.watching,
        };
        Ok((state, files))
    }

    /// Goes on here after all: what its driver does from now on is told the other node.
    pub fn take_back(&mut self) {
        self.saved = false;
        self.exchange.take_back();
    }

    /// Goes on with what was [saved](RemotePort::save).
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn restore(&mut self, state: &RemotePortState) -> Result<(), &'static str> {
        let mut seen = std::collections::BTreeSet::new();
        let came = || state.came.iter().map(|(slot, ..)| *slot);
        let early = || state.early.iter().map(|(_, (slot, _), _)| *slot);
        let inward = state.lent.iter().copied().chain(came()).chain(early());
        let fits = inward.clone().all(is_inward) && state.free.iter().copied().all(is_outward);
        let once = inward.chain(state.free.iter().copied()).all(|slot| seen.insert(slot));
        let sizes = state.came.iter().map(|(_, bytes, at)| (*bytes, *at));
        let sizes = sizes.chain(state.early.iter().map(|(_, (_, bytes), _)| (*bytes, 0)));
        let mut sizes = sizes.map(|(bytes, at)| at <= bytes && bytes as usize <= LAYOUT.data_bytes);
        if !fits || !once || !sizes.all(|fits| fits) {
            return Err("the batches between a front and its port");
        }
        self.free.clone_from(&state.free);
        for slot in &state.lent {
            self.lent[usize::from(*slot - BATCHES)] = true;
        }
        self.early =
            state.early.iter().map(|(number, batch, told)| (*number, (*batch, *told))).collect();
        (self.next, self.up) = (state.next, state.up);
        let mut came = state.came.iter();
        if let Some((slot, bytes, at)) = came.next() {
            let place = self.place(*slot, *bytes as usize).ok_or("the place of a batch")?;
            self.current = Some(Batch::new(*slot, place, *at as usize));
        }
        self.came = came.map(|(slot, bytes, _)| (*slot, *bytes)).collect();
        (self.wanted, self.told, self.telling) = (state.wanted, state.told, state.telling);
        (self.ended, self.watching) = (state.ended, state.watching);
        self.generation = state.generation;
        self.exchange.set_told();
        Ok(())
    }

    /// Finds the next frame, if there is one.
    fn find(&mut self) -> bool {
        loop {
            let found = match &mut self.current {
                Some(batch) => batch.find(),
                None => {
                    if self.came.is_empty() {
                        self.hear();
                    }
                    let Some((slot, bytes)) = self.came.pop_front() else { return false };
                    let Some(place) = self.place(slot, bytes as usize) else { return false };
                    self.current = Some(Batch::new(slot, place, 0));
                    continue;
                }
            };
            match found {
                Ok(true) => return true,
                Ok(false) => self.give_back(),
                Err(_) => {
                    self.current = None;
                    self.exchange.break_off();
                    return false;
                }
            }
        }
    }

    /// The place that frames were taken from is for others from now on.
    fn give_back(&mut self) {
        if let Some(batch) = self.current.take() {
            self.lend(batch.slot);
        }
    }
}

impl NetworkPort for RemotePort {
    fn mac(&self) -> MacAddress {
        self.mac
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }

    fn is_up(&self) -> bool {
        self.up && !self.exchange.is_lost()
    }

    fn attend(&mut self, on: bool) {
        if self.saved {
            // Somebody else continues with the exchange, as it was.
            return;
        }
        self.wanted = on;
        if !on {
            self.ended = self.told;
            self.free.extend(self.filling.take().map(|filling| filling.slot));
            self.give_back();
            std::mem::take(&mut self.came).into_iter().for_each(|(slot, _)| self.lend(slot));
            self.early.values_mut().for_each(|(_, is_wanted)| *is_wanted = false);
            self.exchange.ring();
        }
        self.tell();
    }

    fn send(&mut self, offload: Offload, parts: &[DmaSlice<'_>]) -> SendOutcome {
        let length: usize = parts.iter().map(DmaSlice::len).sum();
        if self.exchange.is_lost() {
            return SendOutcome::Dropped(Cause::Down);
        }
        if length > MAX_FRAME || !offload.is_sound(length) {
            return SendOutcome::Dropped(Cause::Length);
        }
        if !self.is_agreed() || self.exchange.is_untold() {
            // The other node would give it up with what was sent before.
            self.hear();
            if !self.is_agreed() || self.exchange.is_untold() {
                return SendOutcome::Full;
            }
        }
        match self.batch(length) {
            Some(batch) => {
                batch.put(offload, length, parts);
                SendOutcome::Done
            }
            None => SendOutcome::Full,
        }
    }

    fn flush(&mut self) {
        self.dispatch();
        self.exchange.ring();
    }

    fn next(&mut self) -> Option<Frame<'_>> {
        if !self.find() {
            self.exchange.ring();
            return None;
        }
        self.current.as_ref()?.frame()
    }

    fn consume(&mut self) {
        if let Some(batch) = &mut self.current {
            batch.consume();
        }
    }

    fn park(&mut self) -> bool {
        self.dispatch();
        let was_full = self.free.is_empty();
        if self.exchange.is_lost() || self.exchange.is_untold() {
            return true;
        }
        self.hear();
        self.exchange.ring();
        // Another node that always has something more keeps nobody from what else there is to do.
        if !self.exchange.rest() {
            return false;
        }
        let has_room = was_full && !self.free.is_empty();
        !has_room && self.current.is_none() && self.came.is_empty()
    }

    fn unpark(&mut self) {}

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.exchange.wake_fd().unwrap_or(self.quiet.as_fd())
    }
}
