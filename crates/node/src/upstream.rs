//! A function that another program serves, lent like one of this node's own.
//!
//! The program is any vfio-user server. Its user's memory and interrupts are passed on to it, so DMA has
//! nobody of rackbus between the two ends; each mapping is a loan of the node's fabric as for any function.
//! What the server was passed, it has: rackbus asks it to give mappings up, and believes the answer. Where
//! the node runs the program itself, a fresh one for each user, the function is back when that process has
//! ended, whatever it does: that holds against a server that hangs or lies, too. Its standard input is a locked
//! file: a program that is left over, because the node died or it left its process group, is seen by the lock,
//! and none is run beside it.
//!
//! When the node is restarted in place, the program does not stop: the next process has it by the same connection.

mod process;
mod saved;
mod session;

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_control::api::{DeviceReport, ReportedIdentity};
use rackbus_devices::upstream::{CLASS, UpstreamServer};
use rackbus_fabric::Lending;
use rackbus_memory::Stream;
use rackbus_memory::file_lock::lock_file;
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::vfio_user::{self, SavedSession, ServedDevice, SharedBars};
use rackbus_spec::pcie::header::{CACHE_LINE_SIZE, CLASS_CODE, DEVICE_ID, VENDOR_ID};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::lendable::{Attached, Lendable, NotReady, NotSaved, Resumed, User};
use crate::remote::{OnLost, RemoteDevice};
use crate::wired::WiredInterrupts;
use process::ServerProcess;
use saved::PassedOn;
pub(crate) use saved::{STATE_VERSION, abandon};
use session::{OpenedUpstream, UpstreamSession};

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
    process: Arc<Mutex<Option<ServerProcess>>>,
    /// The function while there is a user, for who takes it away, and for who passes it on.
    opened: Arc<Mutex<Option<Arc<OpenedUpstream>>>>,
    /// The connection while the server is asked what it serves.
    opening: Arc<Mutex<Option<UnixStream>>>,
    /// What it says that it is, since somebody had it.
    identity: Mutex<Option<ReportedIdentity>>,
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
            opened: Arc::default(),
            opening: Arc::default(),
            identity: Mutex::default(),
            unsettled: Arc::default(),
        }
    }

    /// Runs the program, in a process group of its own, so that what it starts ends with it.
    fn run(&self, command: &[String]) -> io::Result<ServerProcess> {
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
        let child = command.process_group(0).spawn().map_err(|error| {
            io::Error::new(error.kind(), format!("the program {program} cannot be run: {error}"))
        })?;
        ServerProcess::of(&child)
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
        match lock_file(&file, GRACE) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => {
                let said = format!(
                    "a server that was run for an earlier user is still there; end it (`fuser {}` \
                     names it)",
                    path.display()
                );
                Err(io::Error::new(io::ErrorKind::ResourceBusy, said))
            }
            Err(error) => Err(told(error.into())),
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
            let process = locked(&self.process);
            match process.as_ref() {
                Some(process) => {
                    if let Some(how) = process.ended()? {
                        let said =
                            format!("its server ended ({how}) before it listened at {socket}");
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
    fn open(&self, user: Arc<dyn Stream>) -> io::Result<OpenedUpstream> {
        let stream = self.connect()?;
        let (connection, revoked, slow) =
            (stream.try_clone()?, stream.try_clone()?, stream.try_clone()?);
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
        let (mappings, interrupts) = Default::default();
        Ok(OpenedUpstream { device: device?, connection, mappings, interrupts })
    }

    fn describe_and_reset(
        &self,
        stream: UnixStream,
        user: Arc<dyn Stream>,
    ) -> io::Result<RemoteDevice> {
        let device = RemoteDevice::attach(Arc::new(stream), self.when_lost(user));
        let device = device.map_err(io::Error::other)?.of_foreign_server();
        device.reset().map_err(io::Error::other)?;
        let header = device.read(FunctionRegion::Config, 0, CACHE_LINE_SIZE.into());
        *locked(&self.identity) = identity(&header.map_err(io::Error::other)?);
        Ok(device)
    }

    /// What is done when the server is gone before its user.
    fn when_lost(&self, user: Arc<dyn Stream>) -> OnLost {
        let name = self.name.clone();
        Box::new(move |how| {
            tracing::error!(device = name, how, "the server of a lent function is gone");
            // Its borrower learns it as the loss of its lender.
            user.shut_down();
        })
    }

    /// The function in its user's hands, whose BARs nobody may map yet. Others find it from now on.
    fn begin(&self, function: OpenedUpstream, lending: Lending) -> UpstreamSession {
        let function = Arc::new(function);
        *locked(&self.opened) = Some(function.clone());
        UpstreamSession {
            function,
            lending,
            process: self.server.command.is_some().then(|| self.process.clone()),
            opened: self.opened.clone(),
            unsettled: self.unsettled.clone(),
            bars: None,
        }
    }

    /// Goes on with the function of another process, and its user.
    fn go_on(&self, passed: PassedOn, user: User) -> io::Result<Resumed> {
        let PassedOn { connection, shape, resources, vectors, pin, identity, conversation } =
            passed;
        *locked(&self.identity) = identity;
        let User { lending, stream, .. } = user;
        let server = Arc::new(connection.try_clone()?);
        let device = RemoteDevice::resume(server, shape, self.when_lost(stream));
        let device = device.of_foreign_server();
        let interrupts = WiredInterrupts::resumed(&lending, vectors.into_iter(), pin);
        let interrupts = interrupts.map_err(io::Error::other)?;
        let mappings = Mutex::default();
        let function = OpenedUpstream { device, connection, mappings, interrupts };
        // What is refused from here on ends as every session does: with the program, or with a reset.
        let mut session = self.begin(function, lending.clone());
        let lent = locked(&session.function.mappings).resume(
            &lending,
            resources.mappings,
            resources.windows,
        );
        lent.map_err(io::Error::other)?;
        let bars = SharedBars::new(lending, session.shape()).map_err(io::Error::other)?;
        session.bars = Some(bars);
        Ok((Box::new(session), conversation))
    }
}

/// What the beginning of a configuration space says that the function is; nothing where none is there.
fn identity(header: &[u8]) -> Option<ReportedIdentity> {
    let half = |at: u16| {
        let at = usize::from(at);
        Some(u16::from_le_bytes(header.get(at..at + 2)?.try_into().ok()?))
    };
    let class = usize::from(CLASS_CODE);
    let class: [u8; 3] = header.get(class..class + 3)?.try_into().ok()?;
    let [interface, sub, base] = class;
    let identity = ReportedIdentity {
        vendor_id: half(VENDOR_ID)?,
        device_id: half(DEVICE_ID)?,
        class: u32::from_be_bytes([0, base, sub, interface]),
    };
    (identity.vendor_id != u16::MAX).then_some(identity)
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
        if let Some(command) = &self.server.command {
            let process = self.run(command)?;
            *locked(&self.process) = Some(process);
        }
        let function = match self.open(stream.clone()) {
            Ok(function) => function,
            Err(error) => {
                // Not under the lock: one that cannot be killed must not keep who takes the function away.
                let process = locked(&self.process).take();
                process.into_iter().for_each(ServerProcess::end);
                return Err(error);
            }
        };
        let mut session = self.begin(function, lending.clone());
        // What is refused ends as every session does: with the program, or with a reset.
        let bars = SharedBars::new(lending, session.shape()).map_err(io::Error::other)?;
        session.bars = Some(bars);
        Ok(Box::new(session))
    }

    fn revoke(&self) {
        let conversation =
            || locked(&self.opened).as_ref().map(|function| function.device.conversation());
        if let Some(conversation) = conversation() {
            conversation.expect_end();
        }
        if let Some(process) = &*locked(&self.process) {
            // All that it had mapped goes with it.
            process.kill();
        }
        if let Some(stream) = &*locked(&self.opening) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(conversation) = conversation() {
            conversation.end();
        }
    }

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        DeviceReport { identity: *locked(&self.identity), ..known }
    }

    /// What the server does goes on. Without a user there is nothing to pass on.
    fn save(
        &self,
        conversation: vfio_user::RestingConversation,
        _limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        let process = locked(&self.process).as_ref().map(ServerProcess::number);
        match &*locked(&self.opened) {
            Some(function) => {
                let identity = *locked(&self.identity);
                let saved = function.save(process, identity, conversation);
                saved.map(Some).map_err(NotSaved::Refused)
            }
            None => Ok(None),
        }
    }

    fn continues(&self, class: &str) -> bool {
        class == CLASS
    }

    fn take_back(&self, saved: SavedSession) {
        if let Err(error) = saved.reclaim() {
            tracing::error!(device = self.name, %error, "a saved function cannot be taken back");
        }
    }

    fn resume(&self, saved: SavedSession, user: Option<User>) -> io::Result<Option<Resumed>> {
        let unsettle = || *locked(&self.unsettled) = self.server.command.is_none();
        let process = saved::process_of(&saved).inspect_err(|_| unsettle())?;
        let is_run = process.is_some();
        *locked(&self.process) = process;
        let resumed = match user {
            Some(_) if is_run != self.server.command.is_some() => {
                Err(io::Error::other("the rack file says otherwise who runs its server"))
            }
            Some(user) => PassedOn::of(saved).and_then(|passed| self.go_on(passed, user)),
            // Only one with a user is saved.
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        resumed.map(Some).inspect_err(|_| {
            // What it was passed it releases with its end, or says that it has to its next user.
            let process = locked(&self.process).take();
            process.into_iter().for_each(ServerProcess::end);
            unsettle();
        })
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
        let left = before.run(&program).unwrap();
        drop(before);
        let upstream = Upstream::new("d0", server);
        let refused = upstream.run(&program).map(ServerProcess::end);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("is still there"), "{refused}");
        left.end();
        upstream.run(&program).unwrap().end();
    }
}
