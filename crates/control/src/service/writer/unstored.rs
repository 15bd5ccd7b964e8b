//! Events that could not be stored when they were told, until they are.
//!
//! They go with a later commit, a few at a time, as a store takes a commit of bounded size only.

use std::collections::VecDeque;

use crate::events::Draft;

/// Events that are kept at most; of more, the oldest stay.
const MOST: usize = 1000;
/// Events that go with one commit.
const AT_ONCE: usize = 32;

/// Events that are to be stored later.
#[derive(Debug, Default)]
pub(super) struct Unstored {
    events: VecDeque<Draft>,
    /// How many were not kept since the last that was.
    left_out: u64,
}

impl Unstored {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Those that the next commit takes.
    pub fn next(&self) -> impl Iterator<Item = &Draft> {
        self.events.iter().take(AT_ONCE)
    }

    /// The [next](Unstored::next) ones are stored.
    pub fn stored(&mut self) {
        self.events.drain(..self.events.len().min(AT_ONCE));
        if self.left_out > 0 && self.events.is_empty() {
            let count = std::mem::take(&mut self.left_out);
            tracing::error!(count, "events were lost while the store did not work");
        }
    }

    /// Keeps an event for later.
    pub fn keep(&mut self, event: Draft) {
        match self.events.len() < MOST {
            true => self.events.push_back(event),
            false => self.left_out += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::EventKind;

    #[test]
    fn events_are_kept_in_order_up_to_a_bound() {
        let event = |nth: usize| Draft::of_host(EventKind::Fault, None, nth.to_string());
        let mut unstored = Unstored::default();
        (0..MOST + 5).map(event).for_each(|event| unstored.keep(event));
        assert_eq!(unstored.left_out, 5);
        let mut taken = Vec::new();
        while !unstored.is_empty() {
            let next: Vec<Draft> = unstored.next().cloned().collect();
            assert!((1..=AT_ONCE).contains(&next.len()));
            taken.extend(next);
            unstored.stored();
        }
        assert_eq!(taken, (0..MOST).map(event).collect::<Vec<_>>());
        assert_eq!(unstored.left_out, 0, "it is told");
    }
}
