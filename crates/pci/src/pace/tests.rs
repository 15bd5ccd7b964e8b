//! When an engine polls, yields, moves and sleeps, told by what it finds and how long its yields take.

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
/// do, and nobody sleeps or goes elsewhere while no processor is idle; once it wants the processor no more, the engine
/// spins as one that is alone.
#[test]
fn a_thread_that_needs_the_processor_for_a_moment_gets_it_at_once() {
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
        if pace.after(Work::Idle, || now) != NextStep::Yield {
            assert!(!pace.saw_idle(0));
            assert_eq!(pace.after(Work::Idle, || now), NextStep::Yield);
        }
    }
    // Another processor has nothing to do.
    assert!(pace.saw_idle(now));
    assert_eq!(next(&mut pace, &mut now), NextStep::Yield, "it spun for a while");
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

/// It has moved in vain while all processors were busy, and shares one with a driver now that keeps it.
#[test]
fn an_engine_that_sleeps_when_idle_goes_to_a_processor_that_became_idle() {
    let mut now = 10 * STAY_NS;
    let mut pace = Pace::new(AdaptiveSpin::new(5_000, 100_000), now);
    while now < 10_000_000_000 {
        pace.disturbed(now);
        spin(&mut pace, &mut now, 3_000_000);
    }
    assert!(pace.stay_ns > 100 * STAY_NS);
    let idle_from = now;
    let idle = |now: u64| now.saturating_sub(idle_from);
    loop {
        match spin(&mut pace, &mut now, 3_000_000) {
            NextStep::LookForIdle if pace.saw_idle(idle(now)) => break,
            NextStep::LookForIdle | NextStep::Move => {}
            NextStep::Sleep(_) => {
                // The driver rings for its next command.
                now += 100_000;
                pace.disturbed(now);
                pace.after(Work::Done, || now);
            }
            other => panic!("{other:?}"),
        }
        assert!(idle(now) < 150_000_000, "it has not moved");
    }
    assert_eq!(spin(&mut pace, &mut now, 300), NextStep::Sleep(None), "it is alone there");
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
