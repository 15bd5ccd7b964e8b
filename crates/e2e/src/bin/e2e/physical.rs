//! A machine lends its own PCI devices: a guest with an IOMMU, a stock drive and a network card with virtual
//! functions plays that machine, and a rack runs in it.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, RackProcesses, Result, ensure, programs};

use crate::RackWithGuests;

/// How long a script may take, which waits for many things.
const SCRIPT: Duration = Duration::from_secs(300);
/// Whose guest the machine is.
const HOST: &str = "gamma";

/// An IOMMU; a drive, a card, memory and a device with MSI alone, each behind a port of its own. Virtual functions of the card are on another bus.
const DEVICES: [&str; 20] = [
    "-device",
    "intel-iommu,intremap=on,caching-mode=on",
    "-device",
    "pcie-root-port,id=own0,chassis=100,slot=100",
    "-device",
    "nvme,serial=physical0,bus=own0,drive=medium0",
    "-device",
    "pcie-root-port,id=own1,chassis=101,slot=101,bus-reserve=2",
    "-device",
    "igb,bus=own1",
    "-object",
    "memory-backend-ram,id=shared0,size=1M,share=on",
    "-device",
    "pcie-root-port,id=own2,chassis=102,slot=102",
    "-device",
    "ivshmem-plain,bus=own2,memdev=shared0",
    "-device",
    "pcie-root-port,id=own3,chassis=103,slot=103",
    "-device",
    "edu,bus=own3",
];

/// What the scripts have in common.
const PRELUDE: &str = r#"
    set -eu
    cd /tmp
    export LD_LIBRARY_PATH=/tmp/programs XDG_STATE_HOME=/tmp/state PATH=/tmp/programs:$PATH
    at() { basename $(dirname $(grep -l $1 /sys/bus/pci/devices/*/class)); }
    drive=$(at 0x010802)
    driver() { basename $(readlink /sys/bus/pci/devices/$1/driver); }
    value() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" lease | head -n 1; }
    borrow() { rackbus borrow "$@" --json >lease || cat lease; socket=$(value socket); lease=$(value lease); }
    until_ok() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ $n -lt 600 ] || return 1; sleep 0.05; done; }
    refused() { if rackbus "$@" 2>refused; then echo "not refused: $*"; return 1; fi; cat refused; }
"#;

const RACK: &str = r#"
    printf 'name = "metal"
        [hosts.alpha.devices.d0]
        kind = "vfio"
        address = "%s"
        [hosts.beta]
        [hosts.gamma]
        ' $drive >rack.toml
    rackbus up rack.toml >/dev/null 2>&1
"#;

/// What uses a function, and its group, is looked at; what is taken goes back.
const BINDING: &str = r#"
    rackbus lend $drive --check | head -n 1
    mke2fs -q /dev/nvme0n1
    mount /dev/nvme0n1 /mnt/a
    refused lend $drive
    umount /mnt/a
    refused lend 0000:00:02.0
    rackbus lend $drive --name d0 >section
    grep -q 'address = "0000:' section
    [ $(driver $drive) = vfio-pci ]
    physical $drive open
    physical $drive write
    rackbus lend --return
    [ $(driver $drive) = nvme ]
"#;

/// One user after the other; the first is killed under load. What it was not lent, the drive does not reach.
const USERS: &str = r#"
    [ $(driver $drive) = vfio-pci ]
    # Its lender says what it is: a drive that takes NVMe commands.
    until_ok sh -c "rackbus devices --json | grep '\"class\": $((0x010802))'"
    borrow alpha/d0 --for beta
    physical $socket write
    physical $socket interrupt
    physical $socket stray
    dmesg | grep 'fault addr 0x1000000000'
    until_ok sh -c "rackbus events | grep 'at 0x1000000000: not mapped'"
    rm -f busy; physical $socket busy >busy &
    until_ok grep busy busy
    kill -9 $!
    rackbus return $lease
    borrow alpha/d0 --for gamma --msix
    physical $socket verify
    physical $socket interrupt
    rackbus return $lease
    until_ok rackbus restart --all >/dev/null 2>&1
    [ $(driver $drive) = vfio-pci ]
    refused borrow alpha/d0 --for beta --isolation strict
"#;

/// The nodes of lender and borrower are restarted in place under load. The user notices nothing, what it gave is lent as
/// before, and taken away as ever: by the next node of the lender's.
const RESTARTED: &str = r#"
    dmesg -C
    # A program that can go on, and is not there when it is to: what was saved is taken back.
    gone() {
        printf '%s\n' '#!/bin/sh' 'cat >/dev/null; rm "$0"; echo ready to go on' >program
        chmod +x program
        refused restart alpha --program /tmp/program
        grep 'No such file' refused
    }
    borrow alpha/d0 --for beta --msix
    rm -f end lasting; physical $socket lasting end >lasting 2>&1 &
    user=$!
    until_ok grep busy lasting
    rackbus reach alpha/d0 >before
    for n in 1 2 3; do
        until_ok rackbus restart alpha
        until_ok rackbus restart beta
        until_ok gone
    done
    rackbus restart alpha
    rackbus reach alpha/d0 >after
    cat after
    cmp before after
    touch end
    wait $user || { cat lasting; exit 1; }
    cat lasting
    rm -f busy; physical $socket busy >busy 2>&1 &
    user=$!
    until_ok grep busy busy
    until_ok rackbus restart alpha
    rackbus return $lease
    if wait $user; then exit 1; fi
    cat busy
    borrow alpha/d0 --for gamma --msix
    physical $socket verify
    physical $socket stray
    rackbus return $lease
    if dmesg | grep 'WARNING: '; then exit 1; fi
"#;

/// Who keeps registers that it mapped has none of them when its lease has ended, and keeps the function from others.
const KEEPER: &str = r#"
    borrow alpha/d0 --for beta
    physical $socket keep >keep &
    keeper=$!
    until_ok grep kept keep
    rackbus return $lease
    refused borrow alpha/d0 --for gamma
    refused lend $drive --return
    kill -9 $keeper
    until_ok rackbus borrow alpha/d0 --for gamma
    socket=$(echo /run/rackbus/metal/gamma/functions/d0.*.sock)
    physical $socket verify
"#;

/// The kernel asks for the function back, and its user's lease ends; a node that was killed has it taken still.
const TAKEN_AWAY: &str = r#"
    socket=$(echo /run/rackbus/metal/gamma/functions/d0.*.sock)
    rm -f busy; physical $socket busy >busy 2>&1 &
    until_ok grep busy busy
    until_ok rackbus restart alpha
    rackbus lend $drive --return --force
    [ $(driver $drive) = nvme ]
    until_ok grep 'lender is gone' busy
    until_ok sh -c "rackbus leases --all | grep ended"
    refused borrow alpha/d0 --for beta
    rackbus lend $drive >/dev/null
    borrow alpha/d0 --for beta
    physical $socket verify
    kill -9 $(cat /run/rackbus/metal/alpha/node.pid)
    [ $(driver $drive) = vfio-pci ]
    until_ok rackbus lend --return
    [ $(driver $drive) = nvme ]
    rackbus down >/dev/null 2>&1
    rackbus up rack.toml >/dev/null 2>&1
    [ $(driver $drive) = vfio-pci ]
    rackbus down >/dev/null 2>&1
    [ $(driver $drive) = nvme ]
    [ -z "$(ls /run/rackbus-lent)" ]
"#;

/// Virtual functions are made, lent and removed.
const CARD: &str = r#"
    modprobe igb
    card=$(at 0x020000)
    printf 'name = "card"
        [hosts.alpha.devices.net0]
        kind = "vfio"
        address = "%s"
        functions = 2
        bars = "trapped"
        [hosts.alpha.devices.none]
        kind = "vfio"
        address = "7f:00.0"
        [hosts.beta]
        ' $card >card.toml
    ip link set $(ls /sys/bus/pci/devices/$card/net) up
    rackbus up card.toml >/dev/null 2>&1
    until_ok sh -c "rackbus devices | grep 'there is no PCI function 0000:7f:00.0'"
    rackbus devices
    borrow alpha/net0.vf1 --for beta --msix
    physical $socket card
    refused lend $card --functions 9
    rackbus down >/dev/null 2>&1
    [ $(cat /sys/bus/pci/devices/$card/sriov_numvfs) = 0 ]
    [ -z "$(ls /run/rackbus-lent)" ]
"#;

/// A device that has MSI and no MSI-X interrupts its user, also after its lender's node was restarted in place.
const SIGNALLED: &str = r#"
    edu=$(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device | head -n 1))
    printf 'name = "signal"
        [hosts.alpha.devices.e0]
        kind = "vfio"
        address = "%s"
        [hosts.beta]
        ' $(basename $edu) >signal.toml
    rackbus up signal.toml >/dev/null 2>&1
    borrow alpha/e0 --for beta
    physical $socket signal
    until_ok rackbus restart alpha
    physical $socket signal
    rackbus return $lease
    rackbus down >/dev/null 2>&1
    [ -z "$(ls /run/rackbus-lent)" ]
"#;

/// Peer-to-peer: a drive of the machine reaches a BAR of a modelled function.
const PEERS: &str = r#"
    shared=$(at 0x050000)
    printf 'name = "peers"
        [hosts.alpha.devices.d0]
        kind = "vfio"
        address = "%s"
        [hosts.alpha.devices.s0]
        kind = "vfio"
        address = "%s"
        [hosts.beta.devices.n0]
        kind = "nvme"
        size = "4 MiB"
        [hosts.beta.devices.m0]
        kind = "memory"
        size = "1 MiB"
        [hosts.gamma]
        ' $drive $shared >peers.toml
    rackbus up peers.toml >/dev/null 2>&1
    for name in alpha/d0 alpha/s0 beta/n0 beta/m0; do
        borrow $name --for gamma --group p
        echo "${name#*/}=$socket; lease_${name#*/}=$lease" >>borrowed
    done
    . ./borrowed
    physical $d0 reach $m0
"#;

/// It reaches a BAR of the machine's memory, also while the node of both is restarted in place.
const PEERS_RESTARTED: &str = r#"
    . ./borrowed
    physical $d0 reach $s0 >reached 2>&1 &
    user=$!
    until_ok sh -c 'rackbus reach alpha/d0 | grep "alpha/s0"'
    until_ok rackbus restart alpha
    rackbus reach alpha/d0
    wait $user || { cat reached; exit 1; }
    cat reached
"#;

/// A modelled drive reaches both. When the memory is given back, nobody reaches it, and the next user has it.
const PEERS_MODELLED: &str = r#"
    . ./borrowed
    physical $n0 reach $s0
    physical $n0 reach $m0
    rackbus return $lease_s0
    borrow alpha/s0 --for beta
    rackbus return $lease
    rackbus down >/dev/null 2>&1
    [ -z "$(ls /run/rackbus-lent)" ]
"#;

fn start(rack: &RackProcesses) -> Result<Guest> {
    let disk = programs::qemu_arguments(&programs::disk(rack, &["rackbus", "physical"])?);
    let medium = rack.run_dir().join("physical.img");
    std::fs::File::create(&medium)?.set_len(16 << 20)?;
    let medium = format!("driver=file,node-name=medium0,filename={}", medium.display());
    let mut more = vec!["--memory", "1G", "--", "-blockdev", medium.as_str()];
    more.extend(disk.iter().map(String::as_str));
    more.extend(DEVICES);
    let mut guest = Guest::start_with(rack, "metal", HOST, "bookworm", &[], &more)?;
    guest.booted()?;
    // The programs run by the guest's own loader, as the nodes that one starts of itself do.
    guest.run(&programs::unpack("/dev/vdb"))?;
    Ok(guest)
}

fn run(guest: &mut Guest, script: &str) -> Result<String> {
    let running = guest.begin(&format!("{PRELUDE}{script}"), SCRIPT)?;
    let said = succeeded(guest.name(), "a script", &running.wait()?)?;
    said.trim().lines().for_each(|line| println!("           {line}"));
    Ok(said)
}

/// A machine's drive and the virtual functions of its card are lent, taken away and given back.
pub fn lent(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let mut guest = start(rack)?;
    let said = run(&mut guest, BINDING)?;
    ensure!(said.contains("is mounted at /mnt/a"), "what uses the drive is not said: {said}");
    run(&mut guest, RACK)?;
    let said = run(&mut guest, USERS)?;
    ensure!(said.contains("runs whole at its lender"), "why not strictly is not said: {said}");
    run(&mut guest, RESTARTED)?;
    let said = run(&mut guest, KEEPER)?;
    ensure!(said.contains("maps registers"), "who keeps it is not said: {said}");
    run(&mut guest, TAKEN_AWAY)?;
    run(&mut guest, CARD)?;
    let said = run(&mut guest, SIGNALLED)?;
    ensure!(said.matches("interrupts came by MSI").count() == 2, "no interrupts by MSI: {said}");
    run(&mut guest, PEERS)?;
    run(&mut guest, PEERS_RESTARTED)?;
    run(&mut guest, PEERS_MODELLED)?;
    guest.stop(rack)
}
