//! Two machines joined by a bridge in software, driven by Linux' own NTB drivers.

use std::path::Path;

use rackbus_e2e::metal::{ENDS, bridge_address, start_bridge};
use rackbus_e2e::{Result, ensure};
use rackbus_vm::metal::BridgeProcess;
use rackbus_vm::{Assets, BareMetalMachine, GuestRelease};

/// Reads `$file` again until it is `$value`, for the interrupt that changes it.
const BECOMES: &str = "becomes() { for try in $(seq 400); do [ \"$(cat $1 2>/dev/null)\" = $2 ] && return; sleep 0.05; done; \
                     echo \"$1: $(cat $1)\"; dmesg | tail -n 20; return 1; }\n";

/// Boots two machines that a bridge joins, with Linux' drivers among their files.
fn joined(
    dir: &Path,
    guest: GuestRelease,
    options: &[&str],
) -> Result<([BareMetalMachine; 2], BridgeProcess)> {
    let bridge = start_bridge(&dir.join("bridge"), options)?;
    let assets = Assets::of_user();
    let start = |end| {
        let mut spec = bridge.machine(end, guest);
        spec.files = Some(assets.ntb_drivers(guest)?);
        BareMetalMachine::start(&assets, &spec, bridge.dir())
    };
    let mut machines = [start(ENDS[0])?, start(ENDS[1])?];
    for machine in &mut machines {
        machine.booted()?;
    }
    Ok((machines, bridge))
}

/// Those of Linux 6.1.
pub fn bookworm(dir: &Path) -> Result<()> {
    linux_drivers(dir, GuestRelease::Bookworm)
}

/// Those of Linux 6.12.
pub fn trixie(dir: &Path) -> Result<()> {
    linux_drivers(dir, GuestRelease::Trixie)
}

/// Linux' drivers of the bridge and of its clients run as they are.
fn linux_drivers(dir: &Path, guest: GuestRelease) -> Result<()> {
    // Small windows: the drivers want receive buffers that are aligned to them.
    let options = ["--window", "1M", "--window2", "1M"];
    let (mut machines, bridge) = joined(dir, guest, &options)?;
    for machine in &mut machines {
        bridge_address(machine)?;
        machine.load(&["ntb"])?;
    }
    tool(&mut machines)?;
    pingpong(&mut machines)?;
    messages(&mut machines)?;
    measured(&mut machines)?;
    network(&mut machines)?;
    let counted = bridge.counters()?;
    for end in ["a", "b"] {
        ensure!(counted[end]["dropped"] == 0, "accesses were dropped: {counted}");
    }
    println!("           {counted}");
    Ok(())
}

/// Both machines with a bridge as after a reset, driven by this client of Linux' driver.
fn client(machines: &mut [BareMetalMachine; 2], client: &str) -> Result<()> {
    // What a client left in scratchpads and doorbells misleads the next one.
    let fresh = "rmmod ntb_hw_intel 2>/dev/null; echo 1 > /sys/bus/pci/devices/0000:01:00.0/reset";
    for machine in &mut *machines {
        machine.run(fresh)?;
    }
    for machine in &mut *machines {
        machine.load(&["ntb_hw_intel", client])?;
    }
    Ok(())
}

/// `ntb_tool`: link, scratchpads, doorbells.
fn tool(machines: &mut [BareMetalMachine; 2]) -> Result<()> {
    let dir = "/sys/kernel/debug/ntb_tool/*";
    client(machines, "ntb_tool")?;
    for machine in &mut *machines {
        machine.run(&format!("cd {dir}; echo Y > link"))?;
    }
    let [a, b] = machines;
    for machine in [&mut *a, &mut *b] {
        machine.run(&format!("{BECOMES}cd {dir}; becomes peer0/link Y"))?;
    }
    a.run(&format!("cd {dir}; echo 0x12345678 > peer0/spad3; echo 0xabcd > spad5"))?;
    let pads = b.run(&format!("cd {dir}; cat spad3 peer0/spad5"))?;
    ensure!(pads == "0x12345678\n0xabcd", "scratchpads at b: {pads}");
    a.run(&format!("cd {dir}; echo 'c 0xff' > db_mask"))?;
    b.run(&format!("cd {dir}; echo 's 0x5' > peer_db"))?;
    a.run(&format!("{BECOMES}cd {dir}; becomes db 0x5; echo 'c 0x5' > db; becomes db 0x0"))?;
    for (vector, times) in [(0, 1), (1, 0), (2, 1)] {
        let line = vector + 1;
        let count =
            format!("grep ndev_vec_isr /proc/interrupts | sed -n {line}p | awk '{{print $2}}'");
        let count = a.run(&count)?;
        ensure!(count == times.to_string(), "vector {vector} at a: {count} interrupts");
    }
    for machine in machines {
        machine.run("rmmod ntb_tool")?;
    }
    Ok(())
}

/// `ntb_pingpong`: doorbells ring back and forth.
fn pingpong(machines: &mut [BareMetalMachine; 2]) -> Result<()> {
    client(machines, "ntb_pingpong delay_ms=20")?;
    for machine in machines {
        let count = "$(cat /sys/kernel/debug/ntb_pingpong/*/count)";
        machine.run(&format!(
            "for try in $(seq 400); do [ {count} -ge 20 ] && break; sleep 0.05; done; [ {count} -ge 20 ]; \
             status=$?; rmmod ntb_pingpong; exit $status"
        ))?;
    }
    Ok(())
}

/// `ntb_msi_test`: its messages reach the peer. Linux' driver of the bridge takes all vectors for itself, so that
/// there is none to be tested (also with the real adapter).
fn messages(machines: &mut [BareMetalMachine; 2]) -> Result<()> {
    client(machines, "ntb_msi_test")?;
    let found = "dmesg | grep -q 'ntb_msi_test.*Found 0 interrupts on peer 0'";
    // Port 0 tells port 1; what port 1 tells, the test has masked at port 0.
    machines[1].run(&format!(
        "for try in $(seq 400); do {found} && exit 0; sleep 0.05; done; dmesg | tail; exit 1"
    ))?;
    // Not both at once: the test's handler of doorbells does not stand the other's end.
    for machine in machines {
        machine.run("echo 1 > /sys/bus/pci/devices/0000:01:00.0/remove; rmmod ntb_msi_test")?;
        machine.run("rmmod ntb_hw_intel; echo 1 > /sys/bus/pci/rescan")?;
    }
    Ok(())
}

/// `ntb_perf`: copies into the peer's memory.
fn measured(machines: &mut [BareMetalMachine; 2]) -> Result<()> {
    // It tells its peer its sizes once, and gives up after a second in which a busy machine did not listen.
    const ATTEMPTS: usize = 12;
    let ready = "for try in $(seq 100); do grep -q 'In buffer size' /sys/kernel/debug/ntb_perf/*/info && \
                 { echo ready; break; }; sleep 0.05; done";
    let mut heard = false;
    for _ in 0..ATTEMPTS {
        client(machines, "ntb_perf chunk_order=12 total_order=17")?;
        let [a, b] = &mut *machines;
        heard = a.run(ready)? == "ready" && b.run(ready)? == "ready";
        if heard {
            break;
        }
        for machine in &mut *machines {
            machine.run("rmmod ntb_perf")?;
        }
    }
    ensure!(heard, "ntb_perf: no buffers after {ATTEMPTS} attempts");
    let ran = machines[0].run("cd /sys/kernel/debug/ntb_perf/*; echo 0 > run; cat run")?;
    ensure!(ran.contains("copied 131072 bytes"), "ntb_perf: {ran}");
    println!("           ntb_perf: {}", ran.lines().last().unwrap_or_default().trim());
    for machine in machines {
        machine.run("rmmod ntb_perf")?;
    }
    Ok(())
}

/// `ntb_netdev` over `ntb_transport`: a file goes from one machine to the other by TCP.
fn network(machines: &mut [BareMetalMachine; 2]) -> Result<()> {
    client(machines, "ntb_transport transport_mtu=2048")?;
    let interface = "ls /sys/class/net | grep -v -x lo";
    for (number, machine) in (1..).zip(&mut *machines) {
        machine.load(&["ntb_netdev"])?;
        machine.run(&format!(
            "name=$({interface}); ip addr add 10.79.0.{number}/24 dev $name; ip link set $name up"
        ))?;
    }
    let [a, b] = machines;
    let sent = a.run(
        "mkdir -p /tmp/served; head -c 200000 /dev/urandom > /tmp/served/file; httpd -h /tmp/served; \
         md5sum < /tmp/served/file",
    )?;
    let received = b.run(
        "for try in $(seq 200); do ping -c 1 -W 1 10.79.0.1 >/dev/null && break; sleep 0.1; done; \
         wget -q -O - http://10.79.0.1/file | md5sum",
    )?;
    ensure!(sent == received, "a sent {sent}, b received {received}");
    Ok(())
}
