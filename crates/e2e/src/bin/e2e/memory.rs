//! Memory that is plugged into a guest while it has a borrowed drive, and unplugged again.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure, programs};
use serde_json::Value;

use crate::RackWithGuests;
use crate::guests::remove;

/// What is plugged in, as `rackbus` takes it, and in bytes.
const PLUGGED: (&str, u64) = ("256M", 256 << 20);
/// How long it takes to bring a program into a guest.
const LIMIT: Duration = Duration::from_secs(60);
/// The disk's serial number, by which the guest finds it.
const DISK: &str = "direct-io";

/// A drive reads into, and writes from, memory that its guest got after it: with the controller at the lender in one
/// guest, at the borrower in the other one.
pub fn followed(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    refused(rack)?;
    plugged(rack, old, &["alpha/nvme0"])?;
    plugged(rack, new, &["alpha/nvme1", "--isolation", "strict"])
}

/// What cannot be plugged in is refused, and nothing is changed.
fn refused(rack: &RackProcesses) -> Result<()> {
    for (size, said) in [("100M", "multiples of 128M"), ("2G", "--max-memory 1024M")] {
        let error = rack.refused(&["vm", "add", "old", "--memory", size])?;
        ensure!(error.contains(said), "it is not said what to do: {error}");
    }
    let error = rack.refused(&["vm", "remove", "old", "memory0"])?;
    ensure!(error.contains("no plugged memory memory0"), "there is such memory: {error}");
    Ok(())
}

fn plugged(rack: &RackProcesses, guest: &mut Guest, function: &[&str]) -> Result<()> {
    let name = guest.name().to_owned();
    install(rack, guest)?;
    rack.json(&[&["vm", "add", &name], function].concat())?;
    guest.wait_drives(1)?;
    // Memory that is movable is what programs get first, and what can be unplugged.
    let setting = "/sys/devices/system/memory/auto_online_blocks";
    let before = guest.run(&format!("cat {setting} && echo online_movable >{setting}"))?;
    // What was plugged in once comes back: QEMU's translator must not take it for what was there before.
    for _ in 0..2 {
        round(rack, guest, function[0])?;
    }
    guest.run(&format!("rm -rf /tmp/programs && echo {before} >{setting}"))?;
    guest.run("dd if=$(ls -d /dev/nvme?n1) of=/dev/null bs=1M count=8 iflag=direct status=none")?;
    remove(rack, guest, &name, function[0])
}

/// Memory is plugged in, read and written by the drive, and unplugged.
fn round(rack: &RackProcesses, guest: &mut Guest, function: &str) -> Result<()> {
    let name = &guest.name().to_owned();
    let added = rack.json(&["vm", "add", name, "--memory", PLUGGED.0])?;
    let id = added["plugged"]["id"].as_str().unwrap_or_default().to_owned();
    let address = added["plugged"]["address"].as_u64();
    let address = address.ok_or_else(|| CheckFailure(format!("no address in {added}")))?;
    ensure!(added["vm"]["memory_mib"] == 768, "not 256 MiB more than 512: {added}");
    online(guest, address)?;
    // Programs are read anew, into the new memory.
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    ensure!(lent(rack, function, address)?, "{function} does not reach the new memory");
    let script =
        format!("/tmp/programs/run direct-io $(ls -d /dev/nvme?n1) {address} {}", PLUGGED.1);
    println!("            {name}: {}", guest.run(&script)?.trim());

    rack.json(&["vm", "remove", name, &id])?;
    ensure!(!lent(rack, function, address)?, "{function} reaches what is unplugged");
    // The program tells pages that are there from others: now it has none there.
    guest.run(&format!("! {script} 2>/tmp/said && grep 'a page is at' /tmp/said")).map(drop)
}

/// Brings the program into the guest.
fn install(rack: &RackProcesses, guest: &mut Guest) -> Result<()> {
    let disk = programs::disk(rack, &["direct-io"])?;
    let unpack = programs::unpack("/dev/$(basename $disk)");
    let script = format!(
        "for try in $(seq 400); do for disk in /sys/block/vd*; do\n\
         [ \"$(cat $disk/serial 2>/dev/null)\" = {DISK} ] && {{ {unpack}; exit; }}\n\
         done; sleep 0.05; done; exit 1"
    );
    let output = guest.vm().with_disk(&disk, DISK, |vm| vm.exec(&script, LIMIT))?;
    succeeded(guest.name(), &script, &output).map(drop)
}

/// Waits until the guest's kernel uses the memory from `address` on.
fn online(guest: &mut Guest, address: u64) -> Result<()> {
    let script = format!(
        "first=$(({address} / 0x$(cat /sys/devices/system/memory/block_size_bytes)))\n\
         last=$((({address} + {}) / 0x$(cat /sys/devices/system/memory/block_size_bytes) - 1))\n\
         for try in $(seq 400); do\n\
         cat $(seq -f '/sys/devices/system/memory/memory%.0f/state' $first $last) >/tmp/state 2>&1\n\
         grep -qv '^online$' /tmp/state || exit 0\n\
         sleep 0.05; done; cat /tmp/state; dmesg | tail; exit 1",
        PLUGGED.1
    );
    guest.run(&script).map(drop)
}

/// Whether a range that is lent to the function begins at this address of its guest's.
fn lent(rack: &RackProcesses, function: &str, address: u64) -> Result<bool> {
    let reached = rack.json(&["reach", function])?;
    let is_there = |range: &Value| {
        range["to"] == "lent" && range["at"] == address && range["length"] == PLUGGED.1
    };
    Ok(reached.as_array().is_some_and(|ranges| ranges.iter().any(is_there)))
}
