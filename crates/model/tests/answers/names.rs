//! What holds a flow up is called by its name.

use crate::lab::{flow, link, run, two_hosts};

fn held_up(rack: &str, workload: &str) -> String {
    flow(&run(rack, workload), "a").bottleneck.clone()
}

fn one(more: &str, generation: u8, lanes: u8) -> String {
    let rack = "name = \"one\"\n[hosts.near]\niommu = false\nmemory = \"64 GiB\"\n\
                [hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\n\
                size = \"1 TiB\"\n";
    rack.to_owned() + more + &link("near", "near/gpu0", generation, lanes)
}

const WRITE: &str = "[flows.a]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"64 KiB\"\ndepth = 4\n";
const READ: &str = "[flows.a]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"64 KiB\"\ndepth = 4\n";

#[test]
fn memory() {
    let slow = "[timing.memory]\nbandwidth = \"10 GB/s\"\n";
    assert_eq!(held_up(&one(slow, 5, 16), WRITE), "near/memory: memory bandwidth");
}

#[test]
fn credits() {
    let few = "[timing.link]\nposted_packets = 4\n";
    let named = held_up(&one(few, 5, 16), WRITE);
    assert_eq!(named, "near/gpu0 to near/root: posted credits");
    let few = "[timing.link]\nnonposted_packets = 1\n[timing.device]\ntags = 256\n";
    let named = held_up(&one(few, 5, 16), READ);
    assert_eq!(named, "near/gpu0 to near/root: non-posted credits");
}

#[test]
fn tags() {
    let few = "[timing.device]\ntags = 4\n";
    assert_eq!(held_up(&one(few, 5, 16), READ), "near/gpu0: tags");
}

#[test]
fn walkers() {
    let rack = one("[timing.iommu]\nentries = 4\nwalkers = 1\nwalk = \"500 ns\"\n", 4, 16);
    let rack = rack.replace("iommu = false", "iommu = true");
    let scattered =
        READ.replace("64 KiB", "512 B").replace("depth = 4", "depth = 64") + "random = true\n";
    assert_eq!(held_up(&rack, &scattered), "near/root: page walkers");
}

#[test]
fn root_splitting() {
    let rack = two_hosts(true) + &link("near", "near/gpu0", 4, 16);
    let read = READ.replace("to = \"near\"", "to = \"far\"");
    assert_eq!(held_up(&rack, &read), "near/root: split reads");
}

#[test]
fn packet_rate() {
    let rack = one("[timing.parts.\"near/gpu0\"]\npacket_gap = \"20 ns\"\n", 5, 16);
    assert_eq!(held_up(&rack, WRITE), "near/gpu0: packet rate");
}

#[test]
fn medium() {
    let workload = "[flows.a]\nkind = \"nvme-read\"\nhost = \"near\"\ndevice = \"near/nvme0\"\ndepth = 64\n\
                    units = 2\nservice = \"10 us\"\n";
    assert_eq!(held_up(&one("", 5, 16), workload), "near/nvme0: medium");
}

#[test]
fn wire() {
    assert_eq!(held_up(&one("", 3, 4), WRITE), "near/gpu0 to near/root");
}

#[test]
fn latency_and_demand() {
    let single =
        "[flows.a]\nkind = \"read\"\nfrom = \"near/gpu0\"\nto = \"near\"\nsize = \"64 B\"\n";
    assert_eq!(held_up(&one("", 4, 16), single), "latency");
    let asked = WRITE.replace("depth = 4", "rate = \"1 GB/s\"");
    assert_eq!(held_up(&one("", 4, 16), &asked), "demand");
}

#[test]
fn default_credits_leave_the_fastest_links_to_the_wire() {
    for generation in [5, 6] {
        let ample = "[timing.memory]\nbandwidth = \"1000 GB/s\"\n[timing.device]\nbandwidth = \"1000 GB/s\"\n\
                     tags = 1024\n";
        let rack = one(ample, generation, 16);
        for workload in [WRITE, READ] {
            for depth in ["depth = 4", "depth = 64"] {
                let workload = workload.replace("depth = 4", depth);
                let results = run(&rack, &workload);
                let there = results.links.iter().map(|link| link.there.max(link.back));
                let most = there.fold(0.0, f64::max);
                assert!(most > 0.95, "Gen{generation}: {workload} {most}");
            }
        }
    }
}

/// Eight drives below one switch, whose small reads are at random places: their writes wait behind each other's page walks.
#[test]
fn page_walks_that_hold_writes_up_are_named() {
    let mut rack = "name = \"eight\"\n[hosts.a]\n".to_owned();
    let mut links = link("a", "top", 4, 16);
    let mut workload = "duration = \"500 us\"\n".to_owned();
    for nth in 0..8 {
        rack += &format!("[hosts.a.devices.nvme{nth}]\nkind = \"nvme\"\nsize = \"1 TiB\"\n");
        links += &link("top", &format!("a/nvme{nth}"), 4, 4);
        workload += &format!(
            "[flows.d{nth}]\nkind = \"nvme-read\"\nhost = \"a\"\ndevice = \"a/nvme{nth}\"\ndepth = 128\n\
             random = true\nservice = \"10 us\"\n"
        );
    }
    rack += "[fabric.switches.top]\nhost = \"a\"\n";
    let results = run(&(rack + &links), &workload);
    for flow in &results.flows {
        assert_eq!(flow.bottleneck, "a/root: page walks", "{}", flow.name);
    }
}

/// The first access to a page walks, whatever holds a flow up afterwards.
#[test]
fn a_walk_at_the_beginning_holds_no_writes_up_for_long() {
    let few = "[timing.link]\nposted_packets = 4\n";
    let rack = one(few, 5, 16).replace("iommu = false", "iommu = true");
    let small = WRITE.replace("64 KiB", "4 KiB") + "random = true\nspan = \"64 KiB\"\n";
    assert_eq!(held_up(&rack, &small), "near/gpu0 to near/root: posted credits");
}

/// One GPU's scattered writes wait for page walks all the time. What is written to another goes the other way by the same link.
#[test]
fn what_holds_writes_up_is_not_said_of_those_that_go_the_other_way() {
    let mut rack = "name = \"one\"\n[hosts.near]\nmemory = \"64 GiB\"\n[fabric.switches.top]\nhost = \"near\"\n\
                    [timing.iommu]\nentries = 64\nwalk = \"1 us\"\nwalkers = 1024\n"
        .to_owned();
    rack += &link("near", "top", 4, 16);
    for (above, device) in [("top", "gpu0"), ("top", "gpu1"), ("near", "gpu2")] {
        rack += &format!("[hosts.near.devices.{device}]\nkind = \"gpu\"\n");
        rack += &link(above, &format!("near/{device}"), 4, 16);
    }
    let many = WRITE.replace("64 KiB", "512 B").replace("depth = 4", "depth = 64");
    let single = WRITE.replace("flows.a", "flows.b").replace("gpu0", "gpu2");
    let single = single.replace("to = \"near\"", "to = \"near/gpu1\"");
    let single = single.replace("64 KiB", "64 B").replace("depth = 4", "depth = 1");
    let results = run(&rack, &(many + "random = true\n" + &single + "span = \"4 KiB\"\n"));
    let named = ["a", "b"].map(|name| flow(&results, name).bottleneck.as_str());
    assert_eq!(named, ["near/root: page walks", "latency"]);
}

/// A drive that a file says nothing of is one of flash: a lone read takes 70 to 100 us, and all that it can do is about a
/// million reads a second.
#[test]
fn a_drive_is_one_of_flash_unless_the_file_says_otherwise() {
    let rack = "name = \"one\"\n[hosts.a.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 TiB\"\n"
        .to_owned()
        + &link("a", "a/nvme0", 4, 4);
    let reads = |depth: u32| {
        let text = format!(
            "duration = \"2 ms\"\n[flows.it]\nkind = \"nvme-read\"\nhost = \"a\"\ndevice = \"a/nvme0\"\ndepth = {depth}\n"
        );
        run(&rack, &text).flows.remove(0)
    };
    assert!((70e3..100e3).contains(&reads(1).latency_ns.mean));
    let many = reads(256);
    assert!((0.8e6..1.2e6).contains(&many.jobs_per_second), "{}", many.jobs_per_second);
    assert_eq!(many.bottleneck, "a/nvme0: medium");
}
