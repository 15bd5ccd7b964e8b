//! What nodes say, and what follows from it.

use crate::message::{Epoch, FunctionId, Incarnation, LeaseId, Message, Millis};

use super::{Authority, EndReason, FunctionRecord, FunctionState, HostRecord, LeaseState, Record};

impl Authority {
    pub(super) fn register(
        &mut self,
        now: Millis,
        host: &str,
        incarnation: Incarnation,
        devices: Vec<String>,
        address: String,
    ) {
        let known = self.hosts.get(host).cloned();
        let latest = known.as_ref().map_or(0, |h| h.incarnation);
        if incarnation < latest {
            self.send(host, Message::Outlived { incarnation, latest });
            return;
        }
        self.send(host, Message::Registered { incarnation });
        let record = HostRecord { host: host.to_owned(), incarnation, address };
        let new_life = incarnation > latest;
        if !new_life && known.as_ref() == Some(&record) {
            return;
        }
        self.hosts.insert(host.to_owned(), record.clone());
        self.outcome.records.push(Record::Host(record));
        if new_life {
            self.new_life(now, host, &devices);
        }
    }

    /// A node started anew: nothing of its former life can reach or be reached any more.
    pub(super) fn new_life(&mut self, now: Millis, host: &str, devices: &[String]) {
        let lent: Vec<FunctionRecord> =
            self.functions.values().filter(|f| f.function.host == host).cloned().collect();
        for mut function in lent {
            if let FunctionState::Lent { lease } = function.state {
                self.end_lease(now, lease, EndReason::LenderRestarted);
                self.say_ended(lease);
            }
            // Also when it was being revoked: its process is gone, and every mapping with it.
            function.state = match devices.contains(&function.function.device) {
                true => FunctionState::Offered,
                false => FunctionState::Withdrawn,
            };
            self.put_function(function);
        }
        for device in devices {
            let function = FunctionId { host: host.to_owned(), device: device.clone() };
            if !self.functions.contains_key(&function) {
                let state = FunctionState::Offered;
                self.put_function(FunctionRecord { function, epoch: 0, state });
            }
        }
        let borrowed: Vec<LeaseId> = self
            .leases
            .values()
            .filter(|l| l.is_live() && l.borrower == host)
            .map(|l| l.lease)
            .collect();
        for lease in borrowed {
            self.finish(now, lease, EndReason::BorrowerRestarted);
        }
    }

    /// The live lease that has `device` under `epoch`, if the message is about this life of its host.
    pub(super) fn current(
        &self,
        host: &str,
        incarnation: Incarnation,
        device: &str,
        epoch: Epoch,
    ) -> Option<LeaseId> {
        if self.hosts.get(host)?.incarnation != incarnation {
            return None;
        }
        let function = FunctionId { host: host.to_owned(), device: device.to_owned() };
        let record = self.functions.get(&function)?;
        match record.state {
            FunctionState::Lent { lease } if record.epoch == epoch => Some(lease),
            _ => None,
        }
    }

    pub(super) fn opened(
        &mut self,
        now: Millis,
        host: &str,
        lease: LeaseId,
        outcome: Result<String, String>,
    ) {
        let Some(record) = self.leases.get(&lease).filter(|l| l.borrower == host) else {
            return;
        };
        match (&record.state, outcome) {
            (LeaseState::Opening, Ok(socket)) => {
                self.set_lease_state(lease, LeaseState::Active { socket });
                self.deadlines.insert(lease, now.saturating_add(self.config.ttl));
            }
            (LeaseState::Opening | LeaseState::Active { .. }, Err(reason)) => {
                self.finish(now, lease, EndReason::BorrowerFailed(reason));
            }
            (LeaseState::Ended { .. }, _) => self.say_ended(lease),
            _ => {}
        }
    }

    pub(super) fn renew(&mut self, now: Millis, host: &str, lease: LeaseId) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Arming | LeaseState::Opening | LeaseState::Active { .. }) => {
                self.deadlines.insert(lease, now.saturating_add(self.config.ttl));
            }
            Some(LeaseState::Closing { .. }) => {}
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            None => {
                let reason = "the control plane does not know this lease".to_owned();
                self.send(host, Message::Ended { lease, reason });
            }
        }
    }

    pub(super) fn lost(&mut self, now: Millis, host: &str, lease: LeaseId, reason: String) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            Some(LeaseState::Closing { .. }) | None => {}
            Some(_) => self.close(now, lease, EndReason::LenderLost(reason)),
        }
    }

    pub(super) fn closed(&mut self, now: Millis, host: &str, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease).filter(|l| l.borrower == host) else {
            return;
        };
        if let LeaseState::Closing { reason } = &record.state {
            let reason = reason.clone();
            self.end_lease(now, lease, reason);
            self.start_revoke(lease);
        }
    }

    pub(super) fn revoked(
        &mut self,
        host: &str,
        incarnation: Incarnation,
        device: String,
        epoch: Epoch,
    ) {
        if self.hosts.get(host).is_none_or(|h| h.incarnation != incarnation) {
            return;
        }
        let function = FunctionId { host: host.to_owned(), device };
        let Some(record) = self.functions.get(&function) else {
            return;
        };
        if record.epoch == epoch && matches!(record.state, FunctionState::Revoking { .. }) {
            let record = FunctionRecord { state: FunctionState::Offered, ..record.clone() };
            self.put_function(record);
        }
    }
}
