//! A host borrows another host's drive through a bridge, and its own kernel drives it: the hosts are machines with stock
//! kernels, the lender with an IOMMU.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rackbus_e2e::metal::{ENDS, bridge_address, start_bridge};
use rackbus_e2e::{Result, ensure, programs};
use rackbus_vm::metal::{BridgeProcess, FILES};
use rackbus_vm::{Assets, BareMetalMachine, GuestRelease, SharedNetwork, VmIommu};
use serde_json::Value;

use crate::outages;

/// What the scripts have in common. A kernel that looks at locks (lockdep) looks no more when it has found something.
pub const PRELUDE: &str = r#"
    set -e
    cd /tmp
    export PATH=/mnt/files/bin:$PATH XDG_STATE_HOME=/tmp/state
    until_ok() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ $n -lt 600 ] || return 1; sleep 0.05; done; }
    at() { basename $(dirname $(grep -l $1 /sys/bus/pci/devices/*/class)); }
    value() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" $2 | head -n 1; }
    refused() { if "$@" >refused 2>&1; then echo "not refused: $*"; return 1; fi; cat refused; }
    back() { [ $(basename $(readlink /sys/bus/pci/devices/$(at 0x010802)/driver)) = nvme ]; }
    gone() { [ ! -e /dev/nvme0n1 ] && [ $(rackbus leases | grep -c alpha) = 0 ]; }
    healthy() {
        dmesg | { ! grep -e BUG: -e WARNING: -e Call.Trace -e blocked.for; } || return 1
        [ ! -e /proc/lockdep_stats ] || grep -q 'debug_locks: *1$' /proc/lockdep_stats
    }
    drives() { grep -l 0x010802 /sys/bus/pci/devices/*/class | cut -d/ -f6; }
    write() {
        mke2fs -q /dev/nvme0n1
        mount /dev/nvme0n1 /mnt/a
        dd if=/dev/urandom of=/mnt/a/data bs=64k count=128 status=none
        sha256sum /mnt/a/data >/tmp/sum
        umount /mnt/a
    }
    verify() {
        echo 3 >/proc/sys/vm/drop_caches
        mount -r /dev/nvme0n1 /mnt/a
        sha256sum -c --quiet /tmp/sum
        umount /mnt/a
    }
"#;

/// How long a host's program runs at most: longer than any test.
const LIMIT: Duration = Duration::from_secs(7200);

/// The lender's drive: QEMU's, which copies through a buffer of its own where DMA goes to another function.
pub const DRIVE: [&str; 2] =
    ["-device", "nvme,serial=metal0,drive=medium,x-max-bounce-buffer-size=33554432"];

/// A program that asks the kernel module for what makes no sense, and the headers that it takes.
const IOCTLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/ioctls.c");
const UAPI: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/include/uapi");

/// A lender and a borrower.
pub struct MetalHosts {
    bridge: BridgeProcess,
    pub lender: BareMetalMachine,
    pub borrower: BareMetalMachine,
    /// The bridge's address at either.
    pub ntb: [String; 2],
    /// Of either on the network.
    pub address: [String; 2],
    /// Behind the machines that it joins.
    _switch: SharedNetwork,
}

/// What a borrower's machine has.
pub struct BorrowerMachine {
    pub iommu: VmIommu,
    /// On its kernel's command line.
    pub append: &'static str,
    /// Its memory, and that of the lender's that a bridge reaches, in MiB.
    pub memory_mib: u32,
    /// Puts what it is given beside the programs there.
    pub files: fn(&Path) -> Result<()>,
}

impl Default for BorrowerMachine {
    fn default() -> Self {
        Self { iommu: VmIommu::Absent, append: "", memory_mib: 512, files: |_| Ok(()) }
    }
}

/// Starts hosts of which the lender has these devices on the block node `medium`.
pub fn start(dir: &Path, guest: GuestRelease, devices: &[&str]) -> Result<MetalHosts> {
    start_with(dir, guest, devices, &BorrowerMachine::default())
}

/// The same, with a borrower whose machine is as this says.
pub fn start_with(
    dir: &Path,
    guest: GuestRelease,
    devices: &[&str],
    machine: &BorrowerMachine,
) -> Result<MetalHosts> {
    let memory = format!("{}M", machine.memory_mib);
    let bridge = start_bridge(&dir.join("bridge"), &["--memory", &memory])?;
    let assets = Assets::of_user();
    let files = dir.join("files");
    let programs = ["rackbus", "mapped", "physical"];
    programs::collect(&files, &programs)?;
    programs.iter().try_for_each(|program| wrap(&files.join("bin"), program))?;
    let interface = ["-static".into(), "-I".into(), UAPI.into()];
    programs::compile(IOCTLS.as_ref(), &files.join("bin"), &interface)?;
    std::fs::copy(assets.kernel_module(guest)?, files.join("rackbus.ko"))?;
    let medium = dir.join("medium.img");
    std::fs::File::create(&medium)?.set_len(64 << 20)?;
    let mut switch = SharedNetwork::new(SUBNET)?;
    let cables = [switch.cable()?, switch.cable()?];
    let address = [0, 1].map(|end: usize| {
        let address = cables[end].address();
        address.split('/').next().unwrap_or_default().to_owned()
    });
    let [near, far] = cables;
    let mut spec = bridge.machine(ENDS[0], guest);
    (spec.iommu, spec.files) = (VmIommu::Translating, Some(files.clone()));
    (spec.cable, spec.memory_mib) = (Some(near), 512);
    let medium = format!("driver=file,node-name=medium,filename={}", medium.display());
    spec.devices = vec!["-blockdev".to_owned(), medium];
    spec.devices.extend(devices.iter().map(|it| (*it).to_owned()));
    let mut lender = BareMetalMachine::start(&assets, &spec, bridge.dir())?;
    (machine.files)(&files)?;
    let mut spec = bridge.machine(ENDS[1], guest);
    (spec.files, spec.cable, spec.cpus) = (Some(files), Some(far), 2);
    (spec.iommu, spec.append) = (machine.iommu, machine.append.to_owned());
    spec.memory_mib = machine.memory_mib;
    let mut borrower = BareMetalMachine::start(&assets, &spec, bridge.dir())?;
    lender.booted()?;
    borrower.booted()?;
    let ntb = [bridge_address(&mut lender)?, bridge_address(&mut borrower)?];
    // The hosts are slow, and busy with other tests.
    borrower.load(&["rackbus silence_ms=5000"])?;
    Ok(MetalHosts { bridge, lender, borrower, ntb, address, _switch: switch })
}

/// A program in this folder, which is the machines', whatever libraries they have.
pub fn wrap(folder: &Path, name: &str) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let program = folder.join(name);
    std::fs::write(&program, format!("#!/bin/sh\nexec {FILES}/run {name} \"$@\"\n"))?;
    Ok(std::fs::set_permissions(&program, Permissions::from_mode(0o755))?)
}

/// The network that joins the machines.
const SUBNET: u8 = 17;

/// Runs a script at a machine, and tells what it wrote.
pub fn run(machine: &mut BareMetalMachine, script: &str) -> Result<String> {
    let said = machine.run(&format!("{PRELUDE}{script}"))?;
    let name = machine.name().to_owned();
    said.lines().for_each(|line| println!("           {name}: {line}"));
    Ok(said)
}

/// Starts what continues in the background, with what it says in a file.
pub fn begin(machine: &mut BareMetalMachine, log: &str, command: &str) -> Result<()> {
    machine.begin(&format!("{PRELUDE}exec {command} >/tmp/{log} 2>&1"), LIMIT)?;
    Ok(())
}

/// With Linux 6.1 at both hosts.
pub fn bookworm(dir: &Path) -> Result<()> {
    borrowed(dir, GuestRelease::Bookworm)
}

/// With Linux 6.12 at both hosts.
pub fn trixie(dir: &Path) -> Result<()> {
    borrowed(dir, GuestRelease::Trixie)
}

/// With the newest kernel at both hosts.
pub fn newest(dir: &Path) -> Result<()> {
    borrowed(dir, GuestRelease::TrixieBackports)
}

/// The stock driver of the borrower's kernel finds the drive, and everything that is written to it: first by the
/// commands alone, then by leases.
fn borrowed(dir: &Path, guest: GuestRelease) -> Result<()> {
    // It remaps interrupts, so that the kernel moves them at once, with its locks.
    let machine = BorrowerMachine {
        iommu: VmIommu::Translating,
        append: "iommu=pt",
        ..BorrowerMachine::default()
    };
    let mut hosts = start_with(dir, guest, &DRIVE, &machine)?;
    let outcome = by_hand(&mut hosts)
        .and_then(|()| untrapped(&mut hosts))
        .and_then(|()| maintained(&mut hosts))
        .and_then(|()| by_lease(&mut hosts));
    explained(&mut hosts, outcome)
}

/// What came of a test; when it failed, what the hosts say is told.
pub fn explained(hosts: &mut MetalHosts, outcome: Result<()>) -> Result<()> {
    if outcome.is_err() {
        println!("{}", hosts.bridge.counters()?);
        for machine in [&mut hosts.lender, &mut hosts.borrower] {
            let said = machine.run("tail -n 40 /tmp/*.log; dmesg | tail -n 30; /mnt/files/bin/rackbus --json metal list || true; grep -i rackbus /proc/interrupts || true");
            println!("{}", said.unwrap_or_else(|error| error.to_string()));
        }
    }
    outcome
}

fn by_hand(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [near, far], .. } = hosts;
    let lend = format!(
        "sh -c 'modprobe vfio-pci; exec rackbus --json metal lend $(at 0x010802) --ntb {near} --epoch 7'"
    );
    let lend = lend.replace("$(at 0x010802)", "$0");
    begin(lender, "lend.log", &format!("{lend} $(at 0x010802)"))?;
    run(lender, "until_ok grep -q epoch lend.log")?;
    let offset = run(lender, "value offset lend.log")?;
    let borrow = format!("rackbus metal borrow alpha/nvme0 --ntb {far} --offset {offset}");
    run(borrower, &format!("refused {borrow} --epoch 6"))?;
    run(
        borrower,
        &format!(
            "{borrow} --epoch 7
            until_ok test -b /dev/nvme0n1
            lsblk -d -o NAME,SIZE,MODEL /dev/nvme0n1
            write
            function=$(basename $(readlink -f /sys/class/nvme/nvme0/device))
            echo $function >/sys/bus/pci/drivers/nvme/unbind
            echo $function >/sys/bus/pci/drivers/nvme/bind
            until_ok test -b /dev/nvme0n1
            verify
            mount /dev/nvme0n1 /mnt/a
            refused rackbus metal return 1 --timeout 1
            umount /mnt/a
            ioctls {far}
            verify
            rackbus metal list
            rackbus metal return 1
            [ ! -e /dev/nvme0n1 ]
            {borrow} --epoch 7
            until_ok test -b /dev/nvme0n1"
        ),
    )?;
    Ok(())
}

/// What the drive reads and writes of the borrower's memory goes through the mapped window: the bridge's software sees none of it.
fn untrapped(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { bridge, lender, borrower, .. } = hosts;
    let trapped = |counted: &Value| -> u64 {
        let each = ["a", "b"].iter().flat_map(|end| {
            ["window2_reads", "window2_writes"].map(|name| counted[end][name].as_u64())
        });
        each.map(|count| count.unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    };
    let before = trapped(&bridge.counters()?);
    run(borrower, "verify")?;
    let after = bridge.counters()?;
    ensure!(trapped(&after) == before, "{before} traps in window 2 before: {after}");
    run(borrower, "rackbus metal return 2")?;
    run(
        lender,
        "pkill -TERM -f 'files/rackbus --json metal lend'
        until_ok back",
    )?;
    Ok(())
}

/// What a host's administrator does while a drive is borrowed: one of its interrupts is moved, a processor that they go to
/// is taken off-line under load, suspend and unloading the module are refused, and it is loaded anew after the drive's return.
fn maintained(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [near, far], .. } = hosts;
    let borrow = |lender: &mut BareMetalMachine, epoch: u32| -> Result<String> {
        let lend = format!("rackbus --json metal lend $0 --ntb {near} --epoch {epoch}");
        let log = format!("lend{epoch}.log");
        begin(lender, &log, &format!("sh -c 'exec {lend}' $(at 0x010802)"))?;
        run(lender, &format!("until_ok grep -q epoch {log}"))?;
        let offset = run(lender, &format!("value offset {log}"))?;
        Ok(format!(
            "rackbus metal borrow alpha/nvme0 --ntb {far} --offset {offset} --epoch {epoch}
            until_ok test -b /dev/nvme0n1
            verify
            "
        ))
    };
    let borrowed = borrow(lender, 8)?;
    run(
        borrower,
        &format!(
            "{borrowed}
            load() {{ while [ -e loading ]; do dd if=/dev/nvme0n1 of=/dev/null bs=64k iflag=direct status=none; done; }}
            echo >loading
            load & loader=$!
            used() {{ awk '/rackbus$/ && $2 + $3 > 0 {{ sub(\":\", \"\", $1); print $1 }}' /proc/interrupts; }}
            all_go_to() {{ for irq in $(used); do [ $((0x$(cat /proc/irq/$irq/effective_affinity))) = $1 ] || return 1; done; }}
            move_all_to() {{ for irq in $(used); do echo $1 >/proc/irq/$irq/smp_affinity; done; until_ok all_go_to $1; }}
            [ -n \"$(used)\" ]
            move_all_to 1
            own=$(awk '/nvme0q0/ {{ sub(\":\", \"\", $1); print $1 }}' /proc/interrupts)
            echo 2 >/proc/irq/$own/smp_affinity
            [ $((0x$(cat /proc/irq/$own/effective_affinity))) = 2 ]
            followed() {{ ! all_go_to 1; }}
            until_ok followed
            move_all_to 2
            echo 0 >/sys/devices/system/cpu/cpu1/online
            [ $(cat /sys/devices/system/cpu/online) = 0 ]
            all_go_to 1
            for read in $(seq 20); do dd if=/dev/nvme0n1 of=/dev/null bs=64k count=4 iflag=direct status=none; done
            echo 1 >/sys/devices/system/cpu/cpu1/online
            rm loading
            wait $loader
            verify
            refused sh -c 'echo freeze >/sys/power/state'
            dmesg | grep -q 'no suspend while functions are borrowed'
            verify
            mount /dev/nvme0n1 /mnt/a
            dd if=/dev/urandom of=/mnt/a/data bs=64k count=16 status=none
            sha256sum /mnt/a/data >/tmp/sum
            refused rmmod rackbus
            umount /mnt/a
            verify
            rackbus metal return 3
            rmmod rackbus
            [ ! -e /sys/module/rackbus ]
            healthy"
        ),
    )?;
    // The adapter's link went down with the module: what was lent through it is taken away. It is given back when the
    // lender ends.
    let ended = "pkill -TERM -f 'files/rackbus --json metal lend'; until_ok back";
    run(lender, &format!("until_ok grep -q 'the borrower lost it' lend8.log; {ended}"))?;
    borrower.load(&["rackbus silence_ms=5000"])?;
    let borrowed = borrow(lender, 9)?;
    run(borrower, &format!("{borrowed} rackbus metal return 1"))?;
    run(lender, ended)?;
    Ok(())
}

/// The lender's node lends, the borrower's borrows, and a control plane decides. The borrower reboots, and the lender dies under load.
fn by_lease(hosts: &mut MetalHosts) -> Result<()> {
    join(hosts)?;
    let MetalHosts { lender, borrower, address: [own, _], .. } = hosts;
    run(
        borrower,
        "borrow() { rackbus --json borrow alpha/d0 --for beta --placement host >lease || cat lease; }
        until_ok rackbus borrow alpha/d0 --for beta --placement host
        rackbus leases
        until_ok test -b /dev/nvme0n1
        verify
        refused rackbus borrow alpha/d0 --for alpha
        rackbus return alpha/d0
        [ ! -e /dev/nvme0n1 ]
        refused rackbus borrow alpha/d0 --for beta --placement host --isolation strict
        borrow
        value socket lease
        until_ok test -b /dev/nvme0n1
        verify",
    )?;
    run(lender, "rackbus reach alpha/d0 | tee reached; grep -q 'vector wired by beta' reached")?;
    // A node that ends in order takes back what it lends, and gives it to its driver.
    run(lender, "pkill -TERM -f 'files/rackbus node'; until_ok back")?;
    run(borrower, "until_ok gone")?;
    begin(lender, "node.log", &format!("rackbus node --host alpha --join https://{own}:7420"))?;
    run(
        borrower,
        "until_ok rackbus borrow alpha/d0 --for beta --placement host
        until_ok test -b /dev/nvme0n1
        verify",
    )?;
    outages::rebooted(hosts)?;
    outages::node_killed(hosts)?;
    outages::switched_off(hosts)
}

/// Starts a control plane and the node of either host, alpha and beta. alpha's drives are lent: d0, d1 and so on.
pub fn join(hosts: &mut MetalHosts) -> Result<()> {
    join_with(hosts, "")
}

/// The same, with more of the rack file.
pub fn join_with(hosts: &mut MetalHosts, more: &str) -> Result<()> {
    let MetalHosts { lender, borrower, ntb: [near, far], address: [own, _], .. } = hosts;
    run(
        lender,
        &format!(
            "printf 'name = \"metal\"\n' >rack.toml
            n=0
            for drive in $(drives); do
                printf '[hosts.alpha.devices.d%s]\nkind = \"vfio\"\naddress = \"%s\"\n' $n $drive >>rack.toml
                n=$((n + 1))
            done
            printf '[hosts.alpha.ntb.beta]\naddress = \"{near}\"\n[hosts.beta.ntb.alpha]\naddress = \"{far}\"\n' >>rack.toml
            cat >>rack.toml <<'END'
{more}
END"
        ),
    )?;
    begin(
        lender,
        "control.log",
        &format!("rackbus --run-dir /tmp/control control /tmp/rack.toml --listen {own}:7420"),
    )?;
    run(lender, "until_ok rackbus --run-dir /tmp/control status")?;
    let token = |lender: &mut BareMetalMachine, host: &str| {
        lender.run(&format!("{PRELUDE}rackbus --run-dir /tmp/control token {host}"))
    };
    let (first, second) = (token(lender, "alpha")?, token(lender, "beta")?);
    for (machine, host, token) in [(&mut *lender, "alpha", first), (&mut *borrower, "beta", second)]
    {
        machine.run(&format!("umask 077; echo '{token}' >/tmp/token"))?;
        start_node(machine, host, own)?;
    }
    Ok(())
}

/// Starts the node of a host that has its token in `/tmp/token`, whose control plane is at `control`. It is started again where it
/// does not join: a handshake may take a machine that is translated longer than its peer waits.
pub fn start_node(machine: &mut BareMetalMachine, host: &str, control: &str) -> Result<()> {
    let join =
        format!("rackbus node --host {host} --join https://{control}:7420 --token-file /tmp/token");
    // 1 is a failure that may be over in a moment; a node that is killed, or ends in order, says another status.
    let joining = format!("sh -c 'while {join}; [ $? = 1 ]; do sleep 1; done'");
    begin(machine, "node.log", &joining)?;
    run(machine, "until_ok rackbus devices").map(drop)
}
