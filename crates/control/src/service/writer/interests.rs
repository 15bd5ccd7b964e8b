//! Who waits for the leases that were granted, and which of them nobody waits for any more.
//!
//! That somebody has gone is heard a moment later, and the same request may have come again meanwhile.
//! So each interest has a number, and the end of one that another came after means nothing. A caller whose
//! connection broke repeats its request with the same key: such a lease is not unwanted before it had time to.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rackbus_lease::LeaseId;
use tokio::sync::Notify;

use crate::client::REPEATED;

/// How long a lease is kept whose caller went away without an answer and may ask again, in milliseconds: clients of
/// ours connect again after 100 ms.
const UNTIL_REPEATED: u64 = 2_000;

/// How long a lease is kept that was on its way to its caller when the control plane died, in milliseconds: clients repeat
/// their requests for a while, and this one's successor has to be found.
const UNTIL_REPEATED_ANEW: u64 = REPEATED.as_millis() as u64 + 5_000;

/// All who wait for one lease: a request that is asked again waits beside the first.
#[derive(Debug)]
pub(super) struct Interest {
    lease: LeaseId,
    number: u64,
    kept: AtomicBool,
    /// Whoever waits may ask again: the request has a key, and no answer yet.
    repeatable: AtomicBool,
    ended: Arc<InterestEnds>,
}

impl Interest {
    /// Somebody has the lease.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// Who waits is told that it does not get the lease, and does not ask again.
    pub fn refuse(&self) {
        self.repeatable.store(false, Ordering::Release);
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            let Interest { lease, number, .. } = *self;
            let repeatable = self.repeatable.load(Ordering::Acquire);
            // A writer that is gone gives nothing back; the process ends with it.
            self.ended.put(InterestEnd { lease, number, repeatable });
        }
    }
}

/// All who waited for a lease have gone, and none of them has it.
#[derive(Debug)]
pub(super) struct InterestEnd {
    lease: LeaseId,
    number: u64,
    repeatable: bool,
}

/// Ends that the writer has not heard yet. Who ends an interest must not wait for the writer, so none is refused:
/// of each lease only the newest is kept, as an earlier one means nothing. So there are never more than leases.
#[derive(Debug, Default)]
pub(super) struct InterestEnds {
    waiting: Mutex<BTreeMap<LeaseId, InterestEnd>>,
    came: Notify,
}

impl InterestEnds {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseId, InterestEnd>> {
        // Each change of it is one call.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, end: InterestEnd) {
        let mut waiting = self.lock();
        if waiting.get(&end.lease).is_none_or(|known| known.number < end.number) {
            waiting.insert(end.lease, end);
        }
        drop(waiting);
        self.came.notify_one();
    }

    /// An end that has not been heard, if there is one.
    fn take(&self) -> Option<InterestEnd> {
        self.lock().pop_first().map(|(_, end)| end)
    }

    /// The next one. Dropped before it is there, it takes none.
    pub async fn next(&self) -> InterestEnd {
        loop {
            // One that is put in between leaves a permit, with which the wait is over at once.
            match self.take() {
                Some(end) => return end,
                None => self.came.notified().await,
            }
        }
    }
}

/// The interests in leases.
#[derive(Debug)]
pub(super) struct Interests {
    /// The newest one in each lease, with its number; one that has ended stays until its lease has.
    newest: BTreeMap<LeaseId, (u64, Weak<Interest>)>,
    next: u64,
    /// Leases to be given back, and from when on.
    unwanted: BTreeMap<LeaseId, u64>,
    ended: Arc<InterestEnds>,
}

impl Interests {
    /// None yet; their ends are told to `ended`.
    pub fn new(ended: Arc<InterestEnds>) -> Interests {
        Interests { newest: BTreeMap::new(), next: 0, unwanted: BTreeMap::new(), ended }
    }

    /// A lease was on its way when the former control plane died, so nobody was told of it. It is given back unless its
    /// request is repeated. `now` in milliseconds.
    pub fn lost(&mut self, now: u64, lease: LeaseId) {
        self.unwanted.insert(lease, now.saturating_add(UNTIL_REPEATED_ANEW));
    }

    /// Somebody waits for a lease, and may ask again for it where the request has a key (`repeatable`).
    pub fn want(&mut self, lease: LeaseId, repeatable: bool) -> Arc<Interest> {
        if let Some(interest) = self.newest.get(&lease).and_then(|(_, it)| it.upgrade()) {
            return interest;
        }
        let (number, kept, ended) = (self.supersede(lease), false.into(), self.ended.clone());
        let repeatable = repeatable.into();
        let interest = Arc::new(Interest { lease, number, kept, repeatable, ended });
        self.newest.insert(lease, (number, Arc::downgrade(&interest)));
        interest
    }

    /// Somebody is told, without waiting, that it has the lease.
    pub fn told(&mut self, lease: LeaseId) {
        match self.newest.get(&lease).and_then(|(_, it)| it.upgrade()) {
            Some(interest) => interest.keep(),
            None => {
                let number = self.supersede(lease);
                self.newest.insert(lease, (number, Weak::new()));
            }
        }
    }

    /// Whether somebody has the lease, as far as is known: nobody waits for its answer, and nobody has gone without one.
    pub fn is_owned(&self, lease: LeaseId) -> bool {
        match self.newest.get(&lease).and_then(|(_, it)| it.upgrade()) {
            Some(interest) => interest.kept.load(Ordering::Acquire),
            None => !self.unwanted.contains_key(&lease) && !self.ended.lock().contains_key(&lease),
        }
    }

    /// Whatever was said of a lease until now means nothing; the number of what comes next.
    fn supersede(&mut self, lease: LeaseId) -> u64 {
        self.unwanted.remove(&lease);
        self.next += 1;
        self.next
    }

    /// An interest has ended, `now` in milliseconds.
    pub fn ended(&mut self, now: u64, end: InterestEnd) {
        let InterestEnd { lease, number, repeatable } = end;
        if self.newest.get(&lease).is_some_and(|(newest, _)| *newest == number) {
            let wait = if repeatable { UNTIL_REPEATED } else { 0 };
            self.unwanted.insert(lease, now.saturating_add(wait));
        }
    }

    /// Leases that nobody wants `now`. What cannot be given back is to be [put back](Interests::not_before).
    pub fn take_unwanted(&mut self, now: u64) -> Vec<LeaseId> {
        let due: Vec<LeaseId> =
            self.unwanted.iter().filter(|(_, at)| **at <= now).map(|(lease, _)| *lease).collect();
        self.unwanted.retain(|_, at| *at > now);
        due
    }

    /// When the next lease is to be given back.
    pub fn next_unwanted(&self) -> Option<u64> {
        self.unwanted.values().min().copied()
    }

    /// A lease could not be given back; it is tried again at `at`, in milliseconds.
    pub fn not_before(&mut self, at: u64, lease: LeaseId) {
        self.unwanted.insert(lease, at);
    }

    /// Forgets interests in leases that have ended.
    pub fn retain(&mut self, is_live: impl Fn(LeaseId) -> bool) {
        self.newest.retain(|lease, (_, it)| it.strong_count() > 0 || is_live(*lease));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = 7;

    fn interests() -> (Interests, Arc<InterestEnds>) {
        let ends = Arc::<InterestEnds>::default();
        (Interests::new(ends.clone()), ends)
    }

    /// What is to be given back when all that was said has been heard.
    fn unwanted(interests: &mut Interests, ends: &InterestEnds) -> Vec<LeaseId> {
        while let Some(end) = ends.take() {
            interests.ended(0, end);
        }
        interests.take_unwanted(0)
    }

    #[test]
    fn a_lease_that_nobody_waits_for_any_more_is_given_back() {
        let (mut interests, ends) = interests();
        let (first, second) = (interests.want(LEASE, false), interests.want(LEASE, false));
        drop(first);
        assert!(unwanted(&mut interests, &ends).is_empty(), "the other waits");
        drop(second);
        assert_eq!(unwanted(&mut interests, &ends), [LEASE]);
        interests.not_before(5, LEASE);
        assert!(unwanted(&mut interests, &ends).is_empty(), "the store needs time");
        assert_eq!(interests.next_unwanted(), Some(5));
        interests.not_before(0, LEASE);
        assert_eq!(unwanted(&mut interests, &ends), [LEASE]);
        let kept = interests.want(LEASE, false);
        kept.keep();
        drop(kept);
        assert!(unwanted(&mut interests, &ends).is_empty());
    }

    /// The same request came again before it was heard that the first caller had gone.
    #[test]
    fn the_end_of_an_interest_is_not_that_of_a_later_one() {
        let (mut interests, ends) = interests();
        drop(interests.want(LEASE, false));
        let again = interests.want(LEASE, false);
        again.keep();
        drop(again);
        interests.want(LEASE + 1, false).keep();
        interests.retain(|_| true);
        assert!(unwanted(&mut interests, &ends).is_empty(), "somebody has it");
        // Nor is one given back that could not be, and that was asked for again meanwhile.
        drop(interests.want(LEASE, false));
        ends.take().map(|end| interests.ended(0, end)).unwrap();
        let again = interests.want(LEASE, false);
        assert!(unwanted(&mut interests, &ends).is_empty(), "somebody waits for it");
        drop(again);
        assert_eq!(unwanted(&mut interests, &ends), [LEASE]);
    }

    /// A connection breaks before the answer; the request comes again with its key, or does not.
    #[test]
    fn a_lease_stays_until_its_request_had_time_to_be_repeated() {
        let (mut interests, ends) = interests();
        drop(interests.want(LEASE, true));
        let end = ends.take().unwrap();
        interests.ended(100, end);
        assert!(interests.take_unwanted(100).is_empty(), "the caller connects again");
        assert_eq!(interests.next_unwanted(), Some(100 + UNTIL_REPEATED));
        let again = interests.want(LEASE, true);
        assert_eq!(interests.next_unwanted(), None);
        again.refuse();
        drop(again);
        let end = ends.take().unwrap();
        interests.ended(200, end);
        assert_eq!(interests.take_unwanted(200), [LEASE], "its caller was answered");
        drop(interests.want(LEASE, true));
        let end = ends.take().unwrap();
        interests.ended(300, end);
        assert_eq!(interests.take_unwanted(300 + UNTIL_REPEATED), [LEASE], "it did not come again");
    }

    #[test]
    fn a_lease_that_nobody_was_told_of_in_an_earlier_life_is_given_back_unless_it_is_asked_for() {
        let (mut interests, _) = interests();
        for lease in LEASE..LEASE + 3 {
            interests.lost(100, lease);
        }
        interests.told(LEASE);
        let waits = interests.want(LEASE + 1, true);
        assert!(interests.take_unwanted(100 + REPEATED.as_millis() as u64).is_empty());
        assert_eq!(interests.take_unwanted(100 + UNTIL_REPEATED_ANEW), [LEASE + 2]);
        drop(waits);
    }

    /// The same request came again and was answered with what was stored.
    #[test]
    fn a_lease_that_somebody_else_was_told_of_stays() {
        let (mut interests, ends) = interests();
        let waits = interests.want(LEASE, false);
        interests.told(LEASE);
        drop(waits);
        assert!(unwanted(&mut interests, &ends).is_empty(), "told while the first waits");
        drop(interests.want(LEASE, false));
        interests.told(LEASE);
        assert!(unwanted(&mut interests, &ends).is_empty(), "told before its end is heard");
    }

    #[test]
    fn a_lease_is_owned_when_its_caller_was_told() {
        let (mut interests, ends) = interests();
        let waits = interests.want(LEASE, true);
        assert!(!interests.is_owned(LEASE));
        waits.keep();
        assert!(interests.is_owned(LEASE));
        drop(waits);
        assert!(interests.is_owned(LEASE));
        drop(interests.want(LEASE, true));
        assert!(!interests.is_owned(LEASE), "before its end is heard");
        let end = ends.take().unwrap();
        interests.ended(0, end);
        assert!(!interests.is_owned(LEASE), "while it may be asked for again");
        assert!(interests.is_owned(LEASE + 1), "of an earlier life nothing else is known");
    }

    /// Callers come and go faster than the writer looks.
    #[tokio::test]
    async fn of_each_lease_the_newest_end_waits_and_no_other() {
        let (mut interests, ends) = interests();
        for _ in 0..1000 {
            drop(interests.want(LEASE, true));
            drop(interests.want(LEASE + 1, false));
        }
        assert_eq!(ends.lock().len(), 2);
        let (first, second) = (ends.next().await, ends.next().await);
        assert_eq!([first.number, second.number], [interests.next - 1, interests.next]);
        // Who waits is told of the next; who goes before that takes none.
        let next = ends.next();
        drop(Box::pin(ends.next()));
        drop(interests.want(LEASE, false));
        assert_eq!(next.await.lease, LEASE);
        assert!(ends.take().is_none());
    }

    #[test]
    fn what_is_known_of_leases_that_have_ended_is_forgotten() {
        let (mut interests, ends) = interests();
        let waits = interests.want(LEASE + 1, false);
        drop(interests.want(LEASE, false));
        interests.retain(|_| false);
        assert_eq!(interests.newest.keys().collect::<Vec<_>>(), [&(LEASE + 1)]);
        assert!(unwanted(&mut interests, &ends).is_empty());
        drop(waits);
    }
}
