//! Two machines whose functions send to each other over connections that are slow, delay what they carry, break at any
//! byte or fall silent, driven by a seed, with virtual time. Everything but the connection and the clock is real: queues,
//! rings, both ends, and what the nodes make of their messages.
//!
//! What is checked: frames of a flow come in their order, whole and at most once; what was taken from a queue arrives or is
//! counted by it, unless a port was closed; no end holds more than its bounds; an end that sleeps is woken by what comes for
//! it; and when nothing is wrong any more, frames pass.

//! Two machines whose functions send to each other over connections that are slow, delay what they carry, break at any
//! byte or fall silent, driven by a seed, with virtual time. Everything but the connection and the clock is real: queues,
//! rings, both ends, and what the nodes make of their messages.
//!
//! What is checked: frames of a flow come in their order, whole and at most once; what was taken from a queue arrives or is
//! counted by it, unless a port was closed; no end holds more than its bounds; an end that sleeps is woken by what comes for
//! it; and when nothing is wrong any more, frames pass.

mod ending;
mod pipe;

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rackbus_fabric::rack::Rack;
use rackbus_link::shm::ShmLink;
use rackbus_memory::SharedMemory;
use rackbus_net::{Cause, MacAddress, NetworkPort, Offload, PortOptions, PortSource, SendOutcome};
use rackbus_seeds::{Random, Simulation};

use super::super::NetworkService;
use super::super::peers::AskingNode;
use super::super::requests::AskedRings;
use super::{GATHERED, HEAD, MAX_FRAME, MessageQueue, Over, ReceivingEnd, SendingEnd, WINDOW};
use pipe::{Pipe, PipeEnd, woken};

const HOSTS: [&str; 2] = ["alpha", "beta"];
/// Functions of each host.
const FUNCTIONS: usize = 2;
const MS: u64 = 1_000_000;
/// Bytes that a connection without trouble takes at once.
const ROOMY: usize = 4 << 20;
/// Where the numbers of a frame are: its own, and its length.
const NUMBERS: usize = 14;

/// An end of a connection, with whether it sleeps, and since when.
struct Run<E> {
    end: E,
    side: PipeEnd,
    asleep: Option<u64>,
}

type Receiving = Run<(ReceivingEnd, Arc<AskingNode>)>;

/// A host: its network, and what its queues ask.
struct Host {
    network: NetworkService,
    asked: AskedRings,
    ports: Vec<Option<Box<dyn NetworkPort>>>,
    /// It connects to the other one.
    dials: bool,
    sending: Option<Run<SendingEnd>>,
    receiving: Vec<Receiving>,
    /// Its functions take nothing.
    stands_still: bool,
}

/// What became of a flow from one function to another.
#[derive(Debug, Default)]
struct Flow {
    next: u64,
    accepted: u64,
    /// Frames that the queue dropped at once, which it counts too.
    refused: u64,
    received: u64,
    /// The number of the last that came.
    last: Option<u64>,
    /// A port of it was closed: what was in its rings went with that.
    cut: bool,
}

/// A flow: from which host's function to which of the other's.
type FlowId = (usize, usize, usize);

/// What a thread makes once.
struct Prepared {
    rack: Rack,
    memory: SharedMemory,
    socket: Arc<UnixStream>,
}

impl Prepared {
    fn new() -> Prepared {
        let text = "name = \"t\"\n[network]\nmtu = 9000\n[hosts.alpha.devices.nic0]\nkind = \"nic\"\n\
                    functions = 2\n[hosts.beta.devices.nic0]\nkind = \"nic\"\nfunctions = 2\n";
        let (rack, _) = rackbus_devices::class::parse_rack("rack.toml", text).unwrap();
        let memory = SharedMemory::create("frame", 1 << 14).unwrap();
        Prepared { rack, memory, socket: Arc::new(UnixStream::pair().unwrap().0) }
    }
}

fn function(host: usize, nth: usize) -> String {
    format!("{}/nic0.vf{}", HOSTS[host], nth + 1)
}

struct World<'p> {
    prepared: &'p Prepared,
    random: Random,
    traced: bool,
    clock: Arc<AtomicU64>,
    base: Instant,
    macs: [[MacAddress; FUNCTIONS]; 2],
    hosts: [Host; 2],
    flows: BTreeMap<FlowId, Flow>,
}

impl<'p> World<'p> {
    fn new(prepared: &'p Prepared, seed: u64, traced: bool) -> World<'p> {
        let clock = Arc::new(AtomicU64::new(MS));
        let host = |nth: usize| {
            let all = (0..2).flat_map(|host| (0..FUNCTIONS).map(move |nth| function(host, nth)));
            let ports = all.map(|name| (name, PortOptions::default())).collect();
            let link = ShmLink::new("t", std::path::Path::new("/nowhere"), HOSTS);
            let mut network =
                NetworkService::new(&prepared.rack, &ports, HOSTS[nth], Arc::new(link), true);
            let shared = Arc::get_mut(&mut network.0).expect("nobody else has it");
            let read = clock.clone();
            shared.clock = Arc::new(move || read.load(Ordering::Relaxed));
            let asked = shared.asked.get_mut().unwrap().take().unwrap();
            Host {
                network,
                asked,
                ports: (0..FUNCTIONS).map(|_| None).collect(),
                dials: false,
                sending: None,
                receiving: Vec::new(),
                stands_still: false,
            }
        };
        let hosts = [host(0), host(1)];
        let mac = |name: String| hosts[0].network.0.stations.named(&name).unwrap().1.mac;
        let macs = [0, 1].map(|host| std::array::from_fn(|nth| mac(function(host, nth))));
        let flows = (0..2).flat_map(|host| {
            (0..FUNCTIONS * FUNCTIONS).map(move |it| (host, it / FUNCTIONS, it % FUNCTIONS))
        });
        let flows = flows.map(|id| (id, Flow::default())).collect();
        let base = Instant::now();
        let random = Random(seed);
        let mut world = World { prepared, random, traced, clock, base, macs, hosts, flows };
        for host in 0..2 {
            (0..FUNCTIONS).for_each(|nth| world.open_port(host, nth));
        }
        world
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        if self.traced {
            println!("{:>9.3} ms: {}", self.now() as f64 / MS as f64, what());
        }
    }

    fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn instant(&self) -> Instant {
        self.base + Duration::from_nanos(self.now())
    }

    fn pass(&self, nanoseconds: u64) {
        self.clock.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn open_port(&mut self, host: usize, nth: usize) {
        let mut port = self.hosts[host].network.port(&function(host, nth)).unwrap();
        port.attend(true);
        self.hosts[host].ports[nth] = Some(port);
    }

    /// Frames of this flow that its queue counted as lost, without those that it refused.
    fn lost(&self, (host, from, to): FlowId) -> u64 {
        let shared = &self.hosts[host].network.0;
        let station = |name: &str| shared.stations.named(name).unwrap().0;
        let (own, other) = (station(&function(host, from)), station(&function(1 - host, to)));
        let state = shared.lock();
        let counters = state.ports[&own].queues[0].counters();
        let mut all = counters.peers[other].drops.all();
        let down = all.find(|(cause, _)| *cause == Cause::Down).unwrap().1;
        down - self.flows[&(host, from, to)].refused
    }

    /// A function sends up to so many frames to another.
    fn send(&mut self, id: FlowId, count: usize, longest: usize) -> usize {
        let (host, from, to) = id;
        let [own, other] = [self.macs[host][from], self.macs[1 - host][to]];
        let flow = self.flows.get_mut(&id).unwrap();
        let Some(port) = &mut self.hosts[host].ports[from] else { return 0 };
        let mut taken = 0;
        for _ in 0..count {
            let length = NUMBERS + 12 + self.random.below(longest - NUMBERS - 12);
            let whole = self.prepared.memory.whole();
            whole.write_obj(0, &other.0);
            whole.write_obj(6, &own.0);
            whole.write_obj(12, &[0x88u8, 0xb5]);
            whole.write_obj(NUMBERS, &flow.next);
            whole.write_obj(NUMBERS + 8, &(length as u32));
            match port.send(Offload::default(), &[whole.part(0, length).unwrap()]) {
                SendOutcome::Done => {
                    flow.next += 1;
                    flow.accepted += 1;
                    taken += 1;
                }
                SendOutcome::Full => break,
                SendOutcome::Dropped(cause) => {
                    flow.refused += u64::from(cause == Cause::Down);
                    break;
                }
            }
        }
        port.flush();
        taken
    }

    /// A function takes up to so many frames.
    fn take(&mut self, host: usize, nth: usize, most: usize) -> Result<usize, String> {
        let Some(port) = &mut self.hosts[host].ports[nth] else { return Ok(0) };
        for taken in 0..most {
            let Some(frame) = port.next() else { return Ok(taken) };
            let source: [u8; 6] = frame.bytes.read_obj(6).unwrap();
            let number: u64 = frame.bytes.read_obj(NUMBERS).unwrap();
            let length: u32 = frame.bytes.read_obj(NUMBERS + 8).unwrap();
            let whole = frame.bytes.len() == length as usize;
            port.consume();
            let is_from = |from: &usize| self.macs[1 - host][*from].0 == source;
            let from = (0..FUNCTIONS).find(is_from).ok_or("a frame of nobody")?;
            let flow = self.flows.get_mut(&(1 - host, from, nth)).unwrap();
            if !whole || flow.last.is_some_and(|last| number <= last) || number >= flow.next {
                let name = function(host, nth);
                return Err(format!("frame {number} comes to {name} behind {:?}", flow.last));
            }
            flow.last = Some(number);
            flow.received += 1;
        }
        Ok(most)
    }

    /// What queues ask their nodes, as the thread of the service does it.
    fn ask(&mut self, host: usize) {
        let Host { network, asked, dials, .. } = &mut self.hosts[host];
        while let Some((from, to)) = asked.try_next() {
            let other = HOSTS[1 - host];
            // Where the service would connect on a thread of its own, the seed says when that has come to something.
            let mut state = network.0.lock();
            *dials |= !state.peers.contains_key(other);
            state.peers.entry(other.to_owned()).or_default();
            drop(state);
            network.0.open(from, to);
        }
    }

    /// A host that connects to the other one does, or does not.
    fn dial(&mut self, host: usize, succeeds: bool) {
        if !std::mem::take(&mut self.hosts[host].dials) {
            return;
        }
        self.trace(|| format!("{} connects: {succeeds}", HOSTS[host]));
        let shared = self.hosts[host].network.0.clone();
        if !succeeds {
            return shared.peer_lost(&mut shared.lock(), HOSTS[1 - host]);
        }
        let pipe = |random: &mut Random| {
            let room = [3000, 100_000, ROOMY][random.below(3)];
            let delay = [0, MS / 10, 30 * MS][random.below(3)];
            let pieces = VecDeque::new();
            Arc::new(Mutex::new(Pipe {
                pieces,
                held: 0,
                room,
                delay,
                broken: false,
                silent: false,
            }))
        };
        let (there, back) = (pipe(&mut self.random), pipe(&mut self.random));
        let side = |to: &Arc<Mutex<Pipe>>, from: &Arc<Mutex<Pipe>>| PipeEnd {
            to: to.clone(),
            from: from.clone(),
            clock: self.clock.clone(),
            socket: self.prepared.socket.clone(),
        };
        let now = self.instant();
        let (near, far) = (side(&there, &back), side(&back, &there));
        let outbox = Arc::new(MessageQueue::new().unwrap());
        shared.begin_with_machine(HOSTS[1 - host], &outbox);
        let end = SendingEnd::new(&shared, HOSTS[1 - host], Box::new(near.clone()), outbox, now);
        self.hosts[host].sending = Some(Run { end, side: near, asleep: None });
        let other = &mut self.hosts[1 - host];
        let outbox = Arc::new(MessageQueue::new().unwrap());
        let from = HOSTS[host].to_owned();
        let asker = Arc::new(AskingNode::on_another_machine(from, outbox.clone()));
        other.network.0.meet(&asker);
        let carrier = Box::new(far.clone());
        let end = ReceivingEnd::new(&other.network.0, asker.clone(), carrier, outbox, now);
        other.receiving.push(Run { end: (end, asker), side: far, asleep: None });
    }

    /// The thread of a host's sending end has the processor; whether it did something.
    fn run_sending(&mut self, host: usize) -> Result<bool, String> {
        let now = self.instant();
        let Some(run) = &mut self.hosts[host].sending else { return Ok(false) };
        let fds = run.end.waits_for();
        if !woken(
            run.asleep,
            self.clock.load(Ordering::Relaxed),
            &run.side,
            run.end.wire.held,
            &fds,
        ) {
            return Ok(false);
        }
        if run.asleep.take().is_some() {
            run.end.disarm();
        }
        let turn = run.end.turn(now);
        if let Ok(false) = turn {
            match run.end.arm() {
                true => run.asleep = Some(self.clock.load(Ordering::Relaxed)),
                false => run.end.disarm(),
            }
        }
        run.end.check_bounds()?;
        match turn {
            Ok(some) => Ok(some),
            Err(Over::Violation) => Err(format!("{} finds a violation", HOSTS[host])),
            Err(over) => {
                self.trace(|| format!("{} sends no more: {over}", HOSTS[host]));
                let run = self.hosts[host].sending.take().unwrap();
                let shared = self.hosts[host].network.0.clone();
                shared.peer_lost(&mut shared.lock(), HOSTS[1 - host]);
                run.end.give_up();
                Ok(true)
            }
        }
    }

    /// The same for one of its receiving ends.
    fn run_receiving(&mut self, host: usize, nth: usize) -> Result<bool, String> {
        let now = self.instant();
        let Some(run) = self.hosts[host].receiving.get_mut(nth) else { return Ok(false) };
        let (end, _) = &mut run.end;
        let fds = end.waits_for();
        if !woken(run.asleep, self.clock.load(Ordering::Relaxed), &run.side, end.wire.held, &fds) {
            return Ok(false);
        }
        if run.asleep.take().is_some() {
            end.disarm();
        }
        let turn = match end.turn(now) {
            Ok(false) => end.arm().map(|quiet| {
                match quiet {
                    true => run.asleep = Some(self.clock.load(Ordering::Relaxed)),
                    false => end.disarm(),
                }
                false
            }),
            turn => turn,
        };
        end.check_bounds()?;
        match turn {
            Ok(some) => Ok(some),
            Err(Over::Violation) => Err(format!("{} finds a violation", HOSTS[host])),
            Err(over) => {
                self.trace(|| format!("{} receives no more: {over}", HOSTS[host]));
                let Run { end: (end, asker), .. } = self.hosts[host].receiving.remove(nth);
                drop(end);
                self.hosts[host].network.0.asker_lost(&asker);
                Ok(true)
            }
        }
    }

    /// Something happens to the connection by which a host sends.
    fn disturb(&mut self, host: usize) {
        let Some(run) = &self.hosts[host].sending else { return };
        let (mut to, mut from) = (run.side.to.lock().unwrap(), run.side.from.lock().unwrap());
        let what = self.random.below(4);
        match what {
            0 => {
                for pipe in [&mut to, &mut from] {
                    let left = self.random.below(pipe.pieces.len() + 1);
                    pipe.pieces.truncate(left);
                    if let Some((_, last)) = pipe.pieces.back_mut() {
                        last.truncate(1 + self.random.below(last.len()));
                    }
                    pipe.held = pipe.pieces.iter().map(|(_, piece)| piece.len()).sum();
                    pipe.broken = true;
                }
            }
            1 => {
                for pipe in [&mut to, &mut from] {
                    pipe.silent = true;
                    pipe.pieces.clear();
                }
            }
            2 => to.delay = [0, MS, 200 * MS][self.random.below(3)],
            _ => from.delay = [0, MS, 200 * MS][self.random.below(3)],
        }
        drop((to, from));
        self.trace(|| format!("the way from {}: {what}", HOSTS[host]));
    }

    /// A function's port is closed and opened again.
    fn close(&mut self, host: usize, nth: usize) {
        self.trace(|| format!("{} begins anew", function(host, nth)));
        self.hosts[host].ports[nth] = None;
        self.open_port(host, nth);
        for (id, flow) in &mut self.flows {
            flow.cut |= (id.0, id.1) == (host, nth) || (1 - id.0, id.2) == (host, nth);
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let host = self.random.below(2);
        let (one, other) = (self.random.below(FUNCTIONS), self.random.below(FUNCTIONS));
        match self.random.below(100) {
            0..30 => {
                let longest = if self.random.chance(50) { 9000 } else { 100 };
                let count = 1 + self.random.below(60);
                self.send((host, one, other), count, longest);
            }
            30..60 => drop(self.run_sending(host)?),
            60..75 => {
                let nth = self.random.below(self.hosts[host].receiving.len());
                self.run_receiving(host, nth)?;
            }
            75..84 if !self.hosts[host].stands_still => {
                let most = 1 + self.random.below(100);
                self.take(host, one, most)?;
            }
            84..92 => {
                let at = self.random.below(5);
                self.pass([1000, MS, 5 * MS, 150 * MS, 1100 * MS][at]);
            }
            92 if self.random.chance(50) => self.disturb(host),
            93 if self.random.chance(20) => self.close(host, one),
            94 => self.hosts[host].stands_still = self.random.chance(40),
            95..98 => {
                let succeeds = self.random.chance(80);
                self.dial(host, succeeds);
            }
            _ => {}
        }
        self.ask(host);
        Ok(())
    }
}

impl super::Wire {
    fn check_bounds(&self) -> Result<(), String> {
        let most = 4 * (GATHERED + HEAD + MAX_FRAME);
        match self.out.capacity() <= most {
            true => Ok(()),
            false => Err(format!("{} bytes wait to be sent", self.out.capacity())),
        }
    }
}

impl SendingEnd {
    fn check_bounds(&self) -> Result<(), String> {
        match self.rings.len() <= FUNCTIONS * FUNCTIONS {
            true => self.wire.check_bounds(),
            false => Err(format!("{} rings for {FUNCTIONS} functions", self.rings.len())),
        }
    }
}

impl ReceivingEnd {
    fn check_bounds(&self) -> Result<(), String> {
        let waiting = |ring: &super::receiving::ReceivingRing| -> usize {
            ring.waiting.iter().map(|(_, bytes)| super::cost(bytes.len())).sum()
        };
        if self.rings.values().any(|ring| waiting(ring) > WINDOW) {
            return Err("more waits than a window has".to_owned());
        }
        self.wire.check_bounds()
    }
}

#[test]
fn frames_between_machines_arrive_in_order_or_are_counted() {
    let test = "-p rackbus-node --lib network::carried::simulation";
    Simulation { test, usual: 60 }.run_with(Prepared::new, |prepared, seed, traced| {
        let mut world = World::new(prepared, seed, traced);
        for _ in 0..1000 {
            world.step()?;
        }
        world.finish()
    });
}
