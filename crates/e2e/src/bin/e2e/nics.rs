//! Network functions in stock guests: their own virtio-net finds each, and they reach each other.

use std::time::{Duration, Instant};

use rackbus_driver::net::{Net, NetOptions};
use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure};
use serde_json::Value;

use crate::outside::OutsideMachine;
use crate::{RackWithGuests, guests};

/// The interface that the guest's driver has made, once it is there, and its end.
pub const FIND: &str = "
    set -e
    found() { basename $(ls -d /sys/bus/pci/devices/*/virtio*/net/* 2>/dev/null | head -n 1) 2>/dev/null; }
    for try in $(seq 400); do [ -n \"$(found)\" ] && break; sleep 0.05; done
    interface=$(found)
    [ -n \"$interface\" ]
";

/// How the function of that interface interrupts: `msix`, or `pin` and which one.
const KIND_OF_INTERRUPT: &str = "
    function=$(readlink -f /sys/class/net/$interface/device/..)
    kind=$(cat $function/msi_irqs/* 2>/dev/null | sort -u)
    echo ${kind:-pin $(od -An -tu1 -j61 -N1 $function/config)}
";

/// Addresses of the rack's first two network functions.
pub const FIRST: &str = "10.77.128.1";
pub const SECOND: &str = "10.77.128.2";

/// MiB that go through a connection each way.
const MIB: u32 = 16;

/// Plugs a function into a guest, whose interface gets an address.
pub fn plug(rack: &RackProcesses, guest: &mut Guest, function: &str, address: &str) -> Result<()> {
    guest.release();
    rack.json(&["vm", "add", guest.name(), function])?;
    let said = guest.run(&format!(
        "{FIND}
         ip link set $interface up
         ip addr add {address}/16 dev $interface
         for try in $(seq 400); do [ \"$(cat /sys/class/net/$interface/carrier)\" = 1 ] && break; sleep 0.05; done
         cat /sys/class/net/$interface/carrier /sys/class/net/$interface/address
         {KIND_OF_INTERRUPT}
         grep $interface /proc/net/dev || true; grep virtio /proc/interrupts || true"
    ))?;
    let mut lines = said.lines();
    ensure!(lines.next() == Some("1"), "the link of {function} is not up: {said}");
    let detail = rack.device(function)?["detail"].as_str().unwrap_or_default().to_owned();
    let mac = lines.next().unwrap_or_default();
    ensure!(detail.contains(mac), "{function} has the address {mac}, and is shown as {detail}");
    // Its class knows MSI-X and INTx only, and what is unplugged live has no MSI-X where QEMU cannot do that.
    let kind = if guests::unplugs_msix()? { "msix" } else { "pin 1" };
    let interrupt = lines.next().unwrap_or_default();
    ensure!(interrupt == kind, "{function} interrupts by {interrupt:?} and not by {kind}: {said}");
    Ok(())
}

/// Takes it out again.
pub fn unplug(rack: &RackProcesses, guest: &mut Guest, function: &str) -> Result<()> {
    guest.release();
    rack.json(&["vm", "remove", guest.name(), function])?;
    guest.run("for try in $(seq 200); do ls -d /sys/bus/pci/devices/*/virtio*/net/* 2>/dev/null || exit 0; \
               sleep 0.05; done; exit 1").map(drop)
}

/// Two guests with two kernels: small and large packets, and connections both ways.
pub fn to_each_other(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    plug(rack, old, "alpha/nic0.vf1", FIRST)?;
    plug(rack, new, "alpha/nic0.vf2", SECOND)?;
    for (from, to) in [(&mut *old, SECOND), (&mut *new, FIRST)] {
        from.run(&format!("ping -c 2 -W 10 {to} && ping -c 2 -W 10 -s 60000 {to}"))?;
    }
    connect(old, new, SECOND)?;
    connect(new, old, FIRST)?;
    reach_hosts(rack, old)?;
    // The same functions continue in other processes: of their lender's node, and of one borrower's.
    rack.restart(&["alpha", "beta"])?;
    old.run(&format!("ping -c 2 -W 10 {SECOND} && ping -c 2 -W 10 -s 60000 {SECOND}"))?;
    connect(old, new, SECOND)?;
    let faults = |device: Value| device["report"]["shaping"]["faults"].as_u64();
    let counted = faults(rack.device("alpha/nic0.vf1")?);
    ensure!(counted == Some(0), "a guest's driver broke its device: {counted:?}");
    // A driver in user space is one more neighbour, at which all guests' announcements arrive.
    beside_a_driver(rack, old)?;
    unplug(rack, old, "alpha/nic0.vf1")?;
    unplug(rack, new, "alpha/nic0.vf2")
}

/// A guest and somebody outside of the rack reach each other by an uplink, each opening connections to the other.
fn reach_outside(guest: &mut Guest, outside: &OutsideMachine) -> Result<()> {
    let to = OutsideMachine::ADDRESS;
    guest.run(&format!("ping -c 2 -W 10 {to} && ping -c 2 -W 10 -s 4000 {to}"))?;
    let sent = guest.run(&format!(
        "dd if=/dev/urandom of=/tmp/sent bs=1M count={MIB} status=none; sha256sum </tmp/sent"
    ))?;
    let server = "nc -l -p 7001 </tmp/sent >/dev/null; rm /tmp/sent";
    let listening = guest.begin(server, Duration::from_secs(120))?;
    let fetch = format!(
        "for try in $(seq 600); do exec 3<>/dev/tcp/{FIRST}/7001 && break; sleep 0.05; done 2>/dev/null
         sha256sum <&3"
    );
    let came = outside.command("timeout", &["60", "bash", "-c", &fetch]).output()?;
    let came = String::from_utf8_lossy(&came.stdout).trim().to_owned();
    succeeded(guest.name(), server, &listening.wait()?)?;
    ensure!(!sent.is_empty() && sent == came, "what was sent is {sent}; what came outside {came}");
    Ok(())
}

/// The interfaces of the rack's hosts are neighbours of a guest, and so is what is outside, where this process may make any.
fn reach_hosts(rack: &RackProcesses, guest: &mut Guest) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("           no host has an interface: that takes root");
        return Ok(());
    }
    let outside = OutsideMachine::new(1500)?;
    rack.json(&["net", "up", "alpha", "gamma"])?;
    for host in ["10.77.0.1", "10.77.0.3"] {
        guest.run(&format!("ping -c 2 -W 10 {host} && ping -c 2 -W 10 -s 60000 {host}"))?;
    }
    reach_outside(guest, &outside)?;
    rack.json(&["net", "down"])?;
    Ok(())
}

/// What a driver in user space hears of a guest that sends to its address: the packets, and no question for it, which the
/// guest's own lender answers.
fn beside_a_driver(rack: &RackProcesses, guest: &mut Guest) -> Result<()> {
    let (lease, socket) = rack.borrow("alpha/nic0.vf3", "gamma")?;
    let options = NetOptions { interrupts: true, ..NetOptions::default() };
    let opened = Net::open(&socket, Duration::from_secs(10), options);
    let mut net = opened.map_err(|error| CheckFailure(error.to_string()))?;
    let asking = guest.begin("ping -c 5 10.77.128.3; true", Duration::from_secs(60))?;
    let own = [10, 77, 128, 3];
    let (begun, mut frame) = (Instant::now(), Vec::new());
    loop {
        ensure!(begun.elapsed() < Duration::from_secs(30), "no packet comes");
        let heard = net.receive(0, &mut frame).map_err(|error| CheckFailure(error.to_string()))?;
        if heard.is_none() {
            net.wait(0, Duration::from_secs(1));
        } else if frame.len() >= 42 {
            ensure!(frame[12..14] != [8, 6] || frame[38..42] != own, "it is asked for {own:?}");
            if frame[12..14] == [8, 0] && frame[30..34] == own {
                break;
            }
        }
    }
    drop(net);
    rack.give_back(lease)?;
    drop(asking.wait()?);
    Ok(())
}

/// A stream of random bytes from one guest to the other.
pub fn connect(from: &mut Guest, to: &mut Guest, address: &str) -> Result<()> {
    let limit = Duration::from_secs(120);
    // Its standard input does not end before the connection does.
    let server = "[ -p /tmp/open ] || mkfifo /tmp/open; nc -l -p 7000 <>/tmp/open >/tmp/came
         wc -c </tmp/came; sha256sum </tmp/came; rm /tmp/came";
    let listening = to.begin(server, limit)?;
    let script = format!(
        "dd if=/dev/urandom of=/tmp/sent bs=1M count={MIB} status=none
         for try in $(seq 100); do nc {address} 7000 </tmp/sent && break; sleep 0.1; done
         wc -c </tmp/sent; sha256sum </tmp/sent; rm /tmp/sent"
    );
    let said = from.begin(&script, limit)?.wait()?;
    let sent = succeeded(from.name(), &script, &said)?;
    let found = succeeded(to.name(), server, &listening.wait()?)?;
    ensure!(sent == found, "what was sent is, with its SHA-256, {sent}; what came {found}");
    Ok(())
}
