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
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::metal::{Bridge, Memory};
use rackbus_e2e::{Failure, Result, ensure, programs};
use rackbus_vm::{Assets, Guest, Machine, MachineSpec, NetworkCable, SharedNetwork, VmIommu};

/// What the scripts have in common. The programs bring their own libraries: what they were linked with.
const PRELUDE: &str = r#"
    set -e
    cd /tmp
    export XDG_STATE_HOME=/tmp/state
    rackbus() { /mnt/files/run rackbus "$@"; }
    until_ok() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ $n -lt 600 ] || return 1; sleep 0.05; done; }
    at() { basename $(dirname $(grep -l $1 /sys/bus/pci/devices/*/class)); }
    gone() { [ ! -e /dev/nvme0n1 ]; }
"#;

/// How long a host's daemon runs at most.
const LIMIT: Duration = Duration::from_secs(600);
/// How long what is under way when the lender dies may take to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The network that joins the machines.
const SUBNET: u8 = 18;
/// alpha has the drive. All of them by name, with the kernels they run.
const ALPHA: (&str, Guest) = ("alpha", Guest::Bookworm);
const BETA: (&str, Guest) = ("beta", Guest::Bookworm);
const GAMMA: (&str, Guest) = ("gamma", Guest::Trixie);
/// Machines that are translated miss heartbeats when this one is busy.
const MODULE: &str = "rackbus silence_ms=2000";
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
    let value = run().map_err(|e| Failure(format!("{what}: {e}")))?;
    println!("  {:>9.1} ms  {what}", begun.elapsed().as_secs_f64() * 1000.0);
    Ok(value)
}

/// The machines, and what joins them.
struct Hosts {
    alpha: Machine,
    beta: Machine,
    gamma: Machine,
    /// Where alpha is on the network.
    address: String,
    _bridges: [Bridge; 2],
    _switch: SharedNetwork,
}

fn demonstrate(dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    println!("machines run under {} on this one", Assets::of_user().accel()?);
    let mut hosts = step(
        "an NTB for alpha and beta and one for alpha and gamma start; three machines boot",
        || Hosts::start(dir),
    )?;
    let outcome = borrowed(&mut hosts);
    if outcome.is_err() {
        for machine in [&mut hosts.alpha, &mut hosts.beta, &mut hosts.gamma] {
            let said = machine.run("tail -n 30 /tmp/*.log; dmesg | tail -n 20");
            eprintln!("{}: {}", machine.name(), said.unwrap_or_else(|error| error.to_string()));
        }
    }
    outcome
}

fn borrowed(hosts: &mut Hosts) -> Result<()> {
    step("the control plane starts on alpha; the nodes join it", || hosts.join())?;
    let Hosts { alpha, beta, gamma, .. } = hosts;
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
    step("gamma asks for the drive, and is refused", || {
        let said = run(gamma, &format!("if {BORROW} gamma 2>&1; then echo not refused; fi"))?;
        ensure!(said.contains("alpha/d0 is lent to beta"), "it is told: {said}");
        say(gamma, &said);
        Ok(())
    })?;
    step("beta unmounts it and returns it", || {
        run(beta, "umount /mnt/a; rackbus return 1 >/dev/null; gone").map(drop)
    })?;
    step("gamma borrows the drive", || borrow(gamma))?;
    step("gamma finds the data", || {
        let found = run(gamma, "mount /dev/nvme0n1 /mnt/a; sha256sum </mnt/a/data")?;
        ensure!(found == sum, "beta wrote {sum}, gamma reads {found}");
        Ok(())
    })?;
    killed(alpha, gamma)?;
    step("nothing is left in gamma that hangs, and no lease", || settled(gamma))
}

/// The machine's node borrows the drive; its kernel finds it.
fn borrow(machine: &mut Machine) -> Result<()> {
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
fn killed(alpha: &mut Machine, gamma: &mut Machine) -> Result<()> {
    let script = |text: &str| format!("{PRELUDE}{text}");
    let load = "while dd if=/dev/zero of=/mnt/a/load bs=64k count=64 oflag=direct conv=notrunc 2>load.log; do
            touch loaded
        done";
    let load = gamma.begin(&script(load), LIMIT)?;
    run(gamma, "until_ok test -e loaded")?;
    let watch = "until gone; do sleep 0.02; done";
    let watch = gamma.begin(&script(watch), PATIENCE)?;
    let begun = Instant::now();
    run(alpha, "kill -KILL $(cat node.pid)")?;
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
    let said = run(gamma, why)?;
    say(gamma, &said);
    Ok(())
}

/// The file system can be unmounted, the loss is told, and the kernel complains of nothing.
fn settled(gamma: &mut Machine) -> Result<()> {
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

impl Hosts {
    fn start(dir: &Path) -> Result<Hosts> {
        let assets = Assets::of_user();
        let memory = Memory::new()?;
        let bridge = |other: &str, memory: &Arc<Memory>| {
            Bridge::between([ALPHA.0, other], memory, &dir.join("bridges"), &[])
        };
        let bridges = [bridge(BETA.0, &memory)?, bridge(GAMMA.0, &memory)?];
        let mut switch = SharedNetwork::new(SUBNET)?;
        let mut spec = bridges[0].machine(ALPHA.0, ALPHA.1);
        bridges[1].plug(&mut spec);
        spec.iommu = VmIommu::Translating;
        spec.devices = drive(dir)?;
        let cable = switch.cable()?;
        let address = cable.address().split('/').next().unwrap_or_default().to_owned();
        let mut alpha = launch(&assets, spec, cable, dir)?;
        let spec = bridges[0].machine(BETA.0, BETA.1);
        let mut beta = launch(&assets, spec, switch.cable()?, dir)?;
        let spec = bridges[1].machine(GAMMA.0, GAMMA.1);
        let mut gamma = launch(&assets, spec, switch.cable()?, dir)?;
        for machine in [&mut alpha, &mut beta, &mut gamma] {
            machine.booted()?;
        }
        for borrower in [&mut beta, &mut gamma] {
            borrower.load(&[MODULE])?;
        }
        Ok(Hosts { alpha, beta, gamma, address, _bridges: bridges, _switch: switch })
    }

    /// Writes the rack file, starts the control plane on alpha, and has the hosts join.
    fn join(&mut self) -> Result<()> {
        let Hosts { alpha, beta, gamma, address, .. } = self;
        let ntbs = "lspci -D -d 8086:201c | cut -d' ' -f1";
        let own = run(alpha, ntbs)?;
        // In the order in which they were plugged in.
        let [to_beta, to_gamma] = own.lines().collect::<Vec<_>>()[..] else {
            return Err(Failure(format!("alpha has these NTBs: {own}")));
        };
        let drive = run(alpha, "at 0x010802")?;
        let (beta_end, gamma_end) = (run(beta, ntbs)?, run(gamma, ntbs)?);
        let ends = [
            ("alpha.ntb.beta", to_beta),
            ("alpha.ntb.gamma", to_gamma),
            ("beta.ntb.alpha", &beta_end),
            ("gamma.ntb.alpha", &gamma_end),
        ];
        let mut rack = format!(
            "name = \"metal\"\n[hosts.alpha.devices.d0]\nkind = \"vfio\"\naddress = \"{drive}\"\n"
        );
        for (table, end) in ends {
            rack.push_str(&format!("[hosts.{table}]\naddress = \"{end}\"\n"));
        }
        run(alpha, &format!("cat >rack.toml <<'END'\n{rack}END"))?;
        daemon(alpha, "control", &format!("control rack.toml --listen {address}:7420"))?;
        run(alpha, "until_ok rackbus status")?;
        for host in [ALPHA.0, BETA.0, GAMMA.0] {
            let token = run(alpha, &format!("rackbus token {host}"))?;
            let machine = match host {
                "alpha" => &mut *alpha,
                "beta" => &mut *beta,
                _ => &mut *gamma,
            };
            run(machine, &format!("umask 077; echo '{token}' >token"))?;
            // The control plane has the usual folder on alpha.
            let run_dir = if host == ALPHA.0 { "--run-dir /tmp/run" } else { "" };
            let node = format!(
                "{run_dir} node --host {host} --join https://{address}:7420 --token-file token"
            );
            daemon(machine, "node", &node)?;
            run(machine, "until_ok rackbus devices")?;
        }
        let up = "up() { said=$(rackbus devices) && ! echo \"$said\" | grep -q -e absent -e unreachable; }; until_ok up";
        run(alpha, up).map(drop)
    }
}

/// alpha's drive: QEMU's, which copies through a buffer of its own where DMA goes to another function.
fn drive(dir: &Path) -> Result<Vec<String>> {
    let medium = dir.join("medium.img");
    std::fs::File::create(&medium)?.set_len(64 << 20)?;
    let medium = format!("driver=file,node-name=medium,filename={}", medium.display());
    let device = "nvme,serial=metal0,drive=medium,x-max-bounce-buffer-size=33554432";
    Ok(["-blockdev", &medium, "-device", device].map(str::to_owned).to_vec())
}

/// Starts a machine that has the program, and the kernel module for its kernel.
fn launch(
    assets: &Assets,
    mut spec: MachineSpec,
    cable: NetworkCable,
    dir: &Path,
) -> Result<Machine> {
    let files = dir.join("files").join(&spec.name);
    programs::collect(&files, &["rackbus"])?;
    std::fs::copy(assets.kernel_module(spec.guest)?, files.join("rackbus.ko"))?;
    (spec.files, spec.cable) = (Some(files), Some(cable));
    Ok(Machine::start(assets, &spec, dir)?)
}

fn run(machine: &mut Machine, script: &str) -> Result<String> {
    Ok(machine.run(&format!("{PRELUDE}{script}"))?)
}

/// Starts a daemon, with what it says and its process id in files. One that ends with an error is started again: a
/// handshake may take a machine that is translated longer than a peer waits. One that is killed is not.
fn daemon(machine: &mut Machine, name: &str, arguments: &str) -> Result<()> {
    let script = format!(
        "set +e
        status=1
        while [ $status = 1 ]; do
            sh -c 'echo $$ >{name}.pid; exec /mnt/files/run rackbus {arguments}' >>{name}.log 2>&1
            status=$?
            sleep 1
        done"
    );
    machine.begin(&format!("{PRELUDE}{script}"), LIMIT)?;
    Ok(())
}

fn say(machine: &Machine, said: &str) {
    said.lines()
        .for_each(|line| println!("                {}: {}", machine.name(), line.trim_end()));
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
