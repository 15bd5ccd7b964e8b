//! A client of QEMU's machine protocol (QMP, `docs/interop/qmp-spec.rst` of QEMU): one JSON object
//! a line, a greeting, commands answered in order, events at any time.
//!
//! QEMU serves one client a socket and lets the next one wait, so a [`Qmp`] is opened for one
//! errand and dropped.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::error::io;
use crate::{Result, VmError};

/// How long QEMU may take to answer a command. Hot-adding a vfio-user function talks to its server
/// meanwhile, for which QEMU itself waits up to 5 s a message.
pub const ANSWER: Duration = Duration::from_secs(20);

/// How long whoever has `left` to do something waits for its turn with QEMU: others may be speaking with it.
pub(crate) fn turn_within(left: Duration) -> Duration {
    left.clamp(ANSWER / 4, ANSWER)
}

/// The longest line taken from QEMU, bytes. `query-qmp-schema`, the longest answer, has 300 kB.
const LONGEST_LINE: usize = 16 << 20;

/// A connection to one VM's QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    partial: Vec<u8>,
    events: VecDeque<Value>,
    /// How long QEMU may take to take a command, and to answer it.
    limit: Duration,
}

/// Connects to a socket that whoever listens may be slow to accept at, for so long; what is written waits as long.
fn dial(socket: &Path, limit: Duration) -> std::io::Result<UnixStream> {
    let fd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Linux waits as long for a place in the queue of those who connect.
    set_socket_timeout(&fd, Timeout::Send, Some(limit))?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?)?;
    Ok(UnixStream::from(fd))
}

impl Qmp {
    /// Connects and negotiates. Waits (up to [`ANSWER`]) for another client to be done.
    ///
    /// # Errors
    /// When nobody serves the socket, or what serves it is not QEMU.
    pub fn connect(socket: &Path) -> Result<Self> {
        Self::connect_within(socket, ANSWER)
    }

    /// The same, where nothing takes longer than `limit`.
    pub(crate) fn connect_within(socket: &Path, limit: Duration) -> Result<Self> {
        let stream = match dial(socket, limit) {
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                let what = "a place among those who wait for QEMU".into();
                return Err(VmError::TimedOut { what, limit });
            }
            connected => connected.map_err(io("connect to QEMU at", socket))?,
        };
        let (stream, partial, events) = (BufReader::new(stream), Vec::new(), VecDeque::new());
        let mut qmp = Self { stream, partial, events, limit };
        let greeting = qmp.line("QEMU's greeting", Instant::now() + limit, limit)?;
        if greeting.get("QMP").is_none() {
            return Err(VmError::Protocol { peer: "QEMU", detail: greeting.to_string() });
        }
        qmp.command("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and gives what it returns.
    ///
    /// # Errors
    /// [`VmError::Refused`] with QEMU's words, or a loss of the connection.
    pub fn command(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        let (path, limit) = (Path::new(command), self.limit);
        self.stream.get_mut().write_all(request.as_bytes()).map_err(io("send QEMU", path))?;
        let deadline = Instant::now() + limit;
        loop {
            let mut answer = self.line(command, deadline, limit)?;
            if let Some(error) = answer.get("error") {
                let message = error.get("desc").and_then(Value::as_str).unwrap_or("no reason");
                return Err(VmError::Refused { command: command.into(), message: message.into() });
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            self.events.push_back(answer);
        }
    }

    /// Waits for an event that `wanted` accepts; others are dropped.
    ///
    /// # Errors
    /// [`VmError::TimedOut`] after `limit`, or a loss of the connection.
    pub fn event(
        &mut self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&str, &Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + limit;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.line(what, deadline, limit)?,
            };
            let name = event.get("event").and_then(Value::as_str).unwrap_or_default();
            if wanted(name, event.get("data").unwrap_or(&Value::Null)) {
                return Ok(event);
            }
        }
    }

    /// Asks the guest to release a device, every `again` until it has.
    ///
    /// # Errors
    /// When there is none of that id, or the guest does not release it within `limit`.
    pub fn unplug(&mut self, id: &str, again: Duration, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        let mut first = true;
        loop {
            match self.command("device_del", &json!({"id": id})) {
                Ok(_) => {}
                // An earlier request, of the node perhaps, is under way: the event will come.
                Err(VmError::Refused { message, .. })
                    if message.contains("already in the process") => {}
                // The guest released it since it was last asked.
                Err(VmError::Refused { message, .. })
                    if !first && message.contains("not found") =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            first = false;
            let gone = |name: &str, data: &Value| name == "DEVICE_DELETED" && data["device"] == id;
            // A guest that was still booting has not heard: it is asked again from time to time.
            let left = again.min(limit.saturating_sub(begun.elapsed()));
            match self.event(&format!("the removal of {id} by the guest"), left, gone) {
                Ok(_) => return Ok(()),
                Err(VmError::TimedOut { what, .. }) if begun.elapsed() >= limit => {
                    return Err(VmError::TimedOut { what, limit });
                }
                Err(VmError::TimedOut { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn line(&mut self, what: &str, deadline: Instant, limit: Duration) -> Result<Value> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(VmError::TimedOut { what: what.into(), limit });
            }
            let lost =
                |source| VmError::Io { action: "hear QEMU about", path: what.into(), source };
            self.stream.get_ref().set_read_timeout(Some(left)).map_err(lost)?;
            match self.stream.read_until(b'\n', &mut self.partial) {
                Ok(_) if self.partial.last() == Some(&b'\n') => {
                    let line = std::mem::take(&mut self.partial);
                    return serde_json::from_slice(&line)
                        .map_err(|e| VmError::Protocol { peer: "QEMU", detail: e.to_string() });
                }
                Ok(_) => return Err(lost(ErrorKind::UnexpectedEof.into())),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(lost(e)),
            }
            if self.partial.len() > LONGEST_LINE {
                let detail = format!("a line over {LONGEST_LINE} bytes");
                return Err(VmError::Protocol { peer: "QEMU", detail });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Plays QEMU: a greeting, then for each line received the lines given.
    fn play(name: &str, answers: Vec<&'static str>) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("rackbus-qmp-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("bind");
        let socket = path.clone();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            let _ = std::fs::remove_file(socket);
            stream.write_all(b"{\"QMP\":{}}\n").expect("greet");
            let mut lines = BufReader::new(stream.try_clone().expect("clone")).lines();
            for answer in answers {
                if lines.next().is_none() {
                    return;
                }
                stream.write_all(answer.as_bytes()).expect("answer");
            }
            let _ = lines.next();
        });
        path
    }

    #[test]
    fn events_between_a_command_and_its_answer_are_kept() {
        let path = play(
            "events",
            vec![
                "{\"return\":{}}\n",
                "{\"event\":\"DEVICE_DELETED\",\"data\":{\"device\":\"a\"}}\n{\"return\":{\"x\":1}}\n",
            ],
        );
        let mut qmp = Qmp::connect(&path).expect("connect");
        assert_eq!(qmp.command("device_del", &json!({"id": "a"})).expect("return")["x"], 1);
        let gone = |name: &str, data: &Value| name == "DEVICE_DELETED" && data["device"] == "a";
        qmp.event("removal", Duration::from_secs(1), gone).expect("event");
        let late = qmp.event("removal", Duration::from_millis(20), gone);
        assert!(matches!(late, Err(VmError::TimedOut { .. })), "{late:?}");
    }

    #[test]
    fn a_refusal_carries_the_reason_and_a_lost_peer_is_an_error() {
        let path = play(
            "refusal",
            vec![
                "{\"return\":{}}\n",
                "{\"error\":{\"class\":\"GenericError\",\"desc\":\"no bus\"}}\n",
            ],
        );
        let mut qmp = Qmp::connect(&path).expect("connect");
        let error = qmp.command("device_add", &json!({})).expect_err("refused").to_string();
        assert_eq!(error, "QEMU refused device_add: no bus");
        assert!(qmp.command("quit", &json!({})).is_err(), "the peer has gone");
    }

    /// A QEMU that stands still: it accepts nobody, or takes nothing of what is sent.
    #[test]
    fn a_peer_that_stands_still_is_not_waited_for_without_end() {
        let limit = Duration::from_millis(50);
        let path = std::env::temp_dir().join(format!("rackbus-qmp-still-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("bind");
        rustix::net::listen(&listener, 0).expect("a queue of one");
        let _first = UnixStream::connect(&path).expect("a place in the queue");
        Qmp::connect_within(&path, limit).expect_err("no place in the queue");
        std::fs::remove_file(&path).expect("remove");

        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        set_socket_timeout(&ours, Timeout::Send, Some(limit)).expect("limit");
        theirs.write_all(b"{\"QMP\":{}}\n").expect("greet");
        let (stream, partial, events) = (BufReader::new(ours), Vec::new(), VecDeque::new());
        let mut qmp = Qmp { stream, partial, events, limit };
        let long = "x".repeat(8 << 20);
        qmp.command("quit", &json!({ "why": long })).expect_err("nothing is taken");
    }

    #[test]
    fn what_the_guest_released_before_it_was_asked_again_is_unplugged() {
        const ASKED: &str = "{\"return\":{}}\n";
        const NOT_FOUND: &str =
            "{\"error\":{\"class\":\"DeviceNotFound\",\"desc\":\"Device 'a' not found\"}}\n";
        const PENDING: &str = "{\"error\":{\"class\":\"GenericError\",\"desc\":\"Device a is already in the process of unplug\"}}\n";
        let unplug = |name, answers: &[&'static str]| {
            let path = play(name, [&[ASKED], answers].concat());
            let mut qmp = Qmp::connect(&path).expect("connect");
            qmp.unplug("a", Duration::from_millis(20), Duration::from_millis(200))
        };
        unplug("released", &[ASKED, NOT_FOUND]).expect("the guest released it");
        unplug("pending", &[PENDING, NOT_FOUND]).expect("the guest released it for another");
        let error = unplug("unknown", &[NOT_FOUND]).expect_err("there never was one");
        assert_eq!(error.to_string(), "QEMU refused device_del: Device 'a' not found");
        let error = unplug("kept", &[ASKED; 20]).expect_err("the guest keeps it");
        assert!(matches!(error, VmError::TimedOut { .. }), "{error}");
    }
}
