//! What cannot be asked is refused, with a true reason.

use crate::lab::{link, tried, two_hosts};

fn refused(rack: &str, workload: &str) -> String {
    tried(rack, workload).expect_err("it was answered")
}

const WRITE: &str = "[flows.a]\nkind = \"write\"\nfrom = \"near/gpu0\"\nto = \"far\"\n";

#[test]
fn a_loop_through_an_ntb_is_refused() {
    let board = "[fabric.switches.board]\nhost = \"near\"\n";
    let looped =
        two_hosts(false) + board + &link("near", "board", 4, 8) + &link("board", "near-ntb", 4, 8);
    assert!(refused(&looped, WRITE).contains("closes a loop"));
    let outer = "[fabric.switches.one]\n[fabric.switches.other]\n";
    let rack = "name = \"outer\"\n[hosts.near.devices.gpu0]\nkind = \"gpu\"\n[hosts.far]\n\
                [fabric.adapters.near-ntb]\nhost = \"near\"\n[fabric.adapters.far-ntb]\nhost = \"far\"\n";
    let star =
        rack.to_owned() + outer + &link("near-ntb", "one", 4, 8) + &link("far-ntb", "one", 4, 8);
    assert!(tried(&star, WRITE).is_ok());
    let twice = star.clone() + &link("one", "other", 4, 8) + &link("near-ntb", "other", 4, 8);
    assert!(refused(&twice, WRITE).contains("closes a loop"));
    let beside = star + &link("near-ntb", "far-ntb", 4, 8);
    assert!(refused(&beside, WRITE).contains("closes a loop"));
}

#[test]
fn a_drives_flow_on_another_device_is_refused() {
    let workload = "[flows.a]\nkind = \"nvme-read\"\nhost = \"far\"\ndevice = \"near/gpu0\"\n";
    let said = refused(&two_hosts(false), workload);
    assert!(said.contains("`near/gpu0` is a gpu") && said.contains("nvme"), "{said}");
}

#[test]
fn a_part_that_cannot_be_an_end_is_called_what_it_is() {
    let board = "[fabric.switches.board]\nhost = \"near\"\n";
    let rack = two_hosts(false) + board + &link("near", "board", 4, 8);
    for (from, to) in [("near/gpu0", "board"), ("board", "far")] {
        let workload = format!("[flows.a]\nkind = \"write\"\nfrom = \"{from}\"\nto = \"{to}\"\n");
        let said = refused(&rack, &workload);
        assert!(said.contains("`board` is a switch"), "{said}");
    }
}
