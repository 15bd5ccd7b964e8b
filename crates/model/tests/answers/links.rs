//! A part that no link is written for is joined as if by an ample one: its packets wait, take turns and are
//! split like all others.

use crate::lab::{flow, link, rate, run, two_hosts};

fn beside(size: &str, depth: u32) -> String {
    format!(
        "duration = \"1 ms\"\n\
         [flows.read]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"4 KiB\"\ndepth = 32\n\
         [flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"{size}\"\n\
         depth = {depth}\n"
    )
}

fn near(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 0.02
}

#[test]
fn writes_of_a_part_without_a_link_do_not_pile_up_before_its_reads() {
    let rack = two_hosts(false);
    let linked = rack.clone() + &link("near", "near/gpu0", 5, 16);
    for (size, depth) in [("64 KiB", 4), ("1 MiB", 4), ("4 MiB", 16)] {
        let [bare, with] = [&rack, &linked].map(|rack| {
            let results = run(rack, &beside(size, depth));
            [rate(&results, "read"), rate(&results, "write")]
        });
        assert!(with[0] > 1e9, "{with:?}");
        assert!(near(bare[0], with[0]) && near(bare[1], with[1]), "{size}: {bare:?} {with:?}");
    }
}

#[test]
fn a_root_splits_reads_whether_or_not_links_are_written() {
    let workload = "duration = \"500 us\"\n[flows.read]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"far\"\n\
                    size = \"64 KiB\"\ndepth = 4\n";
    let bare = "name = \"bare\"\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.far]\n\
                [fabric.adapters.near-ntb]\nhost = \"near\"\n[fabric.adapters.far-ntb]\nhost = \"far\"\n"
        .to_owned()
        + &link("near-ntb", "far-ntb", 4, 8);
    let parts = [("near", "near/gpu0"), ("near", "near-ntb"), ("far", "far-ntb")];
    let mut rates = Vec::new();
    for mask in 0..8 {
        let written = parts.iter().enumerate().filter(|(nth, _)| mask >> nth & 1 == 1);
        let links: String = written.map(|(_, (a, b))| link(a, b, 5, 16)).collect();
        let results = run(&(bare.clone() + &links), workload);
        rates.push(rate(&results, "read"));
        assert_eq!(results.flows[0].bottleneck, "near/root: split reads");
    }
    assert!(rates.iter().all(|rate| near(*rate, rates[7])), "{rates:?}");
}

/// Two hosts that an NTB joins for their link, and a third one.
#[test]
fn what_hosts_store_to_each_other_goes_through_the_ntb_that_is_for_their_link() {
    let hosts = "name = \"linked\"\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n";
    let ends = "[hosts.alpha.ntb.beta]\naddress = \"0000:05:00.0\"\nuse = \"link\"\n\
                [hosts.beta.ntb.alpha]\naddress = \"0000:06:00.0\"\nuse = \"link\"\n";
    let workload = "[flows.segment]\nkind = \"write\"\nfrom = \"alpha\"\nto = \"beta\"\nsize = \"64 B\"\n\
                    [flows.back]\nkind = \"write\"\nfrom = \"beta\"\nto = \"alpha\"\nsize = \"64 B\"\n\
                    [flows.other]\nkind = \"write\"\nfrom = \"beta\"\nto = \"gamma\"\nsize = \"64 B\"\n";
    let loaded = |rack: &str, a: &str, b: &str| {
        let results = run(rack, workload);
        results.links.iter().any(|link| {
            let is_between =
                link.ends == [a, b].map(str::to_owned) || link.ends == [b, a].map(str::to_owned);
            is_between && link.there + link.back > 0.0
        })
    };
    let linked = hosts.to_owned() + ends;
    assert!(loaded(&linked, "alpha/ntb/beta", "beta/ntb/alpha"));
    assert!(!loaded(&linked, "alpha/ntb", "shm") && loaded(&linked, "gamma/ntb", "shm"));
    assert!(loaded(hosts, "alpha/ntb", "shm"));
    // Each of the two adapters takes as long as the file says.
    let slow = linked.clone() + "[timing.ntb]\nlatency = \"500 ns\"\n";
    let latency = |rack: &str| flow(&run(rack, workload), "segment").latency_ns.p50;
    let more = latency(&slow) - latency(&linked);
    assert!(near(more, 2.0 * (500.0 - 180.0)), "{more} ns");
}

#[test]
fn hops_without_links_show_load_and_are_traced() {
    let rack =
        "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n";
    let workload =
        "[flows.write]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\ndepth = 8\n";
    let results = run(rack, workload);
    for (a, b) in [("near/root", "near/gpu0"), ("near/root", "near/memory")] {
        let link = results.links.iter().find(|link| link.ends == [a, b]).unwrap();
        assert!(link.there + link.back > 0.05, "{link:?}");
    }
    let parsed = rackbus_fabric::rack::Rack::parse("rack.toml", rack).unwrap();
    let timing = rackbus_model::timing::read_for("rack.toml", rack, &parsed).unwrap();
    let flows = rackbus_model::workload::parse("workload.toml", workload).unwrap();
    let steps = rackbus_model::workload::trace(&parsed, &timing, &flows, "write").unwrap().steps;
    let passed = |from: &str, to: &str| steps.iter().any(|step| step.from == from && step.to == to);
    assert!(passed("near/gpu0", "near/root") && passed("near/root", "near/memory"), "{steps:?}");
}

/// Three flows of one device once fell into a step in which the third never had a tag.
#[test]
fn no_flow_of_a_device_starves_another() {
    let rack =
        "name = \"one\"\n[hosts.near]\niommu = false\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n";
    let flow = |name: &str, kind: &str, size: &str, depth: u32| {
        format!(
            "[flows.{name}]\nkind = \"{kind}\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"{size}\"\n\
             depth = {depth}\n"
        )
    };
    let workload = "duration = \"400 us\"\n".to_owned()
        + &flow("a", "write", "2 KiB", 10)
        + &flow("b", "read", "4 KiB", 5)
        + &flow("c", "read", "1 KiB", 9);
    let results = run(rack, &workload);
    let [one, other] = ["b", "c"].map(|name| rate(&results, name));
    assert!(other > one / 4.0, "{one} {other}");
}

/// A stream that had writes once sent none of its reads: half of what the same reads and writes got as two flows.
#[test]
fn reads_and_writes_of_one_stream_take_turns() {
    let rack = two_hosts(false) + "[timing.device]\nwrite_gap = \"20 ns\"\n";
    let (read, write) = (
        "{ read = \"64 B\", from = \"near/gpu0\", to = \"near\" }",
        "{ write = \"64 B\", from = \"near/gpu0\", to = \"near\" }",
    );
    let most = 64.0 / 20e-9;
    for steps in [format!("{read}, {write}"), format!("{write}, {read}")] {
        for depth in [64, 256] {
            let workload = format!(
                "duration = \"200 us\"\n[flows.a]\nkind = \"steps\"\nsize = \"64 B\"\ndepth = {depth}\nsteps = [{steps}]\n"
            );
            let results = run(&rack, &workload);
            let found = rate(&results, "a");
            assert!(found > 0.95 * most, "{steps}, {depth}: {found} of {most}");
            assert_eq!(flow(&results, "a").bottleneck, "near/gpu0: packet rate");
        }
    }
}
