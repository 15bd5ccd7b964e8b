//! What everybody may know: the records that are stored, and who listens.
//!
//! The writer changes it after each commit, in memory and at once; so nobody is told what is not on
//! disk, and nobody who asks waits for the disk.

use std::collections::BTreeMap;

use rackbus_lease::{
    Authority, Availability, CompositionRecord, DeviceChange, FunctionId, FunctionRecord,
    HostRecord, LeaseId, LeaseRecord, Message, Record, ShareRecord,
};
use tokio::sync::mpsc;

use crate::api::{DeviceReport, NodeReport, PeerReport};
use crate::events::Log;

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
    /// Why NTBs are not used, as it was told last, by the hosts at their ends: first the one whose node said so.
    pub told_ntbs: BTreeMap<String, BTreeMap<String, String>>,
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
        Record::Device(change) => drop(devices.insert(device_key(change), change.clone())),
        Record::DeviceRemoved { host, device } => {
            devices.remove(&(host.clone(), device.clone()));
        }
        _ => {}
    }
}

/// What a change of a device is kept under: its host and its name.
pub(super) fn device_key(change: &DeviceChange) -> (String, String) {
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
        known.devices = authority.devices().map(|it| (device_key(it), it.clone())).collect();
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

    /// Whether a lease is a turn that somebody takes on a function.
    pub fn is_turn(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.turn.is_some())
    }

    /// Notes what was stored.
    pub fn note(&mut self, records: Vec<Record>) {
        for record in records {
            match record {
                Record::Host(host) => drop(self.hosts.insert(host.host.clone(), host)),
                Record::HostRemoved { host } => self.forget_host(&host),
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

    /// A host left the rack: its node is cut off, and what is remembered is of no other host of its name.
    fn forget_host(&mut self, host: &str) {
        self.hosts.remove(host);
        self.heard.remove(host);
        self.nodes.remove(host);
        self.overruns.remove(host);
        self.reports.remove(host);
        self.told_ntbs.remove(host);
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

    /// Why the node of `host` does not use its NTB to `peer` for the link, as it says while it is there.
    pub fn unused_ntb(&self, host: &str, peer: &str) -> Option<&str> {
        let report = self.reports.get(host).filter(|_| self.listens(host))?;
        report.unused_ntbs.get(peer).map(String::as_str)
    }

    /// The functions of a host that were ever offered.
    pub fn functions_of(&self, host: &str) -> impl Iterator<Item = &FunctionRecord> {
        let first = FunctionId { host: host.to_owned(), device: String::new() };
        let from_there = self.functions.range(first..).map(|(_, record)| record);
        from_there.take_while(move |record| record.function.host == host)
    }

    /// Whether `host` has borrowed `function`.
    pub fn borrows(&self, host: &str, function: &str) -> bool {
        let Ok(function) = function.parse::<FunctionId>() else { return false };
        let record = self.functions.get(&function).map(|record| &record.state);
        let Some(Availability::Lent { lease }) = record else { return false };
        self.leases.get(lease).is_some_and(|lease| lease.is_live() && lease.borrower == host)
    }

    /// Whether the device of a function was withdrawn.
    pub fn is_leaving(&self, function: &FunctionId) -> bool {
        self.devices.values().any(|change| change.withdraws(function))
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
