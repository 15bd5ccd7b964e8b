//! For how long a sender waits for a receiver that has no room (pure).
//!
//! A receiver that is busy is waited for: a sender that is slowed down loses nothing. One that takes nothing at
//! all for [`PATIENCE_NS`] stalls; frames for it are dropped from then on, until it has room again, so
//! that those for others continue.
//!
//! A receiver that takes a little all the time never stalls, and would keep up whatever its sender has for others. So
//! while there is something for others, waiting uses patience up, and a quarter of the time gives it back.

/// How long a receiver may take nothing. Longer than a thread waits for its processor on a machine where all are
/// busy, and shorter than any protocol above waits before it sends again.
pub const PATIENCE_NS: u64 = 20_000_000;
/// Of the time that passes, patience grows by one part in so many.
const REFILL_PARTS: u64 = 4;
/// How long after something was sent to others it counts that they wait.
const OTHERS_NS: u64 = 100_000_000;

/// What is known of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Since when it has had no room.
    since: Option<u64>,
    stands_still: bool,
    /// Patience that was used up for it, at a time. A sender that slept for longer than it had is in debt.
    spent_ns: u64,
    reckoned_ns: u64,
    /// It is waited for, and others with it.
    others_wait: bool,
    /// Frames that were sent to others, and when these were more than before.
    others: u64,
    others_ns: Option<u64>,
}

/// What to do with a frame for which there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Keep it, and try again.
    Wait,
    /// Drop the frame: the receiver has used up its sender's patience.
    Drop,
}

impl Pressure {
    /// Whether it had no room for the last frame: only then is it to be told that it [took](Pressure::took) one.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// It took a frame at `now_ns`.
    pub fn took(&mut self, now_ns: u64) {
        self.reckon(now_ns);
        (self.since, self.stands_still, self.others_wait) = (None, false, false);
    }

    /// It has no room at `now_ns`, when so many frames were sent to others.
    pub fn is_full(&mut self, now_ns: u64, others: u64) -> Advice {
        self.reckon(now_ns);
        if std::mem::replace(&mut self.others, others) != others {
            self.others_ns = Some(now_ns);
        }
        let with_others = self.others_ns.is_some_and(|at| now_ns.saturating_sub(at) < OTHERS_NS);
        let since = *self.since.get_or_insert(now_ns);
        self.stands_still |= now_ns.saturating_sub(since) >= PATIENCE_NS;
        self.stands_still |= with_others && self.spent_ns >= PATIENCE_NS;
        self.others_wait = with_others && !self.stands_still;
        if self.stands_still { Advice::Drop } else { Advice::Wait }
    }

    /// What was waited, and what time has given back.
    fn reckon(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.reckoned_ns);
        self.reckoned_ns = self.reckoned_ns.max(now_ns);
        let waited = if self.others_wait { passed } else { 0 };
        let spent = self.spent_ns.saturating_add(waited).saturating_sub(passed / REFILL_PARTS);
        self.spent_ns = spent.min(2 * PATIENCE_NS);
    }

    /// Whether frames for it are dropped.
    pub fn stands_still(&self) -> bool {
        self.stands_still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_waited_for_once_and_anew_when_it_took_something() {
        let mut it = Pressure::default();
        assert_eq!(it.is_full(1_000, 0), Advice::Wait);
        assert_eq!(it.is_full(1_000 + PATIENCE_NS - 1, 0), Advice::Wait);
        assert_eq!(it.is_full(1_000 + PATIENCE_NS, 0), Advice::Drop);
        // Also by a clock that was read out of order.
        assert_eq!(it.is_full(0, 0), Advice::Drop);
        it.took(1_000 + PATIENCE_NS);
        assert_eq!(it.is_full(1_000 + PATIENCE_NS, 0), Advice::Wait);
    }

    /// The part of a second that is waited for a receiver that takes something every 2 ms, with `others` for others
    /// each time, in percent.
    fn waited(others: u64) -> u64 {
        const STEP: u64 = 100_000;
        let (mut it, mut waited) = (Pressure::default(), 0);
        for step in 0..10_000 {
            let now = step * STEP;
            if step % 20 == 0 && it.is_on() {
                it.took(now);
            }
            waited += u64::from(it.is_full(now, others * (step / 20)) == Advice::Wait);
        }
        waited / 100
    }

    #[test]
    fn a_slow_receiver_is_waited_for_only_if_that_holds_up_no_others() {
        assert_eq!(waited(0), 100);
        let shared = waited(1);
        assert!((20..30).contains(&shared), "{shared} %");
    }
}
