//! The engine against closed forms.

use super::*;
use crate::wire::Wire;

const GEN3_X8: LaneParameters = LaneParameters {
    wire: None,
    propagation: Time::ZERO,
    credits: Credits::ENDLESS,
    credit_return: Time::ZERO,
    dllp_bytes: 0,
};

fn link(generation: u8, lanes: u8) -> LaneParameters {
    LaneParameters { wire: Some(Wire::pcie(generation, lanes)), ..GEN3_X8 }
}

/// A device and a memory, and a way over `links` with switches in between.
struct Line {
    world: World,
    stream: StreamId,
    way: WayId,
    lanes: Vec<LaneId>,
}

fn line(
    links: &[LaneParameters],
    stay: Time,
    access: Time,
    requester: RequesterParameters,
) -> Line {
    let mut world = World::new(1);
    let device = world.add_part(PartParameters::default());
    let mut last = device;
    let mut lanes = Vec::new();
    for (nth, link) in links.iter().enumerate() {
        let end = nth + 1 == links.len();
        let part = PartParameters {
            stay: if end { [Time::ZERO; 3] } else { [stay; 3] },
            access: if end { access } else { Time::ZERO },
            ..PartParameters::default()
        };
        let part = world.add_part(part);
        lanes.push(world.add_link((last, part), *link, *link));
        last = part;
    }
    let requester = world.add_requester(device, requester);
    let stream = world.add_stream(requester);
    let way = world.add_way(device, &lanes);
    Line { world, stream, way, lanes }
}

impl Line {
    fn flow(&mut self, script: Script, arrivals: Arrivals, count: u64, bytes: u64) -> FlowId {
        let script = self.world.add_script(script);
        let addresses = Addresses::sequential(0, bytes.next_multiple_of(64));
        let flow = Flow { script, arrivals, count, bytes, begin: Time::ZERO, addresses };
        self.world.add_flow(flow)
    }

    fn write(&self, bytes: u64, until: Until) -> Script {
        vec![Step::Write { stream: self.stream, way: self.way, address: 0, bytes, until }]
    }

    fn read(&self, bytes: u64) -> Script {
        vec![Step::Read { stream: self.stream, way: self.way, address: 0, bytes }]
    }

    fn finish(&mut self) {
        self.world.run(Time::MAX, 10_000_000).unwrap();
        assert!(self.world.is_idle(), "something is left");
    }
}

#[test]
fn a_read_takes_what_its_parts_take() {
    let (stay, access) = (Time::from_ns(110), Time::from_ns(60));
    let mut line = line(&[link(3, 8), link(3, 8)], stay, access, RequesterParameters::default());
    let flow = line.flow(line.read(256), Arrivals::Depth(1), 1, 256);
    line.finish();
    let wire = Wire::pcie(3, 8);
    // Request and completion each: the head through the switch, and the tail once.
    let request = wire.time(24) + wire.time(24) + stay;
    let completion = wire.time(20) + wire.time(276) + stay;
    assert_eq!(line.world.flow(flow).latency.mean(), request + access + completion);
}

#[test]
fn writes_fill_a_link() {
    let mut line = line(&[link(3, 8)], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(4096, Until::Issued), Arrivals::Depth(4), 2_000, 4096);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes as f64 / stats.ended.seconds();
    let limit = Wire::pcie(3, 8).rate() * 256.0 / 280.0;
    assert!((rate / limit - 1.0).abs() < 1e-3, "{rate} of {limit}");
    assert!(line.world.utilization(line.lanes[0]) > 0.999);
    assert_eq!(line.world.lane(line.lanes[0]).payload, 2_000 * 4096);
}

#[test]
fn reads_are_bounded_by_tags_over_the_round_trip() {
    let access = Time::from_us(2);
    let requester = RequesterParameters { tags: 8, ..RequesterParameters::default() };
    let mut line = line(&[link(3, 16)], Time::ZERO, access, requester);
    let flow = line.flow(line.read(1 << 20), Arrivals::Depth(1), 4, 1 << 20);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes as f64 / stats.ended.seconds();
    // Little: 8 requests of 512 bytes under way; the round trip is a little more than the access.
    let limit = 8.0 * 512.0 / access.seconds();
    assert!((0.93..=1.0).contains(&(rate / limit)), "{rate} of {limit}");
}

#[test]
fn credits_bound_what_is_under_way() {
    let credits = Credits { packets: [4; 3], data: [4 * 16; 3] };
    let slow = LaneParameters { credits, credit_return: Time::from_us(1), ..link(3, 8) };
    let mut line = line(&[slow], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let flow = line.flow(line.write(256, Until::Issued), Arrivals::Depth(8), 4_000, 256);
    line.finish();
    let stats = line.world.flow(flow);
    let rate = stats.bytes as f64 / stats.ended.seconds();
    let trip = Time::from_us(1) + Wire::pcie(3, 8).time(280);
    let limit = 4.0 * 256.0 / trip.seconds();
    assert!((rate / limit - 1.0).abs() < 0.01, "{rate} of {limit}");
    assert!(line.world.lane(line.lanes[0]).starved > 900);
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
    let slow = LaneParameters { credits, credit_return: Time::from_us(5), ..link(3, 8) };
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
    let slow = LaneParameters { credits, credit_return: Time::from_us(50), ..link(3, 8) };
    let mut line = line(&[slow], Time::ZERO, Time::ZERO, RequesterParameters::default());
    let far = PartId(1);
    let other = line.world.add_requester(far, RequesterParameters::default());
    let stream = line.world.add_stream(other);
    let back = line.world.add_way(far, &[LaneId(1)]);
    let ours = line.flow(line.read(4096), Arrivals::Depth(1), 1, 4096);
    let script = vec![Step::Read { stream, way: back, address: 0, bytes: 512 }];
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
    let requests = line.lanes.iter().map(|lane| line.world.lane(*lane).packets);
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
    let back = line.lanes.iter().map(|lane| line.world.lane(lane.back()));
    let back: Vec<(u64, u64)> = back.map(|stats| (stats.packets, stats.payload)).collect();
    // Nine pieces of 64 bytes come back; two completions of 256 and one of 64 go on.
    assert_eq!(back, [(30, 5760), (90, 5760)]);
}

#[test]
fn a_copy_writes_what_it_has_read() {
    let mut line =
        line(&[link(3, 4)], Time::ZERO, Time::from_ns(100), RequesterParameters::default());
    let step = Step::Copy {
        stream: line.stream,
        from: line.way,
        source: 0,
        to: line.way,
        target: 1 << 20,
        bytes: 10_000,
        until: Until::Landed,
    };
    let flow = line.flow(vec![step], Arrivals::Depth(2), 6, 10_000);
    line.finish();
    assert_eq!(line.world.flow(flow).jobs, 6);
    assert_eq!(line.world.lane(line.lanes[0]).payload, 60_000);
    let back = LaneId(line.lanes[0].0 + 1);
    assert_eq!(line.world.lane(back).payload, 60_000);
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
    line.way = line.world.add_way(PartId(0), &[]);
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
