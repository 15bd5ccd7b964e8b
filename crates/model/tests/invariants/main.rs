//! What holds for every rack and every flow: nothing is lost, created, reordered against the
//! specification or faster than its parts allow, and no improvement makes a flow slower.

mod bound;
mod plan;
mod trackers;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;
use rackbus_model::engine::{DirectionId, PacketClass, Passage, RouteId, Until};
use rackbus_model::time::Time;

use bound::Bound;
use plan::{Kind, Made, Plan, Run};

type Outcome = Result<(), TestCaseError>;

impl Run {
    /// The directions that are not inside of a chip, and so cost something.
    fn directions(&self) -> BTreeSet<DirectionId> {
        let links = self
            .it
            .links()
            .filter(|link| self.it.world.direction_parameters(link.3).wire.is_some());
        links.flat_map(|(.., direction)| [direction, direction.back()]).collect()
    }

    /// The directions of a route that cost something, forwards or backwards.
    fn wired(&self, route: RouteId, back: bool) -> Vec<DirectionId> {
        let directions = self.directions();
        let route = self.it.world.directions_of(route);
        let route: Vec<DirectionId> = match back {
            false => route,
            true => route.into_iter().rev().map(DirectionId::back).collect(),
        };
        route.into_iter().filter(|direction| directions.contains(direction)).collect()
    }

    fn ended(&self) -> Time {
        self.it.world.flow(self.flows[0].id).ended
    }
}

/// Every job was done, every byte went where it should and nowhere else, and all is as before.
fn everything_came(run: &mut Run) -> Outcome {
    let mut expected: BTreeMap<DirectionId, u64> = BTreeMap::new();
    for flow in &run.flows {
        let stats = run.it.world.flow(flow.id);
        let bytes = flow.plan.count * flow.plan.bytes;
        prop_assert_eq!((stats.jobs, stats.bytes()), (flow.plan.count, bytes));
        let routes = [(flow.to, false), (flow.from, true)];
        for (route, back) in routes.into_iter().filter_map(|(end, back)| Some((end?.1, back))) {
            for direction in run.wired(route, back) {
                *expected.entry(direction).or_default() += bytes;
            }
        }
    }
    for direction in run.directions() {
        let stats = run.it.world.direction(direction);
        prop_assert_eq!(stats.payload, expected.get(&direction).copied().unwrap_or(0));
        prop_assert!(
            stats.busy <= run.it.world.now(),
            "a direction was busy for longer than it was"
        );
    }
    prop_assert!(run.it.world.is_idle(), "something is left");
    Ok(())
}

/// No job was faster than its route and its bytes allow.
fn nothing_was_too_fast(run: &mut Run) -> Outcome {
    for Made { plan, id, from, to, source } in &run.flows {
        let least = run.it.world.flow(*id).latency.least().ps() as f64;
        let mut bound = 0.0;
        let until = match plan.kind {
            Kind::Write(until) | Kind::Copy(until) => until,
            Kind::Read => Until::Landed,
        };
        if until == Until::Begun {
            continue;
        }
        if let Some((end, _)) = from {
            bound += Bound::new(&mut run.it, *source, *end).read(plan.bytes);
        }
        if let Some((end, _)) = to.filter(|_| until == Until::Landed) {
            // Of a copy, the last byte is written when all are read.
            let bytes = if from.is_some() { 1 } else { plan.bytes };
            bound += Bound::new(&mut run.it, *source, end).write(bytes);
        }
        prop_assert!(least * (1.0 + 1e-5) + 2.0 >= bound, "{least} ps, at least {bound}: {plan:?}");
    }
    Ok(())
}

/// By what packets come to a direction: by another, or from the beginning of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum From {
    Direction(DirectionId),
    Route(RouteId),
}

/// No request or completion overtook a write that came the same way, and no write another
/// (PCI Express base specification 2.4.1); each direction sent one packet at a time, and none before it had
/// come.
fn order_was_kept(run: &Run) -> Outcome {
    // What passes inside of a chip takes no time and no turns.
    let passages = run.it.world.trace().iter();
    let wired = run.directions();
    let trace: Vec<&Passage> =
        passages.filter(|passage| wired.contains(&passage.direction)).collect();
    let sent: BTreeMap<(u64, DirectionId), &Passage> =
        trace.iter().map(|passage| ((passage.packet, passage.direction), *passage)).collect();
    let propagation = |direction| run.it.world.direction_parameters(direction).propagation;
    let mut directions: BTreeMap<DirectionId, Vec<&Passage>> = BTreeMap::new();
    let mut streams: BTreeMap<(DirectionId, From), Vec<(u64, &Passage)>> = BTreeMap::new();
    for passage in trace {
        directions.entry(passage.direction).or_default().push(passage);
        let route = run.wired(passage.route, passage.class == PacketClass::Completion);
        let place = route.iter().position(|direction| *direction == passage.direction);
        let before = route[..place.unwrap()].last();
        let Some(ingress) = before else {
            if passage.class != PacketClass::Completion {
                let key = (passage.direction, From::Route(passage.route));
                streams.entry(key).or_default().push((passage.packet, passage));
            }
            continue;
        };
        let came = sent.get(&(passage.packet, *ingress)).or(sent.get(&(passage.whole, *ingress)));
        let came = came.unwrap();
        prop_assert!(
            passage.end >= came.end + propagation(passage.direction),
            "{passage:?} left before it came: {came:?}"
        );
        let key = (passage.direction, From::Direction(*ingress));
        streams.entry(key).or_default().push((came.begin.ps(), passage));
    }
    for passages in directions.values_mut() {
        passages.sort_by_key(|passage| passage.begin);
        for pair in passages.windows(2) {
            let there = propagation(pair[0].direction);
            prop_assert!(pair[1].begin + there >= pair[0].end, "{pair:?} at a time");
        }
    }
    for (place, mut passages) in streams {
        passages.sort_by_key(|(came, passage)| (*came, passage.begin));
        let mut writes: BTreeMap<RouteId, &Passage> = BTreeMap::new();
        for (_, passage) in passages {
            for write in writes.values() {
                // Writes of other ways may have more roots to cross, and rooms of their own.
                let free = passage.class == PacketClass::Posted && passage.route != write.route;
                let kept = free || write.begin < passage.begin;
                prop_assert!(kept, "at {place:?} {passage:?} overtook {write:?}");
            }
            if passage.class == PacketClass::Posted {
                writes.insert(passage.route, passage);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn racks_do_what_they_are_asked(plan in plan::plans()) {
        let mut run = plan.run();
        prop_assert!(run.outcome.is_ok(), "{:?}", run.outcome);
        everything_came(&mut run)?;
        nothing_was_too_fast(&mut run)?;
        order_was_kept(&run)?;
        let again = plan.run();
        prop_assert_eq!(run.it.world.happened(), again.it.world.happened());
        prop_assert_eq!(run.it.world.trace(), again.it.world.trace());
        for flow in &run.flows {
            prop_assert_eq!(run.it.world.flow(flow.id), again.it.world.flow(flow.id));
        }
    }
}

/// A link of the plan that the flow uses, and where on its route.
struct Used {
    nth: usize,
    places: Vec<usize>,
}

impl Run {
    /// The links on the only flow's route, and how many directions that has.
    fn used(&self, plan: &Plan) -> (Vec<Used>, usize) {
        let topology = self.it.topology();
        let part = |name: &str| match topology.host_named(name) {
            Some(host) => topology.host(host).root,
            None => topology.named(name).unwrap(),
        };
        let flow = &self.flows[0];
        let route = flow.from.or(flow.to).unwrap().1;
        let route = self.wired(route, false);
        let mut rack = plan.rack.clone();
        let links = rack.links();
        let used = links.iter().enumerate().filter_map(|(nth, (a, b, _))| {
            let direction = self.it.direction(part(a), part(b)).unwrap();
            let mine = |on: &DirectionId| *on == direction || *on == direction.back();
            let places: Vec<usize> = route
                .iter()
                .enumerate()
                .filter(|(_, on)| mine(on))
                .map(|(place, _)| place)
                .collect();
            (!places.is_empty()).then_some(Used { nth, places })
        });
        (used.collect(), route.len())
    }

    /// Whether requests and completions of the only flow share a direction, up to a root and down again.
    /// Which of them goes first is then a matter of chance, and may cost more than an improvement
    /// brings (Graham, 1969).
    fn turns(&self) -> bool {
        let Some((_, route)) = self.flows[0].from else { return false };
        let route = self.wired(route, false);
        route.iter().any(|direction| route.contains(&direction.back()))
    }

    /// Whole picoseconds that rounding may cost, one for each packet on each direction.
    fn rounding(&self) -> Time {
        Time::from_ps(4 * self.it.world.trace().len() as u64)
    }
}

/// A plan of one flow, run to its end, without DLLPs: each delays the packet that is next, and that
/// may be another when something gets faster.
fn alone(plan: &Plan, divided: Option<usize>) -> Result<Run, TestCaseError> {
    let mut plan = plan.clone();
    (plan.timing.link.acknowledge_every, plan.timing.link.update_every) = (0, 0);
    let run = plan.run_divided(divided);
    prop_assert!(run.outcome.is_ok(), "{:?}", run.outcome);
    Ok(run)
}

fn no_faster(better: &Run, worse: &Run) -> Outcome {
    let (one, other) = (better.ended(), worse.ended());
    prop_assert!(one <= other + better.rounding(), "{one} for the better, {other} for the worse");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// At either end of a route. A link between others may well: it cannot send on a packet's head before
    /// the tail is near, if it is faster than the link by which the packet comes, and what follows gets
    /// the head later then.
    #[test]
    fn a_faster_link_makes_no_flow_slower(plan in plan::single(), which: Index, wider: bool) {
        let before = alone(&plan, None)?;
        let (used, length) = before.used(&plan);
        let at_an_end = |link: &&Used| link.places.iter().all(|nth| *nth == 0 || *nth + 1 == length);
        let used: Vec<&Used> = used.iter().filter(at_an_end).collect();
        if used.is_empty() || before.turns() {
            return Ok(());
        }
        let mut better = plan.clone();
        let speed = better.rack.links().swap_remove(which.get(&used).nth).2;
        match wider {
            true => speed.width = 4.min(speed.width + 1),
            false => speed.generation = 6.min(speed.generation + 1),
        }
        no_faster(&alone(&better, None)?, &before)?;
    }

    #[test]
    fn more_latency_makes_no_flow_faster(plan in plan::single(), which in 0..10, more in 1u64..300) {
        let before = alone(&plan, None)?;
        let mut worse = plan.clone();
        let (timing, more) = (&mut worse.timing, Time::from_ns(more));
        match which {
            0 => timing.switch.latency += more,
            1 => timing.ntb.latency += more,
            2 => timing.ntb.translation += more,
            3 => timing.ntb.completion_translation += more,
            4 => timing.every_host().for_each(|host| host.root.latency += more),
            5 => timing.every_host().for_each(|host| host.root.completion_latency += more),
            6 => timing.every_host().for_each(|host| host.memory.latency += more),
            7 => timing.device.latency += more,
            8 => timing.link.propagation += more,
            _ => timing.link.credit_return += more,
        }
        if !before.turns() {
            no_faster(&before, &alone(&worse, None)?)?;
        }
    }

    #[test]
    fn more_credits_make_no_flow_slower(plan in plan::single(), which in 0..5, more in 1u32..5) {
        let before = alone(&plan, None)?;
        let mut better = plan.clone();
        let bytes = plan.timing.device.mps * more;
        let link = &mut better.timing.link;
        match which {
            0 => link.posted.0 += more,
            1 => link.posted.1 += bytes,
            2 => link.nonposted += more,
            3 => link.completion.0 += more,
            _ => link.completion.1 += bytes,
        }
        if !before.turns() {
            no_faster(&alone(&better, None)?, &before)?;
        }
    }

    /// Where links have little room a switch may: it is one more buffer.
    #[test]
    fn one_more_switch_makes_no_flow_faster(mut plan in plan::single(), which: Index) {
        plan.timing.link.posted = (1_000, 1 << 20);
        plan.timing.link.nonposted = 1_000;
        plan.timing.link.completion = (1_000, 1 << 20);
        let before = alone(&plan, None)?;
        let (used, _) = before.used(&plan);
        if !used.is_empty() && !before.turns() {
            no_faster(&before, &alone(&plan, Some(which.get(&used).nth))?)?;
        }
    }
}
