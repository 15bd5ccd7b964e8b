//! Programs in guests and on hosts, nodes and VMs end in the middle of copies and connects: those at the other
//! side get an error in bounded time, and nothing stays.

use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::sisci::node_id;
use rackbus_e2e::{Guest, RackProcesses, Result, ensure};
use rackbus_vm::agent::RunningCommand;
use serde_json::{Value, json};

use crate::RackWithGuests;
use crate::segments::{HOST, LIMIT, Running, TOOLS, conformance_of_two, installed};

/// The guest: a host of the rack, that it runs on, and its release. Of the releases this is the one that no other
/// scenario shares memory with.
pub const GUEST: (&str, &str, &str) = ("inside", "beta", "trixie-backports");
/// How long any call of the library may take when somebody ends: about three seconds is its own bound for a
/// connect, and the guests share their processors with all else.
const LONGEST_MS: f64 = 10_000.0;
/// What a program is in the middle of.
const WHAT: [&str; 2] = ["copy", "connect"];

/// A program in a guest that is in the middle of something.
fn in_guest(guest: &mut Guest, node: u64, what: &str) -> Result<RunningCommand> {
    guest.run("rm -f /tmp/ready")?;
    let running = guest.begin(&format!("{TOOLS}/ending {node} {what} /tmp/ready"), LIMIT)?;
    guest
        .run("for try in $(seq 1000); do [ -e /tmp/ready ] && exit 0; sleep 0.05; done; exit 1")?;
    Ok(running)
}

/// The same on a host.
fn on_host(rack: &RackProcesses, folder: &str, node: u64, what: &str) -> Result<Running> {
    let ready = Path::new(folder).join("ready");
    // There may be none.
    let _ = std::fs::remove_file(&ready);
    let arguments = format!("{node} {what} {}", ready.display());
    let running = Running::host(rack, &format!("{folder}/bin/ending"), &arguments)?;
    rack.wait("a program is in the middle of it", LIMIT, |_| ready.exists().then_some(()))?;
    Ok(running)
}

fn owner(rack: &RackProcesses, folder: &str) -> Result<Running> {
    Running::host(rack, &format!("{folder}/bin/ending"), "own")
}

/// What a program printed at its end: that it found an error, and that it waited for none too long.
fn bounded(what: &str, printed: &str) -> Result<()> {
    let row: Value = serde_json::from_str(printed.trim()).unwrap_or_default();
    let longest = row["longest"].as_f64().unwrap_or(f64::INFINITY);
    println!("          {what}: {} after {longest:.0} ms at most", row["error"]);
    ensure!(longest < LONGEST_MS, "{what}: {printed}");
    Ok(())
}

/// Waits until a guest reaches nothing, and nobody reaches anything of it.
fn nothing_of(rack: &RackProcesses, name: &str) -> Result<()> {
    rack.wait(&format!("nothing of {name} is left"), LIMIT, |rack| {
        let reached = rack.json(&["reach", name]).ok()?;
        let segments = rack.json(&["mem", "segments", name]).ok()?;
        let none = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        (none(&reached) && none(&segments)).then_some(())
    })
}

/// Has the guest the library and the programs.
fn installed_in(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    guest.booted()?;
    guest.release();
    rack.json(&["guest", "install", guest.name(), "--from", folder]).map(drop)
}

/// A guest that shares memory, with the programs in it.
pub fn started(rack: &RackProcesses, folder: &str) -> Result<Guest> {
    let (name, host, release) = GUEST;
    let mut guest = Guest::start_with(rack, name, host, release, &[], &["--fabric"])?;
    installed_in(rack, &mut guest, folder)?;
    Ok(guest)
}

/// All of them, with one guest.
pub fn in_the_middle(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let folder = installed(rack)?.display().to_string();
    let mut guest = started(rack, &folder)?;
    println!("          Linux {}", guest.run("uname -r")?.trim());
    conformance_of_two(rack, &mut guest, GUEST.0, &folder)?;
    owners(rack, &mut guest, &folder)?;
    users(rack, &mut guest, &folder)?;
    nodes(rack, &mut guest, &folder)?;
    reset_with_nothing_mapped(rack, &mut guest, &folder)?;
    reboot_in_order(rack, &mut guest, &folder)?;
    let mut guest = Some(guest);
    for what in WHAT {
        let mut it = match guest.take() {
            Some(guest) => guest,
            None => started(rack, &folder)?,
        };
        let lives = reset(rack, &mut it, &folder, what)?;
        println!(
            "          a VM that is reset during a {what} {}",
            if lives { "goes on" } else { "ends" }
        );
        if lives {
            installed_in(rack, &mut it, &folder)?;
            guest = Some(it);
        }
    }
    guest.map_or(Ok(()), |it| it.stop(rack))
}

/// The owner of the segment is killed: a program of a host, and one of the guest.
fn owners(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let (host, inside) = (node_id(rack, HOST)?, node_id(rack, guest.name())?);
    for what in WHAT {
        let owner = owner(rack, folder)?;
        let program = in_guest(guest, host, what)?;
        owner.kill()?;
        let printed = succeeded(guest.name(), what, &program.wait()?)?;
        bounded(&format!("a guest's {what}, the owner is killed"), &printed)?;
    }
    for what in WHAT {
        let owner = guest.begin(&format!("{TOOLS}/ending own"), LIMIT)?;
        let program = on_host(rack, folder, inside, what)?;
        guest.run("pkill -KILL -f 'ending own'")?;
        drop(owner);
        bounded(&format!("a host's {what}, the guest's owner is killed"), &program.end()?)?;
    }
    nothing_of(rack, guest.name())
}

/// Programs are killed in the middle of it: of theirs nothing stays, and others go on.
fn users(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let (host, inside) = (node_id(rack, HOST)?, node_id(rack, guest.name())?);
    let owner_on_host = owner(rack, folder)?;
    for what in WHAT.iter().cycle().take(6) {
        drop(in_guest(guest, host, what)?);
        guest.run("pkill -KILL -f '^[^ ]*ending [0-9]'")?;
        nothing_of(rack, guest.name())?;
    }
    owner_on_host.kill()?;
    let owner = guest.begin(&format!("{TOOLS}/ending own"), LIMIT)?;
    for what in WHAT {
        on_host(rack, folder, inside, what)?.kill()?;
    }
    // The owner serves others still.
    let program = on_host(rack, folder, inside, "copy")?;
    guest.run("pkill -KILL -f 'ending own'")?;
    drop((program.end()?, owner));
    nothing_of(rack, guest.name())
}

/// The node of the guest, and that of the other side, are killed.
fn nodes(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let (host, name) = (node_id(rack, HOST)?, guest.name().to_owned());
    for (node, what) in
        [name.as_str(), HOST].into_iter().flat_map(|node| WHAT.map(|what| (node, what)))
    {
        let owner = owner(rack, folder)?;
        let program = in_guest(guest, host, what)?;
        rack.kill(node)?;
        let printed = succeeded(&name, what, &program.wait()?)?;
        bounded(&format!("a guest's {what}, the node of {node} is killed"), &printed)?;
        rack.revive(node)?;
        rack.wait_hosts(&[node])?;
        owner.kill()?;
    }
    nothing_of(rack, &name)
}

/// What tells one boot of a guest from another.
fn boot_of(guest: &mut Guest) -> Result<String> {
    guest.run("cat /proc/sys/kernel/random/boot_id")
}

/// A guest that reboots in order ends its programs and unmounts the rack: it begins anew, and so does the library.
fn reboot_in_order(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let host = node_id(rack, HOST)?;
    let owner = owner(rack, folder)?;
    let program = in_guest(guest, host, "copy")?;
    let old = (guest.vm().record().pid, boot_of(guest)?);
    // As an init system does: the file system is busy until the processes have ended.
    guest.run(
        "pkill -KILL -f '^[^ ]*ending'\n\
         for try in $(seq 200); do umount /run/rackbus && break; sleep 0.05; done\n\
         ! grep -q ' /run/rackbus ' /proc/mounts",
    )?;
    guest.run("sync; (sleep 0.2; reboot -f) >/dev/null 2>&1 &")?;
    drop(program);
    nothing_of(rack, guest.name())?;
    let begun = Instant::now();
    // It cannot be asked while it boots.
    while !boot_of(guest).is_ok_and(|now| now != old.1) {
        ensure!(begun.elapsed() < LIMIT, "{} has not booted again", guest.name());
        guest.release();
        std::thread::sleep(Duration::from_millis(100));
    }
    guest.release();
    installed_in(rack, guest, folder)?;
    ensure!(guest.vm().record().pid == old.0, "another process runs the VM");
    drop(in_guest(guest, host, "copy")?);
    guest.run("pkill -KILL -f '^[^ ]*ending [0-9]'")?;
    owner.kill()
}

/// The VM is reset while others use a segment of the guest's, and it has nothing mapped: QEMU lives. That segment is
/// gone when the guest's kernel has found the device again, whether or not it is mounted.
fn reset_with_nothing_mapped(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let inside = node_id(rack, guest.name())?;
    drop(guest.begin(&format!("{TOOLS}/ending own"), LIMIT)?);
    let program = on_host(rack, folder, inside, "copy")?;
    guest.vm().record().qmp()?.command("system_reset", &json!({}))?;
    bounded("a host's copy, the owner's VM is reset and lives", &program.end()?)?;
    nothing_of(rack, guest.name())?;
    guest.release();
    installed_in(rack, guest, folder)
}

/// The VM is reset with segments of both sides mapped: whether its QEMU lives (11.1.3 does not where the window
/// has mappings).
fn reset(rack: &RackProcesses, guest: &mut Guest, folder: &str, what: &str) -> Result<bool> {
    let (host, inside) = (node_id(rack, HOST)?, node_id(rack, guest.name())?);
    let owner = owner(rack, folder)?;
    drop(guest.begin(&format!("{TOOLS}/ending own"), LIMIT)?);
    let program = on_host(rack, folder, inside, "copy")?;
    drop(in_guest(guest, host, what)?);
    let record = guest.vm().record().clone();
    let begun = Instant::now();
    // A QEMU that ends of it does not answer.
    let _ = record.qmp()?.command("system_reset", &json!({}));
    bounded("a host's copy, the owner's VM is reset", &program.end()?)?;
    nothing_of(rack, guest.name())?;
    println!("          all of it was given back after {:.1?}", begun.elapsed());
    owner.kill()?;
    guest.release();
    match guest.booted() {
        Ok(()) => Ok(true),
        // QEMU ended of it; one that lives must boot.
        Err(_) if !is_running(record.pid) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a process runs, and is not one that has ended and that its parent has not asked about.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state comes behind the name, which may have brackets of its own.
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}
