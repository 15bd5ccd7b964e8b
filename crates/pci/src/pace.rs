//! When an engine polls, spins, sleeps, and goes to another processor (pure).
//!
//! While there is work the engine polls. When there is none it spins for a while
//! ([`AdaptiveSpin`]), and sleeps after an unsuccessful spin. The clock is looked at once in some polls:
//! a look costs as much as a poll that finds nothing.
//!
//! A spin is unsuccessful for certain when the driver that it waits for has to run on the same
//! processor: then each command costs two sleeps and wake-ups, tens of microseconds, while another
//! processor may be idle. The system does not see it, since neither of the two runs for long. So
//! a spin that goes on yields between its looks: where nobody else wants the processor that returns
//! at once, and where somebody does, after their time slice. An engine that finds so that it is not
//! alone goes elsewhere. Where it was elsewhere already a moment ago, all processors are busy: then
//! it spins only for as long as it does so without yielding, and sleeps, so that those whom it waits
//! for have the processor.
//!
//! That is so where the others keep the processor for long. Where they give it back in less time than a spin may
//! last, as other engines do that have something to do now and then, nobody has to sleep: engines that are
//! crowded take turns, each yields as soon as it finds nothing. A turn costs a switch, a sleep costs two and
//! somebody who rings. The same holds for a driver that polls and yields on the engine's processor, and needs it for a
//! microsecond for each command: while the engine spins, that driver sees no answer and sends nothing. A processor that is
//! shared for long while another one is idle is left (`shared`).
//!
//! Where nobody rings ([`Work::Watch`]), a sleep after an unsuccessful spin is a short one. If the poll after it finds
//! nothing again, there is no further spin: the wait goes on, and its whole length is what the next spin learns from.
//!
//! A gap between two looks tells that the thread did not run, or slept: the whole host may have
//! stood still for so long that the function's user has given it up. So after a gap the engine
//! checks that there still is a user. Looks are many polls apart, so models look more often, before
//! they touch memory ([`UserWatch`](crate::user::UserWatch)); this one is for what they leave out.

use rackbus_memory::AdaptiveSpin;

use crate::function::Work;
use crate::shared::SharedProcessor;

/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 16;
/// A spin that is longer yields between its looks.
const ALONE_NS: u64 = 4_000;
/// A yield that took longer let somebody else run, who gave the processor back: where nobody wants it, a yield is a system
/// call of some hundred nanoseconds, and a switch there and back takes more than a microsecond.
const SWITCH_NS: u64 = 1_000;
/// A yield that took longer let somebody run who had so much to do that another processor would be better.
const SHARED_NS: u64 = 30_000;
/// Of as many yields one may take long without more being concluded from it: where two take turns of which one needs the
/// processor for much longer than the other, the system gives the other one its part from time to time.
const RARE: u32 = 16;
/// How long an engine stays on a processor at least, so that on a machine where all are busy it
/// does not wander; doubled with each move that did not help.
const STAY_NS: u64 = 1_000_000;
const STAY_LIMIT_NS: u64 = 1_000_000_000;
/// Longer than an engine is kept from looking at the clock by its own work and by others on the
/// processor, and much shorter than any user waits for its function (seconds).
const GAP_NS: u64 = 50_000_000;
/// A move that lasts so many times as long as it had to has helped.
const LASTING: u64 = 8;

/// What an engine does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// Poll again at once: there may be work.
    Poll,
    /// Lets others have the processor, if any want it, [says](Pace::returned) when it has it again, and polls.
    Yield,
    /// Goes to another processor, if it may, and polls.
    Move,
    /// [Says](Pace::saw_idle) how long processors have been idle, goes to another one if that is the answer, and polls.
    LookForIdle,
    /// Checks that its user is still there, and polls.
    Check,
    /// Sleeps until something rings, or until this time.
    Sleep(Option<u64>),
}

/// The pace of one engine.
#[derive(Debug)]
pub struct Pace {
    spin: AdaptiveSpin,
    now_ns: u64,
    /// When the current spin began; `None` while there is work.
    idle_since: Option<u64>,
    /// When the spin began after which it sleeps.
    asleep_since: Option<u64>,
    /// When the spin began after which it looks from time to time only.
    watching_since: Option<u64>,
    polls: u32,
    /// Somebody else had the processor when it yielded.
    shared: bool,
    /// Yields that returned soon since the last one that did not.
    short_yields: u32,
    /// It was not alone, and could not move: until when it does not spin for long.
    crowded_until: u64,
    /// The same where those others gave the processor back soon: until when it takes turns with them.
    turns_until: u64,
    processor: SharedProcessor,
    /// When it moved last, and for how long it stays.
    moved_ns: u64,
    stay_ns: u64,
}

impl Pace {
    /// Begins at `now_ns`, in nanoseconds of the caller's clock.
    pub fn new(spin: AdaptiveSpin, now_ns: u64) -> Pace {
        let (idle_since, asleep_since, watching_since) = (None, None, None);
        let (moved_ns, stay_ns) = (now_ns, STAY_NS);
        let shared = false;
        let (polls, crowded_until, turns_until, short_yields) = (0, 0, 0, 0);
        Pace {
            spin,
            now_ns,
            idle_since,
            asleep_since,
            watching_since,
            polls,
            shared,
            short_yields,
            crowded_until,
            turns_until,
            processor: SharedProcessor::new(),
            moved_ns,
            stay_ns,
        }
    }

    /// The time to poll with, a few polls old.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Something happened outside of polls, or a sleep ended, at `now_ns`. True when so much time
    /// has passed that the user has to be checked.
    pub fn disturbed(&mut self, now_ns: u64) -> bool {
        let gap = now_ns.saturating_sub(self.now_ns) > GAP_NS;
        if let Some(since) = self.asleep_since.take() {
            self.spin.waited(now_ns.saturating_sub(since));
        }
        self.now_ns = now_ns;
        self.idle_since = None;
        self.shared = false;
        gap
    }

    /// It was to sleep, and let others have the processor instead, until `now_ns`: the spin goes on.
    pub fn stayed_awake(&mut self, now_ns: u64) {
        self.asleep_since = None;
        self.returned(now_ns);
    }

    /// It let others have the processor, and has it again at `now_ns`. That is said at once, before there is work: what
    /// that takes is no time of theirs.
    pub fn returned(&mut self, now_ns: u64) {
        let after_ns = now_ns.saturating_sub(self.now_ns);
        if after_ns <= SHARED_NS {
            // Nobody else wanted the processor, or somebody who needs it for a moment now and then.
            self.short_yields = self.short_yields.saturating_add(1);
            if after_ns > SWITCH_NS {
                self.turns_until = now_ns + STAY_NS;
                self.processor.others_ran(self.now_ns, now_ns);
            } else {
                self.turns_until = 0;
            }
        } else if std::mem::take(&mut self.short_yields) < RARE {
            self.shared = true;
            self.processor.others_ran(self.now_ns, now_ns);
            return;
        } else if after_ns <= GAP_NS {
            // The system gave who had little of the processor its part. That time was no spin.
            self.turns_until = now_ns + STAY_NS;
            self.processor.others_ran(self.now_ns, now_ns);
            self.idle_since = Some(now_ns);
        } else {
            // The next look finds the gap.
            return;
        }
        self.now_ns = now_ns;
    }

    /// Whether it goes to another processor, now that all processors together have been idle for `idle_ns` since the
    /// system started.
    pub fn saw_idle(&mut self, idle_ns: u64) -> bool {
        let moves = self.processor.moves(idle_ns, self.now_ns);
        if moves {
            (self.moved_ns, self.stay_ns) = (self.now_ns, STAY_NS);
            (self.shared, self.crowded_until, self.turns_until) = (false, 0, 0);
            // The time that somebody else had was no spin.
            self.idle_since = Some(self.now_ns);
        }
        moves
    }

    /// What follows a poll that found `work`.
    #[inline]
    pub fn after(&mut self, work: Work, clock: impl FnOnce() -> u64) -> NextStep {
        match work {
            Work::Done => {
                if let Some(since) = self.watching_since.take() {
                    self.spin.waited(self.now_ns.saturating_sub(since));
                } else if self.idle_since.take().is_some() {
                    self.spin.found();
                }
                self.polls = self.polls.wrapping_add(1);
                if self.polls.is_multiple_of(POLLS_PER_CLOCK) && self.disturbed(clock()) {
                    return NextStep::Check;
                }
                NextStep::Poll
            }
            Work::Idle => {
                self.polls = self.polls.wrapping_add(1);
                let turns = self.now_ns < self.turns_until;
                if !turns && !self.polls.is_multiple_of(POLLS_PER_CLOCK) {
                    return NextStep::Poll;
                }
                self.look(clock())
            }
            Work::Watch(limit_ns) => self.watch(limit_ns, clock),
            Work::Asleep(deadline) => NextStep::Sleep(deadline),
        }
    }

    /// Nothing is to be done, and what comes next does not ring.
    fn watch(&mut self, limit_ns: u64, clock: impl FnOnce() -> u64) -> NextStep {
        if self.watching_since.is_none() {
            self.polls = self.polls.wrapping_add(1);
            if !self.polls.is_multiple_of(POLLS_PER_CLOCK) {
                return NextStep::Poll;
            }
            match self.look(clock()) {
                NextStep::Sleep(_) => self.watching_since = self.asleep_since.take(),
                other => return other,
            }
        }
        NextStep::Sleep(Some(self.now_ns.saturating_add(limit_ns)))
    }

    /// Looks at the clock in the middle of a spin.
    fn look(&mut self, now_ns: u64) -> NextStep {
        let since_last = now_ns.saturating_sub(self.now_ns);
        self.now_ns = now_ns;
        if since_last > GAP_NS {
            // The time in which it did not run was no spin.
            self.idle_since = Some(now_ns);
            return NextStep::Check;
        }
        if self.processor.is_due(now_ns) {
            return NextStep::LookForIdle;
        }
        if std::mem::take(&mut self.shared) {
            if now_ns.saturating_sub(self.moved_ns) >= self.stay_ns {
                // Soon after the last move: that did not help.
                let soon = now_ns.saturating_sub(self.moved_ns) < LASTING * self.stay_ns;
                self.stay_ns = if soon { (2 * self.stay_ns).min(STAY_LIMIT_NS) } else { STAY_NS };
                self.moved_ns = now_ns;
                // The time that somebody else had was no spin.
                self.idle_since = Some(now_ns);
                return NextStep::Move;
            }
            let until = self.moved_ns.saturating_add(self.stay_ns);
            match since_last <= self.spin.longest_ns() {
                true => self.turns_until = until,
                false => (self.crowded_until, self.turns_until) = (until, 0),
            }
        }
        let spun = now_ns.saturating_sub(*self.idle_since.get_or_insert(now_ns));
        let turns = now_ns < self.turns_until;
        let crowded = !turns && now_ns < self.crowded_until && spun >= ALONE_NS;
        if crowded {
            // It does not yield, so that nobody tells.
            self.processor.others_ran(now_ns, now_ns);
        }
        // Others had most of that time.
        let budget = if turns { self.spin.longest_ns() } else { self.spin.budget_ns() };
        if crowded || spun >= budget {
            self.asleep_since = self.idle_since;
            return NextStep::Sleep(None);
        }
        if turns || spun >= ALONE_NS {
            return NextStep::Yield;
        }
        NextStep::Poll
    }
}

#[cfg(test)]
mod tests;
