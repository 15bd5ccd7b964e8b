//! Runs commands in a guest: the host's side of `guest/agent`, over a virtio-serial port.
//!
//! QEMU serves one connection of a port at a time, so a VM has several ports, and each connection locks the one that it
//! uses.
//!
//! A request is a line `ID SECONDS COMMAND`, a reply `ID STATUS STDOUT STDERR`, the last fields
//! base64. Commands run at the same time and their replies come as they end, so one connection
//! serves any number of threads. What the guest sends is not trusted: a reply that does not parse
//! or that nobody waits for is dropped.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::io;
use crate::{Result, VmError};

/// The longest reply taken from a guest, bytes: what a guest sends must not fill the host.
const LONGEST_REPLY: u64 = 64 << 20;

/// The longest that a command may run, a year: a longer limit is taken as this.
pub const LONGEST_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// What a command in the guest left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// The exit status; 124 or 143 when it was stopped for taking too long.
    pub status: i32,
    /// What it wrote to standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: Vec<u8>,
}

impl CommandOutput {
    /// Whether the command ended with status 0.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.status == 0
    }

    /// Standard output as text, without the last newline.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

/// How many connections a VM has at the same time; `guest/agent` serves as many ports.
pub(crate) const PORTS: usize = 4;

/// Name of a port's socket, in the VM's folder. VMs of older versions have the first only.
pub(crate) fn socket_name(port: usize) -> String {
    match port {
        0 => "agent.sock".to_owned(),
        port => format!("agent.{port}.sock"),
    }
}

/// Takes a port of the VM whose folder this is: nobody else does for as long as the lock is open.
///
/// # Errors
/// All are taken, or the folder cannot be written to.
fn take_port(dir: &Path) -> Result<(PathBuf, File)> {
    for port in 0..PORTS {
        let socket = dir.join(socket_name(port));
        if !socket.exists() {
            continue;
        }
        let path = dir.join(format!("agent.{port}.lock"));
        let lock = File::options().create(true).append(true).open(&path);
        let lock = lock.map_err(io("make", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok((socket, lock)),
            Err(Errno::WOULDBLOCK) => {}
            Err(cause) => return Err(io("lock", &path)(cause.into())),
        }
    }
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    match dir.join(socket_name(0)).exists() {
        true => Err(VmError::AgentBusy(name.into_owned())),
        false => Err(io("connect to the agent at", dir)(ErrorKind::NotFound.into())),
    }
}

type Waiting = Arc<Mutex<HashMap<u64, Sender<CommandOutput>>>>;

/// A connection to a guest's agent.
#[derive(Debug)]
pub struct GuestAgent {
    path: PathBuf,
    writer: Mutex<RequestWriter>,
    waiting: Waiting,
    next: AtomicU64,
    /// Of its port, from other processes.
    _lock: Option<File>,
}

/// Sends requests to a guest, which may not take any for a while.
#[derive(Debug)]
struct RequestWriter {
    stream: UnixStream,
    /// What is left of a request that the guest has a part of: it goes first, so that the guest does not take what
    /// follows for a part of that request.
    rest: Vec<u8>,
}

impl RequestWriter {
    /// Sends one request within `limit`.
    fn send(&mut self, request: &[u8], limit: Duration) -> std::io::Result<()> {
        let deadline = Instant::now() + limit;
        let mut rest = std::mem::take(&mut self.rest);
        let sent = self.write(&mut rest, deadline);
        self.rest = rest;
        sent?;
        let mut rest = request.to_vec();
        let sent = self.write(&mut rest, deadline);
        if rest.len() < request.len() {
            self.rest = rest;
        }
        sent
    }

    /// Writes `data` and takes away from it what is written.
    fn write(&mut self, data: &mut Vec<u8>, deadline: Instant) -> std::io::Result<()> {
        while !data.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(data) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(data.drain(..written)),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// A command that runs in the guest.
#[derive(Debug)]
pub struct RunningCommand {
    id: u64,
    command: String,
    limit: Duration,
    reply: Receiver<CommandOutput>,
    waiting: Waiting,
}

impl Drop for RunningCommand {
    /// Nobody waits for its reply any more.
    fn drop(&mut self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl GuestAgent {
    /// Connects to the agent of the VM whose folder this is, by a port that nobody else uses. The guest need not have
    /// started: requests wait for it.
    ///
    /// # Errors
    /// When the VM does not run, or others use all of its ports.
    pub fn of_vm(dir: &Path) -> Result<Self> {
        let (socket, lock) = take_port(dir)?;
        let mut agent = Self::connect(&socket)?;
        agent._lock = Some(lock);
        Ok(agent)
    }

    fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).map_err(io("connect to the agent at", socket))?;
        let reader = stream.try_clone().map_err(io("use", socket))?;
        let waiting = Waiting::default();
        let dispatch = Arc::clone(&waiting);
        std::thread::Builder::new()
            .name("guest-agent".into())
            .spawn(move || read_replies(reader, &dispatch))
            .map_err(io("start a reader of", socket))?;
        // Replies to an earlier connection's requests may still come: never reuse their ids.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let first = u64::try_from(now.as_micros()).unwrap_or(1);
        let writer = Mutex::new(RequestWriter { stream, rest: Vec::new() });
        let (path, next) = (socket.to_owned(), AtomicU64::new(first));
        Ok(Self { path, writer, waiting, next, _lock: None })
    }

    /// Runs `command` (a bash script) in the guest and waits for it, up to `limit` or the [`LONGEST_LIMIT`].
    ///
    /// # Errors
    /// When the guest does not answer in time or goes away. A command that fails is not an error:
    /// see [`CommandOutput::status`].
    pub fn exec(&self, command: &str, limit: Duration) -> Result<CommandOutput> {
        self.start(command, limit)?.wait()
    }

    /// Starts `command` in the guest and returns when it is sent.
    ///
    /// # Errors
    /// When the VM has gone, or takes no requests for as long as the command may run.
    pub fn start(&self, command: &str, limit: Duration) -> Result<RunningCommand> {
        let limit = limit.min(LONGEST_LIMIT);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, sender);
        let (command, waiting) = (command.to_owned(), Arc::clone(&self.waiting));
        let running = RunningCommand { id, command, limit, reply, waiting };
        let seconds = limit.as_secs().max(1);
        let line = format!("{id} {seconds} {}\n", BASE64.encode(&running.command));
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = writer.send(line.as_bytes(), Duration::from_secs(seconds));
        sent.map_err(io("send a command to", &self.path))?;
        Ok(running)
    }
}

impl Drop for GuestAgent {
    fn drop(&mut self) {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Ends the reader; an error means that the peer has gone, which ends it as well.
        let _ = writer.stream.shutdown(Shutdown::Both);
    }
}

impl RunningCommand {
    /// Whether the command ends within `limit`; what it left is not kept.
    pub(crate) fn answered(&self, limit: Duration) -> bool {
        self.reply.recv_timeout(limit).is_ok()
    }

    /// Waits for the command to end.
    ///
    /// # Errors
    /// When the guest does not answer in time or goes away.
    pub fn wait(self) -> Result<CommandOutput> {
        // The guest itself stops the command at its limit and then answers.
        let grace = self.limit + Duration::from_secs(5);
        self.reply.recv_timeout(grace).map_err(|e| match e {
            RecvTimeoutError::Timeout => VmError::TimedOut {
                what: format!("the guest's answer to '{}'", first_line(&self.command)),
                limit: grace,
            },
            RecvTimeoutError::Disconnected => VmError::Protocol {
                peer: "the guest",
                detail: format!("it went away during '{}'", first_line(&self.command)),
            },
        })
    }
}

fn first_line(command: &str) -> &str {
    command.lines().next().unwrap_or_default()
}

/// Hands replies to who waits for them until the VM goes; then nobody waits any more.
fn read_replies(stream: UnixStream, waiting: &Waiting) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(LONGEST_REPLY).read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        }
        let Some((id, output)) = parse_reply(&line) else {
            tracing::debug!(bytes = line.len(), "a guest's reply is not understood");
            continue;
        };
        let sender = waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(sender) = sender {
            // Who asked may have given up waiting.
            let _ = sender.send(output);
        }
    }
    waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

fn parse_reply(line: &[u8]) -> Option<(u64, CommandOutput)> {
    let mut fields = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let id = fields.next()?.parse().ok()?;
    let status = fields.next()?.parse().ok()?;
    let mut bytes = || match fields.next()? {
        "-" => Some(Vec::new()),
        text => BASE64.decode(text).ok(),
    };
    let (stdout, stderr) = (bytes()?, bytes()?);
    fields.next().is_none().then_some((id, CommandOutput { status, stdout, stderr }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_parse_whole_or_not_at_all() {
        let (id, output) = parse_reply(b"7 1 aGkK -\n").expect("a reply");
        assert_eq!((id, output.status, output.text().as_str()), (7, 1, "hi"));
        assert!(output.stderr.is_empty());
        for bad in ["", "7", "7 0", "7 0 -", "x 0 - -", "7 0 ! -", "7 0 - - -", "\u{0}7 0 - -"] {
            assert_eq!(parse_reply(bad.as_bytes()), None, "{bad:?}");
        }
    }

    fn connected(name: &str) -> (GuestAgent, UnixStream) {
        let path =
            std::env::temp_dir().join(format!("rackbus-agent-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        let agent = GuestAgent::connect(&path).expect("connect");
        let (guest, _) = listener.accept().expect("accept");
        let _ = std::fs::remove_file(path);
        (agent, guest)
    }

    #[test]
    fn a_guest_that_takes_nothing_holds_a_request_up_for_its_limit_and_gets_it_whole() {
        let (agent, guest) = connected("full");
        let second = Duration::from_secs(1);
        let begun = Instant::now();
        let long = "x".repeat(4 << 20);
        for command in [long.as_str(), "true"] {
            let error = agent.start(command, second).expect_err("the guest takes nothing");
            assert!(matches!(error, VmError::Io { .. }), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(agent.waiting.lock().unwrap().is_empty(), "somebody waits for a reply");
        // When it takes requests again, the one that it has a part of comes to its end before the next.
        let lines = std::thread::spawn(move || {
            let lines = BufReader::new(guest).lines().take(2);
            lines.collect::<std::io::Result<Vec<_>>>().expect("requests")
        });
        let next = agent.start("next", second * 20).expect("the guest takes requests");
        let lines = lines.join().expect("the guest");
        let commands = lines.iter().map(|line| line.split(' ').nth(2).unwrap_or_default());
        let commands: Vec<_> = commands.map(|text| BASE64.decode(text).expect("base64")).collect();
        assert!(commands[0] == long.as_bytes(), "the first request is not whole");
        assert_eq!(commands[1], b"next");
        drop(next);
    }

    #[test]
    fn each_connection_has_a_port_of_its_own_and_the_last_is_refused() {
        let dir = std::env::temp_dir().join(format!("rackbus-ports-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let bind = |port| std::os::unix::net::UnixListener::bind(dir.join(socket_name(port)));
        let _served: Vec<_> = (0..PORTS).map(|port| bind(port).expect("bind")).collect();
        let mut agents: Vec<_> =
            (0..PORTS).map(|_| GuestAgent::of_vm(&dir).expect("a free port")).collect();
        let used: std::collections::BTreeSet<_> = agents.iter().map(|it| it.path.clone()).collect();
        assert_eq!(used.len(), PORTS);
        let refused = GuestAgent::of_vm(&dir).expect_err("all are taken");
        assert!(matches!(refused, VmError::AgentBusy(_)), "{refused}");
        agents.remove(1);
        assert!(GuestAgent::of_vm(&dir).is_ok(), "one was given back");
        std::fs::remove_dir_all(&dir).expect("remove");
    }

    #[test]
    fn a_limit_without_an_end_is_taken_as_the_longest() {
        let (agent, guest) = connected("endless");
        let running = agent.start("true", Duration::MAX).expect("start");
        let mut line = String::new();
        BufReader::new(guest.try_clone().expect("clone")).read_line(&mut line).expect("a request");
        let longest = LONGEST_LIMIT.as_secs().to_string();
        assert_eq!(line.split(' ').nth(1), Some(longest.as_str()));
        let waiting = std::thread::spawn(move || running.wait());
        drop(guest);
        let gone = waiting.join().expect("no panic").expect_err("the guest went away");
        assert!(matches!(gone, VmError::Protocol { .. }), "{gone}");
    }

    #[test]
    fn nobody_is_kept_as_waiting_who_gave_up() {
        let (agent, _guest) = connected("silent");
        let running = agent.start("sleep 9", Duration::from_secs(1)).expect("start");
        assert_eq!(agent.waiting.lock().unwrap().len(), 1);
        assert!(!running.answered(Duration::from_millis(1)));
        drop(running);
        assert!(agent.waiting.lock().unwrap().is_empty());
    }
}
