//! A flow is held up by what its packets use: by no direction of a link, and no class of packets, that others use alone.

use crate::lab::{flow, link, run, two_hosts};

fn rack(more: &str) -> String {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n\
                [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.near.devices.gpu1]\nkind = \"gpu\"\n\
                [fabric.switches.top]\nhost = \"near\"\n";
    let links = link("near", "top", 3, 4) + &link("top", "near/gpu0", 3, 16);
    rack.to_owned() + more + &links + &link("top", "near/gpu1", 3, 16)
}

fn lone(kind: &str) -> String {
    format!("[flows.it]\nkind = \"{kind}\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"64 B\"\n")
}

fn others(kind: &str) -> String {
    format!(
        "[flows.others]\nkind = \"{kind}\"\nfrom = \"near/gpu1\"\nto = \"near\"\nsize = \"64 KiB\"\ndepth = 8\n"
    )
}

fn named(rack: &str, workload: &str) -> [String; 2] {
    let results = run(rack, workload);
    ["it", "others"].map(|name| flow(&results, name).bottleneck.clone())
}

#[test]
fn small_writes_do_not_wait_for_the_wire_of_others_completions() {
    let named = named(&rack(""), &(lone("write") + &others("read")));
    assert_eq!(named, ["latency", "near/root to top"]);
}

#[test]
fn what_shares_the_wire_that_is_full_waits_for_it() {
    // Requests go where others' writes go, and completions where others' completions go.
    assert_eq!(named(&rack(""), &(lone("read") + &others("write"))), ["top to near/root"; 2]);
    assert_eq!(named(&rack(""), &(lone("read") + &others("read"))), ["near/root to top"; 2]);
    assert_eq!(named(&rack(""), &(lone("write") + &others("write"))), ["top to near/root"; 2]);
}

#[test]
fn writes_do_not_wait_for_the_credits_of_others_reads() {
    let few = "[timing.link]\nnonposted_packets = 1\n";
    let named = named(&rack(few), &(lone("write") + &others("read").replace("gpu1", "gpu0")));
    assert_eq!(named[0], "latency");
    assert!(named[1].ends_with("non-posted credits"), "{}", named[1]);
}

/// A job of several steps uses what each of them does.
#[test]
fn steps_wait_for_what_any_of_them_uses() {
    let steps = "[flows.it]\nkind = \"steps\"\nsize = \"64 B\"\nsteps = [{ together = [[{ write = \"64 B\", from = \
                 \"near/gpu0\", to = \"near\" }], [{ read = \"64 B\", from = \"near/gpu0\", to = \"near\" }]] }]\n";
    assert_eq!(named(&rack(""), &(steps.to_owned() + &others("read")))[0], "near/root to top");
}

/// A write was once said to wait for the trackers of a root on its way, which reads alone take.
#[test]
fn writes_do_not_wait_for_the_trackers_of_others_reads() {
    let few = two_hosts(false)
        + "[hosts.far.devices.gpu1]\nkind = \"gpu\"\n[timing.root]\nsplit = \"64 B\"\ntrackers = 4\n";
    let it = "[flows.it]\nkind = \"write\"\nfrom = \"far\"\nto = \"near/gpu0\"\nsize = \"64 B\"\n";
    let reads = "[flows.others]\nkind = \"read\"\nfrom = \"far/gpu1\"\nto = \"near/gpu0\"\nsize = \"64 KiB\"\ndepth = 8\n";
    let named = named(&few, &(it.to_owned() + reads));
    assert_eq!(named[0], "latency");
    assert!(named[1].ends_with("split reads"), "{}", named[1]);
}

/// So it was with tags of the device that writes, and with those, the engine and the packet rate of the one that is written to.
#[test]
fn a_flow_waits_for_no_tags_but_those_of_its_own_reads() {
    let one = rack("[timing.parts.\"near/gpu0\"]\ntags = 1\n");
    let own = named(&one, &(lone("write") + &others("read").replace("gpu1", "gpu0")));
    assert_eq!(own, ["latency", "near/gpu0: tags"]);
    let into = |kind: &str| {
        lone(kind).replace("near/gpu0", "near/gpu1").replace("\"near\"", "\"near/gpu0\"")
    };
    for kind in ["write", "read"] {
        let named = named(&one, &(into(kind) + &others("read").replace("gpu1", "gpu0")));
        assert_eq!(named, ["latency", "near/gpu0: tags"], "{kind}");
    }
    let slow = rack("[timing.parts.\"near/gpu0\"]\nengine = \"1 GB/s\"\n");
    let named = named(&slow, &(into("write") + &others("write").replace("gpu1", "gpu0")));
    assert_eq!(named, ["latency", "near/gpu0: engine"]);
}
