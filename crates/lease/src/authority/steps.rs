//! The steps that decisions are made of: ending a lease, taking a function back, what is said to
//! whom, and the records of it all.

use crate::message::{Grant, LeaseId, Message, Millis};

use super::{
    Authority, Availability, Config, Decision, EndReason, FunctionRecord, HostRecord, LeaseRecord,
    LeaseState, REMEMBERED, Record, Undo, put,
};

/// How long the user of a lease that is closing has to release the function, from when it began to.
pub(super) fn time_to_release(config: &Config, record: &LeaseRecord) -> Millis {
    let grace = record.turn.as_ref().map_or(0, |turn| turn.grace);
    match record.state {
        LeaseState::Closing { within: Some(within), .. } => within,
        _ => grace.saturating_add(config.close_grace),
    }
}

impl Authority {
    /// Every step begins here. Time never goes back, and time that passed unseen (the process was
    /// frozen, or waited for its disk) counts against nobody: the nodes may have renewed meanwhile,
    /// and what they said is still to be heard. A beat of it counts anyway, so that a lease
    /// ends in the end also under an authority that is always late.
    pub(super) fn enter(&mut self, now: Millis) -> Millis {
        let now = now.max(self.seen);
        let (passed, beat) = (now - self.seen, self.config.beat());
        self.seen = now;
        if passed > 2 * beat {
            let unseen = passed - beat;
            let deadlines = self.deadlines.values_mut();
            let heard = self.contacts.values_mut().map(|contact| &mut contact.heard);
            deadlines.chain(heard).for_each(|at| *at = at.saturating_add(unseen));
        }
        now
    }

    /// Ends a lease in order: the borrower first, then the lender. Its user has the rack's time to release the
    /// function, or the time `within`.
    pub(super) fn close(
        &mut self,
        now: Millis,
        lease: LeaseId,
        reason: EndReason,
        within: Option<Millis>,
    ) {
        self.confirm(lease);
        // Nobody keeps a function beyond its turn by returning it.
        let turn = self.leases.get(&lease).and_then(|record| record.turn.as_ref());
        let most = turn.map(|turn| turn.grace.saturating_add(self.config.close_grace));
        let within = within.map(|within| within.min(most.unwrap_or(within)));
        self.set_lease_state(lease, LeaseState::Closing { reason, within });
        let time = self.leases.get(&lease).map_or(0, |it| time_to_release(&self.config, it));
        self.set_deadline(lease, Some(now.saturating_add(time)));
        self.say(lease);
    }

    /// Ends a lease that is closing within this time from now, if it would take longer.
    pub(super) fn hasten(&mut self, now: Millis, lease: LeaseId, within: Millis) {
        let at = now.saturating_add(within);
        let state = self.leases.get(&lease).map(|record| &record.state);
        if let Some(LeaseState::Closing { reason, .. }) = state
            && self.deadlines.get(&lease).is_some_and(|deadline| *deadline > at)
        {
            let reason = reason.clone();
            self.set_lease_state(lease, LeaseState::Closing { reason, within: Some(within) });
            self.set_deadline(lease, Some(at));
            self.say(lease);
        }
    }

    /// Its lender need not be asked any more whether it has the lease armed; whether it had to be.
    pub(super) fn confirm(&mut self, lease: LeaseId) -> bool {
        let had_to_be = self.unconfirmed.remove(&lease);
        if had_to_be {
            self.undo.push(Undo::Confirmed(lease));
        }
        had_to_be
    }

    /// Ends a lease at once: the lender takes the function away, the borrower is told.
    pub(super) fn finish(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.end_lease(now, lease, reason);
        self.say_ended(lease);
        self.start_revoke(lease);
    }

    /// Notes that a lease's lender refused it: one that is lent already is not refused any more, whatever is said.
    pub(super) fn note_refused(&mut self, lease: LeaseId) {
        let arming = |it: &&LeaseRecord| matches!(it.state, LeaseState::Arming);
        if let Some(record) = self.leases.get(&lease).filter(arming).cloned() {
            self.put_lease(LeaseRecord { refused: true, ..record });
        }
    }

    pub(super) fn end_lease(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.set_deadline(lease, None);
        self.confirm(lease);
        if let Some(record) = self.leases.get(&lease).cloned() {
            self.turn_ended(now, &record, &reason);
            let state = LeaseState::Ended { reason };
            self.put_lease(LeaseRecord { state, until: Some(now), ..record });
            self.forget(now);
        }
    }

    /// Releases the lease that has been over and back for longest, when there are too many. What ended at `now` stays: whoever
    /// waits for that has not seen it yet.
    fn forget(&mut self, now: Millis) {
        if self.leases.len() <= REMEMBERED {
            return;
        }
        if let Some(lease) = self.outdated(now) {
            let before = self.leases.put(lease, None);
            self.undo.push(Undo::Lease(lease, before));
            self.outcome.records.push(Record::Forgotten { lease });
        }
    }

    /// The lease that has been over, and its function back, for longest before `now`.
    fn outdated(&self, now: Millis) -> Option<LeaseId> {
        let is_back = |over: &LeaseRecord| {
            let state = self.functions.get(&over.function).map(|it| &it.state);
            !matches!(
                state,
                Some(Availability::Lent { lease } | Availability::Revoking { lease }) if *lease == over.lease
            )
        };
        let mut before = self.leases.over().take_while(|(until, _)| *until < Some(now));
        before.find(|(_, lease)| is_back(lease)).map(|(_, lease)| lease.lease)
    }

    pub(super) fn start_revoke(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let Some(function) = self.functions.get(&record.function) else {
            return;
        };
        if function.state == (Availability::Lent { lease }) {
            let state = Availability::Revoking { lease };
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
            LeaseState::Arming => self.say_arm(record, &lender),
            LeaseState::Active { .. } if self.unconfirmed.contains(&lease) => {
                self.say_arm(record, &lender);
            }
            LeaseState::Opening => {
                let (function, epoch) = (record.function, record.epoch);
                let (address, ttl) = (lender.address, self.config.ttl);
                let LeaseRecord { placement, group, turn, vm, starter, .. } = record;
                let strict_ttl = self.config.strict_ttl;
                #[rustfmt::skip]
                let grant = Grant {
                    lease, function, epoch, address, ttl, placement, group, turn, vm, starter, strict_ttl,
                };
                self.send(&record.borrower, Message::Granted(grant));
            }
            LeaseState::Closing { ref reason, .. } => {
                let within = time_to_release(&self.config, &record);
                let message = match (reason, &record.turn) {
                    // Whoever ends it: a program has its grace, unless its node says that it needs none.
                    (
                        EndReason::TurnOver | EndReason::Returned | EndReason::Withdrawn,
                        Some(turn),
                    ) => {
                        let (grace, within) = (turn.grace.min(within), Some(within));
                        Message::TurnOver { lease, grace, within }
                    }
                    _ => {
                        let (reason, within) = (reason.to_string(), Some(within));
                        Message::Ended { lease, reason, within }
                    }
                };
                self.send(&record.borrower, message);
            }
            LeaseState::Active { .. } => self.say_level(&record),
            LeaseState::Ended { .. } => {}
        }
    }

    fn say_arm(&mut self, record: LeaseRecord, lender: &HostRecord) {
        let LeaseRecord { lease, function, epoch, borrower, placement, level, .. } = record;
        let (incarnation, device) = (lender.incarnation, function.device);
        let serve_for = self.config.strict_ttl.then_some(self.config.ttl);
        #[rustfmt::skip]
        let message = Message::Arm {
            incarnation, device, lease, epoch, borrower, placement, level, serve_for,
        };
        self.send(&lender.host, message);
    }

    /// Tells the lender of a renewal, who answers.
    pub(super) fn say_extend(&mut self, lease: LeaseId, sent: Millis) {
        let Some(record) = self.leases.get(&lease) else { return };
        let Some(lender) = self.hosts.get(&record.function.host) else { return };
        let (incarnation, epoch) = (lender.incarnation, record.epoch);
        let (host, device) = (lender.host.clone(), record.function.device.clone());
        self.send(&host, Message::Extend { incarnation, device, epoch, sent });
    }

    pub(super) fn say_ended(&mut self, lease: LeaseId) {
        if let Some(LeaseRecord { borrower, state: LeaseState::Ended { reason }, .. }) =
            self.leases.get(&lease)
        {
            let (borrower, reason) = (borrower.clone(), reason.to_string());
            self.send(&borrower, Message::Ended { lease, reason, within: None });
        }
    }

    /// Answers a node that has a lease which is not known (any more): it is to release it.
    pub(super) fn say_unknown(&mut self, host: &str, lease: LeaseId) {
        let reason = "the control plane does not know this lease".to_owned();
        self.send(host, Message::Ended { lease, reason, within: None });
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
        let lease = record.lease;
        let before = self.leases.put(lease, Some(record));
        self.undo.push(Undo::Lease(lease, before));
    }

    pub(super) fn put_function(&mut self, record: FunctionRecord) {
        self.outcome.records.push(Record::Function(record.clone()));
        let function = record.function.clone();
        let before = self.functions.put(function.clone(), Some(record));
        self.undo.push(Undo::Function(function, before));
    }

    /// Notes a host's node, if that is news.
    pub(super) fn put_host(&mut self, record: HostRecord) {
        if self.hosts.get(&record.host) == Some(&record) {
            return;
        }
        self.outcome.records.push(Record::Host(record.clone()));
        let host = record.host.clone();
        let before = self.hosts.insert(host.clone(), record);
        self.undo.push(Undo::Host(host, before));
    }

    pub(super) fn set_registered(&mut self, host: &str) {
        if let Some(contact) = self.contacts.get_mut(host).filter(|c| !c.registered) {
            contact.registered = true;
            self.undo.push(Undo::Registered(host.to_owned()));
        }
    }

    pub(super) fn set_deadline(&mut self, lease: LeaseId, at: Option<Millis>) {
        let before = put(&mut self.deadlines, lease, at);
        self.undo.push(Undo::Deadline(lease, before));
    }

    pub(super) fn set_next_lease(&mut self, lease: LeaseId) {
        self.undo.push(Undo::NextLease(self.next_lease));
        self.next_lease = lease;
        self.outcome.records.push(Record::NextLease { lease });
    }

    pub(super) fn take(&mut self) -> Decision {
        std::mem::take(&mut self.outcome)
    }
}
