//! Numbers that are taken, of segments or of interrupts, so that a free one is found without a look at each of those before
//! it: all other sessions wait meanwhile.

use std::collections::BTreeMap;

use crate::message::FIRST_FREE_ID;

/// As ranges that do not touch each other: the first number of each, and the last. So what comes behind one is free.
#[derive(Debug, Default)]
pub(super) struct TakenNumbers(BTreeMap<u32, u32>);

impl TakenNumbers {
    /// The range that has a number, if it is taken.
    fn around(&self, number: u32) -> Option<(u32, u32)> {
        let (first, last) = self.0.range(..=number).next_back()?;
        (number <= *last).then_some((*first, *last))
    }

    pub(super) fn take(&mut self, number: u32) {
        if self.around(number).is_some() {
            return;
        }
        let (mut first, mut last) = (number, number);
        if let Some((before, _)) = number.checked_sub(1).and_then(|it| self.around(it)) {
            first = before;
        }
        if let Some((next, end)) = number.checked_add(1).and_then(|it| self.around(it)) {
            self.0.remove(&next);
            last = end;
        }
        self.0.insert(first, last);
    }

    pub(super) fn give(&mut self, number: u32) {
        let Some((first, last)) = self.around(number) else { return };
        self.0.remove(&first);
        if first < number {
            self.0.insert(first, number - 1);
        }
        if number < last {
            self.0.insert(number + 1, last);
        }
    }

    /// The first free number from `from` on, or else from the first that a node chooses on; `None` when all are taken.
    pub(super) fn first_free(&self, from: u32) -> Option<u32> {
        let behind = |start| match self.around(start) {
            Some((_, last)) => last.checked_add(1),
            None => Some(start),
        };
        behind(from).or_else(|| behind(FIRST_FREE_ID))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// At both ends of what a node chooses from, so close together that ranges meet.
    fn number() -> impl Strategy<Value = u32> {
        prop_oneof![FIRST_FREE_ID - 3..FIRST_FREE_ID + 9, u32::MAX - 9..=u32::MAX]
    }

    proptest! {
        #[test]
        fn a_free_number_is_the_next_that_is_not_taken(
            changes in prop::collection::vec((any::<bool>(), number()), 0..60),
            from in number(),
        ) {
            let (mut taken, mut plain) = (TakenNumbers::default(), BTreeSet::new());
            for (take, number) in changes {
                match take {
                    true => drop((taken.take(number), plain.insert(number))),
                    false => drop((taken.give(number), plain.remove(&number))),
                }
                let mut candidates = (from..=u32::MAX).chain(FIRST_FREE_ID..from);
                prop_assert_eq!(
                    taken.first_free(from),
                    candidates.find(|it| !plain.contains(it))
                );
                let mut gaps = taken.0.iter().zip(taken.0.iter().skip(1));
                prop_assert!(gaps.all(|((_, last), (next, _))| last + 1 < *next), "{:?}", taken);
            }
        }
    }
}
