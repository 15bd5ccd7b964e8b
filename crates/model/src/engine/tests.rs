//! The engine against closed forms.

use super::*;
use crate::wire::{Dllps, Wire};

const GEN3_X8: DirectionParameters = DirectionParameters {
    wire: None,
    propagation: Time::ZERO,
    credits: Credits::ENDLESS,
    credit_return: Time::ZERO,
    dllps: Dllps::NONE,
};

fn link(generation: u8, lanes: u8) -> DirectionParameters {
    DirectionParameters { wire: Some(Wire::pcie(generation, lanes)), ..GEN3_X8 }
}

/// A device and a memory, and a route over `links` with switches in between.
struct Line {
    world: World,
    stream: StreamId,
    route: RouteId,
    directions: Vec<DirectionId>,
}

fn line(
    links: &[DirectionParameters],
    delay: Time,
    access: Time,
    requester: RequesterParameters,
) -> Line {
    let mut world = World::new(1);
    let device = world.add_part(PartParameters::default());
    let mut last = device;
    let mut directions = Vec::new();
    for (nth, link) in links.iter().enumerate() {
        let end = nth + 1 == links.len();
        let part = PartParameters {
            delay: if end { [Time::ZERO; 3] } else { [delay; 3] },
            access: if end { access } else { Time::ZERO },
            ..PartParameters::default()
        };
        let part = world.add_part(part);
        directions.push(world.add_link((last, part), *link, *link));
        last = part;
    }
    let requester = world.add_requester(device, requester);
    let stream = world.add_stream(requester);
    let route = world.add_route(device, &directions);
    Line { world, stream, route, directions }
}

impl Line {
    fn flow(&mut self, script: Script, arrivals: Arrivals, count: u64, bytes: u64) -> FlowId {
        let script = self.world.add_script(script);
        let addresses = Addresses::sequential(0, bytes.next_multiple_of(64));
        let flow = JobFlow { count, addresses, ..JobFlow::new(script, arrivals, bytes) };
        self.world.add_flow(flow)
    }

    fn write(&self, bytes: u64, until: Until) -> Script {
        vec![Step::Write { stream: self.stream, route: self.route, address: 0, bytes, until }]
    }

    fn read(&self, bytes: u64) -> Script {
        vec![Step::Read { stream: self.stream, route: self.route, address: 0, bytes }]
    }

    fn finish(&mut self) {
        self.world.run(Time::MAX, 10_000_000).unwrap();
        assert!(self.world.is_idle(), "something is left");
    }
}

#[test]
fn a_read_takes_what_its_parts_take() {
    let (delay, access) = (Time::from_ns(110), Time::from_ns(60));
    let mut line = line(&[link(3, 8), link(3, 8)], delay, access, RequesterParameters::default());
    let flow = line.flow(line.read(256), Arrivals::Depth(1), 1, 256);
    line.finish();
    let wire = Wire::pcie(3, 8);
    // Request and completion each: the head through the switch, and the tail once.
    let request = wire.time(24) + wire.time(24) + delay;
    let completion = wire.time(20) + wire.time(276) + delay;
    assert_eq!(line.world.flow(flow).latency.mean(), request + access + completion);
}

#[test]
fn writes_fill_a_link() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(4096, Until::Issued), Arrivals::Depth(4), 2_000, 4096);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes() as f64 / stats.ended.seconds();
    let limit = Wire::pcie(3, 8).rate() * 256.0 / 280.0;
    assert!((rate / limit - 1.0).abs() < 1e-3, "{rate} of {limit}");
    assert!(line.world.utilization(line.directions[0]) > 0.999);
    assert_eq!(line.world.direction(line.directions[0]).payload, 2_000 * 4096);
}

#[test]
fn jobs_that_come_faster_than_they_end_are_refused() {
    for (depth, fits) in [(100, true), (101, false)] {
        let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
        line.world.most_jobs = 100;
        line.flow(line.write(4096, Until::Landed), Arrivals::Depth(depth), 1_000, 4096);
        let end = line.world.run(Time::MAX, 1_000_000);
        assert!(fits && end.is_ok() || matches!(end, Err(Stuck::Crowd { jobs: 100, .. })));
    }
}

#[test]
fn reads_are_bounded_by_tags_over_the_round_trip() {
    let access = Time::from_us(2);
    let requester = RequesterParameters { tags: 8, ..RequesterParameters::default() };
    let mut line = line(&[link(3, 16)], Time::ZERO, access, requester);
    let flow = line.flow(line.read(1 << 20), Arrivals::Depth(1), 4, 1 << 20);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes() as f64 / stats.ended.seconds();
    // Little: 8 requests of 512 bytes under way; the round trip is a little more than the access.
    let limit = 8.0 * 512.0 / access.seconds();
    assert!((0.93..=1.0).contains(&(rate / limit)), "{rate} of {limit}");
}

#[test]
fn credits_bound_what_is_under_way() {
    let credits = Credits { packets: [4; 3], data: [4 * 16; 3] };
    let slow = DirectionParameters { credits, credit_return: Time::from_us(1), ..link(3, 8) };
    let mut line = line(&[slow], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(256, Until::Issued), Arrivals::Depth(8), 4_000, 256);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes() as f64 / stats.ended.seconds();
    let trip = Time::from_us(1) + Wire::pcie(3, 8).time(280);
    let limit = 4.0 * 256.0 / trip.seconds();
    assert!((rate / limit - 1.0).abs() < 0.01, "{rate} of {limit}");
    assert!(line.world.direction(line.directions[0]).starved > 900);
}

#[test]
fn waiting_at_a_link_is_that_of_an_m_d_1_queue() {
    let service = Wire::pcie(3, 8).time(280);
    for load in [0.3, 0.6, 0.8] {
        let requester = RequesterParameters { window: u32::MAX, ..RequesterParameters::default() };
        let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, requester);
        let mean = Time::from_ps((service.ps() as f64 / load) as u64);
        let count = 200_000;
        let flow = line.flow(line.write(256, Until::Landed), Arrivals::Poisson(mean), count, 256);
        line.finish();
        let stats = line.world.flow(flow);
        let wait = stats.latency.mean().since(service).ps() as f64;
        // Pollaczek and Khinchine.
        let expected = load * service.ps() as f64 / (2.0 * (1.0 - load));
        assert!((wait / expected - 1.0).abs() < 0.05, "load {load}: {wait} for {expected}");
        // Little's law: arrivals per second times time in the system is how many there are.
        let rate = count as f64 / stats.ended.seconds();
        let present = rate * stats.latency.mean().seconds();
        let expected = load + load * load / (2.0 * (1.0 - load));
        assert!((present / expected - 1.0).abs() < 0.05, "{present} for {expected}");
    }
}

#[test]
fn requests_pass_no_earlier_write() {
    // One credit for writes, slow to come back: the second write waits, and the read behind it too.
    let credits = Credits { packets: [1, 64, 64], data: [64; 3] };
    let slow = DirectionParameters { credits, credit_return: Time::from_us(5), ..link(3, 8) };
    let requester = RequesterParameters { window: 8, ..RequesterParameters::default() };
    let mut line = line(&[slow], Time::ZERO, Time::ZERO, requester);
    let mut script = line.write(256, Until::Begun);
    script.extend(line.write(256, Until::Begun));
    script.extend(line.read(64));
    let flow = line.flow(script, Arrivals::Depth(1), 1, 64);
    line.finish();
    let took = line.world.flow(flow).latency.mean();
    assert!(took > Time::from_us(5), "the read passed a write: {took}");
}

#[test]
fn completions_pass_requests() {
    // No credit for requests comes back in time, yet completions of the other way's reads go.
    let credits = Credits { packets: [64, 1, 64], data: [64; 3] };
    let slow = DirectionParameters { credits, credit_return: Time::from_us(50), ..link(3, 8) };
    let mut line = line(&[slow], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let far = PartId(1);
    let other = line.world.add_requester(far, RequesterParameters::default());
    let stream = line.world.add_stream(other);
    let back = line.world.add_route(far, &[DirectionId(1)]);
    let ours = line.flow(line.read(4096), Arrivals::Depth(1), 1, 4096);
    let script = vec![Step::Read { stream, route: back, address: 0, bytes: 512 }];
    let theirs = line.flow(script, Arrivals::Depth(1), 1, 512);
    line.finish();
    assert!(line.world.flow(ours).latency.mean() > Time::from_us(300));
    assert!(line.world.flow(theirs).latency.mean() < Time::from_us(1));
}

#[test]
fn a_root_splits_reads_that_it_passes_on() {
    let mut line = line(
        &[link(3, 8), link(3, 8)],
        Time::from_ns(100),
        Time::ZERO,
        RequesterParameters { read: 256, ..RequesterParameters::default() },
    );
    line.world.parts[1] =
        Part::new(PartParameters { split: 64, trackers: 3, ..PartParameters::default() });
    let flow = line.flow(line.read(256), Arrivals::Depth(1), 10, 256);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 10);
    let requests = line.directions.iter().map(|direction| line.world.direction(*direction).packets);
    assert_eq!(requests.collect::<Vec<_>>(), [10, 40]);
}

#[test]
fn a_root_combines_completions_of_what_it_has_split() {
    let requester = RequesterParameters { read: 512, ..RequesterParameters::default() };
    let mut line = line(&[link(3, 8), link(3, 8)], Time::from_ns(100), Time::ZERO, requester);
    let part = PartParameters { split: 64, trackers: 3, combine: 256, ..PartParameters::default() };
    line.world.parts[1] = Part::new(part);
    let flow = line.flow(line.read(576), Arrivals::Depth(2), 10, 576);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 10);
    let back = line.directions.iter().map(|direction| line.world.direction(direction.back()));
    let back: Vec<(u64, u64)> = back.map(|stats| (stats.packets, stats.payload)).collect();
    // Nine pieces of 64 bytes come back; two completions of 256 and one of 64 continue.
    assert_eq!(back, [(30, 5760), (90, 5760)]);
}

#[test]
fn a_copy_writes_what_it_has_read() {
    let mut line =
        line(&[link(3, 4)], Time::ZERO, Time::from_ns(100), RequesterParameters::default());
    let step = Step::Copy {
        stream: line.stream,
        from: line.route,
        source: 0,
        to: line.route,
        target: 1 << 20,
        bytes: 10_000,
        until: Until::Landed,
    };
    let flow = line.flow(vec![step], Arrivals::Depth(2), 6, 10_000);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 6);
    assert_eq!(line.world.direction(line.directions[0]).payload, 60_000);
    let back = DirectionId(line.directions[0].0 + 1);
    assert_eq!(line.world.direction(back).payload, 60_000);
}

#[test]
fn jobs_wait_for_their_turn_at_a_resource() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let server = line.world.add_resource(2);
    let inner = line.world.add_script(vec![Step::Use(server, Time::from_us(1))]);
    let script = vec![Step::Each(inner, 6, 0), Step::Mark(0), Step::Wait(Time::from_us(1))];
    let flow = line.flow(script, Arrivals::Depth(1), 1, 1);
    line.finish();
    let stats = line.world.flow(flow);
    assert_eq!((stats.marks[0], stats.latency.mean()), (Time::from_us(3), Time::from_us(4)));
}

#[test]
fn a_way_may_end_where_it_begins() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    line.route = line.world.add_route(PartId(0), &[]);
    let mut script = line.write(4096, Until::Landed);
    script.extend(line.read(4096));
    let flow = line.flow(script, Arrivals::Depth(2), 10, 4096);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 10);
}

#[test]
fn what_can_never_go_on_is_told() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let server = line.world.add_resource(1);
    line.flow(vec![Step::Take(server)], Arrivals::Depth(1), 2, 1);
    assert!(matches!(line.world.run(Time::MAX, 1_000), Err(Stuck::Deadlock { jobs: 1, .. })));
}

/// A root, or what else stands at place `nth` of a line.
fn at(line: &mut Line, nth: usize, parameters: PartParameters) {
    line.world.parts[nth] = Part::new(parameters);
}

fn begins(world: &World, class: PacketClass, direction: DirectionId) -> Vec<Time> {
    let passages = world.trace().iter();
    let passages =
        passages.filter(|passage| (passage.class, passage.direction) == (class, direction));
    passages.map(|passage| passage.begin).collect()
}

#[test]
fn trackers_come_back_however_a_part_is_joined() {
    let inside = GEN3_X8;
    for links in [[link(3, 8), inside, link(3, 8)], [inside, link(3, 8), inside]] {
        let mut line = line(&links, Time::ZERO, Time::ZERO, RequesterParameters::default());
        for nth in 1..3 {
            at(&mut line, nth, PartParameters { split: 64, trackers: 2, ..Default::default() });
        }
        let flow = line.flow(line.read(512), Arrivals::Depth(2), 8, 512);
        line.finish();
        assert_eq!(line.world.flow(flow).jobs, 8);
    }
}

#[test]
fn reads_by_way_of_two_roots_do_not_wait_for_each_other() {
    let links = [link(3, 8); 3];
    let mut line = line(&links, Time::ZERO, Time::ZERO, RequesterParameters::default());
    for nth in 1..3 {
        at(&mut line, nth, PartParameters { split: 64, trackers: 1, ..Default::default() });
    }
    let far = PartId(3);
    let other = line.world.add_requester(far, RequesterParameters::default());
    let stream = line.world.add_stream(other);
    let directions: Vec<DirectionId> =
        line.directions.iter().rev().map(|direction| direction.back()).collect();
    let route = line.world.add_route(far, &directions);
    line.flow(line.read(4096), Arrivals::Depth(1), 1, 4096);
    let theirs = vec![Step::Read { stream, route, address: 0, bytes: 4096 }];
    line.flow(theirs, Arrivals::Depth(1), 1, 4096);
    line.finish();
}

#[test]
fn pieces_of_a_read_pass_no_earlier_write() {
    let credits = Credits { packets: [1, 64, 64], data: [64; 3] };
    let slow = DirectionParameters { credits, credit_return: Time::from_us(5), ..link(3, 8) };
    let requester = RequesterParameters { window: 8, ..RequesterParameters::default() };
    let mut line = line(&[link(3, 8), slow], Time::ZERO, Time::ZERO, requester);
    at(&mut line, 1, PartParameters { split: 64, ..Default::default() });
    line.world.keep_trace();
    let mut script = line.write(256, Until::Begun);
    script.extend(line.write(256, Until::Begun));
    script.extend(line.read(256));
    line.flow(script, Arrivals::Depth(1), 1, 256);
    line.finish();
    let writes = begins(&line.world, PacketClass::Posted, line.directions[1]);
    let pieces = begins(&line.world, PacketClass::NonPosted, line.directions[1]);
    assert_eq!((writes.len(), pieces.len()), (2, 4));
    assert!(writes[1] < pieces[0], "{writes:?} {pieces:?}");
}

#[test]
fn completions_pass_no_earlier_write_inside_a_part() {
    let [delay, walk] = [70, 330].map(Time::from_ns);
    let iommu = IommuParameters { entries: 4, page: 4096, hit: Time::ZERO, walk, walkers: 1 };
    let quick = PartParameters { delay: [delay, delay, Time::ZERO], ..Default::default() };
    let walks = PartParameters { delay: [delay; 3], iommu: Some(iommu), ..Default::default() };
    for (root, walk) in [(quick, Time::ZERO), (walks, walk)] {
        let access = Time::from_us(1);
        let mut line = line(&[link(3, 8); 2], delay, access, RequesterParameters::default());
        at(&mut line, 1, root);
        line.world.keep_trace();
        let far = PartId(2);
        let other = line.world.add_requester(far, RequesterParameters::default());
        let stream = line.world.add_stream(other);
        let directions = [line.directions[1].back(), line.directions[0].back()];
        let route = line.world.add_route(far, &directions);
        line.flow(line.read(64), Arrivals::Depth(1), 1, 64);
        // The answer goes 1,076 ns and a walk after the beginning; the write just before it.
        let begin = Time::from_ns(1_060) + walk;
        let write = Step::Write { stream, route, address: 0, bytes: 64, until: Until::Landed };
        line.flow(vec![Step::Wait(begin), write], Arrivals::Depth(1), 1, 64);
        line.finish();
        let order = |direction| {
            [PacketClass::Posted, PacketClass::Completion]
                .map(|of| begins(&line.world, of, direction)[0])
        };
        assert!(order(directions[0]).is_sorted(), "the write comes first");
        assert!(
            order(directions[1]).is_sorted(),
            "the completion overtook it: {:?}",
            order(directions[1])
        );
    }
}

#[test]
fn nothing_passes_what_is_translated_at_that_very_time() {
    let mut line = line(&[link(3, 8); 2], Time::ZERO, Time::ZERO, RequesterParameters::default());
    // The walk ends just when the read's delay has ended, which was known before the walk began.
    let walk = Wire::pcie(3, 8).time(24 + 64);
    let iommu = IommuParameters { entries: 4, page: 4096, hit: Time::ZERO, walk, walkers: 1 };
    let delay = [Time::from_ns(70); 3];
    at(&mut line, 1, PartParameters { iommu: Some(iommu), delay, ..Default::default() });
    line.world.keep_trace();
    let mut script = line.write(64, Until::Begun);
    script.extend(line.read(64));
    line.flow(script, Arrivals::Depth(1), 1, 64);
    line.finish();
    let [write, read] = [PacketClass::Posted, PacketClass::NonPosted]
        .map(|of| begins(&line.world, of, line.directions[1])[0]);
    assert!(write < read);
}

#[test]
fn credits_that_come_back_early_are_used_at_once() {
    // A root passes a long write on by a slow link, then a short one by a fast one: the short one's
    // room is free first.
    let credits = Credits { packets: [2, 64, 64], data: [64; 3] };
    let first = DirectionParameters { credits, ..link(3, 8) };
    let requester = RequesterParameters { window: 8, ..RequesterParameters::default() };
    let mut line = line(&[first, link(1, 1)], Time::from_ns(100), Time::ZERO, requester);
    line.world.keep_trace();
    let third = line.world.add_part(PartParameters::default());
    let fast = line.world.add_link((PartId(1), third), link(3, 8), link(3, 8));
    let route = line.world.add_route(PartId(0), &[line.directions[0], fast]);
    let mut script = line.write(256, Until::Begun);
    let stream = line.stream;
    let short = |until| Step::Write { stream, route, address: 0, bytes: 64, until };
    script.extend([short(Until::Begun), short(Until::Landed)]);
    line.flow(script, Arrivals::Depth(1), 1, 64);
    line.finish();
    let writes = begins(&line.world, PacketClass::Posted, line.directions[0]);
    assert!(
        writes[2] < Time::from_us(1),
        "the third write waited for the first's room: {writes:?}"
    );
}

#[test]
fn a_packet_is_passed_on_when_all_of_it_is_there_in_time() {
    // Flits frame no single packet: on the second link it is shorter.
    let mut line =
        line(&[link(5, 4), link(6, 4)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(256, Until::Landed), Arrivals::Depth(1), 1, 256);
    line.finish();
    assert_eq!(line.world.flow(flow).latency.mean(), Wire::pcie(5, 4).time(24 + 256));
}

#[test]
fn a_fast_link_between_slow_ones_waits_for_whole_packets() {
    // What comes slowly cannot be sent on quickly before nearly all of it is there.
    let (slow, fast) = (Wire::pcie(1, 1), Wire::pcie(1, 16));
    for (middle, passes) in
        [(slow, slow.time(24) * 2), (fast, slow.time(280) - fast.time(280 - 24))]
    {
        let middle = DirectionParameters { wire: Some(middle), ..GEN3_X8 };
        let links = [link(1, 1), middle, link(1, 1)];
        let mut line = line(&links, Time::ZERO, Time::ZERO, RequesterParameters::default());
        let flow = line.flow(line.write(256, Until::Landed), Arrivals::Depth(1), 1, 256);
        line.finish();
        assert_eq!(line.world.flow(flow).latency.mean(), passes + slow.time(280));
    }
}

#[test]
fn a_faster_link_frees_no_tracker_later() {
    let ended = [1, 2].map(|generation| {
        let links = [link(generation, 16), link(1, 1)];
        let requester = RequesterParameters { read: 256, ..RequesterParameters::default() };
        let mut line = line(&links, Time::ZERO, Time::ZERO, requester);
        at(&mut line, 1, PartParameters { trackers: 1, ..Default::default() });
        let flow = line.flow(line.read(4096), Arrivals::Depth(1), 1, 4096);
        line.finish();
        line.world.flow(flow).ended
    });
    assert!(ended[1] <= ended[0], "{ended:?}");
}

#[test]
fn a_processors_completion_crosses_its_root_from_inside_too() {
    let [request, answer] = [70, 10].map(Time::from_ns);
    let cable = Wire::pcie(3, 8);
    let cases =
        [(vec![GEN3_X8], Time::ZERO), (vec![GEN3_X8, link(3, 8)], cable.time(24) + cable.time(84))];
    for (links, cable) in cases {
        let mut line = line(&links, Time::ZERO, Time::ZERO, RequesterParameters::default());
        at(
            &mut line,
            0,
            PartParameters { delay: [request, request, answer], ..Default::default() },
        );
        let flow = line.flow(line.read(64), Arrivals::Depth(1), 1, 64);
        line.finish();
        assert_eq!(line.world.flow(flow).latency.mean(), request + cable + answer);
    }
}

#[test]
fn what_a_root_combines_is_no_more_than_asked_for() {
    let requester = RequesterParameters { read: 256, ..RequesterParameters::default() };
    let mut line = line(&[link(3, 8); 2], Time::ZERO, Time::ZERO, requester);
    at(&mut line, 1, PartParameters { split: 64, combine: 128, ..PartParameters::default() });
    line.world.keep_trace();
    // Pieces of 63, 64 and 2 bytes.
    let step = Step::Read { stream: line.stream, route: line.route, address: 1281, bytes: 129 };
    line.flow(vec![step], Arrivals::Depth(1), 1, 129);
    line.finish();
    let back = line.directions[0].back();
    let sizes = line.world.trace().iter().filter(|passage| passage.direction == back);
    assert_eq!(sizes.map(|passage| passage.bytes).collect::<Vec<_>>(), [127, 2]);
}

#[test]
fn a_trace_can_begin_at_any_time() {
    let mut line = line(&[link(3, 8); 2], Time::ZERO, Time::ZERO, RequesterParameters::default());
    line.flow(line.write(4096, Until::Landed), Arrivals::Depth(1), 2, 4096);
    line.world.run(Time::from_ns(100), 1_000).unwrap();
    assert!(line.world.trace().is_empty());
    line.world.keep_trace();
    line.finish();
    let last = line.world.trace().iter().filter(|passage| passage.direction == line.directions[1]);
    assert!((16..32).contains(&last.count()));
}

#[test]
fn jobs_that_end_at_once_are_no_more_than_asked_for() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(64, Until::Begun), Arrivals::Depth(4), 6, 64);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 6);
    assert_eq!(line.world.direction(line.directions[0]).packets, 6);
}

#[test]
fn packets_that_no_job_waits_for_are_told_when_they_are_stuck() {
    // There is never room for a whole packet.
    let credits = Credits { packets: [1; 3], data: [15; 3] };
    let narrow = DirectionParameters { credits, ..link(3, 8) };
    let mut line = line(&[narrow], Time::ZERO, Time::ZERO, RequesterParameters::default());
    line.flow(line.write(256, Until::Issued), Arrivals::Depth(1), 1, 256);
    let stuck = line.world.run(Time::MAX, 1_000);
    assert!(matches!(stuck, Err(Stuck::Deadlock { jobs: 0, packets: 1, .. })), "{stuck:?}");
}
