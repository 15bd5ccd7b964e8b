//! A function that another program serves, lent like one of this node's own.
//!
//! The program is any vfio-user server. Its user's memory and interrupts are passed on to it, so DMA has
//! nobody of rackbus between the two ends; each mapping is a loan of the node's fabric as for any function.
//! What the server was passed, it has: rackbus asks it to give mappings up, and believes the answer. Where
//! the node runs the program itself, a fresh one for each user, the function is back when that process has
//! ended, whatever it does: that holds against a server that hangs or lies, too. Its standard input is a locked
//! file: a program that is left over, because the node died or it left its process group, is seen by the lock,
//! and none is run beside it.

mod session;

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_control::api::DeviceReport;
use rackbus_devices::upstream::UpstreamServer;
use rackbus_fabric::Lending;
use rackbus_memory::Stream;
use rackbus_pci::SaveError;
use rackbus_pci::vfio_user::{self, SavedSession, ServedDevice, SharedBars};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::lendable::{Attached, Lendable, NotReady, NotSaved};
use crate::remote::{LenderConversation, RemoteDevice};
use crate::wired::WiredInterrupts;
use session::UpstreamSession;

/// How long a server may take to be there, and for each answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a server may take until its function can be used, whatever it answers meanwhile.
const OPENING: Duration = Duration::from_secs(30);

/// How long a server that was asked to end may take before it is killed.
const GRACE: Duration = Duration::from_secs(1);

/// Between two looks whether something that nothing announces has happened.
const AGAIN: Duration = Duration::from_millis(5);

/// A function that another program serves.
#[derive(Debug)]
pub struct Upstream {
    name: String,
    server: UpstreamServer,
    /// The server that was run for the user; `None` between two users.
    process: Arc<Mutex<Option<Child>>>,
    /// The conversation with the server while there is a user, for who takes the function away.
    conversation: Arc<Mutex<Option<LenderConversation>>>,
    /// The connection while the server is asked what it serves.
    opening: Arc<Mutex<Option<UnixStream>>>,
    /// The last session ended without the server's word that it released everything.
    unsettled: Arc<Mutex<bool>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Upstream {
    /// The device `name`, which `server` runs.
    pub fn new(name: &str, server: UpstreamServer) -> Upstream {
        Upstream {
            name: name.to_owned(),
            server,
            process: Arc::default(),
            conversation: Arc::default(),
            opening: Arc::default(),
            unsettled: Arc::default(),
        }
    }

    /// Runs the program, in a process group of its own, so that what it starts ends with it.
    fn run(&self, command: &[String]) -> io::Result<Child> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let alone = self.lock()?;
        let socket = &self.server.socket;
        match std::fs::symlink_metadata(socket) {
            // Of an earlier life: a server that binds it anew would be refused.
            Ok(found) if found.file_type().is_socket() => std::fs::remove_file(socket)?,
            Ok(_) => {
                let said = format!("{} is there and no socket; name another one", socket.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, said));
            }
            Err(_) => {}
        }
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.server.folder).stdin(Stdio::from(alone));
        command.process_group(0).spawn().map_err(|error| {
            io::Error::new(error.kind(), format!("the program {program} cannot be run: {error}"))
        })
    }

    /// An empty file that the program has for as long as it or what it started runs. One that ran before may
    /// need a moment to be gone.
    fn lock(&self) -> io::Result<File> {
        let mut path = self.server.socket.clone().into_os_string();
        path.push(".lock");
        let path = PathBuf::from(path);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let told = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot lock {}: {error}", path.display()))
        };
        let file = file.map_err(told)?;
        let begun = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK) if begun.elapsed() < GRACE => std::thread::sleep(AGAIN),
                Err(Errno::WOULDBLOCK) => {
                    let said = format!(
                        "a server that was run for an earlier user is still there; end it (`fuser {}` \
                         names it)",
                        path.display()
                    );
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, said));
                }
                Err(error) => return Err(told(error.into())),
            }
        }
    }

    /// Connects to the server, which may need a moment to be there when its program was just run, and to take those who
    /// connected before.
    fn connect(&self) -> io::Result<UnixStream> {
        let begun = Instant::now();
        loop {
            let error = match connect_now(&self.server.socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE))?;
                    stream.set_write_timeout(Some(PATIENCE))?;
                    return Ok(stream);
                }
                Err(error) => error,
            };
            let socket = self.server.socket.display();
            let mut process = locked(&self.process);
            match process.as_mut() {
                Some(child) => {
                    if let Some(status) = child.try_wait()? {
                        let said =
                            format!("its server ended ({status}) before it listened at {socket}");
                        return Err(io::Error::other(said));
                    }
                }
                None if error.kind() == io::ErrorKind::WouldBlock => {}
                None => {
                    let said =
                        format!("no vfio-user server answers at {socket}: {error}; start it");
                    return Err(io::Error::new(error.kind(), said));
                }
            }
            drop(process);
            if begun.elapsed() > PATIENCE {
                let said = format!("its server takes no user at {socket} within {PATIENCE:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, said));
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Connects, and resets the function. It ends within [`OPENING`], and when the function is
    /// [taken away](Lendable::revoke), however slowly the server answers.
    fn open(&self, user: Arc<dyn Stream>) -> io::Result<RemoteDevice> {
        let stream = self.connect()?;
        let (revoked, slow) = (stream.try_clone()?, stream.try_clone()?);
        let (opened, ended) = mpsc::channel::<()>();
        let watch = move || {
            if ended.recv_timeout(OPENING) == Err(RecvTimeoutError::Timeout) {
                let _ = slow.shutdown(Shutdown::Both);
            }
        };
        std::thread::Builder::new().name("upstream opens".to_owned()).spawn(watch)?;
        *locked(&self.opening) = Some(revoked);
        let device = self.describe_and_reset(stream, user);
        *locked(&self.opening) = None;
        drop(opened);
        device
    }

    fn describe_and_reset(
        &self,
        stream: UnixStream,
        user: Arc<dyn Stream>,
    ) -> io::Result<RemoteDevice> {
        let name = self.name.clone();
        let lost = move |how: String| {
            tracing::error!(device = name, how, "the server of a lent function is gone");
            // Its borrower learns it as the loss of its lender.
            user.shut_down();
        };
        let device = RemoteDevice::attach(Arc::new(stream), Box::new(lost));
        let device = device.map_err(io::Error::other)?.of_foreign_server();
        device.reset().map_err(io::Error::other)?;
        Ok(device)
    }
}

/// Connects at once, or fails: also where the server has others to take first, who may never be taken.
fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Ends a program and what it started, and waits until it is gone.
fn end(child: &mut Child) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let signal = |signal| group.map(|group| kill_process_group(group, signal));
    let _ = signal(Signal::TERM);
    let asked = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && asked.elapsed() < GRACE {
        std::thread::sleep(AGAIN);
    }
    // Whatever the program left behind, and the program itself if it is still there. A group that is gone
    // is no failure.
    let _ = signal(Signal::KILL);
    let _ = child.wait();
}

impl Lendable for Upstream {
    fn arm(&self, _limit: Duration) -> Result<(), NotReady> {
        // A server is reached when there is a user: one that is not there yet is no reason against lending.
        if !*locked(&self.unsettled) {
            return Ok(());
        }
        // It did not say that it released its last user. One that serves a next one has.
        let user = UnixStream::pair().map_err(NotReady::Failed)?.0;
        match self.open(Arc::new(user)) {
            Ok(_) => {
                *locked(&self.unsettled) = false;
                Ok(())
            }
            Err(error) => Err(NotReady::Failed(error)),
        }
    }

    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>> {
        let is_run = self.server.command.is_some();
        if let Some(command) = &self.server.command {
            let child = self.run(command)?;
            *locked(&self.process) = Some(child);
        }
        let device = match self.open(stream.clone()) {
            Ok(device) => device,
            Err(error) => {
                // Not under the lock: one that cannot be killed must not keep who takes the function away.
                let child = locked(&self.process).take();
                child.into_iter().for_each(|mut child| end(&mut child));
                return Err(error);
            }
        };
        *locked(&self.conversation) = Some(device.conversation());
        let bars = SharedBars::new(lending.clone(), device.shape());
        let mut session = UpstreamSession {
            device,
            lending,
            mappings: Mutex::default(),
            process: is_run.then(|| self.process.clone()),
            conversation: self.conversation.clone(),
            unsettled: self.unsettled.clone(),
            interrupts: WiredInterrupts::default(),
            bars: None,
        };
        // What is refused ends as every session does: with the program, or with a reset.
        session.bars = Some(bars.map_err(io::Error::other)?);
        Ok(Box::new(session))
    }

    fn revoke(&self) {
        if let Some(conversation) = &*locked(&self.conversation) {
            conversation.expect_end();
        }
        if let Some(child) = locked(&self.process).as_mut() {
            // All that it had mapped goes with it.
            let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        }
        if let Some(stream) = &*locked(&self.opening) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(conversation) = &*locked(&self.conversation) {
            conversation.end();
        }
    }

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        known
    }

    /// What the server has of its user's cannot be read from it. Without a user there is nothing to pass on.
    fn save(
        &self,
        _conversation: vfio_user::RestingConversation,
        _limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        match &*locked(&self.conversation) {
            Some(_) => Err(NotSaved::Refused(SaveError::Unsupported)),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The process of the node died, and the program it ran does not care; or the program left its group.
    #[test]
    fn no_server_is_run_beside_one_that_is_left_over() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("server.sock");
        let server = UpstreamServer { socket, command: None, folder: folder.path().to_owned() };
        let program = ["sleep".to_owned(), "600".to_owned()];
        let before = Upstream::new("d0", server.clone());
        let mut left = before.run(&program).unwrap();
        drop(before);
        let upstream = Upstream::new("d0", server);
        let refused = upstream.run(&program).map(|mut child| end(&mut child));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("is still there"), "{refused}");
        end(&mut left);
        end(&mut upstream.run(&program).unwrap());
    }
}
