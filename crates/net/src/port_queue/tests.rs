//! Stations that send to each other over real rings, driven by a seed: they stall for a while, lose their
//! rings, find no room, and one of them writes anything into what it may write. What is checked at every step:
//! frames of a flow come in order, once and whole, nobody gets what is not for it, and whoever takes what is
//! sent to it gets all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;

use rackbus_fabric::rack::Rack;
use rackbus_memory::frames::FrameEvents;
use rackbus_memory::{PeerEvent, SharedMemory};
use rackbus_seeds::{Random, Simulation};

use super::*;
use crate::addressing::Stations;
use crate::port::Cause;

mod answers;
mod headers;
mod receivers;
mod uplinks;

const STATIONS: usize = 4;
/// Its rings' memory is what the hostile one writes into.
const HOSTILE: usize = 3;
const KIND: [u8; 2] = [0x88, 0xb5];

#[derive(Debug, Default)]
struct Asked(Mutex<Vec<(PortQueueId, usize)>>);

impl RingOpener for Asked {
    fn open(&self, from: PortQueueId, station: usize) {
        self.0.lock().unwrap().push((from, station));
    }
}

/// The outcome of a flow.
#[derive(Debug, Default)]
struct Flow {
    sent: u64,
    /// The last that was taken, by number.
    accepted: Vec<u64>,
    received: Vec<u64>,
}

struct World {
    random: Random,
    stations: Stations,
    clock: Arc<AtomicU64>,
    asked: Arc<Asked>,
    queues: Vec<PortQueue>,
    frozen_until: Vec<u64>,
    held: Vec<Option<(usize, Vec<u8>)>>,
    flows: BTreeMap<(usize, usize), Flow>,
    /// The newest ring of each pair, its number and memory.
    rings: BTreeMap<(usize, usize), (u64, SharedMemory)>,
    next: u64,
    /// Stations whose interface is not up.
    down: BTreeSet<usize>,
}

fn sound<T>(outcome: std::io::Result<T>) -> T {
    outcome.expect("the process has descriptors")
}

fn queue(
    station: usize,
    switch: &Arc<StationSwitch>,
    clock: &Arc<AtomicU64>,
    asked: &Arc<Asked>,
) -> PortQueue {
    let clock = clock.clone();
    let read: NanosecondClock = Arc::new(move || clock.load(Ordering::Relaxed));
    let id = PortQueueId { station, number: 0 };
    sound(PortQueue::new(id, switch.clone(), asked.clone(), read))
}

impl World {
    fn new(seed: u64) -> World {
        World::with("", seed)
    }

    /// One whose network the rack file describes so.
    fn with(network: &str, seed: u64) -> World {
        let text = format!(
            "name = \"lab\"\n[network]\n{network}[hosts.a]\n[hosts.b]\n[hosts.c]\n[hosts.d]\n"
        );
        let rack = Rack::parse("rack.toml", &text).unwrap();
        let stations = Stations::of(&rack, &BTreeMap::new());
        let limit = rack.network.flood_limit;
        let switch = Arc::new(StationSwitch::new(stations.all(), 1500, limit));
        let (clock, asked) = (Arc::new(AtomicU64::new(1)), Arc::new(Asked::default()));
        let port_queue = |station| queue(station, &switch, &clock, &asked);
        World {
            random: Random(seed),
            queues: (0..stations.all().len()).map(port_queue).collect(),
            stations,
            clock,
            asked,
            frozen_until: vec![0; STATIONS],
            held: vec![None; STATIONS],
            flows: BTreeMap::new(),
            rings: BTreeMap::new(),
            next: 0,
            down: BTreeSet::new(),
        }
    }

    fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// As the nodes do it: the ring that was there before ends, and its frames come first.
    fn open(&mut self, from: PortQueueId, to: usize) {
        let bytes = LAYOUT.bytes().unwrap() as u64;
        let memory = SharedMemory::create("ring", bytes).unwrap();
        let [frames, room] = [(); 2].map(|()| OwnedFd::from(sound(Event::new())));
        let copy = |fd: &OwnedFd| sound(PeerEvent::new(fd.try_clone().unwrap()));
        let events = || FrameEvents { frames: copy(&frames), room: copy(&room) };
        let receiver = FrameReceiver::new(memory.region().clone(), events(), LAYOUT).unwrap();
        let sender = FrameSender::new(memory.region().clone(), events(), LAYOUT).unwrap();
        self.next += 1;
        let before = self.rings.insert((from.station, to), (self.next, memory));
        if let Some((number, _)) = before {
            self.queues[to].handle().tell(News::Ended(number));
        }
        self.queues[to].handle().tell(News::Incoming(from, self.next, receiver));
        self.queues[from.station].handle().tell(News::Opened(to, sender));
    }

    /// A station goes as its interface does, and its next queue is another one: rings from it and to it end.
    fn close(&mut self, station: usize) {
        self.down.insert(station);
        for ((from, to), (number, _)) in &self.rings {
            if *from == station {
                self.queues[*to].handle().tell(News::Ended(*number));
            } else if *to == station {
                self.queues[*from].handle().tell(News::Gone(station));
            }
        }
        self.rings.retain(|(from, to), _| *from != station && *to != station);
        self.asked.0.lock().unwrap().retain(|(from, _)| from.station != station);
        let switch = self.queues[station].switch.clone();
        self.queues[station] = queue(station, &switch, &self.clock, &self.asked);
    }

    fn answer(&mut self, reliable: bool) {
        let asked = std::mem::take(&mut *self.asked.0.lock().unwrap());
        for (from, to) in asked {
            if self.down.contains(&to) || !reliable && self.random.chance(20) {
                self.queues[from.station].handle().tell(News::Failed(to));
            } else {
                self.open(from, to);
            }
        }
    }

    fn send(&mut self, from: usize) {
        let (to, frame) = match self.held[from].take() {
            Some(held) => held,
            None => {
                let to = (from + 1 + self.random.below(STATIONS - 1)) % STATIONS;
                (to, self.next_frame(from, to))
            }
        };
        match self.queues[from].send_checked(Offload::default(), &frame, &[]) {
            SendOutcome::Full => self.held[from] = Some((to, frame)),
            SendOutcome::Done => {
                let number = u64::from_le_bytes(frame[14..22].try_into().unwrap());
                self.flows.entry((from, to)).or_default().accepted.push(number);
            }
            SendOutcome::Dropped(Cause::Full | Cause::Down) => {}
            SendOutcome::Dropped(other) => panic!("{other:?}"),
        }
        self.queues[from].flush();
    }

    /// The next frame of a flow.
    fn next_frame(&mut self, from: usize, to: usize) -> Vec<u8> {
        let flow = self.flows.entry((from, to)).or_default();
        flow.sent += 1;
        let all = self.stations.all();
        let length = 60 + self.random.below(1400);
        let body = (0..length).map(|at| (flow.sent as usize + at) as u8);
        let mut frame = [&all[to].mac.0[..], &all[from].mac.0, &KIND].concat();
        frame.extend(flow.sent.to_le_bytes());
        frame.extend(body);
        frame
    }

    /// Has a station send to another one until something is taken, while all is well and all is received.
    fn gets_through(&mut self, from: usize, to: usize) -> Result<bool, String> {
        let taken = |world: &World| world.flows.get(&(from, to)).map_or(0, |it| it.accepted.len());
        let before = taken(self);
        for _ in 0..4 {
            let frame = self.next_frame(from, to);
            self.held[from] = Some((to, frame));
            self.send(from);
            self.clock.fetch_add(1_000_000_000, Ordering::Relaxed);
            self.answer(true);
            for at in 0..STATIONS {
                while self.receive(at, 1000)? {}
            }
        }
        Ok(taken(self) > before)
    }

    /// Takes what there is, at most so many frames; true when there was something.
    fn receive(&mut self, at: usize, most: usize) -> Result<bool, String> {
        let own = self.stations.all()[at].mac;
        for taken in 0..most {
            let Some(frame) = self.queues[at].next() else { return Ok(taken > 0) };
            let mut bytes = vec![0; frame.bytes.len()];
            frame.bytes.copy_to(&mut bytes);
            self.queues[at].consume();
            if at == HOSTILE {
                continue;
            }
            let all = self.stations.all();
            let Some(from) = all.iter().position(|it| it.mac.0[..] == bytes[6..12]) else {
                return Err(format!("{at} got a frame from nobody"));
            };
            if from == HOSTILE {
                continue;
            }
            let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
            let whole = bytes[22..].iter().enumerate();
            if bytes[..6] != own.0
                || !whole.clone().all(|(nth, it)| *it == (number as usize + nth) as u8)
            {
                return Err(format!("{at} got another frame than {from} sent"));
            }
            let flow = self.flows.entry((from, at)).or_default();
            if flow.received.last().is_some_and(|last| *last >= number) {
                return Err(format!(
                    "{number} from {from} to {at} came after {:?}",
                    flow.received.last()
                ));
            }
            flow.received.push(number);
        }
        Ok(true)
    }

    /// The hostile station writes into a ring that it sends into, or gives back what it never had.
    fn scribble(&mut self) {
        let ends: Vec<_> = self
            .rings
            .keys()
            .filter(|(from, to)| *from == HOSTILE || *to == HOSTILE)
            .copied()
            .collect();
        let Some(pair) = ends.get(self.random.below(ends.len())) else { return };
        let whole = self.rings[pair].1.whole();
        let near = if self.random.chance(50) { 512 } else { whole.len() - 8 };
        let at = self.random.below(near) & !7;
        whole.write_obj(at, &(self.random.next() >> self.random.below(64)));
    }

    fn step(&mut self) -> Result<(), String> {
        self.clock.fetch_add(self.random.next() % 2_000_000, Ordering::Relaxed);
        let station = self.random.below(STATIONS);
        let awake = self.frozen_until[station] <= self.now();
        match self.random.below(100) {
            0..=54 if awake => (0..self.random.below(40)).for_each(|_| self.send(station)),
            55..=94 if awake => drop(self.receive(station, 60)?),
            95 => self.frozen_until[station] = self.now() + self.random.next() % 500_000_000,
            96 => {
                // Its conversation ends: what is in the ring is taken, and the next frame asks for another.
                let to = (station + 1 + self.random.below(STATIONS - 1)) % STATIONS;
                if let Some((number, _)) = self.rings.get(&(station, to)) {
                    self.queues[to].handle().tell(News::Ended(*number));
                    self.queues[station].handle().tell(News::Lost(to));
                }
            }
            97 | 98 => self.scribble(),
            _ => self.answer(false),
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        for _ in 0..4 {
            self.clock.fetch_add(1_000_000_000, Ordering::Relaxed);
            self.answer(true);
            for at in 0..STATIONS {
                while self.receive(at, 1000)? {}
            }
            for from in (0..STATIONS).filter(|from| self.held[*from].is_some()).collect::<Vec<_>>()
            {
                self.send(from);
            }
        }
        if let Some(from) = self.held.iter().position(Option::is_some) {
            return Err(format!("{from} still waits for room"));
        }
        let honest = |(from, to): &(usize, usize)| *from != HOSTILE && *to != HOSTILE;
        let pairs = (0..STATIONS).flat_map(|from| (0..STATIONS).map(move |to| (from, to)));
        for (from, to) in pairs.filter(|pair| pair.0 != pair.1 && honest(pair)) {
            if !self.gets_through(from, to)? {
                return Err(format!("{from} sends nothing to {to} any more"));
            }
        }
        for (pair, flow) in self.flows.iter().filter(|(pair, _)| honest(pair)) {
            if flow.accepted != flow.received {
                let (sent, got) = (flow.accepted.len(), flow.received.len());
                return Err(format!("of {sent} frames that were taken from {pair:?}, {got} came"));
            }
        }
        // Who sleeps now is not kept awake by anything.
        for (nth, port_queue) in
            self.queues.iter_mut().enumerate().filter(|(nth, _)| *nth != HOSTILE)
        {
            port_queue.blocked.clear();
            // What is found out at the first attempt is gone at the second.
            let rests = (0..2 + STATIONS).any(|_| {
                while port_queue.next().is_some() {
                    port_queue.consume();
                }
                port_queue.park()
            });
            if !rests {
                return Err(format!("{nth} does not come to rest"));
            }
        }
        Ok(())
    }
}

#[test]
fn flows_stay_whole_whatever_stations_do() {
    let simulation =
        Simulation { test: "-p rackbus-net --lib port_queue::tests::flows", usual: 60 };
    simulation.run(|seed, _| {
        let mut world = World::new(seed);
        for _ in 0..600 {
            world.step()?;
        }
        world.finish()
    });
}

/// What came to a station, and what is left to do to it.
fn received(world: &mut World, at: usize) -> Option<(Vec<u8>, Offload)> {
    let frame = world.queues[at].next()?;
    let mut bytes = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut bytes);
    let offload = frame.offload;
    world.queues[at].consume();
    Some((bytes, offload))
}

#[test]
fn a_frame_has_its_vlans_tag_where_its_receiver_takes_it_with_one() {
    let vlans = "[network.host.a]\nvlan = 7\n[network.host.b]\nvlan = 7\n\
                 [network.host.c]\nvlans = [7, 9]\n[network.host.d]\nvlan = 9\n";
    let mut world = World::with(vlans, 1);
    let macs: Vec<MacAddress> = world.stations.all().iter().map(|it| it.mac).collect();
    let offload = Offload {
        flags: crate::offload::NEEDS_CSUM,
        csum_start: 14.into(),
        csum_offset: 2.into(),
        ..Offload::default()
    };
    let body: Vec<u8> = (0..=255).cycle().take(1000).collect();
    let frame = |from: usize, to: MacAddress, tag: &[u8]| {
        [&to.0[..], &macs[from].0, tag, &KIND, &body].concat()
    };
    let memory = SharedMemory::create("frame", 4096).unwrap();
    let mut reached = |from: usize, to: MacAddress, tag: &[u8], offload: Offload| {
        let bytes = frame(from, to, tag);
        let mut sent = SendOutcome::Full;
        for _ in 0..2 {
            // As a function sends it: what was looked at, and the rest of the guest's memory.
            memory.whole().part(0, bytes.len()).unwrap().copy_from(&bytes);
            let parts = [memory.whole().part(0, 100), memory.whole().part(100, bytes.len() - 100)];
            sent = world.queues[from].send(offload, &parts.map(Option::unwrap));
            world.answer(true);
        }
        world.queues[from].flush();
        let all = (0..STATIONS).map(|at| {
            let mut all = Vec::new();
            while let Some(found) = received(&mut world, at) {
                all.push(found);
            }
            all.pop()
        });
        (sent, all.collect::<Vec<_>>())
    };
    let (seven, nine): (&[u8], &[u8]) = (&[0x81, 0, 0xa0, 7], &[0x81, 0, 0, 9]);
    let moved = |by: u16| Offload { csum_start: by.into(), ..offload };
    let plain = Some((frame(0, MacAddress::BROADCAST, &[]), offload));
    let tagged = Some((frame(0, MacAddress::BROADCAST, &[0x81, 0, 0, 7]), moved(18)));
    assert_eq!(
        reached(0, MacAddress::BROADCAST, &[], offload),
        (SendOutcome::Done, vec![None, plain, tagged, None])
    );
    let plain = Some((frame(2, macs[0], &[]), offload));
    assert_eq!(
        reached(2, macs[0], seven, moved(18)),
        (SendOutcome::Done, vec![plain, None, None, None])
    );
    for (from, to, tag) in [(2, macs[0], nine), (0, macs[3], &[]), (0, macs[2], seven)] {
        let none = vec![None; STATIONS];
        let offload = moved(14 + tag.len() as u16);
        assert_eq!(reached(from, to, tag, offload), (SendOutcome::Dropped(Cause::Vlan), none));
    }
}

#[test]
fn a_station_sends_to_many_no_more_often_than_the_rack_file_allows() {
    let mut world = World::with("flood_limit = 100\n", 1);
    let frame = [&[0xff; 6][..], &world.stations.all()[0].mac.0, &KIND, &[0; 50]].concat();
    let send = |world: &mut World| world.queues[0].send_checked(Offload::default(), &frame, &[]);
    assert_eq!(send(&mut world), SendOutcome::Full);
    world.answer(true);
    for _ in 0..10 {
        assert_eq!(send(&mut world), SendOutcome::Done);
    }
    assert_eq!(send(&mut world), SendOutcome::Dropped(Cause::Rate));
    world.clock.fetch_add(10_000_000, Ordering::Relaxed);
    assert_eq!(send(&mut world), SendOutcome::Done);
    assert_eq!(send(&mut world), SendOutcome::Dropped(Cause::Rate));
}

#[test]
fn many_senders_have_their_turns() {
    let mut world = World::new(1);
    let frame = |world: &World, from: usize| {
        let all = world.stations.all();
        [&all[0].mac.0[..], &all[from].mac.0, &KIND, &[0; 1400]].concat()
    };
    for from in 1..STATIONS {
        let bytes = frame(&world, from);
        world.queues[from].send_checked(Offload::default(), &bytes, &[]);
        world.answer(true);
        while world.queues[from].send_checked(Offload::default(), &bytes, &[]) == SendOutcome::Done
        {
        }
    }
    let mut counts = [0; STATIONS];
    for _ in 0..600 {
        let frame = world.queues[0].next().expect("there are more");
        let source: [u8; 6] = frame.bytes.read_obj(6).unwrap();
        let from = world.stations.all().iter().position(|it| it.mac.0 == source).unwrap();
        counts[from] += 1;
        world.queues[0].consume();
    }
    assert!(counts[1..].iter().all(|count| (100..300).contains(count)), "{counts:?}");
}

#[test]
fn what_a_receiver_had_not_taken_when_it_was_gone_is_counted() {
    let mut world = World::new(1);
    let all = world.stations.all();
    let frame = [&all[1].mac.0[..], &all[0].mac.0, &KIND, &[0; 1400]].concat();
    assert_eq!(world.queues[0].send_checked(Offload::default(), &frame, &[]), SendOutcome::Full);
    world.answer(true);
    for _ in 0..5 {
        assert_eq!(
            world.queues[0].send_checked(Offload::default(), &frame, &[]),
            SendOutcome::Done
        );
    }
    world.queues[0].handle().tell(News::Gone(1));
    world.queues[0].unpark();
    let down = |world: &World| {
        let drops = &world.queues[0].handle().counters().peers[1].drops;
        drops.all().find(|(cause, _)| *cause == Cause::Down).unwrap().1
    };
    assert_eq!(down(&world), 5);
    // The ring is gone already.
    world.queues[0].handle().tell(News::Gone(1));
    world.queues[0].unpark();
    assert_eq!(down(&world), 5);
}
