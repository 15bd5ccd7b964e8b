//! Borrowers take turns on a function: who joins and leaves a ring, who has the function next, and when who has it is
//! asked to release it. The account of a share is in [`crate::share`].

use crate::message::{FunctionId, LeaseId, Millis};
use crate::share::{
    DEFAULT_SLICE, LeaveReason, MOST_FAILED, MOST_SHARES, MOST_UNUSED, ShareRecord, ShareRefused,
    ShareRequest, ShareTurn, ShareTurnEnd, TurnUse, next_turn, tail,
};

use super::{Authority, BorrowRefused, Decision, EndReason, LeaseRecord, LeaseState, Record, Undo};

/// How many times the longest silence a share's host may be silent before the share leaves its ring.
const SILENCES: Millis = 8;

impl Authority {
    /// A borrower takes turns on a function from now on. The number is the share's.
    ///
    /// # Errors
    /// [`ShareRefused`]; nothing changes then.
    pub fn share(
        &mut self,
        now: Millis,
        request: ShareRequest,
    ) -> Result<(LeaseId, Decision), ShareRefused> {
        let now = self.enter(now);
        let function = request.function.clone();
        if !self.functions.contains_key(&function) {
            return Err(ShareRefused::Unknown(function));
        }
        if self.is_withdrawn(&function) {
            return Err(ShareRefused::Withdrawn(function));
        }
        if !self.hosts.contains_key(&request.borrower) {
            return Err(ShareRefused::NoHost(request.borrower));
        }
        let ring = self.ring(&function);
        if ring.len() >= MOST_SHARES {
            return Err(ShareRefused::Full(function));
        }
        let slice = match (ring.first().map(|share| share.slice), request.slice) {
            (Some(slice), Some(asked)) if slice != asked => {
                return Err(ShareRefused::OtherSlice { function, slice });
            }
            (Some(slice), _) => slice,
            (None, asked) => asked.unwrap_or(DEFAULT_SLICE),
        };
        let number = self.next_lease;
        self.set_next_lease(number.saturating_add(1));
        self.put_share(ShareRecord::new(number, request, slice, tail(&ring), now));
        self.take_turns(now);
        Ok((number, self.take()))
    }

    /// A share leaves its ring. If it has the function, that is returned in order.
    ///
    /// # Errors
    /// [`ShareRefused::NoShare`].
    pub fn leave(&mut self, now: Millis, share: LeaseId) -> Result<Decision, ShareRefused> {
        let now = self.enter(now);
        if !self.shares.contains_key(&share) {
            return Err(ShareRefused::NoShare(share));
        }
        self.remove_share(now, share, LeaveReason::Asked);
        self.take_turns(now);
        Ok(self.take())
    }

    /// The turn of a share is given back early; it keeps its place among those who take turns.
    ///
    /// # Errors
    /// [`ShareRefused::NoShare`], [`ShareRefused::NoTurn`].
    pub fn give_turn_back(
        &mut self,
        now: Millis,
        share: LeaseId,
    ) -> Result<Decision, ShareRefused> {
        let now = self.enter(now);
        let record = self.shares.get(&share).ok_or(ShareRefused::NoShare(share))?;
        let turn = record.turn.as_ref().ok_or(ShareRefused::NoTurn(share))?;
        let lease = turn.lease;
        self.ask_back(now, share, lease);
        self.take_turns(now);
        Ok(self.take())
    }

    /// The shares, by number.
    pub fn shares(&self) -> impl Iterator<Item = &ShareRecord> {
        self.shares.values()
    }

    /// Who wants the function by itself, where others take turns on it.
    pub(super) fn check_unshared(&self, function: &FunctionId) -> Result<(), BorrowRefused> {
        match self.shares.values().filter(|share| share.function == *function).count() {
            0 => Ok(()),
            shares => Err(BorrowRefused::Shared { function: function.clone(), shares }),
        }
    }

    /// Gives functions that are free to who is next, asks who has had one for long enough to release it where others want
    /// it, and drops shares whose hosts are silent for long. To be called at the end of each step that may change any
    /// of that.
    pub(super) fn take_turns(&mut self, now: Millis) {
        if self.shares.is_empty() {
            return;
        }
        self.drop_silent(now);
        let due: Vec<(LeaseId, LeaseId)> = self
            .shares
            .values()
            .filter(|share| {
                share.ends_at().is_some_and(|at| at <= now) && self.is_wanted(now, share)
            })
            .filter_map(|share| Some((share.share, share.turn.as_ref()?.lease)))
            .collect();
        for (share, lease) in due {
            if !self.renew_turn(now, share) {
                self.ask_back(now, share, lease);
            }
        }
        let mut functions: Vec<&FunctionId> =
            self.shares.values().map(|share| &share.function).collect();
        functions.sort_unstable();
        functions.dedup();
        let free = |function: &&&FunctionId| self.check_free(now, function).is_ok();
        let free: Vec<FunctionId> = functions.iter().filter(free).map(|it| (*it).clone()).collect();
        free.into_iter().for_each(|function| self.next_of(now, &function));
    }

    /// When [`take_turns`](Authority::take_turns) has something to do, if nothing else happens before.
    pub(super) fn next_turn_at(&self) -> Option<Millis> {
        let over = |share: &ShareRecord| {
            let at = share.ends_at()?;
            self.is_wanted(self.seen, share).then_some(at)
        };
        let again =
            |share: &ShareRecord| (share.not_before > self.seen).then_some(share.not_before);
        self.shares.values().filter_map(|share| over(share).or_else(|| again(share))).min()
    }

    /// The function of a lease can be used from now on.
    pub(super) fn turn_usable(&mut self, now: Millis, lease: LeaseId) {
        let Some((number, function)) = self.turn_of(lease) else { return };
        let from = self
            .ring(&function)
            .into_iter()
            .filter_map(|share| Some((share.let_go?, share.share)))
            .max();
        let ring = self.ring(&function);
        for former in ring.into_iter().filter(|share| share.let_go.is_some()) {
            self.change_share(former.share, |share| share.let_go = None);
        }
        // What one share has twice in a row was not handed over.
        let let_go = from.filter(|(_, from)| *from != number).map(|(at, _)| at);
        self.change_share(number, |share| share.usable(now, let_go));
    }

    /// A lease ended: if it was a turn, the share is charged for it and goes to the tail of its ring.
    pub(super) fn turn_ended(&mut self, now: Millis, record: &LeaseRecord, reason: &EndReason) {
        let Some((number, function)) = self.turn_of(record.lease) else { return };
        let how = match reason {
            EndReason::TurnOver => ShareTurnEnd::Over,
            EndReason::TurnGivenBack | EndReason::Returned | EndReason::Withdrawn => {
                ShareTurnEnd::GivenBack
            }
            EndReason::LenderFailed(_) | EndReason::BorrowerFailed(_) => ShareTurnEnd::Failed,
            EndReason::Expired
            | EndReason::BorrowerRestarted
            | EndReason::LenderLost(_)
            | EndReason::LenderRestarted
            | EndReason::RecordsLost => ShareTurnEnd::CutShort,
        };
        let place = tail(&self.ring(&function));
        self.change_share(number, |share| {
            // It was had for the whole of it: its node would have said that nobody used it.
            let had = how == ShareTurnEnd::Over
                && share.turn.as_ref().is_some_and(|turn| turn.begun.is_some());
            if had {
                share.unused = 0;
            }
            share.end(now, how, place);
        });
        if let EndReason::BorrowerFailed(why) | EndReason::LenderFailed(why) = reason
            && self.shares[&number].failed >= MOST_FAILED
        {
            self.remove_share(now, number, LeaveReason::Failed(why.clone()));
        }
    }

    /// A node says how a turn of its host's goes.
    pub(super) fn turn_used(&mut self, now: Millis, host: &str, lease: LeaseId, how: TurnUse) {
        let ours = self.leases.get(&lease).is_some_and(|it| it.borrower == host && it.is_live());
        let Some((number, _)) = self.turn_of(lease).filter(|_| ours) else { return };
        // It is repeated until it is answered by the lease's end.
        let closing = matches!(self.leases[&lease].state, LeaseState::Closing { .. });
        if closing && !matches!(how, TurnUse::Gone(_)) {
            return;
        }
        let was_used = how == TurnUse::Used;
        self.change_share(number, |share| {
            share.unused = if was_used { 0 } else { share.unused.saturating_add(1) };
        });
        let unused = self.shares[&number].unused;
        match how {
            TurnUse::Gone(why) => self.remove_share(now, number, LeaveReason::Gone(why)),
            TurnUse::Unused if unused >= MOST_UNUSED => {
                self.remove_share(now, number, LeaveReason::Unused);
            }
            _ => self.close(now, lease, EndReason::TurnGivenBack, None),
        }
    }

    /// A function is no longer lent: nobody takes turns on it any more.
    pub(super) fn end_shares_of(&mut self, now: Millis, function: &FunctionId) {
        for share in self.ring(function) {
            self.remove_share(now, share.share, LeaveReason::Withdrawn);
        }
    }

    /// The shares of a function.
    pub(super) fn ring(&self, function: &FunctionId) -> Vec<ShareRecord> {
        self.shares.values().filter(|share| share.function == *function).cloned().collect()
    }

    /// The share whose turn a lease is, and its function.
    fn turn_of(&self, lease: LeaseId) -> Option<(LeaseId, FunctionId)> {
        let share = self.leases.get(&lease)?.turn.as_ref()?.share;
        let is_turn = |turn: &ShareTurn| turn.lease == lease;
        let share = self.shares.get(&share).filter(|it| it.turn.as_ref().is_some_and(is_turn))?;
        Some((share.share, share.function.clone()))
    }

    fn others<'a>(&'a self, share: &'a ShareRecord) -> impl Iterator<Item = &'a ShareRecord> {
        let other = |it: &&ShareRecord| it.function == share.function && it.share != share.share;
        self.shares.values().filter(other)
    }

    /// Asks who has a turn to release the function, within the grace of its share.
    fn ask_back(&mut self, now: Millis, share: LeaseId, lease: LeaseId) {
        self.change_share(share, |share| {
            share.turn.iter_mut().for_each(|turn| turn.asked = turn.asked.or(Some(now)));
        });
        if !matches!(self.leases[&lease].state, LeaseState::Closing { .. }) {
            self.close(now, lease, EndReason::TurnOver, None);
        }
    }

    /// Where whoever has a turn that is over would be the next as well, because the others owe theirs: it keeps the
    /// function, and its next turn begins. The others miss theirs, as when it had released it. Whether it was so.
    fn renew_turn(&mut self, now: Millis, number: LeaseId) -> bool {
        let Some(mut share) = self.shares.get(&number).cloned() else { return false };
        let Some(lease) = share.turn.as_ref().map(|turn| turn.lease) else { return false };
        if matches!(self.leases[&lease].state, LeaseState::Closing { .. }) {
            return false;
        }
        let mut ring = self.ring(&share.function);
        share.end(now, ShareTurnEnd::GivenBack, tail(&ring));
        ring.iter_mut().filter(|it| it.share == number).for_each(|it| *it = share.clone());
        if next_turn(&mut ring, |share| self.is_able(now, share)) != Some(number) {
            return false;
        }
        for mut share in ring {
            if share.share == number {
                share.begin(lease);
                share.usable(now, None);
            }
            self.put_share(share);
        }
        true
    }

    /// Whether another share of the ring would take the function now.
    fn is_wanted(&self, now: Millis, share: &ShareRecord) -> bool {
        self.others(share).any(|other| self.is_able(now, other))
    }

    /// Whether a share that has no turn could have one.
    fn is_able(&self, now: Millis, share: &ShareRecord) -> bool {
        share.turn.is_none()
            && share.not_before <= now
            && self.check_contact(now, &share.borrower).is_ok()
    }

    /// Lends a function that is free to the next of its ring.
    fn next_of(&mut self, now: Millis, function: &FunctionId) {
        let mut ring = self.ring(function);
        let before = ring.clone();
        let Some(number) = next_turn(&mut ring, |share| self.is_able(now, share)) else { return };
        for (share, before) in ring.into_iter().zip(before) {
            if share != before {
                self.put_share(share);
            }
        }
        let share = self.shares[&number].clone();
        let (borrower, terms) = (share.borrower.clone(), share.terms.clone());
        let lease = self.grant(now, function, &borrower, &terms, Some(share.turn_of()));
        self.change_share(number, |share| share.begin(lease));
    }

    fn drop_silent(&mut self, now: Millis) {
        let most = self.config.silence.saturating_mul(SILENCES);
        let silent_for = |share: &ShareRecord| {
            let heard = self.contacts.get(&share.borrower).map_or(0, |contact| contact.heard);
            now.saturating_sub(heard)
        };
        let silent = self.shares.values().map(|share| (share.share, silent_for(share)));
        let silent: Vec<_> = silent.filter(|(_, silent)| *silent > most).collect();
        for (share, silent) in silent {
            self.remove_share(now, share, LeaveReason::Silent(silent));
        }
    }

    fn remove_share(&mut self, now: Millis, number: LeaseId, reason: LeaveReason) {
        let Some(share) = self.shares.remove(&number) else { return };
        let lease = share.turn.as_ref().map(|turn| turn.lease);
        let end = match reason {
            // Its node says so, and need not be given time.
            LeaveReason::Gone(_) | LeaveReason::Unused => EndReason::TurnGivenBack,
            _ => EndReason::Returned,
        };
        let removed = Record::ShareRemoved { share: number, reason };
        self.outcome.records.push(removed);
        self.undo.push(Undo::Share(number, Some(Box::new(share))));
        if let Some(lease) = lease
            && let Some(record) = self.leases.get(&lease)
            && record.is_live()
            && !matches!(record.state, LeaseState::Closing { .. })
        {
            self.close(now, lease, end, None);
        }
    }

    fn change_share(&mut self, number: LeaseId, change: impl FnOnce(&mut ShareRecord)) {
        let Some(mut share) = self.shares.get(&number).cloned() else { return };
        change(&mut share);
        self.put_share(share);
    }

    fn put_share(&mut self, share: ShareRecord) {
        if self.shares.get(&share.share) == Some(&share) {
            return;
        }
        self.outcome.records.push(Record::Share(Box::new(share.clone())));
        let number = share.share;
        let before = self.shares.insert(number, share);
        self.undo.push(Undo::Share(number, before.map(Box::new)));
    }

    /// A turn of which the records say that it goes on, and whose lease is over, has ended.
    /// Its times are of the clock of a former process, which may have been ahead of this one's.
    pub(super) fn restore_shares(&mut self, now: Millis) {
        self.shares.values_mut().for_each(|share| share.not_after(now));
        let live =
            |turn: &ShareTurn| self.leases.get(&turn.lease).is_some_and(LeaseRecord::is_live);
        let ended = |share: &&ShareRecord| share.turn.as_ref().is_some_and(|turn| !live(turn));
        let ended: Vec<LeaseId> =
            self.shares.values().filter(ended).map(|share| share.share).collect();
        for number in ended {
            self.shares.entry(number).and_modify(|share| share.turn = None);
        }
        let newest = self.shares.keys().next_back().map_or(0, |share| share.saturating_add(1));
        self.next_lease = self.next_lease.max(newest);
    }
}
