//! A history of borrowing and returning one function, and whether it can have been: the search of Wing and Gong with
//! Lowe's memory of states that lead nowhere.
//!
//! A function is a lock: a borrow takes it when nobody has it, a return gives it back. Each operation takes effect at
//! one moment between its call and its answer. One without an answer may take effect at any later moment, or never;
//! what such a borrow got is given back by the control plane at some moment.

use std::collections::HashSet;

/// Who has the function.
type Holder = Option<u64>;

/// What an operation does to who has the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It was free and is this lease's.
    Borrowed(u64),
    /// It was this lease's and is free.
    Returned(u64),
    /// Refused, because somebody had the function.
    Held,
    /// This lease did not have it.
    Over(u64),
}

/// An operation of a client's: when it began and ended, and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// When it was called.
    pub from: u64,
    /// When it was answered; never, where its outcome is not known.
    pub to: Option<u64>,
    /// What it did, or may have done.
    pub effect: Effect,
}

impl Operation {
    /// Who has the function after it; `None` where it cannot have been so.
    fn after(&self, holder: Holder) -> Option<Holder> {
        match (self.effect, holder) {
            (Effect::Borrowed(lease), None) => Some(Some(lease)),
            (Effect::Returned(lease), Some(has)) if has == lease => Some(None),
            (Effect::Held, Some(_)) => Some(holder),
            (Effect::Over(lease), _) if holder != Some(lease) => Some(holder),
            _ => None,
        }
    }
}

/// Whether the operations can have been, in some order that keeps what was over before something else began.
///
/// # Errors
/// The answered operations around which no order is found.
pub fn check(operations: &[Operation]) -> Result<(), String> {
    let mut all = operations.to_vec();
    all.sort_by_key(|it| it.from);
    let mut search = Search { all: &all, seen: HashSet::new(), furthest: 0 };
    let done = vec![0u64; all.len().div_ceil(64)];
    match search.find(done, None) {
        true => Ok(()),
        false => {
            let near = search.furthest.saturating_sub(6)..(search.furthest + 8).min(all.len());
            let shown: Vec<String> = all[near].iter().map(|it| format!("{it:?}")).collect();
            Err(format!("no order of these operations can have been:\n{}", shown.join("\n")))
        }
    }
}

struct Search<'a> {
    all: &'a [Operation],
    seen: HashSet<(Vec<u64>, Holder)>,
    furthest: usize,
}

impl Search<'_> {
    /// Depth first, with a stack of its own: histories are long.
    fn find(&mut self, done: Vec<u64>, holder: Holder) -> bool {
        let mut stack = vec![(done, holder)];
        while let Some((done, holder)) = stack.pop() {
            let has = |n: usize| done[n / 64] >> (n % 64) & 1 == 1;
            let open = || (0..self.all.len()).filter(|n| !has(*n));
            // What is answered first has to take effect before anything that was called after that.
            let Some(limit) = open().filter_map(|n| self.all[n].to).min() else { return true };
            let first = open().next().unwrap_or(0);
            self.furthest = self.furthest.max(first);
            let next: Vec<usize> = open().take_while(|n| self.all[*n].from <= limit).collect();
            for n in next {
                let Some(holder) = self.all[n].after(holder) else { continue };
                let mut done = done.clone();
                done[n / 64] |= 1 << (n % 64);
                if self.seen.insert((done.clone(), holder)) {
                    stack.push((done, holder));
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(from: u64, to: u64, effect: Effect) -> Operation {
        Operation { from, to: Some(to), effect }
    }

    fn lost(from: u64, effect: Effect) -> Operation {
        Operation { from, to: None, effect }
    }

    #[test]
    fn one_after_the_other_can_have_been() {
        let history = [
            op(0, 10, Effect::Borrowed(1)),
            op(5, 12, Effect::Held),
            op(20, 30, Effect::Returned(1)),
            op(25, 40, Effect::Borrowed(2)),
            op(41, 42, Effect::Over(1)),
        ];
        assert_eq!(check(&history), Ok(()));
    }

    #[test]
    fn two_holders_cannot_have_been() {
        let history = [
            op(0, 10, Effect::Borrowed(1)),
            op(11, 20, Effect::Borrowed(2)),
            op(21, 22, Effect::Returned(1)),
        ];
        assert!(check(&history).is_err());
        // The first was returned late, but its call was before the second's answer.
        let history = [
            op(0, 10, Effect::Borrowed(1)),
            op(11, 20, Effect::Borrowed(2)),
            op(12, 22, Effect::Returned(1)),
        ];
        assert_eq!(check(&history), Ok(()));
    }

    #[test]
    fn a_refusal_needs_somebody_who_has_it() {
        let history = [
            op(0, 10, Effect::Borrowed(1)),
            op(11, 20, Effect::Returned(1)),
            op(21, 22, Effect::Held),
        ];
        assert!(check(&history).is_err());
        let unknown = [
            history[0],
            history[1],
            lost(15, Effect::Borrowed(9)),
            lost(15, Effect::Returned(9)),
            history[2],
        ];
        assert_eq!(check(&unknown), Ok(()), "somebody of whom nothing was heard");
        let later = [history[0], history[1], lost(30, Effect::Borrowed(9)), history[2]];
        assert!(check(&later).is_err(), "who asked later had it not yet");
    }

    #[test]
    fn what_was_returned_is_not_returned_again() {
        let history = [
            op(0, 1, Effect::Borrowed(1)),
            op(2, 3, Effect::Returned(1)),
            op(4, 5, Effect::Returned(1)),
        ];
        assert!(check(&history).is_err());
        let history = [op(0, 1, Effect::Borrowed(1)), op(2, 3, Effect::Over(1))];
        assert!(check(&history).is_err(), "a lease that goes on is not over");
    }

    #[test]
    fn a_long_history_with_lost_answers_is_searched_in_time() {
        let mut history = Vec::new();
        for n in 0..400 {
            let at = n * 100;
            history.push(op(at, at + 20, Effect::Borrowed(n)));
            history.push(op(at + 10, at + 30, Effect::Held));
            history.push(op(at + 40, at + 60, Effect::Returned(n)));
            if n % 100 == 0 {
                history.push(lost(at + 50, Effect::Borrowed(10_000 + n)));
                history.push(lost(at + 50, Effect::Returned(10_000 + n)));
            }
        }
        assert_eq!(check(&history), Ok(()));
        let last = history.last_mut().unwrap();
        last.effect = Effect::Returned(77);
        assert!(check(&history).is_err());
    }
}
