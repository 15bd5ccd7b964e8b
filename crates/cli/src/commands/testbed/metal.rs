//! `rackbus testbed metal`: virtual machines that stand for physical hosts with NTBs between them, to try borrowing on
//! bare metal without the hardware.
//!
//! The command that boots the machines has them until it ends; the other commands of the testbed ask it at a socket in
//! its folder, a line of JSON each way.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_vm::metal::{ACCELERATOR, BareMetalRack, BareMetalSpec, DRIVE, MODELLED};
use rackbus_vm::{Assets, GuestRelease, VmError};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::sync::mpsc;

use super::{NAMES, done, failed};
use crate::output::{Cell, Failure, Output, Tone};
use crate::{paths, process, shell};

/// The folder's socket at which the other commands ask.
const SOCKET: &str = "metal.sock";
/// The longest request, in bytes: a command line.
const LONGEST_REQUEST: u64 = 2 << 20;

/// What `rackbus testbed metal` boots.
#[derive(Debug, clap::Args)]
pub struct MetalArgs {
    /// How many hosts: alpha, which lends drives and an accelerator, and those that borrow them.
    #[arg(default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=8))]
    hosts: u8,
    /// What the hosts run: bookworm (Linux 6.1) or trixie (Linux 6.12)
    #[arg(long, value_name = "NAME", default_value = "bookworm")]
    guest: GuestRelease,
    /// Size of alpha's drive.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "64M")]
    drive: u64,
    /// The hosts' network is 10.78.NUMBER.0/24.
    #[arg(long, value_name = "NUMBER", default_value_t = 19)]
    subnet: u8,
    /// Boot the machines only: no control plane and no nodes.
    #[arg(long)]
    bare: bool,
}

fn size(text: &str) -> Result<u64, String> {
    match crate::size::parse(text)? {
        bytes if bytes < 1 << 20 => Err("it is at least 1M".to_owned()),
        bytes => Ok(bytes),
    }
}

/// A request of a command to the process that has the machines.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestbedRequest {
    /// Run this command line on a host, for so many seconds at most.
    Run { machine: String, command: String, seconds: u64 },
    /// End the node of a host, as a crash would.
    Kill { machine: String },
    /// Start the node of a host again.
    Start { machine: String },
    /// Plug the cable of a host in, or pull it.
    Cable { machine: String, plugged_in: bool },
    /// End all machines of the testbed.
    End,
}

impl TestbedRequest {
    /// The host that is meant.
    fn machine(&self) -> Option<&str> {
        match self {
            TestbedRequest::Run { machine, .. }
            | TestbedRequest::Kill { machine }
            | TestbedRequest::Start { machine }
            | TestbedRequest::Cable { machine, .. } => Some(machine),
            TestbedRequest::End => None,
        }
    }
}

/// The answer to a [`TestbedRequest`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Ran { status: i32, stdout: Vec<u8>, stderr: Vec<u8> },
    Done,
    Failed { error: String, usage: bool },
}

/// Whether machines that stand for hosts run in this folder.
pub fn is_there(dir: &Path) -> bool {
    UnixStream::connect(dir.join(SOCKET)).is_ok()
}

/// Asks the command that has the machines.
fn ask(dir: &Path, request: &TestbedRequest) -> Result<Answer, Failure> {
    let lost = |cause: std::io::Error| {
        failed(format!("the command `rackbus testbed metal` does not answer: {cause}"))
    };
    let mut stream = UnixStream::connect(dir.join(SOCKET)).map_err(lost)?;
    let mut line = serde_json::to_string(request).map_err(|error| failed(error.to_string()))?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(lost)?;
    let mut answer = String::new();
    BufReader::new(&mut stream).read_line(&mut answer).map_err(lost)?;
    if let TestbedRequest::End = request {
        // It closes when all machines have ended.
        let _ = stream.read(&mut [0]);
    }
    match serde_json::from_str(&answer).map_err(|error| failed(error.to_string()))? {
        Answer::Failed { error, usage: true } => Err(Failure::usage(error, "name one of them")),
        Answer::Failed { error, usage: false } => {
            Err(Failure::new(error, "see its log: `rackbus testbed on HOST -- 'tail /tmp/*.log'`"))
        }
        answer => Ok(answer),
    }
}

/// Runs a program on a host; its exit status is this one's, as with ssh.
pub fn on(dir: &Path, machine: &str, command: &[String], output: &Output) -> Result<(), Failure> {
    // As long as the machines run: whoever waits can end this command.
    let seconds = Duration::from_secs(365 * 86400).as_secs();
    let (machine, command) = (machine.to_owned(), shell::command(command));
    match ask(dir, &TestbedRequest::Run { machine, command, seconds })? {
        Answer::Ran { status, stdout, stderr } => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let value =
                json!({ "status": status, "stdout": text(&stdout), "stderr": text(&stderr) });
            output.result(&value, |_| {
                // A reader that has gone away needs no words.
                let _ = std::io::stdout().write_all(&stdout);
                let _ = std::io::stderr().write_all(&stderr);
            });
            std::process::exit(status)
        }
        other => Err(failed(format!("an unexpected answer: {other:?}"))),
    }
}

/// Asks for something whose only answer is that it was done.
pub fn request(
    dir: &Path,
    request: &TestbedRequest,
    what: &str,
    output: &Output,
) -> Result<(), Failure> {
    ask(dir, request)?;
    match request.machine() {
        Some(machine) => done(output, machine, what),
        None => output.result(&json!({ "ended": true }), |o| o.line("the machines have ended")),
    }
    Ok(())
}

type Shared = Arc<Mutex<BareMetalRack>>;

fn lock(rack: &Shared) -> MutexGuard<'_, BareMetalRack> {
    rack.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MetalArgs {
    /// Boots the machines and has them until it is asked to end.
    pub async fn run(&self, dir: &Path, output: &Output) -> Result<(), Failure> {
        let mut end = process::EndRequests::listen();
        paths::make_private(dir)?;
        // Sockets of machines that were killed, and what they left of their disks.
        for stale in ["machines", SOCKET] {
            remove(&dir.join(stale))?;
        }
        let socket = dir.join(SOCKET);
        let listener = UnixListener::bind(&socket)
            .map_err(|cause| failed(format!("{}: {cause}", socket.display())))?;
        let rack = self.boot(&dir.join("machines"), output, &mut end).await;
        let outcome = match rack {
            Ok(Some(rack)) => {
                self.show(&rack, dir, output);
                serve(rack, listener, end).await
            }
            Ok(None) => Ok(()),
            Err(failure) => Err(failure),
        };
        remove(&socket)?;
        outcome
    }

    /// Boots them; none when that was interrupted.
    async fn boot(
        &self,
        dir: &Path,
        output: &Output,
        end: &mut process::EndRequests,
    ) -> Result<Option<Shared>, Failure> {
        let program = std::env::current_exe().map_err(|cause| failed(cause.to_string()))?;
        let hosts: Vec<(String, GuestRelease)> = { NAMES[..usize::from(self.hosts)].iter() }
            .map(|name| ((*name).to_owned(), self.guest))
            .collect();
        let (subnet, drive, bare) = (self.subnet, self.drive, self.bare);
        let spec = BareMetalSpec {
            program,
            programs: Vec::new(),
            hosts,
            subnet,
            drive,
            with_local_drive: false,
        };
        output.progress(&format!(
            "{} machines boot, each with its end of an NTB in software",
            self.hosts
        ));
        let dir = dir.to_owned();
        let boot = tokio::task::spawn_blocking(move || {
            let mut rack = BareMetalRack::boot(&Assets::of_user(), &spec, &dir)?;
            if !bare {
                rack.join()?;
            }
            Ok::<_, VmError>(rack)
        });
        tokio::select! {
            booted = boot => match booted {
                Ok(rack) => Ok(Some(Arc::new(Mutex::new(rack?)))),
                Err(error) => Err(failed(format!("a thread failed: {error}"))),
            },
            () = end.wait() => {
                output.progress("ending the machines, as soon as they have booted");
                Ok(None)
            }
        }
    }

    /// Says which hosts there are and what to do with them.
    fn show(&self, rack: &Shared, dir: &Path, output: &Output) {
        let names = lock(rack).names();
        let kernel = self.guest.name();
        let role = |number: usize| match number {
            0 => format!("lends {0}/{DRIVE}, {0}/{MODELLED}, {0}/{ACCELERATOR}.vf1", names[0]),
            _ => "borrows".to_owned(),
        };
        let hosts: Vec<_> = names.iter().enumerate().map(|(n, name)| (name, role(n))).collect();
        let value = { hosts.iter() }
            .map(|(name, role)| json!({ "host": name, "guest": kernel, "role": role }));
        let value = json!({ "ready": true, "hosts": value.collect::<Vec<_>>() });
        let option = match dir == Path::new(super::DEFAULT_DIR) {
            true => String::new(),
            false => format!("--dir {} ", dir.display()),
        };
        output.result(&value, |o| {
            let plain = |text: &str| Cell(text.to_owned(), Tone::Plain);
            let rows = hosts.iter().map(|(name, role)| vec![plain(name), plain(kernel), plain(role)]);
            o.table(&["host", "guest", "role"], rows.collect());
            o.line("ready; Ctrl-C ends the machines. In another terminal:");
            if !self.bare {
                o.line(&format!("  rackbus testbed {option}on beta -- rackbus borrow alpha/{DRIVE} --for beta --placement host"));
            }
            o.line(&format!("  rackbus testbed {option}on beta -- lsblk"));
        });
    }
}

fn remove(path: &PathBuf) -> Result<(), Failure> {
    let outcome = match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    match outcome {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
            Err(failed(format!("{}: {cause}", path.display())))
        }
        _ => Ok(()),
    }
}

/// Answers until this command is asked to end, by a signal or by `rackbus testbed down`.
async fn serve(
    rack: Shared,
    listener: UnixListener,
    mut end: process::EndRequests,
) -> Result<(), Failure> {
    let (ending, mut ended) = mpsc::channel(1);
    let last = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(converse(rack.clone(), stream, ending.clone()));
                }
                Err(cause) => return Err(failed(format!("the testbed's socket: {cause}"))),
            },
            last = ended.recv() => break last,
            () = end.wait() => break None,
        }
    };
    // Scripts that run keep no machine: what they were started by has its own connection. The machines end with the
    // last holder, which is this one once the requests under way have dropped it.
    let end = tokio::task::spawn_blocking(move || {
        lock(&rack).machines().iter_mut().for_each(|machine| machine.vm().kill());
        drop(rack);
    });
    end.await.map_err(|error| failed(format!("a thread failed: {error}")))?;
    // Whoever asked for the end waits for the connection's.
    drop(last);
    Ok(())
}

/// Reads the request of one connection, carries it out, and answers it.
async fn converse(
    rack: Shared,
    stream: tokio::net::UnixStream,
    ending: mpsc::Sender<tokio::net::UnixStream>,
) {
    let mut reader = tokio::io::BufReader::new(stream);
    let mut line = String::new();
    let read = (&mut reader).take(LONGEST_REQUEST).read_line(&mut line).await;
    let request = match read {
        Ok(0) | Err(_) => return,
        Ok(_) => serde_json::from_str(&line),
    };
    let mut stream = reader.into_inner();
    let (answer, is_end) = match request {
        Ok(TestbedRequest::End) => (Answer::Done, true),
        Ok(request) => {
            let carried = tokio::task::spawn_blocking(move || carry_out(&rack, request)).await;
            let failed = |error: String| Answer::Failed { error, usage: false };
            let answer = match carried {
                Ok(outcome) => outcome.unwrap_or_else(|error| failed(error.to_string())),
                Err(error) => failed(error.to_string()),
            };
            (answer, false)
        }
        Err(error) => (Answer::Failed { error: error.to_string(), usage: true }, false),
    };
    let text = serde_json::to_string(&answer).unwrap_or_default();
    // Whoever went away needs no answer.
    let _ = stream.write_all(format!("{text}\n").as_bytes()).await;
    if is_end {
        let _ = ending.send(stream).await;
    }
}

fn carry_out(rack: &Shared, request: TestbedRequest) -> Result<Answer, VmError> {
    if let Some(machine) = request.machine() {
        let names = lock(rack).names();
        if !names.iter().any(|name| name == machine) {
            let error = format!("there is no host {machine}: there are {}", names.join(", "));
            return Ok(Answer::Failed { error, usage: true });
        }
    }
    match request {
        TestbedRequest::Run { machine, command, seconds } => {
            // Scripts of one machine run beside each other: the rack is not held meanwhile.
            let limit = Duration::from_secs(seconds);
            let script = format!("set +e\n{command}");
            let running = lock(rack).begin(&machine, &script, limit)?;
            let output = running.wait()?;
            let (stdout, stderr) = (output.stdout, output.stderr);
            return Ok(Answer::Ran { status: output.status, stdout, stderr });
        }
        TestbedRequest::Kill { machine } => lock(rack).kill_node(&machine)?,
        TestbedRequest::Start { machine } => lock(rack).start_node(&machine)?,
        TestbedRequest::Cable { machine, plugged_in } => {
            lock(rack).set_cable(&machine, plugged_in)?
        }
        TestbedRequest::End => {}
    }
    Ok(Answer::Done)
}
