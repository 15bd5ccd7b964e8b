//! What records tell that is not known yet: the events of a step.
//!
//! Several steps may be decided before they are stored and known, so that a record is compared with the newest one of those
//! before it, whether that is [decided](DecidedRecords) or known.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_lease::{
    Availability, DeviceChange, FunctionId, FunctionRecord, HostRecord, LeaseId, LeaseRecord,
    Record, ShareRecord,
};

use super::known::{RackState, device_key};
use crate::api::EventKind;
use crate::events::{Draft, is_told_by_share};

/// The newest records that are decided and not known yet; nothing where one is removed.
#[derive(Debug, Default)]
pub(super) struct DecidedRecords {
    hosts: BTreeMap<String, Option<HostRecord>>,
    functions: BTreeMap<FunctionId, FunctionRecord>,
    leases: BTreeMap<LeaseId, Option<LeaseRecord>>,
    devices: BTreeMap<(String, String), Option<DeviceChange>>,
    shares: BTreeMap<LeaseId, Option<ShareRecord>>,
}

impl DecidedRecords {
    fn note(&mut self, record: &Record) {
        match record {
            Record::Host(host) => drop(self.hosts.insert(host.host.clone(), Some(host.clone()))),
            Record::HostRemoved { host } => drop(self.hosts.insert(host.clone(), None)),
            Record::Function(f) => drop(self.functions.insert(f.function.clone(), f.clone())),
            Record::Lease(lease) => drop(self.leases.insert(lease.lease, Some(lease.clone()))),
            Record::Forgotten { lease } => drop(self.leases.insert(*lease, None)),
            Record::Device(change) => {
                self.devices.insert(device_key(change), Some(change.clone()));
            }
            Record::DeviceRemoved { host, device } => {
                self.devices.insert((host.clone(), device.clone()), None);
            }
            Record::Share(share) => {
                self.shares.insert(share.share, Some(share.as_ref().clone()));
            }
            Record::ShareRemoved { share, .. } => drop(self.shares.insert(*share, None)),
            Record::Composition(_) | Record::Dissolved { .. } | Record::NextLease { .. } => {}
        }
    }
}

/// What is known, with what is decided.
#[derive(Clone, Copy)]
struct Before<'a> {
    known: &'a RackState,
    decided: &'a DecidedRecords,
}

impl<'a> Before<'a> {
    fn lease(self, lease: LeaseId) -> Option<&'a LeaseRecord> {
        let decided = self.decided.leases.get(&lease).map(Option::as_ref);
        decided.unwrap_or_else(|| self.known.leases.get(&lease))
    }

    fn share(self, share: LeaseId) -> Option<&'a ShareRecord> {
        let decided = self.decided.shares.get(&share).map(Option::as_ref);
        decided.unwrap_or_else(|| self.known.shares.get(&share))
    }

    fn device(self, key: &(String, String)) -> Option<&'a DeviceChange> {
        let decided = self.decided.devices.get(key).map(Option::as_ref);
        decided.unwrap_or_else(|| self.known.devices.get(key))
    }

    fn function(self, function: &FunctionId) -> Option<&'a FunctionRecord> {
        let decided = self.decided.functions.get(function);
        decided.or_else(|| self.known.functions.get(function))
    }

    fn host(self, host: &str) -> Option<&'a HostRecord> {
        let decided = self.decided.hosts.get(host).map(Option::as_ref);
        decided.unwrap_or_else(|| self.known.hosts.get(host))
    }

    /// Whether the device of a function was withdrawn.
    fn is_leaving(self, function: &FunctionId) -> bool {
        let known = self.known.devices.iter();
        let unchanged = known.filter(|(key, _)| !self.decided.devices.contains_key(*key));
        let decided = self.decided.devices.values().flatten();
        unchanged.map(|(_, change)| change).chain(decided).any(|change| change.withdraws(function))
    }

    /// Whether a turn on a function is over, and it can be lent again.
    fn is_back_from_turn(self, state: &FunctionRecord) -> bool {
        let before = self.function(&state.function).map(|before| &before.state);
        let Some(Availability::Lent { lease } | Availability::Revoking { lease }) = before else {
            return false;
        };
        let is_turn = self.lease(*lease).is_some_and(|lease| lease.turn.is_some());
        state.state == Availability::Offered && is_turn
    }

    fn event(self, record: &Record) -> Option<Draft> {
        match record {
            Record::Lease(lease) => Draft::of_lease(self.lease(lease.lease), lease)
                .filter(|draft| draft.is_news(|_| is_told_by_share(lease))),
            // What is withdrawn is told of its device.
            Record::Function(state) if self.is_leaving(&state.function) => None,
            Record::Function(state) if self.is_back_from_turn(state) => None,
            Record::Function(state) => Draft::of_state(self.function(&state.function), state),
            Record::Host(life) => {
                let text = match self.host(&life.host) {
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
            Record::Share(share) => Draft::of_share(self.share(share.share), share),
            Record::ShareRemoved { share, reason } => {
                self.share(*share).map(|share| Draft::of_leaving(share, reason))
            }
            // A host's coming and going is told with the rack file that says so.
            Record::NextLease { .. } | Record::Forgotten { .. } | Record::HostRemoved { .. } => {
                None
            }
        }
    }

    fn device_event(self, change: &DeviceChange) -> Option<Draft> {
        let (name, before) = (change.name(), self.device(&device_key(change)));
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
}

/// What the `records` of a step tell that is neither known nor decided before; they are decided from then on.
pub(super) fn events_of(
    known: &RackState,
    decided: &mut DecidedRecords,
    records: &[Record],
) -> Vec<Draft> {
    // A host that tells of several lives at once was started again once.
    let mut hosts = BTreeSet::new();
    let is_told = |record: &&Record| match record {
        Record::Host(life) => hosts.insert(life.host.clone()),
        _ => true,
    };
    let told: Vec<&Record> = records.iter().rev().filter(is_told).collect();
    let before = Before { known, decided };
    let events = told.into_iter().rev().filter_map(|record| before.event(record)).collect();
    records.iter().for_each(|record| decided.note(record));
    events
}

#[cfg(test)]
mod tests {
    use rackbus_lease::{EndReason, LeaseState};

    use super::*;

    fn lease(state: LeaseState) -> Record {
        let text = r#"{"lease":7,"function":"alpha/d0","epoch":1,"borrower":"beta","since":0,"state":{"state":"arming"}}"#;
        let record: LeaseRecord = serde_json::from_str(text).unwrap();
        Record::Lease(LeaseRecord { state, ..record })
    }

    fn function(state: Availability) -> Record {
        let function = "alpha/d0".parse().unwrap();
        Record::Function(FunctionRecord { function, epoch: 1, state })
    }

    #[test]
    fn steps_that_are_decided_together_tell_what_they_would_tell_one_after_the_other() {
        let steps = [
            vec![function(Availability::Offered)],
            vec![lease(LeaseState::Arming), function(Availability::Lent { lease: 7 })],
            vec![lease(LeaseState::Active { socket: "s".to_owned() })],
            vec![lease(LeaseState::Closing { reason: EndReason::Returned, within: None })],
            vec![
                lease(LeaseState::Ended { reason: EndReason::Returned }),
                function(Availability::Revoking { lease: 7 }),
            ],
            vec![function(Availability::Offered), Record::Forgotten { lease: 7 }],
        ];
        let mut known = RackState::default();
        let mut each = Vec::new();
        for records in &steps {
            each.extend(events_of(&known, &mut DecidedRecords::default(), records));
            known.note(records.clone());
        }
        let (nothing, mut decided) = (RackState::default(), DecidedRecords::default());
        let together: Vec<Draft> =
            steps.iter().flat_map(|records| events_of(&nothing, &mut decided, records)).collect();
        assert_eq!(together, each);
        assert!(each.len() > 4, "{each:?}");
    }
}
