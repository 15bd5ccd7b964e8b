//! A segment's home and two replicas on other machines, under random stores, delays and orders of delivery.
//!
//! The simulation is the shells and the programs: memory is bytes, a snapshot is a copy, and parts of batches
//! arrive in their order but at any time. What holds at every moment: a flag is nowhere before the data that was
//! stored before it, or copied, no copy before what was stored before it, no store takes effect twice, and one batch is
//! under way each way, with the rest of a copy behind it. What holds at rest: all have the same bytes, no store
//! to a byte that one host alone stores to is lost, and it comes to rest in a bounded number of turns. Policies
//! that are wrong, one for each rule, are found by the same checks.

#[path = "coherence/lane.rs"]
mod lane;

use std::collections::VecDeque;

use lane::Lane;
use rackbus_seeds::{Random, Simulation};
use rackbus_segment::coherence::{Batch, ConnectionSide, ConnectionWindow, PAGE};

const SEEDS: u64 = 100_000;
const HOSTS: usize = 3;
/// Not whole pages, nor whole words.
const SIZE: usize = 2 * PAGE + 99;
/// Where each host has its data, its flag, and bytes of its own in words that all have a part of.
const DATA: [usize; 6] = [8, 40, PAGE - 16, PAGE + 8, 2 * PAGE + 8, 2 * PAGE + 90];
const FLAG: usize = PAGE + 512;
const OWN: usize = 800;
/// Where each replica's host copies to, and how many bytes.
const COPIED: usize = 2 * PAGE - 58;
const COPY: usize = 20;
/// In parts of so many bytes, where it is made in several.
const COPY_PART: usize = 5;
/// Bytes that all store to.
const COMMON: std::ops::Range<usize> = 1000..1004;

/// What the shell does, which is right or wrong in one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Right,
    /// Each part takes effect when it comes.
    Parts,
    /// What a replica has under way is overwritten by what the home says.
    Overwrite,
    /// Pages are read one after the other while the programs continue.
    WhileWriting,
    /// Snapshots are taken as if what came had taken effect, before it has.
    Early,
    /// An answer is sent before a batch that was taken before what is answered took effect.
    Overtaking,
    /// What is copied is sent before what is stored, and takes effect when it comes.
    CopiesFirst,
    /// The slot of a copy that has landed is another one's as soon as that is said.
    SlotSoonFree,
    /// Copies land where bytes of one that did not end may still arrive.
    LandAfterLoss,
    /// The slot of the part of a copy that was sent last is another one's when the first is answered.
    SlotOfLater,
}

#[derive(Debug, Clone)]
enum Message {
    Part {
        batch: u64,
        last: bool,
        places: Vec<(u64, u32)>,
        data: Vec<u8>,
    },
    Copied {
        batch: u64,
        last: bool,
        offset: u64,
        data: Vec<u8>,
    },
    /// A copy that has landed, at a place.
    Landed {
        batch: u64,
        offset: u64,
        place: u32,
        length: usize,
    },
    Applied(u64),
}

impl Message {
    /// Whether a batch is whole with it.
    fn is_last(&self) -> bool {
        use Message::{Copied, Landed, Part};
        matches!(self, Part { last: true, .. } | Copied { last: true, .. } | Landed { .. })
    }

    /// Whether it may be of a copy that goes on.
    fn goes_on_with_copy(&self) -> bool {
        matches!(self, Message::Copied { .. } | Message::Landed { .. })
    }
}

/// Bytes, and where they are stored.
type Piece = (usize, Vec<u8>);

/// One direction of a connection: from which host, its window, and what is on its way.
#[derive(Debug)]
struct End {
    host: usize,
    window: ConnectionWindow,
    out: VecDeque<Message>,
    /// A batch that was taken and is not sent yet, and what is said behind it.
    unsent: VecDeque<Message>,
    /// What has come of a batch, as it came.
    raw: Vec<Piece>,
    /// What is to be stored later, with a policy that is wrong.
    early: Option<(u64, Vec<Piece>)>,
    lane: Lane,
}

struct Rack {
    policy: Policy,
    /// Nothing is copied any more.
    resting: bool,
    memory: Vec<Vec<u8>>,
    /// The home's end and the replica's, of each connection.
    links: Vec<[End; 2]>,
    /// What each program is about to store: where and what.
    programs: Vec<VecDeque<(usize, u8)>>,
    /// How far each host has counted.
    counts: Vec<u8>,
    /// How far each host had counted when it copied that number to its range, each time.
    copies: Vec<Vec<u8>>,
    /// What the rest of a copy that has begun is to be, of each host, and how many bytes were copied: its program stores nothing
    /// before.
    begun: Vec<Option<(u8, usize)>>,
    /// What each host stored last to its own bytes.
    own: Vec<[u8; 2]>,
    /// The last number that was stored to the common bytes: each store has another one.
    common: u8,
    /// What the home's common bytes were, in order.
    history: Vec<Vec<u8>>,
}

fn data_of(host: usize, at: usize) -> usize {
    at + host
}

fn own_of(host: usize, nth: usize) -> usize {
    OWN + host + HOSTS * nth
}

/// Has what was copied sent behind the rest of its batch: by where it has landed, or in parts of so many bytes.
fn say_copied(end: &mut End, batch: &Batch, landed: Option<u32>, most: usize) {
    if let Some(place) = landed {
        end.lane.under_way.push_back((batch.number(), place));
    }
    if let Some((place, (offset, copied))) = landed.zip(batch.copied()) {
        let (batch, length) = (batch.number(), copied.len());
        return end.unsent.push_back(Message::Landed { batch, offset, place, length });
    }
    for part in batch.copied_parts(most) {
        let (batch, last, offset) = (part.batch, part.last, part.offset);
        let data = part.data.to_vec();
        end.unsent.push_back(Message::Copied { batch, last, offset, data });
    }
}

impl Rack {
    fn new(policy: Policy) -> Rack {
        let end = |host, side| {
            let window = ConnectionWindow::new(side, SIZE as u64, true);
            let (out, unsent) = (VecDeque::new(), VecDeque::new());
            End { host, window, out, unsent, raw: Vec::new(), early: None, lane: Lane::default() }
        };
        Rack {
            policy,
            resting: false,
            memory: vec![vec![0; SIZE]; HOSTS],
            links: (1..HOSTS)
                .map(|host| [end(0, ConnectionSide::Home), end(host, ConnectionSide::Replica)])
                .collect(),
            programs: vec![VecDeque::new(); HOSTS],
            counts: vec![0; HOSTS],
            copies: vec![Vec::new(); HOSTS],
            begun: vec![None; HOSTS],
            own: vec![[0; 2]; HOSTS],
            common: 0,
            history: vec![vec![0]; COMMON.len()],
        }
    }

    /// A program decides to store: data, then the flag; or a byte of its own, or one that all store to.
    fn decide(&mut self, host: usize, random: &mut Random) {
        let program = &mut self.programs[host];
        match random.below(3) {
            0 if self.counts[host] < 250 => {
                self.counts[host] += 1;
                let count = self.counts[host];
                program.extend(DATA.map(|at| (data_of(host, at), count)));
                program.push_back((FLAG + host, count));
            }
            1 => {
                let (nth, value) = (random.below(2), random.next() as u8);
                self.own[host][nth] = value;
                program.push_back((own_of(host, nth), value));
            }
            _ if self.common < u8::MAX => {
                self.common += 1;
                let at = COMMON.start + random.below(COMMON.len());
                program.push_back((at, self.common));
            }
            _ => {}
        }
    }

    fn store_next(&mut self, host: usize) {
        if self.begun[host].is_some() {
            return;
        }
        if let Some((at, value)) = self.programs[host].pop_front() {
            self.memory[host][at] = value;
        }
    }

    /// What a host copies now: to its own range how far it has counted, when all of that is stored.
    fn copy(&mut self, host: usize, random: &mut Random) -> (u64, Vec<u8>) {
        let count = self.counts[host];
        let is_ready = host > 0 && count > 0 && self.programs[host].is_empty();
        if self.resting || !is_ready || random.below(3) > 0 {
            return (0, Vec::new());
        }
        if self.copies[host].last() != Some(&count) {
            self.copies[host].push(count);
        }
        let is_part = random.below(2) == 0;
        let (at, length) = (COPIED + host * COPY, if is_part { COPY_PART } else { COPY });
        self.begun[host] = is_part.then_some((count, length));
        self.memory[host][at..at + length].fill(count);
        (at as u64, vec![count; length])
    }

    /// Takes the next part of a copy that has begun as a batch: nothing else is looked at for it, and it waits for none.
    fn copy_on(&mut self, link: usize, side: usize, random: &mut Random) {
        let policy = self.policy;
        let end = &mut self.links[link][side];
        let Some((count, done)) = self.begun[end.host] else { return };
        let at = COPIED + end.host * COPY + done;
        let bytes = vec![count; COPY_PART];
        let Some(batch) = end.window.go_on_with((at as u64, bytes.clone())) else { return };
        let landed = end.lane.land(&bytes, policy, random);
        self.memory[end.host][at..at + COPY_PART].copy_from_slice(&bytes);
        let is_last = done + COPY_PART == COPY;
        self.begun[end.host] = (!is_last).then_some((count, done + COPY_PART));
        say_copied(end, &batch, landed, COPY);
    }

    /// Takes a snapshot, to be sent later, unless a batch is under way.
    fn collect(&mut self, link: usize, side: usize, random: &mut Random) {
        let host = self.links[link][side].host;
        if self.begun[host].is_some() {
            return self.copy_on(link, side, random);
        }
        if self.links[link][side].window.is_waiting() {
            return;
        }
        let copied = self.copy(host, random);
        let mut pages = Vec::new();
        for start in (0..SIZE).step_by(PAGE) {
            pages.push(self.memory[host][start..SIZE.min(start + PAGE)].to_vec());
            if self.policy == Policy::WhileWriting {
                (0..random.below(12)).for_each(|_| self.store_next(host));
            }
        }
        let policy = self.policy;
        let end = &mut self.links[link][side];
        let landed = end.lane.land(&copied.1, policy, random);
        let all = pages.iter().enumerate().map(|(page, bytes)| (page as u64, &bytes[..]));
        let Some(batch) = end.window.collect_with(all, copied) else { return };
        for part in batch.parts(13 + random.below(60)) {
            let (batch, last, places) = (part.batch, part.last, part.places);
            end.unsent.push_back(Message::Part { batch, last, places, data: part.data.to_vec() });
        }
        say_copied(end, &batch, landed, 1 + random.below(COPY));
    }

    /// Sends what was taken.
    fn send(&mut self, link: usize, side: usize) {
        let end = &mut self.links[link][side];
        end.out.append(&mut end.unsent);
    }

    /// Delivers the next message from one side of a connection to the other.
    fn deliver(&mut self, link: usize, from: usize) -> Result<(), String> {
        let Some(message) = self.links[link][from].out.pop_front() else { return Ok(()) };
        let policy = self.policy;
        let landed = match &message {
            Message::Landed { place, length, .. } => {
                let memory = &self.links[link][from].lane.memory;
                memory.get(place).map(|it| it[..*length].to_vec()).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        let end = &mut self.links[link][1 - from];
        let memory = &mut self.memory[end.host];
        let wrong = |violation| format!("a right peer is refused: {violation}");
        match message {
            Message::Applied(batch) => {
                end.window.applied(batch).map_err(wrong)?;
                end.lane.note_effect(batch, policy);
            }
            Message::Landed { batch, offset, .. } => {
                end.raw.push((offset as usize, landed.clone()));
                end.window.hear_copied(batch, true, offset, landed).map_err(wrong)?;
            }
            Message::Copied { batch, last, offset, data } => {
                let place = offset as usize;
                match policy {
                    Policy::CopiesFirst => memory[place..place + data.len()].copy_from_slice(&data),
                    _ => end.raw.push((place, data.clone())),
                }
                end.window.hear_copied(batch, last, offset, &data).map_err(wrong)?;
            }
            Message::Part { batch, last, places, data } => {
                let mut from = 0;
                for (offset, length) in &places {
                    let bytes = data[from..from + *length as usize].to_vec();
                    from += bytes.len();
                    let place = *offset as usize;
                    match policy {
                        Policy::Parts => memory[place..place + bytes.len()].copy_from_slice(&bytes),
                        _ => end.raw.push((place, bytes)),
                    }
                }
                let whole = end.window.hear(batch, last, &places, &data).map_err(wrong)?;
                if whole && policy == Policy::Early {
                    let stores = end.window.take_effect().map(|(batch, stores)| {
                        let store = |(at, bytes): (u64, &[u8])| (at as usize, bytes.to_vec());
                        (batch, stores.iter().map(store).collect())
                    });
                    end.early = stores;
                }
            }
        }
        Ok(())
    }

    /// What came over a connection takes effect, if it is whole.
    fn take_effect(&mut self, link: usize, side: usize) {
        let policy = self.policy;
        let end = &mut self.links[link][side];
        let taken = end.window.take_effect().map(|(batch, stores)| {
            let store = |(at, bytes): (u64, &[u8])| (at as usize, bytes.to_vec());
            (batch, stores.iter().map(store).collect())
        });
        let Some((batch, mut stores)) = taken.or_else(|| end.early.take()) else { return };
        let raw = std::mem::take(&mut end.raw);
        if policy == Policy::Overwrite {
            stores = raw;
        }
        for (place, bytes) in stores {
            self.memory[end.host][place..place + bytes.len()].copy_from_slice(&bytes);
        }
        match policy {
            Policy::Overtaking => end.out.push_back(Message::Applied(batch)),
            _ if end.unsent.is_empty() => end.out.push_back(Message::Applied(batch)),
            _ => end.unsent.push_back(Message::Applied(batch)),
        }
    }

    /// What holds at every moment.
    fn check(&mut self) -> Result<(), String> {
        for (at, history) in COMMON.zip(&mut self.history) {
            let now = self.memory[0][at];
            if history.last() != Some(&now) {
                if history.contains(&now) {
                    return Err(format!("the store of {now} to {at} takes effect twice"));
                }
                history.push(now);
            }
        }
        for (host, memory) in self.memory.iter().enumerate() {
            for writer in 0..HOSTS {
                let flag = memory[FLAG + writer];
                for at in DATA.map(|at| data_of(writer, at)) {
                    if memory[at] < flag {
                        let data = memory[at];
                        return Err(format!(
                            "{host} has flag {flag} of {writer}, data {data} at {at}"
                        ));
                    }
                }
            }
        }
        for (host, memory) in self.memory.iter().enumerate() {
            for (writer, copies) in self.copies.iter().enumerate().skip(1) {
                let at = COPIED + writer * COPY;
                let (copied, flag) = (&memory[at..at + COPY], memory[FLAG + writer]);
                let most = copied.iter().max().copied().unwrap_or_default();
                if let Some(at) = DATA.iter().find(|at| memory[data_of(writer, **at)] < most) {
                    return Err(format!(
                        "{host} has copy {most} of {writer}, and not its data at {at}"
                    ));
                }
                // A flag is stored behind all copies that were made when less was counted.
                let before = copies.iter().rfind(|count| **count < flag);
                if let Some(count) = before.filter(|count| copied.iter().any(|it| it < count)) {
                    return Err(format!(
                        "{host} has flag {flag} of {writer}, and not all of copy {count}"
                    ));
                }
            }
        }
        for end in self.links.iter().flatten() {
            let said = end.out.iter().chain(&end.unsent).filter(|it| it.is_last());
            let behind = said.skip(1).filter(|it| !it.goes_on_with_copy());
            if behind.count() > 0 {
                return Err(format!("two batches are under way from {}", end.host));
            }
        }
        Ok(())
    }

    /// Goes on without new stores, until nothing changes: a replica's stores are at the other replica after the
    /// batch that was under way, and one for each step there.
    fn rest(&mut self, random: &mut Random) -> Result<(), String> {
        self.resting = true;
        while self.begun.iter().any(Option::is_some) {
            for (link, side) in (0..self.links.len()).flat_map(|link| [(link, 0), (link, 1)]) {
                self.copy_on(link, side, random);
                self.send(link, side);
                self.deliver(link, side)?;
                self.take_effect(link, 1 - side);
                self.check()?;
            }
        }
        for host in 0..HOSTS {
            while !self.programs[host].is_empty() {
                self.store_next(host);
            }
        }
        for _ in 0..6 {
            for link in 0..self.links.len() {
                for side in 0..2 {
                    self.take_effect(link, side);
                    self.collect(link, side, random);
                    self.send(link, side);
                }
            }
            while self.links.iter().flatten().any(|end| !end.out.is_empty()) {
                for link in 0..self.links.len() {
                    for side in 0..2 {
                        self.deliver(link, side)?;
                        self.take_effect(link, 1 - side);
                        self.check()?;
                    }
                }
            }
        }
        for (host, memory) in self.memory.iter().enumerate() {
            if *memory != self.memory[0] {
                let at = (0..SIZE).find(|at| memory[*at] != self.memory[0][*at]).unwrap_or(0);
                return Err(format!("{host} and 0 differ at {at} at rest"));
            }
            for (writer, own) in self.own.iter().enumerate() {
                for (nth, value) in own.iter().enumerate() {
                    if memory[own_of(writer, nth)] != *value {
                        return Err(format!("{host} has not what {writer} stored last"));
                    }
                }
                if memory[FLAG + writer] != self.counts[writer] {
                    return Err(format!("{host} has not the last flag of {writer}"));
                }
                let (at, last) = (COPIED + writer * COPY, self.copies[writer].last());
                if last.is_some_and(|last| memory[at..at + COPY].iter().any(|it| it != last)) {
                    return Err(format!("{host} has not the last copy of {writer}"));
                }
            }
        }
        self.resting = false;
        Ok(())
    }
}

fn run(policy: Policy, seed: u64, traced: bool) -> Result<(), String> {
    let mut random = Random(seed);
    let mut rack = Rack::new(policy);
    for round in 0..1 + random.below(4) {
        for _ in 0..random.below(400) {
            let (host, link, side) =
                (random.below(HOSTS), random.below(HOSTS - 1), random.below(2));
            let step = random.below(15);
            if traced {
                println!("{round}: step {step} of host {host}, link {link}, side {side}");
            }
            match step {
                0 => rack.decide(host, &mut random),
                1..=4 => rack.store_next(host),
                // Most batches are sent at once.
                5 => {
                    rack.collect(link, side, &mut random);
                    if random.below(2) == 0 {
                        rack.send(link, side);
                    }
                }
                6 => rack.take_effect(link, side),
                7 => rack.send(link, side),
                8..=10 => rack.links[link][side].lane.arrive_late(&mut random),
                11 => rack.links[link][side].lane.land_other(&mut random),
                _ => rack.deliver(link, side)?,
            }
            rack.check()?;
        }
        rack.rest(&mut random)?;
    }
    Ok(())
}

#[test]
fn all_memory_becomes_the_same_and_no_flag_is_before_its_data() {
    let simulation = Simulation { test: "-p rackbus-segment --test coherence", usual: SEEDS };
    simulation.run(|seed, traced| run(Policy::Right, seed, traced));
}

#[test]
fn wrong_policies_are_found() {
    // Each by what it does wrong.
    let (flag, twice) = (" has flag ", "takes effect twice");
    for (policy, reason) in [
        (Policy::Parts, flag),
        (Policy::Overwrite, twice),
        (Policy::WhileWriting, flag),
        (Policy::Early, twice),
        (Policy::Overtaking, " at rest"),
        (Policy::CopiesFirst, " has copy "),
        (Policy::SlotSoonFree, " has copy 255 "),
        (Policy::LandAfterLoss, " copy "),
        (Policy::SlotOfLater, " copy 255 "),
    ] {
        let errors = (0..20_000).filter_map(|seed| run(policy, seed, false).err());
        let found = errors.into_iter().find(|error| error.contains(reason));
        assert!(found.is_some(), "{policy:?} is not found");
        println!("{policy:?}: {}", found.unwrap_or_default());
    }
}
