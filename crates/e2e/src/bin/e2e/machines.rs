//! Stock guests on two machines: with functions of a third one, its network card and its memory, and with memory that
//! their programs share.

use std::path::Path;
use std::time::Duration;

use rackbus_e2e::machines::MachineTestbed;
use rackbus_e2e::{Guest, RackProcesses, Result, ensure};

use crate::nics::{FIRST, SECOND, connect, plug, unplug};
use crate::segments::{self, ExchangeSide, between};

/// The rack file of these machines.
const RACK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/machines.toml");

/// Where the memory is in the guest, and how a program there loads and stores words of it: each is a question to the
/// lender. `word PLACE [VALUE]`.
const MEMORY: &str = "
    set -e
    memory() { dirname $(grep -ls 0x726d /sys/bus/pci/devices/*/device) 2>/dev/null; }
    for try in $(seq 400); do [ -n \"$(memory)\" ] && break; sleep 0.05; done
    echo 1 >$(memory)/enable
    base=$(sed -n 3p $(memory)/resource | cut -d' ' -f1)
    word() { busybox devmem $((base + $1)) 64 $2; }
";
/// Words that are stored, and bytes from one to the next.
const WORDS: u32 = 64;
const APART: u32 = 16376;

/// Guests that borrow from a third machine reach each other and pass words on, also while its cable is pulled for a moment; and
/// what one's programs store, the other's find.
pub fn functions(_dir: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("           left out: machines in namespaces take root");
        return Ok(());
    }
    let testbed = MachineTestbed::start(Path::new(RACK))?;
    let (beta, gamma) = (testbed.on("beta")?, testbed.on("gamma")?);
    // Both boot at the same time. Each is the host of its machine, so its VM is named as that.
    let mut old = Guest::start_with(&beta, "beta", "beta", "bookworm", &[], &["--fabric=beta"])?;
    let mut new = Guest::start_with(&gamma, "gamma", "gamma", "trixie", &[], &["--fabric=gamma"])?;
    old.booted()?;
    new.booted()?;

    plug(&beta, &mut old, "alpha/nic0.vf1", FIRST)?;
    plug(&gamma, &mut new, "alpha/nic0.vf2", SECOND)?;
    for (from, to) in [(&mut old, SECOND), (&mut new, FIRST)] {
        from.run(&format!("ping -c 2 -W 10 {to} && ping -c 2 -W 10 -s 60000 {to}"))?;
    }
    connect(&mut old, &mut new, SECOND)?;
    connect(&mut new, &mut old, FIRST)?;
    cut_for_a_moment(&testbed, &beta, &mut old)?;
    connect(&mut old, &mut new, SECOND)?;
    unplug(&beta, &mut old, "alpha/nic0.vf1")?;
    unplug(&gamma, &mut new, "alpha/nic0.vf2")?;

    memory(&beta, &mut old, &gamma, &mut new)?;
    shared(&beta, &mut old, &gamma, &mut new)?;
    old.stop(&beta)?;
    new.stop(&gamma)?;
    let left = beta.json(&["leases"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "leases are left over: {left}");
    Ok(())
}

/// The lender's cable is pulled while a guest pings through its card: what comes later arrives.
fn cut_for_a_moment(
    testbed: &MachineTestbed,
    beta: &RackProcesses,
    guest: &mut Guest,
) -> Result<()> {
    let pinging =
        guest.begin(&format!("ping -c 60 -i 0.2 {SECOND}; true"), Duration::from_secs(60))?;
    testbed.run(&["cut", "alpha"])?;
    beta.wait("the link is lost", Duration::from_secs(60), |rack| {
        let device = rack.device("alpha/nic0.vf1").ok()?;
        device["front"]["trouble"].as_str()?.contains("the link to alpha is lost").then_some(())
    })?;
    testbed.run(&["mend", "alpha"])?;
    let output = pinging.wait()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let came = said.lines().filter(|line| line.contains("bytes from")).count();
    ensure!(came >= 10, "of 60 packets {came} were answered: {said}");
    Ok(())
}

/// Words that a guest on one machine stored, one on the other finds at the lender.
fn memory(
    beta: &RackProcesses,
    old: &mut Guest,
    gamma: &RackProcesses,
    new: &mut Guest,
) -> Result<()> {
    let places = format!("$(seq 0 {APART} {})", APART * (WORDS - 1));
    old.release();
    beta.json(&["vm", "add", old.name(), "alpha/ram0"])?;
    let first = old.run(&format!(
        "{MEMORY} for place in {places}; do word $place $((place * 7919 + 1)); done
         for place in {places}; do word $place; done"
    ))?;
    ensure!(first.lines().count() == WORDS as usize, "{WORDS} words were stored: {first}");
    let expected = |nth: u32| u64::from(nth * APART) * 7919 + 1;
    let values = first.lines().map(|line| {
        u64::from_str_radix(line.trim().trim_start_matches("0x"), 16).unwrap_or_default()
    });
    for (nth, value) in (0..).zip(values) {
        ensure!(value == expected(nth), "word {nth} is {value:#x}, not {:#x}", expected(nth));
    }
    old.release();
    beta.json(&["vm", "remove", old.name(), "alpha/ram0"])?;
    new.release();
    gamma.json(&["vm", "add", new.name(), "alpha/ram0"])?;
    let second = new.run(&format!("{MEMORY} for place in {places}; do word $place; done"))?;
    new.release();
    gamma.json(&["vm", "remove", new.name(), "alpha/ram0"])?;
    ensure!(first == second, "stored {first}, found {second}");
    Ok(())
}

/// The library's conformance tests of two programs, and its tools, each between programs of both guests.
fn shared(
    beta: &RackProcesses,
    old: &mut Guest,
    gamma: &RackProcesses,
    new: &mut Guest,
) -> Result<()> {
    for (rack, guest) in [(beta, &mut *old), (gamma, &mut *new)] {
        let folder = segments::installed(rack)?.display().to_string();
        guest.release();
        rack.json(&["guest", "install", guest.name(), "--from", &folder])?;
    }
    segments::conformance_between_machines(beta, old, new)?;
    for (tool, more) in [
        ("scipp", "-loops 50 -size 64"),
        ("scibench2", "-loops 10 -size 64"),
        ("intr_bench", "-loops 20"),
        ("intr_bench", "-loops 20 -data 64"),
        ("dma_bench", "-loops 3"),
    ] {
        between(ExchangeSide::Guest(old), ExchangeSide::Guest(new), tool, more, "")?;
    }
    Ok(())
}
