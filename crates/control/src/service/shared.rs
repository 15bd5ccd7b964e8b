//! What the writer and those who ask share: the state as it is stored, and who is told of its changes.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use prometheus_client::metrics::histogram::Histogram;
use rackbus_identity::Revocations;
use rackbus_lease::{Decision, Message, Record, WaitingQueue};
use tokio::sync::{broadcast, watch};

use super::clock::WallClock;
use super::known::{RackState, note_device};
use super::{Inventory, ReadFile, ReadRack, present};
use crate::api::{Change, EventRecord};
use crate::register::{AuthoritySet, CertificateRegister};

/// State that the writer shares with the handlers of requests.
pub(super) struct WriterShared {
    /// Exchanged as a whole when devices were offered or withdrawn.
    pub(super) inventory: RwLock<Arc<Inventory>>,
    /// Exchanged when the rack is that of another file.
    pub(super) read_rack: RwLock<Option<ReadRack>>,
    pub(super) read_file: Option<ReadFile>,
    pub(super) clock: WallClock,
    pub(super) log_lines_left_out: fn() -> u64,
    pub(super) known: Mutex<RackState>,
    /// Who waits for which function. Locked for moments only, after `known` where both are.
    pub(super) queue: Mutex<WaitingQueue>,
    /// Moves with every step.
    pub(super) steps: watch::Sender<u64>,
    pub(super) changes: broadcast::Sender<Change>,
    /// How long commits took, in seconds.
    pub(super) commits: Histogram,
    /// The leader's term, which goes with all that nodes are told.
    pub(super) term: AtomicU64,
    /// Certificates and revocations, as they are stored.
    pub(super) register: Mutex<CertificateRegister>,
    /// The revocations for everybody who looks at them.
    pub(super) revocations: Revocations,
    /// The version of these, for those who wait for another.
    pub(super) revoked_version: watch::Sender<u64>,
    /// The certificate authorities of a rack that replaces its first one, as they are stored.
    pub(super) authorities: watch::Sender<Option<AuthoritySet>>,
}

impl std::fmt::Debug for WriterShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriterShared").field("known", &self.known).finish_non_exhaustive()
    }
}

impl WriterShared {
    /// Held for moments only, and never while anything is waited for.
    pub(super) fn known(&self) -> MutexGuard<'_, RackState> {
        // It is changed in whole steps; a panic between two leaves it as it was.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the rack has now.
    pub(super) fn inventory(&self) -> Arc<Inventory> {
        self.inventory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What reads the rack file again; nothing where devices cannot be offered.
    pub(super) fn reader(&self) -> Option<ReadRack> {
        self.read_rack.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has `read` read the rack file from now on; what did so before.
    pub(super) fn exchange_reader(&self, read: Option<ReadRack>) -> Option<ReadRack> {
        let mut reader = self.read_rack.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *reader, read)
    }

    /// Reads the inventory as it is by the changes that are known.
    pub(super) fn renew_inventory(&self) {
        let changes: Vec<_> = self.known().devices.values().cloned().collect();
        if let Some(inventory) = self.read_inventory(&changes) {
            self.set_inventory(inventory);
        }
    }

    fn set_inventory(&self, inventory: Inventory) {
        *self.inventory.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(inventory);
    }

    /// The inventory as it will be when these records are known. None where they change no device, or it cannot be read.
    fn inventory_after(&self, records: &[Record]) -> Option<Inventory> {
        let changes = |it: &Record| matches!(it, Record::Device(_) | Record::DeviceRemoved { .. });
        if !records.iter().any(changes) {
            return None;
        }
        let mut devices = self.known().devices.clone();
        records.iter().for_each(|record| note_device(&mut devices, record));
        self.read_inventory(&devices.into_values().collect::<Vec<_>>())
    }

    /// A step is stored: lets everybody know.
    pub(super) fn publish(&self, outcome: Decision, events: Vec<EventRecord>, first_event: u64) {
        let Decision { records, messages } = outcome;
        // Read before it is needed, since that takes long: what is known and the inventory change together. A device whose
        // change is not known any more would be taken for one that the rack file lists.
        let inventory = self.inventory_after(&records);
        let mut known = self.known();
        known.log.put(&events, first_event);
        known.note(records.clone());
        if let Some(inventory) = inventory {
            self.set_inventory(inventory);
        }
        // Before anybody is told of what it has: that is of the life that registered.
        let registered = messages.iter().filter_map(|(host, message)| {
            let registered = matches!(message, Message::Registered { .. });
            (registered && known.registered(host)).then(|| host.clone())
        });
        let came_up: Vec<String> = registered.collect();
        known.say(messages);
        records.iter().for_each(|record| self.announce(&known, record));
        came_up.iter().for_each(|host| self.announce_devices(&known, host));
        drop(known);
        self.steps.send_modify(|step| *step = step.wrapping_add(1));
        // Last: nobody waits for the lines of the log.
        events.iter().for_each(crate::events::log);
    }

    pub(super) fn announce(&self, known: &RackState, record: &Record) {
        if self.changes.receiver_count() == 0 {
            return;
        }
        let change = match record {
            Record::Lease(lease) => Some(Change::Lease(present(lease))),
            Record::Function(function) => self
                .inventory()
                .devices
                .get(&function.function)
                .map(|device| Change::Device(Box::new(self.device(known, device)))),
            // The others are seen by what becomes of functions and leases.
            _ => None,
        };
        if let Some(change) = change {
            // Nobody listening is no failure.
            let _ = self.changes.send(change);
        }
    }

    /// All that a host has is another thing than before.
    fn announce_devices(&self, known: &RackState, host: &str) {
        if self.changes.receiver_count() == 0 {
            return;
        }
        let inventory = self.inventory();
        for device in inventory.devices.of_host(host) {
            let _ = self.changes.send(Change::Device(Box::new(self.device(known, device))));
        }
    }

    pub(super) fn tell_host(&self, host: &str) {
        if self.changes.receiver_count() == 0 {
            return;
        }
        let status = self.host(&self.known(), host);
        let _ = self.changes.send(Change::Host(status));
    }

    /// Waits until `ready` gives a value, at most until `deadline`.
    pub(super) async fn wait<R>(
        &self,
        deadline: tokio::time::Instant,
        ready: impl Fn(&RackState) -> Option<R>,
    ) -> Option<R> {
        let mut steps = self.steps.subscribe();
        loop {
            if let Some(value) = ready(&self.known()) {
                return Some(value);
            }
            tokio::time::timeout_at(deadline, steps.changed()).await.ok()?.ok()?;
        }
    }
}
