//! The authority: who may use what, and the records that survive it.
//!
//! Every change is returned as [`Record`]s to be stored *before* the messages beside them are
//! sent; an authority restored from its records goes on where the old one stopped. It repeats
//! what was not answered, so it does not matter which messages its death swallowed.

mod devices;
mod levels;
mod nodes;
mod records;
mod shares;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

pub use records::{
    BorrowRefused, EndReason, FunctionRecord, FunctionState, HostRecord, LeaseRecord, LeaseState,
    Record, ReturnRefused,
};

use crate::change::LevelChange;
use crate::composition::{Composition, CompositionRefused};
use crate::device::DeviceChange;
use crate::message::{FunctionId, LeaseId, Message, Millis, Terms};
use crate::share::{Share, TurnOf};

/// Time limits, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long a lease lives without being renewed.
    pub ttl: Millis,
    /// How long a borrower may take to let go in order (a guest unplugs the device) before its
    /// lender is told to take the function away.
    pub close_grace: Millis,
    /// How long to wait for an answer before a message is sent again.
    pub resend: Millis,
    /// How long a node may be silent before new leases on it are refused.
    pub silence: Millis,
}

impl Config {
    /// How often time is to be looked at: each time limit is several of these.
    fn beat(&self) -> Millis {
        (self.ttl.min(self.close_grace).min(self.silence) / BEATS).max(1)
    }
}

/// How many times within the shortest time limit the clock is looked at.
const BEATS: Millis = 8;

impl Default for Config {
    fn default() -> Self {
        Config { ttl: 15_000, close_grace: 20_000, resend: 250, silence: 15_000 }
    }
}

/// Leases that end in one step because their time is over.
const AT_ONCE: usize = 200;

/// Leases that are over and still remembered, to tell why they ended.
const REMEMBERED: usize = 1000;

/// What the control plane must do: store the records, then send the messages.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// To be stored first, all or nothing.
    pub records: Vec<Record>,
    /// To be sent then: the host, and what.
    pub messages: Vec<(String, Message)>,
}

/// What is known of a host in this life of the authority only.
#[derive(Debug, Clone, Copy)]
struct Contact {
    /// Whether its node registered: what it has of former decisions is known then.
    registered: bool,
    heard: Millis,
}

/// Something as it was before the last step.
#[derive(Debug)]
enum Undo {
    Host(String, Option<HostRecord>),
    Function(FunctionId, Option<FunctionRecord>),
    Lease(LeaseId, Option<LeaseRecord>),
    Deadline(LeaseId, Option<Millis>),
    NextLease(LeaseId),
    Registered(String),
    Confirmed(LeaseId),
    Composition(String, Option<Composition>),
    Device((String, String), Option<DeviceChange>),
    Share(LeaseId, Option<Box<Share>>),
}

/// Puts a key's value, or none.
fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    }
}

/// The state machine of the control plane.
#[derive(Debug)]
pub struct Authority {
    config: Config,
    hosts: BTreeMap<String, HostRecord>,
    contacts: BTreeMap<String, Contact>,
    functions: BTreeMap<FunctionId, FunctionRecord>,
    leases: BTreeMap<LeaseId, LeaseRecord>,
    /// When each live lease expires; each closing one stops being waited for.
    deadlines: BTreeMap<LeaseId, Millis>,
    compositions: BTreeMap<String, Composition>,
    /// What differs from the rack file, by host and device.
    devices: BTreeMap<(String, String), DeviceChange>,
    /// Who takes turns on functions.
    shares: BTreeMap<LeaseId, Share>,
    next_lease: LeaseId,
    resend_at: Millis,
    /// Leases that were active when the authority started, and of which their lender has not said
    /// since that it still has them armed: the records may be an older copy.
    unconfirmed: BTreeSet<LeaseId>,
    /// When the last step was taken.
    seen: Millis,
    outcome: Outcome,
    /// What the last step changed, as it was before.
    undo: Vec<Undo>,
}

impl Authority {
    /// An authority of an empty rack.
    pub fn new(config: Config) -> Self {
        Authority::restore(config, 0, [])
    }

    /// The authority that stored `records`, going on at `now`. Every live lease gets a whole time
    /// to live: nobody could renew while there was nobody to renew with.
    pub fn restore(config: Config, now: Millis, records: impl IntoIterator<Item = Record>) -> Self {
        let mut authority = Authority {
            config,
            hosts: BTreeMap::new(),
            contacts: BTreeMap::new(),
            functions: BTreeMap::new(),
            leases: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            compositions: BTreeMap::new(),
            devices: BTreeMap::new(),
            shares: BTreeMap::new(),
            next_lease: 1,
            resend_at: now,
            unconfirmed: BTreeSet::new(),
            seen: now,
            outcome: Outcome::default(),
            undo: Vec::new(),
        };
        for record in records {
            match record {
                Record::Host(host) => {
                    let contact = Contact { registered: false, heard: now };
                    authority.contacts.insert(host.host.clone(), contact);
                    authority.hosts.insert(host.host.clone(), host);
                }
                Record::Function(function) => {
                    authority.functions.insert(function.function.clone(), function);
                }
                Record::Lease(mut lease) => {
                    match lease.state {
                        // Asked again: whether the lender has it armed may be otherwise by now.
                        LeaseState::Opening => lease.state = LeaseState::Arming,
                        LeaseState::Active { .. } => {
                            authority.unconfirmed.insert(lease.lease);
                        }
                        _ => {}
                    }
                    authority.next_lease = authority.next_lease.max(lease.lease.saturating_add(1));
                    let time = match lease.state {
                        LeaseState::Closing { .. } => Some(config.close_grace),
                        LeaseState::Ended { .. } => None,
                        _ => Some(config.ttl),
                    };
                    if let Some(time) = time {
                        authority.deadlines.insert(lease.lease, now.saturating_add(time));
                    }
                    authority.leases.insert(lease.lease, lease);
                }
                Record::NextLease { lease } => {
                    authority.next_lease = authority.next_lease.max(lease);
                }
                Record::Forgotten { lease } => {
                    authority.leases.remove(&lease);
                }
                Record::Composition(composition) => {
                    authority.compositions.insert(composition.name.clone(), composition);
                }
                Record::Dissolved { name } => {
                    authority.compositions.remove(&name);
                }
                Record::Device(change) => {
                    let key = (change.host.clone(), change.device.clone());
                    authority.next_lease =
                        authority.next_lease.max(change.number.saturating_add(1));
                    authority.devices.insert(key, change);
                }
                Record::DeviceRemoved { host, device } => {
                    authority.devices.remove(&(host, device));
                }
                Record::Share(share) => {
                    authority.shares.insert(share.share, *share);
                }
                Record::ShareRemoved { share, .. } => {
                    authority.shares.remove(&share);
                }
            }
        }
        authority.restore_shares();
        authority
    }

    /// Lends `function` to `borrower` on these terms, if it can be had.
    ///
    /// # Errors
    /// [`BorrowRefused`], which names the holder; nothing changes then.
    pub fn borrow(
        &mut self,
        now: Millis,
        function: &FunctionId,
        borrower: &str,
        terms: impl Into<Terms>,
    ) -> Result<(LeaseId, Outcome), BorrowRefused> {
        let (leases, outcome) =
            self.borrow_all(now, std::slice::from_ref(function), borrower, &terms.into())?;
        Ok((leases[0], outcome))
    }

    /// Lends all of `functions`, each named once, to `borrower` on these terms, if every one of them can be had.
    ///
    /// # Errors
    /// [`BorrowRefused`] for the first that cannot be had; nothing changes then.
    pub fn borrow_all(
        &mut self,
        now: Millis,
        functions: &[FunctionId],
        borrower: &str,
        terms: &Terms,
    ) -> Result<(Vec<LeaseId>, Outcome), BorrowRefused> {
        let now = self.enter(now);
        self.check_contact(now, borrower)?;
        functions.iter().try_for_each(|function| self.check_unshared(function))?;
        functions.iter().try_for_each(|function| self.check_free(now, function))?;
        let grant = |function| self.grant(now, function, borrower, terms, None);
        let leases = functions.iter().map(grant).collect();
        Ok((leases, self.take()))
    }

    /// Whether a function can be had now.
    fn check_free(&self, now: Millis, function: &FunctionId) -> Result<(), BorrowRefused> {
        let record = self.functions.get(function);
        let record = record.ok_or_else(|| BorrowRefused::Unknown(function.clone()))?;
        match record.state {
            FunctionState::Withdrawn if self.is_joining(function) => {
                return Err(BorrowRefused::Joining(function.clone()));
            }
            FunctionState::Withdrawn => return Err(BorrowRefused::Withdrawn(function.clone())),
            FunctionState::Lent { lease } | FunctionState::Revoking { lease } => {
                return Err(self.held(function, lease));
            }
            FunctionState::Offered if self.is_withdrawn(function) => {
                return Err(BorrowRefused::Withdrawn(function.clone()));
            }
            FunctionState::Offered => {}
        }
        self.check_contact(now, &function.host)
    }

    /// Begins the lease of a function that [can be had](Authority::check_free).
    fn grant(
        &mut self,
        now: Millis,
        function: &FunctionId,
        borrower: &str,
        terms: &Terms,
        turn: Option<TurnOf>,
    ) -> LeaseId {
        let Terms { placement, group, level } = terms.clone();
        let lease = self.next_lease;
        let epoch = self.functions.get(function).map_or(0, |record| record.epoch).saturating_add(1);
        self.set_next_lease(lease.saturating_add(1));
        let (function, borrower) = (function.clone(), borrower.to_owned());
        let state = LeaseState::Arming;
        let record = LeaseRecord {
            lease,
            function: function.clone(),
            epoch,
            borrower,
            placement,
            group,
            level,
            change: None,
            since: now,
            until: None,
            turn,
            state,
        };
        self.set_deadline(lease, Some(now.saturating_add(self.config.ttl)));
        self.put_lease(record);
        self.put_function(FunctionRecord { function, epoch, state: FunctionState::Lent { lease } });
        self.say(lease);
        lease
    }

    /// Saves a composition, to be borrowed by its name. To save the same again changes nothing.
    ///
    /// # Errors
    /// [`CompositionRefused`]; nothing changes then.
    pub fn compose(
        &mut self,
        now: Millis,
        composition: Composition,
    ) -> Result<Outcome, CompositionRefused> {
        self.enter(now);
        composition.check()?;
        match self.compositions.get(&composition.name) {
            Some(known) if *known == composition => {}
            Some(_) => return Err(CompositionRefused::Exists(composition.name)),
            None => {
                let name = composition.name.clone();
                self.undo.push(Undo::Composition(name.clone(), None));
                self.outcome.records.push(Record::Composition(composition.clone()));
                self.compositions.insert(name, composition);
            }
        }
        Ok(self.take())
    }

    /// Forgets a composition. What is borrowed of it stays so.
    ///
    /// # Errors
    /// [`CompositionRefused::Unknown`].
    pub fn dissolve(&mut self, now: Millis, name: &str) -> Result<Outcome, CompositionRefused> {
        self.enter(now);
        let Some(composition) = self.compositions.remove(name) else {
            return Err(CompositionRefused::Unknown(name.to_owned()));
        };
        self.undo.push(Undo::Composition(name.to_owned(), Some(composition)));
        self.outcome.records.push(Record::Dissolved { name: name.to_owned() });
        Ok(self.take())
    }

    /// The compositions that were saved, by name.
    pub fn compositions(&self) -> impl Iterator<Item = &Composition> {
        self.compositions.values()
    }

    /// Ends a lease in order: its borrower lets go first.
    ///
    /// # Errors
    /// [`ReturnRefused`]; nothing changes then.
    pub fn give_back(&mut self, now: Millis, lease: LeaseId) -> Result<Outcome, ReturnRefused> {
        let now = self.enter(now);
        let record = self.leases.get(&lease).ok_or(ReturnRefused::Unknown(lease))?;
        match &record.state {
            LeaseState::Ended { reason } => {
                return Err(ReturnRefused::AlreadyEnded { lease, reason: reason.clone() });
            }
            LeaseState::Closing { .. } => {}
            _ => self.close(now, lease, EndReason::Returned),
        }
        self.take_turns(now);
        Ok(self.take())
    }

    /// A message from `host`'s node.
    pub fn receive(&mut self, now: Millis, host: &str, message: Message) -> Outcome {
        self.receive_all(now, host, [message])
    }

    /// Messages from `host`'s node, in one step.
    pub fn receive_all(
        &mut self,
        now: Millis,
        host: &str,
        messages: impl IntoIterator<Item = Message>,
    ) -> Outcome {
        let now = self.enter(now);
        let silent = Contact { registered: false, heard: now };
        self.contacts.entry(host.to_owned()).or_insert(silent).heard = now;
        messages.into_iter().for_each(|message| self.hear(now, host, message));
        self.take_turns(now);
        self.take()
    }

    fn hear(&mut self, now: Millis, host: &str, message: Message) {
        match message {
            Message::Register { incarnation, devices, newest_lease, address } => {
                let life = HostRecord { host: host.to_owned(), incarnation, address };
                self.register(now, life, &devices, newest_lease);
            }
            Message::Armed { incarnation, device, epoch, change } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    // One step with the rest: nobody repeats it when the lease goes on.
                    if let Some(change) = change.filter(|change| change.outcome.is_some()) {
                        self.level_set(lease, change);
                    }
                    self.armed(lease);
                }
            }
            Message::ArmFailed { incarnation, device, epoch, reason } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    self.finish(now, lease, EndReason::LenderFailed(reason));
                }
            }
            Message::LevelSet { incarnation, device, epoch, number, level, outcome } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    self.level_set(lease, LevelChange { number, level, outcome: Some(outcome) });
                }
            }
            Message::Revoked { incarnation, device, epoch } => {
                self.revoked(host, incarnation, device, epoch);
            }
            Message::Offered { incarnation, device, number, outcome } => {
                self.device_offered(host, incarnation, (device, number), outcome);
            }
            Message::Withdrawn { incarnation, device, number } => {
                self.device_withdrawn(host, incarnation, &device, number);
            }
            Message::Opened { lease, outcome } => self.opened(now, host, lease, outcome),
            Message::Renew { lease, .. } => self.renew(now, host, lease),
            Message::Lost { lease, reason } => self.lost(now, host, lease, reason),
            Message::Closed { lease } => self.closed(now, host, lease),
            Message::TurnUsed { lease, how } => self.turn_used(now, host, lease, how),
            // Only an authority says the others.
            _ => {}
        }
    }

    /// Time has passed: expires leases and repeats what was not answered. Call it at
    /// [`next_tick`](Authority::next_tick).
    pub fn tick(&mut self, now: Millis) -> Outcome {
        let now = self.enter(now);
        let due: Vec<LeaseId> =
            self.deadlines.iter().filter(|(_, at)| **at <= now).map(|(l, _)| *l).collect();
        // The others are due at once: a step must not be larger than a store takes.
        for lease in due.into_iter().take(AT_ONCE) {
            let reason = match &self.leases[&lease].state {
                LeaseState::Closing { reason } => reason.clone(),
                _ => EndReason::Expired,
            };
            self.finish(now, lease, reason);
        }
        if self.resend_at <= now {
            self.resend_at = now.saturating_add(self.config.resend);
            let live: Vec<LeaseId> = self.deadlines.keys().copied().collect();
            live.into_iter().for_each(|lease| self.say(lease));
            let back: Vec<LeaseId> = self
                .functions
                .values()
                .filter_map(|f| match f.state {
                    FunctionState::Revoking { lease } => Some(lease),
                    _ => None,
                })
                .collect();
            back.into_iter().for_each(|lease| self.say_revoke(lease));
            if self.devices_wait() {
                let hosts: Vec<String> = self.hosts.keys().cloned().collect();
                hosts.iter().for_each(|host| self.say_devices(host));
            }
        }
        self.take_turns(now);
        self.take()
    }

    /// The last step could not be stored: it never happened, and what it said must not be sent.
    /// Time went on all the same, and who was heard was heard.
    pub fn take_back(&mut self) {
        for change in std::mem::take(&mut self.undo).into_iter().rev() {
            match change {
                Undo::Host(key, before) => drop(put(&mut self.hosts, key, before)),
                Undo::Function(key, before) => drop(put(&mut self.functions, key, before)),
                Undo::Lease(key, before) => drop(put(&mut self.leases, key, before)),
                Undo::Deadline(key, before) => drop(put(&mut self.deadlines, key, before)),
                Undo::NextLease(before) => self.next_lease = before,
                Undo::Composition(key, before) => drop(put(&mut self.compositions, key, before)),
                Undo::Device(key, before) => drop(put(&mut self.devices, key, before)),
                Undo::Share(key, before) => {
                    drop(put(&mut self.shares, key, before.map(|share| *share)));
                }
                Undo::Confirmed(lease) => {
                    self.unconfirmed.insert(lease);
                }
                Undo::Registered(host) => {
                    if let Some(contact) = self.contacts.get_mut(&host) {
                        contact.registered = false;
                    }
                }
            }
        }
    }

    /// When [`tick`](Authority::tick) is to be called next, if nothing else happens before.
    pub fn next_tick(&self) -> Option<Millis> {
        let waiting = !self.unconfirmed.is_empty()
            || self.devices_wait()
            || self.leases.values().any(|l| match l.state {
                LeaseState::Arming | LeaseState::Opening | LeaseState::Closing { .. } => true,
                LeaseState::Active { .. } => l.asked_level().is_some(),
                LeaseState::Ended { .. } => false,
            })
            || self.functions.values().any(|f| matches!(f.state, FunctionState::Revoking { .. }));
        let resend = waiting.then_some(self.resend_at);
        // Whoever does not look at the clock regularly cannot tell a silent node from its own sleep.
        let idle = self.contacts.is_empty() && self.deadlines.is_empty();
        let beat = (!idle).then(|| self.seen.saturating_add(self.config.beat()));
        self.deadlines.values().copied().chain(resend).chain(beat).chain(self.next_turn_at()).min()
    }

    /// The leases, also those that are over.
    pub fn leases(&self) -> impl Iterator<Item = &LeaseRecord> {
        self.leases.values()
    }

    /// The record of a lease; none when there never was one, or it was forgotten.
    pub fn lease(&self, lease: LeaseId) -> Option<&LeaseRecord> {
        self.leases.get(&lease)
    }

    /// The records of all functions that were ever offered, in the order of their names.
    pub fn functions(&self) -> impl Iterator<Item = &FunctionRecord> {
        self.functions.values()
    }

    /// The record of a function; none when no host ever offered it.
    pub fn function(&self, function: &FunctionId) -> Option<&FunctionRecord> {
        self.functions.get(function)
    }

    /// The hosts, and when each was last heard from.
    pub fn hosts(&self) -> impl Iterator<Item = (&HostRecord, Millis)> {
        self.hosts.values().map(|h| (h, self.contacts.get(&h.host).map_or(0, |c| c.heard)))
    }

    /// The time limits that it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn check_contact(&self, now: Millis, host: &str) -> Result<(), BorrowRefused> {
        if !self.hosts.contains_key(host) {
            return Err(BorrowRefused::NoHost(host.to_owned()));
        }
        let contact = self.contacts.get(host).copied();
        let heard = contact.map_or(0, |c| c.heard);
        match now.saturating_sub(heard) {
            silent_ms if silent_ms > self.config.silence => {
                Err(BorrowRefused::Silent { host: host.to_owned(), silent_ms })
            }
            // What its node has of decisions that are not in the records is not known.
            _ if contact.is_none_or(|c| !c.registered) => {
                Err(BorrowRefused::Awaited(host.to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn held(&self, function: &FunctionId, lease: LeaseId) -> BorrowRefused {
        let record = &self.leases[&lease];
        let (function, borrower) = (function.clone(), record.borrower.clone());
        match record.state {
            LeaseState::Closing { .. } | LeaseState::Ended { .. } => {
                BorrowRefused::Returning { function, borrower, lease }
            }
            _ => BorrowRefused::Held { function, borrower, lease, since: record.since },
        }
    }
}
