//! Turns of the ways by which packets come to where a link begins. Ways that have something to send take turns, a packet
//! each, as ports of switches and root complexes commonly do (port arbitration, PCI Express specification 6.3.3.3): what
//! one gets depends on how many others there are, and not on how fast its packets come in or how many wait.

use std::collections::VecDeque;

/// Rounds of turns at a direction's beginning.
#[derive(Debug, Default)]
pub(super) struct TurnRounds {
    /// The round of the last packet that was sent.
    round: u64,
    /// By way, the direction that a packet came by: the round of its last packet.
    last: Vec<(u32, u64)>,
    count: u32,
}

/// Bits of an order that tell packets of a round apart, by when they came.
const COUNT_BITS: u32 = 32;

impl TurnRounds {
    /// The order of a packet that has come by a way: rising for packets of that way, and by rounds among ways.
    pub(super) fn order(&mut self, way: u32) -> u64 {
        let nth = self.last.iter().position(|(by, _)| *by == way).unwrap_or_else(|| {
            self.last.push((way, 0));
            self.last.len() - 1
        });
        let last = &mut self.last[nth].1;
        *last = self.round.max(*last) + 1;
        self.count = self.count.wrapping_add(1);
        *last << COUNT_BITS | u64::from(self.count)
    }

    /// A packet of that order is sent.
    pub(super) fn sent(&mut self, order: u64) {
        self.round = self.round.max(order >> COUNT_BITS);
    }

    /// Bytes of memory that it has.
    pub(super) fn memory(&self) -> usize {
        self.last.capacity() * size_of::<(u32, u64)>()
    }
}

/// A packet in a queue: its order and its number.
pub(super) type QueuedPacket = (u64, u32);

/// Puts a packet into a queue that orders rise in: not always at its end, for it may be its turn before others' that came
/// earlier.
#[inline]
pub(super) fn insert(queue: &mut VecDeque<QueuedPacket>, waiting: QueuedPacket) {
    if queue.back().is_none_or(|last| last.0 < waiting.0) {
        return queue.push_back(waiting);
    }
    insert_before(queue, waiting);
}

/// The same where others that came earlier have their turn after it.
fn insert_before(queue: &mut VecDeque<QueuedPacket>, waiting: QueuedPacket) {
    let at = queue.partition_point(|other| *other < waiting);
    queue.insert(at, waiting);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_with_much_to_send_and_one_with_little_take_turns() {
        let mut turns = TurnRounds::default();
        let mut waiting: Vec<(u64, u32)> = (0..6).map(|_| (turns.order(1), 1)).collect();
        waiting.extend((0..3).map(|_| (turns.order(2), 2)));
        waiting.sort_unstable();
        let ways: Vec<u32> = waiting.iter().map(|(_, way)| *way).collect();
        assert_eq!(ways, [1, 2, 1, 2, 1, 2, 1, 1, 1]);
        // Who comes later begins in the present round, and makes up for nothing.
        waiting[..5].iter().for_each(|(order, _)| turns.sent(*order));
        let late = turns.order(3);
        assert!(late > waiting[5].0 && late < waiting[7].0);
    }
}
