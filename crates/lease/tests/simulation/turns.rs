//! Borrowers take turns on functions, and users release them early.

use std::collections::BTreeMap;

use rackbus_lease::{
    Authority, Availability, Decision, LeaseId, LeaseState, ShareRecord, ShareRequest, TurnUse,
};

use crate::world::{World, placement};
use crate::{CONFIG, HOSTS};

/// Milliseconds of a turn.
const SLICE: u64 = 700;

impl World {
    /// Somebody joins a ring, leaves one, or gives a turn back.
    pub fn change_shares(&mut self) -> Result<(), String> {
        let shares: Vec<LeaseId> = self.shares().map(|share| share.share).collect();
        if !shares.is_empty() && self.random.chance(50) {
            let share = shares[self.random.below(shares.len())];
            let leaves = self.random.chance(60);
            self.note(|| format!("share {share} leaves ({leaves}), or gives its turn back"));
            let change = |a: &mut Authority, now| {
                let changed =
                    if leaves { a.leave(now, share) } else { a.give_turn_back(now, share) };
                ((), changed.unwrap_or_default())
            };
            return self.decide(change).map(drop);
        }
        let function = if self.random.chance(70) { "alpha/nvme0" } else { "beta/nvme1" };
        let borrower = HOSTS[self.random.below(HOSTS.len())];
        let request = ShareRequest {
            function: function.parse().expect("a name"),
            borrower: borrower.to_owned(),
            terms: placement(borrower).into(),
            slice: self.random.chance(80).then_some(SLICE),
            grace: self.random.below(500) as u64,
            weight: 1 + self.random.below(3) as u32,
        };
        let joined = self.decide(|a, now| match a.share(now, request) {
            Ok((share, outcome)) => (Ok(share), outcome),
            Err(refused) => (Err(refused.to_string()), Decision::default()),
        })?;
        self.note(|| format!("{borrower} shares {function}: {joined:?}"));
        Ok(())
    }

    /// A user of a turn is done with it, or nobody was there.
    pub fn release_early(&mut self) -> Result<(), String> {
        let host = self.random.below(HOSTS.len());
        let Some(mut node) = self.nodes[host].take() else { return Ok(()) };
        let open: Vec<LeaseId> = node.open.keys().copied().collect();
        if !open.is_empty() {
            let lease = open[self.random.below(open.len())];
            let how = match self.random.below(10) {
                0 => TurnUse::Gone("the VM has ended".to_owned()),
                1..4 => TurnUse::Unused,
                _ => TurnUse::Used,
            };
            let actions = node.borrower.turn_used(lease, how);
            self.borrower_actions(host, &mut node, actions)?;
        }
        self.nodes[host] = Some(node);
        Ok(())
    }

    fn shares(&self) -> impl Iterator<Item = &ShareRecord> {
        self.authority.iter().flat_map(Authority::shares)
    }

    /// No faults any more: each share has a turn in the time that the debts of its ring take. Then all leave.
    pub fn check_turns(&mut self) -> Result<(), String> {
        // An ordinary lease of theirs ends only when it is returned.
        let ordinary = |world: &World| {
            let leases = world.authority.iter().flat_map(Authority::leases);
            let ordinary = leases.filter(|lease| lease.is_live() && lease.turn.is_none());
            ordinary.map(|lease| lease.lease).collect::<Vec<_>>()
        };
        for lease in ordinary(self) {
            self.give_back(lease)?;
        }
        let begun = |world: &World| -> BTreeMap<LeaseId, (u64, bool)> {
            let has =
                |share: &ShareRecord| share.turn.as_ref().is_some_and(|it| it.begun.is_some());
            // One whose node could not take it on is not in the rack.
            let there = |share: &&ShareRecord| {
                let function = world.authority.as_ref().and_then(|it| it.function(&share.function));
                function.is_some_and(|function| function.state != Availability::Withdrawn)
            };
            let shares = world.shares().filter(there);
            shares.map(|share| (share.share, (share.turns, has(share)))).collect()
        };
        let before = begun(self);
        // A ring of many, each of which misses turns for its debts: several times what `settle` waits.
        for _ in 0..400 {
            let after = begun(self);
            let had = |(share, before): (&LeaseId, &(u64, bool))| {
                before.1 || after.get(share).is_none_or(|now| now.0 > before.0 || now.1)
            };
            if before.iter().all(had) {
                break;
            }
            let until = self.now + 5_000;
            self.settle(|world| world.now >= until)?;
        }
        let after = begun(self);
        for (share, (turns, has)) in before {
            let served = has || after.get(&share).is_none_or(|now| now.0 > turns || now.1);
            if !served {
                let share = self.shares().find(|it| it.share == share);
                return Err(format!("no turn without a fault since: {share:?}"));
            }
        }
        for share in self.shares().map(|share| share.share).collect::<Vec<_>>() {
            self.decide(|a, now| ((), a.leave(now, share).unwrap_or_default()))?;
        }
        let over = |world: &World| {
            let mut leases = world.authority.iter().flat_map(Authority::leases);
            leases.all(|lease| matches!(lease.state, LeaseState::Ended { .. }))
        };
        self.settle(over).map_err(|error| format!("turns of nobody: {error}"))?;
        self.now += CONFIG.resend;
        Ok(())
    }
}
