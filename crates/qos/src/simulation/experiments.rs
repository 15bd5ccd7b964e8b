//! The seed paper's observations as experiments: what tenants get from a device that does not shape, and
//! from one that does.
//!
//! Observations 6, 8 and 9 are of the PCIe bus, which this simulation does not have: the timing model
//! (`rackbus_model::reproduce::shaped`) runs them, and what 5 and 10 are on the bus, with the same arbiter.

use serde::Serialize;

use super::report::WARM_NS;
use super::{Load, MessageArrivals, MessageCosts, Policy, TenantReport, run};
use crate::SECOND;
use crate::arbiter::TenantArbiter;
use crate::level::RateUnit;
use crate::tenant::{Guarantee, RateLimit, TenantShare};
use crate::turn::{SharingSettings, TenantId};
use crate::unshaped::MessageRoundRobin;

/// Costs of engines on a processor of today, for an operation and for each byte, in nanoseconds.
const AES: (f64, f64) = (100.0, 0.12);
const SHA3: (f64, f64) = (250.0, 3.3);
const DEFLATE: (f64, f64) = (2000.0, 7.0);
const INFLATE: (f64, f64) = (1500.0, 2.8);
/// How long each case is simulated, in nanoseconds.
const LENGTH: u64 = SECOND / 10;

/// One case of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExperimentCase {
    /// The loads that are compared, for people.
    pub name: String,
    /// What was measured without shaping.
    pub off: f64,
    /// The same with shaping.
    pub on: f64,
}

/// What came of the experiment for one of the paper's observations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Experiment {
    /// The paper's number of the observation.
    pub observation: u32,
    /// The observation, in one line.
    pub title: &'static str,
    /// What the figures of the cases are, in one line.
    pub measure: &'static str,
    /// The figure that perfect isolation would give.
    pub ideal: f64,
    /// The loads that were compared, each without and with an arbiter.
    pub cases: Vec<ExperimentCase>,
}

impl Experiment {
    fn new(
        observation: u32,
        title: &'static str,
        measure: &'static str,
        cases: Vec<ExperimentCase>,
    ) -> Self {
        Experiment { observation, title, measure, ideal: 1.0, cases }
    }
}

/// Runs the experiment of an observation; nothing for one that is not simulated here.
pub fn experiment(observation: u32, seed: u64) -> Option<Experiment> {
    let engine = "engine time of the first tenant over that of the second";
    let of = |title, measure, cases| Some(Experiment::new(observation, title, measure, cases));
    let pair = |name: &str, loads: [Load; 2]| {
        compare(name, &loads, [TenantShare::default(); 2], seed, |a, b| {
            a.total().engine_ns as f64 / b.total().engine_ns as f64
        })
    };
    match observation {
        1 => of(
            "message size matters",
            engine,
            [64, 1024, 16_384, 65_536]
                .map(|size| pair(&format!("{size} B and 64 B"), [load(size, AES), load(64, AES)]))
                .to_vec(),
        ),
        2 => Some(output_ratio(seed)),
        3 => of(
            "the implementation matters, and the content",
            engine,
            vec![
                pair("hashing and encryption", [load(4096, SHA3), load(4096, AES)]),
                pair(
                    "compression and decompression",
                    [load(65_536, DEFLATE), load(65_536, INFLATE)],
                ),
                pair(
                    "deflate of noise and of zeroes",
                    [
                        of_content(load(65_536, DEFLATE), 1.9),
                        of_content(load(65_536, DEFLATE), 0.13),
                    ],
                ),
            ],
        ),
        4 => of(
            "the number of queue pairs decides",
            engine,
            [1, 2, 4, 8]
                .map(|queues| {
                    let many = Load { queues, ..load(4096, AES) };
                    pair(&format!("{queues} queues and 1"), [many, load(4096, AES)])
                })
                .to_vec(),
        ),
        5 => of(
            "mixed message sizes contend",
            engine,
            [256, 512, 1024, 2048, 4096, 8192]
                .map(|size| {
                    pair(&format!("4096 B and {size} B"), [load(4096, AES), load(size, AES)])
                })
                .to_vec(),
        ),
        7 => Some(two_units(seed)),
        10 => Some(floods(seed)),
        _ => None,
    }
}

/// The output of decompression, beside hashing.
fn output_ratio(seed: u64) -> Experiment {
    // 64 KiB come out of 308 bytes; a tenth of a gigabyte each second is what was bought.
    let inflate = MessageCosts { ratio: 213_000, ..load(308, (60_000.0, 0.1)).content };
    let inflate = Load { content: inflate, ..load(308, (60_000.0, 0.1)) };
    let egress = Some(RateLimit::new(100_000_000, 65_536));
    let shares = [TenantShare { egress, ..TenantShare::default() }, TenantShare::default()];
    let loads = [inflate, load(65_536, SHA3)];
    let bytes = |a: &TenantReport, _: &TenantReport| {
        a.total().egress as f64 * SECOND as f64 / (LENGTH - WARM_NS) as f64 / 1e8
    };
    Experiment::new(
        2,
        "the ratio of output to input varies",
        "output over the bandwidth out of the device that was bought",
        vec![compare("decompression beside hashing", &loads, shares, seed, bytes)],
    )
}

/// Minimums in bytes and in operations, side by side.
fn two_units(seed: u64) -> Experiment {
    let loads = [load(4096, AES), load(64, AES)];
    let shares = [
        guaranteed(RateUnit::Bytes, 4096 * 300_000, 300_000, 592.0),
        guaranteed(RateUnit::Operations, 5_000_000, 5_000_000, 108.0),
    ];
    let kept = |nth: usize| {
        move |a: &TenantReport, b: &TenantReport| {
            let window = SECOND / 20;
            match nth {
                0 => a.least(window, WARM_NS, |s| s.ingress) as f64 / 61_440_000.0,
                _ => b.least(window, WARM_NS, |s| s.operations) as f64 / 250_000.0,
            }
        }
    };
    Experiment::new(
        7,
        "bytes each second and operations each second are two things",
        "what was kept of the minimum in the worst twentieth of a second (1 or more is kept)",
        vec![
            compare("9.8 Gbit/s with 4096 B", &loads, shares, seed, kept(0)),
            compare("5 Mop/s with 64 B beside it", &loads, shares, seed, kept(1)),
        ],
    )
}

/// A tenant with a minimum beside one that sends tiny messages by many queues.
fn floods(seed: u64) -> Experiment {
    let rate = |a: &TenantReport, _: &TenantReport| {
        a.total().ingress as f64 * SECOND as f64 / (LENGTH - WARM_NS) as f64 / 5e9
    };
    let shares =
        [guaranteed(RateUnit::Bytes, 5_000_000_000, 1_220_704, 592.0), TenantShare::default()];
    let case = |size: u64| {
        let flood = Load { queues: 16, ..load(size, AES) };
        let loads = [load(4096, AES), flood];
        compare(&format!("a flood of {size} B by 16 queues"), &loads, shares, seed, rate)
    };
    Experiment::new(
        10,
        "floods of tiny messages take over",
        "what the victim gets of the 40 Gbit/s that it bought (1 or more is kept)",
        [16, 32, 64].map(case).to_vec(),
    )
}

fn guaranteed(unit: RateUnit, rate: u64, operations: u64, cost_ns: f64) -> TenantShare {
    let engine = RateLimit::new((operations as f64 * cost_ns) as u64, 0);
    let one = rate / operations.max(1);
    let guarantee = Guarantee { engine, units: RateLimit::new(rate, 0), unit, one };
    TenantShare { guarantee: Some(guarantee), ..TenantShare::default() }
}

fn compare(
    name: &str,
    loads: &[Load],
    shares: [TenantShare; 2],
    seed: u64,
    measure: impl Fn(&TenantReport, &TenantReport) -> f64,
) -> ExperimentCase {
    let settings = SharingSettings { batch: 256, ..SharingSettings::default() };
    let mut arbiter = TenantArbiter::new(settings);
    for (id, share) in (0..).zip(shares) {
        arbiter.set(TenantId(id), share, 0);
    }
    let measured = |policy: &mut dyn Policy| {
        let reports = run(policy, 1, loads, LENGTH, seed);
        measure(&reports[0], &reports[1])
    };
    let off = measured(&mut MessageRoundRobin::default());
    ExperimentCase { name: name.to_owned(), off, on: measured(&mut arbiter) }
}

/// A tenant that always has some turns of work waiting.
fn load(size: u64, (fixed_ns, byte_ns): (f64, f64)) -> Load {
    let cost = fixed_ns + size as f64 * byte_ns;
    let depth = (200_000.0 / cost).ceil().max(64.0) as u32;
    Load { arrivals: MessageArrivals::Closed { depth }, ..Load::steady(size, fixed_ns, byte_ns) }
}

fn of_content(load: Load, factor: f64) -> Load {
    Load { content: MessageCosts { factor: (factor, factor), ..load.content }, ..load }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shaping_brings_every_observation_near_the_ideal_and_none_is_there_without() {
        for observation in 1..=10 {
            let Some(Experiment { title, measure, cases, .. }) = experiment(observation, 1) else {
                assert!(matches!(observation, 6 | 8 | 9), "{observation} is not of the bus alone");
                continue;
            };
            let minimum = measure.contains("or more");
            for ExperimentCase { name, on, .. } in &cases {
                let fits = if minimum { *on >= 0.99 } else { (0.95..=1.05).contains(on) };
                assert!(fits, "{observation} ({title}), {name}: {on:.3}, {cases:?}");
            }
            let worst = cases.iter().map(|case| case.off.max(1.0 / case.off));
            let worst = worst.fold(1.0, f64::max);
            assert!(worst > 1.2, "{observation}: {worst:.3} without shaping is no observation");
        }
    }
}
