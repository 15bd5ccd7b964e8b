//! What everybody may know: the records that are stored, and who listens.
//!
//! The writer changes it after each commit, in memory and at once; so nobody is told what is not on
//! disk, and nobody who asks waits for the disk.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_lease::{
    Authority, Availability, CompositionRecord, DeviceChange, FunctionId, FunctionRecord,
    HostRecord, LeaseId, LeaseRecord, Message, Record, ShareRecord,
};
use tokio::sync::mpsc;

use crate::api::{DeviceReport, EventKind, NodeReport, PeerReport};
use crate::events::{Draft, Log, is_told_by_share};

/// Messages that a node may be behind. One that takes nothing for longer is cut off, and told what
/// it still has to know when it comes back: the authority repeats what was not answered.
pub(super) const NODE_BACKLOG: usize = 4096;

/// The state as it is stored.
#[derive(Debug, Default)]
pub(super) struct RackState {
    pub hosts: BTreeMap<String, HostRecord>,
    /// When each host was last heard from.
    pub heard: BTreeMap<String, u64>,
    pub functions: BTreeMap<FunctionId, FunctionRecord>,
    pub leases: BTreeMap<LeaseId, LeaseRecord>,
    /// Those that were saved, by name.
    pub compositions: BTreeMap<String, CompositionRecord>,
    /// What differs from the rack file, by host and device.
    pub devices: BTreeMap<(String, String), DeviceChange>,
    /// Who takes turns on functions.
    pub shares: BTreeMap<LeaseId, ShareRecord>,
    /// The nodes that listen now.
    nodes: BTreeMap<String, ListeningNode>,
    /// How often each node was cut off because it took nothing.
    pub overruns: BTreeMap<String, u64>,
    /// What each node said of itself last.
    pub reports: BTreeMap<String, NodeReport>,
    /// What happened, as far as it is kept.
    pub log: Log,
    /// Requests that were refused.
    pub refused: u64,
    /// Decisions that could not be stored, and were taken back.
    pub store_failures: u64,
}

/// A node that listens.
#[derive(Debug)]
struct ListeningNode {
    told: mpsc::Sender<Message>,
    /// It has said since then who it is and what it has.
    registered: bool,
}

/// Notes what a record says of the devices that differ from the rack file's, if it says something of them.
pub(super) fn note_device(devices: &mut BTreeMap<(String, String), DeviceChange>, record: &Record) {
    match record {
        Record::Device(change) => drop(devices.insert(key_of(change), change.clone())),
        Record::DeviceRemoved { host, device } => {
            devices.remove(&(host.clone(), device.clone()));
        }
        _ => {}
    }
}

fn key_of(change: &DeviceChange) -> (String, String) {
    (change.host.clone(), change.device.clone())
}

impl RackState {
    /// What an authority begins with.
    pub fn of(authority: &Authority) -> Self {
        let mut known = RackState::default();
        for (host, heard) in authority.hosts() {
            known.heard.insert(host.host.clone(), heard);
            known.hosts.insert(host.host.clone(), host.clone());
        }
        let functions = authority.functions().map(|f| (f.function.clone(), f.clone()));
        known.functions = functions.collect();
        known.compositions =
            authority.compositions().map(|it| (it.name.clone(), it.clone())).collect();
        known.devices = authority.devices().map(|it| (key_of(it), it.clone())).collect();
        known.shares = authority.shares().map(|it| (it.share, it.clone())).collect();
        known.leases = authority.leases().map(|l| (l.lease, l.clone())).collect();
        known
    }

    /// Who takes turns on a function.
    pub fn ring(&self, function: &FunctionId) -> impl Iterator<Item = &ShareRecord> {
        self.shares.values().filter(move |share| share.function == *function)
    }

    /// Whether the function of a lease, which may have ended, is not back from it.
    pub fn is_held(&self, lease: LeaseId) -> bool {
        let record = self.leases.get(&lease);
        let function = record.and_then(|record| self.functions.get(&record.function));
        function.is_some_and(|function| match function.state {
            Availability::Lent { lease: by } | Availability::Revoking { lease: by } => by == lease,
            _ => false,
        })
    }

    /// What `records` tell that is not known yet.
    pub fn events_of(&self, records: &[Record]) -> Vec<Draft> {
        let event = |record: &Record| match record {
            Record::Lease(lease) => Draft::of_lease(self.leases.get(&lease.lease), lease)
                .filter(|draft| draft.is_news(|_| is_told_by_share(lease))),
            // What is withdrawn is told of its device.
            Record::Function(state) if self.is_leaving(&state.function) => None,
            Record::Function(state) if self.is_back_from_turn(state) => None,
            Record::Function(state) => Draft::of_state(self.functions.get(&state.function), state),
            Record::Host(life) => {
                let text = match self.hosts.get(&life.host) {
                    Some(before) if before.incarnation == life.incarnation => return None,
                    Some(_) => format!("the node of {} was started again", life.host),
                    None => format!("the node of {} was started", life.host),
                };
                Some(Draft::of_host(EventKind::Restart, Some(&life.host), text))
            }
            Record::Composition(composition) => {
                let text = format!("the composition {} was saved", composition.name);
                Some(Draft::of_host(EventKind::Lease, Some(&composition.borrower), text))
            }
            Record::Dissolved { name } => {
                let text = format!("the composition {name} was removed");
                Some(Draft::of_host(EventKind::Lease, None, text))
            }
            Record::Device(change) => self.device_event(change),
            Record::DeviceRemoved { host, device } => {
                let text = format!("{host}/{device} is out of the rack");
                Some(Draft::of_host(EventKind::Lease, Some(host), text))
            }
            Record::Share(share) => Draft::of_share(self.shares.get(&share.share), share),
            Record::ShareRemoved { share, reason } => {
                self.shares.get(share).map(|share| Draft::of_leaving(share, reason))
            }
            Record::NextLease { .. } | Record::Forgotten { .. } => None,
        };
        // A host that tells of several lives at once was started again once.
        let mut hosts = BTreeSet::new();
        let is_told = |record: &&Record| match record {
            Record::Host(life) => hosts.insert(life.host.clone()),
            _ => true,
        };
        let told: Vec<&Record> = records.iter().rev().filter(is_told).collect();
        told.into_iter().rev().filter_map(event).collect()
    }

    /// Whether a lease is a turn that somebody takes on a function.
    pub fn is_turn(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.turn.is_some())
    }

    /// Whether a turn on a function is over, and it can be lent again.
    fn is_back_from_turn(&self, state: &FunctionRecord) -> bool {
        let before = self.functions.get(&state.function).map(|before| &before.state);
        let Some(Availability::Lent { lease } | Availability::Revoking { lease }) = before else {
            return false;
        };
        state.state == Availability::Offered && self.is_turn(*lease)
    }

    fn device_event(&self, change: &DeviceChange) -> Option<Draft> {
        let (name, before) = (change.name(), self.devices.get(&key_of(change)));
        // Its number may change until it is answered.
        let known = before.is_some_and(|before| before.section == change.section);
        let answered = change.answer.is_some();
        let kind = if change.failure().is_some() { EventKind::Fault } else { EventKind::Lease };
        let text = match (&change.section, change.failure()) {
            (_, Some(reason)) => format!("{name} cannot be offered: {reason}"),
            (Some(_), None) if answered => format!("{name} is in the rack"),
            (Some(_), None) if !known => format!("{name} was offered"),
            (None, None) if answered => format!("{name} is out of the rack"),
            (None, None) if !known => format!("{name} was withdrawn"),
            _ => return None,
        };
        Some(Draft::of_host(kind, Some(&change.host), text))
    }

    /// Notes what was stored.
    pub fn note(&mut self, records: Vec<Record>) {
        for record in records {
            match record {
                Record::Host(host) => drop(self.hosts.insert(host.host.clone(), host)),
                Record::Function(f) => drop(self.functions.insert(f.function.clone(), f)),
                Record::Lease(lease) => drop(self.leases.insert(lease.lease, lease)),
                Record::Forgotten { lease } => drop(self.leases.remove(&lease)),
                Record::Composition(it) => drop(self.compositions.insert(it.name.clone(), it)),
                Record::Dissolved { name } => drop(self.compositions.remove(&name)),
                Record::Device(_) | Record::DeviceRemoved { .. } => {
                    note_device(&mut self.devices, &record);
                }
                Record::Share(share) => drop(self.shares.insert(share.share, *share)),
                Record::ShareRemoved { share, .. } => drop(self.shares.remove(&share)),
                Record::NextLease { .. } => {}
            }
        }
    }

    /// Sends what is to be said now that it is stored and known.
    pub fn say(&mut self, messages: Vec<(String, Message)>) {
        for (host, message) in messages {
            tracing::debug!(host, ?message, "sent");
            self.send(&host, message);
        }
    }

    fn send(&mut self, host: &str, message: Message) {
        let Some(node) = self.nodes.get(host) else { return };
        match node.told.try_send(message) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => drop(self.nodes.remove(host)),
            Err(mpsc::error::TrySendError::Full(_)) => {
                tracing::warn!(
                    host,
                    "the node takes no messages; it is disconnected until it connects again"
                );
                self.nodes.remove(host);
                *self.overruns.entry(host.to_owned()).or_default() += 1;
            }
        }
    }

    /// A node listens from now on. A later listener takes an earlier one's place.
    pub fn listen(&mut self, host: &str) -> mpsc::Receiver<Message> {
        let (sender, receiver) = mpsc::channel(NODE_BACKLOG);
        self.nodes.insert(host.to_owned(), ListeningNode { told: sender, registered: false });
        receiver
    }

    /// The node of a host has registered, and that was taken. Whether it had not before, since it listens.
    pub fn registered(&mut self, host: &str) -> bool {
        let node = self.nodes.get_mut(host);
        node.is_some_and(|node| !std::mem::replace(&mut node.registered, true))
    }

    /// What the node of a function's host says of it, while it is there.
    pub fn report(&self, function: &FunctionId) -> Option<&DeviceReport> {
        let report = self.reports.get(&function.host).filter(|_| self.listens(&function.host));
        report?.devices.get(&function.device)
    }

    /// What a borrower's node says of the front that it runs for `function`, while it is there.
    pub fn front(&self, borrower: &str, function: &FunctionId) -> Option<&DeviceReport> {
        let report = self.reports.get(borrower).filter(|_| self.listens(borrower));
        report?.fronts.get(&function.to_string())
    }

    /// What a borrower's node says of what `function` reaches of others, while it is there.
    pub fn peers(&self, borrower: &str, function: &FunctionId) -> Option<&PeerReport> {
        let report = self.reports.get(borrower).filter(|_| self.listens(borrower));
        report?.peers.get(&function.to_string())
    }

    /// Whether `host` has borrowed `function`.
    pub fn borrows(&self, host: &str, function: &str) -> bool {
        let mut live = self.leases.values().filter(|lease| lease.is_live());
        live.any(|lease| lease.borrower == host && lease.function.to_string() == function)
    }

    /// Whether the device of a function was withdrawn.
    pub fn is_leaving(&self, function: &FunctionId) -> bool {
        self.devices.values().any(|change| change.section.is_none() && change.has(function))
    }

    /// Whether the node of a host listens.
    pub fn listens(&self, host: &str) -> bool {
        self.nodes.get(host).is_some_and(|node| !node.told.is_closed())
    }

    /// Whether the node of a host listens, and has registered since it does: what is known of the host is of the life that
    /// it is in, and not of one before it.
    pub fn is_up(&self, host: &str) -> bool {
        self.listens(host) && self.nodes.get(host).is_some_and(|node| node.registered)
    }
}
