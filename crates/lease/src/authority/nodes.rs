//! What nodes say, and what follows from it.

use std::collections::BTreeMap;

use crate::message::{Epoch, FunctionId, Incarnation, LeaseId, Message, Millis};

use super::{
    Authority, Availability, EndReason, FunctionRecord, HostRecord, LeaseRecord, LeaseState,
};

/// Leases, epochs, lives and changes of a level that records can have lost: a node that tells of more would use up the
/// numbers.
pub(super) const LOST_AT_MOST: u64 = 1_000_000;
/// No clock numbers a later life: nanoseconds until the year 2262. Later ones are those that the authority has named.
const LATEST_BY_CLOCK: Incarnation = u64::MAX / 2;

/// The newest epoch of a function, of which the records have `known`, and its node says that it has `told`.
pub(super) fn plausible_epoch(known: Epoch, told: Epoch) -> Epoch {
    told.clamp(known, known.saturating_add(LOST_AT_MOST))
}

impl Authority {
    /// A node is there: `devices` says what it lends, and the newest epoch of each that it knows.
    pub(super) fn register(
        &mut self,
        now: Millis,
        life: HostRecord,
        devices: &BTreeMap<String, Epoch>,
        newest_lease: LeaseId,
    ) {
        let (host, incarnation) = (life.host.clone(), life.incarnation);
        let latest = self.hosts.get(&host).map_or(0, |h| h.incarnation);
        // Nothing follows the greatest number, which a former version took.
        let latest = if latest == Incarnation::MAX { LATEST_BY_CLOCK } else { latest };
        // Whoever was given a number that nothing follows could never start anew.
        let plausible = latest.saturating_add(LOST_AT_MOST).max(LATEST_BY_CLOCK);
        if incarnation < latest || incarnation > plausible {
            self.send(&host, Message::StaleIncarnation { incarnation, latest });
            return;
        }
        self.send(&host, Message::Registered { incarnation });
        let is_back = self.contacts.get(&host).is_some_and(|contact| !contact.registered);
        self.set_registered(&host);
        self.put_host(life);
        if incarnation > latest {
            self.new_life(now, &host, devices);
        }
        self.learn(now, &host, devices, newest_lease);
        self.check_devices(&host, devices, is_back.then_some(newest_lease));
        self.say_devices(&host);
        if is_back {
            self.say_all(&host);
        }
    }

    /// Says all that a host's leases wait for, which was said while it did not listen.
    fn say_all(&mut self, host: &str) {
        let concerns = |lease: &&LeaseRecord| {
            lease.is_live() && (lease.borrower == host || lease.function.host == host)
        };
        let leases: Vec<LeaseId> =
            self.leases.values().filter(concerns).map(|lease| lease.lease).collect();
        leases.into_iter().for_each(|lease| self.say(lease));
        let revoking = self.functions.revoking().filter(|(function, _)| function.host == host);
        let revoking: Vec<LeaseId> = revoking.map(|(_, lease)| lease).collect();
        revoking.into_iter().for_each(|lease| self.say_revoke(lease));
    }

    /// A node may know of decisions that the records do not: they were lost, or an older copy was
    /// restored. New leases and epochs are numbered above all that nodes were told of.
    fn learn(
        &mut self,
        now: Millis,
        host: &str,
        devices: &BTreeMap<String, Epoch>,
        newest_lease: LeaseId,
    ) {
        let newest_lease = newest_lease.min(self.next_lease.saturating_add(LOST_AT_MOST));
        if newest_lease >= self.next_lease {
            self.set_next_lease(newest_lease.saturating_add(1));
        }
        for (device, newest) in devices {
            let function = FunctionId { host: host.to_owned(), device: device.clone() };
            let Some(record) = self.functions.get(&function).filter(|f| f.epoch < *newest) else {
                continue;
            };
            let epoch = plausible_epoch(record.epoch, *newest);
            self.put_function(FunctionRecord { epoch, ..record.clone() });
            if let Availability::Lent { lease } = self.functions[&function].state {
                // Its lender was told of a newer epoch, and so has taken this one's function back.
                self.finish(now, lease, EndReason::RecordsLost);
            }
        }
    }

    /// A node started anew: nothing of its former life can reach or be reached any more.
    fn new_life(&mut self, now: Millis, host: &str, devices: &BTreeMap<String, Epoch>) {
        let lent: Vec<FunctionRecord> = self.functions.of_host(host).cloned().collect();
        for mut function in lent {
            if let Availability::Lent { lease } = function.state {
                self.end_lease(now, lease, EndReason::LenderRestarted);
                self.say_ended(lease);
            }
            // Also when it was being revoked: its process is gone, and every mapping with it.
            function.state = match devices.contains_key(&function.function.device) {
                true => Availability::Offered,
                false => Availability::Withdrawn,
            };
            self.put_function(function);
        }
        for device in devices.keys() {
            let function = FunctionId { host: host.to_owned(), device: device.clone() };
            if !self.functions.contains_key(&function) {
                let state = Availability::Offered;
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
            Availability::Lent { lease } => {
                self.leases.get(&lease).filter(|l| l.epoch == epoch).map(|l| l.lease)
            }
            _ => None,
        }
    }

    /// The lender lets the lease's borrower in.
    pub(super) fn armed(&mut self, lease: LeaseId) {
        let confirmed = self.confirm(lease);
        if self.leases.get(&lease).is_some_and(|l| l.state == LeaseState::Arming) {
            self.set_lease_state(lease, LeaseState::Opening);
            self.say(lease);
        } else if confirmed {
            self.say(lease);
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
            return self.say_unknown(host, lease);
        };
        match (&record.state, outcome) {
            (LeaseState::Opening, Ok(socket)) => {
                self.set_lease_state(lease, LeaseState::Active { socket });
                self.turn_usable(now, lease);
                self.set_deadline(lease, Some(now.saturating_add(self.config.ttl)));
            }
            (LeaseState::Opening | LeaseState::Active { .. }, Err(reason)) => {
                self.finish(now, lease, EndReason::BorrowerFailed(reason));
            }
            (LeaseState::Ended { .. }, _) => self.say_ended(lease),
            _ => {}
        }
    }

    /// The borrower still wants the lease, and has said so at `sent` by its own clock, if it waits for the answer.
    pub(super) fn renew(&mut self, now: Millis, host: &str, lease: LeaseId, sent: Option<Millis>) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Arming | LeaseState::Opening | LeaseState::Active { .. }) => {
                self.set_deadline(lease, Some(now.saturating_add(self.config.ttl)));
                if let Some(sent) = sent {
                    self.say_extend(lease, sent);
                }
            }
            // Its time to release the function goes on; until that is over, its lender serves it.
            Some(LeaseState::Closing { .. }) => {
                if let Some(sent) = sent {
                    self.say_extend(lease, sent);
                }
            }
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            None => self.say_unknown(host, lease),
        }
    }

    /// The lender has heard of a renewal: now the borrower may count on it.
    pub(super) fn extended(&mut self, lease: LeaseId, sent: Millis) {
        let Some(record) = self.leases.get(&lease) else { return };
        if !matches!(record.state, LeaseState::Arming | LeaseState::Ended { .. }) {
            let borrower = record.borrower.clone();
            self.send(&borrower, Message::Renewed { lease, sent });
        }
    }

    pub(super) fn lost(&mut self, now: Millis, host: &str, lease: LeaseId, reason: String) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            // A function that is gone already is not worth more time than the rack gives.
            Some(LeaseState::Closing { .. }) => self.hasten(now, lease, self.config.close_grace),
            None => self.say_unknown(host, lease),
            Some(_) => self.close(now, lease, EndReason::LenderLost(reason), None),
        }
    }

    pub(super) fn closed(&mut self, now: Millis, host: &str, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease).filter(|l| l.borrower == host) else {
            return;
        };
        if let LeaseState::Closing { reason, .. } = &record.state {
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
        // The lease's epoch, not the function's newest: the lender may have named a greater one.
        let asked = |lease| self.leases.get(&lease).is_some_and(|l| l.epoch == epoch);
        if matches!(record.state, Availability::Revoking { lease } if asked(lease)) {
            let record = FunctionRecord { state: Availability::Offered, ..record.clone() };
            self.put_function(record);
            self.say_devices(host);
        }
    }
}
