//! Programs in stock guests share memory with other guests and with hosts, by the library and the tools
//! that were compiled for a host.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::rack::beside;
use rackbus_e2e::{Failure, Guest, Rack, Result, ensure};
use serde_json::Value;

use crate::World;

/// What installs library, headers and tools.
const INSTALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/install-sisci");
/// The guests: each is the host of the rack that has its name, and runs on another one.
const GUESTS: [(&str, &str, &str); 2] =
    [("inside", "beta", "bookworm"), ("within", "gamma", "trixie")];
/// A host whose programs take part.
const HOST: &str = "alpha";
/// Where the tools are in a guest.
const TOOLS: &str = "/var/DIS/bin";
/// How long a tool may take under TCG on a busy machine.
const LIMIT: Duration = Duration::from_secs(200);
const ROUNDS: &str = "200";

/// One side of an exchange.
enum Side<'a> {
    Guest(&'a mut Guest),
    Host(&'a Rack),
}

impl Side<'_> {
    fn name(&self) -> String {
        match self {
            Side::Guest(guest) => guest.name().to_owned(),
            Side::Host(_) => HOST.to_owned(),
        }
    }
}

/// A tool that runs.
enum Running {
    Guest(String, rackbus_vm::agent::Running),
    Host(std::process::Child),
}

impl Running {
    fn start(side: &mut Side<'_>, tool: &str, arguments: &str, tools: &str) -> Result<Running> {
        match side {
            Side::Guest(guest) => {
                let name = guest.name().to_owned();
                let script = format!("{TOOLS}/{tool} {arguments}");
                Ok(Running::Guest(name, guest.begin(&script, LIMIT)?))
            }
            Side::Host(rack) => {
                let mut command = Command::new(format!("{tools}/bin/{tool}"));
                command.args(arguments.split_whitespace());
                command.env("RACKBUS_RUN_DIR", rack.run_dir()).env("RACKBUS_HOST", HOST);
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                Ok(Running::Host(command.spawn()?))
            }
        }
    }

    fn end(self) -> Result<String> {
        match self {
            Running::Guest(name, running) => succeeded(&name, "a tool", &running.wait()?),
            Running::Host(child) => {
                let Output { status, stdout, stderr } = child.wait_with_output()?;
                let said = String::from_utf8_lossy(&stderr).into_owned();
                ensure!(status.success(), "a tool on {HOST}: {status}: {said}");
                Ok(String::from_utf8_lossy(&stdout).into_owned())
            }
        }
    }
}

/// Library, headers and tools, as they are installed on a host.
fn installed(rack: &Rack) -> Result<PathBuf> {
    let folder = rack.run_dir().join("sisci");
    let library = beside("libsisci.so")?;
    let made = Command::new(INSTALL)
        .arg(&folder)
        .env("SISCI_LIB", library.parent().unwrap_or(&library))
        .env("CARGO_TARGET_DIR", rack.run_dir().join("sisci-build"))
        .env_remove("DESTDIR")
        .output()?;
    ensure!(made.status.success(), "{INSTALL}: {}", String::from_utf8_lossy(&made.stderr));
    Ok(folder)
}

/// Runs a tool between two sides, and looks that the client printed rows of measures.
fn between(
    mut server: Side<'_>,
    mut client: Side<'_>,
    tool: &str,
    more: &str,
    tools: &str,
) -> Result<()> {
    let (there, here) = (server.name(), client.name());
    let answers = Running::start(&mut server, tool, &format!("-server -rn {here}"), tools)?;
    let arguments = format!("-client -rn {there} -json {more}");
    let measures = Running::start(&mut client, tool, &arguments, tools)?;
    let printed = measures.end()?;
    answers.end()?;
    let rows: Vec<Value> =
        printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    ensure!(!rows.is_empty(), "{tool} from {here} to {there} printed no rows: {printed}");
    let last = rows.last().and_then(|row| row["us"].as_f64()).unwrap_or_default();
    println!("          {tool} {here} to {there}: {last:.2} us");
    Ok(())
}

/// Ping-pong through segments, interrupts and transfers: two guests of two hosts with each other, and each
/// with a host, with either as the owner.
pub fn in_guests(world: &mut World) -> Result<()> {
    let rack = &world.rack;
    let folder = installed(rack)?.display().to_string();
    let mut guests = Vec::new();
    for (name, host, release) in GUESTS {
        guests.push(Guest::start_with(rack, name, host, release, &[], &["--fabric"])?);
    }
    for (guest, (name, ..)) in guests.iter_mut().zip(GUESTS) {
        guest.booted()?;
        guest.release();
        rack.json(&["guest", "install", name, "--from", &folder])?;
        let window = guest.run("dmesg | grep 'Cache len'")?;
        println!("          {name}: {}", window.trim());
    }
    let [first, second] = &mut guests[..] else { return Err(Failure("two guests".into())) };
    let rounds = format!("-loops {ROUNDS} -size 64");
    between(Side::Guest(first), Side::Guest(second), "scipp", &rounds, &folder)?;
    between(Side::Guest(second), Side::Guest(first), "scipp", &rounds, &folder)?;
    between(Side::Host(rack), Side::Guest(first), "scipp", &rounds, &folder)?;
    between(Side::Guest(second), Side::Host(rack), "scipp", &rounds, &folder)?;
    for (tool, more) in [
        ("scibench2", "-loops 10 -size 64"),
        ("intr_bench", "-loops 20"),
        ("intr_bench", "-loops 20 -data 64"),
        ("dma_bench", "-loops 3"),
    ] {
        between(Side::Guest(first), Side::Guest(second), tool, more, &folder)?;
        between(Side::Guest(first), Side::Host(rack), tool, more, &folder)?;
    }
    for guest in guests {
        guest.stop(rack)?;
    }
    let refused = rack.refused(&["guest", "install", "new"])?;
    ensure!(refused.contains("--fabric"), "what to do is not said: {refused}");
    Ok(())
}
