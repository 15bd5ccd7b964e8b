//! Whether the receiver of a ring still takes what is sent to it (pure).
//!
//! A node that is gone ends its rings. One that is stopped does not: it is found by frames that lie in its ring and are
//! taken by nobody. Who looks seldom, because it sends seldom or had no processor itself, must not take that for the
//! other's silence: the time between two looks counts up to a bound.

/// How long a receiver takes nothing of what lies there before it counts as frozen.
pub const SILENT_NS: u64 = 1_000_000_000;
/// How often it is looked, at most: a look goes over all frames that lie there.
const LOOK_NS: u64 = 20_000_000;
/// What the time between two looks counts at most.
const STEP_NS: u64 = SILENT_NS / 2;

/// What is known of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Liveness {
    looked_ns: Option<u64>,
    /// Frames that it had taken at the last look, and whether there were more.
    taken: u64,
    waited: bool,
    silent_ns: u64,
}

impl Liveness {
    /// Whether it is time for another look.
    pub fn is_due(&self, now_ns: u64) -> bool {
        self.looked_ns.is_none_or(|at| now_ns.saturating_sub(at) >= LOOK_NS)
    }

    /// Of all frames that were handed over it has taken so many at `now_ns`, and `unread` are left.
    pub fn look(&mut self, now_ns: u64, taken: u64, unread: u64) {
        let passed = now_ns.saturating_sub(self.looked_ns.unwrap_or(now_ns)).min(STEP_NS);
        let waits = unread > 0;
        match waits && self.waited && taken == self.taken {
            true => self.silent_ns = self.silent_ns.saturating_add(passed),
            false => self.silent_ns = 0,
        }
        (self.looked_ns, self.taken, self.waited) = (Some(now_ns), taken, waits);
    }

    /// Whether it has taken nothing for so long that it counts as frozen.
    pub fn is_silent(&self) -> bool {
        self.silent_ns >= SILENT_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_receiver_that_takes_nothing_for_a_while_is_silent_until_it_takes_something() {
        let mut it = Liveness::default();
        for at in (0..=1000).step_by(100) {
            assert!(!it.is_silent(), "{at} ms");
            it.look(at * MS, 7, 1);
        }
        assert!(it.is_silent());
        it.look(1100 * MS, 8, 3);
        assert!(!it.is_silent());
    }

    #[test]
    fn a_receiver_without_frames_or_that_takes_some_is_never_silent() {
        let (mut idle, mut slow) = (Liveness::default(), Liveness::default());
        for at in 0..100 {
            idle.look(at * 900 * MS, 7, 0);
            slow.look(at * 900 * MS, at, 1000);
            assert!(!idle.is_silent() && !slow.is_silent());
        }
    }

    #[test]
    fn a_look_after_an_hour_counts_no_hour_of_silence() {
        let mut it = Liveness::default();
        it.look(0, 7, 0);
        // Sent just now.
        it.look(3_600_000 * MS, 7, 1);
        it.look(2 * 3_600_000 * MS, 7, 1);
        assert!(!it.is_silent());
        assert!(!it.is_due(2 * 3_600_000 * MS + 1) && it.is_due(2 * 3_600_000 * MS + LOOK_NS));
        it.look(3 * 3_600_000 * MS, 7, 1);
        assert!(it.is_silent());
    }
}
