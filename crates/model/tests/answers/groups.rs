//! Several that work together: GPUs that add up what they have in a ring, hosts behind several switches.

use crate::lab::{flow, link, rate, run, tried};

/// A host with GPUs below one switch, of which the last has links of its own width.
fn gpus(count: u64, last: u8) -> String {
    let mut rack =
        "name = \"gpus\"\n[hosts.box]\niommu = false\n[fabric.switches.board]\nhost = \"box\"\n"
            .to_owned();
    for nth in 0..count {
        rack += &format!("[hosts.box.devices.gpu{nth}]\nkind = \"gpu\"\n");
    }
    rack += &link("box", "board", 4, 16);
    for nth in 0..count {
        let lanes = if nth + 1 == count { last } else { 16 };
        rack += &link("board", &format!("box/gpu{nth}"), 4, lanes);
    }
    rack
}

fn all_reduce(count: u64, size: &str, more: &str) -> String {
    let members: Vec<String> = (0..count).map(|nth| format!("\"box/gpu{nth}\"")).collect();
    format!(
        "warmup = \"0 ns\"\nduration = \"2 s\"\n[flows.ring]\nkind = \"all-reduce\"\nmembers = [{}]\nsize = \"{size}\"\n\
         count = 1\n{more}",
        members.join(", ")
    )
}

#[test]
fn a_ring_takes_what_its_slowest_link_takes_for_all_steps() {
    let wire = rackbus_model::wire::Wire::pcie(4, 16).rate() * 256.0 / 280.0;
    for (count, last, share) in [(2, 16, 1.0), (4, 16, 1.0), (8, 16, 1.0), (4, 8, 0.5)] {
        let results = run(&gpus(count, last), &all_reduce(count, "64 MiB", ""));
        let took = flow(&results, "ring").latency_ns.mean;
        let chunk = f64::from(64 << 20) / count as f64;
        let expected = 2.0 * (count - 1) as f64 * chunk / (wire * share) * 1e9;
        // Addresses below 4 GiB have shorter headers, and steps have latencies.
        assert!((took / expected - 1.0).abs() < 0.03, "{count} {last}: {took} of {expected}");
    }
}

#[test]
fn what_members_do_between_steps_is_added() {
    let took = |more: &str| {
        let results = run(&gpus(4, 16), &all_reduce(4, "4 MiB", more));
        flow(&results, "ring").latency_ns.mean
    };
    let bare = took("");
    // Three of six steps add up a mebibyte each.
    let added = took("reduce = \"100 GB/s\"\n") - bare;
    assert!((added / (3.0 * 10_485.76) - 1.0).abs() < 0.05, "{added}");
    let stepped = took("step = \"10 us\"\n") - bare;
    assert!((stepped / 60_000.0 - 1.0).abs() < 0.05, "{stepped}");
}

#[test]
fn a_ring_between_hosts_is_bound_by_the_links_between_them() {
    let mut rack = "name = \"two\"\n".to_owned();
    for host in ["near", "far"] {
        rack += &format!(
            "[hosts.{host}]\niommu = false\n[hosts.{host}.devices.a]\nkind = \"gpu\"\n\
             [hosts.{host}.devices.b]\nkind = \"gpu\"\n[fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n\
             [fabric.switches.{host}-board]\nhost = \"{host}\"\n"
        );
    }
    for host in ["near", "far"] {
        let board = format!("{host}-board");
        rack += &link(host, &board, 4, 16);
        rack += &link(&board, &format!("{host}-ntb"), 4, 8);
        rack += &link(&board, &format!("{host}/a"), 4, 16);
        rack += &link(&board, &format!("{host}/b"), 4, 16);
    }
    rack += &link("near-ntb", "far-ntb", 4, 8);
    let workload = "warmup = \"0 ns\"\nduration = \"1 s\"\n[flows.ring]\nkind = \"all-reduce\"\n\
                    members = [\"near/a\", \"near/b\", \"far/a\", \"far/b\"]\nsize = \"16 MiB\"\ncount = 2\n";
    let results = run(&rack, workload);
    let wire = rackbus_model::wire::Wire::pcie(4, 8).rate() * 256.0 / 280.0;
    let expected = 6.0 * f64::from(4 << 20) / wire * 1e9;
    let took = flow(&results, "ring").latency_ns.mean;
    assert!((took / expected - 1.0).abs() < 0.04, "{took} of {expected}");
    let refused = tried(&rack, &workload.replace("far/b", "far")).unwrap_err();
    assert!(refused.contains("`far` is no device"), "{refused}");
}

/// Hosts behind two switches, which one link joins; `host-a0` and so on.
fn two_switches(lanes: u8) -> String {
    let mut rack = "name = \"row\"\n[fabric.switches.a]\n[fabric.switches.b]\n".to_owned();
    let mut links = link("a", "b", 3, lanes);
    for switch in ["a", "b"] {
        for nth in 0..2 {
            let host = format!("{switch}{nth}");
            rack += &format!(
                "[hosts.{host}]\niommu = false\nmemory = \"4 GiB\"\n[hosts.{host}.devices.nic]\nkind = \"nic\"\n\
                 [fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n"
            );
            links += &link(&host, &format!("{host}-ntb"), 3, 8);
            links += &link(&format!("{host}-ntb"), switch, 3, 8);
        }
    }
    rack + &links
}

#[test]
fn hosts_behind_several_switches_share_the_link_between_them() {
    let flow_of = |name: &str, from: &str, to: &str| {
        format!(
            "[flows.{name}]\nkind = \"write\"\nfrom = \"{from}/nic\"\nto = \"{to}\"\nsize = \"64 KiB\"\ndepth = 8\n"
        )
    };
    let across = flow_of("one", "a0", "b0") + &flow_of("other", "a1", "b1");
    let workload = format!("duration = \"2 ms\"\n{across}");
    let results = run(&two_switches(8), &workload);
    let full = rackbus_model::wire::Wire::pcie(3, 8).rate() * 256.0 / 280.0;
    for name in ["one", "other"] {
        let share = rate(&results, name) / full;
        assert!((share - 0.5).abs() < 0.03, "{name}: {share}");
        assert_eq!(flow(&results, name).bottleneck, "a to b");
    }
    // From its device: its root, two NTBs and two switches, and the far root.
    assert_eq!(flow(&results, "one").hops, 6);
    let wide = run(&two_switches(16), &across);
    assert!(["one", "other"].iter().all(|name| rate(&wide, name) > 0.97 * full));
    // What closes a ring of switches is refused: PCIe is a tree.
    let ring =
        two_switches(8) + "[fabric.switches.c]\n" + &link("b", "c", 3, 8) + &link("c", "a", 3, 8);
    let refused = tried(&ring, &workload).unwrap_err();
    assert!(refused.contains("closes a loop"), "{refused}");
}
