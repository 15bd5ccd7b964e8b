//! Peer-to-peer in a stock guest: a program there tells its drive to read into BARs of other functions.

use std::time::Duration;

use rackbus_e2e::{Guest, RackProcesses, Result, ensure, programs};
use serde_json::Value;

use crate::RackWithGuests;

/// Where the program runs.
const HOST: &str = "gamma";
/// All functions of the guest, which it is started with.
const COMPOSITION: &str = "peers";
const DRIVE: &str = "alpha/nvme2";
/// At the drive's lender, at another one, and at the borrower itself, and the memory buffer of another drive; with their
/// sizes, by which the guest tells them apart.
const TARGETS: [(&str, u64); 4] = [
    ("alpha/ram0", 64 << 20),
    ("beta/ram0", 16 << 20),
    ("gamma/ram0", 32 << 20),
    ("beta/nvme1", 8 << 20),
];
/// Bytes that the program moves each way.
const MOVED: u64 = 8192;

/// What the control plane knows of the drive, when it is as wanted.
fn drive_when(rack: &RackProcesses, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    rack.wait(what, Duration::from_secs(60), |rack| rack.device(DRIVE).ok().filter(&wanted))
}

/// How the composition is, and how many functions are borrowed of it.
fn composition(rack: &RackProcesses) -> Result<(String, usize)> {
    let all = rack.json(&["composition", "list"])?;
    let ours = all.as_array().into_iter().flatten().find(|it| it["name"] == COMPOSITION);
    let state = ours.and_then(|it| it["state"].as_str()).unwrap_or("not there").to_owned();
    Ok((state, ours.and_then(|it| it["leases"].as_array()).map_or(0, Vec::len)))
}

/// A guest is started with all functions of a composition by one command, and returns them all when it is stopped. In
/// between, a stock kernel programs the BARs; a program drives a drive by itself and names addresses in them. Each
/// target is elsewhere. When a target decodes nothing or is unplugged, the drive does not reach it.
pub fn to_each_other(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let disk = programs::qemu_arguments(&programs::disk(rack, &["peer"])?);
    let mut more = vec!["--composition", COMPOSITION, "--"];
    more.extend(disk.iter().map(String::as_str));
    let mut guest = Guest::start_with(rack, "peers", HOST, "trixie", &[], &more)?;
    let (state, borrowed) = composition(rack)?;
    let whole = state == "borrowed" && borrowed == TARGETS.len() + 1;
    ensure!(whole, "the composition is {state}, with {borrowed} functions");
    let again = ["vm", "run", "--host", HOST, "--composition", COMPOSITION, "--detach"];
    let refused = rack.refused(&again)?;
    ensure!(refused.contains("is borrowed already"), "another VM has a part of it: {refused}");
    guest.booted()?;
    guest.run(&format!(
        "{} && echo 1 >/proc/sys/vm/nr_hugepages && \
         for at in $(dirname $(grep -l 0x010802 /sys/bus/pci/devices/*/class)); do \
         basename $at >$at/driver/unbind; [ -e $at/resource2 ] || basename $at >/tmp/drive; done",
        programs::unpack("/dev/vdb")
    ))?;
    for (nth, (target, size)) in (0..).zip(TARGETS) {
        let find = format!(
            "for at in $(dirname /sys/bus/pci/devices/*/resource2); do \
             [ $(stat -c %s $at/resource2) = {size} ] && place=$(basename $at); done; \
             echo 1 >/sys/bus/pci/devices/$place/enable; echo $place"
        );
        let place = guest.run(&find)?;
        let place = place.trim();
        let peer = format!("/tmp/programs/run peer $(cat /tmp/drive) {place} 2");
        // The program ends with a drive that does not master the bus.
        let moved = format!("{peer} move && setpci -s $(cat /tmp/drive) COMMAND=6");
        println!("{}", guest.run(&moved)?.trim());
        // Once more into each of those before, see below.
        let (from, to) = (MOVED * (nth + 1), MOVED * (2 * nth + 1));
        let counted = |drive: &Value| {
            let report = &drive["report"];
            report["peer_bytes_read"] == from && report["peer_bytes_written"] == to
        };
        drive_when(rack, &format!("what was moved to {target} is counted"), counted)?;
        let reached = rack.json(&["reach", DRIVE])?;
        let bar = |range: &&Value| range["to"] == "bar" && range["device"] == target;
        let reached = reached.as_array().into_iter().flatten().filter(bar).count();
        ensure!(reached == 1, "{reached} windows lead to {target}");
        let refused = format!("{peer} refused");
        guest.run(&format!(
            "setpci -s {place} COMMAND=0 && {refused} && setpci -s {place} COMMAND=2 && \
             ! {refused} && setpci -s {place} COMMAND=0"
        ))?;
    }
    guest.stop(rack)?;
    let (state, left) = composition(rack)?;
    ensure!(state == "free" && left == 0, "the composition is {state}, {left} functions are left");
    Ok(())
}
