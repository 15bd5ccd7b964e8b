//! What another machine stores into an arena through an NTB that is for the link: its header, the heads of slots and bytes,
//! also while this end looks.
//!
//! The peer is an end like this one, beside which the input stores what it likes. Whatever is stored, this end reaches no
//! byte outside of the two arenas, tells of conversations only that begin and end in their order, and finds no more bytes
//! than there can be. Until something is stored that the peer did not say, bytes arrive as they were sent and nothing is
//! taken for a violation. Afterwards an orderly peer in the same place is found, and bytes pass in either direction.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rackbus_link::ntb::layout::SLOTS;
use rackbus_link::ntb::protocol::{ArenaEvent, ArenaProtocol, BEAT, SILENCE};
use rackbus_link::ntb::{ArenaLayout, Arenas, EndNames};

use crate::input::Input;

/// Deeds of one input.
const MOST: usize = 128;
/// The end that is driven, and its peer.
const ENDS: [usize; 2] = [NEAR, FAR];
const NEAR: usize = 0;
const FAR: usize = 1;
/// Bytes of the window of either end, which are enough for an arena.
const WINDOW: u64 = 512 << 10;
/// Where the heads of slots begin, and the bytes of each.
const HEADS: u32 = 4096;
const HEAD: u32 = 64;

/// The arena of either end.
struct Memory {
    arenas: RefCell<[Vec<u8>; 2]>,
    /// What is stored into the driven end's arena after so many more of its loads.
    racing: Cell<Option<(u8, u32, u32)>>,
    cut: Cell<[bool; 2]>,
}

impl Memory {
    fn store(&self, end: usize, at: u32, word: u32) {
        let mut arenas = self.arenas.borrow_mut();
        arenas[end][at as usize..][..4].copy_from_slice(&word.to_ne_bytes());
    }

    /// The driven end loads once more.
    fn race(&self) {
        match self.racing.take() {
            Some((0, at, word)) => self.store(NEAR, at, word),
            Some((loads, at, word)) => self.racing.set(Some((loads - 1, at, word))),
            None => {}
        }
    }
}

/// What one end reaches of it; what is outside of an arena panics.
struct Reached<'m>(&'m Memory, usize);

impl Arenas for Reached<'_> {
    fn load(&self, at: u32) -> u32 {
        assert!(at.is_multiple_of(4), "a word at {at:#x}");
        let mut word = [0; 4];
        self.copy(at, &mut word);
        u32::from_ne_bytes(word)
    }

    fn copy(&self, at: u32, out: &mut [u8]) {
        if self.1 == NEAR {
            self.0.race();
        }
        out.copy_from_slice(&self.0.arenas.borrow()[self.1][at as usize..][..out.len()]);
    }

    fn clear(&self, at: u32, bytes: u32) {
        self.0.arenas.borrow_mut()[self.1][at as usize..][..bytes as usize].fill(0);
    }

    fn store(&self, at: u32, words: &[u32]) {
        assert!(at.is_multiple_of(4), "a word at {at:#x}");
        (at..).step_by(4).zip(words).for_each(|(at, word)| self.0.store(1 - self.1, at, *word));
    }

    fn was_cut(&self) -> bool {
        let mut cut = self.0.cut.get();
        let was = std::mem::take(&mut cut[self.1]);
        self.0.cut.set(cut);
        was
    }
}

/// The byte that is sent at this place of a conversation.
fn byte_of(talk: u32, end: usize, at: usize) -> u8 {
    (talk as usize * 151 + end * 85 + at * 7 + at / 251) as u8
}

/// A conversation as one end knows it.
#[derive(Debug, Clone, Copy, Default)]
struct ArenaTalk {
    /// Which one it is.
    number: u32,
    sent: usize,
    received: usize,
}

/// Two ends, and what must hold between them.
struct World {
    memory: Memory,
    layout: ArenaLayout,
    ends: [ArenaProtocol; 2],
    up: [bool; 2],
    talks: [BTreeMap<usize, ArenaTalk>; 2],
    /// Which conversation was begun last in a slot, and how many there were.
    begun: BTreeMap<usize, u32>,
    numbers: u32,
    lives: u32,
    now: Instant,
    /// Something was stored, or lost, that the peer did not say.
    lied: bool,
}

fn protocol(layout: ArenaLayout, end: usize, life: u32, now: Instant) -> ArenaProtocol {
    let hosts = ["alpha", "beta"];
    let names = EndNames::new("lab", hosts[end], hosts[1 - end]);
    ArenaProtocol::new(layout, names, end == NEAR, life, now)
}

impl World {
    fn new() -> World {
        let now = Instant::now();
        let layout = ArenaLayout::within([WINDOW; 2]).expect("the windows are large enough");
        let arenas = ENDS.map(|_| vec![0; layout.bytes() as usize]);
        let memory =
            Memory { arenas: RefCell::new(arenas), racing: Cell::default(), cut: Cell::default() };
        World {
            memory,
            layout,
            ends: ENDS.map(|end| protocol(layout, end, 100 + end as u32, now)),
            up: [false; 2],
            talks: Default::default(),
            begun: BTreeMap::new(),
            numbers: 0,
            lives: 100_000,
            now,
            lied: false,
        }
    }

    /// Bytes of a slot's ring.
    fn ring(&self) -> usize {
        let heads = u64::from(HEADS + SLOTS as u32 * HEAD);
        (self.layout.bytes() - heads) as usize / SLOTS
    }

    fn look(&mut self, end: usize) {
        let events = self.ends[end].look(&Reached(&self.memory, end), self.now);
        let mismatch = self.ends[end].mismatch();
        assert!(mismatch.is_none() || self.lied, "{mismatch:?}");
        for event in events {
            match event {
                ArenaEvent::Up => {
                    assert!(!std::mem::replace(&mut self.up[end], true), "it is up already");
                }
                ArenaEvent::Down => {
                    assert!(std::mem::take(&mut self.up[end]), "it is down already");
                    self.talks[end].clear();
                }
                ArenaEvent::Begun(slot) => {
                    assert_eq!(slot % 2, 1 - end, "the peer begins none in this slot");
                    let number = self.begun.get(&slot).copied().unwrap_or_default();
                    let talk = ArenaTalk { number, ..ArenaTalk::default() };
                    assert!(self.talks[end].insert(slot, talk).is_none(), "{slot} is taken");
                }
                ArenaEvent::Ended(slot) => {
                    assert!(self.lied || end == FAR, "what was said makes sense");
                    assert!(self.talks[end].remove(&slot).is_some(), "{slot} was not begun");
                }
            }
        }
        assert_eq!(self.ends[end].is_up(), self.up[end]);
    }

    fn begin(&mut self, end: usize) {
        let Some(slot) = self.ends[end].begin(&Reached(&self.memory, end)) else { return };
        assert!(self.up[end], "the peer is not there");
        assert_eq!(slot % 2, end, "this is the peer's slot");
        self.numbers += 1;
        self.begun.insert(slot, self.numbers);
        let talk = ArenaTalk { number: self.numbers, ..ArenaTalk::default() };
        assert!(self.talks[end].insert(slot, talk).is_none(), "{slot} is taken");
    }

    /// A slot with a conversation of this end.
    fn slot(&self, end: usize, which: u8) -> Option<usize> {
        let talks = &self.talks[end];
        talks.keys().nth(usize::from(which) % talks.len().max(1)).copied()
    }

    /// How many bytes were sent.
    fn send(&mut self, end: usize, slot: usize, most: usize) -> usize {
        let side = Reached(&self.memory, end);
        let Some(room) = self.ends[end].room(&side, slot) else {
            self.talks[end].remove(&slot);
            return 0;
        };
        assert!(room <= self.ring(), "{room} bytes");
        let talk = self.talks[end].get_mut(&slot).expect("it goes on");
        let until = talk.sent + most.min(room);
        let bytes: Vec<u8> = (talk.sent..until).map(|at| byte_of(talk.number, end, at)).collect();
        self.ends[end].put(&side, slot, &bytes);
        talk.sent = until;
        bytes.len()
    }

    /// How many bytes were received.
    fn receive(&mut self, end: usize, slot: usize, most: usize) -> usize {
        let (side, ring) = (Reached(&self.memory, end), self.ring());
        let mut bytes = vec![0; most];
        let Some(count) = self.ends[end].peek(&side, slot, &mut bytes) else {
            self.end(end, slot);
            return 0;
        };
        assert!(count <= most.min(ring), "{count} bytes");
        self.ends[end].take(&side, slot, count);
        let talk = self.talks[end].get_mut(&slot).expect("it goes on");
        if !self.lied {
            let from = talk.received;
            let sent = (from..).map(|at| byte_of(talk.number, 1 - end, at));
            assert!(bytes[..count].iter().copied().eq(sent.take(count)), "others were sent");
        }
        talk.received += count;
        count
    }

    fn end(&mut self, end: usize, slot: usize) {
        self.ends[end].end(&Reached(&self.memory, end), slot);
        self.talks[end].remove(&slot);
    }

    /// Another process takes an end's place; its arena is empty.
    fn restart(&mut self, end: usize) {
        self.memory.arenas.borrow_mut()[end].fill(0);
        self.lives += 100_000;
        self.ends[end] = protocol(self.layout, end, self.lives, self.now);
        self.up[end] = false;
        self.talks[end].clear();
    }

    /// Where something is stored: a word of the header, of the head of a slot, or any other one.
    fn place(&self, input: &mut Input<'_>) -> u32 {
        match input.u8() {
            word @ 0..0x40 => 4 * u32::from(word % 8),
            word @ 0x40..0xe0 => {
                let slot = u32::from(input.u8()) % SLOTS as u32;
                HEADS + slot * HEAD + 4 * u32::from(word % 3)
            }
            _ => (input.u32() % self.layout.bytes() as u32) & !3,
        }
    }

    /// What is stored there: what there is and a little more or less, or anything.
    fn value(&self, input: &mut Input<'_>, at: u32) -> u32 {
        match input.u8() {
            0 => input.u32(),
            step => {
                let arenas = self.memory.arenas.borrow();
                let word = arenas[NEAR][at as usize..].first_chunk().expect("it is inside");
                u32::from_ne_bytes(*word).wrapping_add_signed(i32::from(step.cast_signed()))
            }
        }
    }

    fn lie(&mut self, input: &mut Input<'_>) {
        self.lied = true;
        let loads = input.u8();
        let at = self.place(input);
        let word = self.value(input, at);
        match loads {
            0..0x80 => self.memory.store(NEAR, at, word),
            _ => self.memory.racing.set(Some((loads & 0x7f, at, word))),
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let deed = input.u8();
        let end = usize::from(deed >> 7);
        match deed % 16 {
            0..=2 => {
                self.now += Duration::from_millis(u64::from(input.u8()) * 4);
                self.look(end);
            }
            3 => self.begin(end),
            4 | 5 => {
                let slot = self.slot(end, input.u8());
                let most = usize::from(input.u16());
                slot.map(|slot| self.send(end, slot, most));
            }
            6 | 7 => {
                let slot = self.slot(end, input.u8());
                let most = usize::from(input.u16());
                slot.map(|slot| self.receive(end, slot, most));
            }
            8 => {
                let slot = self.slot(end, input.u8());
                slot.into_iter().for_each(|slot| self.end(end, slot));
            }
            9..=11 => self.lie(input),
            12 => {
                self.lied = true;
                self.restart(FAR);
            }
            13 => {
                self.lied = true;
                self.memory.cut.set([true; 2]);
            }
            14 => {
                self.ends[end].sleep(&Reached(&self.memory, end), input.u8() & 1 == 0);
                self.ends[end].is_to_ring(&Reached(&self.memory, end));
            }
            _ => {
                let side = Reached(&self.memory, NEAR);
                let taken: BTreeSet<usize> = self.talks[NEAR].keys().copied().collect();
                taken.iter().for_each(|slot| _ = self.ends[NEAR].has_peer_ended(&side, *slot));
            }
        }
        let violations = self.ends[NEAR].counts().violations;
        assert!(self.lied || violations == 0, "what was said makes sense");
    }

    /// Both ends look for as long as it takes them to find that the other one lives anew.
    fn settle(&mut self) {
        let beats = 3 * SILENCE.as_millis().div_ceil(BEAT.as_millis());
        for _ in 0..beats {
            ENDS.into_iter().for_each(|end| self.look(end));
            self.now += BEAT;
        }
        assert_eq!(self.up, [true; 2], "they do not find each other");
    }

    /// An orderly peer takes the place of the one that lied.
    fn finish(&mut self) {
        self.memory.racing.set(None);
        self.memory.cut.set([false; 2]);
        self.lied = true;
        self.restart(FAR);
        self.settle();
        for end in ENDS {
            let taken: Vec<usize> = self.talks[end].keys().copied().collect();
            taken.into_iter().for_each(|slot| self.end(end, slot));
        }
        self.settle();
        self.lied = false;
        for end in ENDS {
            self.begin(end);
            let slot = *self.talks[end].keys().next_back().expect("a slot is free");
            self.look(1 - end);
            for (from, to) in [(end, 1 - end), (1 - end, end)] {
                let sent: usize = (0..3).map(|_| self.send(from, slot, 1001)).sum();
                assert_eq!(sent, 3003, "there is room for it");
                assert_eq!(self.receive(to, slot, 4096), sent);
            }
        }
    }
}

/// Deeds of both ends, with what the input stores between them.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new();
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        world.step(&mut input);
    }
    world.finish();
}

/// Ends that find each other and converse, one with what is stored beside that, and a peer that is replaced.
pub fn seeds() -> Vec<Vec<u8>> {
    const OTHER: u8 = 0x80;
    let up = [0, 26, OTHER, 26, 0, 26, OTHER, 26, 0, 26, OTHER, 26];
    let begin = [3, OTHER, 1, OTHER | 3, 0, 1];
    let talk = |first: u8, slot: u8, bytes: u16| {
        let [low, high] = bytes.to_le_bytes();
        vec![first | 4, slot, low, high, (first ^ OTHER) | 6, slot, low, high]
    };
    let end = [8, 0, OTHER, 1, OTHER | 6, 0, 1, 0, 0, 1];
    let orderly = [&up[..], &begin, &talk(0, 0, 100), &talk(OTHER, 1, 5000), &end].concat();
    let wraps: Vec<u8> = (0..12).flat_map(|_| talk(OTHER, 0, 3001)).collect();
    let wraps = [&up[..], &begin, &wraps].concat();
    // Words of the header and of a head, at once and while this end looks.
    let lies = [9, 0, 4, 1, 9, 0x81, 0x41, 1, 1, 0, 1, 10, 0, 0x42, 0, 0, 255, 255, 255, 127];
    let lies = [&orderly[..], &lies, &talk(0, 0, 9), &talk(OTHER, 0, 9)].concat();
    // More bytes than a ring has.
    let more = [9, 0, 0x40, 1, 0, 0, 0x20, 0, 0, 6, 1, 0, 0x18];
    let more = [&up[..], &begin, &talk(OTHER, 1, 9), &more].concat();
    let replaced = [&orderly[..], &[12], &up, &begin, &[13, 0, 26, 14, 0, 15]].concat();
    vec![up.to_vec(), orderly, wraps, lies, more, replaced]
}
