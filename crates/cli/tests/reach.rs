//! Who reaches what now, and what the rack file bounds, over a rack of real processes.

mod support;

use rackbus_attach::{Location, SegmentOptions, Session};
use rackbus_control::api::{Lease, LeaseStage};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_pci::vfio_user::Client;
use serde_json::{Value, json};
use support::segments::answered;
use support::{PATIENCE, Rack, open, socket};

const RACK: &str = r#"
name = "lab"

[hosts.alpha]
memory = "64 MiB"
[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.beta]
memory = "64 MiB"

[hosts.gamma]
iommu = false
"#;

/// Who accesses, what it leads to, and where the way ends.
fn ends(range: &Value) -> (&str, &str, &str, &str) {
    let components = range["components"].as_array().unwrap();
    let name = |hop: &'_ Value| hop["name"].as_str().unwrap().len();
    assert!(components.iter().all(|hop| name(hop) > 0));
    let (first, last) = (&components[0]["name"], &components[components.len() - 1]["name"]);
    let text = |value: &'static str| range[value].as_str().unwrap();
    (first.as_str().unwrap(), text("to"), text("host"), last.as_str().unwrap())
}

fn ranges(rack: &Rack, of: &str) -> Vec<Value> {
    rack.json(&["reach", of]).as_array().unwrap().clone()
}

fn wait_for_nothing(rack: &Rack, of: &str) {
    let begun = std::time::Instant::now();
    while !ranges(rack, of).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{of} still reaches memory");
    }
}

fn strictly(rack: &Rack, host: &str) -> Lease {
    let said = rack.json(&["borrow", "alpha/nvme0", "--for", host, "--isolation", "strict"]);
    let lease: Lease = serde_json::from_value(said).unwrap();
    assert_eq!(lease.stage, LeaseStage::Active);
    lease
}

#[test]
fn a_drive_reaches_what_its_driver_maps_by_the_way_that_path_shows() {
    let rack = Rack::up(RACK);
    assert_eq!(
        rack.good(&["reach", "alpha/nvme0"]).trim(),
        "alpha/nvme0 reaches nothing of others now"
    );
    let lease = rack.borrow("alpha/nvme0", "beta");
    let drive = open(&lease);
    let reached = ranges(&rack, "alpha/nvme0");
    assert!(!reached.is_empty());
    let way = &rack.json(&["path", "alpha/nvme0", "beta"])["components"];
    for range in &reached {
        assert_eq!(ends(range), ("alpha/nvme0", "lent", "beta", "beta/memory"));
        assert_eq!((&range["node"], &range["components"]), (&json!("alpha"), way));
        assert_eq!((&range["read"], &range["write"]), (&json!(true), &json!(true)));
    }
    let table = rack.good(&["reach", "alpha/nvme0"]);
    let way = "alpha/nvme0 > alpha/root > alpha/ntb > shm > beta/ntb > beta/root > beta/memory";
    for text in ["memory lent by beta", "read, write", way] {
        assert!(table.contains(text), "{text} is not in\n{table}");
    }
    drop(drive);
    wait_for_nothing(&rack, "alpha/nvme0");
    rack.give_back(&lease);

    // The front of a strict borrower is in its own node, and the lender reaches nothing.
    let lease = strictly(&rack, "beta");
    let drive = open(&lease);
    let reached = ranges(&rack, "alpha/nvme0");
    assert!(!reached.is_empty());
    for range in &reached {
        assert_eq!(ends(range), ("alpha/nvme0@beta", "lent", "beta", "beta/memory"));
        assert_eq!(range["node"], "beta");
    }
    drop(drive);
    wait_for_nothing(&rack, "alpha/nvme0");
    let told = rack.bad(1, &["reach", "alpha/nvme7"]);
    assert!(told.contains("no alpha/nvme7") && told.contains("HOST/DEVICE"), "{told}");
}

/// The front of a strict borrower has the memory mapped that a memory function is, or a drive's persistent region: its owner's
/// node has that on record, also after it was restarted in place.
#[test]
fn memory_that_a_front_elsewhere_has_is_within_reach_by_its_owners_record() {
    let rack = Rack::up(
        r#"
name = "lab"
[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"
[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "1 MiB"
persistent = "1 MiB"
[hosts.beta]
"#,
    );
    for (function, bar) in [("alpha/ram0", 2), ("alpha/nvme0", 4)] {
        let said = rack.json(&["borrow", function, "--for", "beta", "--isolation", "strict"]);
        let lease: Lease = serde_json::from_value(said).unwrap();
        let user = Client::connect(socket(&lease), PATIENCE).unwrap();
        let owners = || {
            let mut ranges = ranges(&rack, "beta");
            ranges.retain(|range| range["node"] == "alpha");
            let leads = |range: &Value| {
                (range["device"].clone(), range["bar"].clone(), range["length"].clone())
            };
            ranges.iter().map(leads).collect::<Vec<_>>()
        };
        let expected = [(json!(function), json!(bar), json!(1 << 20))];
        assert_eq!(owners(), expected, "while {function} is used");
        rack.good(&["restart", "alpha"]);
        assert_eq!(owners(), expected, "after a restart in place with {function} in use");
        drop(user);
        rack.give_back(&lease);
        let begun = std::time::Instant::now();
        while !owners().is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{function} is within reach after its return");
        }
    }
}

#[test]
fn segments_and_interrupts_are_windows_as_well() {
    let rack = Rack::up(RACK);
    let session = |host: &str| {
        Session::open(&Location { run_dir: rack.run_dir(), host: host.to_owned() }).unwrap()
    };
    let (owner, user) = (session("alpha"), session("beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    segment.set_available().unwrap();
    let interrupt = owner.create_interrupt(Some(9), false, false).unwrap();
    assert!(ranges(&rack, "beta").is_empty());
    let remote = answered(|| user.connect(owner.node(), 7, 20_000)).unwrap();
    let sender = answered(|| user.connect_interrupt(owner.node(), 9, 20_000)).unwrap();
    let reached = ranges(&rack, "beta");
    assert_eq!(reached.len(), 2);
    assert_eq!(ends(&reached[0]), ("beta/root", "exported", "alpha", "alpha/memory"));
    assert_eq!(reached[0]["length"], 8192);
    assert_eq!(ends(&reached[1]), ("beta/root", "interrupt", "alpha", "alpha/root"));
    assert_eq!((&reached[1]["number"], &reached[1]["data"]), (&json!(9), &json!(false)));
    let table = rack.good(&["reach", "beta"]);
    for text in ["memory exported by alpha", "8 KiB", "interrupt of alpha", "0x9"] {
        assert!(table.contains(text), "{text} is not in\n{table}");
    }
    drop(remote);
    drop(sender);
    wait_for_nothing(&rack, "beta");
    drop((segment, interrupt));
}

#[test]
fn no_host_lends_more_than_the_rack_file_says_it_has() {
    let rack = Rack::up(RACK);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let much = DriveOptions { depth: 4, data: 65 << 20 };
    Drive::open(socket(&lease), much).map(drop).unwrap_err();
    wait_for_nothing(&rack, "alpha/nvme0");
    let line = "beta has 64 MiB of memory by the rack file";
    assert!(rack.logs().contains(line), "{line} is not in\n{}", rack.logs());
    drop(open(&lease));
    rack.give_back(&lease);

    let lease = strictly(&rack, "gamma");
    support::try_open(&lease).map(drop).unwrap_err();
    let line = "gamma has no IOMMU (iommu = false in the rack file)";
    assert!(rack.logs().contains(line), "{line} is not in\n{}", rack.logs());
}
