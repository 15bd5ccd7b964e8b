//! Leases are granted and returned, each request with its key and its place among those who wait.

use rackbus_lease::{
    Availability, BorrowRefused, FunctionId, LeaseId, LeaseRecord, LeaseState, ReturnRefused, Terms,
};

use super::requests::{Answer, AwaitedLease, ChosenFunction, Granted, QueueStanding, Returned};
use super::{Step, Writer};
use crate::answers::{
    ANY_ACCELERATOR, BorrowAnswer, KeptAnswer, KeyLookup, KeyedRequest, TOGETHER, is_back,
};
use crate::api::{ApiError, EventKind};
use crate::events::{Draft, lease_span};
use crate::service::turns::is_busy;

/// A request for functions as it is kept under its key. Where the function was `chosen`, the request names none.
fn borrow_request(
    functions: &[FunctionId],
    borrower: &str,
    terms: &Terms,
    chosen: bool,
) -> KeyedRequest {
    // Who starts what uses it is not asked for: whoever asks again may be another process.
    let Terms { placement, group, level, vm, starter: _ } = terms.clone();
    let names: Vec<String> = functions.iter().map(FunctionId::to_string).collect();
    let function = if chosen { ANY_ACCELERATOR.to_owned() } else { names.join(TOGETHER) };
    KeyedRequest::Borrow { function, borrower: borrower.to_owned(), placement, group, level, vm }
}

/// The outcome of a request for functions, before it is stored.
pub(super) enum DecidedGrant {
    /// Leases that are granted, and whether the request may be repeated.
    Leases { leases: Vec<LeaseId>, repeatable: bool },
    /// The request was answered before, about these leases.
    Answered(Box<BorrowAnswer>, Vec<LeaseId>),
}

impl Writer {
    pub(super) fn give_back_unwanted(&mut self) {
        let now = self.shared.clock.now();
        for lease in self.interests.take_unwanted(now) {
            // Nobody has the answer: who asks again with the same key asks for another lease.
            let forgotten_keys = self.answers.borrow_keys(lease);
            let returned =
                self.step(|authority, now| match authority.give_back(now, lease, None) {
                    Ok(outcome) => (true, Step { forgotten_keys, ..outcome.into() }),
                    Err(_) => (false, Step { forgotten_keys, ..Step::default() }),
                });
            match returned {
                Ok(true) => {
                    let _about = lease_span(lease).entered();
                    tracing::info!("given back: the caller has gone");
                }
                // It has ended already.
                Ok(false) => {}
                // Not at once: the store may fail for long.
                Err(_) => {
                    let at = now.saturating_add(self.authority.config().resend);
                    self.interests.not_before(at, lease);
                }
            }
        }
    }

    pub(super) fn borrow(
        &mut self,
        functions: &[FunctionId],
        borrower: &str,
        terms: &Terms,
        (key, chosen): (Option<String>, Option<ChosenFunction>),
        asker: QueueStanding,
    ) -> Result<Result<DecidedGrant, BorrowRefused>, ApiError> {
        let request = borrow_request(functions, borrower, terms, chosen.is_some());
        match self.find(key.as_deref(), &request)? {
            KeyLookup::New => {}
            // The same request, which goes on with another function.
            KeyLookup::Pending(before) | KeyLookup::Answered(before, _)
                if chosen.is_some_and(|chosen| chosen.instead_of == Some(before)) => {}
            KeyLookup::Answered(_, answer) if chosen.is_some() && answer.is_err() => {}
            // Its caller has them since: nobody takes one back because another has ended.
            KeyLookup::Answered(first, answer) if self.is_told(first, functions.len(), &answer) => {
                let leases = (first..).take(functions.len()).collect();
                return Ok(Ok(DecidedGrant::Answered(answer, leases)));
            }
            // The answer that is kept tells of the first; what was granted in one step has numbers in a row.
            KeyLookup::Pending(first) | KeyLookup::Answered(first, _) => {
                let leases = (first..).take(functions.len()).collect();
                return Ok(Ok(DecidedGrant::Leases { leases, repeatable: true }));
            }
        }
        // Whoever waits for its turn is woken when one of them goes, and is told of that and not of its turn.
        let there = functions.iter().try_for_each(|function| self.authority.check_there(function));
        let turn = || functions.iter().try_for_each(|function| self.check_turn(function, asker));
        if let Err(refused) = there.and_then(|()| turn()) {
            self.refused_borrow(functions, borrower, &refused, asker);
            return Ok(Err(refused));
        }
        let repeatable = key.is_some();
        let granted = self.stage(|authority, at_ms| {
            match authority.borrow_all(at_ms, functions, borrower, terms) {
                Ok((leases, outcome)) => {
                    let lease = leases[0];
                    let keep = |key| KeptAnswer { key, request, lease, at_ms, answer: None };
                    let answers = key.map(keep).into_iter().collect();
                    (Ok(leases), Step { answers, ..outcome.into() })
                }
                Err(refused) => (Err(refused), Step::default()),
            }
        });
        if let Err(refused) = &granted {
            self.refused_borrow(functions, borrower, refused, asker);
        }
        Ok(granted.map(|leases| DecidedGrant::Leases { leases, repeatable }))
    }

    /// What was decided is stored: whoever asked for it waits for it, or is told that it has it.
    pub(super) fn hand_out(&mut self, decided: DecidedGrant) -> Granted {
        match decided {
            DecidedGrant::Leases { leases, repeatable } => {
                let wanted = leases.into_iter().map(|lease| self.want(lease, repeatable));
                Granted::Leases(wanted.collect())
            }
            DecidedGrant::Answered(answer, leases) => {
                leases.iter().for_each(|lease| self.interests.told(*lease));
                Granted::Answered(answer, leases)
            }
        }
    }

    /// Whether a request for so many functions, of which the first has the lease `first`, need not wait to be answered as it
    /// was before. Of one function the answer is all there is to know. One of several that nobody was told of is whole or
    /// not at all: where one of them has ended meanwhile, the others are given back.
    fn is_told(&self, first: LeaseId, count: usize, answer: &BorrowAnswer) -> bool {
        let mut leases = (first..).take(count);
        let is_live = |lease| self.authority.lease(lease).is_some_and(LeaseRecord::is_live);
        match answer {
            _ if count == 1 => true,
            Ok(_) => leases.all(|lease| self.interests.is_owned(lease)),
            Err(_) => !leases.any(is_live),
        }
    }

    /// What was granted before to a request that names no function; nothing where it was refused, for it is decided
    /// anew then.
    pub(super) fn recall(
        &mut self,
        key: &str,
        borrower: &str,
        terms: &Terms,
    ) -> Result<Option<DecidedGrant>, ApiError> {
        let request = borrow_request(&[], borrower, terms, true);
        Ok(match self.find(Some(key), &request)? {
            KeyLookup::New => None,
            KeyLookup::Answered(_, answer) if answer.is_err() => None,
            KeyLookup::Answered(lease, answer) => Some(DecidedGrant::Answered(answer, vec![lease])),
            KeyLookup::Pending(lease) => {
                Some(DecidedGrant::Leases { leases: vec![lease], repeatable: true })
            }
        })
    }

    /// Whether it is this request's turn, where the function is available.
    pub(super) fn check_turn(
        &self,
        function: &FunctionId,
        asker: QueueStanding,
    ) -> Result<(), BorrowRefused> {
        let state = self.authority.function(function).map(|record| &record.state);
        if state != Some(&Availability::Offered) {
            return Ok(());
        }
        let queue = self.shared.queue();
        let before = match asker {
            QueueStanding::Now(priority) => queue.before_newcomer(function, priority),
            QueueStanding::Waits(place) => queue.before(function, place),
        };
        match before {
            0 => Ok(()),
            before => Err(BorrowRefused::Queued { function: function.clone(), before }),
        }
    }

    pub(super) fn refused_borrow(
        &mut self,
        functions: &[FunctionId],
        borrower: &str,
        refused: &BorrowRefused,
        asker: QueueStanding,
    ) {
        // Asked again as soon as the nodes have registered, or while it waits.
        let waits = matches!(asker, QueueStanding::Waits(_)) && is_busy(refused);
        if waits || matches!(refused, BorrowRefused::Awaited(_) | BorrowRefused::Joining(_)) {
            return;
        }
        self.shared.known().refused += 1;
        let cause = refused.to_string();
        self.refused(Draft::of_refused_borrow(borrower, functions, None, &cause), false);
    }

    pub(super) fn give_back(
        &mut self,
        lease: LeaseId,
        within: Option<u64>,
        key: Option<String>,
    ) -> Result<Result<Returned, ReturnRefused>, ApiError> {
        let request = KeyedRequest::Return { lease, within };
        match self.find(key.as_deref(), &request)? {
            KeyLookup::New => {}
            KeyLookup::Pending(_) => return Ok(Ok(Returned::Awaited)),
            KeyLookup::Answered(_, answer) => return Ok(Ok(Returned::Answered(answer))),
        }
        // Somebody else may have returned it, and its function still be on the way back.
        let record = self.authority.lease(lease);
        let held = record.is_some_and(|record| !is_back(&self.authority, record));
        let returned = self.stage(|authority, at_ms| {
            let keep = |key| KeptAnswer { key, request, lease, at_ms, answer: None };
            let answers = key.map(keep).into_iter().collect();
            match authority.give_back(at_ms, lease, within) {
                Ok(outcome) => (Ok(Returned::Awaited), Step { answers, ..outcome.into() }),
                Err(ReturnRefused::AlreadyEnded { .. }) if held => {
                    (Ok(Returned::Awaited), Step { answers, ..Step::default() })
                }
                Err(refused) => (Err(refused), Step::default()),
            }
        });
        if let Err(refused) = &returned {
            let text = format!("a return was refused: {refused}");
            self.refused(Draft::of_host(EventKind::Refusal, None, text), false);
        }
        Ok(returned)
    }

    /// Answers whether somebody may be told that it has these leases, and notes that it is.
    pub(super) fn told(&mut self, leases: Vec<LeaseId>, answer: Answer<bool>) {
        let asked = leases.clone();
        let decide = move |writer: &mut Writer| Ok(writer.are_active(&asked));
        self.answer_when_stored(decide, move |writer, all| {
            if matches!(all, Ok(true)) {
                leases.iter().for_each(|lease| writer.interests.told(*lease));
            }
            let _ = answer.send(all);
        });
    }

    /// Whether all of these leases can be used. Where one is on its way back the others are not wanted either.
    fn are_active(&self, leases: &[LeaseId]) -> bool {
        let is_active = |lease: &LeaseId| {
            let record = self.authority.lease(*lease);
            record.is_some_and(|record| matches!(record.state, LeaseState::Active { .. }))
        };
        leases.iter().all(is_active)
    }

    /// Somebody waits for a lease, and may ask again where the request has a key (`repeatable`).
    pub(super) fn want(&mut self, lease: LeaseId, repeatable: bool) -> AwaitedLease {
        let authority = &self.authority;
        self.interests.retain(|it| authority.lease(it).is_some_and(|lease| lease.is_live()));
        AwaitedLease { lease, interest: self.interests.want(lease, repeatable) }
    }
}
