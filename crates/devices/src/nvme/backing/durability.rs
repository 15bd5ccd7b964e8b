//! What is durable, and what may be said about it (pure).
//!
//! The kernel reports that data could not be written back *once* for an open file, to whichever
//! operation asks first, and forgets the data: its pages count as clean from then on. So an answer
//! is right only when it takes in what everybody was told who asked at the same time:
//!
//! - Operations that ask (a flush, a write with FUA) run in batches. A batch ends as a whole: when
//!   one of it failed, all of it failed. What asks meanwhile is the next batch.
//! - After a failure nothing can be called durable any more, until the file was loaded anew and
//!   what it holds is known again: the failure stays.
//! - A flush is answered without asking only when nothing changed since the last one that
//!   succeeded was begun, and nothing is changing.

use std::collections::VecDeque;

/// Something that was to become durable did not, now or earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotDurable;

/// The state of one file. `T` names an operation.
#[derive(Debug)]
pub struct Durability<T> {
    /// Counts beginnings and ends of changes.
    changes: u64,
    /// The changes that a flush has made durable.
    durable: u64,
    /// Changes that have begun and not ended.
    changing: usize,
    failed: bool,
    batch: Batch<T>,
    waiting: VecDeque<(T, Asks)>,
}

#[derive(Debug)]
struct Batch<T> {
    running: usize,
    ended: Vec<T>,
    failed: bool,
    /// The changes that its flush makes durable, if it has one.
    covers: Option<u64>,
}

/// What an operation asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// That everything which ended before is durable.
    Flush,
    /// That its own data is.
    Write,
}

impl<T> Default for Durability<T> {
    /// As of a file that somebody may have written before: not durable, as far as is known.
    fn default() -> Self {
        let batch = Batch { running: 0, ended: Vec::new(), failed: false, covers: None };
        let waiting = VecDeque::new();
        Durability { changes: 1, durable: 0, changing: 0, failed: false, batch, waiting }
    }
}

impl<T> Durability<T> {
    /// Whether something failed to become durable since the file was loaded.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Something failed to become durable before this state began.
    pub fn inherit_failure(&mut self) {
        self.failed = true;
    }

    /// A change was made from its beginning to its end.
    pub fn changed(&mut self) {
        self.changes += 1;
    }

    /// A change begins; [`change_ended`](Durability::change_ended) follows, well or badly.
    pub fn change_begun(&mut self) {
        self.changing += 1;
        self.changes += 1;
    }

    /// A change that had begun ended.
    pub fn change_ended(&mut self) {
        self.changing = self.changing.saturating_sub(1);
        self.changes += 1;
    }

    /// The answer to a flush that needs no asking; `None` when the system has to be asked.
    pub fn known(&self) -> Option<Result<(), NotDurable>> {
        if self.failed {
            return Some(Err(NotDurable));
        }
        let quiet = self.changing == 0 && self.batch.running == 0;
        (quiet && self.durable == self.changes).then_some(Ok(()))
    }

    /// `operation` is to ask as soon as it may; [`next_batch`](Durability::next_batch) says when.
    pub fn ask(&mut self, operation: T, asks: Asks) {
        self.waiting.push_back((operation, asks));
    }

    /// What has to be started now: a whole batch once the last one has ended.
    pub fn next_batch(&mut self) -> Vec<T> {
        if self.batch.running > 0 || self.waiting.is_empty() {
            return Vec::new();
        }
        let flush = self.waiting.iter().any(|(_, asks)| *asks == Asks::Flush);
        self.batch.covers = flush.then_some(self.changes);
        self.batch.running = self.waiting.len();
        self.waiting.drain(..).map(|(operation, _)| operation).collect()
    }

    /// Takes out what waits and was not started.
    pub fn cancel_waiting(&mut self) -> impl Iterator<Item = T> + '_ {
        self.waiting.drain(..).map(|(operation, _)| operation)
    }

    /// An operation of the running batch ended; `ok` tells whether the system called it durable.
    /// Returns the operations that may be answered now, all in the same way.
    pub fn asked(&mut self, operation: T, ok: bool) -> Option<(Vec<T>, Result<(), NotDurable>)> {
        self.batch.ended.push(operation);
        self.batch.failed |= !ok;
        self.batch.running = self.batch.running.saturating_sub(1);
        if self.batch.running > 0 {
            return None;
        }
        self.failed |= std::mem::take(&mut self.batch.failed);
        let covers = self.batch.covers.take();
        let answer = if self.failed { Err(NotDurable) } else { Ok(()) };
        if let (Ok(()), Some(covers)) = (answer, covers) {
            self.durable = self.durable.max(covers);
        }
        Some((std::mem::take(&mut self.batch.ended), answer))
    }

    /// The file was loaded anew: what is read now is what the medium holds.
    pub fn reloaded(&mut self) {
        self.failed = false;
        self.durable = self.changes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_flush_beside_a_running_flush_waits_and_fails_with_it() {
        let mut state = Durability::default();
        state.changed();
        state.ask(1, Asks::Flush);
        assert_eq!(state.next_batch(), [1]);
        assert_eq!(state.known(), None, "the first has not succeeded");
        state.ask(2, Asks::Flush);
        assert!(state.next_batch().is_empty());
        assert_eq!(state.asked(1, false), Some((vec![1], Err(NotDurable))));
        assert_eq!(state.next_batch(), [2]);
        // The system says that all is well; it has reported its error already.
        assert_eq!(state.asked(2, true), Some((vec![2], Err(NotDurable))));
        assert_eq!(state.known(), Some(Err(NotDurable)));
        state.reloaded();
        assert_eq!(state.known(), Some(Ok(())));
    }

    #[test]
    fn one_report_is_for_the_whole_batch() {
        let mut state = Durability::default();
        for (operation, asks) in [(1, Asks::Write), (2, Asks::Flush), (3, Asks::Write)] {
            state.ask(operation, asks);
        }
        assert_eq!(state.next_batch(), [1, 2, 3]);
        assert_eq!(state.asked(2, true), None);
        assert_eq!(state.asked(3, false), None);
        assert_eq!(state.asked(1, true), Some((vec![2, 3, 1], Err(NotDurable))));
    }

    #[test]
    fn a_change_that_ends_after_a_flush_began_is_not_covered() {
        let mut state = Durability::default();
        state.change_begun();
        state.ask(1, Asks::Flush);
        state.next_batch();
        state.change_ended();
        assert_eq!(state.asked(1, true), Some((vec![1], Ok(()))));
        assert_eq!(state.known(), None);
        state.ask(2, Asks::Flush);
        state.next_batch();
        state.asked(2, true);
        assert_eq!(state.known(), Some(Ok(())));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Begin,
        End,
        Ask(bool),
        Start,
        Asked(bool),
    }

    proptest! {
        /// Against the plain rule: a flush that is answered well began after every change that
        /// had ended when it was asked for, and nothing had failed when it was answered.
        #[test]
        fn no_answer_is_better_than_the_truth(steps in prop::collection::vec(prop_oneof![
            Just(Step::Begin), Just(Step::End), any::<bool>().prop_map(Step::Ask),
            Just(Step::Start), prop::bool::weighted(0.9).prop_map(Step::Asked),
        ], 0..60)) {
            let mut state = Durability::default();
            let (mut open, mut ended, mut flushed, mut failed) = (0u32, 1u32, 0u32, false);
            let mut running: VecDeque<(u32, bool, u32)> = VecDeque::new();
            let mut kinds = Vec::new();
            for step in steps {
                match step {
                    Step::Begin => { state.change_begun(); open += 1; }
                    Step::End if open > 0 => { state.change_ended(); open -= 1; ended += 1; }
                    Step::Ask(flush) => {
                        if flush && let Some(answer) = state.known() {
                            prop_assert_eq!(answer.is_err(), failed);
                            prop_assert!(failed || flushed >= ended && open == 0);
                        } else {
                            let asks = if flush { Asks::Flush } else { Asks::Write };
                            state.ask((kinds.len() as u32, ended), asks);
                            kinds.push(flush);
                        }
                    }
                    Step::Start => {
                        for (id, asked_at) in state.next_batch() {
                            prop_assert!(ended >= asked_at);
                            running.push_back((id, kinds[id as usize], ended));
                        }
                    }
                    Step::Asked(ok) => if let Some((id, flush, at)) = running.pop_front() {
                        failed |= !ok;
                        if let Some((answered, answer)) = state.asked((id, at), ok) {
                            prop_assert!(running.is_empty(), "a batch was answered in part");
                            prop_assert!(!answered.is_empty());
                            prop_assert_eq!(answer.is_err(), failed);
                            let _ = flush;
                            for (id, at) in answered {
                                if kinds[id as usize] && answer.is_ok() { flushed = flushed.max(at); }
                            }
                        } else {
                            prop_assert!(!running.is_empty());
                        }
                    },
                    Step::End => {}
                }
            }
        }
    }
}
