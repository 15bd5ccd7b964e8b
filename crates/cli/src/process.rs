//! The rack's processes: started in the background, found again by their process id files.
//!
//! A process holds a lock on its file for as long as it lives, so a file that a killed process
//! left behind is never mistaken for a living one.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::output::Failure;

/// How long a process may take to end in order.
const GRACE: Duration = Duration::from_secs(10);

/// The process id file of the control plane, or of a host's node.
pub fn pid_file(run_dir: &Path, host: Option<&str>) -> PathBuf {
    match host {
        Some(host) => run_dir.join(host).join("node.pid"),
        None => run_dir.join("control.pid"),
    }
}

/// The living process that holds `path`.
pub fn holder(path: &Path) -> Option<Pid> {
    let file = File::open(path).ok()?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => None,
        Err(_) => Pid::from_raw(fs::read_to_string(path).ok()?.trim().parse().ok()?),
    }
}

/// Holds `path` for this process; keep the file open.
pub fn hold(path: &Path) -> Result<File, Failure> {
    let failed = |cause: String| {
        Failure::new(format!("{}: {cause}", path.display()), "see whether the rack runs already")
    };
    let file = File::options().create(true).append(true).open(path);
    let mut file = file.map_err(|e| failed(e.to_string()))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| failed("another process holds it".to_owned()))?;
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(|e| failed(e.to_string()))?;
    Ok(file)
}

/// Starts this program again with `args`, in the background, its words going to `log`.
pub fn start(args: &[&str], log: &Path) -> Result<Child, Failure> {
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{} cannot be started: {cause}", args[0]), "see to the cause")
    };
    let log = File::options().create(true).append(true).open(log).map_err(failed)?;
    let errors = log.try_clone().map_err(failed)?;
    Command::new(std::env::current_exe().map_err(failed)?)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .map_err(failed)
}

/// Ends a process: asks it, and insists when it takes too long. Returns when it is gone.
pub fn end(pid: Pid) {
    // Without a handle the process is gone already.
    let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
    let wait = |limit: Duration| {
        let mut fds = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: 0,
        };
        matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1..))
    };
    let _ = rustix::process::pidfd_send_signal(&handle, Signal::TERM);
    if !wait(GRACE) {
        let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
        wait(GRACE);
    }
}

/// Becomes a process of its own: the terminal it was started from may close. A process that
/// leads a group already (started by hand) stays where it is.
pub fn detach() {
    let _ = rustix::process::setsid();
}

/// Lets the process have as many descriptors as it may: each segment of its host is one of them.
pub fn make_room() {
    if let Err(error) = rackbus_memory::descriptors::raise_limit() {
        tracing::warn!(%error, "the host can have few segments; raise the limit of open files");
    }
}

/// Hears when the process is asked to end, from the moment it is made.
#[derive(Debug)]
pub struct EndRequests {
    signals: Vec<tokio::signal::unix::Signal>,
}

impl EndRequests {
    /// Listens from now on.
    pub fn listen() -> Self {
        use tokio::signal::unix::{SignalKind, signal};
        let mut kinds = vec![SignalKind::terminate(), SignalKind::interrupt()];
        // The terminal was closed; `nohup` has that ignored.
        if !ignored(SignalKind::hangup().as_raw_value()) {
            kinds.push(SignalKind::hangup());
        }
        // Unheard signals do what they do by default: end the process.
        EndRequests { signals: kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect() }
    }

    /// Waits until the process is asked to end.
    pub async fn wait(&mut self) {
        std::future::poll_fn(|context| {
            let heard = self.signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if heard { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
    }
}

/// Whether whoever started this process has it ignore a signal.
fn ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// Waits until the process is asked to end.
pub async fn asked_to_end() {
    EndRequests::listen().wait().await;
}
