//! Fair shares: textbook cases by hand, and the certificate of max-min fairness on random and on
//! large networks.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::random::RandomSequence;

/// Relative room for rounding.
const ROUNDING: f64 = 1e-9;

/// A use of a link where a payload byte is one byte.
fn plain(link: usize) -> Use {
    Use { link, cost_ppm: 1_000_000 }
}

fn over(links: &[usize]) -> Flow {
    Flow::new(links.iter().copied().map(plain).collect())
}

fn rates(capacities: &[u64], flows: &[Flow]) -> Vec<f64> {
    fair_shares(capacities, flows).unwrap().flows.iter().map(|share| share.rate).collect()
}

#[test]
fn a_long_flow_shares_each_link_of_a_line() {
    let flows = [over(&[0, 1, 2]), over(&[0]), over(&[1]), over(&[2])];
    let shares = fair_shares(&[10, 4, 10], &flows).unwrap();
    let got: Vec<_> = shares.flows.iter().map(|share| (share.rate, share.bottleneck)).collect();
    let [middle, first, last] = [1, 0, 2].map(Bottleneck::Link);
    assert_eq!(got, [(2.0, middle), (8.0, first), (2.0, middle), (8.0, last)]);
    assert_eq!(shares.utilization, [1.0, 1.0, 1.0]);
}

#[test]
fn what_one_link_leaves_others_take() {
    let flows = [over(&[0]), over(&[0]), over(&[0, 1]), over(&[1]), over(&[2])];
    assert_eq!(rates(&[3, 3, 3], &flows), [1.0, 1.0, 1.0, 2.0, 3.0]);
}

#[test]
fn weights_and_demands_divide_a_link() {
    let mut flows = [over(&[0]), over(&[0]), over(&[0])];
    flows[1].weight = 3;
    flows[2].demand = Some(20);
    assert_eq!(rates(&[100], &flows), [20.0, 60.0, 20.0]);
    let shares = fair_shares(&[1000], &flows[2..]).unwrap();
    assert_eq!(shares.flows, [FlowRate { rate: 20.0, bottleneck: Bottleneck::Demand }]);
    assert_eq!(shares.utilization, [0.02]);
}

#[test]
fn a_demand_that_is_met_as_the_link_fills_is_the_bottleneck_and_the_first_of_two_links() {
    let mut flows = [over(&[1, 0]), over(&[1, 0])];
    flows[0].demand = Some(50);
    let shares = fair_shares(&[100, 100], &flows).unwrap();
    let bottlenecks = shares.flows.iter().map(|share| share.bottleneck);
    assert!(bottlenecks.eq([Bottleneck::Demand, Bottleneck::Link(0)]));
}

#[test]
fn headers_and_requests_cost_what_they_take() {
    // A read: completions with 9 % of headers one way, requests the other, against a write.
    let request = Use { link: 1, cost_ppm: 90_000 };
    let read = Flow::new(vec![Use { link: 0, cost_ppm: 1_090_000 }, request]);
    let mut write = Flow::new(vec![Use { link: 1, cost_ppm: 1_090_000 }]);
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < ROUNDING, "{a}, not {b}");
    let shares = rates(&[1090, 1090], &[read.clone(), write.clone()]);
    near(shares[0], 1090.0 / 1.18);
    near(shares[1], 1090.0 / 1.18);
    write.weight = 3;
    let shares = rates(&[545, 1090], &[read, write]);
    near(shares[0], 1090.0 / 3.36);
    near(shares[1], 3.0 * shares[0]);
}

#[test]
fn a_use_without_cost_bounds_nothing() {
    let mut free = over(&[0, 1]);
    free.uses[0].cost_ppm = 0;
    assert_eq!(rates(&[2, 100], &[free, over(&[0])]), [100.0, 2.0]);
}

#[test]
fn what_has_no_shares_is_refused() {
    let error = |capacities: &[u64], flow: Flow| fair_shares(capacities, &[flow]).unwrap_err();
    assert_eq!(error(&[1, 0], over(&[0])), FlowError::NoCapacity { link: 1 });
    assert_eq!(error(&[1], over(&[0, 1])), FlowError::NoLink { flow: 0, link: 1, links: 1 });
    assert_eq!(error(&[1], Flow { weight: 0, ..over(&[0]) }), FlowError::NoWeight { flow: 0 });
    assert_eq!(error(&[1], over(&[])), FlowError::Unbounded { flow: 0 });
    let free = Flow::new(vec![Use { link: 0, cost_ppm: 0 }]);
    assert_eq!(error(&[1], free), FlowError::Unbounded { flow: 0 });
    let idle = Flow { demand: Some(7), ..over(&[]) };
    assert_eq!(rates(&[], &[idle]), [7.0]);
}

/// Checks that `shares` are feasible and that each flow has its bottleneck: which only the max-min
/// fair shares do.
fn certify(capacities: &[u64], flows: &[Flow], shares: &Shares) {
    assert_eq!(shares.flows.len(), flows.len());
    let mut loads = vec![0.0; capacities.len()];
    let mut highest = vec![0.0f64; capacities.len()];
    for (flow, share) in flows.iter().zip(&shares.flows) {
        for at in flow.uses.iter().filter(|at| at.cost_ppm > 0) {
            loads[at.link] += share.rate * at.cost_ppm as f64 / 1e6;
            highest[at.link] = highest[at.link].max(share.rate / f64::from(flow.weight));
        }
    }
    for (link, load) in loads.iter().enumerate() {
        let part = load / capacities[link] as f64;
        assert!(part <= 1.0 + ROUNDING, "link {link} is loaded {part}");
        assert!((part - shares.utilization[link]).abs() <= ROUNDING);
    }
    for (index, (flow, share)) in flows.iter().zip(&shares.flows).enumerate() {
        let demand = flow.demand.map_or(f64::INFINITY, |most| most as f64);
        assert!(share.rate <= demand * (1.0 + ROUNDING), "flow {index} exceeds its demand");
        match share.bottleneck {
            Bottleneck::Demand => assert!(share.rate >= demand * (1.0 - ROUNDING)),
            Bottleneck::Link(link) => {
                assert!(flow.uses.iter().any(|at| at.link == link && at.cost_ppm > 0));
                assert!(shares.utilization[link] >= 1.0 - ROUNDING, "link {link} is not full");
                let level = share.rate / f64::from(flow.weight);
                assert!(level >= highest[link] * (1.0 - ROUNDING), "flow {index} could get more");
            }
        }
    }
}

fn networks() -> impl Strategy<Value = (Vec<u64>, Vec<Flow>)> {
    let capacity = prop_oneof![1u64..20, 1_000_000_000u64..64_000_000_000];
    prop::collection::vec(capacity, 1..12).prop_flat_map(|capacities| {
        let cost = prop_oneof![Just(1_000_000), Just(0), 1u64..2_000_000];
        let at = (0..capacities.len(), cost).prop_map(|(link, cost_ppm)| Use { link, cost_ppm });
        let uses = prop::collection::vec(at, 0..6);
        let demand = prop::option::of(prop_oneof![0u64..20, 1_000_000u64..30_000_000_000]);
        let flow = (uses, demand, prop_oneof![3 => Just(1), 1 => 1u32..100]).prop_map(
            |(mut uses, demand, weight)| {
                if demand.is_none() {
                    uses.push(plain(0));
                }
                Flow { uses, demand, weight }
            },
        );
        (Just(capacities), prop::collection::vec(flow, 1..40))
    })
}

fn lowest_level(flows: &[Flow], shares: &Shares) -> f64 {
    let level = |(flow, share): (&Flow, &FlowRate)| share.rate / f64::from(flow.weight);
    flows.iter().zip(&shares.flows).map(level).fold(f64::INFINITY, f64::min)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn shares_are_max_min_fair((capacities, flows) in networks()) {
        certify(&capacities, &flows, &fair_shares(&capacities, &flows).unwrap());
    }

    /// Twice the capacities and demands: twice the rates, to the last bit.
    #[test]
    fn shares_scale((mut capacities, mut flows) in networks()) {
        let before = fair_shares(&capacities, &flows).unwrap();
        capacities.iter_mut().for_each(|capacity| *capacity *= 2);
        flows.iter_mut().for_each(|flow| flow.demand = flow.demand.map(|most| most * 2));
        let after = fair_shares(&capacities, &flows).unwrap();
        prop_assert_eq!(&before.utilization, &after.utilization);
        for (one, two) in before.flows.iter().zip(&after.flows) {
            prop_assert_eq!((one.rate * 2.0, one.bottleneck), (two.rate, two.bottleneck));
        }
    }

    /// More capacity may lower a flow's rate, but never that of the flow that gets the least.
    #[test]
    fn more_capacity_never_lowers_the_lowest_level(
        (mut capacities, flows) in networks(),
        link in any::<prop::sample::Index>(),
        more in 1u64..10_000_000_000,
    ) {
        let before = lowest_level(&flows, &fair_shares(&capacities, &flows).unwrap());
        let link = link.index(capacities.len());
        capacities[link] += more;
        let after = lowest_level(&flows, &fair_shares(&capacities, &flows).unwrap());
        prop_assert!(after >= before * (1.0 - ROUNDING), "{after} after {before}");
    }
}

/// Hosts below leaf switches of 32 ports, each leaf joined to each of 8 spines, and reads between
/// random devices and memories: 8 links of data, up to 4 of requests.
fn rack(hosts: usize, count: usize, seed: u64) -> (Vec<u64>, Vec<Flow>) {
    const SPINES: usize = 8;
    // By host: device, adapter and memory; up to the leaf and down to the host.
    const PER_HOST: usize = 6;
    let leaves = hosts.div_ceil(32);
    let trunk = |leaf: usize, spine: usize, down: usize| {
        hosts * PER_HOST + (leaf * SPINES + spine) * 2 + down
    };
    let mut capacities = vec![15_750_000_000; hosts * PER_HOST];
    capacities.resize(trunk(leaves, 0, 0), 31_500_000_000);
    let mut random = RandomSequence::new(seed);
    let mut below = |end: usize| random.below(end as u64) as usize;
    let flows = (0..count).map(|_| {
        let (from, to, spine) = (below(hosts), below(hosts), below(SPINES));
        let (lower, upper) = (from * PER_HOST, to * PER_HOST);
        let mut data = vec![lower, lower + 1, upper + 2, upper + 3];
        let mut requests = vec![upper + 4, upper + 5, lower + 4, lower + 5];
        if from / 32 != to / 32 {
            data.extend([trunk(from / 32, spine, 0), trunk(to / 32, spine, 1)]);
            requests.extend([trunk(to / 32, spine, 0), trunk(from / 32, spine, 1)]);
        }
        let costing = |cost_ppm| move |link| Use { link, cost_ppm };
        let data = data.into_iter().map(costing(1_090_000));
        let uses = data.chain(requests.into_iter().map(costing(50_000))).collect();
        let demand = (below(4) == 0).then(|| 1_000_000 * (1 + below(4_000) as u64));
        Flow { uses, demand, weight: 1 + below(4) as u32 }
    });
    let flows = flows.collect();
    (capacities, flows)
}

/// With optimization, 10,000 hosts and 100,000 flows.
#[test]
fn large() {
    let (hosts, count) = if cfg!(debug_assertions) { (1_000, 10_000) } else { (10_000, 100_000) };
    let (capacities, flows) = rack(hosts, count, 1);
    let begin = Instant::now();
    let shares = fair_shares(&capacities, &flows).unwrap();
    let took = begin.elapsed();
    println!("{count} flows in {hosts} hosts: {took:?}");
    certify(&capacities, &flows, &shares);
    let held = shares.flows.iter().filter(|share| share.bottleneck != Bottleneck::Demand).count();
    assert!((count / 4..count).contains(&held), "{held} flows are held back by links");
    // A hundred times what it takes; a pass over all flows for each link takes longer.
    assert!(took < Duration::from_secs(10), "{took:?}");
}
