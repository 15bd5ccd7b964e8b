//! Memory that three machines have: what was flushed by one connector is at the other one before what is stored behind it,
//! however late messages are, and in whatever order the bytes of a batch take effect.

use std::collections::VecDeque;

use rackbus_seeds::{Random, Simulation};
use rackbus_segment::coherence::{Batch, ConnectionSide, ConnectionWindow, PAGE, Stores};
use rackbus_segment::flushing::FlushLedger;

const SEEDS: u64 = 20_000;
/// The flag is at the first byte, so that it is stored first of all in a batch where nothing forbids it.
const FLAG: usize = 0;
const BYTES: usize = 64;

#[derive(Debug)]
enum Message {
    Stores(Batch),
    Applied { batch: u64, alone: bool },
    PassOn(u64),
    PassedOn(u64),
}

/// A connector's machine, with the home's end of its connection.
struct Connector {
    memory: [u8; BYTES],
    here: ConnectionWindow,
    there: ConnectionWindow,
    to_home: VecDeque<Message>,
    to_here: VecDeque<Message>,
    ledger: FlushLedger,
    /// The flushes that the cycle under way is for.
    cycle: Option<u64>,
    flush: Option<u64>,
    /// The round that its program stores.
    round: u8,
    stored: usize,
    /// What the home owes it: a passing on, which waits for the other's batch that is under way and one more.
    passing: Option<(u64, u64)>,
}

impl Connector {
    fn new() -> Connector {
        let window = |side| ConnectionWindow::new(side, BYTES as u64, true);
        Connector {
            memory: [0; BYTES],
            here: window(ConnectionSide::Replica),
            there: window(ConnectionSide::Home),
            to_home: VecDeque::new(),
            to_here: VecDeque::new(),
            ledger: FlushLedger::default(),
            cycle: None,
            flush: None,
            round: 0,
            stored: 0,
            passing: None,
        }
    }
}

struct World {
    random: Random,
    home: [u8; BYTES],
    connectors: [Connector; 2],
    passes_on: bool,
}

fn page(memory: &[u8; BYTES]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..BYTES].copy_from_slice(memory);
    page
}

fn hear(window: &mut ConnectionWindow, batch: &Batch) -> Stores {
    for part in batch.parts(usize::MAX) {
        window.hear(part.batch, part.last, &part.places, part.data).unwrap();
    }
    window.take_effect().unwrap().1
}

impl World {
    /// The writer stores a round byte by byte, flushes, and raises the flag.
    fn write(&mut self) {
        let (random, writer) = (&mut self.random, &mut self.connectors[0]);
        if let Some(flush) = writer.flush {
            if writer.ledger.is_done(flush) {
                (writer.flush, writer.stored) = (None, 0);
                writer.memory[FLAG] = writer.round;
            }
            return;
        }
        if writer.stored == 0 {
            writer.round += 1;
        }
        let count = 1 + random.below(20);
        for _ in 0..count.min(BYTES - 1 - writer.stored) {
            writer.stored += 1;
            writer.memory[writer.stored] = writer.round;
        }
        if writer.stored == BYTES - 1 {
            writer.flush = Some(writer.ledger.want());
        }
    }

    fn cycle(&mut self, at: usize) {
        let it = &mut self.connectors[at];
        if it.cycle.is_some() {
            return;
        }
        let wanted = it.ledger.wanted();
        let page = page(&it.memory);
        let differs = *it.here.known(0) != page;
        let batch = differs.then(|| it.here.collect([(0, &page[..BYTES])])).flatten();
        it.cycle = Some(wanted);
        match batch {
            Some(batch) => it.to_home.push_back(Message::Stores(batch)),
            None => self.end_cycle(at),
        }
    }

    fn end_cycle(&mut self, at: usize) {
        let it = &mut self.connectors[at];
        let Some(wanted) = it.cycle.take() else { return };
        let number = it.ledger.cycle_ended(wanted);
        if let Some(number) = number {
            match self.passes_on {
                true => it.to_home.push_back(Message::PassOn(number)),
                false => assert!(it.ledger.passed_on(number)),
            }
        }
    }

    /// The home looks, for one connector.
    fn look(&mut self, at: usize) {
        let it = &mut self.connectors[at];
        let page = page(&self.home);
        if *it.there.known(0) != page
            && let Some(batch) = it.there.collect([(0, &page[..BYTES])])
        {
            it.to_here.push_back(Message::Stores(batch));
        }
        // All that had taken effect when it was asked is at the other one, or was not new to it.
        let other = &self.connectors[1 - at];
        let (sent, waits) = (other.there.numbers().0, other.there.is_waiting());
        let same = *other.there.known(0) == crate::page(&self.home);
        let it = &mut self.connectors[at];
        if let Some((number, needed)) = it.passing
            && sent >= needed
            && !waits
            && (same || sent > needed)
        {
            it.passing = None;
            it.to_here.push_back(Message::PassedOn(number));
        }
    }

    fn at_home(&mut self, at: usize) {
        let Some(message) = self.connectors[at].to_home.pop_front() else { return };
        match message {
            Message::Stores(batch) => {
                let it = &mut self.connectors[at];
                for (offset, bytes) in hear(&mut it.there, &batch).iter() {
                    self.home[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                it.to_here.push_back(Message::Applied { batch: batch.number(), alone: false });
            }
            Message::Applied { batch, .. } => self.connectors[at].there.applied(batch).unwrap(),
            Message::PassOn(number) => {
                let sent = self.connectors[1 - at].there.numbers().0;
                self.connectors[at].passing = Some((number, sent));
            }
            Message::PassedOn(_) => unreachable!("it is the home that passes on"),
        }
    }

    fn at_connector(&mut self, at: usize) -> Result<(), String> {
        let Some(message) = self.connectors[at].to_here.pop_front() else { return Ok(()) };
        let it = &mut self.connectors[at];
        match message {
            Message::Stores(batch) => {
                let stores = hear(&mut it.here, &batch);
                let each = stores.iter().flat_map(|(offset, bytes)| {
                    bytes.iter().enumerate().map(move |(n, byte)| (offset as usize + n, *byte))
                });
                // The flag first of all, and a reader looks after each byte.
                for (offset, byte) in each {
                    it.memory[offset] = byte;
                    let (flag, data) = (it.memory[FLAG], &it.memory[1..]);
                    if at == 1 && data.iter().any(|byte| *byte < flag) {
                        return Err(format!("flag {flag} is seen before its data: {data:?}"));
                    }
                }
                it.to_home.push_back(Message::Applied { batch: batch.number(), alone: false });
            }
            Message::Applied { batch, alone } => {
                it.here.applied(batch).unwrap();
                if !alone {
                    it.ledger.is_told_on();
                }
                self.end_cycle(at);
            }
            Message::PassedOn(number) => assert!(it.ledger.passed_on(number)),
            Message::PassOn(_) => unreachable!("it is the connector that asks"),
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let at = self.random.below(2);
        match self.random.below(6) {
            0 => self.write(),
            1 => self.cycle(at),
            2 => self.look(at),
            3 => self.at_home(at),
            _ => return self.at_connector(at),
        }
        Ok(())
    }
}

fn run(seed: u64, passes_on: bool) -> Result<(), String> {
    let connectors = [Connector::new(), Connector::new()];
    let mut world = World { random: Random(seed), home: [0; BYTES], connectors, passes_on };
    for _ in 0..600 {
        world.step()?;
    }
    // It goes on to the end: whoever waits for a flush does not wait for ever.
    let round = world.connectors[0].round;
    for _ in 0..4000 {
        world.step()?;
        if world.connectors[1].memory[FLAG] > round {
            return Ok(());
        }
    }
    Err(format!("round {round} does not end"))
}

#[test]
fn what_was_flushed_is_everywhere_before_what_comes_behind_it() {
    Simulation { test: "-p rackbus-segment --test passing", usual: SEEDS }
        .run(|seed, _| run(seed, true));
}

#[test]
fn without_passing_on_a_flag_comes_before_its_data() {
    let found = (0..1000).find(|seed| run(*seed, false).is_err_and(|it| it.contains("before")));
    assert!(found.is_some(), "nothing is noticed");
}
