//! Leases are granted, and returned in order.

use super::restore::RETURN;
use super::{
    Authority, Availability, BorrowRefused, Decision, EndReason, FunctionRecord, LeaseRecord,
    LeaseState, ReturnRefused,
};
use crate::message::{FunctionId, LeaseId, Millis, Terms};
use crate::share::TurnOf;

impl Authority {
    /// Lends `function` to `borrower` on these terms, if it can be obtained.
    ///
    /// # Errors
    /// [`BorrowRefused`], which names the holder; nothing changes then.
    pub fn borrow(
        &mut self,
        now: Millis,
        function: &FunctionId,
        borrower: &str,
        terms: impl Into<Terms>,
    ) -> Result<(LeaseId, Decision), BorrowRefused> {
        let (leases, outcome) =
            self.borrow_all(now, std::slice::from_ref(function), borrower, &terms.into())?;
        Ok((leases[0], outcome))
    }

    /// Lends all of `functions`, each named once, to `borrower` on these terms, if every one of them can be obtained.
    ///
    /// # Errors
    /// [`BorrowRefused`] for the first that is not there, or else for the first that cannot be obtained now; nothing changes
    /// then.
    pub fn borrow_all(
        &mut self,
        now: Millis,
        functions: &[FunctionId],
        borrower: &str,
        terms: &Terms,
    ) -> Result<(Vec<LeaseId>, Decision), BorrowRefused> {
        let now = self.enter(now);
        self.check_contact(now, borrower)?;
        // Of what others have, one that waits may wait for all; not for what never comes.
        functions.iter().try_for_each(|function| self.check_there(function))?;
        functions.iter().try_for_each(|function| self.check_unshared(function))?;
        functions.iter().try_for_each(|function| self.check_free(now, function))?;
        let grant = |function| self.grant(now, function, borrower, terms, None);
        let leases = functions.iter().map(grant).collect();
        Ok((leases, self.take()))
    }

    /// Whether a function is in the rack: nobody has to wait for those who have it or come first, where it is not.
    ///
    /// # Errors
    /// [`BorrowRefused::Unknown`], [`BorrowRefused::Withdrawn`], or [`BorrowRefused::Joining`] where its node has still to take
    /// it on.
    pub fn check_there(&self, function: &FunctionId) -> Result<(), BorrowRefused> {
        match self.functions.get(function).map(|record| &record.state) {
            None => Err(BorrowRefused::Unknown(function.clone())),
            Some(Availability::Withdrawn) if self.is_joining(function) => {
                Err(BorrowRefused::Joining(function.clone()))
            }
            Some(Availability::Withdrawn) => Err(BorrowRefused::Withdrawn(function.clone())),
            Some(_) => Ok(()),
        }
    }

    /// Whether a function can be obtained now.
    pub(super) fn check_free(
        &self,
        now: Millis,
        function: &FunctionId,
    ) -> Result<(), BorrowRefused> {
        self.check_there(function)?;
        match self.functions[function].state {
            Availability::Lent { lease } | Availability::Revoking { lease } => {
                return Err(self.held(function, lease));
            }
            Availability::Offered if self.is_withdrawn(function) => {
                return Err(BorrowRefused::Withdrawn(function.clone()));
            }
            Availability::Offered | Availability::Withdrawn => {}
        }
        self.check_contact(now, &function.host)
    }

    /// Begins the lease of a function that [can be obtained](Authority::check_free).
    pub(super) fn grant(
        &mut self,
        now: Millis,
        function: &FunctionId,
        borrower: &str,
        terms: &Terms,
        turn: Option<TurnOf>,
    ) -> LeaseId {
        let Terms { placement, group, level, vm, starter } = terms.clone();
        let lease = self.next_lease;
        let epoch = self.functions.get(function).map_or(0, |record| record.epoch).saturating_add(1);
        self.set_next_lease(lease.saturating_add(1));
        let (function, borrower) = (function.clone(), borrower.to_owned());
        let state = LeaseState::Arming;
        let record = LeaseRecord {
            lease,
            function: function.clone(),
            epoch,
            borrower,
            placement,
            group,
            level,
            change: None,
            since: now,
            until: None,
            turn,
            vm,
            starter,
            refused: false,
            state,
        };
        self.set_deadline(lease, Some(now.saturating_add(self.config.ttl.max(RETURN))));
        self.put_lease(record);
        self.put_function(FunctionRecord { function, epoch, state: Availability::Lent { lease } });
        self.say(lease);
        lease
    }

    /// Ends a lease in order: its borrower releases the function first. `within`: the function is taken after so long,
    /// instead of the time that the rack gives; where the lease is ending already, if that is sooner.
    ///
    /// # Errors
    /// [`ReturnRefused`]; nothing changes then.
    pub fn give_back(
        &mut self,
        now: Millis,
        lease: LeaseId,
        within: Option<Millis>,
    ) -> Result<Decision, ReturnRefused> {
        let now = self.enter(now);
        let record = self.leases.get(&lease).ok_or(ReturnRefused::Unknown(lease))?;
        match &record.state {
            LeaseState::Ended { reason } => {
                return Err(ReturnRefused::AlreadyEnded { lease, reason: reason.clone() });
            }
            LeaseState::Closing { .. } => {
                within.into_iter().for_each(|within| self.hasten(now, lease, within));
            }
            _ => self.close(now, lease, EndReason::Returned, within),
        }
        self.take_turns(now);
        Ok(self.take())
    }

    /// Ends several leases in order, in one step. Those that have ended, are ending or are not known stay as they are.
    pub fn give_back_all(&mut self, now: Millis, leases: &[LeaseId]) -> Decision {
        let now = self.enter(now);
        for lease in leases {
            let state = self.leases.get(lease).map(|record| &record.state);
            let over = |it: &LeaseState| {
                matches!(it, LeaseState::Ended { .. } | LeaseState::Closing { .. })
            };
            if !state.is_none_or(over) {
                self.close(now, *lease, EndReason::Returned, None);
            }
        }
        self.take_turns(now);
        self.take()
    }

    pub(super) fn check_contact(&self, now: Millis, host: &str) -> Result<(), BorrowRefused> {
        if !self.hosts.contains_key(host) {
            return Err(BorrowRefused::NoHost(host.to_owned()));
        }
        let contact = self.contacts.get(host).copied();
        let heard = contact.map_or(0, |c| c.heard);
        match now.saturating_sub(heard) {
            silent_ms if silent_ms > self.config.silence => {
                Err(BorrowRefused::Silent { host: host.to_owned(), silent_ms })
            }
            // What its node has of decisions that are not in the records is not known.
            _ if contact.is_none_or(|c| !c.registered) => {
                Err(BorrowRefused::Awaited(host.to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn held(&self, function: &FunctionId, lease: LeaseId) -> BorrowRefused {
        let record = &self.leases[&lease];
        let (function, borrower) = (function.clone(), record.borrower.clone());
        match record.state {
            LeaseState::Closing { .. } | LeaseState::Ended { .. } => {
                BorrowRefused::Returning { function, borrower, lease }
            }
            _ => BorrowRefused::Held { function, borrower, lease, since: record.since },
        }
    }
}
