#![forbid(unsafe_code)]
//! The demonstration of shared memory in virtual machines: one program, compiled on this machine, in two
//! unmodified guests on two hosts.
//!
//! The guests' programs share memory with each other, and each with a program on a host. Then the process
//! that serves a guest's device is killed, and the program runs again. The last line is `demo: ok` only
//! when all of it held.
//!
//! Usage: `demo-sisci RACK_FILE PROGRAM.c DIR`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Guest, RackProcesses, Result, ensure, sisci};
use rackbus_vm::Assets;

/// How long a program may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Where programs are in a guest.
const PROGRAMS: &str = "/var/DIS/bin";
/// What the receiver prints.
const RECEIVED: &str = "received: stored by another host";

/// The guests, the host that each runs on, and the release of Debian.
const GUESTS: [(&str, &str, &str); 2] = [("vm1", "alpha", "bookworm"), ("vm2", "beta", "trixie")];

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [file, program, dir] = &arguments[..] else {
        eprintln!("usage: demo-sisci RACK_FILE PROGRAM.c DIR");
        return ExitCode::from(2);
    };
    let begun = Instant::now();
    match demonstrate(file, program, dir) {
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
    let value = run().map_err(|e| rackbus_e2e::CheckFailure(format!("{what}: {e}")))?;
    println!("  {:>9.1} ms  {what}", begun.elapsed().as_secs_f64() * 1000.0);
    Ok(value)
}

fn demonstrate(file: &Path, source: &Path, dir: &Path) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    println!("guests run under {} on this machine", Assets::of_user().accel()?);
    let rack = step("the rack comes up", || RackProcesses::start(file, dir))?;
    let folder =
        step("library, tools and program are built and installed for this machine", || {
            let folder = sisci::install(&rack)?;
            sisci::build(&folder, source)?;
            Ok(folder)
        })?;
    let start =
        |(name, host, release)| Guest::start_with(&rack, name, host, release, &[], &["--fabric"]);
    let mut guests = step("two VMs start, on alpha and on beta", || {
        GUESTS.into_iter().map(start).collect::<Result<Vec<Guest>>>()
    })?;
    step("their guests boot (Debian 12, Debian 13, unmodified)", || {
        guests.iter_mut().try_for_each(Guest::booted)
    })?;
    let from = folder.display().to_string();
    step("library and program are put into both", || {
        guests.iter_mut().try_for_each(|guest| {
            guest.release();
            rack.json(&["guest", "install", guest.name(), "--from", &from]).map(drop)
        })
    })?;
    let program = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let [first, second] = &mut guests[..] else { return Ok(()) };
    step("vm2's program stores into memory of vm1's", || {
        between_guests(&rack, &program, first, second)
    })?;
    step("vm1's program stores into memory of vm2's", || {
        between_guests(&rack, &program, second, first)
    })?;
    step("a program on beta stores into memory of vm1's", || {
        from_host(&rack, &folder.join("bin").join(&program), first, &program)
    })?;
    step("the process that serves vm1's device is killed; its standby goes on", || {
        rack.kill_helper("vm1").map(drop)
    })?;
    step("vm2's program stores into memory of vm1's again", || {
        between_guests(&rack, &program, first, second)
    })?;
    step("the VMs stop and the rack goes down", || {
        guests.into_iter().try_for_each(|guest| guest.stop(&rack))?;
        drop(rack);
        Ok(())
    })
}

fn between_guests(
    rack: &RackProcesses,
    program: &str,
    receiver: &mut Guest,
    sender: &mut Guest,
) -> Result<()> {
    let id = sisci::node_id(rack, receiver.name())?;
    let receives = receiver.begin(&format!("{PROGRAMS}/{program}"), LIMIT)?;
    sender.run(&format!("{PROGRAMS}/{program} {id}"))?;
    let said = succeeded(receiver.name(), program, &receives.wait()?)?;
    ensure!(said.trim() == RECEIVED, "the receiver printed {said}");
    println!("                in {}: {}", receiver.name(), said.trim());
    Ok(())
}

/// The same program on a host, by the same binary.
fn from_host(
    rack: &RackProcesses,
    binary: &Path,
    receiver: &mut Guest,
    program: &str,
) -> Result<()> {
    let id = sisci::node_id(rack, receiver.name())?.to_string();
    let receives = receiver.begin(&format!("{PROGRAMS}/{program}"), LIMIT)?;
    let sends = Command::new(binary)
        .arg(id)
        .env("RACKBUS_RUN_DIR", rack.run_dir())
        .env("RACKBUS_HOST", "beta")
        .stdin(Stdio::null())
        .output()?;
    let error = String::from_utf8_lossy(&sends.stderr);
    ensure!(sends.status.success(), "the sender failed: {error}");
    let said = succeeded(receiver.name(), program, &receives.wait()?)?;
    ensure!(said.trim() == RECEIVED, "the receiver printed {said}");
    Ok(())
}
