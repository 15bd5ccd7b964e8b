//! Deficit round robin in which the cost of a turn is known afterwards.
//!
//! As Shreedhar and Varghese (1995) have it, each round gives a member a quantum by its weight, and
//! who has used its quantum waits for the next. Here a member is served while it has any credit left
//! and may overdraw it: what it overdrew, and what a later settlement adds, it owes in the rounds that
//! follow. Who comes back from having no work, and owes nothing, is served before those who always
//! have some, once in a round (FQ-CoDel, RFC 8290, section 4.1): so who asks for little waits for
//! nobody's quantum.

use std::collections::{BTreeMap, VecDeque};

/// Deficit round robin: members take turns, each for what its weight earns it.
#[derive(Debug, Clone)]
pub struct Drr<K> {
    /// Credit that a round gives to the member with the greatest weight.
    quantum: u64,
    heaviest: u32,
    members: BTreeMap<K, Member>,
    /// Those who came back with work since they last had a turn.
    fresh: VecDeque<K>,
    /// The others that have work, or had when they were last looked at.
    rest: VecDeque<K>,
    /// The weights of all in the two lists, together.
    listed_weight: u64,
}

#[derive(Debug, Clone)]
struct Member {
    weight: u32,
    credit: i64,
    /// It is in `fresh` or in `rest`.
    listed: bool,
    /// When it was taken from the lists.
    left: u64,
}

impl<K: Copy + Ord> Drr<K> {
    /// Nobody takes turns yet. `quantum` is at least 1.
    pub fn new(quantum: u64) -> Drr<K> {
        let quantum = quantum.clamp(1, i64::MAX as u64 >> 16);
        Drr {
            quantum,
            heaviest: 1,
            members: BTreeMap::new(),
            fresh: VecDeque::new(),
            rest: VecDeque::new(),
            listed_weight: 0,
        }
    }

    /// Adds a member, or gives it another weight, of 1 at least.
    pub fn set(&mut self, key: K, weight: u32) {
        let weight = weight.max(1);
        let new = Member { weight, credit: 0, listed: false, left: 0 };
        let member = self.members.entry(key).or_insert(new);
        if member.listed {
            self.listed_weight = self.listed_weight + u64::from(weight) - u64::from(member.weight);
        }
        member.weight = weight;
        self.weigh();
    }

    /// Takes a member away.
    pub fn remove(&mut self, key: K) {
        self.unlist(key, 0);
        self.members.remove(&key);
        self.weigh();
    }

    /// Takes a member that has no work from the lists, before its turn to be looked at.
    fn unlist(&mut self, key: K, now: u64) {
        let Some(member) = self.members.get_mut(&key).filter(|member| member.listed) else {
            return;
        };
        (member.listed, member.left) = (false, now);
        self.listed_weight -= u64::from(member.weight);
        self.fresh.retain(|other| *other != key);
        self.rest.retain(|other| *other != key);
    }

    /// Credit of a member: what it owes when negative.
    pub fn credit(&self, key: K) -> i64 {
        self.members.get(&key).map_or(0, |member| member.credit)
    }

    /// What a member that is in no list has paid of what it owed since it left: of what would have been served meanwhile,
    /// `parallel` at a time, its part by weight beside those that have work. So a pause pays no more than turns would
    /// have.
    fn paid(&self, member: &Member, now: u64, parallel: u32) -> i64 {
        let (weight, passed) = (u64::from(member.weight), now.saturating_sub(member.left));
        let all = u128::from(self.listed_weight + weight);
        let served = u128::from(passed) * u128::from(parallel);
        i64::try_from(served.saturating_mul(u128::from(weight)) / all).unwrap_or(i64::MAX)
    }

    /// A member has work. Of what it owed, its part of the time since it left is paid, where
    /// `parallel` are served at a time.
    pub fn wake(&mut self, key: K, now: u64, parallel: u32) {
        let Some(member) = self.members.get(&key).filter(|member| !member.listed) else { return };
        let (quantum, paid) = (self.quantum_of(key), self.paid(member, now, parallel));
        let Some(member) = self.members.get_mut(&key) else { return };
        member.listed = true;
        self.listed_weight += u64::from(member.weight);
        member.credit = member.credit.saturating_add(paid).min(0);
        if member.credit == 0 {
            member.credit = quantum;
            self.fresh.push_back(key);
        } else {
            self.rest.push_back(key);
        }
    }

    /// Whose turn it is, of those of whom `has_work` says so. Who has none is looked at no more until
    /// it [wakes](Drr::wake).
    pub fn pick(&mut self, now: u64, mut has_work: impl FnMut(K) -> bool) -> Option<K> {
        let mut passed = 0;
        loop {
            let fresh = !self.fresh.is_empty();
            let list = if fresh { &mut self.fresh } else { &mut self.rest };
            let key = *list.front()?;
            let quantum = quantum(self.quantum, self.heaviest, self.members.get(&key));
            let Some(member) = self.members.get_mut(&key) else {
                list.pop_front();
                continue;
            };
            if !has_work(key) {
                list.pop_front();
                if fresh {
                    // It has had its turn before the others; the next is among them.
                    self.rest.push_back(key);
                } else {
                    (member.listed, member.left) = (false, now);
                    self.listed_weight -= u64::from(member.weight);
                    member.credit = member.credit.min(0);
                }
                continue;
            }
            if member.credit > 0 {
                return Some(key);
            }
            list.pop_front();
            member.credit = member.credit.saturating_add(quantum);
            self.rest.push_back(key);
            passed += 1;
            if passed > self.rest.len() {
                self.skip_rounds();
                passed = 0;
            }
        }
    }

    /// A member is given something that is estimated to cost so much.
    pub fn charge(&mut self, key: K, cost: u64) {
        if let Some(member) = self.members.get_mut(&key) {
            member.credit = member.credit.saturating_sub(signed(cost));
        }
    }

    /// The same of what a member was given in no turn, perhaps while it had no work: the time before does not pay for it.
    pub fn charge_now(&mut self, key: K, cost: u64, now: u64, parallel: u32) {
        if let Some(member) = self.members.get(&key).filter(|member| !member.listed) {
            let paid = self.paid(member, now, parallel);
            if let Some(member) = self.members.get_mut(&key) {
                member.credit = member.credit.saturating_add(paid).min(0);
                member.left = now;
            }
        }
        self.charge(key, cost);
    }

    /// What a member owes now. One that has no work leaves the lists when it owes, for time pays then and no turns.
    pub fn owed(&mut self, key: K, has_work: bool, now: u64, parallel: u32) -> u64 {
        if self.credit(key) >= 0 {
            return 0;
        }
        if !has_work {
            self.unlist(key, now);
        }
        let Some(member) = self.members.get(&key) else { return 0 };
        let paid = if member.listed { 0 } else { self.paid(member, now, parallel) };
        member.credit.saturating_add(paid).min(0).unsigned_abs()
    }

    /// What was charged as `estimated` has cost `actual`.
    pub fn settle(&mut self, key: K, estimated: u64, actual: u64) {
        if let Some(member) = self.members.get_mut(&key) {
            let credit = member.credit.saturating_add(signed(estimated));
            member.credit = credit.saturating_sub(signed(actual));
        }
    }

    /// All owe something: as many rounds at once as it takes until one does not.
    fn skip_rounds(&mut self) {
        let (base, heaviest) = (self.quantum, self.heaviest);
        let rounds = |member: &Member| {
            let quantum = quantum(base, heaviest, Some(member));
            (-member.credit).div_euclid(quantum)
        };
        let listed = self.rest.iter().filter_map(|key| self.members.get(key));
        let Some(least) = listed.map(rounds).min().filter(|least| *least > 0) else { return };
        for key in &self.rest {
            if let Some(member) = self.members.get_mut(key) {
                let quantum = quantum(base, heaviest, Some(member));
                member.credit = member.credit.saturating_add(least.saturating_mul(quantum));
            }
        }
    }

    fn quantum_of(&self, key: K) -> i64 {
        quantum(self.quantum, self.heaviest, self.members.get(&key))
    }

    fn weigh(&mut self) {
        self.heaviest = self.members.values().map(|member| member.weight).max().unwrap_or(1);
    }
}

/// Credit that a round gives a member: the whole quantum to the heaviest, so that a weight makes
/// nobody's turn longer.
fn quantum(quantum: u64, heaviest: u32, member: Option<&Member>) -> i64 {
    let weight = member.map_or(1, |member| member.weight);
    signed((quantum * u64::from(weight) / u64::from(heaviest.max(1))).max(1))
}

fn signed(cost: u64) -> i64 {
    i64::try_from(cost).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Members that always have work get shares by weight, whatever a turn costs and was estimated
        /// to cost, to within the costliest turn and two quanta.
        #[test]
        fn shares_are_by_weight(
            members in prop::collection::vec((1u32..100, 1u64..5000, 1u64..5000), 2..8),
        ) {
            let mut drr = Drr::new(1000);
            for (key, (weight, ..)) in members.iter().enumerate() {
                drr.set(key, *weight);
                drr.wake(key, 0, 1);
            }
            let mut used = vec![0u64; members.len()];
            for _ in 0..20_000 {
                let key = drr.pick(0, |_| true).unwrap();
                let (_, estimated, actual) = members[key];
                drr.charge(key, estimated);
                drr.settle(key, estimated, actual);
                used[key] += actual;
            }
            let heaviest = members.iter().map(|member| member.0).max().unwrap();
            let rounds = |key: usize, more: f64| {
                let quantum = (1000 * members[key].0 / heaviest).max(1);
                (used[key] as f64 + more) / f64::from(quantum)
            };
            for a in 0..members.len() {
                for b in 0..members.len() {
                    let slack = |key: usize| 2000.0 + 2.0 * members[key].2 as f64;
                    prop_assert!(rounds(a, -slack(a)) <= rounds(b, slack(b)), "{used:?}");
                }
            }
        }

        /// Nobody with work waits for ever, whoever else comes and goes.
        #[test]
        fn nobody_starves(deeds in prop::collection::vec((1usize..6, any::<bool>()), 300..600)) {
            let mut drr = Drr::new(100);
            let mut work = [true; 6];
            for key in 0..6 {
                drr.set(key, 1 + key as u32);
                drr.wake(key, 0, 1);
            }
            let mut last = 0;
            for (now, (key, has)) in deeds.into_iter().enumerate() {
                work[key] = has;
                if has {
                    drr.wake(key, now as u64, 1);
                }
                let picked = drr.pick(now as u64, |key| work[key]).unwrap();
                drr.charge(picked, 150);
                if picked == 0 {
                    last = now;
                }
                // The others' five quanta are at most six of a sixth of this one's each.
                prop_assert!(now - last <= 120, "member 0 waits since turn {last}");
            }
        }
    }

    #[test]
    fn a_flow_that_returns_with_work_is_served_first_and_once_in_a_round() {
        let mut drr = Drr::new(100);
        for key in 0..3 {
            drr.set(key, 1);
        }
        drr.wake(0, 0, 1);
        drr.wake(1, 0, 1);
        for _ in 0..4 {
            let key = drr.pick(0, |key| key != 2).unwrap();
            drr.charge(key, 100);
        }
        drr.wake(2, 0, 1);
        assert_eq!(drr.pick(0, |_| true), Some(2));
        drr.charge(2, 100);
        let first = drr.pick(0, |key| key != 2).unwrap();
        drr.charge(first, 100);
        // It has work again at once, and its turn is after the others'.
        drr.wake(2, 0, 1);
        let second = drr.pick(0, |_| true).unwrap();
        assert!(second != 2 && second != first, "{first} {second}");
    }

    /// A member of weight 100 always has work; one of weight 1 has its next 100 us after each of its turns.
    #[test]
    fn a_flow_that_pauses_briefly_gets_no_more_than_its_weight() {
        const TURN: u64 = 50_000;
        let mut drr = Drr::new(TURN);
        drr.set(0, 100);
        drr.set(1, 1);
        drr.wake(0, 0, 1);
        let (mut now, mut back_at, mut got) = (0, 0, 0);
        while now < crate::SECOND {
            if now >= back_at {
                drr.wake(1, now, 1);
            }
            let key = drr.pick(now, |key| key == 0 || now >= back_at).unwrap();
            drr.charge(key, TURN);
            now += TURN;
            if key == 1 {
                (got, back_at) = (got + TURN, now + 100_000);
            }
        }
        assert!((TURN..=crate::SECOND / 50 + TURN).contains(&got), "{got} ns of a second");
    }

    #[test]
    fn what_is_charged_to_who_has_no_work_is_owed_from_then_on() {
        let mut drr = Drr::new(100);
        for (key, weight) in [(0, 1), (1, 3)] {
            drr.set(key, weight);
        }
        drr.wake(1, 0, 1);
        drr.charge_now(0, 1000, 5000, 1);
        let owed = |drr: &mut Drr<u32>, now| drr.owed(0, false, now, 1);
        assert_eq!([5000, 5400, 9000].map(|now| owed(&mut drr, now)), [1000, 900, 0]);
        // What was asked often is paid as fast.
        assert_eq!(
            (5000..=9000).map(|now| owed(&mut drr, now)).filter(|owed| *owed > 0).count(),
            4000
        );
        drr.charge_now(0, 1000, 5400, 1);
        assert_eq!(owed(&mut drr, 5400), 1900);
        // Who has work, pays by turns.
        drr.wake(0, 5400, 1);
        assert_eq!(drr.owed(0, true, 9400, 1), 1900);
        assert_eq!((owed(&mut drr, 9400), owed(&mut drr, 9800)), (1900, 1800));
    }

    #[test]
    fn a_debt_is_owed_after_a_pause_too_short_to_pay_it() {
        let mut drr = Drr::new(100);
        drr.set(0, 1);
        drr.set(1, 1);
        drr.wake(0, 0, 1);
        drr.wake(1, 0, 1);
        assert_eq!(drr.pick(0, |_| true), Some(0));
        drr.charge(0, 100);
        drr.settle(0, 100, 1500);
        for _ in 0..2 {
            assert_eq!(drr.pick(0, |key| key == 1), Some(1));
            drr.charge(1, 100);
        }
        drr.wake(0, 200, 1);
        assert_eq!(drr.credit(0), -1300);
        let mut turns = 0;
        while drr.pick(200, |_| true) == Some(1) {
            drr.charge(1, 100);
            turns += 1;
        }
        assert!((12..=15).contains(&turns), "{turns}");
    }
}
