//! Who waits for the leases that were granted, and which of them nobody waits for any more.
//!
//! That somebody has gone is heard a moment later, and the same request may have come again meanwhile.
//! So each interest has a number, and the end of one that another came after means nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rackbus_lease::LeaseId;
use tokio::sync::mpsc;

/// All who wait for one lease: a request that is asked again waits beside the first.
#[derive(Debug)]
pub(super) struct Interest {
    lease: LeaseId,
    number: u64,
    kept: AtomicBool,
    ended: mpsc::UnboundedSender<InterestEnd>,
}

impl Interest {
    /// Somebody has the lease.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            let Interest { lease, number, .. } = *self;
            // A writer that is gone gives nothing back; the process ends with it.
            let _ = self.ended.send(InterestEnd { lease, number });
        }
    }
}

/// All who waited for a lease have gone, and none of them has it.
#[derive(Debug)]
pub(super) struct InterestEnd {
    lease: LeaseId,
    number: u64,
}

/// The interests in leases.
#[derive(Debug)]
pub(super) struct Interests {
    /// The newest one in each lease, with its number; one that has ended stays until its lease has.
    newest: BTreeMap<LeaseId, (u64, Weak<Interest>)>,
    next: u64,
    /// Leases to be given back as soon as that can be stored.
    unwanted: BTreeSet<LeaseId>,
    ended: mpsc::UnboundedSender<InterestEnd>,
}

impl Interests {
    /// None yet; their ends are told to `ended`.
    pub fn new(ended: mpsc::UnboundedSender<InterestEnd>) -> Interests {
        Interests { newest: BTreeMap::new(), next: 0, unwanted: BTreeSet::new(), ended }
    }

    /// Somebody waits for a lease.
    pub fn want(&mut self, lease: LeaseId) -> Arc<Interest> {
        if let Some(interest) = self.newest.get(&lease).and_then(|(_, it)| it.upgrade()) {
            return interest;
        }
        let (number, kept, ended) = (self.supersede(lease), false.into(), self.ended.clone());
        let interest = Arc::new(Interest { lease, number, kept, ended });
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

    /// Whatever was said of a lease until now means nothing; the number of what comes next.
    fn supersede(&mut self, lease: LeaseId) -> u64 {
        self.unwanted.remove(&lease);
        self.next += 1;
        self.next
    }

    /// An interest has ended.
    pub fn ended(&mut self, InterestEnd { lease, number }: InterestEnd) {
        if self.newest.get(&lease).is_some_and(|(newest, _)| *newest == number) {
            self.unwanted.insert(lease);
        }
    }

    /// Leases that nobody wants. What cannot be given back now is to be [put back](Interests::not_yet).
    pub fn take_unwanted(&mut self) -> BTreeSet<LeaseId> {
        std::mem::take(&mut self.unwanted)
    }

    /// A lease could not be given back yet.
    pub fn not_yet(&mut self, lease: LeaseId) {
        self.unwanted.insert(lease);
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

    fn interests() -> (Interests, mpsc::UnboundedReceiver<InterestEnd>) {
        let (ended, ends) = mpsc::unbounded_channel();
        (Interests::new(ended), ends)
    }

    /// What is to be given back when all that was said has been heard.
    fn unwanted(
        interests: &mut Interests,
        ends: &mut mpsc::UnboundedReceiver<InterestEnd>,
    ) -> Vec<LeaseId> {
        while let Ok(end) = ends.try_recv() {
            interests.ended(end);
        }
        interests.take_unwanted().into_iter().collect()
    }

    #[test]
    fn a_lease_that_nobody_waits_for_any_more_is_given_back() {
        let (mut interests, mut ends) = interests();
        let (first, second) = (interests.want(LEASE), interests.want(LEASE));
        drop(first);
        assert!(unwanted(&mut interests, &mut ends).is_empty(), "the other waits");
        drop(second);
        assert_eq!(unwanted(&mut interests, &mut ends), [LEASE]);
        interests.not_yet(LEASE);
        assert_eq!(unwanted(&mut interests, &mut ends), [LEASE]);
        let kept = interests.want(LEASE);
        kept.keep();
        drop(kept);
        assert!(unwanted(&mut interests, &mut ends).is_empty());
    }

    /// The same request came again before it was heard that the first caller had gone.
    #[test]
    fn the_end_of_an_interest_is_not_that_of_a_later_one() {
        let (mut interests, mut ends) = interests();
        drop(interests.want(LEASE));
        let again = interests.want(LEASE);
        again.keep();
        drop(again);
        interests.want(LEASE + 1).keep();
        interests.retain(|_| true);
        assert!(unwanted(&mut interests, &mut ends).is_empty(), "somebody has it");
        // Nor is one given back that could not be, and that was asked for again meanwhile.
        drop(interests.want(LEASE));
        ends.try_recv().map(|end| interests.ended(end)).unwrap();
        let again = interests.want(LEASE);
        assert!(unwanted(&mut interests, &mut ends).is_empty(), "somebody waits for it");
        drop(again);
        assert_eq!(unwanted(&mut interests, &mut ends), [LEASE]);
    }

    /// The same request came again and was answered with what was stored.
    #[test]
    fn a_lease_that_somebody_else_was_told_of_stays() {
        let (mut interests, mut ends) = interests();
        let waits = interests.want(LEASE);
        interests.told(LEASE);
        drop(waits);
        assert!(unwanted(&mut interests, &mut ends).is_empty(), "told while the first waits");
        drop(interests.want(LEASE));
        interests.told(LEASE);
        assert!(unwanted(&mut interests, &mut ends).is_empty(), "told before its end is heard");
    }

    #[test]
    fn what_is_known_of_leases_that_have_ended_is_forgotten() {
        let (mut interests, mut ends) = interests();
        let waits = interests.want(LEASE + 1);
        drop(interests.want(LEASE));
        interests.retain(|_| false);
        assert_eq!(interests.newest.keys().collect::<Vec<_>>(), [&(LEASE + 1)]);
        assert!(unwanted(&mut interests, &mut ends).is_empty());
        drop(waits);
    }
}
