//! The records of leases and functions, with what is asked of all of them at each step beside them: a rack may have tens
//! of thousands of functions.
//!
//! They are read as the maps that they are, and changed through [`LeaseTable::put`] and [`FunctionTable::put`] alone.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use super::undo::put;
use super::{Availability, FunctionRecord, LeaseRecord, LeaseState};
use crate::message::{FunctionId, LeaseId, Millis};

/// The leases by number.
#[derive(Debug, Default)]
pub(super) struct LeaseTable {
    records: BTreeMap<LeaseId, LeaseRecord>,
    /// Those that wait for the answer of a node.
    waiting: BTreeSet<LeaseId>,
    /// Those that are over, with when they ended.
    over: BTreeSet<(Option<Millis>, LeaseId)>,
}

/// Whether a node owes an answer about a lease.
fn waits(lease: &LeaseRecord) -> bool {
    match lease.state {
        LeaseState::Arming | LeaseState::Opening | LeaseState::Closing { .. } => true,
        LeaseState::Active { .. } => lease.asked_level().is_some(),
        LeaseState::Ended { .. } => false,
    }
}

impl LeaseTable {
    /// Sets or removes a lease's record; the one before is returned.
    pub fn put(&mut self, lease: LeaseId, record: Option<LeaseRecord>) -> Option<LeaseRecord> {
        match record.as_ref().is_some_and(waits) {
            true => self.waiting.insert(lease),
            false => self.waiting.remove(&lease),
        };
        let over = record.as_ref().filter(|it| !it.is_live()).map(|it| (it.until, lease));
        let before = put(&mut self.records, lease, record);
        if let Some(before) = before.as_ref().filter(|it| !it.is_live()) {
            self.over.remove(&(before.until, lease));
        }
        self.over.extend(over);
        before
    }

    /// Whether a node owes an answer about any of them.
    pub fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Those that are over, the one that has been so for longest first, with when they ended.
    pub fn over(&self) -> impl Iterator<Item = (Option<Millis>, &LeaseRecord)> {
        self.over.iter().filter_map(|(until, lease)| Some((*until, self.records.get(lease)?)))
    }
}

impl Deref for LeaseTable {
    type Target = BTreeMap<LeaseId, LeaseRecord>;

    fn deref(&self) -> &Self::Target {
        &self.records
    }
}

/// The functions by name.
#[derive(Debug, Default)]
pub(super) struct FunctionTable {
    records: BTreeMap<FunctionId, FunctionRecord>,
    /// The leases from which functions are being taken back.
    revoking: BTreeMap<FunctionId, LeaseId>,
}

impl FunctionTable {
    /// Sets or removes a function's record; the one before is returned.
    pub fn put(
        &mut self,
        function: FunctionId,
        record: Option<FunctionRecord>,
    ) -> Option<FunctionRecord> {
        let revoking = match record.as_ref().map(|it| &it.state) {
            Some(Availability::Revoking { lease }) => Some(*lease),
            _ => None,
        };
        put(&mut self.revoking, function.clone(), revoking);
        put(&mut self.records, function, record)
    }

    /// The leases from which functions are being taken back, each with its function.
    pub fn revoking(&self) -> impl Iterator<Item = (&FunctionId, LeaseId)> {
        self.revoking.iter().map(|(function, lease)| (function, *lease))
    }

    /// The functions of a host.
    pub fn of_host(&self, host: &str) -> impl Iterator<Item = &FunctionRecord> {
        let first = FunctionId { host: host.to_owned(), device: String::new() };
        let from_there = self.records.range(first..).map(|(_, record)| record);
        from_there.take_while(move |record| record.function.host == host)
    }
}

impl Deref for FunctionTable {
    type Target = BTreeMap<FunctionId, FunctionRecord>;

    fn deref(&self) -> &Self::Target {
        &self.records
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::authority::EndReason;
    use crate::message::Placement;

    fn lease(number: LeaseId, kind: u8, until: Millis) -> Option<LeaseRecord> {
        let state = match kind {
            0 => return None,
            1 => LeaseState::Arming,
            2 => LeaseState::Active { socket: String::new() },
            3 => LeaseState::Closing { reason: EndReason::Returned, within: None },
            _ => LeaseState::Ended { reason: EndReason::Returned },
        };
        Some(LeaseRecord {
            lease: number,
            function: FunctionId { host: "alpha".to_owned(), device: number.to_string() },
            epoch: 1,
            borrower: "beta".to_owned(),
            placement: Placement::Lender,
            group: None,
            level: None,
            change: None,
            since: 0,
            until: (kind > 3).then_some(until),
            turn: None,
            vm: None,
            starter: None,
            refused: false,
            state,
        })
    }

    fn function(host: u8, kind: u8) -> Option<FunctionRecord> {
        let function = FunctionId { host: format!("h{host}"), device: "d".to_owned() };
        let state = match kind {
            0 => return None,
            1 => Availability::Offered,
            2 => Availability::Lent { lease: host.into() },
            _ => Availability::Revoking { lease: host.into() },
        };
        Some(FunctionRecord { function, epoch: 1, state })
    }

    proptest! {
        #[test]
        fn what_is_kept_beside_the_records_is_what_they_say(
            leases in prop::collection::vec((0..6u64, 0..5u8, 0..4u64), 0..60),
            functions in prop::collection::vec((0..12u8, 0..4u8), 0..60),
        ) {
            let mut table = LeaseTable::default();
            for (number, kind, until) in leases {
                table.put(number, lease(number, kind, until));
                prop_assert_eq!(table.is_waited_for(), table.values().any(waits));
                let is_over = |it: &&LeaseRecord| !it.is_live();
                let mut over: Vec<_> =
                    table.values().filter(is_over).map(|it| (it.until, it.lease)).collect();
                over.sort_unstable();
                let found: Vec<_> = table.over().map(|(until, it)| (until, it.lease)).collect();
                prop_assert_eq!(found, over);
            }
            let mut table = FunctionTable::default();
            for (host, kind) in functions {
                let name = FunctionId { host: format!("h{host}"), device: "d".to_owned() };
                table.put(name, function(host, kind));
                let revoking = |it: &&FunctionRecord| matches!(it.state, Availability::Revoking { .. });
                prop_assert_eq!(
                    table.revoking().map(|(name, _)| name).collect::<Vec<_>>(),
                    table.values().filter(revoking).map(|it| &it.function).collect::<Vec<_>>()
                );
                for host in 0..12u8 {
                    let of = |it: &&FunctionRecord| it.function.host == format!("h{host}");
                    prop_assert_eq!(
                        table.of_host(&format!("h{host}")).collect::<Vec<_>>(),
                        table.values().filter(of).collect::<Vec<_>>()
                    );
                }
            }
        }
    }
}
