//! The rack's processes: started in the background, found again by their process id files.
//!
//! A process holds a lock on its file for as long as it lives, and the kernel says who holds it: a
//! file that a killed process left behind is never mistaken for a living one, whatever is in it.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_link::presence::{holder, node_file};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use crate::output::Failure;

/// How long a process may take to end in order.
const GRACE: Duration = Duration::from_secs(10);

/// The process id file of the control plane, or of a host's node.
pub fn pid_file(run_dir: &Path, host: Option<&str>) -> PathBuf {
    match host {
        Some(host) => node_file(run_dir, host),
        None => run_dir.join("control.pid"),
    }
}

/// A process of the rack.
#[derive(Debug)]
pub struct Living {
    /// The host whose node it is; the control plane has none.
    pub host: Option<String>,
    pid: Pid,
    file: PathBuf,
}

impl Living {
    /// Ends it: asks it, and insists when it takes too long. Whether it is gone: a process that waits in the kernel,
    /// for storage that does not answer, ends only after that.
    pub fn end(&self) -> bool {
        // Without a handle the process is gone already; another one may have its number by now.
        match pidfd_open(self.pid, PidfdFlags::empty()) {
            Ok(handle) if holder(&self.file) == Some(self.pid) => end_process(&handle),
            _ => true,
        }
    }

    /// The process id, valid while this is held.
    pub fn pid(&self) -> Pid {
        self.pid
    }
}

/// The living processes of the rack in `run_dir`, nodes first: also those of hosts that have left
/// the rack file.
pub fn living(run_dir: &Path) -> Vec<Living> {
    let folders = fs::read_dir(run_dir).into_iter().flatten().flatten();
    let folders = folders.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut hosts: Vec<String> =
        folders.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    hosts.sort();
    let all = hosts.into_iter().map(Some).chain([None]);
    let found = all.filter_map(|host| {
        let file = pid_file(run_dir, host.as_deref());
        Some(Living { pid: holder(&file)?, host, file })
    });
    found.collect()
}

/// How long a process that has ended may take until what it held is free.
const ENDING: Duration = Duration::from_secs(5);

/// Holds `path` for this process; keep the file open. `taken` says what it means that another one
/// does.
pub fn hold(path: &Path, taken: impl FnOnce(Option<Pid>) -> Failure) -> Result<File, Failure> {
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{}: {cause}", path.display()), "see to the cause")
    };
    let mut file = File::options().create(true).append(true).open(path).map_err(failed)?;
    let begun = Instant::now();
    loop {
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::ACCESS) => {
                let holder = holder(path);
                if begun.elapsed() > ENDING || !holder.is_none_or(is_ending) {
                    return Err(taken(holder));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(cause) => return Err(failed(cause.into())),
        }
    }
    // For people: the lock is what counts.
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Whether a process was killed or has ended, and the kernel is still taking its threads and files down: what it holds
/// is free in a moment.
fn is_ending(process: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    // proc(5): the state follows the name, which may hold anything.
    let state = stat.ok().and_then(|stat| stat.rsplit(')').next()?.trim_start().chars().next());
    state.is_none_or(|state| matches!(state, 'Z' | 'X'))
}

/// What it means that another process has this one's part.
pub fn runs_already(part: &str) -> impl FnOnce(Option<Pid>) -> Failure {
    move |holder| {
        let pid = holder.map_or(String::new(), |pid| format!(" (process {pid})"));
        Failure::new(format!("{part} runs already{pid}"), "stop the rack with `rackbus down`")
    }
}

/// The file of a state directory that whoever has it holds.
pub const STATE_LOCK: &str = ".lock";

/// Makes a state directory this process' own, for as long as the file is open. No host's folder begins
/// with a dot.
pub fn own_state(dir: &Path) -> Result<File, Failure> {
    hold(&dir.join(STATE_LOCK), |holder| {
        let pid = holder.map_or("another process".to_owned(), |pid| format!("process {pid}"));
        let error = format!("the state in {} is in use by {pid}, of another rack", dir.display());
        Failure::new(error, "give each rack a state directory of its own with --state-dir")
    })
}

/// Starts this program again with `args`, in the background, its words going to `log`.
pub fn start(args: &[&str], log: &Path) -> Result<Child, Failure> {
    let failed = |cause: std::io::Error| {
        Failure::new(format!("{} cannot be started: {cause}", args[0]), "see to the cause")
    };
    let path = log;
    let log = File::options().create(true).append(true).open(path).map_err(failed)?;
    let errors = log.try_clone().map_err(failed)?;
    Command::new(std::env::current_exe().map_err(failed)?)
        .args(args)
        .arg("--log")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .map_err(failed)
}

/// Ends a child of this process: asks it, and insists when it takes too long.
pub fn end(pid: Pid) {
    if let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) {
        end_process(&handle);
    }
}

/// As [`end`], of a child that nobody has waited for.
pub fn end_child(child: &mut Child) {
    if matches!(child.try_wait(), Ok(None)) {
        end(Pid::from_child(child));
    }
    // One that does not end even so is not waited for.
    let _ = child.try_wait();
}

/// Asks a process to end, and insists when it takes too long; whether it has ended.
fn end_process(handle: &OwnedFd) -> bool {
    let wait = |limit: Duration| {
        let mut fds = [rustix::event::PollFd::new(handle, rustix::event::PollFlags::IN)];
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: 0,
        };
        matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1..))
    };
    let _ = rustix::process::pidfd_send_signal(handle, Signal::TERM);
    wait(GRACE) || {
        let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
        wait(GRACE)
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

/// How long something that is under way is waited for when the process is asked to end.
const UNDER_WAY: Duration = Duration::from_millis(300);

/// What something came to that the process did while it could be asked to end.
#[derive(Debug, PartialEq, Eq)]
pub enum Undertaking<T> {
    /// This, and nobody has asked for an end.
    Done(T),
    /// This, and the process was asked to end meanwhile: what has been done is to be undone.
    DoneLate(T),
    /// It was given up, as the process was asked to end.
    GivenUp,
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
        let mut kinds = vec![SignalKind::terminate(), SignalKind::interrupt(), SignalKind::quit()];
        // The terminal was closed; `nohup` has that ignored.
        if !ignored(SignalKind::hangup().as_raw_value()) {
            kinds.push(SignalKind::hangup());
        }
        // Unheard signals do what they do by default: end the process.
        EndRequests { signals: kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect() }
    }

    /// Does something that is to be undone where the process is asked to end meanwhile. It is not given up at once then: it
    /// may be done and its answer on its way, and nobody else would undo it.
    pub async fn unless_asked<T>(&mut self, work: impl Future<Output = T>) -> Undertaking<T> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return Undertaking::Done(done),
            () = self.wait() => {}
        }
        match tokio::time::timeout(UNDER_WAY, work).await {
            Ok(done) => Undertaking::DoneLate(done),
            Err(_) => Undertaking::GivenUp,
        }
    }

    /// Whether the process was asked to end.
    pub async fn is_asked(&mut self) -> bool {
        tokio::select! {
            biased;
            () = self.wait() => true,
            () = std::future::ready(()) => false,
        }
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

/// Between two looks whether a socket is there.
const READY_LOOK: Duration = Duration::from_millis(20);

/// Tells systemd, where that has started this process and waits for it, that it is ready: when somebody listens at
/// `socket`. Comes back never.
pub async fn ready_at(socket: &Path) -> Infallible {
    if std::env::var_os("NOTIFY_SOCKET").is_some() {
        while tokio::net::UnixStream::connect(socket).await.is_err() {
            tokio::time::sleep(READY_LOOK).await;
        }
        if let Err(error) = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]) {
            tracing::warn!(%error, "systemd cannot be told that this is ready");
        }
    }
    std::future::pending().await
}

/// Waits until the process is asked to end.
pub async fn asked_to_end() {
    EndRequests::listen().wait().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer is on its way, or there already, when the process is asked to end.
    #[tokio::test]
    async fn what_is_done_when_the_process_is_asked_to_end_is_told() {
        let mut requests = EndRequests::listen();
        let done_in = async |millis| {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            7
        };
        assert_eq!(requests.unless_asked(done_in(1)).await, Undertaking::Done(7));
        let own = rustix::process::getpid();
        for millis in [0, 20] {
            rustix::process::kill_process(own, Signal::INT).unwrap();
            let told = requests.unless_asked(done_in(millis)).await;
            assert!(told != Undertaking::GivenUp, "after {millis} ms");
            requests = EndRequests::listen();
        }
        rustix::process::kill_process(own, Signal::INT).unwrap();
        let never = std::future::pending::<u32>();
        assert_eq!(requests.unless_asked(never).await, Undertaking::GivenUp);
    }
}
