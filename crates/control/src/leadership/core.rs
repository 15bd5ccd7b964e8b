//! Who leads, decided: a state machine without clock or I/O.
//!
//! A candidate has a lease of etcd's, which it keeps alive, and leads while a key that is bound to that lease is its
//! own. etcd's clock says when a lease is over; so that a leader never believes in one that is, its time is counted by
//! its own clock from the moment a renewal was *sent*, and ends a margin before the time to live. What it commits is
//! fenced besides ([`crate::store::Etcd`]): this here bounds how long somebody may be told what is no longer so. The clock
//! is one of this machine's that never goes back, nor stands while the machine sleeps.

use rackbus_lease::Millis;

use crate::etcd::{EtcdLease, Revision};

/// How a candidate behaves, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateConfig {
    /// Time to live of the lease.
    pub ttl: Millis,
    /// How long before the lease can end its holder stops to lead.
    pub margin: Millis,
    /// Milliseconds from one renewal of etcd's lease to the next.
    pub renew: Millis,
    /// Between two looks who leads.
    pub look: Millis,
}

impl CandidateConfig {
    /// What fits a time to live.
    pub fn of_ttl(ttl: Millis) -> CandidateConfig {
        CandidateConfig { ttl, margin: ttl / 6, renew: ttl / 4, look: (ttl / 12).max(50) }
    }
}

/// Why a leader stops that could not reach etcd.
const LATE: &str = "its lease could not be renewed in time";

/// What is to be done next. The next is asked for when the outcome of this one was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeadershipAction {
    /// Have a lease granted, then say [`granted`](Leadership::granted).
    Grant,
    /// Renew the lease, then say [`renewed`](Leadership::renewed).
    Renew(EtcdLease),
    /// Read who leads, then say [`looked`](Leadership::looked).
    Look,
    /// Take the leadership, which nobody has, then say [`campaigned`](Leadership::campaigned).
    Campaign {
        /// The lease that the leader's key is to be bound to.
        lease: EtcdLease,
        /// The term to begin.
        term: u64,
        /// The revision of the term before, which must be the last one still.
        term_revision: Revision,
    },
    /// Begin to lead, for the term that was won.
    Lead(Won),
    /// Lead no more, for this reason.
    Stop(&'static str),
}

/// A leadership that was won.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Won {
    /// The revision that made the leader's key: what is committed is compared with it.
    pub revision: Revision,
    /// The term; each leader has a greater one than all before.
    pub term: u64,
}

/// What a look at the keys found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenKeys {
    /// The lease of who leads, and the revision that made its key.
    pub leader: Option<(EtcdLease, Revision)>,
    /// The newest term; 0 when there was none.
    pub term: u64,
    /// The revision that set it; 0 when there was none.
    pub term_revision: Revision,
}

/// That etcd did not answer, or refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EtcdUnavailable;

#[derive(Debug, Clone, PartialEq, Eq)]
struct CandidateLease {
    number: EtcdLease,
    /// Until then its holder may lead.
    until: Millis,
    renew_at: Millis,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CandidateRole {
    Follower,
    /// Has won, and is to be told.
    Elected(Won),
    Leader,
    /// Leads no more, and is to be told.
    Deposed(&'static str),
}

/// The decisions of one candidate: when to renew, to campaign and to stop.
#[derive(Debug)]
pub struct Leadership {
    config: CandidateConfig,
    lease: Option<CandidateLease>,
    role: CandidateRole,
    /// Not before then is something tried that failed.
    again: Millis,
    look_at: Millis,
    /// The last look found nobody who leads.
    vacant: Option<(u64, Revision)>,
}

impl Leadership {
    /// A candidate that has nothing yet.
    pub fn new(config: CandidateConfig) -> Leadership {
        let (role, vacant) = (CandidateRole::Follower, None);
        Leadership { config, lease: None, role, again: 0, look_at: 0, vacant }
    }

    /// The lease that it has.
    pub fn lease(&self) -> Option<EtcdLease> {
        self.lease.as_ref().map(|lease| lease.number)
    }

    /// Until when it may lead; `None` when it does not.
    pub fn until(&self) -> Option<Millis> {
        let lease = self.lease.as_ref()?;
        matches!(self.role, CandidateRole::Leader | CandidateRole::Elected(_))
            .then_some(lease.until)
    }

    /// What is to be done now; `None`: nothing before [`next`](Leadership::next).
    pub fn poll(&mut self, now: Millis) -> Option<LeadershipAction> {
        if self.lease.as_ref().is_some_and(|lease| lease.until <= now) {
            self.give_up(LATE);
        }
        match self.role {
            CandidateRole::Deposed(why) => {
                self.role = CandidateRole::Follower;
                return Some(LeadershipAction::Stop(why));
            }
            CandidateRole::Elected(won) => {
                self.role = CandidateRole::Leader;
                return Some(LeadershipAction::Lead(won));
            }
            CandidateRole::Leader | CandidateRole::Follower => {}
        }
        let Some(lease) = &self.lease else {
            return (self.again <= now).then_some(LeadershipAction::Grant);
        };
        if lease.renew_at <= now {
            return Some(LeadershipAction::Renew(lease.number));
        }
        if let Some((term, term_revision)) = self.vacant.take() {
            return Some(LeadershipAction::Campaign {
                lease: lease.number,
                term: term + 1,
                term_revision,
            });
        }
        (self.look_at <= now).then_some(LeadershipAction::Look)
    }

    /// When there is something to do.
    pub fn next(&self) -> Millis {
        if self.vacant.is_some()
            || matches!(self.role, CandidateRole::Deposed(_) | CandidateRole::Elected(_))
        {
            return 0;
        }
        match &self.lease {
            None => self.again,
            Some(lease) => lease.until.min(lease.renew_at).min(self.look_at),
        }
    }

    /// A lease was granted for so many milliseconds, or not. `sent`: when it was asked for.
    pub fn granted(
        &mut self,
        sent: Millis,
        now: Millis,
        outcome: Result<(EtcdLease, Millis), EtcdUnavailable>,
    ) {
        match outcome {
            Ok((number, ttl)) => {
                let lease = CandidateLease {
                    number,
                    until: self.until_of(sent, ttl),
                    renew_at: sent + self.config.renew,
                };
                self.lease = Some(lease);
                self.look_at = now;
            }
            Err(EtcdUnavailable) => self.again = now + self.config.look,
        }
    }

    /// The lease was renewed for so many milliseconds; or is over (`None`); or there was no answer.
    pub fn renewed(
        &mut self,
        sent: Millis,
        now: Millis,
        outcome: Result<Option<Millis>, EtcdUnavailable>,
    ) {
        let until = match outcome {
            Ok(Some(ttl)) => self.until_of(sent, ttl),
            Ok(None) => return self.give_up("etcd has ended its lease"),
            Err(EtcdUnavailable) => 0,
        };
        let again = now + self.config.look;
        let Some(lease) = &mut self.lease else { return };
        if lease.until <= now {
            // What ended by its own clock does not begin again.
            return self.give_up(LATE);
        }
        lease.until = lease.until.max(until);
        lease.renew_at = if until > 0 { sent + self.config.renew } else { again };
    }

    /// Who leads was read, or not.
    pub fn looked(&mut self, now: Millis, outcome: Result<SeenKeys, EtcdUnavailable>) {
        let every =
            if self.role == CandidateRole::Leader { self.config.renew } else { self.config.look };
        self.look_at = now + every;
        let (Ok(seen), Some(own)) = (outcome, self.lease()) else { return };
        match (self.role, seen.leader) {
            (CandidateRole::Leader, Some((lease, _))) if lease == own => {}
            (CandidateRole::Leader, _) => self.give_up("the leader's key is not its own any more"),
            // Its campaign was won, and the answer lost.
            (CandidateRole::Follower, Some((lease, revision))) if lease == own => {
                self.role = CandidateRole::Elected(Won { revision, term: seen.term });
            }
            (CandidateRole::Follower, None) => self.vacant = Some((seen.term, seen.term_revision)),
            _ => {}
        }
    }

    /// The leadership was taken, or somebody else has it (`None`), or there was no answer.
    pub fn campaigned(&mut self, now: Millis, outcome: Result<Option<Won>, EtcdUnavailable>) {
        // Looked at again soon, also after no answer: it may have been won.
        self.look_at = now + self.config.look;
        if let (Ok(Some(won)), CandidateRole::Follower, Some(_)) = (outcome, self.role, &self.lease)
        {
            self.role = CandidateRole::Elected(won);
        }
    }

    /// It has learned otherwise that it does not lead any more: a commit was refused.
    pub fn lost(&mut self) {
        self.give_up("a commit was refused: somebody else leads");
    }

    /// Without its lease it begins anew: what is bound to the old one goes away with that.
    fn give_up(&mut self, why: &'static str) {
        self.lease = None;
        self.vacant = None;
        self.again = 0;
        match self.role {
            CandidateRole::Leader => self.role = CandidateRole::Deposed(why),
            CandidateRole::Elected(_) => self.role = CandidateRole::Follower,
            CandidateRole::Follower | CandidateRole::Deposed(_) => {}
        }
    }

    fn until_of(&self, sent: Millis, ttl: Millis) -> Millis {
        // etcd may grant more than was asked for; that is never counted on.
        sent.saturating_add(ttl.min(self.config.ttl).saturating_sub(self.config.margin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: CandidateConfig =
        CandidateConfig { ttl: 3000, margin: 500, renew: 750, look: 250 };

    fn vacant(term: u64) -> SeenKeys {
        SeenKeys { leader: None, term, term_revision: 9 }
    }

    /// A candidate that was granted lease 7 at 0.
    fn candidate() -> Leadership {
        let mut it = Leadership::new(CONFIG);
        assert_eq!(it.poll(0), Some(LeadershipAction::Grant));
        it.granted(0, 10, Ok((7, 3000)));
        it
    }

    fn leader() -> Leadership {
        let mut it = candidate();
        assert_eq!(it.poll(10), Some(LeadershipAction::Look));
        it.looked(20, Ok(vacant(4)));
        let campaign = LeadershipAction::Campaign { lease: 7, term: 5, term_revision: 9 };
        assert_eq!(it.poll(20), Some(campaign));
        let won = Won { revision: 11, term: 5 };
        it.campaigned(30, Ok(Some(won)));
        assert_eq!(it.poll(30), Some(LeadershipAction::Lead(won)));
        it
    }

    #[test]
    fn a_control_plane_without_a_leader_campaigns_with_its_lease_and_the_next_term() {
        let mut it = leader();
        assert_eq!(it.until(), Some(2500));
        assert_eq!((it.poll(31), it.next()), (None, 280));
    }

    #[test]
    fn a_leader_stops_by_its_own_clock_before_its_lease_can_end() {
        let mut it = leader();
        assert_eq!(it.poll(750), Some(LeadershipAction::Renew(7)));
        // Sent at 750, answered late: counted from when it was sent.
        it.renewed(750, 2000, Ok(Some(3000)));
        assert_eq!(it.until(), Some(3250));
        assert_eq!(it.poll(2000), Some(LeadershipAction::Renew(7)));
        it.renewed(2000, 3249, Err(EtcdUnavailable));
        assert_eq!(it.until(), Some(3250));
        assert!(matches!(it.poll(3250), Some(LeadershipAction::Stop(_))), "not a moment later");
        assert_eq!((it.until(), it.poll(3250)), (None, Some(LeadershipAction::Grant)));
    }

    #[test]
    fn an_answer_of_a_longer_lease_is_not_counted_on() {
        let mut it = leader();
        it.poll(750);
        it.renewed(750, 760, Ok(Some(60_000)));
        assert_eq!(it.until(), Some(3250));
    }

    #[test]
    fn a_lease_that_is_over_or_a_key_that_is_gone_ends_the_leadership_at_once() {
        for seen in [None, Some((8, 12))] {
            let mut it = leader();
            it.looked(100, Ok(SeenKeys { leader: seen, term: 5, term_revision: 11 }));
            assert!(matches!(it.poll(100), Some(LeadershipAction::Stop(_))), "{seen:?}");
        }
        let mut it = leader();
        it.renewed(100, 110, Ok(None));
        assert!(matches!(it.poll(110), Some(LeadershipAction::Stop(_))));
        let mut it = leader();
        it.lost();
        assert!(matches!(it.poll(110), Some(LeadershipAction::Stop(_))));
        assert_eq!(it.poll(110), Some(LeadershipAction::Grant), "with another lease");
    }

    #[test]
    fn a_campaign_whose_answer_was_lost_is_found_to_be_won() {
        let mut it = candidate();
        it.looked(20, Ok(vacant(0)));
        assert!(matches!(it.poll(20), Some(LeadershipAction::Campaign { term: 1, .. })));
        it.campaigned(30, Err(EtcdUnavailable));
        assert_eq!(it.poll(280), Some(LeadershipAction::Look));
        it.looked(290, Ok(SeenKeys { leader: Some((7, 44)), term: 1, term_revision: 44 }));
        assert_eq!(it.poll(290), Some(LeadershipAction::Lead(Won { revision: 44, term: 1 })));
    }

    #[test]
    fn a_control_plane_that_was_frozen_after_winning_does_not_lead() {
        let mut it = candidate();
        it.looked(20, Ok(vacant(0)));
        it.poll(20);
        it.campaigned(9000, Ok(Some(Won { revision: 44, term: 1 })));
        assert_eq!((it.poll(9000), it.until()), (Some(LeadershipAction::Grant), None));
    }
}
