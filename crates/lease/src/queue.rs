//! Requests that wait for functions which others have, in the order in which they get them.
//!
//! Who asks with a greater priority comes first, and of the same priority who asked earlier. A
//! request that does not wait gets a free function only when nobody who waits comes before it: what
//! is returned is not snatched from those who wait for it. A request may be for several functions: it has one
//! place among those who wait for each of them, gets all at once, and has none of them before, so among those who
//! have nothing yet nobody waits for ever. A function that is free is kept for who comes first, also while that one
//! waits for others: who has one of those, and waits behind it, waits until one of the two gives up. The queue is of one life of the control plane: who waits asks again when it
//! was restarted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::message::FunctionId;

/// How urgent a request is: the greater comes first.
pub type Priority = u8;

/// A place in the queue for a function. What is less comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePlace {
    priority: Reverse<Priority>,
    number: u64,
}

/// Who waits for which function.
#[derive(Debug, Default)]
pub struct WaitingQueue {
    next: u64,
    waiting: BTreeMap<FunctionId, BTreeSet<QueuePlace>>,
}

impl WaitingQueue {
    /// A request waits for all of `functions` from now on, until it [leaves](WaitingQueue::leave).
    pub fn enter(&mut self, functions: &[FunctionId], priority: Priority) -> QueuePlace {
        let place = QueuePlace { priority: Reverse(priority), number: self.next };
        self.next += 1;
        for function in functions {
            self.waiting.entry(function.clone()).or_default().insert(place);
        }
        place
    }

    /// A request that waited has its functions, or gave up.
    pub fn leave(&mut self, functions: &[FunctionId], place: QueuePlace) {
        for function in functions {
            if let Some(waiting) = self.waiting.get_mut(function) {
                waiting.remove(&place);
                if waiting.is_empty() {
                    self.waiting.remove(function);
                }
            }
        }
    }

    /// How many who wait for `function` come before the request that has `place` there.
    pub fn before(&self, function: &FunctionId, place: QueuePlace) -> usize {
        self.waiting.get(function).map_or(0, |waiting| waiting.range(..place).count())
    }

    /// The same for a request that does not wait.
    pub fn before_newcomer(&self, function: &FunctionId, priority: Priority) -> usize {
        self.before(function, QueuePlace { priority: Reverse(priority), number: self.next })
    }

    /// How many wait for `function`.
    pub fn length(&self, function: &FunctionId) -> usize {
        self.waiting.get(function).map_or(0, BTreeSet::len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn function(number: usize) -> FunctionId {
        format!("alpha/nvme{number}").parse().unwrap()
    }

    proptest! {
        /// Against a list that is sorted anew for each question.
        #[test]
        fn the_queue_is_ordered_by_priority_and_then_by_arrival(
            deeds in prop::collection::vec((1usize..4, 0u8..3, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut queue = WaitingQueue::default();
            // Which of the two functions a request is for are the bits of a number.
            let of = |bits: usize| (0..2).filter(|at| bits >> at & 1 == 1).map(function).collect::<Vec<_>>();
            let mut list: Vec<(usize, u8, usize, QueuePlace)> = Vec::new();
            for (number, (bits, priority, choice)) in deeds.into_iter().enumerate() {
                if choice.index(3) == 0 && !list.is_empty() {
                    let (bits, _, _, place) = list.remove(choice.index(list.len()));
                    queue.leave(&of(bits), place);
                    // Once is enough.
                    queue.leave(&of(bits), place);
                } else {
                    let place = queue.enter(&of(bits), priority);
                    list.push((bits, priority, number, place));
                }
                for (at, (bits, priority, number, place)) in
                    (0..2).flat_map(|at| list.iter().map(move |entry| (at, entry)))
                {
                    let before = list.iter().filter(|(others, other, earlier, _)| {
                        others >> at & 1 == 1 && (other > priority || other == priority && earlier < number)
                    });
                    if bits >> at & 1 == 1 {
                        prop_assert_eq!(queue.before(&function(at), *place), before.count());
                    }
                }
                for at in 0..2 {
                    let there = || list.iter().filter(|(others, ..)| others >> at & 1 == 1);
                    prop_assert_eq!(queue.length(&function(at)), there().count());
                    for priority in 0..4 {
                        let before = there().filter(|(_, other, ..)| *other >= priority);
                        let newcomer = queue.before_newcomer(&function(at), priority);
                        prop_assert_eq!(newcomer, before.count());
                    }
                }
            }
        }
    }
}
