//! What a root counts of the reads that it passes on, where other roots on their way cut them otherwise.

use rackbus_fabric::rack::Rack;
use rackbus_model::assembly::{Assembly, End};
use rackbus_model::engine::{Addresses, Arrivals, JobFlow, Step};
use rackbus_model::time::Time;
use rackbus_model::timing::{HostTiming, Timing};

/// Reads of 512 bytes by a GPU of another host's, by both roots, and how long they take: `near` and `far` are what the
/// roots split, and how many reads each passes on at a time.
fn read([near, far]: [(u32, u32); 2]) -> Time {
    let link =
        |a, b| format!("[[fabric.links]]\nends = [\"{a}\", \"{b}\"]\ngeneration = 4\nlanes = 8\n");
    let hosts = ["a", "b"].map(|host| {
        format!("[hosts.{host}.devices.gpu]\nkind = \"gpu\"\n[fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n")
    });
    let text = format!("name = \"two\"\n{}{}", hosts.concat(), link("a", "a-ntb"))
        + &link("a-ntb", "b-ntb")
        + &link("b-ntb", "b");
    let rack = Rack::parse("rack.toml", &text).unwrap();
    let mut timing = Timing::default();
    for (name, (split, trackers)) in [("a", near), ("b", far)] {
        let mut host = HostTiming::default();
        (host.root.split, host.root.trackers, host.root.combine) = (split, trackers, 0);
        timing.hosts.insert(name.to_owned(), host);
    }
    let mut it = Assembly::new(&rack, &timing, 1).unwrap();
    let [from, to] = ["a/gpu", "b/gpu"].map(|name| it.end(name).unwrap());
    assert!(matches!(from, End::Device(_)));
    let (stream, route) = (it.source(from).unwrap().stream, it.route(from, to).unwrap());
    let script = it.world.add_script(vec![Step::Read { stream, route, address: 0, bytes: 512 }]);
    it.world.add_flow(JobFlow {
        count: 64,
        addresses: Addresses::sequential(0, 1 << 16),
        ..JobFlow::new(script, Arrivals::Depth(16), 512)
    });
    it.world.run(Time::MAX, 1_000_000).unwrap();
    assert!(it.world.is_idle(), "something is left, or more than was taken has come back");
    it.world.now()
}

#[test]
fn a_root_gets_back_as_many_trackers_as_it_took() {
    for near in [0, 64, 128, 512] {
        for far in [0, 64, 256] {
            read([(near, 128), (far, 128)]);
        }
    }
}

/// One read at a time is slower than sixteen, by as much as a round trip is long, however the far root splits it.
#[test]
fn trackers_of_a_root_that_splits_nothing_bound_reads_that_a_later_root_splits() {
    for far in [0, 64] {
        let [one, many] = [1, 128].map(|trackers| read([(0, trackers), (far, 128)]));
        assert!(one > many * 4, "{one} one by one, {many} together");
    }
}
