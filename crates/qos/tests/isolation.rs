//! What tenants get from shared engines, in simulated time: from the arbiter, and for comparison from
//! devices that do not shape (seed paper, table 1 and observations 4, 5, 7 and 10).

use std::collections::BTreeMap;

use rackbus_qos::simulation::by_size::BySize;
use rackbus_qos::simulation::{Load, MessageArrivals, MessageCosts, Policy, TenantReport, run};
use rackbus_qos::{
    Capacity, EngineProfile, LevelAdmission, MessageRoundRobin, Point, SECOND, ServiceLevel,
    SharingSettings, TenantArbiter, TenantId, TenantShare,
};
use rackbus_seeds::Simulation;

const SIMULATION: Simulation = Simulation { test: "-p rackbus-qos --test isolation", usual: 1 };
const SLICE_NS: u64 = 50_000;

/// Costs of engines on a processor of today, for an operation and for each byte, in nanoseconds: AES-256
/// in counter mode, SHA3-512, deflate.
const AES: (f64, f64) = (100.0, 0.12);
const SHA3: (f64, f64) = (250.0, 3.3);
const DEFLATE: (f64, f64) = (2000.0, 7.0);

/// A tenant that has enough under way to always have some slices of work waiting.
fn load(size: u64, (fixed_ns, byte_ns): (f64, f64)) -> Load {
    let cost = fixed_ns + size as f64 * byte_ns;
    let depth = (4.0 * SLICE_NS as f64 / cost).ceil().max(64.0) as u32;
    Load { arrivals: MessageArrivals::Closed { depth }, ..Load::steady(size, fixed_ns, byte_ns) }
}

fn of_content(load: Load, factor: f64) -> Load {
    Load { content: MessageCosts { factor: (factor, factor), ..load.content }, ..load }
}

fn shaped(shares: &[TenantShare], engines: usize) -> TenantArbiter {
    let workers = engines as u32;
    let settings =
        SharingSettings { slice_ns: SLICE_NS, workers, batch: 256, ..SharingSettings::default() };
    let mut arbiter = TenantArbiter::new(settings);
    for (id, share) in shares.iter().enumerate() {
        arbiter.set(TenantId(id as u32), *share, 0);
    }
    arbiter
}

fn equal(loads: &[Load], engines: usize) -> TenantArbiter {
    shaped(&vec![TenantShare::default(); loads.len()], engines)
}

/// How much more engine time the first of two tenants got.
fn ratio(policy: &mut dyn Policy, engines: usize, loads: &[Load], seed: u64) -> f64 {
    let reports = run(policy, engines, loads, SECOND / 5, seed);
    reports[0].total().engine_ns as f64 / reports[1].total().engine_ns as f64
}

/// Pairs of tenants that pay the same: what they send, and how unequal they are without shaping, by
/// message and by byte. Where that is not what it is about, they are equal.
fn pairs() -> Vec<(&'static str, [Load; 2], f64, f64)> {
    let queues = |load: Load, queues| Load { queues, ..load };
    vec![
        ("the same", [load(4096, AES), load(4096, AES)], 1.0, 1.0),
        ("64 KiB and 64 B", [load(65_536, AES), load(64, AES)], 30.0, 0.08),
        ("four queues and one", [queues(load(4096, AES), 4), load(4096, AES)], 3.9, 1.0),
        ("hashing and encryption", [load(4096, SHA3), load(4096, AES)], 20.0, 20.0),
        (
            "noise and zeroes",
            [of_content(load(65_536, DEFLATE), 1.9), of_content(load(65_536, DEFLATE), 0.13)],
            10.0,
            10.0,
        ),
        ("a flood of 16 B", [load(16_384, AES), queues(load(16, AES), 8)], 2.0, 0.02),
    ]
}

#[test]
fn equal_tenants_get_equal_engine_time_and_do_not_without_shaping() {
    SIMULATION.run(|seed, _| {
        for (name, loads, by_message, by_size) in pairs() {
            let shaped = ratio(&mut equal(&loads, 1), 1, &loads, seed);
            if !(0.98..=1.02).contains(&shaped) {
                return Err(format!("{name}: {shaped:.3} shaped"));
            }
            let unshaped = ratio(&mut MessageRoundRobin::default(), 1, &loads, seed);
            let sized = ratio(&mut BySize::default(), 1, &loads, seed);
            for (found, expected, policy) in
                [(unshaped, by_message, "round robin"), (sized, by_size, "round robin by size")]
            {
                let fits = if expected > 1.5 { found > expected } else { found < 1.5 * expected };
                if !fits {
                    return Err(format!("{name}: {found:.3} by {policy}, not {expected}"));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn any_number_of_equal_tenants_on_any_number_of_engines_get_the_same() {
    SIMULATION.run(|seed, _| {
        for (tenants, engines) in [(2, 1), (8, 1), (8, 3), (64, 2), (64, 8)] {
            let kinds = [
                load(4096, AES),
                load(64, AES),
                load(65_536, SHA3),
                of_content(load(65_536, DEFLATE), 1.9),
                of_content(load(16_384, DEFLATE), 0.13),
            ];
            let loads: Vec<Load> = (0..tenants).map(|n| kinds[n % kinds.len()].clone()).collect();
            let reports = run(&mut equal(&loads, engines), engines, &loads, 3 * SECOND / 10, seed);
            let got: Vec<u64> = reports.iter().map(|report| report.total().engine_ns).collect();
            let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
            let ratio = *most as f64 / *least as f64;
            if ratio > 1.02 {
                return Err(format!("{tenants} tenants, {engines} engines: {ratio:.3}: {got:?}"));
            }
            let busy = got.iter().sum::<u64>() as f64 / (0.28e9 * engines as f64);
            if busy < 0.98 {
                return Err(format!("{tenants} tenants, {engines} engines: {busy:.3} busy"));
            }
        }
        Ok(())
    });
}

fn profiles() -> BTreeMap<String, EngineProfile> {
    let profile = |(fixed, byte): (f64, f64)| {
        let point =
            |message: u64| Point { message, ratio: 1000, cost_ns: fixed + byte * message as f64 };
        EngineProfile::new([64, 4096, 65_536].map(point).to_vec()).unwrap()
    };
    let named = [("aes256ctr", AES), ("sha3-512", SHA3), ("deflate", DEFLATE)];
    named.map(|(name, cost)| (name.to_owned(), profile(cost))).into()
}

/// Levels that a device with so many engines keeps, and loads that use them; then tenants without
/// minimum that take whatever they can.
fn sold(
    texts: &[&str],
    engines: usize,
    others: usize,
) -> (Vec<ServiceLevel>, Vec<TenantShare>, Vec<Load>) {
    let capacity = Capacity::of(engines as u32);
    let mut admission = LevelAdmission::new(capacity, profiles());
    let (mut levels, mut shares, mut loads) = (Vec::new(), Vec::new(), Vec::new());
    for (holder, text) in (0..).zip(texts) {
        let level: ServiceLevel = text.parse().unwrap();
        shares.push(admission.admit(holder, &level).unwrap_or_else(|error| panic!("{error}")));
        let cost = match level.engine.as_str() {
            "aes256ctr" => AES,
            "sha3-512" => SHA3,
            _ => DEFLATE,
        };
        loads.push(load(level.message, cost));
        levels.push(level);
    }
    for other in 0..others {
        shares.push(TenantShare::default());
        loads.push(match other % 3 {
            0 => of_content(Load { queues: 8, ..load(65_536, DEFLATE) }, 1.9),
            1 => Load { queues: 16, ..load(16, AES) },
            _ => load(1 << 20, SHA3),
        });
    }
    (levels, shares, loads)
}

/// Units of the minimum that were done.
fn units(level: &ServiceLevel, report: &TenantReport, from_ns: u64) -> u64 {
    report.least(SECOND, from_ns, |step| match level.min.unit {
        rackbus_qos::RateUnit::Bytes => step.ingress,
        rackbus_qos::RateUnit::Operations => step.operations,
    })
}

#[test]
fn every_minimum_is_met_within_one_percent_over_any_second() {
    let mixes: [&[&str]; 3] = [
        &["aes256ctr 30 Gbit/s", "deflate 3000 op/s message 16KiB"],
        &[
            "aes256ctr 1 Gbit/s message 64B",
            "aes256ctr 8 Gbit/s message 64KiB",
            "sha3-512 200 Mbit/s",
            "deflate 500 op/s message 64KiB",
        ],
        &["sha3-512 20 Mbit/s message 1KiB"; 32],
    ];
    SIMULATION.run(|seed, _| {
        for (texts, others) in mixes.iter().flat_map(|texts| [(texts, 2), (texts, 32)]) {
            let (levels, shares, loads) = sold(texts, 1, others);
            let mut arbiter = shaped(&shares, 1);
            let reports = run(&mut arbiter, 1, &loads, 11 * SECOND / 10, seed);
            let kept = (0..levels.len())
                .filter_map(|id| arbiter.kept(TenantId(id as u32), 11 * SECOND / 10));
            if let Some(broken) = kept.into_iter().find(|it| it.violations > 0 || it.windows != 1) {
                return Err(format!("{texts:?} beside {others}: {broken:?} on record"));
            }
            for (level, report) in levels.iter().zip(&reports) {
                let got = units(level, report, 0) as f64 / level.min.per_second as f64;
                if got < 0.99 {
                    return Err(format!("{level} beside {others}: {got:.4} of it"));
                }
            }
            // Nobody starves.
            if let Some(starved) = reports.iter().position(|r| r.total().engine_ns == 0) {
                return Err(format!("tenant {starved} of {} got nothing", reports.len()));
            }
        }
        Ok(())
    });
}

/// Minima that were sold, and how many others there are without any: two, eight and 64 tenants.
fn minima_and_others() -> [(Vec<&'static str>, usize); 3] {
    let several = [
        "aes256ctr 8 Gbit/s message 64KiB",
        "sha3-512 200 Mbit/s",
        "deflate 500 op/s message 64KiB",
        "sha3-512 20 Mbit/s message 1KiB",
    ];
    [
        (vec!["aes256ctr 30 Gbit/s message 64KiB"], 1),
        (several.to_vec(), 4),
        (vec!["sha3-512 20 Mbit/s message 4KiB"; 32], 32),
    ]
}

/// With large messages, of which there are not too many in five seconds.
#[test]
fn minima_are_met_for_seconds_with_two_eight_and_64_tenants_on_one_engine_and_two() {
    const LENGTH: u64 = 5 * SECOND + SECOND / 10;
    let several = Simulation { usual: 2, ..SIMULATION };
    several.run(|seed, _| {
        let all = minima_and_others().into_iter();
        for ((texts, others), engines) in all.flat_map(|mix| [(mix.clone(), 1), (mix, 2)]) {
            let (levels, mut shares, mut loads) = sold(&texts, engines, 0);
            shares.resize(texts.len() + others, TenantShare::default());
            loads.extend((0..others).map(|other| match other % 2 {
                0 => of_content(Load { queues: 8, ..load(65_536, DEFLATE) }, 1.9),
                _ => load(1 << 20, SHA3),
            }));
            let context = format!("{texts:?} beside {others} on {engines} engines");
            let mut arbiter = shaped(&shares, engines);
            let reports = run(&mut arbiter, engines, &loads, LENGTH, seed);
            for ((level, report), id) in levels.iter().zip(&reports).zip(0..) {
                let got = units(level, report, 0) as f64 / level.min.per_second as f64;
                let kept = arbiter.kept(TenantId(id), LENGTH).unwrap();
                if got < 0.99 || kept.violations > 0 || kept.windows != 5 {
                    return Err(format!("{context}: {got:.4} of {level}, {kept:?}"));
                }
            }
            if let Some(starved) = reports.iter().position(|r| r.total().engine_ns == 0) {
                return Err(format!("{context}: tenant {starved} got nothing"));
            }
        }
        Ok(())
    });
}

/// Descriptors that are refused take next to no time, and are sent by many queues as fast as they are answered.
#[test]
fn a_flood_of_refused_descriptors_takes_nothing_of_anybodys_share() {
    SIMULATION.run(|seed, _| {
        let refused = Load { queues: 16, ..load(0, (60.0, 0.0)) };
        let victim = load(4096, SHA3);
        for floods in [1, 7] {
            let mut loads = vec![victim.clone()];
            loads.resize(1 + floods, refused.clone());
            let reports = run(&mut equal(&loads, 1), 1, &loads, SECOND / 5, seed);
            let got = reports[0].total().engine_ns as f64 / 0.18e9;
            let share = 1.0 / (1.0 + floods as f64);
            if got < 0.98 * share {
                return Err(format!("{floods} floods: {got:.3} of the engine, not {share:.3}"));
            }
        }
        Ok(())
    });
}

/// More is promised than there is, which admission would refuse: the record says who did not get it, and of those who
/// asked for less than that, nothing.
#[test]
fn a_minimum_that_is_not_kept_is_on_record() {
    SIMULATION.run(|seed, _| {
        let promised = |rate: u64| {
            let min = rackbus_qos::Rate { per_second: rate, unit: rackbus_qos::RateUnit::Bytes };
            TenantShare::of(&ServiceLevel::new("sha3-512", min), SHA3.0 + 4096.0 * SHA3.1)
        };
        // One engine does some 298 MB/s of it.
        let shares = [promised(250_000_000), promised(250_000_000), promised(100_000_000)];
        let seldom =
            Load { arrivals: MessageArrivals::Open { per_second: 1000 }, ..load(4096, SHA3) };
        let loads = [load(4096, SHA3), load(4096, SHA3), seldom];
        let mut arbiter = shaped(&shares, 1);
        run(&mut arbiter, 1, &loads, 3 * SECOND, seed);
        let kept = |id| arbiter.kept(TenantId(id), 3 * SECOND).unwrap();
        let kept = [0, 1, 2].map(kept);
        for of in &kept[..2] {
            let part = of.delivered as f64 / of.promised as f64;
            if of.violations < 2 || of.violations != of.windows || !(0.5..0.7).contains(&part) {
                return Err(format!("{of:?}, {part:.3} of it"));
            }
        }
        if kept[2].violations > 0 {
            Err(format!("{:?} of who asked for little", kept[2]))
        } else {
            Ok(())
        }
    });
}

/// A tenant's room for output is a thousand times what comes out, and it has a bound of that; another engine looks at it
/// while its message is under way.
#[test]
fn a_minimum_is_met_where_output_is_estimated_a_thousand_times_too_high() {
    SIMULATION.run(|seed, _| {
        for engines in [1, 2] {
            let texts = [
                "sha3-512 400 Mbit/s out 800 Mbit/s",
                "deflate 2000 op/s message 16KiB out 1 Gbit/s",
            ];
            let (levels, shares, mut loads) = sold(&texts, engines, 1);
            for load in &mut loads[..2] {
                load.content.room = 1_000_000;
            }
            let mut arbiter = shaped(&shares, engines);
            let reports = run(&mut arbiter, engines, &loads, 11 * SECOND / 10, seed);
            for ((level, report), id) in levels.iter().zip(&reports).zip(0..) {
                let got = units(level, report, 0) as f64 / level.min.per_second as f64;
                let kept = arbiter.kept(TenantId(id), SECOND).unwrap();
                if got < 0.99 || kept.violations > 0 {
                    return Err(format!("{level} of {engines} engines: {got:.4} of it, {kept:?}"));
                }
            }
        }
        Ok(())
    });
}

/// Who pauses between its messages has no more than its weight for that, and who asks for less than its part has that.
#[test]
fn what_is_left_is_shared_by_weight_with_who_pauses_too() {
    SIMULATION.run(|seed, _| {
        for (think_ns, engines) in [(0, 1), (100_000, 1), (1_000_000, 1), (100_000, 2)] {
            let weights = [1, 100, 100];
            let shares = weights.map(|weight| TenantShare { weight, ..TenantShare::default() });
            let always = load(4096, SHA3);
            let pauses =
                Load { think_ns, arrivals: MessageArrivals::Closed { depth: 1 }, ..always.clone() };
            let loads = [pauses, always.clone(), always];
            let reports = run(&mut shaped(&shares, engines), engines, &loads, SECOND, seed);
            let got: Vec<u64> = reports.iter().map(|report| report.total().engine_ns).collect();
            let part = got[0] as f64 / got.iter().sum::<u64>() as f64;
            if part > 0.0075 || got[0] == 0 || got[1].abs_diff(got[2]) > got[1] / 50 {
                return Err(format!("{think_ns} ns, {engines} engines: {part:.4}, {got:?}"));
            }
        }
        Ok(())
    });
}

/// The latency of who keeps to its minimum does not depend on what others send.
#[test]
fn a_victims_latency_under_attack_is_as_alone_and_one_slice() {
    let attacks = [
        Load { queues: 16, ..load(16, AES) },
        of_content(Load { queues: 4, ..load(1 << 20, DEFLATE) }, 1.9),
        load(65_536, SHA3),
        // In bursts, so that it always comes back with work.
        Load { period_ns: 3_000_000, ..load(4096, SHA3) },
    ];
    SIMULATION.run(|seed, _| {
        for (tenants, attack) in
            [2, 8, 64].into_iter().flat_map(|n| attacks.iter().map(move |a| (n, a)))
        {
            let (_, mut shares, mut loads) = sold(&["sha3-512 400 Mbit/s message 4KiB"], 1, 0);
            // A third of what was bought, as requests come.
            loads[0].arrivals = MessageArrivals::Open { per_second: 4000 };
            let alone = run(&mut shaped(&shares, 1), 1, &loads, SECOND / 5, seed);
            shares.resize(tenants, TenantShare::default());
            loads.resize(tenants, attack.clone());
            let attacked = run(&mut shaped(&shares, 1), 1, &loads, SECOND / 5, seed);
            let (alone, attacked) = (alone[0].percentile(99.0), attacked[0].percentile(99.0));
            if attacked > alone * 3 / 2 + SLICE_NS {
                let attack = &attack.content.sizes;
                return Err(format!("{tenants} tenants, {attack:?}: {attacked} ns, {alone} alone"));
            }
            let unshaped = run(&mut MessageRoundRobin::default(), 1, &loads, SECOND / 4, seed);
            if tenants == 64 && attack.content.sizes[0] == 65_536 {
                let unshaped = unshaped[0].percentile(99.0);
                if unshaped < 5 * attacked {
                    return Err(format!("{unshaped} ns without shaping is no attack"));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn what_is_left_is_shared_by_weight_and_what_nobody_uses_is_not_lost() {
    SIMULATION.run(|seed, _| {
        let loads = [
            load(4096, AES),
            load(65_536, DEFLATE),
            Load { period_ns: SECOND / 5, ..load(4096, SHA3) },
        ];
        let weights = [1, 3, 4];
        let shares = weights.map(|weight| TenantShare { weight, ..TenantShare::default() });
        let reports = run(&mut shaped(&shares, 1), 1, &loads, 2 * SECOND, seed);
        let got: Vec<u64> = reports.iter().map(|report| report.total().engine_ns).collect();
        let ratio = got[1] as f64 / got[0] as f64;
        if !(2.94..=3.06).contains(&ratio) {
            return Err(format!("{ratio:.3} instead of 3: {got:?}"));
        }
        let third = got[2] as f64 / 0.98e9;
        if !(0.49..=0.53).contains(&third) {
            return Err(format!("half of the time in which it works is not {third:.3}"));
        }
        let busy = got.iter().sum::<u64>() as f64 / 1.98e9;
        if busy < 0.99 { Err(format!("busy for {busy:.3} of the time")) } else { Ok(()) }
    });
}

#[test]
fn a_maximum_is_kept_however_much_there_is() {
    SIMULATION.run(|seed, _| {
        for text in [
            "aes256ctr 1 Gbit/s max 2 Gbit/s",
            "deflate 10 op/s max 500 op/s message 16KiB",
            "aes256ctr 0 Gbit/s max 1 Gbit/s message 64B",
            "sha3-512 0 Gbit/s out 100 Mbit/s",
        ] {
            let (levels, shares, loads) = sold(&[text], 1, 0);
            let reports = run(&mut shaped(&shares, 1), 1, &loads, 2 * SECOND, seed);
            let (level, total) = (&levels[0], reports[0].total());
            let got = match (level.max, level.min.unit) {
                (None, _) => total.egress as f64 / level.egress.unwrap() as f64,
                (Some(max), rackbus_qos::RateUnit::Bytes) => total.ingress as f64 / max as f64,
                (Some(max), rackbus_qos::RateUnit::Operations) => {
                    total.operations as f64 / max as f64
                }
            } / 1.98;
            if !(0.98..=1.02).contains(&got) {
                return Err(format!("{level}: {got:.3} of the maximum"));
            }
        }
        Ok(())
    });
}
