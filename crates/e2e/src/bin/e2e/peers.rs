//! Peer-to-peer in a stock guest: a program there tells its drive to read into BARs of other functions.

use std::fs::{File, copy};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rackbus_e2e::{Guest, Rack, Result, ensure};
use serde_json::Value;

use crate::World;

/// The program's source.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/peer.c");
/// Where the program runs.
const HOST: &str = "gamma";
const DRIVE: &str = "alpha/nvme2";
/// At the drive's lender, at another one, and at the borrower itself; with their sizes, by which the guest
/// tells them apart.
const TARGETS: [(&str, u64); 3] =
    [("alpha/ram0", 64 << 20), ("beta/ram0", 16 << 20), ("gamma/ram0", 32 << 20)];
/// Bytes that the program moves each way.
const MOVED: u64 = 8192;

/// The program as a disk: nothing of this host's libraries is in the guest.
fn program(rack: &Rack) -> Result<PathBuf> {
    let (built, disk) = (rack.run_dir().join("peer"), rack.run_dir().join("peer.img"));
    let compiled =
        Command::new("cc").args(["-static", "-O2", "-o"]).arg(&built).arg(SOURCE).status()?;
    ensure!(compiled.success(), "{SOURCE} does not compile: {compiled}");
    copy(&built, &disk)?;
    let file = File::options().write(true).open(&disk)?;
    file.set_len(file.metadata()?.len().next_multiple_of(512))?;
    Ok(disk)
}

/// What the control plane knows of the drive, when it is as wanted.
fn drive_when(rack: &Rack, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    rack.wait(what, Duration::from_secs(20), |rack| rack.device(DRIVE).ok().filter(&wanted))
}

/// A stock kernel programs the BARs; a program drives a drive by itself and names addresses in them. Each
/// target is elsewhere. When a target decodes nothing or is unplugged, the drive does not reach it.
pub fn to_each_other(world: &mut World) -> Result<()> {
    let rack = &world.rack;
    let disk = program(rack)?.display().to_string();
    let disk =
        format!("driver=raw,node-name=peer,read-only=on,file.driver=file,file.filename={disk}");
    let mut functions = vec![DRIVE];
    functions.extend(TARGETS.map(|(name, _)| name));
    // Behind the guest's other disk, which it looks for as the first one.
    let more = ["--", "-blockdev", &disk, "-device", "virtio-blk-pci,drive=peer,addr=0x1e"];
    let mut guest = Guest::start_with(rack, "peers", HOST, "trixie", &functions, &more)?;
    guest.booted()?;
    guest.run(
        "dd if=/dev/vdb of=/tmp/peer bs=64k status=none && chmod +x /tmp/peer && \
         echo 1 >/proc/sys/vm/nr_hugepages && \
         drive=$(dirname $(grep -l 0x010802 /sys/bus/pci/devices/*/class)) && \
         basename $drive >$drive/driver/unbind && ln -sfn $drive /tmp/drive && \
         setpci -s $(basename $drive) COMMAND=6",
    )?;
    for (nth, (target, size)) in (0..).zip(TARGETS) {
        let find = format!(
            "for at in $(dirname $(grep -l 0x726d /sys/bus/pci/devices/*/device)); do \
             [ $(stat -c %s $at/resource2) = {size} ] && ln -sfn $at /tmp/target; done; \
             echo 1 >/tmp/target/enable; basename $(readlink /tmp/target)"
        );
        let place = guest.run(&find)?;
        println!("{}", guest.run("/tmp/peer /tmp/drive /tmp/target 2 move")?.trim());
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
        let refused = "/tmp/peer /tmp/drive /tmp/target 2 refused";
        let place = place.trim();
        guest.run(&format!(
            "setpci -s {place} COMMAND=0 && {refused} && setpci -s {place} COMMAND=2 && \
             ! {refused} && setpci -s {place} COMMAND=0"
        ))?;
    }
    guest.stop(rack)
}
