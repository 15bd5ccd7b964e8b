//! Programs in stock guests share memory with other guests and with hosts, by the library and the tools
//! that were compiled for a host.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::sisci::node_id;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, SystemGuest, ensure, sisci};
use serde_json::{Value, json};

use crate::RackWithGuests;
use crate::programs::HostProgram;
use crate::systems::{AS_NOBODY, SYSTEM, installed_by_ssh};

/// What builds the conformance tests.
const CRATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sisci");
/// The guests: each is the host of the rack that has its name, and runs on another one.
pub const GUESTS: [(&str, &str, &str); 2] =
    [("inside", "beta", "bookworm"), ("within", "gamma", "trixie")];
/// A drive that the second of them has borrowed, and the program that has it read into a segment.
const DRIVE: &str = "alpha/nvme2";
const DIRECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/direct.c");
/// What connects, maps, stores and gives back, again and again.
const MAPPING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/mapping.c");
/// What is in the middle of something when somebody ends.
const ENDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/ending.c");
/// Two programs that write to each other's memory in turn until they are told to end.
const EXCHANGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/exchange.c");
/// A file that program makes when both write, and one that ends it.
const EXCHANGING: [&str; 2] = ["/tmp/exchanging", "/tmp/exchanged"];
/// More memory than a guest's window, which has 512 MiB.
const LARGER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/guest/window.c");
const LARGER_MIB: &str = "640";
/// The first segment of its owner.
const MAPPED: &str = "0x3a9000";
/// A host whose programs take part.
pub const HOST: &str = "alpha";
/// Where the tools are in a guest.
pub const TOOLS: &str = "/var/DIS/bin";
const TESTS: &str = "/var/DIS/tests";
/// How long a tool may take under TCG on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(200);
const ROUNDS: &str = "200";

/// The conformance tests of the library: what one process runs, and what two do, of which the guest's is the
/// one that is named.
const ALONE: [&str; 7] = ["binary", "forks", "handles", "library", "query", "sharing", "signals"];
const TOGETHER: [(&str, &str); 9] = [
    ("segments", "owner"),
    ("maps", "peer"),
    ("segment_events", "owner"),
    ("interrupts", "peer"),
    ("data_interrupts", "owner"),
    ("dma", "peer"),
    ("copy", "owner"),
    ("reflective", "peer"),
    ("removals", "owner"),
];

/// One side of an exchange.
pub enum ExchangeSide<'a> {
    Guest(&'a mut Guest),
    System(&'a SystemGuest),
    Host(&'a RackProcesses),
}

impl ExchangeSide<'_> {
    fn name(&self) -> String {
        match self {
            ExchangeSide::Guest(guest) => guest.name().to_owned(),
            ExchangeSide::System(guest) => guest.name().to_owned(),
            ExchangeSide::Host(_) => HOST.to_owned(),
        }
    }
}

/// A tool that runs, on a host or by a program of a host's.
pub enum Running {
    Guest(String, rackbus_vm::agent::RunningCommand),
    Host(HostProgram),
}

impl Running {
    fn start(
        side: &mut ExchangeSide<'_>,
        tool: &str,
        arguments: &str,
        tools: &str,
    ) -> Result<Running> {
        match side {
            ExchangeSide::Guest(guest) => {
                let name = guest.name().to_owned();
                let script = format!("{TOOLS}/{tool} {arguments}");
                Ok(Running::Guest(name, guest.begin(&script, LIMIT)?))
            }
            ExchangeSide::System(guest) => {
                let script = format!("{AS_NOBODY} {}/{tool} {arguments}", crate::systems::TOOLS);
                Ok(Running::Host(HostProgram::start(guest.command(&script))?))
            }
            ExchangeSide::Host(rack) => {
                Running::host(rack, &format!("{tools}/bin/{tool}"), arguments)
            }
        }
    }

    /// One on a host.
    pub fn host(rack: &RackProcesses, program: &str, arguments: &str) -> Result<Running> {
        let mut command = Command::new(program);
        command.args(arguments.split_whitespace());
        command.env("RACKBUS_RUN_DIR", rack.run_dir()).env("RACKBUS_HOST", HOST);
        Ok(Running::Host(HostProgram::start(command)?))
    }

    /// What it printed, once it has ended well.
    pub fn end(self) -> Result<String> {
        match self {
            Running::Guest(name, running) => succeeded(&name, "a tool", &running.wait()?),
            Running::Host(program) => program.end(),
        }
    }

    /// Kills one on a host.
    pub fn kill(self) -> Result<()> {
        match self {
            Running::Guest(name, _) => {
                Err(CheckFailure(format!("a tool in {name} is not killed so")))
            }
            Running::Host(program) => {
                drop(program);
                Ok(())
            }
        }
    }
}

/// Library, headers and tools, as they are installed on a host, with programs of the tests beside them.
pub fn installed(rack: &RackProcesses) -> Result<PathBuf> {
    let folder = sisci::install(rack)?;
    let assigned = |name: &str, value: &std::path::Path| format!("{name}={}", value.display());
    let made = Command::new("make")
        .args(["--silent", "-C", CRATE, "tests", "RPATH="])
        .arg(assigned("LIB", &folder.join("lib")))
        .arg(assigned("OUT", &folder))
        .output()?;
    ensure!(made.status.success(), "{CRATE}: {}", String::from_utf8_lossy(&made.stderr));
    for source in [DIRECT, MAPPING, ENDING, EXCHANGE, LARGER] {
        sisci::build(&folder, source.as_ref())?;
    }
    Ok(folder)
}

/// Runs a tool between two sides, and looks that the client printed rows of measures.
pub fn between(
    mut server: ExchangeSide<'_>,
    mut client: ExchangeSide<'_>,
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

/// Runs the conformance tests in a guest, with a host as the other side.
pub fn conformance(
    rack: &RackProcesses,
    guest: &mut Guest,
    name: &str,
    folder: &str,
) -> Result<()> {
    for test in ALONE {
        guest
            .begin(&format!("{TESTS}/{test}"), LIMIT)
            .and_then(|it| succeeded(name, test, &it.wait()?))?;
    }
    conformance_of_two(rack, guest, name, folder)
}

/// Those of the conformance tests that are about two programs.
pub fn conformance_of_two(
    rack: &RackProcesses,
    guest: &mut Guest,
    name: &str,
    folder: &str,
) -> Result<()> {
    let id = |host| node_id(rack, host);
    for (test, role) in TOGETHER {
        let other = if role == "owner" { "peer" } else { "owner" };
        let inside = guest.begin(&format!("{TESTS}/{test} {role} {}", id(HOST)?), LIMIT)?;
        let inside = Running::Guest(format!("{name}, {test}"), inside);
        let arguments = format!("{other} {}", id(name)?);
        let outside = Running::host(rack, &format!("{folder}/tests/{test}"), &arguments)?;
        outside.end()?;
        inside.end()?;
    }
    Ok(())
}

/// The conformance tests of two programs, in guests of two machines, each of which is the host of its name.
pub fn conformance_between_machines(
    rack: &RackProcesses,
    first: &mut Guest,
    second: &mut Guest,
) -> Result<()> {
    let (first_id, second_id) = (node_id(rack, first.name())?, node_id(rack, second.name())?);
    for (test, role) in TOGETHER {
        let other = if role == "owner" { "peer" } else { "owner" };
        let begin = |guest: &mut Guest, role: &str, id: u64| {
            let script = format!("SCENARIO_MACHINES=1 {TESTS}/{test} {role} {id}");
            let running = guest.begin(&script, LIMIT)?;
            Ok::<_, CheckFailure>(Running::Guest(format!("{}, {test}", guest.name()), running))
        };
        let one = begin(first, role, second_id)?;
        let two = begin(second, other, first_id)?;
        one.end()?;
        two.end()?;
    }
    Ok(())
}

/// The guests, with library, tools and programs from `folder`.
fn started(rack: &RackProcesses, folder: &str) -> Result<Vec<Guest>> {
    let mut guests = Vec::new();
    for (name, host, release) in GUESTS {
        let functions: &[&str] = if guests.is_empty() { &[] } else { &[DRIVE] };
        guests.push(Guest::start_with(rack, name, host, release, functions, &["--fabric"])?);
    }
    for (guest, (name, ..)) in guests.iter_mut().zip(GUESTS) {
        guest.booted()?;
        guest.release();
        rack.json(&["guest", "install", name, "--from", folder])?;
        let window = guest.run("dmesg | grep 'Cache len'")?;
        println!("          {name}: {}", window.trim());
    }
    Ok(guests)
}

/// The conformance tests in guests of all kernels. Where programs end in the middle, some of them run as well.
pub fn conformance_in_guests(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let folder = installed(rack)?.display().to_string();
    let mut guests = started(rack, &folder)?;
    for (guest, (name, ..)) in guests.iter_mut().zip(GUESTS) {
        conformance(rack, guest, name, &folder)?;
    }
    guests.into_iter().try_for_each(|guest| guest.stop(rack))?;
    let mut newest = crate::endings::started(rack, &folder)?;
    conformance(rack, &mut newest, crate::endings::GUEST.0, &folder)?;
    newest.stop(rack)
}

/// Ping-pong through segments, interrupts and transfers: two guests of two hosts with each other, and each
/// with a host, with either as the owner; and two guests of one host.
pub fn in_guests(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let folder = installed(rack)?.display().to_string();
    let system = SystemGuest::start(rack, SYSTEM.0, SYSTEM.1)?;
    let mut guests = started(rack, &folder)?;
    interrupted_install(rack, &mut guests[0], &folder)?;
    let [first, second] = &mut guests[..] else { return Err(CheckFailure("two guests".into())) };
    let rounds = format!("-loops {ROUNDS} -size 64");
    between(ExchangeSide::Guest(first), ExchangeSide::Guest(second), "scipp", &rounds, &folder)?;
    between(ExchangeSide::Guest(second), ExchangeSide::Guest(first), "scipp", &rounds, &folder)?;
    between(ExchangeSide::Host(rack), ExchangeSide::Guest(first), "scipp", &rounds, &folder)?;
    between(ExchangeSide::Guest(second), ExchangeSide::Host(rack), "scipp", &rounds, &folder)?;
    for (tool, more) in [
        ("scibench2", "-loops 10 -size 64"),
        ("intr_bench", "-loops 20"),
        ("intr_bench", "-loops 20 -data 64"),
        ("dma_bench", "-loops 3"),
    ] {
        between(ExchangeSide::Guest(first), ExchangeSide::Guest(second), tool, more, &folder)?;
        between(ExchangeSide::Guest(first), ExchangeSide::Host(rack), tool, more, &folder)?;
    }
    one_segment_everywhere(rack, first, second, &folder)?;
    read_only(rack, first, &folder)?;
    larger_than_the_window(rack, second, &folder)?;
    helper_dies(rack, first, second, &folder)?;
    killed(rack, guests.remove(0), &folder)?;
    installed_by_ssh(rack, system, &mut guests[0], &folder)?;
    for guest in guests {
        guest.stop(rack)?;
    }
    let refused = rack.refused(&["guest", "install", "new"])?;
    ensure!(refused.contains("--fabric"), "what to do is not said: {refused}");
    Ok(())
}

/// An installation that ends in its middle leaves nothing that is in the way of the next.
fn interrupted_install(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let (name, record) = (guest.name().to_owned(), guest.vm().record().clone());
    let mut command = Command::new(rackbus_e2e::rack::beside("rackbus")?);
    command.args(["guest", "install", &name, "--from", folder]);
    let install = HostProgram::start({
        command.env("RACKBUS_RUN_DIR", rack.run_dir());
        command
    })?;
    rack.wait("the disk is plugged in", LIMIT, |_| {
        let path = json!({"path": "/machine/peripheral"});
        let mut qmp = record.qmp().ok()?;
        qmp.command("qom-list", &path).ok()?.to_string().contains("rackbus-disk").then_some(())
    })?;
    // Killed.
    drop(install);
    rack.json(&["guest", "install", &name, "--from", folder]).map(drop)
}

/// A segment of a host, mapped by two guests on two hosts and by a program on a third at once: the drive of one
/// guest reads into it, and all see that.
fn one_segment_everywhere(
    rack: &RackProcesses,
    first: &mut Guest,
    second: &mut Guest,
    folder: &str,
) -> Result<()> {
    let program = format!("{folder}/bin/direct");
    let owner = Running::host(rack, &program, "own 2")?;
    let id = node_id(rack, HOST)?;
    let watching = first.begin(&format!("{TOOLS}/direct {id} watch 1"), LIMIT)?;
    let on_host = Running::host(rack, &program, &format!("{id} watch 2"))?;
    second.run(&format!("{TOOLS}/direct {id} /dev/nvme0n1"))?;
    succeeded(first.name(), "watch", &watching.wait()?)?;
    on_host.end()?;
    owner.end().map(drop)
}

/// A guest is refused what it may only read, by a line that says why; a host is not.
fn read_only(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let share = |access| {
        let name = guest.name();
        rack.json(&["mem", "share", HOST, MAPPED, "--with", name, "--access", access])
    };
    share("read")?;
    let owner = Running::host(rack, &format!("{folder}/bin/mapping"), "own 1")?;
    let id = node_id(rack, HOST)?;
    let said = guest.run(&format!("{TOOLS}/mapping {id} 1 0 2>&1; echo status $?"))?;
    ensure!(said.ends_with("status 1"), "what may only be read was had: {said}");
    let share = |access| {
        let name = guest.name();
        rack.json(&["mem", "share", HOST, MAPPED, "--with", name, "--access", access])
    };
    share("write")?;
    guest.run(&format!("{TOOLS}/mapping {id} 1 0 end"))?;
    owner.end().map(drop)
}

/// A guest maps more than its window has room for at once.
fn larger_than_the_window(rack: &RackProcesses, guest: &mut Guest, folder: &str) -> Result<()> {
    let begun = std::time::Instant::now();
    let owner = Running::host(rack, &format!("{folder}/bin/window"), &format!("own {LARGER_MIB}"))?;
    let script = format!("{TOOLS}/window {} {LARGER_MIB}", node_id(rack, HOST)?);
    let user = guest.begin(&script, LIMIT)?;
    succeeded(guest.name(), "window", &user.wait()?)?;
    owner.end()?;
    println!("          {LARGER_MIB} MiB through the window: {:.0?}", begun.elapsed());
    Ok(())
}

/// The process that serves a guest's device is killed, several times: programs that have memory mapped notice
/// nothing, and what asks for something waits a moment.
fn helper_dies(
    rack: &RackProcesses,
    first: &mut Guest,
    second: &mut Guest,
    folder: &str,
) -> Result<()> {
    let (here, there) = (second.name().to_owned(), first.name().to_owned());
    let [begun, end] = EXCHANGING;
    let (first_id, second_id) = (node_id(rack, &there)?, node_id(rack, &here)?);
    let answers = first.begin(&format!("{TOOLS}/exchange {second_id}"), LIMIT)?;
    let asks = second.begin(&format!("{TOOLS}/exchange {first_id} {begun} {end}"), LIMIT)?;
    second.run(&format!("until [ -e {begun} ]; do sleep 0.1; done"))?;
    let owner = Running::host(rack, &format!("{folder}/bin/mapping"), "own 6")?;
    let id = node_id(rack, HOST)?;
    let once = format!("{TOOLS}/mapping {id} 10 5");
    first.run(&once)?;
    for _ in 0..3 {
        let standby = rack.kill_helper(&there)?;
        let printed = first.run(&once)?;
        let row = printed.lines().filter_map(|it| serde_json::from_str::<Value>(it).ok()).next();
        let worst = row.and_then(|row| row["worst"].as_f64()).unwrap_or_default();
        println!("          the standby serves; connect, map and store took {worst:.0} us at most");
        let serving = rack.wait("there is a standby again", LIMIT, |rack| rack.helpers(&there))?;
        ensure!(serving.0 == standby, "another process than the standby serves");
    }
    second.run(&format!("touch {end}"))?;
    let printed = succeeded(&here, "exchange", &asks.wait()?)?;
    println!("          meanwhile: {}", printed.trim());
    succeeded(&there, "exchange", &answers.wait()?)?;
    // In the middle of requests: each is answered, or its process is told that the session has ended.
    let busy = first.begin(&format!("{TOOLS}/mapping {id} 2000 5"), LIMIT)?;
    for _ in 0..3 {
        rack.kill_helper(&there)?;
    }
    let ended = busy.wait()?;
    ensure!([0, 1].contains(&ended.status), "status {}: {}", ended.status, ended.text());
    first.run(&format!("{TOOLS}/mapping {id} 10 5 end"))?;
    owner.end().map(drop)
}

/// A VM is killed with segments of others mapped, and with others connected to its own: nothing of it is left.
fn killed(rack: &RackProcesses, mut guest: Guest, folder: &str) -> Result<()> {
    let name = guest.name().to_owned();
    let own = guest.begin(&format!("{TOOLS}/mapping own 3"), LIMIT)?;
    let owner = Running::host(rack, &format!("{folder}/bin/mapping"), "own 21")?;
    let id = node_id(rack, HOST)?;
    guest.run(&format!("{TOOLS}/mapping {id} 10 2"))?;
    let maps = guest.begin(&format!("{TOOLS}/mapping {id} 1000000 20"), LIMIT)?;
    let guests_own = node_id(rack, &name)?;
    let program = format!("{folder}/bin/mapping");
    Running::host(rack, &program, &format!("{guests_own} 10 2"))?.end()?;
    rack.json(&["vm", "stop", "--kill", &name])?;
    drop((own, maps));
    rack.wait("nothing of a killed VM is left", LIMIT, |rack| {
        let reached = rack.json(&["reach", &name]).ok()?;
        let segments = rack.json(&["mem", "segments", &name]).ok()?;
        let none = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        (none(&reached) && none(&segments) && rack.helpers(&name).is_none()).then_some(())
    })?;
    Running::host(rack, &program, &format!("{id} 1 0 end"))?.end()?;
    owner.end().map(drop)
}
