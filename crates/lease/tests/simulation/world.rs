//! The world: nodes, what is between them and the control plane, and what happens to them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use rackbus_lease::{
    Authority, Borrower, BorrowerAction, Config, Epoch, FunctionId, LeaseId, LeaseState, Lender,
    LenderAction, Message, Millis, Placement, Record,
};
use rackbus_seeds::Random;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::clocks::Clocks;
use crate::fronts::{Front, Stage};
use crate::patience::Patience;
use crate::work::Work;
use crate::{AUTHORITY, CONFIG, DEVICES, HOSTS, Mistake};

/// What would be memory and registers: who can reach a device right now.
#[derive(Default)]
pub struct Device {
    pub sessions: Vec<Epoch>,
    /// The epoch whose traces the function still has.
    pub dirty: Option<Epoch>,
    /// The newest epoch whose revocation was answered.
    pub revoked: Epoch,
    /// The service level that its borrower has.
    pub level: Option<String>,
}

/// One life of a node, or none.
pub struct Node {
    pub lender: Lender,
    pub borrower: Borrower,
    pub incarnation: u64,
    pub registered: bool,
    pub register_at: Millis,
    pub devices: BTreeMap<String, Device>,
    /// Work the node was told to do and has not finished.
    pub pending: Vec<Work>,
    /// Grants it has open.
    pub open: BTreeMap<LeaseId, (FunctionId, Epoch)>,
    /// What runs here of functions whose fronts are at their borrower.
    pub fronts: Vec<Front>,
    /// Leases that were answered as closed.
    pub closed: BTreeSet<LeaseId>,
}

pub struct World {
    pub random: Random,
    pub now: Millis,
    /// Whether leases end by the clocks of their nodes, too.
    pub strict: bool,
    pub clocks: Clocks,
    pub authority: Option<Authority>,
    /// Until when it does nothing, though it lives.
    pub frozen_until: Millis,
    pub stored: BTreeMap<String, Record>,
    /// A copy of what was stored once.
    pub backup: BTreeMap<String, Record>,
    /// Nothing can be stored before then.
    pub store_fails_until: Millis,
    pub patience: Patience,
    pub nodes: Vec<Option<Node>>,
    /// Until when each node does nothing, though it lives.
    pub slow_until: Vec<Millis>,
    pub lives: u64,
    pub network: Vec<(usize, usize, Message)>,
    /// Every lease ever granted, also those whose borrower should have forgotten them.
    pub known: Vec<(usize, FunctionId, LeaseId, Epoch)>,
    pub faults: bool,
    pub mistake: Mistake,
    pub trace: Option<String>,
}

/// What another process reads of what one wrote.
fn rewritten<T: Serialize + DeserializeOwned>(value: &T) -> T {
    let text = serde_json::to_vec(value).expect("it can be written");
    serde_json::from_slice(&text).expect("it was written just now")
}

pub fn host_index(host: &str) -> usize {
    HOSTS.iter().position(|h| *h == host).expect("a host of the world")
}

/// Where the front runs of what a host borrows: some want it themselves.
pub fn placement(borrower: &str) -> Placement {
    if borrower == HOSTS[1] { Placement::Borrower } else { Placement::Lender }
}

/// The time limits of an authority.
pub fn config(strict_ttl: bool) -> Config {
    Config { strict_ttl, ..CONFIG }
}

impl World {
    pub fn new(seed: u64, mistake: Mistake, traced: bool) -> World {
        let (mut random, strict) = (Random(seed), seed % 2 == 1);
        let clocks = Clocks::new(&mut random);
        let mut world = World {
            random,
            now: 1,
            strict,
            clocks,
            authority: Some(Authority::new(config(strict))),
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

    pub fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{now:>6}  {}", text());
        }
    }

    pub fn start_node(&mut self, host: usize) {
        self.lives += 1;
        // Lives are numbered by a clock. Now and then the host's clock went back.
        let clock = self.lives * 1_000_000;
        let incarnation = if self.random.chance(10) { clock / 1000 } else { clock };
        let names = || DEVICES[host].1.iter().map(|d| (*d).to_owned());
        self.note(|| format!("{} starts, life {incarnation}", HOSTS[host]));
        self.clocks.begin(host);
        self.nodes[host] = Some(Node {
            lender: Lender::new(incarnation, names()),
            borrower: Borrower::new(incarnation),
            incarnation,
            registered: false,
            register_at: self.now,
            devices: names().map(|d| (d, Device::default())).collect(),
            pending: Vec::new(),
            open: BTreeMap::new(),
            fronts: Vec::new(),
            closed: BTreeSet::new(),
        });
    }

    pub fn send(&mut self, from: usize, to: usize, message: Message) {
        let is_cut = self.clocks.is_cut(from, to, self.now);
        if self.faults && (is_cut || self.random.chance(10)) {
            self.note(|| format!("lost {from}->{to} {message:?}"));
            return;
        }
        if self.faults && self.random.chance(10) {
            self.network.push((from, to, message.clone()));
        }
        self.network.push((from, to, message));
    }

    pub fn deliver(&mut self, index: usize) -> Result<(), String> {
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
            if let Message::Renew { lease, sent: Some(sent), .. } = message
                && self.mistake == Mistake::UnheardRenewal
            {
                self.send(AUTHORITY, from, Message::Renewed { lease, sent });
            }
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
            Message::StaleIncarnation { incarnation, latest }
                if incarnation == node.incarnation =>
            {
                node.incarnation = latest + 1;
                node.lender.set_incarnation(node.incarnation);
                node.borrower.set_incarnation(node.incarnation);
                node.register_at = self.now;
            }
            Message::Arm { .. }
            | Message::Revoke { .. }
            | Message::Extend { .. }
            | Message::SetLevel { .. }
            | Message::Offer { .. }
            | Message::Withdraw { .. } => self.lender_hears(to, &mut node, message),
            other => {
                let other = match other {
                    Message::Renewed { lease, .. } if self.mistake == Mistake::LateRenewal => {
                        Message::Renewed { lease, sent: self.clock(to) }
                    }
                    other => other,
                };
                let actions = node.borrower.receive(self.clock(to), other);
                self.borrower_actions(to, &mut node, actions)?;
            }
        }
        self.nodes[to] = Some(node);
        Ok(())
    }

    pub fn lender_actions(&mut self, host: usize, node: &mut Node, actions: Vec<LenderAction>) {
        for action in actions {
            match action {
                LenderAction::Send(message) => self.send(host, AUTHORITY, message),
                LenderAction::Arm { device, epoch, level, .. } => {
                    node.pending.push(Work::Arm(device, epoch, level));
                }
                LenderAction::SetLevel { device, epoch, number, level, .. } => {
                    node.pending.push(Work::Level { device, epoch, number, level });
                }
                LenderAction::Revoke { device, epoch, .. } => {
                    node.pending.push(Work::Revoke(device, epoch));
                }
                LenderAction::Offer { device, number, .. } => {
                    node.pending.push(Work::Offer(device, number));
                }
                LenderAction::Withdraw { device, number, .. } => {
                    node.pending.push(Work::Withdraw(device, number));
                }
            }
        }
    }

    pub fn borrower_actions(
        &mut self,
        host: usize,
        node: &mut Node,
        actions: Vec<BorrowerAction>,
    ) -> Result<(), String> {
        for action in actions {
            if let BorrowerAction::Send(Message::Closed { lease }) = &action {
                World::check_closed(node, *lease)?;
            }
            match action {
                BorrowerAction::Send(message) => self.send(host, AUTHORITY, message),
                BorrowerAction::Open(grant) => {
                    self.known.push((host, grant.function.clone(), grant.lease, grant.epoch));
                    node.open.insert(grant.lease, (grant.function, grant.epoch));
                    node.pending.push(Work::Open(grant.lease));
                }
                BorrowerAction::Cut { lease, closing, .. } => {
                    if let Some((function, epoch)) = node.open.remove(&lease) {
                        self.detach(node, host, &function, epoch);
                    }
                    node.pending.retain(|w| !matches!(w, Work::Open(l) if *l == lease));
                    node.pending.extend((!closing).then_some(Work::Close(lease)));
                }
                // A node that waits for its user is one whose work is not done.
                BorrowerAction::Close { lease, .. } | BorrowerAction::Yield { lease, .. } => {
                    // Whatever was still to be opened is closed instead.
                    node.pending.retain(|w| !matches!(w, Work::Open(l) if *l == lease));
                    node.pending.push(Work::Close(lease));
                }
                // Here a user releases a function at any time, with a limit or without.
                BorrowerAction::Hasten { .. } => {}
            }
        }
        Ok(())
    }

    pub fn user(&mut self) -> Result<(), String> {
        if self.random.chance(12) {
            return self.change_device();
        }
        if self.random.chance(20) {
            return self.change_shares();
        }
        let live = self.live();
        if !live.is_empty() && self.random.chance(30) {
            let lease = live[self.random.below(live.len())];
            return self.change_level(lease);
        }
        if !live.is_empty() && self.random.chance(50) {
            let lease = live[self.random.below(live.len())];
            self.note(|| format!("return {lease}"));
            return self.give_back(lease);
        }
        let function = match self.random.below(5) {
            0 => "alpha/extra",
            1 | 2 => "alpha/nvme0",
            _ => "beta/nvme1",
        };
        let borrower = HOSTS[self.random.below(HOSTS.len())];
        let answer = self.borrow(&function.parse().expect("a name"), borrower)?;
        self.note(|| format!("{borrower} borrows {function}: {answer:?}"));
        Ok(())
    }

    pub fn tick(&mut self) -> Result<(), String> {
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
        let mut ended = Vec::new();
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
            let actions = node.borrower.tick(self.clock(host));
            self.borrower_actions(host, &mut node, actions)?;
            ended.extend(self.end_by_clock(host, &mut node));
            self.nodes[host] = Some(node);
        }
        self.check_clocks(&ended)
    }

    /// A borrower notices that the lender it uses has died (or believes so).
    pub fn notice_loss(&mut self) -> Result<(), String> {
        let host = self.random.below(HOSTS.len());
        let Some(mut node) = self.nodes[host].take() else {
            return Ok(());
        };
        if let Some(lease) = node.open.keys().next().copied() {
            let actions = node.borrower.lender_lost(lease, "link closed".into());
            self.borrower_actions(host, &mut node, actions)?;
        }
        self.nodes[host] = Some(node);
        Ok(())
    }

    pub fn crash_or_return(&mut self) -> Result<(), String> {
        let who = self.random.below(HOSTS.len() + 1);
        if who == AUTHORITY {
            match self.authority.take() {
                None => self.restore_authority(),
                Some(authority) => {
                    self.note(|| "authority dies".into());
                    self.check_stored(&authority)?;
                }
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
        Ok(())
    }

    /// The process of a node is replaced by another one, which goes on with what was written down. The
    /// function's users do not notice; what was said to the old process and not heard is lost.
    pub fn replace_process(&mut self) -> Result<(), String> {
        let host = self.random.below(HOSTS.len());
        let Some(mut node) = self.nodes[host].take() else { return Ok(()) };
        let under_way = node.lender.under_way().or(node.borrower.under_way());
        let attaching = node.fronts.iter().any(|front| front.stage == Stage::Attached);
        if under_way.is_none() && node.pending.is_empty() && !attaching {
            if self.mistake == Mistake::Amnesia {
                node.lender = Lender::new(node.incarnation, node.devices.keys().cloned());
                node.borrower = Borrower::new(node.incarnation);
            } else {
                node.lender = rewritten(&node.lender);
                node.borrower = rewritten(&node.borrower);
            }
            node.borrower.reconnected();
            (node.registered, node.register_at) = (false, self.now);
            self.network.retain(|(_, to, _)| *to != host);
            self.note(|| format!("the process of {} is replaced", HOSTS[host]));
            self.adopt_fronts(host, &mut node)?;
        }
        self.nodes[host] = Some(node);
        Ok(())
    }

    pub fn freeze(&mut self) {
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

    pub fn step(&mut self) -> Result<(), String> {
        match self.random.below(1003) {
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
                self.finish_work(host)?;
            }
            710..830 => self.attach()?,
            830..930 => self.user()?,
            930..945 => self.notice_loss()?,
            945..950 => self.release_early()?,
            950..965 => self.now += self.random.next() % 2000,
            965..972 => self.freeze(),
            972..976 => self.store_fails_until = self.now + self.random.next() % (3 * CONFIG.ttl),
            976..979 => self.backup = self.stored.clone(),
            979..981 => self.lose_database(),
            981..986 => self.replace_process()?,
            986..1000 => self.crash_or_return()?,
            _ => self.cut_off(),
        }
        Ok(())
    }
}
