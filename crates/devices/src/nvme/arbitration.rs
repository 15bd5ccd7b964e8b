//! Which queue has its turn, and for how much (pure).
//!
//! Round robin as NVM Express describes it (base 1.4, section 4.13.1), weighted by what commands
//! cost: a queue gets a quantum of credit with each turn, a command costs its data and not less
//! than a minimum, and a queue in debt passes its turn. So queues that have work get equal shares
//! of the bytes whatever their depths and the sizes of their commands are (deficit round robin,
//! Shreedhar and Varghese 1995), and none waits longer than it takes to serve each of the others
//! with a quantum and one longest command.

use std::collections::VecDeque;

/// How much work a turn and a poll may be, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct TurnShares {
    /// Credit that a turn gives.
    pub quantum: i64,
    /// What the commands of one poll may be about, more or less: what else the engine has to do,
    /// a revocation above all, waits no longer than these take.
    pub poll: i64,
    /// What a command costs at least: about the bytes that could be copied meanwhile.
    pub least: i64,
    /// What a command costs at most, and so the largest debt. What takes longer than that is done
    /// in the background.
    pub most: i64,
}

impl Default for TurnShares {
    fn default() -> Self {
        TurnShares { quantum: 256 << 10, poll: 4 << 20, least: 4096, most: 1 << 20 }
    }
}

/// How a queue's turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    /// It has nothing that could be done now.
    Idle,
    /// It has more to do.
    More,
    /// It has more to do and no queue can continue: something that all share is used up.
    Blocked,
}

/// The order of the queues. For each poll: [`begin`](Arbiter::begin), then turns, each with
/// [`next`](Arbiter::next), commands, [`end`](Arbiter::end).
pub trait Arbiter: Send {
    /// A poll begins; `queues` is how many there are.
    fn begin(&mut self, queues: usize);

    /// The index of the queue whose turn it is; `None` ends the poll.
    fn next(&mut self) -> Option<usize>;

    /// Gives the queue at `index` a turn of its own, in the place of a poll.
    fn only(&mut self, queues: usize, index: usize);

    /// A command about `bytes` was taken from the queue whose turn it is.
    fn spend(&mut self, bytes: u64);

    /// Whether the queue whose turn it is may take another command.
    fn may_continue(&self) -> bool;

    /// Called after the last command of a turn.
    fn end(&mut self, how: TurnEnd);
}

/// Deficit round robin over queues (Shreedhar and Varghese, 1995), in units of what a command costs.
#[derive(Debug, Default)]
pub struct RoundRobin {
    shares: TurnShares,
    /// Credit of each queue by index, from minus the costliest command to a quantum.
    credit: Vec<i64>,
    /// The queue that has its turn next, and the one that has it now.
    turn: usize,
    current: usize,
    /// Turns left in this round.
    turns: usize,
    /// A queue had more to do than this round let it.
    another_round: bool,
    /// Whether a command was taken in this turn.
    taken: bool,
    budget: i64,
}

impl RoundRobin {
    /// With other shares than usual.
    #[cfg(test)]
    pub fn with_shares(shares: TurnShares) -> RoundRobin {
        RoundRobin { shares, ..RoundRobin::default() }
    }
}

impl Arbiter for RoundRobin {
    #[inline]
    fn begin(&mut self, queues: usize) {
        // Queues came or went, so indices mean other queues: nobody owes anything.
        if self.credit.len() != queues {
            self.credit.clear();
            self.credit.resize(queues, 0);
        }
        self.turns = queues;
        self.another_round = false;
        self.budget = self.shares.poll;
    }

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.budget > 0 {
            if self.turns == 0 {
                if !std::mem::take(&mut self.another_round) {
                    return None;
                }
                self.turns = self.credit.len();
            }
            self.turns -= 1;
            self.current = if self.turn < self.credit.len() { self.turn } else { 0 };
            self.turn = self.current + 1;
            self.taken = false;
            let credit = self.credit.get_mut(self.current)?;
            *credit = (*credit + self.shares.quantum).min(self.shares.quantum);
            if *credit > 0 {
                return Some(self.current);
            }
            self.another_round = true;
        }
        None
    }

    fn only(&mut self, queues: usize, index: usize) {
        self.begin(queues);
        self.current = index.min(queues.saturating_sub(1));
        if let Some(credit) = self.credit.get_mut(self.current) {
            *credit = (*credit + self.shares.quantum).min(self.shares.quantum);
        }
    }

    #[inline]
    fn spend(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let cost = bytes.clamp(self.shares.least, self.shares.most);
        self.credit[self.current] -= cost;
        self.budget -= cost;
        self.taken = true;
    }

    #[inline]
    fn may_continue(&self) -> bool {
        self.credit[self.current] > 0 && self.budget > 0
    }

    #[inline]
    fn end(&mut self, how: TurnEnd) {
        let credit = &mut self.credit[self.current];
        match how {
            // Debts stay, but credit is not saved up by who has nothing to do.
            TurnEnd::Idle => *credit = (*credit).min(0),
            TurnEnd::More => {
                self.another_round = true;
                if *credit > 0 {
                    // The poll has ended before the turn: the next one continues with it.
                    self.turn = self.current;
                    *credit -= self.shares.quantum;
                }
            }
            TurnEnd::Blocked => {
                self.budget = 0;
                if !self.taken {
                    // What becomes free first is its.
                    self.turn = self.current;
                    *credit -= self.shares.quantum;
                }
            }
        }
    }
}

/// Which queue may have its next range made zeroes, where others are to be left places: those that wait take turns,
/// whatever order queues are polled in.
#[derive(Debug, Default)]
pub struct ZeroingTurns {
    /// Queues by identifier, the one that waits longest first.
    waiting: VecDeque<u16>,
}

impl ZeroingTurns {
    /// Whether no queue waits for its turn to have ranges made zeroes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether queue `qid`, whose next command makes ranges zeroes, may take it now. If not, it waits from now on.
    /// `free` is whether one more may be under way.
    pub fn may_take(&mut self, qid: u16, free: bool) -> bool {
        if free && self.waiting.front().is_none_or(|first| *first == qid) {
            self.waiting.pop_front();
            return true;
        }
        if !self.waiting.contains(&qid) {
            self.waiting.push_back(qid);
        }
        false
    }

    /// Drops those that do not wait any more: the others do not wait for them.
    pub fn keep(&mut self, waits: impl Fn(u16) -> bool) {
        self.waiting.retain(|qid| waits(*qid));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What was before: a full round begins at the same queue, and a spent budget ends the poll
    /// before the next one.
    #[derive(Debug, Default)]
    pub struct FirstComesFirst {
        pub poll: i64,
        queues: usize,
        turn: usize,
        index: usize,
        turns: usize,
        budget: i64,
    }

    impl FirstComesFirst {
        pub fn new(poll: i64) -> Self {
            FirstComesFirst { poll, ..FirstComesFirst::default() }
        }
    }

    impl Arbiter for FirstComesFirst {
        fn begin(&mut self, queues: usize) {
            (self.queues, self.turns, self.index) = (queues, queues, self.turn);
            self.budget = self.poll;
        }
        fn only(&mut self, queues: usize, _index: usize) {
            self.begin(queues);
        }
        fn next(&mut self) -> Option<usize> {
            if self.budget < 0 || self.turns == 0 {
                self.turn = self.index;
                return None;
            }
            self.turns -= 1;
            if self.index >= self.queues {
                self.index = 0;
            }
            Some(self.index)
        }
        fn spend(&mut self, bytes: u64) {
            self.budget -= bytes as i64;
        }
        fn may_continue(&self) -> bool {
            self.budget >= 0
        }
        fn end(&mut self, _how: TurnEnd) {
            if self.budget >= 0 {
                self.index += 1;
            }
        }
    }

    /// A queue that always has work: commands of these sizes in turn, `depth` at a time, refilled
    /// between polls.
    #[derive(Debug, Clone)]
    struct Busy {
        depth: usize,
        sizes: Vec<u64>,
    }

    fn busy() -> impl Strategy<Value = Busy> {
        (1usize..200, prop::collection::vec(512u64..=1 << 20, 1..4))
            .prop_map(|(depth, sizes)| Busy { depth, sizes })
    }

    /// What a queue got.
    #[derive(Debug, Clone, Default)]
    struct Served {
        /// Bytes, by the cost of its commands.
        cost: i64,
        commands: usize,
        /// It had no more commands in one of its turns.
        ran_dry: bool,
    }

    /// What each queue got in `polls` polls, in each of which `slots` commands could be taken.
    fn run(arbiter: &mut dyn Arbiter, queues: &[Busy], polls: usize, slots: usize) -> Vec<Served> {
        let shares = TurnShares::default();
        let mut served = vec![Served::default(); queues.len()];
        for _ in 0..polls {
            let mut left: Vec<usize> = queues.iter().map(|queue| queue.depth).collect();
            let mut free = slots;
            arbiter.begin(queues.len());
            while let Some(index) = arbiter.next() {
                let end = loop {
                    let queue = &mut served[index];
                    if left[index] == 0 {
                        queue.ran_dry = true;
                        break TurnEnd::Idle;
                    }
                    if free == 0 {
                        break TurnEnd::Blocked;
                    }
                    if !arbiter.may_continue() {
                        break TurnEnd::More;
                    }
                    let sizes = &queues[index].sizes;
                    let bytes = sizes[queue.commands % sizes.len()];
                    arbiter.spend(bytes);
                    queue.cost += (bytes as i64).clamp(shares.least, shares.most);
                    queue.commands += 1;
                    left[index] -= 1;
                    free -= 1;
                };
                arbiter.end(end);
            }
        }
        served
    }

    /// How far the shares of two queues may differ: by a quantum and the longest command of each.
    fn most_apart() -> i64 {
        let shares = TurnShares::default();
        2 * (shares.quantum + shares.most)
    }

    proptest! {
        /// A queue gets as much as any other, or has its turn every few polls and gets all that it asks for then, however deep
        /// the others are and however long their commands.
        #[test]
        fn each_queue_gets_what_it_asks_for_or_as_much_as_any_other(
            queues in prop::collection::vec(busy(), 2..8),
            deep in prop::collection::vec(any::<bool>(), 8),
        ) {
            // The first one at least never runs dry.
            let depth = |nth, queue: &Busy| if nth == 0 || deep[nth] { 9000 } else { queue.depth };
            let queues: Vec<Busy> = queues
                .into_iter()
                .enumerate()
                .map(|(nth, queue)| Busy { depth: depth(nth, &queue), ..queue })
                .collect();
            let (polls, shares) = (100, TurnShares::default());
            // What the others may take before it has its turn.
            let others = (queues.len() as i64 - 1) * (shares.quantum + shares.most);
            let polls_between = 1 + others.unsigned_abs().div_ceil(shares.poll.unsigned_abs()) as usize;
            let served = run(&mut RoundRobin::default(), &queues, polls, usize::MAX);
            let most = served.iter().map(|queue| queue.cost).max().unwrap_or_default();
            for (queue, got) in queues.iter().zip(&served) {
                let turns = polls / polls_between;
                let as_much = most - got.cost <= most_apart();
                let all = got.commands >= queue.depth * (turns - 1);
                prop_assert!(as_much || all, "{served:?} of {queues:?}");
            }
        }

        /// Where few commands may be under way, a place that becomes free is offered to each queue in turn; one that
        /// took a long command passes its turn until it has paid for it.
        #[test]
        fn no_queue_is_passed_over_for_a_free_place(
            queues in prop::collection::vec(busy(), 2..8),
            slots in 1usize..300,
        ) {
            let polls = 400;
            let served = run(&mut RoundRobin::default(), &queues, polls, slots);
            let shares = TurnShares::default();
            let rounds_in_debt = (shares.most / shares.quantum) as usize;
            let most = queues.len() * (rounds_in_debt + 1);
            for queue in served.iter().filter(|queue| !queue.ran_dry) {
                prop_assert!((queue.commands + 1) * most >= polls, "{served:?} of {queues:?}");
            }
        }
    }

    #[test]
    fn one_deep_queue_of_long_commands_does_not_keep_others_out() {
        let deep = Busy { depth: 64, sizes: vec![128 << 10] };
        let other = Busy { depth: 4, sizes: vec![4096] };
        let queues = [deep, other];
        let served = run(&mut FirstComesFirst::new(4 << 20), &queues, 6600, usize::MAX);
        assert_eq!(served[1].cost, 0, "the old order starved it");
        let served = run(&mut RoundRobin::default(), &queues, 6600, usize::MAX);
        assert_eq!(served[1].cost, 6600 * 4 * 4096, "all that it asked for");
    }

    #[test]
    fn a_poll_ends_with_its_budget_and_goes_on_with_the_next_queue() {
        let mut arbiter = RoundRobin::default();
        let mut order = Vec::new();
        for _ in 0..2 {
            arbiter.begin(3);
            while let Some(index) = arbiter.next() {
                while arbiter.may_continue() {
                    arbiter.spend(1 << 20);
                    order.push(index);
                }
                arbiter.end(TurnEnd::More);
            }
        }
        assert_eq!(order, [0, 1, 2, 0, 1, 2, 0, 1]);
    }
}
