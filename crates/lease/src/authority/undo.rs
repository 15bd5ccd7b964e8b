//! What the steps since the last stored one changed, as it was before: a step that cannot be stored never happened.

use std::collections::BTreeMap;

use super::{Authority, Contact, FunctionRecord, HostRecord, LeaseRecord};
use crate::composition::CompositionRecord;
use crate::device::DeviceChange;
use crate::message::{FunctionId, LeaseId, Millis};
use crate::share::ShareRecord;

/// Something as it was before a step that is not known to be stored.
#[derive(Debug)]
pub(super) enum Undo {
    Host(String, Option<HostRecord>),
    Contact(String, Contact),
    Function(FunctionId, Option<FunctionRecord>),
    Lease(LeaseId, Option<LeaseRecord>),
    Deadline(LeaseId, Option<Millis>),
    NextLease(LeaseId),
    Registered(String),
    Confirmed(LeaseId),
    Composition(String, Option<CompositionRecord>),
    Device((String, String), Option<DeviceChange>),
    Share(LeaseId, Option<Box<ShareRecord>>),
}

/// Puts a key's value, or none.
pub(super) fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    }
}

impl Authority {
    /// All steps so far are stored: none of them is [taken back](Authority::take_back) any more. What they changed is
    /// kept until this is called.
    pub fn settle(&mut self) {
        self.undo.clear();
    }

    /// The steps since [`settle`](Authority::settle) could not be stored, as they are stored together: they never
    /// happened, and what they said must not be sent. Time went on anyway, and who was heard was heard.
    pub fn take_back(&mut self) {
        for change in std::mem::take(&mut self.undo).into_iter().rev() {
            match change {
                Undo::Host(key, before) => drop(put(&mut self.hosts, key, before)),
                Undo::Contact(key, before) => drop(self.contacts.insert(key, before)),
                Undo::Function(key, before) => drop(self.functions.put(key, before)),
                Undo::Lease(key, before) => drop(self.leases.put(key, before)),
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
}
