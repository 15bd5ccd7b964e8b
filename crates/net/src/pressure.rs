//! For how long a sender waits for a receiver that has no room (pure).
//!
//! A receiver that is busy is waited for: a sender that is slowed down loses nothing. One that takes nothing at
//! all for [`PATIENCE_NS`] stalls; frames for it are dropped from then on, until it has room again, so
//! that those for others continue.

/// How long a receiver may take nothing. Longer than a thread waits for its processor on a machine where all are
/// busy, and shorter than any protocol above waits before it sends again.
pub const PATIENCE_NS: u64 = 20_000_000;

/// What is known of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Since when it has had no room.
    since: Option<u64>,
    stands_still: bool,
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
    /// It took a frame.
    #[inline]
    pub fn took(&mut self) {
        if self.since.is_some() {
            *self = Pressure::default();
        }
    }

    /// It has no room at `now_ns`.
    pub fn is_full(&mut self, now_ns: u64) -> Advice {
        let since = *self.since.get_or_insert(now_ns);
        self.stands_still |= now_ns.saturating_sub(since) >= PATIENCE_NS;
        if self.stands_still { Advice::Drop } else { Advice::Wait }
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
        assert_eq!(it.is_full(1_000), Advice::Wait);
        assert_eq!(it.is_full(1_000 + PATIENCE_NS - 1), Advice::Wait);
        assert_eq!(it.is_full(1_000 + PATIENCE_NS), Advice::Drop);
        // Also by a clock that was read out of order.
        assert_eq!(it.is_full(0), Advice::Drop);
        it.took();
        assert_eq!(it.is_full(1_000 + PATIENCE_NS), Advice::Wait);
    }
}
