//! Copies that land beside the link: when both nodes agree on that, and what is said of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_segment::message::CarriedMessage;

use super::super::landing::{LandedCopy, LandingLane, LandingMemory};
use super::super::outbox::LetterQueue;
use super::{Far, FarConversation, FarState};
use crate::sequencer::essential_thread;

/// What there is for copies to land, in the two conversations with another node.
#[derive(Debug, Default)]
pub struct Landings {
    /// Memory of the other side was asked for.
    is_asked: bool,
    /// And the answer came.
    is_answered: bool,
    /// The lane to it.
    lane: Option<Arc<LandingLane>>,
    /// The other side has asked for memory of this one.
    is_wanted: bool,
    /// In which its copies land.
    memory: Option<Arc<LandingMemory>>,
}

impl Landings {
    /// A conversation has ended: what it had, to be [closed](Landings::close) without a lock.
    #[must_use]
    pub fn end(&mut self, way: FarConversation) -> Landings {
        let ended = std::mem::take(self);
        match way {
            FarConversation::ToOwner => {
                let Landings { is_wanted, memory, .. } = ended;
                *self = Landings { is_wanted, memory, ..Landings::default() };
                Landings { is_wanted: false, memory: None, ..ended }
            }
            FarConversation::ToConnector => {
                let Landings { memory, .. } = ended;
                *self = Landings { is_wanted: false, memory: None, ..ended };
                Landings { memory, ..Landings::default() }
            }
        }
    }

    #[cfg(test)]
    pub fn set_lane(&mut self, lane: Arc<LandingLane>) {
        self.lane = Some(lane);
    }

    #[cfg(test)]
    pub fn lane(&self) -> Option<Arc<LandingLane>> {
        self.lane.clone()
    }

    #[cfg(test)]
    pub fn set_memory(&mut self, memory: LandingMemory) {
        self.memory = Some(Arc::new(memory));
    }

    /// Has neither a lane nor memory any more, until a conversation begins anew: what it had.
    #[must_use]
    fn give_up(&mut self) -> Landings {
        let (lane, memory) = (self.lane.take(), self.memory.take());
        Landings { lane, memory, ..Landings::default() }
    }

    /// Takes away what the other side could reach, and the lane to its memory, by a thread of its own.
    pub fn close(self) {
        if self.lane.is_none() && self.memory.is_none() {
            return;
        }
        // The provider's library may hang, and the caller has others who wait.
        let here = Arc::new(self);
        let aside = here.clone();
        if essential_thread("landing end", move || aside.close_here()).is_err() {
            here.close_here();
        }
    }

    /// As [`close`](Landings::close), before it returns.
    fn close_here(&self) {
        self.memory.iter().for_each(|memory| memory.close());
        self.lane.iter().for_each(|lane| lane.lose());
    }
}

impl Far {
    /// Closes all that copies land by, both ways: the library's descriptors would stay open in a program that takes the
    /// place of this one.
    pub fn give_landings_up(&self) {
        let landings = self.lock().landings.give_up();
        landings.close_here();
    }

    /// Has bytes land that are to be copied, where there is a way for that; else one is asked for.
    pub(super) fn land(&self, bytes: &[u8]) -> Option<Arc<LandedCopy>> {
        if bytes.len() < rackbus_segment::landing::LEAST_LANDED as usize {
            return None;
        }
        let lane = {
            let state = self.lock();
            state.landings.lane.clone()
        };
        match lane {
            Some(lane) => lane.land(bytes).map(Arc::new),
            None => {
                self.want_landing();
                None
            }
        }
    }

    /// Counts what was copied.
    pub(super) fn count_copied(&self, has_landed: bool, bytes: usize) {
        let copied = &self.host.copied;
        let count = if has_landed { &copied.by_lane } else { &copied.by_link };
        count.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Asks for memory to copy to, once.
    fn want_landing(&self) {
        let way = FarConversation::ToOwner;
        {
            let state = self.lock();
            let knows = state.ways.get(&way).is_some_and(|outbox| outbox.has_landings());
            if state.landings.is_asked || !knows {
                return;
            }
        }
        // The library is loaded by the first who wants it.
        let providers = self.host.lanes.providers().to_vec();
        let mut state = self.lock();
        // Another conversation may have begun meanwhile.
        let knows = state.ways.get(&way).is_some_and(|outbox| outbox.has_landings());
        if knows && !std::mem::replace(&mut state.landings.is_asked, true) && !providers.is_empty()
        {
            state.send(way, &CarriedMessage::LandingWanted { providers });
        }
    }

    /// The other side asks for memory to copy to, and gets it from a thread of its own: a provider takes its time.
    ///
    /// # Errors
    /// What is wrong with that.
    pub(super) fn hear_wanted(
        &self,
        (way, outbox): (FarConversation, &Arc<LetterQueue>),
        providers: Vec<String>,
    ) -> Result<(), String> {
        let is_connector = way == FarConversation::ToConnector;
        if !is_connector || std::mem::replace(&mut self.lock().landings.is_wanted, true) {
            return Err("memory to copy to that is not due".to_owned());
        }
        let (Some(far), outbox) = (self.own.upgrade(), outbox.clone()) else { return Ok(()) };
        let give = move || {
            let made = far.host.lanes.landing(&providers, outbox.local_address());
            let (memory, offer) = made.unzip();
            let memory = memory.map(Arc::new);
            let mut state = far.lock();
            if state.is_with(way, &outbox) {
                state.landings.memory = memory;
                state.send(way, &CarriedMessage::LandingGiven { offer });
            } else if let Some(memory) = memory {
                drop(state);
                memory.close();
            }
        };
        essential_thread("landing", give).map_err(|error| format!("no thread for it: {error}"))
    }

    /// The other side has given memory, or has none.
    ///
    /// # Errors
    /// What is wrong with that.
    pub(super) fn hear_given(
        &self,
        (way, outbox): (FarConversation, &Arc<LetterQueue>),
        offer: Option<String>,
    ) -> Result<(), String> {
        {
            let landings = &mut self.lock().landings;
            let is_due = landings.is_asked && !std::mem::replace(&mut landings.is_answered, true);
            if way != FarConversation::ToOwner || !is_due {
                return Err("memory to copy to that was not asked for".to_owned());
            }
        }
        let (Some(far), Some(offer), outbox) = (self.own.upgrade(), offer, outbox.clone()) else {
            return Ok(());
        };
        let open = move || {
            let lane = far.host.lanes.landing_lane(&offer, outbox.local_address());
            let mut state = far.lock();
            if state.is_with(way, &outbox) {
                state.landings.lane = lane;
            }
        };
        essential_thread("landing", open).map_err(|error| format!("no thread for it: {error}"))
    }
}

impl FarState {
    /// The memory in which the other side's copies land.
    pub(super) fn landing_memory(&self) -> Option<Arc<LandingMemory>> {
        self.landings.memory.clone()
    }
}
