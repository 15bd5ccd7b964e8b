//! The turns that this host has on functions that it shares: notices who uses them, and who does not any more.
//!
//! A turn that its user has released, or that nobody takes up in time, is given back early.

use std::collections::BTreeMap;

use rackbus_lease::{LeaseId, Millis, TurnUse};

/// How often it is looked who uses a turn, in milliseconds.
const LOOK: Millis = 20;

/// Whether anybody has used a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseUse {
    /// Nobody has opened its function yet.
    Unused,
    /// Somebody has it open.
    InUse,
    /// Who had it open has released it, however soon.
    Released,
}

/// A turn that can be used.
#[derive(Debug)]
struct Turn {
    /// Until when somebody must have used it.
    claim_by: Millis,
    used: bool,
}

/// The turns that can be used now.
#[derive(Debug, Default)]
pub struct UsableTurns {
    open: BTreeMap<LeaseId, Turn>,
}

impl UsableTurns {
    /// A turn begins, which its user may take up within `claim` milliseconds.
    pub fn begin(&mut self, now: Millis, lease: LeaseId, claim: Millis) {
        let turn = Turn { claim_by: now.saturating_add(claim), used: false };
        self.open.entry(lease).or_insert(turn);
    }

    /// Forgets the turn that this lease was.
    pub fn end(&mut self, lease: LeaseId) {
        self.open.remove(&lease);
    }

    /// When to look again who uses them.
    pub fn due(&self, now: Millis) -> Millis {
        if self.open.is_empty() { Millis::MAX } else { now.saturating_add(LOOK) }
    }

    /// The turns that are not needed any more, as `use_of` tells whether somebody has one open, or had it since it
    /// began. Each is told once.
    pub fn look(
        &mut self,
        now: Millis,
        use_of: impl Fn(LeaseId) -> LeaseUse,
    ) -> Vec<(LeaseId, TurnUse)> {
        let mut done = Vec::new();
        self.open.retain(|lease, turn| {
            let how = match use_of(*lease) {
                LeaseUse::InUse => {
                    turn.used = true;
                    return true;
                }
                LeaseUse::Released => TurnUse::Used,
                LeaseUse::Unused if turn.used => TurnUse::Used,
                LeaseUse::Unused if now >= turn.claim_by => TurnUse::Unused,
                LeaseUse::Unused => return true,
            };
            done.push((*lease, how));
            false
        });
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only one lease is in use.
    fn only(in_use: LeaseId) -> impl Fn(LeaseId) -> LeaseUse {
        move |lease| if lease == in_use { LeaseUse::InUse } else { LeaseUse::Unused }
    }

    #[test]
    fn a_turn_is_given_back_when_its_user_goes_or_nobody_comes() {
        let mut turns = UsableTurns::default();
        assert_eq!(turns.due(5), Millis::MAX);
        turns.begin(0, 1, 100);
        turns.begin(0, 2, 100);
        turns.begin(0, 3, 100);
        assert_eq!(turns.look(50, only(1)), []);
        assert_eq!(turns.look(99, only(1)), []);
        turns.end(3);
        assert_eq!(turns.look(100, only(1)), [(2, TurnUse::Unused)]);
        assert_eq!(turns.look(500, only(1)), [], "told once, and used for longer");
        assert_eq!(turns.look(501, |_| LeaseUse::Unused), [(1, TurnUse::Used)]);
        assert_eq!(turns.due(501), Millis::MAX);
    }

    /// A program may be done within a few milliseconds, between two looks.
    #[test]
    fn a_turn_that_was_used_between_two_looks_was_used() {
        let mut turns = UsableTurns::default();
        turns.begin(0, 1, 100);
        assert_eq!(turns.look(20, |_| LeaseUse::Unused), []);
        assert_eq!(turns.look(40, |_| LeaseUse::Released), [(1, TurnUse::Used)]);
    }
}
