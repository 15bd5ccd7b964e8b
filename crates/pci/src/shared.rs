//! When an engine that shares its processor leaves it for an idle one (pure).
//!
//! To take turns, or to sleep whenever there is nothing to do, is right where all processors are busy. An engine that moved
//! while they were, and whose neighbours have nothing to do any more, may be left with its driver on one processor
//! while another one is idle: the system does not part the two, since neither of them runs for long, and a command
//! takes ten times as long. So where others run on its processor again and again, the engine looks now and then at how
//! long processors have been idle, and moves if one of them was for half of the time since the last look. Where
//! none was, it stays: a move to a busy processor would disturb those who are there.

/// A processor that is shared for so long is looked into. It is three times what the system counts idle time in at most.
const LOOK_NS: u64 = 30_000_000;
const LOOK_LIMIT_NS: u64 = 1_000_000_000;
/// Others who leave the engine's processor alone for so long do not share it.
const BREAK_NS: u64 = 10_000_000;
/// A move after which nothing is to be done for so many times as long has helped.
const LASTING: u64 = 8;

/// What an engine knows of others on its processor.
#[derive(Debug)]
pub(crate) struct SharedProcessor {
    /// Since when it is shared, or when that was looked into last.
    since_ns: u64,
    /// When somebody else ran last.
    last_ns: u64,
    /// The total idle time at the last look.
    idle_ns: Option<u64>,
    /// How long it is shared until that is looked into; doubled with each move that did not help.
    look_ns: u64,
    moved_ns: Option<u64>,
}

impl SharedProcessor {
    pub(crate) fn new() -> SharedProcessor {
        SharedProcessor { since_ns: 0, last_ns: 0, idle_ns: None, look_ns: LOOK_NS, moved_ns: None }
    }

    /// Somebody else ran on the processor from `begun_ns` on, and gave it back at `now_ns`.
    pub(crate) fn others_ran(&mut self, begun_ns: u64, now_ns: u64) {
        if begun_ns.saturating_sub(self.last_ns) > BREAK_NS {
            (self.since_ns, self.idle_ns) = (now_ns, None);
        }
        self.last_ns = now_ns;
    }

    /// Whether it has been shared for so long that the idle time is to be [told](Self::moves). It is true once for each
    /// such time.
    pub(crate) fn is_due(&mut self, now_ns: u64) -> bool {
        let goes_on = now_ns.saturating_sub(self.last_ns) <= BREAK_NS;
        let due = goes_on && self.last_ns.saturating_sub(self.since_ns) >= self.look_ns;
        if due {
            self.since_ns = now_ns;
        }
        due
    }

    /// Whether the engine leaves its processor, where all processors together have been idle for `idle_ns` since the
    /// system started.
    pub(crate) fn moves(&mut self, idle_ns: u64, now_ns: u64) -> bool {
        let before = self.idle_ns.replace(idle_ns);
        // The look before was at least that long ago.
        let was_idle = |before: u64| idle_ns.saturating_sub(before) >= self.look_ns / 2;
        if !before.is_some_and(was_idle) {
            return false;
        }
        let soon = |moved: u64| now_ns.saturating_sub(moved) < LASTING * self.look_ns;
        self.look_ns = match self.moved_ns.is_some_and(soon) {
            true => (2 * self.look_ns).min(LOOK_LIMIT_NS),
            false => LOOK_NS,
        };
        (self.moved_ns, self.last_ns, self.idle_ns) = (Some(now_ns), 0, None);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns each 10 us until `until_ns`, on a machine where `idle` of a hundred parts of a processor are idle: when
    /// the engine moved.
    fn turns(shared: &mut SharedProcessor, now: &mut u64, until_ns: u64, idle: u64) -> Vec<u64> {
        let mut moved = Vec::new();
        while *now < until_ns {
            *now += 10_000;
            shared.others_ran(*now - 5_000, *now);
            if shared.is_due(*now) {
                // In the steps that the system tells it in.
                let idle_ns = *now / 100 * idle / 10_000_000 * 10_000_000;
                if shared.moves(idle_ns, *now) {
                    moved.push(*now);
                }
            }
        }
        moved
    }

    #[test]
    fn where_another_processor_is_idle_it_moves_soon() {
        let (mut shared, mut now) = (SharedProcessor::new(), LOOK_NS);
        let moved = turns(&mut shared, &mut now, 10 * LOOK_NS, 100);
        assert!(moved[0] <= 4 * LOOK_NS, "{moved:?}");
    }

    #[test]
    fn where_none_is_idle_it_stays() {
        for idle in [0, 10, 30] {
            let (mut shared, mut now) = (SharedProcessor::new(), LOOK_NS);
            assert!(turns(&mut shared, &mut now, 100 * LOOK_NS, idle).is_empty());
        }
    }

    /// The idle processor is one that it may not use, say.
    #[test]
    fn moves_that_do_not_help_become_rare_until_one_helps() {
        let (mut shared, mut now) = (SharedProcessor::new(), LOOK_NS);
        let moved = turns(&mut shared, &mut now, 20 * LOOK_LIMIT_NS, 100);
        assert!((5..30).contains(&moved.len()), "{} moves in 20 s", moved.len());
        now += LASTING * LOOK_LIMIT_NS + 1;
        let until = now + 2 * LOOK_LIMIT_NS + 2 * LOOK_NS;
        assert_eq!(turns(&mut shared, &mut now, until, 100).len(), 1);
        assert_eq!(shared.look_ns, LOOK_NS);
    }

    #[test]
    fn others_who_run_now_and_then_do_not_share_it() {
        let (mut shared, mut now) = (SharedProcessor::new(), LOOK_NS);
        for _ in 0..1000 {
            now += 2 * BREAK_NS;
            shared.others_ran(now - 5_000, now);
            assert!(!shared.is_due(now));
        }
        // What was idle before a break says nothing of after it.
        let until = now + 3 * LOOK_NS;
        turns(&mut shared, &mut now, until, 0);
        assert!(shared.idle_ns.is_some());
        shared.others_ran(now + 2 * BREAK_NS, now + 2 * BREAK_NS);
        assert_eq!(shared.idle_ns, None);
    }
}
