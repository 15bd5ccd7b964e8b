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
//! microsecond for each command: while the engine spins, that driver sees no answer and sends nothing.
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
            self.turns_until = if after_ns > SWITCH_NS { now_ns + STAY_NS } else { 0 };
        } else if std::mem::take(&mut self.short_yields) < RARE {
            self.shared = true;
            return;
        } else if after_ns <= GAP_NS {
            // The system gave who had little of the processor its part. That time was no spin.
            self.turns_until = now_ns + STAY_NS;
            self.idle_since = Some(now_ns);
        } else {
            // The next look finds the gap.
            return;
        }
        self.now_ns = now_ns;
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
mod tests {
    use super::*;

    #[test]
    fn what_comes_to_one_that_stayed_awake_was_no_wait_in_vain() {
        let (spin, mut now) = (AdaptiveSpin::default(), 0);
        let before = spin.budget_ns();
        let mut pace = Pace::new(spin, now);
        assert_eq!(self::spin(&mut pace, &mut now, 0), NextStep::Sleep(None));
        pace.stayed_awake(now);
        pace.after(Work::Done, || now);
        // Long after, which would be the length of the sleep.
        pace.disturbed(now + 40_000_000);
        assert!(pace.spin.budget_ns() >= before, "{} of {before}", pace.spin.budget_ns());
    }

    /// Polls that find nothing until something else than a poll follows, a microsecond for each look.
    fn spin(pace: &mut Pace, now: &mut u64, yield_ns: u64) -> NextStep {
        for _ in 0..100_000 {
            let next = pace.after(Work::Idle, || {
                *now += 1000;
                *now
            });
            match next {
                NextStep::Poll => {}
                NextStep::Yield => {
                    *now += yield_ns;
                    pace.returned(*now);
                }
                other => return other,
            }
        }
        panic!("it spins for ever");
    }

    #[test]
    fn a_spin_alone_ends_in_sleep() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        now += 10 * STAY_NS;
        pace.disturbed(now);
        assert_eq!(spin(&mut pace, &mut now, 300), NextStep::Sleep(None));
    }

    /// Where nobody rings, an engine that found nothing looks from time to time, without a spin at each look, and
    /// spins again when work has come.
    #[test]
    fn an_engine_that_nobody_rings_sleeps_for_a_while_and_looks() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        now += 10 * STAY_NS;
        pace.disturbed(now);
        let budget = pace.spin.budget_ns();
        let next = |pace: &mut Pace, now: &mut u64, work| {
            for _ in 0..100_000 {
                match pace.after(work, || {
                    *now += 1000;
                    *now
                }) {
                    NextStep::Poll | NextStep::Yield => {}
                    other => return other,
                }
            }
            panic!("it spins for ever");
        };
        let slept = next(&mut pace, &mut now, Work::Watch(50_000));
        assert_eq!(slept, NextStep::Sleep(Some(now + 50_000)));
        for _ in 0..10 {
            now += 50_000;
            assert!(!pace.disturbed(now));
            // The very next poll.
            let looked = pace.after(Work::Watch(60_000), || panic!("the time is known"));
            assert_eq!(looked, NextStep::Sleep(Some(now + 60_000)));
        }
        assert_eq!(pace.spin.budget_ns(), budget, "what has not ended teaches nothing");
        pace.after(Work::Done, || now);
        assert!(pace.spin.budget_ns() < budget, "so long a wait is no spin's");
        assert_eq!(pace.after(Work::Watch(50_000), || now), NextStep::Poll);
    }

    #[test]
    fn an_engine_that_is_not_alone_moves_and_then_spins_anew() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        now += 10 * STAY_NS;
        pace.disturbed(now);
        assert_eq!(spin(&mut pace, &mut now, 3_000_000), NextStep::Move);
        assert_eq!(spin(&mut pace, &mut now, 300), NextStep::Sleep(None));
    }

    #[test]
    fn an_engine_that_waits_long_for_its_processor_moves_too() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        now += 10 * STAY_NS;
        pace.disturbed(now);
        assert_eq!(spin(&mut pace, &mut now, 2 * GAP_NS), NextStep::Check);
        assert_eq!(spin(&mut pace, &mut now, 2 * GAP_NS), NextStep::Move);
    }

    #[test]
    fn after_a_gap_the_user_is_checked_and_only_then() {
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), 0);
        let mut now = 0;
        for work in [Work::Done, Work::Idle] {
            for step in [GAP_NS / 32, GAP_NS] {
                let checks = (0..4 * POLLS_PER_CLOCK).filter(|_| {
                    pace.after(work, || {
                        now += step + 1;
                        now
                    }) == NextStep::Check
                });
                assert_eq!(checks.count(), if step == GAP_NS { 4 } else { 0 }, "{work:?} {step}");
            }
        }
        assert!(!pace.disturbed(now + GAP_NS) && pace.disturbed(now + 3 * GAP_NS));
    }

    #[test]
    fn where_all_processors_are_busy_spins_are_short() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        // It moved, and is not alone there either.
        pace.moved_ns = now;
        assert_eq!(spin(&mut pace, &mut now, 100_000), NextStep::Sleep(None));
        now += 10_000;
        pace.disturbed(now);
        let begun = now;
        assert_eq!(spin(&mut pace, &mut now, 300), NextStep::Sleep(None));
        assert!(now - begun <= 2 * ALONE_NS, "{} ns", now - begun);
        // Later it tries again.
        now += 10 * STAY_NS;
        pace.disturbed(now);
        let begun = now;
        assert_eq!(spin(&mut pace, &mut now, 300), NextStep::Sleep(None));
        assert!(now - begun > 3 * ALONE_NS, "{} ns", now - begun);
    }

    /// Others that give the processor back within a spin are taken turns with: it yields at each look, and sleeps
    /// when there was nothing for as long as a spin lasts.
    #[test]
    fn engines_that_are_crowded_take_turns() {
        let (mut now, turn) = (1, 2 * SHARED_NS);
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        // It has been elsewhere, and was not alone there either.
        (pace.moved_ns, pace.stay_ns) = (now, STAY_LIMIT_NS);
        let look = |pace: &mut Pace, now: &mut u64| loop {
            let next = pace.after(Work::Idle, || {
                *now += 100;
                *now
            });
            if next != NextStep::Poll {
                return next;
            }
        };
        assert_eq!(look(&mut pace, &mut now), NextStep::Yield);
        let (begun, mut yields) = (now + turn, 0);
        for _ in 0..20 {
            now += turn;
            pace.returned(now);
            assert_eq!(look(&mut pace, &mut now), NextStep::Yield);
            pace.after(Work::Done, || now);
            yields += 1;
        }
        assert!(now - begun < yields * (turn + 2 * 100), "it spins between its turns");
        let slept = spin(&mut pace, &mut now, turn);
        assert_eq!(slept, NextStep::Sleep(None), "nothing came in {} ns", pace.spin.longest_ns());
        // Somebody who does not give it back.
        pace.disturbed(now);
        assert_eq!(spin(&mut pace, &mut now, 3_000_000), NextStep::Sleep(None));
        assert!(now < pace.crowded_until && pace.turns_until == 0);
    }

    /// A driver on the same processor that needs it for a few microseconds at a time gets it whenever there is nothing to
    /// do, and nobody sleeps or goes elsewhere; once it wants the processor no more, the engine spins as one that is alone.
    #[test]
    fn one_who_needs_the_processor_for_a_moment_gets_it_at_once() {
        let mut now = 10 * STAY_NS;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), 0);
        pace.disturbed(now);
        assert_eq!(next(&mut pace, &mut now), NextStep::Yield, "it spun for a while");
        for _ in 0..1000 {
            now += 2 * SWITCH_NS;
            pace.returned(now);
            assert_eq!(pace.after(Work::Done, || now), NextStep::Poll);
            // Work takes long, which says nothing of the other one.
            now += 2 * SHARED_NS;
            assert_eq!(pace.after(Work::Idle, || now), NextStep::Yield);
        }
        // Once it has the processor for long, which is rare.
        now += 3_000_000;
        pace.returned(now);
        assert_eq!(pace.after(Work::Idle, || now), NextStep::Yield);
        now += SWITCH_NS / 2;
        pace.returned(now);
        pace.after(Work::Done, || now);
        let begun = now;
        assert_eq!(next(&mut pace, &mut now), NextStep::Yield);
        assert!(now - begun >= ALONE_NS, "it yields after {} ns alone", now - begun);
    }

    /// What follows polls that find nothing, 100 ns for each look, and is no poll.
    fn next(pace: &mut Pace, now: &mut u64) -> NextStep {
        loop {
            let next = pace.after(Work::Idle, || {
                *now += 100;
                *now
            });
            if next != NextStep::Poll {
                return next;
            }
        }
    }

    #[test]
    fn where_all_processors_are_busy_moves_become_rare() {
        let mut now = 1;
        let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
        let mut moves = 0;
        while now < 10_000_000_000 {
            pace.disturbed(now);
            moves += u32::from(spin(&mut pace, &mut now, 3_000_000) == NextStep::Move);
        }
        assert!((5..60).contains(&moves), "{moves} moves in ten seconds");
    }
}
