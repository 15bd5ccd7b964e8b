//! What the two ends of an NTB say to each other in their arenas: which conversations there are, and their bytes (pure).
//!
//! An end only stores into its peer's arena, and only loads from its own: a load across the NTB would wait for a round trip.
//! Stores arrive in the order in which they were made, so what they announce is there before the announcement.
//!
//! A host that starts anew has a new *life*. Whoever finds that its peer has one ends all conversations, clears what was stored
//! in its arena, and says so by the number of that life; before that, the peer stores nothing but its header. An end that had
//! conversations takes a new life itself then, so that nothing of the former ones is taken for the next.
//!
//! What the peer stored is hostile: each word is read once and checked, and what is wrong ends the conversation that it belongs to.

use std::time::{Duration, Instant};

use super::layout::{ArenaLayout, MAGIC, SLOTS, SlotWord, header};
use super::peer::{EndNames, PeerMismatch};

/// How often an end says that it lives.
pub const BEAT: Duration = Duration::from_millis(100);
/// How long a peer may say nothing before it counts as lost.
pub const SILENCE: Duration = Duration::from_millis(750);

/// What an end reaches: its own arena, and its peer's by stores.
pub trait Arenas {
    /// Loads a word of the own arena; what is loaded afterwards was stored with it, or later.
    fn load(&self, at: u32) -> u32;

    /// Copies bytes out of the own arena.
    fn copy(&self, at: u32, out: &mut [u8]);

    /// Fills bytes of the own arena with zeroes.
    fn clear(&self, at: u32, bytes: u32);

    /// Stores words into the peer's arena, after all that were stored before.
    fn store(&self, at: u32, words: &[u32]);

    /// Whether the link between the two ends went down, or up, since this was asked last: stores may have been lost, of either
    /// side's.
    fn was_cut(&self) -> bool;
}

/// What an end finds when it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaEvent {
    /// The peer is there: conversations can begin.
    Up,
    /// The peer was lost, or lives anew: all conversations have ended.
    Down,
    /// The peer began a conversation in this slot.
    Begun(usize),
    /// The conversation in this slot has ended, because the peer said what makes no sense.
    Ended(usize),
}

/// What an end has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArenaCounts {
    /// Bytes that were put into the peer's arena, and that were taken out of the own one.
    pub bytes: [u64; 2],
    /// Conversations that this end began, and that its peer began.
    pub conversations: [u64; 2],
    /// How often the peer was lost or lived anew.
    pub losses: u64,
    /// How often what the peer stored made no sense.
    pub violations: u64,
}

/// One place for a conversation.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Of the conversation that is there, or was there last; 0: there was none.
    number: u32,
    live: bool,
    /// The peer takes part: what it stored belongs to this conversation.
    answered: bool,
    /// Bytes put into the peer's ring, and how many of them it has taken.
    put: u32,
    acknowledged: u32,
    /// Bytes taken out of the own ring.
    taken: u32,
    /// The bytes of the word that is not full yet.
    partial: [u8; 4],
}

/// Forms the word that says whether a conversation goes on.
fn state(number: u32, ended: bool) -> u32 {
    number << 1 | u32::from(ended)
}

/// An end of the NTB.
#[derive(Debug)]
pub struct ArenaProtocol {
    layout: ArenaLayout,
    names: EndNames,
    /// What was wrong with the peer's header when it was read last.
    mismatch: Option<PeerMismatch>,
    /// The header of whoever is there in the peer's place, and when it was found to be another one than before.
    stranger: Option<([u32; header::WORDS as usize], Instant)>,
    /// The number of the first slot in which this end begins conversations; every second one from there is its own.
    first: usize,
    life: u32,
    known: u32,
    up: bool,
    /// The link was cut, and the conversations have not ended for it yet.
    was_cut: bool,
    beat: u32,
    next_beat: Instant,
    /// The peer's last beat, and when it was heard.
    heard: Option<(u32, Instant)>,
    slots: Vec<Slot>,
    asleep: u32,
    sleeps: u32,
    rung: u32,
    stored: bool,
    counts: ArenaCounts,
}

impl ArenaProtocol {
    /// An end whose process has this `life`, a random number, and begins conversations in the even slots or in the odd ones.
    /// Its arena is empty.
    pub fn new(
        layout: ArenaLayout,
        names: EndNames,
        even: bool,
        life: u32,
        now: Instant,
    ) -> ArenaProtocol {
        ArenaProtocol {
            layout,
            names,
            mismatch: None,
            stranger: None,
            first: usize::from(!even),
            life: life.max(1),
            known: 0,
            up: false,
            was_cut: false,
            beat: 0,
            next_beat: now,
            heard: None,
            slots: vec![Slot::default(); SLOTS],
            asleep: 0,
            sleeps: 0,
            rung: 0,
            stored: false,
            counts: ArenaCounts::default(),
        }
    }

    /// Whether the peer is there.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Why nothing is said to whoever is at the other end; `None` while it is the peer, or says nothing.
    pub fn mismatch(&self) -> Option<PeerMismatch> {
        self.mismatch
    }

    /// Counts since this end was made, over all of its lives.
    pub fn counts(&self) -> ArenaCounts {
        self.counts
    }

    /// When to look again, though nothing rings.
    pub fn next_beat(&self) -> Instant {
        self.next_beat
    }

    /// Looks what the peer says of itself, and which conversations it begins.
    pub fn look(&mut self, arenas: &dyn Arenas, now: Instant) -> Vec<ArenaEvent> {
        let mut events = Vec::new();
        self.look_at_peer(arenas, now, &mut events);
        let is_time = now >= self.next_beat;
        if self.up && (self.was_cut || is_time && arenas.was_cut()) {
            self.cut(arenas, &mut events);
        }
        if is_time {
            self.beat = self.beat.wrapping_add(1);
            self.next_beat = now + BEAT;
            self.announce(arenas);
        }
        if self.up {
            self.look_at_slots(arenas, &mut events);
        }
        events
    }

    fn look_at_peer(&mut self, arenas: &dyn Arenas, now: Instant, events: &mut Vec<ArenaEvent>) {
        let beat = arenas.load(header::BEAT);
        // In this order: what it knows it has said in the life that was read, or in a later one.
        let is_peer = self.names.is_peer(self.layout, |at| arenas.load(at));
        let [life, known] = [header::LIFE, header::KNOWN].map(|at| arenas.load(at));
        let speaks = is_peer == Ok(true) && life != 0;
        self.mismatch = is_peer.err().filter(|what| self.is_stranger_there(arenas, now, *what));
        if self.mismatch.is_none() && is_peer.is_ok() {
            self.stranger = None;
        }
        if speaks && self.heard.is_none_or(|(last, _)| last != beat) {
            self.heard = Some((beat, now));
        }
        let is_heard = self.heard.is_some_and(|(_, at)| now.duration_since(at) < SILENCE);
        if !speaks || !is_heard {
            if self.known != 0 {
                self.forget(arenas, events);
                self.announce(arenas);
            }
            return;
        }
        if self.known != life {
            self.forget(arenas, events);
            let (heads, bytes) = self.layout.heads();
            arenas.clear(heads, bytes);
            // Before this end says that it knows the peer, that one stores nothing that counts: the link may have come up for it.
            let _ = arenas.was_cut();
            self.known = life;
            self.announce(arenas);
        }
        match (self.up, known == self.life) {
            (false, true) => {
                self.up = true;
                events.push(ArenaEvent::Up);
            }
            // It has forgotten this life, and says soon which one it has now.
            (true, false) => self.forget(arenas, events),
            _ => {}
        }
    }

    /// Whether whoever stored a header that is not the peer's is there still: it has not said that it goes, and its header
    /// changes. Where another version has its life and its beat is not known.
    fn is_stranger_there(&mut self, arenas: &dyn Arenas, now: Instant, what: PeerMismatch) -> bool {
        let words = std::array::from_fn(|nth| arenas.load(4 * nth as u32));
        let goes = words[header::LIFE as usize / 4] == 0;
        let since = match self.stranger {
            Some((before, since)) if before == words => since,
            _ => now,
        };
        self.stranger = Some((words, since));
        let is_version = matches!(what, PeerMismatch::Version(_));
        now.duration_since(since) < SILENCE && (is_version || !goes)
    }

    /// Says that this end goes, so that the peer need not find out by its silence. Nothing is said after that.
    pub fn leave(&mut self, arenas: &dyn Arenas) {
        self.forget(arenas, &mut Vec::new());
        arenas.store(header::LIFE, &[0]);
        self.stored = true;
    }

    /// Stores of either side may have been lost: all conversations end, and the ends find each other anew.
    pub fn cut(&mut self, arenas: &dyn Arenas, events: &mut Vec<ArenaEvent>) {
        self.forget(arenas, events);
        self.announce(arenas);
    }

    /// Ends all conversations. What was stored in this life may be under way still: there is another one then.
    fn forget(&mut self, arenas: &dyn Arenas, events: &mut Vec<ArenaEvent>) {
        (self.known, self.was_cut) = (0, false);
        // Before the next life, which knows nobody yet.
        arenas.store(header::KNOWN, &[0]);
        self.slots.fill(Slot::default());
        if std::mem::take(&mut self.up) {
            self.life = self.life.wrapping_add(1).max(1);
            self.counts.losses += 1;
            events.push(ArenaEvent::Down);
        }
    }

    fn announce(&mut self, arenas: &dyn Arenas) {
        let [first, second] = self.names.own();
        let shape = self.layout.shape();
        let words = [MAGIC, shape, first, second, self.life, self.known, self.beat, self.asleep];
        arenas.store(header::MAGIC, &words);
    }

    /// Takes part in what the peer begins in its slots.
    fn look_at_slots(&mut self, arenas: &dyn Arenas, events: &mut Vec<ArenaEvent>) {
        for slot in (1 - self.first..SLOTS).step_by(2) {
            let said = arenas.load(self.layout.word(slot, SlotWord::State));
            let (number, ended) = (said >> 1, said & 1 != 0);
            let here = self.slots[slot];
            if number == here.number || number == 0 {
                continue;
            }
            if here.live {
                // Without an end of the one before.
                self.violated(arenas, slot);
                events.push(ArenaEvent::Ended(slot));
                continue;
            }
            self.slots[slot] = Slot { number, answered: true, live: !ended, ..Slot::default() };
            self.say(arenas, slot, SlotWord::Put, &[0, 0]);
            self.say(arenas, slot, SlotWord::State, &[said]);
            if !ended {
                self.counts.conversations[1] += 1;
                events.push(ArenaEvent::Begun(slot));
            }
        }
    }

    /// Begins a conversation; `None` while the peer is not there or all slots are taken.
    pub fn begin(&mut self, arenas: &dyn Arenas) -> Option<usize> {
        let is_free = |slot: &usize| {
            let here = self.slots[*slot];
            let said = arenas.load(self.layout.word(*slot, SlotWord::State));
            !here.live && (here.number == 0 || said == state(here.number, true))
        };
        let slot = (self.first..SLOTS).step_by(2).find(is_free).filter(|_| self.up)?;
        let number = (self.slots[slot].number % (u32::MAX >> 1)) + 1;
        self.slots[slot] = Slot { number, live: true, ..Slot::default() };
        self.say(arenas, slot, SlotWord::Put, &[0, 0]);
        self.say(arenas, slot, SlotWord::State, &[state(number, false)]);
        self.counts.conversations[0] += 1;
        Some(slot)
    }

    /// Ends a conversation; its slot is free when the peer has ended it, too.
    pub fn end(&mut self, arenas: &dyn Arenas, slot: usize) {
        if std::mem::take(&mut self.slots[slot].live) {
            self.say(arenas, slot, SlotWord::State, &[state(self.slots[slot].number, true)]);
        }
    }

    /// Whether the peer has ended the conversation in this slot: it puts no more bytes there.
    pub fn has_peer_ended(&self, arenas: &dyn Arenas, slot: usize) -> bool {
        let said = arenas.load(self.layout.word(slot, SlotWord::State));
        said == state(self.slots[slot].number, true)
    }

    /// How many bytes can be put now; `None` when the conversation is over.
    pub fn room(&mut self, arenas: &dyn Arenas, slot: usize) -> Option<usize> {
        let ring = self.layout.ring();
        let answered = self.answered(arenas, slot);
        let here = &mut self.slots[slot];
        if !here.live {
            return None;
        }
        if answered {
            let taken = arenas.load(self.layout.word(slot, SlotWord::Taken));
            if taken.wrapping_sub(here.acknowledged) > here.put.wrapping_sub(here.acknowledged) {
                self.violated(arenas, slot);
                return None;
            }
            here.acknowledged = taken;
        }
        // The last word is stored whole: none of it may be another byte that waits.
        let free = ring - here.put.wrapping_sub(here.acknowledged);
        Some(free.saturating_sub(here.acknowledged & 3) as usize)
    }

    /// Puts bytes into the peer's ring, at most as many as there is [room](ArenaProtocol::room) for.
    pub fn put(&mut self, arenas: &dyn Arenas, slot: usize, bytes: &[u8]) {
        let (layout, ring) = (self.layout, self.layout.ring());
        let here = &mut self.slots[slot];
        let lead = (here.put & 3) as usize;
        let mut all = [&here.partial[..lead], bytes].concat();
        let from = here.put & !3;
        here.put = here.put.wrapping_add(bytes.len() as u32);
        let rest = all.len() & 3;
        here.partial[..rest].copy_from_slice(&all[all.len() - rest..]);
        all.resize(all.len().next_multiple_of(4), 0);
        let words: Vec<u32> = { all.chunks_exact(4) }
            .map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")))
            .collect();
        let put = here.put;
        let until_end = ((ring - (from & (ring - 1))) / 4) as usize;
        let (one, other) = words.split_at(until_end.min(words.len()));
        arenas.store(layout.byte(slot, from), one);
        if !other.is_empty() {
            arenas.store(layout.byte(slot, 0), other);
        }
        self.say(arenas, slot, SlotWord::Put, &[put]);
        self.counts.bytes[0] += bytes.len() as u64;
    }

    /// Copies bytes that the peer has put, without taking them; `None` when the conversation is over and there are none left.
    pub fn peek(&mut self, arenas: &dyn Arenas, slot: usize, out: &mut [u8]) -> Option<usize> {
        let (layout, ring) = (self.layout, self.layout.ring());
        let answered = self.answered(arenas, slot);
        let here = self.slots[slot];
        if !here.live {
            return None;
        }
        if !answered {
            return Some(0);
        }
        let said = arenas.load(layout.word(slot, SlotWord::State));
        let waiting = arenas.load(layout.word(slot, SlotWord::Put)).wrapping_sub(here.taken);
        if said >> 1 != here.number || waiting > ring {
            self.violated(arenas, slot);
            return None;
        }
        if waiting == 0 {
            return (said == state(here.number, false)).then_some(0);
        }
        let count = out.len().min(waiting as usize);
        let until_end = (ring - (here.taken & (ring - 1))) as usize;
        let (one, other) = out[..count].split_at_mut(until_end.min(count));
        arenas.copy(layout.byte(slot, here.taken), one);
        if !other.is_empty() {
            arenas.copy(layout.byte(slot, 0), other);
        }
        Some(count)
    }

    /// Takes so many of the bytes that were found by [`peek`](ArenaProtocol::peek): the peer has room for others.
    pub fn take(&mut self, arenas: &dyn Arenas, slot: usize, count: usize) {
        let here = &mut self.slots[slot];
        here.taken = here.taken.wrapping_add(count as u32);
        let taken = here.taken;
        self.say(arenas, slot, SlotWord::Taken, &[taken]);
        self.counts.bytes[1] += count as u64;
    }

    /// Whether the peer is to be rung: it sleeps, and something was stored that it has not been rung for.
    pub fn is_to_ring(&mut self, arenas: &dyn Arenas) -> bool {
        if !std::mem::take(&mut self.stored) {
            return false;
        }
        let asleep = arenas.load(header::ASLEEP);
        let is_new = asleep != 0 && asleep != self.rung;
        self.rung = asleep;
        is_new
    }

    /// Says that this end sleeps from now on, until it is rung, or that it is awake. A store of the peer's that was under way
    /// meanwhile rings nothing: whoever falls asleep looks once more after a short time.
    pub fn sleep(&mut self, arenas: &dyn Arenas, sleeps: bool) {
        if sleeps {
            self.sleeps = self.sleeps.wrapping_add(1).max(1);
        }
        self.asleep = if sleeps { self.sleeps } else { 0 };
        arenas.store(header::ASLEEP, &[self.asleep]);
    }

    /// Whether the peer takes part in the conversation in this slot.
    fn answered(&mut self, arenas: &dyn Arenas, slot: usize) -> bool {
        let here = &mut self.slots[slot];
        if !here.answered {
            let said = arenas.load(self.layout.word(slot, SlotWord::State));
            here.answered = said >> 1 == here.number;
        }
        here.answered
    }

    /// What the peer stored makes no sense, or it does because other stores of its were lost.
    fn violated(&mut self, arenas: &dyn Arenas, slot: usize) {
        self.was_cut |= arenas.was_cut();
        self.counts.violations += u64::from(!self.was_cut);
        self.end(arenas, slot);
    }

    /// Stores words of a slot's head.
    fn say(&mut self, arenas: &dyn Arenas, slot: usize, word: SlotWord, words: &[u32]) {
        arenas.store(self.layout.word(slot, word), words);
        self.stored = true;
    }
}

#[cfg(test)]
mod simulation;
