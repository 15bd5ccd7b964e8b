//! One program goes on as the node that another one was, in the same process.
//!
//! The rack file is not read again: the node goes on with what it was begun with, whatever became of the file, or with the
//! text that whoever asks for it names (`up`, where hosts come and go).

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rackbus_devices::RackDevice;
use rackbus_devices::class::parse_rack;
use rackbus_fabric::rack::Rack;
use rackbus_node::handover::StateVersions;
use rackbus_node::{HandoverProgram, InheritedNode};
use rustix::event::{PollFd, PollFlags};
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use super::joined::own_credentials;
use super::own_devices;
use crate::commands::{misread, named_host};
use crate::output::Failure;
use crate::paths;

/// How long a program may take to say whether it can go on.
const ANSWER: Duration = Duration::from_secs(10);
/// What it says then, so that no program is taken for one that can.
const READY: &str = "ready to go on";
/// Bytes of what it says that are read.
const MOST_SAID: u64 = 64 << 10;

/// What the rack is, and where.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RackSource {
    /// Path of the rack file that the node was started with.
    pub file: PathBuf,
    /// What was in it.
    pub text: String,
    /// Where the drives in files are.
    pub state_dir: PathBuf,
    /// The node has joined a rack of several machines.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub joined: bool,
}

impl RackSource {
    /// Of the rack that runs in a run directory, of which the node was `joined` from another machine or not.
    pub fn running(run_dir: &Path, joined: bool) -> Result<RackSource, Failure> {
        let running = paths::running(run_dir)?;
        let text = running.text()?;
        Ok(RackSource { file: running.file, text, state_dir: running.state_dir, joined })
    }

    /// What the program before passed on.
    pub fn carried(text: &str) -> Result<RackSource, Failure> {
        serde_json::from_str(text).map_err(|error| senseless(&error))
    }

    /// The rack and its devices.
    pub fn parse(&self) -> Result<(Rack, Vec<RackDevice>), Failure> {
        parse_rack(&self.file.display().to_string(), &self.text).map_err(misread)
    }
}

/// What is asked of a program before it goes on.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    versions: StateVersions,
    rack: RackSource,
}

/// Answers the question at the standard input: whether this program can go on as the node of `host`, which has devices
/// from a file of its own or not.
pub fn answer(host: &str, devices: Option<&Path>) -> Result<(), Failure> {
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text).map_err(|error| senseless(&error))?;
    let question: Question = serde_json::from_slice(&text).map_err(|error| senseless(&error))?;
    let versions = question.versions.check();
    versions.map_err(|error| Failure::new(error, "use a newer program"))?;
    let (rack, _) = question.rack.parse()?;
    named_host(&rack, host)?;
    if let Some(file) = devices {
        own_devices::read(file, &question.rack.text, host)?;
    }
    if question.rack.joined {
        own_credentials(host, &question.rack.state_dir)?;
    }
    println!("{READY}");
    Ok(())
}

/// What the process had before it became this program.
pub fn inherited() -> Result<InheritedNode, Failure> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let inherited = socket.and_then(InheritedNode::receive).map_err(|error| senseless(&error))?;
    // From here on as every other node.
    let nothing = File::open("/dev/null").map_err(|error| senseless(&error))?;
    rustix::stdio::dup2_stdin(&nothing).map_err(|error| senseless(&error))?;
    Ok(inherited)
}

fn senseless(error: &dyn std::fmt::Display) -> Failure {
    let text = format!("what the program before passed on makes no sense: {error}");
    Failure::new(text, "start the node again; `rackbus restart` has another program go on")
}

/// The program that runs a node.
#[derive(Debug)]
pub struct NodeProgram {
    pub host: String,
    /// As it was started.
    pub args: Vec<OsString>,
    pub from: RackSource,
    /// The file with devices of its own.
    pub devices: Option<PathBuf>,
    /// The locks by which others know the process. They end when a file is closed once.
    pub held: Vec<File>,
    /// Where it passes requests of its machine on to the control plane.
    pub requests: Option<OwnedFd>,
}

impl NodeProgram {
    /// What the rack is for the program that goes on: another one where the text of its file is named.
    fn source(&self, rack: Option<&str>) -> RackSource {
        let text = rack.map_or_else(|| self.from.text.clone(), str::to_owned);
        RackSource { text, ..self.from.clone() }
    }

    fn try_replace(&self, program: &Path, parcel: &OwnedFd) -> std::io::Result<()> {
        let text = |text: &std::ffi::OsStr| CString::new(text.as_bytes());
        let mut args = vec![text(program.as_os_str())?];
        for arg in self.args.iter().chain(&["--resume".into()]) {
            args.push(text(arg)?);
        }
        for file in &self.held {
            rustix::io::fcntl_setfd(file, FdFlags::empty())?;
        }
        rustix::stdio::dup2_stdin(parcel)?;
        let Err(error) = nix::unistd::execv(&args[0], &args);
        Err(error.into())
    }
}

impl HandoverProgram for NodeProgram {
    fn carried(&self, rack: Option<&str>) -> String {
        serde_json::to_string(&self.source(rack)).unwrap_or_default()
    }

    fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.requests.as_ref().map(AsFd::as_fd)
    }

    fn check(
        &self,
        program: &Path,
        versions: &StateVersions,
        rack: Option<&str>,
    ) -> Result<(), String> {
        let question = Question { versions: versions.clone(), rack: self.source(rack) };
        let question = serde_json::to_vec(&question).map_err(|error| error.to_string())?;
        let failed = |cause: std::io::Error| format!("{}: {cause}", program.display());
        // Files, and no pipes: whatever the program does with them, nobody waits for more than its end.
        let asked = memory("question", &question).map_err(failed)?;
        let [mut answer, mut errors] =
            [memory("answer", &[]).map_err(failed)?, memory("errors", &[]).map_err(failed)?];
        let mut child = Command::new(program)
            .args(["node", "--can-resume", "--host", &self.host])
            .args(self.devices.iter().flat_map(|file| ["--devices".as_ref(), file.as_os_str()]))
            .stdin(asked)
            .stdout(answer.try_clone().map_err(failed)?)
            .stderr(errors.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let ended = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
        if !ended.is_some_and(|ended| wait(&ended, ANSWER)) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("{} does not say whether it can", program.display()));
        }
        let status = child.wait().map_err(failed)?;
        let said = |file: &mut File| -> std::io::Result<Vec<u8>> {
            let mut said = Vec::new();
            file.rewind()?;
            file.take(MOST_SAID).read_to_end(&mut said)?;
            Ok(said)
        };
        if status.success() && said(&mut answer).map_err(failed)?.trim_ascii() == READY.as_bytes() {
            return Ok(());
        }
        let errors = said(&mut errors).map_err(failed)?;
        let errors = String::from_utf8_lossy(&errors);
        // An older rackbus says first that it does not know the question.
        let why = errors.lines().find(|line| !line.trim().is_empty());
        let why = why.unwrap_or("it is no rackbus that can").trim_start_matches("rackbus: ");
        Err(format!("{}: {why}", program.display()))
    }

    fn replace(&self, program: &Path, parcel: OwnedFd) -> std::io::Error {
        let error = self.try_replace(program, &parcel).err();
        for file in &self.held {
            // Programs that this process starts have no part in them.
            let _ = rustix::io::fcntl_setfd(file, FdFlags::CLOEXEC);
        }
        if let Ok(nothing) = File::open("/dev/null") {
            // The parcel is of no use to anybody any more.
            let _ = rustix::stdio::dup2_stdin(&nothing);
        }
        error.unwrap_or_else(|| std::io::Error::other("it did not go on"))
    }
}

/// A file in memory with these bytes, to be read from its beginning.
fn memory(name: &str, bytes: &[u8]) -> std::io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Waits until a process has ended; false after `limit`.
fn wait(process: &OwnedFd, limit: Duration) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let seconds = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
    let limit = rustix::time::Timespec { tv_sec: seconds, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1..))
}
