//! Flows that end: by the clock or by their number of jobs. What they get is what moves in the time that it takes.

use rackbus_model::random::RandomSequence;
use rackbus_model::wire::Wire;

use crate::lab::{flow, link, rate, run};

/// A device at its host over Gen3 x8, with 512 B in a packet.
fn rack() -> String {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n\
                [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[timing.device]\nmps = \"512 B\"\n";
    rack.to_owned() + &link("near", "near/gpu0", 3, 8)
}

/// What payload goes through the wire.
fn full() -> f64 {
    Wire::pcie(3, 8).rate() * 512.0 / 536.0
}

const WRITE: &str = "[flows.it]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\n";

/// Once twenty times the wire, as bytes counted to the end of the simulation, and time to that of the flow.
#[test]
fn jobs_that_last_longer_than_their_flow_are_no_faster_than_the_wire() {
    let text = format!(
        "duration = \"4 ms\"\nwarmup = \"0 ns\"\n{WRITE}size = \"64 MiB\"\ndepth = 2\nend = \"200 us\"\n"
    );
    let results = run(&rack(), &text);
    let it = flow(&results, "it");
    assert_eq!(it.jobs, 0);
    assert!((it.bytes_per_second / full() - 1.0).abs() < 0.01, "{}", it.bytes_per_second);
    // Its parts are those of the time before its end, and as fast as each other.
    assert!(it.confidence.unwrap() < 0.01, "{:?}", it.confidence);
    let doubt = it.doubt.as_deref().unwrap_or_default();
    assert!(doubt.starts_with("no job ended"), "{doubt}");
}

/// Nothing moves before the end of so short a flow.
#[test]
fn a_flow_of_which_all_moves_after_its_end_is_not_told_to_have_moved_nothing() {
    let text = format!(
        "duration = \"1 ms\"\nwarmup = \"0 ns\"\n{WRITE}size = \"64 MiB\"\nend = \"100 ns\"\n"
    );
    let results = run(&rack(), &text);
    let it = flow(&results, "it");
    assert!((it.bytes_per_second / full() - 1.0).abs() < 0.01, "{}", it.bytes_per_second);
    let doubt = it.doubt.as_deref().unwrap_or_default();
    assert!(doubt.starts_with("no job ended"), "{doubt}");
}

#[test]
fn no_flow_is_faster_than_the_wire_whenever_it_begins_and_ends() {
    let mut random = RandomSequence::new(1);
    for nth in 0..150 {
        let mut below = |end: u64| random.below(end);
        let size = 4096 << below(15);
        let (begin, lasts) = (below(500), 1 + below(500));
        let (warmup, depth, apart) = (below(begin + lasts), 1 + below(4), 10 + below(100));
        let moves = match nth % 4 {
            0 => format!("{WRITE}size = {size}\ndepth = {depth}\n"),
            1 => format!("{WRITE}size = {size}\nevery = \"{apart} us\"\n"),
            2 => format!("{WRITE}size = {size}\ndepth = {depth}\n").replace("write", "read"),
            // Jobs that are over before their bytes have moved.
            _ => format!(
                "[flows.it]\nkind = \"steps\"\nsize = {size}\nevery = \"{apart} us\"\nsteps = [{{ write = \"{size} B\", \
                 from = \"near/gpu0\", to = \"near\", until = \"begun\" }}]\n"
            ),
        };
        let text = format!(
            "duration = \"2 ms\"\nwarmup = \"{warmup} us\"\n{moves}begin = \"{begin} us\"\nend = \"{} us\"\n",
            begin + lasts
        );
        let rate = rate(&run(&rack(), &text), "it");
        // What was under way when measuring began comes, too: at most what the link and its buffers hold.
        let under_way = 16e3 / (lasts as f64 * 1e-6);
        assert!(rate < full() * 1.001 + under_way, "{rate} of {}: {text}", full());
    }
}

/// Once `latency`, as it asked for no more at the end.
#[test]
fn a_flow_that_got_all_its_jobs_is_held_up_by_nothing() {
    for life in ["count = 20\n", "end = \"200 us\"\n", "count = 20\nend = \"900 us\"\n"] {
        for arrivals in ["every = \"10 us\"\n", "poisson = \"10 us\"\n", "rate = \"400 MB/s\"\n"] {
            let text = format!("duration = \"1 ms\"\nwarmup = \"0 ns\"\n{WRITE}{arrivals}{life}");
            let results = run(&rack(), &text);
            let it = flow(&results, "it");
            let said = (it.bottleneck.as_str(), &it.doubt);
            assert_eq!(said, ("demand", &None), "{arrivals}{life}");
        }
    }
}

/// What asks for more than the wire is held up by it, whether it ends or not.
#[test]
fn a_flow_that_waits_for_its_jobs_is_not_told_to_get_all() {
    for life in ["count = 20\n", "end = \"200 us\"\n"] {
        let text = format!(
            "duration = \"250 us\"\nwarmup = \"0 ns\"\n{WRITE}size = \"256 KiB\"\nevery = \"10 us\"\n{life}"
        );
        let results = run(&rack(), &text);
        assert_eq!(flow(&results, "it").bottleneck, "near/gpu0 to near/root", "{life}");
    }
}
