//! The steps that decisions are made of: ending a lease, taking a function back, what is said to
//! whom, and the records of it all.

use crate::message::{Grant, LeaseId, Message, Millis};

use super::{
    Authority, EndReason, FunctionRecord, FunctionState, LeaseRecord, LeaseState, Outcome,
    REMEMBERED, Record,
};

impl Authority {
    /// Ends a lease in order: the borrower first, then the lender.
    pub(super) fn close(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.set_lease_state(lease, LeaseState::Closing { reason });
        self.deadlines.insert(lease, now.saturating_add(self.config.close_grace));
        self.say(lease);
    }

    /// Ends a lease at once: the lender takes the function away, the borrower is told.
    pub(super) fn finish(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.end_lease(now, lease, reason);
        self.say_ended(lease);
        self.start_revoke(lease);
    }

    pub(super) fn end_lease(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.deadlines.remove(&lease);
        if let Some(record) = self.leases.get(&lease).cloned() {
            let state = LeaseState::Ended { reason };
            self.put_lease(LeaseRecord { state, until: Some(now), ..record });
            self.forget();
        }
    }

    /// Lets go of the oldest lease that is over and back, when there are too many.
    pub(super) fn forget(&mut self) {
        if self.leases.len() <= REMEMBERED {
            return;
        }
        let wanted = |lease: LeaseId| {
            self.functions.values().any(|f| {
                matches!(f.state, FunctionState::Lent { lease: l } | FunctionState::Revoking { lease: l } if l == lease)
            })
        };
        let oldest = self.leases.values().find(|l| !l.is_live() && !wanted(l.lease));
        if let Some(lease) = oldest.map(|l| l.lease) {
            self.leases.remove(&lease);
            self.outcome.records.push(Record::Forgotten { lease });
        }
    }

    pub(super) fn start_revoke(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let Some(function) = self.functions.get(&record.function) else {
            return;
        };
        if function.state == (FunctionState::Lent { lease }) {
            let state = FunctionState::Revoking { lease };
            self.put_function(FunctionRecord { state, ..function.clone() });
            self.say_revoke(lease);
        }
    }

    /// Says (again) what a live lease waits for.
    pub(super) fn say(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease).cloned() else {
            return;
        };
        let Some(lender) = self.hosts.get(&record.function.host).cloned() else {
            return;
        };
        match record.state {
            LeaseState::Arming => {
                let message = Message::Arm {
                    incarnation: lender.incarnation,
                    device: record.function.device,
                    lease,
                    epoch: record.epoch,
                    borrower: record.borrower,
                };
                self.send(&lender.host, message);
            }
            LeaseState::Opening => {
                let (function, epoch) = (record.function, record.epoch);
                let (address, ttl) = (lender.address, self.config.ttl);
                let grant = Grant { lease, function, epoch, address, ttl };
                self.send(&record.borrower, Message::Granted(grant));
            }
            LeaseState::Closing { reason } => {
                let reason = reason.to_string();
                self.send(&record.borrower, Message::Ended { lease, reason });
            }
            LeaseState::Active { .. } | LeaseState::Ended { .. } => {}
        }
    }

    pub(super) fn say_ended(&mut self, lease: LeaseId) {
        if let Some(LeaseRecord { borrower, state: LeaseState::Ended { reason }, .. }) =
            self.leases.get(&lease)
        {
            let (borrower, reason) = (borrower.clone(), reason.to_string());
            self.send(&borrower, Message::Ended { lease, reason });
        }
    }

    pub(super) fn say_revoke(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let Some(lender) = self.hosts.get(&record.function.host) else {
            return;
        };
        let message = Message::Revoke {
            incarnation: lender.incarnation,
            device: record.function.device.clone(),
            epoch: record.epoch,
        };
        let host = lender.host.clone();
        self.send(&host, message);
    }

    pub(super) fn send(&mut self, host: &str, message: Message) {
        self.outcome.messages.push((host.to_owned(), message));
    }

    pub(super) fn set_lease_state(&mut self, lease: LeaseId, state: LeaseState) {
        if let Some(record) = self.leases.get(&lease).cloned() {
            self.put_lease(LeaseRecord { state, ..record });
        }
    }

    pub(super) fn put_lease(&mut self, record: LeaseRecord) {
        self.outcome.records.push(Record::Lease(record.clone()));
        self.leases.insert(record.lease, record);
    }

    pub(super) fn put_function(&mut self, record: FunctionRecord) {
        self.outcome.records.push(Record::Function(record.clone()));
        self.functions.insert(record.function.clone(), record);
    }

    pub(super) fn take(&mut self) -> Outcome {
        std::mem::take(&mut self.outcome)
    }
}
