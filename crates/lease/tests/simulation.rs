//! The protocol under seeded random schedules: messages lost, delayed, reordered and duplicated,
//! nodes and control plane dying and returning, while invariants are checked at every step.
//!
//! * I2: no two epochs of a function have live accesses at once.
//! * I4: after a revocation was answered, nothing of its epoch or an older one gets in, and the
//!   function is scrubbed before another epoch's borrower touches it.
//! * When the faults stop, what was asked for is granted and what was crashed is offered again.
//!
//! A failing seed prints the command that replays it with its whole trace.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rackbus_lease::{
    Authority, Borrower, BorrowerAction, Config, Epoch, FunctionId, FunctionState, LeaseId,
    LeaseState, Lender, LenderAction, Message, Millis, Outcome, Record,
};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const DEVICES: [(&str, &[&str]); 3] = [("alpha", &["nvme0"]), ("beta", &["nvme1"]), ("gamma", &[])];
const CONFIG: Config = Config { ttl: 3000, close_grace: 2000, resend: 100, silence: 4000 };
const AUTHORITY: usize = HOSTS.len();

/// splitmix64: a whole schedule from one number.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// What would be memory and registers: who can reach a device right now.
#[derive(Default)]
struct Device {
    sessions: Vec<Epoch>,
    /// The epoch whose traces the function still has.
    dirty: Option<Epoch>,
    /// The newest epoch whose revocation was answered.
    revoked: Epoch,
}

/// One life of a node, or none.
struct Node {
    lender: Lender,
    borrower: Borrower,
    incarnation: u64,
    registered: bool,
    register_at: Millis,
    devices: BTreeMap<String, Device>,
    /// Work the node was told to do and has not finished.
    pending: Vec<Work>,
    /// Grants it has open.
    open: BTreeMap<LeaseId, (FunctionId, Epoch)>,
}

enum Work {
    Arm(String, Epoch),
    Revoke(String, Epoch),
    Open(LeaseId),
    Close(LeaseId),
}

/// A deliberate mistake, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A lender lets in whoever has a grant, without looking at its epoch.
    NoFence,
    /// A lender answers a revocation without cutting its borrower off.
    LazyRevoke,
    /// The authority forgets everything when it restarts.
    Amnesia,
}

struct World {
    random: Random,
    now: Millis,
    authority: Option<Authority>,
    stored: BTreeMap<String, Record>,
    nodes: Vec<Option<Node>>,
    lives: u64,
    network: Vec<(usize, usize, Message)>,
    /// Every lease ever granted, also those whose borrower should have forgotten them.
    known: Vec<(usize, FunctionId, LeaseId, Epoch)>,
    faults: bool,
    mistake: Mistake,
    trace: Option<String>,
}

fn host_index(host: &str) -> usize {
    HOSTS.iter().position(|h| *h == host).expect("a host of the world")
}

impl World {
    fn new(seed: u64, mistake: Mistake, traced: bool) -> World {
        let mut world = World {
            random: Random(seed),
            now: 1,
            authority: Some(Authority::new(CONFIG)),
            stored: BTreeMap::new(),
            nodes: Vec::new(),
            lives: 0,
            network: Vec::new(),
            known: Vec::new(),
            faults: true,
            mistake,
            trace: traced.then(String::new),
        };
        for host in 0..HOSTS.len() {
            world.nodes.push(None);
            world.start_node(host);
        }
        world
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{now:>6}  {}", text());
        }
    }

    fn start_node(&mut self, host: usize) {
        self.lives += 1;
        // Lives are numbered by a clock. Now and then the host's clock went back.
        let clock = self.lives * 1_000_000;
        let incarnation = if self.random.chance(10) { clock / 1000 } else { clock };
        let names = || DEVICES[host].1.iter().map(|d| (*d).to_owned());
        self.note(|| format!("{} starts, life {incarnation}", HOSTS[host]));
        self.nodes[host] = Some(Node {
            lender: Lender::new(incarnation, names()),
            borrower: Borrower::new(incarnation),
            incarnation,
            registered: false,
            register_at: self.now,
            devices: names().map(|d| (d, Device::default())).collect(),
            pending: Vec::new(),
            open: BTreeMap::new(),
        });
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        if self.faults && self.random.chance(10) {
            self.note(|| format!("lost {from}->{to} {message:?}"));
            return;
        }
        if self.faults && self.random.chance(10) {
            self.network.push((from, to, message.clone()));
        }
        self.network.push((from, to, message));
    }

    fn carry_out(&mut self, outcome: Outcome) {
        for record in outcome.records {
            let key = match &record {
                Record::Host(h) => format!("h{}", h.host),
                Record::Function(f) => format!("f{}", f.function),
                Record::Lease(l) => format!("l{}", l.lease),
                Record::Forgotten { lease } => format!("l{lease}"),
            };
            if matches!(record, Record::Forgotten { .. }) {
                self.stored.remove(&key);
                continue;
            }
            self.stored.insert(key, record);
        }
        for (host, message) in outcome.messages {
            self.send(AUTHORITY, host_index(&host), message);
        }
    }

    fn deliver(&mut self, index: usize) {
        let (from, to, message) = self.network.swap_remove(index);
        self.note(|| format!("{from}->{to} {message:?}"));
        if to == AUTHORITY {
            if let Some(mut authority) = self.authority.take() {
                let outcome = authority.receive(self.now, HOSTS[from], message);
                self.authority = Some(authority);
                self.carry_out(outcome);
            }
            return;
        }
        let Some(mut node) = self.nodes[to].take() else {
            return;
        };
        match message {
            Message::Registered { incarnation } => {
                node.registered |= incarnation == node.incarnation;
            }
            Message::Outlived { incarnation, latest } if incarnation == node.incarnation => {
                node.incarnation = latest + 1;
                node.lender.set_incarnation(node.incarnation);
                node.borrower.set_incarnation(node.incarnation);
                node.register_at = self.now;
            }
            Message::Arm { .. } | Message::Revoke { .. } => {
                let actions = node.lender.receive(message);
                self.lender_actions(to, &mut node, actions);
            }
            other => {
                let actions = node.borrower.receive(self.now, other);
                self.borrower_actions(to, &mut node, actions);
            }
        }
        self.nodes[to] = Some(node);
    }

    fn lender_actions(&mut self, host: usize, node: &mut Node, actions: Vec<LenderAction>) {
        for action in actions {
            match action {
                LenderAction::Send(message) => self.send(host, AUTHORITY, message),
                LenderAction::Arm { device, epoch, .. } => {
                    node.pending.push(Work::Arm(device, epoch));
                }
                LenderAction::Revoke { device, epoch } => {
                    node.pending.push(Work::Revoke(device, epoch));
                }
            }
        }
    }

    fn borrower_actions(&mut self, host: usize, node: &mut Node, actions: Vec<BorrowerAction>) {
        for action in actions {
            match action {
                BorrowerAction::Send(message) => self.send(host, AUTHORITY, message),
                BorrowerAction::Open(grant) => {
                    self.known.push((host, grant.function.clone(), grant.lease, grant.epoch));
                    node.open.insert(grant.lease, (grant.function, grant.epoch));
                    node.pending.push(Work::Open(grant.lease));
                }
                BorrowerAction::Close { lease, .. } => {
                    // Whatever was still to be opened is closed instead.
                    node.pending.retain(|w| !matches!(w, Work::Open(l) if *l == lease));
                    node.pending.push(Work::Close(lease));
                }
            }
        }
    }

    fn finish_work(&mut self, host: usize) {
        let Some(mut node) = self.nodes[host].take() else {
            return;
        };
        if !node.pending.is_empty() {
            let index = self.random.below(node.pending.len());
            match node.pending.remove(index) {
                Work::Arm(device, epoch) => {
                    let failed = self.faults && self.random.chance(5);
                    let outcome = if failed { Err("broken".to_owned()) } else { Ok(()) };
                    let actions = node.lender.arm_done(&device, epoch, outcome);
                    self.lender_actions(host, &mut node, actions);
                }
                Work::Revoke(name, epoch) => {
                    let device = node.devices.get_mut(&name).expect("its own device");
                    if self.mistake != Mistake::LazyRevoke {
                        device.sessions.retain(|e| *e > epoch);
                        device.dirty = None;
                    }
                    device.revoked = device.revoked.max(epoch);
                    let actions = node.lender.revoke_done(&name, epoch);
                    self.lender_actions(host, &mut node, actions);
                }
                Work::Open(lease) => {
                    let failed = self.faults && self.random.chance(3);
                    let outcome = if failed { Err("no socket".into()) } else { Ok("sock".into()) };
                    let actions = node.borrower.open_done(lease, outcome);
                    self.borrower_actions(host, &mut node, actions);
                }
                Work::Close(lease) => {
                    if let Some((function, epoch)) = node.open.remove(&lease) {
                        self.detach(&mut node, host, &function, epoch);
                    }
                    let actions = node.borrower.close_done(lease);
                    self.borrower_actions(host, &mut node, actions);
                }
            }
        }
        self.nodes[host] = Some(node);
    }

    /// The borrower lets go: the lender sees the conversation end, and scrubs.
    fn detach(&mut self, own: &mut Node, host: usize, function: &FunctionId, epoch: Epoch) {
        let lender = host_index(&function.host);
        let node = if lender == host { Some(own) } else { self.nodes[lender].as_mut() };
        let device = node.and_then(|n| n.devices.get_mut(&function.device));
        if let Some(device) = device.filter(|d| d.sessions.contains(&epoch)) {
            device.sessions.retain(|e| *e != epoch);
            device.dirty = None;
        }
    }

    /// Somebody tries to use a function under any epoch it ever heard of.
    fn attach(&mut self) -> Result<(), String> {
        if self.known.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.known.len());
        let (_, function, lease, epoch) = self.known[index].clone();
        let Some(node) = &mut self.nodes[host_index(&function.host)] else {
            return Ok(());
        };
        let fenced = self.mistake != Mistake::NoFence;
        if fenced && !node.lender.admits(&function.device, epoch) {
            return Ok(());
        }
        let device = node.devices.get_mut(&function.device).expect("its own device");
        if epoch <= device.revoked {
            return Err(format!("I4: {function} let in epoch {epoch} after revoking it"));
        }
        if let Some(other) = device.sessions.iter().find(|e| **e != epoch) {
            return Err(format!("I2: {function} has epochs {other} and {epoch} at once"));
        }
        if let Some(other) = device.dirty.filter(|e| *e != epoch) {
            return Err(format!("I4: {function} still has traces of epoch {other}, now {epoch}"));
        }
        device.sessions.push(epoch);
        device.dirty = Some(epoch);
        self.note(|| format!("lease {lease} uses {function} under epoch {epoch}"));
        Ok(())
    }

    fn user(&mut self) {
        let Some(mut authority) = self.authority.take() else {
            return;
        };
        let live: Vec<LeaseId> =
            authority.leases().filter(|l| l.is_live()).map(|l| l.lease).collect();
        let outcome = if !live.is_empty() && self.random.chance(50) {
            let lease = live[self.random.below(live.len())];
            self.note(|| format!("return {lease}"));
            authority.give_back(self.now, lease).ok()
        } else {
            let function = if self.random.chance(50) { "alpha/nvme0" } else { "beta/nvme1" };
            let borrower = HOSTS[self.random.below(HOSTS.len())];
            let answer = authority.borrow(self.now, &function.parse().expect("a name"), borrower);
            self.note(|| format!("{borrower} borrows {function}: {answer:?}"));
            answer.ok().map(|(_, outcome)| outcome)
        };
        self.authority = Some(authority);
        outcome.into_iter().for_each(|outcome| self.carry_out(outcome));
    }

    fn tick(&mut self) {
        if let Some(mut authority) = self.authority.take() {
            let outcome = authority.tick(self.now);
            self.authority = Some(authority);
            self.carry_out(outcome);
        }
        for host in 0..HOSTS.len() {
            let Some(mut node) = self.nodes[host].take() else {
                continue;
            };
            if node.register_at <= self.now {
                let wait = if node.registered { CONFIG.ttl / 3 } else { CONFIG.resend };
                node.register_at = self.now + wait;
                let devices = DEVICES[host].1.iter().map(|d| (*d).to_owned()).collect();
                let (incarnation, address) = (node.incarnation, HOSTS[host].to_owned());
                self.send(host, AUTHORITY, Message::Register { incarnation, devices, address });
            }
            let actions = node.borrower.tick(self.now);
            self.borrower_actions(host, &mut node, actions);
            self.nodes[host] = Some(node);
        }
    }

    /// A borrower notices that the lender it uses has died (or believes so).
    fn notice_loss(&mut self) {
        let host = self.random.below(HOSTS.len());
        let Some(mut node) = self.nodes[host].take() else {
            return;
        };
        if let Some(lease) = node.open.keys().next().copied() {
            let actions = node.borrower.lender_lost(lease, "link closed".into());
            self.borrower_actions(host, &mut node, actions);
        }
        self.nodes[host] = Some(node);
    }

    fn crash_or_return(&mut self) {
        let who = self.random.below(HOSTS.len() + 1);
        if who == AUTHORITY {
            if self.authority.take().is_none() {
                self.restore_authority();
            } else {
                self.note(|| "authority dies".into());
            }
        } else if let Some(node) = self.nodes[who].take() {
            self.note(|| format!("{} dies", HOSTS[who]));
            // The lenders of what it used see its connections close, and scrub.
            let mut node = node;
            for (function, epoch) in std::mem::take(&mut node.open).into_values() {
                self.detach(&mut node, who, &function, epoch);
            }
        } else {
            self.start_node(who);
        }
    }

    fn restore_authority(&mut self) {
        self.note(|| "authority returns".into());
        if self.mistake == Mistake::Amnesia {
            self.stored.clear();
        }
        let records = self.stored.values().cloned();
        self.authority = Some(Authority::restore(CONFIG, self.now, records));
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(100) {
            0..40 if !self.network.is_empty() => {
                let index = self.random.below(self.network.len());
                self.deliver(index);
            }
            0..58 => {
                self.now += self.random.next() % 120;
                self.tick();
            }
            58..72 => {
                let host = self.random.below(HOSTS.len());
                self.finish_work(host);
            }
            72..84 => self.attach()?,
            84..94 => self.user(),
            94..96 => self.notice_loss(),
            96..98 => self.now += self.random.next() % 2000,
            _ => self.crash_or_return(),
        }
        Ok(())
    }

    /// No more faults: everybody is up, every message arrives.
    fn settle(&mut self, until: impl Fn(&World) -> bool) -> Result<(), String> {
        for _ in 0..400 {
            while !self.network.is_empty() {
                self.deliver(0);
            }
            for host in 0..HOSTS.len() {
                self.finish_work(host);
            }
            self.attach()?;
            if self.network.is_empty() && until(self) {
                return Ok(());
            }
            self.now += 50;
            self.tick();
        }
        Err("after the faults stopped, it did not settle".to_owned())
    }

    fn recover(&mut self) -> Result<(), String> {
        self.faults = false;
        if self.authority.is_none() {
            self.restore_authority();
        }
        for host in 0..HOSTS.len() {
            if self.nodes[host].is_none() {
                self.start_node(host);
            }
        }
        self.settle(|w| w.nodes.iter().flatten().all(|n| n.registered && n.pending.is_empty()))?;
        // Whoever has something gives it back; then everything is to be had again.
        let authority = self.authority.as_mut().expect("it was restored");
        let live: Vec<LeaseId> =
            authority.leases().filter(|l| l.is_live()).map(|l| l.lease).collect();
        for lease in live {
            let authority = self.authority.as_mut().expect("it was restored");
            if let Ok(outcome) = authority.give_back(self.now, lease) {
                self.carry_out(outcome);
            }
        }
        self.settle(|w| {
            let offered = |f: &rackbus_lease::FunctionRecord| f.state == FunctionState::Offered;
            w.authority
                .as_ref()
                .is_some_and(|a| a.functions().count() == 2 && a.functions().all(offered))
        })?;
        // All nodes are heard from again, perhaps as lives that were not known before: the first
        // lease may still fall to that, the next must not.
        self.now += CONFIG.ttl;
        self.tick();
        self.settle(|_| true)?;
        match self.borrow_anew()? {
            true => Ok(()),
            false if self.borrow_anew()? => Ok(()),
            false => Err("two leases in a row ended without a fault".to_owned()),
        }
    }

    /// Whether a lease, asked for now, becomes active.
    fn borrow_anew(&mut self) -> Result<bool, String> {
        let function: FunctionId = "alpha/nvme0".parse().expect("a name");
        let authority = self.authority.as_mut().expect("it was restored");
        let granted = authority.borrow(self.now, &function, "gamma");
        let (lease, outcome) = granted.map_err(|refused| format!("refused: {refused}"))?;
        self.carry_out(outcome);
        let state =
            |w: &World| w.authority.as_ref().and_then(|a| a.lease(lease)).map(|l| l.state.clone());
        self.settle(|w| {
            let authority = w.authority.as_ref().expect("it was restored");
            match state(w) {
                Some(LeaseState::Active { .. }) => true,
                Some(LeaseState::Ended { .. }) => {
                    authority.function(&function).is_some_and(|f| f.state == FunctionState::Offered)
                }
                _ => false,
            }
        })?;
        Ok(matches!(state(self), Some(LeaseState::Active { .. })))
    }
}

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), (String, String)> {
    let mut world = World::new(seed, mistake, traced);
    let steps = 100 + world.random.below(500);
    let outcome = (0..steps).try_for_each(|_| world.step()).and_then(|()| world.recover());
    outcome.map_err(|error| (error, world.trace.unwrap_or_default()))
}

fn replay(seed: u64) -> String {
    format!(
        "RACKBUS_LEASE_SEED={seed} cargo test -p rackbus-lease --test simulation -- --nocapture"
    )
}

#[test]
fn invariants_hold_under_random_schedules() {
    if let Ok(seed) = std::env::var("RACKBUS_LEASE_SEED") {
        let seed = seed.parse().expect("RACKBUS_LEASE_SEED is a number");
        if let Err((error, trace)) = run(seed, Mistake::None, true) {
            panic!("{trace}\nseed {seed}: {error}");
        }
        return;
    }
    const SEEDS: u64 = 100_000;
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (thread..SEEDS).step_by(threads as usize) {
                    if let Err((error, _)) = run(seed, Mistake::None, false) {
                        panic!("seed {seed}: {error}\nreplay it with: {}", replay(seed));
                    }
                }
            });
        }
    });
}

/// A simulation that finds no planted mistake would prove nothing.
#[test]
fn planted_mistakes_are_found() {
    for mistake in [Mistake::NoFence, Mistake::LazyRevoke, Mistake::Amnesia] {
        let found = (0..5000).find(|seed| run(*seed, mistake, false).is_err());
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found by seed {found:?}");
    }
}
