//! Two ends of an NTB whose stores arrive late, in the order in which they were made; processes stand still, die and are started
//! anew, and the link is cut, with stores of before under way. At every step a conversation receives what was sent in it, in order,
//! and nothing else; which two talks are one conversation is known from its place and number, and not from what is received.
//! When nothing dies any more, the ends find each other, and what was sent arrives whole. A peer that stores whatever it likes
//! harms nothing but its own conversations.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

use rackbus_seeds::{Random, Simulation};

use super::*;

const SIMULATION: Simulation =
    Simulation { test: "-p rackbus-link --lib ntb::protocol::simulation", usual: 300 };

/// A small arena: rings of 4 KiB.
fn layout() -> ArenaLayout {
    ArenaLayout::within([512 << 10; 2]).unwrap()
}

/// The arenas of both ends, and what is under way to each.
struct Memory {
    arenas: [Vec<u8>; 2],
    under_way: [VecDeque<(u32, u32)>; 2],
    /// Of each end, whether the link was cut since it asked last.
    cut: [bool; 2],
}

impl Memory {
    fn arrive(&mut self, end: usize) -> bool {
        let Some((at, word)) = self.under_way[end].pop_front() else { return false };
        self.arenas[end][at as usize..][..4].copy_from_slice(&word.to_ne_bytes());
        true
    }
}

/// What one end reaches of them.
struct Side<'m>(&'m RefCell<Memory>, usize);

impl Arenas for Side<'_> {
    fn load(&self, at: u32) -> u32 {
        let mut word = [0; 4];
        self.copy(at, &mut word);
        u32::from_ne_bytes(word)
    }

    fn copy(&self, at: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.0.borrow().arenas[self.1][at as usize..][..out.len()]);
    }

    fn clear(&self, at: u32, bytes: u32) {
        self.0.borrow_mut().arenas[self.1][at as usize..][..bytes as usize].fill(0);
    }

    fn store(&self, at: u32, words: &[u32]) {
        let peer = 1 - self.1;
        let placed = (at..).step_by(4).zip(words.iter().copied());
        assert!(at as usize + 4 * words.len() <= self.0.borrow().arenas[peer].len());
        self.0.borrow_mut().under_way[peer].extend(placed);
    }

    fn was_cut(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().cut[self.1])
    }
}

/// The byte that is sent at this place of a conversation.
fn byte_of(conversation: u32, at: usize) -> u8 {
    (conversation.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ (at * 7 + at / 251) as u8
}

/// A conversation as its end knows it. The first four bytes in either direction name the talk in which they were sent.
#[derive(Default)]
struct Talk {
    own: u32,
    sent: usize,
    theirs: Vec<u8>,
}

/// What says which conversation it is: the end that began it and its life then, the slot, and the number there.
type Begun = (usize, u32, usize, u32);

/// Which talks there have been, and which two of them are one conversation.
#[derive(Default)]
struct Talks {
    last: u32,
    begun: BTreeMap<Begun, u32>,
    /// Of each talk the one at the other end.
    others: BTreeMap<u32, u32>,
}

impl Talks {
    fn next(&mut self) -> Talk {
        self.last += 1;
        Talk { own: self.last, ..Talk::default() }
    }

    fn began(&mut self, begun: Begun) -> Talk {
        let talk = self.next();
        assert!(self.begun.insert(begun, talk.own).is_none(), "{begun:?} begins twice");
        talk
    }

    /// The other end takes part in it.
    fn joined(&mut self, begun: Begun) -> Talk {
        let talk = self.next();
        let other = *self.begun.get(&begun).unwrap_or_else(|| panic!("nobody began {begun:?}"));
        assert!(self.others.insert(other, talk.own).is_none(), "{begun:?} has two other ends");
        self.others.insert(talk.own, other);
        talk
    }
}

const OF_ANOTHER: &str = "bytes of another conversation";

fn protocol_of(end: usize, life: u32, now: Instant) -> ArenaProtocol {
    let hosts = ["alpha", "beta"];
    let names = EndNames::new("demo", hosts[end], hosts[1 - end]);
    ArenaProtocol::new(layout(), names, end == 0, life, now)
}

/// Exchanges what is known of the conversation in this slot with that of another one that is as new.
fn confuse(talks: &mut BTreeMap<usize, Talk>, slot: usize) {
    let is_new = |talk: &Talk| talk.sent == 0 && talk.theirs.is_empty();
    let other = talks.iter().find(|(other, talk)| **other != slot && is_new(talk));
    if let Some(other) = other.map(|(other, _)| *other) {
        let [one, two] = [slot, other].map(|at| talks.remove(&at).unwrap());
        talks.extend([(slot, two), (other, one)]);
    }
}

struct End {
    protocol: ArenaProtocol,
    talks: BTreeMap<usize, Talk>,
}

/// What came about in a run.
#[derive(Debug, Default)]
struct Reached {
    received: usize,
    ended: u64,
    losses: u64,
    cuts: u64,
    violations: u64,
}

struct World {
    memory: RefCell<Memory>,
    ends: [End; 2],
    now: Instant,
    random: Random,
    talks: Talks,
    lives: u32,
    reached: Reached,
    /// An end that stores whatever it likes beside what it should.
    hostile: Option<usize>,
    /// It has done so.
    lied: bool,
    /// Both ends take one conversation for another when both are new: a mistake that is to be found.
    confused: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let now = Instant::now();
        let bytes = usize::try_from(layout().bytes()).unwrap();
        let arenas = [vec![0; bytes], vec![0; bytes]];
        let ends = [0, 1].map(|end| End {
            protocol: protocol_of(end, 100 + end as u32, now),
            talks: BTreeMap::new(),
        });
        let (under_way, cut) = Default::default();
        let memory = RefCell::new(Memory { arenas, under_way, cut });
        let (random, reached) = (Random(seed), Reached::default());
        let (talks, lives) = (Talks::default(), 100_000);
        let (hostile, lied, confused) = (None, false, false);
        World { memory, ends, now, random, talks, lives, reached, hostile, lied, confused }
    }

    fn look(&mut self, end: usize) {
        let events = self.ends[end].protocol.look(&Side(&self.memory, end), self.now);
        let mismatch = self.ends[end].protocol.mismatch();
        assert!(mismatch.is_none() || self.lied, "{mismatch:?}");
        for event in events {
            match event {
                ArenaEvent::Up => {}
                ArenaEvent::Down => {
                    self.reached.losses += 1;
                    self.ends[end].talks.clear();
                }
                ArenaEvent::Begun(slot) => {
                    let End { talks, protocol } = &mut self.ends[end];
                    let number = protocol.slots[slot].number;
                    let begun = (1 - end, protocol.known, slot, number);
                    // What a lie says that it has begun is no conversation, or another one.
                    let talk = match self.lied {
                        true => self.talks.next(),
                        false => self.talks.joined(begun),
                    };
                    assert!(talks.insert(slot, talk).is_none(), "begun twice");
                    if self.confused {
                        confuse(talks, slot);
                    }
                }
                ArenaEvent::Ended(slot) => drop(self.ends[end].talks.remove(&slot)),
            }
        }
    }

    fn begin(&mut self, end: usize) {
        if let Some(slot) = self.ends[end].protocol.begin(&Side(&self.memory, end)) {
            let End { talks, protocol } = &mut self.ends[end];
            let talk = self.talks.began((end, protocol.life, slot, protocol.slots[slot].number));
            assert!(talks.insert(slot, talk).is_none(), "a slot that is taken");
        }
    }

    /// Sends some bytes in a conversation.
    fn send(&mut self, end: usize, slot: usize) {
        let side = Side(&self.memory, end);
        let End { protocol, talks } = &mut self.ends[end];
        let talk = talks.get_mut(&slot).unwrap();
        let Some(room) = protocol.room(&side, slot) else {
            talks.remove(&slot);
            return;
        };
        let most = if self.random.chance(20) { 5000 } else { 40 };
        let count = self.random.below(most).min(room);
        let bytes: Vec<u8> = (talk.sent..talk.sent + count)
            .map(|at| match at {
                0..4 => talk.own.to_le_bytes()[at],
                _ => byte_of(talk.own, at),
            })
            .collect();
        protocol.put(&side, slot, &bytes);
        talk.sent += count;
    }

    /// Receives what is there, and checks it.
    fn receive(&mut self, end: usize, slot: usize) -> Result<(), String> {
        let side = Side(&self.memory, end);
        let End { protocol, talks } = &mut self.ends[end];
        let mut bytes = vec![0; self.random.below(5000)];
        let Some(count) = protocol.peek(&side, slot, &mut bytes) else {
            protocol.end(&side, slot);
            talks.remove(&slot);
            self.reached.ended += 1;
            return Ok(());
        };
        // As whoever gives them to somebody asks.
        if count > 0 && side.was_cut() {
            protocol.cut(&side, &mut Vec::new());
            talks.clear();
            return Ok(());
        }
        if count > 0 {
            protocol.take(&side, slot, count);
        }
        let talk = talks.get_mut(&slot).unwrap();
        let from = talk.theirs.len();
        talk.theirs.extend(&bytes[..count]);
        self.reached.received += count;
        let theirs = &talk.theirs;
        if let Some(name) = theirs.first_chunk().filter(|_| self.hostile.is_none()) {
            let name = u32::from_le_bytes(*name);
            if !self.lied && self.talks.others.get(&talk.own) != Some(&name) {
                return Err(format!("{end}, slot {slot}: {OF_ANOTHER}"));
            }
            let wrong = (from.max(4)..theirs.len()).find(|at| theirs[*at] != byte_of(name, *at));
            if let Some(at) = wrong {
                return Err(format!("{end}, slot {slot}: byte {at} is wrong"));
            }
        }
        Ok(())
    }

    /// The link goes down and comes up again: what is under way is lost, some of it or all.
    fn cut(&mut self) {
        let mut memory = self.memory.borrow_mut();
        for end in [0, 1] {
            let arrived = self.random.below(memory.under_way[end].len() + 1);
            memory.under_way[end].truncate(arrived);
        }
        memory.cut = [true; 2];
        self.reached.cuts += 1;
    }

    /// The process of an end dies, and another one takes its place with an empty arena. What it stored is under way still.
    fn restart(&mut self, end: usize) {
        self.memory.borrow_mut().arenas[end].fill(0);
        // Random numbers are not near each other.
        self.lives += 100_000;
        let protocol = protocol_of(end, self.lives, self.now);
        self.ends[end] = End { protocol, talks: BTreeMap::new() };
    }

    fn step(&mut self, quiet: bool) -> Result<(), String> {
        let end = self.random.below(2);
        let slots: Vec<usize> = self.ends[end].talks.keys().copied().collect();
        let slot = slots.get(self.random.below(slots.len())).copied();
        match self.random.below(100) {
            0..30 => {
                let most = self.random.below(200);
                for _ in 0..most {
                    self.memory.borrow_mut().arrive(end);
                }
            }
            30..50 => self.look(end),
            50..60 if slots.len() < 3 => self.begin(end),
            60..75 if slot.is_some() => self.send(end, slot.unwrap()),
            75..90 if slot.is_some() => self.receive(end, slot.unwrap())?,
            90..93 if slot.is_some() && !quiet => {
                self.ends[end].protocol.end(&Side(&self.memory, end), slot.unwrap());
                self.ends[end].talks.remove(&slot.unwrap());
            }
            93..97 => self.now += Duration::from_millis(self.random.below(120) as u64),
            97 if !quiet && self.random.chance(20) => self.restart(end),
            98 if !quiet && self.random.chance(20) => self.now += SILENCE,
            98 if !quiet && self.random.chance(20) => self.cut(),
            99 if self.hostile == Some(end) => self.lie(end),
            _ => {}
        }
        Ok(())
    }

    /// Stores a word anywhere in the head of a slot, or in the header.
    fn lie(&mut self, end: usize) {
        self.lied = true;
        let slot = self.random.below(4);
        let word = [SlotWord::State, SlotWord::Put, SlotWord::Taken][self.random.below(3)];
        let at = match self.random.chance(5) {
            true => 4 * self.random.below(6) as u32,
            false => layout().word(slot, word),
        };
        let value = match self.random.chance(50) {
            true => self.random.below(10) as u32,
            false => self.random.next() as u32,
        };
        Side(&self.memory, end).store(at, &[value]);
    }

    /// All that is under way arrives, and both ends look, until they see each other.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..40 {
            for end in [0, 1] {
                while self.memory.borrow_mut().arrive(end) {}
                self.look(end);
            }
            self.now += BEAT;
        }
        let up = [0, 1].map(|end| self.ends[end].protocol.is_up());
        if up == [true; 2] { Ok(()) } else { Err(format!("they do not find each other: {up:?}")) }
    }

    /// A conversation of either end goes on, and all that is sent arrives.
    fn deliver(&mut self) -> Result<(), String> {
        for end in [0, 1] {
            for slot in self.ends[end].talks.keys().copied().collect::<Vec<_>>() {
                self.ends[end].protocol.end(&Side(&self.memory, end), slot);
            }
            self.ends[end].talks.clear();
        }
        self.settle()?;
        for end in [0, 1] {
            self.begin(end);
            let slot = *self.ends[end].talks.keys().next_back().ok_or("no slot is free")?;
            self.settle()?;
            let peer = 1 - end;
            for _ in 0..40 {
                self.send(end, slot);
                self.settle_bytes();
                self.receive(peer, slot)?;
                self.settle_bytes();
            }
            let sent = self.ends[end].talks[&slot].sent;
            self.ends[end].protocol.end(&Side(&self.memory, end), slot);
            self.ends[end].talks.clear();
            self.settle_bytes();
            let mut received = 0;
            while let Some(talk) = self.ends[peer].talks.get(&slot) {
                received = talk.theirs.len();
                self.receive(peer, slot)?;
            }
            if received != sent {
                return Err(format!("{received} bytes of {sent} arrived"));
            }
        }
        Ok(())
    }

    fn settle_bytes(&self) {
        for end in [0, 1] {
            while self.memory.borrow_mut().arrive(end) {}
        }
    }

    fn run(&mut self) -> Result<(), String> {
        (0..3000).try_for_each(|_| self.step(false))?;
        self.settle()?;
        self.deliver()?;
        self.reached.violations =
            self.ends.iter().map(|end| end.protocol.counts().violations).sum::<u64>();
        Ok(())
    }
}

#[test]
fn conversations_receive_what_was_sent_whoever_dies() {
    SIMULATION.run(|seed, _| {
        let mut world = World::new(seed);
        world.run()?;
        match world.reached.violations {
            0 => Ok(()),
            count => Err(format!("{count} violations, and nobody lies")),
        }
    });
}

#[test]
fn bytes_that_are_given_to_another_conversation_are_found() {
    let found = (0..50).filter(|seed| {
        let mut world = World::new(*seed);
        world.confused = true;
        world.run().is_err_and(|error| error.contains(OF_ANOTHER))
    });
    let found = found.count();
    assert!(found > 25, "{found} of 50");
}

/// Seen before anybody has looked whether the link was cut.
#[test]
fn what_makes_no_sense_after_a_cut_is_no_violation_and_ends_all_conversations() {
    for is_cut in [false, true] {
        let mut world = World::new(1);
        world.settle().unwrap();
        world.begin(0);
        world.settle().unwrap();
        let slot = *world.ends[1].talks.keys().next().unwrap();
        let at = layout().word(slot, SlotWord::Put);
        Side(&world.memory, 0).store(at, &[u32::MAX / 2]);
        world.settle_bytes();
        world.memory.borrow_mut().cut = [is_cut; 2];
        world.receive(1, slot).unwrap();
        world.look(1);
        let protocol = &world.ends[1].protocol;
        let ArenaCounts { violations, losses, .. } = protocol.counts();
        assert_eq!((violations, losses), if is_cut { (0, 1) } else { (1, 0) });
        assert_eq!(protocol.is_up(), !is_cut);
        world.settle().unwrap();
    }
}

#[test]
fn what_is_simulated_comes_about() {
    let mut sums = [0; 4];
    for seed in 0..100 {
        let mut world = World::new(seed);
        world.run().unwrap();
        let Reached { received, ended, losses, cuts, .. } = world.reached;
        sums.iter_mut()
            .zip([received as u64, ended, losses, cuts])
            .for_each(|(sum, it)| *sum += it);
    }
    println!("bytes received, conversations ended, losses, cuts: {sums:?}");
    assert!(sums[0] > 1_000_000 && sums[1] > 200 && sums[2] > 100 && sums[3] > 100, "{sums:?}");
}

#[test]
fn a_peer_that_lies_loses_its_conversations_and_stops_nobody() {
    let mut violations = 0;
    for seed in 0..100 {
        let mut world = World::new(seed);
        world.hostile = Some(1);
        (0..3000).try_for_each(|_| world.step(true)).unwrap();
        violations += world.ends[0].protocol.counts().violations;
        // When its place is taken by one that does not lie, they talk.
        world.hostile = None;
        world.restart(1);
        world.settle().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        world.deliver().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    assert!(violations > 30, "{violations}");
}
