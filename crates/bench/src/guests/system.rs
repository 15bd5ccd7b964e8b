//! A rack with two hosts and two guests, and programs on them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result, ensure, sisci};
use rackbus_vm::Assets;
use rackbus_vm::agent::RunningCommand;

/// The rack: two hosts, and the hosts that their guests are.
const RACK: &str = "name = \"guests-bench\"\n[hosts.alpha]\n[hosts.beta]\n\
    [hosts.vm1]\nmemory = \"1 GiB\"\n[hosts.vm2]\nmemory = \"1 GiB\"\n";
/// The guests: name, host, release.
const GUESTS: [(&str, &str, &str); 2] = [("vm1", "alpha", "trixie"), ("vm2", "beta", "trixie")];
/// Programs of the end-to-end tests.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/guest");
const PROGRAMS: [&str; 3] = ["mapping.c", "pio.c", "events.c"];
/// Where programs are in a guest.
const TOOLS: &str = "/var/DIS/bin";
/// How long one may take.
const LIMIT: Duration = Duration::from_secs(900);

/// Where a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramPlace {
    Host(&'static str),
    First,
    Second,
}

impl ProgramPlace {
    fn name(self) -> &'static str {
        match self {
            ProgramPlace::Host(host) => host,
            ProgramPlace::First => GUESTS[0].0,
            ProgramPlace::Second => GUESTS[1].0,
        }
    }
}

/// A program that runs.
enum Program {
    Guest(RunningCommand),
    Host(Child),
}

/// The rack and its guests.
#[derive(Debug)]
pub(super) struct MeasuredGuests {
    guests: Vec<Guest>,
    folder: PathBuf,
    rack: RackProcesses,
    /// What the guests run under.
    pub accel: String,
}

impl MeasuredGuests {
    pub(super) fn start(dir: &Path) -> Result<MeasuredGuests> {
        let accel = Assets::of_user().accel()?.to_string().to_uppercase();
        let file = dir.join("rack.toml");
        std::fs::write(&file, RACK)?;
        let rack = RackProcesses::start(&file, dir)?;
        let folder = sisci::install(&rack)?;
        for program in PROGRAMS {
            sisci::build(&folder, &Path::new(SOURCES).join(program))?;
        }
        let start = |(name, host, release)| {
            Guest::start_with(&rack, name, host, release, &[], &["--fabric"])
        };
        let mut guests = GUESTS.into_iter().map(start).collect::<Result<Vec<Guest>>>()?;
        let from = folder.display().to_string();
        for guest in &mut guests {
            guest.booted()?;
            guest.release();
            rack.json(&["guest", "install", guest.name(), "--from", &from])?;
        }
        Ok(MeasuredGuests { guests, folder, rack, accel })
    }

    fn begin(&mut self, place: ProgramPlace, program: &str, arguments: &str) -> Result<Program> {
        let guest = match place {
            ProgramPlace::First => self.guests.first_mut(),
            ProgramPlace::Second => self.guests.get_mut(1),
            ProgramPlace::Host(host) => {
                let child = Command::new(self.folder.join("bin").join(program))
                    .args(arguments.split_whitespace())
                    .env("RACKBUS_RUN_DIR", self.rack.run_dir())
                    .env("RACKBUS_HOST", host)
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()?;
                return Ok(Program::Host(child));
            }
        };
        let guest = guest.ok_or_else(|| CheckFailure("there is no such guest".to_owned()))?;
        let script = format!("{TOOLS}/{program} {arguments}");
        Ok(Program::Guest(guest.begin(&script, LIMIT)?))
    }

    fn end(place: ProgramPlace, program: Program) -> Result<String> {
        match program {
            Program::Guest(running) => succeeded(place.name(), "a program", &running.wait()?),
            Program::Host(child) => {
                let output = child.wait_with_output()?;
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(output.status.success(), "on {}: {said}", place.name());
                Ok(String::from_utf8_lossy(&output.stdout).into_owned())
            }
        }
    }

    /// Runs a program by itself.
    pub(super) fn alone(
        &mut self,
        place: ProgramPlace,
        program: &str,
        options: &str,
    ) -> Result<String> {
        let program = self.begin(place, program, options)?;
        MeasuredGuests::end(place, program)
    }

    /// Runs a program at an owner and at a user of its memory, with the arguments for the owner's node id, or
    /// for none at the owner; what the user prints.
    pub(super) fn pair(
        &mut self,
        owner: ProgramPlace,
        user: ProgramPlace,
        program: &str,
        arguments: impl Fn(Option<u64>) -> String,
    ) -> Result<String> {
        let id = sisci::node_id(&self.rack, owner.name())?;
        let owns = self.begin(owner, program, &arguments(None))?;
        let uses = self.begin(user, program, &arguments(Some(id)))?;
        let printed = MeasuredGuests::end(user, uses)?;
        MeasuredGuests::end(owner, owns)?;
        Ok(printed)
    }

    /// Runs one of the public tools between two sides; what the client prints.
    pub(super) fn tool(
        &mut self,
        server: ProgramPlace,
        client: ProgramPlace,
        tool: &str,
        options: &str,
    ) -> Result<String> {
        let answers = self.begin(server, tool, &format!("-server -rn {}", client.name()))?;
        let arguments = format!("-client -rn {} -json {options}", server.name());
        let measures = self.begin(client, tool, &arguments)?;
        let printed = MeasuredGuests::end(client, measures)?;
        MeasuredGuests::end(server, answers)?;
        Ok(printed)
    }

    /// Connects to a host's segment, maps it and gives it back, again and again.
    pub(super) fn mapping(&mut self, user: ProgramPlace, loops: u32, live: u32) -> Result<String> {
        let segments = live + 1;
        self.pair(ProgramPlace::Host("alpha"), user, "mapping", |id| match id {
            None => format!("own {segments}"),
            Some(id) => format!("{id} {loops} {live} end"),
        })
    }
}
