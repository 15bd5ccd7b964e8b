//! The protocol under seeded random schedules: messages lost, delayed, reordered and duplicated,
//! nodes and control plane dying, returning and freezing, clocks read out of order, a store that
//! fails, is lost or replaced by an older copy, while invariants are checked at every step.
//!
//! * I2: no two epochs of a function have live accesses at once.
//! * I4: after a revocation was answered, nothing of its epoch or an older one gets in, and the
//!   function is scrubbed before another epoch's borrower touches it.
//! * A lease expires after a whole time to live in which the control plane was awake and heard
//!   nothing, and then it does.
//! * A lease that becomes active is one that its lender lets in.
//! * When the faults stop, what was asked for is granted and what was crashed is offered again.
//!
//! A failing seed prints the command that replays it with its whole trace.

mod patience;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use patience::Patience;

use rackbus_lease::{
    Authority, Borrower, BorrowerAction, Config, EndReason, Epoch, FunctionId, FunctionState,
    Holder, LeaseId, LeaseRecord, LeaseState, Lender, LenderAction, Message, Millis, Outcome,
    Record,
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
    /// A node does not say which epochs and leases it was told of.
    Silence,
    /// An authority that was frozen takes the time for time in which nobody renewed.
    Sleepwalker,
    /// An authority whose store fails starts again from what is stored.
    FreshStart,
}

struct World {
    random: Random,
    now: Millis,
    authority: Option<Authority>,
    /// Until when it does nothing, though it lives.
    frozen_until: Millis,
    stored: BTreeMap<String, Record>,
    /// A copy of what was stored once.
    backup: BTreeMap<String, Record>,
    /// Nothing can be stored before then.
    store_fails_until: Millis,
    patience: Patience,
    nodes: Vec<Option<Node>>,
    /// Until when each node does nothing, though it lives.
    slow_until: Vec<Millis>,
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
            frozen_until: 0,
            stored: BTreeMap::new(),
            backup: BTreeMap::new(),
            store_fails_until: 0,
            patience: Patience::new(CONFIG, 1),
            slow_until: vec![0; HOSTS.len()],
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

    /// One step of the authority: decide, store, send; as the control plane does it.
    fn decide<R>(
        &mut self,
        decide: impl FnOnce(&mut Authority, Millis) -> (R, Outcome),
    ) -> Result<Option<R>, String> {
        if self.frozen_until > self.now {
            return Ok(None);
        }
        let Some(mut authority) = self.authority.take() else {
            return Ok(None);
        };
        // Now and then the clock was read before somebody else's step.
        let late = if self.faults && self.random.chance(5) { self.random.next() % 200 } else { 0 };
        if self.mistake == Mistake::Sleepwalker {
            self.sleepwalk(&mut authority)?;
        }
        let now = self.now.saturating_sub(late);
        let (answer, outcome) = decide(&mut authority, now);
        self.patience.pass(now);
        let answer = self.store_and_send(&mut authority, outcome)?.then_some(answer);
        // What is to be expired is, unless that cannot be stored.
        self.authority.get_or_insert(authority);
        Ok(answer)
    }

    /// Has the authority believe that it was awake all the time, as it did when it did not ask.
    fn sleepwalk(&mut self, authority: &mut Authority) -> Result<(), String> {
        while let Some(at) = authority.next_tick().filter(|at| *at < self.now) {
            let outcome = authority.tick(at);
            if !self.store_and_send(authority, outcome)? {
                break;
            }
        }
        Ok(())
    }

    fn store_and_send(
        &mut self,
        authority: &mut Authority,
        outcome: Outcome,
    ) -> Result<bool, String> {
        if !outcome.records.is_empty() && self.store_fails_until > self.now {
            self.note(|| "the store fails".into());
            match self.mistake {
                Mistake::FreshStart => {
                    let records = self.stored.values().cloned();
                    *authority = Authority::restore(CONFIG, self.now, records);
                }
                _ => authority.take_back(),
            }
            return Ok(false);
        }
        for record in outcome.records {
            if let Record::Lease(lease) = &record {
                self.check_lease(lease)?;
            }
            match &record {
                Record::Forgotten { .. } => self.stored.remove(&record.key()),
                _ => self.stored.insert(record.key(), record),
            };
        }
        for (host, message) in outcome.messages {
            self.send(AUTHORITY, host_index(&host), message);
        }
        Ok(true)
    }

    /// A lease's new state, about to be stored.
    fn check_lease(&mut self, lease: &LeaseRecord) -> Result<(), String> {
        let number = lease.lease;
        match &lease.state {
            LeaseState::Arming => self.patience.begin(number),
            LeaseState::Active { .. } => {
                self.patience.begin(number);
                let before = self.stored.get(&Record::Lease(lease.clone()).key());
                if !matches!(before, Some(Record::Lease(l)) if l.state == LeaseState::Opening) {
                    return Ok(());
                }
                let function = &lease.function;
                let Some(Record::Host(life)) = self.stored.get(&format!("host/{}", function.host))
                else {
                    return Err(format!("{function} is lent by nobody"));
                };
                let node = self.nodes[host_index(&function.host)].as_ref();
                let Some(node) = node.filter(|n| n.incarnation == life.incarnation) else {
                    return Ok(());
                };
                let (epoch, borrower) = (lease.epoch, lease.borrower.clone());
                let wanted = Holder { lease: number, epoch, borrower };
                let admitted = node.lender.admitted(&function.device);
                if admitted != Some(&wanted) {
                    return Err(format!("active, but not let in: {wanted:?}, but {admitted:?}"));
                }
            }
            LeaseState::Ended { reason: EndReason::Expired } => self.patience.expired(number)?,
            LeaseState::Closing { .. } | LeaseState::Ended { .. } => self.patience.end(number),
            LeaseState::Opening => {}
        }
        Ok(())
    }

    fn deliver(&mut self, index: usize) -> Result<(), String> {
        let (from, to, message) = self.network.swap_remove(index);
        let frozen = match to {
            AUTHORITY => self.frozen_until,
            host => self.slow_until[host],
        };
        if frozen > self.now {
            // It waits in a queue; one that is full is cut off, and all that is in it lost.
            self.network.push((from, to, message));
            if self.network.iter().filter(|(_, t, _)| *t == to).count() > 30 {
                self.network.retain(|(_, t, _)| *t != to);
            }
            return Ok(());
        }
        self.note(|| format!("{from}->{to} {message:?}"));
        if to == AUTHORITY {
            let renewed = match &message {
                Message::Renew { lease, .. } => Some(*lease),
                _ => None,
            };
            let receive = |a: &mut Authority, now| ((), a.receive(now, HOSTS[from], message));
            if self.decide(receive)?.is_some()
                && let Some(authority) = &self.authority
                && let Some(lease) = renewed.and_then(|lease| authority.lease(lease))
                && lease.borrower == HOSTS[from]
                && matches!(
                    lease.state,
                    LeaseState::Arming | LeaseState::Opening | LeaseState::Active { .. }
                )
            {
                self.patience.begin(lease.lease);
            }
            return Ok(());
        }
        let Some(mut node) = self.nodes[to].take() else {
            return Ok(());
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
        Ok(())
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
        if self.slow_until[host] > self.now {
            return;
        }
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
        let admitted = node.lender.admitted(&function.device);
        if fenced && admitted.is_none_or(|holder| (holder.lease, holder.epoch) != (lease, epoch)) {
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

    fn user(&mut self) -> Result<(), String> {
        let live = self.live();
        if !live.is_empty() && self.random.chance(50) {
            let lease = live[self.random.below(live.len())];
            self.note(|| format!("return {lease}"));
            return self.give_back(lease);
        }
        let function = if self.random.chance(50) { "alpha/nvme0" } else { "beta/nvme1" };
        let borrower = HOSTS[self.random.below(HOSTS.len())];
        let answer = self.borrow(&function.parse().expect("a name"), borrower)?;
        self.note(|| format!("{borrower} borrows {function}: {answer:?}"));
        Ok(())
    }

    fn live(&self) -> Vec<LeaseId> {
        let leases = self.authority.iter().flat_map(Authority::leases);
        leases.filter(|l| l.is_live()).map(|l| l.lease).collect()
    }

    fn give_back(&mut self, lease: LeaseId) -> Result<(), String> {
        let give_back = |a: &mut Authority, now| ((), a.give_back(now, lease).unwrap_or_default());
        self.decide(give_back).map(drop)
    }

    /// Borrows; `None` when that was not decided, or is not stored.
    fn borrow(
        &mut self,
        function: &FunctionId,
        borrower: &str,
    ) -> Result<Option<Result<LeaseId, String>>, String> {
        self.decide(|a, now| match a.borrow(now, function, borrower) {
            Ok((lease, outcome)) => (Ok(lease), outcome),
            Err(refused) => (Err(refused.to_string()), Outcome::default()),
        })
    }

    fn tick(&mut self) -> Result<(), String> {
        // Ticks come late when something else keeps the control plane busy.
        let late = self.faults && self.random.chance(10);
        if !late
            && self.decide(|a, now| ((), a.tick(now)))?.is_some()
            && let Some(authority) = &self.authority
        {
            let waited = authority.leases().filter(|l| {
                !matches!(l.state, LeaseState::Closing { .. } | LeaseState::Ended { .. })
            });
            waited.map(|l| l.lease).try_for_each(|lease| self.patience.still_live(lease))?;
        }
        for (host, name) in HOSTS.iter().enumerate() {
            if self.slow_until[host] > self.now {
                continue;
            }
            let Some(mut node) = self.nodes[host].take() else {
                continue;
            };
            if node.register_at <= self.now {
                let wait = if node.registered { CONFIG.ttl / 3 } else { CONFIG.resend };
                node.register_at = self.now + wait;
                let mut devices = node.lender.newest_epochs();
                let (lender, borrower) = (&node.lender, &node.borrower);
                let mut newest_lease = lender.newest_lease().max(borrower.newest_lease());
                if self.mistake == Mistake::Silence {
                    devices.values_mut().for_each(|epoch| *epoch = 0);
                    newest_lease = 0;
                }
                let (incarnation, address) = (node.incarnation, (*name).to_owned());
                let register = Message::Register { incarnation, devices, newest_lease, address };
                self.send(host, AUTHORITY, register);
            }
            let actions = node.borrower.tick(self.now);
            self.borrower_actions(host, &mut node, actions);
            self.nodes[host] = Some(node);
        }
        Ok(())
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
        self.frozen_until = 0;
        let records = self.stored.values().cloned();
        let authority = Authority::restore(CONFIG, self.now, records);
        self.patience = Patience::new(CONFIG, self.now);
        authority.leases().filter(|l| l.is_live()).for_each(|l| self.patience.begin(l.lease));
        self.authority = Some(authority);
        // Nodes that find a control plane say who they are.
        for node in self.nodes.iter_mut().flatten() {
            node.registered = false;
            node.register_at = self.now;
        }
    }

    /// The control plane ends, and its successor finds nothing, or an older copy. That takes longer
    /// than a message lives: they end with their connections.
    fn lose_database(&mut self) {
        let lost = self.random.chance(50);
        self.note(|| format!("the database is {}", if lost { "lost" } else { "replaced" }));
        self.stored = if lost { BTreeMap::new() } else { self.backup.clone() };
        self.network.clear();
        self.restore_authority();
    }

    fn freeze(&mut self) {
        let until = self.now + self.random.next() % (4 * CONFIG.ttl);
        match self.random.below(HOSTS.len() + 1) {
            AUTHORITY => {
                self.note(|| format!("authority is frozen until {until}"));
                self.frozen_until = until;
            }
            host => {
                self.note(|| format!("{} is frozen until {until}", HOSTS[host]));
                self.slow_until[host] = until;
            }
        }
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(1000) {
            0..400 if !self.network.is_empty() => {
                let index = self.random.below(self.network.len());
                self.deliver(index)?;
            }
            0..570 => {
                self.now += self.random.next() % 120;
                self.tick()?;
            }
            570..710 => {
                let host = self.random.below(HOSTS.len());
                self.finish_work(host);
            }
            710..830 => self.attach()?,
            830..930 => self.user()?,
            930..950 => self.notice_loss(),
            950..965 => self.now += self.random.next() % 2000,
            965..972 => self.freeze(),
            972..976 => self.store_fails_until = self.now + self.random.next() % (3 * CONFIG.ttl),
            976..979 => self.backup = self.stored.clone(),
            979..981 => self.lose_database(),
            _ => self.crash_or_return(),
        }
        Ok(())
    }

    /// No more faults: everybody is up, every message arrives.
    fn settle(&mut self, until: impl Fn(&World) -> bool) -> Result<(), String> {
        for _ in 0..400 {
            while !self.network.is_empty() {
                self.deliver(0)?;
            }
            for host in 0..HOSTS.len() {
                self.finish_work(host);
            }
            self.attach()?;
            if self.network.is_empty() && until(self) {
                return Ok(());
            }
            self.now += 50;
            self.tick()?;
        }
        Err("after the faults stopped, it did not settle".to_owned())
    }

    fn recover(&mut self) -> Result<(), String> {
        self.faults = false;
        self.store_fails_until = 0;
        self.frozen_until = 0;
        self.slow_until.fill(0);
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
        for lease in self.live() {
            self.give_back(lease)?;
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
        self.tick()?;
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
        let granted = self.borrow(&function, "gamma")?.ok_or("nothing was decided")?;
        let lease = granted.map_err(|refused| format!("refused: {refused}"))?;
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
    for mistake in [
        Mistake::NoFence,
        Mistake::LazyRevoke,
        Mistake::Silence,
        Mistake::Sleepwalker,
        Mistake::FreshStart,
    ] {
        let found = (0..5000).find(|seed| run(*seed, mistake, false).is_err());
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found by seed {found:?}");
    }
}
