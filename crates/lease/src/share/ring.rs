//! Whose turn is next.

use super::ShareRecord;
use crate::message::LeaseId;

/// Of `ring`, the shares of one function, the one that gets it next: the first by place that is `able` and whose
/// allowance is at least a half of its quantum. Others that are able and come before it miss their turn: they get their
/// quantum added to their credit and go to the tail. None where none is able.
pub fn next_turn(ring: &mut [ShareRecord], able: impl Fn(&ShareRecord) -> bool) -> Option<LeaseId> {
    // A debt is bounded, and less by a quantum after each round: so this ends.
    loop {
        let first = ring.iter_mut().filter(|share| able(share)).min_by_key(|share| share.place)?;
        let quantum = first.quantum_signed();
        if first.next_allowance() >= quantum / 2 {
            return Some(first.share);
        }
        first.credit += quantum;
        let number = first.share;
        let tail = tail(ring);
        ring.iter_mut().filter(|share| share.share == number).for_each(|share| share.place = tail);
    }
}

/// The place behind all others.
pub fn tail(ring: &[ShareRecord]) -> u64 {
    ring.iter().map(|share| share.place).max().map_or(0, |last| last.saturating_add(1))
}
