//! A question outside of what has been validated says so in its answer.

use crate::lab::{link, run, shared, two_hosts};

const WRITE: &str = "[flows.a]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"far\"\nsize = \"64 KiB\"\ndepth = 4\n";

/// What is said at both levels, which is the same, of a rack whose payloads are stated.
fn said(rack: &str, workload: &str) -> Vec<String> {
    said_of(&format!("{rack}[timing.device]\nmps = \"256 B\"\n"), workload)
}

/// The same of the rack as it is.
fn said_of(rack: &str, workload: &str) -> Vec<String> {
    let simulated = run(rack, workload).unvalidated;
    assert_eq!(shared(rack, workload).unvalidated, simulated);
    simulated
}

#[test]
fn hosts_that_nobody_measured_are_named() {
    let rack = two_hosts(false);
    assert_eq!(
        said(&rack, WRITE),
        ["sapphire-rapids (far, near): no measurement was of such a host"]
    );
    let measured = rack.replace("iommu = false", "iommu = false\nprofile = \"xeon-e5-v4\"");
    assert!(said(&measured, WRITE).is_empty());
    let mixed = measured.replacen("xeon-e5-v4", "genoa", 1);
    let of = said(&mixed, WRITE);
    assert!(
        of.len() == 1 && of[0].starts_with("genoa (near): measurements were of copies"),
        "{of:?}"
    );
    let own =
        measured.replace("xeon-e5-v4", "mine") + "[timing.profiles.mine]\nlike = \"xeon-e5-v4\"\n";
    let of = said(&own, WRITE);
    assert!(of.len() == 1 && of[0].starts_with("mine (far, near): the rack file's own"), "{of:?}");
}

/// What a file sets anew was measured by nobody, whatever its host's profile.
#[test]
fn hosts_of_which_the_file_sets_values_are_named() {
    let rack = two_hosts(false).replace("iommu = false", "iommu = false\nprofile = \"xeon-e5-v4\"");
    let own = "with values of the rack file's own";
    for (more, hosts) in [
        ("[timing.memory]\nlatency = \"1 us\"\n", "far, near"),
        ("[timing.hosts.far.root]\nlatency = \"1 us\"\n", "far"),
        ("[timing.parts.\"near/root\"]\nlatency = \"1 us\"\n", "near"),
    ] {
        let of = said(&format!("{rack}{more}"), WRITE);
        assert_eq!(of, [format!("xeon-e5-v4 ({hosts}): {own}")]);
    }
    let same = "[timing.profiles.xeon-e5-v4]\nlike = \"xeon-e5-v4\"\nmemory.latency = \"1 us\"\n";
    assert_eq!(said(&format!("{rack}{same}"), WRITE), [format!("xeon-e5-v4 (far, near): {own}")]);
    let unmeasured = two_hosts(false) + "[timing.memory]\nlatency = \"1 us\"\n";
    let expected = format!("sapphire-rapids (far, near): {own}; no measurement was of such a host");
    assert_eq!(said(&unmeasured, WRITE), [expected]);
}

#[test]
fn links_devices_and_flows_that_nobody_measured_are_named() {
    let rack = two_hosts(false).replace("iommu = false", "iommu = false\nprofile = \"xeon-e5-v4\"")
        + "[hosts.near.devices.gpu1]\nkind = \"gpu\"\n[hosts.near.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 GiB\"\n";
    assert!(said(&rack, WRITE).is_empty());
    let flits = rack.clone() + &link("near", "near/gpu0", 6, 16);
    assert_eq!(said(&flits, WRITE), ["Gen6 links: no measurement was of one"]);
    let other = flits.replace("\"near/gpu0\"]\ngeneration = 6", "\"near/gpu1\"]\ngeneration = 6");
    assert!(said(&other, WRITE).is_empty(), "what no flow uses is not of concern");
    // What joins hosts where a file tells of no cables, no planner has between machines.
    let hosts = "name = \"two\"\n[hosts.near]\nprofile = \"xeon-e5-v4\"\niommu = false\n[hosts.near.devices.gpu0]\n\
                 kind = \"gpu\"\n[hosts.far]\nprofile = \"xeon-e5-v4\"\niommu = false\n";
    let of = said(hosts, WRITE);
    assert!(of.len() == 1 && of[0].starts_with("hosts that no cable joins are taken to"), "{of:?}");
    assert!(said(hosts, &WRITE.replace("far", "near")).is_empty());
    for (flow, expected) in [
        (
            "kind = \"all-reduce\"\nmembers = [\"near/gpu0\", \"near/gpu1\"]\nsize = \"1 MiB\"\n",
            "b: no measurement was of an all-reduce",
        ),
        (
            "kind = \"nvme-read\"\nhost = \"far\"\ndevice = \"near/nvme0\"\n",
            "b: of drives one published difference",
        ),
        (
            "kind = \"write\"\nfrom = \"near/gpu1\"\nto = \"far\"\ntenant = \"t\"\n[shaping.\"near/gpu1\".t]\nweight = 2\n",
            "b: no measurement was of a device or switch that shapes",
        ),
    ] {
        let of = said(&rack, &format!("{WRITE}[flows.b]\n{flow}"));
        assert!(of.len() == 1 && of[0].starts_with(expected), "{of:?}");
    }
}

/// Nobody can tell a full link's rate to a tenth who does not know the machine's MPS.
#[test]
fn payloads_that_the_file_does_not_state_are_named_where_links_are_full() {
    let rack = two_hosts(false);
    let is_said = |rack: &str, workload: &str| {
        let of = said_of(rack, workload);
        of.iter().any(|what| what.starts_with("a: packets are taken to have payloads of 256 B"))
    };
    assert!(is_said(&rack, WRITE));
    for stated in [128, 256] {
        assert!(!is_said(&format!("{rack}[timing.device]\nmps = \"{stated} B\"\n"), WRITE));
    }
    let little = WRITE.replace("depth = 4", "rate = \"1 GB/s\"");
    assert!(!is_said(&rack, &little), "a link that is not full");
}

/// Of writes that miss in an IOMMU's cache, the rows of P4 are half within 15 %.
#[test]
fn writes_to_more_pages_than_an_iommu_keeps_are_named() {
    let rack = |iommu: bool| {
        let to = format!("iommu = {iommu}\nprofile = \"xeon-e5-v4\"");
        two_hosts(false).replace("iommu = false", &to)
    };
    let of = said(&rack(true), WRITE);
    assert!(of.len() == 1 && of[0].starts_with("a: more pages are written than"), "{of:?}");
    assert!(said(&rack(false), WRITE).is_empty());
    // A cache of 64 translations has room for as many pages of 4 KiB, of all queues together.
    let few = format!("{WRITE}span = \"256 KiB\"\n");
    assert!(said(&rack(true), &few).is_empty());
    assert_eq!(said(&rack(true), &format!("{few}queues = 2\n")).len(), 1);
    assert!(said(&rack(true), &WRITE.replace("\"write\"", "\"read\"")).is_empty());
}

/// Of all sending to all through a switch, the rows of G2 and G3 are a quarter to nearly a half below the model.
#[test]
fn switches_whose_ports_all_send_to_all_are_named() {
    let gpus: String =
        (0..8).map(|nth| format!("[hosts.near.devices.gpu{nth}]\nkind = \"gpu\"\n")).collect();
    let links: String = (0..8).map(|nth| link("board", &format!("near/gpu{nth}"), 5, 16)).collect();
    let rack = format!(
        "name = \"one\"\n[hosts.near]\niommu = false\nprofile = \"xeon-e5-v4\"\n{gpus}[fabric.switches.board]\nhost = \"near\"\n"
    ) + &link("near", "board", 5, 16)
        + &links;
    let flows = |pairs: &[(usize, usize)], more: &str| -> String {
        let flow = |(from, to): &(usize, usize)| {
            format!(
                "[flows.f{from}{to}]\nkind = \"write\"\nfrom = \"near/gpu{from}\"\nto = \"near/gpu{to}\"\nsize = \"64 KiB\"\n{more}\n"
            )
        };
        "duration = \"200 us\"\n".to_owned() + &pairs.iter().map(flow).collect::<String>()
    };
    let all: Vec<(usize, usize)> =
        (0..16).map(|nth| (nth / 4, nth % 4)).filter(|(a, b)| a != b).collect();
    let of = said(&rack, &flows(&all, "depth = 4"));
    assert!(of.len() == 1 && of[0].starts_with("board: several ports send to several"), "{of:?}");
    // Two exchanges with nothing in common are simulated apart, and cross in the same switch all the same.
    let two = [(0, 2), (0, 3), (1, 2), (1, 3), (4, 6), (4, 7), (5, 6), (5, 7)];
    let of = said(&rack, &flows(&two, "depth = 4"));
    assert!(of.len() == 1 && of[0].starts_with("board: several ports send to several"), "{of:?}");
    // Little traffic meets nobody, and pairs do not cross.
    assert!(said(&rack, &flows(&all, "rate = \"1 GB/s\"")).is_empty());
    assert!(said(&rack, &flows(&[(0, 1), (1, 0), (2, 3), (3, 2)], "depth = 4")).is_empty());
}
