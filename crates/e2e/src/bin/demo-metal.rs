#![forbid(unsafe_code)]
//! The demonstration of borrowing on bare metal: three machines with stock kernels stand for hosts, joined by bridges
//! in software (NTBs) and a network. alpha has a drive, which beta and then gamma drive with their own kernel's driver;
//! then alpha's node is killed while gamma writes.
//!
//! The last line is `demo: ok` only when all of it held.
//!
//! Usage: `demo-metal DIR`. It needs root, for the network.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::rack::beside;
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_vm::metal::{BareMetalRack, BareMetalSpec};
use rackbus_vm::{Assets, BareMetalMachine, GuestRelease};

/// How long the load on the drive goes on at most.
const LIMIT: Duration = Duration::from_secs(600);
/// How long what is under way when the lender dies may take to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The network that joins the machines.
const SUBNET: u8 = 18;
/// The hosts, and what they run. alpha has the drive.
const HOSTS: [(&str, GuestRelease); 3] = [
    ("alpha", GuestRelease::Bookworm),
    ("beta", GuestRelease::Bookworm),
    ("gamma", GuestRelease::Trixie),
];
/// Whether the drive has gone.
const GONE: &str = "gone() { [ ! -e /dev/nvme0n1 ]; }\n";
const BORROW: &str = "rackbus borrow alpha/d0 --placement host --for";

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [dir] = &arguments[..] else {
        eprintln!("usage: demo-metal DIR");
        return ExitCode::from(2);
    };
    let begun = Instant::now();
    match demonstrate(dir) {
        Ok(()) => {
            println!("demo: ok, in {:.1} s", begun.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("demo: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Does a step, times it and says so.
fn step<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    let value = run().map_err(|e| CheckFailure(format!("{what}: {e}")))?;
    println!("  {:>9.1} ms  {what}", begun.elapsed().as_secs_f64() * 1000.0);
    Ok(value)
}

fn demonstrate(dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    println!("machines run under {} on this one", Assets::of_user().accel()?);
    let mut rack = step(
        "an NTB for alpha and beta and one for alpha and gamma start; three machines boot",
        || {
            let hosts = HOSTS.map(|(name, guest)| (name.to_owned(), guest)).to_vec();
            let spec = BareMetalSpec {
                program: beside("rackbus")?,
                programs: Vec::new(),
                hosts,
                subnet: SUBNET,
                drive: 64 << 20,
                with_local_drive: false,
            };
            Ok(BareMetalRack::boot(&Assets::of_user(), &spec, dir)?)
        },
    )?;
    let outcome = borrowed(&mut rack);
    if outcome.is_err() {
        for machine in rack.machines() {
            let said = machine.run("tail -n 30 /tmp/*.log; dmesg | tail -n 20");
            eprintln!("{}: {}", machine.name(), said.unwrap_or_else(|error| error.to_string()));
        }
    }
    outcome
}

fn borrowed(rack: &mut BareMetalRack) -> Result<()> {
    step("the control plane starts on alpha; the nodes join it", || Ok(rack.join()?))?;
    // What a kernel says of its boot on a busy machine has nothing to do with the drive.
    for machine in rack.machines() {
        machine.run("dmesg -C")?;
    }
    let beta = rack.machine("beta")?;
    step("beta borrows alpha's drive into its own PCI tree", || borrow(beta))?;
    let sum = step("beta makes a file system and writes 16 MiB", || {
        run(
            beta,
            "mke2fs -q /dev/nvme0n1
            mount /dev/nvme0n1 /mnt/a
            dd if=/dev/urandom of=/mnt/a/data bs=64k count=256 conv=fsync status=none
            sha256sum </mnt/a/data",
        )
    })?;
    let gamma = rack.machine("gamma")?;
    step("gamma asks for the drive, and is refused", || {
        let said = run(gamma, &format!("if {BORROW} gamma 2>&1; then echo not refused; fi"))?;
        ensure!(said.contains("alpha/d0 is lent to beta"), "it is told: {said}");
        say(gamma, &said);
        Ok(())
    })?;
    let beta = rack.machine("beta")?;
    step("beta unmounts it and returns it", || {
        run(beta, "umount /mnt/a; rackbus return 1 >/dev/null; gone").map(drop)
    })?;
    let gamma = rack.machine("gamma")?;
    step("gamma borrows the drive", || borrow(gamma))?;
    step("gamma finds the data", || {
        let found = run(gamma, "mount /dev/nvme0n1 /mnt/a; sha256sum </mnt/a/data")?;
        ensure!(found == sum, "beta wrote {sum}, gamma reads {found}");
        Ok(())
    })?;
    killed(rack)?;
    let gamma = rack.machine("gamma")?;
    step("nothing is left in gamma that hangs, and no lease", || settled(gamma))
}

/// The machine's node borrows the drive; its kernel finds it.
fn borrow(machine: &mut BareMetalMachine) -> Result<()> {
    let host = machine.name().to_owned();
    // The link of an NTB comes up a moment after both of its ends are there.
    let said = run(
        machine,
        &format!(
            "until_ok {BORROW} {host}
            until_ok test -b /dev/nvme0n1
            lsblk -d -o NAME,SIZE,MODEL /dev/nvme0n1
            device=$(readlink -f /sys/class/nvme/nvme0/device)
            echo \"PCI function $(basename $device), driver $(basename $(readlink $device/driver)), Linux $(uname -r)\""
        ),
    )?;
    say(machine, &said);
    Ok(())
}

/// alpha's node is killed while gamma writes to its drive.
fn killed(rack: &mut BareMetalRack) -> Result<()> {
    let load = "while dd if=/dev/zero of=/mnt/a/load bs=64k count=64 oflag=direct conv=notrunc 2>load.log; do
            touch loaded
        done";
    let load = rack.begin("gamma", load, LIMIT)?;
    run(rack.machine("gamma")?, "until_ok test -e loaded")?;
    let watch = format!("{GONE}until gone; do sleep 0.02; done");
    let watch = rack.begin("gamma", &watch, PATIENCE)?;
    let begun = Instant::now();
    rack.kill_node("alpha")?;
    let ended = watch.wait()?;
    let took = begun.elapsed();
    succeeded("gamma", "the drive goes", &ended)?;
    println!(
        "  {:>9.1} ms  alpha's node is killed while gamma writes: gamma's drive is gone",
        ms(took)
    );
    let ended = load.wait()?;
    succeeded("gamma", "the writes end", &ended)?;
    println!("  {:>9.1} ms  gamma's writes have ended", ms(begun.elapsed()));
    let why = "grep -v records load.log; dmesg | grep -i 'rackbus.*lost' | tail -n 2";
    let gamma = rack.machine("gamma")?;
    let said = run(gamma, why)?;
    say(gamma, &said);
    Ok(())
}

/// The file system can be unmounted, the loss is told, and the kernel complains of nothing.
fn settled(gamma: &mut BareMetalMachine) -> Result<()> {
    let said = run(
        gamma,
        "umount /mnt/a
        sync
        none() { [ \"$(rackbus --json leases)\" = '[]' ] && [ \"$(rackbus --json metal list)\" = '[]' ]; }
        until_ok none
        rackbus events --kind loss
        dmesg | { ! grep -e BUG: -e WARNING: -e Call.Trace -e blocked.for; }",
    )?;
    say(gamma, &said);
    Ok(())
}

fn run(machine: &mut BareMetalMachine, script: &str) -> Result<String> {
    Ok(rackbus_vm::metal::run(machine, &format!("{GONE}{script}"))?)
}

fn say(machine: &BareMetalMachine, said: &str) {
    said.lines()
        .for_each(|line| println!("                {}: {}", machine.name(), line.trim_end()));
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
