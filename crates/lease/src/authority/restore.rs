//! An authority is made from the records that a former one stored.

use std::collections::{BTreeMap, BTreeSet};

use super::steps::time_to_release;
use super::tables::{FunctionTable, LeaseTable};
use super::{Authority, Config, Contact, Decision, LeaseRecord, LeaseState, Record};
use crate::message::Millis;

/// How long nodes may take at least, whatever the time to live, to come back to an authority that was made anew (they look
/// for it again, and write down that it is another one before they answer), and a lender to let a borrower in.
pub(super) const RETURN: Millis = 3_000;

impl Authority {
    /// The authority that stored `records`, going on at `now`. Every live lease gets a whole time
    /// to live, of 3 s at least: nobody could renew while there was nobody to renew with.
    pub fn restore(config: Config, now: Millis, records: impl IntoIterator<Item = Record>) -> Self {
        let mut authority = Authority {
            config,
            hosts: BTreeMap::new(),
            contacts: BTreeMap::new(),
            functions: FunctionTable::default(),
            leases: LeaseTable::default(),
            deadlines: BTreeMap::new(),
            compositions: BTreeMap::new(),
            devices: BTreeMap::new(),
            shares: BTreeMap::new(),
            next_lease: 1,
            resend_at: now,
            unconfirmed: BTreeSet::new(),
            seen: now,
            outcome: Decision::default(),
            undo: Vec::new(),
        };
        for record in records {
            match record {
                Record::Host(host) => {
                    let contact = Contact { registered: false, heard: now };
                    authority.contacts.insert(host.host.clone(), contact);
                    authority.hosts.insert(host.host.clone(), host);
                }
                Record::HostRemoved { host } => {
                    authority.contacts.remove(&host);
                    authority.hosts.remove(&host);
                }
                Record::Function(function) => {
                    authority.functions.put(function.function.clone(), Some(function));
                }
                Record::Lease(lease) => authority.restore_lease(now, lease),
                Record::NextLease { lease } => {
                    authority.next_lease = authority.next_lease.max(lease);
                }
                Record::Forgotten { lease } => {
                    authority.leases.put(lease, None);
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
        authority.restore_shares(now);
        authority
    }

    fn restore_lease(&mut self, now: Millis, mut lease: LeaseRecord) {
        match lease.state {
            // Asked again: whether the lender has it armed may be otherwise by now.
            LeaseState::Opening => lease.state = LeaseState::Arming,
            LeaseState::Active { .. } => {
                self.unconfirmed.insert(lease.lease);
            }
            _ => {}
        }
        self.next_lease = self.next_lease.max(lease.lease.saturating_add(1));
        let time = match lease.state {
            LeaseState::Closing { .. } => Some(time_to_release(&self.config, &lease)),
            LeaseState::Ended { .. } => None,
            _ => Some(self.config.ttl.max(RETURN)),
        };
        if let Some(time) = time {
            self.deadlines.insert(lease.lease, now.saturating_add(time));
        }
        self.leases.put(lease.lease, Some(lease));
    }
}
