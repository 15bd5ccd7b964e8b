//! The authority: who may use what, and the records that survive it.
//!
//! Every change is returned as [`Record`]s to be stored *before* the messages beside them are
//! sent; an authority restored from its records goes on where the old one stopped. It repeats
//! what was not answered, so it does not matter which messages were lost when it ended.

mod compositions;
mod devices;
mod grants;
mod hosts;
mod levels;
mod nodes;
mod records;
mod restore;
mod shares;
mod steps;
mod tables;
#[cfg(test)]
mod tests;
mod undo;

use std::collections::{BTreeMap, BTreeSet};

pub use hosts::HostInUse;
pub use records::{
    Availability, BorrowRefused, EndReason, FunctionRecord, HostRecord, LeaseRecord, LeaseState,
    Record, ReturnRefused,
};

use tables::{FunctionTable, LeaseTable};
use undo::{Undo, put};

use crate::change::LevelChange;
use crate::composition::CompositionRecord;
use crate::device::DeviceChange;
use crate::message::{FunctionId, LeaseId, Message, Millis};
use crate::share::ShareRecord;

/// Time limits, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long a lease lives without being renewed.
    pub ttl: Millis,
    /// How long a borrower may take to release a function in order (a guest unplugs the device) before its
    /// lender is told to take the function away.
    pub close_grace: Millis,
    /// How long to wait for an answer before a message is sent again.
    pub resend: Millis,
    /// How long a node may be silent before new leases on it are refused.
    pub silence: Millis,
    /// Whether a lease also ends at its two nodes, by their own clocks, when it was not renewed for `ttl`: the borrower
    /// stops first. Else it goes on there until this authority can say that it ended.
    pub strict_ttl: bool,
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
        Config { ttl: 15_000, close_grace: 20_000, resend: 250, silence: 15_000, strict_ttl: false }
    }
}

/// Leases that end in one step because their time is over.
const AT_ONCE: usize = 200;

/// Leases that are over and still remembered, to tell why they ended.
const REMEMBERED: usize = 1000;

/// What the control plane must do: store the records, then send the messages.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Decision {
    /// To be stored first, all or nothing.
    pub records: Vec<Record>,
    /// To be sent then: the host, and what.
    pub messages: Vec<(String, Message)>,
}

impl Decision {
    /// Adds what a later step came to, for both to be stored together.
    pub fn append(&mut self, mut later: Decision) {
        self.records.append(&mut later.records);
        self.messages.append(&mut later.messages);
    }
}

/// What is known of a host in this life of the authority only.
#[derive(Debug, Clone, Copy)]
struct Contact {
    /// Whether its node registered: what it has of former decisions is known then.
    registered: bool,
    heard: Millis,
}

/// The state machine of the control plane.
#[derive(Debug)]
pub struct Authority {
    config: Config,
    hosts: BTreeMap<String, HostRecord>,
    contacts: BTreeMap<String, Contact>,
    functions: FunctionTable,
    leases: LeaseTable,
    /// When each live lease expires; each closing one stops being waited for.
    deadlines: BTreeMap<LeaseId, Millis>,
    compositions: BTreeMap<String, CompositionRecord>,
    /// What differs from the rack file, by host and device.
    devices: BTreeMap<(String, String), DeviceChange>,
    /// Who takes turns on functions.
    shares: BTreeMap<LeaseId, ShareRecord>,
    next_lease: LeaseId,
    resend_at: Millis,
    /// Leases that were active when the authority started, and of which their lender has not said
    /// since that it still has them armed: the records may be an older copy.
    unconfirmed: BTreeSet<LeaseId>,
    /// When the last step was taken.
    seen: Millis,
    outcome: Decision,
    /// What the steps that are not [settled](Authority::settle) changed, as it was before.
    undo: Vec<Undo>,
}

impl Authority {
    /// An authority of an empty rack.
    pub fn new(config: Config) -> Self {
        Authority::restore(config, 0, [])
    }

    /// A message from `host`'s node.
    pub fn receive(&mut self, now: Millis, host: &str, message: Message) -> Decision {
        self.receive_all(now, host, [message])
    }

    /// Messages from `host`'s node, in one step.
    pub fn receive_all(
        &mut self,
        now: Millis,
        host: &str,
        messages: impl IntoIterator<Item = Message>,
    ) -> Decision {
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
            Message::ArmFailed { incarnation, device, epoch, reason, refused } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    if refused {
                        self.note_refused(lease);
                    }
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
            Message::Renew { lease, sent, .. } => self.renew(now, host, lease, sent),
            Message::Extended { incarnation, device, epoch, sent } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    self.extended(lease, sent);
                }
            }
            Message::Lost { lease, reason } => self.lost(now, host, lease, reason),
            Message::Closed { lease } => self.closed(now, host, lease),
            Message::TurnUsed { lease, how } => self.turn_used(now, host, lease, how),
            // Only an authority says the others.
            _ => {}
        }
    }

    /// Time has passed: expires leases and repeats what was not answered. Call it at
    /// [`next_tick`](Authority::next_tick).
    pub fn tick(&mut self, now: Millis) -> Decision {
        let now = self.enter(now);
        let due: Vec<LeaseId> =
            self.deadlines.iter().filter(|(_, at)| **at <= now).map(|(l, _)| *l).collect();
        // The others are due at once: a step must not be larger than a store takes.
        for lease in due.into_iter().take(AT_ONCE) {
            let reason = match &self.leases[&lease].state {
                LeaseState::Closing { reason, .. } => reason.clone(),
                // Its borrower knows nothing of it yet.
                LeaseState::Arming => EndReason::LenderFailed("it did not answer in time".into()),
                _ => EndReason::Expired,
            };
            self.finish(now, lease, reason);
        }
        if self.resend_at <= now {
            self.resend_at = now.saturating_add(self.config.resend);
            let live: Vec<LeaseId> = self.deadlines.keys().copied().collect();
            live.into_iter().for_each(|lease| self.say(lease));
            let back: Vec<LeaseId> = self.functions.revoking().map(|(_, lease)| lease).collect();
            back.into_iter().for_each(|lease| self.say_revoke(lease));
            if self.devices_wait() {
                let hosts: Vec<String> = self.hosts.keys().cloned().collect();
                hosts.iter().for_each(|host| self.say_devices(host));
            }
        }
        self.take_turns(now);
        self.take()
    }

    /// When [`tick`](Authority::tick) is to be called next, if nothing else happens before.
    pub fn next_tick(&self) -> Option<Millis> {
        let waiting = !self.unconfirmed.is_empty()
            || self.devices_wait()
            || self.leases.is_waited_for()
            || self.functions.revoking().next().is_some();
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

    /// Whether the node of `host` has said something since this authority was made or restored, and what it has of former
    /// decisions is known.
    pub fn is_registered(&self, host: &str) -> bool {
        self.contacts.get(host).is_some_and(|contact| contact.registered)
    }

    /// The hosts, and when each was last heard from.
    pub fn hosts(&self) -> impl Iterator<Item = (&HostRecord, Millis)> {
        self.hosts.values().map(|h| (h, self.contacts.get(&h.host).map_or(0, |c| c.heard)))
    }

    /// The time limits that it was made with.
    pub fn config(&self) -> &Config {
        &self.config
    }
}
