//! Network functions in stock guests: their own virtio-net finds each, and they reach each other.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, Rack, Result, ensure};

use crate::World;

/// The interface that the guest's driver has made, once it is there, and its end.
const FIND: &str = "
    set -e
    found() { basename $(ls -d /sys/bus/pci/devices/*/virtio*/net/* 2>/dev/null | head -n 1) 2>/dev/null; }
    for try in $(seq 400); do [ -n \"$(found)\" ] && break; sleep 0.05; done
    interface=$(found)
    [ -n \"$interface\" ]
";

/// MiB that go through a connection each way.
const MIB: u32 = 64;

fn plug(rack: &Rack, guest: &mut Guest, function: &str, address: &str) -> Result<()> {
    guest.release();
    rack.json(&["vm", "add", guest.name(), function])?;
    let said = guest.run(&format!(
        "{FIND}
         ip link set $interface up
         ip addr add {address}/24 dev $interface
         for try in $(seq 400); do [ \"$(cat /sys/class/net/$interface/carrier)\" = 1 ] && break; sleep 0.05; done
         cat /sys/class/net/$interface/carrier /sys/class/net/$interface/address
         grep $interface /proc/net/dev || true; grep virtio /proc/interrupts || true"
    ))?;
    let mut lines = said.lines();
    ensure!(lines.next() == Some("1"), "the link of {function} is not up: {said}");
    let detail = rack.device(function)?["detail"].as_str().unwrap_or_default().to_owned();
    let mac = lines.next().unwrap_or_default();
    ensure!(detail.contains(mac), "{function} has the address {mac}, and is shown as {detail}");
    Ok(())
}

fn unplug(rack: &Rack, guest: &mut Guest, function: &str) -> Result<()> {
    guest.release();
    rack.json(&["vm", "remove", guest.name(), function])?;
    guest.run("for try in $(seq 200); do ls -d /sys/bus/pci/devices/*/virtio*/net/* 2>/dev/null || exit 0; \
               sleep 0.05; done; exit 1").map(drop)
}

/// Two guests with two kernels: small and large packets, and connections both ways.
pub fn to_each_other(world: &mut World) -> Result<()> {
    let World { rack, old, new } = world;
    plug(rack, old, "alpha/nic0.vf1", "10.77.0.1")?;
    plug(rack, new, "alpha/nic0.vf2", "10.77.0.2")?;
    for (from, to) in [(&mut *old, "10.77.0.2"), (&mut *new, "10.77.0.1")] {
        from.run(&format!("ping -c 2 -W 10 {to} && ping -c 2 -W 10 -s 60000 {to}"))?;
    }
    connect(old, new, "10.77.0.2")?;
    connect(new, old, "10.77.0.1")?;
    let counted = rack.device("alpha/nic0.vf2")?;
    ensure!(counted["shaping"]["faults"] == 0, "a guest's driver broke its device: {counted}");
    unplug(rack, old, "alpha/nic0.vf1")?;
    unplug(rack, new, "alpha/nic0.vf2")
}

/// A stream of random bytes from one guest to the other.
fn connect(from: &mut Guest, to: &mut Guest, address: &str) -> Result<()> {
    let limit = Duration::from_secs(120);
    let server = "nc -l -p 7000 </dev/null | sha256sum | cut -d' ' -f1";
    let listening = to.begin(server, limit)?;
    let script = format!(
        "dd if=/dev/urandom of=/tmp/sent bs=1M count={MIB} status=none
         for try in $(seq 100); do nc -w 5 {address} 7000 </tmp/sent && break; sleep 0.1; done
         sha256sum </tmp/sent | cut -d' ' -f1; rm /tmp/sent"
    );
    let said = from.begin(&script, limit)?.wait()?;
    let sent = succeeded(from.name(), &script, &said)?;
    let found = succeeded(to.name(), server, &listening.wait()?)?;
    ensure!(sent == found, "what was sent has SHA-256 {sent}, what came {found}");
    Ok(())
}
