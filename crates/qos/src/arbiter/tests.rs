//! The arbiter step by step; over time, the simulation in `tests/` looks at it.

use proptest::prelude::*;

use super::*;
use crate::SECOND;
use crate::level::{Rate, RateUnit, ServiceLevel};
use crate::tenant::RateLimit;

const A: TenantId = TenantId(0);
const B: TenantId = TenantId(1);

fn message(tag: u64, ingress: u64, cost_ns: u64) -> QueuedMessage {
    QueuedMessage { tag, ingress, egress: ingress, cost_ns, granule: 64, done: 0 }
}

fn arbiter(shares: [TenantShare; 2]) -> TenantArbiter {
    let mut arbiter = TenantArbiter::new(SharingSettings::default());
    arbiter.set(A, shares[0], 0);
    arbiter.set(B, shares[1], 0);
    arbiter
}

fn run(arbiter: &mut TenantArbiter, now: u64) -> EngineTurn {
    match arbiter.next(now) {
        NextTurn::Run(turn) => turn,
        other => panic!("nothing to run: {other:?}"),
    }
}

#[test]
fn a_long_message_is_done_in_slices_and_short_ones_together() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    arbiter.submit(A, 0, message(1, 65_536, 200_000), 0);
    for tag in 0..40 {
        arbiter.submit(B, 0, message(tag, 64, 20), 0);
    }
    let mut sizes = Vec::new();
    while let NextTurn::Run(turn) = arbiter.next(0) {
        let estimated = turn.estimated.engine_ns;
        assert!(estimated <= 50_000, "{turn:?}");
        sizes.push((turn.tenant, turn.pieces.len(), turn.pieces[0].length));
        arbiter.complete(&turn, TurnResult { engine_ns: estimated, egress: 0 }, 0);
    }
    let slice = (A, 1, 16_384);
    assert_eq!(sizes, [slice, (B, 32, 64), (B, 8, 64), slice, slice, slice]);
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.operations, usage.split, usage.ingress), (1, 1, 65_536));
    let usage = arbiter.usage(B).unwrap();
    assert_eq!((usage.operations, usage.batched, usage.turns), (40, 38, 2));
    // What a tiny message is charged at least.
    assert_eq!(usage.engine_ns, 40 * 100);
}

#[test]
fn what_is_not_done_within_a_turn_comes_first_in_the_next_one() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    arbiter.submit(A, 3, message(1, 4096, 10_000), 0);
    arbiter.submit(A, 3, message(2, 4096, 10_000), 0);
    let mut turn = run(&mut arbiter, 0);
    assert_eq!(turn.pieces.len(), 2);
    for piece in &mut turn.pieces {
        (piece.length, piece.over) = (1024, false);
    }
    arbiter.submit(A, 3, message(3, 4096, 10_000), 0);
    arbiter.complete(&turn, TurnResult { engine_ns: 50_000, egress: 100 }, 0);
    let turn = run(&mut arbiter, 0);
    let seen: Vec<_> =
        turn.pieces.iter().map(|piece| (piece.message.tag, piece.message.done)).collect();
    assert_eq!(seen, [(1, 1024), (2, 1024), (3, 0)]);
}

#[test]
fn a_limit_holds_a_tenant_back_and_nobody_else() {
    let slow = TenantShare {
        operations: Some(RateLimit { rate: 1000, burst: 1 }),
        ..TenantShare::default()
    };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    for tag in 0..10 {
        arbiter.submit(A, 0, message(tag, 64, 100), 0);
    }
    let first = run(&mut arbiter, 0);
    assert_eq!((first.tenant, first.pieces.len()), (A, 1));
    arbiter.complete(&first, TurnResult { engine_ns: 100, egress: 64 }, 0);
    let NextTurn::Wait(until) = arbiter.next(10) else { panic!("it does not wait") };
    assert!((1_000_000..1_000_100).contains(&until), "{until}");
    arbiter.submit(B, 0, message(99, 64, 100), 20);
    assert_eq!(run(&mut arbiter, 20).tenant, B);
    assert_eq!(run(&mut arbiter, until).tenant, A);
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.throttled, usage.throttled_ns), (1, until - 10));
    // A wider limit counts at once.
    arbiter.set(A, TenantShare::default(), until);
    assert_eq!(run(&mut arbiter, until).pieces.len(), 9 - 1);
}

/// The room that a message has for its output is a thousand times what comes out of it, and there are two engines.
#[test]
fn a_tenant_that_an_estimate_held_back_goes_on_when_less_was_spent() {
    let min = Rate { per_second: 1000, unit: RateUnit::Operations };
    let share = TenantShare {
        egress: Some(RateLimit { rate: 1 << 20, burst: 4096 }),
        ..TenantShare::of(&ServiceLevel::new("any", min), 50_000.0)
    };
    let mut arbiter =
        TenantArbiter::new(SharingSettings { workers: 2, ..SharingSettings::default() });
    arbiter.set(A, share, 0);
    for tag in 0..100 {
        let message = message(tag, 64, 50_000);
        arbiter.submit(A, 0, QueuedMessage { egress: 1 << 20, ..message }, 0);
    }
    let (mut now, done) = (0, TurnResult { engine_ns: 50_000, egress: 64 });
    for _ in 0..10 {
        let turn = run(&mut arbiter, now);
        let NextTurn::Wait(until) = arbiter.next(now) else { panic!("nothing holds it back") };
        assert!(until > now + SECOND / 2 && arbiter.is_held(A), "{until}");
        now += 50_000;
        arbiter.complete(&turn, done, now);
        assert!(!arbiter.is_held(A));
    }
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.throttled, usage.throttled_ns), (10, 10 * 50_000));
    // A bound that is passed indeed still holds it back, no longer than it takes.
    let turn = run(&mut arbiter, now);
    assert!(matches!(arbiter.next(now), NextTurn::Wait(_)));
    arbiter.complete(&turn, TurnResult { engine_ns: 50_000, egress: 1 << 18 }, now);
    let NextTurn::Wait(until) = arbiter.next(now) else { panic!("the bound is passed") };
    assert!((SECOND / 5..SECOND / 3).contains(&until), "{until}");
    // Whoever gets nothing from then on was promised more.
    assert!(matches!(arbiter.next(until), NextTurn::Run(_)));
    arbiter.set(A, TenantShare { egress: None, ..share }, until);
    let kept = arbiter.kept(A, 3 * SECOND).unwrap();
    assert_eq!((kept.windows, kept.violations), (3, 3), "{kept:?}");
}

/// The engines have nothing to do for it until then, and it has nothing to say about what others do meanwhile.
#[test]
fn a_tenant_that_its_own_bound_holds_back_keeps_nobody_from_an_open_turn() {
    let slow = TenantShare {
        operations: Some(RateLimit { rate: 1000, burst: 1 }),
        ..TenantShare::default()
    };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    for tag in 0..3 {
        arbiter.submit(A, 0, message(tag, 64, 100), 0);
    }
    assert_eq!(arbiter.open(B, 0), None, "an engine could work for the other one");
    let turn = run(&mut arbiter, 0);
    arbiter.complete(&turn, done(100), 0);
    let NextTurn::Wait(until) = arbiter.next(0) else { panic!("nothing holds it back") };
    let mut open = arbiter.open(B, 10).unwrap();
    open.did(64, done(100), true);
    assert!(arbiter.close(&open, 110));
    assert_eq!(arbiter.open(A, 120), None, "its bound holds it back");
    assert_eq!(arbiter.open(B, until), None, "it does so no more");
    assert_eq!(run(&mut arbiter, until).tenant, A);
}

/// Messages that share a turn with one that took all of its time.
#[test]
fn an_operation_that_was_not_begun_is_not_counted() {
    let slow = TenantShare {
        operations: Some(RateLimit { rate: 1000, burst: 3 }),
        ..TenantShare::default()
    };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    for tag in 0..3 {
        arbiter.submit(A, 0, message(tag, 64, 100), 0);
    }
    for left in (0..3).rev() {
        let mut turn = run(&mut arbiter, 0);
        assert_eq!(turn.pieces.len(), left + 1);
        for piece in &mut turn.pieces[1..] {
            (piece.length, piece.over) = (0, false);
        }
        arbiter.complete(&turn, TurnResult { engine_ns: 50_000, egress: 0 }, 0);
    }
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.operations, usage.split, usage.throttled), (3, 0, 0));
}

#[test]
fn a_queue_that_goes_takes_its_messages_with_it() {
    let slow =
        TenantShare { operations: Some(RateLimit { rate: 1, burst: 1 }), ..TenantShare::default() };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    for tag in 0..4 {
        arbiter.submit(A, tag as u16 % 2, message(tag, 64, 100), 0);
    }
    let left = |messages: Vec<QueuedMessage>| messages.iter().map(|m| m.tag).collect::<Vec<_>>();
    assert_eq!(left(arbiter.take_out(A, 0, |queue, _| queue == 1)), [1, 3]);
    assert_eq!(
        (arbiter.waiting(A), arbiter.take_out(A, 0, |queue, _| queue == 1)),
        (2, Vec::new())
    );
    let turn = run(&mut arbiter, 0);
    arbiter.complete(&turn, TurnResult { engine_ns: 100, egress: 64 }, 0);
    assert_eq!(left(arbiter.take_out(A, 0, |queue, _| queue == 0)), [2]);
    assert_eq!(arbiter.waiting(A), 0);
    assert!(!matches!(arbiter.next(10 * SECOND), NextTurn::Run(_)));
}

#[test]
fn tenants_with_a_minimum_left_are_served_before_the_others() {
    let min = Rate { per_second: 4096 * 1000, unit: RateUnit::Bytes };
    let level = ServiceLevel { burst: 2 * 4096, ..ServiceLevel::new("any", min) };
    let mut arbiter = arbiter([TenantShare::default(), TenantShare::of(&level, 50_000.0)]);
    for tag in 0..100 {
        arbiter.submit(A, 0, message(tag, 4096, 50_000), 0);
        arbiter.submit(B, 0, message(tag, 4096, 50_000), 0);
    }
    // Twenty milliseconds of it are there at the beginning: twenty messages.
    let mut served = Vec::new();
    for _ in 0..24 {
        let turn = run(&mut arbiter, 0);
        arbiter.complete(&turn, TurnResult { engine_ns: 50_000, egress: 4096 }, 0);
        served.push(turn.tenant);
    }
    assert_eq!(&served[..20], [B; 20]);
    assert_eq!(served[20..].iter().filter(|tenant| **tenant == A).count(), 2, "{served:?}");
    assert_eq!(arbiter.usage(B).unwrap().guaranteed_ns, 20 * 50_000);
}

#[test]
fn a_tenant_that_goes_leaves_nothing_and_its_turns_are_nobodys() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    arbiter.submit(A, 0, message(1, 64, 100), 0);
    let turn = run(&mut arbiter, 0);
    arbiter.submit(A, 1, message(2, 64, 100), 0);
    let left: Vec<_> = arbiter.remove(A).iter().map(|message| message.tag).collect();
    assert_eq!(left, [2]);
    arbiter.complete(&turn, TurnResult { engine_ns: 100, egress: 64 }, 0);
    assert_eq!((arbiter.next(0), arbiter.under_way()), (NextTurn::Idle, 0));
    assert!(!arbiter.submit(A, 0, message(3, 64, 100), 0));
}

/// What a user owes, of its bounds and of engine time, is not the next one's; what was counted continues.
#[test]
fn another_user_in_the_place_of_one_owes_nothing() {
    let slow =
        TenantShare { egress: Some(RateLimit { rate: 1000, burst: 1 }), ..TenantShare::default() };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    arbiter.submit(A, 0, message(1, 64, 100), 0);
    let first = run(&mut arbiter, 0);
    arbiter.submit(A, 0, message(2, 64, 100), 0);
    arbiter.complete(&first, TurnResult { engine_ns: 900_000, egress: 1 << 20 }, 0);
    assert!(!matches!(arbiter.next(SECOND), NextTurn::Run(_)), "it owes a thousand seconds");
    arbiter.set(A, slow, SECOND);
    assert!(
        !matches!(arbiter.next(SECOND), NextTurn::Run(_)),
        "the same user, whose share is changed, still does"
    );
    let left = arbiter.renew(A, slow, SECOND);
    assert_eq!(left.iter().map(|message| message.tag).collect::<Vec<_>>(), [2]);
    assert_eq!((arbiter.debt_ns(A), arbiter.usage(A).unwrap().engine_ns), (0, 900_000));
    // A turn of the one before ends late, and is nobody's.
    arbiter.submit(A, 0, message(3, 64, 100), SECOND);
    let last = run(&mut arbiter, SECOND);
    arbiter.renew(A, slow, SECOND);
    assert!(!arbiter.complete(&last, TurnResult { engine_ns: 100, egress: 1 << 20 }, SECOND));
    arbiter.submit(A, 0, message(4, 64, 100), SECOND);
    assert_eq!(run(&mut arbiter, SECOND).pieces[0].message.tag, 4);
}

/// A tenant has something done outside of the engines that takes as long as a hundred of the other's messages.
#[test]
fn what_is_done_outside_of_turns_is_charged_too() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    for tag in 0..200 {
        arbiter.submit(A, 0, message(tag, 4096, 50_000), 0);
        arbiter.submit(B, 0, message(tag, 4096, 50_000), 0);
    }
    arbiter.charge(A, 100 * 50_000, 0);
    let mut served = [0; 2];
    for _ in 0..100 {
        let turn = run(&mut arbiter, 0);
        served[turn.tenant.0 as usize] += 1;
        arbiter.complete(&turn, TurnResult { engine_ns: 50_000, egress: 4096 }, 0);
    }
    assert!(served[0] <= 1 && arbiter.usage(A).unwrap().engine_ns >= 5_000_000, "{served:?}");
}

/// Whose smallest pieces take longer than a slice owes one of them nearly always.
#[test]
fn a_tenant_that_owes_no_more_than_its_last_turn_is_not_kept_waiting() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    let piece = |tag| QueuedMessage { granule: 0, ..message(tag, 4096, 150_000) };
    for tag in 0..20 {
        assert!(arbiter.submit(A, 0, piece(tag), 0));
    }
    for turn in 1..20 {
        let now = turn * 150_000;
        let taken = run(&mut arbiter, now);
        assert!(!arbiter.owes(A, now), "turn {turn}");
        arbiter.complete(&taken, done(150_000), now + 150_000);
        assert!(!arbiter.owes(A, now + 150_000), "turn {turn}");
    }
}

/// While a tenant has no work, only time from then on pays for what was done for it.
#[test]
fn a_tenant_owes_what_was_done_outside_of_turns_by_its_part_of_the_time() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    assert!(!arbiter.owes(A, 0));
    let long = 100_000_000;
    // It was idle for long before.
    let begun = 10 * SECOND;
    arbiter.charge(A, long, begun);
    assert!(arbiter.owes(A, begun) && arbiter.owes(A, begun + long / 2) && !arbiter.owes(B, begun));
    assert!(!arbiter.owes(A, begun + long));
    // Beside one that has work it has half of the engine.
    arbiter.charge(A, long, begun + long);
    arbiter.submit(B, 0, message(1, 64, 100), begun + long);
    assert!(arbiter.owes(A, begun + 2 * long) && !arbiter.owes(A, begun + 3 * long));
    // A debt of a turn is one that everybody has at times who has work.
    let now = begun + 3 * long;
    let turn = run(&mut arbiter, now);
    arbiter.complete(&turn, done(50_000), now);
    let mut turn = arbiter.open(B, now).unwrap();
    turn.did(64, done(50_000), true);
    arbiter.close(&turn, now);
    assert!(!arbiter.owes(B, now));
    // Of a minimum, what it has of that is spent first.
    let min = Rate { per_second: 1000, unit: RateUnit::Operations };
    arbiter.set(B, TenantShare::of(&ServiceLevel::new("any", min), 50_000.0), now);
    for owes in [false, false, true] {
        assert_eq!(arbiter.owes(B, now), owes);
        arbiter.charge(B, long, now);
    }
}

proptest! {
    /// Whatever comes, goes and is changed: what was sent is done once, and nothing is left waiting.
    #[test]
    fn every_message_is_done_once(
        deeds in prop::collection::vec((0u32..3, 0u16..3, 0u64..100_000, 1u64..300_000, 0u8..8), 1..200),
    ) {
        let mut arbiter = TenantArbiter::new(SharingSettings::default());
        let limit = |rate| Some(RateLimit { rate, burst: 1 });
        let shares = [
            TenantShare::default(),
            TenantShare { operations: limit(10_000), egress: limit(100_000_000), ..TenantShare::default() },
            TenantShare::of(&ServiceLevel::new("any", Rate { per_second: 1 << 20, unit: RateUnit::Bytes }), 9000.0),
        ];
        for (id, share) in shares.iter().enumerate() {
            arbiter.set(TenantId(id as u32), *share, 0);
        }
        let (mut now, mut over) = (0, vec![0u32; deeds.len()]);
        let mut under_way = Vec::new();
        let step = |arbiter: &mut TenantArbiter, under_way: &mut Vec<EngineTurn>, now: &mut u64, end: bool| {
            match arbiter.next(*now) {
                NextTurn::Run(turn) => under_way.push(turn),
                NextTurn::Wait(until) if end && under_way.is_empty() => *now = until,
                _ if under_way.is_empty() => return Ok(!end),
                _ => {}
            }
            if (end || under_way.len() > 2)
                && let Some(turn) = under_way.pop()
            {
                *now += 1000;
                for piece in turn.pieces.iter().filter(|piece| piece.over) {
                    over[piece.message.tag as usize] += 1;
                    prop_assert_eq!(piece.message.done + piece.length, piece.message.ingress);
                }
                let engine_ns = turn.estimated.engine_ns * 3 / 2;
                arbiter.complete(&turn, TurnResult { engine_ns, egress: 10 }, *now);
            }
            Ok(true)
        };
        let mut step = step;
        for (tag, (id, queue, ingress, cost, deed)) in deeds.iter().copied().enumerate() {
            let granule = if deed == 0 { 0 } else { 512 };
            let message = QueuedMessage { granule, ..message(tag as u64, ingress, cost) };
            prop_assert!(arbiter.submit(TenantId(id), queue, message, now));
            if deed == 7 {
                arbiter.set(TenantId(id), shares[(id as usize + 1) % 3], now);
            }
            step(&mut arbiter, &mut under_way, &mut now, false)?;
        }
        for _ in 0..100_000 {
            if !step(&mut arbiter, &mut under_way, &mut now, true)? {
                break;
            }
        }
        prop_assert!(over.iter().all(|times| *times == 1), "{over:?}");
        prop_assert!(now < 1000 * SECOND);
    }
}

fn done(engine_ns: u64) -> TurnResult {
    TurnResult { engine_ns, egress: 64 }
}

#[test]
fn messages_that_come_while_a_turn_lasts_are_charged_as_those_that_waited() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    let mut turn = arbiter.open(A, 0).unwrap();
    assert_eq!(arbiter.under_way(), 1);
    for _ in 0..3 {
        assert!(turn.goes_on());
        turn.did(64, done(20), true);
    }
    turn.did(64, done(60_000), false);
    assert!(!turn.goes_on(), "a slice is over");
    assert!(arbiter.close(&turn, 60_300));
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.operations, usage.batched, usage.turns), (3, 3, 1));
    assert_eq!((usage.ingress, usage.egress, usage.engine_ns), (256, 256, 60_300));
    assert_eq!(arbiter.under_way(), 0);
    // What a processor did for others meanwhile is not charged; what each message is charged at least is.
    let mut turn = arbiter.open(A, 60_300).unwrap();
    turn.did(64, done(40_000), true);
    turn.correct(20);
    assert_eq!(turn.engine_ns(), 100);
    // Who has gone is not charged.
    arbiter.remove(A);
    assert!(!arbiter.close(&turn, 60_300));
}

#[test]
fn no_turn_is_open_to_messages_that_come_while_any_wait_or_a_bound_holds_the_tenant_back() {
    let slow = TenantShare {
        operations: Some(RateLimit { rate: 1000, burst: 2 }),
        ..TenantShare::default()
    };
    let mut arbiter = arbiter([slow, TenantShare::default()]);
    arbiter.submit(B, 0, message(1, 64, 100), 0);
    assert_eq!((arbiter.open(A, 0), arbiter.open(B, 0)), (None, None));
    let turn = run(&mut arbiter, 0);
    arbiter.complete(&turn, done(100), 0);
    let mut turn = arbiter.open(A, 0).unwrap();
    // One that was not advanced is counted by the turn that goes on with it.
    turn.did(0, done(100), false);
    turn.did(64, done(100), true);
    assert!(turn.goes_on());
    turn.did(64, done(100), true);
    assert!(!turn.goes_on());
    arbiter.close(&turn, 0);
    assert_eq!(arbiter.open(A, 900_000), None);
    assert!(arbiter.open(A, 1_000_000).is_some() && arbiter.open(TenantId(7), 0).is_none());
}

/// Whoever had engines for itself for long owes no more than a turn when another comes.
#[test]
fn a_tenant_that_was_alone_owes_no_more_than_a_turn() {
    let mut arbiter = arbiter([TenantShare::default(); 2]);
    let mut now = 0;
    for _ in 0..1000 {
        let mut turn = arbiter.open(A, now).unwrap();
        turn.did(64, done(50_000), true);
        now += 50_000;
        arbiter.close(&turn, now);
    }
    for tag in 0..200 {
        for tenant in [A, B] {
            arbiter.submit(tenant, 0, message(tag, 64, 50_000), now);
        }
    }
    let before = arbiter.usage(A).unwrap().engine_ns;
    for _ in 0..100 {
        let turn = run(&mut arbiter, now);
        now += 50_000;
        arbiter.complete(&turn, done(50_000), now);
    }
    let got = [A, B].map(|tenant| arbiter.usage(tenant).unwrap().engine_ns);
    assert!(got[1].abs_diff(got[0] - before) <= 100_000, "{got:?}");
}

/// A guarantee is kept in the unit that was bought, and what comes beyond it is of what is left.
#[test]
fn an_open_turn_is_of_the_guarantee_as_long_as_there_is_any() {
    let min = Rate { per_second: 1000, unit: RateUnit::Operations };
    let share = TenantShare::of(&ServiceLevel::new("any", min), 1000.0);
    let mut arbiter = arbiter([share, TenantShare::default()]);
    let burst = share.guarantee.unwrap().units.burst;
    let mut turn = arbiter.open(A, 0).unwrap();
    let mut count = 0;
    while turn.goes_on() {
        turn.did(64, done(1000), true);
        count += 1;
    }
    assert_eq!(count, burst);
    arbiter.close(&turn, 0);
    let mut turn = arbiter.open(A, 0).unwrap();
    turn.did(64, done(1000), true);
    arbiter.close(&turn, 0);
    let usage = arbiter.usage(A).unwrap();
    assert_eq!((usage.operations, usage.guaranteed_ns), (burst + 1, burst * 1000));
}

proptest! {
    /// Descriptors that are refused compute nothing and have no bytes: each costs its tenant what fetching and completing
    /// one takes, however fast it was, and no more comes through than the tenant's bound lets operations through.
    #[test]
    fn what_costs_nothing_is_charged_and_bounded_as_the_shortest_operation(
        took in 0u64..100, count in 1usize..400, rate in 1u64..10_000,
    ) {
        let bounded = TenantShare {
            operations: Some(RateLimit { rate, burst: 1 }),
            ..TenantShare::default()
        };
        for share in [TenantShare::default(), bounded] {
            let mut arbiter = arbiter([share, TenantShare::default()]);
            for tag in 0..count {
                arbiter.submit(A, 0, message(tag as u64, 0, 0), 0);
            }
            let mut now = 0;
            while arbiter.waiting(A) > 0 {
                match arbiter.next(now) {
                    NextTurn::Run(turn) => {
                        let engine_ns = took * turn.pieces.len() as u64;
                        arbiter.complete(&turn, TurnResult { engine_ns, egress: 0 }, now);
                    }
                    NextTurn::Wait(until) => now = until,
                    NextTurn::Idle => prop_assert!(false, "they wait for nothing"),
                }
            }
            let usage = arbiter.usage(A).unwrap();
            prop_assert_eq!((usage.operations, usage.engine_ns), (count as u64, 100 * count as u64));
            if share.operations.is_some() {
                prop_assert!(now >= (count as u64 - 1) * SECOND / rate, "{} ns for {}", now, count);
            }
        }
    }
}
