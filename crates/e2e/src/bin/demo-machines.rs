#![forbid(unsafe_code)]
//! The demonstration with machines: three hosts and a control plane, each in namespaces of its own and joined by
//! a network alone; a drive of one of them, and unmodified guests on the others.
//!
//! A guest on beta writes to alpha's drive over the network; alpha's cable is pulled while it does, and plugged
//! in again, and the guest sees nothing of it. Then it is pulled for longer; what was acknowledged is found by a guest on gamma. The last line is `demo: ok` only when all of it
//! held. Needs root.
//!
//! Usage: `demo-machines RACK_FILE`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rackbus_e2e::machines::MachineTestbed;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure};
use rackbus_vm::Assets;

/// Does a step, times it and says so.
fn step<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    let value = run().map_err(|error| CheckFailure(format!("{what}: {error}")))?;
    println!("  {:>9.1} ms  {what}", begun.elapsed().as_secs_f64() * 1000.0);
    Ok(value)
}

fn main() -> ExitCode {
    let Some(file) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: demo-machines RACK_FILE");
        return ExitCode::from(2);
    };
    let begun = Instant::now();
    match demonstrate(&file) {
        Ok(()) => {
            println!("\n{:.1} s", begun.elapsed().as_secs_f64());
            println!("demo: ok");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("demo: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate(file: &Path) -> Result<()> {
    println!("guests run under {} on this machine", Assets::of_user().accel()?);
    println!("machines of a control plane, alpha, beta and gamma ({}):", file.display());
    let testbed = step("they come up, and join by tokens", || MachineTestbed::start(file))?;
    let (beta, gamma) = (testbed.on("beta")?, testbed.on("gamma")?);

    println!("a guest on beta borrows alpha/nvme0 (Debian 12, unmodified):");
    let mut guest = step("borrowed over the network, VM started", || {
        Guest::start(&beta, "writer", "beta", "bookworm", &["alpha/nvme0"])
    })?;
    step("the guest boots and finds the drive", || {
        guest.booted()?;
        guest.wait_drives(1)
    })?;
    let sum = step("it makes an ext4 file system and writes 32 MiB", || {
        guest.run(
            "mkfs.ext4 -q /dev/nvme0n1 && mount /dev/nvme0n1 /mnt/a && \
             dd if=/dev/urandom of=/mnt/a/data bs=1M count=32 status=none && sync && \
             sha256sum </mnt/a/data | cut -d' ' -f1",
        )
    })?;
    println!("                SHA-256 {sum}");
    let refusal = step("gamma is refused the drive", || {
        gamma.refused(&["borrow", "alpha/nvme0", "--for", "gamma"])
    })?;
    ensure!(refusal.contains("beta"), "the refusal does not name the holder: {refusal}");

    brief_loss(&testbed, &beta, &mut guest, &sum)?;
    long_loss(&testbed, &beta, guest)?;
    read_elsewhere(&gamma, &sum)?;
    let left = beta.json(&["leases"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "leases are left over: {left}");
    step("the machines end", || {
        drop(testbed);
        Ok(())
    })
}

/// The link to the drive's machine is lost while the guest writes, and the guest notices a pause.
fn brief_loss(
    testbed: &MachineTestbed,
    beta: &RackProcesses,
    guest: &mut Guest,
    sum: &str,
) -> Result<()> {
    println!("alpha's cable is pulled while the guest writes, and plugged in again:");
    let copying =
        "dd if=/mnt/a/data of=/mnt/a/copy bs=64k oflag=direct conv=fsync 2>/dev/null && echo whole";
    let load = step("it copies the data", || guest.begin(copying, Duration::from_secs(60)))?;
    step("cut off until the rack says that the guest's drive waits for its link", || {
        testbed.run(&["cut", "alpha"])?;
        beta.wait("the link is lost", Duration::from_secs(60), |rack| {
            let device = rack.device("alpha/nvme0").ok()?;
            let trouble = device["front"]["trouble"].as_str()?;
            trouble.contains("the link to alpha is lost").then_some(())
        })
    })?;
    step("the cable is back: the guest's copy goes on, and ends without an error", || {
        testbed.run(&["mend", "alpha"])?;
        let output = load.wait()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(said.contains("whole"), "the copy failed: {said}");
        Ok(())
    })?;
    let copied = step("it reads the copy from the drive", || {
        guest.run("echo 3 >/proc/sys/vm/drop_caches; sha256sum </mnt/a/copy | cut -d' ' -f1")
    })?;
    ensure!(copied == sum, "the copy differs: SHA-256 {copied}, not {sum}");
    Ok(())
}

/// The link is lost for longer than a front waits: the guest loses its drive, and the lender offers it again.
fn long_loss(testbed: &MachineTestbed, beta: &RackProcesses, mut guest: Guest) -> Result<()> {
    println!("alpha's cable is pulled for longer than a front waits, while the guest writes:");
    let writing = "dd if=/dev/zero of=/mnt/a/more bs=64k count=100000 oflag=direct conv=fsync 2>&1; echo over";
    let load = step("it writes on", || guest.begin(writing, Duration::from_secs(60)))?;
    step("cut off: the guest's drive fails, and nothing hangs", || {
        testbed.run(&["cut", "alpha"])?;
        load.wait()?;
        guest.wait_drives(0)
    })?;
    step("the guest goes on without, and is stopped", || {
        guest.run("dmesg | tail -n 1")?;
        guest.stop(beta)
    })?;
    step("the cable is back: alpha offers its drive again", || {
        testbed.run(&["mend", "alpha"])?;
        beta.wait("the drive is offered", Duration::from_secs(30), |rack| {
            let device = rack.device("alpha/nvme0").ok()?;
            (device["state"] == "offered").then_some(())
        })
    })?;
    Ok(())
}

/// A guest of another machine finds what the first one wrote.
fn read_elsewhere(gamma: &RackProcesses, sum: &str) -> Result<()> {
    println!("a guest on gamma borrows alpha/nvme0 (Debian 13, unmodified):");
    let mut guest = step("borrowed over the network, VM started", || {
        Guest::start(gamma, "reader", "gamma", "trixie", &["alpha/nvme0"])
    })?;
    step("the guest boots and finds the drive", || {
        guest.booted()?;
        guest.wait_drives(1)
    })?;
    let found = step("it mounts the file system and reads the data", || {
        guest.run("mount /dev/nvme0n1 /mnt/a && sha256sum </mnt/a/data | cut -d' ' -f1")
    })?;
    ensure!(found == sum, "the data changed: SHA-256 {found}, was {sum}");
    println!("                SHA-256 {found}: the same");
    step("it unmounts; VM stopped, drive given back", || {
        guest.run("umount /mnt/a")?;
        guest.stop(gamma)
    })?;
    Ok(())
}
